"""The request and response structs, one frozen dataclass a message; ``docs/protocol.md`` is their specification.

Every struct travels as a msgpack array of its fields in the order they stand here. Every response starts
with ``error_code`` and ``error_message``: the outcome of the request as a whole.
"""
