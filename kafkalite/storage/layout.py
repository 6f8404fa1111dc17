"""Builds and parses the names of the files and directories in a data directory.

::

    <data directory>/
      .lock                                 held by the process that uses the directory
      node.json                             cluster id, node id, directory id, format version
      recovery-points                       for each log, the offset below which it is synced
      recovery-points.copy                  the same, to notice that the file was lost or replaced
      boot-id                               id of the system's boot during the last session
      start-count                           of a node of a cluster: how often it was started
      quorum-voters                         of a controller: the voters of the cluster
      clean-shutdown                        exists only after an orderly stop: the offset range of each log
      <32 hex digits of topic id>-<n>/      one log
        partition.json                      topic, topic id, partition: the identity of the log
        log-state                           log start offset and the last truncation
        leader-epochs                       checkpoint of (leader epoch, start offset)
        <20-digit base offset>.log          record batches, back to back
        <20-digit base offset>.index        offset -> position, sparse
        <20-digit base offset>.timeindex    timestamp -> offset, sparse
        <20-digit offset>.producers         snapshot of the idempotent producers' states below the offset
        <a .log, .index or .timeindex>.deleted
                                            retired segment file, to be removed later
        <20-digit offset>.torn-<n>          bytes that a recovery cut off at that offset, kept for a while
        compaction                          how far the log is compacted, and when the passes ran
        <base offset>-<next offset>-<replaced>-<content>.swap
                                            a compacted segment that is to replace those with its offsets
      __cluster_metadata/                   the metadata log
      <log directory>.deleted/              retired log, to be removed later
      log-dirs                              of a node with several data directories: the further ones

A further data directory of the node has logs, recovery points and a marker of its own::

    <further data directory>/
      .lock, recovery-points, recovery-points.copy, boot-id, clean-shutdown, <log directory>/
      log-dir.json                          cluster id, node id, directory id, format version
      log-dir-starts                        in how many starts of the node the directory was used
      moving/<log directory>/               the copy of a log that moves here, until it replaces the log
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kafkalite.errors import DataDirectoryError

LOCK_FILE: Final = ".lock"
NODE_FILE: Final = "node.json"
LOG_DIR_FILE: Final = "log-dir.json"  #: in place of ``node.json`` in each data directory but the first
LOG_DIR_STARTS_FILE: Final = "log-dir-starts"
LOG_DIRS_FILE: Final = "log-dirs"
MOVING_DIRECTORY: Final = "moving"  #: has the copies of logs that move into the data directory
PROBE_FILE: Final = ".probe"  #: written to find out whether a disk can be written
RECOVERY_POINTS_FILE: Final = "recovery-points"
RECOVERY_POINTS_COPY: Final = "recovery-points.copy"
CLEAN_SHUTDOWN_FILE: Final = "clean-shutdown"

#: The directory of the metadata log, whose files ``raft`` defines.
METADATA_DIRECTORY: Final = "__cluster_metadata"
BOOT_ID_FILE: Final = "boot-id"
START_COUNT_FILE: Final = "start-count"
START_FILE_FILE: Final = "start-file"
VOTERS_FILE: Final = "quorum-voters"

PARTITION_FILE: Final = "partition.json"
LOG_STATE_FILE: Final = "log-state"
LEADER_EPOCHS_FILE: Final = "leader-epochs"
COMPACTION_FILE: Final = "compaction"

LOG_SUFFIX: Final = ".log"
OFFSET_INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
PRODUCERS_SUFFIX: Final = ".producers"
DELETED_SUFFIX: Final = ".deleted"
DAMAGED_SUFFIX: Final = ".damaged-"  #: followed by a number: a log or a file that was replaced by a new one
#: Followed by the log end offset: a damaged log until the log that replaces it is in sync (R52).
REPLACED_SUFFIX: Final = ".replaced-"
REPAIRED_SUFFIX: Final = ".repaired"  #: a file that is about to replace a damaged one
TEMPORARY_SUFFIX: Final = ".tmp"
SWAP_SUFFIX: Final = ".swap"

SEGMENT_SUFFIXES: Final = (LOG_SUFFIX, OFFSET_INDEX_SUFFIX, TIME_INDEX_SUFFIX)

_OFFSET_DIGITS: Final = 20
_SEGMENT_FILE = re.compile(r"([0-9]{20})(\.log|\.index|\.timeindex)")
_SWAP_FILE = re.compile(r"([0-9]{20})-([0-9]{20})(?:-([0-9a-f]{16})-([0-9a-f]{16}))?\.swap")
_TORN_FILE = re.compile(r"([0-9]{20})\.torn-([1-9][0-9]{0,8})")
_PRODUCERS_FILE = re.compile(r"([0-9]{20})\.producers")
_LOG_DIRECTORY = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,8})")
_TOPIC_ID = re.compile(r"[0-9a-f]{32}")


class LogDirectoryName(NamedTuple):
    topic_id: str
    partition: int


class SegmentFileName(NamedTuple):
    base_offset: int
    suffix: str


class SwapFileName(NamedTuple):
    """The offsets and identities of a compacted segment that replaces other segments.

    ``next_offset`` is exclusive. ``replaced`` identifies the log and the first segment that is replaced,
    ``content`` the new segment: 16 hex digits each, or "" in the names of earlier versions.
    """

    base_offset: int
    next_offset: int
    replaced: str
    content: str


def log_directory_name(topic_id: str, partition: int) -> str:
    """Return ``<topic_id>-<partition>``. Raises DataDirectoryError if the id is not 32 lower-case hex digits
    or the partition is negative."""
    if _TOPIC_ID.fullmatch(topic_id) is None or partition < 0:
        raise DataDirectoryError(f"topic id {topic_id!r} with partition {partition} cannot name a directory")
    return f"{topic_id}-{partition}"


def parse_log_directory_name(name: str) -> LogDirectoryName | None:
    match = _LOG_DIRECTORY.fullmatch(name)
    return None if match is None else LogDirectoryName(match[1], int(match[2]))


def segment_file_name(base_offset: int, suffix: str) -> str:
    return f"{base_offset:0{_OFFSET_DIGITS}d}{suffix}"


def parse_segment_file_name(name: str) -> SegmentFileName | None:
    """Return the parts of a segment's file name, or None for other names, including ``.deleted`` ones."""
    match = _SEGMENT_FILE.fullmatch(name)
    return None if match is None else SegmentFileName(int(match[1]), match[2])


