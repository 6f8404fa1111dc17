"""Sampled rates and token buckets, against models that keep every event."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalite.broker.quotas.rates import WINDOW_COUNT, WINDOW_MS, SampledRate, TokenBucket

SPAN_MS = WINDOW_COUNT * WINDOW_MS
#: (ms since the previous event, amount)
EVENTS = st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 50)), min_size=1, max_size=60)


def throttled_sum(
    quota: float, size: float, *, connections: int, offered: float, until_ms: int
) -> list[tuple[int, float]]:
    """Return (time, amount) of clients that share a rate, offer a multiple of it, and wait as told."""
    rate = SampledRate(quota)
    events = [(0, number) for number in range(connections)]
    sent: list[tuple[int, float]] = []
    while events[0][0] < until_ms:
        now_ms, number = heapq.heappop(events)
        sent.append((now_ms, size))
        wait_ms = rate.record(size, now_ms)
        pace_ms = round(size * connections * 1000 / (offered * quota))
        heapq.heappush(events, (now_ms + wait_ms + pace_ms, number))
    return sent


@pytest.mark.parametrize("connections", [1, 5])
@pytest.mark.parametrize("seconds_per_request", [0.01, 0.1, 0.5])
def test_a_client_at_ten_times_its_quota_is_held_within_a_tenth_of_it(
    connections: int, seconds_per_request: float
) -> None:
    sent = throttled_sum(
        1000.0, 1000 * seconds_per_request, connections=connections, offered=10, until_ms=120_000
    )
    for start_ms in range(0, 90_000, 5_000):
        total = sum(amount for at_ms, amount in sent if start_ms <= at_ms < start_ms + 30_000)
        assert 27_000 <= total <= 33_000, start_ms


def test_a_client_within_its_quota_is_not_throttled() -> None:
    rate = SampledRate(1000)
    assert not any(rate.record(90, now_ms) for now_ms in range(0, 60_000, 100))


def test_the_throttle_time_is_that_after_which_the_rate_is_the_bound() -> None:
    rate = SampledRate(1000)
    assert rate.record(1000, 0) == 0
    assert rate.record(500, 0) == 500
    assert rate.record(0, 1_499) == 1
    assert rate.record(0, 1_500) == 0


def test_an_idle_client_may_use_what_it_has_not_used_within_the_window() -> None:
    rate = SampledRate(1000)
    rate.record(1, 0)
    assert rate.record(8_999, 9_000) == 0
    assert rate.record(1_000, 9_000) == 1_000


def test_an_excess_is_not_forgotten_with_its_sample() -> None:
    rate = SampledRate(1)
    rate.record(60, 0)
    assert rate.record(0, 30_000) > 0
    assert rate.record(0, 60_000) == 0


def test_a_rate_is_idle_after_the_window_unless_an_excess_remains() -> None:
    rate = SampledRate(10)
    rate.record(10, 0)
    assert not rate.is_idle(SPAN_MS - 1)
    assert rate.is_idle(SPAN_MS)
    rate.record(10 * 3 * WINDOW_COUNT, SPAN_MS)
    assert not rate.is_idle(3 * SPAN_MS)


@given(EVENTS)
def test_below_the_bound_a_rate_counts_the_events_of_the_window(events: Any) -> None:
    rate = SampledRate(1e9)
    kept: list[tuple[int, int]] = []
    samples: list[int] = []
    now_ms = 0
    for pause_ms, amount in events:
        now_ms += pause_ms
        rate.record(amount, now_ms)
        samples = [start_ms for start_ms in samples if now_ms - start_ms < SPAN_MS]
        if not samples or now_ms - samples[-1] >= WINDOW_MS:
            samples.append(now_ms)
        kept = [(at_ms, one) for at_ms, one in [*kept, (now_ms, amount)] if at_ms >= samples[0]]
        assert rate._total == sum(one for _, one in kept)


@given(EVENTS, st.integers(1, 20))
def test_a_client_that_waits_never_exceeds_its_quota_and_a_window(events: Any, quota: int) -> None:
    rate = SampledRate(quota)
    sent: list[tuple[int, int]] = []
    now_ms = 0
    for pause_ms, amount in events:
        now_ms += pause_ms
        sent.append((now_ms, amount))
        now_ms += rate.record(amount, now_ms)
        for first_ms, _ in sent:
            total = sum(one for at_ms, one in sent[:-1] if at_ms >= first_ms)
            assert total <= quota * (now_ms - first_ms + SPAN_MS) / 1000 + 50
    total = sum(amount for _, amount in sent)
    assert total <= quota * (now_ms + WINDOW_MS) / 1000 + 1e-6


@given(EVENTS, st.integers(1, 20))
def test_a_bucket_admits_while_it_is_not_overdrawn(events: Any, quota: int) -> None:
    bucket = TokenBucket(quota, 0)
    burst = tokens = quota * WINDOW_COUNT * WINDOW_MS / 1000
    now_ms = 0
    for pause_ms, amount in events:
        now_ms += pause_ms
        tokens = min(burst, tokens + quota * pause_ms / 1000)
        wait_ms = bucket.admit(amount, now_ms)
        assert (wait_ms > 0) == (tokens < 0)
        if not wait_ms:
            tokens -= amount


def test_a_bucket_names_the_time_after_which_it_admits() -> None:
    bucket = TokenBucket(2, 0)
    assert bucket.admit(30, 0) == 0
    wait_ms = bucket.admit(1, 0)
    assert wait_ms == 4_000
    assert bucket.admit(1, wait_ms - 1) == 1
    assert bucket.admit(1, wait_ms) == 0
    assert not bucket.is_idle(wait_ms)
    assert bucket.is_idle(wait_ms + 60_000)


def test_a_bucket_gives_tokens_back_up_to_its_burst() -> None:
    bucket = TokenBucket(100, 0, burst_ms=500)
    assert bucket.tokens(0) == 50
    bucket.take(80, 0)
    assert bucket.tokens(100) == -20
    bucket.take(-30, 100)
    assert bucket.tokens(100) == 10
    bucket.take(-1_000, 100)
    assert bucket.tokens(60_000) == 50
