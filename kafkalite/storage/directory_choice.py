"""Decides in which data directory of a node a new log is made, and which of several logs is used. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DirectoryUse(NamedTuple):
    """A data directory that works: the free bytes of its disk, and the number of logs in it."""

    free_bytes: int
    log_count: int


def choose_directory(uses: Sequence[DirectoryUse]) -> int:
    """Return the index of the directory for a new log: the one with the most free bytes for each of its logs,
    the new one included.

    New logs are empty, so the free bytes alone would put all of them into one directory. If several are
    equal, or no directory has a free byte, the one with the fewest logs is chosen, then the first.
    """
    assert uses, "no data directory works"
    return min(
        range(len(uses)), key=lambda index: (-_free_bytes_per_log(uses[index]), uses[index].log_count, index)
    )


def _free_bytes_per_log(use: DirectoryUse) -> int:
    return max(use.free_bytes, 0) // (use.log_count + 1)


class LogVersion(NamedTuple):
    """How far a log of a partition is. The greater one of two has all committed records of the other (R84).

    A replica that was removed and added again has a greater ``replica_epoch`` (R62). In the same leader epoch
    one log is the beginning of the other, so that the longer one is complete.
    """

    replica_epoch: int
    is_sound: bool  #: whether the log is not damaged
    last_epoch: int  #: the leader epoch of the last batch; -1 if there is none
    log_end_offset: int
    log_start_offset: int
    known_end_offset: int = 0  #: which the end of a damaged log is known to have reached


def choose_log(versions: Sequence[LogVersion]) -> int:
    """Return the index of the log that is used, if a partition has logs in several directories: the greatest
    one, and of equal ones the first."""
    return max(range(len(versions)), key=lambda index: (versions[index], -index))


def missing_end(versions: Sequence[LogVersion], chosen: int) -> int | None:
    """Return the end that the log ``chosen`` should have reached, if a damaged log of the same replica epoch
    was further; else None. The chosen log then lacks records, although it is sound."""
    used = versions[chosen]
    ends = [
        max(other.log_end_offset, other.known_end_offset, used.log_end_offset + 1)
        for other in versions
        if other.replica_epoch == used.replica_epoch and not other.is_sound and _is_further(other, used)
    ]
    return max(ends, default=None)


def _is_further(other: LogVersion, used: LogVersion) -> bool:
    end = max(other.log_end_offset, other.known_end_offset)
    return other.last_epoch > used.last_epoch or end > used.log_end_offset
