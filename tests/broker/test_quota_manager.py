"""Throttle times of clients: which clients share a quota, live changes, and bounded memory."""

from __future__ import annotations

import pytest

from kafkalite.broker.quotas.quota_manager import MAX_REQUEST_THROTTLE_MS, MIN_KEPT, QuotaManager
from kafkalite.model import DEFAULT_ENTITY, QuotaEntity

DEFAULT = DEFAULT_ENTITY

ALICE = QuotaEntity("alice")


def manager(*entries: tuple[QuotaEntity, str, float]) -> QuotaManager:
    made = QuotaManager()
    quotas: dict[QuotaEntity, dict[str, float]] = {}
    for entity, key, bound in entries:
        quotas.setdefault(entity, {})[key] = bound
    made.update(quotas)
    return made


def charge(
    quotas: QuotaManager,
    *,
    user: str = "alice",
    client_id: str = "app",
    produced: int = 0,
    fetched: int = 0,
    busy_ms: int = 0,
    now_ms: int = 0,
) -> int:
    return quotas.charge(
        user, client_id, now_ms, produced_bytes=produced, fetched_bytes=fetched, busy_ns=busy_ms * 1_000_000
    )


def test_bytes_produced_and_fetched_have_quotas_of_their_own() -> None:
    quotas = manager((ALICE, "producer_byte_rate", 1000), (ALICE, "consumer_byte_rate", 500))
    assert charge(quotas, produced=1000, fetched=500) == 0
    assert charge(quotas, produced=1000) == 1000
    assert charge(quotas, fetched=1500) == 3000


def test_the_longest_of_several_throttle_times_counts() -> None:
    quotas = manager((ALICE, "producer_byte_rate", 1000), (ALICE, "consumer_byte_rate", 500))
    assert charge(quotas, produced=2000, fetched=2000) == 3000


@pytest.mark.parametrize(
    ("entity", "sharing", "other"),
    [
        (ALICE, {"client_id": "another"}, {"user": "bob"}),
        (QuotaEntity(None, "app"), {"user": "bob"}, {"client_id": "another"}),
    ],
    ids=["a user", "a client id"],
)
def test_all_clients_of_an_entity_share_its_quota(
    entity: QuotaEntity, sharing: dict[str, str], other: dict[str, str]
) -> None:
    quotas = manager((entity, "producer_byte_rate", 1000))
    assert charge(quotas, produced=1000) == 0
    assert charge(quotas, **sharing, produced=1000) == 1000  # type: ignore[arg-type]
    assert charge(quotas, **other, produced=10_000) == 0  # type: ignore[arg-type]


def test_each_user_has_the_default_quota_for_itself() -> None:
    quotas = manager((QuotaEntity(DEFAULT), "producer_byte_rate", 1000))
    assert charge(quotas, user="alice", produced=1000) == 0
    assert charge(quotas, user="bob", produced=1000) == 0
    assert charge(quotas, user="bob", produced=1000) == 1000


def test_request_time_is_a_percentage_with_a_longest_throttle_time() -> None:
    quotas = manager((ALICE, "request_percentage", 10))
    assert charge(quotas, busy_ms=100) == 0
    assert charge(quotas, busy_ms=50) == 500
    assert charge(quotas, busy_ms=1_000) == 10_500
    assert charge(quotas, busy_ms=1_000) == MAX_REQUEST_THROTTLE_MS == 11_000


def test_one_response_to_a_fetch_has_at_most_the_bytes_of_a_window() -> None:
    quotas = manager((ALICE, "consumer_byte_rate", 1000))
    assert quotas.max_fetch_bytes("alice", "app", 0) == 10_000
    assert quotas.max_fetch_bytes("bob", "app", 0) is None


def test_mutations_are_refused_while_the_quota_is_overdrawn() -> None:
    quotas = manager((ALICE, "controller_mutation_rate", 2))
    assert quotas.admit_mutations("alice", "app", 30, 0) == 0
    assert quotas.admit_mutations("alice", "app", 1, 0) == 4_000
    assert quotas.admit_mutations("alice", "app", 1, 4_000) == 0
    assert quotas.admit_mutations("bob", "app", 1000, 0) == 0


def test_connections_of_each_address_have_a_rate() -> None:
    quotas = manager((QuotaEntity(ip=DEFAULT), "connection_creation_rate", 1))
    assert [quotas.admit_connection("10.0.0.1", 0) for _ in range(13)] == [0] * 12 + [1000]
    assert quotas.admit_connection("10.0.0.2", 0) == 0


def test_a_changed_quota_applies_at_once_and_others_keep_their_samples() -> None:
    quotas = manager((ALICE, "producer_byte_rate", 1000), (ALICE, "consumer_byte_rate", 1000))
    charge(quotas, produced=5_000, fetched=5_000)
    quotas.update({ALICE: {"producer_byte_rate": 10_000, "consumer_byte_rate": 1000}})
    assert charge(quotas, produced=5_000) == 0
    assert charge(quotas, fetched=1) == 4_001
    quotas.update({})
    assert charge(quotas, produced=1_000_000, fetched=1_000_000) == 0
    assert not quotas.has_quotas


def test_throttled_responses_are_counted_by_quota() -> None:
    quotas = manager((ALICE, "producer_byte_rate", 1000), (ALICE, "controller_mutation_rate", 1))
    charge(quotas, produced=1500)
    charge(quotas, produced=500)
    quotas.admit_mutations("alice", "app", 12, 0)
    quotas.admit_mutations("alice", "app", 1, 0)
    counts = {name: (count.responses, count.total_ms) for name, count in quotas.throttled.items()}
    assert counts == {
        ("producer_byte_rate", "alice", None): (2, 1500),
        ("controller_mutation_rate", "alice", None): (1, 1000),
    }


def test_memory_is_bounded_by_the_clients_of_a_window() -> None:
    quotas = manager(
        (QuotaEntity(None, DEFAULT), "producer_byte_rate", 1000),
        (QuotaEntity(None, DEFAULT), "controller_mutation_rate", 1000),
        (QuotaEntity(ip=DEFAULT), "connection_creation_rate", 1000),
    )
    for number in range(20 * MIN_KEPT):
        now_ms = number * 100
        charge(quotas, client_id=str(number), produced=2000, now_ms=now_ms)
        quotas.admit_mutations("alice", str(number), 1, now_ms)
        quotas.admit_connection(str(number), now_ms)
    tables = (quotas._clients, quotas._rates, quotas._mutations, quotas._connections, quotas.throttled)
    assert all(len(table) <= 2 * MIN_KEPT for table in tables), [len(table) for table in tables]


def test_forgetting_idle_clients_forgives_no_excess() -> None:
    quotas = manager((QuotaEntity(None, DEFAULT), "producer_byte_rate", 1000))
    charge(quotas, client_id="greedy", produced=100_000)
    for number in range(2 * MIN_KEPT):
        charge(quotas, client_id=str(number), produced=1, now_ms=20_000)
    assert (
        charge(quotas, client_id="greedy", produced=0, now_ms=20_000) == 0
    )  # nothing produced, no quota used
    assert charge(quotas, client_id="greedy", produced=1, now_ms=20_000) > 70_000
