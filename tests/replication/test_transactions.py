"""A partition and its transactions: what a leader appends, refuses and returns (R31 to R33)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import (
    BrokerError,
    ConcurrentTransactionsError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidRequiredAcksError,
    InvalidTxnStateError,
    KafkaStorageError,
    LogOfflineError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OutOfOrderSequenceNumberError,
    TransactionCoordinatorFencedError,
    UnknownProducerIdError,
)
from kafkalite.metadata.image import PartitionState
from kafkalite.model import EARLIEST, LATEST, MAX_PRODUCER_EPOCH, MAX_TIMESTAMP, NO_OFFSET, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker, parse_marker
from kafkalite.records.header import check
from kafkalite.replication.partition import Partition, PartitionSettings
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem

NOW_MS = 1_700_000_000_000


class Transactional:
    """A partition led by broker 1 that commits appended records at once by default."""

    def __init__(self, *, fsync: bool = False, isr=(1,), **settings) -> None:
        config = LogConfig(preallocate_min_bytes=0, durability="fsync" if fsync else "page-cache")
        self.log = Log.create(MemoryFileSystem(), f"/data/{'a' * 32}-0", config)
        self.partition = Partition(
            TopicPartition("orders", 0),
            "a" * 32,
            self.log,
            broker_id=1,
            settings=PartitionSettings(**settings),
        )
        self.partition.become_leader(PartitionState((1, 2, 3), isr, 1, 0, 0))

    def part(self, producer=7, epoch=0, sequence=0, *, verified=False, acks=-1, transactional=True, count=1):
        batch = build_batch(
            [b"v"] * count,
            timestamps_ms=NOW_MS,
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=transactional,
        )
        return self.partition.append(batch, check(batch), NOW_MS, acks=acks, is_verified=verified)

    def plain(self):
        batch = build_batch([b"v"], timestamps_ms=NOW_MS)
        return self.partition.append(batch, check(batch), NOW_MS)

    def marker(self, producer=7, epoch=1, coordinator=3, *, commit=True):
        return self.partition.append_marker(producer, epoch, coordinator, commit, NOW_MS)

    def sync(self):
        work = self.log.begin_sync()
        work.run()
        self.log.finish_sync(work, None)
        return self.partition.on_synced()

    def needs(self, producer=7, epoch=0, transactional=True):
        batch = build_batch(
            [b"v"], producer_id=producer, producer_epoch=epoch, base_sequence=0, transactional=transactional
        )
        return self.partition.needs_verification(check(batch))

    @property
    def stable(self):
        return self.partition.last_stable_offset

    @property
    def end(self):
        return self.log.log_end_offset


@pytest.fixture
def leader():
    return Transactional()


def headers(partition, offset=0, **options):
    found = []
    for buffer in partition.read(offset, 1 << 20, **options).buffers:
        while buffer:
            length = 12 + int.from_bytes(buffer[8:12], "big")
            found.append(RecordBatch(buffer[:length]).header)
            buffer = buffer[length:]
    return found


# --- what may be appended ------------------------------------------------------------------------------


def test_r31_the_first_batch_of_a_transaction_needs_the_coordinator(leader):
    assert leader.needs()
    with pytest.raises(
        InvalidTxnStateError, match="producer 7 in epoch 0 has no transaction open in orders-0"
    ):
        leader.part()
    leader.part(verified=True)
    assert not leader.needs()
    leader.part(sequence=1)
    assert [(one.producer_id, one.start_offset) for one in leader.partition.open_transactions()] == [(7, 0)]
    leader.marker()
    assert leader.needs(epoch=1)
    with pytest.raises(InvalidTxnStateError):
        leader.part(epoch=1)
    assert not leader.needs(epoch=0)  # it is refused anyway
    assert not leader.needs(producer=9, transactional=False)
    assert leader.partition.open_transactions() == []


def test_r31_a_late_batch_of_an_ended_transaction_is_refused(leader):
    leader.part(verified=True)
    leader.marker()
    for late in (0, 1):
        with pytest.raises(InvalidProducerEpochError):
            leader.part(sequence=late, verified=True)
    leader.part(epoch=1, verified=True)
    with pytest.raises(OutOfOrderSequenceNumberError, match="expected to continue with sequence 1"):
        leader.part(epoch=1, sequence=2)


def test_r31_a_marker_fences_a_batch_that_was_verified_and_not_yet_appended(leader):
    assert leader.needs()
    assert not leader.marker(commit=False).is_duplicate  # nothing is open, and yet it is appended
    with pytest.raises(InvalidProducerEpochError):
        leader.part(verified=True)
    assert leader.stable == leader.end == 1


def test_the_loss_of_r31_is_noticed(leader, mutant):
    mutant("R31-marker-epoch-ignored")
    leader.part(verified=True)
    leader.marker()
    leader.part(sequence=1, verified=True)  # the late batch opens a transaction that never ends
    assert leader.stable == 2 < leader.end


def test_each_transaction_begins_with_sequence_0(leader):
    leader.part(verified=True)
    leader.marker()
    with pytest.raises(OutOfOrderSequenceNumberError, match="sequence 0"):
        leader.part(epoch=1, sequence=1, verified=True)
    leader.part(epoch=1, verified=True)
    assert leader.part(epoch=1).is_duplicate


def test_an_unknown_producer_begins_with_sequence_0(leader):
    with pytest.raises(UnknownProducerIdError):
        leader.part(sequence=4, verified=True)
    assert leader.end == 0


def test_batches_outside_the_open_transaction_are_refused(leader):
    leader.part(verified=True)
    with pytest.raises(InvalidTxnStateError, match="not part of it"):
        leader.part(sequence=1, transactional=False)
    with pytest.raises(InvalidTxnStateError):
        leader.part(epoch=1, transactional=False)
    with pytest.raises(ConcurrentTransactionsError):
        leader.part(epoch=1, verified=True)
    leader.part(producer=8, transactional=False)
    leader.plain()


def test_s11_another_client_can_fence_an_idle_producer_but_cannot_end_or_change_an_open_transaction(leader):
    """It needs Write on the topic only, as in Kafka: a leader does not know whose a producer id is."""
    leader.part(verified=True)
    for transactional in (False, True):
        with pytest.raises((InvalidTxnStateError, ConcurrentTransactionsError)):
            leader.part(epoch=MAX_PRODUCER_EPOCH, transactional=transactional, verified=transactional)
    leader.part(sequence=1)
    leader.marker()
    committed = leader.stable
    assert committed == leader.end, "the owner has committed"
    with pytest.raises(InvalidTxnStateError, match="its coordinator did not confirm one"):
        leader.part(epoch=MAX_PRODUCER_EPOCH)
    leader.part(epoch=MAX_PRODUCER_EPOCH, transactional=False)
    with pytest.raises(InvalidProducerEpochError):
        leader.part(epoch=1, verified=True)
    with pytest.raises(InvalidProducerEpochError):  # which the coordinator counts as written: nothing is open
        leader.marker(epoch=2)
    assert leader.stable == leader.end, "readers of committed records do not wait"
    assert leader.log.expire_producers(NOW_MS + 100, 100) == 1
    leader.part(epoch=1, verified=True)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"producer": -1, "epoch": -1, "sequence": -1}, InvalidRecordError),
        ({"epoch": -1}, InvalidRecordError),
        ({"sequence": -1}, InvalidRecordError),
        ({"acks": 1}, InvalidRequiredAcksError),
        ({"acks": 0}, InvalidRequiredAcksError),
    ],
)
def test_a_transactional_batch_has_a_producer_a_sequence_and_acks_all(leader, changes, error):
    with pytest.raises(error):
        leader.part(verified=True, **changes)
    assert leader.end == 0


def test_clients_write_no_markers(leader):
    batch = build_marker(7, 1, 3, True, NOW_MS)
    for append in (leader.partition.append, leader.partition.append_state):
        with pytest.raises(InvalidRecordError):
            append(batch, check(batch), NOW_MS)
    assert leader.end == 0


# --- markers -------------------------------------------------------------------------------------------


def test_a_marker_is_a_batch_in_the_log(leader):
    leader.part(verified=True, count=3)
    appended = leader.marker(commit=False)
    assert appended[:2] == (3, 3)
    (header,) = headers(leader.partition, 3)
    assert (header.is_control, header.producer_epoch, header.max_timestamp_ms) == (True, 1, NOW_MS)
    view = leader.partition.read(3, 1 << 20).buffers[0]
    assert parse_marker(view) == (False, 3)


def test_r33_a_repeated_marker_is_not_written_again(leader):
    leader.part(verified=True)
    leader.marker()
    leader.plain()
    repeated = leader.marker()
    assert (repeated.is_duplicate, repeated.last_offset, leader.end) == (True, 2, 3)


def test_r33_a_late_repetition_leaves_the_next_transaction_open(leader):
    leader.part(verified=True)
    leader.marker(epoch=1)
    leader.part(epoch=1, verified=True)
    assert leader.marker(epoch=1, commit=False).is_duplicate
    assert leader.stable == 2
    leader.marker(epoch=2)
    with pytest.raises(InvalidProducerEpochError, match="is in epoch 2; the marker is of 1"):
        leader.marker(epoch=1)


def test_r32_a_marker_of_an_earlier_coordinator_is_refused(leader, mutant):
    leader.part(verified=True)
    leader.marker(coordinator=5)
    leader.part(epoch=1, verified=True)
    with pytest.raises(TransactionCoordinatorFencedError, match="epoch 5; this one is of 4"):
        leader.marker(epoch=2, coordinator=4, commit=False)
    assert leader.stable == 2
    mutant("R32-old-coordinator")
    assert not leader.marker(epoch=2, coordinator=4, commit=False).is_duplicate


def test_r6_markers_and_state_need_enough_replicas_in_sync():
    leader = Transactional(isr=(1,), min_insync_replicas=2)
    with pytest.raises(NotEnoughReplicasError):
        leader.marker()
    batch = build_batch([b"v"])
    with pytest.raises(NotEnoughReplicasError):
        leader.partition.append_state(batch, check(batch), NOW_MS)
    assert leader.end == 0


def test_only_a_leader_with_a_working_log_takes_markers(leader):
    leader.log.offline_reason = "write failed"
    with pytest.raises(KafkaStorageError):
        leader.marker()
    leader.partition.resign()
    for ask in (leader.marker, leader.needs, leader.partition.open_transactions):
        with pytest.raises(NotLeaderOrFollowerError):
            ask()


# --- a coordinator's own batches -----------------------------------------------------------------------


def state(producer=-1, epoch=-1, *, transactional=False):
    batch = build_batch(
        [b"v"], [b"k"], producer_id=producer, producer_epoch=epoch, transactional=transactional
    )
    return batch, check(batch), NOW_MS


def test_a_coordinators_batch_may_be_part_of_a_transaction_without_a_sequence(leader):
    leader.partition.append_state(*state())
    leader.partition.append_state(*state(7, 0, transactional=True))
    leader.partition.append_state(*state(7, 0, transactional=True))
    assert (leader.stable, leader.end) == (1, 3)
    with pytest.raises(ConcurrentTransactionsError):
        leader.partition.append_state(*state(7, 1, transactional=True))
    leader.marker()
    assert leader.stable == 4
    with pytest.raises(InvalidProducerEpochError):
        leader.partition.append_state(*state(7, 0, transactional=True))
    leader.partition.append_state(*state(7, 1, transactional=True))
    assert leader.stable == 4


# --- what is shown -------------------------------------------------------------------------------------


def test_r33_readers_of_committed_records_stop_at_the_first_open_transaction(leader):
    leader.plain()
    leader.part(verified=True)
    leader.plain()
    assert [len(headers(leader.partition, is_committed_only=only)) for only in (False, True)] == [3, 1]
    assert leader.partition.read(2, 1000, is_committed_only=True).buffers == []
    assert leader.partition.list_offset(LATEST).offset == 3
    assert leader.partition.list_offset(LATEST, True).offset == 1
    assert leader.partition.list_offset(EARLIEST, True).offset == 0
    assert leader.partition.list_offset(MAX_TIMESTAMP, True).offset == 0
    leader.marker(commit=False)
    assert leader.partition.list_offset(LATEST, True).offset == 4
    assert len(headers(leader.partition, is_committed_only=True)) == 4
    assert leader.log.aborted_between(0, 4) == [(7, 1)]


def test_r24_a_transaction_whose_end_is_behind_damage_is_an_error_for_readers_of_committed_records(leader):
    """They waited for ever, because the last stable offset stayed at its first record."""
    leader.plain()
    leader.part(verified=True)
    leader.plain()
    leader.plain()
    leader.log.mark_damaged("a flipped bit", sound_end_offset=3)
    assert len(headers(leader.partition, is_committed_only=True)) == 1
    for read in (leader.partition.readable_end, lambda *at: leader.partition.read(at[0], 1000, at[1])):
        for offset in (1, 2):
            with pytest.raises(LogOfflineError, match="a flipped bit; sound below offset 3"):
                read(offset, True)
        read(2, False)


def test_no_record_of_an_open_transaction_is_found_by_time():
    leader = Transactional()
    leader.part(verified=True)
    assert leader.partition.list_offset(NOW_MS).offset == 0
    assert leader.partition.list_offset(NOW_MS, True).offset == NO_OFFSET


def test_r33_a_marker_counts_when_it_is_committed():
    leader = Transactional(fsync=True)
    leader.part(verified=True)
    leader.sync()
    leader.marker()
    assert (leader.partition.high_watermark, leader.stable) == (1, 0)
    leader.sync()
    assert (leader.partition.high_watermark, leader.stable) == (2, 2)


# --- failover ------------------------------------------------------------------------------------------


class Pair:
    """A leader and a follower, and a second leadership."""

    def __init__(self) -> None:
        self.first = Transactional(isr=(1, 2))
        config = LogConfig(preallocate_min_bytes=0, durability="page-cache", segment_bytes=1024)
        self.log = Log.create(MemoryFileSystem(), f"/data/{'b' * 32}-0", config)
        self.second = Partition(TopicPartition("orders", 0), "a" * 32, self.log, broker_id=2)
        self.second.become_follower(PartitionState((1, 2, 3), (1, 2), 1, 0, 0))

    def replicate(self):
        """Let the follower have all records, and both know that."""
        for _ in range(2):
            position = self.second.fetch_position()
            end = position.fetch_offset
            self.first.partition.on_replica_fetch(
                2,
                broker_epoch=1,
                leader_epoch=0,
                fetch_offset=end,
                last_epoch=position.last_epoch,
                synced_end_offset=end,
                log_start_offset=0,
                now_ms=0,
            )
            batches = b"".join(self.first.partition.read_for_replica(end, 1 << 20).buffers)
            answer = ReplicaFetchedPartition(
                "a" * 32, 0, 0, None, 0, self.first.partition.high_watermark, 0, -1, -1, len(batches)
            )
            self.second.on_fetched(answer, memoryview(batches), now_ms=NOW_MS)

    def fail_over(self):
        self.second.become_leader(PartitionState((1, 2, 3), (2,), 2, 1, 1))
        return self.second


def test_r27_a_new_leader_knows_what_the_old_one_knew():
    pair = Pair()
    first = pair.first
    first.part(verified=True)
    first.part(producer=8, verified=True)
    first.part(producer=9, verified=True)
    first.marker(producer=8, commit=False)
    first.marker(producer=9)
    pair.replicate()
    assert pair.log.producers == first.log.producers
    second = pair.fail_over()
    assert second.last_stable_offset == 0
    assert [one.producer_id for one in second.open_transactions()] == [7]
    assert pair.log.aborted_between(0, 5) == [(8, 1)]
    with pytest.raises(TransactionCoordinatorFencedError):
        second.append_marker(8, 2, 1, True, NOW_MS)
    assert second.append_marker(8, 1, 3, False, NOW_MS).is_duplicate
    second.append_marker(7, 1, 3, True, NOW_MS)
    assert second.last_stable_offset == 6


def test_a_followers_state_does_not_grow_with_ended_transactions():
    pair = Pair()
    for number in range(50):
        pair.first.part(epoch=number, verified=True)
        pair.first.marker(epoch=number + 1)
        pair.replicate()
    assert len(pair.log.producers.ended) <= 2
    assert len(pair.first.log.producers.ended) <= 2


def test_the_loss_of_the_index_is_noticed(mutant):
    pair = Pair()
    pair.first.part(verified=True)
    pair.first.marker(commit=False)
    pair.replicate()
    mutant("R33-index-forgotten")
    pair.fail_over()
    assert pair.log.aborted_between(0, 2) == []


# --- anything, in any order ----------------------------------------------------------------------------

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["part", "verified", "plain", "commit", "abort", "state"]),
        st.integers(1, 2),  # producer
        st.integers(0, 3),  # epoch
        st.integers(0, 2),  # sequence, or coordinator epoch
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(CALLS)
def test_any_sequence_of_operations_leaves_the_log_consistent(calls):
    """Invariants of the log: transactions end by markers of later epochs, epochs never go back, and each
    batch was appended by a producer that was allowed to.
    """
    leader = Transactional()
    for what, producer, epoch, number in calls:
        try:
            if what in ("part", "verified"):
                leader.part(producer, epoch, number, verified=what == "verified")
            elif what == "plain":
                leader.part(producer, epoch, number, transactional=False)
            elif what == "state":
                leader.partition.append_state(*state(producer, epoch, transactional=True))
            else:
                leader.marker(producer, epoch, number, commit=what == "commit")
        except BrokerError:
            continue
    epochs, opened, coordinators, aborted = {}, {}, {}, []
    for header in headers(leader.partition):
        producer, epoch = header.producer_id, header.producer_epoch
        assert epoch >= epochs.get(producer, 0)
        if header.is_control:
            (view,) = leader.partition.read(header.base_offset, 1).buffers
            is_commit, coordinator = parse_marker(view)
            assert coordinator >= coordinators.get(producer, 0)
            coordinators[producer] = coordinator
            first, first_epoch = opened.pop(producer, (None, -1))
            assert first_epoch < epoch
            if first is not None and not is_commit:
                aborted.append((producer, first))
        elif header.is_transactional:
            assert opened.setdefault(producer, (header.base_offset, epoch))[1] == epoch
        else:
            assert producer not in opened
        epochs[producer] = epoch
    assert leader.stable == min([leader.end, *(first for first, _ in opened.values())])
    assert leader.log.aborted_between(0, leader.end) == sorted(aborted, key=lambda one: one[1])
