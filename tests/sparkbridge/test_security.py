"""Source and sink over TLS and with logins, without a JVM: options, what they show, and connections."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("cryptography")

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

from kafkalite.client.cluster import login
from kafkalite.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionFailedError,
    KafkaliteError,
    SaslAuthenticationError,
    SslAuthenticationError,
)
from kafkalite.model import TopicPartition
from kafkalite.protocol.connection import ClientConnection
from kafkalite.sync import Broker, Producer
from kafkalite.testing import SyncCluster
from proof.certificates import DevCertificates
from proof.token_issuer import AUDIENCE, ISSUER, Issuer
from pyspark_kafkalite import DefaultSource
from sparkbridge.brokers.cluster import SparkCluster, close_all
from sparkbridge.errors import SparkOptionError, UnknownSparkOptionWarning
from sparkbridge.options import ClientOptions, SinkOptions, SourceOptions
from sparkbridge.sink.servers import PLANNING_MODULE

SCHEMA = StructType([StructField("value", BinaryType())])
PASSWORD = "correct horse battery staple"
LOGIN = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.username": "alice",
    "kafka.sasl.password": PASSWORD,
}


def spark_options(settings: dict[str, Any]) -> dict[str, str]:
    """Return the options of Spark for the settings of a client."""
    return {f"kafka.{name.replace('_', '.')}": str(value) for name, value in settings.items()}


def client(servers: str, settings: dict[str, Any], **more: str) -> ClientOptions:
    given = {"kafka.bootstrap.servers": servers, "subscribe": "t", **spark_options(settings), **more}
    return SourceOptions.parse(given, is_stream=False).client


def opened(servers: str, settings: dict[str, Any], **more: str) -> SparkCluster:
    return SparkCluster.shared(client(servers, settings, **more))


def error_of(servers: str, settings: dict[str, Any], **more: str) -> KafkaliteError:
    with pytest.raises(KafkaliteError) as caught:
        opened(servers, settings, **more).topics()
    return caught.value


# --- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SourceOptions, SinkOptions])
def test_no_text_of_the_options_has_a_password(kind: Any) -> None:
    of_kind = {"subscribe": "t"} if kind is SourceOptions else {"topic": "t"}
    given = {"kafka.bootstrap.servers": "h:1", "kafka.ssl.key.password": PASSWORD, **LOGIN, **of_kind}
    options = kind.parse(given, is_stream=True)
    assert options.client.security["sasl.password"] == PASSWORD
    assert PASSWORD not in repr(options) + str(options) + repr(options.client)
    assert PASSWORD not in repr(SparkCluster(options.client))
    for name, value in (("kafka.sasl.mechanism", "MAGIC"), ("kafka.sasl.username", "")):
        with pytest.raises(SparkOptionError) as caught:
            kind.parse({**given, name: value}, is_stream=True)
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kafka.sasl.pasword", "did you mean kafka.sasl.password?"),
        ("kafka.ssl.truststore.lokation", "did you mean kafka.ssl.truststore.location?"),
        ("security.protocol", "did you mean kafka.security.protocol?"),
        ("ssl.keystore.location", "did you mean kafka.ssl.keystore.location?"),
        ("kafka.sasl.jaas.config", "set sasl.username and sasl.password"),
        ("kafka.sasl.xyz", "see docs/spark.md"),
    ],
)
@pytest.mark.parametrize("kind", [SourceOptions, SinkOptions])
def test_unknown_security_options_are_refused(kind: Any, name: str, hint: str) -> None:
    """A warning would let the client connect without the protection that was asked for."""
    given = {"kafka.bootstrap.servers": "h:1", "subscribe": "t", name: PASSWORD}
    with pytest.raises(SparkOptionError, match="is not an option of the kafkalite") as caught:
        kind.parse(given, is_stream=True)
    assert caught.value.message.startswith(name)
    assert caught.value.hint == hint
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("kind", [SourceOptions, SinkOptions])
def test_settings_that_contradict_each_other_are_refused_at_once(kind: Any) -> None:
    given = {"kafka.bootstrap.servers": "h:1", "kafka.security.protocol": "sasl_ssl"}
    given["subscribe" if kind is SourceOptions else "topic"] = "t"
    with pytest.raises(SparkOptionError, match=r"kafka\.sasl\.username: required with security"):
        kind.parse(given, is_stream=True)
    given |= {"kafka.sasl.username": "a", "kafka.sasl.password": "b", "kafka.ssl.enabled.protocols": "SSLv3"}
    with pytest.raises(SparkOptionError, match=r"kafka\.ssl\.enabled\.protocols is 'SSLv3', but must be TLS"):
        kind.parse(given, is_stream=True)


@pytest.mark.parametrize("kind", [SourceOptions, SinkOptions])
def test_options_without_their_protocol_have_no_effect(kind: Any) -> None:
    given = {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "kafka.sasl.username": "alice"}
    if kind is SinkOptions:
        del given["subscribe"]
    with pytest.warns(
        UnknownSparkOptionWarning,
        match=r"kafka\.sasl\.username is ignored: kafka\.security\.protocol is PLAIN",
    ):
        kind.parse(given, is_stream=True)
    given |= {"kafka.security.protocol": "SSL"}
    with pytest.warns(UnknownSparkOptionWarning, match=r"username is ignored.*protocol is SSL"):
        kind.parse(given, is_stream=True)


# --- reading and writing -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["SASL_SSL", "SSL"])
def secured(request: pytest.FixtureRequest) -> Iterator[SyncCluster]:
    """A broker that requires a login over TLS, or the certificate of the client."""
    auth = {"ssl_client_auth": "required"} if request.param == "SSL" else {}
    with SyncCluster(transport="tcp", security_protocol=request.param, **auth) as cluster:
        yield cluster
        cluster.kill()


def settings_of(cluster: SyncCluster) -> dict[str, Any]:
    """Return the settings of a client with what the cluster requires, and no more."""
    settings = cluster.client_settings
    if settings["security_protocol"] == "SASL_SSL":
        settings |= {"sasl_mechanism": "SCRAM-SHA-256"}
        del settings["ssl_keystore_location"]
    return settings


class FirstTask:
    def getLocalProperty(self, key: str) -> None:
        return None

    def partitionId(self) -> int:
        return 0

    attemptNumber = taskAttemptId = partitionId


def through_pickle(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))


def test_a_job_writes_and_another_reads(secured: SyncCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    write_and_read(secured, settings_of(secured), monkeypatch)


def write_and_read(
    secured: SyncCluster,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Each step is one of Spark's: the planning process, tasks, and the commit. Calls ``between`` steps."""
    topic = "job"
    secured.create_topic(topic)
    options = spark_options(settings)
    options |= {"kafka.bootstrap.servers": secured.bootstrap_servers}
    with monkeypatch.context() as planning:
        planning.setitem(sys.modules, PLANNING_MODULE, ModuleType("planning"))
        sink = DefaultSource(CaseInsensitiveDict({**options, "topic": topic}))
        writer = sink.writer(SCHEMA, False)
    values = [b"x" * 100_000, b"y"]
    between()
    with monkeypatch.context() as task:
        task.setattr(TaskContext, "_taskContext", FirstTask())
        message = through_pickle(writer).write(iter([pa.record_batch([pa.array(values)], names=["value"])]))
    between()
    through_pickle(writer).commit([message])
    source = through_pickle(DefaultSource(CaseInsensitiveDict({**options, "subscribe": topic})))
    schema = source.schema()
    reader = source.reader(schema)
    between()
    found = []
    for partition in reader.partitions():
        for batch in through_pickle(reader).read(through_pickle(partition)):
            found += batch.to_pydict()["value"]
    assert found == values


