"""Numbers about a release. The guarantee does not cover those computed against real images: they are local."""
