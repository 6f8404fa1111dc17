"""The TLS options that brokers and clients have in common, and the names of protocols and mechanisms.

The options have Kafka's names. Certificates and keys are in PEM files (KIP-651).
"""

# Tests: tests/transport/test_tls_context.py

from __future__ import annotations

from dataclasses import field
from typing import Any, Final, Literal, Protocol

from kafkalite.errors import ConfigError
from kafkalite.options import Option, OptionRegistry

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
ClientAuth = Literal["none", "requested", "required"]
CLIENT_AUTH: Final = ("none", "requested", "required")
PLAINTEXT: Final = "PLAINTEXT"
SSL: Final = "SSL"
SASL_PLAINTEXT: Final = "SASL_PLAINTEXT"
SASL_SSL: Final = "SASL_SSL"
SECURITY_PROTOCOLS: Final = (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL)
OAUTHBEARER: Final = "OAUTHBEARER"
#: The mechanisms of logins.
SASL_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN", OAUTHBEARER)
WITH_TLS: Final = frozenset({SSL, SASL_SSL})
WITH_LOGIN: Final = frozenset({SASL_PLAINTEXT, SASL_SSL})

TLS_VERSIONS: Final = ("TLSv1.2", "TLSv1.3")

TLS_OPTIONS: Final = OptionRegistry(
    (
        Option(
            "ssl.keystore.location",
            "string",
            None,
            "A PEM file with this side's private key and its certificate, followed by the certificates of"
            " intermediate authorities. It is read again when it changes.",
        ),
        Option(
            "ssl.keystore.type", "string", "PEM", "The format of ssl.keystore.location.", choices=("PEM",)
        ),
        Option(
            "ssl.key.password",
            "string",
            None,
            "The password of an encrypted private key. Never shown.",
            is_secret=True,
        ),
        Option(
            "ssl.truststore.location",
            "string",
            None,
            "A PEM file with the certificates of the authorities that this side trusts. It is read again when"
            " it changes. Unset: the authorities that the operating system trusts.",
        ),
        Option(
            "ssl.truststore.type", "string", "PEM", "The format of ssl.truststore.location.", choices=("PEM",)
        ),
        Option(
            "ssl.enabled.protocols",
            "list",
            TLS_VERSIONS,
            "The versions of TLS that may be used: TLSv1.2, TLSv1.3, or both.",
        ),
        Option(
            "ssl.endpoint.identification.algorithm",
            "string",
            "https",
            "https: the certificate of a server must have the host name or address that was dialled. Empty:"
            " any trusted certificate is accepted, so that each of its owners may act as the server.",
            choices=("https", ""),
        ),
    )
)


def check_versions(versions: tuple[str, ...], *, source: str = "") -> None:
    """Raise ConfigError unless ``versions`` are one or more of ``TLS_VERSIONS``."""
    if not versions or not set(versions) <= set(TLS_VERSIONS):
        text = ",".join(versions)
        allowed = "TLSv1.2, TLSv1.3, or both"
        raise ConfigError(key="ssl.enabled.protocols", value=text, allowed=allowed, source=source)


def tls_field(name: str) -> Any:
    """Return a dataclass field that declares the option ``name`` of ``TLS_OPTIONS``."""
    option = TLS_OPTIONS.get(name)
    return field(default=option.default, repr=not option.is_secret, metadata={"option": option})


class TlsConfig(Protocol):
    """The attributes of a config from which ``TlsContext`` builds a TLS context."""

    @property
    def ssl_keystore_location(self) -> str | None: ...
    @property
    def ssl_key_password(self) -> str | None: ...
    @property
    def ssl_truststore_location(self) -> str | None: ...
    @property
    def ssl_enabled_protocols(self) -> tuple[str, ...]: ...
    @property
    def ssl_endpoint_identification_algorithm(self) -> str: ...
