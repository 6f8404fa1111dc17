"""Transactions over the wire: hand-written producers, the real coordinator, and readers.

Covers ``transactions.py`` and ``marker_writer.py`` of the coordination room, and
``handlers/transactions.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Self

import pytest

from kafkalite.broker.coordination.internal_topics import TRANSACTION
from kafkalite.broker.server.responses import settled
from kafkalite.client.consumer.isolation import AbortedFilter
from kafkalite.errors import (
    BrokerError,
    ClientError,
    ErrorCode,
    NotEnoughReplicasAfterAppendError,
    broker_error,
)
from kafkalite.model import IsolationLevel
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import data, groups, transactions
from kafkalite.records.batch import iter_batches
from kafkalite.records.builder import build_batch
from kafkalite.testing import Cluster
from kafkalite.testing.faults import delay_next, disconnect_next, drop_next, fail_next
from kafkalite.testing.wire import WireClient
from proof.mutants import without
from proof.waiting import eventually, settle

TIMEOUT_MS = 60_000
LOST = (OSError, ClientError)


def checked(message: Any) -> Any:
    """Return the response. Raises the BrokerError of a refused request or of the error code in it."""
    if message.error_code:
        raise broker_error(message.error_code, message.error_message or "")
    return message


class Wires:
    """One connection to each broker of a cluster, and the search for the right one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._open: dict[tuple[str, object], WireClient] = {}
        self._locks: dict[tuple[str, object], asyncio.Lock] = {}
        self.payload = memoryview(b"")  #: of the last response

    async def call(self, node_id: int, request: Any, *payload: Any, lane: object = None) -> Any:
        """Return that broker's response. Raises ConnectionError, BrokerError of a refusal."""
        broker = self.cluster.brokers[node_id]
        place = (broker.address, lane)
        async with self._locks.setdefault(place, asyncio.Lock()):
            wire = self._open.get(place)
            if wire is None or wire.is_closed:
                wire = self._open[place] = await WireClient(broker.address).__aenter__()
            answer = await wire.call(request, *payload)
            self.payload = wire.last_payload
        if isinstance(answer, RequestError):
            raise broker_error(answer.error_code, answer.error_message or "")
        return answer

    def running(self) -> list[int]:
        return [node_id for node_id, broker in self.cluster.brokers.items() if broker.is_running]

    async def find(self, key: str, kind: int = TRANSACTION) -> int:
        async with asyncio.timeout(20):
            while True:
                for node_id in self.running():
                    try:
                        answer = await self.call(node_id, groups.FindCoordinatorRequest(kind, [key]))
                    except (*LOST, BrokerError):
                        continue
                    (found,) = answer.coordinators
                    if not found.error_code and found.node_id in self.running():
                        return int(found.node_id)
                await asyncio.sleep(0.01)

    async def ask(self, key: str, request: Any, kind: int = TRANSACTION) -> Any:
        """Return the response of the coordinator. Retriable errors are retried. Raises BrokerError."""
        async with asyncio.timeout(30):
            while True:
                try:
                    return checked(await self.call(await self.find(key, kind), request))
                except BrokerError as error:
                    if not error.retriable:
                        raise
                except LOST:
                    pass
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for wire in self._open.values():
            await wire.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def fetch(self, topic: str, partition: int = 0, *, committed: bool = True) -> list[bytes]:
        """Return all records of a partition that a reader sees now."""
        values: list[bytes] = []
        offset = 0
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        while True:
            leader = self.cluster.leader(topic, partition)
            asked = data.FetchPartition(topic, partition, -1, offset, 2**20)
            answer = await self.call(leader, data.FetchRequest(0, 1, 2**20, level, [asked]))
            (fetched,) = answer.partitions
            checked(fetched)
            if not fetched.length_bytes:
                return values
            dropped = AbortedFilter(fetched.aborted)
            for batch in iter_batches(self.payload):
                header = batch.header
                offset = header.next_offset
                flags = header.attributes & 0x30
                if flags and dropped.drops(batch.buffer, 0, flags, offset):
                    continue
                values += [record.value for record in batch if record.value is not None]

    async def last_stable_offset(self, topic: str, partition: int = 0) -> tuple[int, int]:
        """Return (last stable offset, high watermark) of the leader."""
        leader = self.cluster.leader(topic, partition)
        asked = data.FetchPartition(topic, partition, -1, 0, 1)
        answer = await self.call(leader, data.FetchRequest(0, 0, 1, 0, [asked]))
        (fetched,) = answer.partitions
        return fetched.last_stable_offset, fetched.high_watermark


