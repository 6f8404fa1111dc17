"""``kl cluster reassign`` and ``kl cluster decommission``: move partitions to other brokers (KIP-455)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import connect, invocation
from kafkalite.cli.cluster import named_partitions
from kafkalite.cli.cluster_balance import cluster as cluster
from kafkalite.cli.cluster_load import read_cluster
from kafkalite.cli.cluster_moves import (
    POLL_S,
    Targets,
    alter,
    end_throttle,
    finished,
    ongoing,
    require_none_ongoing,
    some,
    throttle_in_place,
    throttle_option,
)
from kafkalite.cli.completion import complete_topics
from kafkalite.cli.exit_codes import CheckFailedError, UsageError
from kafkalite.cli.invocation import client_options, listing_options, number_option
from kafkalite.cli.lazy_group import Group
from kafkalite.cli.output import Column, human_bytes, plural, print_listing, rows_of, write
from kafkalite.client.admin.cluster_health import look, look_at_quorum
from kafkalite.errors import broker_error
from kafkalite.metadata.balance import PlacedPartition, plan_drain
from kafkalite.metadata.placement import add_replicas, keep_replicas
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.admin import UnregisterBrokerRequest

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient

#: How long a broker may lag behind the controller that has ended the moves.
LAG_S: Final = 5.0

_COLUMNS: Final = (
    Column("name", "PARTITION", read=lambda each: f"{each.topic}-{each.partition}"),
    Column("topic"),
    Column("partition"),
    Column("replicas", "REPLICAS", read=lambda each: list(each.replicas)),
    Column("adding_replicas", "ADDING", read=lambda each: list(each.adding_replicas)),
    Column("removing_replicas", "REMOVING", read=lambda each: list(each.removing_replicas)),
    Column("isr", "IN SYNC", read=lambda each: list(each.isr)),
)

_allow_option: Final = click.option(
    "--allow-replication-factor-change", is_flag=True, help="Accept another number of replicas than now."
)
_wait_option: Final = click.option("--wait", is_flag=True, help="Wait until the moves are complete.")


@cluster.group(cls=Group)
def reassign() -> None:
    """Move partitions to other brokers while clients write."""


@reassign.command(
    epilog="""\b
Examples:
  kl cluster reassign plan orders --brokers 1,2,4     only on these brokers
  kl cluster reassign plan orders -r 3 > plan.json    three replicas of each partition"""
)
@click.argument("names", nargs=-1, required=True, metavar="TOPIC…", shell_complete=complete_topics)
@click.option("--brokers", metavar="N,N…", help="The brokers that may have replicas; all by default.")
@number_option("-r", "--replication-factor", help="The number of replicas; as now by default.")
@client_options
def plan(names: tuple[str, ...], brokers: str | None, replication_factor: int | None) -> None:
    """Print a plan, as JSON, for 'kl cluster reassign apply'. Nothing is changed.

    Replicas move only off brokers that are not in --brokers, to those with the fewest bytes.
    """
    if brokers is None and replication_factor is None:
        raise UsageError("nothing to move: give --brokers or -r")
    chosen = None if brokers is None else _node_ids(brokers)
    targets = connect.ask_cluster(lambda client: planned(client, names, chosen, replication_factor))
    _print_plan(targets)


def _node_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--brokers {text!r} is no list of node ids", hint="such as 1,2,4") from None


def _print_plan(targets: Targets) -> None:
    partitions = [
        {"topic": tp.topic, "partition": tp.partition, "replicas": replicas}
        for tp, replicas in targets.items()
    ]
    write(json.dumps({"version": 1, "partitions": partitions}, indent=1) + "\n")


async def planned(
    client: ClusterClient, names: Sequence[str], brokers: Sequence[int] | None, factor: int | None
) -> dict[TopicPartition, list[int]]:
    """Return the replicas afterwards of those partitions of ``names`` that must move.

    Fewer replicas are those in sync on live brokers, then the first ones. Warns if others stay. Raises
    NotFoundError for an unknown topic or broker, InvalidReplicationFactorError or UsageError if there are too
    few live brokers, and CheckFailedError if a partition is being moved, or would lose replicas while it has
    no leader.
    """
    wanted = {(each.topic, each.partition) for each in await named_partitions(client, names)}
    await require_none_ongoing(client, wanted)
    hosts, everything = await read_cluster(client)
    placed = [each for each in everything if (each.topic, each.partition) in wanted]
    allowed = {host.node_id for host in hosts} if brokers is None else set(brokers)
    if unknown := allowed - {host.node_id for host in hosts}:
        raise connect.no_such_broker(min(unknown), [host.node_id for host in hosts])
    moved: dict[tuple[str, int], tuple[int, ...]] = {}
    if left := {host.node_id for host in hosts} - allowed:
        drain = plan_drain(hosts, placed, left)
        moved = {(move.topic, move.partition): move.new_replicas for move in drain.moves}
        if drain.stuck:
            invocation.say(f"without a leader, nothing can be copied, so these stay: {some(drain.stuck)}")
    racks = {host.node_id: host.rack for host in hosts if host.is_live and host.node_id in allowed}
    held = {node_id: sum(node_id in each.replicas for each in everything) for node_id in racks}
    targets: dict[TopicPartition, list[int]] = {}
    for each in placed:
        replicas = moved.get((each.topic, each.partition), each.replicas)
        if factor is not None:
            if len(replicas) > factor:
                replicas = _fewer(each, replicas, factor)
            replicas = add_replicas(replicas, factor, racks, held)
            for node_id in set(replicas) - set(each.replicas):
                held[node_id] += 1
            if len(replicas) < factor:
                raise UsageError(f"{factor} replicas need {factor} live brokers; there are {len(racks)}")
        if replicas != each.replicas:
            targets[TopicPartition(each.topic, each.partition)] = list(replicas)
    return targets


def _fewer(partition: PlacedPartition, replicas: Sequence[int], factor: int) -> tuple[int, ...]:
    name = f"{partition.topic}-{partition.partition}"
    if partition.leader < 0:
        raise CheckFailedError(
            f"{name} has no leader, so any replica may be the last copy of a record; nothing was changed",
            hint="'kl cluster status' shows the nodes that it waits for",
        )
    kept = keep_replicas(replicas, factor, partition.in_sync)
    in_sync = sum(node_id in partition.in_sync for node_id in kept)
    if in_sync < factor:
        invocation.say(f"{name}: only {in_sync} of the {plural(factor, 'replica')} that stay are in sync now")
    return kept


@reassign.command(
    epilog="""\b
