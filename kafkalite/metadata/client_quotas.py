"""The quotas of clients in the metadata: whom a quota is for, its keys, and which one applies (KIP-546).

Names and precedence are Kafka's. A quota of an entity bounds one key, such as producer_byte_rate. It is for a
user, a client id, or both together, or for the address from which connections come; each by name or as the
default of all names that have no quota of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from kafkalite.model import DEFAULT_ENTITY, QuotaEntity

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

#: {key: its unit and meaning}. All of users and client ids but the last, which is of addresses.
CLIENT_KEYS: Final[Mapping[str, str]] = {
    PRODUCER_BYTE_RATE: "bytes per second that clients produce",
    CONSUMER_BYTE_RATE: "bytes per second that clients fetch",
    REQUEST_PERCENTAGE: "percent of the time of a broker's event loop that requests use",
    CONTROLLER_MUTATION_RATE: "partitions per second that are created or deleted",
}
IP_KEYS: Final[Mapping[str, str]] = {
    CONNECTION_CREATION_RATE: "connections per second that a broker accepts from one address"
}

Quotas = Mapping[QuotaEntity, Mapping[str, float]]
"""{entity: {key: bound per second, or percentage}}."""


class AppliedQuota(NamedTuple):
    """The quota that applies to a client. Clients with the same ``user`` and ``client_id`` here share it."""

    entity: QuotaEntity  #: for which it is set
    bound: float
    user: str | None  #: None: clients of all users share it
    client_id: str | None  #: None: all clients of the user share it


def applied_quota(quotas: Quotas, key: str, user: str, client_id: str) -> AppliedQuota | None:
    """Return the quota of the client for ``key``, or None if it has none.

    It is the most specific one that is set, as in Kafka: a user's before a default user's, both before those
    of client ids; and under each, that of the client id, of the default client id, of the user alone.
    """
    for entity, user_shared, client_shared in _levels(user, client_id):
        bound = quotas.get(entity, {}).get(key)
        if bound is not None:
            return AppliedQuota(entity, bound, user_shared, client_shared)
    return None


def _levels(user: str, client_id: str) -> Iterator[tuple[QuotaEntity, str | None, str | None]]:
    """Yield (entity, user, client id) from the most specific to the least. The last two are those of
    ``AppliedQuota``."""
    for name in (user, DEFAULT_ENTITY):
        yield QuotaEntity(name, client_id), user, client_id
        yield QuotaEntity(name, DEFAULT_ENTITY), user, client_id
        yield QuotaEntity(name), user, None
    yield QuotaEntity(None, client_id), None, client_id
    yield QuotaEntity(None, DEFAULT_ENTITY), None, client_id


def connection_rate(quotas: Quotas, ip: str) -> float | None:
    """Return the connection_creation_rate of an address, or None if it has none."""
    for entity in (QuotaEntity(ip=ip), QuotaEntity(ip=DEFAULT_ENTITY)):
        bound = quotas.get(entity, {}).get(CONNECTION_CREATION_RATE)
        if bound is not None:
            return bound
    return None
