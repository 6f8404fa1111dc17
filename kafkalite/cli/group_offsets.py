"""``kl group reset-offsets`` and ``commit``: change committed offsets. A reset needs --execute."""

# Tests: tests/cli/test_group.py

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.argument_types import GROUP_ID
from kafkalite.cli.completion import complete_groups
from kafkalite.cli.exit_codes import NotFoundError, UsageError
from kafkalite.cli.group import group
from kafkalite.cli.invocation import client_options, duration_ms, listing_options
from kafkalite.cli.offset_queries import Extent, extents, offsets_at, partitions_of
from kafkalite.cli.output import Column, plural, print_listing, write
from kafkalite.cli.times import parse_time
from kafkalite.errors import UnknownMemberIdError
from kafkalite.model import OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin

_COLUMNS: Final = (
    Column("name", "PARTITION"),
    Column("current", "NOW AT"),
    Column("offset", "GOES TO"),
    Column("change", "CHANGE"),
    Column("start", "LOG START", wide=True),
    Column("end", "LOG END", wide=True),
)
_STRATEGIES: Final = (
    "to_earliest",
    "to_latest",
    "to_current",
    "to_offset",
    "to_datetime",
    "by_duration",
    "shift_by",
    "from_file",
)


@dataclass(frozen=True, slots=True)
class Place:
    """One partition's offsets, from which a Strategy computes the new offset to commit."""

    extent: Extent
    current: int | None  #: the committed offset
    at_time: int | None  #: first offset at or after the requested time; None if all records are older


Strategy = Callable[[TopicPartition, Place], "int | None"]
"""Returns the new offset of a partition, or None to leave its committed offset unchanged."""


def strategy_of(chosen: Mapping[str, Any], offsets: Mapping[TopicPartition, int]) -> Strategy:
    """Return the strategy for the one option in ``chosen`` that was given, such as --to-earliest.

    ``offsets`` are the offsets of --from-file. Raises UsageError unless exactly one option was given.
    """
    given = [name for name in _STRATEGIES if chosen[name] not in (None, False)]
    flags = ", ".join("--" + name.replace("_", "-") for name in _STRATEGIES)
    if len(given) != 1:
        raise UsageError(f"give exactly one of {flags}")
    name, value = given[0], chosen[given[0]]
    match name:
        case "to_earliest":
            return lambda tp, place: place.extent.log_start_offset
        case "to_latest":
            return lambda tp, place: place.extent.log_end_offset
        case "to_current":
            return lambda tp, place: place.extent.log_end_offset if place.current is None else place.current
        case "to_offset":
            return lambda tp, place: int(value)
        case "shift_by":
            return lambda tp, place: None if place.current is None else place.current + int(value)
        case "from_file":
            return lambda tp, place: offsets.get(tp)
        case _:
            return lambda tp, place: place.extent.log_end_offset if place.at_time is None else place.at_time


def within(offset: int, extent: Extent) -> int:
    """Return ``offset``, limited to the range from the log start to the log end (both inclusive)."""
    return min(max(offset, extent.log_start_offset), extent.log_end_offset)


@group.command(
    "reset-offsets",
    epilog="""\b
Nothing is changed unless --execute is given, and only while the group has no members.

\b
Examples:
  kl group reset-offsets billing --to-earliest              shows the change for all its topics
  kl group reset-offsets billing --topic orders --to-datetime -1h --execute
  kl group reset-offsets billing --topic orders:0,2 --shift-by -100 --execute
  kl group reset-offsets billing --to-current --export > offsets.csv
  kl group reset-offsets billing --from-file offsets.csv --execute""",
)
@click.argument("name", type=GROUP_ID, metavar="GROUP", shell_complete=complete_groups)
@click.option("--topic", "topics", multiple=True, metavar="TOPIC[:P,P]", help="Only these partitions.")
@click.option("--to-earliest", is_flag=True, help="To the first record.")
@click.option("--to-latest", is_flag=True, help="To the end of the log: only new records.")
@click.option("--to-current", is_flag=True, help="To the committed offset; to the end if there is none.")
@invocation.number_option("--to-offset", help="To this offset.", minimum=0)
@click.option(
    "--to-datetime", metavar="TIME", help="To the first record at or after a time (2015-05-17, -1h)."
)
@click.option(
    "--by-duration", type=duration_ms, metavar="TIME", help="To the first record not older than this (1h30m)."
)
@click.option("--shift-by", type=int, metavar="N", help="By N records; backwards if N is negative.")
@click.option(
    "--from-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="topic,partition,offset lines, as --export writes them.",
)
@click.option("--execute", is_flag=True, help="Make the change.")
@click.option("--dry-run", is_flag=True, help="Only show the change, as without --execute.")
@click.option("--export", is_flag=True, help="Print topic,partition,offset lines.")
@listing_options
def reset_offsets(
    name: str, topics: tuple[str, ...], execute: bool, dry_run: bool, export: bool, **chosen: Any
) -> None:
    """Change GROUP's committed offsets. Shows the change; --execute makes it."""
    if execute and dry_run:
        raise UsageError("give either --execute or --dry-run")
    offsets = _read_file(chosen["from_file"]) if chosen["from_file"] else {}
    strategy = strategy_of(chosen, offsets)
    moment_ms = _moment(chosen, invocation.now_ms())

    async def main(admin: Admin) -> list[dict[str, Any]]:
        rows = await _plan(admin, name, topics, list(offsets), strategy, moment_ms)
        if execute:
            wanted = {TopicPartition(row["topic"], row["partition"]): row["offset"] for row in rows}
            await _execute(admin, name, wanted)
        return rows

    rows = connect.ask_admin(main)
    if export:
        write("".join(f"{row['topic']},{row['partition']},{row['offset']}\n" for row in rows))
    else:
        print_listing(rows, _COLUMNS, invocation.current().output)
    if not execute and not export:
        invocation.say("nothing was changed; --execute makes the change")
    elif execute:
        invocation.say(f"group {name!r}: new offsets in {plural(len(rows), 'partition')}")


