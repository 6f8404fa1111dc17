"""The request and response structs, one frozen ``Struct`` each; ``docs/protocol.md`` specifies them.

Every struct is sent as a msgpack array of its fields in declaration order. Every response starts with
``error_code`` and ``error_message``: the outcome of the request as a whole.
"""
