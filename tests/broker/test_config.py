"""BrokerConfig and load_settings: names, precedence, sources, and errors that say what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.broker.config import (
    BROKER_OPTIONS,
    SECRET_OPTIONS,
    BrokerConfig,
    load_settings,
    parse_settings,
)
from kafkalite.errors import ConfigError


def test_fields_and_options_are_the_same_list() -> None:
    assert [f.name for f in dataclasses.fields(BrokerConfig)] == [o.python_name for o in BROKER_OPTIONS]
    assert BrokerConfig().settings() == BROKER_OPTIONS.defaults()


def test_every_option_is_documented_with_a_default_of_its_kind() -> None:
    for option in BROKER_OPTIONS:
        assert option.doc, option.name
        assert option.default is None or option.parse(option.default) == option.default, option.name


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("log.retention.ms", 604_800_000),
        ("log.retention.bytes", -1),
        ("log.segment.bytes", 1_073_741_824),
        ("message.max.bytes", 1_048_588),
        ("num.partitions", 1),
        ("auto.create.topics.enable", True),
        ("log.retention.check.interval.ms", 300_000),
        ("connections.max.idle.ms", 600_000),
        ("socket.request.max.bytes", 104_857_600),
        ("fetch.max.bytes", 57_671_680),
        ("log.index.interval.bytes", 4096),
        ("log.segment.delete.delay.ms", 60_000),
    ],
)
def test_defaults_are_kafkas(name: str, default: Any) -> None:
    assert BROKER_OPTIONS.get(name).default == default


@pytest.mark.parametrize(
    ("given", "listeners"),
    [
        ("127.0.0.1:9092", ("127.0.0.1:9092",)),
        ("PLAINTEXT://:9092", ("0.0.0.0:9092",)),
        (":0, inproc://x", ("0.0.0.0:0", "inproc://x")),
        ("[::1]:9092", ("[::1]:9092",)),
        (["a:1", "b:2"], ("a:1", "b:2")),
    ],
)
def test_listeners_in_every_spelling(given: Any, listeners: tuple[str, ...]) -> None:
    assert BrokerConfig.from_settings({"listeners": given}).listeners == listeners
    if isinstance(given, str):
        assert BrokerConfig(listeners=given).listeners == listeners  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address", ["localhost", "SASL_SSL://x", "TLS://x:1", "SSL://x", "host:port", "host:70000", "host:-1"]
)
def test_an_invalid_listener_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"listeners is .* but must be host:port"):
        BrokerConfig.from_settings({"listeners": address})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"listeners": ""}, "listeners"),
        ({"advertised.listeners": "a:1,b:2"}, "advertised.listeners"),
        ({"log.dirs": "/a,/a/"}, "log.dirs"),
        ({"log.dirs": "/a,,/b"}, "log.dirs"),
        ({"message.max.bytes": 1_000_000, "socket.request.max.bytes": 2000}, "message.max.bytes"),
        ({"log.roll.ms": 10, "log.roll.jitter.ms": 11}, "log.roll.jitter.ms"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BrokerConfig.from_settings(settings)
    assert refused.value.key == key


def test_coarse_units_become_milliseconds_and_the_finest_wins() -> None:
    assert parse_settings({"log.retention.hours": "2"}) == {"log.retention.ms": 7_200_000}
    assert parse_settings({"log.retention.hours": -1}) == {"log.retention.ms": -1}
    assert parse_settings({"log_retention_hours": 2, "log_retention_minutes": 1}) == {
        "log.retention.ms": 60_000
    }
    assert parse_settings({"log.retention.minutes": 1, "log.retention.ms": 5}) == {"log.retention.ms": 5}
    with pytest.raises(ConfigError, match=r"log\.roll\.hours is 'soon', but must be a whole number"):
        parse_settings({"log.roll.hours": "soon"})


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kafkalite.toml"
    file.write_text(
        """
        "node.id" = 7
        listeners = "127.0.0.1:1, inproc://a"
        num.partitions = 2
        [log.retention]
        ms = 1000
        bytes = 5
        """
    )
    environment = {
        "KAFKALITE_LOG_RETENTION_MS": "2000",
        "KAFKALITE_NUM_PARTITIONS": "3",
        "KAFKALITE_BOOTSTRAP_SERVERS": "somebody else's",
        "HOME": "/root",
    }
    config, sources = load_settings(file, environment, {"num.partitions": "4", "node.id": None})
    assert (config.node_id, config.log_retention_ms, config.num_partitions) == (7, 2000, 4)
    assert config.listeners == ("127.0.0.1:1", "inproc://a")
    assert config.log_retention_bytes == 5
    assert sources["node.id"] == str(file)
    assert sources["log.retention.ms"] == "KAFKALITE_LOG_RETENTION_MS"
    assert sources["num.partitions"] == "flag"
    assert sources["fetch.max.bytes"] == "default"
    assert sources.keys() == {option.name for option in BROKER_OPTIONS}


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="RETENTON_MS: unknown option; did you mean KAFKALITE_LOG_RETENTION_MS"
    ):
        load_settings(env={"KAFKALITE_LOG_RETENTON_MS": "1"})


def test_variables_of_other_purposes_are_ignored() -> None:
    others = "UVLOOP SPARK_CACHE SPARK_IMAGE IMAGE BASE_IMAGE PIPELINE PIPELINES PYTHON VENV PARENT_PIPE"
    load_settings(env={f"KAFKALITE_{name}": "x" for name in [*others.split(), "CLIENT_LOG_RETENTION_MS"]})


def test_the_environment_may_use_hours_and_milliseconds_win_over_them() -> None:
    both = {"KAFKALITE_LOG_RETENTION_MS": "9", "KAFKALITE_LOG_RETENTION_HOURS": "1"}
    assert load_settings(env=both).config.log_retention_ms == 9
    only = load_settings(env={"KAFKALITE_LOG_RETENTION_HOURS": "1"})
    assert only.config.log_retention_ms == 3_600_000
    assert only.sources["log.retention.ms"] == "KAFKALITE_LOG_RETENTION_HOURS"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num.partitions = 0", "num.partitions is 0, but must be a whole number from 1 to 10000 .in "),
        ("num_partitons = 1", "num_partitons: unknown option; did you mean num.partitions"),
        ('durability = "disk"', "durability is 'disk', but must be one of fsync, page-cache .in "),
        ("listeners = ", "config file is .* but must be TOML: "),
    ],
)
def test_errors_name_key_value_allowed_and_source(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_settings(file)
    assert "bad.toml" in str(refused.value)


def test_relations_name_the_source_too() -> None:
    with pytest.raises(ConfigError, match=r"message\.max\.bytes .* \(in KAFKALITE_MESSAGE_MAX_BYTES"):
        load_settings(env={"KAFKALITE_MESSAGE_MAX_BYTES": "120000000"})
    with pytest.raises(ConfigError, match=r"\(in flag\)"):
        load_settings(overrides={"listeners": "nowhere"})


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that exists"):
        load_settings(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not a directory"):
        load_settings(tmp_path)


def test_paths_are_accepted_as_text(tmp_path: Path) -> None:
    assert BrokerConfig.from_settings({"log_dirs": tmp_path}).log_dirs == str(tmp_path)
    assert BrokerConfig.from_settings({"log.dirs": "/a, /b/"}).log_directories == ("/a", "/b")
    assert BrokerConfig(log_dirs=tmp_path).log_dirs == str(tmp_path)  # type: ignore[arg-type]


def test_topic_defaults_hold_only_what_differs_from_kafka() -> None:
    assert BrokerConfig().topic_defaults() == {}
    config = BrokerConfig(durability="page-cache", log_retention_ms=5, message_max_bytes=2**20)
    assert config.topic_defaults() == {
        "durability": "page-cache",
        "retention.ms": 5,
        "max.message.bytes": 2**20,
    }


SECRET = "a secret of sixteen or more"
ONE_OF_THREE = {
    "node.id": 1,
    "cluster.id": "donuts",
    "cluster.secret": SECRET,
    "controller.quorum.voters": "1@a:9093,2@b:9093,3@c:9093",
}


def test_a_node_of_a_cluster() -> None:
    config = BrokerConfig.from_settings(ONE_OF_THREE)
    assert (config.is_broker, config.is_controller, config.has_peers) == (True, True, True)
    assert config.voters == {1: "a:9093", 2: "b:9093", 3: "c:9093"}
    assert config.controller_settings().voters == {1, 2, 3}
    assert BrokerConfig.from_settings({"node.id": 7}).controller_settings().voters == {7}  # the only node
    controller = BrokerConfig.from_settings(ONE_OF_THREE | {"process.roles": "controller", "listeners": ""})
    assert (controller.is_broker, controller.is_controller) == (False, True)
    broker = BrokerConfig.from_settings(ONE_OF_THREE | {"process.roles": "broker", "node.id": 4})
    assert (broker.is_broker, broker.is_controller) == (True, False)


JOINING = {
    "node.id": 4,
    "cluster.id": "donuts",
    "cluster.secret": SECRET,
    "controller.quorum.bootstrap.servers": "1@a:9093,2@b:9093",
}


def test_a_controller_joins_a_running_quorum() -> None:
    config = BrokerConfig.from_settings(JOINING | {"controller.listeners": "d:9093"})
    assert (config.has_peers, config.voters, config.controller_addresses) == (True, {}, ("d:9093",))
    assert config.controllers == {1: "a:9093", 2: "b:9093", 4: "d:9093"}
    listed = BrokerConfig.from_settings(JOINING | {"node.id": 2})
    assert (listed.controller_addresses, listed.controllers) == (("b:9093",), {1: "a:9093", 2: "b:9093"})
    broker = BrokerConfig.from_settings(JOINING | {"process.roles": "broker"})
    assert (broker.controller_addresses, broker.controllers) == ((), {1: "a:9093", 2: "b:9093"})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "controller.listeners"),
        ({"controller.listeners": ":9093"}, "controller.listeners"),
        ({"controller.quorum.voters": "4@d:9093"}, "controller.quorum.bootstrap.servers"),
    ],
)
def test_a_joining_controller_needs_an_address_and_no_voters(changes: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        BrokerConfig.from_settings(JOINING | changes)
    assert refusal.value.key == key


def test_a_node_without_voters_is_a_cluster_of_its_own() -> None:
    config = BrokerConfig()
    assert (config.is_broker, config.is_controller, config.has_peers) == (True, True, False)
    assert config.voters == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"process.roles": "leader"}, "process.roles", "broker, controller, or broker,controller"),
        ({"process.roles": ""}, "process.roles", "broker, controller, or"),
        ({"process.roles": "broker,broker"}, "process.roles", "broker, controller, or"),
        ({"cluster.id": None}, "cluster.id", "required with controller.quorum.voters"),
        ({"cluster.secret": None}, "cluster.secret", "16 characters or more"),
        ({"cluster.secret": "short"}, "cluster.secret", "16 characters or more"),
        ({"node.id": 4}, "node.id", "one of controller.quorum.voters"),
        ({"process.roles": "broker"}, "node.id", "none of controller.quorum.voters"),
        ({"controller.quorum.voters": "1@a:1,1@b:1"}, "controller.quorum.voters", "one address for each"),
        ({"controller.quorum.voters": "1@a:1,2@a:1"}, "controller.quorum.voters", "a different address"),
        ({"controller.quorum.voters": "a:1"}, "controller.quorum.voters", "node.id@host:port"),
        ({"controller.quorum.voters": "x@a:1"}, "controller.quorum.voters", "node.id@host:port"),
        ({"controller.quorum.voters": "1@a"}, "controller.quorum.voters", "host:port"),
        (
            {"controller.quorum.voters": "1@:9093"},
            "controller.quorum.voters",
            "the other nodes can connect to",
        ),
        ({"broker.heartbeat.interval.ms": 3000}, "broker.heartbeat.interval.ms", "less than broker.session"),
        ({"listeners": ":9092"}, "advertised.listeners", "required when a listener is on every interface"),
    ],
)
def test_settings_that_a_node_of_a_cluster_cannot_have(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BrokerConfig.from_settings(ONE_OF_THREE | changes)
    assert refused.value.key == key
    assert words in str(refused.value)


KEYSTORE = {"ssl.keystore.location": "broker.pem"}


def test_the_protocol_of_each_listener() -> None:
    config = BrokerConfig.from_settings(
        KEYSTORE
        | {
            "listeners": "SSL://:9092,INTERNAL://a:9093,PLAINTEXT://a:9094,b:9095,SSL://inproc://x",
            "advertised.listeners": "SSL://c:1,INTERNAL://c:2,c:3,c:4,SSL://inproc://x",
            "listener.security.protocol.map": "internal:ssl, CONTROLLER:SSL",
        }
    )
    own = ("SSL://0.0.0.0:9092", "SSL://a:9093", "a:9094", "b:9095", "SSL://inproc://x")
    assert config.listeners == own
    assert config.advertised_listeners == ("SSL://c:1", "SSL://c:2", "c:3", "c:4", "SSL://inproc://x")
    assert BrokerConfig(listeners=own, ssl_keystore_location="broker.pem").listeners == own


def test_the_protocol_of_controllers() -> None:
    encrypted = ONE_OF_THREE | KEYSTORE | {"listener.security.protocol.map": "CONTROLLER:SSL"}
    config = BrokerConfig.from_settings(encrypted)
    assert config.voters == {1: "SSL://a:9093", 2: "SSL://b:9093", 3: "SSL://c:9093"}
    assert config.controller_addresses == ("SSL://a:9093",)
    assert config.listeners == ("127.0.0.1:9092",)
    elsewhere = BrokerConfig.from_settings(encrypted | {"controller.listeners": "0.0.0.0:1"})
    assert elsewhere.controller_addresses == ("SSL://0.0.0.0:1",)


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"listeners": "SSL://:1"}, "ssl.keystore.location", "required by a listener with TLS"),
        (
            ONE_OF_THREE | {"listener.security.protocol.map": "CONTROLLER:SSL"},
            "ssl.keystore.location",
            "required by a listener with TLS",
        ),
        (
            KEYSTORE | {"listeners": "SSL://:1", "ssl.client.auth": "required"},
            "ssl.truststore.location",
            "required with ssl.client.auth=required",
        ),
        (
            KEYSTORE | {"listeners": "SSL://:1", "advertised.listeners": "a:1"},
            "advertised.listeners",
            "the protocols of listeners",
        ),
        ({"listener.security.protocol.map": "A:SASL"}, "listener.security.protocol.map", "NAME:PROTOCOL"),
        ({"listener.security.protocol.map": "SSL"}, "listener.security.protocol.map", "NAME:PROTOCOL"),
        (
            {"listener.security.protocol.map": "CONTROLLER:SASL_SSL"},
            "listener.security.protocol.map",
            "controllers prove that they know cluster.secret",
        ),
        (
            {"controller.listeners": "SASL_PLAINTEXT://:1"},
            "controller.listeners",
            "controllers prove that they know cluster.secret",
        ),
        ({"listeners": "SASL_SSL://:1"}, "ssl.keystore.location", "required by a listener with TLS"),
        ({"sasl.enabled.mechanisms": "GSSAPI"}, "sasl.enabled.mechanisms", "SCRAM-SHA-256"),
        (
            {"listeners": "SASL_PLAINTEXT://:1", "sasl.enabled.mechanisms": "PLAIN"},
            "sasl.enabled.mechanisms",
            "PLAIN sends passwords",
        ),
        ({"listeners": "OTHER://:1"}, "listeners", "one of listener.security.protocol.map"),
        ({"ssl.enabled.protocols": "SSLv3"}, "ssl.enabled.protocols", "TLSv1.2, TLSv1.3, or both"),
        ({"ssl.enabled.protocols": ""}, "ssl.enabled.protocols", "TLSv1.2, TLSv1.3, or both"),
        ({"ssl.client.auth": "maybe"}, "ssl.client.auth", "one of none, requested, required"),
        ({"ssl.keystore.type": "JKS"}, "ssl.keystore.type", "one of PEM"),
    ],
)
def test_settings_of_tls_that_contradict_each_other(settings: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BrokerConfig.from_settings(settings)
    assert refused.value.key == key
    assert words in str(refused.value)


def test_the_password_of_a_key_is_never_shown() -> None:
    assert "ssl.key.password" in SECRET_OPTIONS
    assert "hush" not in repr(BrokerConfig(ssl_key_password="hush"))


@pytest.mark.parametrize("role", ["broker", "controller"])
def test_a_node_with_one_role_needs_voters(role: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"controller\.quorum\.voters: required on a node that is only a {role}"
    ):
        BrokerConfig.from_settings({"process.roles": role})


def test_the_secret_is_never_shown() -> None:
    config = BrokerConfig.from_settings(ONE_OF_THREE)
    assert SECRET not in repr(config)
    assert "cluster.secret" in SECRET_OPTIONS
    with pytest.raises(ConfigError) as refused:
        BrokerConfig.from_settings(ONE_OF_THREE | {"cluster.secret": "tooshort"})
    assert "tooshort" not in str(refused.value)


def test_voters_without_a_disk_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"log\.dirs: required with controller\.quorum\.voters"):
        Broker(**{name.replace(".", "_"): value for name, value in ONE_OF_THREE.items()})
