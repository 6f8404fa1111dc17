"""The quotas of clients in the metadata: their keys, and the choice of the quota that applies (KIP-546).

Names and precedence are Kafka's. A quota of an entity bounds one key, such as producer_byte_rate. The entity
is a user, a client id, both together, or the address from which connections come. Each of these parts is a
name, or the default for all names without a quota of their own.
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
    """The quota that applies to a client. All clients with this ``user`` and ``client_id`` share it."""

    entity: QuotaEntity  #: for which it is set
    bound: float
    user: str | None  #: None: clients of all users share it
    client_id: str | None  #: None: all clients of the user share it


def applied_quota(quotas: Quotas, key: str, user: str, client_id: str) -> AppliedQuota | None:
    """Return the quota of the client for ``key``, or None if it has none.

    The quota is that of the first of these entities, as in Kafka: (user, client id), (user, default client
    id), user, (default user, client id), (default user, default client id), default user, client id, default
    client id.
    """
    for entity, user_shared, client_shared in _levels(user, client_id):
        bound = quotas.get(entity, {}).get(key)
        if bound is not None:
            return AppliedQuota(entity, bound, user_shared, client_shared)
    return None


def _levels(user: str, client_id: str) -> Iterator[tuple[QuotaEntity, str | None, str | None]]:
    """Yield (entity, user, client id), from the most specific entity to the least. User and client id are the
    fields of ``AppliedQuota``."""
    for name in (user, DEFAULT_ENTITY):
        yield QuotaEntity(name, client_id), user, client_id
        yield QuotaEntity(name, DEFAULT_ENTITY), user, client_id
        yield QuotaEntity(name), user, None
    yield QuotaEntity(None, client_id), None, client_id
    yield QuotaEntity(None, DEFAULT_ENTITY), None, client_id


def connection_rate(quotas: Quotas, ip: str) -> float | None:
    """Return the connection_creation_rate of an address or else of the default address. Return None if there
    is none."""
    for entity in (QuotaEntity(ip=ip), QuotaEntity(ip=DEFAULT_ENTITY)):
        bound = quotas.get(entity, {}).get(CONNECTION_CREATION_RATE)
        if bound is not None:
            return bound
    return None
