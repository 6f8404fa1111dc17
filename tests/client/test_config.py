"""Options in both spellings, their bounds and contradictions."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from kafkalite.client.config import (
    ADMIN_OPTIONS,
    CONSUMER_OPTIONS,
    PRODUCER_OPTIONS,
    CommonSettings,
    ConsumerSettings,
    ProducerSettings,
    admin_config,
    consumer_config,
    merged,
    producer_config,
)
from kafkalite.errors import ConfigError
from kafkalite.model import Acks, IsolationLevel
from kafkalite.options import OptionRegistry
from kafkalite.records.header import Codec


def test_defaults_are_kafkas() -> None:
    config = producer_config({})
    assert config.bootstrap_servers == ("localhost:9092",)
    assert (config.acks, config.linger_ms, config.batch_size) == (Acks.ALL, 5, 16384)
    assert (config.buffer_memory, config.max_block_ms, config.max_request_size) == (33554432, 60000, 1048576)
    assert (config.retries, config.delivery_timeout_ms) == (2**31 - 1, 120_000)
    assert (config.codec, config.partitioner) == (Codec.NONE, "roundrobin")
    reader = consumer_config({})
    assert (reader.auto_offset_reset, reader.fetch_max_wait_ms, reader.max_poll_records) == (
        "latest",
        500,
        500,
    )
    assert (reader.fetch_max_bytes, reader.max_partition_fetch_bytes) == (52428800, 1048576)
    assert reader.isolation_level is IsolationLevel.READ_UNCOMMITTED
    assert admin_config({}).request_timeout_ms == 30_000


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0", Acks.NONE), (0, Acks.NONE), (1, Acks.LEADER), ("all", Acks.ALL), ("-1", Acks.ALL), (-1, Acks.ALL)],
)
def test_acks_in_every_spelling(given: object, expected: Acks) -> None:
    assert producer_config({"acks": given}).acks is expected


def test_names_may_be_dotted_or_pythons() -> None:
    assert producer_config({"linger.ms": "7"}).linger_ms == producer_config({"linger_ms": 7}).linger_ms == 7
    assert producer_config({"request.required.acks": "1"}).acks is Acks.LEADER


def test_arguments_win_over_the_mapping() -> None:
    settings = merged({"linger.ms": 1, "acks": "1"}, {"linger_ms": 2, "acks": None})
    assert settings == {"linger.ms": 2, "acks": "1"}
    assert merged(None, {}) == {}


def test_none_means_no_compression() -> None:
    assert producer_config({"compression_type": None}).codec is Codec.NONE
    assert producer_config({"compression.type": "zstd", "compression.level": 3}).codec is Codec.ZSTD


def test_a_batch_is_never_larger_than_a_request() -> None:
    assert producer_config({"batch_size": 4_000_000}).batch_size == 1_048_576


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lingerms": 1}, "lingerms"),
        ({"linger.ms": -1}, "linger.ms"),
        ({"acks": 2}, "acks"),
        ({"compression.type": "rar"}, "compression.type"),
        ({"buffer.memory": 1000}, "buffer.memory"),
        ({"linger.ms": 120_000}, "linger.ms"),
        ({"bootstrap.servers": ""}, "bootstrap.servers"),
        ({"partitioner": "lucky"}, "partitioner"),
    ],
)
def test_errors_name_the_option(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as failure:
        producer_config(settings, source="producer.toml")
    assert failure.value.key == key
    assert "producer.toml" in str(failure.value)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"linger\.ms"):
        producer_config({"linger.sm": 1})


def test_isolation_level() -> None:
    level = consumer_config({"isolation.level": "read_committed"}).isolation_level
    assert level is IsolationLevel.READ_COMMITTED


@pytest.mark.parametrize(
    ("settings", "registry", "arguments"),
    [
        (CommonSettings, ADMIN_OPTIONS, {"bootstrap_servers"}),
        (ProducerSettings, PRODUCER_OPTIONS, {"bootstrap_servers", "partitioner"}),
        (ConsumerSettings, CONSUMER_OPTIONS, {"bootstrap_servers"}),
    ],
)
def test_the_settings_that_type_checkers_see_are_the_declared_options(
    settings: type, registry: OptionRegistry, arguments: set[str]
) -> None:
    """``arguments`` are options with a parameter of their own in the constructors."""
    names = {option.python_name for option in registry}
    assert set(get_type_hints(settings)) == names - arguments


@pytest.mark.parametrize("registry", [PRODUCER_OPTIONS, CONSUMER_OPTIONS])
def test_every_option_is_documented_and_accepts_its_default(registry: object) -> None:
    for option in registry:  # type: ignore[attr-defined]
        assert option.doc.endswith(".")
        assert option.parse(option.default) == option.default


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"acks": "all"}, True),
        ({"acks": 1}, False),
        ({"acks": 0}, False),
        ({"retries": 0}, False),
        ({"enable.idempotence": False}, False),
        ({"max.in.flight.requests.per.connection": 64}, True),
    ],
)
def test_idempotence_is_on_where_it_can_be(settings: dict[str, object], expected: bool) -> None:
    assert producer_config(settings).enable_idempotence is expected


@pytest.mark.parametrize("settings", [{"acks": 1}, {"acks": "0"}, {"retries": 0}])
def test_explicit_idempotence_refuses_contradicting_options(settings: dict[str, object]) -> None:
    (key,) = settings
    with pytest.raises(ConfigError, match=r"enable\.idempotence=true") as caught:
        producer_config({"enable.idempotence": True, **settings})
    assert caught.value.key == key
