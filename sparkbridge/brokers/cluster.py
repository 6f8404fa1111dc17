"""SparkCluster: the blocking client of the source, in Spark's driver and in its tasks.

``SparkCluster.shared`` keeps one instance per process and ClientOptions, because Spark's worker processes
run many tasks. On first use, a forked process closes its copies of the parent's connections and opens its
own. The connections of the parent stay open.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from kafkalite.client.cluster.retry import is_retriable
from kafkalite.client.cluster.routing import Leader
from kafkalite.client.config import CONSUMER_OPTIONS
from kafkalite.client.consumer.isolation import AbortedFilter
from kafkalite.client.consumer.near_replica import NearReplica
from kafkalite.errors import (
    BrokerError,
    KafkaliteError,
    LeaderNotAvailableError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    UnknownTopicOrPartitionError,
    broker_error,
)
from kafkalite.limits import MIB
from kafkalite.model import EARLIEST, LATEST, NO_OFFSET, IsolationLevel, TopicPartition
from kafkalite.protocol.messages.data import (
    AbortedTransaction,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchRequestV1,
    FetchResponseV1,
    ListOffsetsPartition,
    ListOffsetsRequest,
    OffsetForBytes,
    OffsetsForBytesPartition,
    OffsetsForBytesRequest,
)
from kafkalite.records.batch import RecordBatch
from kafkalite.records.header import parse_header
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.brokers.connection import BrokerConnection, Reply
from sparkbridge.brokers.groups import GroupOffsets
from sparkbridge.brokers.long_poll import LongPolls
from sparkbridge.offsets import Positions, TopicSnapshot
from sparkbridge.options import ClientOptions

# A process rarely uses more than two ClientOptions: one for the source and one for the sink of a query.
MAX_SHARED: Final = 16

# The search for a timestamp fetches the first batch alone, and then the log in steps of this size.
_STEP_BYTES: Final = MIB

# Both requests of a look-up are repeated up to this many times if a topic is deleted, created again or
# truncated between them.
_ROUNDS: Final = 5

# A follower that does not know yet that an offset is committed is asked again after this pause.
_COMMIT_PAUSE_S: Final = 0.02
_MAX_AGE_MS: Final[int] = CONSUMER_OPTIONS.get("metadata.max.age.ms").default


class TopicInfo(NamedTuple):
    topic_id: str
    partition_count: int


class Fetched(NamedTuple):
    """The response to a fetch: complete batches, of which the first may begin before the requested offset."""

    payload: memoryview
    aborted: list[AbortedTransaction]
    high_watermark: int  #: exclusive
    last_stable_offset: int  #: exclusive
    log_start_offset: int  #: inclusive


@dataclass(slots=True, eq=False)
class FetchToken:
    """A fetch in flight. To cancel it, drop the token; the response is then discarded."""

    tp: TopicPartition
    offset: int
    max_bytes: int
    max_wait_ms: int
    connection: BrokerConnection | None = None  #: None: not sent yet; ``receive_fetch`` then sends it
    reply: Reply | None = None
    near: NearReplica | None = None  #: set if a follower was asked

    def __repr__(self) -> str:
        state = "not sent" if self.reply is None else "answered" if self.reply.is_done else "sent"
        return f"<FetchToken {self.tp} from {self.offset}, {state}>"


class _ProcessState(NamedTuple):
    """The connections of one SparkCluster in one process, and the lock that guards them."""

    pid: int
    lock: threading.RLock
    brokers: Brokers
    groups: GroupOffsets
    long_polls: LongPolls
    #: Where each partition is read, if the client has a rack (KIP-392).
    near: dict[TopicPartition, NearReplica]

    @classmethod
    def new(cls, options: ClientOptions) -> _ProcessState:
        brokers = Brokers(options)
        return cls(os.getpid(), threading.RLock(), brokers, GroupOffsets(brokers), LongPolls(brokers), {})

    def close(self) -> None:
        """Close the sockets without a shutdown, because the parent process may still use the connections."""
        self.long_polls.close()
        self.brokers.close()


class SparkCluster:
    """A blocking client that connects on first use. A lock admits one call at a time.

    Unless their docstrings say otherwise, methods retry and raise errors as ``Brokers.until_answered`` does.
    kafka.request.timeout.ms limits each of the requests that a method makes one after another.
    """

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self._state = _ProcessState.new(options)

    def __repr__(self) -> str:
        return f"<SparkCluster {self._state.brokers!r}>"

    @classmethod
    def shared(cls, options: ClientOptions) -> SparkCluster:
        """Return the instance of this process for these options. Creates it if necessary.

        At most MAX_SHARED instances are kept. If there are more, the least recently used one is closed.
        """
        pid = os.getpid()
        for key in [key for key in _shared if key[0] != pid]:
            _shared.pop(key).close()  # inherited from the parent by a fork
        found = _shared.pop((pid, options), None) or cls(options)
        _shared[pid, options] = found  # the most recently used is last
        if len(_shared) > MAX_SHARED:
            _shared.pop(next(iter(_shared))).close()
        return found

    @property
    def connection_count(self) -> int:
        """The number of connections, including those of long polls."""
        return self._state.brokers.connection_count + self._state.long_polls.connection_count

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        self._state.close()

    @contextmanager
    def _locked(self) -> Iterator[_ProcessState]:
        state = self._state
        if state.pid != os.getpid():
            self._state = _ProcessState.new(self.options)
            state.close()
            state = self._state
        with state.lock:
            yield state

    # --- topics and offsets --------------------------------------------------------------------

    def topics(
        self, *, names: Sequence[str] | None = None, pattern: str | None = None
    ) -> dict[str, TopicInfo]:
        """Return the existing topics by name. ``names`` and ``pattern``, unless None, restrict the result.

        ``pattern`` must match the whole name. Internal topics are returned only if they are in ``names``. The
        metadata is always fetched. Raises the BrokerError of a topic in ``names`` that cannot be used.
        """
        with self._locked() as state:
            brokers = state.brokers
            brokers.until_answered("metadata", (), lambda deadline_s: brokers.refresh(names, deadline_s))
            for name in names or ():
                fatal = brokers.metadata.fatal_error(name)
                if fatal is not None:
                    raise broker_error(*fatal, about=f"topic {name!r}")
            known = brokers.metadata.topics
            if names is None:
                chosen = [name for name in sorted(known) if not known[name].is_internal]
            else:
                chosen = [name for name in dict.fromkeys(names) if name in known]
            if pattern is not None:
                matches = re.compile(pattern).fullmatch
                chosen = [name for name in chosen if matches(name)]
            return {name: TopicInfo(known[name].topic_id, known[name].partition_count) for name in chosen}

    def avoid_last_responder(self) -> None:
        """Prefer other brokers for metadata requests: the metadata of the last responder may be old."""
        with self._locked() as state:
            state.brokers.avoid_last_responder()

    def snapshot(self, topics: Mapping[str, Sequence[int] | None]) -> dict[str, TopicSnapshot]:
        """Return {topic: the log start (inclusive) and end (exclusive) of each partition}.

        ``topics`` maps each topic to the requested partitions (None: all). Missing topics are omitted. With
        read_committed, the end is the last stable offset. Start and end are -1 for partitions that were not
        requested. The metadata is always fetched, because a topic may have been deleted and created again.
        """
        gone: UnknownTopicOrPartitionError | None = None
        with self._locked() as state:
            brokers = state.brokers
            for _ in range(_ROUNDS):
                brokers.until_answered("metadata", (), lambda deadline_s: brokers.refresh(topics, deadline_s))
                ids: dict[str, str] = {}
                wanted: dict[TopicPartition, tuple[int, int]] = {}
                for name, numbers in topics.items():
                    known = brokers.metadata.topics.get(name)
                    if known is None:
                        continue
                    ids[name] = known.topic_id
                    numbers = range(known.partition_count) if numbers is None else numbers
                    for number in numbers:
                        if 0 <= number < known.partition_count:
                            wanted[TopicPartition(name, number)] = (EARLIEST, LATEST)
                try:
                    listed = self._list_offsets(brokers, wanted)
                except UnknownTopicOrPartitionError as error:
                    gone = error  # the topic was deleted between the two requests; the next metadata omits it
                    continue
                # A retry refreshes the metadata, in which a topic may be missing or another one by then.
                topics_now = brokers.metadata.topics
                if all(name in topics_now and topics_now[name].topic_id == ids[name] for name in ids):
                    return {name: _topic_snapshot(brokers, name, ids[name], listed) for name in ids}
        raise gone or RequestTimeoutError("topics are created again faster than they can be listed")

    def high_watermarks(self, tps: Collection[TopicPartition]) -> Positions:
        """Return the high watermark (exclusive) of each partition, even if open transactions are below it."""
        with self._locked() as state:
            level = int(IsolationLevel.READ_UNCOMMITTED)
            listed = self._list_offsets(state.brokers, dict.fromkeys(tps, (LATEST,)), level)
        return {tp: found.offset for tp, (found,) in listed.items()}

    def _list_offsets(
        self,
        brokers: Brokers,
        wanted: Mapping[TopicPartition, Sequence[int]],
        isolation_level: int | None = None,
    ) -> dict[TopicPartition, list[Any]]:
        """Return a ListedOffset for each timestamp that ``wanted`` has for a partition, in the same order.

        A timestamp may be EARLIEST or LATEST. ``isolation_level`` defaults to the level of ``brokers``.
        """
        level = brokers.isolation_level if isolation_level is None else isolation_level

        def entries_of(tp: TopicPartition, leader_epoch: int) -> list[ListOffsetsPartition]:
            return [ListOffsetsPartition(*tp, leader_epoch, timestamp_ms) for timestamp_ms in wanted[tp]]

        request_of = partial(ListOffsetsRequest, level)
        return brokers.ask_leaders("the look-up of offsets", wanted, entries_of, request_of)

    def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Return, by partition, the offset of the first record at or after the time in ``times`` (ms).

        The offset is None if there is no such record. Transaction markers and, with read_committed, records
        of aborted transactions are ignored.
        """
        gone: OffsetOutOfRangeError | None = None
        with self._locked() as state:
            for _ in range(_ROUNDS):
                try:
                    return self._look_up_times(state.brokers, times)
                except OffsetOutOfRangeError as error:
                    gone = error  # the record was deleted between the two requests: look for a later one
        assert gone is not None, "every round failed with this error"
        raise gone

    def _look_up_times(
        self, brokers: Brokers, times: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        listed = self._list_offsets(brokers, {tp: (timestamp_ms,) for tp, timestamp_ms in times.items()})
        tokens: dict[TopicPartition, FetchToken] = {}
        for tp, (found,) in listed.items():
            if found.offset != NO_OFFSET:  # the base offset of a batch, because brokers unpack no batches
                tokens[tp] = self.send_fetch(tp, found.offset, max_bytes=1)
        return {
            tp: self._find_time(tokens[tp], timestamp_ms) if tp in tokens else None
            for tp, timestamp_ms in times.items()
        }

    def _find_time(self, token: FetchToken, timestamp_ms: int) -> int | None:
        """Search the log from ``token.offset`` on for a record with a timestamp >= ``timestamp_ms``.

        Return the offset of the first such record, or None.
        """
        while True:
            fetched = self.receive_fetch(token)
            offset, next_offset = _find_time_in(fetched, timestamp_ms, token.offset)
            if offset is not None or next_offset == token.offset:
                return offset
            token = FetchToken(token.tp, next_offset, _STEP_BYTES, 0)

    def ends_by_bytes(
        self, starts: Positions, ends: Positions, max_bytes: int, first: TopicPartition | None = None
    ) -> Positions:
        """Divide ``max_bytes`` among partitions. Return the exclusive end up to which each may be read.

        The ranges from ``starts`` (inclusive) to ``ends`` (exclusive) are cut after complete batches, so that
        about ``max_bytes`` remain in all. Each partition gets a share in proportion to the size of its range,
        but the partition ``first`` gets all the bytes that it can use. If the first batch of a partition
        exceeds the partition's share, it is included only if the other partitions leave enough bytes, or if
        no other batch is included.
        """
        reached = dict(ends)
        open_ = {tp: end for tp, end in ends.items() if starts.get(tp, end) < end}
        with self._locked() as state:
            sizes = _offsets_for_bytes(state.brokers, starts, open_, {})
            totals = {tp: found.total_bytes for tp, found in sizes.items()}
            if sum(totals.values()) <= max_bytes:
                return reached
            shares = _shares({tp: size for tp, size in totals.items() if size}, max_bytes, first)
            found = _offsets_for_bytes(state.brokers, starts, {tp: open_[tp] for tp in shares}, shares)
        left_bytes = max_bytes
        too_large: list[TopicPartition] = []
        for tp, end in found.items():
            if tp == first or end.size_bytes <= shares[tp]:
                reached[tp] = end.end_offset
                left_bytes -= end.size_bytes
            else:
                too_large.append(tp)
        is_empty = len(too_large) == len(found)
        for tp in sorted(too_large, key=totals.__getitem__, reverse=True):
            end = found[tp]
            if is_empty or end.size_bytes <= left_bytes:
                reached[tp] = end.end_offset
                left_bytes -= end.size_bytes
                is_empty = False
            else:
                reached[tp] = starts[tp]
        return reached

    def wait_for_data(self, positions: Positions, max_wait_ms: int) -> bool:
        """Whether there is data at or after any of ``positions``. Waits for it as ``LongPolls.wait`` does."""
        with self._locked() as state:
            return state.long_polls.wait(positions, max_wait_ms)

    # --- groups --------------------------------------------------------------------------------

    def committed_offsets(self, group: str) -> Positions:
        """Return the committed offsets of ``group`` for all partitions that have one."""
        with self._locked() as state:
            return state.groups.fetch(group)

    def commit_offsets(self, group: str, positions: Positions, metadata: str = "") -> None:
        """Commit the offsets ``positions`` for ``group``. Raises BrokerError if the group has members."""
        with self._locked() as state:
            state.groups.commit(group, positions, metadata)

    # --- records -------------------------------------------------------------------------------

    def fetch(self, tp: TopicPartition, offset: int, *, max_bytes: int, max_wait_ms: int = 0) -> Fetched:
        """Return complete batches from ``offset`` on: about ``max_bytes``, at least one if there is any.

        Waits up to ``max_wait_ms`` for the first batch. Raises UnknownTopicOrPartitionError, and
        OffsetOutOfRangeError with the range of existing offsets in its message.
        """
        return self.receive_fetch(self.send_fetch(tp, offset, max_bytes=max_bytes, max_wait_ms=max_wait_ms))

    def send_fetch(
        self, tp: TopicPartition, offset: int, *, max_bytes: int, max_wait_ms: int = 0
    ) -> FetchToken:
        """Send the request of ``fetch`` without waiting for its response. The token may be dropped.

        If sending fails with a retriable error, ``receive_fetch`` sends the request again. A broker responds
        in the order of the requests, so later requests to it may also wait for ``max_wait_ms``.
        """
        token = FetchToken(TopicPartition(*tp), offset, max_bytes, max_wait_ms)
        with self._locked() as state:
            try:
                _send(state, token, state.brokers.deadline_s())
            except KafkaliteError as error:
                if not is_retriable(error):
                    raise
        return token

    def receive_fetch(self, token: FetchToken) -> Fetched:
        """Wait for the response to a fetch. Retries retriable errors. Raises the same errors as ``fetch``.

        If a follower was asked and has failed, or has no records, the leader is asked (R67).
        """

        def attempt(deadline_s: float) -> Fetched:
            while True:
                try:
                    fetched = _receive(state, token, deadline_s)
                except KafkaliteError as error:
                    near, token.near = token.near, None
                    if near is None:
                        raise
                    if isinstance(error, OffsetNotAvailableError) and near.is_patient():
                        time.sleep(_COMMIT_PAUSE_S)
                    else:
                        near.leave(_now_ms(), _MAX_AGE_MS)
                    continue
                if fetched is not None:
                    return fetched

        what = f"the fetch of {token.tp} from {token.offset}"
        with self._locked() as state:
            brokers = state.brokers
            return brokers.until_answered(what, [token.tp], attempt, extra_ms=token.max_wait_ms)


_shared: dict[tuple[int, ClientOptions], SparkCluster] = {}  #: by (process id, options)


def close_all() -> None:
    """Close and forget all instances of ``SparkCluster.shared``."""
    clusters = list(_shared.values())
    _shared.clear()
    for cluster in clusters:
        cluster.close()


def _topic_snapshot(
    brokers: Brokers, name: str, topic_id: str, listed: Mapping[TopicPartition, list[Any]]
) -> TopicSnapshot:
    count = brokers.metadata.partition_count(name) or 0
    starts, ends = [NO_OFFSET] * count, [NO_OFFSET] * count
    for number in range(count):
        found = listed.get(TopicPartition(name, number))
        if found is not None:
            starts[number], ends[number] = (each.offset for each in found)
    return TopicSnapshot(topic_id, tuple(starts), tuple(ends))


def _find_time_in(fetched: Fetched, timestamp_ms: int, from_offset: int) -> tuple[int | None, int]:
    """Return (first offset with a timestamp >= ``timestamp_ms`` or None, next offset to search)."""
    data, position, next_offset = fetched.payload, 0, from_offset
    isolation = AbortedFilter(fetched.aborted)
    while position < len(data):
        header = parse_header(data, position)
        start, position = position, position + header.length_bytes
        next_offset = header.next_offset
        if (header.is_transactional or header.is_control) and isolation.drops(
            data, start, header.attributes, next_offset
        ):
            continue
        if header.max_timestamp_ms < timestamp_ms:
            continue
        for record in RecordBatch(data[start:position]).records("", -1):
            if record.timestamp_ms >= timestamp_ms and record.offset >= from_offset:
                return record.offset, next_offset
    return None, next_offset


def _shares(
    totals: Mapping[TopicPartition, int], max_bytes: int, first: TopicPartition | None
) -> dict[TopicPartition, int]:
    """Give ``first`` its whole total if possible. Divide the rest in proportion to the others' ``totals``."""
    of_first = min(totals.get(first, 0), max_bytes) if first is not None else 0
    left_bytes = max_bytes - of_first
    left_total = sum(size for tp, size in totals.items() if tp != first)
    return {tp: of_first if tp == first else left_bytes * size // left_total for tp, size in totals.items()}


def _offsets_for_bytes(
    brokers: Brokers, starts: Positions, ends: Positions, shares: Mapping[TopicPartition, int]
) -> dict[TopicPartition, OffsetForBytes]:
    def entries_of(tp: TopicPartition, leader_epoch: int) -> list[OffsetsForBytesPartition]:
        return [OffsetsForBytesPartition(*tp, leader_epoch, starts[tp], ends[tp], shares.get(tp, 0))]

    request_of = partial(OffsetsForBytesRequest, brokers.isolation_level)
    found = brokers.ask_leaders("the look-up of sizes", ends, entries_of, request_of)
    return {tp: answers[0] for tp, answers in found.items()}


def _now_ms() -> int:
    return int(time.monotonic() * 1000)


def _send(state: _ProcessState, token: FetchToken, deadline_s: float) -> None:
    """Send the fetch to the partition's leader, or to the follower that the leader has named.

    If this raises an error after the follower was chosen, ``token.near`` is set.
    """
    brokers = state.brokers
    address, leader_epoch = brokers.leader(token.tp, deadline_s)
    rack = brokers.options.consumer.get("client.rack")
    states_rack = False
    if rack is not None:
        near = state.near.setdefault(token.tp, NearReplica())
        leader_id = brokers.metadata.leader(token.tp).node_id
        follower = near.follower(Leader(leader_id, leader_epoch), _now_ms())
        if follower in brokers.metadata.addresses:
            token.near, address, states_rack = near, brokers.address(follower), True
        else:
            states_rack = near.may_move(_now_ms())
    connection = brokers.connection(address, deadline_s)
    topic, partition = token.tp
    asked = FetchPartition(topic, partition, leader_epoch, token.offset, token.max_bytes)
    fields = (token.max_wait_ms, 1, token.max_bytes, brokers.isolation_level, [asked])
    request = FetchRequest(*fields)
    if rack is not None and states_rack and connection.supports(FetchRequestV1):
        request = FetchRequestV1(*fields, rack)
    try:
        token.reply = connection.send(request, deadline_s)
    except KafkaliteError as error:
        brokers.record_failure(address, error)
        raise
    token.connection = connection


def _receive(state: _ProcessState, token: FetchToken, deadline_s: float) -> Fetched | None:
    """Return the response to the fetch, or None if it must be sent again: to the follower that the leader has
    named, or to the leader because the follower has no records at that offset.

    The next call sends the request again. ``token.near`` is set if a follower was asked.
    """
    brokers = state.brokers
    if token.reply is None or token.connection is None:
        token.near = None
        _send(state, token, deadline_s)
    reply, connection = token.reply, token.connection
    assert reply is not None and connection is not None, "just sent"
    token.reply = token.connection = None
    brokers.receive(connection, reply, token.tp, deadline_s, extra_ms=token.max_wait_ms)
    message = reply.message
    if not message.partitions:
        raise LeaderNotAvailableError(f"{connection.address} omitted {token.tp} from its response")
    partition: FetchedPartition = message.partitions[0]
    if partition.error_code:
        raise _fetch_error(partition, token)
    if token.near is not None:
        token.near.on_records()
        if not reply.payload:
            token.near.leave(_now_ms(), _MAX_AGE_MS)
            return None
    elif isinstance(message, FetchResponseV1) and message.preferred_read_replicas:
        epoch = brokers.metadata.leader(token.tp).leader_epoch
        node_id = message.preferred_read_replicas[0].node_id
        state.near[token.tp].prefer(node_id, epoch, _now_ms(), _MAX_AGE_MS)
        return None
    return Fetched(
        reply.payload,
        partition.aborted,
        partition.high_watermark,
        partition.last_stable_offset,
        partition.log_start_offset,
    )


def _fetch_error(partition: FetchedPartition, token: FetchToken) -> BrokerError:
    error = broker_error(partition.error_code, partition.error_message or "", about=str(token.tp))
    if isinstance(error, OffsetOutOfRangeError):
        return OffsetOutOfRangeError(
            f"{token.tp} has offsets from {partition.log_start_offset} to before {partition.high_watermark}, "
            f"not {token.offset}",
            hint="the records are deleted, or the topic was created again",
        )
    return error
