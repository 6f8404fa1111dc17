"""CompactableLog: a durable log whose closed segments may be compacted.

The owner asks ``begin_compaction`` for a pass, runs its steps, and takes every ``SwapWork`` among them
through ``begin_swap``, ``run`` in any thread, ``finish_swap``; during that nothing else may remove anything
of the log. ``finish_compaction`` then notes how far it came. What can be wrong is told by the steps
themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from kafkalite.errors import CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import CompactionPoints, decode_compaction, encode_compaction
from kafkalite.storage.compaction import Horizons, Remembered
from kafkalite.storage.compaction_pass import CompactionPass
from kafkalite.storage.compaction_swap import SwapWork
from kafkalite.storage.durable_log import DurableLog
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)

_DAY_MS: Final = 24 * 60 * 60 * 1000

#: How long a marker of a commit stays at least. Whoever has read its transaction as undecided, a replica that
#: lags or a coordinator that loads, must still find it.
MARKER_RETENTION_MS: Final = _DAY_MS

#: Passes remembered, each with its time: more would only make tombstones go a little sooner.
_MAX_PASSES: Final = 64


class Cleanable(NamedTuple):
    """What of a log may be compacted, and how many bytes of that never were."""

    total_bytes: int
    dirty_bytes: int

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / self.total_bytes if self.total_bytes else 0.0


class CompactableLog(DurableLog):
    """Invariant: while ``_swap`` is set, no segment lets go of its file."""

    __slots__ = ("_points", "_remembered", "_surveyed_to", "_swap")

    def __init__(
        self, fs: FileSystem, directory: str, config: LogConfig, *, start: int = 0, end: int = 0
    ) -> None:
        super().__init__(fs, directory, config, start=start, end=end)
        self._points: CompactionPoints | None = None  # not read yet
        self._remembered: Remembered = {}  # by the last pass, for the next one
        self._surveyed_to = 0  # the last pass looked so far, and could not come further than it did
        self._swap: SwapWork | None = None

    # --- what is to be done ----------------------------------------------------------------------------

    def cleanable(self, now_ms: int, up_to: int) -> Cleanable:
        """What a pass could compact now; ``up_to`` is the high watermark, exclusive. Raises StorageError."""
        segments = self._cleanable_segments(now_ms, up_to)
        if not segments or segments[-1].next_offset <= self._surveyed_to:
            return Cleanable(sum(segment.size_bytes for segment in segments), 0)
        compacted_to = self.compaction_points.compacted_to
        dirty = [segment.size_bytes for segment in segments if segment.next_offset > compacted_to]
        return Cleanable(sum(segment.size_bytes for segment in segments), sum(dirty))

    def _cleanable_segments(self, now_ms: int, up_to: int) -> list[Segment]:
        """The closed segments from the first on that are synced, committed and old enough."""
        if not self._config.is_compacted or self.offline_reason is not None or self._clean_end is not None:
            return []  # a log that nobody has used since a clean start is not opened for this
        limit = min(up_to, self.synced_end_offset)
        lag_ms = self._config.min_compaction_lag_ms
        found: list[Segment] = []
        for segment in self._segments.segments[:-1]:
            if segment.next_offset > limit or segment in self._unsynced:
                break
            if lag_ms:
                try:
                    segment.load_indexes()
                except (CorruptLogError, OSError) as error:
                    raise self._read_failed(error) from error
                if segment.max_timestamp_ms > now_ms - lag_ms:
                    break
            found.append(segment)
        return found

    @property
    def compaction_points(self) -> CompactionPoints:
        """How far this log was compacted. Forgotten, it would only be found out anew."""
        if self._points is None:
            path = layout.join(self._directory, layout.COMPACTION_FILE)
            try:
                self._points = decode_compaction(self._fs.read_bytes(path), path)
            except FileNotFoundError:
                self._points = CompactionPoints(self._state.truncations)
            except (CorruptLogError, ValueError) as error:
                logger.warning("compaction points ignored %s", Fields(path=path, error=error))
                self._points = CompactionPoints(self._state.truncations)
        held = self._points.after(self._state)
        if held is not self._points:
            self._points = held
            self._surveyed_to = 0
            self._remembered = {}
        return held

    # --- a pass ----------------------------------------------------------------------------------------

    def begin_compaction(
        self, now_ms: int, up_to: int, max_keys: int, *, may_forget: bool = True
    ) -> CompactionPass | None:
        """A pass over what may be compacted, or None if there is nothing. ``now_ms`` is the wall clock.

        Of ``max_keys`` different keys at most it remembers where they stand. Unless it ``may_forget``, every
        tombstone and marker stays that nothing later has replaced (R41). Raises StorageError.
        """
        segments = self._cleanable_segments(now_ms, up_to)
        if not segments:
            return None
        points = self.compaction_points
        retention_ms = self._config.delete_retention_ms
        horizons = Horizons(
            points.horizon(now_ms, retention_ms),
            points.horizon(now_ms, max(retention_ms, MARKER_RETENTION_MS)),
        )
        if not may_forget:
            horizons = Horizons(0, 0)
        return CompactionPass(
            self._fs,
            self._directory,
            self._config,
            segments,
            compacted_before=points.compacted_to,
            horizons=horizons,
            remembered=self._remembered,
            is_known=self._is_known,
            max_keys=max_keys,
            truncations=self._state.truncations,
        )

    def _is_known(self, producer_id: int) -> bool:
        """Whether something is known of a producer; yes if that is not known itself."""
        states = self._producers.states
        return states is None or states.get(producer_id) is not None

    def fits(self, done: CompactionPass) -> bool:
        """Whether the log is still what the pass began with, apart from what was deleted from its front."""
        is_open = self.offline_reason is None and not self._is_closed
        return is_open and done.truncations == self._state.truncations

    def begin_swap(self, work: SwapWork) -> SwapWork | None:
        """``work``, if it still fits the log; None ends the pass. The caller runs it, and then calls
        ``finish_swap``, whatever comes of it. Raises StorageError."""
        if self.offline_reason is not None or self._is_closed or work.truncations != self._state.truncations:
            return None
        listed = self._segments.segments
        number = self._segments.number_of(work.old[0].base_offset)
        if number < 0 or listed[number : number + len(work.old)] != work.old:
            return None
        try:
            for (
                segment
            ) in work.old:  # readers go on with the old files meanwhile, whatever becomes of the names
                segment.load_indexes()
                segment.view()
        except (CorruptLogError, OSError) as error:
            raise self._read_failed(error) from error
        self._swap = work
        return work

    def finish_swap(self, work: SwapWork, error: BaseException | None) -> None:
        """Take the outcome of ``work.run()``. Raises LogOfflineError: the directory is neither old nor new
        until the next start (R26); DiskFullError, OSError: nothing changed."""
        self._swap = None
        if error is not None:
            if work.is_decided:
                raise self._write_failed(error) from error
            raise error
        new = work.new
        new.state = self._state
        new.reconfigure(self._config)
        self._segments.replace(work.old, new)
        new.save_indexes(new.size_bytes, final=True)
        work.is_done = True

    def give_up_swap(self, work: SwapWork) -> None:
        """``work`` was begun, but will not be run."""
        if self._swap is work:
            self._swap = None

    def finish_compaction(self, done: CompactionPass, now_ms: int) -> Callable[[], None] | None:
        """Note how far a pass came that was run to its end. Returns what makes it durable: to be run in any
        thread, and no loss if it fails."""
        if not self.fits(done) or not done.is_complete:
            return None
        if not done.has_more:
            self._surveyed_to = done.surveyed_to
        points = self.compaction_points
        self._remembered = done.remembered
        if done.compacted_to <= points.compacted_to:
            return None
        passes = (*points.passes, (done.compacted_to, now_ms))
        self._points = CompactionPoints(
            self._state.truncations, done.compacted_to, _thinned(passes, now_ms, self._config)
        )
        data = encode_compaction(self._points)
        path = layout.join(self._directory, layout.COMPACTION_FILE)
        return lambda: self._fs.write_atomically(path, data)

    # --- letting go ------------------------------------------------------------------------------------

    def release_idle(self) -> int:
        """Let go of files and maps not used since the last call. Returns how many segments that were."""
        return 0 if self._swap is not None else super().release_idle()


def _thinned(
    passes: tuple[tuple[int, int], ...], now_ms: int, config: LogConfig
) -> tuple[tuple[int, int], ...]:
    """``passes`` without those that tell nothing more, and not too many of them."""
    longest_ms = max(config.delete_retention_ms, MARKER_RETENTION_MS)
    old = sum(wall_ms + longest_ms <= now_ms for _, wall_ms in passes)
    kept = passes[max(old - 1, 0) :]
    if len(kept) <= _MAX_PASSES:
        return kept
    half = len(kept) // 2
    return (*kept[:half:2], *kept[half:])
