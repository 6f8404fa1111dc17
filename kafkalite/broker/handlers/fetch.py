"""Fetch: returns complete batches from an offset on, as they are stored in the segments."""

# Tests: tests/broker/test_handlers.py

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.partitions.partitions import Partitions
from kafkalite.broker.partitions.waiters import AppendedWaiter, Key, Waiters
from kafkalite.broker.quotas.quota_manager import QuotaManager
from kafkalite.broker.replication.near_reads import NearReads
from kafkalite.broker.server.client import NOTHING_REFUSED, Client
from kafkalite.broker.server.error_responses import STOPS, translate
from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import HeldResponse, Pending, Refusal, Reply, Response
from kafkalite.broker.server.turns import PARTITIONS_PER_TURN, InTurns, Steps
from kafkalite.clock import Clock
from kafkalite.errors import BrokerError, ErrorCode, InvalidRequestError, StorageError
from kafkalite.model import NO_OFFSET, IsolationLevel
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.data import (
    AbortedTransaction,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchRequestV1,
    FetchResponse,
    FetchResponseV1,
    PreferredReplica,
)
from kafkalite.replication.partition import Partition
from kafkalite.security.acls import Operation

#: ``Partitions.leader`` or ``Partitions.readable``.
Find: TypeAlias = Callable[..., Partition]

#: More than all bytes that can become readable while the steps of one request run.
_NEVER_ENOUGH: Final = 1 << 70
_IS_READ_COMMITTED: Final = {int(level): level is IsolationLevel.READ_COMMITTED for level in IsolationLevel}


class FetchServices(Protocol):
    """The parts of a broker that this handler uses."""

    clock: Clock
    config: BrokerConfig
    metrics: Metrics
    near_reads: NearReads
    partitions: Partitions
    quotas: QuotaManager
    waiters: Waiters
    is_stopping: bool

    def on_broken(self, error: BaseException, /) -> None: ...


class _Read(NamedTuple):
    """A response with the data that is readable now, and whether it must be sent."""

    reply: Reply
    size_bytes: int
    is_final: bool  #: whether to send it now, because a partition failed or a watched one has data
    missed_bytes: int = 0  #: at most so many bytes became readable between the steps of the read

    def missing_bytes(self, message: FetchRequest) -> int:
        """Return how many more bytes must become readable before the response is sent; 0 or less means none.

        The number is at most 1 if an open transaction holds back bytes of a partition, because the end of
        that transaction can make any number of bytes readable.
        """
        partitions = self.reply.message.partitions
        if any(one.last_stable_offset < one.high_watermark for one in partitions):
            return min(1, message.min_bytes - self.size_bytes)
        return message.min_bytes - self.size_bytes


def fetch(services: FetchServices, request: Request, client: Client) -> Reply | Pending:
    """Return record batches from an offset on, as they are stored.

    Behaviour: reads each partition below its high watermark until the response has ``max_bytes``. The first
    batch of the response is complete even if it is larger. If there are fewer than ``min_bytes``, the request
    waits up to ``max_wait_ms`` for more and reads again. If a partition fails, the response is sent at once
    with its error and the data of the others. The payload consists of views of the segments' maps, without a
    copy.

    With ``read_committed`` each partition is read below its last stable offset. The response lists the
    aborted transactions among its batches (R11, R33), which the reader filters out.

    If a client fetches records again that this connection has already sent, the CRCs of their batches are
    checked first, because a consumer repeats a fetch once if it finds a batch damaged (R43).

    A consumer that states its rack (version 1) is directed to a follower in that rack, if there is a suitable
    one (R66): the response is sent at once, and has no records of that partition. A follower serves such
    consumers, and only them, below the high watermark that it knows (R65).

    A partition with ``max_bytes`` 0 is only watched: the response has its offsets and no data. As soon as a
    batch at or after ``fetch_offset`` is readable, the response is sent, regardless of ``min_bytes``.

    Deviations from Kafka: a partition with ``max_bytes`` 0 gets no batch. There are no fetch sessions.
    Without ``read_committed`` the last stable offset may be outdated, because determining it could require a
    scan of the log.

    Errors: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH,
    OFFSET_NOT_AVAILABLE (a new leader does not yet know its high watermark, or a follower does not know the
    offset to be committed), OFFSET_OUT_OF_RANGE (with the log start and the high watermark),
    TOPIC_AUTHORIZATION_FAILED, KAFKA_STORAGE_ERROR; of the whole request INVALID_REQUEST (an unknown
    isolation level).
    """
    message: FetchRequest = request.message
    if services.quotas.has_quotas and client.node_id is None:
        message = _within_quota(services, message, client.user, request.client_id or "")
    if len(message.partitions) > PARTITIONS_PER_TURN:
        return InTurns(services, _fetch_in_turns(services, message, client))
    _check_again(services, message, message.partitions, client)
    return _respond(services, message, client, _read(services, message, message.partitions, client))


