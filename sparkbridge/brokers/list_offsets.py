"""Where partitions begin and end, and where they pass a time: asked of all leaders at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kafkalite.client.consumer.isolation import AbortedFilter
from kafkalite.errors import OffsetOutOfRangeError, RequestTimeoutError, UnknownTopicOrPartitionError
from kafkalite.limits import MIB
from kafkalite.model import EARLIEST, LATEST, NO_OFFSET, IsolationLevel, TopicPartition
from kafkalite.protocol.messages.data import ListOffsetsPartition, ListOffsetsRequest
from kafkalite.records.batch import RecordBatch
from kafkalite.records.header import parse_header
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.brokers.fetch import Fetched, FetchToken, receive_fetch, send_early
from sparkbridge.offsets import Positions, TopicSnapshot

# Behind the batch where the record of a time should be, the search goes on by steps of this size.
_STEP_BYTES: Final = MIB

# A topic may go, be made anew or be cut while it is looked at: so often is begun again.
_ROUNDS: Final = 5


def list_offsets(
    brokers: Brokers,
    wanted: Mapping[TopicPartition, Sequence[int]],
    isolation_level: int | None = None,
) -> dict[TopicPartition, list[Any]]:
    """The ListedOffset of each partition at each of its timestamps (or EARLIEST, LATEST), in their order.

    ``isolation_level`` is that of ``brokers`` by default. Raises as Brokers.until_answered.
    """
    level = brokers.isolation_level if isolation_level is None else isolation_level

    def request_of(asked: Sequence[tuple[TopicPartition, int]]) -> ListOffsetsRequest:
        partitions = [
            ListOffsetsPartition(tp.topic, tp.partition, leader_epoch, timestamp_ms)
            for tp, leader_epoch in asked
            for timestamp_ms in wanted[tp]
        ]
        return ListOffsetsRequest(level, partitions)

    return brokers.ask_leaders("the look-up of offsets", wanted, request_of)


def snapshot(brokers: Brokers, topics: Mapping[str, Sequence[int] | None]) -> dict[str, TopicSnapshot]:
    """Starts and ends of the topics that exist, of all partitions (None) or of those named.

    Metadata is always fresh, for a topic may have been made anew under its name. Raises as
    Brokers.until_answered.
    """
    gone: UnknownTopicOrPartitionError | None = None
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
            listed = list_offsets(brokers, wanted)
        except UnknownTopicOrPartitionError as error:
            gone = error  # between the two questions; fresh metadata does not tell it any more
            continue
        if all(brokers.metadata.topics[name].topic_id == id_ for name, id_ in ids.items()):
            return {name: _told(brokers, name, ids[name], listed) for name in ids}
    raise gone or RequestTimeoutError("topics are made anew faster than they can be looked at")


def high_watermarks(brokers: Brokers, tps: Iterable[TopicPartition]) -> Positions:
    """Where the logs end, records of open transactions included. Raises as Brokers.until_answered."""
    wanted = dict.fromkeys(tps, (LATEST,))
    listed = list_offsets(brokers, wanted, int(IsolationLevel.READ_UNCOMMITTED))
    return {tp: answer.offset for tp, (answer,) in listed.items()}


def _told(
    brokers: Brokers, name: str, topic_id: str, listed: Mapping[TopicPartition, list[Any]]
) -> TopicSnapshot:
    count = brokers.metadata.partition_count(name) or 0
    starts, ends = [NO_OFFSET] * count, [NO_OFFSET] * count
    for number in range(count):
        answers = listed.get(TopicPartition(name, number))
        if answers is not None:
            starts[number], ends[number] = (answer.offset for answer in answers)
    return TopicSnapshot(topic_id, tuple(starts), tuple(ends))


def offsets_for_times(
    brokers: Brokers, times: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int | None]:
    """The first record, in the order of the log, whose timestamp is not less; None where there is none.

    Records that a reader does not see (markers, aborted transactions) do not count. Raises as
    Brokers.until_answered.
    """
    gone: OffsetOutOfRangeError | None = None
    for _ in range(_ROUNDS):
        try:
            return _look_up_times(brokers, times)
        except OffsetOutOfRangeError as error:
            gone = error  # deleted between the two questions; the next record may do
    assert gone is not None, "every round ended so"
    raise gone


def _look_up_times(brokers: Brokers, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
    listed = list_offsets(brokers, {tp: (timestamp_ms,) for tp, timestamp_ms in times.items()})
    tokens: dict[TopicPartition, FetchToken] = {}
    for tp, (answer,) in listed.items():
        if answer.offset != NO_OFFSET:  # brokers unpack no batches: the first that has such a record
            tokens[tp] = FetchToken(tp, answer.offset, 1, 0)
            send_early(brokers, tokens[tp])
    return {
        tp: _find(brokers, tokens[tp], timestamp_ms) if tp in tokens else None
        for tp, timestamp_ms in times.items()
    }


def _find(brokers: Brokers, token: FetchToken, timestamp_ms: int) -> int | None:
    """The record of ``timestamp_ms`` from ``token`` on, batch by batch to the end of the log."""
    while True:
        fetched = receive_fetch(brokers, token)
        offset, next_offset = _find_in(fetched, timestamp_ms, token.offset)
        if offset is not None or next_offset == token.offset:
            return offset
        token = FetchToken(token.tp, next_offset, _STEP_BYTES, 0)


def _find_in(fetched: Fetched, timestamp_ms: int, from_offset: int) -> tuple[int | None, int]:
    """(offset of the record or None, offset behind the last batch looked at)."""
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
