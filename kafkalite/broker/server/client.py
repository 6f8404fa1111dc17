"""A client's connection, as handlers see it."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    number: int = 0  #: of the connection; increases with each connection that this broker accepts
    is_session: bool = False  #: whether this connection received a broker's newest heartbeat
    #: By topic and partition: the end of the records that were last sent on this connection.
    sent_ends: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def caller(self) -> Caller:
        """The client id, the host and the number of the connection, as coordinators receive them."""
        return Caller(self.client_id or "", self.peer, self.number)