def _finder(services: FetchServices, message: FetchRequest) -> Find:
    """Return the function that looks a partition up: a consumer without a rack reads from leaders only."""
    if type(message) is FetchRequestV1 and message.rack_id is not None:
        return services.partitions.readable
    return services.partitions.leader


def _within_quota(services: FetchServices, message: FetchRequest, user: str, client_id: str) -> FetchRequest:
    """Return the request with ``max_bytes`` and ``min_bytes`` limited to what the client's quota allows."""
    limit = services.quotas.max_fetch_bytes(user, client_id, services.clock.monotonic_ms())
    if limit is None or limit >= message.max_bytes:
        return message
    return message._replace(max_bytes=limit, min_bytes=min(message.min_bytes, limit))


def _check_again(
    services: FetchServices, message: FetchRequest, partitions: list[FetchPartition], client: Client
) -> None:
    """Check the CRCs of batches that were already sent on this connection.

    If a batch is damaged, this function does not raise, but the read that follows it does.
    """
    for asked in partitions:
        if asked.fetch_offset >= client.sent_ends.get(asked[:2], 0):
            continue
        with suppress(BrokerError, StorageError):
            find = _finder(services, message)
            partition = find(asked.topic, asked.partition, asked.current_leader_epoch)
            partition.check_again(asked.fetch_offset, min(asked.max_bytes, services.config.fetch_max_bytes))


def _fetch_in_turns(services: FetchServices, message: FetchRequest, client: Client) -> Steps:
    read = yield from _read_in_turns(services, message, client)
    return _respond(services, message, client, read)


def _respond(services: FetchServices, message: FetchRequest, client: Client, read: _Read) -> Reply | Pending:
    if (
        read.size_bytes >= message.min_bytes
        or read.is_final
        or message.max_wait_ms <= 0
        or services.is_stopping
    ):
        services.metrics.fetched_bytes += read.size_bytes
        return read.reply
    return _hold(services, message, client, read)


def _hold(services: FetchServices, message: FetchRequest, client: Client, read: _Read) -> HeldResponse:
    """Hold the response. Read again when ``min_bytes`` may be readable or ``max_wait_ms`` is over."""
    waiters, find = services.waiters, _finder(services, message)
    keys = [(asked.topic, asked.partition) for asked in message.partitions]
    is_watching = any(asked.max_bytes <= 0 for asked in message.partitions)
    is_committed_only = is_read_committed(message.isolation_level)
    stable_offsets: dict[Key, int] = {}  # with read_committed: the last stable offsets that were read
    waiter: AppendedWaiter
    latest = read

    def has_more_stable(key: Key) -> bool:
        try:
            return find(*key).last_stable_offset > stable_offsets[key]
        except (BrokerError, StorageError):
            return True  # the next read raises the error

    def wait(read: _Read) -> None:
        nonlocal waiter, stable_offsets
        missing_bytes = 1 if is_watching else message.min_bytes - read.size_bytes
        is_readable = None
        if is_committed_only:
            missing_bytes = min(missing_bytes, read.missing_bytes(message))
            partitions = read.reply.message.partitions
            stable_offsets = {(one.topic, one.partition): one.last_stable_offset for one in partitions}
            is_readable = has_more_stable
        waiter = waiters.appended(keys, missing_bytes, held.update, is_readable)
        if read.missed_bytes:
            waiter.missing_bytes -= read.missed_bytes
            if waiter.missing_bytes <= 0 and (is_readable is None or any(map(is_readable, keys))):
                held.update()

    def is_due(read: _Read) -> bool:
        is_enough = read.size_bytes >= message.min_bytes or read.is_final
        if not is_enough and not held.is_over and not services.is_stopping:
            wait(read)
            return False
        services.metrics.fetched_bytes += read.size_bytes
        return True

    def ask_in_turns() -> Pending:
        waiter.cancel()
        return InTurns(services, read_in_turns())

    def read_in_turns() -> Steps:
        nonlocal latest
        latest = yield from _read_in_turns(services, message, client)
        return latest.reply

    def ask() -> Response | None:
        try:
            read = _read(services, message, message.partitions, client)
        except AssertionError as error:
            services.on_broken(error)
            return STOPS
        waiter.cancel()
        return read.reply if is_due(read) else None

    if len(message.partitions) > PARTITIONS_PER_TURN:
        held = HeldResponse(
            waiters.loop,
            message.max_wait_ms,
            ask_in_turns,
            lambda response: isinstance(response, Refusal) or is_due(latest),
            on_cancel=lambda: waiter.cancel(),
        )
    else:
        held = HeldResponse(waiters.loop, message.max_wait_ms, ask, on_cancel=lambda: waiter.cancel())
    wait(read)
    held.offer(None)
    return held


