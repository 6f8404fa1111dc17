"""The Transport interface, which opens and accepts byte streams.

Each end of a stream has an ``asyncio.BufferedProtocol``, which receives the bytes. ``tcp`` uses the network;
``inproc`` connects two protocols of one process without a socket; ``tls`` encrypts the streams of another
transport.
"""

from __future__ import annotations

from collections.abc import Callable

from kafkalite.transport.seam import Listener as Listener
from kafkalite.transport.seam import ProtocolFactory as ProtocolFactory
from kafkalite.transport.seam import Transport as Transport

__all__ = [
    "INPROC_SCHEME",
    "SASL_PLAINTEXT_SCHEME",
    "SASL_SSL_SCHEME",
    "SSL_SCHEME",
    "Listener",
    "ProtocolFactory",
    "Transport",
    "has_own_name",
    "is_tls",
    "needs_login",
    "register_scheme",
    "security_scheme",
    "transport_for",
    "without_security",
]

INPROC_SCHEME = "inproc://"
#: Begins the address of a listener that speaks TLS, as in Kafka's ``listeners``.
SSL_SCHEME = "SSL://"
#: Begin the addresses of listeners that require a login, with TLS and in plain text.
SASL_SSL_SCHEME = "SASL_SSL://"
SASL_PLAINTEXT_SCHEME = "SASL_PLAINTEXT://"


def _inproc() -> Transport:
    from kafkalite.transport.inproc import InprocTransport

    return InprocTransport()


_factories: dict[str, Callable[[], Transport]] = {INPROC_SCHEME: _inproc}


def register_scheme(scheme: str, factory: Callable[[], Transport]) -> None:
    """Let ``factory`` make the transport of each address that begins with ``scheme``, such as ``sim://``."""
    assert scheme.endswith("://"), scheme
    _factories[scheme] = factory


def has_own_name(address: str) -> bool:
    """Whether ``address`` begins with a registered scheme, such as ``inproc://``."""
    return any(address.startswith(scheme) for scheme in _factories)


def is_tls(address: str) -> bool:
    """Whether the listener at ``address`` speaks TLS: it begins with ``SSL://`` or ``SASL_SSL://``."""
    return address.startswith((SSL_SCHEME, SASL_SSL_SCHEME))


def needs_login(address: str) -> bool:
    """Whether the listener at ``address`` requires a login: it begins with ``SASL_...://``."""
    return address.startswith((SASL_SSL_SCHEME, SASL_PLAINTEXT_SCHEME))


def security_scheme(address: str) -> str:
    """Return the prefix ``SSL://``, ``SASL_SSL://`` or ``SASL_PLAINTEXT://`` of ``address``, or ""."""
    schemes = (SSL_SCHEME, SASL_SSL_SCHEME, SASL_PLAINTEXT_SCHEME)
    return next((scheme for scheme in schemes if address.startswith(scheme)), "")


def without_security(address: str) -> str:
    """Return ``address`` without its ``security_scheme``, as transports expect it."""
    return address.removeprefix(security_scheme(address))


def transport_for(address: str) -> Transport:
    """Return the transport of the registered scheme that begins ``address``, or TCP if none does."""
    for scheme, factory in _factories.items():
        if address.startswith(scheme):
            return factory()
    from kafkalite.transport.tcp import TcpTransport

    return TcpTransport()
