"""Which quota applies to a client: Kafka's eight levels, against a list of them by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from kafkalite.metadata.client_quotas import (
    CONNECTION_CREATION_RATE,
    PRODUCER_BYTE_RATE,
    applied_quota,
    connection_rate,
)
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity

DEFAULT = DEFAULT_ENTITY

#: Kafka's order (KIP-257), with the clients that share a rate of the level.
LEVELS = (
    (QuotaEntity("alice", "app"), ("alice", "app")),
    (QuotaEntity("alice", DEFAULT), ("alice", "app")),
    (QuotaEntity("alice"), ("alice", None)),
    (QuotaEntity(DEFAULT, "app"), ("alice", "app")),
    (QuotaEntity(DEFAULT, DEFAULT), ("alice", "app")),
    (QuotaEntity(DEFAULT), ("alice", None)),
    (QuotaEntity(None, "app"), (None, "app")),
    (QuotaEntity(None, DEFAULT), (None, "app")),
)


@pytest.mark.parametrize("count", range(1, 9))
def test_the_most_specific_quota_applies(count: int) -> None:
    for chosen in combinations(range(8), count):
        quotas = {LEVELS[level][0]: {PRODUCER_BYTE_RATE: level + 1.0} for level in chosen}
        applied = applied_quota(quotas, PRODUCER_BYTE_RATE, "alice", "app")
        entity, shared = LEVELS[chosen[0]]
        assert applied == (entity, chosen[0] + 1.0, *shared)


def test_each_key_has_its_own_precedence() -> None:
    quotas = {
        QuotaEntity("alice", "app"): {"consumer_byte_rate": 1.0},
        QuotaEntity(None, DEFAULT): {PRODUCER_BYTE_RATE: 2.0},
    }
    applied = applied_quota(quotas, PRODUCER_BYTE_RATE, "alice", "app")
    assert applied is not None
    assert applied.bound == 2.0


def test_quotas_of_other_clients_do_not_apply() -> None:
    quotas = {QuotaEntity("bob"): {PRODUCER_BYTE_RATE: 1.0}, QuotaEntity(ip="127.0.0.1"): {"x": 1.0}}
    assert applied_quota(quotas, PRODUCER_BYTE_RATE, "alice", "app") is None


def test_an_address_has_its_own_connection_rate_or_the_default() -> None:
    own, default = QuotaEntity(ip="127.0.0.1"), QuotaEntity(ip=DEFAULT)
    quotas = {own: {CONNECTION_CREATION_RATE: 1.0}, default: {CONNECTION_CREATION_RATE: 2.0}}
    assert connection_rate(quotas, "127.0.0.1") == 1.0
    assert connection_rate(quotas, "::1") == 2.0
    assert connection_rate({}, "::1") is None
