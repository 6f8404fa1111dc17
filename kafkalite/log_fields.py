"""Formats a log message as an event with named values, for people and for structured logging.

``logger.info("log created %s", Fields(topic="orders", partition=3))`` prints ``log created topic=orders
partition=3`` with plain logging; ``cli/server_logging.py`` turns the same record into a structured one.
"""

from __future__ import annotations

from typing import Any, Final

MAX_VALUE_CHARACTERS: Final = 300


class Fields:
    """The named values of a log message, in order. ``str`` returns ``name=value`` for each of them, with the
    value as ``printable`` returns it (S13)."""

    __slots__ = ("values",)

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{name}={printable(value)}" for name, value in self.values.items())


class Uncut(str):
    """Text that ``printable`` does not truncate, such as a command, of which a part would be useless."""

    __slots__ = ()


def text_of(value: Any) -> str:
    """Return ``str(value)``. If that raises, return a text with the types of the value and of the error."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}: its __str__ raises {type(error).__name__}>"


def printable(value: Any) -> str:
    """Return ``str(value)`` as one line. Unless ``value`` is ``Uncut``, text after the first
    MAX_VALUE_CHARACTERS is replaced by "…". Then characters that are not printable are escaped."""
    text = text_of(value)
    if len(text) > MAX_VALUE_CHARACTERS and not isinstance(value, Uncut):
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    return escaped(text)


def escaped(text: str) -> str:
    """Return ``text`` as one line, in which characters that are not printable are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
