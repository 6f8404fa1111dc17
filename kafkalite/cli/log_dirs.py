"""``kl log dirs`` and ``kl log move``: the data directories of brokers, and moves between them.

``log`` is the group ``kl log`` with the commands of ``kafkalite.cli.log``.
"""

# Tests: tests/cli/test_log_dirs.py

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.exit_codes import CheckFailedError, NotFoundError, UsageError
from kafkalite.cli.invocation import client_options, listing_options
from kafkalite.cli.log import log
from kafkalite.cli.output import Column, human_bytes, pick, plural, print_listing, rows_of
from kafkalite.model import TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.admin.descriptions import DirectoryDescription, LogDescription

#: The pause between looks at moves that are waited for.
POLL_S: Final = 0.2


def _or_nothing(reason: str | None) -> str:
    return reason or ""


def _size(size_bytes: int) -> str:
    return "?" if size_bytes < 0 else human_bytes(size_bytes)


_DIRS_COLUMNS: Final = (
    Column("node_id", "NODE"),
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("size_bytes", "SIZE", show=human_bytes),
    Column("segment_count", "SEGMENTS"),
    Column("log_start_offset", "START"),
    Column("log_end_offset", "END"),
    Column("offline_reason", "PROBLEM", show=_or_nothing),
    Column("path", "DIRECTORY", wide=True),
)
_DISKS_COLUMNS: Final = (
    Column("node_id", "NODE"),
    Column("path", "DIRECTORY"),
    Column("state", "STATE"),
    Column("partitions", "PARTITIONS"),
    Column("moving_in", "MOVING IN"),
    Column("size_bytes", "SIZE", show=human_bytes),
    Column("free_bytes", "FREE", show=_size),
    Column("total_bytes", "TOTAL", show=_size),
    Column("failure", "PROBLEM", show=_or_nothing),
    Column("directory_id", "ID", wide=True),
)


@log.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]…")
@click.option("--broker", "node_ids", multiple=True, metavar="N[,N]", help="Only of this broker.")
@click.option("--disks", is_flag=True, help="List the data directories: their disks, states and logs.")
@listing_options
def dirs(topics: tuple[str, ...], node_ids: tuple[str, ...], disks: bool) -> None:
    """List the logs on each running broker: size, offsets, problems. With --disks, list the directories."""
    texts = [each.strip() for text in node_ids for each in text.split(",")]
    if wrong := [each for each in texts if not (each.isascii() and each.isdigit())]:
        raise UsageError(f"--broker: {wrong[0]!r} is not a node id")

    async def check(admin: Admin) -> None:
        await admin.describe_topics(topics)  # raises the error of one that does not exist
        await connect.check_brokers(admin, texts)

    async def main(admin: Admin) -> list[LogDescription]:
        await check(admin)
        return await admin.describe_log_dirs(list(topics) or None)

    async def look_at_disks(admin: Admin) -> dict[int, list[DirectoryDescription]]:
        await check(admin)
        return await admin.describe_directories(list(topics) or None)

    if disks:
        _print_disks(connect.ask_admin(look_at_disks), texts)
        return
    logs = connect.ask_admin(main)
    chosen = [each for each in logs if not texts or str(each.node_id) in texts]
    rows = rows_of(sorted(chosen, key=lambda each: (each.topic, each.partition, each.node_id)), _DIRS_COLUMNS)
    for row in rows:
        row["name"] = f"{row['topic']}-{row['partition']}"
    print_listing(rows, _DIRS_COLUMNS, invocation.current().output, if_empty="no logs")


def _print_disks(found: Mapping[int, Sequence[DirectoryDescription]], node_ids: Sequence[str]) -> None:
    rows = [
        {
            "node_id": node_id,
            "state": "online" if one.failure is None else "failed",
            "partitions": len(one.size_bytes),
            "moving_in": len(one.copies),
            "size_bytes": sum(one.size_bytes.values()),
            **pick(one, "path", "free_bytes", "total_bytes", "failure", "directory_id"),
        }
        for node_id, directories in found.items()
        for one in directories
        if not node_ids or str(node_id) in node_ids
    ]
    print_listing(
        rows, _DISKS_COLUMNS, invocation.current().output, name_key="path", if_empty="no directories"
    )


@log.command(
    epilog="""\b
Examples:
  kl log move events-0 /disks/2/kafkalite --broker 1
  kl log move events-0 events-1 /disks/2/kafkalite --broker 1 --no-wait
  kl log dirs --disks                    shows the directories, and the moves into them"""
)
@click.argument("names", nargs=-1, required=True, metavar="TOPIC-P…")
@click.argument("path", metavar="DIRECTORY")
@invocation.number_option("--broker", "node_id", help="The broker.", minimum=0, required=True)
@click.option("--no-wait", is_flag=True, help="Return as soon as the moves have begun.")
@client_options
def move(names: tuple[str, ...], path: str, node_id: int, no_wait: bool) -> None:
    """Move logs to another data directory of a broker, while they are used.

    To cancel a move, name the directory that has the log. A move ends with the broker's process.
    """
    wanted = [_partition(name) for name in names]

    async def main(admin: Admin) -> None:
        await connect.check_brokers(admin, [str(node_id)])
        await admin.alter_replica_log_dirs(node_id, dict.fromkeys(wanted, path))
        while not no_wait:
            directories = (await admin.describe_directories())[node_id]
            moving = {tp for one in directories for tp in one.copies}.intersection(wanted)
            if not moving:
                there = {tp for one in directories if one.path == path.rstrip("/") for tp in one.size_bytes}
                if missing := [str(tp) for tp in wanted if tp not in there]:
                    raise CheckFailedError(
                        f"not moved: {', '.join(missing)}", hint="the broker's log has the reason"
                    )
                return
            await asyncio.sleep(POLL_S)

    connect.ask_admin(main)
    done = "moves" if no_wait else "moved"
    invocation.say(f"{plural(len(wanted), 'log')} {done} to {path}")


def _partition(name: str) -> TopicPartition:
    topic, _, number = name.rpartition("-")
    if not topic or not (number.isascii() and number.isdigit()):
        raise NotFoundError(f"there is no partition {name!r}", hint="for example events-0")
    return TopicPartition(topic, int(number))
