"""Fetches the state of a cluster and finds its problems. Functions marked "Pure" send no requests."""

# Tests: tests/cli/test_cluster.py

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalite.client.admin.descriptions import FeatureDescription, feature_description
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.connection import Connection, connect
from kafkalite.client.cluster.routing import NO_NODE
from kafkalite.client.cluster.setbacks import lost_quorum
from kafkalite.errors import ConnectionFailedError, KafkaliteError, LocalProtocolError, RequestTimeoutError
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.admin import DescribeLogDirsRequest
from kafkalite.protocol.messages.metadata import (
    BrokerDescription,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeFeaturesRequest,
    DescribeQuorumRequest,
    DescribeQuorumRequestV1,
    DescribeQuorumResponse,
    DescribeQuorumResponseV1,
    DescribeRecoveryRequest,
    MetadataRequest,
    MetadataResponse,
    PartitionMetadata,
    RecoveringPartition,
)
from kafkalite.transport import SSL_SCHEME

if TYPE_CHECKING:
    from kafkalite.client.cluster.login import ConnectionLogin
    from kafkalite.transport.tls_context import TlsContext

#: If a controller is silent for longer, the leader considers it unavailable. Controllers send messages many
#: times a second.
VOTER_SILENCE_MS: Final = 2_000

#: A node that accepts no connection for so long, while there is no controller, counts as unreachable.
PROBE_MS: Final = 1_000

LIVE: Final = "live"
FENCED: Final = "fenced"
LEAVING: Final = "shutting down"
STOPPED: Final = "stopped"
UNREACHABLE: Final = "unreachable"


