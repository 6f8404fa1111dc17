"""Formats a log message as an event with named values, for people and for structured logging.

``logger.info("log created %s", Fields(topic="orders", partition=3))`` prints ``log created topic=orders
partition=3`` with plain logging; ``cli/server_logging.py`` turns the same record into a structured one.
"""

from __future__ import annotations

from typing import Any, Final

MAX_VALUE_CHARACTERS: Final = 300


class Fields:
    """The named values of a log message, in order. Control characters are escaped, long values cut (S13)."""

    __slots__ = ("values",)

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{name}={printable(value)}" for name, value in self.values.items())


def printable(value: Any) -> str:
    """Return ``value`` as one line of text, truncated to MAX_VALUE_CHARACTERS, control characters escaped."""
    text = str(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
