"""Brokers on real sockets, and the requests that most tests send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from kafkalite.broker.broker import Broker
from kafkalite.protocol.messages import data
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.waiting import eventually


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Modules that say ON_BOTH_LOOPS run each test twice."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if getattr(getattr(item, "module", None), "ON_BOTH_LOOPS", False):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(log_dirs="/broker", filesystem=MemoryFileSystem()) as running:
        yield running


@pytest.fixture
def fetch() -> Callable[..., Any]:
    """The fetch request for one partition."""

    def make(offset: int, topic: str = "t", *, max_wait_ms: int = 0, max_bytes: int = 2**20) -> Any:
        asked = data.FetchPartition(topic, 0, -1, offset, max_bytes)
        return data.FetchRequest(max_wait_ms, 1, max_bytes, 0, [asked])

    return make


@pytest.fixture
def settled() -> Callable[..., Any]:
    """``eventually`` of ``proof.waiting``."""
    return eventually
