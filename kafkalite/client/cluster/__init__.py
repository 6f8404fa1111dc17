"""Connections to a cluster: bootstrap, metadata, requests with retries."""
