"""LogStore: one data directory, and the logs in it.

The directory is formatted once with a cluster id, a node id and a directory id; a directory of another
node is refused. One process at a time holds its lock. Unknown directories are reported and not touched;
only ``delete_log``, which names the topic id, deletes data (R25).

A start after an orderly stop reads the marker and opens no log. Any other start recovers each log from
its recovery point. A log that cannot be recovered is offline, with the reason; the others are used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from kafkalite.errors import CorruptLogError, DataDirectoryError, DiskFullError, StorageError
from kafkalite.log_fields import Fields
from kafkalite.model import NO_BROKER_EPOCH, TopicPartition
from kafkalite.rng import Rng, system_rng
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    CleanShutdown,
    NodeIdentity,
    RecoveryPoint,
    decode_clean_shutdown,
    decode_node,
    decode_recovery_points,
    encode_clean_shutdown,
    encode_node,
    encode_partition,
    encode_recovery_points,
)
from kafkalite.storage.filesystem import FileSystem, Lock
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.recovery import RecoverySync
from kafkalite.storage.retention import RetiredPaths

logger = logging.getLogger(__name__)


def format_data_dir(
    fs: FileSystem, path: str, *, cluster_id: str | None, node_id: int, rng: Rng | None = None
) -> NodeIdentity:
    """Format ``path`` as a data directory, durably. ``cluster_id`` None generates an id for a new cluster.

    Raises DataDirectoryError if it is already formatted or not empty.
    """
    rng = rng or system_rng()
    _make_dirs_durably(fs, path)
    ignored = {layout.LOCK_FILE, "lost+found"}
    names = [name for name in fs.list_dir(path) if name not in ignored and not layout.is_leftover(name)]
    if layout.NODE_FILE in names:
        raise DataDirectoryError(f"{path} is already formatted", hint="use it, or choose another directory")
    if names:
        raise DataDirectoryError(
            f"{path} is not empty: it contains {', '.join(names[:3])}", hint="choose an empty directory"
        )
    identity = NodeIdentity(cluster_id or rng.randbytes(16).hex(), node_id, rng.randbytes(16).hex())
    fs.write_atomically(layout.join(path, layout.NODE_FILE), encode_node(identity))
    return identity


def _make_dirs_durably(fs: FileSystem, path: str) -> None:
    made: list[str] = []
    missing = path
    while not fs.exists(missing):
        made.append(missing)
        missing = layout.parent(missing)
    fs.make_dirs(path)
    for directory in reversed(made):
        fs.sync_dir(layout.parent(directory))


def read_identity(fs: FileSystem, path: str) -> NodeIdentity | None:
    """Return the identity of a data directory, or None if it is not formatted. Raises DataDirectoryError."""
    node_path = layout.join(path, layout.NODE_FILE)
    try:
        return decode_node(fs.read_bytes(node_path), node_path)
    except FileNotFoundError:
        return None


class LogStore:
    """The logs of one data directory by topic and partition. Created by ``open``, closed once.

    ``clean_start``: the last session stopped orderly. ``last_broker_epoch``: from its marker (R21),
    NO_BROKER_EPOCH without one. ``unknown_directories``: found, but not loaded.
    """

    def __init__(self, fs: FileSystem, path: str, identity: NodeIdentity, lock: Lock) -> None:
        self._fs = fs
        self._path = path
        self._lock = lock
        self._logs: dict[TopicPartition, Log] = {}
        self._names: dict[TopicPartition, str] = {}
        self._points: dict[str, RecoveryPoint] = {}
        self._clean_ends: dict[str, CleanEnd] = {}
        self._retired = RetiredPaths()
        self._has_stale_point = False
        self._closed = False
        self.identity = identity
        self.clean_start = False
        self.last_broker_epoch = NO_BROKER_EPOCH
        self.unknown_directories: list[str] = []

    def __repr__(self) -> str:
        return f"<LogStore {self._path} of node {self.identity.node_id}, {len(self._logs)} logs>"

    # --- opening and closing ---------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        path: str,
        *,
        cluster_id: str | None = None,
        node_id: int,
        rng: Rng | None = None,
        format_if_empty: bool = True,
    ) -> LogStore:
        """Open a data directory; an empty or missing one is formatted first.

        ``cluster_id`` None accepts any. The clean-shutdown marker is read and durably removed here,
        before anything is appended (R21). Raises DataDirectoryError, CorruptLogError for an unreadable
        checkpoint, OSError.
        """
        path = path.rstrip("/") or "/"
        _make_dirs_durably(fs, path)
        lock = fs.lock(layout.join(path, layout.LOCK_FILE))
        try:
            identity = read_identity(fs, path)
            if identity is None:
                if not format_if_empty:
                    raise DataDirectoryError(
                        f"{path} is not formatted", hint="format it once with 'kl server format'"
                    )
                identity = format_data_dir(fs, path, cluster_id=cluster_id, node_id=node_id, rng=rng)
            _refuse_strange(path, identity, cluster_id, node_id)
            store = cls(fs, path, identity, lock)
            store._read_checkpoints()
        except BaseException:
            lock.release()
            raise
        return store

    def _read_checkpoints(self) -> None:
        points_path = self._join(layout.RECOVERY_POINTS_FILE)
        if self._fs.exists(points_path):
            self._points = decode_recovery_points(self._fs.read_bytes(points_path), points_path)
        marker_path = self._join(layout.CLEAN_SHUTDOWN_FILE)
        if not self._fs.exists(marker_path):
            return
        try:
            marker = decode_clean_shutdown(self._fs.read_bytes(marker_path), marker_path)
        except (CorruptLogError, ValueError) as error:  # recovery works without it
            logger.warning("clean shutdown marker ignored %s", Fields(path=marker_path, error=error))
        else:
            self.clean_start = True
            self.last_broker_epoch = marker.broker_epoch
            self._clean_ends = marker.ends
        self._fs.unlink(marker_path)
        self._fs.sync_dir(self._path)

    def load(self, logs: Mapping[TopicPartition, tuple[str, LogConfig]], *, are_all: bool = True) -> None:
        """Open the logs {topic and partition: (topic id, configuration)}; missing ones are created.

        After an orderly stop no file of a log is read. A log that is damaged, or whose directory is
        missing although the checkpoint has records of it, is offline. ``are_all``: the logs are
        complete, so report all other directories.
        """
        names = set(self._fs.list_dir(self._path))
        if not self.clean_start:
            self._fs.sync_dir(self._path)  # a crash may have left this directory's names unsynced
        recovered: list[tuple[TopicPartition, Log, RecoverySync]] = []
        for tp, (topic_id, config) in logs.items():
            name = layout.log_directory_name(topic_id, tp.partition)
            if tp in self._logs:
                continue
            if name in names:
                log, unsynced = self._open_log(name, config)
                self._add(tp, name, log)
                if unsynced is not None:
                    recovered.append((tp, log, unsynced))
            elif self._known_to_hold_records(name):
                reason = f"{self._join(name)} is missing, but the checkpoint has records of it"
                self._add(tp, name, Log.damaged(self._fs, self._join(name), config, reason))
            else:
                self.create_log(tp, topic_id, config)
        self._sync_recovered(recovered)
        if are_all:
            self._look_around(names)

    def _open_log(self, name: str, config: LogConfig) -> tuple[Log, RecoverySync | None]:
        """Return the log, and the syncs that must run before it is used."""
        directory = self._join(name)
        end = self._clean_ends.pop(name, None)
        if end is not None:
            return Log.open_clean(self._fs, directory, config, end), None
        try:
            return Log.begin_recovery(self._fs, directory, config, self._points.get(name))
        except (StorageError, OSError, ValueError) as error:
            return Log.damaged(self._fs, directory, config, str(error)), None

    def _sync_recovered(self, recovered: Sequence[tuple[TopicPartition, Log, RecoverySync]]) -> None:
        """Run the syncs of all recoveries together; a log that cannot be synced is not used (R24)."""
        errors = self._fs.run_all([unsynced.run for _, _, unsynced in recovered])
        for (tp, log, _), error in zip(recovered, errors, strict=True):
            if isinstance(error, (StorageError, OSError)):
                self._logs[tp] = Log.damaged(self._fs, log.directory, log.config, str(error))
            elif error is not None:
                raise error

    def _known_to_hold_records(self, name: str) -> bool:
        end = self._clean_ends.get(name)
        point = self._points.get(name, RecoveryPoint())
        return point.recovery_point > 0 or (end is not None and end.log_end_offset > 0)

    def _look_around(self, names: Iterable[str]) -> None:
        """Report unknown directories; remove the deleted logs of an earlier session."""
        ours = set(self._names.values())
        unknown: list[str] = []
        for name in sorted(names):
            if name.endswith(layout.DELETED_SUFFIX):
                if layout.parse_log_directory_name(name.removesuffix(layout.DELETED_SUFFIX)):
                    self._fs.remove_tree(self._join(name))
            elif layout.parse_log_directory_name(name) and name not in ours:
                unknown.append(name)
        for name in unknown:
            if name not in self.unknown_directories:
                logger.warning("unknown directory %s", Fields(path=self._join(name), action="left alone"))
        self.unknown_directories = unknown

    def close(self, *, clean: bool = True, broker_epoch: int = NO_BROKER_EPOCH) -> None:
        """Close every log and release the directory. Idempotent.

        With ``clean`` everything is synced and checkpointed before the marker is written (R21). A log
        that cannot be synced is left out of the marker and will be recovered; the marker then has no
        broker epoch, which would claim that every acknowledged record is on this disk.
        """
        if self._closed:
            return
        self._closed = True
        try:
            logs = list(self._logs.values())
            errors = self._fs.run_all([partial(log.close, clean=clean) for log in logs])
            for log, error in zip(logs, errors, strict=True):
                if isinstance(error, OSError | DiskFullError):
                    logger.error("log not closed %s", Fields(directory=log.directory, error=error))
                elif error is not None:
                    raise error
            if clean:
                self._write_marker(broker_epoch)
        finally:
            self._lock.release()

    def _write_marker(self, broker_epoch: int) -> None:
        ends = dict(self._clean_ends)
        for tp, log in self._logs.items():
            end = log.clean_end
            if end is not None:
                ends[self._names[tp]] = end
            elif not log.is_damaged:  # a damaged log is never trusted
                broker_epoch = NO_BROKER_EPOCH
        marker = encode_clean_shutdown(CleanShutdown(broker_epoch, ends))
        try:
            self.checkpoint()
            self._fs.write_atomically(self._join(layout.CLEAN_SHUTDOWN_FILE), marker)
        except (OSError, DiskFullError) as error:
            logger.error("clean shutdown not marked %s", Fields(path=self._path, error=error))

    # --- logs ------------------------------------------------------------------------------------------

    def create_log(self, tp: TopicPartition, topic_id: str, config: LogConfig) -> Log:
        """Create an empty log, or return the existing one if it has the same topic id. The log is durable
        after its first sync.

        Raises DataDirectoryError if ``tp`` belongs to another topic id; DiskFullError.
        """
        name = layout.log_directory_name(topic_id, tp.partition)
        existing = self._logs.get(tp)
        if existing is not None:
            if self._names[tp] != name:
                raise DataDirectoryError(
                    f"{tp} is the log in {existing.directory}, not {name}", hint="delete that one first"
                )
            return existing
        directory = self._join(name)
        if self._fs.exists(directory):
            log, unsynced = self._open_log(name, config)
            self._add(tp, name, log)
            if unsynced is not None:
                self._sync_recovered([(tp, log, unsynced)])
            return self._logs[tp]
        log = Log.create(self._fs, directory, config)
        file = self._fs.open(layout.join(directory, layout.PARTITION_FILE), create=True)
        file.write_at(0, encode_partition(tp.topic, topic_id, tp.partition))
        file.close()
        self._add(tp, name, log)
        return log

    def _add(self, tp: TopicPartition, name: str, log: Log) -> None:
        self._logs[tp] = log
        self._names[tp] = name

    def get(self, tp: TopicPartition) -> Log | None:
        return self._logs.get(tp)

    def logs(self) -> Mapping[TopicPartition, Log]:
        """All logs, offline ones included: a live view, valid until a log is added or removed."""
        return self._logs

    def delete_log(self, tp: TopicPartition, topic_id: str | None = None) -> None:
        """Retire a log with all its records, durably; a later ``remove_retired`` unlinks its files.

        With ``topic_id``, only if the log is of that topic (R25). A missing log is no error.
        """
        log, name = self._logs.get(tp), self._names.get(tp)
        if log is None or name is None:
            return
        if topic_id is not None and name != layout.log_directory_name(topic_id, tp.partition):
            raise DataDirectoryError(f"{tp} is the log in {log.directory}, not one of topic id {topic_id}")
        log.close(clean=False)
        del self._logs[tp]
        del self._names[tp]
        self._has_stale_point = self._points.pop(name, None) is not None or self._has_stale_point
        if self._fs.exists(log.directory):
            self._fs.rename(log.directory, log.directory + layout.DELETED_SUFFIX)
            self._fs.sync_dir(self._path)
            self._retired.add(log.directory + layout.DELETED_SUFFIX)

    def replace_damaged(self, tp: TopicPartition, topic_id: str, config: LogConfig) -> Log:
        """Replace a damaged log by an empty one; the damaged files are kept beside it for inspection
        (R24).

        Only for a replica that is in no in-sync set. Raises DiskFullError, OSError.
        """
        damaged, name = self._logs[tp], self._names[tp]
        assert damaged.is_damaged, f"{tp} is not damaged"
        damaged.close(clean=False)
        if self._fs.exists(damaged.directory):
            number = 1
            while self._fs.exists(kept := f"{damaged.directory}{layout.DAMAGED_SUFFIX}{number}"):
                number += 1
            self._fs.rename(damaged.directory, kept)
            self._fs.sync_dir(self._path)
        self._has_stale_point = self._points.pop(name, None) is not None or self._has_stale_point
        self._clean_ends.pop(name, None)
        self.checkpoint()  # with the old recovery point the new log would count as damaged
        del self._logs[tp]
        del self._names[tp]
        return self.create_log(tp, topic_id, config)

    def remove_retired(self, now_ms: int, delay_ms: int = 60_000) -> None:
        """Remove the directories of logs deleted at least ``delay_ms`` ago."""
        for path in self._retired.due(now_ms, delay_ms):
            self._fs.remove_tree(path)

    # --- passes ----------------------------------------------------------------------------------------

    def release_idle(self) -> int:
        """Close files and maps not used since the last call. Returns the number of segments released."""
        return sum(log.release_idle() for log in self._logs.values())

    def checkpoint(self) -> None:
        """Write the recovery points if any moved. Raises OSError, DiskFullError: the old ones stay valid."""
        points = dict(self._points)
        for tp, log in self._logs.items():
            if log.is_open:
                points[self._names[tp]] = log.recovery_point
        if points == self._points and not self._has_stale_point:
            return
        self._fs.write_atomically(self._join(layout.RECOVERY_POINTS_FILE), encode_recovery_points(points))
        self._points = points
        self._has_stale_point = False

    def _join(self, name: str) -> str:
        return layout.join(self._path, name)


def _refuse_strange(path: str, identity: NodeIdentity, cluster_id: str | None, node_id: int) -> None:
    if cluster_id is not None and identity.cluster_id != cluster_id:
        raise DataDirectoryError(
            f"{path} belongs to cluster {identity.cluster_id}, not {cluster_id}",
            hint="use the directory of this cluster, or an empty one",
        )
    if identity.node_id != node_id:
        raise DataDirectoryError(
            f"{path} belongs to node {identity.node_id}, not {node_id}",
            hint="use the directory of this node, or an empty one",
        )
