"""Options in both spellings, their bounds and contradictions."""

from __future__ import annotations

import asyncio
import re
from typing import Any, get_type_hints

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, sync
from kafkalite.broker.config import BROKER_OPTIONS
from kafkalite.client.config import (
    ADMIN_OPTIONS,
    CONSUMER_OPTIONS,
    PRODUCER_OPTIONS,
    CommonSettings,
    ConsumerSettings,
    ProducerSettings,
    admin_config,
    consumer_config,
    elsewhere,
    environment_settings,
    merged,
    producer_config,
)
from kafkalite.errors import ClientError, ConfigError
from kafkalite.model import Acks, IsolationLevel
from kafkalite.options import OptionRegistry
from kafkalite.records.header import Codec
from kafkalite.testing import VirtualClock


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
    settings = merged({"linger.ms": 1, "acks": "1"}, {"linger_ms": 2, "acks": None}, PRODUCER_OPTIONS)
    assert settings == {"linger.ms": 2, "acks": "1"}
    assert merged(None, {}, PRODUCER_OPTIONS) == {}


def test_the_environment_configures_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the variables of its options; arguments win over them."""
    monkeypatch.setenv("KAFKALITE_CLIENT_BOOTSTRAP_SERVERS", "a:1,b:2")
    monkeypatch.setenv("KAFKALITE_CLIENT_LINGER_MS", "20")
    monkeypatch.setenv("KAFKALITE_CLIENT_GROUP_ID", "billing")
    monkeypatch.setenv("KAFKALITE_LOG_RETENTION_MS", "5")  # a broker's
    clients = (
        Admin(config="environment"),
        Producer(config="environment", acks=1),
        Consumer(config="environment"),
        sync.Producer(config="environment")._original,
        sync.Consumer(config="environment")._original,
    )
    for client in clients:
        assert client.config.bootstrap_servers == ("a:1", "b:2")
    assert (clients[1].config.linger_ms, clients[1].config.acks) == (20, Acks.LEADER)
    assert clients[3].config.linger_ms == 20
    assert clients[2].config.group_id == clients[4].config.group_id == "billing"
    assert Producer(config="environment", linger_ms=1).config.linger_ms == 1
    assert Producer().config.linger_ms == 5  # only if it is asked for


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("KAFKALITE_CLIENT_LINGR_MS", "1", "did you mean KAFKALITE_CLIENT_LINGER_MS"),
        ("KAFKALITE_CLIENT_QQQQ", "1", "QQQQ: no client has such an option"),
        ("KAFKALITE_CLIENT_LINGER_MS", "x", "linger.ms is 'x'.*in KAFKALITE_CLIENT_LINGER_MS"),
    ],
)
def test_a_misspelt_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=problem):
        Producer(config="environment")


@pytest.mark.parametrize("client", [Admin, Producer, Consumer])
def test_the_environment_has_every_setting_of_security(monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    given = {
        "security_protocol": "SASL_SSL",
        "ssl_keystore_location": "alice.pem",
        "ssl_keystore_type": "PEM",
        "ssl_key_password": "of-the-key",
        "ssl_truststore_location": "ca.pem",
        "ssl_truststore_type": "PEM",
        "ssl_enabled_protocols": "TLSv1.3",
        "ssl_endpoint_identification_algorithm": "",
        "sasl_mechanism": "PLAIN",
        "sasl_username": "alice",
        "sasl_password": "hunter-two",
        "sasl_oauthbearer_token_endpoint_url": "token.jwt",
    }
    names = {option.python_name for option in ADMIN_OPTIONS} - {"sasl_oauth_token_provider"}  # a function
    assert given.keys() == {name for name in names if name.startswith(("security", "ssl", "sasl"))}
    for name, value in given.items():
        monkeypatch.setenv(f"KAFKALITE_CLIENT_{name.upper()}", value)
    settings = merged("environment", {}, ADMIN_OPTIONS)
    assert settings.pop("ssl.enabled.protocols") == ("TLSv1.3",)
    del given["ssl_enabled_protocols"]
    assert settings == {name.replace("_", "."): value for name, value in given.items()}
    for name in ("SSL_KEYSTORE_LOCATION", "SSL_TRUSTSTORE_LOCATION", "SASL_OAUTHBEARER_TOKEN_ENDPOINT_URL"):
        monkeypatch.delenv(f"KAFKALITE_CLIENT_{name}")
    made = client(config="environment").config
    assert made.security_protocol == "SASL_SSL"
    assert (made.sasl_username, made.sasl_password) == ("alice", "hunter-two")


@pytest.mark.parametrize("client", [Admin, Producer, Consumer])
@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KAFKALITE_SECURITY_PROTOCOL", "KAFKALITE_CLIENT_SECURITY_PROTOCOL"),
        ("KAFKALITE_SECURTY_PROTOCOL", "KAFKALITE_CLIENT_SECURITY_PROTOCOL"),
        ("KAFKALITE_SASL_USERNAME", "KAFKALITE_CLIENT_SASL_USERNAME"),
        ("KAFKALITE_SASL_PASSWORD", "KAFKALITE_CLIENT_SASL_PASSWORD"),
        ("KAFKALITE_CLIENT_SASL_PASSWRD", "KAFKALITE_CLIENT_SASL_PASSWORD"),
        ("KAFKALITE_SASL_MECHANISMS", "KAFKALITE_CLIENT_SASL_MECHANISM"),
    ],
)
def test_no_variable_of_security_is_ignored(
    monkeypatch: pytest.MonkeyPatch, client: Any, variable: str, meant: str
) -> None:
    """A client that ignored one would connect without TLS, or without the login that was meant."""
    monkeypatch.setenv(variable, "SASL_SSL")
    with pytest.raises(ConfigError, match=f"did you mean {meant}") as refused:
        client(config="environment")
    assert str(refused.value).startswith(f"{variable}:")
    assert "SASL_SSL" not in str(refused.value)


def test_variables_of_brokers_are_not_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their settings of TLS and logins have similar names, and a node's environment may have both."""
    for option in BROKER_OPTIONS:
        if option.name.startswith(("ssl.", "sasl.", "listener")):
            monkeypatch.setenv(f"KAFKALITE_{option.python_name.upper()}", "x")
    assert merged("environment", {}, ADMIN_OPTIONS) == {}