class PlacedPartition(NamedTuple):
    """A partition with its leader and replicas."""

    name: TopicPartition
    state: PartitionMetadata

    @property
    def is_leaderless(self) -> bool:
        return self.state.leader_id < 0

    @property
    def is_under_replicated(self) -> bool:
        return len(self.state.isr) < len(self.state.replicas)

    @property
    def is_led_by_another(self) -> bool:
        """Whether there is a leader that is not the preferred (first) replica."""
        return not self.is_leaderless and self.state.leader_id != self.state.replicas[0]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A snapshot of a cluster, according to the broker that responded."""

    cluster_id: str
    controller_id: int
    metadata_offset: int
    brokers: tuple[BrokerDescription, ...]
    partitions: tuple[PlacedPartition, ...]
    topic_count: int  #: including internal topics
    internal_topics: frozenset[str] = frozenset()
    #: Brokers that accepted no connection. A controller fences them later, or never if there is none.
    unreachable: frozenset[int] = frozenset()

    @property
    def live(self) -> list[BrokerDescription]:
        return [broker for broker in self.brokers if self.state_of(broker) == LIVE]

    def state_of(self, broker: BrokerDescription) -> str:
        return UNREACHABLE if broker.node_id in self.unreachable else state_of(broker)

    @property
    def leaderless(self) -> list[PlacedPartition]:
        return [each for each in self.partitions if each.is_leaderless]

    @property
    def under_replicated(self) -> list[PlacedPartition]:
        return [each for each in self.partitions if each.is_under_replicated]

    @property
    def led_by_others(self) -> list[PlacedPartition]:
        return [each for each in self.partitions if each.is_led_by_another]


class BrokerLoad(NamedTuple):
    """The numbers of partitions that a broker leads, replicates, and replicates in sync."""

    leads: int
    replicas: int
    in_sync: int


def state_of(broker: BrokerDescription) -> str:
    if broker.is_fenced:
        return STOPPED if broker.is_shutting_down else FENCED
    return LEAVING if broker.is_shutting_down else LIVE


def load_of(node_id: int, partitions: Iterable[PlacedPartition]) -> BrokerLoad:
    leads = replicas = in_sync = 0
    for _, state in partitions:
        leads += state.leader_id == node_id
        replicas += node_id in state.replicas
        in_sync += node_id in state.isr
    return BrokerLoad(leads, replicas, in_sync)


def view_of(cluster: DescribeClusterResponse, topics: MetadataResponse) -> ClusterView:
    partitions = [
        PlacedPartition(TopicPartition(topic.name, state.partition), state)
        for topic in sorted(topics.topics, key=lambda topic: topic.name)
        for state in sorted(topic.partitions, key=lambda state: state.partition)
    ]
    return ClusterView(
        cluster_id=cluster.cluster_id,
        controller_id=cluster.controller_id,
        metadata_offset=cluster.metadata_offset,
        brokers=tuple(sorted(cluster.brokers, key=lambda broker: broker.node_id)),
        partitions=tuple(partitions),
        topic_count=len(topics.topics),
        internal_topics=frozenset(topic.name for topic in topics.topics if topic.is_internal),
    )


async def look(client: ClusterClient) -> ClusterView:
    """Return a snapshot of the cluster from any broker. Raises the same errors as ``ClusterClient.call``.

    If there is no active controller, dead brokers are not fenced. Then this function connects to each broker,
    waiting up to PROBE_MS, to find those that cannot be reached.
    """
    cluster = (await client.call(DescribeClusterRequest())).message
    topics = (await client.call(MetadataRequest(None, False))).message
    return await _with_unreachable(view_of(cluster, topics), client.dial)


async def look_again(client: ClusterClient, silent: Container[int]) -> ClusterView:
    """Return a new snapshot after the brokers ``silent`` did not respond.

    Connects to those of them that are still live in it, as ``look`` does if there is no active controller: a
    broker that was just killed is fenced only when its session ends.
    """
    view = await look(client)
    return await _with_unreachable(view, client.dial, silent)


async def _with_unreachable(
    view: ClusterView, dial: Callable[[str, int], Awaitable[Connection]], suspects: Container[int] = ()
) -> ClusterView:
    """Return ``view`` with ``unreachable`` set. Connects to the live brokers of ``suspects``, or to each
    broker if there is no controller."""
    if view.controller_id >= 0:
        brokers = [broker for broker in view.live if broker.node_id in suspects]
    else:
        brokers = list(view.brokers)

    async def probe(broker: BrokerDescription) -> int | None:
        try:
            connection = await dial(broker.address, PROBE_MS)
        except KafkaliteError:
            return broker.node_id
        connection.close()
        await asyncio.sleep(0)  # the transport calls connection_lost
        return None

    found = await asyncio.gather(*map(probe, brokers))
    return replace(view, unreachable=frozenset(node_id for node_id in found if node_id is not None))


async def look_at_recovery(client: ClusterClient) -> list[RecoveringPartition]:
    """Return the partitions that wait for a leader or have damaged or unverified replicas.

    Raises the same errors as ``ClusterClient.call``.
    """
    response = await client.call(DescribeRecoveryRequest(NO_NODE))
    found: list[RecoveringPartition] = response.message.partitions
    return found


async def look_at_features(client: ClusterClient) -> list[FeatureDescription]:
    """Return the features with their levels. Raises the same errors as ``ClusterClient.call``."""
    response = await client.call(DescribeFeaturesRequest(NO_NODE))
    return [feature_description(each) for each in response.message.features]


async def look_from(
    addresses: Iterable[str],
    *,
    timeout_ms: int,
    tls: TlsContext | None = None,
    login: ConnectionLogin | None = None,
) -> ClusterView:
    """Return a snapshot of the cluster from the first of ``addresses`` that responds.

    ``tls`` and ``login`` are those of ``connect``. ``timeout_ms`` limits each step at an address: connecting,
    and each of two responses. If there is no active controller, connects to all brokers, as ``look`` does.
    If no address responds, raises the last ConnectionFailedError or RequestTimeoutError. Raises another error
    at once.
    """
    problem: KafkaliteError = ConnectionFailedError("no address was given")
    for address in addresses:
        try:
            return await _look_at(address.strip(), timeout_ms, tls, login)
        except (ConnectionFailedError, RequestTimeoutError) as error:
            problem = error
    raise problem


async def _look_at(
    address: str, timeout_ms: int, tls: TlsContext | None, login: ConnectionLogin | None
) -> ClusterView:
    async def dial(address: str, timeout_ms: int) -> Connection:
        return await connect(address, client_id="kl", timeout_ms=timeout_ms, tls=tls, login=login)

    connection = await dial(address, timeout_ms)
    try:
        cluster = await connection.call(DescribeClusterRequest(), timeout_ms=timeout_ms)
        topics = await connection.call(MetadataRequest(None, False), timeout_ms=timeout_ms)
        return await _with_unreachable(
            view_of(cluster.message, topics.message),
            lambda address, limit_ms: dial(f"{SSL_SCHEME}{address}" if tls else address, limit_ms),
        )
    finally:
        connection.close()
        await asyncio.sleep(0)  # the transport calls connection_lost


async def look_at_quorum(client: ClusterClient) -> DescribeQuorumResponse:
    """Return the state of the controller quorum from its leader, because only the leader knows all offsets.

    If the leader is unknown or accepts no connection, another node reports the state. Raises the errors of
    ``ClusterClient.call``.
    """
    response = await describe_quorum(client)
    leader_id = response.leader_id
    if leader_id in {NO_NODE, response.node_id} or leader_id not in client.metadata.addresses:
        return response
    with contextlib.suppress(ConnectionFailedError):  # otherwise the first response is returned
        response = await describe_quorum(client, leader_id)
    return response


async def describe_quorum(client: ClusterClient, node_id: int | None = None) -> DescribeQuorumResponse:
    """Return the state of the controller quorum from ``node_id`` (None: any node), in the newest version that
    the node supports."""
    try:
        response = await client.call(DescribeQuorumRequestV1(), node_id=node_id)
    except LocalProtocolError:  # a broker of an earlier version
        response = await client.call(DescribeQuorumRequest(), node_id=node_id)
    message: DescribeQuorumResponse = response.message
    return message


def directories_of(quorum: DescribeQuorumResponse) -> dict[int, str]:
    """Return {node id: id of its metadata directory, in hex}, as far as they are known. Pure."""
    if not isinstance(quorum, DescribeQuorumResponseV1):
        return {}
    return {one.node_id: one.directory_id for one in quorum.directories}


class RequestedState(NamedTuple):
    """The conditions to wait for. A cluster must also have an active controller."""

    broker_count: int = 1
    is_fully_in_sync: bool = False  #: every registered broker live, every partition led and fully in sync
    node_id: int | None = None  #: a broker that must be live
    topics: frozenset[str] = frozenset()  #: topics that must exist, with a leader for every partition


def unmet_conditions(view: ClusterView, requested: RequestedState) -> list[str]:
    """Return the reasons why the cluster is not in the requested state, the most important first. Pure."""
    found: list[str] = []
    live = view.live
    if view.controller_id < 0:
        found.append(_lost_quorum(view) or "no controller")
    if len(live) < requested.broker_count:
        found.append(f"{len(live)} of {requested.broker_count} brokers live")
    elif requested.is_fully_in_sync and len(live) < len(view.brokers):
        found.append(f"{len(live)} of {len(view.brokers)} brokers live")
    if requested.node_id is not None and requested.node_id not in {broker.node_id for broker in live}:
        states = {broker.node_id: view.state_of(broker) for broker in view.brokers}
        found.append(f"broker {requested.node_id} {states.get(requested.node_id, 'not registered')}")
    for topic in sorted(requested.topics):
        states_of_topic = [each for each in view.partitions if each.name.topic == topic]
        if not states_of_topic:
            found.append(f"no topic {topic}")
        elif any(each.is_leaderless for each in states_of_topic):
            found.append(f"{topic} has partitions without a leader")
    if requested.is_fully_in_sync:
        found += _unwhole(view)
    return found


def _lost_quorum(view: ClusterView) -> str:
    """Return a sentence that names the brokers that can't be reached, or "" if there are none."""
    lost = [
        f"node {each.node_id} ({each.address})" for each in view.brokers if each.node_id in view.unreachable
    ]
    return lost_quorum(lost, len(view.brokers)) if lost else ""


