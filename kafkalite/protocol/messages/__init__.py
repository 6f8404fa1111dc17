"""The request and response structs. Each is a frozen ``Struct``; ``docs/protocol.md`` specifies them.

Every struct is sent as a msgpack array of its fields in declaration order. Every response starts with
``error_code`` and ``error_message``, the result of the whole request.
"""
