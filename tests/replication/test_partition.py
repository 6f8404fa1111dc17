"""A partition: what a leader appends, returns and refuses."""

from __future__ import annotations

import dataclasses

import pytest

from kafkalite.errors import (
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidTimestampError,
    KafkaStorageError,
    MessageTooLargeError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceNumberError,
    PolicyViolationError,
    UnknownLeaderEpochError,
    UnknownProducerIdError,
)
from kafkalite.model import EARLIEST, LATEST, MAX_TIMESTAMP, NO_EPOCH, NO_OFFSET, NO_TIMESTAMP, TimestampType
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.header import CONTROL_BIT, TIMESTAMP_TYPE_BIT, TRANSACTIONAL_BIT, check
from kafkalite.replication import partition as partition_module
from kafkalite.replication.partition import PartitionSettings
from kafkalite.storage.disk import RealFileSystem
from kafkalite.storage.log import Log


def values(read):
    return [
        value
        for buffer in read.buffers
        for batch in batches(buffer)
        for value in RecordBatch(batch).columns().values
    ]


def batches(buffer):
    while buffer:
        length = 12 + int.from_bytes(buffer[8:12], "big")
        yield buffer[:length]
        buffer = buffer[length:]


def test_records_are_read_below_the_high_watermark_only(new_leader):
    leader = new_leader()
    appended = leader.append(b"a", b"b")
    assert (appended.base_offset, appended.last_offset, appended.log_end_offset) == (0, 1, 2)
    assert leader.partition.high_watermark == 0
    assert leader.partition.read(0, 1_000).buffers == []
    assert leader.sync()
    assert leader.partition.high_watermark == leader.partition.last_stable_offset == 2
    assert values(leader.partition.read(0, 1_000)) == [b"a", b"b"]


def test_r7_with_fsync_only_synced_records_count(new_leader):
    leader = new_leader()
    leader.append(b"a")
    work = leader.log.begin_sync()
    leader.append(b"b")  # while the disk is busy
    work.run()
    leader.log.finish_sync(work, None)
    assert leader.partition.on_synced()
    assert leader.partition.high_watermark == 1
    assert values(leader.partition.read(0, 1_000)) == [b"a"]
    assert leader.sync()
    assert not leader.partition.on_synced()
    assert leader.partition.high_watermark == 2