Examples:
  kl cluster reassign apply plan.json --wait
  kl cluster reassign apply plan.json --throttle 20000000    20 MB/s a broker
  kl cluster balance -o json | kl cluster reassign apply -"""
)
@click.argument("file", type=click.File("r"), metavar="FILE")
@_allow_option
@throttle_option
@_wait_option
@client_options
def apply(file: Any, allow_replication_factor_change: bool, throttle: int | None, wait: bool) -> None:
    """Begin the moves of a plan: of 'reassign plan', of 'balance -o json', or of Kafka's tool.

    A throttle ends with --wait, or when 'kl cluster reassign status' finds nothing in progress.
    """
    targets = _parsed(file.read())

    async def main(client: ClusterClient) -> None:
        await alter(client, targets, may_change_factor=allow_replication_factor_change, throttle=throttle)
        if wait:
            await finished(client)
            await end_throttle(client)
        elif throttle is not None:
            invocation.say("'kl cluster reassign status' removes the throttle when the moves are complete")

    connect.ask_cluster(main)


def _parsed(text: str) -> dict[TopicPartition, list[int]]:
    """Return the targets in a plan. Raises UsageError if it is none."""
    try:
        document = json.loads(text)
        items = document["partitions"] if "partitions" in document else document["moves"]
        return {
            TopicPartition(str(item["topic"]), int(item["partition"])): [
                int(node_id) for node_id in item.get("new_replicas", item.get("replicas"))
            ]
            for item in items
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"this is no plan: {type(error).__name__}: {error}",
            hint="it has {'partitions': [{'topic': …, 'partition': …, 'replicas': […]}]}",
        ) from error


@reassign.command()
@click.option("--preserve-throttles", is_flag=True, help="Do not remove a throttle when nothing is moved.")
@listing_options
def status(preserve_throttles: bool) -> None:
    """List the moves that are in progress. If there are none, remove the throttle of earlier ones."""

    async def main(client: ClusterClient) -> None:
        found = await ongoing(client)
        output = invocation.current().output
        print_listing(rows_of(found, _COLUMNS), _COLUMNS, output, if_empty="nothing is being moved")
        if found:
            if rate := await throttle_in_place(client):
                invocation.say(
                    f"throttled: each broker sends and receives at most {human_bytes(rate)}/s of moves"
                )
        elif not preserve_throttles:
            await end_throttle(client)

    connect.ask_cluster(main)


@reassign.command()
@click.argument("names", nargs=-1, metavar="[TOPIC|TOPIC-PARTITION]…", shell_complete=complete_topics)
@click.option("--all", "every", is_flag=True, help="Cancel all moves.")
@client_options
def cancel(names: tuple[str, ...], every: bool) -> None:
    """Cancel moves that are in progress: the partitions return to their original replicas."""
    if every == bool(names):
        raise UsageError("give the names of topics or partitions, or --all")

    async def main(client: ClusterClient) -> None:
        found = [TopicPartition(each.topic, each.partition) for each in await ongoing(client)]
        if names:
            wanted = {tuple(each) for each in await named_partitions(client, names)}
            found = [tp for tp in found if tp in wanted]
        await alter(client, dict.fromkeys(found))
        await end_throttle(client)

    connect.ask_cluster(main)


@cluster.command(
    epilog="""\b
