"""A node that is no voter follows some voter; ``test_raft_quorum`` has a test with a real one."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kafkalite.errors import RequestTimedOutError, StorageError
from kafkalite.metadata import record_codec
from kafkalite.protocol.messages.cluster import FetchMetadataResponse, MetadataEntry
from kafkalite.raft.observer_quorum import ObserverQuorum


@contextlib.asynccontextmanager
async def observing(fetch, machine):
    observer = ObserverQuorum(fetch, node_id=9)
    observer.attach(machine)
    await observer.start()
    try:
        yield observer
    finally:
        await observer.stop()


async def eventually(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def test_an_observer_continues_after_failures_and_ignores_a_voter_that_is_behind(kit):
    records = record_codec.to_bytes(kit.topic(1))
    more = record_codec.to_bytes(kit.topic(2))
    answers = [
        ([MetadataEntry(3, len(records))], records),
        None,
        ([MetadataEntry(2, len(more))], more),
        ([MetadataEntry(3, len(records)), MetadataEntry(5, len(more))], records + more),
    ]

    async def fetch(_request):
        if not answers:
            await asyncio.sleep(3600)
        answer = answers.pop(0)
        if answer is None:
            raise RequestTimedOutError("no voter responds")
        entries, payload = answer
        return FetchMetadataResponse(0, None, 2, 5, False, entries), memoryview(payload)

    machine = kit.Machine()
    async with observing(fetch, machine) as observer:
        await eventually(lambda: observer.offset == 5)
        assert [offset for offset, _ in machine.applied] == [3, 5]


@pytest.mark.parametrize("payload", [b"", b"\xc1\xc1\xc1"])
async def test_an_observer_that_cannot_read_stops(payload, kit):
    async def fetch(_request):
        return FetchMetadataResponse(0, None, 2, 5, False, [MetadataEntry(3, 3)]), memoryview(payload)

    machine = kit.Machine()
    async with observing(fetch, machine):
        await eventually(lambda: machine.failure is not None)
    assert isinstance(machine.failure, StorageError)