def _moment(chosen: Mapping[str, Any], now_ms: int) -> int | None:
    if chosen["by_duration"] is not None:
        return now_ms - int(chosen["by_duration"])
    if chosen["to_datetime"] is None:
        return None
    try:
        return parse_time(chosen["to_datetime"], now_ms=now_ms)
    except ValueError as problem:
        raise UsageError(f"--to-datetime: {problem}") from None


def _read_file(path: Path) -> dict[TopicPartition, int]:
    """Return the offsets in the file.

    Raises UsageError for a line other than ``topic,partition,offset``, and for a file that is not UTF-8.
    """
    offsets: dict[TopicPartition, int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.reader(lines))
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8") from None
    except csv.Error as problem:
        raise UsageError(f"{path} is not CSV: {problem}") from None
    for number, row in enumerate(rows, 1):
        if not row:
            continue
        try:
            topic, partition, offset = row
            offsets[TopicPartition(topic, int(partition))] = int(offset)
        except ValueError:
            raise UsageError(
                f"{path}, line {number}: {','.join(row)!r} is not topic,partition,offset"
            ) from None
    return offsets


async def _plan(
    admin: Admin,
    name: str,
    topics: Sequence[str],
    listed: Sequence[TopicPartition],
    strategy: Strategy,
    moment_ms: int | None,
) -> list[dict[str, Any]]:
    committed = await admin.committed_offsets(name)
    partitions = await _chosen(admin, topics) if topics else sorted({*committed, *listed})
    if not partitions:
        raise NotFoundError(
            f"group {name!r} has no committed offsets", hint="name the topics to commit for: --topic TOPIC"
        )
    known = await extents(admin, partitions)
    by_time = await offsets_at(admin, partitions, moment_ms) if moment_ms is not None else {}
    rows: list[dict[str, Any]] = []
    for tp in partitions:
        now_at = committed[tp].offset if tp in committed else None
        wanted = strategy(tp, Place(known[tp], now_at, by_time.get(tp)))
        if wanted is None:
            continue
        offset = within(wanted, known[tp])
        if offset != wanted:
            start, end = known[tp]
            invocation.say(f"{tp} has offsets {start} to {end}: it is set to {offset}, not {wanted}")
        rows.append(
            {
                "name": str(tp),
                "topic": tp.topic,
                "partition": tp.partition,
                "current": now_at,
                "offset": offset,
                "change": None if now_at is None else offset - now_at,
                "start": known[tp].log_start_offset,
                "end": known[tp].log_end_offset,
            }
        )
    return rows


async def _chosen(admin: Admin, topics: Iterable[str]) -> list[TopicPartition]:
    """Return the partitions of ``topics``: ``orders`` is a whole topic, ``orders:0,2`` two partitions."""
    found: dict[TopicPartition, None] = {}
    for text in topics:
        topic, colon, numbers = text.partition(":")
        try:
            wanted = [int(number) for number in numbers.split(",")] if colon else []
        except ValueError:
            raise UsageError(f"--topic {text}: write it as orders or orders:0,2") from None
        found |= dict.fromkeys(await partitions_of(admin, [topic], wanted))
    return sorted(found)


async def _execute(
    admin: Admin, name: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
) -> None:
    try:
        await admin.alter_group_offsets(name, offsets)
    except UnknownMemberIdError as error:
        raise type(error)(
            f"group {name!r} has members, which commit their own offsets", hint="stop its consumers first"
        ) from None


@group.command(
    epilog="""\b
Examples:
  kl group commit billing orders-0=42 orders-1=17
  kl group commit billing orders-0=42 --metadata 'after the repair'"""
)
@click.argument("name", type=GROUP_ID, metavar="GROUP", shell_complete=complete_groups)
@click.argument("places", metavar="TOPIC-PARTITION=OFFSET…", nargs=-1, required=True)
@click.option("--metadata", metavar="TEXT", help="Text to keep with the offsets.")
@client_options
def commit(name: str, places: tuple[str, ...], metadata: str | None) -> None:
    """Commit offsets for GROUP, which must have no members."""
    offsets = {tp: OffsetAndMetadata(offset, metadata=metadata) for tp, offset in map(_place, places)}

    async def main(admin: Admin) -> None:
        known = await extents(admin, list(offsets))
        for tp, wanted in offsets.items():
            if within(wanted.offset, known[tp]) != wanted.offset:
                start, end = known[tp]
                raise UsageError(f"{tp} has offsets {start} to {end}, not {wanted.offset}")
        await _execute(admin, name, offsets)

    connect.ask_admin(main)
    invocation.say(f"committed for group {name!r}: {plural(len(offsets), 'partition')}")


def _place(text: str) -> tuple[TopicPartition, int]:
    name, equals, offset = text.rpartition("=")
    topic, dash, partition = name.rpartition("-")
    if not (equals and dash and topic and partition.isdecimal() and offset.isdecimal()):
        raise UsageError(f"{text!r} is not TOPIC-PARTITION=OFFSET, for example orders-0=42")
    return TopicPartition(topic, int(partition)), int(offset)
