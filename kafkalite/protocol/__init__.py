"""Bytes to messages and back: frames, the msgpack codec, typed messages, sans-IO connections. Pure."""
