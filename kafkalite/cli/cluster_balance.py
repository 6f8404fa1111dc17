"""``kl cluster balance``: moves replicas and leaderships so that brokers are loaded evenly."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.cluster_load import read_cluster
from kafkalite.cli.cluster_moves import (
    begin,
    elect_preferred,
    end_throttle,
    finished,
    ongoing,
    require_none_ongoing,
    some,
)
from kafkalite.cli.cluster_wait import cluster as cluster
from kafkalite.cli.exit_codes import PartialFailureError, UsageError
from kafkalite.cli.invocation import duration_ms, listing_options
from kafkalite.cli.output import Column, human_bytes, plural, print_document, print_listing, rows_of, write
from kafkalite.durations import format_duration
from kafkalite.metadata.balance import (
    Host,
    HostPlan,
    Load,
    Measure,
    Move,
    PlacedPartition,
    Plan,
    plan_balance,
    plan_drain,
)
from kafkalite.model import TopicPartition

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient

DEFAULT_SAMPLE_MS: Final = 5_000
DEFAULT_THROTTLE_BYTES: Final = 50_000_000


def _change(read: Callable[[Load], Any], show: Callable[[Any], str] = str) -> Callable[[HostPlan], str]:
    """Return a function that shows a number of a broker's load before and after."""

    def shown(host: HostPlan) -> str:
        before, after = show(read(host.before)), show(read(host.after))
        return before if before == after else f"{before} → {after}"

    return shown


def _rate(rate: float) -> str:
    return f"{human_bytes(round(rate))}/s"


_RATES: Final = ("rate", "leader_rate")

_MOVE_COLUMNS: Final = (
    Column("name", "PARTITION", read=lambda each: f"{each.topic}-{each.partition}"),
    Column("topic"),
    Column("partition"),
    Column("replicas", "REPLICAS", read=lambda each: list(each.replicas)),
    Column("new_replicas", "NEW REPLICAS", read=lambda each: list(each.new_replicas)),
    Column("bytes_to_copy", "TO COPY", show=human_bytes),
)
_HOST_COLUMNS: Final = (
    Column("node_id", "NODE"),
    Column("replicas", "REPLICAS", read=_change(lambda load: load.replicas)),
    Column("bytes", "BYTES", read=_change(lambda load: load.size_bytes, human_bytes)),
    Column("rate", "WRITTEN", read=_change(lambda load: load.rate, _rate)),
    Column("leaders", "LEADS", read=_change(lambda load: load.leaders)),
    Column("leader_bytes", "BYTES LED", wide=True, read=_change(lambda load: load.leader_bytes, human_bytes)),
    Column("leader_rate", "WRITTEN BY CLIENTS", read=_change(lambda load: load.leader_rate, _rate)),
    Column("bytes_in", "COPIED IN", show=human_bytes),
    Column("bytes_out", "COPIED OUT", show=human_bytes),
)


