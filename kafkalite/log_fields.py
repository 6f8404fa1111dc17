"""Formats a log message as an event with named values, for people and for structured logging.

``logger.info("log created %s", Fields(topic="orders", partition=3))`` prints ``log created topic=orders
partition=3`` with plain logging; ``cli/server_logging.py`` turns the same record into a structured one.
"""

from __future__ import annotations

from typing import Any, Final

MAX_VALUE_CHARACTERS: Final = 300


class Fields:
    """The named values of a log message, in order. Control characters are escaped, and values are cut to
    MAX_VALUE_CHARACTERS unless they are ``Uncut`` (S13)."""

    __slots__ = ("values",)

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{name}={printable(value)}" for name, value in self.values.items())


class Uncut(str):
    """Text that is never truncated, because a part of it is useless: a command with a path."""

    __slots__ = ()


def text_of(value: Any) -> str:
    """Return ``str(value)``. If that raises, as a user's exception may do, return the name of its type."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}: its __str__ raises {type(error).__name__}>"


def printable(value: Any) -> str:
    """Return ``value`` as one line of text, control characters escaped. It is truncated to
    MAX_VALUE_CHARACTERS unless it is ``Uncut``."""
    text = text_of(value)
    if len(text) > MAX_VALUE_CHARACTERS and not isinstance(value, Uncut):
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
