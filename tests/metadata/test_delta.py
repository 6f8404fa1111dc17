"""Replay of records on images, and the resulting work of a broker."""

from __future__ import annotations

import pytest

from kafkalite.metadata.delta import Delta, LocalChanges
from kafkalite.metadata.image import EMPTY, PartitionState
from kafkalite.metadata.records import (
    BrokerChangeRecord,
    BrokerRegistrationRecord,
    ConfigRecord,
    HighWatermarksRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from kafkalite.model import TopicPartition

A, B = "a" * 32, "b" * 32


def partition(
    topic_id: str, number: int, *, leader: int = 1, replicas=(1,), epoch: int = 0, version: int = 0
):
    isr = replicas if leader != -1 else ()
    return PartitionRecord(topic_id, number, replicas, isr, leader, epoch, version)


def image_of(*records, before=EMPTY, offset=1):
    return Delta(before).replay_all(records).apply(offset)


BROKER = BrokerRegistrationRecord(1, 1, ("a:1",), None, 5)
ORDERS = (TopicRecord(A, "orders"), partition(A, 0), partition(A, 1))


def test_a_topic_stands_under_its_name_and_its_id():
    image = image_of(*ORDERS)
    topic = image.topics["orders"]
    assert image.topics_by_id == {A: topic}
    assert topic.partitions == (PartitionState((1,), (1,), 1, 0, 0),) * 2
    assert image.metadata_offset == 1


def test_the_partition_lookup_returns_none_for_unknown_partitions():
    image = image_of(*ORDERS)
    assert image.partition("orders", 1) == image.topics["orders"].partitions[1]
    assert image.partition("orders", 2) is None
    assert image.partition("orders", -1) is None
    assert image.partition("unknown", 0) is None


def test_the_image_before_is_not_changed():
    before = image_of(*ORDERS, ConfigRecord("topic", "orders", "retention.ms", "1"))
    copy = image_of(*before.to_records())
    image_of(
        partition(A, 1, epoch=1, version=1),
        ConfigRecord("topic", "orders", "retention.ms", "2"),
        TopicRecord(B, "other"),
        partition(B, 0),
        before=before,
        offset=2,
    )
    assert before == copy


def test_untouched_topics_are_shared_and_not_copied():
    before = image_of(*ORDERS, TopicRecord(B, "other"), partition(B, 0))
    after = image_of(partition(A, 0, epoch=1, version=1), before=before, offset=2)
    assert after.topics["other"] is before.topics["other"]
    assert after.configs is before.configs
    assert after.brokers is before.brokers


def test_a_removed_topic_takes_its_configs_along():
    before = image_of(*ORDERS, ConfigRecord("topic", "orders", "retention.ms", "1"))
    after = image_of(RemoveTopicRecord(A), before=before, offset=2)
    assert (after.topics, after.topics_by_id, after.configs) == ({}, {}, {})


def test_a_topic_created_again_under_its_name_is_another_topic():
    before = image_of(*ORDERS, ConfigRecord("topic", "orders", "retention.ms", "1"))
    delta = Delta(before).replay_all([RemoveTopicRecord(A), TopicRecord(B, "orders"), partition(B, 0)])
    after = delta.apply(2)
    assert after.topics["orders"].topic_id == B
    assert after.topics_by_id.keys() == {B}
    assert after.topic_configs("orders") == {}
    changes = delta.local_changes(1)
    assert [(item.topic_id, item.topic_partition.partition) for item in changes.deleted] == [(A, 0), (A, 1)]
    assert [(item.topic_id, item.topic_partition.partition) for item in changes.created] == [(B, 0)]
    assert changes.leaders == changes.created
    assert changes.configs_changed == ()


def test_a_topic_that_came_and_went_in_one_delta_leaves_nothing():
    delta = Delta(EMPTY).replay_all([*ORDERS, RemoveTopicRecord(A)])
    assert delta.apply(1).topics == {}
    assert not delta.local_changes(1)


def test_a_config_of_none_takes_the_override_away():
    image = image_of(*ORDERS, ConfigRecord("topic", "orders", "retention.ms", "1"))
    assert image.topic_configs("orders") == {"retention.ms": "1"}
    image = image_of(ConfigRecord("topic", "orders", "retention.ms", None), before=image, offset=2)
    assert image.configs == {}


def test_the_later_registration_of_a_broker_replaces_the_earlier():
    image = image_of(
        BrokerRegistrationRecord(1, 1, ("a:1",), None, 5), BrokerRegistrationRecord(1, 2, ("b:1",), "r", 6)
    )
    assert [(broker.broker_epoch, broker.addresses) for broker in image.brokers.values()] == [(2, ("b:1",))]


def test_a_change_of_a_broker_leaves_its_registration():
    before = image_of(BROKER)
    after = image_of(BrokerChangeRecord(1, 1, True, False), before=before, offset=2)
    assert (after.brokers[1].is_fenced, after.brokers[1].addresses) == (True, ("a:1",))
    assert after.live_brokers() == frozenset()
    assert before.live_brokers() == {1}


def test_high_watermarks_go_with_their_topic_and_with_zero():
    before = image_of(*ORDERS, HighWatermarksRecord(((A, 0, 5), (A, 1, 6))))
    assert before.high_watermarks == {(A, 0): 5, (A, 1): 6}
    after = image_of(HighWatermarksRecord(((A, 0, 0),)), before=before, offset=2)
    assert after.high_watermarks == {(A, 1): 6}
    after = image_of(RemoveTopicRecord(A), before=after, offset=3)
    assert after.high_watermarks == {}


def test_a_snapshot_reverts_everything_it_omits():
    before = image_of(BROKER, *ORDERS, HighWatermarksRecord(((A, 0, 5),)), ProducerIdsRecord(1_000))
    after = Delta.to_snapshot(before, image_of(*ORDERS).to_records()).apply(9)
    assert (after.high_watermarks, after.next_producer_id, after.brokers) == ({}, 0, {})
    assert after.loads == before.loads


def test_followers_are_the_replicas_with_another_leader_or_none():
    records = [TopicRecord(A, "t"), partition(A, 0, leader=1, replicas=(1, 2))]
    delta = Delta(EMPTY).replay_all(records)
    before = delta.apply(1)
    assert [item.topic_partition for item in delta.local_changes(2).followers] == [("t", 0)]
    assert delta.local_changes(1).followers == ()
    delta = Delta(before).replay_all([PartitionRecord(A, 0, (1, 2), (), -1, 1, 1, (1, 2))])
    delta.apply(2)
    for node_id in (1, 2):
        changes = delta.local_changes(node_id)
        assert (changes.leaders, len(changes.followers)) == ((), 1)
        assert changes


def test_local_changes_of_a_new_topic_are_this_brokers_partitions():
    delta = Delta(EMPTY).replay_all(
        [
            TopicRecord(A, "t"),
            partition(A, 0, leader=1, replicas=(1, 2)),
            partition(A, 1, leader=2, replicas=(2,)),
        ]
    )
    delta.apply(1)
    one, two = delta.local_changes(1), delta.local_changes(2)
    assert [item.topic_partition for item in one.created] == [TopicPartition("t", 0)]
    assert [item.topic_partition for item in one.leaders] == [TopicPartition("t", 0)]
    assert [item.topic_partition for item in two.created] == [TopicPartition("t", 0), TopicPartition("t", 1)]
    assert [item.topic_partition for item in two.leaders] == [TopicPartition("t", 1)]
    assert delta.local_changes(3) == LocalChanges()


def test_added_partitions_are_created_and_the_present_ones_left_alone():
    before = image_of(*ORDERS)
    delta = Delta(before).replay_all([partition(A, 2)])
    delta.apply(2)
    changes = delta.local_changes(1)
    assert [item.topic_partition.partition for item in changes.created] == [2]
    assert changes.leaders == changes.created
    assert changes.deleted == ()


def test_a_new_leader_epoch_is_a_leadership_to_take():
    before = image_of(*ORDERS)
    delta = Delta(before).replay_all([partition(A, 1, epoch=1, version=1)])
    delta.apply(2)
    changes = delta.local_changes(1)
    assert changes.created == ()
    assert [item.state.leader_epoch for item in changes.leaders] == [1]


def test_a_replica_that_moved_away_is_deleted_here():
    before = image_of(*ORDERS)
    delta = Delta(before).replay_all([partition(A, 1, leader=2, replicas=(2,), epoch=1, version=1)])
    delta.apply(2)
    assert [item.topic_partition.partition for item in delta.local_changes(1).deleted] == [1]


def test_changed_configs_name_the_topic_unless_they_are_as_before():
    before = image_of(*ORDERS, ConfigRecord("topic", "orders", "retention.ms", "1"))
    delta = Delta(before).replay_all([ConfigRecord("topic", "orders", "retention.ms", "2")])
    delta.apply(2)
    assert delta.local_changes(1) == LocalChanges(configs_changed=("orders",))
    delta = Delta(before).replay_all([ConfigRecord("topic", "orders", "retention.ms", "1")])
    delta.apply(2)
    assert not delta.local_changes(1)


def test_a_brokers_own_configs_concern_only_itself():
    delta = Delta(EMPTY).replay_all([ConfigRecord("broker", "1", "log.retention.ms", "1")])
    delta.apply(1)
    assert delta.local_changes(1).broker_configs_changed
    assert delta.local_changes(1)
    assert not delta.local_changes(2)


def test_configs_of_a_new_topic_are_no_change_of_configs():
    delta = Delta(EMPTY).replay_all([*ORDERS, ConfigRecord("topic", "orders", "retention.ms", "1")])
    delta.apply(1)
    assert delta.local_changes(1).configs_changed == ()


def test_a_snapshot_removes_everything_it_omits():
    before = image_of(
        *ORDERS,
        TopicRecord(B, "kept"),
        partition(B, 0),
        ConfigRecord("topic", "kept", "retention.ms", "1"),
        ConfigRecord("broker", "1", "log.retention.ms", "1"),
        BrokerRegistrationRecord(9, 1, ("a:1",), None, 5),
    )
    snapshot = image_of(
        TopicRecord(B, "kept"), partition(B, 0), BrokerRegistrationRecord(1, 2, ("a:1",), None, 5)
    )
    delta = Delta.to_snapshot(before, snapshot.to_records())
    after = delta.apply(1)
    assert after == snapshot
    changes = delta.local_changes(1)
    assert [item.topic_id for item in changes.deleted] == [A, A]
    assert (changes.created, changes.leaders) == ((), ())
    assert changes.configs_changed == ("kept",)
    assert changes.broker_configs_changed


def test_a_delta_is_applied_once():
    delta = Delta(EMPTY)
    with pytest.raises(AssertionError, match="apply the delta first"):
        delta.local_changes(1)
    delta.apply(1)
    with pytest.raises(AssertionError, match="applied already"):
        delta.apply(2)
    with pytest.raises(AssertionError, match="applied already"):
        delta.replay(TopicRecord(A, "t"))


def test_the_id_of_a_topic_in_the_image_before_is_taken():
    before = image_of(*ORDERS)
    with pytest.raises(AssertionError, match="belongs to another topic"):
        Delta(before).replay(TopicRecord(A, "other"))


@pytest.mark.parametrize(
    ("records", "match"),
    [
        ([*ORDERS, TopicRecord(B, "orders")], "exists already"),
        ([*ORDERS, TopicRecord(A, "other")], "belongs to another topic"),
        ([RemoveTopicRecord(A)], "no topic with the id"),
        ([partition(A, 0)], "no topic with the id"),
        ([*ORDERS, RemoveTopicRecord(A), partition(A, 0)], "no topic with the id"),
        ([TopicRecord(A, "t"), partition(A, 1)], "partitions are missing before"),
        ([TopicRecord(A, "t"), PartitionRecord(A, 0, (1,), (2,), 1, 0, 0)], "outside the replicas"),
        ([TopicRecord(A, "t"), PartitionRecord(A, 0, (1, 2), (2,), 1, 0, 0)], "leader is not in sync"),
        ([TopicRecord(A, "t"), PartitionRecord(A, 0, (1, 2), (1,), 1, 0, 0, (3,))], "outside the replicas"),
        ([TopicRecord(A, "t"), PartitionRecord(A, 0, (1, 2), (1,), 1, 0, 0, (1,))], "has two roles"),
        ([TopicRecord(A, "t"), PartitionRecord(A, 0, (1, 2), (1,), 1, 0, 0, (2,), (2,))], "has two roles"),
        ([*ORDERS, partition(A, 0, epoch=1), partition(A, 0)], "leader epoch goes back"),
        ([*ORDERS, partition(A, 0, version=1), partition(A, 0)], "partition epoch goes back"),
        ([BrokerChangeRecord(1, 1, True, False)], "not registered"),
        ([BROKER, BrokerChangeRecord(1, 2, True, False)], "an earlier process"),
        ([*ORDERS, HighWatermarksRecord(((A, 2, 5),))], "no partition 2"),
        ([HighWatermarksRecord(((A, 0, 5),))], "no partition 0"),
        ([ProducerIdsRecord(5), ProducerIdsRecord(4)], "already allocated"),
        ([ConfigRecord("topic", "t", "retention.ms", "1")], "a topic that does not exist"),
        ([ConfigRecord("group", "t", "x", "1")], "unknown kind of resource"),
        ([TopicRecord(A, "t")], "has no partition"),
    ],
)
def test_a_record_that_cannot_follow_stops_the_node(records, match):
    with pytest.raises(AssertionError, match=match):
        Delta(EMPTY).replay_all(records).apply(1)
