"""``kl offsets``: prints the first and next offsets of partitions, or the offsets at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.invocation import listing_options, topic_names
from kafkalite.cli.offset_queries import extents, offsets_at, partitions_of
from kafkalite.cli.output import Column, print_listing
from kafkalite.cli.times import format_time, parse_time

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin

_HEAD = (Column("topic", "TOPIC"), Column("partition", "PARTITION"))
_COLUMNS = {
    "both": (*_HEAD, Column("earliest", "EARLIEST"), Column("latest", "LATEST"), Column("count", "COUNT")),
    "earliest": (*_HEAD, Column("earliest", "EARLIEST")),
    "latest": (*_HEAD, Column("latest", "LATEST")),
    "at": (*_HEAD, Column("offset", "OFFSET"), Column("at", "AT")),
}


@click.command(
    epilog="""\b
LATEST is the offset the next record will get. --at prints the first offset that is
not older than TIME (2015-05-17T10:00:00Z, -1h, today, 1431857103), '-' when all are.

\b
Examples:
  kl offsets events
  kl offsets events --at -1h
  kl offsets events --latest -o jsonl"""
)
@click.argument("topics", nargs=-1, shell_complete=complete_topics)
@click.option("--topic", "topic_flags", multiple=True, hidden=True)
@click.option("--at", "at_text", metavar="TIME", help="Offsets at a time.")
@click.option("--earliest", "which", flag_value="earliest", help="Only the first offsets.")
@click.option("--latest", "which", flag_value="latest", help="Only the next offsets.")
@listing_options
def offsets(
    topics: tuple[str, ...], topic_flags: tuple[str, ...], at_text: str | None, which: str | None
) -> None:
    """Print the offsets of TOPICS' partitions."""
    topics = topic_names(topics, topic_flags, "kl offsets")
    if at_text is not None and which is not None:
        raise UsageError(f"give either --at or --{which}")
    try:
        at_ms = None if at_text is None else parse_time(at_text.removeprefix("@"), now_ms=invocation.now_ms())
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    rows = connect.ask_admin(lambda admin: _rows(admin, topics, at_ms, which))
    columns = _COLUMNS["at" if at_ms is not None else which or "both"]
    print_listing(rows, columns, invocation.current().output)


async def _rows(
    admin: Admin, topics: tuple[str, ...], at_ms: int | None, which: str | None
) -> list[dict[str, Any]]:
    partitions = await partitions_of(admin, topics)
    if at_ms is not None:
        at = await offsets_at(admin, partitions, at_ms)
        return [_row(tp) | {"offset": offset, "at": format_time(at_ms)} for tp, offset in at.items()]
    rows: list[dict[str, Any]] = []
    for partition, (start, end) in (await extents(admin, partitions)).items():
        numbers = {"earliest": start, "latest": end, "count": end - start}
        rows.append(_row(partition) | {k: v for k, v in numbers.items() if which in {None, k}})
    return rows


def _row(partition: Any) -> dict[str, Any]:
    return {"name": str(partition), "topic": partition.topic, "partition": partition.partition}