@pytest.mark.parametrize("name", ["sasl.password", "ssl.key.password"])
def test_the_error_for_a_secret_of_another_type_does_not_show_it(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(name)) as refused:
        Admin(config={name: b"hunter-two"})
    assert "hunter-two" not in f"{refused.value} {refused.value.value}"


async def test_every_client_uses_the_clock_that_it_is_given() -> None:
    clock = VirtualClock(wall_ms=1_000_000)
    async with (
        Broker(listeners="inproc://") as broker,
        Producer(broker.address, clock=clock, linger_ms=0) as producer,
        Consumer(
            "t", bootstrap_servers=broker.address, clock=clock, auto_offset_reset="earliest"
        ) as consumer,
    ):
        await producer.send("t", b"x")
        async with asyncio.timeout(30):
            record = await consumer.get_one()
        assert record is not None and record.timestamp_ms == 1_000_000
        assert consumer.clock is sync.Consumer(clock=clock)._original.clock is clock
        assert Admin(clock=clock)._clock is sync.Admin(clock=clock)._original._clock is clock
        assert sync.Producer(clock=clock)._original._time_ns() == 10**12


@pytest.mark.parametrize("client", [Admin, Producer, Consumer, sync.Admin, sync.Producer, sync.Consumer])
def test_misspellings_are_refused_everywhere(client: Any) -> None:
    for settings in ({"config": {"client.idd": "x"}}, {"client_idd": "x"}):
        with pytest.raises(ConfigError, match=r"did you mean client\.id\?"):
            client(**settings)
    with pytest.raises(ConfigError, match="config is 'enviroment'"):
        client(config="enviroment")
    assert client(config={"bootstrap.servers": "h:1"}, client_id="me")


