"""Metadata records ↔ bytes: a msgpack array of ``[type, version, field, …]``, fields in declared order.

A reader refuses a type or version it does not know: skipping a record it can't understand would give
this node another state than its peers (R18).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, Final, assert_never

import msgpack

from kafkalite.errors import StorageError
from kafkalite.metadata.records import (
    BrokerRegistrationRecord,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)

_VERSION: Final = 0


class RecordType(enum.IntEnum):
    """The numbers on disk: never give one a second meaning."""

    TOPIC = 1
    REMOVE_TOPIC = 2
    PARTITION = 3
    CONFIG = 4
    BROKER_REGISTRATION = 5


def to_bytes(records: Iterable[MetadataRecord]) -> bytes:
    """The records as one msgpack array."""
    packed: bytes = msgpack.packb([to_array(record) for record in records])
    return packed


def from_bytes(data: bytes | memoryview) -> list[MetadataRecord]:
    """The records of ``to_bytes``. Raises StorageError for anything else."""
    try:
        arrays = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise StorageError(f"metadata records are not valid msgpack: {error}") from error
    return from_arrays(arrays)


def from_arrays(arrays: Any) -> list[MetadataRecord]:
    """Already unpacked msgpack values as records. Raises StorageError."""
    if not isinstance(arrays, list):
        raise StorageError(f"metadata records must be an array, found {type(arrays).__name__}")
    return [from_array(array) for array in arrays]


def to_array(record: MetadataRecord) -> list[Any]:
    """One record as msgpack values."""
    match record:
        case PartitionRecord():
            return [
                RecordType.PARTITION,
                _VERSION,
                record.topic_id,
                record.partition,
                record.replicas,
                record.isr,
                record.leader,
                record.leader_epoch,
                record.partition_epoch,
            ]
        case TopicRecord():
            return [RecordType.TOPIC, _VERSION, record.topic_id, record.name]
        case RemoveTopicRecord():
            return [RecordType.REMOVE_TOPIC, _VERSION, record.topic_id]
        case ConfigRecord():
            return [RecordType.CONFIG, _VERSION, record.resource_type, record.name, record.key, record.value]
        case BrokerRegistrationRecord():
            return [
                RecordType.BROKER_REGISTRATION,
                _VERSION,
                record.node_id,
                record.broker_epoch,
                record.addresses,
                record.rack,
                record.registered_ms,
            ]
        case _:
            assert_never(record)


def from_array(array: Any) -> MetadataRecord:
    """One record from msgpack values. Raises StorageError for an unknown type or version, or wrong fields."""
    match array:
        case [
            RecordType.PARTITION,
            0,
            str(topic_id),
            int(partition),
            [*replicas],
            [*isr],
            int(leader),
            int(leader_epoch),
            int(partition_epoch),
        ] if _all_are(int, replicas) and _all_are(int, isr):
            return PartitionRecord(
                topic_id, partition, tuple(replicas), tuple(isr), leader, leader_epoch, partition_epoch
            )
        case [RecordType.TOPIC, 0, str(topic_id), str(name)]:
            return TopicRecord(topic_id, name)
        case [RecordType.REMOVE_TOPIC, 0, str(topic_id)]:
            return RemoveTopicRecord(topic_id)
        case [RecordType.CONFIG, 0, str(resource_type), str(name), str(key), str() | None as value]:
            return ConfigRecord(resource_type, name, key, value)
        case [
            RecordType.BROKER_REGISTRATION,
            0,
            int(node_id),
            int(broker_epoch),
            [*addresses],
            str() | None as rack,
            int(registered_ms),
        ] if _all_are(str, addresses):
            return BrokerRegistrationRecord(node_id, broker_epoch, tuple(addresses), rack, registered_ms)
    raise _unreadable(array)


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _unreadable(array: Any) -> StorageError:
    match array:
        case [int(kind), int(version), *_] if kind not in list(RecordType) or version != _VERSION:
            return StorageError(
                f"metadata record of type {kind}, version {version} is not known here",
                hint="a newer kafkalite wrote it; start that version again",
            )
    return StorageError(f"metadata record has the wrong shape: {str(array)[:120]}")