def is_read_committed(isolation_level: int) -> bool:
    """Whether the isolation level is read_committed. Raises InvalidRequestError for an unknown level."""
    is_committed_only = _IS_READ_COMMITTED.get(isolation_level)
    if is_committed_only is None:
        raise InvalidRequestError(f"isolation level {isolation_level} is neither 0 nor 1")
    return is_committed_only


def _read_in_turns(
    services: FetchServices, message: FetchRequest, client: Client
) -> Generator[None, None, _Read]:
    """Read all partitions, PARTITIONS_PER_TURN in each step of the generator (S24).

    A waiter counts the bytes that become readable between the steps: no other one waits for them yet.
    """
    keys = [(asked.topic, asked.partition) for asked in message.partitions]
    counter = services.waiters.appended(keys, _NEVER_ENOUGH, lambda: None)
    try:
        read = yield from _read_steps(services, message, client)
    finally:
        missed = _NEVER_ENOUGH if counter.is_woken else _NEVER_ENOUGH - counter.missing_bytes
        counter.cancel()
    return read._replace(missed_bytes=missed)


def _read_steps(
    services: FetchServices, message: FetchRequest, client: Client
) -> Generator[None, None, _Read]:
    results: list[FetchedPartition] = []
    buffers: list[Any] = []
    preferred: list[PreferredReplica] = []
    size_bytes, is_final = 0, False
    for start in range(0, len(message.partitions), PARTITIONS_PER_TURN):
        if start:
            yield
        partitions = message.partitions[start : start + PARTITIONS_PER_TURN]
        _check_again(services, message, partitions, client)
        read = _read(services, message, partitions, client, size_bytes)
        results += read.reply.message.partitions
        buffers += read.reply.payload
        preferred += getattr(read.reply.message, "preferred_read_replicas", ())
        size_bytes, is_final = read.size_bytes, is_final or read.is_final
    return _Read(_reply(message, results, preferred, buffers), size_bytes, is_final)


def _reply(
    message: FetchRequest,
    results: list[FetchedPartition],
    preferred: list[PreferredReplica],
    buffers: list[Any],
) -> Reply:
    """Return the response in the version of the request."""
    if type(message) is FetchRequestV1:
        return Reply(FetchResponseV1(0, None, results, preferred), buffers)
    return Reply(FetchResponse(0, None, results), buffers)


