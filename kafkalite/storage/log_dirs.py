"""LogDirs: the data directories of a node, and the logs in all of them.

The first directory is the node's own: it has ``node.json`` and the metadata. Each further directory has the
file ``log-dir.json`` with an id, and recovery points and a clean-shutdown marker for its logs. The first
directory knows the ids of the further ones, so that a directory that is missing, replaced, or an older copy
is noticed (R80, R82, R83). If a further directory fails, the logs in the others are used (R81).

A node with one directory has one LogStore, to which every call is passed.
"""

# Tests: tests/storage/test_log_dirs.py
# Long because one object knows in which directory each log is.

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

from kafkalite.errors import (
    CorruptLogError,
    DataDirectoryError,
    LogDirNotFoundError,
    LogOfflineError,
    StorageError,
    StorageExhaustedError,
)
from kafkalite.log_fields import Fields
from kafkalite.model import NO_BROKER_EPOCH, NO_EPOCH, TopicPartition
from kafkalite.rng import Rng
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    LOG_DIR_STARTS,
    KnownDirectory,
    decode_lines,
    decode_log_dirs,
    encode_lines,
    encode_log_dirs,
)
from kafkalite.storage.directory_choice import (
    DirectoryUse,
    LogVersion,
    choose_directory,
    choose_log,
    missing_end,
)
from kafkalite.storage.filesystem import FileSystem, Space
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.log_copy import LogCopy
from kafkalite.storage.log_store import LogExchange, LogStore, read_identity

logger = logging.getLogger(__name__)

NOTHING_COMMITTED: Final[Mapping[tuple[str, int], int]] = MappingProxyType({})
#: The size and the free bytes of a disk that cannot be asked.
_UNKNOWN_SPACE: Final = Space(-1, -1)


class DirectoryState(NamedTuple):
    """A data directory, for operators. ``space`` has -1 if it is unknown."""

    path: str
    directory_id: str  #: "" if the directory could not be opened
    failure: str | None  #: why the directory is not used; None if it works
    space: Space
    logs: tuple[TopicPartition, ...]


