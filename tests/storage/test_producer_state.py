"""Idempotent producers: batches that are next, repeated, or refused (R27, R28, R29)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import (
    InvalidProducerEpochError,
    InvalidRecordError,
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
)
from kafkalite.model import NO_TIMESTAMP
from kafkalite.records.header import HEADER_BYTES, BatchHeader
from kafkalite.storage.producer_state import SEQUENCES, ProducerStates

PRODUCER = 7


def header(sequence, count=1, *, epoch=0, producer=PRODUCER, crc=0):
    return BatchHeader(0, 61, 0, 2, crc, 0, count - 1, 0, 0, producer, epoch, sequence, count)


def check(states, header):
    return states.check(header, bytes(HEADER_BYTES))


def append(states, sequence, count=1, *, offset, epoch=0, now_ms=0):
    assert check(states, header(sequence, count, epoch=epoch)) is None
    states.note(PRODUCER, epoch, sequence, offset, offset + count - 1, 50, now_ms, 0)


def test_batches_come_in_sequence():
    states = ProducerStates()
    append(states, 0, 3, offset=10)
    append(states, 3, 2, offset=20)
    with pytest.raises(OutOfOrderSequenceNumberError, match="sequence 5; the batch begins with 6"):
        check(states, header(6))
    assert len(states) == 1


def test_a_repeated_batch_is_returned_with_its_first_offsets():
    states = ProducerStates()
    append(states, 0, 3, offset=10)
    append(states, 3, 2, offset=20)
    assert check(states, header(0, 3))[:4] == (0, 2, 10, 12)
    assert check(states, header(3, 2)) == (3, 4, 20, 21, 50, 0)


@pytest.mark.parametrize(("sequence", "count"), [(0, 2), (1, 2), (3, 1), (4, 3), (2, 2)])
def test_a_part_of_an_earlier_batch_is_not_a_repetition(sequence, count):
    states = ProducerStates()
    append(states, 0, 3, offset=10)
    append(states, 3, 2, offset=20)
    with pytest.raises(OutOfOrderSequenceNumberError):
        check(states, header(sequence, count))


def test_other_content_under_the_same_sequences_is_not_a_repetition():
    states = ProducerStates()
    append(states, 0, 3, offset=10)
    append(states, 3, 2, offset=20)
    for sequence, count in ((0, 3), (3, 2)):
        with pytest.raises(OutOfOrderSequenceNumberError, match="has another batch with sequences"):
            check(states, header(sequence, count, crc=1))


def test_only_five_batches_are_kept_and_older_ones_are_not_taken_for_repeated():
    states = ProducerStates()
    for number in range(8):
        append(states, number, offset=10 * number)
    assert [batch.base_offset for batch in states.get(PRODUCER).batches] == [30, 40, 50, 60, 70]
    assert check(states, header(3)).base_offset == 30
    for count in (1, 2):  # nothing shows that it is the batch in the log
        with pytest.raises(OutOfOrderSequenceNumberError):
            check(states, header(2, count))


def test_sequences_wrap():
    states = ProducerStates()
    states.note(PRODUCER, 0, SEQUENCES - 3, 0, 1, 0, 0)
    append(states, SEQUENCES - 1, 2, offset=2)
    append(states, 1, offset=4)
    assert check(states, header(SEQUENCES - 1, 2)).base_offset == 2
    assert check(states, header(SEQUENCES - 3, 2)).base_offset == 0
    for sequence in (SEQUENCES - 9, 9):
        with pytest.raises(OutOfOrderSequenceNumberError):
            check(states, header(sequence, 2))


def test_an_epoch_begins_with_sequence_0_and_ends_the_one_before():
    states = ProducerStates()
    append(states, 0, 3, offset=0)
    with pytest.raises(OutOfOrderSequenceNumberError, match="sequence 0"):
        check(states, header(3, epoch=1))
    append(states, 0, offset=3, epoch=1)
    with pytest.raises(InvalidProducerEpochError):
        check(states, header(3, epoch=0))
    assert states.get(PRODUCER).batches[0].base_offset == 3


def test_an_unknown_producer_must_begin_with_sequence_0():
    states = ProducerStates()
    with pytest.raises(UnknownProducerIdError):
        check(states, header(4))
    for bad in (header(-1), header(0, epoch=-1)):
        with pytest.raises(InvalidRecordError):
            check(states, bad)


def test_r29_an_inactive_producer_is_forgotten():
    states = ProducerStates()
    states.note(1, 0, 0, 0, 0, 0, 1_000)
    states.note(2, 0, 0, 1, 1, 0, 5_000)
    states.note(3, 0, 0, 2, 2, 10, NO_TIMESTAMP)  # restored from the log
    assert states.expire(9_000, 8_000) == 1
    assert (states.get(1), len(states)) == (None, 2)
    assert states.expire(16_999, 8_000) == 1
    assert states.expire(17_000, 8_000) == 1


def test_states_are_restored_from_their_lines():
    states = ProducerStates()
    append(states, 0, 3, offset=10, now_ms=4)
    append(states, 3, 2, offset=20, now_ms=5)
    assert list(states.lines()) == ["7 0 5 -1 -1 0:2:10:12:50:0 3:4:20:21:50:0"]
    assert ProducerStates.from_lines(states.lines()) == states
    for bad in ("7 0 5", "7 0", "7 0 5 -1 -1 1:2", "7 0 5 x:1:1:1:1", "ended 1", "aborted 1 2 3"):
        with pytest.raises(ValueError):
            ProducerStates.from_lines([bad])


def test_a_batch_of_a_snapshot_without_checksums_is_repeated_by_its_sequences():
    states = ProducerStates.from_lines(["7 0 5 -1 -1 0:2:10:12:50"])
    assert check(states, header(0, 3, crc=9)).base_offset == 10
    assert ProducerStates.from_lines(states.lines()) == states


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), max_size=60), st.integers(0, SEQUENCES - 1))
def test_nothing_is_ever_appended_twice_or_out_of_order(asked, start):
    """Compared with a list of every record's sequence, from any start on the circle."""
    states, there = ProducerStates(), [0]
    states.note(PRODUCER, 0, start, 0, 0, 0, 0)
    for relative, count in asked:
        sequence = (start + relative) % SEQUENCES
        try:
            found = check(states, header(sequence, count))
        except OutOfOrderSequenceNumberError:
            assert relative != len(there)
            continue
        if found is None:
            assert relative == len(there)
            states.note(PRODUCER, 0, sequence, len(there), len(there) + count - 1, 0, 0, 0)
            there += range(relative, relative + count)
        else:
            assert relative + count <= len(there)
            assert (found.base_offset, found.last_offset) == (relative, relative + count - 1)
    assert there == list(range(len(there)))
