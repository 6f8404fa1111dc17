"""Large requests are served in steps, with other connections in between (S24)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.handlers import fetch as fetch_handler
from kafkalite.broker.handlers import metadata as metadata_handler
from kafkalite.broker.server import turns
from kafkalite.broker.server.responses import Pending, Refusal, Reply
from kafkalite.broker.server.turns import PARTITIONS_PER_TURN, InTurns
from kafkalite.clock import SystemClock
from kafkalite.errors import ErrorCode
from kafkalite.model import LATEST
from kafkalite.protocol.messages import data, metadata
from kafkalite.records.header import check
from kafkalite.testing.wire import WireClient

Make = Callable[..., Any]

COUNT = 3 * PARTITIONS_PER_TURN + 7


class Services:
    def __init__(self) -> None:
        self.broken: list[BaseException] = []
        self.clock = SystemClock()

    def on_broken(self, error: BaseException) -> None:
        self.broken.append(error)


async def test_one_step_runs_in_each_iteration() -> None:
    steps: list[int] = []

    def run() -> Any:
        for number in range(3):
            steps.append(number)
            yield
        return Reply("done")

    pending = InTurns(Services(), run())
    for count in (1, 2, 3):
        assert (len(steps), pending.is_done) == (count, False)
        await asyncio.sleep(0)
    assert pending.response == Reply("done")


async def test_a_step_that_fails_refuses_the_request() -> None:
    def run(error: Exception) -> Any:
        yield
        raise error

    services = Services()
    for error, code in ((ValueError("x"), ErrorCode.UNKNOWN_SERVER_ERROR), (AssertionError(), -1)):
        pending = InTurns(services, run(error))
        await asyncio.sleep(0)
        assert isinstance(pending.response, Refusal) and pending.response.error_code == code
    assert len(services.broken) == 1


async def test_a_cancelled_response_takes_no_further_step() -> None:
    steps: list[int] = []
    inner = Pending()

    def run() -> Any:
        for number in range(9):
            steps.append(number)
            yield
        return inner

    pending = InTurns(Services(), run())
    await asyncio.sleep(0)
    pending.cancel()
    await asyncio.sleep(0)
    assert steps == [0, 1]
    chained = InTurns(Services(), run())
    for _ in range(9):
        await asyncio.sleep(0)
    chained.cancel()
    assert inner.is_done


@pytest.fixture
async def wire(broker: Broker, new_topic: Make) -> Any:
    async with WireClient(broker.address) as wire:
        await wire.call(new_topic("t", COUNT))
        yield wire


@pytest.mark.parametrize("acks", [1, -1])
async def test_batches_of_a_large_request_and_of_the_next_one_keep_their_order(
    wire: WireClient, batch_of: Make, acks: int
) -> None:
    batches = [batch_of(b"%d" % number) for number in range(2 * COUNT)]
    partitions = [data.ProducePartition("t", number, len(batches[number])) for number in range(COUNT)]
    wire.send(data.ProduceRequest(acks, 5_000, None, partitions), *batches[:COUNT])
    last = COUNT - 1
    second = data.ProduceRequest(acks, 5_000, None, [data.ProducePartition("t", last, len(batches[-1]))])
    wire.send(second, batches[-1])
    first, later = [(await wire.response()).message for _ in range(2)]
    assert [(one.partition, one.error_code, one.base_offset) for one in first.partitions] == [
        (number, 0, 0) for number in range(COUNT)
    ]
    assert later.partitions[0].base_offset == 1


async def test_a_large_fetch_reads_and_waits_like_a_small_one(
    wire: WireClient, batch_of: Make, produce: Make
) -> None:
    def fetch(max_wait_ms: int) -> data.FetchRequest:
        asked = [data.FetchPartition("t", number, -1, 0, 1 << 20) for number in range(COUNT)]
        return data.FetchRequest(max_wait_ms, 1, 1 << 20, 0, asked)

    empty = await wire.call(fetch(0))
    assert [one.partition for one in empty.partitions] == list(range(COUNT))
    assert not wire.last_payload
    started_s = time.monotonic()
    wire.send(fetch(60_000))
    batch = batch_of(b"x")
    async with WireClient(wire._address) as other:
        await other.call(
            data.ProduceRequest(-1, 1000, None, [data.ProducePartition("t", COUNT - 1, len(batch))]), batch
        )
    response = await wire.response()
    assert response.message.partitions[-1].length_bytes == len(response.payload) == len(batch)
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("step", [1, 2])
async def test_an_append_between_the_steps_of_a_large_fetch_ends_its_wait(
    wire: WireClient, batch_of: Make, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """``step``: during the first read, or during the one that follows an append without enough bytes."""
    read, steps, clock = fetch_handler._read, 0, SystemClock()

    def append(find: Any) -> None:
        batch = batch_of(b"x")
        find("t", 0).append(batch, check(batch), clock.wall_ms())

    def read_and_append(services: Any, message: Any, partitions: Any, *rest: Any) -> Any:
        nonlocal steps
        result = read(services, message, partitions, *rest)
        steps += partitions[0].partition == PARTITIONS_PER_TURN
        if partitions[0].partition == PARTITIONS_PER_TURN and steps <= step:
            append(services.partitions.leader)  # partition 0 was read in the step before
        return result

    monkeypatch.setattr(fetch_handler, "_read", read_and_append)
    asked = [data.FetchPartition("t", number, -1, 0, 1 << 20) for number in range(COUNT)]
    min_bytes = step * len(batch_of(b"x"))
    async with asyncio.timeout(30):
        response = await wire.call(data.FetchRequest(60_000, min_bytes, 1 << 20, 0, asked))
    assert response.partitions[0].length_bytes == min_bytes


async def test_other_large_requests_have_all_results(wire: WireClient) -> None:
    listed = await wire.call(
        data.ListOffsetsRequest(0, [data.ListOffsetsPartition("t", n, -1, LATEST) for n in range(COUNT)])
    )
    ends = await wire.call(
        data.OffsetsForLeaderEpochRequest([data.EpochPartition("t", n, -1, 0) for n in range(COUNT)])
    )
    deleted = await wire.call(
        data.DeleteRecordsRequest(1000, [data.DeleteRecordsPartition("t", n, 0) for n in range(COUNT)])
    )
    for answer in (listed, ends, deleted):
        assert [(one.partition, one.error_code) for one in answer.partitions] == [
            (n, 0) for n in range(COUNT)
        ]
    refused = data.ProduceRequest(7, 1, None, [data.ProducePartition("t", n, 0) for n in range(COUNT)])
    wire.send(refused)
    assert (await wire.response()).message.error_code == ErrorCode.INVALID_REQUIRED_ACKS


async def test_s24_a_large_request_delays_others_by_one_step(
    broker: Broker, wire: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in partitions, because time depends on the machine."""
    seen: list[int] = []
    run = turns._part

    def counting(request: Any, items: list[Any], start: int, end: int) -> Any:
        seen.append(len(items))
        return run(request, items, start, end)

    monkeypatch.setattr(turns, "_part", counting)
    asked = [data.ListOffsetsPartition("t", n, -1, LATEST) for n in range(COUNT)]
    wire.send(data.ListOffsetsRequest(0, asked))
    await wire.response()
    assert seen == [PARTITIONS_PER_TURN] * 3 + [7]


