"""The permissions that each request needs, in one table (S9). ``docs/authorization.md`` shows it.

A request is refused as a whole if the client lacks one of the permissions that it needs. There is one
exception: if a topic in Produce, Fetch or Metadata is not allowed, the response has an error for that topic
only. Lists in some responses, such as that of all groups, omit the items that the client may not describe. A
request of an API without an entry is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from kafkalite.errors import ErrorCode
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.metadata import MetadataRequest
from kafkalite.security.acls import CLUSTER_NAME, WILDCARD, Operation, ResourceType

TOPIC, GROUP, USER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.USER
CLUSTER, TRANSACTIONAL_ID = ResourceType.CLUSTER, ResourceType.TRANSACTIONAL_ID
_Op = Operation
#: The number of names that are decided before other connections are served: about two ms (S24).
NAMES_PER_TURN: Final = 500

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Returns a T after steps of at most NAMES_PER_TURN names. Most requests take one."""

#: The error of a request that is not allowed, by the type of the first resource that is refused.
ERRORS: Final[Mapping[ResourceType, ErrorCode]] = MappingProxyType(
    {
        TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
        TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ResourceType.USER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    }
)


class Access(Protocol):
    """What one client may do."""

    def allows(self, operation: Operation, resource_type: ResourceType, name: str, /) -> bool: ...

    def allows_on_any(self, operation: Operation, resource_type: ResourceType, /) -> bool:
        """Whether the operation is allowed on at least one resource of this type."""
        ...


class Need(NamedTuple):
    """An operation on the resources that a request names."""

    operation: Operation
    resource_type: ResourceType
    names: Callable[[Any], Iterable[str]]  #: the names in a request
    where: str  #: of the names, for people
    #: Suffices instead: an operation on the cluster, or on any resource of another type.
    otherwise: tuple[Operation, ResourceType] | None = None
    #: The handler decides it for all names, with ``Client.refusals``, and refuses only the denied items.
    is_each: bool = False


class Listed(NamedTuple):
    """A list in a response, from which the items are removed that the client may not describe.

    The list is not changed if the field of the request that ``unless`` names is not None: then the request
    has named the items.
    """

    resource_type: ResourceType
    path: tuple[str, ...]  #: the fields that lead to the list
    name: str  #: the field of an item that has the resource's name; "" if the items are names
    unless: str = ""


class Requirement:
    """The permissions that a request of one API needs, and the lists of its response that are pruned."""

    __slots__ = ("lists", "needs", "of_whole")

    def __init__(self, needs: tuple[Need, ...] = (), lists: tuple[Listed, ...] = ()) -> None:
        self.needs = needs
        self.lists = lists
        #: Those that refuse the whole request.
        self.of_whole = tuple(need for need in needs if not need.is_each)


class Denial(NamedTuple):
    """An operation that a request needs and the client may not perform."""

    operation: Operation
    resource_type: ResourceType
    name: str


def is_decided_by_item(key: int, message: Any) -> bool:
    """Whether only the handler decides, for each item: the request needs nothing as a whole, and nothing is
    pruned from its response. That holds for most Produce and Fetch requests.
    """
    requirement = REQUIRED.get(key)
    if requirement is None or requirement.lists:
        return False
    for need in requirement.of_whole:  # noqa: SIM110 - all() takes longer, for each request
        if need.names(message) != ():
            return False
    return True


def denials(key: int, message: Any, access: Access, *, is_whole: bool = False) -> Steps[list[Denial] | None]:
    """Return the operations that ``message`` needs and ``access`` does not allow, in the order of the table.

    If ``is_whole``, omit the needs with ``is_each``, which the handler checks. Return None if the API has no
    entry; the caller must refuse the request then, too.
    """
    requirement = REQUIRED.get(key)
    if requirement is None:
        return None
    found: list[Denial] = []
    for need in requirement.of_whole if is_whole else requirement.needs:
        names = need.names(message)
        if names != ():  # () is usual: most produce requests have no transactional id
            found += yield from _denied(need, names, access)
    return found


