"""Encodes metadata records as msgpack arrays ``[type, version, field, …]``, fields in declared order.

A record is written in the lowest version from that of level 1 on (``features``) that has all its values. So
a node of level 1 reads each record that the controller decides at this level (R91). All versions are read. A
field that an old version lacks gets its default, except that ``registration_offset`` of a broker registration
gets the broker epoch. An unknown type or version and a level that this program does not support are refused,
because skipping a record would make this node's state differ from that of its peers (R18, R92).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import product
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import msgpack

from kafkalite.errors import StorageError
from kafkalite.metadata.features import METADATA_VERSION, RECORD_VERSIONS, SUPPORTED, range_text, supports
from kafkalite.metadata.records import (
    AclRecord,
    BrokerChangeRecord,
    BrokerRegistrationRecord,
    ClientQuotaRecord,
    ConfigRecord,
    FeatureLevelRecord,
    HighWatermarksRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    ScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)


class RecordType(enum.IntEnum):
    """The record types by their numbers on disk. Never reuse a number for another type."""

    TOPIC = 1
    REMOVE_TOPIC = 2
    PARTITION = 3
    CONFIG = 4
    BROKER_REGISTRATION = 5
    BROKER_CHANGE = 6
    HIGH_WATERMARKS = 7
    PRODUCER_IDS = 8
    ACL = 9
    SCRAM_CREDENTIAL = 10
    CLIENT_QUOTA = 11
    UNREGISTER_BROKER = 12
    FEATURE_LEVEL = 13


class _Layout(NamedTuple):
    """The number and types of the fields of one record type, in each of its versions."""

    record_type: type[Any]
    shapes: tuple[frozenset[tuple[type, ...]], ...]  #: by version: the allowed types of all fields
    #: For each tuple field: its index, the type of its items, and the field types of items that are tuples.
    lists: tuple[tuple[int, frozenset[type], tuple[type, ...]], ...]


def _layout(record_type: type[Any], *field_counts: int) -> _Layout:
    """Derive the layout from the fields' types. ``field_counts`` has the count of each older version.

    A new version only adds fields at the end.
    """
    hints = list(get_type_hints(record_type).values())
    items = [(index, get_args(hint)[0]) for index, hint in enumerate(hints) if get_origin(hint) is tuple]
    lists = tuple((index, frozenset([item]), get_args(item)) for index, item in items)
    kinds = [(list,) if get_origin(hint) is tuple else get_args(hint) or (hint,) for hint in hints]
    counts = (*field_counts, len(hints))
    return _Layout(record_type, tuple(frozenset(product(*kinds[:count])) for count in counts), lists)


_LAYOUTS: Final[dict[int, _Layout]] = {
    RecordType.TOPIC: _layout(TopicRecord),
    RecordType.REMOVE_TOPIC: _layout(RemoveTopicRecord),
    RecordType.PARTITION: _layout(PartitionRecord, 7, 9, 11, 12),
    RecordType.CONFIG: _layout(ConfigRecord),
    RecordType.BROKER_REGISTRATION: _layout(BrokerRegistrationRecord, 5, 10),
    RecordType.BROKER_CHANGE: _layout(BrokerChangeRecord),
    RecordType.HIGH_WATERMARKS: _layout(HighWatermarksRecord),
    RecordType.PRODUCER_IDS: _layout(ProducerIdsRecord),
    RecordType.ACL: _layout(AclRecord),
    RecordType.SCRAM_CREDENTIAL: _layout(ScramCredentialRecord),
    RecordType.CLIENT_QUOTA: _layout(ClientQuotaRecord),
    RecordType.UNREGISTER_BROKER: _layout(UnregisterBrokerRecord),
    RecordType.FEATURE_LEVEL: _layout(FeatureLevelRecord),
}
# {class: (type number, newest version)}.
_HEADS: Final[dict[type, tuple[int, int]]] = {
    layout.record_type: (int(kind), len(layout.shapes) - 1) for kind, layout in _LAYOUTS.items()
}
# Of a partition that is not being reassigned: its head, and the number of its last fields that are omitted.
_SETTLED_HEAD: Final = (int(RecordType.PARTITION), RECORD_VERSIONS[1][PartitionRecord])
_REASSIGNMENT_FIELDS: Final = 2


def to_bytes(records: Iterable[MetadataRecord]) -> bytes:
    """Encode the records as one msgpack array."""
    packed: bytes = msgpack.packb([to_array(record) for record in records])
    return packed


def from_bytes(data: bytes | memoryview) -> list[MetadataRecord]:
    """Decode the records that ``to_bytes`` encoded. Raises StorageError if ``data`` is malformed, or if the
    type or version of a record is unknown."""
    try:
        arrays = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise StorageError(f"metadata records are not valid msgpack: {error}") from error
    return from_arrays(arrays)


def from_arrays(arrays: Any) -> list[MetadataRecord]:
    """Return the records of unpacked msgpack values. Raises the same errors as ``from_bytes``."""
    if not isinstance(arrays, list):
        raise StorageError(f"metadata records must be an array, found {type(arrays).__name__}")
    return [from_array(array) for array in arrays]


def to_array(record: MetadataRecord) -> list[Any]:
    """Return one record as a list of msgpack values."""
    if type(record) is PartitionRecord and not (record.target_replicas or record.added_replicas):
        return [*_SETTLED_HEAD, *record[:-_REASSIGNMENT_FIELDS]]
    return [*_HEADS[type(record)], *record]


def check_level(records: Iterable[MetadataRecord], level: int) -> None:
    """Assert that nodes of this level of metadata.version read the records as ``to_array`` writes them
    (R91)."""
    if level == max(RECORD_VERSIONS):
        return
    for record in records:
        if isinstance(record, FeatureLevelRecord) and record.feature == METADATA_VERSION:
            level = record.level
        version = to_array(record)[1]
        newest = RECORD_VERSIONS[level].get(type(record), -1)
        assert version <= newest, f"a record above metadata.version {level}: {record}"


def from_array(array: Any) -> MetadataRecord:
    """Return the record of a list of msgpack values. Raises the same errors as ``from_bytes``."""
    match array:
        case [int(kind), int(version), *fields]:
            layout = _LAYOUTS.get(kind)
            if layout is None or not 0 <= version < len(layout.shapes):
                raise StorageError(
                    f"metadata record of type {kind}, version {version} is unknown",
                    hint="a newer kafkalite wrote it; start that version again",
                )
            record = _read(layout, version, fields)
            if type(record) is FeatureLevelRecord:
                check_supported(record)
            if record is not None:
                return record
            if kind == RecordType.SCRAM_CREDENTIAL:  # its fields are secrets (S19)
                array = [kind, version, "..."]
    raise StorageError(f"metadata record has the wrong shape: {str(array)[:120]}")


def check_supported(record: FeatureLevelRecord) -> None:
    """Raise StorageError if this program does not support a finalised level (R92)."""
    if not supports(SUPPORTED, record.feature, record.level):
        raise StorageError(
            f"{record.feature} {record.level} is finalised, and this program supports"
            f" {range_text(SUPPORTED, record.feature)}",
            hint="a newer kafkalite finalised it; start that version again",
        )


def _read(layout: _Layout, version: int, fields: list[Any]) -> MetadataRecord | None:
    """Return the record, or None if the fields are malformed.

    Written for speed, because the failure of one broker can change thousands of partitions.
    """
    if tuple(map(type, fields)) not in layout.shapes[version]:
        return None
    for index, item_types, row in layout.lists:
        if index < len(fields):
            items = fields[index]
            if row:
                if not all(type(item) is list and tuple(map(type, item)) == row for item in items):
                    return None
                items = map(tuple, items)
            elif not item_types.issuperset(map(type, items)):
                return None
            fields[index] = tuple(items)
    record: MetadataRecord = layout.record_type(*fields)
    if version == 0 and isinstance(record, BrokerRegistrationRecord):
        return record._replace(
            registration_offset=record.broker_epoch
        )  # in version 0, the two are always equal
    return record
