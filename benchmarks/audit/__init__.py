"""Attack releases, to bound the privacy loss from below."""