def _denied(need: Need, names: Iterable[str], access: Access) -> Steps[list[Denial]]:
    operation, resource_type, otherwise = need.operation, need.resource_type, need.otherwise
    denied: list[Denial] = []
    for count, name in enumerate(dict.fromkeys(names), 1):
        if not access.allows(operation, resource_type, name):
            denied.append(Denial(operation, resource_type, name))
        if count % NAMES_PER_TURN == 0:
            yield
    return [] if denied and otherwise is not None and _allows_otherwise(access, *otherwise) else denied


def _allows_otherwise(access: Access, operation: Operation, resource_type: ResourceType) -> bool:
    if resource_type is CLUSTER:
        return access.allows(operation, CLUSTER, CLUSTER_NAME)
    return access.allows_on_any(operation, resource_type)


def permitted(message: Any, access: Access) -> Steps[Any]:
    """Return ``message``, or a copy in which ``allow_auto_topic_creation`` is False.

    The copy is returned for a Metadata request with ``allow_auto_topic_creation`` that names a topic that the
    client may not create.
    """
    if not (isinstance(message, MetadataRequest) and message.allow_auto_topic_creation and message.topics):
        return message
    if _allows_otherwise(access, _Op.CREATE, CLUSTER):
        return message
    for count, name in enumerate(message.topics, 1):
        if not access.allows(_Op.CREATE, TOPIC, name):
            return message._replace(allow_auto_topic_creation=False)
        if count % NAMES_PER_TURN == 0:
            yield
    return message


def visible(key: int, message: Any, response: Any, access: Access) -> Steps[Any]:
    """Return the response to ``message`` without the listed items that the client may not describe."""
    for resource_type, path, name, unless in REQUIRED[key].lists:
        if not unless or getattr(message, unless) is None:
            response = yield from _pruned(response, path, name, resource_type, access)
    return response


def _pruned(
    struct: Any, path: tuple[str, ...], name: str, resource_type: ResourceType, access: Access
) -> Steps[Any]:
    field, *rest = path
    items = getattr(struct, field)
    if items is None:
        return struct
    kept: list[Any] = []
    named = attrgetter(name) if name else str
    for count, item in enumerate(items, 1):
        if rest:
            kept.append((yield from _pruned(item, tuple(rest), name, resource_type, access)))
        elif access.allows(_Op.DESCRIBE, resource_type, named(item)):
            kept.append(item)
        if count % NAMES_PER_TURN == 0:
            yield
    return struct._replace(**{field: kept})


def _field(name: str) -> Callable[[Any], Iterable[str]]:
    """Return a function that returns the names in a field, which has one name, a list of names, or None."""

    def names(message: Any) -> Iterable[str]:
        value = getattr(message, name)
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    return names


def _each(field: str, attribute: str) -> Callable[[Any], Iterable[str]]:
    """Return a function that returns ``attribute`` of each item of the list ``field``, which may be None."""
    attribute_of = attrgetter(attribute)

    def names(message: Any) -> Iterable[str]:
        return map(attribute_of, getattr(message, field) or ())

    return names


def _coordinated(key_type: int) -> Callable[[Any], Iterable[str]]:
    return lambda message: message.keys if message.key_type == key_type else ()


def _configured(field: str, *, of_topics: bool) -> Callable[[Any], Iterable[str]]:
    """Return a function that returns the topics in the list ``field`` of resources.

    If ``of_topics`` is False, it instead returns the cluster's name for each resource that is not a topic.
    """

    def names(message: Any) -> Iterable[str]:
        for item in getattr(message, field):
            if (item.resource_type == "topic") == of_topics:
                yield item.name if of_topics else CLUSTER_NAME

    return names


def _subscribed_pattern(message: Any) -> Iterable[str]:
    """Return WILDCARD, all topics, if the member subscribes to a pattern: it will see which topics match."""
    return (WILDCARD,) if message.subscribed_pattern else ()


