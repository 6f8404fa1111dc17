"""Tab completion of names that a broker returns, and ``kl completion``, which prints the shell script."""

# Tests: tests/cli/test_txn.py

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin

SHELLS: Final = ("bash", "zsh", "fish")
PROGRAMS: Final = ("kl", "kafkalite")
_PATIENCE_MS: Final = 700


def complete_topics(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    async def names(admin: Admin) -> list[str]:
        return sorted(topic.name for topic in await admin.list_topics())

    return _complete(ctx, incomplete, names)


def complete_groups(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    async def names(admin: Admin) -> list[str]:
        return [group.group_id for group in await admin.list_groups()]

    return _complete(ctx, incomplete, names)


def complete_transactional_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    async def names(admin: Admin) -> list[str]:
        return sorted({each.transactional_id for each in await admin.list_transactions()})

    return _complete(ctx, incomplete, names)


def _complete(
    ctx: click.Context, incomplete: str, names: Callable[[Admin], Awaitable[list[str]]]
) -> list[str]:
    from kafkalite.cli.invocation import Invocation, run

    invocation = ctx.find_object(Invocation) or Invocation()

    async def ask() -> list[str]:
        from kafkalite.cli import connect

        async with connect.admin(invocation) as admin:
            return await names(admin)

    try:
        found = run(ask, timeout_ms=_PATIENCE_MS)
    except Exception:  # a failed completion must not disturb the line being typed
        return []
    return [name for name in found if name.startswith(incomplete)]


@click.command(
    epilog="""\b
Now:          eval "$(kl completion bash)"
For good:     kl completion bash >> ~/.bashrc
              kl completion zsh  >> ~/.zshrc
              kl completion fish > ~/.config/fish/completions/kl.fish"""
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import BashComplete, get_completion_class

    root = click.get_current_context().find_root().command
    cls = get_completion_class(shell)
    assert cls is not None, "click knows these three shells"
    for program in PROGRAMS:
        script = cls(root, {}, program, "_KL_COMPLETE")
        # click's bash class would start bash to check its version.
        template_vars = script.source_vars()
        click.echo(script.source_template % template_vars if cls is BashComplete else script.source())
