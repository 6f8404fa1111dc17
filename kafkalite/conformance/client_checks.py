"""Checks the requests of a client, for ``kl conformance --listen``, in the bytes of both directions. Pure.

A ``Judge`` watches all connections of a run, and expects one client program at a time. A check is made
whenever the client does what the check examines. A check that finds one violation has failed. A check that
was never made counts as not exercised.
"""

# Tests: tests/conformance/test_clients.py

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kafkalite.errors import BrokerError, ErrorCode, KafkaliteError, RemoteProtocolError, broker_error
from kafkalite.model import TopicPartition
from kafkalite.protocol import codec
from kafkalite.protocol.api import APIS, LATER_APIS, ApiKey
from kafkalite.protocol.connection import BadRequest, Request, RequestError, ServerConnection
from kafkalite.protocol.frames import FrameReader
from kafkalite.protocol.messages.data import (
    FetchRequest,
    FetchResponse,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)
from kafkalite.protocol.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    FindCoordinatorRequest,
    OffsetCommitRequest,
    TxnOffsetCommitRequest,
)
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.protocol.messages.transactions import EndTxnRequest, EndTxnResponse
from kafkalite.records import header as batch_header
from kafkalite.records.header import BatchHeader
from kafkalite.records.readable import check_readable

#: {name: (section of docs/protocol.md, what the client must do)}, in the order of the report.
CLIENT_CHECKS: Final[dict[str, tuple[str, str]]] = {
    "handshake.first-request": ("1", "the first request of a connection is ApiVersions"),
    "handshake.response-first": ("1", "the response to ApiVersions is read before anything else is sent"),
    "frames.layout": ("2", "frames have correct lengths, within the limits"),
    "envelope.body": ("3", "a body has exactly the fields of its struct, with their types"),
    "correlation-ids.unique": ("1", "correlation ids are unique among the requests in flight"),
    "versions.offered": ("4", "each request has an API and a version that the server offers"),
    "produce.batch": ("5", "a batch has its length, its CRC-32C and columns that can be read"),
    "idempotence.producer-id": ("5.1", "a producer id and its epoch come from the server"),
    "idempotence.sequences": ("5.1", "sequences begin at 0 and continue without a gap in each partition"),
    "idempotence.repetition": ("5.1", "a batch that is sent again has the same bytes"),
    "idempotence.in-flight": ("5.1", "at most five requests with batches of a partition are in flight"),
    "retries.produce": ("4", "a batch is sent again after a retriable error"),
    "retries.fetch": ("4", "a partition is fetched again after a retriable error"),
    "metadata.refresh": ("4", "Metadata is requested before the repetition, after an error marked refresh"),
    "groups.coordinator": ("6", "FindCoordinator is sent before the first request about a group"),
    "groups.epoch": ("6", "a heartbeat has the epoch of the last response; 0 only to join"),
    "groups.owned": ("6", "the first heartbeat at a new epoch names the partitions that are owned"),
    "groups.commits": ("6", "a member commits with its current epoch"),
    "groups.leave": ("9", "a member leaves its group before its last connection ends"),
    "transactions.identity": ("5.1", "EndTxn and TxnOffsetCommit have the newest producer id and epoch"),
}
PASSED: Final = "passed"
FAILED: Final = "failed"
UNTOUCHED: Final = "not exercised"

#: The number of batches of one producer in one partition whose CRCs are remembered.
_KEPT_BATCHES: Final = 100
_MAX_IN_FLIGHT: Final = 5
_SEQUENCES: Final = 1 << 31


class ClientResult(NamedTuple):
    """The result of one check. ``times`` is the number of times that it was made. ``detail`` is the first
    violation or, if there is none, the rule."""

    name: str
    section: str
    status: str
    times: int
    detail: str


@dataclass(slots=True)
class _Sequences:
    """The batches of one producer id and epoch in one partition."""

    next_sequence: int = 0
    sent: dict[int, int] = field(default_factory=dict)  #: {base sequence: CRC}, the newest


@dataclass(slots=True)
class _Member:
    epochs: deque[int] = field(
        default_factory=lambda: deque(maxlen=2)
    )  #: from responses, the last one newest
    is_in: bool = False
    has_left: bool = False  #: since it last joined; responses to earlier heartbeats may still arrive
    must_name_owned: bool = False  #: whether the next heartbeat must name the owned partitions
    is_alone: bool = True  #: no heartbeat has failed since the last response


