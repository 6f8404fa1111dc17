"""kl on a broker with a damaged log: nothing takes the sound part for the whole log (R24)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kafkalite import Admin, Broker, Producer, TopicPartition
from kafkalite.cli.exit_codes import PARTIAL_FAILURE
from kafkalite.cli.group_consume import GroupJob
from kafkalite.client.cluster import list_offsets
from kafkalite.client.consumer import assigned_partitions
from kafkalite.errors import KafkaStorageError

Kl = Callable[..., Any]


@pytest.fixture
def damaged(kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kl]:
    """``kl`` for a broker with the topic t: the batch at offset 2 of 4 in partition 0 is damaged."""
    for module in (list_offsets, assigned_partitions):
        monkeypatch.setattr(module, "STORAGE_ERROR_PATIENCE_MS", 0)
    settings = {"log_dirs": tmp_path / "data", "listeners": "127.0.0.1:0"}
    up, ends = threading.Event(), []

    async def fill() -> None:
        async with Broker(**settings) as broker, Admin(broker.address) as admin:
            await admin.create_topic("t", partitions=2)
            async with Producer(broker.address) as producer:
                for number in range(4):
                    for partition in (0, 1):
                        await producer.send("t", b"%d" % number, partition=partition)
                    await producer.flush()

    async def live() -> None:
        stop = asyncio.Event()
        async with Broker(**settings) as broker:
            ends.extend([broker.bootstrap_servers, asyncio.get_running_loop(), stop])
            up.set()
            await stop.wait()

    asyncio.run(fill())
    (log,) = (tmp_path / "data").glob("*-0/*.log")
    content = bytearray(log.read_bytes())
    length = int.from_bytes(content[8:12], "big") + 12
    content[2 * length + length - 3] ^= 1
    log.write_bytes(content)
    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    assert up.wait(20)
    monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", ends[0])
    yield kl
    ends[1].call_soon_threadsafe(ends[2].set)
    thread.join()


def test_a_damaged_partition_does_not_keep_kl_from_reading_the_others(damaged: Kl) -> None:
    consumed = damaged("consume", "t", "-e", "-f", "%p:%s\\n")
    assert sorted(consumed.text.split()) == ["0:0", "0:1", "1:0", "1:1", "1:2", "1:3"]
    assert consumed.code == PARTIAL_FAILURE
    assert "t-0" in consumed.told
    assert "accept-loss" in consumed.told
    assert "1 of 2 partitions could not be read to the end" in consumed.told


def test_a_damaged_partition_does_not_keep_a_group_from_the_others(damaged: Kl) -> None:
    consumed = damaged("consume", "t", "-g", "g", "-e", "-f", "%p:%s\\n")
    assert sorted(consumed.text.split()) == ["0:0", "0:1", "1:0", "1:1", "1:2", "1:3"]
    assert consumed.code == PARTIAL_FAILURE
    assert "accept-loss" in consumed.told
    assert "t-0 could not be read to the end" in consumed.told
    again = damaged("consume", "t", "-g", "g", "-e", "-f", "%p:%s\\n")
    assert (again.text, again.code) == ("", PARTIAL_FAILURE)


def test_r24_kl_reads_the_sound_records_and_then_fails_with_the_cause(damaged: Kl) -> None:
    """The damage is found only while it is read: the broker was stopped cleanly."""
    for _ in range(2):
        consumed = damaged("consume", "t", "-p", "0", "-e")
        assert (consumed.text.split(), consumed.code) == (["0", "1"], 1)
        assert "accept-loss" in consumed.told
    assert damaged("consume", "t", "-p", "0", "-r", "0:2").text.split() == ["0", "1"]
    assert damaged("consume", "t", "-p", "1", "-e").text.split() == ["0", "1", "2", "3"]
    assert damaged("fetch", "t-0-1").text.split() == ["1"]
    assert "accept-loss" in damaged("fetch", "t-0-2").told
    offsets = damaged("offsets", "t")
    assert [row.split() for row in offsets.text.splitlines()[1:]] == [
        ["t", "0", "0", "-", "-"],
        ["t", "1", "0", "4", "4"],
    ]
    assert offsets.code == 1
    assert "t-0 is offline" in offsets.told
    assert damaged("offsets", "t", "--earliest").code == 0
    described = damaged("topic", "describe", "t")
    assert described.code == 0
    assert "partition 0 is offline on broker 1" in described.text


def test_the_end_of_a_partition_that_another_replica_takes_over_is_asked_for_again() -> None:
    """With ``-e``, a member would otherwise never reach the end of this partition."""
    tp = TopicPartition("t", 0)

    class TakenOver:
        """A consumer whose first lookup of an end offset fails."""

        calls = 0

        def assignment(self) -> list[TopicPartition]:
            return [tp]

        def position(self, _: TopicPartition) -> int:
            return 4

        async def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
            self.calls += 1
            if self.calls == 1:
                raise KafkaStorageError("the log is damaged")
            return dict.fromkeys(tps, 4)

    async def rounds() -> list[bool]:
        job = GroupJob(("t",), "g", True, None, None, {}, cast(Any, None))
        consumer: Any = TakenOver()
        return [await job._is_at_end(consumer) for _ in range(3)]

    assert asyncio.run(rounds()) == [False, True, True]
