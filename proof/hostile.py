"""Directed schedules of clients that harm others. Each violates a guarantee if its rule is removed.

``DIRECTED`` is {mutant: schedule}. A schedule returns the violation, or None.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from kafkalite.broker.broker import Broker
from kafkalite.broker.server.error_responses import translate
from kafkalite.broker.server.responses import PendingResults, Reply
from kafkalite.broker.server.server import REQUESTS_PER_TURN
from kafkalite.errors import broker_error
from kafkalite.protocol.messages.admin import CreateTopicsRequest, NewTopic
from kafkalite.protocol.messages.data import FetchPartition, FetchRequest, ProducePartition, ProduceRequest
from kafkalite.protocol.messages.metadata import DescribeClusterRequest
from kafkalite.records.builder import build_batch
from kafkalite.records.header import HEADER_BYTES, seal
from kafkalite.testing.wire import WireClient

_TOPIC: Final = "t"
_REQUESTS_OF_FLOOD: Final = 20 * REQUESTS_PER_TURN


async def _produce_garbage() -> str | None:
    """A batch with a garbage body and a correct checksum is refused (S22)."""
    batch = bytearray(build_batch([b"x" * 100] * 10, timestamps_ms=1))
    batch[HEADER_BYTES:] = b"\xff" * (len(batch) - HEADER_BYTES)
    seal(batch)
    async with _broker() as broker, WireClient(broker.address) as wire:
        await wire.call(CreateTopicsRequest(1_000, False, [NewTopic(_TOPIC, 1, 1, {})]))
        part = ProducePartition(_TOPIC, 0, len(batch))
        response = await wire.call(ProduceRequest(-1, 1_000, None, [part]), bytes(batch))
    if response.partitions[0].error_code:
        return None
    return "a batch was acknowledged that no consumer can read"


async def _fetch_repeatedly() -> str | None:
    """A request that names a partition twice is refused (S23)."""
    async with _broker() as broker, WireClient(broker.address) as wire:
        await wire.call(CreateTopicsRequest(1_000, False, [NewTopic(_TOPIC, 1, 1, {})]))
        parts = [FetchPartition(_TOPIC, 0, -1, 0, 100)] * 1_000
        response = await wire.call(FetchRequest(0, 0, 100, 0, parts))
    if response.error_code:
        return None
    return f"a request read one partition {len(response.partitions)} times"


async def _flood() -> str | None:
    """A connection with many requests at once is served in turns, and others in between (S24)."""
    async with _broker() as broker, WireClient(broker.address) as quiet, WireClient(broker.address) as flood:
        for one in (quiet, flood):
            await one.call(DescribeClusterRequest())
        *_, served = broker._server._connections  # the last one connected
        until = served.received_requests + _REQUESTS_OF_FLOOD
        frames = [flood.encode(DescribeClusterRequest()) for _ in range(_REQUESTS_OF_FLOOD)]
        flood.send_raw(b"".join(frames))
        most = 0
        while served.received_requests < until:
            before = served.received_requests
            await quiet.call(DescribeClusterRequest())
            most = max(most, served.received_requests - before)
    if most > _REQUESTS_OF_FLOOD // 2:
        return f"{most} requests of one connection were served before one of another"
    return None


async def _lose_track() -> str | None:
    """A produce request whose outcome is unknown gets a retriable error (R30)."""

    def fail(_result: Any, error: Exception) -> int:
        return translate(error).error_code

    response = PendingResults(asyncio.get_running_loop(), [0], fail, Reply)
    response.expect(0)
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    response.begin(1, "not acknowledged within %d ms").then(done.set_result)
    error = broker_error((await done).message[0], "")
    return None if error.retriable else f"the outcome is unknown, and the error is final: {error!r}"


def _broker() -> Broker:
    return Broker(listeners="127.0.0.1:0")


def _run(schedule: Callable[[], Any]) -> Callable[[], str | None]:
    def run() -> str | None:
        logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
        violation: str | None = asyncio.run(schedule())
        return violation

    return run


DIRECTED: Final = {
    "S22-unreadable": _run(_produce_garbage),
    "S23-repeated": _run(_fetch_repeatedly),
    "S24-all-at-once": _run(_flood),
    "R30-unknown-is-final": _run(_lose_track),
}