class RawProducer:
    """A transactional producer: (producer id, epoch) and the next sequence of each partition."""

    def __init__(self, wires: Wires, name: str = "txn", timeout_ms: int = TIMEOUT_MS) -> None:
        self.wires = wires
        self.name = name
        self.timeout_ms = timeout_ms
        self.producer_id = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}
        self.timestamp_ms = time.time_ns() // 1_000_000  # the same at each retry (R28)

    async def init(self) -> Self:
        request = data.InitProducerIdRequest(self.name, self.timeout_ms, self.producer_id, self.epoch)
        answer = await self.wires.ask(self.name, request)
        self._take(answer.producer_id, answer.producer_epoch)
        return self

    def _take(self, producer_id: int, epoch: int) -> None:
        self.producer_id, self.epoch = producer_id, epoch
        self.sequences.clear()

    def batch(self, *values: bytes, sequence: int = 0) -> bytearray:
        return build_batch(
            list(values),
            timestamps_ms=self.timestamp_ms,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            transactional=True,
        )

    async def send(self, topic: str, *values: bytes, partition: int = 0, retries: bool = True) -> int:
        """Return the base offset. Raises BrokerError; with ``retries``, retriable errors are retried."""
        key = (topic, partition)
        sequence = self.sequences.get(key, 0)
        batch = self.batch(*values, sequence=sequence)
        part = data.ProducePartition(topic, partition, len(batch))
        async with asyncio.timeout(30):
            while True:
                leader = self.wires.cluster.leader(topic, partition)
                try:
                    if leader < 0:
                        raise ConnectionError("no leader")
                    request = data.ProduceRequest(-1, 2_000, self.name, [part])
                    answer = await self.wires.call(leader, request, batch, lane=self)
                    (result,) = answer.partitions
                    checked(result)
                except BrokerError as error:
                    if not (error.retriable and retries):
                        raise
                except LOST:
                    if not retries:
                        raise
                else:
                    self.sequences[key] = sequence + len(values)
                    return int(result.base_offset)
                await asyncio.sleep(0.005)

    async def end(self, *, is_commit: bool = True) -> None:
        request = transactions.EndTxnRequest(self.name, self.producer_id, self.epoch, is_commit)
        answer = await self.wires.ask(self.name, request)
        self._take(answer.producer_id, answer.producer_epoch)

    async def describe(self) -> transactions.DescribedTransaction:
        request = transactions.DescribeTransactionsRequest([self.name])
        answer = await self.wires.ask(self.name, request)
        (described,) = answer.transactions
        assert isinstance(described, transactions.DescribedTransaction)
        return described

    async def until(self, state: str) -> None:
        async def is_reached() -> bool:
            return (await self.describe()).state == state

        await eventually(is_reached)


@asynccontextmanager
async def one_broker(**settings: Any) -> AsyncIterator[tuple[Cluster, Wires]]:
    async with Cluster(**settings) as cluster, Wires(cluster) as wires:
        await cluster.create_topic("t", partitions=2)
        yield cluster, wires


# --- one broker


async def test_a_committed_transaction_is_read_and_an_aborted_one_is_not() -> None:
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1", b"2")
        await producer.send("t", b"3", partition=1)
        assert await wires.fetch("t") == []
        assert await wires.fetch("t", committed=False) == [b"1", b"2"]
        await producer.end()
        await producer.send("t", b"4")
        await producer.end(is_commit=False)
        await producer.send("t", b"5")
        await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.fetch("t") == [b"1", b"2", b"5"]
        assert await wires.fetch("t", 1) == [b"3"]
        assert await wires.fetch("t", committed=False) == [b"1", b"2", b"4", b"5"]
        assert await wires.last_stable_offset("t") == (7, 7)


async def test_the_end_of_a_transaction_may_be_repeated_but_not_reversed() -> None:
    """R32: the response may be lost. The opposite of a decision is refused."""
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1")
        ended = transactions.EndTxnRequest("txn", producer.producer_id, producer.epoch, True)
        first = await wires.ask("txn", ended)
        assert first.producer_epoch == producer.epoch + 1, "R31"
        assert await wires.ask("txn", ended) == first
        await producer.until("CompleteCommit")
        assert await wires.ask("txn", ended) == first
        with pytest.raises(BrokerError) as caught:
            await wires.ask("txn", ended._replace(is_commit=False))
        assert caught.value.code == ErrorCode.INVALID_TXN_STATE
        assert await wires.fetch("t") == [b"1"]


