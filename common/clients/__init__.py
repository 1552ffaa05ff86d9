"""One client per service."""
