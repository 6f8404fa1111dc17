"""Mutants of the rules in ``kafkalite.storage``; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from kafkalite.errors import (
    InvalidProducerEpochError,
    OutOfOrderSequenceNumberError,
    StorageExhaustedError,
    UnknownProducerIdError,
)
from kafkalite.records.header import BatchHeader, Buffer, parse_header, stamp, total_length
from kafkalite.storage.log import Log
from kafkalite.storage.producer_state import ProducerState, ProducerStates, SequencedBatch
from proof.mutants import Mutant

_LOG: Final = "kafkalite.storage.log:Log"
_STATE: Final = "kafkalite.storage.producer_state:ProducerState"
_STATES: Final = "kafkalite.storage.producer_state:ProducerStates"

_BATCH: Final = "kafkalite.storage.producer_state:SequencedBatch"

Check = Callable[[ProducerStates, BatchHeader, Buffer], SequencedBatch | None]


def _keep_empty_epoch(self: Log) -> None:
    self._epochs.truncate_from_end(self.log_end_offset + 1)
    self._latest_epoch = self._epochs.latest_epoch


def _accept_repeated(self: ProducerStates, header: BatchHeader, batch: Buffer, original: Check) -> None:
    original(self, header, batch)


def _accept_gap(
    self: ProducerStates, header: BatchHeader, batch: Buffer, original: Check
) -> SequencedBatch | None:
    try:
        return original(self, header, batch)
    except (OutOfOrderSequenceNumberError, UnknownProducerIdError):
        return None


def _any_content(self: SequencedBatch, header: BatchHeader, batch: Buffer) -> bool:
    return True


def _any_coordinator(self: ProducerState, coordinator_epoch: int) -> bool:
    return True


def _keep_epoch(self: ProducerState, marker_epoch: int) -> None:
    pass


def _high_watermark(self: ProducerStates, high_watermark: int) -> int:
    return high_watermark


def _always(self: object, *_: object) -> bool:
    return True


def _never(*_: object) -> bool:
    return False


def _no_files(*_: object) -> tuple[str, ...]:
    return ()


_RECOVERY: Final = "kafkalite.storage.recovery:_Recovery"
_STORE: Final = "kafkalite.storage.log_store:LogStore"
_DIRS: Final = "kafkalite.storage.log_dirs:LogDirs"
_SEGMENT: Final = "kafkalite.storage.segment:Segment"


def _nothing(*_: object, **__: object) -> None:
    return None


def _stamp_own_epoch(
    self: Log, batches: Buffer, *, now_ms: int, leader_epoch: int | None = None, original: Callable[..., None]
) -> None:
    data, position = bytearray(batches), 0
    while leader_epoch is not None and position < len(data):
        length = total_length(data, position)
        header = parse_header(data[position : position + length])
        stamp(
            memoryview(data)[position : position + length],
            base_offset=header.base_offset,
            leader_epoch=leader_epoch,
        )
        position += length
    original(self, data, now_ms=now_ms, leader_epoch=leader_epoch)


def _unchecked(buffer: memoryview, position: int) -> BatchHeader:
    return parse_header(buffer, position)


def _only_remember(self: Log, leader_epoch: int) -> None:
    self._latest_epoch = leader_epoch


def _first_run(*arguments: Any, original: Callable[..., Any]) -> Any:
    return islice(original(*arguments), 1)


class _UnsyncedNames:
    """A file system whose directories are never synced."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        return _nothing if name == "sync_dir" else getattr(self._fs, name)


def _cut_unsynced(self: Log, number: int, found: Any, original: Callable[..., None]) -> None:
    fs: Any = self._fs
    self._fs = _UnsyncedNames(fs)
    try:
        original(self, number, found)
    finally:
        self._fs = fs


def _try_again(self: Log, work: Any, error: BaseException | None, original: Callable[..., None]) -> None:
    if error is None:
        original(self, work, error)
    else:
        self._sync.round = None


def _fail_at_once(self: Log, work: Any, error: BaseException | None, original: Callable[..., None]) -> None:
    original(self, work, OSError(str(error)) if isinstance(error, StorageExhaustedError) else error)


def _accept_old_epoch(
    self: ProducerStates, header: BatchHeader, batch: Buffer, original: Check
) -> SequencedBatch | None:
    try:
        return original(self, header, batch)
    except InvalidProducerEpochError:
        return None


