"""The request and response structs, which ``docs/protocol.md`` specifies.

Every struct is sent as a msgpack array of its fields in declaration order. Every response starts with
``error_code`` and ``error_message``, the result of the whole request.
"""
