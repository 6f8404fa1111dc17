"""``kl txn``: lists, describes and aborts transactions, and finds hanging transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.argument_types import TRANSACTIONAL_ID
from kafkalite.cli.completion import complete_topics, complete_transactional_ids
from kafkalite.cli.exit_codes import UsageError
from kafkalite.cli.invocation import client_options, duration_ms, listing_options
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.offset_queries import partitions_of
from kafkalite.cli.output import Column, names_of, pick, plural, print_document, print_listing, rows_of, write
from kafkalite.cli.times import format_time
from kafkalite.durations import format_duration
from kafkalite.errors import InvalidTxnStateError
from kafkalite.model import TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.admin.descriptions import (
        HangingTransaction,
        TransactionDescription,
        TransactionGroupDescription,
    )

STATES: Final = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort")
_OPEN_STATES: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")
#: The default of transaction.max.timeout.ms. No coordinator leaves a transaction open for longer.
LONGEST_MS: Final = 900_000

_COLUMNS: Final = (
    Column("name", "TRANSACTIONAL ID", read="transactional_id"),
    Column("state", "STATE"),
    Column(
        "open_ms",
        "OPEN FOR",
        show=lambda ms: "-" if ms is None else format_duration(ms),
        read=lambda each: each.duration_ms if each.state in _OPEN_STATES else None,
    ),
    Column("producer_id", "PRODUCER"),
    Column("coordinator", "COORDINATOR", read="coordinator_id"),
)
_MEMBER_COLUMNS: Final = (
    Column("name", "MEMBER", read="writer"),
    Column("batch_id", "BATCH"),
    Column("state", "STATE"),
    Column("producer_id", "PRODUCER"),
    Column("producer_epoch", "EPOCH"),
    Column("started", "STARTED", read=lambda writer: format_time(writer.start_ms)),
    Column("partitions", "PARTITIONS", read=lambda writer: names_of(writer.partitions)),
)
_HANGING_COLUMNS: Final = (
    Column("name", "PARTITION", read=lambda each: str(each.partition)),
    Column("producer_id", "PRODUCER", read="producer.producer_id"),
    Column("producer_epoch", "EPOCH", read="producer.producer_epoch"),
    Column("start_offset", "START OFFSET", read="producer.transaction_start_offset"),
    Column("last_write", "LAST WRITE", read=lambda each: format_time(each.producer.last_timestamp_ms)),
)


@click.group(cls=Group)
def txn() -> None:
    """Inspect and abort transactions."""


@txn.command("list")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STATES, False), help="List only this state."
)
@click.option(
    "--open-for",
    type=duration_ms,
    default="0",
    metavar="TIME",
    help="List only transactions open for at least this long.",
)
@listing_options
def list_(states: tuple[str, ...], open_for: int) -> None:
    """List transactional ids and their state."""
    listed = connect.ask_admin(lambda admin: admin.list_transactions(states, min_duration_ms=open_for))
    rows = rows_of(listed, _COLUMNS)
    none = "no transactional ids" + (" in that state" if states else "")
    none += f" open for {format_duration(open_for)}" if open_for else ""
    print_listing(rows, _COLUMNS, invocation.current().output, if_empty=none)


@txn.command()
@click.argument(
    "name", type=TRANSACTIONAL_ID, metavar="TRANSACTIONAL_ID", shell_complete=complete_transactional_ids
)
@listing_options
def describe(name: str) -> None:
    """Describe a transactional id, or a transaction group by its application id."""
    current = invocation.current()

    async def main(admin: Admin) -> TransactionDescription | TransactionGroupDescription:
        try:
            return await admin.describe_transaction(name)
        except InvalidTxnStateError:  # the name is an application id
            return await admin.describe_transaction_group(name)

    described: Any = connect.ask_admin(main)
    if hasattr(described, "last_batch_id"):
        _print_group(described, current.output)
        return
    print_document(
        {
            **pick(described, "transactional_id", "state", "producer_id", "producer_epoch", "timeout_ms"),
            "started": None if described.start_ms < 0 else format_time(described.start_ms),
            "partitions": names_of(described.partitions),
            "coordinator_epoch": described.coordinator_epoch,
        },
        current.output,
    )


def _print_group(described: TransactionGroupDescription, output: str) -> None:
    rows = rows_of(described.writers, _MEMBER_COLUMNS)
    document = {
        "application_id": described.application_id,
        "last_batch_id": described.last_batch_id if described.last_batch_id >= 0 else None,
        "last_winners": list(described.last_winners),
    }
    if output not in {"table", "wide"}:
        print_document(document | {"members": rows}, output)
        return
    print_document(document, output)
    if rows:
        write("\n")
        print_listing(rows, _MEMBER_COLUMNS, output)


@txn.command(
    epilog="""\b