class LogDirs:
    """The data directories of a node. Create it with ``open``, and close it once.

    ``clean_start`` and ``last_broker_epoch`` are as in LogStore, for all directories together: a directory
    that is missing, has failed or may be an older copy makes the start unclean.

    Invariant: a log is loaded in at most one directory.
    """

    def __init__(self, fs: FileSystem, first: LogStore) -> None:
        self._fs = fs
        self._stores = [first]  #: the directories that were opened; the first one is the node's own
        self.identity = first.identity  #: the cluster, the node and the first directory
        self.path = first.path  #: the first directory
        self.note_metadata_offset = first.note_metadata_offset
        self.are_several = False  #: whether the node has, or had, further directories
        self._unopened: dict[str, str] = {}  #: by path: why a directory could not be opened
        self._known: list[KnownDirectory] = []  #: the further directories in the file ``log-dirs``
        self._is_list_damaged = False
        #: Directories of which nothing is left: another directory, or none, is in the place of each.
        self._lost: list[KnownDirectory] = []
        self._older: set[str] = set()  #: the paths of directories that may be older copies
        #: By path of such a directory: its logs that must be fetched again. None before ``distrust``.
        self._suspects: dict[str, dict[TopicPartition, Log]] | None = None
        self._was_complete = True  #: at the start no directory was lost, unopened or an older copy
        #: Names of logs that are or may be in a directory that could not be opened, or has failed.
        self._unfound: set[str] = set()
        #: By name of the log: where the log that replaces a damaged one is made.
        self._next_homes: dict[str, LogStore] = {}

    def __repr__(self) -> str:
        return f"<LogDirs {', '.join(store.path for store in self._stores)}>"

    # --- opening and closing

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        paths: Sequence[str],
        *,
        cluster_id: str | None = None,
        node_id: int,
        rng: Rng | None = None,
    ) -> LogDirs:
        """Open the data directories ``paths``, none of which ends in a slash. Format empty or missing ones.

        A further directory that raises an OSError is not used. Raises DataDirectoryError if a directory is
        that of another node, is given twice, or is in the wrong place of the list (R80); the errors of
        ``LogStore.open`` for the first directory.
        """
        first, further = paths[0], paths[1:]
        if further:
            _refuse_lost_first(fs, first, further, node_id)
        store = LogStore.open(fs, first, cluster_id=cluster_id, node_id=node_id, rng=rng)
        dirs = cls(fs, store)
        try:
            if further or (not store.is_new and fs.exists(layout.join(first, layout.LOG_DIRS_FILE))):
                dirs._open_further(further, rng)
        except BaseException:
            dirs.close(clean=False)
            raise
        return dirs

    def _open_further(self, paths: Iterable[str], rng: Rng | None) -> None:
        paths = list(paths)
        known = {one.directory_id: one for one in self._read_known(paths)}
        used: dict[str, KnownDirectory] = {}
        for path in paths:
            try:
                store = self._open_one(path, rng)
                starts = self._count_start(store, known.get(store.identity.directory_id))
            except OSError as error:
                self._unopened[path] = str(error)
                logger.error("data directory not opened %s", Fields(path=path, error=error))
                continue
            self._stores.append(store)
            directory_id = store.identity.directory_id
            used[directory_id] = KnownDirectory(directory_id, starts, path)
        missing = [one for one in known.values() if one.directory_id not in used]
        self._lost = [one for one in missing if one.path not in self._unopened]
        if self._is_list_damaged:  # any directory may have been lost
            self._lost.append(KnownDirectory("unknown", 0, "unknown"))
        for one in self._lost:
            logger.error(
                "data directory lost %s",
                Fields(path=one.path, directory_id=one.directory_id, action="its logs count as damaged"),
            )
        for path in sorted(self._older):
            logger.error("data directory may be an older copy %s", Fields(path=path))
        self._was_complete = not (self._lost or self._unopened or self._older)
        self._write_known([*used.values(), *missing])
        self.are_several = len(self._stores) > 1 or bool(self._unopened or self._known)

    def _open_one(self, path: str, rng: Rng | None) -> LogStore:
        """Open a further directory. Raises DataDirectoryError if it is the first one of a node, or open."""
        own = self._stores[0].identity
        if (other := read_identity(self._fs, path)) is not None:
            raise DataDirectoryError(
                f"{path} is the first data directory of node {other.node_id} of cluster {other.cluster_id}",
                hint="name it first in log.dirs of that node, and another directory here",
            )
        identity = read_identity(self._fs, path, layout.LOG_DIR_FILE)
        for store in self._stores:
            if identity is not None and store.identity.directory_id == identity.directory_id:
                raise DataDirectoryError(
                    f"{path} and {store.path} are the same data directory, or one is a copy of the other",
                    hint="name each directory once in log.dirs",
                )
        return LogStore.open(
            self._fs,
            path,
            cluster_id=own.cluster_id,
            node_id=own.node_id,
            rng=rng,
            identity_file=layout.LOG_DIR_FILE,
        )

    def _count_start(self, store: LogStore, known: KnownDirectory | None) -> int:
        """Count this start in the directory, durably, and return the number for the first directory.

        Note whether the directory may be an older copy: it was used in fewer starts than the first directory
        knows (R83). Then nothing is counted, so that the next start notices it, too, unless
        ``begin_checkpoint`` has found that no log of it is suspect any more.
        """
        path = layout.join(store.path, layout.LOG_DIR_STARTS_FILE)
        starts = _read_starts(self._fs, path)
        if not store.is_new and is_older_directory(starts, None if known is None else known.starts):
            self._older.add(store.path)
            return starts + 1 if known is None else known.starts
        known_starts = 0 if known is None else known.starts
        try:
            self._write_starts(store.path, more := max(starts, known_starts) + 1)
        except StorageExhaustedError as error:  # this start does not count
            logger.warning("start not counted %s", Fields(path=path, error=error))
            return known_starts
        return more

    def _write_starts(self, path: str, starts: int) -> None:
        file = layout.join(path, layout.LOG_DIR_STARTS_FILE)
        self._fs.write_atomically(file, encode_lines(LOG_DIR_STARTS, [str(starts)]))

    def _read_known(self, further: Iterable[str]) -> list[KnownDirectory]:
        path = self._known_path
        if not self._fs.exists(path):
            if not self._stores[0].is_new and any(map(self._was_used, further)):
                logger.error("list of data directories is missing %s", Fields(path=path))
                self._is_list_damaged = True
            return []
        try:
            return decode_log_dirs(self._fs.read_bytes(path), path)
        except (CorruptLogError, ValueError) as error:
            logger.error("list of data directories is unreadable %s", Fields(path=path, error=error))
            self._is_list_damaged = True
            return []

    def _was_used(self, path: str) -> bool:
        """Whether the further directory ``path`` was used in a start. False if its disk does not work."""
        try:
            return self._fs.exists(layout.join(path, layout.LOG_DIR_STARTS_FILE))
        except OSError:
            return False

    def _write_known(self, known: list[KnownDirectory]) -> None:
        if known != self._known:
            self._fs.write_atomically(self._known_path, encode_log_dirs(known))
            self._known = known

    def _expect_another_start(self, directory_id: str) -> None:
        """Record, in the first directory, one more start in which this further directory was used."""
        self._write_known(
            [
                one._replace(starts=one.starts + 1) if one.directory_id == directory_id else one
                for one in self._known
            ]
        )

    @property
    def _known_path(self) -> str:
        return layout.join(self._stores[0].path, layout.LOG_DIRS_FILE)

    def close(self, *, clean: bool = True, broker_epoch: int = NO_BROKER_EPOCH) -> None:
        """Close every directory as ``LogStore.close`` does. Idempotent. A directory that has failed gets no
        marker, so that the next start is unclean."""
        for store in reversed(self._stores):
            store.close(clean=clean, broker_epoch=broker_epoch)

    @property
    def is_closed(self) -> bool:
        return self._stores[0].is_closed

    # --- the node

    @property
    def clean_start(self) -> bool:
        if not self.are_several:
            return self._stores[0].clean_start
        marked = [store for store in self._stores if not store.is_new]
        return self._was_complete and bool(marked) and all(store.clean_start for store in marked)

    @property
    def last_broker_epoch(self) -> int:
        if not self.are_several:
            return self._stores[0].last_broker_epoch
        epochs = {store.last_broker_epoch for store in self._stores if not store.is_new}
        return epochs.pop() if len(epochs) == 1 else NO_BROKER_EPOCH

    @property
    def unknown_directories(self) -> list[str]:
        return [name for store in self._stores for name in store.unknown_directories]

    @property
    def metadata_offset(self) -> int | None:
        return self._stores[0].metadata_offset

    # --- the directories

    def states(self) -> list[DirectoryState]:
        """Return the state of each data directory, those that could not be opened last."""
        opened = [
            DirectoryState(
                store.path,
                store.identity.directory_id,
                store.failure,
                _space_of(store),
                tuple(sorted(store.loaded)),
            )
            for store in self._stores
        ]
        return opened + [
            DirectoryState(path, "", reason, _UNKNOWN_SPACE, ()) for path, reason in self._unopened.items()
        ]

    def path_of(self, tp: TopicPartition) -> str | None:
        """Return the data directory of a loaded log; None if the log is not loaded."""
        store = self._store_of(tp)
        return None if store is None else store.path

    def is_from_older_copy(self, tp: TopicPartition) -> bool:
        """Whether the log is in a directory that may be an older copy of itself (R83)."""
        return self.path_of(tp) in self._older

    def distrust(self, keys: Iterable[TopicPartition]) -> None:
        """Note that these loaded logs of older copies must be fetched again, and later ones of further calls
        (R83)."""
        self._suspects = self._suspects or {path: {} for path in self._older}
        for tp in keys:
            store = self._loaded(tp)
            self._suspects[store.path][tp] = store.loaded[tp]
        if self._older and self.on_moved is not None:
            self.on_moved()

    def _trusted_again(self) -> list[LogStore]:
        """Return the older copies without suspect logs: each was replaced by a complete one, or deleted."""
        if not self._older or self._suspects is None:
            return []
        suspects = self._suspects
        return [
            store
            for store in self._working()
            if store.path in self._older
            and not store.has_unloaded
            and not any(self._is_suspect(store, tp, log) for tp, log in suspects[store.path].items())
        ]

    @staticmethod
    def _is_suspect(store: LogStore, tp: TopicPartition, suspect: Log) -> bool:
        log = store.get(tp)
        return log is suspect or store.replaced_end(tp) is not None or (log is not None and log.is_damaged)

    def _trust(self, store: LogStore) -> None:
        """Count a start in a directory that was an older copy, so that it is none. May run in any thread."""
        directory_id = store.identity.directory_id
        starts = next(one.starts for one in self._known if one.directory_id == directory_id)
        self._write_starts(store.path, starts + 1)
        self._expect_another_start(directory_id)
        self._older.discard(store.path)
        logger.info("data directory is trusted again %s", Fields(path=store.path))

    def probes(self) -> dict[str, Callable[[], None]]:
        """Return, for each directory that works, a function that raises an OSError if its disk does not. The
        functions may run in any thread. Return nothing if the node has one directory (R81)."""
        if not self.are_several:
            return {}
        return {store.path: store.probe for store in self._working()}

    def fail(self, path: str, reason: str) -> list[TopicPartition]:
        """Take the logs of the data directory ``path`` offline, because its disk has failed. Return them."""
        for store in self._working():
            if store.path == path:
                logger.error(
                    "data directory failed %s", Fields(path=path, logs=len(store.loaded), reason=reason)
                )
                store.fail(f"the data directory {path} has failed: {reason}")
                self._hold_back(store)
                return list(store.loaded)
        return []

    def _hold_back(self, failed: LogStore) -> None:
        """Let ``create_log`` refuse the logs of a directory that has failed: an empty log in another
        directory would be taken for a sound one (R81)."""
        elsewhere = {store.name_of(tp) for store in self._working() for tp in store.loaded}
        self._unfound |= failed.known_names() - elsewhere

    def _working(self) -> list[LogStore]:
        return [store for store in self._stores if store.failure is None]

    # --- the logs

    def _store_of(self, tp: TopicPartition) -> LogStore | None:
        for store in self._stores:
            if store.get(tp) is not None:
                return store
        return None

    def _loaded(self, tp: TopicPartition) -> LogStore:
        store = self._store_of(tp)
        assert store is not None, f"{tp} is not loaded"
        return store

    def load(
        self,
        logs: Mapping[TopicPartition, tuple[str, LogConfig]],
        *,
        are_all: bool = True,
        committed: Mapping[tuple[str, int], int] = NOTHING_COMMITTED,
    ) -> None:
        """Open logs, and create missing ones, as ``LogStore.load`` does. ``committed`` has known high
        watermarks by topic id and partition.

        A log that is in no directory although the node has lost one is offline as damaged (R82). If a known
        directory could not be opened, such a log is not loaded, and ``create_log`` refuses it.
        """
        if not self.are_several:
            self._stores[0].load(logs, are_all=are_all)
            return
        shares = self._shares(logs, committed)
        for store, share in shares.items():
            try:
                store.load(share, are_all=are_all)
            except (OSError, StorageExhaustedError) as error:
                if store is self._stores[0] or isinstance(error, StorageExhaustedError):
                    raise
                self._unfound |= {
                    _name(tp, topic_id) for tp, (topic_id, _) in share.items() if store.get(tp) is None
                }
                self.fail(store.path, str(error))
        if are_all and self._lost and not self._unfound:
            self._lost = []
            used = {store.identity.directory_id for store in self._stores}
            self._write_known(
                [one for one in self._known if one.directory_id in used or one.path in self._unopened]
            )

    def _shares(
        self, logs: Mapping[TopicPartition, tuple[str, LogConfig]], committed: Mapping[tuple[str, int], int]
    ) -> dict[LogStore, dict[TopicPartition, tuple[str, LogConfig]]]:
        """Return the logs that each directory must load."""
        names: dict[LogStore, set[str]] = {}
        for store in self._working():
            try:
                names[store] = store.directory_names()
            except OSError as error:
                if store is self._stores[0]:
                    raise
                self.fail(store.path, str(error))
        shares: dict[LogStore, dict[TopicPartition, tuple[str, LogConfig]]] = {store: {} for store in names}
        replaced = {
            store: {one.partition(layout.REPLACED_SUFFIX)[0] for one in names[store]} for store in names
        }
        unfound: dict[TopicPartition, tuple[str, LogConfig]] = {}
        for tp, (topic_id, config) in logs.items():
            if self._store_of(tp) is not None:
                continue
            name = _name(tp, topic_id)
            homes = [store for store in shares if name in names[store]]
            if len(homes) > 1:
                homes = [self._resolve(tp, topic_id, config, homes)]
            if not homes:
                homes = [store for store in shares if name in replaced[store]]
                homes += [store for store in shares if store.has_record_of(name)]
            if homes:
                shares[homes[0]][tp] = (topic_id, config)
                for store in shares:
                    if store is not homes[0] and store.has_record_of(name):
                        store.forget_record(name)
            else:
                unfound[tp] = (topic_id, config)
        if unfound and self._may_be_elsewhere():
            self._unfound |= {_name(tp, topic_id) for tp, (topic_id, _) in unfound.items()}
        elif unfound:
            added = self._place(unfound, shares)
            if self._lost:
                self._expect(added, committed)
        return shares

    def _may_be_elsewhere(self) -> bool:
        """Whether logs may be in a known directory that could not be opened, or failed since."""
        failed = {store.path for store in self._stores if store.failure is not None} | set(self._unopened)
        return any(one.path in failed for one in self._known)

    def _place(
        self,
        logs: Mapping[TopicPartition, tuple[str, LogConfig]],
        shares: dict[LogStore, dict[TopicPartition, tuple[str, LogConfig]]],
    ) -> dict[LogStore, list[str]]:
        """Add logs that are in no directory to ``shares``. Return their names by directory.

        If the node has lost directories, the logs go to the directories in their places, or to new ones.
        """
        homes = list(shares)
        if self._lost:
            places = {one.path for one in self._lost}
            new = [store for store in homes if store.is_new]
            homes = [store for store in new if store.path in places] or new or homes
        uses = [self._use_of(store, len(shares[store])) for store in homes]
        added: dict[LogStore, list[str]] = {}
        for tp, wanted in logs.items():
            index = choose_directory(uses)
            uses[index] = uses[index]._replace(log_count=uses[index].log_count + 1)
            shares[homes[index]][tp] = wanted
            added.setdefault(homes[index], []).append(_name(tp, wanted[0]))
        return added

    def _expect(
        self, added: Mapping[LogStore, Sequence[str]], committed: Mapping[tuple[str, int], int]
    ) -> None:
        """Let each directory take these logs for damaged instead of new ones: they may have been in a lost
        directory (R82)."""
        for store, names in added.items():
            parsed = {name: layout.parse_log_directory_name(name) for name in names}
            store.expect({name: 0 if one is None else committed.get(one, 0) for name, one in parsed.items()})

    def _resolve(
        self, tp: TopicPartition, topic_id: str, config: LogConfig, homes: Sequence[LogStore]
    ) -> LogStore:
        """Return the directory whose log of ``tp`` is used, and set the logs in the other directories aside
        (R84). Raises OSError, StorageExhaustedError."""
        versions = [self._version(store, tp, topic_id, config) for store in homes]
        index = choose_log(versions)
        chosen, end = homes[index], missing_end(versions, index)
        if end is not None:  # before the longer log is set aside
            logger.error(
                "used log lacks records of a damaged one %s",
                Fields(partition=tp, used=chosen.path, ends_at=versions[index].log_end_offset, known_end=end),
            )
            chosen.expect_end(_name(tp, topic_id), end)
        for store, version in zip(homes, versions, strict=True):
            if store is not chosen:
                logger.warning(
                    "partition in two data directories %s",
                    Fields(
                        partition=tp,
                        used=chosen.path,
                        set_aside=store.path,
                        ended_at=version.log_end_offset,
                        is_sound=version.is_sound,
                    ),
                )
                store.set_aside_log(_name(tp, topic_id))
        return chosen

    def _version(self, store: LogStore, tp: TopicPartition, topic_id: str, config: LogConfig) -> LogVersion:
        replica_epoch = store.replica_epoch(topic_id, tp.partition)
        recorded = store.recorded_end(_name(tp, topic_id))
        log = store.create_log(tp, topic_id, config)
        try:
            last_epoch = log.latest_epoch
        except StorageError:
            last_epoch = NO_EPOCH
        version = LogVersion(
            replica_epoch,
            not log.is_damaged,
            last_epoch,
            log.log_end_offset,
            log.log_start_offset,
            0 if log.damage is None else max(log.damage.known_end_offset, recorded),
        )
        store.release_log(tp)
        return version

    def _use_of(self, store: LogStore, more: int = 0) -> DirectoryUse:
        return DirectoryUse(_space_of(store).free_bytes, len(store.loaded) + more)

    def create_log(
        self, tp: TopicPartition, topic_id: str, config: LogConfig, *, replica_epoch: int = 0
    ) -> Log:
        """Create an empty log, or open the existing one, as ``LogStore.create_log`` does. A new log is made
        where the disk has the most room for it.

        Raises LogOfflineError if the log may be in a directory that has failed.
        """
        store = self._home(tp, topic_id, config) if self.are_several else self._stores[0]
        return store.create_log(tp, topic_id, config, replica_epoch=replica_epoch)

    def _home(self, tp: TopicPartition, topic_id: str, config: LogConfig) -> LogStore:
        loaded = self._store_of(tp)
        if loaded is not None:
            return loaded
        name = _name(tp, topic_id)
        if name in self._unfound:
            failed = [*self._unopened, *(store.path for store in self._stores if store.failure is not None)]
            raise LogOfflineError(
                f"{tp} may be in the data directory {', '.join(failed)}, which has failed",
                hint="repair or replace the disk, then restart the broker",
            )
        working = self._working()
        homes = [store for store in working if store.has_directory(name)]
        if len(homes) > 1:
            homes = [self._resolve(tp, topic_id, config, homes)]
        next_home = self._next_homes.pop(name, None)
        if not homes and next_home in working:
            homes = [next_home]
        if not homes and not working:
            raise LogOfflineError(f"{tp} can't be created: every data directory has failed")
        return homes[0] if homes else working[choose_directory([self._use_of(one) for one in working])]

    def discard_earlier(
        self, tp: TopicPartition, topic_id: str, replica_epoch: int, *, is_kept: bool = False
    ) -> None:
        """As ``LogStore.discard_earlier``, in every directory. Files in a directory that has failed stay, and
        are set aside when it works again, because their replica epoch is lower (R84)."""
        for store in self._working():
            store.discard_earlier(tp, topic_id, replica_epoch, is_kept=is_kept)
        self._unfound.discard(_name(tp, topic_id))

    def is_earlier(self, topic_id: str, partition: int, replica_epoch: int) -> bool:
        name = layout.log_directory_name(topic_id, partition)
        homes = [store for store in self._working() if store.has_directory(name)] or self._stores[:1]
        return homes[0].is_earlier(topic_id, partition, replica_epoch)

    def get(self, tp: TopicPartition) -> Log | None:
        store = self._store_of(tp)
        return None if store is None else store.get(tp)

    def find(self, tp: TopicPartition, topic_id: str) -> Log | None:
        """Return the loaded log of a partition of the topic with this id, or None."""
        for store in self._stores:
            log = store.find(tp, topic_id)
            if log is not None:
                return log
        return None

    def shortages(self) -> dict[str, str]:
        """Return, by directory, why no log in it can grow. Directories that have room are omitted."""
        found = {store.path: store.shortage() for store in self._working()}
        return {path: shortage for path, shortage in found.items() if shortage is not None}

    def delete_log(self, tp: TopicPartition, topic_id: str | None = None, *, is_kept: bool = False) -> None:
        store = self._store_of(tp)
        if store is not None:
            store.delete_log(tp, topic_id, is_kept=is_kept)

    def release_log(self, tp: TopicPartition) -> None:
        self._loaded(tp).release_log(tp)

    def unload_log(self, tp: TopicPartition) -> None:
        self._loaded(tp).unload_log(tp)

    def delete_unloaded(self, tp: TopicPartition, topic_id: str, *, is_kept: bool = False) -> None:
        for store in self._working():
            store.delete_unloaded(tp, topic_id, is_kept=is_kept)
        self._unfound.discard(_name(tp, topic_id))

    def begin_replace(self, tp: TopicPartition) -> LogExchange:
        store = self._loaded(tp)
        if self.are_several:
            self._next_homes[store.name_of(tp)] = store
        return store.begin_replace(tp)

    # --- moves between the directories

    def begin_copy(self, tp: TopicPartition, path: str) -> LogCopy:
        """Return an empty copy of the log of ``tp`` for the data directory ``path``.

        Raises LogOfflineError if the log is offline, or is itself the incomplete replacement of a damaged log
        (R52); LogDirNotFoundError if there is no such directory, or it has failed.
        """
        source, target = self._loaded(tp), self._target(path)
        log = source.get(tp)
        assert log is not None, f"{tp} is loaded"
        if log.offline_reason is not None:
            raise LogOfflineError(f"{tp} is offline: {log.offline_reason}")
        if source.replaced_end(tp) is not None:
            raise LogOfflineError(f"{tp} is being fetched again", hint="move it when it is in sync")
        return source.begin_copy(tp, target)

    def check_target(self, path: str) -> None:
        """Raise LogDirNotFoundError unless ``path`` is a data directory that works."""
        self._target(path)

    def _target(self, path: str) -> LogStore:
        for store in self._working():
            if store.path == path.rstrip("/"):
                return store
        names = ", ".join(store.path for store in self._working())
        raise LogDirNotFoundError(f"{path} is no working data directory of this broker; these are: {names}")

    def complete_copy(self, copy: LogCopy) -> None:
        """Complete the copy of a frozen log, and record it. May be called in any thread. Raises OSError,
        StorageError."""
        copy.complete()
        self._store_at(copy).record_copy(copy)

    def replace_by_copy(self, tp: TopicPartition, copy: LogCopy) -> Log:
        """Use the complete copy from now on, and retire the log. Return the copy's log (R85).

        Raises StorageError, OSError if the copy's directory has failed meanwhile, or the files of the log
        cannot be renamed. Then nothing has changed.
        """
        source = self._loaded(tp)
        if self._store_at(copy).failure is not None:
            raise LogOfflineError(f"the copy of {tp} can't be used: {self._store_at(copy).failure}")
        name, config = source.name_of(tp), copy.source.config
        source.retire_moved(tp)
        return self._store_at(copy).take_copy(tp, name, copy, config)

    def forget_copy(self, copy: LogCopy) -> None:
        """Forget a copy that was discarded. Called on the loop."""
        self._store_at(copy).forget_copy(copy)

    def doubt(self, copy: LogCopy) -> None:
        """Let the next start take the directory of a copy that could not be discarded for an older one (R83):
        the copy may have the name of the log and become stale. Has no effect in the first directory.

        May be called in any thread. Raises OSError, StorageExhaustedError.
        """
        self._expect_another_start(self._store_at(copy).identity.directory_id)

    def _store_at(self, copy: LogCopy) -> LogStore:
        return next(one for one in self._stores if one.path == layout.parent(copy.target_directory))

    def replaced_end(self, tp: TopicPartition) -> int | None:
        store = self._store_of(tp)
        return None if store is None else store.replaced_end(tp)

    def keep_replacement(self, tp: TopicPartition) -> Callable[[], None] | None:
        store = self._store_of(tp)
        return None if store is None else store.keep_replacement(tp)

    def begin_reinstate(self, tp: TopicPartition) -> LogExchange:
        return self._loaded(tp).begin_reinstate(tp)

    # --- housekeeping

    @property
    def on_moved(self) -> Callable[[], None] | None:
        return self._stores[0].on_moved

    @on_moved.setter
    def on_moved(self, callback: Callable[[], None] | None) -> None:
        for store in self._stores:
            store.on_moved = callback

    def begin_checkpoint(self) -> Callable[[], None] | None:
        """As ``LogStore.begin_checkpoint``, for every directory that works. If all logs of an older copy were
        fetched again, the function records that, too (R83)."""
        checkpoints = [store.begin_checkpoint() for store in self._working()]
        return _together([*checkpoints, *(partial(self._trust, one) for one in self._trusted_again())])

    def begin_removal(
        self, now_ms: int, files: Iterable[str] = (), delay_ms: int = 60_000
    ) -> Callable[[], None] | None:
        """As ``LogStore.begin_removal``. ``files`` may be in any directory."""
        removals = [self._stores[0].begin_removal(now_ms, files, delay_ms)]
        removals += [
            store.begin_removal(now_ms, (), delay_ms)
            for store in self._working()
            if store is not self._stores[0]
        ]
        return _together(removals)

    def release_idle(self) -> int:
        return sum(store.release_idle() for store in self._stores)

    @property
    def has_retired(self) -> bool:
        return any(store.has_retired for store in self._stores)


