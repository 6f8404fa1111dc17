"""Contexts of TLS: every unusable file has an error that names it, and changed files are read again."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kafkalite.errors import ConfigError
from kafkalite.tls_options import ClientAuth
from kafkalite.transport.dev_certificates import DevAuthority
from kafkalite.transport.tls_context import TlsContext
from proof.certificates import DevCertificates


def problem(certificates: DevCertificates, keystore: Path | None = None, **settings: Any) -> str:
    """Return the error of a listener's context."""
    config = certificates.config(str(keystore or "broker.pem"), **settings)
    with pytest.raises(ConfigError) as caught:
        TlsContext(config, client_auth="none").current()
    return caught.value.message


def test_unusable_keystores_are_named(dev_certificates: DevCertificates, tmp_path: Path) -> None:
    pem = (dev_certificates / "broker.pem").read_bytes()
    key, _, rest = pem.partition(b"-----BEGIN CERTIFICATE-----")
    chain = b"-----BEGIN CERTIFICATE-----" + rest
    other_key = (dev_certificates / "client.pem").read_bytes().partition(b"-----BEGIN CERTIFICATE-----")[0]
    path = tmp_path / "keystore.pem"
    begin = f"ssl.keystore.location is '{path}', but must be"
    assert problem(dev_certificates, path) == f"{begin} a file that exists"
    assert problem(dev_certificates, tmp_path).endswith("but must be a file, not a directory")
    for content, words in (
        (b"\x00\x01binary", "a PEM file with a certificate"),
        (key, "a PEM file with a certificate"),
        (chain, "a PEM file that also has the private key of the certificate"),
        (other_key + chain, "a certificate, the first in the file, and the private key that belongs to it"),
        (key + b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n", "not an X.509 certificate"),
        (key[:60] + b"!" + key[61:] + chain, "a key and certificate that OpenSSL accepts"),
    ):
        path.write_bytes(content)
        message = problem(dev_certificates, path)
        assert message.startswith(begin)
        assert words in message


def test_an_expired_certificate_is_refused_before_clients_refuse_it(
    dev_certificates: DevCertificates,
) -> None:
    path = dev_certificates.issue("expired.pem", not_after=datetime(2020, 2, 3, 4, 5, 6, tzinfo=UTC))
    assert problem(dev_certificates, path) == (
        f"ssl.keystore.location is '{path}', but must be a certificate that has not expired: that of"
        " CN=broker,O=kafkalite development was valid until 2020-02-03 04:05:06 UTC"
    )


def test_a_certificate_of_the_future_is_refused(dev_certificates: DevCertificates) -> None:
    path = dev_certificates.issue("future.pem", not_before=datetime(2990, 1, 1, tzinfo=UTC), days=500_000)
    assert "that of CN=broker,O=kafkalite development is from 2990-01-01 00:00:00 UTC on" in problem(
        dev_certificates, path
    )


def test_the_password_of_an_encrypted_key(dev_certificates: DevCertificates) -> None:
    path = dev_certificates.issue("encrypted.pem", password="correct horse")
    required = f"ssl.key.password: required: the private key in {path} is encrypted"
    assert problem(dev_certificates, path) == required
    wrong = problem(dev_certificates, path, ssl_key_password="wrong battery")
    assert wrong == f"ssl.key.password: the password of the private key in {path}"
    config = dev_certificates.config(str(path), ssl_key_password="correct horse")
    assert "correct horse" not in repr(config)
    assert TlsContext(config, client_auth="none").current()


def test_unusable_truststores_are_named(dev_certificates: DevCertificates, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    begin = f"ssl.truststore.location is '{path}', but must be"
    assert problem(dev_certificates, ssl_truststore_location=str(path)) == f"{begin} a file that exists"
    path.write_text("not a certificate")
    message = problem(dev_certificates, ssl_truststore_location=str(path))
    assert message == f"{begin} a PEM file with certificates of authorities"


@pytest.mark.parametrize(
    ("client_auth", "mode"),
    [("none", ssl.CERT_NONE), ("requested", ssl.CERT_OPTIONAL), ("required", ssl.CERT_REQUIRED)],
)
def test_what_a_listener_demands(
    dev_certificates: DevCertificates, client_auth: ClientAuth, mode: ssl.VerifyMode
) -> None:
    config = dev_certificates.config("broker.pem", ssl_enabled_protocols="TLSv1.3")
    context = TlsContext(config, client_auth=client_auth).current()
    assert context.verify_mode is mode
    assert (context.minimum_version, context.maximum_version) == (ssl.TLSVersion.TLSv1_3,) * 2


def test_what_a_client_demands(dev_certificates: DevCertificates) -> None:
    """S6: TLS 1.2 or newer, a trusted certificate, and the host's name, unless that is switched off."""
    context = TlsContext(dev_certificates.config()).current()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    config = dev_certificates.config(ssl_endpoint_identification_algorithm="")
    context = TlsContext(config).current()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)


def test_changed_files_are_read_again(dev_certificates: DevCertificates, tmp_path: Path) -> None:
    keystore, truststore = tmp_path / "broker.pem", tmp_path / "ca.pem"
    keystore.write_bytes((dev_certificates / "broker.pem").read_bytes())
    truststore.write_bytes(dev_certificates.authority.pem)
    config = dev_certificates.config(str(keystore), ssl_truststore_location=str(truststore))
    tls = TlsContext(config, client_auth="required")
    first = tls.current()
    assert tls.current() is first
    keystore.write_bytes(
        dev_certificates.authority.issue("renewed", not_after=datetime.now(UTC) + timedelta(9))
    )
    second = tls.current()
    assert second is not first
    truststore.write_bytes(DevAuthority.create().pem)
    assert tls.current() is not second


def test_unusable_new_files_leave_the_old_certificates(
    dev_certificates: DevCertificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keystore = tmp_path / "broker.pem"
    good = (dev_certificates / "broker.pem").read_bytes()
    keystore.write_bytes(good)
    tls = TlsContext(dev_certificates.config(str(keystore)), client_auth="none")
    first = tls.current()
    keystore.write_bytes(good[:300])
    with caplog.at_level(logging.ERROR):
        assert tls.current() is first
        assert tls.current() is first
    assert len(caplog.records) == 1, "logged once, not for every connection"
    assert f"ssl.keystore.location is '{keystore}'" in caplog.text
    keystore.unlink()
    assert tls.current() is first
    keystore.write_bytes(good)
    assert tls.current() is not first
