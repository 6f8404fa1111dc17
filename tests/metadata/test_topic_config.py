"""Topic options: Kafka's names and defaults, where a value comes from, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.errors import ConfigError
from kafkalite.metadata.image import EMPTY
from kafkalite.metadata.topic_config import (
    BROKER_DEFAULT_NAMES,
    BROKER_DEFAULT_OPTIONS,
    MAX_INT64,
    TOPIC_OPTIONS,
    Setting,
    parse_broker_config,
    parse_topic_config,
    topic_defaults,
    topic_settings,
    value_text,
)

KAFKA_DEFAULTS = {
    "unclean.leader.election.enable": False,
    "retention.ms": 604_800_000,
    "retention.bytes": -1,
    "segment.bytes": 1_073_741_824,
    "segment.ms": 604_800_000,
    "segment.jitter.ms": 0,
    "index.interval.bytes": 4096,
    "segment.index.bytes": 10_485_760,
    "cleanup.policy": "delete",
    "min.cleanable.dirty.ratio": 0.5,
    "min.compaction.lag.ms": 0,
    "delete.retention.ms": 86_400_000,
    "file.delete.delay.ms": 60_000,
    "max.message.bytes": 1_048_588,
    "message.timestamp.type": "CreateTime",
    "message.timestamp.before.max.ms": MAX_INT64,
    "message.timestamp.after.max.ms": 3_600_000,
    "compression.type": "producer",
    "min.insync.replicas": 1,
    "preallocate": False,
}
#: They belong to a move, so that a broker has no default for them.
THROTTLES = {"leader.replication.throttled.replicas": (), "follower.replication.throttled.replicas": ()}


def test_names_and_defaults_are_kafkas():
    own = {"durability": "fsync", "retention.topic.bytes": -1}
    assert TOPIC_OPTIONS.defaults() == {**KAFKA_DEFAULTS, **THROTTLES, **own}


def test_every_default_is_allowed_and_every_option_explained():
    for option in TOPIC_OPTIONS:
        assert option.parse(option.default) == option.default
        assert option.doc.endswith(".")
        assert option.dynamic


def test_every_topic_option_has_a_default_on_the_broker():
    with_default = set(TOPIC_OPTIONS.defaults()) - set(THROTTLES)
    assert {default.topic_name for default in BROKER_DEFAULT_NAMES.values()} == with_default
    assert [option.name for option in BROKER_DEFAULT_OPTIONS] == list(BROKER_DEFAULT_NAMES)
    assert {option.default for option in BROKER_DEFAULT_OPTIONS} == {None}


def test_a_value_comes_from_the_topic_then_the_broker_then_the_default(metadata):
    metadata.create("a", configs={"retention.ms": "1"})
    metadata.alter("broker", "1", {"log.retention.bytes": "5", "log.retention.ms": "7"})
    static = topic_defaults({"log.segment.bytes": 2048, "log.retention.bytes": 9})
    settings = topic_settings(metadata.image, "a", static, node_id=1)
    assert settings["retention.ms"] == Setting(1, "topic")
    assert settings["retention.bytes"] == Setting(5, "broker")
    assert settings["segment.bytes"] == Setting(2048, "broker")
    assert settings["segment.ms"] == Setting(604_800_000, "default")
    other = topic_settings(metadata.image, "a", static, node_id=2)
    assert other["retention.bytes"] == Setting(9, "broker")
    assert topic_settings(metadata.image, "a", static)["retention.bytes"] == Setting(9, "broker")


def test_a_topic_without_overrides_has_the_defaults():
    settings = topic_settings(EMPTY, "nothing", {})
    assert {name: setting.value for name, setting in settings.items()} == TOPIC_OPTIONS.defaults()
    assert {setting.source for setting in settings.values()} == {"default"}


def test_hours_and_minutes_become_milliseconds_and_the_finest_unit_wins():
    assert topic_defaults({"log.retention.hours": 2}) == {"retention.ms": 7_200_000}
    assert topic_defaults({"log.retention.minutes": "3", "log.retention.hours": 2}) == {
        "retention.ms": 180_000
    }
    both = {"log.retention.hours": 2, "log.retention.ms": 5, "log.retention.minutes": None}
    assert topic_defaults(both) == {"retention.ms": 5}
    assert topic_defaults({"log.retention.hours": -1}) == {"retention.ms": -1}
    assert topic_defaults({"log.roll.hours": 1, "log.roll.jitter.hours": 0}) == {
        "segment.ms": 3_600_000,
        "segment.jitter.ms": 0,
    }


def test_settings_that_are_no_topic_defaults_are_passed_over():
    assert topic_defaults({"node.id": 1, "log.dirs": "x"}) == {}


def test_a_bad_default_names_its_source():
    with pytest.raises(ConfigError, match=r"log\.segment\.bytes is 5, but must be .* \(in server\.toml"):
        topic_defaults({"log.segment.bytes": 5}, source="server.toml")


@pytest.mark.parametrize("name", BROKER_DEFAULT_NAMES)
def test_the_largest_broker_default_is_allowed_for_the_topic(name):
    option = BROKER_DEFAULT_OPTIONS.get(name)
    if option.maximum is None:
        return
    (topic_name, value), *_ = topic_defaults({name: int(option.maximum)}).items()
    assert TOPIC_OPTIONS.get(topic_name).parse(value) == value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("retention.ms", "-2", "-1"),
        ("segment.bytes", "10", "from 1024"),
        ("cleanup.policy", "shrink", "one of delete, compact, compact,delete, delete,compact"),
        ("min.cleanable.dirty.ratio", "1.5", "from 0 to 1"),
        ("compression.type", "zstd", "one of producer: the broker keeps batches as they were sent"),
        ("message.timestamp.type", "createtime", "one of CreateTime, LogAppendTime"),
        ("durability", "maybe", "one of fsync, page-cache"),
        ("preallocate", "perhaps", "true or false"),
        ("min.insync.replicas", "0", "from 1"),
        ("leader.replication.throttled.replicas", "0:1,2", "comma-separated list of partition:broker"),
        ("follower.replication.throttled.replicas", "all", "* for every replica"),
    ],
)
def test_an_error_names_key_value_and_allowed_values(name, value, allowed):
    with pytest.raises(ConfigError) as caught:
        parse_topic_config(name, value)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert allowed in str(caught.value)


def test_a_brokers_default_has_the_same_meaning():
    with pytest.raises(ConfigError, match=r"compression\.type is 'zstd'.*keeps batches as they were sent"):
        parse_broker_config("compression.type", "zstd")


def test_overrides_are_stored_under_one_name_in_one_spelling():
    assert parse_topic_config("retention_ms", " 1_000 ") == ("retention.ms", "1000")
    assert parse_topic_config("preallocate", "on") == ("preallocate", "true")
    assert parse_topic_config("retention_ms", None) == ("retention.ms", None)
    assert parse_broker_config("log.retention.hours", "01") == ("log.retention.hours", "1")


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_canonical_text_parses_to_the_same_value(data):
    option = data.draw(st.sampled_from(list(TOPIC_OPTIONS)))
    if option.choices is not None:
        value = data.draw(st.sampled_from(option.choices))
    elif option.kind == "bool":
        value = data.draw(st.booleans())
    elif option.kind == "list":
        value = tuple(data.draw(st.lists(st.from_regex(option.items[0], fullmatch=True))))
    else:
        value = data.draw(st.integers(int(option.minimum), int(option.maximum)))
    assert option.parse(value_text(value)) == value


def test_lists_are_written_with_commas():
    assert value_text(("a", "b")) == "a,b"
