"""Blocking twins of the asynchronous clients. ``kafkalite.sync`` exports them."""