async def test_a_zombie_is_refused_and_harms_nothing() -> None:
    """R34: a new producer of the id aborts the open transaction and fences the previous producer."""
    async with one_broker() as (_, wires):
        zombie = await RawProducer(wires).init()
        await zombie.send("t", b"zombie")
        successor = await RawProducer(wires).init()
        assert (successor.producer_id, successor.epoch) > (zombie.producer_id, zombie.epoch)
        await successor.send("t", b"new")
        for act in (zombie.send("t", b"late"), zombie.send("t", b"late", partition=1), zombie.end()):
            with pytest.raises(BrokerError) as caught:
                await act
            assert caught.value.code in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
        await successor.end()
        await successor.until("CompleteCommit")
        assert await wires.fetch("t") == [b"new"]
        assert await wires.fetch("t", 1) == []
        assert await wires.last_stable_offset("t") == (4, 4)


async def test_an_internal_topic_is_refused_before_it_is_part_of_the_transaction() -> None:
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        with pytest.raises(BrokerError) as caught:
            await producer.send("__transaction_state", b"no")
        assert caught.value.code == ErrorCode.INVALID_TOPIC_EXCEPTION
        await producer.until("Empty")


async def test_a_late_batch_does_not_join_the_next_transaction() -> None:
    """R31: nor does it hang in the log (KIP-890)."""
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1")
        late = await RawProducer(wires).init()  # the same transaction over a slow network
        late.producer_id, late.epoch = producer.producer_id, producer.epoch
        await wires.ask("txn", data.InitProducerIdRequest("txn", TIMEOUT_MS, -1, -1))
        for partition in (0, 1):
            with pytest.raises(BrokerError) as caught:
                await late.send("t", b"late", partition=partition)
            assert caught.value.code in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
        assert await wires.last_stable_offset("t", 1) == (0, 0)


async def test_a_transaction_is_aborted_by_timeout_and_its_producer_fenced() -> None:
    """R34"""
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires, timeout_ms=150).init()
        await producer.send("t", b"1")
        await producer.until("CompleteAbort")
        assert await wires.last_stable_offset("t") == (2, 2)
        assert await wires.fetch("t") == []
        with pytest.raises(BrokerError) as caught:
            await producer.send("t", b"2")
        assert caught.value.code == ErrorCode.INVALID_PRODUCER_EPOCH
        with pytest.raises(BrokerError):
            await producer.end()
        with pytest.raises(BrokerError) as caught:
            await producer.init()
        assert caught.value.code == ErrorCode.PRODUCER_FENCED
        producer = await RawProducer(wires).init()
        await producer.send("t", b"3")
        await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.fetch("t") == [b"3"]


async def test_batches_in_flight_keep_their_order_behind_the_first_one() -> None:
    """R31: the first waits for the coordinator, the others for the first."""
    async with one_broker() as (cluster, wires):
        producer = await RawProducer(wires).init()
        async with WireClient(cluster.broker.address) as wire:
            for number in range(5):
                batch = producer.batch(b"%d" % number, sequence=number)
                part = data.ProducePartition("t", 0, len(batch))
                wire.send(data.ProduceRequest(-1, 2_000, "txn", [part]), batch)
            offsets = [checked((await wire.response()).message).partitions[0] for _ in range(5)]
        assert [(one.error_code, one.base_offset) for one in offsets] == [(0, n) for n in range(5)]
        await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.fetch("t") == [b"0", b"1", b"2", b"3", b"4"]


async def test_one_request_for_many_partitions_asks_the_coordinator_once() -> None:
    async with one_broker() as (cluster, wires):
        producer = await RawProducer(wires).init()
        batches = [producer.batch(b"x"), producer.batch(b"y")]
        parts = [data.ProducePartition("t", number, len(batch)) for number, batch in enumerate(batches)]
        answer = await wires.call(1, data.ProduceRequest(-1, 2_000, "txn", parts), b"".join(batches))
        assert [part.error_code for part in answer.partitions] == [0, 0]
        described = await producer.describe()
        assert described.state == "Ongoing"
        assert {(at.topic, at.partition) for at in described.partitions} == {("t", 0), ("t", 1)}
        shard = cluster.broker.coordinators.transactions("txn")
        assert shard.end_offset == 2, "one record for the id, one for both partitions"


async def test_batches_outside_a_transaction_are_refused() -> None:
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()

        async def outcome(name: str | None, *, acks: int = -1) -> int:
            batch = producer.batch(b"x")
            part = data.ProducePartition("t", 0, len(batch))
            answer = await wires.call(1, data.ProduceRequest(acks, 2_000, name, [part]), batch)
            return int(answer.partitions[0].error_code)

        assert await outcome(None) == ErrorCode.INVALID_RECORD
        assert await outcome("another") == ErrorCode.INVALID_PRODUCER_ID_MAPPING
        producer.epoch += 1
        assert await outcome("txn") in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
        producer.epoch -= 1
        assert await outcome("txn", acks=1) == ErrorCode.INVALID_REQUIRED_ACKS
        assert await outcome("txn") == 0


