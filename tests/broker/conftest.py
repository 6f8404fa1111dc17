"""A broker on a disk in memory, and connections to it that speak the bare protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.broker.broker import Broker
from kafkalite.protocol.messages import data
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing.wire import WireClient


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(listeners="inproc://", log_dirs="/broker", filesystem=MemoryFileSystem()) as running:
        yield running


@pytest_asyncio.fixture
async def wire(broker: Broker) -> AsyncIterator[WireClient]:
    async with WireClient(broker.address) as client:
        yield client


@pytest.fixture
def fetch() -> Callable[..., Any]:
    """The fetch request for one partition."""

    def make(
        offset: int,
        topic: str = "t",
        partition: int = 0,
        *,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 2**20,
        epoch: int = -1,
    ) -> data.FetchRequest:
        asked = data.FetchPartition(topic, partition, epoch, offset, max_bytes)
        return data.FetchRequest(max_wait_ms, min_bytes, max_bytes, 0, [asked])

    return make
