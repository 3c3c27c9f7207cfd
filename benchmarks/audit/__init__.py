"""Lower bounds on privacy by attack: what the noise and the clip really are, found from releases of made images."""
