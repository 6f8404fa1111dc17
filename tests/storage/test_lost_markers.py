"""R45: a lost transaction marker delivers no aborted record, and hides no record without a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.gaps import build_gap
from kafkalite.records.header import check
from kafkalite.storage.accept_loss import AcceptedLoss
from kafkalite.storage.log import Log
from kafkalite.storage.lost_markers import TransactionRange
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.damage.one_log import DIRECTORY, accept_as_expected, log_of, open_store

PATH = f"{DIRECTORY}/{0:020d}.log"
PRODUCER = 7
END = -1  #: the number of the last batch


def write(fs: MemoryFileSystem, batches: Sequence[bytearray], sync: Any) -> None:
    """Append the batches, and stop the node after a checkpoint."""
    store = open_store(fs)
    for batch in batches:
        log_of(store).append(batch, now_ms=1000, leader_epoch=3)
    sync(log_of(store))
    store.checkpoint()
    store.close()


def part(epoch: int, *, producer_id: int = PRODUCER, sequence: int = 0) -> bytearray:
    """Return a batch of three records of a transaction."""
    return build_batch(
        [b"1", b"2", b"3"],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=True,
    )


def marker(epoch: int, *, is_commit: bool, producer_id: int = PRODUCER) -> bytearray:
    """Return the marker of a transaction of ``epoch``."""
    return build_marker(producer_id, epoch + 1, 5, is_commit, 1000)


def transactions(outcomes: str) -> list[bytearray]:
    """Return the batches of transactions: C is committed, A aborted. Each has the offsets 4n to 4n + 3."""
    return [
        batch
        for epoch, outcome in enumerate(outcomes)
        for batch in (part(epoch), marker(epoch, is_commit=outcome == "C"))
    ]


def lose(fs: MemoryFileSystem, batches: Sequence[bytearray], *numbers: int) -> None:
    """Flip a bit in batches of the only segment."""
    for number in numbers:
        at = sum(map(len, batches[: number % len(batches)]))
        position = at + len(batches[number]) - 1
        file = fs.open(PATH)
        file.write_at(position, bytes((file.read_at(position, 1)[0] ^ 1,)))


def committed(log: Log) -> list[int]:
    """Return the offsets of the records that a reader with read_committed receives. As a client, it ends an
    aborted transaction at the next marker of the producer."""
    end = log.last_stable_offset(log.log_end_offset)
    aborted = log.aborted_between(0, end)
    skipped: set[int] = set()
    found: list[int] = []
    for header in headers(log):
        if header.base_offset >= end:
            break
        skipped |= {producer_id for producer_id, first in aborted if first == header.base_offset}
        if header.is_control:
            if header.is_transactional:
                skipped.discard(header.producer_id)
        elif header.producer_id not in skipped:
            found += range(header.base_offset, header.next_offset)
    return found


def headers(log: Log) -> list[Any]:
    found, offset = [], 0
    while offset < log.log_end_offset:
        piece = log.read(offset, max_bytes=1 << 20, up_to=log.log_end_offset)
        data = memoryview(b"".join(piece.buffers))
        while data:
            header = check(data[: int.from_bytes(data[8:12]) + 12])
            found.append(header)
            data = data[header.length_bytes :]
        offset = piece.next_offset
    return found


def repaired(fs: MemoryFileSystem) -> tuple[AcceptedLoss, Log]:
    """Accept the loss, after a comparison with what was announced, and open the log twice: the second time
    from its snapshot."""
    accepted = accept_as_expected(fs, DIRECTORY)
    assert accepted.damage is None
    store = open_store(fs)
    first = committed(log_of(store)), log_of(store).producers
    store.close()
    store = open_store(fs)
    log = log_of(store)
    assert (committed(log), log.producers) == first
    store.close()
    again = accept_as_expected(fs, DIRECTORY)
    assert (again.lost_records, again.unknown_transactions) == (0, [])
    return accepted, log_of(open_store(fs))


@pytest.mark.parametrize("outcomes", ["CAC", "ACA", "CCC", "AAA", "CAA"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_transaction_whose_marker_is_lost_counts_as_aborted_and_is_named(
    outcomes: str, lost: int, sync: Any
) -> None:
    fs, batches = MemoryFileSystem(), transactions(outcomes)
    write(fs, batches, sync)
    lose(fs, batches, 2 * lost + 1)
    accepted, log = repaired(fs)
    expected = [
        offset
        for number, outcome in enumerate(outcomes)
        if outcome == "C" and number != lost
        for offset in range(4 * number, 4 * number + 3)
    ]
    assert committed(log) == expected
    assert accepted.lost_records == 1
    first = 4 * lost
    assert accepted.unknown_transactions == [TransactionRange(PRODUCER, first, first + 2, 3)]
    assert accepted.open_transactions == []
    assert [one.record_count for one in headers(log) if not one.is_control] == [3, 3, 3], "all are readable"


def test_a_transaction_that_stays_open_because_its_marker_is_lost_is_named(sync: Any) -> None:
    fs, batches = MemoryFileSystem(), transactions("CC")
    write(fs, batches, sync)
    lose(fs, batches, END)
    accepted, log = repaired(fs)
    assert accepted.unknown_transactions == []
    assert accepted.open_transactions == [TransactionRange(PRODUCER, 4, 6, 3)]
    assert log.last_stable_offset(log.log_end_offset) == 4


def test_the_marker_of_a_transaction_of_which_all_records_are_lost_does_not_end_an_earlier_one(
    sync: Any,
) -> None:
    fs, batches = MemoryFileSystem(), transactions("AC")
    write(fs, batches, sync)
    lose(fs, batches, 1, 2)
    accepted, log = repaired(fs)
    assert committed(log) == []
    assert accepted.unknown_transactions == [TransactionRange(PRODUCER, 0, 2, 3)]
    assert accepted.open_transactions == []


def test_every_producer_gets_a_marker_if_adjacent_markers_are_lost(sync: Any) -> None:
    fs = MemoryFileSystem()
    batches = [
        part(0),
        part(0, producer_id=8),
        marker(0, is_commit=False),
        marker(0, is_commit=True, producer_id=8),
        part(1, producer_id=8),
        part(1),
        marker(1, is_commit=True),
        marker(1, is_commit=True, producer_id=8),
    ]
    write(fs, batches, sync)
    lose(fs, batches, 2, 3)
    accepted, log = repaired(fs)
    assert committed(log) == [*range(8, 14)]
    assert sorted(accepted.unknown_transactions) == [
        TransactionRange(PRODUCER, 0, 2, 3),
        TransactionRange(8, 3, 5, 3),
    ]


def test_lost_records_of_a_transaction_with_its_marker_leave_the_outcome_known(sync: Any) -> None:
    fs = MemoryFileSystem()
    batches = [part(0), part(0, sequence=3), part(0, sequence=6), marker(0, is_commit=True), part(1)]
    write(fs, batches, sync)
    lose(fs, batches, 1)
    accepted, log = repaired(fs)
    assert committed(log) == [0, 1, 2, 6, 7, 8]
    assert (accepted.lost_records, accepted.unknown_transactions) == (3, [])
    assert accepted.open_transactions == [TransactionRange(PRODUCER, 10, 12, 3)]


def test_a_marker_that_compaction_removed_is_not_taken_for_a_lost_one(sync: Any) -> None:
    """A replica that was away has the records of a transaction, but its leader a gap for the marker."""
    fs = MemoryFileSystem()
    batches = [part(0), build_gap(0, 1, 3), part(1), marker(1, is_commit=True), part(2), build_batch([b"x"])]
    write(fs, batches, sync)
    lose(fs, batches, END)
    accepted, log = repaired(fs)
    assert accepted.unknown_transactions == []
    assert committed(log) == [0, 1, 2, 4, 5, 6]