Examples:
  kl cluster decommission 3             move everything off node 3, and remove it from the cluster
  kl cluster decommission 3 --dry-run   print the plan"""
)
@click.argument("node_id", type=click.IntRange(min=0), metavar="NODE")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print what would be moved, as JSON; change nothing.")
@throttle_option
@client_options
def decommission(node_id: int, yes: bool, dry_run: bool, throttle: int | None) -> None:
    """Move all replicas off a broker, remove it from the cluster, and retire its node id.

    A broker that still runs stops then. A node that is a voter of the metadata quorum stays registered.
    """
    targets, is_voter = connect.ask_cluster(lambda client: _drained(client, node_id))
    if dry_run:
        _print_plan(targets)
        return
    if not yes:
        what = plural(len(targets), "partition")
        invocation.confirm(f"Move {what} off node {node_id}, and remove it for ever?", "nothing was changed")

    async def main(client: ClusterClient) -> None:
        await require_none_ongoing(client, node_id=node_id)
        await alter(client, targets, throttle=throttle)
        await finished(client, set(targets))
        if throttle is not None:
            await end_throttle(client)
        await _require_empty(client, node_id)
        if is_voter:
            invocation.say(f"node {node_id} has no replica now; it stays registered, because it is a voter")
            return
        response = (await client.call(UnregisterBrokerRequest(node_id))).message
        if response.error_code:
            raise broker_error(response.error_code, response.error_message or "")
        click.echo(f"node {node_id}: removed; its id is retired")

    connect.ask_cluster(main)


async def _drained(client: ClusterClient, node_id: int) -> tuple[dict[TopicPartition, list[int]], bool]:
    """Return (the replicas afterwards of the partitions on the broker, whether the node is a voter).

    Raises NotFoundError for an unknown broker, and CheckFailedError if a partition on it is being moved, or
    has no leader to copy it from.
    """
    view = await look(client)
    known = [broker.node_id for broker in view.brokers]
    if node_id not in known:
        raise connect.no_such_broker(node_id, known)
    await require_none_ongoing(client, node_id=node_id)
    hosts, placed = await read_cluster(client)
    plan = plan_drain(hosts, placed, [node_id])
    if plan.stuck:
        raise CheckFailedError(
            f"node {node_id} may have the last copy of {some(plan.stuck)}: without a leader, nothing can be"
            " copied; nothing was changed",
            hint="'kl cluster status' shows the nodes that a partition waits for; start them, or delete the"
            " topic",
        )
    quorum = await look_at_quorum(client)
    is_voter = any(each.node_id == node_id and each.is_voter for each in quorum.nodes)
    targets = {TopicPartition(move.topic, move.partition): list(move.new_replicas) for move in plan.moves}
    return targets, is_voter


async def _require_empty(client: ClusterClient, node_id: int) -> None:
    """Raise CheckFailedError if the broker still has replicas LAG_S after the first look."""
    import asyncio

    loop = asyncio.get_running_loop()
    until = loop.time() + LAG_S
    while left := [name for name, state in (await look(client)).partitions if node_id in state.replicas]:
        if loop.time() >= until:
            raise CheckFailedError(
                f"node {node_id} still has replicas of {some(left)}: a move was cancelled, or a topic was"
                " created meanwhile",
                hint=f"run 'kl cluster decommission {node_id}' again",
            )
        await asyncio.sleep(POLL_S)
