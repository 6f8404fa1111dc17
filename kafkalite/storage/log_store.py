"""LogStore: a data directory and the logs in it.

The directory is formatted once with a cluster id, a node id and a directory id. A directory of another node
is refused. Only one process at a time can lock it. Unknown directories are reported but not changed; only
``delete_log``, which takes a topic id, deletes data (R25).

A start after an orderly stop reads the marker and opens no log. Any other start recovers each log from its
recovery point. A log that cannot be recovered is offline, with the reason; the other logs are used.
"""

# Long because one object owns the directory's names, recovery points and logs, which change together.

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from kafkalite.errors import (
    CorruptLogError,
    DataDirectoryError,
    StorageError,
    StorageExhaustedError,
    WrongFileTypeError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import NO_BROKER_EPOCH, TopicPartition
from kafkalite.rng import Rng, system_rng
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    CleanEnd,
    CleanShutdown,
    NodeIdentity,
    PartitionIdentity,
    RecoveryPoint,
    decode_clean_shutdown,
    decode_node,
    encode_clean_shutdown,
    encode_node,
    encode_partition,
)
from kafkalite.storage.damage import Damage
from kafkalite.storage.filesystem import FileSystem, Lock, unlink_existing
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.recovery import RecoverySync, is_as_left
from kafkalite.storage.recovery_points import Change, RecoveryPointsFile
from kafkalite.storage.retention import RetiredPaths
from kafkalite.storage.sync_work import SyncWork

logger = logging.getLogger(__name__)

#: The name of the recovery point that has the metadata offset of this node instead of the offset of a log.
METADATA_POINT: Final = layout.METADATA_DIRECTORY

#: A directory with one of these names is the data directory of a node (R25).
_NODE_NAMES: Final = frozenset(
    {METADATA_POINT, layout.RECOVERY_POINTS_FILE, layout.RECOVERY_POINTS_COPY, layout.CLEAN_SHUTDOWN_FILE}
)


def format_data_dir(
    fs: FileSystem, path: str, *, cluster_id: str | None, node_id: int, rng: Rng | None = None
) -> NodeIdentity:
    """Format ``path`` durably as a data directory. If ``cluster_id`` is None, generate an id.

    Raises DataDirectoryError if it is already formatted or not empty.
    """
    _make_dirs_durably(fs, path)
    _check_empty(fs, path)
    return _format(fs, path, cluster_id, node_id, rng)


def _format(fs: FileSystem, path: str, cluster_id: str | None, node_id: int, rng: Rng | None) -> NodeIdentity:
    """Write the identity of a node into an empty directory."""
    rng = rng or system_rng()
    identity = NodeIdentity(cluster_id or rng.randbytes(16).hex(), node_id, rng.randbytes(16).hex())
    fs.write_atomically(layout.join(path, layout.NODE_FILE), encode_node(identity))
    return identity


def _check_empty(fs: FileSystem, path: str) -> None:
    """Raise DataDirectoryError if ``path`` has files other than those that a start may have left."""
    ignored = {layout.LOCK_FILE, "lost+found"}
    names = [name for name in fs.list_dir(path) if name not in ignored and not layout.is_leftover(name)]
    if layout.NODE_FILE in names:
        raise DataDirectoryError(f"{path} is already formatted", hint="use it, or choose another directory")
    if _NODE_NAMES.intersection(names) or any(map(layout.parse_log_directory_name, names)):
        raise DataDirectoryError(
            f"{path} has the data of a node, but no {layout.NODE_FILE}",
            hint=f"restore {layout.NODE_FILE} or the whole directory from a backup",
        )
    if names:
        raise DataDirectoryError(
            f"{path} is not empty: it contains {', '.join(names[:3])}", hint="choose an empty directory"
        )


def _check_formattable(fs: FileSystem, path: str, format_if_empty: bool) -> None:
    if not format_if_empty:
        raise DataDirectoryError(f"{path} is not formatted", hint="format it once with 'kl server format'")
    _check_empty(fs, path)


