"""A broker on a disk in memory, and connections to it that speak the bare protocol."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.broker.broker import Broker
from kafkalite.protocol.messages import admin, data
from kafkalite.records.builder import build_batch
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
def new_topic() -> Callable[..., Any]:
    """The request that creates one topic: ``new_topic("t", partitions=2, **{"retention.ms": "1"})``."""

    def make(name: str, partitions: int = 1, **configs: str) -> admin.CreateTopicsRequest:
        return admin.CreateTopicsRequest(1000, False, [admin.NewTopic(name, partitions, 1, configs)])

    return make


@pytest.fixture
def batch_of() -> Callable[..., bytearray]:
    """A record batch of some values, stamped now."""

    def make(*values: bytes, timestamp_ms: int | None = None, **options: Any) -> bytearray:
        now_ms = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
        return bytearray(build_batch(list(values) or [b"value"], timestamps_ms=now_ms, **options))

    return make


@pytest.fixture
def produce() -> Callable[..., Any]:
    """The produce request for one batch: ``produce(batch, "t", acks=1)``, to be sent with the batch."""

    def make(
        batch: bytes | bytearray,
        topic: str = "t",
        partition: int = 0,
        *,
        acks: int = -1,
        timeout_ms: int = 5000,
    ) -> data.ProduceRequest:
        return data.ProduceRequest(acks, timeout_ms, [data.ProducePartition(topic, partition, len(batch))])

    return make


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
