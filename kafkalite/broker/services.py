"""What a handler may use of its broker, and what it knows of the client that asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafkalite.broker.answers import Answer, Reply
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.metrics import Metrics
from kafkalite.broker.partitions import Partitions
from kafkalite.broker.waiters import Waiters
from kafkalite.clock import Clock
from kafkalite.errors import RequestTimedOutError

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
    on_broken: Callable[[BaseException], None]  #: an invariant is broken: the broker must stop
    is_stopping: bool = False


@dataclass(slots=True)
class Client:
    """One connection, as handlers see it."""

    peer: str  #: for logs: "127.0.0.1:53712" or "inproc"
    address: str  #: what this broker calls itself towards this client
    client_id: str | None = None


async def submit(services: Services, command: Any, *, timeout_ms: int) -> Answer:
    """Have the controller decide ``command``; its reply, when this broker shows it.

    Raises RequestTimedOutError after ``timeout_ms``, unless that is 0; the command may take effect later.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
            return Reply(await services.controller.submit(command))
    except TimeoutError:
        raise RequestTimedOutError(f"the controller did not answer within {timeout_ms} ms") from None