def is_older_directory(starts: int, known_starts: int | None) -> bool:
    """Whether a further data directory with logs may be an older copy (R83): it was used in ``starts`` starts
    of the node, and the first directory knows of ``known_starts``, or None if it does not know it."""
    return known_starts is None or starts < known_starts


def _refuse_lost_first(fs: FileSystem, first: str, further: Iterable[str], node_id: int) -> None:
    """Raise DataDirectoryError if ``first`` is not formatted, but a further directory has logs of the node.

    Its metadata are lost, or the directories are in the wrong order.
    """
    if fs.exists(layout.join(first, layout.NODE_FILE)):
        return
    for path in further:
        if not fs.exists(layout.join(path, layout.LOG_DIR_FILE)):
            continue
        other = read_identity(fs, path, layout.LOG_DIR_FILE)
        assert other is not None, f"{path} has a {layout.LOG_DIR_FILE}"
        if other.node_id != node_id:
            continue  # the directory is refused when it is opened
        raise DataDirectoryError(
            f"{first} has no {layout.NODE_FILE}, but {path} has logs of node {other.node_id} of cluster"
            f" {other.cluster_id}",
            hint=f"name the directory with {layout.NODE_FILE} first in log.dirs; if its disk was replaced:"
            f" kl server format --data {first} --cluster-id {other.cluster_id} --node-id {other.node_id}",
        )