def _users(message: Any) -> Iterable[str]:
    """Return the named users, or WILDCARD if the request is for all users."""
    return (WILDCARD,) if message.users is None else message.users


def _journal(message: Any) -> Iterable[str]:
    """Return WILDCARD, all topics, if the request is for the journal, whose sentences name topics."""
    return (WILDCARD,) if message.include_journal else ()


def _without_transaction(message: Any) -> Iterable[str]:
    return (CLUSTER_NAME,) if message.transactional_id is None else ()


def _cluster(operation: Operation) -> Requirement:
    return Requirement((Need(operation, CLUSTER, lambda _: (CLUSTER_NAME,), ""),))


def _topics(operation: Operation, field: str = "partitions", attribute: str = "topic") -> Requirement:
    return Requirement((Need(operation, TOPIC, _each(field, attribute), f"`{field}`"),))


def _one(operation: Operation, resource_type: ResourceType, field: str) -> Need:
    return Need(operation, resource_type, _field(field), f"`{field}`")


_OPEN: Final = Requirement()
_OF_NODES: Final = _cluster(_Op.CLUSTER_ACTION)
_DESCRIBE_CLUSTER: Final = _cluster(_Op.DESCRIBE)

REQUIRED: Final[Mapping[int, Requirement]] = MappingProxyType(
    {
        # data
        ApiKey.PRODUCE: Requirement(
            (
                _one(_Op.WRITE, TRANSACTIONAL_ID, "transactional_id"),
                Need(_Op.WRITE, TOPIC, _each("partitions", "topic"), "each of `partitions`", is_each=True),
            )
        ),
        ApiKey.FETCH: Requirement(
            (Need(_Op.READ, TOPIC, _each("partitions", "topic"), "each of `partitions`", is_each=True),)
        ),
        ApiKey.LIST_OFFSETS: _topics(_Op.DESCRIBE),
        ApiKey.OFFSETS_FOR_BYTES: _topics(_Op.DESCRIBE),
        ApiKey.OFFSETS_FOR_LEADER_EPOCH: _topics(_Op.DESCRIBE),
        ApiKey.DELETE_RECORDS: _topics(_Op.DELETE),
        ApiKey.INIT_PRODUCER_ID: Requirement(
            (
                _one(_Op.WRITE, TRANSACTIONAL_ID, "transactional_id"),
                Need(
                    _Op.IDEMPOTENT_WRITE,
                    CLUSTER,
                    _without_transaction,
                    "without `transactional_id`",
                    (_Op.WRITE, TOPIC),
                ),
            )
        ),
        # metadata
        ApiKey.API_VERSIONS: _OPEN,
        ApiKey.METADATA: Requirement(
            (Need(_Op.DESCRIBE, TOPIC, _field("topics"), "each of `topics`", is_each=True),),
            (Listed(TOPIC, ("topics",), "name", unless="topics"),),
        ),
        ApiKey.DESCRIBE_CLUSTER: _DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_QUORUM: _DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_RECOVERY: _DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_FEATURES: _DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_METADATA: Requirement(
            (*_DESCRIBE_CLUSTER.needs, *_cluster(_Op.DESCRIBE_CONFIGS).needs)
        ),
        # administration
        ApiKey.CREATE_TOPICS: Requirement(
            (Need(_Op.CREATE, TOPIC, _each("topics", "name"), "`topics`", (_Op.CREATE, CLUSTER)),)
        ),
        ApiKey.DELETE_TOPICS: Requirement((_one(_Op.DELETE, TOPIC, "names"),)),
        ApiKey.CREATE_PARTITIONS: _topics(_Op.ALTER, "topics", "name"),
        ApiKey.DESCRIBE_CONFIGS: Requirement(
            (
                Need(
                    _Op.DESCRIBE_CONFIGS,
                    TOPIC,
                    _configured("resources", of_topics=True),
                    "topics in `resources`",
                ),
                Need(
                    _Op.DESCRIBE_CONFIGS,
                    CLUSTER,
                    _configured("resources", of_topics=False),
                    "brokers in `resources`",
                ),
            )
        ),
        ApiKey.ALTER_CONFIGS: Requirement(
            (
                Need(_Op.ALTER_CONFIGS, TOPIC, _configured("changes", of_topics=True), "topics in `changes`"),
                Need(
                    _Op.ALTER_CONFIGS,
                    CLUSTER,
                    _configured("changes", of_topics=False),
                    "brokers in `changes`",
                ),
            )
        ),
        ApiKey.DESCRIBE_CLIENT_QUOTAS: _cluster(_Op.DESCRIBE_CONFIGS),
        ApiKey.ALTER_CLIENT_QUOTAS: _cluster(_Op.ALTER_CONFIGS),
        ApiKey.DESCRIBE_LOG_DIRS: _DESCRIBE_CLUSTER,
        ApiKey.ALTER_REPLICA_LOG_DIRS: _cluster(_Op.ALTER),
        ApiKey.ELECT_LEADERS: _cluster(_Op.ALTER),
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: _cluster(_Op.ALTER),
        ApiKey.LIST_PARTITION_REASSIGNMENTS: _DESCRIBE_CLUSTER,
        ApiKey.UNREGISTER_BROKER: _cluster(_Op.ALTER),
        ApiKey.UPDATE_FEATURES: _cluster(_Op.ALTER),
        ApiKey.ADD_RAFT_VOTER: _cluster(_Op.ALTER),
        ApiKey.REMOVE_RAFT_VOTER: _cluster(_Op.ALTER),
        ApiKey.CONTROLLED_SHUTDOWN: _OF_NODES,
        # security
        ApiKey.DESCRIBE_ACLS: _DESCRIBE_CLUSTER,
        ApiKey.CREATE_ACLS: _cluster(_Op.ALTER),
        ApiKey.DELETE_ACLS: _cluster(_Op.ALTER),
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: Requirement(
            (Need(_Op.DESCRIBE, USER, _users, "`users`, or `*`", (_Op.DESCRIBE, CLUSTER)),)
        ),
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Requirement(
            (
                Need(_Op.ALTER, USER, _each("upsertions", "user"), "`upsertions`", (_Op.ALTER, CLUSTER)),
                Need(_Op.ALTER, USER, _each("deletions", "user"), "`deletions`", (_Op.ALTER, CLUSTER)),
            )
        ),
        ApiKey.SASL_HANDSHAKE: _OPEN,
        ApiKey.SASL_AUTHENTICATE: _OPEN,
        # groups
        ApiKey.FIND_COORDINATOR: Requirement(
            (
                Need(_Op.DESCRIBE, GROUP, _coordinated(0), "`keys` of type 0"),
                Need(_Op.DESCRIBE, TRANSACTIONAL_ID, _coordinated(1), "`keys` of type 1"),
            )
        ),
        ApiKey.CONSUMER_GROUP_HEARTBEAT: Requirement(
            (
                _one(_Op.READ, GROUP, "group_id"),
                _one(_Op.DESCRIBE, TOPIC, "subscribed_topics"),
                Need(_Op.DESCRIBE, TOPIC, _subscribed_pattern, "`*`, with a `subscribed_pattern`"),
                Need(_Op.DESCRIBE, TOPIC, _each("owned", "topic"), "`owned`"),
            )
        ),
        ApiKey.OFFSET_COMMIT: Requirement(
            (_one(_Op.READ, GROUP, "group_id"), Need(_Op.READ, TOPIC, _each("offsets", "topic"), "`offsets`"))
        ),
        ApiKey.OFFSET_FETCH: Requirement(
            (
                _one(_Op.DESCRIBE, GROUP, "group_id"),
                Need(_Op.DESCRIBE, TOPIC, _each("partitions", "topic"), "`partitions`"),
            ),
            (Listed(TOPIC, ("offsets",), "topic"),),
        ),
        ApiKey.OFFSET_DELETE: Requirement(
            (
                _one(_Op.DELETE, GROUP, "group_id"),
                Need(_Op.READ, TOPIC, _each("partitions", "topic"), "`partitions`"),
            )
        ),
        ApiKey.LIST_GROUPS: Requirement((), (Listed(GROUP, ("groups",), "group_id"),)),
        ApiKey.DESCRIBE_GROUPS: Requirement(
            (
                _one(_Op.DESCRIBE, GROUP, "group_ids"),
                Need(_Op.DESCRIBE, TOPIC, _journal, "`*`, with `include_journal`"),
            ),
            (
                Listed(TOPIC, ("groups", "members", "subscribed_topics"), ""),
                Listed(TOPIC, ("groups", "members", "assignment"), "topic"),
                Listed(TOPIC, ("groups", "members", "target"), "topic"),
                Listed(TOPIC, ("groups", "members", "awaited_revocation"), "topic"),
            ),
        ),
        ApiKey.DELETE_GROUPS: Requirement((_one(_Op.DELETE, GROUP, "group_ids"),)),
        # transactions
        ApiKey.END_TXN: Requirement((_one(_Op.WRITE, TRANSACTIONAL_ID, "transactional_id"),)),
        ApiKey.TXN_OFFSET_COMMIT: Requirement(
            (
                _one(_Op.WRITE, TRANSACTIONAL_ID, "transactional_id"),
                _one(_Op.READ, GROUP, "group_id"),
                Need(_Op.READ, TOPIC, _each("offsets", "topic"), "`offsets`"),
            )
        ),
        ApiKey.LIST_TRANSACTIONS: Requirement(
            (), (Listed(TRANSACTIONAL_ID, ("transactions",), "transactional_id"),)
        ),
        ApiKey.DESCRIBE_TRANSACTIONS: Requirement(
            (_one(_Op.DESCRIBE, TRANSACTIONAL_ID, "transactional_ids"),),
            (Listed(TOPIC, ("transactions", "partitions"), "topic"),),
        ),
        ApiKey.DESCRIBE_PRODUCERS: _topics(_Op.READ),
        ApiKey.ABORT_TRANSACTION: _cluster(_Op.ALTER),
        ApiKey.JOIN_TXN_GROUP: Requirement((_one(_Op.WRITE, TRANSACTIONAL_ID, "application_id"),)),
        ApiKey.END_TXN_GROUP: Requirement((_one(_Op.WRITE, TRANSACTIONAL_ID, "application_id"),)),
        ApiKey.RETIRE_TXN_GROUP: Requirement((_one(_Op.WRITE, TRANSACTIONAL_ID, "application_id"),)),
        ApiKey.DESCRIBE_TXN_GROUP: Requirement(
            (_one(_Op.DESCRIBE, TRANSACTIONAL_ID, "application_id"),),
            (Listed(TOPIC, ("members", "partitions"), "topic"),),
        ),
        # between the nodes; these also need a connection of a node (S10)
        ApiKey.CLUSTER_HELLO: _OPEN,
        ApiKey.CLUSTER_PROOF: _OPEN,
        ApiKey.ALTER_PARTITION: _OF_NODES,
        ApiKey.ENVELOPE: _OF_NODES,
        ApiKey.BROKER_REGISTRATION: _OF_NODES,
        ApiKey.BROKER_HEARTBEAT: _OF_NODES,
        ApiKey.ALLOCATE_PRODUCER_IDS: _OF_NODES,
        ApiKey.RAFT_MESSAGES: _OF_NODES,
        ApiKey.REPLICA_FETCH: _OF_NODES,
        ApiKey.CHECKPOINT_HIGH_WATERMARKS: _OF_NODES,
        ApiKey.REPORT_REPLICAS: _OF_NODES,
        ApiKey.FETCH_METADATA: _OF_NODES,
        ApiKey.ADD_PARTITIONS_TO_TXN: _OF_NODES,
        ApiKey.WRITE_TXN_MARKERS: _OF_NODES,
    }
)
