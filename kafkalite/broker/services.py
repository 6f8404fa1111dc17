"""What a handler may use of its broker, and what it knows of the client that asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.metrics import Metrics
from kafkalite.broker.partitions import Partitions
from kafkalite.broker.waiters import Waiters
from kafkalite.clock import Clock

if TYPE_CHECKING:
    from kafkalite.raft.controller_node import ControllerNode


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
    is_stopping: bool = False


@dataclass(slots=True)
class Client:
    """One connection, as handlers see it."""

    peer: str  #: for logs: "127.0.0.1:53712" or "inproc"
    address: str  #: what this broker calls itself towards this client
    client_id: str | None = field(default=None)
