"""What an administrative request changes, for the audit log. The lines contain no secret (S19).

A request may have thousands of items, so a line names the first one and their number.
"""

# Tests: tests/broker/test_audited.py

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kafkalite.protocol.api import ApiKey
from kafkalite.security.acls import AclBinding
from kafkalite.security.scram import Mechanism


class _Description(NamedTuple):
    """How a line describes the requests of one API."""

    items: Callable[[Any], Sequence[Any] | None]  #: of the request; None: all that there are
    resource: Callable[[Any], str]  #: the name of an item
    change: Callable[[Any], str] | None = None  #: what changes in an item


def changes_of(api_key: int, message: Any) -> dict[str, str | int]:
    """Return the fields of the line: ``resource``, ``change`` and ``count``.

    ``change`` is omitted if the API says it. ``validate_only`` is added if the request changes nothing.
    """
    items, resource, change = _DESCRIPTIONS[api_key]
    found = items(message)
    fields: dict[str, str | int] = {}
    if found is None:
        fields["resource"] = "*"
    elif found:
        fields["resource"] = resource(found[0])
        if change is not None:
            fields["change"] = change(found[0])
        fields["count"] = len(found)
    else:
        fields["count"] = 0
    if getattr(message, "validate_only", False):
        fields["validate_only"] = "true"
    return fields


def _alone(message: Any) -> Sequence[Any]:
    return (message,)


def _partitions(message: Any) -> Sequence[Any] | None:
    items: Sequence[Any] | None = message.partitions
    return items


def _partition(item: Any) -> str:
    return f"{item.topic}-{item.partition}"


def _topic_counts(item: Any) -> str:
    return f"{item.num_partitions} partitions, {item.replication_factor} replicas"


def _config(item: Any) -> str:
    """Return the name of the option only: a client may send any value, such as a password."""
    return f"{'remove' if item.value is None else 'set'} {item.key}"


def _rule(item: Any) -> str:
    try:
        return str(AclBinding(*item))
    except ValueError:  # an unknown number, which the controller refuses
        return repr(item)


def _selection(item: Any) -> str:
    named = (f"{name}={value}" for name, value in item._asdict().items() if value is not None)
    return " ".join(named) or "every rule"


def _credential(item: Any) -> str:
    try:
        mechanism = Mechanism(item.mechanism).label
    except ValueError:
        mechanism = f"mechanism {item.mechanism}"
    return f"{'set' if hasattr(item, 'salt') else 'remove'} {mechanism}"


def _quota_entity(item: Any) -> str:
    parts = (f"{one.entity_type}={'<default>' if one.name is None else one.name}" for one in item.entity)
    return ",".join(parts)


def _quotas(item: Any) -> str:
    return ",".join(f"{key}={'removed' if value is None else value}" for key, value in item.changes)


def _voter(item: Any) -> str:
    return f"voter {item.node_id}"


def _broker(item: Any) -> str:
    return f"broker {item.node_id}"


_DESCRIPTIONS: Final[Mapping[int, _Description]] = MappingProxyType(
    {
        ApiKey.CREATE_TOPICS: _Description(lambda m: m.topics, lambda item: str(item.name), _topic_counts),
        ApiKey.DELETE_TOPICS: _Description(lambda m: m.names, str),
        ApiKey.CREATE_PARTITIONS: _Description(
            lambda m: m.topics, lambda item: str(item.name), lambda item: f"{item.total_count} partitions"
        ),
        ApiKey.DELETE_RECORDS: _Description(
            _partitions, _partition, lambda item: f"before offset {item.before_offset}"
        ),
        ApiKey.ALTER_CONFIGS: _Description(
            lambda m: m.changes, lambda item: f"{item.resource_type} {item.name}", _config
        ),
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: _Description(
            _partitions, _partition, lambda item: f"replicas {item.replicas}"
        ),
        ApiKey.ALTER_REPLICA_LOG_DIRS: _Description(_partitions, _partition, lambda item: f"to {item.path}"),
        ApiKey.ELECT_LEADERS: _Description(_partitions, _partition),
        ApiKey.ALTER_CLIENT_QUOTAS: _Description(lambda m: m.entries, _quota_entity, _quotas),
        ApiKey.CREATE_ACLS: _Description(lambda m: m.acls, _rule),
        ApiKey.DELETE_ACLS: _Description(lambda m: m.selections, _selection),
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _Description(
            lambda m: [*m.upsertions, *m.deletions], lambda item: str(item.user), _credential
        ),
        ApiKey.DELETE_GROUPS: _Description(lambda m: m.group_ids, str),
        ApiKey.OFFSET_DELETE: _Description(
            lambda m: [(m.group_id, item) for item in m.partitions],
            lambda item: str(item[0]),
            lambda item: _partition(item[1]),
        ),
        ApiKey.ABORT_TRANSACTION: _Description(
            _alone, _partition, lambda item: f"producer {item.producer_id} at offset {item.start_offset}"
        ),
        ApiKey.CONTROLLED_SHUTDOWN: _Description(_alone, _broker),
        ApiKey.UNREGISTER_BROKER: _Description(_alone, _broker),
        ApiKey.UPDATE_FEATURES: _Description(
            lambda m: m.updates, lambda item: f"{item.feature} {item.level}"
        ),
        ApiKey.ADD_RAFT_VOTER: _Description(_alone, _voter),
        ApiKey.REMOVE_RAFT_VOTER: _Description(_alone, _voter),
    }
)
