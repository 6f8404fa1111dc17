"""Metadata records ↔ bytes: a msgpack array of ``[type, version, field, …]``, fields in declared order.

The newest version of each type is written, and all versions are read; a field that an old version lacks
gets the value that held before the field existed. An unknown type or version is refused: skipping a
record would give this node another state than its peers (R18).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

import msgpack

from kafkalite.errors import StorageError
from kafkalite.metadata.records import (
    BrokerChangeRecord,
    BrokerRegistrationRecord,
    ConfigRecord,
    HighWatermarksRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
)


class RecordType(enum.IntEnum):
    """The numbers on disk: never give one a second meaning."""

    TOPIC = 1
    REMOVE_TOPIC = 2
    PARTITION = 3
    CONFIG = 4
    BROKER_REGISTRATION = 5
    BROKER_CHANGE = 6
    HIGH_WATERMARKS = 7
    PRODUCER_IDS = 8


#: The class of each type, and its newest version, which is the one that is written.
_LAYOUTS: Final[dict[RecordType, tuple[type, int]]] = {
    RecordType.TOPIC: (TopicRecord, 0),
    RecordType.REMOVE_TOPIC: (RemoveTopicRecord, 0),
    RecordType.PARTITION: (PartitionRecord, 1),  # 1: elr, last_known_elr
    RecordType.CONFIG: (ConfigRecord, 0),
    RecordType.BROKER_REGISTRATION: (BrokerRegistrationRecord, 1),  # 1: incarnation_id and all after it
    RecordType.BROKER_CHANGE: (BrokerChangeRecord, 0),
    RecordType.HIGH_WATERMARKS: (HighWatermarksRecord, 0),
    RecordType.PRODUCER_IDS: (ProducerIdsRecord, 0),
}
_VERSIONS: Final[dict[int, int]] = {kind: version for kind, (_, version) in _LAYOUTS.items()}


def _fields_of(record_type: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(record_type)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda record: (get(record),)


_WRITERS: Final[dict[type, tuple[int, int, Callable[[Any], tuple[Any, ...]]]]] = {
    record_type: (int(kind), version, _fields_of(record_type))
    for kind, (record_type, version) in _LAYOUTS.items()
}


def to_bytes(records: Iterable[MetadataRecord]) -> bytes:
    """Return the records as one msgpack array."""
    packed: bytes = msgpack.packb([to_array(record) for record in records])
    return packed


def from_bytes(data: bytes | memoryview) -> list[MetadataRecord]:
    """Return the records of ``to_bytes``. Raises StorageError for anything else."""
    try:
        arrays = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise StorageError(f"metadata records are not valid msgpack: {error}") from error
    return from_arrays(arrays)


def from_arrays(arrays: Any) -> list[MetadataRecord]:
    """Return unpacked msgpack values as records. Raises StorageError."""
    if not isinstance(arrays, list):
        raise StorageError(f"metadata records must be an array, found {type(arrays).__name__}")
    return [from_array(array) for array in arrays]


def to_array(record: MetadataRecord) -> list[Any]:
    """Return one record as msgpack values."""
    kind, version, fields_of = _WRITERS[type(record)]
    return [kind, version, *fields_of(record)]


def from_array(array: Any) -> MetadataRecord:
    """Return a record from msgpack values. Raises StorageError for an unknown type or version, or bad
    fields.
    """
    match array:
        case [int(kind), int(version), *values] if 0 <= version <= _VERSIONS.get(kind, -1):
            record = _READERS[kind](version, values)
            if record is not None:
                return record
        case [int(kind), int(version), *_]:
            raise StorageError(
                f"metadata record of type {kind}, version {version} is unknown",
                hint="a newer kafkalite wrote it; start that version again",
            )
    raise StorageError(f"metadata record has the wrong shape: {str(array)[:120]}")


# Each reads the fields of one type, and returns None if they are malformed. A new version only adds fields at
# the end, so the fields of older versions are completed.


def _read_topic(version: int, fields: list[Any]) -> TopicRecord | None:
    match fields:
        case [str(topic_id), str(name)]:
            return TopicRecord(topic_id, name)
    return None


def _read_remove_topic(version: int, fields: list[Any]) -> RemoveTopicRecord | None:
    match fields:
        case [str(topic_id)]:
            return RemoveTopicRecord(topic_id)
    return None


def _read_partition(version: int, fields: list[Any]) -> PartitionRecord | None:
    """Optimized, because a broker's death changes all of its partitions, often thousands."""
    if version == 0:
        fields = [*fields, [], []]
    if len(fields) != 9:
        return None
    topic_id, partition, replicas, isr, leader, leader_epoch, partition_epoch, elr, last_known_elr = fields
    if type(topic_id) is not str or not _all_are(list, (replicas, isr, elr, last_known_elr)):
        return None
    numbers = [partition, leader, leader_epoch, partition_epoch, *replicas, *isr, *elr, *last_known_elr]
    if not _all_are(int, numbers):
        return None
    return PartitionRecord(
        topic_id,
        partition,
        tuple(replicas),
        tuple(isr),
        leader,
        leader_epoch,
        partition_epoch,
        tuple(elr),
        tuple(last_known_elr),
    )