def _expire_open(self: ProducerStates, now_ms: int, expiration_ms: int, original: Callable[..., int]) -> int:
    self.open.clear()
    return original(self, now_ms, expiration_ms)


def _close_unsynced(copy: Any) -> None:
    log = copy.log
    log.synced_end_offset = log.log_end_offset
    log._sync.forget()
    log._closed_end = log._end_now()
    log._segments.release()
    log._is_closed = True


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R80-any-directory",
        "a data directory of another node is used",
        {"kafkalite.storage.log_store:_refuse_strange": _nothing},
    ),
    Mutant(
        "R82-lost-is-new",
        "a log that was in a lost data directory begins as a new, empty one",
        {f"{_DIRS}._expect": _nothing},
    ),
    Mutant(
        "R83-older-is-current",
        "an older copy of a data directory is taken for the directory itself",
        {"kafkalite.storage.log_dirs:is_older_directory": _never},
    ),
    Mutant(
        "R83-forgotten",
        "an older copy of a data directory is trusted before its logs were fetched again",
        {f"{_DIRS}._is_suspect": _never},
    ),
    Mutant(
        "R85-not-frozen",
        "a log takes appends while its copy replaces it",
        {"kafkalite.storage.log:Log.freeze": _nothing},
    ),
    Mutant(
        "R85-unsynced-copy",
        "a copy replaces a log before it is synced",
        {"kafkalite.storage.log_copy:LogCopy.make_durable": _close_unsynced},
    ),
    Mutant(
        "R84-first-found",
        "of two logs of a partition, the one in the first directory is used",
        {"kafkalite.storage.log_dirs:choose_log": lambda versions: 0},
    ),
    Mutant(
        "R84-damaged-forgotten",
        "a sound log is used although a damaged one of the partition was further, and nothing is missing",
        {"kafkalite.storage.log_dirs:missing_end": _nothing},
    ),
    Mutant(
        "R24-no-scan",
        "a bad batch with intact ones behind it is cut as a torn tail",
        {f"{_RECOVERY}._is_cut_expected": _always},
    ),
    Mutant(
        "R24-whole-tail-cut",
        "a whole last batch with a changed base offset is cut as a torn tail",
        {"kafkalite.storage.recovery:is_copy": _always},
    ),
    Mutant(
        "R24-late-points",
        "recovery points are not written within a second",
        {f"{_STORE}.begin_checkpoint": _nothing},
    ),
    Mutant(
        "R24-kept-unsynced",
        "a log is used before the bytes that its recovery keeps are synced",
        {"kafkalite.storage.recovery:RecoverySync.run": _nothing},
    ),
    Mutant("R24-torn-deleted", "a torn tail is not kept", {f"{_RECOVERY}._keep_torn": _no_files}),
    Mutant(
        "R25-missing-is-new",
        "a log whose directory is missing is created again",
        {f"{_STORE}._missing_log": _nothing},
    ),
    Mutant(
        "R45-behind-dropped",
        "accepting a loss drops the intact batches behind the damage",
        {
            "kafkalite.storage.accept_loss:intact_runs": _first_run,
            "kafkalite.storage.accept_loss:misplaced_runs": _no_files,
        },
    ),
    Mutant(
        "R42-no-fingerprint",
        "a segment of another log or an older one is used",
        {f"{_RECOVERY}._check_fingerprint": _nothing, f"{_SEGMENT}.has": _always},
    ),
    Mutant(
        "R42-head-unnamed",
        "no index names the first batch of a segment before the segment is synced",
        {f"{_SEGMENT}._save_head": _nothing},
    ),
    Mutant(
        "R42-any-identity",
        "a directory of another log is used",
        {
            f"{_RECOVERY}._check_identity": _nothing,
            f"{_RECOVERY}._check_fingerprint": _nothing,
            f"{_SEGMENT}.has": _always,
        },
    ),
    Mutant(
        "R42-any-swap",
        "a swap file of another log replaces a segment",
        {"kafkalite.storage.compaction_swap:swap_problem": _nothing},
    ),
    Mutant(
        "R53-scrub-ignored", "damage that no reader meets stays unnoticed", {f"{_LOG}.finish_scrub": _nothing}
    ),
    Mutant(
        "R58-epoch-unchecked",
        "a batch whose leader epoch has changed is used",
        {"kafkalite.storage.leader_epochs:LeaderEpochs.check": _nothing},
    ),
    Mutant(
        "R58-epochs-late",
        "a new epoch is in the leader-epochs file only after the next sync",
        {"kafkalite.storage.sync_work:SyncState.write_ahead": _nothing},
    ),
    Mutant(
        "R58-newer-accepted",
        "after the end of the process a last batch may have any later epoch",
        {f"{_RECOVERY}._may_begin_epochs": _always},
    ),
    Mutant(
        "R58-older-kept",
        "an older version of the leader-epochs file is used",
        {"kafkalite.storage.recovery:_has_newer_end": _never},
    ),
    Mutant("R43-unchecked-read", "changed bytes are sent to readers", {f"{_SEGMENT}._verify": _nothing}),
    Mutant(
        "R43-place-unchecked",
        "a batch that another one has overwritten under a running node is hidden from readers",
        {f"{_SEGMENT}._check_place": _nothing},
    ),
    Mutant(
        "R1-own-epoch",
        "a follower writes the epoch that it follows into the leader's batches",
        {f"{_LOG}.append_as_follower": _stamp_own_epoch},
    ),
    Mutant(
        "R1-crc-unchecked",
        "a follower appends batches without checking their CRC",
        {"kafkalite.storage.log:check_at": _unchecked},
    ),
    Mutant(
        "R2-cache-kept",
        "a truncation leaves the epochs behind the log end in the cache",
        {"kafkalite.storage.leader_epochs:LeaderEpochs.truncate_from_end": _nothing},
    ),
    Mutant(
        "R2-start-unrecorded",
        "the start of a leader epoch is not in the cache",
        {f"{_LOG}.start_epoch": _only_remember},
    ),
    Mutant(
        "R4-names-unsynced",
        "a truncation does not sync the directory of the segments that it removes",
        {f"{_LOG}._cut": _cut_unsynced},
    ),
    Mutant(
        "R5-keep-empty-epochs",
        "an epoch without a record stays in the epoch cache of a follower",
        {"kafkalite.storage.log:Log._drop_empty_epochs": _keep_empty_epoch},
    ),
    Mutant(
        "R26-sync-retried",
        "after a failed sync the log stays online and syncs again",
        {f"{_LOG}.finish_sync": _try_again},
    ),
    Mutant(
        "R55-refusal-final",
        "a sync that lacks a file descriptor takes the log offline",
        {f"{_LOG}.finish_sync": _fail_at_once},
    ),
    Mutant(
        "R27-kept-after-truncation",
        "a truncation leaves the producers as they were",
        {"kafkalite.storage.producer_snapshots:ProducerSnapshots.truncate": _nothing},
    ),
    Mutant("R28-old-epoch", "a batch of an older epoch is appended", {f"{_STATES}.check": _accept_old_epoch}),
    Mutant(
        "R29-expires-open", "a producer with an open transaction expires", {f"{_STATES}.expire": _expire_open}
    ),
    Mutant(
        "R31-never-asked",
        "a leader takes the first batch of a transaction without the coordinator",
        {f"{_STATES}.needs_verification": lambda self, producer_id, epoch: False},
    ),
    Mutant(
        "R33-aborted-unindexed",
        "an aborted transaction does not enter the index",
        {"kafkalite.storage.aborted_index:AbortedIndex.add": _nothing},
    ),
    Mutant("R28-no-dedup", "a repeated batch is appended again", {f"{_STATES}.check": _accept_repeated}),
    Mutant(
        "R28-sequence-only",
        "a batch with other content under the same sequences counts as a repetition",
        {f"{_BATCH}.is_repeated_by": _any_content},
    ),
    Mutant("R28-no-gap-check", "a batch out of sequence is appended", {f"{_STATES}.check": _accept_gap}),
    Mutant(
        "R31-marker-epoch-ignored",
        "a marker does not fence late batches of the transaction that it ended",
        {f"{_STATE}.fence": _keep_epoch},
    ),
    Mutant(
        "R32-old-coordinator",
        "a partition takes a marker of an earlier coordinator",
        {f"{_STATE}.is_from_current_coordinator": _any_coordinator},
    ),
    Mutant(
        "R33-lso-ignores-open",
        "the last stable offset passes the beginning of an open transaction",
        {f"{_STATES}.first_open_offset": _high_watermark},
    ),
    Mutant(
        "R33-lso-uncommitted-marker",
        "the last stable offset passes a transaction whose marker is uncommitted",
        {f"{_STATES}.first_uncommitted_offset": _high_watermark},
    ),
)
