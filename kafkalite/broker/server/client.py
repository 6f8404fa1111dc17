"""A client's connection, as handlers see it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kafkalite.coordinator_types import Caller
from kafkalite.errors import TopicAuthorizationFailedError
from kafkalite.log_fields import Fields
from kafkalite.protocol.messages.cluster import ClusterProofRequest
from kafkalite.security.acls import ANONYMOUS, Authorizer, Operation, ResourceType, label, refusal_of
from kafkalite.security.sasl import Login

audit = logging.getLogger("kafkalite.audit")  # a line for each denied and each administrative request


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
    principal: str = ANONYMOUS  #: who the client has proved to be, such as ``User:alice``; its quotas apply
    listener: int = 0  #: the number of the listener that accepted the connection
    node_id: int | None = None  #: the cluster node that the client has proved to be
    login: Login | None = None  #: None if the listener requires no login
    on_authenticated: Callable[[], None] | None = None  #: called after each login, and each proof of a node
    challenge: Challenge | None = None  #: the challenge that the next proof must match
    number: int = 0  #: of the connection; increases with each connection that this broker accepts
    is_session: bool = False  #: whether this connection received a broker's newest heartbeat
    #: By topic and partition: the end of the records that were last sent on this connection.
    sent_ends: dict[tuple[str, int], int] = field(default_factory=dict)
    #: Decides what the client may do. None allows everything: no authorizer is set, or the client is a node.
    authorizer: Authorizer | None = None
    host: str = field(init=False)  #: the client's IP address, as rules name it; ``inproc`` within the process

    def __post_init__(self) -> None:
        self.host = self.peer.rpartition(":")[0].strip("[]").removesuffix("://") or self.peer

    @property
    def login_problem(self) -> str | None:
        """Why the client may send nothing but messages of a login now; None if it may."""
        return None if self.login is None or self.node_id is not None else self.login.problem

    def authenticate(self, *, principal: str | None = None, node_id: int | None = None) -> None:
        """Record who the client has proved to be: a principal, or a node of the cluster."""
        if principal is not None:
            self.principal = principal
        if node_id is not None:
            self.node_id = node_id
        if self.on_authenticated is not None:
            self.on_authenticated()

    @property
    def user(self) -> str:
        """The name of the principal, as quotas name it."""
        return self.principal.removeprefix("User:")

    def allows(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Whether the client may perform the operation on the resource."""
        authorizer = self.authorizer
        return authorizer is None or authorizer.allows(
            self.principal, self.host, operation, resource_type, name
        )

    def allows_on_any(self, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether the client may perform the operation on at least one resource of this type."""
        authorizer = self.authorizer
        return authorizer is None or authorizer.allows_on_any(
            self.principal, self.host, operation, resource_type
        )

    def check(self, operation: Operation, topic: str) -> None:
        """Raise TopicAuthorizationFailedError unless the client may perform the operation on the topic."""
        if not self.allows(operation, ResourceType.TOPIC, topic):
            fields = Fields(
                principal=self.principal,
                host=self.host,
                operation=label(operation),
                resource_type=label(ResourceType.TOPIC),
                resource=topic,
            )
            audit.warning("request denied %s", fields)
            raise TopicAuthorizationFailedError(
                refusal_of(self.principal, operation, ResourceType.TOPIC, topic)
            )

    @property
    def caller(self) -> Caller:
        """The client id, the host and the number of the connection, as coordinators receive them."""
        return Caller(self.client_id or "", self.peer, self.number)