def _read_starts(fs: FileSystem, path: str) -> int:
    """Return the number of starts in the file; 0 if it is missing or unreadable."""
    if not fs.exists(path):
        return 0
    try:
        (line,) = decode_lines(LOG_DIR_STARTS, fs.read_bytes(path), path)
        return int(line)
    except (CorruptLogError, ValueError) as error:
        logger.error("count of starts is unreadable %s", Fields(path=path, error=error))
        return 0


def _name(tp: TopicPartition, topic_id: str) -> str:
    return layout.log_directory_name(topic_id, tp.partition)


def _space_of(store: LogStore) -> Space:
    if store.failure is not None:
        return _UNKNOWN_SPACE
    try:
        return store.space()
    except OSError:
        return _UNKNOWN_SPACE


def _together(jobs: Iterable[Callable[[], None] | None]) -> Callable[[], None] | None:
    """Return one function that runs all ``jobs``, also if some fail; None if there are none."""
    wanted = [job for job in jobs if job is not None]
    return partial(_run_each, wanted) if len(wanted) > 1 else next(iter(wanted), None)


def _run_each(jobs: Sequence[Callable[[], None]]) -> None:
    """Run every job. Raises the error of the first one that failed."""
    failures: list[Exception] = []
    for job in jobs:
        try:
            job()
        except (OSError, StorageError) as error:
            failures.append(error)
    if failures:
        raise failures[0]
