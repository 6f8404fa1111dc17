"""Bytes to messages and back: framing, the msgpack codec, typed messages, sans-IO connections. Pure."""
