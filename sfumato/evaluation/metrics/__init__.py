"""Numbers about a release. Those computed against real images are outside the guarantee: local, for the owner only."""
