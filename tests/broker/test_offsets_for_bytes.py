"""OffsetsForBytes (``handlers/data.py``) against a broker in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.errors import ErrorCode
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import data
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check
from kafkalite.testing.wire import WireClient

Make = Callable[..., Any]


async def ask(
    wire: WireClient,
    start: int,
    end: int,
    max_bytes: int,
    *,
    partition: int = 0,
    epoch: int = -1,
    level: int = 0,
) -> Any:
    asked = data.OffsetsForBytesPartition("t", partition, epoch, start, end, max_bytes)
    (found,) = (await wire.call(data.OffsetsForBytesRequest(level, [asked]))).partitions
    return found


async def test_bytes_reach_complete_batches(
    wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of(b"a", b"b", b"c")
    size = len(batch)
    for _ in range(4):
        await wire.call(produce(batch), batch)

    async def found(start: int, end: int, max_bytes: int) -> tuple[int, int, int]:
        return (await ask(wire, start, end, max_bytes))[4:]

    assert await found(0, 12, 4 * size) == (12, 4 * size, 4 * size)
    assert await found(0, 12, 4 * size - 1) == (9, 3 * size, 4 * size)
    assert await found(0, 12, 0) == (3, size, 4 * size)
    assert await found(1, 12, 2 * size) == (6, 2 * size, 4 * size)
    assert await found(1, 2, 0) == (2, size, size)
    assert await found(4, 10, 10 * size) == (10, 3 * size, 3 * size)
    assert await found(0, 99, 10 * size) == (12, 4 * size, 4 * size)
    assert await found(12, 12, 1) == (12, 0, 0)
    await wire.call(data.DeleteRecordsRequest(1000, [data.DeleteRecordsPartition("t", 0, 7)]))
    assert await found(0, 12, size) == (9, size, 2 * size)
    assert await found(0, 6, size) == (6, 0, 0)


async def test_with_read_committed_the_range_ends_at_the_last_stable_offset(
    broker: Broker, wire: WireClient, new_topic: Make, batch_of: Make, produce: Make
) -> None:
    await wire.call(new_topic("t", durability="page-cache"))
    batch = batch_of(b"a")
    await wire.call(produce(batch, acks=1), batch)
    part = build_batch([b"v"], producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)
    broker.partitions.leader("t", 0).append(part, check(part), 1_700_000_000_000, -1, is_verified=True)
    whole = await ask(wire, 0, 9, 2**20)
    assert whole[4:] == (2, len(batch) + len(part), len(batch) + len(part))
    assert (await ask(wire, 0, 9, 2**20, level=1))[4:] == (1, len(batch), len(batch))
    assert (await ask(wire, 2, 2, 2**20, level=1)).error_code == ErrorCode.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize(
    ("start", "end", "options", "code"),
    [
        (0, 1, {"partition": 7}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (0, 1, {"epoch": 5}, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (0, 1, {"epoch": -2}, ErrorCode.FENCED_LEADER_EPOCH),
        (-1, 1, {}, ErrorCode.INVALID_REQUEST),
        (2, 1, {}, ErrorCode.INVALID_REQUEST),
        (2, 3, {}, ErrorCode.OFFSET_OUT_OF_RANGE),
    ],
)
async def test_errors_are_returned_per_partition(
    wire: WireClient,
    new_topic: Make,
    batch_of: Make,
    produce: Make,
    start: int,
    end: int,
    options: dict[str, int],
    code: ErrorCode,
) -> None:
    await wire.call(new_topic("t"))
    batch = batch_of(b"a")
    await wire.call(produce(batch), batch)
    found = await ask(wire, start, end, 100, **options)
    assert (found.error_code, found[4:]) == (code, (-1, 0, 0))


async def test_an_unknown_isolation_level_is_refused(wire: WireClient) -> None:
    answer = await wire.call(data.OffsetsForBytesRequest(2, []))
    assert isinstance(answer, RequestError) and answer.error_code == ErrorCode.INVALID_REQUEST
