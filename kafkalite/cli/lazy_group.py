"""Click groups. ``LazyGroup`` lists its commands without importing them."""

# Tests: tests/cli/test_app.py

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

import click

from kafkalite.cli.argument_types import require_utf8
from kafkalite.suggestions import did_you_mean

_WHOLE: Final = 1_000  # more characters than a description has


class LazyCommand(NamedTuple):
    short_help: str
    section: str
    location: str = ""  #: "package.module:attribute"; "" is kafkalite.cli.NAME:NAME


class Group(click.Group):
    """A group whose help wraps long descriptions of its commands. click's own group truncates them."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        super().add_command(require_utf8(cmd), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=_WHOLE))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are first used. ``lazy`` maps names to commands."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)
        require_utf8(self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._lazy.get(cmd_name)
        if entry is None:
            return None
        location = entry.location or f"kafkalite.cli.{cmd_name}:{cmd_name}"
        module, _, attribute = location.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return require_utf8(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self._lazy:
            path = ctx.command_path
            advice = did_you_mean(
                args[0], self._lazy, shown=lambda name: f"'{path} {name}'", otherwise=f"see '{path} --help'"
            )
            raise click.UsageError(f"there is no command {args[0]!r}; {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self._lazy.items():
            sections.setdefault(entry.section, []).append((name, entry.short_help))
        width = max(map(len, self._lazy))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])