def test_a_long_poll_sees_bytes_that_are_decrypted_already(
    secured: SyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not make the socket readable: here a buffer takes 10 bytes of a TLS record."""
    topic = "poll"
    secured.create_topic(topic)
    with Producer(secured.bootstrap_servers, **settings_of(secured)) as producer:
        producer.send(topic, b"x").result(20)
    whole = ClientConnection.get_buffer
    monkeypatch.setattr(ClientConnection, "get_buffer", lambda self: whole(self)[:10])
    assert opened(secured.bootstrap_servers, settings_of(secured)).wait_for_data(
        {TopicPartition(topic, 0): 0}, 4_000
    )


def test_large_responses_arrive_beside_a_long_poll(secured: SyncCluster) -> None:
    topic = "large"
    secured.create_topic(topic)
    with Producer(secured.bootstrap_servers, **settings_of(secured)) as producer:
        for number in range(4):
            producer.send(topic, bytes([number]) * 900_000).result(20)
    cluster = opened(secured.bootstrap_servers, settings_of(secured))
    tp = TopicPartition(topic, 0)
    tokens = [cluster.send_fetch(tp, offset, max_bytes=1 << 20) for offset in range(4)]
    assert cluster.wait_for_data({tp: 3}, 10_000)
    assert not cluster.wait_for_data({tp: 4}, 50)
    for token in tokens:
        assert len(cluster.receive_fetch(token).payload) > 900_000
    with Producer(secured.bootstrap_servers, **settings_of(secured)) as producer:
        producer.send(topic, b"more").result(20)
    assert cluster.wait_for_data({tp: 4}, 10_000), "the poll that was kept"


def test_connections_log_in_again_before_their_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "RENEWAL_FACTOR", 0.0)
    with SyncCluster(
        transport="tcp", security_protocol="SASL_SSL", connections_max_reauth_ms=10_000
    ) as secured:
        secured.create_topic("t")
        cluster = opened(secured.bootstrap_servers, settings_of(secured))
        cluster.topics()
        accepted = secured.statistics().connections_accepted
        count = len(secured.requests.of("SaslHandshake"))
        token = cluster.send_fetch(TopicPartition("t", 0), 0, max_bytes=1, max_wait_ms=50)
        for _ in range(3):
            cluster.topics()
        assert not cluster.receive_fetch(token).payload
        assert len(secured.requests.of("SaslHandshake")) >= count + 3
        assert secured.statistics().connections_accepted == accepted
        secured.kill()


def test_a_session_that_has_ended_is_begun_again_on_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "RENEWAL_FACTOR", 1_000_000.0)
    with SyncCluster(transport="tcp", security_protocol="SASL_SSL", connections_max_reauth_ms=300) as secured:
        cluster = opened(secured.bootstrap_servers, settings_of(secured))
        accepted = secured.statistics().connections_accepted
        deadline_s = time.monotonic() + 30
        while secured.statistics().connections_accepted < accepted + 3 and time.monotonic() < deadline_s:
            cluster.topics()
        assert secured.statistics().connections_accepted >= accepted + 3
        secured.kill()


def test_a_token_of_a_file_is_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of planning, tasks, the commit and the reader: each login reads the token that is in the file then."""
    pytest.importorskip("jwt")
    issuer = Issuer()
    keys, token = tmp_path / "jwks.json", tmp_path / "token"
    keys.write_bytes(issuer.key_set)
    token.write_text(issuer.token())
    with SyncCluster(
        transport="tcp",
        security_protocol="SASL_SSL",
        sasl_enabled_mechanisms="SCRAM-SHA-512,OAUTHBEARER",
        sasl_oauthbearer_jwks_endpoint_url=str(keys),
        sasl_oauthbearer_expected_audience=AUDIENCE,
        sasl_oauthbearer_expected_issuer=ISSUER,
    ) as secured:
        settings = {
            "security_protocol": "SASL_SSL",
            "ssl_truststore_location": secured.client_settings["ssl_truststore_location"],
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauthbearer_token_endpoint_url": str(token),
        }
        seen: set[str] = set()
        secured.cluster.broker.intercept(lambda request, client: seen.add(client.principal))
        numbers = count()

        def rotate() -> None:
            close_all()
            token.write_text(issuer.token(f"user-{next(numbers)}"))

        write_and_read(secured, settings, monkeypatch, rotate)
        assert {f"User:user-{number}" for number in range(next(numbers))} <= seen
        token.write_text("nonsense")
        error = error_of(secured.bootstrap_servers, settings, **{"kafka.client.id": "new"})
        assert isinstance(error, SaslAuthenticationError)
        secured.kill()


# --- errors ------------------------------------------------------------------------------------------


def test_a_wrong_password_is_one_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncCluster(transport="tcp", security_protocol="SASL_SSL") as secured:
        wrong = {**settings_of(secured), "sasl_password": PASSWORD}
        servers = secured.bootstrap_servers
        accepted = secured.statistics().connections_accepted
        error = error_of(servers, wrong)
        assert isinstance(error, SaslAuthenticationError)
        assert secured.cluster.broker.address in error.message
        monkeypatch.setitem(sys.modules, PLANNING_MODULE, ModuleType("planning"))
        given = {"kafka.bootstrap.servers": servers, "topic": "t", **spark_options(wrong)}
        source = DefaultSource(CaseInsensitiveDict(given))
        for make in (source.writer, source.streamWriter):
            with pytest.raises(SaslAuthenticationError) as caught:
                make(SCHEMA, False)
            assert PASSWORD not in str(caught.value) + str(error)
        assert secured.statistics().connections_accepted == accepted + 3, "one attempt each"
        secured.kill()


def test_an_open_client_tries_again_until_the_password_is_corrected() -> None:
    with SyncCluster(transport="tcp", security_protocol="SASL_SSL") as secured:
        settings = settings_of(secured)
        cluster = opened(secured.bootstrap_servers, settings, **{"kafka.request.timeout.ms": "700"})
        cluster.topics()
        secured.add_user("client", PASSWORD)
        cluster.close()
        with pytest.raises(SaslAuthenticationError, match=r"metadata failed for \d+ ms"):
            cluster.topics()
        secured.add_user("client", settings["sasl_password"])
        assert cluster.topics() == {}
        secured.kill()


def test_refused_certificates_name_the_reason(dev_certificates: DevCertificates) -> None:
    with Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        for settings, reason in (
            (dev_certificates.client(), "it requires a certificate"),
            ({"security_protocol": "SSL"}, "its issuer is not trusted"),
        ):
            error = error_of(broker.address, settings)
            assert isinstance(error, SslAuthenticationError)
            assert f"cannot connect to {broker.address}: " in error.message
            assert reason in error.message
        error = error_of(broker.address, dev_certificates.client(str(dev_certificates / "none.pem")))
        assert isinstance(error, ConfigError)
        assert "none.pem" in error.message
    elsewhere = dev_certificates.issue("other-host.pem", hosts=["elsewhere.example"])
    with Broker(**dev_certificates.broker(str(elsewhere))) as broker:
        error = error_of(broker.address, dev_certificates.client())
        assert isinstance(error, SslAuthenticationError)
        assert "certificate is not valid for '127.0.0.1'" in error.message


def test_protocols_that_do_not_match(dev_certificates: DevCertificates) -> None:
    short = {"kafka.request.timeout.ms": "300"}
    with Broker(listeners="127.0.0.1:0") as broker:
        error = error_of(broker.address, dev_certificates.client(), **short)
        assert isinstance(error, ConnectionFailedError)
        assert "closed the connection during the TLS handshake" in error.message
        assert "security.protocol" in str(error)
    with Broker(**dev_certificates.broker()) as broker:
        assert (
            "the peer speaks TLS, and this side plain text" in error_of(broker.address, {}, **short).message
        )
    with SyncCluster(transport="tcp", security_protocol="SASL_SSL") as secured:
        encrypted = {name: value for name, value in settings_of(secured).items() if name.startswith("ssl")}
        error = error_of(secured.bootstrap_servers, {**encrypted, "security_protocol": "SSL"})
        assert isinstance(error, SaslAuthenticationError)
        assert "security.protocol" in error.message
        secured.kill()


def test_a_server_that_never_shakes_hands_is_abandoned(dev_certificates: DevCertificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        started_s = time.monotonic()
        error = error_of(address, dev_certificates.client(), **{"kafka.request.timeout.ms": "300"})
        assert isinstance(error, ConnectionFailedError)
        assert not isinstance(error, AuthenticationError)
        assert time.monotonic() - started_s < 10
