"""Backoff against its formula, and which errors are retriable."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.client.cluster.retry import Backoff, is_retriable, needs_metadata
from kafkalite.errors import (
    ClientClosedError,
    ConnectionFailedError,
    KafkaStorageError,
    MessageTooLargeError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    RequestTimeoutError,
)


def test_backoff_doubles_up_to_its_ceiling() -> None:
    backoff = Backoff(100, 1000)
    assert [backoff.delay_ms(failures, 0.5) for failures in range(1, 7)] == [100, 200, 400, 800, 1000, 1000]


def test_backoff_of_a_million_failures_is_the_ceiling() -> None:
    assert Backoff(100, 1000).delay_ms(1_000_000, 0.5) == 1000


def test_no_backoff_is_none() -> None:
    assert Backoff(0, 0).delay_ms(3, 0.9) == 0


def test_a_first_pause_above_the_ceiling_is_kept() -> None:
    assert Backoff(500, 100).delay_ms(1, 0.5) == 500


@settings(derandomize=True, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(0, 100_000), st.integers(1, 100), st.floats(0, 1, exclude_max=True)
)
def test_jitter_is_at_most_a_fifth(initial_ms: int, max_ms: int, failures: int, chance: float) -> None:
    plain = min(initial_ms * 2 ** (failures - 1), max(max_ms, initial_ms))
    delay_ms = Backoff(initial_ms, max_ms).delay_ms(failures, chance)
    assert plain * 0.8 - 1 <= delay_ms <= plain * 1.2


@pytest.mark.parametrize(
    ("error", "retriable", "stale"),
    [
        (NotLeaderOrFollowerError(), True, True),
        (NotEnoughReplicasError(), True, False),
        (KafkaStorageError(), True, True),
        (MessageTooLargeError(), False, False),
        (ConnectionFailedError("x"), True, True),
        (RequestTimeoutError("x"), True, True),
        (ClientClosedError("x"), False, False),
        (ValueError("x"), False, False),
    ],
)
def test_which_errors_are_retriable(error: Exception, retriable: bool, stale: bool) -> None:
    assert is_retriable(error) is retriable
    assert needs_metadata(error) is stale
