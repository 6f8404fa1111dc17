"""What happened, and with which values: log lines that people read and machines parse.

``logger.info("log created %s", Fields(topic="orders", partition=3))`` prints ``log created topic=orders
partition=3`` with plain logging; ``server_logging`` turns the same record into a structured one.
"""

from __future__ import annotations

from typing import Any, Final

MAX_VALUE_CHARACTERS: Final = 300


class Fields:
    """Named values of one event, in order. Values from outside are escaped and cut (S13)."""

    __slots__ = ("values",)

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return " ".join(f"{name}={printable(value)}" for name, value in self.values.items())


def printable(value: Any) -> str:
    """Text that stays on its line and can't drive a terminal, at most MAX_VALUE_CHARACTERS long."""
    text = str(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[:MAX_VALUE_CHARACTERS] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
