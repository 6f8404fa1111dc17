"""Blocking twins of the async clients."""
