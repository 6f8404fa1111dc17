"""kl over SASL_SSL with passwords and tokens, and over mutual TLS; errors of refused commands (S6, S7)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kafkalite import sync
from proof.certificates import DevCertificates
from proof.token_issuer import Issuer

PASSWORD = "correct horse battery staple"


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def broker(
    dev_certificates: DevCertificates, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sync.Broker]:
    """A broker with a listener for logins, one for certificates, and one in the process."""
    key_set = tmp_path_factory.mktemp("issuer") / "jwks.json"
    key_set.write_bytes(issuer.key_set)
    settings = {
        "listeners": "SASL_SSL://127.0.0.1:0,SSL://127.0.0.1:0,inproc://kl-secured",
        "ssl_client_auth": "required",
        "sasl_enabled_mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN,OAUTHBEARER",
        "sasl_oauthbearer_jwks_endpoint_url": str(key_set),
        "connection_failed_authentication_delay_ms": 1,
    }
    with sync.Broker(**dev_certificates.broker(**settings) | settings) as broker:
        with sync.Admin("inproc://kl-secured") as admin:
            admin.set_user_password("alice", PASSWORD, iterations=4_096)
        yield broker


class Command:
    """Runs kl with client settings in the environment, as their values are not for a command line."""

    def __init__(self, kl: Any, address: str, patch: pytest.MonkeyPatch) -> None:
        self._kl = kl
        self._patch = patch
        patch.setenv("KL_BOOTSTRAP_SERVERS", address)

    def set(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            self._patch.setenv(f"KAFKALITE_CLIENT_{name.upper()}", str(value))

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Any:
        return self._kl(*arguments, stdin=stdin)

    def refused(self) -> list[str]:
        """Return the lines of the error of a command, without those that the broker logs in this process."""
        begun = time.monotonic()
        done = self("topic", "list", "--timeout", "120s")
        assert done.code == 6
        assert time.monotonic() - begun < 60, "it is final, so it is not retried"
        told = [
            line
            for line in re.sub(r"(?<!\n)kl: ", r"\nkl: ", done.told).splitlines()
            if " peer=" not in line and " host=" not in line
        ]
        return [line for line in told if line.startswith(("kl:", "    hint:"))]


@pytest.fixture
def login(
    kl: Any, broker: sync.Broker, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> Command:
    command = Command(kl, broker.addresses[0], monkeypatch)
    user = {"security_protocol": "SASL_SSL", "sasl_username": "alice", "sasl_password": PASSWORD}
    command.set(dev_certificates.client(**user) | user)
    return command


@pytest.fixture
def certificate(
    kl: Any, broker: sync.Broker, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> Command:
    command = Command(kl, broker.addresses[1], monkeypatch)
    command.set(dev_certificates.client("client.pem"))
    return command


def use(command: Command, topic: str) -> None:
    assert command("topic", "create", topic).code == 0
    assert command("produce", topic, stdin=b"one\ntwo\n").code == 0
    assert command("consume", topic, "-e", "-f", "%s,").text == "one,two,"
    assert (
        command("consume", topic, "-g", f"{topic}-group", "--from-beginning", "-n", "1", "-f", "%s").text
        == "one"
    )
    assert topic in command("topic", "list").text


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
def test_commands_over_tls_with_a_password(login: Command, mechanism: str) -> None:
    login.set({"sasl_mechanism": mechanism})
    use(login, f"by-{mechanism}")


def test_commands_over_tls_with_a_token(login: Command, issuer: Issuer, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(issuer.token())
    login.set({"sasl_mechanism": "OAUTHBEARER", "sasl_oauthbearer_token_endpoint_url": file})
    use(login, "by-token")
    expired = issuer.token(exp=1)
    file.write_text(expired)
    (line, hint) = login.refused()
    assert "the token is refused: it expired" in line and expired not in line
    assert hint == "    hint: check sasl.username and sasl.password, or the token"


def test_commands_over_mutual_tls(certificate: Command) -> None:
    use(certificate, "by-certificate")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sasl_password": "hunter-two"},
        {"sasl_username": "nobody"},
        {"sasl_mechanism": "PLAIN", "sasl_password": "hunter-two"},
    ],
)
def test_a_wrong_password_is_one_error(login: Command, broker: sync.Broker, wrong: dict[str, str]) -> None:
    login.set(wrong)
    address = broker.addresses[0]
    assert login.refused() == [
        f"kl: {address}: authentication failed: unknown user, or wrong password",
        "    hint: check sasl.username and sasl.password, or the token",
    ]


def test_a_listener_for_logins_names_the_setting_that_is_missing(
    login: Command, dev_certificates: DevCertificates
) -> None:
    login.set({"security_protocol": "SSL"})
    assert any("set security.protocol of the client to SASL_SSL" in line for line in login.refused())


def test_a_certificate_for_another_host_is_one_error(
    kl: Any, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev_certificates.issue("elsewhere.pem", hosts=["elsewhere.example"])
    with sync.Broker(**dev_certificates.broker("elsewhere.pem")) as broker:
        command = Command(kl, broker.address, monkeypatch)
        command.set(dev_certificates.client())
        (line, *_) = command.refused()
    assert line.startswith(f"kl: cannot connect to {broker.address}: the server's certificate is refused:")
    assert "certificate is not valid for '127.0.0.1'" in line


def test_a_certificate_that_expires_is_one_error(
    kl: Any, dev_certificates: DevCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker refuses to start with an expired one, so this one expires while it runs."""
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
    dev_certificates.issue("short.pem", not_after=end)
    with sync.Broker(**dev_certificates.broker("short.pem")) as broker:
        command = Command(kl, broker.address, monkeypatch)
        command.set(dev_certificates.client())
        assert command("topic", "list").code == 0
        while datetime.now(UTC) <= end + timedelta(seconds=1):
            time.sleep(0.05)
        (line, *_) = command.refused()
    assert (
        line == f"kl: cannot connect to {broker.address}: the server's certificate is refused: it has expired"
    )


def test_an_expired_certificate_of_the_client_is_one_error(
    certificate: Command, dev_certificates: DevCertificates
) -> None:
    gone = dev_certificates.issue("expired-client.pem", not_after=datetime.now(UTC) - timedelta(days=1))
    certificate.set({"ssl_keystore_location": gone})
    done = certificate("topic", "list")
    (line,) = [line for line in done.told.splitlines() if line.startswith("kl:")]
    assert "ssl.keystore.location" in line and "expired" in line
