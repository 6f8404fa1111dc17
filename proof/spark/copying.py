"""What a copy does to each record, told to Spark and told in Python; and how a driver answers."""

from __future__ import annotations

from typing import Final

#: A line of a driver's output that begins so is an answer.
ANSWER: Final = "ANSWER "
#: Whose record it was and what it says. ``expected_value`` says the same in Python.
TRANSFORM: Final = (
    "key",
    "concat(string(partition), '/', string(offset), ':', upper(string(value))) as value",
)


def expected_value(partition: int, offset: int, value: bytes) -> bytes:
    """What the copy of a record must hold."""
    return b"%d/%d:%s" % (partition, offset, value.upper())
