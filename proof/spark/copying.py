"""The change that a copy makes to each record, for Spark and for Python; and the format of a driver's
responses.
"""

from __future__ import annotations

from typing import Final

#: A line of a driver's output that begins with this is a response.
ANSWER: Final = "ANSWER "
#: The place and the value of the input record. ``expected_value`` is the same in Python.
TRANSFORM: Final = (
    "key",
    "concat(string(partition), '/', string(offset), ':', upper(string(value))) as value",
)


def expected_value(partition: int, offset: int, value: bytes) -> bytes:
    """Return the value that the copy of a record must have."""
    return b"%d/%d:%s" % (partition, offset, value.upper())