def test_a_misspelt_argument_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean the argument value_serializer"):
        Producer(config={"value.serialiser": str})
    with pytest.raises(ConfigError, match="did you mean the argument value_deserializer"):
        Consumer(value_deserialiser=str)  # type: ignore[call-arg]


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


@pytest.mark.parametrize("make", [Consumer, sync.Consumer])
@pytest.mark.parametrize(
    ("topics", "call"),
    [
        (("orders", "localhost:9092"), 'Consumer("orders", bootstrap_servers="localhost:9092")'),
        (("a", "b", "h:1,i:2"), 'Consumer("a", "b", bootstrap_servers="h:1,i:2")'),
        ((["a"], ["h:1", "i:2"]), 'Consumer("a", bootstrap_servers="h:1,i:2")'),
        (("inproc://broker",), 'Consumer("orders", bootstrap_servers="inproc://broker")'),
    ],
)
def test_servers_in_the_place_of_a_topic_are_refused_with_the_right_call(
    make: Any, topics: tuple[Any, ...], call: str
) -> None:
    with pytest.raises(ClientError, match="is an address, not a topic") as refused:
        make(*topics)
    assert call in str(refused.value)


@pytest.mark.parametrize("topic", [5, b"orders", ("orders", 5)])
def test_a_topic_is_a_str(topic: Any) -> None:
    with pytest.raises(ClientError, match=r"topic (5|b'orders') is not a str"):
        Consumer(topic)


@pytest.mark.parametrize("make", [Producer, sync.Producer, Admin, sync.Admin])
def test_a_topic_in_the_place_of_the_servers_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is 'orders', but must be host:port"):
        make("orders")
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is 'orders'"):
        make(["localhost:9092", "orders"])


@pytest.mark.parametrize("make", [Producer, sync.Producer, Consumer, sync.Consumer, Admin, sync.Admin])
@pytest.mark.parametrize("host", ["a..b", ".", "a" * 64, "ä..ö", "ä" * 60, "h\udcff", "a b", "a\0b", "a\n"])
def test_an_invalid_host_name_is_refused(make: Any, host: str) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is .* a valid host name: ") as failure:
        make(bootstrap_servers=["localhost:9092", f"{host}:9092"])
    assert failure.value.value == f"{host}:9092"


@pytest.mark.parametrize("host", ["a.b.", "a" * 63, "a_b", "ä.ö", "[::1]", "[fe80::1%eth0]", "10.0.0.1"])
def test_a_valid_host_name_is_accepted(host: str) -> None:
    assert Admin(f"{host}:9092")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("session.timeout.ms", "group.consumer.session.timeout.ms"),
        ("heartbeat_interval_ms", "group.consumer.heartbeat.interval.ms"),
        ("partition.assignment.strategy", "group.remote.assignor"),
    ],
)
def test_an_option_that_the_brokers_have_names_theirs(name: str, instead: str) -> None:
    unknown: Any = {name: 6000}
    with pytest.raises(ConfigError, match=r"the brokers .*KIP-848") as refused:
        Consumer("t", group_id="g", **unknown)
    assert instead in str(refused.value)
    assert "did you mean" not in str(refused.value)
    assert instead in BROKER_OPTIONS or instead in CONSUMER_OPTIONS
    with pytest.raises(ConfigError, match="KIP-848"):
        Consumer("t", config=unknown)
    variable = f"KAFKALITE_CLIENT_{name.upper().replace('.', '_')}"
    with pytest.raises(ConfigError, match="KIP-848"):
        environment_settings({variable: "6000"}, CONSUMER_OPTIONS)


def test_the_defaults_of_the_brokers_options_are_named_as_they_are() -> None:
    for name in ("session.timeout.ms", "heartbeat.interval.ms"):
        seconds = BROKER_OPTIONS.get(f"group.consumer.{name}").default // 1000
        assert elsewhere(name).endswith(f"by default {seconds} s")
