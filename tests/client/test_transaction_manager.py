"""Transactions of the producer (KIP-98, KIP-890, R31, R32), against a scripted broker and coordinator."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from kafkalite.client.producer.producer import Producer
from kafkalite.client.producer.transaction_state import Phase
from kafkalite.errors import (
    ClientClosedError,
    CommitFailedError,
    ConfigError,
    DeliveryTimeoutError,
    ErrorCode,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTopicError,
    ProducerFencedError,
    RequestTimeoutError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionStateError,
    UnknownServerError,
)
from kafkalite.model import GroupMetadata, OffsetAndMetadata, TopicPartition
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.data import InitProducerIdResponse
from kafkalite.protocol.messages.groups import Coordinator, FindCoordinatorResponse, TxnOffsetCommitResponse
from kafkalite.protocol.messages.transactions import EndTxnGroupResponse, EndTxnResponse, JoinTxnGroupResponse
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.header import check, stamp
from kafkalite.rng import seeded_rng
from proof.waiting import eventually

FAST = {
    "linger_ms": 0,
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 5,
    "reconnect_backoff_ms": 1,
    "reconnect_backoff_max_ms": 5,
}


@dataclass
class Identity:
    producer_id: int
    epoch: int
    last_end: tuple[int, bool] | None = None  # (epoch that ended, commit)


@dataclass
class ScriptedCoordinator:
    """Coordinates every key on one scripted broker. ``ends`` has each decision once, in order."""

    broker: Any
    ids: dict[str, Identity] = field(default_factory=dict)
    ends: list[tuple[str, int, int, bool]] = field(default_factory=list)  # id, producer id, epoch, commit
    offsets: list[Any] = field(default_factory=list)  # TxnOffsetCommit requests
    offset_codes: list[int] = field(default_factory=list)  # for the next of those requests, one each
    groups: dict[str, tuple[int, list[str]]] = field(default_factory=dict)  # application: last batch, winners
    members: dict[tuple[str, str], Identity] = field(default_factory=dict)
    writes_markers: bool = True

    def __post_init__(self) -> None:
        self.broker.verify = self._verify
        self.broker.handlers.update(
            {
                ApiKey.FIND_COORDINATOR: self._find,
                ApiKey.INIT_PRODUCER_ID: self._init,
                ApiKey.END_TXN: self._end,
                ApiKey.TXN_OFFSET_COMMIT: self._offsets,
                ApiKey.JOIN_TXN_GROUP: self._join,
                ApiKey.END_TXN_GROUP: self._end_group,
            }
        )

    def _verify(self, name: str | None, header: Any) -> None:
        """What a leader does before the first batch of a transaction (R31)."""
        if header.is_transactional:
            known = [self.ids[name]] if name in self.ids else []
            known += [one for (group, _), one in self.members.items() if group == name]
            if (header.producer_id, header.producer_epoch) not in {(k.producer_id, k.epoch) for k in known}:
                raise InvalidProducerEpochError("by the coordinator")

    def _find(self, request: Any, fault: Any) -> Any:
        broker = self.broker
        found = [
            Coordinator(key, int(fault.code), None, broker.node_id, broker.address, 0)
            for key in request.message.keys
        ]
        return FindCoordinatorResponse(0, None, found), []

    def _init(self, request: Any, fault: Any) -> Any:
        if fault.code:
            return InitProducerIdResponse(int(fault.code), "by the test", -1, -1), []
        name = request.message.transactional_id
        identity = self.ids.get(name)
        if identity is None:
            identity = self.ids[name] = Identity(5000 + len(self.ids), -1)
        self._mark(identity.producer_id, identity.epoch + 1, is_commit=False)
        identity.epoch += 1
        identity.last_end = None
        return InitProducerIdResponse(0, None, identity.producer_id, identity.epoch), []

    def fence(self, name: str) -> None:
        """Another producer takes over the id."""
        self.ids[name].epoch += 1
        self.ids[name].last_end = None
        self._mark(self.ids[name].producer_id, self.ids[name].epoch, is_commit=False)

    def _end(self, request: Any, fault: Any) -> Any:
        name, producer_id, epoch, is_commit = request.message
        identity = self.ids[name]
        code = int(fault.code)
        if not code and (identity.epoch, identity.last_end) == (epoch + 1, (epoch, is_commit)):
            return EndTxnResponse(0, None, identity.producer_id, identity.epoch), []
        if not code and (producer_id, epoch) != (identity.producer_id, identity.epoch):
            code = int(ErrorCode.PRODUCER_FENCED)
        if code:
            return EndTxnResponse(code, "by the test", -1, -1), []
        identity.epoch, identity.last_end = epoch + 1, (epoch, is_commit)
        self.ends.append((name, producer_id, epoch, is_commit))
        self._mark(producer_id, identity.epoch, is_commit=is_commit)
        return EndTxnResponse(0, None, producer_id, identity.epoch), []

    def _mark(self, producer_id: int, epoch: int, *, is_commit: bool) -> None:
        for log in self.broker.logs.values() if self.writes_markers else ():
            headers = [RecordBatch(batch, check_crc=False).header for batch in log.batches]
            if any(header.producer_id == producer_id for header in headers):
                marker = build_marker(producer_id, epoch, 0, is_commit, 0)
                stamp(marker, base_offset=log.end, leader_epoch=log.epoch)
                log.batches.append(bytes(marker))
                log.producers.note_marker(producer_id, epoch, 0, log.end, 0, is_commit=is_commit)
                log.end += 1

    def _offsets(self, request: Any, fault: Any) -> Any:
        code = self.offset_codes.pop(0) if self.offset_codes else int(fault.code)
        self.offsets.append(request.message)
        if code:
            return TxnOffsetCommitResponse(code, "by the test", []), []
        return TxnOffsetCommitResponse(0, None, request.message.offsets), []

    # --- transaction groups

    def _join(self, request: Any, fault: Any) -> Any:
        application, batch_id, member, _ = request.message
        last, _ = self.groups.get(application, (-1, []))
        if batch_id <= last:
            return JoinTxnGroupResponse(0, None, -1, -1, last, True), []
        identity = self.members.setdefault((application, member), Identity(7000 + len(self.members), -1))
        identity.epoch += 1
        self._mark(identity.producer_id, identity.epoch, is_commit=False)
        return JoinTxnGroupResponse(0, None, identity.producer_id, identity.epoch, last, False), []

    def _end_group(self, request: Any, fault: Any) -> Any:
        application, batch_id, winners = request.message
        last, names = self.groups.get(application, (-1, []))
        if batch_id == last:
            return EndTxnGroupResponse(0, None, batch_id, names, True, True), []
        code = int(ErrorCode.FINISHED_BATCH) if batch_id < last else 0
        for winner in winners:
            identity = self.members.get((application, winner.member))
            if identity != Identity(winner.producer_id, winner.producer_epoch):
                code = code or int(ErrorCode.INVALID_TXN_STATE)
        if code:
            return EndTxnGroupResponse(code, "by the test", batch_id, [], False, False), []
        names = [winner.member for winner in winners]
        self.groups[application] = batch_id, names
        for (_, member), identity in self.members.items():
            identity.epoch += 1
            self._mark(identity.producer_id, identity.epoch, is_commit=member in names)
        return EndTxnGroupResponse(0, None, batch_id, names, False, len(self.ends) > 0), []

    def committed(self, topic: str, partition: int = 0) -> list[bytes | None]:
        """Return what a read_committed reader sees, from the whole log."""
        batches = [RecordBatch(batch) for batch in self.broker.logs[topic, partition].batches]
        open_values: dict[int, list[bytes | None]] = {}
        seen: list[bytes | None] = []
        for batch in batches:
            header = check(batch.buffer)
            if header.is_control:
                values = open_values.pop(header.producer_id, [])
                (record,) = batch.records(topic, partition)
                if record.key == b"\0\0\0\1":
                    seen += values
            elif header.is_transactional:
                open_values.setdefault(header.producer_id, []).extend(r.value for r in batch)
            else:
                seen += [record.value for record in batch]
        return seen


@pytest.fixture
def coordinator(fake_broker: Any) -> ScriptedCoordinator:
    return ScriptedCoordinator(fake_broker)


def _producer(broker: Any, name: str = "app", **settings: Any) -> Producer:
    return Producer(broker.address, rng=seeded_rng(1), transactional_id=name, **{**FAST, **settings})


def _headers(broker: Any, topic: str, partition: int = 0) -> list[Any]:
    """Return the headers of record batches."""
    headers = [check(batch) for batch in broker.logs[topic, partition].batches]
    return [header for header in headers if not header.is_control]


# --- commit ----------------------------------------------------------------------------------------


async def test_a_transaction_commits_what_was_sent_in_it(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        async with producer.transaction() as transaction:
            assert transaction.is_open and "in a transaction" in repr(transaction)
            producer.send_nowait("t", b"1")
            await producer.send("t", b"2", key=b"k")
            producer.send_nowait("t", b"3")
        assert coordinator.committed("t") == [b"1", b"2", b"3"]
    assert coordinator.ends == [("app", 5000, 0, True)]
    request = next(one for one in fake_broker.requests if one.api_key == ApiKey.PRODUCE)
    assert (request.message.transactional_id, request.message.acks) == ("app", -1)


async def test_each_transaction_has_its_epoch_and_sequences_from_0_r31(
    fake_broker: Any, coordinator: Any
) -> None:
    fake_broker.topics["t"] = 2
    async with _producer(fake_broker) as producer:
        for number in range(3):
            async with producer.transaction():
                await producer.send_many("t", [b"a", b"b"], partition=0)
                await producer.send("t", b"%d" % number, partition=0)
                if number != 1:
                    await producer.send("t", b"x", partition=1)
    found = [(h.producer_id, h.producer_epoch, h.base_sequence) for h in _headers(fake_broker, "t", 0)]
    assert found == [(5000, epoch, sequence) for epoch in range(3) for sequence in (0, 2)]
    found = [(h.producer_id, h.producer_epoch, h.base_sequence) for h in _headers(fake_broker, "t", 1)]
    assert found == [(5000, 0, 0), (5000, 2, 0)]
    assert all(h.is_transactional for n in (0, 1) for h in _headers(fake_broker, "t", n))


async def test_every_way_of_sending_is_transactional(fake_broker: Any, coordinator: Any) -> None:
    builder = RecordBatchBuilder()
    builder.append(b"built")
    foreign = build_batch([b"foreign"], producer_id=1, producer_epoch=2, base_sequence=3)
    async with _producer(fake_broker) as producer, producer.transaction():
        await producer.send("t", b"alone")
        await producer.send_many("t", [b"many"])
        await producer.send_batch("t", 0, builder)
        await producer.send_batch("t", 0, bytes(foreign))
        await producer.send("t", b"headers", headers=[("h", b"v")])
    assert [h.base_sequence for h in _headers(fake_broker, "t")] == [0, 1, 2, 3, 4]
    assert all(h.is_transactional for h in _headers(fake_broker, "t"))
    assert coordinator.committed("t") == [b"alone", b"many", b"built", b"foreign", b"headers"]


async def test_a_batch_read_from_a_transaction_is_plain_again_when_a_plain_producer_sends_it(
    fake_broker: Any,
) -> None:
    copied = build_batch([b"v"], producer_id=1, producer_epoch=2, base_sequence=3, transactional=True)
    async with Producer(fake_broker.address, **FAST) as producer:
        await producer.send_batch("t", 0, bytes(copied))
    assert not _headers(fake_broker, "t")[0].is_transactional


async def test_an_empty_transaction_costs_no_request(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        for _ in range(3):
            async with producer.transaction():
                pass
        await producer.begin_transaction()
        await producer.abort_transaction()
    assert fake_broker.count(ApiKey.END_TXN) == 0


async def test_commit_waits_for_records_of_a_topic_not_known_yet(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        async with producer.transaction():
            delivery = producer.send_nowait("new", b"1")
        assert delivery.result().offset == 0
    assert coordinator.committed("new") == [b"1"]


async def test_a_request_with_a_lost_response_is_repeated_r32(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.END_TXN, make_fault(close=True, serve_first=True))
        async with producer.transaction():
            await producer.send("t", b"1")
        async with producer.transaction():
            await producer.send("t", b"2")
    assert coordinator.ends == [("app", 5000, 0, True), ("app", 5000, 1, True)]
    assert coordinator.committed("t") == [b"1", b"2"]


@pytest.mark.parametrize(
    "code",
    [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR, ErrorCode.CONCURRENT_TRANSACTIONS],
)
async def test_a_coordinator_that_moves_or_loads_is_waited_for(
    fake_broker: Any, coordinator: Any, make_fault: Any, code: ErrorCode
) -> None:
    fake_broker.fault(ApiKey.INIT_PRODUCER_ID, make_fault(code=code), times=3)
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.END_TXN, make_fault(code=code), times=3)
        async with producer.transaction():
            await producer.send("t", b"1")
    assert coordinator.ends == [("app", 5000, 0, True)]


async def test_waiting_for_the_previous_transaction_counts_no_retry(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    """A leader responds CONCURRENT_TRANSACTIONS while the markers of the last transaction are written."""
    fault = make_fault(code=ErrorCode.CONCURRENT_TRANSACTIONS)
    async with _producer(fake_broker, retries=1) as producer, producer.transaction():
        fake_broker.fault(ApiKey.PRODUCE, fault, times=4)
        await asyncio.gather(*(producer.send("t", b"%d" % number) for number in range(3)))
    assert sorted(coordinator.committed("t")) == [b"0", b"1", b"2"]


async def test_after_an_unknown_outcome_only_commit_is_allowed(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    async with _producer(fake_broker, default_api_timeout_ms=60) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        fake_broker.fault(ApiKey.END_TXN, make_fault(drop=True, serve_first=True))
        with pytest.raises(RequestTimeoutError):
            await producer.commit_transaction()
        fake_broker.disconnect()  # responses would wait behind the dropped one
        with pytest.raises(TransactionStateError, match="commit_transaction"):
            await producer.abort_transaction()
        with pytest.raises(TransactionStateError, match="commit_transaction"):
            await producer.begin_transaction()
        with pytest.raises(TransactionStateError, match="committing"):
            producer.send_nowait("t", b"2")
        await producer.commit_transaction()
        async with producer.transaction():
            await producer.send("t", b"3")
    assert coordinator.committed("t") == [b"1", b"3"]
    assert len(coordinator.ends) == 2


async def test_a_cancelled_commit_continues_and_the_next_transaction_waits(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    gate = asyncio.Event()
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        fake_broker.fault(ApiKey.END_TXN, make_fault(hold=gate))
        commit = asyncio.ensure_future(producer.commit_transaction())
        await eventually(lambda: fake_broker.count(ApiKey.END_TXN))
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        asyncio.get_running_loop().call_later(0.02, gate.set)
        async with producer.transaction():
            await producer.send("t", b"2")
    assert coordinator.committed("t") == [b"1", b"2"]


async def test_nothing_is_sent_during_a_commit(fake_broker: Any, coordinator: Any, make_fault: Any) -> None:
    gate = asyncio.Event()
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"0")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(hold=gate))
        producer.send_nowait("t", b"1")
        commit = asyncio.ensure_future(producer.commit_transaction())
        await eventually(lambda: fake_broker.count(ApiKey.PRODUCE) == 2)
        for late in (producer.send, producer.send_many):
            with pytest.raises(TransactionStateError, match="being committed"):
                await late("t", [b"late"] if late == producer.send_many else b"late")
        with pytest.raises(TransactionStateError, match="already"):
            await producer.commit_transaction()
        gate.set()
        await commit
    assert coordinator.committed("t") == [b"0", b"1"]


# --- abort -----------------------------------------------------------------------------------------


async def test_an_exception_aborts(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        with pytest.raises(ValueError, match="mine") as raised:
            async with producer.transaction():
                await producer.send("t", b"no")
                raise ValueError("mine")
        assert not hasattr(raised.value, "__notes__")
        async with producer.transaction() as transaction:
            await producer.send("t", b"not either")
            await transaction.abort()
            assert not transaction.is_open
        async with producer.transaction():
            await producer.send("t", b"yes")
    assert coordinator.committed("t") == [b"yes"]
    assert [end[2:] for end in coordinator.ends] == [(0, False), (1, False), (2, True)]


@pytest.mark.parametrize("way", ["send_many", "send_batch", "queue_batch"])
async def test_a_waiting_record_is_not_sent_in_a_later_transaction(
    fake_broker: Any, coordinator: Any, way: str
) -> None:
    fake_broker.auto_create = 0
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        if way == "send_many":
            late: Any = producer.send_many("t", [b"late"])
        else:
            late = getattr(producer, way)("t", 0, build_batch([b"late"], timestamps_ms=1))
        sending = asyncio.ensure_future(late)
        await asyncio.sleep(0)
        await producer.abort_transaction()
        await producer.begin_transaction()
        fake_broker.topics["t"] = 1
        with pytest.raises(TransactionAbortedError, match="has ended"):
            await sending
        await producer.send_many("t", [b"yes"])
        await producer.commit_transaction()
    assert coordinator.committed("t") == [b"yes"]


async def test_a_cancellation_aborts(fake_broker: Any, coordinator: Any) -> None:
    started = asyncio.Event()

    async def work(producer: Producer) -> None:
        async with producer.transaction():
            await producer.send("t", b"no")
            started.set()
            await asyncio.Event().wait()

    async with _producer(fake_broker) as producer:
        task = asyncio.ensure_future(work(producer))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert coordinator.ends == [("app", 5000, 0, False)]
        async with asyncio.timeout(30), producer.transaction():
            await producer.send("t", b"yes")
    assert coordinator.committed("t") == [b"yes"]


async def test_an_abort_waits_for_nothing_in_flight_r31(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    """In-flight batches belong to an epoch that has ended; a late response is ignored."""
    gate = asyncio.Event()
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"a")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(hold=gate))
        stuck = producer.send_nowait("t", b"stuck")
        producer.send_nowait("t", b"behind")
        producer.send_nowait("unknown", b"parked")
        await eventually(lambda: fake_broker.count(ApiKey.PRODUCE) == 2)
        aborted = asyncio.ensure_future(producer.abort_transaction())
        await asyncio.sleep(0)
        with pytest.raises(TransactionAbortedError, match="aborted before"):
            await stuck
        await aborted  # responses keep the order of requests, so it uses another connection
        gate.set()
        async with producer.transaction():
            await producer.send("t", b"b")
    assert coordinator.committed("t") == [b"b"]
    assert fake_broker.logs["t", 0].producers.open == {}


async def test_a_late_batch_of_an_ended_transaction_is_refused_r31(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    async with _producer(fake_broker) as producer:
        async with producer.transaction():
            await producer.send("t", b"a")
        late = build_batch([b"late"], producer_id=5000, producer_epoch=0, base_sequence=1, transactional=True)
        with pytest.raises(Exception, match="epoch"):
            fake_broker.append("t", 0, late)


async def test_after_a_failed_record_the_transaction_can_only_be_aborted(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    async with _producer(fake_broker) as producer:
        with pytest.raises(TransactionAbortableError, match="can't be committed") as raised:
            async with producer.transaction():
                await producer.send("t", b"0")
                fake_broker.fault(ApiKey.PRODUCE, make_fault(code=ErrorCode.INVALID_RECORD))
                with pytest.raises(InvalidRecordError):
                    await producer.send("t", b"1")
                for late in (producer.send, producer.send_many):
                    with pytest.raises(TransactionAbortableError):
                        await late("t", [b"2"] if late == producer.send_many else b"2")
        assert isinstance(raised.value.__cause__, InvalidRecordError)
        async with producer.transaction():
            await producer.send("t", b"3")
    assert coordinator.committed("t") == [b"3"]
    assert [end[3] for end in coordinator.ends] == [False, True]


async def test_a_failure_fails_the_rest_of_the_transaction_at_once(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    gate = asyncio.Event()
    fake_broker.topics.update(t=1, u=1)
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        await producer.partitions_for("t")
        await producer.partitions_for("u")
        fake_broker.fault(ApiKey.PRODUCE, make_fault(code=ErrorCode.INVALID_RECORD, hold=gate))
        bad = producer.send_nowait("t", b"bad")
        await eventually(lambda: fake_broker.count(ApiKey.PRODUCE))
        others = [producer.send_nowait("u", b"in flight"), producer.send_nowait("t", b"waits")]
        parked = producer.send_nowait("unknown", b"parked")
        gate.set()
        with pytest.raises(InvalidRecordError):
            await bad
        for other in (*others, parked):
            with pytest.raises(TransactionAbortableError):
                await other
        with pytest.raises(TransactionAbortableError):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await producer.flush()  # failures covered by the abort are not raised again
        assert producer.statistics().free_bytes == producer.config.buffer_memory
        async with producer.transaction():
            await producer.send("u", b"good")
    assert coordinator.committed("u") == [b"good"]


async def test_delivery_timeouts_and_refused_topics_fail_the_transaction(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    async with _producer(fake_broker, delivery_timeout_ms=30) as producer:
        with pytest.raises(TransactionAbortableError) as raised:
            async with producer.transaction():
                fake_broker.fault(ApiKey.PRODUCE, make_fault(drop=True))
                producer.send_nowait("t", b"1")
        assert isinstance(raised.value.__cause__, DeliveryTimeoutError)
        assert not hasattr(raised.value, "__notes__"), "the abort waits for no answer"
        fake_broker.disconnect()  # other responses would wait behind the dropped one
        fake_broker.always[ApiKey.METADATA] = make_fault(code=ErrorCode.INVALID_TOPIC_EXCEPTION)
        with pytest.raises(TransactionAbortableError) as raised:
            async with producer.transaction():
                producer.send_nowait("bad", b"1")
        assert isinstance(raised.value.__cause__, InvalidTopicError)


async def test_a_failing_cluster_delays_no_exception(
    fake_broker: Any, coordinator: Any, make_fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalite.client.producer.transaction_manager.ABORT_AFTER_ERROR_MS", 10)
    gate = asyncio.Event()
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.END_TXN, make_fault(hold=gate))
        with pytest.raises(ValueError, match="mine") as raised:
            async with producer.transaction():
                await producer.send("t", b"no")
                raise ValueError("mine")
        assert "background" in raised.value.__notes__[0]
        asyncio.get_running_loop().call_later(0.01, gate.set)
        async with producer.transaction():
            await producer.send("t", b"yes")
    assert [end[2:] for end in coordinator.ends] == [(0, False), (1, True)]


async def test_an_abort_that_is_refused_is_noted_on_the_exception(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.END_TXN, make_fault(code=ErrorCode.PRODUCER_FENCED))
        with pytest.raises(ValueError, match="mine") as raised:
            async with producer.transaction():
                await producer.send("t", b"no")
                raise ValueError("mine")
        assert "could not be aborted" in raised.value.__notes__[0]
        with pytest.raises(ProducerFencedError):
            await producer.begin_transaction()


async def test_closing_aborts_an_open_transaction(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"no")
    assert coordinator.ends == [("app", 5000, 0, False)]
    with pytest.raises(ClientClosedError):
        await producer.begin_transaction()


async def test_a_commit_ends_with_the_client(fake_broker: Any, coordinator: Any, make_fault: Any) -> None:
    async with _producer(fake_broker) as producer:
        await producer.begin_transaction()
        await producer.send("t", b"1")
        fake_broker.fault(ApiKey.END_TXN, make_fault(drop=True))
        commit = asyncio.ensure_future(producer.commit_transaction())
        await eventually(lambda: fake_broker.count(ApiKey.END_TXN))
        await producer.close(timeout_ms=1)
        with pytest.raises(ClientClosedError):
            await commit


# --- fencing ---------------------------------------------------------------------------------------


async def test_a_fenced_producer_stays_fenced(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as zombie, _producer(fake_broker) as successor:
        with pytest.raises(ProducerFencedError, match="fenced") as raised:
            async with zombie.transaction():
                await zombie.send("t", b"no")
        assert "app" in str(raised.value) and "close this producer" in raised.value.hint
        with pytest.raises(ProducerFencedError):
            await zombie.begin_transaction()
        with pytest.raises(ProducerFencedError):
            await zombie.send("t", b"no")
        with pytest.raises(ProducerFencedError):
            await zombie.abort_transaction()
        async with successor.transaction():
            await successor.send("t", b"yes")
    assert coordinator.committed("t") == [b"yes"]


@pytest.mark.parametrize("code", [ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED])
async def test_a_leader_with_a_newer_epoch_fences_the_producer(
    fake_broker: Any, coordinator: Any, make_fault: Any, code: ErrorCode
) -> None:
    async with _producer(fake_broker) as producer:
        with pytest.raises(ProducerFencedError):
            async with producer.transaction():
                fake_broker.fault(ApiKey.PRODUCE, make_fault(code=code))
                producer.send_nowait("t", b"1")
        assert producer._transactions.state.phase is Phase.FENCED
    assert coordinator.ends == []


async def test_errors_of_the_end_request(fake_broker: Any, coordinator: Any, make_fault: Any) -> None:
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.END_TXN, make_fault(code=ErrorCode.TRANSACTION_ABORTABLE))
        with pytest.raises(TransactionAbortableError):
            async with producer.transaction():
                await producer.send("t", b"1")
        assert coordinator.ends == [("app", 5000, 0, False)]
        fake_broker.fault(ApiKey.END_TXN, make_fault(code=ErrorCode.UNKNOWN_SERVER_ERROR))
        await producer.begin_transaction()
        await producer.send("t", b"2")
        with pytest.raises(UnknownServerError):
            await producer.commit_transaction()
        await producer.commit_transaction()
        await producer.begin_transaction()
        await producer.send("t", b"3")
        fake_broker.fault(ApiKey.END_TXN, make_fault(code=ErrorCode.INVALID_TXN_STATE))
        with pytest.raises(ProducerFencedError):
            await producer.commit_transaction()


async def test_an_unusable_coordinator_fails_the_start(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    fake_broker.fault(ApiKey.INIT_PRODUCER_ID, make_fault(code=ErrorCode.INVALID_TRANSACTION_TIMEOUT))
    with pytest.raises(Exception, match="by the test"):
        await _producer(fake_broker).start()
    fake_broker.always[ApiKey.INIT_PRODUCER_ID] = make_fault(code=ErrorCode.CONCURRENT_TRANSACTIONS)
    with pytest.raises(RequestTimeoutError, match="has not ended yet"):
        await _producer(fake_broker, default_api_timeout_ms=300).start()


# --- what is not allowed ---------------------------------------------------------------------------


async def test_outside_a_transaction_nothing_is_sent(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        with pytest.raises(TransactionStateError, match="ready to begin"):
            producer.send_nowait("t", b"1")
        for call in (producer.commit_transaction, producer.abort_transaction):
            with pytest.raises(TransactionStateError):
                await call()
        await producer.begin_transaction()
        with pytest.raises(TransactionStateError, match="in a transaction"):
            await producer.begin_transaction()
        await producer.send("t", b"1")
        await producer.commit_transaction()
        for send in (producer.send("t", b"2"), producer.send_many("t", [b"2"])):
            with pytest.raises(TransactionStateError):
                await send
        with pytest.raises(TransactionStateError):
            await producer.send_batch("t", 0, build_batch([b"2"]))
    async with Producer(fake_broker.address, **FAST) as plain:
        with pytest.raises(TransactionStateError, match="transactional_id"):
            plain.transaction()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"acks": 1}, "acks"),
        ({"enable_idempotence": False}, "enable.idempotence"),
        ({"retries": 0}, "retries"),
        ({"transactional_id": ""}, "transactional.id"),
        ({"transaction_timeout_ms": 0}, "transaction.timeout.ms"),
    ],
)
def test_settings_that_contradict_transactions(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Producer("localhost:1", **{"transactional_id": "app", **settings})
    assert raised.value.key == key


# --- offsets ---------------------------------------------------------------------------------------

T0 = TopicPartition("in", 0)


class _Consumer:
    def __init__(self, *epochs: int) -> None:
        self.epochs = list(epochs)

    def positions(self) -> dict[TopicPartition, Any]:
        return {T0: OffsetAndMetadata(7, 3, "m"), TopicPartition("in", 1): None}

    def group_metadata(self) -> GroupMetadata:
        epoch = self.epochs.pop(0) if len(self.epochs) > 1 else self.epochs[0]
        return GroupMetadata("g", "member", epoch, "instance")


async def test_offsets_are_part_of_the_transaction(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer:
        async with producer.transaction() as transaction:
            await transaction.send_offsets(_Consumer(4))
        await producer.begin_transaction()
        await producer.send_offsets({T0: 9}, GroupMetadata("g", "member", 5))
        await producer.send_offsets({}, "nobody")
        await producer.commit_transaction()
        with pytest.raises(TransactionStateError, match="ready"):
            await producer.send_offsets({T0: 9}, "g")
    first, second = coordinator.offsets
    assert first[:7] == ("app", 5000, 0, "g", "member", 4, "instance")
    (offset,) = first.offsets
    assert (offset.topic, offset.partition, offset.offset, offset.leader_epoch, offset.metadata) == (
        "in",
        0,
        7,
        3,
        "m",
    )
    assert second[:7] == ("app", 5000, 1, "g", "member", 5, None)
    assert len(coordinator.ends) == 2, "offsets alone make a transaction"


async def test_offsets_need_a_group(fake_broker: Any, coordinator: Any) -> None:
    async with _producer(fake_broker) as producer, producer.transaction():
        with pytest.raises(TransactionStateError, match="group"):
            await producer.send_offsets({T0: 9})
    assert coordinator.offsets == []


async def test_offsets_wait_for_the_members_newer_epoch(fake_broker: Any, coordinator: Any) -> None:
    stale = int(ErrorCode.STALE_MEMBER_EPOCH)
    coordinator.offset_codes = [int(ErrorCode.CONCURRENT_TRANSACTIONS), stale, stale]
    async with _producer(fake_broker) as producer, producer.transaction():
        await producer.send_offsets(_Consumer(4, 4, 4, 5))
    assert [request.member_epoch for request in coordinator.offsets] == [4, 4, 4, 5]


@pytest.mark.parametrize(
    "code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.FENCED_INSTANCE_ID]
)
async def test_a_consumer_that_was_expelled_commits_nothing_r35(
    fake_broker: Any, coordinator: Any, code: ErrorCode
) -> None:
    coordinator.offset_codes = [int(code)]
    async with _producer(fake_broker) as producer:
        with pytest.raises(CommitFailedError, match="refused"):
            async with producer.transaction():
                await producer.send("t", b"no")
                await producer.send_offsets(_Consumer(4))
        async with producer.transaction():
            await producer.send("t", b"yes")
    assert coordinator.committed("t") == [b"yes"]


async def test_after_refused_offsets_the_transaction_is_not_committed(
    fake_broker: Any, coordinator: Any
) -> None:
    coordinator.offset_codes = [int(ErrorCode.OFFSET_METADATA_TOO_LARGE), int(ErrorCode.PRODUCER_FENCED)]
    async with _producer(fake_broker) as producer:
        with pytest.raises(TransactionAbortableError):
            async with producer.transaction():
                await producer.send("t", b"no")
                with pytest.raises(Exception, match="by the test"):
                    await producer.send_offsets(_Consumer(4))
        with pytest.raises(ProducerFencedError):
            async with producer.transaction():
                await producer.send_offsets(_Consumer(4))
    assert coordinator.committed("t") == []


async def test_after_offsets_with_an_unknown_outcome_the_transaction_is_not_committed(
    fake_broker: Any, coordinator: Any, make_fault: Any
) -> None:
    gate = asyncio.Event()
    async with _producer(fake_broker) as producer:
        fake_broker.fault(ApiKey.TXN_OFFSET_COMMIT, make_fault(hold=gate))
        with pytest.raises(TransactionAbortableError, match="cancelled"):
            async with producer.transaction():
                sending = asyncio.ensure_future(producer.send_offsets(_Consumer(4)))
                await eventually(lambda: fake_broker.count(ApiKey.TXN_OFFSET_COMMIT))
                with pytest.raises(TransactionStateError, match="not returned"):
                    await producer.commit_transaction()
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                gate.set()
    assert [end[3] for end in coordinator.ends] == [False]