class Judge:
    """Checks the requests of a client program on all of its connections. Counts how often each check was
    made, and keeps the first violation of each check."""

    def __init__(self) -> None:
        self.connection_count = 0
        self._open: set[Watched] = set()
        self._counts = dict.fromkeys(CLIENT_CHECKS, 0)
        self._violations: dict[str, str] = {}
        self._given: set[tuple[int, int]] = set()  # producer ids and epochs of responses
        self._newest: dict[int, int] = {}  # {producer id: its newest epoch}
        self._sequences: dict[tuple[TopicPartition, int, int], _Sequences] = {}
        self._in_flight: dict[TopicPartition, int] = {}
        #: Batches that failed with a retriable error: {CRC: whether Metadata must precede the repetition}.
        self._failed: dict[TopicPartition, dict[int, bool]] = {}
        self._unfetched: dict[TopicPartition, bool] = {}
        self._found: set[str] = set()  # keys of FindCoordinator
        self._members: dict[tuple[str, str], _Member] = {}

    def connect(self) -> Watched:
        """Return the Watched for a new connection of the client."""
        self.connection_count += 1
        watched = Watched(self)
        self._open.add(watched)
        return watched

    def disconnect(self, watched: Watched) -> None:
        """Handle the end of a connection. If it was the last open one, each member that has not left its
        group is a violation."""
        self._open.discard(watched)
        for request in watched.unanswered.values():
            self.forget(request)
        if not self._open:
            for (group_id, _), member in self._members.items():
                if member.is_in:
                    self.check("groups.leave", False, f"a member of {group_id!r} did not leave")
                    member.is_in = False

    def results(self) -> list[ClientResult]:
        """Return the result of each check.

        A request that failed with a retriable error, and that the client has not repeated yet, counts as a
        violation.
        """
        for tp, waiting in self._failed.items():
            if waiting:
                self.check("retries.produce", False, f"a batch of {tp} was not sent again")
        for tp in self._unfetched:
            self.check("retries.fetch", False, f"{tp} was not fetched again")
        found = []
        for name, (section, rule) in CLIENT_CHECKS.items():
            count, violation = self._counts[name], self._violations.get(name)
            status = FAILED if violation else PASSED if count else UNTOUCHED
            found.append(ClientResult(name, section, status, count, violation or rule))
        return found

    def check(self, name: str, is_met: bool, violation: str = "") -> None:
        """Record that check ``name`` was made. Only its first violation is kept."""
        self._counts[name] += 1
        if not is_met:
            self._violations.setdefault(name, violation)

    # --- requests

    def on_request(self, request: Request) -> None:
        message = request.message
        if isinstance(message, ProduceRequest):
            self._on_produce(message, request.payload)
        elif isinstance(message, FetchRequest):
            self._on_fetch(message)
        elif isinstance(message, MetadataRequest):
            self._on_metadata()
        elif isinstance(message, FindCoordinatorRequest):
            self._found.update(message.keys)
        elif isinstance(message, ConsumerGroupHeartbeatRequest):
            self._check_coordinator(message.group_id)
            self._on_heartbeat(message)
        elif isinstance(message, OffsetCommitRequest):
            self._check_coordinator(message.group_id)
            if message.member_id:
                epochs = self._member(message.group_id, message.member_id).epochs
                found = f"a commit at epoch {message.member_epoch}, after {list(epochs)}"
                self.check("groups.commits", message.member_epoch in epochs, found)
        elif isinstance(message, EndTxnRequest | TxnOffsetCommitRequest):
            pair = (message.producer_id, message.producer_epoch)
            is_newest = self._newest.get(pair[0]) == pair[1]
            self.check("transactions.identity", is_newest, f"producer id and epoch {pair} are not the newest")

    def _on_produce(self, message: ProduceRequest, payload: memoryview) -> None:
        position = 0
        for part in message.partitions:
            batch = payload[position : position + part.length_bytes]
            position += part.length_bytes
            tp = TopicPartition(part.topic, part.partition)
            self._in_flight[tp] = self._in_flight.get(tp, 0) + 1
            try:
                header = batch_header.check(batch)
                check_readable(batch, header)
            except KafkaliteError as error:
                self.check("produce.batch", False, f"{tp}: {error.message}")
                continue
            self.check("produce.batch", True)
            self._on_repetition(tp, header)
            if header.producer_id >= 0:
                self._on_sequence(tp, header)

    def _on_repetition(self, tp: TopicPartition, header: BatchHeader) -> None:
        """If the batch repeats one that failed with a retriable error, record the checks of the retry."""
        waiting = self._failed.get(tp)
        if not waiting:
            return
        # A batch without a producer id may be built again, with other bytes.
        crc = header.crc if header.producer_id >= 0 else next(iter(waiting))
        must_refresh = waiting.pop(crc, None)
        if must_refresh is not None:
            self.check("retries.produce", True)
            if must_refresh:
                self.check("metadata.refresh", False, f"a batch of {tp} was sent again without it")

    def _on_sequence(self, tp: TopicPartition, header: BatchHeader) -> None:
        producer = (header.producer_id, header.producer_epoch)
        self.check("idempotence.producer-id", producer in self._given, f"{producer} was never given")
        count = self._in_flight[tp]
        self.check("idempotence.in-flight", count <= _MAX_IN_FLIGHT, f"{count} requests for {tp}")
        state = self._sequences.setdefault((tp, *producer), _Sequences())
        base, crc = header.base_sequence, state.sent.get(header.base_sequence)
        if crc is not None:
            self.check("idempotence.repetition", crc == header.crc, f"{tp}: other bytes at sequence {base}")
            return
        expected = state.next_sequence
        self.check("idempotence.sequences", base == expected, f"{tp}: {base}, where {expected} is next")
        state.next_sequence = (base + header.last_offset_delta + 1) % _SEQUENCES
        state.sent[base] = header.crc
        if len(state.sent) > _KEPT_BATCHES:
            del state.sent[next(iter(state.sent))]

    def _on_fetch(self, message: FetchRequest) -> None:
        for part in message.partitions:
            tp = TopicPartition(part.topic, part.partition)
            must_refresh = self._unfetched.pop(tp, None)
            if must_refresh is not None:
                self.check("retries.fetch", True)
                if must_refresh:
                    self.check("metadata.refresh", False, f"{tp} was fetched again without it")

    def _on_metadata(self) -> None:
        waits = any(any(waiting.values()) for waiting in self._failed.values())
        if waits or any(self._unfetched.values()):
            self.check("metadata.refresh", True)
        for waiting in self._failed.values():
            for crc in waiting:
                waiting[crc] = False
        self._unfetched = dict.fromkeys(self._unfetched, False)

    def _check_coordinator(self, group_id: str) -> None:
        self.check("groups.coordinator", group_id in self._found, f"group {group_id!r}")

    def _member(self, group_id: str, member_id: str) -> _Member:
        return self._members.setdefault((group_id, member_id), _Member())

    def _on_heartbeat(self, message: ConsumerGroupHeartbeatRequest) -> None:
        member = self._member(message.group_id, message.member_id)
        epoch = message.member_epoch
        if epoch < 0:
            self.check("groups.leave", True)
            member.is_in, member.has_left = False, True
        elif epoch == 0:
            member.has_left = False
            found = f"a member at epoch {list(member.epochs)} joined again, although no heartbeat had failed"
            self.check("groups.epoch", not member.is_in or not member.is_alone, found)
        else:
            found = f"a heartbeat at epoch {epoch}, after {list(member.epochs)}"
            self.check("groups.epoch", epoch in member.epochs, found)
            if member.must_name_owned and epoch == member.epochs[-1]:
                found = f"the first heartbeat at epoch {epoch} has owned nil"
                self.check("groups.owned", message.owned is not None, found)
                member.must_name_owned = False

    # --- responses

    def on_response(self, request: Request, message: Any) -> None:
        """Handle a response. ``message`` is a RequestError if the request failed as a whole."""
        asked = request.message
        self.forget(request)
        if isinstance(asked, ConsumerGroupHeartbeatRequest):
            self._on_heartbeat_response(asked, message)
        elif isinstance(message, InitProducerIdResponse | EndTxnResponse):
            self._given.add((message.producer_id, message.producer_epoch))
            self._newest[message.producer_id] = message.producer_epoch
        elif isinstance(asked, ProduceRequest) and isinstance(message, ProduceResponse):
            crcs = _crcs(asked, request.payload)
            for part in message.partitions:
                tp = TopicPartition(part.topic, part.partition)
                error = _retriable(part.error_code)
                # With acks=0 the response is not passed on, so the client cannot know of the error.
                if error is not None and tp in crcs and asked.acks != 0:
                    self._failed.setdefault(tp, {})[crcs[tp]] = error.refresh_metadata
        elif isinstance(message, FetchResponse):
            for fetched in message.partitions:
                error = _retriable(fetched.error_code)
                if error is not None:
                    self._unfetched[TopicPartition(fetched.topic, fetched.partition)] = error.refresh_metadata

    def _on_heartbeat_response(self, asked: ConsumerGroupHeartbeatRequest, message: Any) -> None:
        member = self._member(asked.group_id, asked.member_id)
        if not isinstance(message, ConsumerGroupHeartbeatResponse) or message.error_code:
            member.is_alone = False
            return
        member.is_alone = True
        if message.member_epoch > 0 and not member.has_left:
            member.is_in = True
            if not member.epochs or member.epochs[-1] != message.member_epoch:
                member.epochs.append(message.member_epoch)
                member.must_name_owned = True

    def forget(self, request: Request) -> None:
        """Remove a request from those in flight, because its response has arrived or is not expected any
        more."""
        if isinstance(request.message, ProduceRequest):
            for part in request.message.partitions:
                self._in_flight[TopicPartition(part.topic, part.partition)] -= 1
        elif isinstance(request.message, ConsumerGroupHeartbeatRequest):
            # Without a response the member does not know its epoch.
            self._member(request.message.group_id, request.message.member_id).is_alone = False


