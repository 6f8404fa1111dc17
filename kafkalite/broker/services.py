"""The parts of one broker that its handlers use."""

# Tests: tests/broker/test_broker.py

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafkalite.broker.cluster.controller_channel import ControllerChannel
from kafkalite.broker.cluster.node_state import NodeState
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.coordination.coordinators import Coordinators
from kafkalite.broker.coordination.marker_writer import MarkerWriter
from kafkalite.broker.coordination.producer_ids import ProducerIds
from kafkalite.broker.coordination.transactions import Transactions
from kafkalite.broker.partitions.log_mover import LogMover
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.quotas.quota_manager import QuotaManager
from kafkalite.broker.replication.near_reads import NearReads
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.logins import Logins
from kafkalite.broker.server.metrics import Metrics
from kafkalite.clock import Clock
from kafkalite.raft.controller_node import ControllerNode

if TYPE_CHECKING:
    from kafkalite.broker.cluster.peers import PeerConnections
    from kafkalite.broker.replication.replica_manager import ReplicaManager
    from kafkalite.client.cluster.authentication import Authenticator
    from kafkalite.raft.raft_quorum import RaftQuorum


@dataclass(slots=True)
class Services:
    """The parts of one broker, which ``Broker`` creates and connects."""

    config: BrokerConfig
    cluster_id: str
    clock: Clock
    node: NodeState
    metrics: Metrics
    waiters: Waiters
    partitions: Partitions
    controller: ControllerNode
    channel: ControllerChannel  #: to the active controller, in this process or on another node
    producer_ids: ProducerIds
    coordinators: Coordinators  #: of the groups and transactions that this broker coordinates
    marker_writer: MarkerWriter
    transactions: Transactions
    quotas: QuotaManager
    near_reads: NearReads
    mover: LogMover
    logins: Logins
    on_broken: Callable[[BaseException], None]  #: called when an invariant is violated; stops the broker
    request_stop: Callable[[], object]  #: begins an orderly stop and returns at once
    authenticator: Authenticator | None = None  #: None in a single-node cluster
    peers: PeerConnections | None = None
    raft: RaftQuorum | None = None  #: None if this node does not vote
    replicas: ReplicaManager | None = None  #: None in a single-node cluster
    sessions: dict[int, Client] = field(default_factory=dict)  #: {broker id: sender of its last heartbeat}
    is_stopping: bool = False
