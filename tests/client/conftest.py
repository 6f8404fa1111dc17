"""A small broker for the client's tests: batches in memory, and every fault on request."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.errors import BrokerError, ErrorCode
from kafkalite.model import EARLIEST, LATEST, MAX_TIMESTAMP, Record
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import BadRequest, Request, ServerConnection
from kafkalite.protocol.messages.data import (
    EpochEnd,
    FetchedPartition,
    FetchResponse,
    InitProducerIdResponse,
    ListedOffset,
    ListOffsetsResponse,
    OffsetsForLeaderEpochResponse,
    ProducedPartition,
    ProduceResponse,
)
from kafkalite.protocol.messages.metadata import (
    ApiVersionRange,
    ApiVersionsResponse,
    BrokerMetadata,
    MetadataResponse,
    PartitionMetadata,
    TopicMetadata,
)
from kafkalite.records.batch import RecordBatch, iter_batches
from kafkalite.records.header import check, stamp
from kafkalite.storage.producer_state import ProducerStates
from kafkalite.transport import transport_for

_numbers = itertools.count(1)
_producer_ids = itertools.count(1000)


@dataclass
class Fault:
    """What to do with a request instead of, or in addition to, serving it."""

    drop: bool = False  # never respond
    close: bool = False  # close the connection without a response
    serve_first: bool = False  # serve the request first
    code: int = 0  # respond with this error for every partition (or topic)
    refuse: int = 0  # respond with this error for the whole request
    hold: asyncio.Event | None = None  # respond when it is set
    only: tuple[str, int] | None = None  # ``code`` is only for this partition


@dataclass
class FakeLog:
    batches: list[bytes] = field(default_factory=list)
    start: int = 0
    end: int = 0
    epoch: int = 1  # of the leader
    producers: ProducerStates = field(default_factory=ProducerStates)

    def append(self, batch: bytes | memoryview) -> int:
        """Append. Raises the error of the producer's sequence; a duplicate returns its first offset."""
        own = bytearray(batch)
        header = check(own)
        if header.producer_id >= 0:
            self.producers.check_open(header)
            repeated = self.producers.check(header, own)
            if repeated is not None:
                return repeated.base_offset
        base = self.end
        stamp(own, base_offset=base, leader_epoch=self.epoch)
        self.batches.append(bytes(own))
        self.end += header.record_count
        if header.is_transactional:
            self.producers.note_open(header.producer_id, header.producer_epoch, base, 0)
        if header.producer_id >= 0:
            self.producers.note(
                header.producer_id, header.producer_epoch, header.base_sequence, base, self.end - 1, 0, 0
            )
        return base

    def truncate(self, end: int) -> None:
        """Lose whole batches from ``end`` on, as by an unclean election."""
        while self.batches and RecordBatch(self.batches[-1]).header.next_offset > end:
            self.end = RecordBatch(self.batches.pop()).header.base_offset

    def end_of(self, epoch: int) -> tuple[int, int]:
        """The largest epoch not above, and its end: R4."""
        headers = [RecordBatch(batch, check_crc=False).header for batch in self.batches]
        known = [header for header in headers if header.leader_epoch <= epoch]
        if not known:
            return epoch, headers[0].base_offset if headers else self.start
        later = [header.base_offset for header in headers if header.leader_epoch > epoch]
        return known[-1].leader_epoch, later[0] if later else self.end

    def read(self, offset: int, max_bytes: int) -> bytes:
        chosen: list[bytes] = []
        size = 0
        for batch in self.batches:
            if RecordBatch(batch, check_crc=False).header.next_offset <= offset:
                continue
            if chosen and size + len(batch) > max_bytes:
                break
            chosen.append(batch)
            size += len(batch)
        return b"".join(chosen)


