"""Finds the transactions whose markers are lost in a damaged log, for ``kl log accept-loss`` (R45).

A marker has the epoch of its transaction plus one, and the producer's next transaction has that epoch or a
later one (R31). So if a later batch of the producer has a later epoch than its open transaction, and is not
the marker of that transaction, this marker is missing. Without a marker, the transaction would last until the
marker of the next transaction and have the outcome of the next transaction. So the repair writes an abort
marker at a lost offset between the last batch of the transaction and the later batch: readers with
``read_committed`` never receive an aborted record. If the transaction was committed, they no longer receive
its records; readers with ``read_uncommitted`` do.

Only an offset that this repair loses is used. A missing marker elsewhere was removed by compaction, which
keeps the outcome unambiguous (``storage.compaction``).

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kafkalite.errors import CorruptBatchError
from kafkalite.records.control import build_marker, parse_marker
from kafkalite.records.gaps import replaced_by
from kafkalite.records.header import BatchHeader


class TransactionRange(NamedTuple):
    """A transaction in a repaired log. ``first_offset`` is the base offset of its first intact batch, and
    ``last_offset`` the last offset (inclusive) of its last one. ``record_count`` is the number of records in
    its intact batches."""

    producer_id: int
    first_offset: int
    last_offset: int
    record_count: int


class Outcomes(NamedTuple):
    """The transactions without a marker in a repaired log.

    ``unknown``: the marker is lost, and the repair ends the transaction as aborted. ``open``: no marker
    follows. Either it is lost too, or the transaction has not ended. ``markers``: {lost offset: abort marker
    to write there}.
    """

    unknown: list[TransactionRange]
    open: list[TransactionRange]
    markers: dict[int, bytearray]


@dataclass(slots=True)
class _Open:
    """A transaction whose marker has not been found yet."""

    epoch: int
    first_offset: int
    last_offset: int
    record_count: int
    max_timestamp_ms: int

    def range_of(self, producer_id: int) -> TransactionRange:
        return TransactionRange(producer_id, self.first_offset, self.last_offset, self.record_count)


def find_lost_markers(batches: Iterable[tuple[memoryview, int, BatchHeader]]) -> Outcomes:
    """Return the transactions whose markers are lost or do not exist yet, and the markers to write.

    ``batches`` are (buffer, position, header) of the intact batches of a log, in order of offsets. The
    offsets between them are lost.
    """
    found = Outcomes([], [], {})
    opened: dict[int, _Open] = {}
    coordinator_epochs: dict[int, int] = {}  # of each producer's last marker
    lost: list[range] = []
    next_offset: int | None = None
    for view, position, header in batches:
        if next_offset is not None and header.base_offset > next_offset:
            lost.append(range(next_offset, header.base_offset))
        next_offset = header.next_offset
        producer_id, epoch = header.producer_id, header.producer_epoch
        is_marker = header.is_control and header.is_transactional
        if header.is_control and not is_marker:
            replaced = replaced_by(view, position, header.attributes)
            if replaced is None:
                continue
            producer_id, epoch = replaced.producer_id, replaced.epoch
        one = opened.get(producer_id)
        if one is not None and epoch > one.epoch + is_marker:
            offset = _free_offset(lost, one.last_offset + 1, found.markers)
            if offset is not None:
                coordinator_epoch = coordinator_epochs.get(producer_id, 0)
                marker = build_marker(
                    producer_id, one.epoch + 1, coordinator_epoch, False, one.max_timestamp_ms
                )
                found.markers[offset] = marker
                found.unknown.append(one.range_of(producer_id))
                del opened[producer_id]
                one = None
        if is_marker:
            with suppress(CorruptBatchError):  # the next start reports a malformed marker
                marker_bytes = view[position : position + header.length_bytes]
                coordinator_epochs[producer_id] = parse_marker(marker_bytes).coordinator_epoch
            opened.pop(producer_id, None)
        elif header.is_transactional:
            if one is None:
                one = opened[producer_id] = _Open(epoch, header.base_offset, 0, 0, 0)
            one.epoch = epoch
            one.last_offset = header.last_offset
            one.record_count += header.record_count
            one.max_timestamp_ms = header.max_timestamp_ms
    found.open.extend(one.range_of(producer_id) for producer_id, one in opened.items())
    return found


def _free_offset(lost: list[range], first: int, used: dict[int, bytearray]) -> int | None:
    """Return the lowest offset at or above ``first`` that is in ``lost`` and not in ``used``, or None.

    The lowest one leaves the higher offsets to the transactions whose lost markers are found later.
    """
    for number in range(bisect_left(lost, first, key=lambda one: one.stop - 1), len(lost)):
        for offset in range(max(first, lost[number].start), lost[number].stop):
            if offset not in used:
                return offset
    return None
