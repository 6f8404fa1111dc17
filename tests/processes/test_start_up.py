"""Starts after kill -9 with many objects: the cost of each is small. ``benchmarks/start_up.py`` has more."""

from __future__ import annotations

import pytest

from benchmarks.start_up import start_after_kill


@pytest.mark.slow
def test_s26_a_start_after_a_kill_costs_little_for_each_object() -> None:
    """At most 10 s for 5,000 partitions, 20 s for 20,000 topics, groups, transactional ids and producers."""
    _, base_s = start_after_kill(topics=1, others=1)
    _, cpu_s = start_after_kill(topics=200, partitions=3, others=200)
    assert cpu_s - base_s < 200 * 3 * 10 / 5_000 + 200 * 20 / 20_000