def _read(
    services: FetchServices,
    message: FetchRequest,
    partitions: list[FetchPartition],
    client: Client,
    size_bytes: int = 0,
) -> _Read:
    """Read some partitions of a request, and update ``client.sent_ends``.

    ``size_bytes`` is the size of the data read for earlier partitions. The result includes that size.
    """
    left_bytes = min(message.max_bytes, services.config.fetch_max_bytes) - size_bytes
    results: list[FetchedPartition] = []
    buffers: list[Any] = []
    preferred: list[PreferredReplica] = []
    is_final = False
    is_committed_only = is_read_committed(message.isolation_level)
    refused = NOTHING_REFUSED
    if client.authorizer is not None:
        refused = client.refusals(ApiKey.FETCH, Operation.READ, [asked.topic for asked in partitions])
    rack = message.rack_id if type(message) is FetchRequestV1 else None
    find = _finder(services, message)
    for asked in partitions:
        if asked.topic in refused:
            is_final = True
            results.append(_refused(find, asked, refused[asked.topic]))
            continue
        try:
            if rack is not None:
                node_id = services.near_reads.preferred(find(*asked[:3]), rack, asked.fetch_offset)
                if node_id is not None:
                    is_final = True
                    results.append(_watch_partition(find, asked, is_committed_only)[0])
                    preferred.append(PreferredReplica(asked.topic, asked.partition, node_id))
                    continue
            if asked.max_bytes <= 0:
                result, has_data = _watch_partition(find, asked, is_committed_only)
                is_final = is_final or has_data
                results.append(result)
                continue
            result, parts, end = _read_partition(find, asked, left_bytes, size_bytes, is_committed_only)
        except Exception as error:
            is_final = True
            results.append(_refused(find, asked, error))
            continue
        results.append(result)
        if parts:
            buffers += parts
            client.sent_ends[asked[:2]] = end
            size_bytes += result.length_bytes
            left_bytes -= result.length_bytes
    return _Read(_reply(message, results, preferred, buffers), size_bytes, is_final)


def _read_partition(
    find: Find, asked: FetchPartition, left_bytes: int, earlier_bytes: int, is_committed_only: bool
) -> tuple[FetchedPartition, list[memoryview], int]:
    """Return (result, buffers of its batches, offset after them) of one partition.

    If the response already has data (``earlier_bytes``), a batch of more than ``left_bytes`` is left for the
    next request.
    """
    topic, number, leader_epoch, fetch_offset, max_bytes = asked
    partition = find(topic, number, leader_epoch)
    method = partition.read if partition.is_leader else partition.read_as_follower
    read = method(fetch_offset, min(max_bytes, left_bytes), is_committed_only)
    high_watermark = partition.high_watermark
    length_bytes, buffers = read.size_bytes, read.buffers
    if earlier_bytes and length_bytes > left_bytes:
        length_bytes, buffers = 0, []
    aborted: list[AbortedTransaction] = []
    if is_committed_only:
        stable = partition.last_stable_offset
        if buffers:
            found = partition.aborted_between(fetch_offset, read.next_offset)
            aborted = [AbortedTransaction(producer_id, first_offset) for producer_id, first_offset in found]
    else:
        stable = partition.known_stable_offset(high_watermark)
    result = FetchedPartition(
        topic, number, 0, None, high_watermark, stable, partition.log_start_offset, length_bytes, aborted
    )
    return result, buffers, read.next_offset


def _watch_partition(
    find: Find, asked: FetchPartition, is_committed_only: bool
) -> tuple[FetchedPartition, bool]:
    """Return (result without data, whether a batch at or after ``fetch_offset`` is readable)."""
    topic, number, leader_epoch, fetch_offset, _ = asked
    partition = find(topic, number, leader_epoch)
    method = partition.readable_end if partition.is_leader else partition.readable_end_as_follower
    end = method(fetch_offset, is_committed_only)
    high_watermark = partition.high_watermark
    stable = end if is_committed_only else partition.known_stable_offset(high_watermark)
    log_start_offset = partition.log_start_offset
    result = FetchedPartition(topic, number, 0, None, high_watermark, stable, log_start_offset, 0, [])
    return result, fetch_offset < end


def _refused(find: Find, asked: FetchPartition, error: Exception) -> FetchedPartition:
    code, message = translate(error)
    log_start_offset = high_watermark = NO_OFFSET
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        partition = find(asked.topic, asked.partition)
        log_start_offset, high_watermark = partition.log_start_offset, partition.high_watermark
    return FetchedPartition(
        asked.topic, asked.partition, code, message, high_watermark, high_watermark, log_start_offset, 0, []
    )