async def test_s24_metadata_of_few_topics_with_many_partitions_is_served_in_turns(
    wire: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_taken: list[object] = []

    class Counted(InTurns):
        def _step(self) -> None:
            turns_taken.append(None)
            super()._step()

    monkeypatch.setattr(metadata_handler, "InTurns", Counted)
    monkeypatch.setattr(metadata_handler, "TOPICS_PER_TURN", COUNT // 2)
    for topics in (None, ["t", "missing"]):
        turns_taken.clear()
        answer = await wire.call(metadata.MetadataRequest(topics, False))
        assert len(answer.topics[0].partitions) == COUNT
        assert len(turns_taken) == 2


@pytest.mark.parametrize("creates", [False, True])
async def test_s24_metadata_of_many_topics_takes_many_steps(
    broker: Broker, wire: WireClient, monkeypatch: pytest.MonkeyPatch, creates: bool
) -> None:
    """Each step looks at ten names, or describes topics with ten partitions or more."""
    steps = 0
    describe = metadata_handler._steps

    def counting(*arguments: Any) -> Any:
        nonlocal steps
        generator = describe(*arguments)
        while True:
            steps += 1
            try:
                next(generator)
            except StopIteration as end:
                return end.value
            yield

    monkeypatch.setattr(metadata_handler, "_steps", counting)
    monkeypatch.setattr(metadata_handler, "TOPICS_PER_TURN", 10)
    names = [f"n{number:02}" for number in range(35)]
    answer = await wire.call(metadata.MetadataRequest([*names, "t", names[0]], creates))
    assert [one.name for one in answer.topics] == [*names, "t"]
    assert {one.error_code for one in answer.topics[:-1]} == {0 if creates else 3}
    assert len(answer.topics[-1].partitions) == COUNT
    assert steps == (4 if creates else 8)  # 3 for 36 names, 4 to describe them, and the last
    if creates:
        steps = 0
        everything = await wire.call(metadata.MetadataRequest(None, False))
        assert [one.name for one in everything.topics] == [*names, "t"]
        assert steps > 4
