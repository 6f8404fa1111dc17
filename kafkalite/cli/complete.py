"""Completion of words that only a broker knows: topic names. Quick and silent: no answer is an answer."""

from __future__ import annotations

from typing import Final

import click

_PATIENCE_MS: Final = 700


def complete_topics(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from kafkalite.cli.invocation import Invocation, run

    invocation = ctx.find_object(Invocation) or Invocation()

    async def names() -> list[str]:
        from kafkalite.cli import connect

        async with connect.admin(invocation) as admin:
            return sorted(topic.name for topic in await admin.list_topics())

    try:
        found = run(names, timeout_ms=_PATIENCE_MS)
    except Exception:  # a completion that fails must not disturb the line being typed
        return []
    return [name for name in found if name.startswith(incomplete)]