def _unwhole(view: ClusterView) -> list[str]:
    found = []
    if view.leaderless:
        found.append(counted(view.leaderless, "without a leader"))
    if view.under_replicated:
        found.append(counted(view.under_replicated, "under-replicated"))
    return found


def counted(partitions: Iterable[PlacedPartition], how: str) -> str:
    """Return a text such as ``3 partitions HOW (orders-0, orders-1, …)``, where HOW is the text ``how``."""
    named = [str(each.name) for each in partitions]
    noun = "partition" if len(named) == 1 else "partitions"
    shown = ", ".join(named[:3]) + (", …" if len(named) > 3 else "")
    return f"{len(named):,} {noun} {how} ({shown})"


def silent_voters(quorum: DescribeQuorumResponse) -> list[int]:
    """Return the ids of voters that sent the leader no message for VOTER_SILENCE_MS. Pure.

    Returns [] if ``quorum`` is not the leader's report.
    """
    if quorum.leader_id != quorum.node_id:
        return []
    return [
        node.node_id
        for node in quorum.nodes
        if node.is_voter
        and node.node_id != quorum.leader_id
        and not 0 <= node.last_contact_ms <= VOTER_SILENCE_MS
    ]


def describe_recovery(partition: RecoveringPartition) -> str:
    """Describe why the partition has no leader or is being repaired, and the state of each replica."""
    name = f"{partition.topic}-{partition.partition}"
    states = [
        f"{each.node_id} {each.state}"
        + (f", ends at {each.log_end_offset}" if each.log_end_offset >= 0 else "")
        for each in partition.replicas
    ]
    replicas = f" (replicas: {', '.join(states)})" if states else ""
    if partition.leader_id >= 0:
        return f"{name} is led by {partition.leader_id} while replicas are repaired or compared{replicas}"
    if partition.waits_for:
        return f"{name} waits for replicas {partition.waits_for} before it elects a leader{replicas}"
    if partition.replicas and all(each.state == "damaged" for each in partition.replicas):
        return (
            f"{name} has no leader, because its replicas are damaged{replicas}; stop the broker with the most"
            " complete log, run 'kl log accept-loss' there, start it, and elect it with"
            " 'kl cluster elect --unclean'"
        )
    return (
        f"{name} has no leader and no complete replica{replicas};"
        " 'kl cluster elect --unclean' accepts the loss"
    )


