"""The cost of a large group for its coordinator: 100 members and 1,000 partitions."""

from __future__ import annotations

import gc
import sys
import time

import pytest

from kafkalite.groups.record_codec import OFFSET, OffsetValue, record
from proof.groups.world import Consumer, Coordinator, settle

MEMBERS, PARTITIONS = 100, 1_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer multiplies the cost"),
]


def cpu_ms(call):
    """Return the call's own cost, without garbage collection of other tests' objects."""
    gc.collect()
    gc.disable()
    try:
        started = time.process_time()
        call()
        return (time.process_time() - started) * 1_000
    finally:
        gc.enable()


@pytest.fixture
def large():
    coordinator = Coordinator(t=PARTITIONS)
    consumers = [Consumer(coordinator, f"m{number:03d}", "t") for number in range(MEMBERS)]
    return coordinator, consumers


def test_a_hundred_joins_take_well_under_a_second(large, capsys):
    coordinator, consumers = large

    def everybody_joins():
        for consumer in consumers:
            consumer.join()

    join_ms = cpu_ms(everybody_joins)
    settle_ms = cpu_ms(lambda: settle(*consumers))
    assert {len(consumer.owned) for consumer in consumers} == {PARTITIONS // MEMBERS}
    byte_count = sum(len(record.key) + len(record.value or b"") for _, record in coordinator.log)
    with capsys.disabled():
        print(
            f"\n  {MEMBERS} members x {PARTITIONS} partitions: joins {join_ms:.0f} ms, settling"
            f" {settle_ms:.0f} ms of CPU, {len(coordinator.log)} records, {byte_count:,} bytes"
        )
    assert join_ms < 700


def test_joins_one_by_one_with_all_that_moves(large, capsys):
    _, consumers = large

    def grow():
        for count, consumer in enumerate(consumers, 1):
            consumer.join()
            settle(*consumers[:count])

    grow_ms = cpu_ms(grow)
    with capsys.disabled():
        print(f"\n  {MEMBERS} joins, settled after each: {grow_ms:.0f} ms of CPU (members' side included)")
    assert grow_ms < 5_000


def test_a_heartbeat_without_an_update_is_cheap(large, capsys):
    coordinator, consumers = large
    for consumer in consumers:
        consumer.join()
    settle(*consumers)
    for consumer in consumers:
        consumer.beat()
    request = consumers[0].request()
    machine, now, topics = coordinator.machine, coordinator.now, coordinator.topics
    rounds = 5_000
    beat_ms = cpu_ms(lambda: [machine.decide(request, ("", ""), now, topics) for _ in range(rounds)])
    update_ms = cpu_ms(lambda: [machine.has_update(request) for _ in range(rounds)])
    with capsys.disabled():
        print(
            f"\n  heartbeat {beat_ms * 1_000 / rounds:.1f} µs,"
            f" has_update {update_ms * 1_000 / rounds:.1f} µs of CPU"
        )
    assert beat_ms * 1_000 / rounds < 30


def test_offsets_are_loaded_fast(coordinator, capsys):
    count = 100_000
    records = [
        record(
            OFFSET,
            OffsetValue(number, 1, None, 10**12, "f" * 32),
            f"group-{number % 100}",
            "t",
            number % 1_000,
        )
        for number in range(count)
    ]
    replay = coordinator.machine.replay
    replay_ms = cpu_ms(lambda: [replay(each, coordinator.now) for each in records])
    with capsys.disabled():
        print(f"\n  {count / replay_ms:.0f} thousand offset records replayed in a second of CPU")
    # About an eighth of what an idle machine does: this finds work that grows with the log.
    assert count / replay_ms > 100
