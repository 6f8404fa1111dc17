"""Converts between bytes and messages without I/O: frames, the msgpack codec, typed messages, connections."""
