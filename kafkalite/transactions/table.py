"""The transactions of a coordinator by name, their deadlines and their pending markers.

Everything except the deadlines and the progress of markers (``pending``) is determined by the replayed
records (R36).
"""

# Tests: tests/transactions/test_machine.py

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Final

from kafkalite.coordinator_types import Instant, StateRecord
from kafkalite.model import NO_PRODUCER_ID
from kafkalite.transactions.commands import PendingMarker
from kafkalite.transactions.group import TransactionGroup
from kafkalite.transactions.record_codec import GroupResult, parse_record, removal, result_record
from kafkalite.transactions.transaction import (
    NO_BATCH,
    PREPARED,
    Key,
    Transaction,
    TransactionState,
    in_order,
)

_SPARE_DEADLINES: Final = 64  # the number of outdated heap entries to tolerate


class TransactionTable:
    """Stores transactions and their deadlines. No name is in both ``transactions`` and ``groups``."""

    def __init__(self, expiration_ms: int) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.groups: dict[str, TransactionGroup] = {}
        self._expiration_ms = expiration_ms
        #: {key of a prepared transaction: its partitions that may lack the marker}. A new coordinator begins
        #: with all partitions of the transaction. A marker that is sent again has no effect (R33).
        self.pending: dict[Key, PendingMarker] = {}
        # {key of an Ongoing transaction: (monotonic deadline, start_ms)}
        self._timeouts: dict[Key, tuple[int, int]] = {}
        self._heap: list[tuple[int, Key]] = []  # all deadlines in ``_timeouts``, and outdated ones
        #: {key of an id, writer or retired group without an open transaction: monotonic time of its
        #: expiration}, the longest idle first
        self._idle: dict[Key, int] = {}

    def get(self, key: Key) -> Transaction | None:
        """Return the latest transaction of a transactional id or a writer, or None."""
        name, producer_id = key
        if producer_id == NO_PRODUCER_ID:
            return self.transactions.get(name)
        group = self.groups.get(name)
        return None if group is None else group.writers.get(producer_id)

    def __iter__(self) -> Iterator[Transaction]:
        """Yield the transactions of all transactional ids and writers."""
        yield from self.transactions.values()
        for group in self.groups.values():
            yield from group.writers.values()

    def overdue(self, now: Instant) -> Iterator[Transaction]:
        """Yield the Ongoing transactions whose timeout has expired, the longest overdue first."""
        due = sorted(key for key in self._timeouts if self._timeouts[key][0] <= now.monotonic_ms)
        due.sort(key=lambda key: self._timeouts[key][0])
        for key in due:
            transaction = self.get(key)
            assert transaction is not None
            yield transaction

    def expired(self, now: Instant) -> Iterator[StateRecord]:
        """Yield tombstones of expired transactional ids, writers and retired groups."""
        for key, deadline_ms in self._idle.items():
            if deadline_ms > now.monotonic_ms:
                return
            group = self.groups.get(key[0])
            if group is None or key[1] != NO_PRODUCER_ID:
                yield removal(key)
                continue
            for producer_id in group.writers:
                yield removal((group.name, producer_id))
            yield result_record(GroupResult(group.name, NO_BATCH, ()))

    def next_deadline_ms(self) -> int | None:
        """Return the monotonic time at which ``overdue`` or ``expired`` next yields something, or None."""
        heap = self._heap
        while heap and self._timeouts.get(heap[0][1], (None,))[0] != heap[0][0]:
            heapq.heappop(heap)
        deadlines = [heap[0][0]] if heap else []
        deadlines += list(islice(self._idle.values(), 1))
        return min(deadlines, default=None)

    def replay(self, record: StateRecord, now: Instant) -> None:
        """Replay a record. Raises StorageError if the record cannot be decoded."""
        item = parse_record(record)
        if isinstance(item, Transaction):
            self._put(item, now)
        elif isinstance(item, GroupResult):
            group = self.groups.setdefault(item.name, TransactionGroup(item.name))
            was_over = self.is_over(item.name)
            group.decide(item)
            for producer_id in group.free if was_over else ():  # each producer id expires separately again
                writer = group.writers[producer_id]
                self._idle[writer.key] = self._expiration(writer.update_ms, now)
            self._settle(group, item.retired_ms, now)
            self._drop_if_empty(group)
        else:
            self._forget(item)

    def _put(self, transaction: Transaction, now: Instant) -> None:
        key = transaction.key
        if transaction.is_writer:
            group = self.groups.setdefault(transaction.name, TransactionGroup(transaction.name))
            group.put(transaction)
            self._settle(group, transaction.update_ms, now)
        else:
            self.transactions[transaction.name] = transaction
        self._idle.pop(key, None)
        if transaction.state is TransactionState.ONGOING:
            self._set_timeout(transaction, now)
        else:
            self._timeouts.pop(key, None)
        if transaction.state in PREPARED:
            self.pending[key] = PendingMarker(
                transaction.name,
                transaction.producer_id,
                transaction.producer_epoch,
                transaction.is_commit,
                tuple(in_order(transaction.partitions)),
            )
        else:
            self.pending.pop(key, None)
        if not transaction.is_open and not self.is_over(transaction.name):
            self._idle[key] = self._expiration(transaction.update_ms, now)

    def _expiration(self, update_ms: int, now: Instant) -> int:
        idle_ms = max(now.wall_ms - update_ms, 0)
        return now.monotonic_ms + max(self._expiration_ms - idle_ms, 0)

    def is_over(self, name: str) -> bool:
        """Whether ``name`` is a retired group, which expires as a whole when it is unused (R32)."""
        group = self.groups.get(name)
        return group is not None and group.is_retired

    def _settle(self, group: TransactionGroup, used_ms: int, now: Instant) -> None:
        """If a retired group has no open writers, schedule its expiration, counted from its last use.
        Otherwise, cancel a scheduled expiration of the group."""
        key = (group.name, NO_PRODUCER_ID)
        deadline_ms = self._idle.pop(key, None)
        if group.open or not self.is_over(group.name):
            return
        if deadline_ms is None:
            for writer in group.writers.values():
                self._idle.pop(writer.key, None)
                used_ms = max(used_ms, writer.update_ms)
            deadline_ms = now.monotonic_ms
        self._idle[key] = max(deadline_ms, self._expiration(used_ms, now))

    def _forget(self, key: Key) -> None:
        name, producer_id = key
        if producer_id == NO_PRODUCER_ID:
            self.transactions.pop(name, None)
        elif (group := self.groups.get(name)) is not None:
            group.remove(producer_id)
            self._drop_if_empty(group)
        self._idle.pop(key, None)
        self._timeouts.pop(key, None)
        self.pending.pop(key, None)

    def _drop_if_empty(self, group: TransactionGroup) -> None:
        if group.is_empty:
            del self.groups[group.name]
            self._idle.pop((group.name, NO_PRODUCER_ID), None)

    def _set_timeout(self, transaction: Transaction, now: Instant) -> None:
        """Set the monotonic deadline of an Ongoing transaction, from the wall-clock time of its start."""
        key = transaction.key
        known = self._timeouts.get(key)
        if known is not None and known[1] == transaction.start_ms:
            return
        lasted_ms = min(max(now.wall_ms - transaction.start_ms, 0), transaction.timeout_ms)
        deadline_ms = now.monotonic_ms + transaction.timeout_ms - lasted_ms
        self._timeouts[key] = (deadline_ms, transaction.start_ms)
        heapq.heappush(self._heap, (deadline_ms, key))
        if len(self._heap) > 2 * len(self._timeouts) + _SPARE_DEADLINES:
            self._heap = [(ms, key) for key, (ms, _) in self._timeouts.items()]
            heapq.heapify(self._heap)
