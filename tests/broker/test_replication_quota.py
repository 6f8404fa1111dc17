"""How many bytes of throttled replicas a broker may send now: pure decisions (KIP-73)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.broker.quotas.replication_quota import BURST_MS, LEAST_MS, MAX_WAIT_MS, ReplicationQuota
from kafkalite.metadata.throttles import UNLIMITED, Throttle

RATE = 100_000


@pytest.fixture
def quota() -> ReplicationQuota:
    made = ReplicationQuota()
    assert made.update(Throttle(RATE, {"t": None}), 0)
    return made


def test_without_a_rate_everything_is_allowed() -> None:
    quota = ReplicationQuota()
    assert not quota.covers("t", 0)
    assert (quota.allowed_bytes(0), quota.wait_ms(0)) == (UNLIMITED, 0)
    quota.spend(10**12, 0)
    assert quota.allowed_bytes(0) == UNLIMITED


def test_a_large_batch_is_paid_for_by_a_wait(quota: ReplicationQuota) -> None:
    assert quota.covers("t", 0)
    assert not quota.covers("u", 0)
    assert quota.allowed_bytes(0) == RATE * BURST_MS // 1000
    quota.spend(RATE + RATE // 2, 0)  # one second ahead
    assert quota.allowed_bytes(999 + LEAST_MS) == 0
    assert quota.wait_ms(0) == MAX_WAIT_MS
    assert quota.wait_ms(999 + LEAST_MS) == 1
    assert quota.allowed_bytes(1_000 + LEAST_MS) == RATE * LEAST_MS // 1000
    assert quota.wait_ms(1_000 + LEAST_MS) == 0


def test_spent_bytes_count_on_unless_the_rate_changes(quota: ReplicationQuota) -> None:
    quota.spend(RATE, 0)
    assert not quota.update(Throttle(RATE, {"t": None}), 0)
    assert quota.update(Throttle(RATE, {"u": None}), 0)
    assert quota.allowed_bytes(0) == 0
    assert quota.update(Throttle(2 * RATE, {"u": None}), 0)
    assert quota.allowed_bytes(0) == RATE
    assert quota.update(Throttle(), 0)
    assert quota.allowed_bytes(0) == UNLIMITED


@pytest.mark.parametrize("rate", [1, 2, 3, 7, 20])
def test_the_slowest_rates_allow_a_batch_after_a_while(rate: int) -> None:
    quota = ReplicationQuota()
    assert quota.update(Throttle(rate, {"t": None}), 0)
    assert quota.allowed_bytes(0) >= 1
    quota.spend(100, 0)
    assert quota.allowed_bytes(90_000 // rate) == 0
    assert quota.allowed_bytes(102_000 // rate + 1_000) >= 1


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50_000)), min_size=1, max_size=200),
    st.integers(1, 10**6),
)
def test_over_any_time_the_rate_is_exceeded_by_a_burst_and_a_response_at_most(
    steps: list[tuple[int, int]], rate: int
) -> None:
    quota = ReplicationQuota()
    quota.update(Throttle(rate, {"t": None}), 0)
    now_ms = sent = 0
    for pause_ms, size_bytes in steps:
        now_ms += pause_ms
        if quota.allowed_bytes(now_ms):
            quota.spend(size_bytes, now_ms)
            sent += size_bytes
        assert sent <= rate * (now_ms + BURST_MS) / 1000 + 50_000
