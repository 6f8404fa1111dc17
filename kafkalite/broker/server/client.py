"""A client's connection, as handlers see it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kafkalite.coordinator_types import Caller
from kafkalite.errors import TopicAuthorizationFailedError
from kafkalite.log_fields import Fields
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.cluster import ClusterProofRequest
from kafkalite.security.acls import ANONYMOUS, Authorizer, Operation, ResourceType, label, refusal_of
from kafkalite.security.sasl import Login

FULL_TEXTS: Final = 10  # refused topics of a request, or of a part of it, whose errors have all details
NOTHING_REFUSED: Final[Mapping[str, TopicAuthorizationFailedError]] = {}
_TOPIC: Final = ResourceType.TOPIC  # a constant of a module is read faster than a member of an enum

audit = logging.getLogger("kafkalite.audit")  # a line for each denied and each administrative request


class Challenge(Protocol):
    """A challenge that was sent to the node at the other end. It checks the proof that the node returns."""

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
        """The reason why the client may send only login messages now; None if it may send other requests."""
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
        """The principal without the prefix ``User:``, as quotas name it."""
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

    def refusals(
        self, api: ApiKey, operation: Operation, topics: Iterable[str]
    ) -> Mapping[str, TopicAuthorizationFailedError]:
        """Return the error of each topic on which the client may not perform the operation."""
        authorizer = self.authorizer
        if authorizer is None:
            return NOTHING_REFUSED
        principal, host = self.principal, self.host
        refused: list[str] = []
        for name in topics:  # a comprehension takes longer for one topic, as of most requests
            if not authorizer.allows(principal, host, operation, _TOPIC, name):
                refused.append(name)
        return self.deny_topics(api, operation, refused) if refused else NOTHING_REFUSED

    def deny_topics(
        self, api: ApiKey, operation: Operation, refused: Sequence[str]
    ) -> Mapping[str, TopicAuthorizationFailedError]:
        """Return the errors of topics on which the client may not perform the operation.

        A request can name thousands of topics. So the audit log gets one line for all of them, and only the
        first FULL_TEXTS errors name the topic and the command that allows the operation.
        """
        if not refused:
            return NOTHING_REFUSED
        principal = self.principal
        names = list(dict.fromkeys(refused))
        errors = {
            name: TopicAuthorizationFailedError(refusal_of(principal, operation, _TOPIC, name))
            for name in names[:FULL_TEXTS]
        }
        if len(names) > FULL_TEXTS:
            short = TopicAuthorizationFailedError(f"not allowed, like the first {FULL_TEXTS} topics")
            errors.update(dict.fromkeys(names[FULL_TEXTS:], short))
        fields = Fields(
            principal=principal,
            host=self.host,
            api=api.name,
            operation=label(operation),
            resource_type=label(_TOPIC),
            resource=refused[0],
            count=len(errors),
        )
        audit.warning("request denied %s", fields)
        return errors

    @property
    def caller(self) -> Caller:
        """The client id, the peer address and the number of the connection, for coordinators."""
        return Caller(self.client_id or "", self.peer, self.number)