@cluster.command(
    epilog="""\b
Examples:
  kl cluster balance                        even numbers of replicas and leaders
  kl cluster balance --by bytes             even sizes
  kl cluster balance --by rates --leaders   even rates of producers' bytes; copies nothing
  kl cluster balance --by rates --leaders --apply
  kl cluster balance --drain 3              where the replicas of node 3 could go"""
)
@click.option(
    "--by",
    "measure",
    type=click.Choice([each.value for each in Measure]),
    default=Measure.PARTITIONS.value,
    show_default=True,
    help="What is spread evenly: numbers of replicas, their bytes, or the bytes per second written to them.",
)
@click.option("--leaders", is_flag=True, help="Change only preferred leaders, which copies nothing.")
@invocation.number_option(
    "--drain", "drained", minimum=0, multiple=True, help="Move only the replicas of node N, away from it."
)
@invocation.number_option(
    "--throttle",
    help="Bytes per second that each broker may send and receive: with --apply the limit of the copies, else"
    f" to tell the time that they take.  [default: no limit; {DEFAULT_THROTTLE_BYTES} to tell the time]",
)
@click.option(
    "--sample",
    "sample_ms",
    type=duration_ms,
    metavar="DURATION",
    help=f"How long rates are measured.  [default: {DEFAULT_SAMPLE_MS // 1000}s with --by rates, else 0]",
)
@click.option("--apply", "applies", is_flag=True, help="Move it, and wait until that is done.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@listing_options
def balance(
    measure: str,
    leaders: bool,
    drained: tuple[int, ...],
    throttle: int | None,
    sample_ms: int | None,
    applies: bool,
    yes: bool,
) -> None:
    """Show what to move so that the brokers are loaded evenly. Without --apply, nothing is changed."""
    if leaders and drained:
        raise UsageError("--leaders moves no replicas, so it cannot be combined with --drain")
    if sample_ms is None:
        sample_ms = DEFAULT_SAMPLE_MS if measure == Measure.RATES.value else 0
    if measure == Measure.RATES.value and sample_ms == 0:
        raise UsageError("--by rates needs a --sample above 0")
    hosts, partitions = connect.ask_cluster(lambda client: _settled_cluster(client, sample_ms, applies))
    if unknown := set(drained) - {host.node_id for host in hosts}:
        raise connect.no_such_broker(min(unknown), [host.node_id for host in hosts])
    if drained:
        plan = plan_drain(hosts, partitions, drained)
    else:
        plan = plan_balance(hosts, partitions, Measure(measure), leaders_only=leaders)
    _print(plan, throttle or DEFAULT_THROTTLE_BYTES, has_rates=sample_ms > 0)
    if applies and plan.moves:
        if not yes:
            invocation.confirm(f"Change {plural(len(plan.moves), 'partition')}?", "nothing was changed")
        targets = {TopicPartition(move.topic, move.partition): move.new_replicas for move in plan.moves}
        connect.ask_cluster(lambda client: _apply(client, targets, throttle))


async def _settled_cluster(
    client: ClusterClient, sample_ms: int, applies: bool
) -> tuple[list[Host], list[PlacedPartition]]:
    """Return the brokers and partitions to plan with.

    While partitions are being moved, their replicas are those before and after together. Then raises
    CheckFailedError if the plan is to be carried out, and warns otherwise.
    """
    if applies:
        await require_none_ongoing(client)
    elif moving := await ongoing(client):
        names = some((each.topic, each.partition) for each in moving)
        invocation.say(f"{names}: being moved now, and planned with the replicas before and after together")
    return await read_cluster(client, sample_ms)


async def _apply(
    client: ClusterClient, targets: dict[TopicPartition, tuple[int, ...]], throttle: int | None
) -> None:
    """Reassign the partitions, wait until that is done, and elect the new preferred leaders.

    Raises CheckFailedError if reassignments are in progress, because the plan does not know where they end,
    and PartialFailureError if a partition was refused or could not get its preferred leader.
    """
    await require_none_ongoing(client)
    moving = await begin(client, targets, throttle=throttle)
    await finished(client, moving)
    if throttle is not None:
        await end_throttle(client)
    failed = len(targets) - len(moving) + await elect_preferred(client, moving)
    if failed:
        raise PartialFailureError(f"{failed} of {plural(len(targets), 'partition')} are not as planned")
    invocation.say(f"{plural(len(targets), 'partition')} changed")


def _print(plan: Plan, throttle: int, *, has_rates: bool) -> None:
    output = invocation.current().output
    moves = rows_of(plan.moves, _MOVE_COLUMNS)
    seconds = plan.duration_s(throttle)
    if output == "name":
        print_listing(moves, _MOVE_COLUMNS, output)
        return
    if output not in {"table", "wide"}:
        document = {
            "moves": moves,
            "brokers": [_host_document(host, has_rates) for host in plan.hosts],
            "bytes_to_copy": plan.bytes_to_copy,
            "throttle": throttle,
            "seconds": None if math.isinf(seconds) else round(seconds, 3),
            "without_leader": [f"{topic}-{partition}" for topic, partition in plan.stuck],
        }
        print_document(document, output)
        return
    for topic, partition in plan.stuck:
        invocation.say(f"{topic}-{partition} has no leader, so no replica of it can be copied")
    print_listing(moves, _MOVE_COLUMNS, output, if_empty="nothing to move")
    if moves:
        write("\n")
    columns = [column for column in _HOST_COLUMNS if has_rates or column.key not in _RATES]
    print_listing(rows_of(plan.hosts, columns), columns, output)
    if moves:
        write(f"\n{_summary(plan.moves, plan.bytes_to_copy, seconds, throttle)}\n")


def _summary(moves: Collection[Move], bytes_to_copy: int, seconds: float, throttle: int) -> str:
    what = plural(len(moves), "partition")
    if not bytes_to_copy:
        return f"{what} to change, nothing to copy"
    what = f"{what} to change, {human_bytes(bytes_to_copy)} to copy"
    at = f"at {human_bytes(throttle)}/s a broker"
    if math.isinf(seconds):
        return f"{what}; it never ends {at}, because producers write as much to the moved partitions"
    return f"{what}, {format_duration(round(seconds * 1000))} {at}"


def _host_document(host: HostPlan, has_rates: bool) -> dict[str, Any]:
    unknown = {} if has_rates else dict.fromkeys(_RATES)
    return {
        "node_id": host.node_id,
        "before": host.before._asdict() | unknown,
        "after": host.after._asdict() | unknown,
        "bytes_in": host.bytes_in,
        "bytes_out": host.bytes_out,
    }
