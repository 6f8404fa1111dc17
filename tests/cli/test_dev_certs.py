"""``kl tls dev-certs``, and kl commands over TLS and with a login: by -X, the environment, a context."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalite import sync
from proof.certificates import DevCertificates


@pytest.fixture(scope="module")
def secured(dev_certificates: DevCertificates) -> Iterator[sync.Broker]:
    with sync.Broker(**dev_certificates.broker(ssl_client_auth="required")) as broker:
        yield broker


def options(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-X", f"{name.replace('_', '.')}={value}")]


def test_the_printed_settings_are_those_that_work(kl: Any, tmp_path: Path, repository: Path) -> None:
    directory = tmp_path / "certificates"
    done = kl("tls", "dev-certs", directory, "--server", "node1", "--client", "alice", "--days", "9")
    assert done.code == 0
    assert sorted(path.name for path in directory.iterdir()) == [
        "alice.pem", "ca-key.pem", "ca.pem", "node1.pem"
    ]  # fmt: skip
    printed = done.text.split()
    server = dict(word.split("=", 1) for word in printed if word.startswith(("ssl.", "listeners=")))
    server["listeners"] = "SSL://localhost:0"
    server["ssl.keystore.location"] = str(directory / "node1.pem")
    with sync.Broker(**{name.replace(".", "_"): value for name, value in server.items()}) as broker:
        start = printed.index("-X")
        command = [word for word in printed[start:] if word != "\\"]
        assert kl("-b", broker.address, *command).code == 0
        assert kl("-b", broker.address, "topic", "list").code == 3


def test_a_new_authority_is_valid_as_long_as_its_certificates(kl: Any, tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    assert kl("tls", "dev-certs", tmp_path, "--server", "node1", "--days", "3650").code == 0
    authority, node = (
        x509.load_pem_x509_certificate(
            (tmp_path / name).read_bytes().partition(b"-----BEGIN CERT")[1]
            + (tmp_path / name).read_bytes().partition(b"-----BEGIN CERT")[2]
        )
        for name in ("ca.pem", "node1.pem")
    )
    assert authority.not_valid_after_utc >= node.not_valid_after_utc


def test_without_the_package_one_sentence(kl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    done = kl("tls", "dev-certs", tmp_path)
    assert done.code == 1
    assert done.told.splitlines() == [
        "kl: making certificates needs the package cryptography, which is not installed",
        "    hint: pip install 'kafkalite[tls]'",
    ]


def test_commands_over_tls_by_options(
    kl: Any, secured: sync.Broker, dev_certificates: DevCertificates
) -> None:
    ssl = options(dev_certificates.client("client.pem"))
    at = ("-b", secured.address, *ssl)
    assert kl("produce", "by-options", *at, stdin=b"hello\n").code == 0
    assert kl("consume", "by-options", "-e", "-f", "%s", *at).text == "hello"
    assert kl("cluster", "wait", "--timeout", "10s", *at).code == 0
    assert kl("cluster", "status", *at).code == 0


def test_commands_over_tls_by_the_environment(
    kl: Any, secured: sync.Broker, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in dev_certificates.client("client.pem").items():
        monkeypatch.setenv(f"KAFKALITE_CLIENT_{name.upper()}", value)
    monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", secured.address)
    assert kl("topic", "list").code == 0
    done = kl("topic", "list", "-X", "security.protocol=PLAINTEXT")
    assert done.code == 3, "-X overrides the environment"
    assert "the peer speaks TLS" in done.told


def test_commands_over_tls_by_a_context(
    kl: Any, secured: sync.Broker, dev_certificates: DevCertificates
) -> None:
    ssl = options(dev_certificates.client("client.pem"))
    assert kl("context", "add", "secured", "-b", secured.address, *ssl).code == 0
    assert kl("topic", "list").code == 0


def test_errors_of_certificates(kl: Any, secured: sync.Broker, dev_certificates: DevCertificates) -> None:
    anonymous = kl("topic", "list", "-b", secured.address, *options(dev_certificates.client()))
    assert anonymous.code == 6
    # The broker logs in this process, to the same stderr.
    assert [line for line in anonymous.told.splitlines() if "TLS handshake failed" not in line] == [
        f"kl: {secured.address}: the server refuses: it requires a certificate",
        "    hint: set ssl.keystore.location",
    ]
    missing = dev_certificates.client(ssl_truststore_location="missing.pem")
    done = kl("topic", "list", "-b", secured.address, *options(missing))
    assert "kl: ssl.truststore.location is 'missing.pem', but must be a file that exists" in done.told


def test_a_node_waits_for_itself_over_tls(
    kl: Any, secured: sync.Broker, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As health checks do: the settings are those of the node, also its certificates."""
    monkeypatch.setenv("KAFKALITE_LISTENERS", f"SSL://{secured.address}")
    for name, value in dev_certificates.ssl("broker.pem").items():
        monkeypatch.setenv(f"KAFKALITE_{name.upper()}", value)
    assert kl("cluster", "wait", "--this-node", "--timeout", "10s").code == 0


def test_commands_log_in_by_the_environment(
    kl: Any, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = "SASL_SSL://127.0.0.1:0,inproc://commands-log-in"
    with sync.Broker(**dev_certificates.broker() | {"listeners": listeners}) as broker:
        with sync.Admin("inproc://commands-log-in") as admin:
            admin.set_user_password("alice", "hunter-two", mechanisms=["SCRAM-SHA-512"], iterations=4_096)
        monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", broker.bootstrap_servers.split(",")[0])
        login = {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": "hunter-two"}
        for name, value in dev_certificates.client(**login).items():
            monkeypatch.setenv(f"KAFKALITE_CLIENT_{name.upper()}", value)
        assert kl("topic", "list").code == 0
        monkeypatch.setenv("KAFKALITE_CLIENT_SASL_PASSWORD", "hunter-three")
        done = kl("topic", "list", "--debug")
        assert done.code == 6
        assert "wrong password" in done.told
        assert "hunter" not in done.told
        monkeypatch.delenv("KAFKALITE_CLIENT_SASL_PASSWORD")
        done = kl("topic", "list")
        assert (done.code, done.told.partition(":")[2].partition(":")[0]) == (2, " sasl.password")


@pytest.mark.parametrize("variable", ["SECURITY_PROTOCOL", "SASL_USERNAME", "SASL_PASSWORD"])
def test_a_variable_of_security_without_client_in_its_name_is_refused(
    kl: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A command that ignored it would connect in plain text."""
    monkeypatch.setenv(f"KAFKALITE_{variable}", "SASL_SSL")
    done = kl("topic", "list", "-b", "127.0.0.1:1")
    assert done.code == 2
    why = f"no client reads this variable; did you mean KAFKALITE_CLIENT_{variable}?"
    assert done.told == f"kl: KAFKALITE_{variable}: {why}\n"
