"""Bound privacy loss from below by attacks on releases of generated images."""
