"""The controller's decisions: the effect of each command, and Kafka's error code for each refusal."""

from __future__ import annotations

import sys
import time

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.limits import MAX_PARTITIONS_PER_REQUEST, MAX_PARTITIONS_PER_TOPIC, MAX_TOPICS_PER_REQUEST
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.protocol.messages.admin import (
    AlterConfigsRequest,
    ConfigChange,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    NewTopic,
    PartitionCount,
)


def only(response):
    assert response.error_code == 0
    items = getattr(response, "topics", None) or response.resources
    (item,) = items
    return item


def test_a_created_topic_has_its_partitions_configs_and_an_id(metadata):
    result = only(metadata.create("orders", partitions=3, configs={"retention_ms": "1_000"}))
    assert (result.error_code, result.num_partitions, result.replication_factor) == (0, 3, 1)
    topic = metadata.image.topics["orders"]
    assert topic.topic_id == result.topic_id
    assert len(bytes.fromhex(topic.topic_id)) == 16
    assert [(state.leader, state.isr, state.leader_epoch) for state in topic.partitions] == [(1, (1,), 0)] * 3
    assert metadata.image.topic_configs("orders") == {"retention.ms": "1000"}


def test_one_request_is_one_entry(metadata):
    before = metadata.image.metadata_offset
    metadata.create("a", "b", "c")
    assert metadata.image.metadata_offset == before + 1
    assert len({topic.topic_id for topic in metadata.image.topics.values()}) == 3


def test_missing_choices_come_from_the_broker(new_metadata):
    settings = ControllerSettings(num_partitions=4, default_replication_factor=2)
    metadata = new_metadata(brokers=3, settings=settings)
    result = only(metadata.create("orders", partitions=-1, factor=-1))
    assert (result.num_partitions, result.replication_factor) == (4, 2)
    assert {len(state.replicas) for state in metadata.image.topics["orders"].partitions} == {2}


def test_leaders_go_round_the_brokers(new_metadata):
    metadata = new_metadata(brokers=3)
    metadata.create("orders", partitions=6, factor=3)
    leaders = [state.leader for state in metadata.image.topics["orders"].partitions]
    assert sorted(leaders[:3]) == sorted(leaders[3:]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ({"name": "a/b"}, ErrorCode.INVALID_TOPIC_EXCEPTION, "outside"),
        ({"name": ""}, ErrorCode.INVALID_TOPIC_EXCEPTION, "empty"),
        ({"name": "../x"}, ErrorCode.INVALID_TOPIC_EXCEPTION, "outside"),
        ({"name": "old"}, ErrorCode.TOPIC_ALREADY_EXISTS, "'old' already exists"),
        ({"partitions": 0}, ErrorCode.INVALID_PARTITIONS, "from 1 to"),
        ({"partitions": -2}, ErrorCode.INVALID_PARTITIONS, "not -2"),
        ({"partitions": MAX_PARTITIONS_PER_TOPIC + 1}, ErrorCode.INVALID_PARTITIONS, "from 1 to"),
        ({"factor": 0}, ErrorCode.INVALID_REPLICATION_FACTOR, "1 or more"),
        (
            {"factor": 2},
            ErrorCode.INVALID_REPLICATION_FACTOR,
            "2 is larger than the number of live brokers, 1",
        ),
        (
            {"configs": {"retention.ms": "soon"}},
            ErrorCode.INVALID_CONFIG,
            "retention.ms is 'soon', but must be",
        ),
        ({"configs": {"retention.mss": "1"}}, ErrorCode.INVALID_CONFIG, "did you mean retention.ms"),
        ({"configs": {"cleanup.policy": "shrink"}}, ErrorCode.INVALID_CONFIG, "one of delete"),
        ({"configs": {"retention.ms": "1", "retention_ms": "2"}}, ErrorCode.INVALID_CONFIG, "more than once"),
    ],
)
def test_a_topic_that_cannot_be_is_refused_with_kafkas_code(metadata, arguments, code, message):
    metadata.create("old")
    image = metadata.image
    result = only(metadata.create(arguments.pop("name", "new"), **arguments))
    assert result.error_code == code
    assert message in result.error_message
    assert (result.topic_id, result.num_partitions) == ("", -1)
    assert metadata.image is image


