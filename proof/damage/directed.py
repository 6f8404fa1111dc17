"""The cases of damage that find each mutant of the rules about damage.

``DIRECTED`` is {mutant: schedule}; a schedule returns None, or the violation. The node is prepared with the
mutant as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kafkalite.errors import LogOfflineError
from kafkalite.records.builder import build_batch
from kafkalite.storage import layout
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.damage.cases import Case, damage
from proof.damage.kinds import with_epoch
from proof.damage.single_node import broker_on, disk_of, intact_batches, prepare, run_case

_LOG: Final = "/data/log"
_OTHER_LOG: Final = "/data/other-log"


def _schedule(*cases: Case) -> Callable[[], str | None]:
    def run() -> str | None:
        for case in cases:
            outcome = asyncio.run(run_case(case, asyncio.run(prepare(is_clean=case.is_clean))))
            if outcome is None:
                return f"{case} changes nothing"
            if outcome.verdict in {"lost", "wrong"}:
                return f"{case}: {outcome.verdict}: {outcome.detail}"
        return None

    return run


def _keeps_torn_batches() -> str | None:
    """Check that batches behind a bad place, cut off after a restart of the system, are kept in a file."""
    node = asyncio.run(prepare(is_clean=False))
    tree = dict(node.tree)
    damage(Case("unproven segment", "flip", is_clean=False), tree, node.older, node.names)
    active = max(path for path in tree if path.startswith(f"{node.names.orders}/") and path.endswith(".log"))
    tree[active] = tree[active][:100] + b"\xff" + tree[active][101:]
    fs = disk_of(tree)
    fs.boot_count += 1
    before = intact_batches(fs)

    async def start() -> None:
        async with broker_on(fs):
            pass

    asyncio.run(start())
    gone = before - intact_batches(fs)
    return f"{len(gone)} intact batches were deleted" if gone else None


def _scrub_finds_damage() -> str | None:
    """Schedule: a bit of a closed segment that no client reads has changed."""
    node = asyncio.run(prepare(is_clean=True))
    tree = dict(node.tree)
    damage(Case("middle segment", "flip", is_clean=True), tree, node.older, node.names)

    async def start() -> int:
        async with broker_on(disk_of(tree)) as broker:
            await broker.housekeeping.scrubber.scrub()
            return broker.statistics().damaged_partition_count

    return None if asyncio.run(start()) == 1 else "the changed bit was not found"


class _Epochs:
    """A log without a broker, whose batches have the leader epochs 1, 1, 2, 2, …"""

    def __init__(self, count: int) -> None:
        self.fs = MemoryFileSystem()
        self.log = Log.create(self.fs, _LOG, LogConfig(segment_bytes=1024))
        for number in range(count):
            batch = build_batch([b"%d" % number * 40])
            self.log.append(batch, now_ms=1, leader_epoch=1 + number // 2)

    def change(self, number: int) -> None:
        """Give the last batch of segment ``number`` a later epoch."""
        names = [name for name in self.fs.list_dir(_LOG) if name.endswith(".log")]
        path = f"{_LOG}/{names[number]}"
        self.fs.open(path).write_at(0, with_epoch(self.fs.read_bytes(path), 1, is_last=True))

    def is_damaged(self) -> bool:
        """Whether a start after the end of the process, or a reader, finds damage."""
        log = Log.recover(self.fs, _LOG, LogConfig())
        with suppress(LogOfflineError):
            log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset)
        return log.damage is not None


def _finds_epoch(segment: int) -> Callable[[], str | None]:
    def run() -> str | None:
        node = _Epochs(20)
        node.change(segment)
        return None if node.is_damaged() else "a changed leader epoch is served"

    return run


def _takes_new_epoch() -> str | None:
    """Schedule: the process ends after the first batch of an epoch, which is not synced."""
    node = _Epochs(20)
    work = node.log.begin_sync()
    assert work is not None
    work.run()
    node.log.finish_sync(work, None)
    node.log.append(build_batch([b"new"]), now_ms=1, leader_epoch=20)
    return "a sound log is damaged" if node.is_damaged() else None


def _rebuilds_older_epochs() -> str | None:
    """Schedule: the file of epochs is an older version."""
    node, path = _Epochs(8), f"{_LOG}/leader-epochs"
    older = node.fs.read_bytes(path)
    for number in range(2):
        node.log.append(build_batch([b"%d" % number]), now_ms=1, leader_epoch=9)
    node.log.close(clean=True)
    node.fs.write_atomically(path, older)
    end = node.log.clean_end
    assert end is not None
    log = Log.open_clean(node.fs, _LOG, LogConfig(), end)
    with suppress(LogOfflineError):
        log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset)
    return "a sound log is damaged" if log.is_damaged else None


def _finds_flipped_batch() -> str | None:
    """Schedule: a payload changes while no process runs, after an orderly stop."""
    fs = MemoryFileSystem()
    log = Log.create(fs, _LOG, LogConfig())
    log.append(build_batch([b"value"]), now_ms=1, leader_epoch=1)
    log.close(clean=True)
    (name,) = (name for name in fs.list_dir(_LOG) if name.endswith(".log"))
    fs.open(f"{_LOG}/{name}").write_at(log.size_bytes - 1, b"?")
    end = log.clean_end
    assert end is not None
    again = Log.open_clean(fs, _LOG, LogConfig(), end)
    with suppress(LogOfflineError):
        again.read(0, max_bytes=1 << 20, up_to=again.log_end_offset)
    return None if again.is_damaged else "a changed batch is sent"


def _finds_moved_batch() -> str | None:
    """Schedule: the base offset of a batch changes after its process has written it."""
    fs = MemoryFileSystem()
    log = Log.create(fs, _LOG, LogConfig())
    for number in range(4):
        log.append(build_batch([b"%d" % number]), now_ms=1, leader_epoch=1)
    (name,) = (name for name in fs.list_dir(_LOG) if name.endswith(".log"))
    second = log.size_bytes // 4
    fs.open(f"{_LOG}/{name}").write_at(second, (3).to_bytes(8, "big"))
    with suppress(LogOfflineError):
        log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset)
    return None if log.is_damaged else "a batch is served with the offset of another one"


def _keeps_whole_tail() -> str | None:
    """Schedule: the process ends, and the base offset of the last batch, which is not synced, gets lower."""
    fs = MemoryFileSystem()
    log = Log.create(fs, _LOG, LogConfig())
    for number in range(4):
        log.append(build_batch([b"%d" % number]), now_ms=1, leader_epoch=1)
    (name,) = (name for name in fs.list_dir(_LOG) if name.endswith(".log"))
    fs.open(f"{_LOG}/{name}").write_at(log.size_bytes // 4 * 3, (1).to_bytes(8, "big"))
    again = Log.recover(fs, _LOG, LogConfig())
    return None if again.is_damaged else f"the log ends at {again.log_end_offset}, and nothing is reported"


def _refuses_foreign_swap() -> str | None:
    """Schedule: a closed segment of another log appears as a swap file; then the log is recovered."""
    fs = MemoryFileSystem()
    for directory, value in ((_LOG, b"own"), (_OTHER_LOG, b"foreign")):
        log = Log.create(fs, directory, LogConfig(is_compacted=True))
        log.append(build_batch([value]), now_ms=1, leader_epoch=1)
        log.roll()
        log.append(build_batch([value]), now_ms=1, leader_epoch=1)
        log.close(clean=False)
    segment = fs.read_bytes(f"{_OTHER_LOG}/{layout.segment_file_name(0, layout.LOG_SUFFIX)}")
    fs.open(f"{_LOG}/{layout.swap_file_name(0, 1, '0' * 16, '0' * 16)}", create=True).write_at(0, segment)
    log = Log.recover(fs, _LOG, LogConfig(is_compacted=True))
    data = b"".join(log.read(0, max_bytes=1 << 20, up_to=log.log_end_offset).buffers)
    return "records of another log are served" if b"foreign" in data else None


DIRECTED: Final = {
    "R24-no-scan": _schedule(Case("unproven segment", "flip", is_clean=False)),
    "R24-whole-tail-cut": _keeps_whole_tail,
    "R24-late-points": _schedule(Case("active segment", "third", is_clean=False)),
    "R24-torn-deleted": _keeps_torn_batches,
    "R25-missing-is-new": _schedule(Case("partition directory", "delete", is_clean=False)),
    "R42-no-fingerprint": _schedule(Case("middle segment", "swap", is_clean=False)),
    "R42-head-unnamed": _schedule(Case("young segment", "swap", is_clean=False)),
    "R42-any-swap": _refuses_foreign_swap,
    "R43-unchecked-read": _finds_flipped_batch,
    "R43-place-unchecked": _finds_moved_batch,
    "R53-scrub-ignored": _scrub_finds_damage,
    "R58-epoch-unchecked": _finds_epoch(1),
    "R58-newer-accepted": _finds_epoch(-1),
    "R58-epochs-late": _takes_new_epoch,
    "R58-older-kept": _rebuilds_older_epochs,
    "R44-damaged-served": _schedule(Case("group directory", "delete", is_clean=False)),
}