async def test_an_empty_transaction_ends_at_once() -> None:
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        for is_commit in (True, False, True):
            await producer.end(is_commit=is_commit)
        await producer.send("t", b"1")
        await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.fetch("t") == [b"1"]


async def test_a_deleted_topic_does_not_delay_the_end() -> None:
    async with one_broker() as (cluster, wires):
        await cluster.create_topic("gone")
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1")
        await producer.send("gone", b"1")
        async with cluster.admin() as admin:
            await admin.delete_topics(["gone"])
        await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.fetch("t") == [b"1"]


async def test_transactions_are_listed_and_described() -> None:
    async with one_broker() as (_, wires):
        one, two = await RawProducer(wires, "one").init(), await RawProducer(wires, "two").init()
        await one.send("t", b"1")
        await two.end()
        listed = checked(await wires.call(1, transactions.ListTransactionsRequest([], 0))).transactions
        assert [(it.transactional_id, it.state) for it in listed] == [
            ("one", "Ongoing"),
            ("two", "CompleteCommit"),
        ]
        described = await one.describe()
        assert described.producer_id == one.producer_id
        assert described.coordinator_epoch == 0
        unknown = transactions.DescribeTransactionsRequest(["nobody"])
        answer = await wires.call(1, unknown)
        assert answer.transactions[0].error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


async def test_offsets_take_effect_with_the_transaction() -> None:
    """R35"""
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()

        async def committed(*, stable: bool = False) -> tuple[int, int]:
            asked = groups.OffsetFetchRequest("g", "", -1, stable, [groups.GroupPartition("t", 0)])
            (offset,) = (await wires.ask("g", asked, kind=0)).offsets
            return offset.offset, offset.error_code

        async def commit(offset: int) -> None:
            one = groups.CommittedOffset("t", 0, offset, -1, None, -1, "", 0, None)
            request = groups.TxnOffsetCommitRequest(
                "txn", producer.producer_id, producer.epoch, "g", "", -1, None, [one]
            )
            answer = await wires.ask("g", request, kind=0)
            assert answer.offsets[0].error_code == 0

        await commit(7)
        assert await committed() == (-1, 0)
        assert (await committed(stable=True))[1] == ErrorCode.UNSTABLE_OFFSET_COMMIT
        await producer.end()
        await producer.until("CompleteCommit")
        assert await committed(stable=True) == (7, 0)
        await commit(9)
        await producer.end(is_commit=False)
        await producer.until("CompleteAbort")
        assert await committed(stable=True) == (7, 0)


async def test_a_restarted_broker_continues_its_transactions() -> None:
    """R36: open and decided transactions are replayed, and missing markers are sent."""
    async with one_broker() as (cluster, wires):
        open_one, ended = await RawProducer(wires, "open").init(), await RawProducer(wires, "ended").init()
        await open_one.send("t", b"open")
        await ended.send("t", b"ended", partition=1)
        sender = cluster.broker._services.transactions.sender
        sender._route = lambda work, partitions: None  # type: ignore[method-assign]  # no marker leaves
        await ended.end()
        assert (await ended.describe()).state == "PrepareCommit"
        await cluster.kill(1)
        await cluster.start(1)
        await ended.until("CompleteCommit")
        assert await wires.fetch("t", 1) == [b"ended"]
        await open_one.send("t", b"more")
        await open_one.end()
        await open_one.until("CompleteCommit")
        assert await wires.fetch("t") == [b"open", b"more"]


async def test_a_hanging_transaction_is_found_and_aborted() -> None:
    """KIP-664, and what R31-unverified leads to."""
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        late = RawProducer(wires)
        late.producer_id, late.epoch = producer.producer_id, producer.epoch
        await producer.end()
        with pytest.raises(BrokerError) as caught:
            await late.send("t", b"late")
        assert caught.value.code in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
        with without("R31-unverified"):
            await late.send("t", b"late")
        assert await wires.last_stable_offset("t") == (0, 1)
        asked = transactions.DescribeProducersRequest([transactions.TxnPartition("t", 0)])
        (active,) = checked(await wires.call(1, asked)).partitions[0].producers
        assert active.transaction_start_offset == 0
        abort = transactions.AbortTransactionRequest("t", 0, active.producer_id, 0)
        with pytest.raises(BrokerError):
            await wires.call(1, abort._replace(start_offset=5))
        checked(await wires.call(1, abort))
        assert await wires.last_stable_offset("t") == (2, 2)
        assert await wires.fetch("t") == []
        with pytest.raises(BrokerError):
            await wires.call(1, abort)


# --- transaction groups