def swap_file_name(base_offset: int, next_offset: int, replaced: str, content: str) -> str:
    offsets = f"{base_offset:0{_OFFSET_DIGITS}d}-{next_offset:0{_OFFSET_DIGITS}d}"
    return f"{offsets}-{replaced}-{content}{SWAP_SUFFIX}"


def parse_swap_file_name(name: str) -> SwapFileName | None:
    """Return the parts of the name of a swap file, or None for other names."""
    match = _SWAP_FILE.fullmatch(name)
    return (
        None if match is None else SwapFileName(int(match[1]), int(match[2]), match[3] or "", match[4] or "")
    )


def producers_file_name(offset: int) -> str:
    return f"{offset:0{_OFFSET_DIGITS}d}{PRODUCERS_SUFFIX}"


def parse_producers_file_name(name: str) -> int | None:
    """Return the offset in the name of a producers' snapshot, or None for other names."""
    match = _PRODUCERS_FILE.fullmatch(name)
    return None if match is None else int(match[1])


class TornFileName(NamedTuple):
    """The offset at which a recovery cut the bytes off, and the number of the file. A new file gets 1, or one
    more than the highest number of such a file in the log's directory."""

    offset: int
    number: int


def torn_file_name(offset: int, number: int) -> str:
    return f"{offset:0{_OFFSET_DIGITS}d}.torn-{number}"


def parse_torn_file_name(name: str) -> TornFileName | None:
    """Return the parts of the name of a file with bytes that a recovery cut off, or None for other names."""
    match = _TORN_FILE.fullmatch(name)
    return None if match is None else TornFileName(int(match[1]), int(match[2]))


def is_leftover(name: str) -> bool:
    """Whether a name is that of a retired or incomplete file or directory, which a start removes."""
    return name.endswith((DELETED_SUFFIX, TEMPORARY_SUFFIX))


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}"


def name_of(path: str) -> str:
    """Return the last component of a path."""
    return path.rpartition("/")[2]


def parent(path: str) -> str:
    """Return the directory part of ``path``, or ``.`` for a name without a directory."""
    head, slash, _ = path.rpartition("/")
    return head or ("/" if slash else ".")