async def look_at_disks(client: ClusterClient, view: ClusterView) -> tuple[list[str], set[int]]:
    """Return (the reasons why logs of live brokers refuse records, the brokers that did not respond).

    There are at most three reasons per broker. Each names the broker, a reason, and the number of logs with
    this reason. Waits for half of default.api.timeout.ms, so that other requests can follow.
    """
    timeout_ms = client.config.default_api_timeout_ms // 2
    silent: set[int] = set()

    async def look_at(node_id: int) -> list[str]:
        request = DescribeLogDirsRequest(None)
        try:
            response = (await client.call(request, node_id=node_id, timeout_ms=timeout_ms)).message
        except (ConnectionFailedError, RequestTimeoutError):
            silent.add(node_id)
            return []
        except KafkaliteError:
            return []
        reasons = Counter(each.offline_reason for each in response.partitions if each.offline_reason)
        return [
            f"broker {node_id} refuses records in {count:,} {'log' if count == 1 else 'logs'}: {reason}"
            for reason, count in reasons.most_common(3)
        ]

    found = await asyncio.gather(*(look_at(broker.node_id) for broker in view.live))
    return [reason for each in found for reason in each], silent


def problems(
    view: ClusterView,
    quorum: DescribeQuorumResponse | None = None,
    recovering: Iterable[RecoveringPartition] = (),
    refusals: Iterable[str] = (),
) -> list[str]:
    """Return a one-line description of each problem of the cluster. Pure.

    The arguments are the results of ``look``, ``look_at_quorum``, ``look_at_recovery`` and ``look_at_disks``.
    """
    found: list[str] = []
    known = {broker.node_id for broker in view.brokers if broker.is_fenced} | view.unreachable
    for node_id in silent_voters(quorum) if quorum is not None else ():
        if node_id not in known:
            found.append(f"controller {node_id} is silent")
    if view.controller_id < 0:
        missing = "no controller: metadata can't change, so neither leaders nor ISRs do"
        found.append(_lost_quorum(view) or missing)
    for broker in view.brokers:
        state = view.state_of(broker)
        if state == UNREACHABLE and view.controller_id >= 0:
            role = ", the controller," if broker.node_id == view.controller_id else ""
            found.append(f"broker {broker.node_id} ({broker.address}){role} does not respond")
        elif state not in {LIVE, UNREACHABLE}:
            why = ": it was killed, or does not respond" if state == FENCED else ""
            found.append(f"broker {broker.node_id} is {state}{why}")
    return found + _unwhole(view) + [describe_recovery(each) for each in recovering] + [*refusals]
