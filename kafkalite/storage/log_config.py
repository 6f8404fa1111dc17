"""The topic options that a log uses, as typed values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kafkalite.errors import ConfigError
from kafkalite.limits import KIB, MAX_SEGMENT_BYTES, MIB, MIN_SEGMENT_BYTES
from kafkalite.model import TimestampType

FSYNC: Final = "fsync"
PAGE_CACHE: Final = "page-cache"

_DAY_MS: Final = 24 * 60 * 60 * 1000
_SEVEN_DAYS_MS: Final = 7 * _DAY_MS


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The settings of one log. Immutable; ``Log.reconfigure`` replaces them.

    Behaviour: ``retention_ms`` and ``retention_bytes`` (-1: no limit), ``max_message_bytes`` (of one record
    batch), ``timestamp_type``, ``durability`` (``fsync``: only synced bytes are acknowledged;
    ``page-cache``: as in Kafka), ``file_delete_delay_ms`` (how long retired files are kept).

    Performance: a segment is closed at ``segment_bytes``, at the age ``segment_ms`` minus up to
    ``segment_jitter_ms``, or when its offset index has ``segment_index_bytes``. The offset index has at most
    one entry for each ``index_interval_bytes`` of log. A file first grows by ``preallocate_min_bytes``, later
    by its own size, up to ``preallocate_max_bytes``.

    Compaction, if ``is_compacted``: it begins when at least the fraction ``min_cleanable_dirty_ratio`` of the
    cleanable bytes was never compacted. Records younger than ``min_compaction_lag_ms`` are not compacted. A
    tombstone stays for at least ``delete_retention_ms`` after all earlier offsets were compacted.
    """

    segment_bytes: int = 1024 * MIB
    segment_ms: int = _SEVEN_DAYS_MS
    segment_jitter_ms: int = 0
    segment_index_bytes: int = 10 * MIB
    index_interval_bytes: int = 4096
    retention_ms: int = _SEVEN_DAYS_MS
    retention_bytes: int = -1
    max_message_bytes: int = MIB + 12
    timestamp_type: TimestampType = TimestampType.CREATE_TIME
    durability: str = FSYNC
    file_delete_delay_ms: int = 60_000
    preallocate_min_bytes: int = 64 * KIB
    preallocate_max_bytes: int = 16 * MIB
    is_compacted: bool = False
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    delete_retention_ms: int = _DAY_MS

    def __post_init__(self) -> None:
        _at_least("segment.bytes", self.segment_bytes, MIN_SEGMENT_BYTES)
        if self.segment_bytes > MAX_SEGMENT_BYTES:
            raise ConfigError(
                key="segment.bytes", value=self.segment_bytes, allowed=f"{MAX_SEGMENT_BYTES} or less"
            )
        _at_least("segment.ms", self.segment_ms, 1)
        _at_least("segment.jitter.ms", self.segment_jitter_ms, 0)
        _at_least("segment.index.bytes", self.segment_index_bytes, 8)
        _at_least("index.interval.bytes", self.index_interval_bytes, 0)
        _at_least("retention.ms", self.retention_ms, -1)
        _at_least("retention.bytes", self.retention_bytes, -1)
        _at_least("max.message.bytes", self.max_message_bytes, 0)
        _at_least("file.delete.delay.ms", self.file_delete_delay_ms, 0)
        _at_least("min.compaction.lag.ms", self.min_compaction_lag_ms, 0)
        _at_least("delete.retention.ms", self.delete_retention_ms, 0)
        _at_least("preallocate.min.bytes", self.preallocate_min_bytes, 0)
        _at_least("preallocate.max.bytes", self.preallocate_max_bytes, self.preallocate_min_bytes)
        if self.durability not in {FSYNC, PAGE_CACHE}:
            raise ConfigError(
                key="durability", value=self.durability, allowed=f"one of {FSYNC}, {PAGE_CACHE}"
            )

    @property
    def synced_only(self) -> bool:
        """Whether only synced bytes may be acknowledged."""
        return self.durability == FSYNC


def _at_least(key: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(key=key, value=value, allowed=f"a whole number, {minimum} or more")
