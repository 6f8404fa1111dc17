"""One connection of a client, as the handlers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kafkalite.coordinator_types import Caller
from kafkalite.protocol.messages.cluster import ClusterProofRequest


class Challenge(Protocol):
    """The proof that a node must send next."""

    node_id: int

    def is_met_by(self, request: ClusterProofRequest, /) -> bool: ...


@dataclass(slots=True)
class Client:
    """The peer of one connection, and the identity that it has proved."""

    peer: str  #: for logs: "127.0.0.1:53712" or "inproc"
    address: str  #: this broker's address as the client used it
    client_id: str | None = None
    listener: int = 0  #: the number of the listener that accepted the connection
    node_id: int | None = None  #: the node of the cluster that it has proved to be
    challenge: Challenge | None = None  #: the challenge that the next proof must match
    is_session: bool = False  #: whether a broker's heartbeats arrive here, and on no later connection

    @property
    def caller(self) -> Caller:
        """The client as a coordinator sees it."""
        return Caller(self.client_id or "", self.peer)