class Watched:
    """Decodes the bytes of one connection in both directions, and passes the messages to the Judge."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._server = ServerConnection()
        self._responses = FrameReader()
        self._is_damaged = False
        self._has_versions = False  # the response to ApiVersions has arrived
        self.unanswered: dict[int, Request] = {}

    def from_client(self, data: bytes) -> None:
        """Handle bytes of the client, before they are passed to the server."""
        while data and not self._is_damaged:
            buffer = self._server.get_buffer()
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            try:
                for event in self._server.buffer_updated(count):
                    self._on_event(event)
            except RemoteProtocolError as error:
                self._damage(error.message)

    def _damage(self, violation: str) -> None:
        self._is_damaged = True
        self._judge.check("frames.layout", False, violation)

    def _on_event(self, event: Request | BadRequest) -> None:
        judge = self._judge
        if isinstance(event, BadRequest):
            self._is_damaged = event.fatal
            judge.check(_broken_check(event), False, event.error_message)
            return
        key, number = event.api_key, event.correlation_id
        judge.check("frames.layout", True)
        judge.check("envelope.body", True)
        judge.check("versions.offered", True)
        if key == ApiKey.API_VERSIONS:
            judge.check("handshake.first-request", True)
        else:
            found = f"{APIS[key].key.name} was sent before the response"
            judge.check("handshake.response-first", self._has_versions, found)
        judge.check("correlation-ids.unique", number not in self.unanswered, f"{number} is in flight already")
        earlier = self.unanswered.get(number)
        if earlier is not None:
            judge.forget(earlier)  # both responses have the same id, so the first is not awaited any more
        self.unanswered[number] = event
        judge.on_request(event)

    def from_server(self, data: bytes) -> None:
        """Handle bytes of the server, before they are passed to the client."""
        while data:
            buffer = self._responses.get_buffer()
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            for frame in self._responses.buffer_updated(count):
                head = codec.decode_response_head(frame.envelope)
                request = self.unanswered.pop(head.correlation_id, None)
                if request is None:
                    continue  # an error, or one of two requests with one number
                self._has_versions = True
                key, version = request.api_key, request.api_version
                response = (LATER_APIS[key, version] if version else APIS[key]).response
                message = codec.decode_response_body(response, RequestError, head.body)
                self._judge.on_response(request, message)

    def end(self) -> None:
        """Handle the end of the connection."""
        if not self._is_damaged:
            try:
                self._server.eof()
            except RemoteProtocolError as error:
                self._damage(error.message)
        self._judge.disconnect(self)


def _broken_check(bad: BadRequest) -> str:
    """Return the check that a refused request violates."""
    if bad.error_code in (ErrorCode.UNKNOWN_API, ErrorCode.UNSUPPORTED_VERSION):
        return "versions.offered"
    if bad.error_code != ErrorCode.INVALID_REQUEST or bad.correlation_id < 0:
        return "frames.layout"
    return "handshake.first-request" if bad.fatal else "envelope.body"


def _crcs(asked: ProduceRequest, payload: memoryview) -> dict[TopicPartition, int]:
    """Return the CRC of the batch for each partition of a request. Batches whose header cannot be read are
    omitted."""
    found: dict[TopicPartition, int] = {}
    position = 0
    for part in asked.partitions:
        batch = payload[position : position + part.length_bytes]
        position += part.length_bytes
        try:
            found[TopicPartition(part.topic, part.partition)] = batch_header.parse_header(batch).crc
        except KafkaliteError:
            continue
    return found


def _retriable(code: int) -> type[BrokerError] | None:
    """Return the class of a retriable error, otherwise None."""
    if code == ErrorCode.NONE:
        return None
    error = type(broker_error(code))
    return error if error.retriable else None
