"""The core model: one partition's real replicas and the real controller, without an event loop."""
