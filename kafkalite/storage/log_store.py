"""LogStore: a data directory and the logs in it.

The directory is formatted once with a cluster id, a node id and a directory id. A directory of another node
is refused. Only one process at a time can lock it. Directories of unknown logs are reported but not changed;
a log is deleted only by ``delete_log`` (R25).

A start after an orderly stop opens no log whose files match the marker. All other logs are recovered from
their recovery points. A log that cannot be recovered is offline, with the reason; the other logs are used.
"""

# Long because one object owns the directory's names, recovery points and logs, which change together.

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from kafkalite.errors import (
    CorruptLogError,
    DamagedIdentityError,
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
    decode_replica_epoch,
    encode_clean_shutdown,
    encode_node,
    encode_partition,
    restore_hint,
)
from kafkalite.storage.damage import Damage
from kafkalite.storage.filesystem import FileSystem, Lock, Space, damaged_name, retired_name, unlink_existing
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_copy import LogCopy
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


def _format(
    fs: FileSystem,
    path: str,
    cluster_id: str | None,
    node_id: int,
    rng: Rng | None,
    file: str = layout.NODE_FILE,
) -> NodeIdentity:
    """Write a ``file`` with a new directory id durably. If ``cluster_id`` is None, generate an id."""
    rng = rng or system_rng()
    identity = NodeIdentity(cluster_id or rng.randbytes(16).hex(), node_id, rng.randbytes(16).hex())
    fs.write_atomically(layout.join(path, file), encode_node(identity))
    return identity


def _check_empty(fs: FileSystem, path: str) -> None:
    """Raise DataDirectoryError if ``path`` has files other than those that a start may have left."""
    ignored = {layout.LOCK_FILE, "lost+found"}
    names = [name for name in fs.list_dir(path) if name not in ignored and not layout.is_leftover(name)]
    if layout.NODE_FILE in names:
        raise DataDirectoryError(f"{path} is already formatted", hint="use it, or choose another directory")
    if layout.LOG_DIR_FILE in names:
        raise DataDirectoryError(
            f"{path} is a further data directory of a node, not the first one",
            hint=f"name the directory with {layout.NODE_FILE} first in log.dirs",
        )
    if _has_node_data(names):
        raise DataDirectoryError(
            f"{path} has the data of a node, but no {layout.NODE_FILE}",
            hint=restore_hint(layout.join(path, layout.NODE_FILE)),
        )
    if names:
        raise DataDirectoryError(
            f"{path} is not empty: it contains {', '.join(names[:3])}", hint="choose an empty directory"
        )


def _has_node_data(names: Sequence[str]) -> bool:
    return bool(_NODE_NAMES.intersection(names)) or any(map(layout.parse_log_directory_name, names))


def restore_identity(
    fs: FileSystem, path: str, *, cluster_id: str, node_id: int, rng: Rng | None = None
) -> NodeIdentity:
    """Write a lost or damaged ``node.json`` again, with a new directory id. A damaged file is renamed to a
    name with ``.damaged-``.

    Raises DataDirectoryError if the file is intact or of another format version, if ``path`` has no data of a
    node, or if the data directory is in use; OSError, StorageExhaustedError.
    """
    if not (fs.exists(path) and _has_node_data(fs.list_dir(path))):
        raise DataDirectoryError(f"{path} has no data of a node", hint="format it without --restore")
    lock = fs.lock(layout.join(path, layout.LOCK_FILE))
    try:
        with suppress(DamagedIdentityError, WrongFileTypeError):
            if read_identity(fs, path) is not None:
                raise DataDirectoryError(f"{path} has an intact {layout.NODE_FILE}", hint="start the node")
        if fs.exists(file := layout.join(path, layout.NODE_FILE)):
            fs.rename(file, damaged_name(fs, file))
        return _format(fs, path, cluster_id, node_id, rng)
    finally:
        lock.release()


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


def read_identity(fs: FileSystem, path: str, file: str = layout.NODE_FILE) -> NodeIdentity | None:
    """Return the identity of a data directory, or None if it has no ``file``. Raises DataDirectoryError,
    WrongFileTypeError, OSError."""
    node_path = layout.join(path, file)
    try:
        return decode_node(fs.read_bytes(node_path), node_path)
    except FileNotFoundError:
        return None