def test_a_refused_topic_does_not_keep_the_others_from_being_created(metadata):
    response = metadata.create("a", "b!", "c")
    assert [topic.error_code for topic in response.topics] == [0, ErrorCode.INVALID_TOPIC_EXCEPTION, 0]
    assert metadata.image.topics.keys() == {"a", "c"}


def test_a_name_given_twice_is_refused_both_times(metadata):
    response = metadata.create("a", "b", "a")
    assert [topic.error_code for topic in response.topics] == [
        ErrorCode.INVALID_REQUEST,
        0,
        ErrorCode.INVALID_REQUEST,
    ]
    response = metadata.delete("b", "b")
    assert [topic.error_code for topic in response.topics] == [ErrorCode.INVALID_REQUEST] * 2
    twice = [PartitionCount("b", 2), PartitionCount("b", 3)]
    response = metadata.submit(CreatePartitionsRequest(0, False, twice))
    assert [topic.error_code for topic in response.topics] == [ErrorCode.INVALID_REQUEST] * 2
    assert metadata.image.topics.keys() == {"b"}


def test_names_that_differ_in_dot_and_underscore_stand_side_by_side(metadata):
    response = metadata.create("a.b", "a_b")
    assert [topic.error_code for topic in response.topics] == [0, 0]


def test_validate_only_answers_and_changes_nothing(metadata):
    image = metadata.image
    result = only(metadata.create("orders", partitions=2, validate_only=True))
    assert (result.error_code, result.topic_id, result.num_partitions) == (0, "", 2)
    assert only(metadata.create("a!", validate_only=True)).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert metadata.image is image


def test_the_partitions_of_one_request_are_bounded(metadata):
    half = MAX_PARTITIONS_PER_REQUEST // 2
    topics = [NewTopic("a", half, 1, {}), NewTopic("b", half + 1, 1, {}), NewTopic("c", half, 1, {})]
    response = metadata.submit(CreateTopicsRequest(0, True, topics))
    assert [topic.error_code for topic in response.topics] == [0, ErrorCode.POLICY_VIOLATION, 0]


def test_s26_the_topics_and_partitions_of_a_cluster_are_bounded(metadata):
    metadata.settings = ControllerSettings(max_topics=3, max_partitions=10)
    topics = [NewTopic("a", 4, 1, {}), NewTopic("b", 7, 1, {}), NewTopic("c", 5, 1, {})]
    response = metadata.submit(CreateTopicsRequest(0, False, topics))
    assert [topic.error_code for topic in response.topics] == [0, ErrorCode.POLICY_VIOLATION, 0]
    assert "max.partitions=10" in response.topics[1].error_message
    grown = only(metadata.submit(CreatePartitionsRequest(0, False, [PartitionCount("a", 6)])))
    assert grown.error_code == ErrorCode.POLICY_VIOLATION
    topics = [NewTopic("d", 1, 1, {}), NewTopic("e", 1, 1, {})]
    response = metadata.submit(CreateTopicsRequest(0, True, topics[1:]))
    assert only(response).error_code == 0
    metadata.settings = ControllerSettings(max_topics=3, max_partitions=100)
    response = metadata.submit(CreateTopicsRequest(0, False, topics))
    assert [topic.error_code for topic in response.topics] == [0, ErrorCode.POLICY_VIOLATION]
    assert "max.topics=3" in response.topics[1].error_message