def _make_dirs_durably(fs: FileSystem, path: str) -> None:
    made: list[str] = []
    missing = path
    while not fs.exists(missing):
        made.append(missing)
        missing = layout.parent(missing)
    try:
        fs.make_dirs(path)
    except WrongFileTypeError as error:
        raise DataDirectoryError(
            f"the data directory {path} can't be used: {error.path} is {error.actual}",
            hint="name a directory; it is created if it does not exist",
        ) from error
    for directory in reversed(made):
        fs.sync_dir(layout.parent(directory))


def read_identity(fs: FileSystem, path: str) -> NodeIdentity | None:
    """Return the identity of a data directory, or None if it is not formatted. Raises DataDirectoryError."""
    node_path = layout.join(path, layout.NODE_FILE)
    try:
        return decode_node(fs.read_bytes(node_path), node_path)
    except FileNotFoundError:
        return None


class LogExchange(NamedTuple):
    """The replacement of a damaged log by an empty one, or its reversal (R52).

    The caller runs ``run`` in any thread, because it waits for the disk, then calls ``finish`` with the
    configuration of the log. After StorageExhaustedError or OSError the exchange can be begun again.
    """

    run: Callable[[], None]
    finish: Callable[[LogConfig], None]


class LogStore:
    """The logs of one data directory by topic and partition. Create it with ``open``, and close it once.

    ``clean_start``: the previous process stopped in an orderly way. ``last_broker_epoch``: the epoch in its
    marker (R21), or NO_BROKER_EPOCH. ``unknown_directories``: directories that were found but not loaded.
    """

    def __init__(self, fs: FileSystem, path: str, identity: NodeIdentity, lock: Lock) -> None:
        self._fs = fs
        self._path = path
        self._lock = lock
        self._logs: dict[TopicPartition, Log] = {}
        self._names: dict[TopicPartition, str] = {}
        self._points = RecoveryPointsFile(fs, path)
        #: The points that moved since the last checkpoint, by log directory.
        self._moved: dict[str, SyncWork | RecoveryPoint] = {}
        self._forgotten: dict[str, None] = {}  #: the logs whose points the next checkpoint removes
        self._unrecorded: dict[str, Log] = {}  #: by name: new logs, whose existence is not recorded yet
        self._clean_ends: dict[str, CleanEnd] = {}
        self._retired = RetiredPaths()
        #: The logs that ``begin_replace`` set aside: their log end offsets, and the damage if known.
        self._replaced: dict[TopicPartition, tuple[int, Damage | None]] = {}
        self._metadata_offset = 0
        self._closed = False
        #: Called in any thread when a recovery point has moved, or a log was created or deleted, and may be
        #: called again before the next ``begin_checkpoint``.
        self.on_moved: Callable[[], None] | None = None
        self._may_lack_unsynced = True  #: the system may have lost unsynced bytes since the last session
        self.identity = identity
        self.clean_start = False
        self.last_broker_epoch = NO_BROKER_EPOCH
        self.unknown_directories: list[str] = []

    def __repr__(self) -> str:
        return f"<LogStore {self._path} of node {self.identity.node_id}, {len(self._logs)} logs>"

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
        """Open a data directory. If it is empty or missing, format it first, or raise DataDirectoryError if
        ``format_if_empty`` is False.

        If ``cluster_id`` is None, any cluster id is accepted. The clean-shutdown marker is read and durably
        removed before anything is appended (R21). Raises DataDirectoryError, CorruptLogError if a checkpoint
        cannot be read, OSError.
        """
        path = path.rstrip("/") or "/"
        _make_dirs_durably(fs, path)
        is_new = not fs.exists(layout.join(path, layout.NODE_FILE))
        if is_new:
            _check_formattable(fs, path, format_if_empty)  # a refused directory gets no lock file
        lock = fs.lock(layout.join(path, layout.LOCK_FILE))
        try:
            # Before the lock, another process may have formatted the directory.
            identity = None if is_new and fs.is_memory else read_identity(fs, path)
            is_new = identity is None
            if identity is None:
                if not fs.is_memory:
                    _check_formattable(fs, path, format_if_empty)
                identity = _format(fs, path, cluster_id, node_id, rng)
            _refuse_strange(path, identity, cluster_id, node_id)
            store = cls(fs, path, identity, lock)
            if not is_new:  # a new directory has no checkpoints
                store._read_checkpoints()
        except BaseException:
            lock.release()
            raise
        return store

    def _read_checkpoints(self) -> None:
        self._points.open()
        self._may_lack_unsynced = may_lack_unsynced(self._fs, self._path)
        marker_path = self._join(layout.CLEAN_SHUTDOWN_FILE)
        if not self._fs.exists(marker_path):
            return
        try:
            marker = decode_clean_shutdown(self._fs.read_bytes(marker_path), marker_path)
        except (CorruptLogError, ValueError) as error:  # recovery works without the file
            logger.warning("clean shutdown marker ignored %s", Fields(path=marker_path, error=error))
        else:
            self.clean_start = True
            self.last_broker_epoch = marker.broker_epoch
            self._clean_ends = marker.ends
        self._fs.unlink(marker_path)
        self._fs.sync_dir(self._path)

    def _write_boot_id(self) -> None:
        """Store the system's boot id. Called when all logs are recovered, so that the next process knows that
        they were recovered since the system's last restart.

        An error is only logged: the next recovery then assumes that unsynced bytes may be lost.
        """
        try:
            self._fs.write_atomically(self._join(layout.BOOT_ID_FILE), _boot_line(self._fs.boot_id()))
        except (OSError, StorageExhaustedError) as error:
            logger.warning("boot id not stored %s", Fields(path=self._path, error=error))

    def load(self, logs: Mapping[TopicPartition, tuple[str, LogConfig]], *, are_all: bool = True) -> None:
        """Open the logs {topic and partition: (topic id, configuration)}, and create missing ones.

        After an orderly stop no file of a log is read. A log is offline if it is damaged, or if its directory
        is missing although the checkpoint shows that the log had records. ``are_all``: ``logs`` is complete,
        so other directories are reported.
        """
        names = set(self._fs.list_dir(self._path))
        if not self.clean_start:
            self._fs.sync_dir(self._path)  # a crash may have left names in this directory unsynced
        recovered: list[tuple[TopicPartition, Log, RecoverySync]] = []
        replaced = {
            name: int(end)
            for name, suffix, end in (one.partition(layout.REPLACED_SUFFIX) for one in names)
            if suffix and end.isdecimal()
        }
        for tp, (topic_id, config) in logs.items():
            name = layout.log_directory_name(topic_id, tp.partition)
            if tp in self._logs:
                continue
            if name in replaced:
                self._replaced[tp] = replaced[name], None
            if name in names:
                log, unsynced = self._open_log(name, tp, config)
                self._add(tp, name, log)
                if unsynced is not None:
                    recovered.append((tp, log, unsynced))
            elif (missing := self._missing_log(name, config)) is not None:
                self._add(tp, name, missing)
            else:
                self.create_log(tp, topic_id, config)
        if recovered:
            self._sync_recovered(recovered)
        if are_all:
            kept = names.union(self._names.values(), (METADATA_POINT,))
            self._forgotten |= dict.fromkeys(self._points.forget_deleted(kept.__contains__))
            self._look_around(names)
            if self._may_lack_unsynced:
                self._write_boot_id()

    def _open_log(self, name: str, tp: TopicPartition, config: LogConfig) -> tuple[Log, RecoverySync | None]:
        """Return (the log, the syncs that must run before it is used). The syncs are None if nothing must be
        synced."""
        directory = self._join(name)
        identity = PartitionIdentity(tp.topic, *_parts(name))
        point = self._points.points.get(name)
        end = self._clean_ends.pop(name, None)
        if end is not None:
            if is_as_left(self._fs, directory, config, end, identity):
                return Log.open_clean(self._fs, directory, config, end), None
            logger.warning("log differs from its state at the orderly stop %s", Fields(directory=directory))
            point = max(point or RecoveryPoint(), end.point, key=RecoveryPoint.age)
        is_cut_expected = self._may_lack_unsynced and end is None
        try:
            return Log.begin_recovery(
                self._fs, directory, config, point, identity, may_lack_unsynced=is_cut_expected
            )
        except StorageExhaustedError:
            raise  # the log may be intact
        except (StorageError, OSError, ValueError) as error:
            return Log.damaged(self._fs, directory, config, str(error)), None

    def _missing_log(self, name: str, config: LogConfig) -> Log | None:
        """Return a damaged log for a missing directory. Return None if no records are lost: the log was empty
        at an orderly stop, or has no recovery point."""
        end, point = self._clean_ends.get(name), self._points.points.get(name)
        records = None
        if end is not None:
            records = end.log_end_offset - end.log_start_offset
            if not records:
                return None
        elif point is None:
            return None
        elif point.recovery_point > point.log_start_offset:
            records = point.recovery_point - point.log_start_offset
        log = Log(self._fs, self._join(name), config)
        cause = f"the directory {self._join(name)} is missing, but the checkpoint has its records"
        log.mark_damaged(cause, records_in_doubt=records)
        return log

    def _sync_recovered(self, recovered: Sequence[tuple[TopicPartition, Log, RecoverySync]]) -> None:
        """Run the syncs of all recoveries together. A log that cannot be synced is not used (R24).

        Raises StorageExhaustedError if any sync raised it. The logs of those syncs are then not loaded; their
        files stay.
        """
        exhausted: StorageExhaustedError | None = None
        errors = self._fs.run_all([unsynced.run for _, _, unsynced in recovered])
        for (tp, log, _), error in zip(recovered, errors, strict=True):
            if isinstance(error, StorageExhaustedError):
                exhausted = error
                log.release()
                del self._logs[tp], self._names[tp]
            elif isinstance(error, (StorageError, OSError)):
                self._logs[tp] = Log.damaged(self._fs, log.directory, log.config, str(error))
            elif error is not None:
                raise error
            else:
                self._on_moved(log.directory, log.recovery_point)
                log.release()
        if exhausted is not None:
            raise exhausted

    def _look_around(self, names: Iterable[str]) -> None:
        """Report the directories of unknown logs, and remove the files of logs that an earlier process
        deleted."""
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

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self, *, clean: bool = True, broker_epoch: int = NO_BROKER_EPOCH) -> None:
        """Close every log and unlock the directory. Idempotent.

        If ``clean``, everything is synced and checkpointed before the clean-shutdown marker is written (R21).
        A log that cannot be synced is omitted from the marker and will be recovered. In that case the marker
        has no broker epoch, because an epoch claims that every acknowledged record is on this disk.
        """
        if self._closed:
            return
        self._closed = True
        self.on_moved = None
        try:
            logs = list(self._logs.values())
            if not clean:
                for log in () if self._fs.is_memory else logs:
                    log.close(clean=False)  # closes its files
                return
            errors = self._fs.run_all([partial(log.close, clean=True) for log in logs])
            for log, error in zip(logs, errors, strict=True):
                if isinstance(error, OSError | StorageExhaustedError):
                    logger.error("log not closed %s", Fields(directory=log.directory, error=error))
                elif error is not None:
                    raise error
            self._write_marker(broker_epoch)
        finally:
            self._lock.release()

    def _write_marker(self, broker_epoch: int) -> None:
        ends = dict(self._clean_ends)
        for tp, log in self._logs.items():
            end = log.clean_end
            if end is not None:
                ends[self._names[tp]] = end
            elif not log.is_damaged:  # a damaged log is never listed, and does not change the epoch
                broker_epoch = NO_BROKER_EPOCH
        marker = encode_clean_shutdown(CleanShutdown(broker_epoch, ends))
        try:
            self.checkpoint()
            self._fs.write_atomically(self._join(layout.CLEAN_SHUTDOWN_FILE), marker)
        except (OSError, StorageExhaustedError) as error:
            logger.error("clean shutdown not marked %s", Fields(path=self._path, error=error))

    def create_log(self, tp: TopicPartition, topic_id: str, config: LogConfig) -> Log:
        """Create an empty log, or return the existing log with the same topic id. A new log is durable after
        its first sync.

        Raises DataDirectoryError if ``tp`` belongs to another topic id; StorageExhaustedError.
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
            log, unsynced = self._open_log(name, tp, config)
            self._add(tp, name, log)
            if unsynced is not None:
                self._sync_recovered([(tp, log, unsynced)])
            return self._logs[tp]
        log = Log.create(self._fs, directory, config)
        file = self._fs.open(layout.join(directory, layout.PARTITION_FILE), create=True)
        file.write_at(0, encode_partition(tp.topic, topic_id, tp.partition))
        file.close()
        self._forgotten.pop(name, None)
        self._unrecorded[name] = log
        self._add(tp, name, log)
        self._wake()
        return log

    def _add(self, tp: TopicPartition, name: str, log: Log) -> None:
        self._logs[tp] = log
        self._names[tp] = name
        log.on_moved = self._on_moved

    def get(self, tp: TopicPartition) -> Log | None:
        return self._logs.get(tp)

    def shortage(self) -> str | None:
        """Return why no log can grow, or None."""
        return self._fs.shortage(self._path)

    def logs(self) -> Mapping[TopicPartition, Log]:
        """A live view of all logs, including offline ones, valid until a log is added or removed."""
        return self._logs

    def delete_log(self, tp: TopicPartition, topic_id: str | None = None) -> None:
        """Retire a log with all its records. The next checkpoint makes that durable, and a later
        ``begin_removal`` returns the job that removes its files.

        If ``topic_id`` is given, the log must belong to that topic (R25). Has no effect if there is no log.
        """
        log, name = self._logs.get(tp), self._names.get(tp)
        if log is None or name is None:
            return
        if topic_id is not None and name != layout.log_directory_name(topic_id, tp.partition):
            raise DataDirectoryError(f"{tp} is the log in {log.directory}, not one of topic id {topic_id}")
        log.close(clean=False)
        self.keep_replacement(tp)
        del self._logs[tp]
        del self._names[tp]
        self._forget(log, name)
        if self._fs.exists(log.directory):
            self._fs.rename(log.directory, log.directory + layout.DELETED_SUFFIX)
            self._retired.add(log.directory + layout.DELETED_SUFFIX)

    def release_log(self, tp: TopicPartition) -> None:
        """Close a log, so that ``create_log`` recovers it from its files."""
        log = self._logs.pop(tp)
        del self._names[tp]
        log.close(clean=False)

    def begin_replace(self, tp: TopicPartition) -> LogExchange:
        """Begin to replace a damaged log by an empty one. After ``finish``, the caller makes the empty log
        with ``create_log``. The damaged files are kept beside it (R24).

        Until ``keep_replacement`` is called, ``begin_reinstate`` can undo this, also in a later process
        (R52). Use it only for a replica that is in no in-sync set.
        """
        damaged, name = self._logs[tp], self._names[tp]
        assert damaged.is_damaged, f"{tp} is not damaged"
        damage = damaged.damage
        end = damaged.log_end_offset
        if damage is not None:
            end = max(end, damage.known_end_offset)
        damaged.close(clean=False)
        # If this log itself replaced a damaged log, it is incomplete; ``begin_reinstate`` needs that log.
        target = None if tp in self._replaced else self._replaced_path(name, end)

        def run() -> None:
            if self._fs.exists(damaged.directory):
                if target is None:
                    self._set_aside(damaged.directory, name)
                else:
                    self._fs.rename(damaged.directory, target)
            self._forget_durably(name)

        def finish(_config: LogConfig) -> None:
            if target is not None and self._fs.exists(target):
                self._replaced[tp] = end, damage
            self._remove_log(tp)

        return LogExchange(run, finish)

    def replaced_end(self, tp: TopicPartition) -> int | None:
        """Return the log end offset of the damaged log that ``begin_reinstate`` would put back; None if
        there is none."""
        replaced = self._replaced.get(tp)
        return None if replaced is None else replaced[0]

    def keep_replacement(self, tp: TopicPartition) -> Callable[[], None] | None:
        """Make ``begin_replace`` final: rename the damaged log, so that it is kept only for inspection.

        Returns a function that syncs the new name, in any thread, or None if no log was replaced. Raises
        OSError.
        """
        replaced = self._replaced.get(tp)
        if replaced is None:
            return None
        name = self._names[tp]
        self._set_aside(self._replaced_path(name, replaced[0]), name)
        del self._replaced[tp]
        return self._sync_names

    def _sync_names(self) -> None:
        try:
            self._fs.sync_dir(self._path)
        except (OSError, StorageExhaustedError) as error:  # after a power loss the next start repeats it
            logger.warning("names not synced %s", Fields(path=self._path, error=error))

    def begin_reinstate(self, tp: TopicPartition) -> LogExchange:
        """Begin to undo ``begin_replace`` by putting the damaged log back. The files of the log that replaced
        it are kept beside it (R52).

        After ``finish``, ``get`` returns the damaged log. It is offline; the next start reads its files.
        """
        log, name = self._logs[tp], self._names[tp]
        end, damage = self._replaced[tp]
        log.close(clean=False)

        def run() -> None:
            if self._fs.exists(replaced := self._replaced_path(name, end)):
                if self._fs.exists(log.directory):
                    self._set_aside(log.directory, name)
                self._fs.rename(replaced, log.directory)
            self._forget_durably(name)

        def finish(config: LogConfig) -> None:
            del self._replaced[tp]
            self._remove_log(tp)
            damaged = Log(self._fs, self._join(name), config, end=end)
            if damage is None:
                damaged.mark_damaged("it was found damaged before the last start", records_in_doubt=end)
            else:
                damaged.mark_damaged(
                    damage.cause,
                    sound_end_offset=damage.sound_end_offset,
                    records_in_doubt=damage.records_in_doubt,
                )
            self._add(tp, name, damaged)

        return LogExchange(run, finish)

    def _replaced_path(self, name: str, end: int) -> str:
        return f"{self._join(name)}{layout.REPLACED_SUFFIX}{end}"

    def _set_aside(self, path: str, name: str) -> None:
        """Rename the directory ``path`` to the next free name of a damaged copy of ``name``."""
        number = 1
        while self._fs.exists(kept := f"{self._join(name)}{layout.DAMAGED_SUFFIX}{number}"):
            number += 1
        self._fs.rename(path, kept)

    def _forget_durably(self, name: str) -> None:
        """Sync the new name of a log's directory, and remove its recovery point. With the point, a new log in
        a directory of the old name would count as damaged."""
        self._fs.sync_dir(self._path)
        self._points.write({name: None})

    def _remove_log(self, tp: TopicPartition) -> None:
        """Remove a closed log whose directory was renamed."""
        log, name = self._logs.pop(tp), self._names.pop(tp)
        self._forget(log, name)
        self._clean_ends.pop(name, None)

    def begin_removal(
        self, now_ms: int, files: Iterable[str] = (), delay_ms: int = 60_000
    ) -> Callable[[], None] | None:
        """Return a job that removes ``files``, which ``Log.take_retired`` returned, and the directories of
        deleted logs whose delay has passed; None if there are none.

        The delay of ``delay_ms`` begins with the first call after the deletion. The job may run in any
        thread. If it raises OSError, the next start removes the rest, except torn tails.
        """
        files, directories = list(files), self._retired.due(now_ms, delay_ms)
        return partial(self._remove, files, directories) if files or directories else None

    def _remove(self, files: Sequence[str], directories: Sequence[str]) -> None:
        unlink_existing(self._fs, files)
        for path in directories:
            self._fs.remove_tree(path)

    def release_idle(self) -> int:
        """Close files and maps unused since the last call. Return the number of segments whose files were
        closed."""
        return sum(log.release_idle() for log in self._logs.values())

    @property
    def has_retired(self) -> bool:
        """Whether directories of deleted logs wait for their removal."""
        return len(self._retired) > 0

    def _forget(self, log: Log, name: str) -> None:
        """Remove the recovery point of a log when the next checkpoint is written."""
        self._moved.pop(log.directory, None)
        self._unrecorded.pop(name, None)
        self._forgotten[name] = None
        self._wake()

    def _on_moved(self, directory: str, change: SyncWork | RecoveryPoint) -> None:
        """Record that the recovery point of a log has moved to ``change``, or to the point after the round
        ``change``. Called in any thread."""
        is_first = not self._moved
        self._moved[directory] = change
        if is_first:
            self._wake()

    def _wake(self) -> None:
        if self.on_moved is not None:
            self.on_moved()

    @property
    def metadata_offset(self) -> int | None:
        """A metadata offset that this node had reached in an earlier session; None if there was no session, 0
        if only the logs prove that there was one.

        A node must not start with metadata that ends below this offset (R25).
        """
        point = self._points.points.get(METADATA_POINT)
        if point is not None:
            return point.recovery_point
        names = self._fs.list_dir(self._path)
        return 0 if any(map(layout.parse_log_directory_name, names)) else None

    def note_metadata_offset(self, offset: int) -> None:
        """Record with the next checkpoint that this node has the metadata up to ``offset``."""
        if offset > self._metadata_offset:
            self._metadata_offset = offset
            self._on_moved(METADATA_POINT, RecoveryPoint(offset))

    def checkpoint(self) -> None:
        """Write the recovery points that moved. Raises OSError or StorageExhaustedError; then the old points
        stay valid."""
        work = self.begin_checkpoint()
        if work is not None:
            work()

    def begin_checkpoint(self) -> Callable[[], None] | None:
        """Return a function that writes the recovery points that have moved, or None if none has (R24).

        The function may run in any thread. Its cost depends on the points that moved, not on the number of
        logs. After OSError or StorageExhaustedError the old points stay valid, and the next checkpoint
        repeats the write.
        """
        if not (self._moved or self._forgotten or self._unrecorded or self._points.has_failed):
            return None
        changes: dict[str, Change] = dict.fromkeys(self._forgotten)
        created = [name for name, log in self._unrecorded.items() if log.damage is None]
        has_names = bool(created or self._forgotten)
        changes |= {name: RecoveryPoint() for name in created}
        for directory, change in list(self._moved.items()):
            changes[layout.name_of(directory)] = change
        # Entries are deleted one by one, because the logs refer to this dict, and a truncation in another
        # thread may have replaced an entry since it was read: that one stays for the next checkpoint.
        for directory in [
            one for one, change in self._moved.items() if change is changes.get(layout.name_of(one))
        ]:
            del self._moved[directory]
        self._forgotten.clear()
        self._unrecorded.clear()
        return partial(self._write_points, changes, has_names=has_names)

    def _write_points(self, changes: Mapping[str, Change], *, has_names: bool) -> None:
        if has_names:  # after a power loss a recorded log must exist, and a deleted one must not
            self._fs.sync_dir(self._path)
        self._points.write(changes)

    def _join(self, name: str) -> str:
        return layout.join(self._path, name)


def may_lack_unsynced(fs: FileSystem, path: str) -> bool:
    """Whether the system may have restarted since all logs of the data directory ``path`` were last
    recovered, and so may have lost unsynced bytes."""
    boot_id = fs.boot_id()
    try:
        last = fs.read_bytes(layout.join(path, layout.BOOT_ID_FILE))
    except (FileNotFoundError, WrongFileTypeError):
        last = b""
    return not boot_id or last != _boot_line(boot_id)


def _boot_line(boot_id: str) -> bytes:
    return boot_id.encode() + b"\n"


def _parts(name: str) -> layout.LogDirectoryName:
    parsed = layout.parse_log_directory_name(name)
    assert parsed is not None, f"{name} was built by log_directory_name"
    return parsed


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
