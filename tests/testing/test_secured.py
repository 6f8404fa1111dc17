"""A broker in a test over SASL_SSL and over mutual TLS, with certificates that it makes: the fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from kafkalite import sync
from kafkalite.errors import ConfigError, KafkaliteError, SaslAuthenticationError, SslAuthenticationError
from kafkalite.testing import SyncCluster
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, DevAuthority
from proof.certificates import DevCertificates

TRANSPORTS = pytest.mark.parametrize("transport", ["inproc", "tcp"])
MUTUAL: dict[str, Any] = {"security_protocol": "SSL", "ssl_client_auth": "required"}


def error_of(cluster: SyncCluster, **settings: Any) -> KafkaliteError:
    """Return the error with which a client with other settings than the cluster's is refused."""
    given = {**cluster.client_settings, **settings}
    with pytest.raises(KafkaliteError) as caught, sync.Admin(cluster.bootstrap_servers, **given):
        pass
    return caught.value


def send_and_read(cluster: SyncCluster, settings: dict[str, Any]) -> None:
    servers = cluster.bootstrap_servers
    with sync.Producer(servers, **settings) as producer:
        producer.send("orders", b"x" * 100_000).result(20)
    with sync.Consumer(
        "orders", bootstrap_servers=servers, auto_offset_reset="earliest", **settings
    ) as consumer:
        assert consumer.get_one().value == b"x" * 100_000


@TRANSPORTS
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
def test_logins_over_tls(
    kafkalite_cluster: Callable[..., SyncCluster], transport: str, mechanism: str
) -> None:
    cluster = kafkalite_cluster(
        security_protocol="SASL_SSL",
        transport=transport,
        sasl_enabled_mechanisms="SCRAM-SHA-256,SCRAM-SHA-512,PLAIN",
    )
    cluster.add_user("alice", "correct horse")
    assert cluster.login("alice")["sasl_password"] == "correct horse"
    send_and_read(cluster, {**cluster.login("alice"), "sasl_mechanism": mechanism})
    error = error_of(cluster, sasl_mechanism=mechanism, sasl_password="wrong")
    assert isinstance(error, SaslAuthenticationError)
    assert "unknown user, or wrong password" in error.message
    with pytest.raises(ConfigError, match="'bob', but must be a user that add_user has added"):
        cluster.login("bob")


@TRANSPORTS
def test_mutual_tls(kafkalite_cluster: Callable[..., SyncCluster], transport: str) -> None:
    cluster = kafkalite_cluster(**MUTUAL, transport=transport)
    send_and_read(cluster, cluster.client_settings)
    error = error_of(cluster, ssl_keystore_location=None)
    assert isinstance(error, SslAuthenticationError)
    assert "it requires a certificate" in error.message


@pytest.mark.parametrize("protocol", ["SASL_SSL", "SSL"])
def test_refused_certificates(
    kafkalite_cluster: Callable[..., SyncCluster], dev_certificates: DevCertificates, protocol: str
) -> None:
    """Of an authority that the client does not trust, and, of the cluster's authority, for another host."""
    cluster = kafkalite_cluster(security_protocol=protocol, transport="tcp")
    error = error_of(cluster, ssl_truststore_location=str(dev_certificates / CA_CERTIFICATE))
    assert isinstance(error, SslAuthenticationError)
    assert "its issuer is not trusted" in error.message
    directory = Path(cluster.client_settings["ssl_truststore_location"]).parent
    elsewhere = DevAuthority.read(directory).issue("broker", ["elsewhere.example"])
    (directory / "broker.pem").write_bytes(elsewhere)
    error = error_of(cluster)
    assert isinstance(error, SslAuthenticationError)
    assert "certificate is not valid for '127.0.0.1'" in error.message


def test_an_empty_broker_keeps_the_user_of_its_clients(kafkalite_cluster: Callable[..., SyncCluster]) -> None:
    cluster = kafkalite_cluster(security_protocol="SASL_SSL")
    cluster.add_user("alice")
    settings = cluster.client_settings
    send_and_read(cluster, settings)
    cluster.reset()
    assert cluster.client_settings == settings
    send_and_read(cluster, settings)
    with pytest.raises(ConfigError, match="alice"):
        cluster.login("alice")


def test_the_certificates_end_with_the_cluster() -> None:
    with SyncCluster(security_protocol="SSL") as cluster:
        directory = Path(cluster.client_settings["ssl_truststore_location"]).parent
        assert (directory / "broker.pem").exists()
    assert not directory.exists()