def test_the_items_of_one_request_are_bounded(metadata):
    many = MAX_TOPICS_PER_REQUEST + 1
    requests = [
        CreateTopicsRequest(0, False, [NewTopic("a", 1, 1, {})] * many),
        DeleteTopicsRequest(0, ["a"] * many),
        CreatePartitionsRequest(0, False, [PartitionCount("a", 1)] * many),
        AlterConfigsRequest(False, [ConfigChange("topic", "a", "retention.ms", "1")] * many),
    ]
    for request in requests:
        response = metadata.submit(request)
        assert response.error_code == ErrorCode.INVALID_REQUEST
        assert f"at most {MAX_TOPICS_PER_REQUEST}" in response.error_message


def test_deleting_answers_for_each_topic(metadata):
    metadata.create("a", "b")
    response = metadata.delete("a", "nothing")
    assert [topic.error_code for topic in response.topics] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert metadata.image.topics.keys() == {"b"}


def test_a_topic_created_again_has_another_id(metadata):
    first = only(metadata.create("a")).topic_id
    metadata.delete("a")
    assert only(metadata.create("a")).topic_id != first


def test_partitions_can_only_grow(metadata):
    metadata.create("a", partitions=2)
    for count in (2, 1, 0, -1):
        result = only(metadata.grow("a", count))
        assert result.error_code == ErrorCode.INVALID_PARTITIONS
        assert f"has 2 partitions; {count} would not be an increase" in result.error_message
    too_many = only(metadata.grow("a", MAX_PARTITIONS_PER_TOPIC + 1))
    assert too_many.error_code == ErrorCode.INVALID_PARTITIONS
    assert only(metadata.grow("nothing", 3)).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert only(metadata.grow("a", 5)).error_code == 0
    assert len(metadata.image.topics["a"].partitions) == 5


def test_growing_only_validated_changes_nothing(metadata):
    metadata.create("a")
    image = metadata.image
    assert only(metadata.grow("a", 5, validate_only=True)).error_code == 0
    assert metadata.image is image


def test_added_partitions_have_as_many_replicas_and_go_on_round_the_brokers(new_metadata):
    metadata = new_metadata(brokers=3)
    metadata.create("a", partitions=2, factor=2)
    metadata.grow("a", 6)
    partitions = metadata.image.topics["a"].partitions
    assert {len(state.replicas) for state in partitions} == {2}
    assert sorted(state.leader for state in partitions) == [1, 1, 2, 2, 3, 3]


def test_growing_beyond_the_brokers_that_are_left_is_refused(new_metadata):
    metadata = new_metadata(brokers=2)
    metadata.create("a", factor=2)
    brokers = {1: metadata.image.brokers[1]}
    image = metadata.image
    metadata.image = type(image)(image.metadata_offset, image.topics, image.topics_by_id, {}, brokers)
    assert only(metadata.grow("a", 2)).error_code == ErrorCode.INVALID_REPLICATION_FACTOR


def test_a_generator_started_again_from_its_seed_makes_no_id_twice(metadata):
    for round_number in range(3):
        metadata.rng.seed(5)
        metadata.create(f"a-{round_number}", f"b-{round_number}")
    assert len(metadata.image.topics_by_id) == len(metadata.image.topics) == 6


def test_configs_are_set_changed_and_taken_away(metadata):
    metadata.create("a", configs={"retention.ms": "5"})
    metadata.alter("topic", "a", {"retention.ms": "6", "preallocate": "yes"})
    assert metadata.image.topic_configs("a") == {"retention.ms": "6", "preallocate": "true"}
    metadata.alter("topic", "a", {"retention.ms": None})
    assert metadata.image.topic_configs("a") == {"preallocate": "true"}


def test_a_change_that_changes_nothing_writes_nothing(metadata):
    metadata.create("a", configs={"retention.ms": "5"})
    image = metadata.image
    assert only(metadata.alter("topic", "a", {"retention.ms": "5", "segment.ms": None})).error_code == 0
    assert metadata.image is image


