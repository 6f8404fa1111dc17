"""The change that a copy makes to each record, for Spark and in Python, and a driver's response format."""

from __future__ import annotations

from typing import Final

#: A line of a driver's output that begins with this is a response.
ANSWER: Final = "ANSWER "
#: Adds the place of the input record to its value. ``expected_value`` does the same in Python.
TRANSFORM: Final = (
    "key",
    "concat(string(partition), '/', string(offset), ':', upper(string(value))) as value",
)


def expected_value(partition: int, offset: int, value: bytes) -> bytes:
    """Return the value that the copy of a record must have."""
    return b"%d/%d:%s" % (partition, offset, value.upper())