def _read_config(version: int, fields: list[Any]) -> ConfigRecord | None:
    match fields:
        case [str(resource_type), str(name), str(key), str() | None as value]:
            return ConfigRecord(resource_type, name, key, value)
    return None


def _read_registration(version: int, fields: list[Any]) -> BrokerRegistrationRecord | None:
    """In version 0 every registered broker was live, and its epoch was the offset of its registration."""
    if version == 0:
        fields = [*fields, "", "", fields[1] if len(fields) > 1 else None, False, False]
    match fields:
        case [
            int(node_id),
            int(broker_epoch),
            [*addresses],
            str() | None as rack,
            int(registered_ms),
            str(incarnation_id),
            str(directory_id),
            int(registration_offset),
            bool(is_fenced),
            bool(is_shutting_down),
        ] if _all_are(str, addresses):
            return BrokerRegistrationRecord(
                node_id,
                broker_epoch,
                tuple(addresses),
                rack,
                registered_ms,
                incarnation_id,
                directory_id,
                registration_offset,
                is_fenced,
                is_shutting_down,
            )
    return None


def _read_broker_change(version: int, fields: list[Any]) -> BrokerChangeRecord | None:
    match fields:
        case [int(node_id), int(broker_epoch), bool(is_fenced), bool(is_shutting_down)]:
            return BrokerChangeRecord(node_id, broker_epoch, is_fenced, is_shutting_down)
    return None


def _read_high_watermarks(version: int, fields: list[Any]) -> HighWatermarksRecord | None:
    match fields:
        case [[*ends]]:
            for end in ends:
                if type(end) is not list or [type(value) for value in end] != [str, int, int]:
                    return None
            return HighWatermarksRecord(tuple([tuple(end) for end in ends]))
    return None


def _read_producer_ids(version: int, fields: list[Any]) -> ProducerIdsRecord | None:
    match fields:
        case [int(next_producer_id)]:
            return ProducerIdsRecord(next_producer_id)
    return None


_READERS: Final[dict[int, Callable[[int, list[Any]], MetadataRecord | None]]] = {
    RecordType.TOPIC: _read_topic,
    RecordType.REMOVE_TOPIC: _read_remove_topic,
    RecordType.PARTITION: _read_partition,
    RecordType.CONFIG: _read_config,
    RecordType.BROKER_REGISTRATION: _read_registration,
    RecordType.BROKER_CHANGE: _read_broker_change,
    RecordType.HIGH_WATERMARKS: _read_high_watermarks,
    RecordType.PRODUCER_IDS: _read_producer_ids,
}


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return set(map(type, values)) <= {kind}
