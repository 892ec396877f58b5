"""What lies on disk: one module a format."""
