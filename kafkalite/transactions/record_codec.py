"""Encodes the records of ``__transaction_state`` as msgpack arrays.

Keys are ``[type, name, …]``, values are ``[version, field, …]``.

==============================  ================================================================
key                             value
==============================  ================================================================
``[1, transactional id]``       the transaction
``[2, application id]``         the last decided batch and the names of its winners; version 1 adds
                                the time of the application's retirement
``[3, application id, id]``     a writer's transaction; ``id`` is the writer's producer id
==============================  ================================================================

Each writer of a group has its own record, so a change of one writer does not rewrite the records of the
others. An unknown type or version is refused, because skipping a record would make this coordinator forget a
decision (R36).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgpack

from kafkalite.coordinator_types import StateRecord
from kafkalite.errors import StorageError
from kafkalite.model import NO_PRODUCER_ID, NO_TIMESTAMP
from kafkalite.protocol.messages.transactions import TxnPartition
from kafkalite.transactions.transaction import (
    NO_BATCH,
    NO_WRITER,
    Identity,
    Key,
    Transaction,
    TransactionState,
    in_order,
)


class KeyType(enum.IntEnum):
    """The key types by their numbers on disk. Never reuse a number for another type."""

    TRANSACTION = 1
    GROUP = 2
    WRITER = 3


_VERSION: Final = 0
# The version of a GroupResult. A broker that knows only version 0 refuses it, so serves no such group.
_RETIRED_VERSION: Final = 1
_STATES: Final = tuple(TransactionState)
_NUMBERS: Final = {state: number for number, state in enumerate(_STATES)}


class GroupResult(NamedTuple):
    """The last decided batch of an application and its winners, kept for repeated requests (R32).

    If ``last_batch_id`` is NO_BATCH, the decision was removed.
    """

    name: str
    last_batch_id: int
    winners: tuple[str, ...]
    retired_ms: int = NO_TIMESTAMP  #: wall clock of the retirement; the next decided batch revokes it


def transaction_record(transaction: Transaction) -> StateRecord:
    """Return the record that stores ``transaction`` under its key."""
    value = [
        _VERSION,
        *transaction[1:3],
        _NUMBERS[transaction.state],
        *transaction[4:7],
        *transaction.ended,
        transaction.next_producer_id,
        _partitions_to_array(transaction.partitions),
    ]
    if transaction.is_writer:
        value += [transaction.writer_name, transaction.batch_id]
    return StateRecord(_key(transaction.key), msgpack.packb(value))


def removal(key: Key) -> StateRecord:
    """Return the tombstone of a transactional id or a writer; for a group, use ``result_record``."""
    return StateRecord(_key(key), None)


def result_record(result: GroupResult) -> StateRecord:
    """Return the record that stores ``result``, or its tombstone if the last batch is NO_BATCH."""
    key = msgpack.packb([int(KeyType.GROUP), result.name])
    if result.last_batch_id == NO_BATCH:
        return StateRecord(key, None)
    value = [_VERSION, result.last_batch_id, list(result.winners)]
    if result.retired_ms != NO_TIMESTAMP:
        value = [_RETIRED_VERSION, *value[1:], result.retired_ms]
    return StateRecord(key, msgpack.packb(value))


def parse_record(record: StateRecord) -> Transaction | GroupResult | Key:
    """Return the decoded record. Raises StorageError if it is malformed, or its type or version is unknown.

    For the tombstone of a transactional id or a writer, return its Key. For the tombstone of a group, return
    a GroupResult with NO_BATCH.
    """
    try:
        return _parse(record)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise StorageError(
            f"a record of the transaction log can't be read: {error}; key {record.key[:64]!r}",
            hint="a newer broker may have written it: then start that version; otherwise the log is damaged",
        ) from error


def _parse(record: StateRecord) -> Transaction | GroupResult | Key:
    kind, name, *rest = msgpack.unpackb(record.key)
    if kind not in (KeyType.TRANSACTION, KeyType.GROUP, KeyType.WRITER) or type(name) is not str:
        raise ValueError(f"unknown type {kind!r}")
    if record.value is None:
        if kind == KeyType.GROUP:
            return GroupResult(name, NO_BATCH, ())
        return name, _writer_id(rest) if kind == KeyType.WRITER else NO_PRODUCER_ID
    version, *fields = msgpack.unpackb(record.value)
    if version == _RETIRED_VERSION and kind == KeyType.GROUP:
        batch_id, winners, retired_ms = fields
        return GroupResult(name, batch_id, tuple(winners), retired_ms)
    if version != _VERSION:
        raise ValueError(f"unknown version {version!r} of type {kind}")
    if kind == KeyType.GROUP:
        batch_id, winners = fields
        return GroupResult(name, batch_id, tuple(winners))
    writer, batch_id = NO_WRITER, NO_BATCH
    if kind == KeyType.WRITER:
        *fields, writer, batch_id = fields
    *head, ended_id, ended_epoch, next_id, topics = fields
    head[2] = _STATES[head[2]]
    rest = (_partitions_from_array(topics), Identity(ended_id, ended_epoch), next_id, writer, batch_id)
    return Transaction._make((name, *head, *rest))  # raises TypeError for a wrong number of fields


def _writer_id(rest: list[Any]) -> int:
    (producer_id,) = rest
    if type(producer_id) is not int or producer_id < 0:
        raise ValueError(f"a writer has no producer id {producer_id!r}")
    return producer_id


def _key(key: Key) -> bytes:
    name, producer_id = key
    parts = [KeyType.TRANSACTION, name] if producer_id == NO_PRODUCER_ID else [KeyType.WRITER, *key]
    packed: bytes = msgpack.packb(parts)
    return packed


def _partitions_to_array(partitions: Iterable[TxnPartition]) -> list[tuple[str, list[int]]]:
    """Return (topic, [first, count, first, count, …]) for each topic, sorted.

    Partitions are stored as ranges, so all partitions of a topic take two numbers. Equal sets of partitions
    have equal bytes.
    """
    topics: dict[str, list[int]] = {}
    for topic, number in in_order(partitions):
        runs = topics.setdefault(topic, [])
        if runs and runs[-2] + runs[-1] == number:
            runs[-1] += 1
        else:
            runs += (number, 1)
    return list(topics.items())


def _partitions_from_array(topics: list[tuple[str, list[int]]]) -> frozenset[TxnPartition]:
    return frozenset(
        TxnPartition(topic, number)
        for topic, runs in topics
        for first, count in zip(runs[::2], runs[1::2], strict=True)
        for number in range(first, first + count)
    )
