"""Lower bounds on privacy by attack: measure noise and clip from releases of generated images."""