def test_with_page_cache_appended_records_count_at_once(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    assert leader.partition.high_watermark == 1
    assert values(leader.partition.read(0, 1_000)) == [b"a"]


def test_offset_and_leader_epoch_are_stamped_into_the_batch(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    leader.lead(epoch=3, version=1)
    batch, header = leader.batch(b"b")
    leader.partition.append(batch, header, leader.now_ms)
    stamped = RecordBatch(batch).header
    assert (stamped.base_offset, stamped.leader_epoch) == (1, 3)


def test_a_read_outside_the_log_is_refused(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    assert leader.partition.read(1, 1_000).buffers == []
    for offset in (2, -1):
        with pytest.raises(OffsetOutOfRangeError):
            leader.partition.read(offset, 1_000)


def test_a_replica_without_a_role_refuses_everything(new_leader):
    leader = new_leader(lead=False)
    partition = leader.partition
    assert not partition.is_leader
    assert (partition.leader_epoch, partition.high_watermark) == (NO_EPOCH, 0)
    assert not partition.on_synced()
    assert not partition.reconfigure(leader.log.config, PartitionSettings())
    for call in (
        leader.append,
        lambda: partition.read(0, 1),
        lambda: partition.list_offset(LATEST),
        lambda: partition.end_offset_for_epoch(0),
        lambda: partition.deletion_end(0),
        lambda: partition.check_leader_epoch(NO_EPOCH),
    ):
        with pytest.raises(NotLeaderOrFollowerError, match="broker 1 does not lead orders-0"):
            call()


def test_resigning_keeps_the_high_watermark_and_refuses_from_then_on(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    leader.partition.resign()
    assert (leader.partition.is_leader, leader.partition.high_watermark) == (False, 1)
    with pytest.raises(NotLeaderOrFollowerError):
        leader.append(b"b")
    leader.lead(epoch=1, version=1)
    assert leader.partition.high_watermark == 1


def test_r3_older_and_newer_leader_epochs_are_refused(new_leader):
    leader = new_leader(lead=False)
    leader.lead(epoch=5)
    partition = leader.partition
    assert partition.leader_epoch == 5
    partition.check_leader_epoch(5)
    partition.check_leader_epoch(NO_EPOCH)
    with pytest.raises(FencedLeaderEpochError, match="epoch 5, the request expects 4"):
        partition.check_leader_epoch(4)
    with pytest.raises(UnknownLeaderEpochError):
        partition.check_leader_epoch(6)


def test_an_outdated_or_foreign_leadership_is_a_broken_invariant(new_leader):
    leader = new_leader()
    leader.lead(epoch=1, version=4)
    with pytest.raises(AssertionError, match="outdated"):
        leader.lead(epoch=0, version=3)
    state = leader.partition.become_leader
    with pytest.raises(AssertionError, match="is led by 2"):
        state(_state()._replace(leader=2))


def _state():
    from kafkalite.metadata.image import PartitionState

    return PartitionState((1, 2), (1, 2), 1, 2, 9)


def test_a_first_leadership_opens_no_file_of_a_cleanly_closed_log(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    leader.log.close(clean=True)
    log = Log.open_clean(RealFileSystem(), leader.log.directory, leader.log.config, leader.log.clean_end)
    again = new_leader(log=log)
    again.lead(epoch=3, version=1)
    assert not log.is_open
    assert again.partition.high_watermark == 1
    assert again.partition.end_offset_for_epoch(3) == (3, 1)
    assert again.partition.end_offset_for_epoch(2) == (0, 1)
    assert values(again.partition.read(0, 1_000)) == [b"a"]


def test_r2_a_new_leadership_begins_its_epoch_at_the_log_end(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a", b"b")
    leader.lead(epoch=2, version=1)
    assert leader.partition.end_offset_for_epoch(0) == (0, 2)
    assert leader.partition.end_offset_for_epoch(2) == (2, 2)
    leader.append(b"c")
    assert leader.partition.end_offset_for_epoch(1) == (0, 2)
    assert leader.partition.end_offset_for_epoch(2) == (2, 3)


def test_a_new_isr_in_the_same_epoch_keeps_the_leadership(new_leader):
    leader = new_leader(durability="page-cache", isr=(1, 2))
    leader.append(b"a")
    assert leader.partition.high_watermark == 0
    assert leader.lead(version=1, isr=(1,))
    assert leader.partition.high_watermark == 1
    assert leader.partition.partition_epoch == 1


def test_r10_a_new_leader_lists_no_offsets_before_it_is_settled(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    again = new_leader(log=leader.log, isr=(1, 2))
    assert again.partition.high_watermark == 0
    for timestamp_ms in (LATEST, MAX_TIMESTAMP, 0):
        with pytest.raises(OffsetNotAvailableError):
            again.partition.list_offset(timestamp_ms)
    with pytest.raises(OffsetNotAvailableError):
        again.partition.read(5, 1_000)
    assert again.partition.list_offset(EARLIEST).offset == 0
    assert again.partition.read(1, 1_000).buffers == []


def test_r6_acks_all_is_refused_with_too_few_in_sync(new_leader):
    leader = new_leader(durability="page-cache", settings=PartitionSettings(min_insync_replicas=2))
    with pytest.raises(NotEnoughReplicasError, match=r"1 replicas in sync.*min\.insync\.replicas is 2"):
        leader.append(b"a")
    assert leader.log.log_end_offset == 0
    leader.append(b"a", acks=1)
    assert (leader.log.log_end_offset, leader.partition.high_watermark) == (1, 0)
    assert leader.partition.reconfigure(leader.log.config, PartitionSettings(min_insync_replicas=1))
    assert leader.partition.high_watermark == 1
    leader.append(b"b")


def test_r6_the_error_says_if_there_are_fewer_replicas_than_the_minimum(new_leader):
    """Waiting cannot help, so the error names the setting to change."""
    leader = new_leader(settings=PartitionSettings(min_insync_replicas=4))
    with pytest.raises(
        NotEnoughReplicasError, match=r"3 replicas, fewer than min\.insync\.replicas 4"
    ) as caught:
        leader.append(b"a")
    assert "kl topic alter orders -c min.insync.replicas=3" in str(caught.value)
    assert "fewer than min.insync.replicas 4" in str(leader.partition.acknowledgement_error)
    leader.partition.reconfigure(leader.log.config, PartitionSettings(min_insync_replicas=3))
    with pytest.raises(NotEnoughReplicasError, match=r"1 replicas in sync.*min\.insync\.replicas is 3"):
        leader.append(b"a")


def test_a_changed_durability_takes_effect_at_once(new_leader):
    leader = new_leader()
    leader.append(b"a")
    page_cache = dataclasses.replace(leader.log.config, durability="page-cache")
    assert leader.partition.reconfigure(page_cache, PartitionSettings())
    assert leader.partition.high_watermark == 1
    leader.append(b"b")
    assert leader.partition.high_watermark == 2
    fsync = dataclasses.replace(page_cache, durability="fsync")
    assert not leader.partition.reconfigure(fsync, PartitionSettings())
    leader.append(b"c")
    assert leader.partition.high_watermark == 2
    assert leader.sync()
    assert leader.partition.high_watermark == 3


def test_a_batch_over_max_message_bytes_is_refused(new_leader):
    leader = new_leader(max_message_bytes=200)
    with pytest.raises(MessageTooLargeError, match=r"orders-0, whose max\.message\.bytes is 200"):
        leader.append(b"x" * 200)
    larger = dataclasses.replace(leader.log.config, max_message_bytes=1_000)
    leader.partition.reconfigure(larger, PartitionSettings())
    leader.append(b"x" * 200)


def test_an_offline_log_takes_no_more_but_is_still_read(new_leader):
    leader = new_leader(durability="page-cache")
    leader.append(b"a")
    leader.log.offline_reason = "sync failed: Input/output error"
    with pytest.raises(KafkaStorageError, match="orders-0 is offline: sync failed"):
        leader.append(b"b")
    assert values(leader.partition.read(0, 1_000)) == [b"a"]


@pytest.mark.parametrize("bit", [CONTROL_BIT, TRANSACTIONAL_BIT])
def test_control_and_transactional_batches_are_not_for_clients(new_leader, bit):
    leader = new_leader()
    _, header = leader.batch()
    with pytest.raises(InvalidRecordError):
        leader.append(attributes=header.attributes | bit)


def test_only_the_broker_sets_log_append_time(new_leader):
    leader = new_leader()
    _, header = leader.batch()
    with pytest.raises(InvalidTimestampError, match="only the broker"):
        leader.append(attributes=header.attributes | TIMESTAMP_TYPE_BIT)


def test_kip_937_timestamps_far_from_the_brokers_clock_are_refused(new_leader):
    bounds = PartitionSettings(message_timestamp_before_max_ms=10, message_timestamp_after_max_ms=20)
    leader = new_leader(durability="page-cache", settings=bounds)
    now_ms = leader.now_ms
    for timestamp_ms in (now_ms - 11, now_ms + 21):
        with pytest.raises(InvalidTimestampError, match="10 ms before and 20 ms after"):
            leader.append(timestamp_ms=timestamp_ms)
    leader.append(timestamp_ms=now_ms - 10)
    leader.append(timestamp_ms=now_ms + 20)
    leader.append(base_timestamp_ms=NO_TIMESTAMP, max_timestamp_ms=NO_TIMESTAMP)
    assert leader.log.log_end_offset == 3


def test_with_log_append_time_the_producers_timestamps_do_not_matter(new_leader):
    leader = new_leader(durability="page-cache", timestamp_type=TimestampType.LOG_APPEND_TIME)
    appended = leader.append(timestamp_ms=leader.now_ms * 2)
    assert appended.log_append_time_ms == leader.now_ms


def test_r43_a_batch_of_an_epoch_that_has_not_begun_is_damage(new_leader):
    """The checksum of a batch does not cover its leader epoch."""
    leader = new_leader(durability="page-cache", lead=False)
    leader.lead(epoch=8)
    for _ in range(3):
        leader.append(b"x")
    again = new_leader(log=leader.log, lead=False)
    again.lead(epoch=5, version=1)
    damage = again.log.damage
    assert (damage.sound_end_offset, damage.records_in_doubt) == (0, 3)
    assert "have leader epoch 8, but the partition is in epoch 5" in damage.cause


def test_r24_the_end_of_a_damaged_log_is_an_error_and_not_its_sound_end(new_leader):
    leader = new_leader(durability="page-cache")
    now_ms = leader.now_ms
    for step in range(4):
        leader.append(b"x", timestamp_ms=now_ms + step)
    leader.partition.log.mark_damaged("a flipped bit", sound_end_offset=2)
    list_offset = leader.partition.list_offset
    assert list_offset(EARLIEST).offset == 0
    assert list_offset(now_ms + 1).offset == 1
    for timestamp_ms in (LATEST, MAX_TIMESTAMP, now_ms + 2, now_ms + 9):
        with pytest.raises(KafkaStorageError, match=r"a flipped bit; sound below offset 2") as caught:
            list_offset(timestamp_ms)
        assert str(caught.value).count("accept-loss") == 1
        assert "accept-loss" in caught.value.message, "a response has no hint"


def test_offsets_are_listed_by_time_below_the_high_watermark(new_leader):
    leader = new_leader()
    now_ms = leader.now_ms
    for step in range(3):
        leader.append(b"x", timestamp_ms=now_ms + step * 10)
    leader.sync()
    leader.append(b"later", timestamp_ms=now_ms + 100)
    list_offset = leader.partition.list_offset
    assert list_offset(EARLIEST) == (0, NO_TIMESTAMP, 0)
    assert list_offset(LATEST) == (3, NO_TIMESTAMP, 0)
    assert list_offset(now_ms - 5) == (0, now_ms, 0)
    assert list_offset(now_ms + 5) == (1, now_ms + 10, 0)
    assert list_offset(now_ms + 20) == (2, now_ms + 20, 0)
    assert list_offset(now_ms + 21) == (NO_OFFSET, NO_TIMESTAMP, 0)
    assert list_offset(now_ms + 1_000) == (NO_OFFSET, NO_TIMESTAMP, 0)
    leader.sync()
    assert list_offset(now_ms + 21) == (3, now_ms + 100, 0)
    assert list_offset(MAX_TIMESTAMP) == (3, now_ms + 100, 0)
    with pytest.raises(InvalidRequestError, match="timestamp -4"):
        list_offset(-4)


def test_records_are_deleted_up_to_the_high_watermark(new_leader):
    leader = new_leader()
    for _ in range(4):
        leader.append(b"x")
    leader.sync()
    leader.append(b"unsynced")
    partition = leader.partition
    leader.log.delete_before(partition.deletion_end(2))
    assert partition.list_offset(EARLIEST).offset == 2
    for offset in (5, -2):
        with pytest.raises(OffsetOutOfRangeError, match="up to its high watermark, 4"):
            partition.deletion_end(offset)
    leader.log.delete_before(partition.deletion_end(LATEST))
    with pytest.raises(OffsetOutOfRangeError):
        partition.read(3, 1_000)


def test_r28_a_repeated_batch_is_answered_with_its_first_offsets(new_leader):
    leader = new_leader()

    def produce(sequence, *values):
        batch = bytearray(
            build_batch(
                list(values),
                timestamps_ms=leader.now_ms,
                producer_id=5,
                producer_epoch=0,
                base_sequence=sequence,
            )
        )
        return leader.partition.append(batch, check(batch), leader.now_ms)

    first = produce(0, b"a", b"b")
    again = produce(0, b"a", b"b")
    assert (first.is_duplicate, again.is_duplicate) == (False, True)
    assert again[:2] == first[:2] == (0, 1)
    assert leader.log.log_end_offset == 2
    assert leader.partition.high_watermark <= again.last_offset  # not acknowledged yet
    for number in range(6):
        produce(2 + number, b"x")
    for sequence, *values in ((0, b"a", b"b"), (20, b"x")):
        with pytest.raises(OutOfOrderSequenceNumberError):
            produce(sequence, *values)
    assert leader.log.expire_producers(leader.now_ms + 100, 100) == 1
    with pytest.raises(UnknownProducerIdError):
        produce(8, b"x")


def test_s26_a_partition_has_a_greatest_number_of_producers(new_leader, monkeypatch):
    monkeypatch.setattr(partition_module, "MAX_PRODUCERS_PER_PARTITION", 2)
    leader = new_leader()

    def produce(producer_id, sequence=0):
        identity = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence}
        batch = bytearray(build_batch([b"v"], timestamps_ms=leader.now_ms, **identity))
        leader.partition.append(batch, check(batch), leader.now_ms)

    produce(7)
    produce(8)
    with pytest.raises(PolicyViolationError, match="2 idempotent producers"):
        produce(9)
    produce(7, 1)
    assert leader.log.log_end_offset == 3
    assert leader.log.expire_producers(leader.now_ms + 100, 100) == 2
    produce(9)


@pytest.mark.parametrize("timestamp_type", TimestampType)
@pytest.mark.parametrize("own", [{"values": [b"own"]}, {"transactional": True}])
def test_r28_another_batch_with_the_sequence_is_not_a_repetition(new_leader, timestamp_type, own, mutant):
    leader = new_leader(timestamp_type=timestamp_type)

    def produce(*, values=(b"forged",), transactional=False):
        producer = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0}
        batch = build_batch(
            list(values), timestamps_ms=leader.now_ms, transactional=transactional, **producer
        )
        return leader.partition.append(batch, check(batch), leader.now_ms, is_verified=True)

    assert produce().base_offset == 0
    with pytest.raises(OutOfOrderSequenceNumberError, match="has another batch"):
        produce(**own)
    assert produce().is_duplicate
    assert leader.log.log_end_offset == 1
    mutant("R28-sequence-only")
    assert produce(**own).is_duplicate  # acknowledged, and not in the log


def test_r28_a_repetition_with_log_append_time_returns_the_first_time(new_leader):
    leader = new_leader(timestamp_type=TimestampType.LOG_APPEND_TIME)
    for now_ms in (leader.now_ms, leader.now_ms + 50):
        batch = bytearray(build_batch([b"a"], producer_id=5, producer_epoch=0, base_sequence=0))
        appended = leader.partition.append(batch, check(batch), now_ms)
        assert appended.log_append_time_ms == leader.now_ms


def test_r6_a_duplicate_too_is_refused_with_too_few_in_sync(new_leader):
    leader = new_leader(
        durability="page-cache", isr=(1, 2), settings=PartitionSettings(min_insync_replicas=2)
    )
    batch = bytearray(
        build_batch([b"a"], timestamps_ms=leader.now_ms, producer_id=5, producer_epoch=0, base_sequence=0)
    )
    leader.partition.append(batch, check(batch), leader.now_ms)
    leader.lead(version=1)
    with pytest.raises(NotEnoughReplicasError):
        leader.partition.append(batch, check(batch), leader.now_ms)