Examples:
  kl txn abort billing-1            its open transaction; its producer is fenced
  kl txn abort --hanging orders-0 --producer 17 --start-offset 42
                                    one found by 'kl txn find-hanging'"""
)
@click.argument(
    "name",
    type=TRANSACTIONAL_ID,
    metavar="[TRANSACTIONAL_ID]",
    required=False,
    shell_complete=complete_transactional_ids,
)
@click.option("--hanging", metavar="TOPIC-PARTITION", help="The partition of a hanging transaction.")
@click.option("--producer", "producer_id", type=int, metavar="ID", help="The producer id for --hanging.")
@click.option("--start-offset", type=int, metavar="N", help="The first offset for --hanging.")
@client_options
def abort(name: str | None, hanging: str | None, producer_id: int | None, start_offset: int | None) -> None:
    """Abort the open transaction of TRANSACTIONAL_ID, and fence its producer.

    With --hanging, abort a hanging transaction instead.
    """
    where = _hanging(name, hanging, producer_id, start_offset)

    async def main(admin: Admin) -> None:
        if where is None:
            assert name is not None
            await _abort(admin, name)
        else:
            await admin.abort_hanging_transaction(*where)

    connect.ask_admin(main)
    invocation.say(
        f"{name!r} has no open transaction now, and its producer is fenced"
        if where is None
        else f"aborted in {where[0]}"
    )


async def _abort(admin: Admin, name: str) -> None:
    try:
        await admin.abort_transaction(name)
    except InvalidTxnStateError:
        raise InvalidTxnStateError(
            f"{name!r} is the application of a transaction group, whose writers end with their batch",
            hint="TransactionGroup.finish() decides a batch; undecided writers are aborted in time;"
            f" 'kl txn describe {name}' shows them",
        ) from None


def _hanging(
    name: str | None, hanging: str | None, producer_id: int | None, start_offset: int | None
) -> tuple[TopicPartition, int, int] | None:
    """Return the hanging transaction to abort: (partition, producer id, first offset).

    Returns None if the transaction is given by ``name``, its transactional id. Raises UsageError.
    """
    if hanging is None:
        if name is None:
            raise UsageError("no transaction given: name a TRANSACTIONAL_ID, or --hanging TOPIC-PARTITION")
        return None
    topic, _, partition = hanging.rpartition("-")
    if name is not None or not topic or not partition.isdecimal():
        raise UsageError("--hanging takes TOPIC-PARTITION, without a TRANSACTIONAL_ID")
    if producer_id is None or start_offset is None:
        raise UsageError(
            "--hanging needs --producer and --start-offset, as 'kl txn find-hanging' prints them"
        )
    return TopicPartition(topic, int(partition)), producer_id, start_offset


@txn.command(
    epilog="""\b
Examples:
  kl txn retire spark-4f0d...       a stream whose checkpoint was deleted"""
)
@click.argument("name", metavar="APPLICATION_ID", shell_complete=complete_transactional_ids)
@client_options
def retire(name: str) -> None:
    """Let the brokers forget a transaction group whose last batch is done.

    The brokers remember the last batch id of every transaction group, so that a restarted driver does not
    write that batch twice. A retired group is forgotten after transactional.id.expiration.ms without use.
    """

    last = connect.ask_admin(lambda admin: admin.retire_transaction_group(name))
    invocation.say(f"{name!r} is retired: batch {last} was its last; the brokers will forget it")


@txn.command("find-hanging")
@click.argument("topics", nargs=-1, shell_complete=complete_topics)
@click.option(
    "--older-than",
    type=duration_ms,
    default=f"{LONGEST_MS}ms",
    metavar="TIME",
    help="Omit transactions with a more recent write.  [default: 15m]",
)
@listing_options
def find_hanging(topics: tuple[str, ...], older_than: int) -> None:
    """Find transactions that are open in a partition but unknown to every coordinator."""
    current = invocation.current()

    async def main(admin: Admin) -> tuple[list[HangingTransaction], int]:
        names: Sequence[str] = topics
        if not names:
            names = [topic.name for topic in await admin.list_topics(internal=True)]
        partitions = await partitions_of(admin, names) if names else []
        return await admin.find_hanging_transactions(partitions, min_age_ms=older_than), len(partitions)

    found, looked_at = connect.ask_admin(main)
    rows = rows_of(found, _HANGING_COLUMNS)
    none = f"none in {plural(looked_at, 'partition')}"
    print_listing(rows, _HANGING_COLUMNS, current.output, if_empty=none)
    if rows and current.output in {"table", "wide"}:
        first = found[0]
        invocation.say(
            f"to abort the first: kl txn abort --hanging {first.partition} --producer"
            f" {first.producer.producer_id} --start-offset {first.producer.transaction_start_offset}"
        )