class LogExchange:
    """The replacement of a damaged log by an empty one, or its reversal (R52).

    The caller runs ``run`` in any thread, because it waits for the disk, then calls ``finish`` with the
    configuration of the log. After StorageExhaustedError or OSError the exchange can be begun again.
    """

    def __init__(self, run: Callable[[], None], finish: Callable[[LogConfig], None]) -> None:
        self._run = run
        self.finish = finish
        self._lock = threading.Lock()
        self._is_cancelled = False

    def run(self) -> None:
        """Rename the logs. Has no effect after ``cancel``."""
        with self._lock:
            if not self._is_cancelled:
                self._run()

    def cancel(self) -> None:
        """Wait for ``run`` if it is running, and let later calls do nothing: the log's directory may soon be
        that of another replica."""
        with self._lock:
            self._is_cancelled = True


class LogStore:
    """The logs of one data directory by topic and partition. Create it with ``open``, and close it once.

    ``is_new``: this process has formatted the directory. ``clean_start``: the previous process stopped in an
    orderly way. ``last_broker_epoch``: the epoch in its marker (R21), or NO_BROKER_EPOCH.
    ``unknown_directories``: the names of the log directories that ``load`` found but did not open.
    """

    def __init__(
        self, fs: FileSystem, path: str, identity: NodeIdentity, lock: Lock, *, is_new: bool = False
    ) -> None:
        self._fs = fs
        self._path = self.path = path
        self.is_new = is_new
        self.failure: str | None = None  #: why the directory cannot be used any more, set by ``fail``
        self._lock = lock
        self._logs: dict[TopicPartition, Log] = {}
        self._names: dict[TopicPartition, str] = {}
        self._points = RecoveryPointsFile(fs, path)
        #: The points that moved since the last checkpoint, by log directory.
        self._moved: dict[str, SyncWork | RecoveryPoint] = {}
        self._forgotten: dict[str, None] = {}  #: the logs whose points the next checkpoint removes
        self._unrecorded: dict[str, Log] = {}  #: by name: new logs, whose existence is not recorded yet
        self._clean_ends: dict[str, CleanEnd] = {}
        self._unloaded: set[str] = set()  #: logs that were opened here, and are not loaded
        self._retired = RetiredPaths()
        #: The logs that ``begin_replace`` set aside: their log end offsets, and the damage if known.
        self._replaced: dict[TopicPartition, tuple[int, Damage | None]] = {}
        self._exchanges: dict[TopicPartition, LogExchange] = {}  #: those without ``finish``
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
        identity_file: str = layout.NODE_FILE,
    ) -> LogStore:
        """Open a data directory. If it is empty or missing, format it first, or raise DataDirectoryError if
        ``format_if_empty`` is False. ``identity_file`` is LOG_DIR_FILE for a node's further directory (R80).

        If ``cluster_id`` is None, any cluster id is accepted. The clean-shutdown marker is read and durably
        removed before anything is appended (R21). Raises DataDirectoryError, OSError, StorageExhaustedError;
        WrongFileTypeError if something else is in the place of a file that is needed.
        """
        path = path.rstrip("/") or "/"
        _make_dirs_durably(fs, path)
        is_new = not fs.exists(layout.join(path, identity_file))
        if is_new:
            _check_formattable(fs, path, format_if_empty)  # a refused directory gets no lock file
        lock = fs.lock(layout.join(path, layout.LOCK_FILE))
        try:
            # Before the lock, another process may have formatted the directory.
            identity = None if is_new and fs.is_memory else read_identity(fs, path, identity_file)
            is_new = identity is None
            if identity is None:
                if not fs.is_memory:
                    _check_formattable(fs, path, format_if_empty)
                identity = _format(fs, path, cluster_id, node_id, rng, identity_file)
            _refuse_strange(path, identity, cluster_id, node_id)
            store = cls(fs, path, identity, lock, is_new=is_new)
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

        After an orderly stop, no batch of a log is read if the files match the marker. A log is offline if it
        is damaged, or if its directory is missing although the marker or the recovery points show that it may
        have had records. ``are_all``: ``logs`` is complete, so the directories of other logs are reported.

        Raises StorageExhaustedError, OSError.
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
                continue  # ``find`` tells whether it is the log of this topic id
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
        self._unloaded.add(name)  # until ``_add``
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
            cause = error.message if isinstance(error, StorageError) else str(error)
            return Log.damaged(self._fs, directory, config, cause), None

    def _missing_log(self, name: str, config: LogConfig) -> Log | None:
        """Return a damaged log in place of a log whose directory is missing. Return None if no record is lost
        with the directory: at an orderly stop the log was empty, or neither the marker nor a recovery point
        names it."""
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
                self._unloaded.add(self._names[tp])
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
        """Report the directories of unknown logs, and retire those of logs that an earlier process deleted:
        the delay of their removal begins again."""
        ours = set(self._names.values())
        unknown: list[str] = []
        if layout.MOVING_DIRECTORY in names:  # of an earlier process
            self._fs.remove_tree(self._join(layout.MOVING_DIRECTORY))
        for name in sorted(names):
            if name.endswith(layout.DELETED_SUFFIX):
                is_log = layout.parse_log_directory_name(name.partition(layout.DELETED_SUFFIX)[0])
                if is_log and self._join(name) not in self._retired:
                    self._retired.add(self._join(name))
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
            if not clean or self.failure is not None:
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

    def create_log(
        self, tp: TopicPartition, topic_id: str, config: LogConfig, *, replica_epoch: int = 0
    ) -> Log:
        """Create an empty log, or return the existing log with the same topic id. If the log is not loaded,
        but its directory exists, recover it. A new log is durable after its first sync. ``replica_epoch`` is
        stored with a new log (``discard_earlier``).

        Raises DataDirectoryError if ``tp`` is loaded with another topic id, or the topic id is malformed;
        OSError, StorageExhaustedError.
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
        file.write_at(0, encode_partition(tp.topic, topic_id, tp.partition, replica_epoch))
        file.close()
        self._forgotten.pop(name, None)
        self._unrecorded[name] = log
        self._add(tp, name, log)
        self._wake()
        return log

    def discard_earlier(
        self, tp: TopicPartition, topic_id: str, replica_epoch: int, *, is_kept: bool = False
    ) -> None:
        """Retire the files of a log that is not loaded, if they are from before ``replica_epoch``, in which a
        reassignment has added the replica again (R62).

        ``is_kept``: set them aside for an operator instead (R71). Call it only for a replica that is in no
        ISR or ELR. Raises OSError, StorageExhaustedError.
        """
        name = layout.log_directory_name(topic_id, tp.partition)
        directory = self._join(name)
        if tp in self._logs:
            return
        self._set_replaced_aside(name, replica_epoch)
        is_there = self._fs.exists(directory)
        if is_there and not self.is_earlier(topic_id, tp.partition, replica_epoch):
            return
        if is_there:
            logger.warning("log of a removed replica retired %s", Fields(partition=tp, directory=directory))
            self._put_away(directory, name, is_kept=is_kept)
        self._clean_ends.pop(name, None)
        self._unloaded.discard(name)
        if is_there or name in self._points.points:
            self._forget_durably(name)

    def is_earlier(self, topic_id: str, partition: int, replica_epoch: int) -> bool:
        """Whether the files of a log are of a replica that was removed before ``replica_epoch`` (R62)."""
        return self._is_earlier(self._join(layout.log_directory_name(topic_id, partition)), replica_epoch)

    def _is_earlier(self, directory: str, replica_epoch: int) -> bool:
        return is_earlier_replica(self._replica_epoch(directory), replica_epoch)

    def _replica_epoch(self, directory: str) -> int:
        try:
            return decode_replica_epoch(self._fs.read_bytes(layout.join(directory, layout.PARTITION_FILE)))
        except (FileNotFoundError, WrongFileTypeError):
            return 0

    def _put_away(self, directory: str, name: str, *, is_kept: bool) -> None:
        """Retire a log's directory or, if it ``is_kept``, rename it to a name with ``.damaged-``, which no
        process removes (R71)."""
        if is_kept:
            kept = self._set_aside(directory, name)
            logger.warning("log of a removed replica is kept %s", Fields(directory=kept))
        else:
            self._retire(directory)

    def _retire(self, directory: str) -> None:
        """Rename a log's directory, so that ``begin_removal`` returns it."""
        retired = retired_name(self._fs, directory)
        self._fs.rename(directory, retired)
        self._retired.add(retired)

    def _add(self, tp: TopicPartition, name: str, log: Log) -> None:
        self._logs[tp] = log
        self._names[tp] = name
        self._unloaded.discard(name)
        log.on_moved = self._on_moved

    def get(self, tp: TopicPartition) -> Log | None:
        return self._logs.get(tp)

    # --- one of several data directories (``log_dirs``)

    @property
    def loaded(self) -> Mapping[TopicPartition, Log]:
        """The loaded logs by topic and partition."""
        return self._logs

    def directory_names(self) -> set[str]:
        """Return the names in the directory. Raises OSError."""
        return set(self._fs.list_dir(self._path))

    def has_directory(self, name: str) -> bool:
        """Whether the directory has the log ``name``, loaded or not."""
        return self._fs.exists(self._join(name))

    def name_of(self, tp: TopicPartition) -> str:
        """Return the name of the directory of a loaded log."""
        return self._names[tp]

    def replica_epoch(self, topic_id: str, partition: int) -> int:
        """Return the replica epoch in the files of a log (R62); 0 if there is none."""
        return self._replica_epoch(self._join(layout.log_directory_name(topic_id, partition)))

    def has_record_of(self, name: str) -> bool:
        """Whether the marker or a recovery point names the log ``name``, which then was here."""
        return name in self._clean_ends or name in self._points.points

    @property
    def has_unloaded(self) -> bool:
        """Whether a log was opened here and is not loaded, because it is to be opened again."""
        return bool(self._unloaded)

    def known_names(self) -> set[str]:
        """Return the names of the logs that are or may be here, without use of the disk."""
        recorded = {*self._points.points, *self._clean_ends, *self._unrecorded} - self._forgotten.keys()
        return recorded.union(self._names.values(), self._unloaded)

    def expect(self, ends: Mapping[str, int]) -> None:
        """Record durably that these logs were here, {name: offset up to which it had records, 0 if unknown}.

        So ``load`` takes each of them for damaged as long as its directory is missing (R82). Raises OSError,
        StorageExhaustedError.
        """
        self._points.write({name: RecoveryPoint(end) for name, end in ends.items()})

    def recorded_end(self, name: str) -> int:
        """Return the offset up to which the recovery point shows that the log ``name`` was synced; 0 if there
        is none."""
        return self._points.points.get(name, RecoveryPoint()).recovery_point

    def expect_end(self, name: str, end: int) -> None:
        """Record durably that the log ``name``, which is not loaded, had records up to ``end``, so that it is
        damaged if it ends before (R84). Raises OSError, StorageExhaustedError."""
        self._clean_ends.pop(name, None)
        self._moved.pop(self._join(name), None)
        point = self._points.points.get(name, RecoveryPoint())
        if point.recovery_point < end:
            self._points.write({name: point._replace(recovery_point=end)})

    def take_copy(self, tp: TopicPartition, name: str, copy: LogCopy, config: LogConfig) -> Log:
        """Load a complete copy as the log of ``tp``, and return it."""
        assert tp not in self._logs, f"{tp} is loaded"
        assert copy.end is not None, "the copy is complete"
        log = Log.open_clean(self._fs, copy.target_directory, config, copy.end)
        self._forgotten.pop(name, None)
        self._add(tp, name, log)
        self._on_moved(log.directory, copy.end.point)
        return log

    def record_copy(self, copy: LogCopy) -> None:
        """Write the recovery point of a complete copy durably. May be called in any thread. Raises OSError,
        StorageExhaustedError."""
        assert copy.end is not None, "the copy is complete"
        self._points.write({layout.name_of(copy.target_directory): copy.end.point})

    def forget_copy(self, copy: LogCopy) -> None:
        """Let ``begin_removal`` remove the files of a copy that was discarded after it had the log's name."""
        if copy.retired is not None:
            self._retired.add(copy.retired)
            self.forget_record(layout.name_of(copy.target_directory))

    def begin_copy(self, tp: TopicPartition, target: LogStore) -> LogCopy:
        """Return the empty copy of a loaded log for another data directory of the node."""
        topic_id, number = _parts(self._names[tp])
        epoch = self.replica_epoch(topic_id, number)
        return LogCopy(self._fs, self._logs[tp], target.path, tp, topic_id, replica_epoch=epoch)

    def retire_moved(self, tp: TopicPartition) -> None:
        """Retire the files of a log that a copy in another directory replaces, and close it.

        Raises OSError, StorageExhaustedError. Then nothing has changed.
        """
        self._retire(self._logs[tp].directory)
        log, name = self._logs.pop(tp), self._names.pop(tp)
        log.close(clean=False)
        self._forget(log, name)

    def forget_record(self, name: str) -> None:
        """Let the next checkpoint remove the recovery point of a log that is in another directory."""
        self._clean_ends.pop(name, None)
        self._forgotten[name] = None
        self._wake()

    def set_aside_log(self, name: str) -> None:
        """Rename the directory of a log that is not loaded to a name with ``.damaged-``, durably.

        Raises OSError, StorageExhaustedError.
        """
        self._set_aside(self._join(name), name)
        self._clean_ends.pop(name, None)
        self._unloaded.discard(name)
        self._forget_durably(name)

    def space(self) -> Space:
        """Return the size of the disk and its free bytes. Raises OSError."""
        return self._fs.space(self._path)

    def probe(self) -> None:
        """Raise an OSError if the disk can't be written. May be called in any thread."""
        path = self._join(layout.PROBE_FILE)
        try:
            self._fs.write_atomically(path, b"")
            self._fs.unlink(path)
        except StorageExhaustedError:
            pass  # the disk works, and the condition passes (R54, R55)

    def fail(self, reason: str) -> None:
        """Take every log of the directory offline, because its disk has failed. ``close`` then leaves no
        marker. Idempotent."""
        if self.failure is None:
            self.failure = reason
            for log in self._logs.values():
                log.take_offline(reason)

    def find(self, tp: TopicPartition, topic_id: str) -> Log | None:
        """Return the loaded log of a partition of the topic with this id, or None."""
        is_it = self._names.get(tp) == layout.log_directory_name(topic_id, tp.partition)
        return self._logs[tp] if is_it else None

    def shortage(self) -> str | None:
        """Return why no log can grow, or None."""
        return self._fs.shortage(self._path)

    def logs(self) -> Mapping[TopicPartition, Log]:
        """Return all logs, including offline ones. The result changes when a log is added or removed."""
        return self._logs

    def delete_log(self, tp: TopicPartition, topic_id: str | None = None, *, is_kept: bool = False) -> None:
        """Retire a log with all its records. The next checkpoint makes that durable, and a later
        ``begin_removal`` returns the job that removes its files.

        ``is_kept``: set its files aside for an operator instead (R71). Has no effect if there is no log.
        Raises DataDirectoryError if ``topic_id`` is given and the log belongs to another topic (R25);
        OSError, StorageExhaustedError.
        """
        log, name = self._logs.get(tp), self._names.get(tp)
        if log is None or name is None:
            return
        if topic_id is not None and name != layout.log_directory_name(topic_id, tp.partition):
            raise DataDirectoryError(f"{tp} is the log in {log.directory}, not one of topic id {topic_id}")
        log.close(clean=False)
        exchange = self._exchanges.pop(tp, None)
        if exchange is not None:
            exchange.cancel()
        if self._replaced.pop(tp, None) is not None or exchange is not None:
            self._set_replaced_aside(name)
        del self._logs[tp]
        del self._names[tp]
        self._forget(log, name)
        if self._fs.exists(log.directory):
            self._put_away(log.directory, name, is_kept=is_kept)

    def release_log(self, tp: TopicPartition) -> None:
        """Close a log without a sync, and remove it from the store. ``create_log`` then recovers it from its
        files."""
        log = self._logs.pop(tp)
        self._unloaded.add(self._names.pop(tp))
        log.close(clean=False)

    def unload_log(self, tp: TopicPartition) -> None:
        """Close a log that was not used since it was loaded, and leave its files as they are: ``load`` opens
        it again, ``delete_unloaded`` retires it. Meanwhile another topic's log can have its name (R63)."""
        log, name = self._logs[tp], self._names[tp]
        if not log.is_open and (end := log.clean_end) is not None:
            self._clean_ends[name] = end
        self._replaced.pop(tp, None)  # ``load`` finds it again
        self.release_log(tp)

    def delete_unloaded(self, tp: TopicPartition, topic_id: str, *, is_kept: bool = False) -> None:
        """Retire a log that is not loaded, as ``delete_log`` does. Has no effect if there are no files.

        Raises OSError, StorageExhaustedError.
        """
        assert self.find(tp, topic_id) is None, f"{tp} of topic id {topic_id} is loaded"
        name = layout.log_directory_name(topic_id, tp.partition)
        directory = self._join(name)
        self._clean_ends.pop(name, None)
        self._unloaded.discard(name)
        self._moved.pop(directory, None)
        self._unrecorded.pop(name, None)
        self._forgotten[name] = None
        self._wake()
        self._set_replaced_aside(name)
        if self._fs.exists(directory):
            self._put_away(directory, name, is_kept=is_kept)

    def begin_replace(self, tp: TopicPartition) -> LogExchange:
        """Begin to replace a damaged log by an empty one. After ``finish``, the caller makes the empty log
        with ``create_log``. The damaged files are kept beside the new ones (R24).

        Until ``keep_replacement`` is called, ``begin_reinstate`` can undo this, also in a later process
        (R52). If the damaged log has itself replaced an earlier log, ``begin_reinstate`` puts the earlier log
        back. Use this only for a replica outside of its partition's in-sync set.
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
            del self._exchanges[tp]
            if target is not None and self._fs.exists(target):
                self._replaced[tp] = end, damage
            self._remove_log(tp)

        self._exchanges[tp] = exchange = LogExchange(run, finish)
        return exchange

    def replaced_end(self, tp: TopicPartition) -> int | None:
        """Return the known log end offset of the damaged log that ``begin_reinstate`` would put back; None if
        there is no such log."""
        replaced = self._replaced.get(tp)
        return None if replaced is None else replaced[0]

    def keep_replacement(self, tp: TopicPartition) -> Callable[[], None] | None:
        """Make ``begin_replace`` final: rename the damaged log, so that it is kept only for inspection.

        Returns a function that syncs the new name and may run in any thread. Returns None if no log was
        replaced. Raises OSError, StorageExhaustedError.
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
            del self._exchanges[tp]
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

        self._exchanges[tp] = exchange = LogExchange(run, finish)
        return exchange

    def _replaced_path(self, name: str, end: int) -> str:
        return f"{self._join(name)}{layout.REPLACED_SUFFIX}{end}"

    def _set_aside(self, path: str, name: str) -> str:
        """Rename the directory ``path`` to the next free ``.damaged-`` name of the log ``name``, and return
        that name."""
        kept = damaged_name(self._fs, self._join(name))
        self._fs.rename(path, kept)
        return kept

    def _set_replaced_aside(self, name: str, before_epoch: int | None = None) -> None:
        """Make each ``begin_replace`` of the log ``name`` final. If ``before_epoch`` is given, omit logs of
        replicas that were not removed before this replica epoch."""
        for one in self._fs.list_dir(self._path):
            path = self._join(one)
            if one.startswith(name + layout.REPLACED_SUFFIX) and (
                before_epoch is None or self._is_earlier(path, before_epoch)
            ):
                self._set_aside(path, name)

    def _forget_durably(self, name: str) -> None:
        """Sync the name to which a log's directory was renamed, and remove the log's recovery point. With
        that point, a new log in a directory of the old name would count as damaged."""
        self._fs.sync_dir(self._path)
        self._points.write({name: None})

    def _remove_log(self, tp: TopicPartition) -> None:
        """Remove a closed log, whose directory was renamed, from the store."""
        log, name = self._logs.pop(tp), self._names.pop(tp)
        self._forget(log, name)
        self._clean_ends.pop(name, None)

    def begin_removal(
        self, now_ms: int, files: Iterable[str] = (), delay_ms: int = 60_000
    ) -> Callable[[], None] | None:
        """Return a job that removes ``files``, which ``Log.take_retired`` returned, and the directories of
        deleted logs whose delay has passed; None if there are none.

        The delay of ``delay_ms`` begins with the first call after the deletion, and again after a restart.
        The job may run in any thread. If it raises an error, the next process removes the rest, except torn
        tails.
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
        """Let the next checkpoint remove the recovery point of a log."""
        self._moved.pop(log.directory, None)
        self._unrecorded.pop(name, None)
        self._forgotten[name] = None
        self._wake()

    def _on_moved(self, directory: str, change: SyncWork | RecoveryPoint) -> None:
        """Record that the recovery point of a log has moved: to the point ``change``, or if ``change`` is a
        sync round, to the point after this round. Called in any thread."""
        is_first = not self._moved
        self._moved[directory] = change
        if is_first:
            self._wake()

    def _wake(self) -> None:
        if self.on_moved is not None:
            self.on_moved()

    @property
    def metadata_offset(self) -> int | None:
        """The metadata offset in the last checkpoint that has one. If there is none: 0 if the directory has
        logs, else None.

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
        """Write the recovery points that were moved, added or removed. Raises OSError or
        StorageExhaustedError; then the old points stay valid."""
        work = self.begin_checkpoint()
        if work is not None:
            work()

    def begin_checkpoint(self) -> Callable[[], None] | None:
        """Return a function that writes the recovery points that were moved, added or removed (R24). Return
        None if nothing must be written.

        The function may run in any thread. Its cost depends on the number of these points, not on the number
        of logs. After OSError or StorageExhaustedError the old points stay valid, and the next checkpoint
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


def is_earlier_replica(stored_epoch: int, replica_epoch: int) -> bool:
    """Whether files with ``stored_epoch`` are of a replica that was removed before it was added again in
    ``replica_epoch``. No compaction has waited for that replica meanwhile (R41, R62)."""
    return stored_epoch < replica_epoch


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
