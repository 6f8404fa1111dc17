"""Types of command-line arguments: texts in UTF-8, texts of any bytes, and texts that must not be empty."""

# Tests: tests/cli/test_argument_types.py

from __future__ import annotations

from typing import Any, Final

import click


class Utf8(click.types.StringParamType):
    """Text, in which the name of a topic, group or property is valid UTF-8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not UTF-8", param, ctx)
        return text


class NotEmpty(Utf8):
    """Text that must not be empty. ``what`` is the noun for it in the error."""

    def __init__(self, what: str) -> None:
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(f"{self._what} must not be empty", param, ctx)
        return super().convert(value, param, ctx)


class DirectoryPath(click.Path):
    """A path that must not be empty: an empty path would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(f"{param.opts[0] if param else 'the path'} is empty", param, ctx)
        return super().convert(value, param, ctx)


#: Text of any bytes, such as a key or a header. Bytes that are not UTF-8 are surrogates in it.
ANY_BYTES: Final = click.types.StringParamType()
GROUP_ID: Final = NotEmpty("a group id")
TRANSACTIONAL_ID: Final = NotEmpty("a transactional id")
_UTF8: Final = Utf8()


def require_utf8(command: click.Command) -> click.Command:
    """Refuse texts that are not UTF-8 in all arguments of ``command`` without a type. Return ``command``."""
    for parameter in command.params:
        if parameter.type is click.STRING:
            parameter.type = _UTF8
    return command
