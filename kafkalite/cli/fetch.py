"""``kl fetch``: prints records by their addresses, Topic-Partition-Offset."""

# Tests: tests/cli/test_produce_consume.py

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.argument_types import ANY_BYTES
from kafkalite.cli.exit_codes import NotFoundError, TimedOutError, UsageError
from kafkalite.cli.invocation import Invocation, client_options
from kafkalite.cli.offset_queries import UNKNOWN_END, Extent, list_or_fail, partitions_of
from kafkalite.cli.printers import RECORD_OUTPUTS, make_printer
from kafkalite.cli.stdio import printing
from kafkalite.model import Record, RecordAddress, TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.consumer.consumer import Consumer

_PATIENCE_S: Final = 10.0
_POLL_MS: Final = 100


@click.command(
    epilog="""\b
Examples:
  kl fetch Purchases-1-456332
  kl fetch Purchases-1-456332 -o json
  kl fetch my-topic-0-7 -f '%T{iso} %k %s\\n'"""
)
@click.argument("addresses", nargs=-1, required=True, metavar="TOPIC-PARTITION-OFFSET…")
@click.option(
    "-f", "--format", "text_format", type=ANY_BYTES, metavar="FORMAT", help="Print it as kl consume -f does."
)
@click.option(
    "-o", "--output", type=click.Choice(RECORD_OUTPUTS), default="value", show_default=True, help="Format."
)
@client_options
def fetch(addresses: tuple[str, ...], text_format: str | None, output: str) -> None:
    """Print the record at each address."""
    try:
        wanted = [RecordAddress.parse(text) for text in addresses]
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    printer = make_printer(output, text_format)
    current = invocation.current()
    records = invocation.run_command(lambda: _fetch_all(current, wanted))
    with printing(printer) as show:
        show(records)


async def _fetch_all(current: Invocation, wanted: list[RecordAddress]) -> list[Record]:
    async with connect.admin(current) as admin, connect.consumer(current) as consumer:
        return [await _fetch(admin, consumer, address) for address in wanted]


async def _fetch(admin: Admin, consumer: Consumer, address: RecordAddress) -> Record:
    """Return the record at ``address``.

    Raises NotFoundError if the offset is outside the log, if the next record has a higher offset, or if no
    record follows. Raises TimedOutError if the log is not read within _PATIENCE_S.
    """
    (partition,) = await partitions_of(admin, [address.topic], [address.partition])
    first = (await admin.list_offsets([partition], "earliest"))[partition].offset
    end = (await list_or_fail(admin, [partition], "latest"))[partition]
    extent = Extent(first, end if isinstance(end, int) else UNKNOWN_END)
    if not extent.log_start_offset <= address.offset < extent.log_end_offset:
        raise NotFoundError(f"there is no record {address}", hint=_extent_in_words(partition, extent))
    consumer.assign([partition])
    await consumer.seek(partition, address.offset)
    deadline = time.monotonic() + _PATIENCE_S
    while not (records := await consumer.get_many(1, timeout_ms=_POLL_MS)):
        if (consumer.position(partition) or 0) >= extent.log_end_offset:
            break
        if time.monotonic() >= deadline:
            raise TimedOutError(f"no response for {address} within {_PATIENCE_S:g} s")
    if records and records[0].offset == address.offset:
        return records[0]
    following = f"the next record is {records[0].address}" if records else "no record follows"
    raise NotFoundError(
        f"there is no record {address}",
        hint=f"{following}; this one was removed by compaction, or its offset marks the end of a transaction",
    )


def _extent_in_words(partition: TopicPartition, extent: tuple[int, int]) -> str:
    start, end = extent
    return f"{partition} is empty" if start == end else f"{partition} holds offsets {start} to {end - 1}"