class Team:
    """Writers of an application's batches, and the process that decides about them."""

    def __init__(self, wires: Wires, name: str = "app") -> None:
        self.wires = wires
        self.name = name
        self._identities: dict[str, tuple[int, int]] = {}

    async def join(self, batch_id: int, member: str, timeout_ms: int = TIMEOUT_MS) -> RawProducer | None:
        request = transactions.JoinTxnGroupRequest(self.name, batch_id, member, timeout_ms)
        answer = await self.wires.ask(self.name, request)
        if answer.is_finished:
            return None
        producer = RawProducer(self.wires, self.name)
        producer.producer_id, producer.epoch = answer.producer_id, answer.producer_epoch
        self._identities[member] = producer.producer_id, producer.epoch
        return producer

    async def end(self, batch_id: int, *winners: str) -> transactions.EndTxnGroupResponse:
        won = [transactions.TxnWinner(name, *self._identities[name]) for name in winners]
        request = transactions.EndTxnGroupRequest(self.name, batch_id, won)
        while not (answer := await self.wires.ask(self.name, request)).is_complete:
            await asyncio.sleep(0.005)
        assert isinstance(answer, transactions.EndTxnGroupResponse)
        return answer


async def test_one_call_commits_the_winners_and_aborts_the_others() -> None:
    async with one_broker() as (_, wires):
        team = Team(wires)
        writers = {name: await team.join(0, name) for name in ("a", "b", "a-again")}
        for name, writer in writers.items():
            assert writer is not None
            await writer.send("t", name.encode())
        ended = await team.end(0, "a", "b")
        assert sorted(ended.winners) == ["a", "b"]
        assert sorted(await wires.fetch("t")) == [b"a", b"b"]
        again = await team.end(0, "a-again")
        assert again.is_repeated
        assert sorted(again.winners) == ["a", "b"]
        assert await team.join(0, "late") is None
        late = writers["a-again"]
        assert late is not None
        with pytest.raises(BrokerError):
            await late.send("t", b"late")
        assert sorted(await wires.fetch("t")) == [b"a", b"b"]


async def test_the_same_writer_again_is_the_same_attempt() -> None:
    async with one_broker() as (_, wires):
        team = Team(wires)
        first = await team.join(1, "a")
        assert first is not None
        await first.send("t", b"first")
        second = await team.join(1, "a")
        assert second is not None
        await second.send("t", b"second")
        with pytest.raises(BrokerError):
            await first.send("t", b"zombie")
        await team.end(1, "a")
        assert await wires.fetch("t") == [b"second"]
        with pytest.raises(BrokerError) as caught:
            await team.end(0, "a")
        assert caught.value.code == ErrorCode.FINISHED_BATCH


async def test_abandoned_writers_are_aborted_by_timeout() -> None:
    async with one_broker() as (_, wires):
        team = Team(wires)
        lost = await team.join(0, "lost", timeout_ms=150)
        assert lost is not None
        await lost.send("t", b"lost")

        async def is_aborted() -> bool:
            return await wires.last_stable_offset("t") == (2, 2)

        await eventually(is_aborted)
        with pytest.raises(BrokerError) as caught:
            await team.end(0, "lost")
        assert caught.value.code == ErrorCode.INVALID_TXN_STATE
        assert await wires.fetch("t") == []


# --- three brokers


@asynccontextmanager
async def three_brokers(**settings: Any) -> AsyncIterator[tuple[Cluster, Wires]]:
    few = {"transaction_state_log_num_partitions": 3, "offsets_topic_num_partitions": 3}
    async with Cluster(brokers=3, **few, **settings) as cluster, Wires(cluster) as wires:
        await cluster.create_topic("t", partitions=6, configs={"min.insync.replicas": "2"})
        await wires.find("txn")
        yield cluster, wires


async def led_by_another(cluster: Cluster, coordinator: int) -> int:
    """Return a partition of t whose leader is not the coordinator."""
    return next(number for number in range(6) if cluster.leader("t", number) not in (coordinator, -1))


async def restart(cluster: Cluster, node_id: int) -> None:
    await cluster.kill(node_id)
    await cluster.start(node_id)


async def test_markers_reach_every_leader() -> None:
    async with three_brokers() as (_, wires):
        producer = await RawProducer(wires).init()
        for _ in range(3):
            for number in range(6):
                await producer.send("t", b"%d" % number, partition=number)
            await producer.end()
        await producer.until("CompleteCommit")
        for number in range(6):
            assert await wires.fetch("t", number) == [b"%d" % number] * 3


