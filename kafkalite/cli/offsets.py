"""``kl offsets``: prints the first and next offsets of partitions, or the offsets at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.invocation import listing_options, topic_names
from kafkalite.cli.offset_queries import list_or_fail, partitions_of
from kafkalite.cli.output import Column, print_listing
from kafkalite.cli.times import format_time, parse_time
from kafkalite.errors import KafkaStorageError
from kafkalite.model import NO_OFFSET

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
@click.option("--at", "at_text", metavar="TIME", help="Offsets at a time.")
@click.option("--earliest", "which", flag_value="earliest", help="Only the first offsets.")
@click.option("--latest", "which", flag_value="latest", help="Only the next offsets.")
@listing_options
def offsets(topics: tuple[str, ...], at_text: str | None, which: str | None) -> None:
    """Print the offsets of TOPICS' partitions."""
    topics = topic_names(topics)
    if at_text is not None and which is not None:
        raise UsageError(f"give either --at or --{which}")
    try:
        at_ms = None if at_text is None else parse_time(at_text.removeprefix("@"), now_ms=invocation.now_ms())
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    rows, errors = connect.ask_admin(lambda admin: _rows(admin, topics, at_ms, which))
    columns = _COLUMNS["at" if at_ms is not None else which or "both"]
    print_listing(rows, columns, invocation.current().output)
    if errors:
        raise errors[0]


async def _rows(
    admin: Admin, topics: tuple[str, ...], at_ms: int | None, which: str | None
) -> tuple[list[dict[str, Any]], list[KafkaStorageError]]:
    """Return (rows, errors). There is an error for each partition whose leader did not return the offset."""
    partitions = await partitions_of(admin, topics)
    at: Literal["earliest", "latest"] = "earliest" if which == "earliest" else "latest"
    found = await list_or_fail(admin, partitions, at if at_ms is None else at_ms)
    errors = [offset for offset in found.values() if isinstance(offset, KafkaStorageError)]
    known = {tp: None if isinstance(offset, KafkaStorageError) else offset for tp, offset in found.items()}
    if at_ms is not None:
        return [
            _row(tp) | {"offset": None if offset == NO_OFFSET else offset, "at": format_time(at_ms)}
            for tp, offset in known.items()
        ], errors
    rows: list[dict[str, Any]] = []
    for partition, first in (await admin.list_offsets(partitions, "earliest")).items():
        start, end = first.offset, known[partition]
        numbers = {"earliest": start, "latest": end, "count": None if end is None else end - start}
        rows.append(_row(partition) | {k: v for k, v in numbers.items() if which in {None, k}})
    return rows, errors


def _row(partition: Any) -> dict[str, Any]:
    return {"name": str(partition), "topic": partition.topic, "partition": partition.partition}
