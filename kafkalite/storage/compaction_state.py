"""CompactionState: how far one log is compacted, and the keys that the last pass stored for the next one."""

# Tests: tests/storage/test_compaction.py

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kafkalite.errors import CorruptLogError
from kafkalite.log_fields import Fields
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import CompactionPoints, LogState, decode_compaction, encode_compaction
from kafkalite.storage.compaction import Horizons, Remembered
from kafkalite.storage.compaction_pass import CompactionPass
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.segment import Segment

logger = logging.getLogger(__name__)

_DAY_MS: Final = 24 * 60 * 60 * 1000

#: The minimum time for which a commit marker stays. A lagging replica or a loading coordinator that has read
# its transaction as undecided must still find the marker.
MARKER_RETENTION_MS: Final = _DAY_MS

#: The maximum number of recorded passes. If there are more, tombstones may be removed slightly later.
_MAX_PASSES: Final = 64


class Cleanable(NamedTuple):
    """The bytes that a pass may cover, and the bytes among them that were never compacted (dirty)."""

    total_bytes: int
    dirty_bytes: int

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / self.total_bytes if self.total_bytes else 0.0


class CompactionState:
    """How far one log is compacted, and the results of its last complete pass that the next one uses.

    ``_remembered`` and ``_surveyed_to`` are results of the complete passes in this process. They are empty
    and 0 before the first one, and again when ``points`` finds that the log was truncated.
    """

    __slots__ = ("_directory", "_fs", "_points", "_remembered", "_surveyed_to")

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._points: CompactionPoints | None = None  # read on first use
        self._remembered: Remembered = {}  # from the last pass, for the next pass
        #: The end (exclusive) of the last complete pass. A pass over the same segments cannot go beyond it.
        self._surveyed_to = 0

    @property
    def _path(self) -> str:
        return layout.join(self._directory, layout.COMPACTION_FILE)

    def points(self, state: LogState) -> CompactionPoints:
        """Return the compaction points that are valid for a log with ``state``. Return empty points if the
        file is missing or damaged, or if a truncation has made the points invalid."""
        if self._points is None:
            try:
                self._points = decode_compaction(self._fs.read_bytes(self._path), self._path)
            except FileNotFoundError:
                self._points = CompactionPoints(state.truncations)
            except (CorruptLogError, ValueError) as error:
                logger.warning("compaction points ignored %s", Fields(path=self._path, error=error))
                self._points = CompactionPoints(state.truncations)
        held = self._points.after(state)
        if held is not self._points:
            self._points = held
            self._surveyed_to = 0
            self._remembered = {}
        return held

    def cleanable(self, segments: Sequence[Segment], state: LogState) -> Cleanable:
        """Return the total size of ``segments``, which a pass may compact, and of their dirty part. Nothing
        is dirty if the last pass could not have compacted more."""
        total_bytes = sum(segment.size_bytes for segment in segments)
        if not segments or segments[-1].next_offset <= self._surveyed_to:
            return Cleanable(total_bytes, 0)
        compacted_to = self.points(state).compacted_to
        dirty = (segment.size_bytes for segment in segments if segment.next_offset > compacted_to)
        return Cleanable(total_bytes, sum(dirty))

    def begin(
        self,
        segments: Sequence[Segment],
        state: LogState,
        config: LogConfig,
        now_ms: int,
        *,
        is_known: Callable[[int], bool],
        max_keys: int,
        may_forget: bool,
    ) -> CompactionPass:
        """Return a pass over ``segments``. ``Log.begin_compaction`` describes the arguments."""
        points = self.points(state)
        horizons = Horizons(0, 0)
        if may_forget:
            tombstone_ms = config.delete_retention_ms
            marker_ms = max(tombstone_ms, MARKER_RETENTION_MS)
            horizons = Horizons(_horizon(points, now_ms, tombstone_ms), _horizon(points, now_ms, marker_ms))
        return CompactionPass(
            self._fs,
            self._directory,
            config,
            segments,
            compacted_before=points.compacted_to,
            horizons=horizons,
            remembered=self._remembered,
            is_known=is_known,
            max_keys=max_keys,
            truncations=state.truncations,
        )

    def finish(
        self, done: CompactionPass, state: LogState, config: LogConfig, now_ms: int
    ) -> Callable[[], None] | None:
        """Adopt the results of a complete pass. Return a function that writes the new compaction points, or
        None if the points have not changed."""
        if not done.has_more:
            self._surveyed_to = done.surveyed_to
        points = self.points(state)
        self._remembered = done.remembered
        if done.compacted_to <= points.compacted_to:
            return None
        passes = (*points.passes, (done.compacted_to, now_ms))
        self._points = CompactionPoints(
            state.truncations, done.compacted_to, _thinned(passes, now_ms, config)
        )
        path, data = self._path, encode_compaction(self._points)
        return lambda: self._fs.write_atomically(path, data)


def _horizon(points: CompactionPoints, now_ms: int, age_ms: int) -> int:
    """Return the offset (exclusive) up to which passes that ended at least ``age_ms`` before ``now_ms`` have
    compacted the log; 0 if there are none."""
    return max((offset for offset, wall_ms in points.passes if wall_ms + age_ms <= now_ms), default=0)


def _thinned(
    passes: tuple[tuple[int, int], ...], now_ms: int, config: LogConfig
) -> tuple[tuple[int, int], ...]:
    """Drop the passes older than the retention of tombstones and markers, except the newest of them. If more
    than _MAX_PASSES are left, also drop every other pass of the older half."""
    longest_ms = max(config.delete_retention_ms, MARKER_RETENTION_MS)
    old = sum(wall_ms + longest_ms <= now_ms for _, wall_ms in passes)
    kept = passes[max(old - 1, 0) :]
    if len(kept) <= _MAX_PASSES:
        return kept
    half = len(kept) // 2
    return (*kept[:half:2], *kept[half:])