async def test_a_killed_coordinator_loses_nothing() -> None:
    """R36: the next coordinator has the open transaction, and continues with its epoch."""
    async with three_brokers() as (cluster, wires):
        producer = await RawProducer(wires).init()
        for number in range(6):
            await producer.send("t", b"1", partition=number)
        await cluster.kill(await wires.find("txn"))
        for number in range(6):
            await producer.send("t", b"2", partition=number)
        await producer.end()
        await producer.until("CompleteCommit")
        for number in range(6):
            assert await wires.fetch("t", number) == [b"1", b"2"]


@pytest.mark.parametrize("is_commit", [True, False])
async def test_a_new_coordinator_sends_the_missing_markers(is_commit: bool) -> None:
    """R32: a decision stands, although the coordinator dies before any marker is written."""
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        elsewhere = await led_by_another(cluster, coordinator)
        producer = await RawProducer(wires).init()
        for number in range(6):
            await producer.send("t", b"1", partition=number)
        cluster.intercept(ApiKey.WRITE_TXN_MARKERS, drop_next(1_000))
        await producer.end(is_commit=is_commit)
        assert (await wires.last_stable_offset("t", elsewhere))[0] == 0
        await cluster.kill(coordinator)
        cluster.intercept(ApiKey.WRITE_TXN_MARKERS, None)
        await producer.until("CompleteCommit" if is_commit else "CompleteAbort")
        for number in range(6):
            assert await wires.fetch("t", number) == ([b"1"] if is_commit else [])
        await producer.send("t", b"2")
        await producer.end()


async def test_lost_markers_and_lost_responses_are_sent_again() -> None:
    """R33: a marker is idempotent."""
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        producer = await RawProducer(wires).init()
        faults = [
            fail_next(2, ErrorCode.NOT_ENOUGH_REPLICAS),
            disconnect_next(2),
            disconnect_next(2, after=True),
            delay_next(2, delay_ms=30),
        ]
        for fault in faults:
            cluster.intercept(ApiKey.WRITE_TXN_MARKERS, fault)
            for number in range(6):
                await producer.send("t", b"1", partition=number)
            await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.find("txn") == coordinator
        for number in range(6):
            assert await wires.fetch("t", number) == [b"1"] * len(faults)
            assert await wires.last_stable_offset("t", number) == (2 * len(faults),) * 2


async def test_a_killed_leader_does_not_tear_the_transaction() -> None:
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        elsewhere = await led_by_another(cluster, coordinator)
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1", partition=elsewhere)
        await cluster.kill(cluster.leader("t", elsewhere))
        await producer.send("t", b"2", partition=elsewhere)
        other = await RawProducer(wires, "other").init()
        await other.send("t", b"aborted", partition=elsewhere)
        await other.end(is_commit=False)
        await producer.end()
        await producer.until("CompleteCommit")
        await other.until("CompleteAbort")
        assert await wires.fetch("t", elsewhere) == [b"1", b"2"]


async def test_a_coordinator_that_was_cut_off_writes_no_more_markers() -> None:
    """R32: of two coordinators, leaders accept the markers of the later one only."""
    async with three_brokers() as (cluster, wires):
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1")
        leader = cluster.leader("t", 0)
        await producer.end()
        await producer.until("CompleteCommit")
        marker = transactions.TxnMarker(
            producer.producer_id, producer.epoch + 1, -1, False, [transactions.TxnPartition("t", 0)]
        )
        answer = await settled(cluster.brokers[leader]._services.marker_writer.write([marker]))
        assert answer.markers[0].partitions[0].error_code == ErrorCode.TRANSACTION_COORDINATOR_FENCED
        assert await wires.fetch("t") == [b"1"]


async def test_a_decision_that_is_committed_late_is_carried_out() -> None:
    """Its request failed, as too few replicas were in sync for a while; the log has the decision."""
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1")
        cluster.intercept(ApiKey.REPLICA_FETCH, delay_next(1_000, delay_ms=100), node_id=coordinator)
        end = transactions.EndTxnRequest("txn", producer.producer_id, producer.epoch, True)
        answered = asyncio.ensure_future(wires.call(coordinator, end, lane="end"))
        broker = cluster.brokers[coordinator]
        shard = broker.coordinators.transactions("txn")
        await eventually(lambda: shard.high_watermark < shard.end_offset)
        error = NotEnoughReplicasAfterAppendError("alone for a moment")
        broker._services.waiters.on_uncommittable(shard.partition.key, error)
        with pytest.raises(BrokerError) as caught:
            await answered
        assert caught.value.code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=coordinator)
        await cluster.wait_until(lambda: not shard.machine.pending_markers())
        assert await wires.fetch("t") == [b"1"]