class FakeConnection(asyncio.BufferedProtocol):
    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.protocol = ServerConnection()
        self.transport: Any = None
        self.answers: deque[asyncio.Task[Any]] = deque()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.broker.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.protocol.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        for request in self.protocol.buffer_updated(nbytes):
            before = self.answers[-1] if self.answers else None
            self.answers.append(asyncio.ensure_future(self._answer(request, before)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.broker.connections.discard(self)
        for answer in self.answers:
            answer.cancel()

    async def _answer(self, request: Request | BadRequest, before: asyncio.Task[Any] | None) -> None:
        """Responses are sent in the order of requests."""
        buffers = await self.broker.serve(self, request)
        if before is not None:
            await before
        if buffers is not None and not self.transport.is_closing():
            self.transport.writelines(buffers)


class FakeBroker:
    """One node that leads everything, unless ``leaders`` says otherwise."""

    def __init__(self, node_id: int = 1, peers: dict[int, FakeBroker] | None = None) -> None:
        self.node_id = node_id
        self.address = f"inproc://fake-{next(_numbers)}"
        self.peers = peers if peers is not None else {}
        self.peers[node_id] = self
        first = next(iter(self.peers.values()))
        self.topics: dict[str, int] = {} if first is self else first.topics
        self.leaders: dict[tuple[str, int], int] = {} if first is self else first.leaders
        self.epochs: dict[tuple[str, int], int] = {} if first is self else first.epochs
        self.logs: defaultdict[tuple[str, int], FakeLog] = (
            defaultdict(FakeLog) if first is self else first.logs
        )
        self.auto_create = 1  # partitions of automatically created topics; 0: none are created
        self.connections: set[FakeConnection] = set()
        self.requests: list[Request] = []
        self.faults: defaultdict[int, deque[Fault]] = defaultdict(deque)
        self.always: dict[int, Fault] = {}
        self.controller_id = 1  #: in its metadata; -1 if it reaches no controller
        self.appended = asyncio.Event()
        self.missing_outcomes = False
        self.handlers: dict[ApiKey, Callable[..., Any]] = {}  # besides the built-in ones
        self.verify: Callable[..., None] | None = None  # (transactional id, header) of each batch
        self._listener: Any = None

    # --- for tests

    async def start(self) -> None:
        self._listener = await transport_for(self.address).listen(self.address, lambda: FakeConnection(self))

    async def stop(self) -> None:
        self._listener.close()
        self.disconnect()
        await self._listener.wait_closed()
        for _ in range(5):
            await asyncio.sleep(0)

    def disconnect(self) -> None:
        for connection in list(self.connections):
            connection.transport.abort()

    def fault(self, api: ApiKey, *faults: Fault | None, times: int = 1) -> None:
        """Apply these faults to the next requests of ``api``, one each. None is no fault."""
        for _ in range(times):
            self.faults[api].extend(fault or Fault() for fault in faults)

    def count(self, api: ApiKey) -> int:
        return Counter(request.api_key for request in self.requests)[api]

    def records(self, topic: str, partition: int) -> list[Record]:
        found: list[Record] = []
        for batch in self.logs[topic, partition].batches:
            found += RecordBatch(batch).records(topic, partition)
        return found

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [record.value for record in self.records(topic, partition)]

    # --- serving

    async def serve(self, connection: FakeConnection, request: Request | BadRequest) -> Any:
        assert isinstance(request, Request), request
        self.requests.append(request)
        queue = self.faults[request.api_key]
        fault = queue.popleft() if queue else self.always.get(request.api_key, Fault())
        if fault.hold is not None:
            await fault.hold.wait()
        if fault.drop:
            if fault.serve_first:
                await self._serve(request, fault)
            await asyncio.Event().wait()
        if fault.close:
            if fault.serve_first:
                await self._serve(request, fault)
            connection.transport.abort()
            return None
        if fault.refuse:
            return connection.protocol.send_error(request, fault.refuse, "refused by the test")
        message, payload = await self._serve(request, fault)
        return connection.protocol.send(request, message, payload)

    async def _serve(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        handler: Callable[..., Any] = {
            ApiKey.API_VERSIONS: self._api_versions,
            ApiKey.METADATA: self._metadata,
            ApiKey.PRODUCE: self._produce,
            ApiKey.FETCH: self._fetch,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.INIT_PRODUCER_ID: self._init_producer_id,
            ApiKey.OFFSETS_FOR_LEADER_EPOCH: self._epoch_ends,
            **self.handlers,
        }[ApiKey(request.api_key)]
        answer = handler(request, fault)
        return await answer if asyncio.iscoroutine(answer) else answer

    def _api_versions(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        ranges = [ApiVersionRange(api.key, api.min_version, api.max_version) for api in APIS.values()]
        return ApiVersionsResponse(0, None, "fake", "0", ranges), []

    def _metadata(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        asked = request.message.topics
        for name in asked or []:
            if name not in self.topics and request.message.allow_auto_topic_creation and self.auto_create:
                self.topics[name] = self.auto_create
        names = sorted(self.topics) if asked is None else asked
        topics = []
        for name in names:
            if fault.code or name not in self.topics:
                code = fault.code or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                topics.append(TopicMetadata(int(code), "by the test", name, "", False, []))
                continue
            partitions = [
                PartitionMetadata(
                    0,
                    number,
                    self.leaders.get((name, number), 1),
                    self.epochs.get((name, number), 1),
                    0,
                    [1],
                    [1],
                    [],
                )
                for number in range(self.topics[name])
            ]
            topics.append(TopicMetadata(0, None, name, f"{hash(name) % 10**8:032}", False, partitions))
        brokers = [BrokerMetadata(node_id, peer.address, None) for node_id, peer in self.peers.items()]
        return MetadataResponse(0, None, "fake-cluster", self.controller_id, brokers, topics), []

    def _error(self, fault: Fault, topic: str, partition: int) -> int:
        if fault.code and (fault.only is None or fault.only == (topic, partition)):
            return int(fault.code)
        if partition >= self.topics.get(topic, 0):
            return int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if self.leaders.get((topic, partition), 1) != self.node_id:
            return int(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return 0

    def _produce(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        outcomes = []
        position = 0
        for asked in request.message.partitions:
            batch = request.payload[position : position + asked.length_bytes]
            position += asked.length_bytes
            code = self._error(fault, asked.topic, asked.partition)
            base = -1
            if not code:
                try:
                    if self.verify is not None:
                        self.verify(request.message.transactional_id, check(batch))
                    base = self.logs[asked.topic, asked.partition].append(batch)
                except BrokerError as error:
                    code = int(error.code)
            outcomes.append(
                ProducedPartition(
                    asked.topic, asked.partition, code, "by the test" if code else None, base, -1, 0
                )
            )
        self._wake()
        if self.missing_outcomes:
            outcomes = []
        return ProduceResponse(0, None, outcomes), []

    def _init_producer_id(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        return InitProducerIdResponse(int(fault.code), None, next(_producer_ids), 0), []

    def append(self, topic: str, partition: int, batch: bytes | bytearray) -> int:
        """Put a batch straight into a log."""
        base = self.logs[topic, partition].append(batch)
        self._wake()
        return base

    def _wake(self) -> None:
        self.appended.set()
        self.appended = asyncio.Event()

    async def _fetch(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        message = request.message
        response, payload, has_error = self._read(message, fault)
        if not has_error and sum(map(len, payload)) < message.min_bytes and message.max_wait_ms:
            try:
                async with asyncio.timeout(message.max_wait_ms / 1000):
                    while sum(map(len, payload)) < message.min_bytes:
                        await self.appended.wait()
                        response, payload, _ = self._read(message, fault)
            except TimeoutError:
                pass
        return response, payload

    def _read(self, message: Any, fault: Fault) -> tuple[Any, list[bytes], bool]:
        results, payload, has_error = [], [], False
        for asked in message.partitions:
            code = self._error(fault, asked.topic, asked.partition)
            code = code or self._epoch_error(asked.topic, asked.partition, asked.current_leader_epoch)
            log = self.logs[asked.topic, asked.partition]
            if not code and not log.start <= asked.fetch_offset <= log.end:
                code = int(ErrorCode.OFFSET_OUT_OF_RANGE)
            data = b"" if code else log.read(asked.fetch_offset, asked.max_bytes)
            has_error = has_error or bool(code)
            payload.append(data)
            results.append(
                FetchedPartition(
                    asked.topic, asked.partition, code, None, log.end, log.end, log.start, len(data), []
                )
            )
        return FetchResponse(0, None, results), payload, has_error

    def _list_offsets(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        listed = []
        for asked in request.message.partitions:
            code = self._error(fault, asked.topic, asked.partition)
            log = self.logs[asked.topic, asked.partition]
            offset, time_ms = self._offset_at(log, asked.timestamp_ms)
            listed.append(
                ListedOffset(asked.topic, asked.partition, code, None, time_ms, -1 if code else offset, 1)
            )
        return ListOffsetsResponse(0, None, listed), []

    def _epoch_ends(self, request: Request, fault: Fault) -> tuple[Any, list[bytes]]:
        ends = []
        for asked in request.message.partitions:
            code = self._error(fault, asked.topic, asked.partition)
            code = code or self._epoch_error(asked.topic, asked.partition, asked.current_leader_epoch)
            log = self.logs[asked.topic, asked.partition]
            epoch, end = log.end_of(asked.leader_epoch)
            ends.append(EpochEnd(asked.topic, asked.partition, code, None, epoch, -1 if code else end))
        return OffsetsForLeaderEpochResponse(0, None, ends), []

    def _epoch_error(self, topic: str, partition: int, epoch: int) -> int:
        """Return the error if the request's epoch differs from the partition's."""
        current = self.epochs.get((topic, partition), 1)
        if epoch in {-1, current}:
            return 0
        return int(ErrorCode.FENCED_LEADER_EPOCH if epoch < current else ErrorCode.UNKNOWN_LEADER_EPOCH)

    def _offset_at(self, log: FakeLog, timestamp_ms: int) -> tuple[int, int]:
        if timestamp_ms == EARLIEST:
            return log.start, -1
        if timestamp_ms == LATEST:
            return log.end, -1
        headers = [batch.header for data in log.batches for batch in iter_batches(data)]
        if timestamp_ms == MAX_TIMESTAMP:
            timestamp_ms = max((header.max_timestamp_ms for header in headers), default=-1)
        for header in headers:
            if header.max_timestamp_ms >= timestamp_ms:
                return header.base_offset, header.max_timestamp_ms
        return -1, -1


@pytest_asyncio.fixture
async def fake_broker() -> AsyncIterator[FakeBroker]:
    broker = FakeBroker()
    await broker.start()
    yield broker
    await broker.stop()


@pytest_asyncio.fixture
async def fake_cluster() -> AsyncIterator[list[FakeBroker]]:
    """Two nodes that share logs and metadata. ``leaders`` of either names the leaders."""
    peers: dict[int, FakeBroker] = {}
    brokers = [FakeBroker(1, peers), FakeBroker(2, peers)]
    for broker in brokers:
        await broker.start()
    yield brokers
    for broker in brokers:
        await broker.stop()


@pytest.fixture
def make_fault() -> type[Fault]:
    return Fault
