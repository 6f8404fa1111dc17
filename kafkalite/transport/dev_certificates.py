"""Issues certificates for development and tests: an authority, and certificates of servers and clients.

Needs the package ``cryptography``. The authority's key is in the same directory as the certificates, and
anybody who can read it can issue certificates. In production, use the authority of your organisation.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

from kafkalite.errors import ConfigError, MissingExtraError

CA_CERTIFICATE: Final = "ca.pem"
CA_KEY: Final = "ca-key.pem"
DAYS: Final = 365
_ORGANIZATION: Final = "kafkalite development"
#: Certificates are valid from an hour ago, for machines whose clocks are late.
_EARLY: Final = timedelta(hours=1)


class DevAuthority:
    """A certificate authority for development, with its key in memory."""

    def __init__(self, key: Any, certificate: Any) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls, *, days: int = DAYS) -> Self:
        """Return a new authority. Raises MissingExtraError."""
        x509, ec, _ = _cryptography()
        key = ec.generate_private_key(ec.SECP256R1())
        # Two authorities with the same name could not be told apart in a trust store.
        name = _name(x509, f"kafkalite development CA {secrets.token_hex(4)}")
        builder = _builder(x509, name, name, key, *_validity(days)).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        return cls(
            key, builder.add_extension(_key_usage(x509, is_ca=True), critical=True).sign(key, _sha256())
        )

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Return the authority that ``write`` stored in ``directory``.

        Raises MissingExtraError, and ConfigError if the authority is missing or cannot be read.
        """
        x509, _, serialization = _cryptography()
        try:
            key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), None)
            return cls(key, x509.load_pem_x509_certificate((directory / CA_CERTIFICATE).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            allowed = f"a directory with {CA_CERTIFICATE} and {CA_KEY} of 'kl tls dev-certs': {error}"
            raise ConfigError(key="directory", value=str(directory), allowed=allowed) from error

    @property
    def pem(self) -> bytes:
        """The authority's certificate, for ``ssl.truststore.location``."""
        _, _, serialization = _cryptography()
        pem: bytes = self._certificate.public_bytes(serialization.Encoding.PEM)
        return pem

    def write(self, directory: Path) -> None:
        _write(directory / CA_KEY, _private_pem(self._key, None))
        _write(directory / CA_CERTIFICATE, self.pem, mode=0o644)

    def issue(
        self,
        common_name: str,
        hosts: Iterable[str] = (),
        *,
        days: int = DAYS,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
        password: str | None = None,
    ) -> bytes:
        """Return a new private key, its certificate and the authority's certificate in one PEM text.

        The text is the contents of a file for ``ssl.keystore.location``. The certificate is valid for servers
        and clients, because a node is both. ``hosts`` are the names and addresses under which a server is
        reached. The certificate expires after ``days``, or at ``not_after``. ``password`` encrypts the key.
        """
        x509, ec, serialization = _cryptography()
        key = ec.generate_private_key(ec.SECP256R1())
        start, end = _validity(days)
        if not_after is not None:
            start, end = min(start, not_after - timedelta(days=1)), not_after
        start = not_before or start
        purposes = [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(x509, _name(x509, common_name), self._certificate.subject, key, start, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(x509, is_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        names = [_host(x509, host) for host in hosts]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate: bytes = builder.sign(self._key, _sha256()).public_bytes(serialization.Encoding.PEM)
        return _private_pem(key, password) + certificate + self.pem


def make_dev_certificates(
    directory: Path, servers: Iterable[str], clients: Iterable[str], hosts: Iterable[str], *, days: int = DAYS
) -> dict[str, Path]:
    """Write an authority and certificates into ``directory``. Return {common name: path of its keystore}.

    If ``directory`` already has an authority, that one issues the certificates. Existing certificates of the
    same names are replaced. The certificate of each server is valid for the server's name and all ``hosts``.
    ``days`` is the validity of the certificates. A new authority is valid for at least as long, and for at
    least DAYS. Raises MissingExtraError, ConfigError, OSError.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (directory / CA_KEY).exists():
        authority = DevAuthority.read(directory)
    else:
        authority = DevAuthority.create(days=max(days, DAYS))
        authority.write(directory)
    written: dict[str, Path] = {}
    hosts = tuple(hosts)
    for name, names in [*((one, (one, *hosts)) for one in servers), *((one, ()) for one in clients)]:
        written[name] = directory / f"{name}.pem"
        _write(written[name], authority.issue(name, dict.fromkeys(names), days=days))
    return written


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtraError("making certificates", "cryptography", "tls") from error
    return x509, ec, serialization


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _name(x509: Any, common_name: str) -> Any:
    oid = x509.oid.NameOID
    return x509.Name(
        [
            x509.NameAttribute(oid.ORGANIZATION_NAME, _ORGANIZATION),
            x509.NameAttribute(oid.COMMON_NAME, common_name),
        ]
    )


def _validity(days: int) -> tuple[datetime, datetime]:
    now = datetime.now(UTC)
    return now - _EARLY, now + timedelta(days=days)


def _builder(x509: Any, subject: Any, issuer: Any, key: Any, start: datetime, end: datetime) -> Any:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(x509: Any, *, is_ca: bool) -> Any:
    unused = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    signs = {"digital_signature": True, "key_cert_sign": is_ca, "crl_sign": is_ca}
    return x509.KeyUsage(**unused, **signs, encipher_only=False, decipher_only=False)


def _host(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: Any, password: str | None) -> bytes:
    _, _, serialization = _cryptography()
    encryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password.encode())
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    return pem


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the file atomically, so that a process that reloads it never reads a part of it."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    new.replace(path)