async def test_transactions_survive_a_restart_of_any_broker() -> None:
    """Committed transactions are complete and in order, aborted ones invisible."""
    async with three_brokers() as (cluster, wires):
        is_over = False
        committed: dict[str, list[bytes]] = {}

        def places(number: int) -> tuple[int, int]:
            return number % 6, (number + 1) % 6

        async def work(name: str) -> None:
            producer = await RawProducer(wires, name).init()
            done = committed.setdefault(name, [])
            for number in count():
                if is_over:
                    return
                value, is_commit = b"%s-%d" % (name.encode(), number), number % 4 != 3
                for partition in places(number):
                    await producer.send("t", value, partition=partition)
                await producer.end(is_commit=is_commit)
                if is_commit:
                    done.append(value)

        async with asyncio.TaskGroup() as tasks:
            for name in ("a", "b", "c"):
                tasks.create_task(work(name))
            for node_id in (1, 2, 3):
                await asyncio.sleep(0.3)  # so many transactions between two restarts
                await restart(cluster, node_id)
            await asyncio.sleep(0.3)  # and after the last one
            is_over = True

        async def is_stable() -> bool:
            ends = [await wires.last_stable_offset("t", partition) for partition in range(6)]
            return all(stable == high_watermark for stable, high_watermark in ends)

        await eventually(is_stable)
        seen = [await wires.fetch("t", partition) for partition in range(6)]
        for name, values in committed.items():
            assert values, f"{name} committed nothing"
            for partition, read in enumerate(seen):
                of_name = [value for value in read if value.startswith(name.encode())]
                assert of_name == [v for v in values if partition in places(int(v.split(b"-")[1]))]


# --- rules whose loss must be noticed


async def _a_late_batch_hangs_nowhere() -> None:
    """R31: the coordinator does not know the partition, so the transaction never ends there."""
    async with one_broker() as (_, wires):
        producer = await RawProducer(wires).init()
        late = RawProducer(wires)
        late.producer_id, late.epoch = producer.producer_id, producer.epoch
        await producer.end()
        with contextlib.suppress(BrokerError):
            await late.send("t", b"late")
        last_stable_offset, high_watermark = await wires.last_stable_offset("t")
        assert last_stable_offset == high_watermark


async def _an_end_is_answered_when_it_is_committed() -> None:
    """R32: otherwise the next coordinator may decide the opposite."""
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1", partition=await led_by_another(cluster, coordinator))
        cluster.intercept(ApiKey.REPLICA_FETCH, drop_next(1_000), node_id=coordinator)
        end = transactions.EndTxnRequest("txn", producer.producer_id, producer.epoch, True)
        answered = asyncio.ensure_future(wires.call(coordinator, end, lane="end"))
        shard = cluster.brokers[coordinator].coordinators.transactions("txn")
        await eventually(lambda: shard.high_watermark < shard.end_offset)
        await settle()
        is_early = answered.done() and not answered.result().error_code
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=coordinator)
        await cluster.kill(coordinator)
        await asyncio.wait((answered,))
        answered.exception()
        assert not is_early


