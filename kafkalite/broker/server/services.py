"""What a handler may use of its broker, and what it knows of the client that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import Waiters
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.clock import Clock
from kafkalite.errors import ClusterAuthorizationFailedError, InvalidRequestError, RequestTimedOutError
from kafkalite.model import NO_BROKER_EPOCH, IsolationLevel

if TYPE_CHECKING:
    from kafkalite.broker.cluster.authentication import Authenticator, Challenge
    from kafkalite.broker.cluster.controller_channel import ControllerChannel
    from kafkalite.broker.cluster.peers import PeerConnections
    from kafkalite.broker.coordination.coordinators import Coordinators
    from kafkalite.broker.coordination.producer_ids import ProducerIds
    from kafkalite.broker.coordination.transactions import Transactions
    from kafkalite.raft.controller_node import ControllerNode
    from kafkalite.raft.raft_quorum import RaftQuorum


@dataclass(slots=True)
class Services:
    """One broker's parts, as its composition root joined them."""

    config: BrokerConfig
    cluster_id: str
    clock: Clock
    metrics: Metrics
    waiters: Waiters
    partitions: Partitions
    controller: ControllerNode
    on_broken: Callable[[BaseException], None]  #: an invariant is broken: the broker must stop
    request_stop: Callable[[], object]  #: stop in order, soon
    channel: ControllerChannel  #: to the active controller, wherever it is
    producer_ids: ProducerIds
    incarnation_id: str  #: of this process: 32 hex digits
    coordinators: Coordinators  #: of groups and transactions, as far as they are here
    authenticator: Authenticator | None = None  #: None: a cluster of its own
    peers: PeerConnections | None = None
    raft: RaftQuorum | None = None  #: None: this node does not vote
    replicas: Any = None  #: the ReplicaManager of a cluster of several
    broker_epoch: int = NO_BROKER_EPOCH  #: of this process's registration
    sessions: dict[int, Client] = field(default_factory=dict)  #: on which each broker's heartbeats came last
    is_stopping: bool = False
    transactions: Transactions = field(init=False)  #: of the composition root, which joins it to the others
    is_isolated: bool = (
        False  #: no controller was reached for longer than a session lasts: perhaps fenced (R23)
    )


@dataclass(slots=True)
class Client:
    """One connection, as handlers see it."""

    peer: str  #: for logs: "127.0.0.1:53712" or "inproc"
    address: str  #: what this broker calls itself towards this client
    client_id: str | None = None
    listener: int = 0  #: which of this broker's listeners it came to
    node_id: int | None = None  #: as which node of the cluster it has proved itself
    challenge: Challenge | None = None  #: the proof it owes
    is_session: bool = False  #: a broker's heartbeats come here, and on no later connection


async def submit(services: Services, command: Any, *, timeout_ms: int) -> Answer:
    """Have the active controller decide ``command``; its reply, when this broker shows it.

    Raises RequestTimedOutError after ``timeout_ms``, unless that is 0; the command may take effect later.
    """
    return Reply(await services.channel.decide(command, timeout_ms=timeout_ms))


async def decide_for(services: Services, message: Any, client: Client) -> Answer:
    """Have this controller decide what another node asks in its own name."""
    if client.node_id != message.node_id:
        raise ClusterAuthorizationFailedError(
            f"node {client.node_id} asked in the name of node {message.node_id}"
        )
    return Reply(await services.channel.execute(message))


_IS_READ_COMMITTED: Final = {int(level): level is IsolationLevel.READ_COMMITTED for level in IsolationLevel}


def is_read_committed(isolation_level: int) -> bool:
    """What a request's isolation level asks for. Raises InvalidRequestError for one that nobody knows."""
    is_committed_only = _IS_READ_COMMITTED.get(isolation_level)
    if is_committed_only is None:
        raise InvalidRequestError(f"isolation level {isolation_level} is neither 0 nor 1")
    return is_committed_only


async def bounded(awaitable: Any, timeout_ms: int, what: str) -> Any:
    """``awaitable``'s result. Raises RequestTimedOutError after ``timeout_ms``, unless that is 0."""
    try:
        async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
            return await awaitable
    except TimeoutError:
        raise RequestTimedOutError(f"{what} within {timeout_ms} ms") from None
