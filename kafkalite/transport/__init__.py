"""The Transport interface, which opens and accepts byte streams.

I/O code uses this interface and never sockets. A protocol object is connected and receives bytes through
``get_buffer`` and ``buffer_updated``. ``tcp`` is the network; ``inproc`` joins two protocols in one process
without a socket.
"""

from __future__ import annotations

from collections.abc import Callable

from kafkalite.transport.seam import Listener as Listener
from kafkalite.transport.seam import ProtocolFactory as ProtocolFactory
from kafkalite.transport.seam import Transport as Transport

__all__ = [
    "INPROC_SCHEME",
    "Listener",
    "ProtocolFactory",
    "Transport",
    "has_own_name",
    "register_scheme",
    "transport_for",
]

INPROC_SCHEME = "inproc://"


def _inproc() -> Transport:
    from kafkalite.transport.inproc import InprocTransport

    return InprocTransport()


_factories: dict[str, Callable[[], Transport]] = {INPROC_SCHEME: _inproc}


def register_scheme(scheme: str, factory: Callable[[], Transport]) -> None:
    """Let ``factory`` create the transport of every address that begins with ``scheme`` (``sim://``)."""
    assert scheme.endswith("://"), scheme
    _factories[scheme] = factory


def has_own_name(address: str) -> bool:
    """Whether ``address`` has a registered scheme, so that it is a name instead of a host and port."""
    return any(address.startswith(scheme) for scheme in _factories)


def transport_for(address: str) -> Transport:
    """Return the transport for ``address``: that of a registered scheme, or TCP for ``host:port``."""
    for scheme, factory in _factories.items():
        if address.startswith(scheme):
            return factory()
    from kafkalite.transport.tcp import TcpTransport

    return TcpTransport()
