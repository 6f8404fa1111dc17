"""Builds the TLS context of a listener or of a client from its ``ssl.*`` options.

The files are read again when they change: connections made after that use the new certificates, and open
connections keep the old ones. If a changed file cannot be used, the previous context stays in use.
"""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kafkalite.errors import ConfigError
from kafkalite.log_fields import Fields
from kafkalite.tls_options import ClientAuth, TlsConfig
from kafkalite.transport.certificates import CertificateError, parse_certificate, pem_certificates

logger = logging.getLogger(__name__)

_KEYSTORE: Final = "ssl.keystore.location"
_TRUSTSTORE: Final = "ssl.truststore.location"
_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_VERIFY: Final = {"none": ssl.CERT_NONE, "requested": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class TlsContext:
    """The current TLS context of a listener or of a client. Threads may share it."""

    def __init__(self, config: TlsConfig, *, client_auth: ClientAuth | None = None) -> None:
        """``client_auth`` is the listener's ``ssl.client.auth``, and None on the side that connects."""
        self._config = config
        self._client_auth = client_auth
        self._stamp: list[tuple[str, int, int, int]] = []
        self._context: ssl.SSLContext | None = None

    def for_logins(self) -> TlsContext:
        """Return the context of a listener that requires logins: it requests no certificate from clients."""
        return TlsContext(self._config, client_auth="none")

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection, built from the present contents of the files.

        If these cannot be used, return the context of the previous call or, if there is none, raise
        ConfigError, which names the option.
        """
        stamp = self._files()
        if self._context is None:
            self._context, self._stamp = self._build(), stamp
        elif stamp != self._stamp:
            self._stamp = stamp
            try:
                self._context = self._build()
            except ConfigError as error:
                logger.error("certificates not reloaded %s", Fields(error=error))
            else:
                logger.info("certificates reloaded %s", Fields(files=",".join(path for path, *_ in stamp)))
        return self._context

    def _files(self) -> list[tuple[str, int, int, int]]:
        """Return (path, inode, size, modification time) of each file; zeros if ``stat`` fails."""
        found = []
        for path in (self._config.ssl_keystore_location, self._config.ssl_truststore_location):
            if path is not None:
                try:
                    stat = Path(path).stat()
                    found.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
                except OSError:
                    found.append((path, 0, 0, 0))
        return found

    def _build(self) -> ssl.SSLContext:
        config = self._config
        if self._client_auth is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = config.ssl_endpoint_identification_algorithm == "https"
            context.hostname_checks_common_name = False  # only subjectAltName names hosts (RFC 9525)
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = _VERIFY[self._client_auth]
            context.num_tickets = 0  # TLS 1.3: clients resume no sessions
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        versions = [_VERSIONS[name] for name in config.ssl_enabled_protocols]
        context.minimum_version, context.maximum_version = min(versions), max(versions)
        if config.ssl_keystore_location is not None:
            _load_keystore(context, config.ssl_keystore_location, config.ssl_key_password)
        if config.ssl_truststore_location is not None:
            _load_truststore(context, config.ssl_truststore_location)
        elif self._client_auth is None:
            context.load_default_certs()
        return context


def _load_keystore(context: ssl.SSLContext, path: str, password: str | None) -> None:
    pem = _read(_KEYSTORE, path)
    chain = _certificates(_KEYSTORE, path, pem, "a PEM file with a certificate")
    if b"PRIVATE KEY-----" not in pem:
        raise _refused(_KEYSTORE, path, "a PEM file that also has the private key of the certificate")
    if password is None and b"ENCRYPTED" in pem:
        raise ConfigError(
            key="ssl.key.password", value=None, allowed=f"required: the private key in {path} is encrypted"
        )
    _check_validity(path, chain[0])
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(path, password=password or "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            allowed = "a certificate, the first in the file, and the private key that belongs to it"
            raise _refused(_KEYSTORE, path, allowed) from error
        if password is not None and error.reason not in {"CA_MD_TOO_WEAK", "EE_KEY_TOO_SMALL"}:
            raise ConfigError(
                key="ssl.key.password", value=None, allowed=f"the password of the private key in {path}"
            ) from error
        raise _refused(
            _KEYSTORE, path, f"a key and certificate that OpenSSL accepts: {_words(error)}"
        ) from error


def _load_truststore(context: ssl.SSLContext, path: str) -> None:
    pem = _read(_TRUSTSTORE, path)
    trusted = _certificates(_TRUSTSTORE, path, pem, "a PEM file with certificates of authorities")
    try:
        context.load_verify_locations(cadata=b"".join(trusted))
    except ssl.SSLError as error:
        raise _refused(_TRUSTSTORE, path, f"certificates that OpenSSL accepts: {_words(error)}") from error


def _read(key: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise _refused(key, path, "a file that exists") from None
    except IsADirectoryError:
        raise _refused(key, path, "a file, not a directory") from None
    except OSError as error:
        raise _refused(key, path, f"a file that can be read: {error.strerror}") from error


def _certificates(key: str, path: str, pem: bytes, allowed: str) -> list[bytes]:
    try:
        found = pem_certificates(pem)
        if not found:
            raise _refused(key, path, allowed)
        for der in found:
            parse_certificate(der)
        return found
    except CertificateError as error:
        raise _refused(key, path, f"{allowed}: {error.message}") from None


def _check_validity(path: str, der: bytes) -> None:
    """Raise ConfigError if the certificate has expired or is not valid yet."""
    subject, start, end = parse_certificate(der)
    now = datetime.now(UTC)
    if end < now:
        allowed = f"a certificate that has not expired: that of {subject} was valid until {end:%F %T} UTC"
        raise _refused(_KEYSTORE, path, allowed)
    if start > now:
        allowed = f"a certificate that is valid already: that of {subject} is from {start:%F %T} UTC on"
        raise _refused(_KEYSTORE, path, allowed)


def _refused(key: str, path: str, allowed: str) -> ConfigError:
    return ConfigError(key=key, value=path, allowed=allowed)


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
