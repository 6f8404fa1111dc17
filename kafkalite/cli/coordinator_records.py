"""Decodes the records that coordinators keep in ``__consumer_offsets`` and ``__transaction_state``."""

# Tests: tests/cli/test_log_state.py

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafkalite.cli.output import pick
from kafkalite.cli.times import format_time
from kafkalite.coordinator_types import StateRecord
from kafkalite.model import NO_PRODUCER_ID, NO_TIMESTAMP

if TYPE_CHECKING:
    from kafkalite.groups.member import CurrentAssignment
    from kafkalite.groups.record_codec import GroupState, OffsetValue, Target
    from kafkalite.protocol.messages.groups import GroupEvent

GROUPS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"

Fields = dict[str, Any]


class StateEntry(NamedTuple):
    """One decoded record. ``value`` is None for a tombstone, which deletes ``key``."""

    kind: str
    key: Fields
    value: Fields | None


def read_record(topic: str, record: StateRecord) -> StateEntry:
    """Decode a record of an internal topic. Raises StorageError for a malformed or newer record."""
    return _read_of_groups(record) if topic == GROUPS_TOPIC else _read_of_transactions(record)


def as_text(fields: Mapping[str, Any] | None) -> str:
    """Return ``name=value name=value``, or ``removed`` for None, the value of a tombstone."""
    if fields is None:
        return "removed"
    return " ".join(f"{name}={_text(value)}" for name, value in fields.items())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    return repr(text) if " " in text or not text else text


def _read_of_groups(record: StateRecord) -> StateEntry:
    from kafkalite.groups import record_codec as codec

    kinds: Final[dict[int, tuple[str, tuple[str, ...], Callable[[Any, Mapping[str, str]], Fields]]]] = {
        codec.GROUP: ("group", ("group",), _group),
        codec.SUBSCRIPTION: ("subscription", ("group", "member"), lambda value, _: value._asdict()),
        codec.TARGET: ("target", ("group", "member"), _sets_of_partitions),
        codec.CURRENT: ("assignment", ("group", "member"), _sets_of_partitions),
        codec.EVENT: ("event", ("group", "place"), _event),
        codec.OFFSET: ("offset", ("group", "topic", "partition"), _offset),
    }
    kind, *parts = codec.parse_key(record.key)
    name, names, fields_of = kinds[kind]
    key = dict(zip(names, parts, strict=True))
    return StateEntry(
        name, key, None if record.value is None else fields_of(*codec.parse(kind, record.value))
    )


def _group(state: GroupState, _: Mapping[str, str]) -> Fields:
    return {
        "generation": state.group_epoch,
        "assignor": state.assignor,
        "empty_since": format_time(state.emptied_ms),
        "topics": [f"{name}:{count}" for name, (_, count) in state.topics.items()],
    }


def _sets_of_partitions(value: Target | CurrentAssignment, names: Mapping[str, str]) -> Fields:
    return {
        name: [f"{names.get(id_) or id_}-{number}" for id_, number in sorted(field)]
        if isinstance(field, frozenset)
        else field
        for name, field in value._asdict().items()
    }


def _event(event: GroupEvent, _: Mapping[str, str]) -> Fields:
    return {
        "generation": event.group_epoch,
        "time": format_time(event.time_ms),
        "cause": event.cause,
        "detail": event.detail,
        "members": event.member_count,
        "partitions": event.partition_count,
    }


def _offset(offset: OffsetValue, _: Mapping[str, str]) -> Fields:
    return {
        **pick(offset, "offset", "leader_epoch", "metadata"),
        "committed": format_time(offset.commit_ms),
        "topic_id": offset.topic_id,
    }


def _read_of_transactions(record: StateRecord) -> StateEntry:
    from kafkalite.transactions.record_codec import GroupResult, parse_record
    from kafkalite.transactions.transaction import NO_BATCH, Transaction, in_order

    found = parse_record(record)
    if isinstance(found, GroupResult):
        result: Fields | None = None
        if found.last_batch_id != NO_BATCH:
            result = {"last_batch": found.last_batch_id, "winners": list(found.winners)}
            if found.retired_ms != NO_TIMESTAMP:
                result["retired"] = format_time(found.retired_ms)
        return StateEntry("group", {"application_id": found.name}, result)
    if not isinstance(found, Transaction):
        name, producer_id = found
        if producer_id == NO_PRODUCER_ID:
            return StateEntry("transaction", {"transactional_id": name}, None)
        return StateEntry("member", {"application_id": name, "producer_id": producer_id}, None)
    value = {
        "state": found.state.value,
        **pick(found, "producer_id", "producer_epoch", "timeout_ms"),
        "started": format_time(found.start_ms),
        "updated": format_time(found.update_ms),
        "partitions": [f"{tp.topic}-{tp.partition}" for tp in in_order(found.partitions)],
    }
    if not found.is_writer:
        return StateEntry("transaction", {"transactional_id": found.name}, value)
    value |= {"member": found.writer_name, "batch": found.batch_id}
    return StateEntry("member", {"application_id": found.name, "producer_id": found.producer_id}, value)
