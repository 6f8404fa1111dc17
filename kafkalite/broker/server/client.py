"""A client's connection, as handlers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kafkalite.coordinator_types import Caller
from kafkalite.protocol.messages.cluster import ClusterProofRequest


class Challenge(Protocol):
    """A challenge that was sent to the node at the other end, and that checks the node's proof."""

    node_id: int

    def is_met_by(self, request: ClusterProofRequest, /) -> bool: ...


@dataclass(slots=True)
class Client:
    """The client at the other end of a connection, and the identity that it has proved."""

    peer: str  #: for logs: "127.0.0.1:53712" or "inproc"
    address: str  #: the address of this broker that the client used
    client_id: str | None = None
    listener: int = 0  #: the number of the listener that accepted the connection
    node_id: int | None = None  #: the cluster node that the client has proved to be
    challenge: Challenge | None = None  #: the challenge that the next proof must match
    is_session: bool = False  #: whether this connection received a broker's newest heartbeat

    @property
    def caller(self) -> Caller:
        """The client id and host, as coordinators store them."""
        return Caller(self.client_id or "", self.peer)
