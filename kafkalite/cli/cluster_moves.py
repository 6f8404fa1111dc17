"""Carries out moves of partitions: begins, throttles and awaits them (KIP-455, KIP-73)."""

# Tests: tests/cli/test_cluster_reassign.py

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalite.cli import invocation
from kafkalite.cli.cluster import ELECTION_TIMEOUT_MS
from kafkalite.cli.exit_codes import CheckFailedError, PartialFailureError
from kafkalite.cli.output import plural
from kafkalite.client.admin.cluster_health import look
from kafkalite.errors import ErrorCode, broker_error
from kafkalite.limits import MAX_RESOURCES_PER_REQUEST, MAX_TOPICS_PER_REQUEST
from kafkalite.metadata.records import BROKER, TOPIC
from kafkalite.metadata.throttles import (
    FOLLOWER_RATE,
    FOLLOWER_REPLICAS,
    LEADER_RATE,
    LEADER_REPLICAS,
    UNLIMITED,
    items_text,
    replica_items,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.admin import (
    AlterConfigsRequest,
    AlterPartitionReassignmentsRequest,
    ConfigChange,
    ConfigResource,
    DescribeConfigsRequest,
    ElectionPartition,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
    OngoingReassignment,
    PartitionReassignment,
)

if TYPE_CHECKING:
    from kafkalite.client.cluster.client import ClusterClient

POLL_S: Final = 0.3

Targets = Mapping[TopicPartition, Sequence[int] | None]
"""The replicas of each partition afterwards; None cancels."""

throttle_option: Final[Callable[..., Any]] = invocation.number_option(
    "--throttle",
    help="The bytes per second of the copies that each broker may send, and receive. By default, no limit.",
)


def some(partitions: Iterable[tuple[str, int]]) -> str:
    """Return the names of up to three partitions, and how many more there are."""
    names = [f"{topic}-{partition}" for topic, partition in sorted(partitions)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


async def require_none_ongoing(
    client: ClusterClient, wanted: Collection[tuple[str, int]] | None = None, node_id: int | None = None
) -> None:
    """Raise CheckFailedError if one of the partitions ``wanted``, or one on the broker ``node_id``, is being
    moved (neither is given: any): its replicas are those before and after together, so they are none to plan
    with.
    """
    is_any = wanted is None and node_id is None
    moving = [
        (each.topic, each.partition)
        for each in await ongoing(client)
        if is_any or (each.topic, each.partition) in (wanted or ()) or node_id in each.replicas
    ]
    if moving:
        raise CheckFailedError(
            f"{some(moving)}: being moved already; nothing was changed",
            hint="try again when 'kl cluster reassign status' lists nothing, or cancel the moves",
        )


async def begin(
    client: ClusterClient, targets: Targets, *, may_change_factor: bool = False, throttle: int | None = None
) -> set[TopicPartition]:
    """Begin or cancel reassignments. Return those that were accepted, and warn of the others.

    With ``throttle``, each broker sends and receives at most so many bytes per second of these and the other
    moves in progress, until ``end_throttle``. Raises the BrokerError if all are refused.
    """
    if throttle is not None:
        await _set_throttle(client, throttle, targets)
    items = [
        PartitionReassignment(*tp, None if replicas is None else list(replicas))
        for tp, replicas in targets.items()
    ]
    request = AlterPartitionReassignmentsRequest(ELECTION_TIMEOUT_MS, may_change_factor, items)
    results = (await client.call(request)).message.partitions
    failed = [each for each in results if each.error_code]
    if failed and len(failed) == len(results):
        if throttle is not None:
            await end_throttle(client)
        raise broker_error(failed[0].error_code, failed[0].error_message or "")
    for each in failed:
        invocation.say(f"{each.topic}-{each.partition}: {each.error_message}")
    return {TopicPartition(each.topic, each.partition) for each in results if not each.error_code}


async def alter(
    client: ClusterClient, targets: Targets, *, may_change_factor: bool = False, throttle: int | None = None
) -> None:
    """Begin or cancel reassignments as ``begin`` does, and print how many. Raises the BrokerError if all are
    refused, or PartialFailureError if some are."""
    if not targets:
        click.echo("nothing to move")
        return
    accepted = await begin(client, targets, may_change_factor=may_change_factor, throttle=throttle)
    click.echo(f"{plural(len(accepted), 'reassignment')} accepted")
    if len(accepted) < len(targets):
        raise PartialFailureError(f"{len(targets) - len(accepted)} of {len(targets)} partitions were refused")


async def ongoing(client: ClusterClient) -> list[OngoingReassignment]:
    """Return the reassignments that are in progress."""
    request = ListPartitionReassignmentsRequest(ELECTION_TIMEOUT_MS, None)
    found: list[OngoingReassignment] = (await client.call(request)).message.partitions
    return found


async def finished(client: ClusterClient, partitions: set[TopicPartition] | None = None) -> None:
    """Wait until no reassignment of ``partitions`` (None: of any) is in progress. Print how many are left."""
    import asyncio

    told = -1
    while True:
        keys = [TopicPartition(each.topic, each.partition) for each in await ongoing(client)]
        left = sum(partitions is None or key in partitions for key in keys)
        if left != told:
            invocation.say(f"{plural(left, 'partition')} left to move")
            told = left
        if not left:
            return
        await asyncio.sleep(POLL_S)


async def elect_preferred(client: ClusterClient, partitions: Iterable[TopicPartition]) -> int:
    """Make the preferred replicas lead. Warn of the partitions that fail, and return their number."""
    request = ElectLeadersRequest(ELECTION_TIMEOUT_MS, False, [ElectionPartition(*tp) for tp in partitions])
    fine = {ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED}
    failed = [each for each in (await client.call(request)).message.partitions if each.error_code not in fine]
    for each in failed:
        invocation.say(
            f"{each.topic}-{each.partition}: {broker_error(each.error_code, each.error_message or '')}"
        )
    return len(failed)


# --- the throttle ----------------------------------------------------------------------------------


async def _set_throttle(client: ClusterClient, rate: int, targets: Targets) -> None:
    """Limit the copies of ``targets`` and of the moves in progress to ``rate`` bytes per second a broker.

    As Kafka's tool does: every replica that may send is listed as a leader, every new one as a follower.
    """
    view = await look(client)
    moves = {tp: tuple(replicas) for tp, replicas in targets.items() if replicas is not None}
    for each in await ongoing(client):
        moves.setdefault(TopicPartition(each.topic, each.partition), tuple(each.adding_replicas))
    listed = await _listed(client, sorted({tp.topic for tp in moves}))
    for name, state in view.partitions:
        if name in moves:
            as_leader, as_follower = listed[name.topic]
            as_leader |= {f"{name.partition}:{node_id}" for node_id in state.replicas}
            added = set(moves[name]) - set(state.replicas) | set(moves[name]) - set(state.isr)
            as_follower |= {f"{name.partition}:{node_id}" for node_id in added}
    changes = [
        ConfigChange(TOPIC, topic, option, items_text(items))
        for topic, lists in listed.items()
        for option, items in zip((LEADER_REPLICAS, FOLLOWER_REPLICAS), lists, strict=True)
    ]
    brokers = [str(broker.node_id) for broker in view.brokers]
    changes += [
        ConfigChange(BROKER, node_id, option, str(rate))
        for node_id in brokers
        for option in (LEADER_RATE, FOLLOWER_RATE)
    ]
    await _alter_configs(client, changes)


async def end_throttle(client: ClusterClient) -> bool:
    """Remove the throttle of moves if none is in progress. Return whether there was one and it is removed.

    Warns if it stays.
    """
    view = await look(client)
    topics = sorted({each.name.topic for each in view.partitions})
    throttled = [topic for topic, lists in (await _listed(client, topics)).items() if any(lists)]
    if not throttled:
        return False
    if left := await ongoing(client):
        invocation.say(
            f"{plural(len(left), 'partition')} still being moved, so the throttle stays;"
            " 'kl cluster reassign status' removes it when nothing is"
        )
        return False
    changes = [
        ConfigChange(TOPIC, topic, option, None)
        for topic in throttled
        for option in (LEADER_REPLICAS, FOLLOWER_REPLICAS)
    ]
    changes += [
        ConfigChange(BROKER, str(broker.node_id), option, None)
        for broker in view.brokers
        for option in (LEADER_RATE, FOLLOWER_RATE)
    ]
    await _alter_configs(client, changes)
    invocation.say("the throttle is removed")
    return True


async def throttle_in_place(client: ClusterClient) -> int | None:
    """Return the bytes per second to which a broker limits moves, or None if it limits none."""
    view = await look(client)
    for broker in view.live:
        request = DescribeConfigsRequest([ConfigResource(BROKER, str(broker.node_id))])
        resources = (await client.call(request, node_id=broker.node_id)).message.resources
        values = {entry.name: entry.value for each in resources for entry in each.entries}
        rate = min(int(values.get(option) or UNLIMITED) for option in (LEADER_RATE, FOLLOWER_RATE))
        return None if rate == UNLIMITED else rate
    return None


async def _listed(client: ClusterClient, topics: Sequence[str]) -> dict[str, tuple[set[str], set[str]]]:
    """Return {topic: (replicas listed as throttled leaders, as throttled followers)}."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for first in range(0, len(topics), MAX_RESOURCES_PER_REQUEST):
        chosen = topics[first : first + MAX_RESOURCES_PER_REQUEST]
        request = DescribeConfigsRequest([ConfigResource(TOPIC, topic) for topic in chosen])
        for resource in (await client.call(request)).message.resources:
            values = {entry.name: entry.value for entry in resource.entries}
            found[resource.name] = (
                replica_items(values.get(LEADER_REPLICAS)),
                replica_items(values.get(FOLLOWER_REPLICAS)),
            )
    return found


async def _alter_configs(client: ClusterClient, changes: Sequence[ConfigChange]) -> None:
    """Change configs. Raises the BrokerError of the first resource that is refused."""
    for first in range(0, len(changes), MAX_TOPICS_PER_REQUEST):
        request = AlterConfigsRequest(False, list(changes[first : first + MAX_TOPICS_PER_REQUEST]))
        for each in (await client.call(request)).message.resources:
            if each.error_code:
                raise broker_error(each.error_code, each.error_message or "")
