"""Converts between bytes and messages: frames, the msgpack codec, typed messages, connections. Pure."""
