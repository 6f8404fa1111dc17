"""The high watermark, against the rules R7 to R10 and a slow obvious model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.replication.leader import PartitionLeader


def leader(*, isr=(1,), epoch_start=0, high_watermark=0, minimum=1):
    return PartitionLeader(
        1,
        leader_epoch=0,
        isr=isr,
        epoch_start_offset=epoch_start,
        high_watermark=high_watermark,
        min_insync_replicas=minimum,
    )


def test_alone_in_the_isr_the_leaders_own_progress_is_the_high_watermark():
    alone = leader()
    assert alone.on_progress(1, 5)
    assert alone.high_watermark == 5
    assert not alone.on_progress(1, 5)
    assert not alone.on_progress(1, 4)
    assert alone.high_watermark == 5


def test_r8_the_least_progress_over_the_isr_counts():
    three = leader(isr=(1, 2, 3))
    assert not three.on_progress(1, 9)
    assert not three.on_progress(2, 4)
    assert three.on_progress(3, 7)
    assert three.high_watermark == 4
    assert three.on_progress(2, 8)
    assert three.high_watermark == 7


def test_r8_a_replica_outside_the_isr_does_not_count():
    pair = leader(isr=(1, 2))
    pair.on_progress(1, 9)
    pair.on_progress(2, 9)
    assert not pair.on_progress(3, 2)
    assert pair.high_watermark == 9


def test_r8_the_leader_counts_even_outside_the_isr():
    outside = leader(isr=(2,))
    assert not outside.on_progress(2, 9)
    assert outside.on_progress(1, 5)
    assert outside.high_watermark == 5


def test_r9_with_too_few_in_sync_the_high_watermark_stands_still():
    lonely = leader(minimum=2)
    assert not lonely.has_enough_in_sync
    assert not lonely.on_progress(1, 5)
    assert lonely.high_watermark == 0
    assert lonely.configure((1,), 1)
    assert (lonely.has_enough_in_sync, lonely.high_watermark) == (True, 5)


def test_a_shrunken_isr_lets_the_high_watermark_go_on():
    pair = leader(isr=(1, 2))
    pair.on_progress(1, 9)
    pair.on_progress(2, 3)
    assert pair.high_watermark == 3
    assert pair.configure((1,), 1)
    assert pair.high_watermark == 9


def test_r10_a_leader_is_settled_when_the_start_of_its_epoch_is_reached():
    new = leader(isr=(1, 2), epoch_start=10, high_watermark=6)
    assert not new.is_settled
    new.on_progress(1, 12)
    new.on_progress(2, 9)
    assert (new.high_watermark, new.is_settled) == (9, False)
    new.on_progress(2, 10)
    assert new.is_settled


@pytest.mark.parametrize("isr", [(), (1,), (2,), (1, 2, 3)])
def test_an_unknown_progress_is_none(isr):
    assert leader(isr=isr, minimum=0).high_watermark == 0


events = st.one_of(
    st.tuples(st.just("progress"), st.integers(1, 3), st.integers(0, 20)),
    st.tuples(st.just("configure"), st.sets(st.integers(1, 3)), st.integers(1, 3)),
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(events, max_size=30))
def test_the_high_watermark_is_what_the_rules_say(history):
    real = leader()
    progress, isr, minimum, expected = {}, {1}, 1, 0
    for kind, first, second in history:
        if kind == "progress":
            progress[first] = second
            moved = real.on_progress(first, second)
        else:
            isr, minimum = first, second
            moved = real.configure(isr, minimum)
        before = expected
        if len(isr) >= minimum:
            expected = max(expected, min(progress.get(broker_id, 0) for broker_id in isr | {1}))
        assert real.high_watermark == expected
        assert moved == (expected > before)
