"""The high watermark, against the rules R7 to R10 and a slow obvious model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.replication.leader import PartitionLeader


def leader(*, isr=(1,), epoch_start=0, high_watermark=0, minimum=1, **more):
    return PartitionLeader(
        1,
        leader_epoch=0,
        isr=isr,
        epoch_start_offset=epoch_start,
        high_watermark=high_watermark,
        min_insync_replicas=minimum,
        **more,
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


def test_r57_while_another_replica_is_eligible_the_high_watermark_stands_still(mutant):
    pair = leader(isr=(1, 2, 3), minimum=2, partition_epoch=0)
    for node_id, end in ((1, 9), (2, 5), (3, 3)):
        pair.on_progress(node_id, end)
    assert pair.high_watermark == 3
    assert not pair.take_state(1, (1, 2), has_eligible=True)
    assert not pair.on_progress(2, 6)
    assert pair.has_enough_in_sync, "acks=all is accepted, and waits"
    proposed = pair.propose(0, lag_time_max_ms=1_000, leader_end_offset=9, live=lambda _: None)
    assert (proposed.partition_epoch, proposed.isr) == (1, (1, 2))
    assert not pair.on_progress(2, 7)
    assert pair.take_state(2, (1, 2))
    assert pair.high_watermark == 7
    assert pair.propose(0, lag_time_max_ms=1_000, leader_end_offset=9, live=lambda _: None) is None
    mutant("R57-unconfirmed")
    pair.take_state(3, (1, 2), has_eligible=True)
    assert pair.on_progress(2, 8)


def test_r57_with_too_few_in_sync_there_is_nothing_to_confirm():
    lonely = leader(isr=(1,), minimum=2, has_eligible=True)
    lonely.on_progress(1, 9)
    assert lonely.propose(0, lag_time_max_ms=1_000, leader_end_offset=9, live=lambda _: None) is None


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


class TestReplicaThatIsAlwaysAMomentBehind:
    """Two replicas move the high watermark; each fetch of the third comes a little late."""

    END = 100

    @pytest.fixture
    def led(self) -> PartitionLeader:
        led = PartitionLeader(
            1,
            leader_epoch=0,
            isr=(1, 2),
            epoch_start_offset=0,
            high_watermark=0,
            min_insync_replicas=2,
            replicas=(1, 2, 3),
            now_ms=0,
        )
        self.fetch(led, 3, 90, at_end=90, now_ms=1_000)  # everything there was
        self.advance(led, 95)
        self.fetch(led, 3, 94, at_end=95, now_ms=1_010)  # a moment late
        return led

    def fetch(self, led: PartitionLeader, replica_id: int, end: int, *, at_end: int, now_ms: int) -> bool:
        return led.on_fetch(
            replica_id,
            broker_epoch=7,
            progress=end,
            synced_end_offset=end,
            log_start_offset=0,
            leader_end_offset=at_end,
            now_ms=now_ms,
        )

    def advance(self, led: PartitionLeader, end: int) -> None:
        led.on_progress(1, end)
        self.fetch(led, 2, end, at_end=end, now_ms=1_005)

    def propose(self, led: PartitionLeader, now_ms: int, *, is_live: bool = True):
        return led.propose(
            now_ms, lag_time_max_ms=10_000, leader_end_offset=self.END, live=lambda _: 7 if is_live else None
        )

    def test_is_waited_for_and_joins_with_its_next_fetch(self, led: PartitionLeader) -> None:
        assert not led.may_join(3)
        assert led.is_close(3, 1_010)
        assert self.propose(led, 1_010) is None
        assert led.is_waiting
        self.advance(led, 100)
        assert led.high_watermark == 95, "it waits"
        assert not self.fetch(led, 3, 95, at_end=100, now_ms=1_015)
        assert led.may_join(3)
        proposed = self.propose(led, 1_015)
        assert proposed is not None
        assert proposed.isr == (1, 2, 3)
        assert led.take_state(1, (1, 2, 3)) is False
        led.end_waits(1_020)
        assert not led.is_waiting

    def test_is_waited_for_briefly_and_not_again_at_once(self, led: PartitionLeader) -> None:
        self.propose(led, 1_010)
        self.advance(led, 100)
        assert not led.end_waits(1_509)
        assert led.end_waits(1_510)
        assert led.high_watermark == 100
        self.fetch(led, 3, 99, at_end=100, now_ms=1_511)
        assert not led.is_close(3, 1_511)

    def test_is_not_waited_for_when_it_may_not_join_at_all(self, led: PartitionLeader) -> None:
        assert self.propose(led, 1_010, is_live=False) is None
        assert not led.is_waiting

    def test_is_not_waited_for_when_it_was_caught_up_long_ago(self, led: PartitionLeader) -> None:
        assert not led.is_close(3, 2_000)
