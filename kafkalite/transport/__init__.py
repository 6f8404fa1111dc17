"""The Transport seam: how byte streams are opened and accepted.

Shells speak to this interface and never to sockets: a protocol object is connected, and receives through
``get_buffer`` and ``buffer_updated`` whatever carries the bytes. ``tcp`` is the network, ``inproc``
joins two protocols in one process without a socket.
"""

from __future__ import annotations

from kafkalite.transport.seam import Listener as Listener
from kafkalite.transport.seam import ProtocolFactory as ProtocolFactory
from kafkalite.transport.seam import Transport as Transport

__all__ = ["INPROC_SCHEME", "Listener", "ProtocolFactory", "Transport", "transport_for"]

INPROC_SCHEME = "inproc://"


def transport_for(address: str) -> Transport:
    """The transport that understands ``address``: ``inproc://name``, or ``host:port`` over TCP."""
    if address.startswith(INPROC_SCHEME):
        from kafkalite.transport.inproc import InprocTransport

        return InprocTransport()
    from kafkalite.transport.tcp import TcpTransport

    return TcpTransport()