def test_the_changes_of_one_resource_are_done_all_or_none(metadata):
    metadata.create("a", "b")
    changes = [
        ConfigChange("topic", "a", "retention.ms", "5"),
        ConfigChange("topic", "b", "retention.ms", "6"),
        ConfigChange("topic", "a", "segment.bytes", "x"),
    ]
    response = metadata.submit(AlterConfigsRequest(False, changes))
    assert [(item.name, item.error_code) for item in response.resources] == [
        ("a", ErrorCode.INVALID_CONFIG),
        ("b", 0),
    ]
    assert metadata.image.configs == {("topic", "b"): {"retention.ms": "6"}}


def test_altering_only_validated_changes_nothing(metadata):
    metadata.create("a")
    image = metadata.image
    change = ConfigChange("topic", "a", "retention.ms", "5")
    assert only(metadata.submit(AlterConfigsRequest(True, [change]))).error_code == 0
    assert metadata.image is image


@pytest.mark.parametrize(
    ("resource_type", "name", "key", "code", "message"),
    [
        ("topic", "nothing", "retention.ms", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no topic 'nothing'"),
        ("group", "a", "retention.ms", ErrorCode.INVALID_REQUEST, "one of topic, broker"),
        ("broker", "9", "log.retention.ms", ErrorCode.INVALID_REQUEST, "no broker '9'; there are: 1"),
        ("broker", "01", "log.retention.ms", ErrorCode.INVALID_REQUEST, "no broker '01'"),
        (
            "broker",
            "1",
            "node.id",
            ErrorCode.INVALID_CONFIG,
            "no option that can be changed while the broker runs",
        ),
        ("broker", "1", "log.retention.m", ErrorCode.INVALID_CONFIG, "did you mean log.retention.ms?"),
        ("broker", "1", "retention.ms", ErrorCode.INVALID_CONFIG, "log.retention.ms"),
        ("topic", "a", "log.retention.ms", ErrorCode.INVALID_CONFIG, "unknown option"),
    ],
)
def test_configs_of_unknown_resources_are_refused(metadata, resource_type, name, key, code, message):
    metadata.create("a")
    result = only(metadata.alter(resource_type, name, {key: "1"}))
    assert result.error_code == code
    assert message in result.error_message


def test_a_broker_takes_new_defaults_while_it_runs(metadata):
    assert only(metadata.alter("broker", "1", {"log.retention.hours": "2"})).error_code == 0
    assert metadata.image.configs == {("broker", "1"): {"log.retention.hours": "2"}}


def test_every_registration_has_a_larger_epoch(metadata):
    epochs = [metadata.image.brokers[1].broker_epoch]
    for _ in range(3):
        reply = metadata.join(1, rack="rack")
        assert reply.broker_epoch == metadata.image.brokers[1].broker_epoch
        assert metadata.image.brokers[1].broker_epoch <= metadata.image.metadata_offset
        epochs.append(reply.broker_epoch)
    assert epochs == sorted(set(epochs))
    broker = metadata.image.brokers[1]
    assert (broker.addresses, broker.rack, broker.registered_ms) == (("host1:9092",), "rack", 1_000)


def test_two_registrations_in_one_entry_differ(metadata):
    image = metadata.image
    metadata.join(1)
    # As the controller node decides a group: on the result of the first command, at the offset before it.
    metadata.image = type(image)(image.metadata_offset, {}, {}, {}, metadata.image.brokers)
    first = metadata.image.brokers[1].broker_epoch
    assert metadata.join(1).broker_epoch == first + 1


@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer multiplies the cost")
def test_a_thousand_topics_are_created_one_by_one_in_little_time(metadata):
    started = time.process_time()
    for number in range(1_000):
        metadata.create(f"topic-{number}", partitions=5)
    # About 0.15 s; quadratic work would take many times the bound.
    assert time.process_time() - started < 2
    assert len(metadata.image.topics_by_id) == 1_000