async def _a_marker_is_acknowledged_when_it_is_committed() -> None:
    """R33: otherwise the transaction counts as complete, and its end may vanish from the partition."""
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        elsewhere = await led_by_another(cluster, coordinator)
        leader = cluster.leader("t", elsewhere)
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1", partition=elsewhere)
        cluster.intercept(ApiKey.REPLICA_FETCH, drop_next(1_000), node_id=leader)
        await producer.end()
        await settle()
        state = (await producer.describe()).state
        cluster.intercept(ApiKey.REPLICA_FETCH, None, node_id=leader)
        await cluster.kill(leader)
        assert state == "PrepareCommit"
        await producer.until("CompleteCommit")


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        ("R31-unverified", _a_late_batch_hangs_nowhere),
        ("R32-answer-early", _an_end_is_answered_when_it_is_committed),
        ("R33-marker-uncommitted", _a_marker_is_acknowledged_when_it_is_committed),
    ],
)
async def test_the_loss_of_a_rule_is_noticed(mutant: str, scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()
    with without(mutant), pytest.raises(AssertionError):
        await scenario()


async def test_a_stopping_broker_answers_waiting_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose coordinator does not respond is refused at once, not after the grace period of the
    stop.
    """
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        elsewhere = await led_by_another(cluster, coordinator)
        leader = cluster.leader("t", elsewhere)
        producer = await RawProducer(wires).init()
        cluster.intercept(
            ApiKey.ADD_PARTITIONS_TO_TXN, fail_next(1_000, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        )
        sending = asyncio.ensure_future(producer.send("t", b"1", partition=elsewhere, retries=False))
        await settle()
        with monkeypatch.context() as patch:
            patch.setattr("kafkalite.broker.broker.STOP_GRACE_MS", 600_000)
            await cluster.stop(leader)
        with pytest.raises((BrokerError, *LOST)):
            await sending


async def test_a_batch_that_no_coordinator_confirms_is_answered_in_time() -> None:
    """The error is retriable (R30), and nothing was appended."""
    async with three_brokers() as (cluster, wires):
        coordinator = await wires.find("txn")
        elsewhere = await led_by_another(cluster, coordinator)
        leader = cluster.leader("t", elsewhere)
        producer = await RawProducer(wires).init()
        cluster.intercept(
            ApiKey.ADD_PARTITIONS_TO_TXN, fail_next(1_000, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        )
        batch = producer.batch(b"1")
        part = data.ProducePartition("t", elsewhere, len(batch))
        answer = await wires.call(leader, data.ProduceRequest(-1, 50, "txn", [part]), batch)
        assert answer.partitions[0].error_code == ErrorCode.REQUEST_TIMED_OUT
        assert await wires.last_stable_offset("t", elsewhere) == (0, 0)
        cluster.intercept(ApiKey.ADD_PARTITIONS_TO_TXN, None)
        assert await producer.send("t", b"1", partition=elsewhere) == 0
        await producer.end()
        await producer.until("CompleteCommit")
        assert await wires.fetch("t", elsewhere) == [b"1"], "sent twice, and there once (R28)"


async def test_a_decided_batch_stays_decided_when_its_coordinator_dies() -> None:
    async with three_brokers() as (cluster, wires):
        team = Team(wires)
        coordinator = await wires.find("app")
        for name, partition in (("a", 0), ("b", 1), ("lost", 2)):
            writer = await team.join(3, name)
            assert writer is not None
            for number in (partition, partition + 3):
                await writer.send("t", name.encode(), partition=number)
        cluster.intercept(ApiKey.WRITE_TXN_MARKERS, drop_next(1_000))
        won = [transactions.TxnWinner(name, *team._identities[name]) for name in ("a", "b")]
        answer = await wires.ask("app", transactions.EndTxnGroupRequest("app", 3, won))
        assert not answer.is_complete
        await cluster.kill(coordinator)
        cluster.intercept(ApiKey.WRITE_TXN_MARKERS, None)
        ended = await team.end(3, "lost")
        assert ended.is_repeated
        assert sorted(ended.winners) == ["a", "b"]
        assert [await wires.fetch("t", number) for number in range(6)] == [[b"a"], [b"b"], []] * 2


async def test_a_retired_application_is_deleted_by_any_coordinator() -> None:
    """An application that was not retired is kept, however long it is idle (R32)."""
    async with three_brokers(transactional_id_expiration_ms=100) as (cluster, wires):
        for name in ("app", "kept"):
            team = Team(wires, name)
            writer = await team.join(0, "a")
            assert writer is not None
            await writer.send("t", name.encode())
            await team.end(0, "a")
        retire = transactions.RetireTxnGroupRequest("app")
        assert (await wires.ask("app", retire)).last_batch_id == 0
        kept, forgotten = (transactions.DescribeTxnGroupRequest(name) for name in ("kept", "app"))

        async def is_forgotten() -> bool:
            try:
                await wires.ask("app", forgotten)
            except BrokerError as error:
                return error.code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
            return False

        await eventually(is_forgotten)
        for name in ("app", "kept"):
            await restart(cluster, await wires.find(name))
        assert await is_forgotten()
        assert (await wires.ask("kept", kept)).last_batch_id == 0
        shard = cluster.brokers[await wires.find("kept")].coordinators.transactions("kept")
        assert shard.machine.transaction_count == 0, "its members' ids are forgotten"


async def test_offsets_of_a_transaction_survive_both_coordinators() -> None:
    """R35, R36"""
    async with three_brokers() as (cluster, wires):
        producer = await RawProducer(wires).init()
        await producer.send("t", b"1")
        offset = groups.CommittedOffset("t", 0, 7, -1, None, -1, "", 0, None)
        request = groups.TxnOffsetCommitRequest(
            "txn", producer.producer_id, producer.epoch, "g", "", -1, None, [offset]
        )
        assert (await wires.ask("g", request, kind=0)).offsets[0].error_code == 0
        await restart(cluster, await wires.find("g", 0))
        cluster.intercept(ApiKey.WRITE_TXN_MARKERS, delay_next(1_000, delay_ms=50))
        await producer.end()
        await restart(cluster, await wires.find("txn"))
        await producer.until("CompleteCommit")
        asked = groups.OffsetFetchRequest("g", "", -1, True, [groups.GroupPartition("t", 0)])
        (committed,) = (await wires.ask("g", asked, kind=0)).offsets
        assert (committed.offset, committed.error_code) == (7, 0)
        assert await wires.fetch("t") == [b"1"]
