"""A log compared with a list of batches, over any sequence of operations and crashes (I7, R4, R5, R24)."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kafkalite.records.header import stamp
from kafkalite.storage.checkpoints import RecoveryPoint
from kafkalite.storage.filesystem import unlink_existing
from kafkalite.storage.leader_epochs import LeaderEpochs
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem

DIRECTORY = "/data/log"


class LogMachine(RuleBasedStateMachine):
    """``batches`` is the expected log: (base offset, next offset, time, epoch, bytes). After a crash the
    end is anywhere from ``synced`` on; truncated batches never come back."""

    make_batch: Any
    read_all: Any

    @initialize(
        segment_bytes=st.sampled_from([1024, 3000]),
        interval=st.sampled_from([0, 200, 1000]),
        ahead=st.sampled_from([0, 512]),
    )
    def begin(self, segment_bytes: int, interval: int, ahead: int) -> None:
        self.fs = MemoryFileSystem(crashable=True)
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.config = LogConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=interval,
            preallocate_min_bytes=ahead,
            preallocate_max_bytes=2048,
            file_delete_delay_ms=10,
        )
        self.log = Log.create(self.fs, DIRECTORY, self.config)
        self.fs.sync_dir("/data")
        self.batches: list[tuple[int, int, int, int, bytes]] = []
        self.synced = 0
        self.start = 0
        self.epoch = 0
        self.point = RecoveryPoint()
        self.count = 0

    @property
    def end(self) -> int:
        return self.batches[-1][1] if self.batches else self.log.log_end_offset

    @rule(records=st.integers(1, 4), body_bytes=st.sampled_from([0, 60, 400, 1500]), time=st.integers(0, 60))
    def append(self, records: int, body_bytes: int, time: int) -> None:
        self.count += 1
        batch = self.make_batch(records, body_bytes=body_bytes, timestamp_ms=time, seed=self.count)
        base_offset = self.log.append(batch, now_ms=self.count, leader_epoch=self.epoch).base_offset
        self.batches.append((base_offset, base_offset + records, time, self.epoch, bytes(batch)))

    @rule(records=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def follow(self, records: list[int]) -> None:
        offset, data = self.log.log_end_offset, b""
        for count in records:
            self.count += 1
            batch = self.make_batch(count, timestamp_ms=7, seed=self.count)
            stamp(batch, base_offset=offset, leader_epoch=self.epoch)
            self.batches.append((offset, offset + count, 7, self.epoch, bytes(batch)))
            offset += count
            data += batch
        self.log.append_as_follower(data, now_ms=self.count)

    @rule()
    def sync(self) -> None:
        work = self.log.begin_sync()
        if work is not None:
            work.run()
            self.log.finish_sync(work, None)
        self.synced = self.log.log_end_offset
        assert self.log.synced_end_offset == self.synced

    @rule()
    def checkpoint(self) -> None:
        self.point = self.log.recovery_point

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def new_epoch(self) -> None:
        self.epoch += 1
        self.log.start_epoch(self.epoch)

    @precondition(lambda self: self.batches)
    @rule(back=st.integers(0, 12))
    def truncate(self, back: int) -> None:
        offset = max(self.log.log_end_offset - back, self.start)
        end = self.log.truncate_to(offset)
        self.batches = [one for one in self.batches if one[1] <= offset]
        self.start = min(self.start, end)
        self.synced = end if back else self.synced
        self.epoch += 1

    @rule(forward=st.integers(0, 6))
    def delete(self, forward: int) -> None:
        self.start = self.log.delete_before(min(self.start + forward, self.log.log_end_offset))
        self.synced = max(self.synced, self.start)
        self.forget_deleted()

    @rule(retention_bytes=st.sampled_from([0, 500, 3000]))
    def retain(self, retention_bytes: int) -> None:
        from dataclasses import replace

        self.log.reconfigure(replace(self.config, retention_bytes=retention_bytes))
        up_to = self.log.synced_end_offset if self.config.synced_only else self.log.log_end_offset
        self.log.delete_before(self.log.retention_offset(self.count, up_to=up_to))
        unlink_existing(self.log._fs, self.log.take_retired(self.count))
        self.log.reconfigure(self.config)
        assert self.log.log_start_offset <= max(self.synced, self.start)
        self.start = self.log.log_start_offset
        self.forget_deleted()

    def forget_deleted(self) -> None:
        self.batches = [one for one in self.batches if one[1] > self.start]

    @rule()
    def reopen(self) -> None:
        self.log.close(clean=True)
        end = self.log.clean_end
        assert end is not None
        self.log = Log.open_clean(self.fs, DIRECTORY, self.config, end)
        self.synced = self.log.log_end_offset

    @rule()
    def kill(self) -> None:
        """Kill the process; the page cache survives."""
        self.log = Log.recover(self.fs, DIRECTORY, self.config, self.point, may_lack_unsynced=True)
        self.synced = self.log.log_end_offset

    @rule(seed=st.integers(0, 1 << 16))
    def lose_power(self, seed: int) -> None:
        self.fs.crash(random.Random(seed))
        self.log = Log.recover(self.fs, DIRECTORY, self.config, self.point, may_lack_unsynced=True)
        end = self.log.log_end_offset
        assert end >= self.synced
        self.batches = [one for one in self.batches if one[1] <= end]
        self.synced = end

    @rule()
    def release(self) -> None:
        self.log.release_idle()

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert log.offline_reason is None
        assert log.log_start_offset == self.start
        if self.batches:
            assert log.log_end_offset == self.batches[-1][1]
        read = self.read_all(log, max_bytes=700)
        assert read == [(base, data) for base, _, _, _, data in self.batches]

    @invariant()
    def epochs_are_what_a_scan_finds(self) -> None:
        if not hasattr(self, "log"):
            return
        scanned = LeaderEpochs()
        for base, _, _, epoch, _ in self.batches:
            scanned.assign(epoch, max(base, self.start))
        found = [one for one in self.log.leader_epochs if one.start_offset < self.log.log_end_offset]
        assert found == scanned.entries()

    @precondition(lambda self: self.batches)
    @rule(back=st.integers(0, 40), time=st.integers(0, 61))
    def look_up(self, back: int, time: int) -> None:
        offset = max(self.log.log_end_offset - 1 - back, self.start)
        piece = self.log.read(offset, max_bytes=1, up_to=self.log.log_end_offset)
        holder = next(one for one in self.batches if one[0] <= offset < one[1])
        assert b"".join(piece.buffers) == holder[4]
        found = self.log.offset_for_timestamp(time)
        expected = next(((one[2], max(one[0], self.start)) for one in self.batches if one[2] >= time), None)
        assert found == expected

    @rule(start=st.integers(0, 30), length=st.integers(0, 40), max_bytes=st.integers(-1, 6000))
    def measure(self, start: int, length: int, max_bytes: int) -> None:
        start, end = self.start + start - 3, self.start + start - 3 + length
        touched = [one for one in self.batches if max(one[0], start, self.start) < min(one[1], end)]
        total = sum(len(one[4]) for one in touched)
        reached, size = end, total
        if total > max(max_bytes, 0):
            reached, size = min(touched[0][1], end), len(touched[0][4])
            for one in touched[1:]:
                if size + len(one[4]) > max_bytes:
                    break
                reached, size = one[1], size + len(one[4])
        reached = end if size == total else reached
        assert self.log.offset_for_bytes(start, end, max_bytes) == (reached, size, total)


@pytest.mark.slow
def test_a_log_is_a_list(make_batch: Any, read_all: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    machine = type(
        "Machine", (LogMachine,), {"make_batch": staticmethod(make_batch), "read_all": staticmethod(read_all)}
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            derandomize=True,
            deadline=None,
            max_examples=120,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
