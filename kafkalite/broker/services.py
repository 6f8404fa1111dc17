"""The parts of one broker, as the handlers receive them.

Each family of handlers declares the parts that it uses as a Protocol; ``handlers.HANDLERS`` checks that
this class has them all. Only the broker, which creates it, depends on the whole class.
"""

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
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.metrics import Metrics
from kafkalite.clock import Clock
from kafkalite.raft.controller_node import ControllerNode

if TYPE_CHECKING:
    from kafkalite.broker.cluster.authentication import Authenticator
    from kafkalite.broker.cluster.peers import PeerConnections
    from kafkalite.broker.replication.replica_manager import ReplicaManager
    from kafkalite.raft.raft_quorum import RaftQuorum


@dataclass(slots=True)
class Services:
    """One broker's parts, as its composition root joined them."""

    config: BrokerConfig
    cluster_id: str
    clock: Clock
    node: NodeState
    metrics: Metrics
    waiters: Waiters
    partitions: Partitions
    controller: ControllerNode
    channel: ControllerChannel  #: to the active controller, wherever it is
    producer_ids: ProducerIds
    coordinators: Coordinators  #: of the groups and transactions that are coordinated here
    marker_writer: MarkerWriter
    transactions: Transactions
    on_broken: Callable[[BaseException], None]  #: called when an invariant is broken: the broker must stop
    request_stop: Callable[[], object]  #: begins an orderly stop and returns at once
    authenticator: Authenticator | None = None  #: None in a single-node cluster
    peers: PeerConnections | None = None
    raft: RaftQuorum | None = None  #: None: this node does not vote
    replicas: ReplicaManager | None = None  #: None in a single-node cluster
    sessions: dict[int, Client] = field(default_factory=dict)  #: where each broker's heartbeats arrived last
    is_stopping: bool = False
