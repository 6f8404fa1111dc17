"""Records the requests that a Cluster receives from clients, and finds the topics and partitions that a
request names."""

# Tests: tests/testing/test_faults.py

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from sys import intern
from typing import Any, Final, NamedTuple

from kafkalite.errors import ConfigError
from kafkalite.model import TopicPartition
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.suggestions import did_you_mean

#: The number of requests that a Cluster remembers. Older ones are dropped.
KEPT_REQUESTS: Final = 10_000

_PARTITION_FIELDS: Final = ("partitions", "offsets")
_TOPIC_FIELDS: Final = ("topics", "names", "subscribed_topics", "resources")

#: Requests between nodes that name partitions by topic id.
_BY_TOPIC_ID: Final = frozenset(
    {ApiKey.ALTER_PARTITION, ApiKey.CHECKPOINT_HIGH_WATERMARKS, ApiKey.REPLICA_FETCH, ApiKey.REPORT_REPLICAS}
)

_NAMES: Final = {key: key.name.title().replace("_", "") for key in ApiKey}
_KEYS: Final = {name.lower(): key for key, name in _NAMES.items()}
#: Kafka's names of two APIs that have other names in kafkalite.
_KEYS["incrementalalterconfigs"] = ApiKey.ALTER_CONFIGS
_KEYS["consumergroupdescribe"] = ApiKey.DESCRIBE_GROUPS
#: Requests of Kafka's older group protocol, which have no equivalents of their own. Only errors name these.
_OLDER_NAMES: Final = dict.fromkeys(("heartbeat", "joingroup", "syncgroup"), ApiKey.CONSUMER_GROUP_HEARTBEAT)


class ClientRequest(NamedTuple):
    """One request of a client. ``topics`` and ``partitions`` are empty if the request names none."""

    api: str  #: Kafka's name: "Produce", "FindCoordinator"
    client_id: str
    topics: tuple[str, ...]  #: each topic once, in the order of the request
    partitions: tuple[TopicPartition, ...]  #: empty if the request names topics only
    time_ms: int  #: the wall clock of the cluster at the arrival
    node_id: int  #: the node that received it


_Fields = tuple[str, str, tuple[str, ...], tuple[TopicPartition, ...], int, int]


class RequestLog:
    """The newest ``KEPT_REQUESTS`` requests of clients, in the order of arrival. Any thread may read it."""

    def __init__(self) -> None:
        # The fields of ClientRequests as plain tuples, which are created and freed faster.
        self._requests: deque[_Fields] = deque(maxlen=KEPT_REQUESTS)

    def __repr__(self) -> str:
        return f"<RequestLog of {len(self)} requests>"

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ClientRequest]:
        return map(ClientRequest._make, list(self._requests))

    def __getitem__(self, index: int) -> ClientRequest:
        return ClientRequest._make(self._requests[index])

    def add(self, fields: _Fields) -> None:
        """Add a request. ``fields`` are those of a ClientRequest, in order."""
        self._requests.append(fields)

    def clear(self) -> None:
        """Remove all requests."""
        self._requests.clear()

    def of(
        self,
        api: ApiKey | str,
        *,
        topic: str | None = None,
        partition: int | None = None,
        client_id: str | None = None,
    ) -> list[ClientRequest]:
        """Return the requests of ``api`` that name ``topic`` and ``partition`` and come from ``client_id``.

        None stands for any. Raises ConfigError if there is no such API, or if ``topic`` or ``partition`` is
        malformed or can match no request of this API.
        """
        key = api_key_of(api)
        check_names(key, topic, partition)
        name = _NAMES[key]
        return [
            request
            for request in self
            if request.api == name
            and client_id in (None, request.client_id)
            and is_named(request.topics, request.partitions, topic, partition)
        ]


def api_key_of(api: ApiKey | str | int) -> ApiKey:
    """Return the key of an API, given by key or by name: "FindCoordinator", "FIND_COORDINATOR".

    Raises ConfigError if there is no such API.
    """
    if isinstance(api, str):
        key = _KEYS.get(api.replace("_", "").lower())
        if key is not None:
            return key
    elif isinstance(api, int) and not isinstance(api, bool) and api in APIS:
        return ApiKey(api)
    keys = _KEYS | _OLDER_NAMES
    hint = did_you_mean(
        str(api).replace("_", "").lower(),
        keys,
        shown=lambda name: repr(_NAMES[keys[name]]),
        otherwise="such as 'Produce' or ApiKey.PRODUCE",
    )
    raise ConfigError(key="api", value=api, allowed=f"the name of an API; {hint}")


def name_of(api: ApiKey) -> str:
    """Return the name of an API in Kafka's spelling: "FindCoordinator"."""
    return _NAMES[api]


def check_names(api: ApiKey, topic: str | None, partition: int | None) -> None:
    """Raise ConfigError if a filter by topic or partition is malformed or can match no request of ``api``."""
    fields = APIS[api].request._fields
    has_partitions = "partition" in fields or any(name in fields for name in _PARTITION_FIELDS)
    if api in _BY_TOPIC_ID:
        fields, has_partitions = (), False
    if topic is not None:
        if not isinstance(topic, str) or not topic:
            raise ConfigError(key="topic", value=topic, allowed="the name of a topic, or None")
        if not has_partitions and not any(name in fields for name in _TOPIC_FIELDS):
            allowed = f"None for {name_of(api)}, whose requests name no topic"
            raise ConfigError(key="topic", value=topic, allowed=allowed)
    if partition is not None:
        if not isinstance(partition, int) or isinstance(partition, bool) or partition < 0:
            raise ConfigError(key="partition", value=partition, allowed="0 or more, or None")
        if not has_partitions:
            allowed = f"None for {name_of(api)}, whose requests name no partition"
            raise ConfigError(key="partition", value=partition, allowed=allowed)


def is_named(
    topics: tuple[str, ...], partitions: tuple[TopicPartition, ...], topic: str | None, partition: int | None
) -> bool:
    """Whether a request with these ``topics`` and ``partitions`` names ``partition`` of ``topic``. None
    stands for any."""
    if partition is None:
        return topic is None or topic in topics
    return any(number == partition and topic in (None, name) for name, number in partitions)


def names_in(message: Any) -> tuple[tuple[str, ...], tuple[TopicPartition, ...]]:
    """Return (topics, partitions) that the message of a request names.

    Equal topic names are the same object, so that a log of thousands of requests stays small.
    """
    fields = message._fields
    for name in _PARTITION_FIELDS:
        if name in fields:
            items: Any = getattr(message, name) or ()
            if len(items) == 1:
                return _one_partition(items[0][0], items[0][1])
            partitions = tuple(TopicPartition(intern(item[0]), item[1]) for item in items)
            return tuple({name: None for name, _ in partitions}), partitions
    if "partition" in fields:
        return _one_partition(message.topic, message.partition)
    for name in _TOPIC_FIELDS:
        if name in fields:
            items = getattr(message, name) or ()
            if name == "resources":
                items = [item.name for item in items if item.resource_type == "topic"]
            names = [item if isinstance(item, str) else item.name for item in items]
            return (_one_topic(*names) if len(names) == 1 else tuple(map(intern, names))), ()
    return (), ()


# Most requests name one partition or one topic. Shared tuples make the log smaller, and faster to clear.


@lru_cache(maxsize=1024)
def _one_partition(topic: str, partition: int) -> tuple[tuple[str, ...], tuple[TopicPartition, ...]]:
    return _one_topic(topic), (TopicPartition(intern(topic), partition),)


@lru_cache(maxsize=1024)
def _one_topic(topic: str) -> tuple[str, ...]:
    return (intern(topic),)
