"""LogCopy: the copy of a log in another data directory of the node, which catches up and then replaces it.

The copy is a log in the directory ``moving`` of the target, which a start removes. It gets the name of the
log only when it has all batches of the log and is synced (R85)::

    copy batches      the log is used as before
    freeze the log    it takes no append; the copy gets the rest
    complete          the copy is synced and closed, then renamed, and the new name is synced
    replace           the node uses the copy; the files of the log are retired

After a crash before the new name is durable, the log is found. After that both are found, until the log is
retired; they are equal (R84).
"""

# Tests: tests/storage/test_log_copy.py

from __future__ import annotations

from kafkalite.errors import LogOfflineError, StorageError
from kafkalite.limits import KIB, MIB
from kafkalite.model import TopicPartition
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import CleanEnd, encode_partition
from kafkalite.storage.filesystem import FileSystem, retired_name
from kafkalite.storage.log import Log, Slice

#: How many bytes are copied in one step.
STEP_BYTES = 256 * KIB
#: The log is frozen only if the copy lacks at most this many bytes.
MAX_REST_BYTES = MIB
#: The copy is synced whenever so many bytes were copied, so that little is left for ``complete``.
SYNC_BYTES = 64 * MIB


class LogCopy:
    """A copy of ``source`` in the data directory ``target_path``.

    ``read``, ``freeze`` and ``lag`` belong to the thread of the source. ``begin``, ``append``, ``sync``,
    ``complete`` and ``discard`` wait for the disk; they may run in any thread, one at a time.
    """

    def __init__(
        self,
        fs: FileSystem,
        source: Log,
        target_path: str,
        tp: TopicPartition,
        topic_id: str,
        *,
        replica_epoch: int = 0,
    ) -> None:
        name = layout.log_directory_name(topic_id, tp.partition)
        self._fs = fs
        self._source = source
        self._target_path = target_path
        self._identity = encode_partition(tp.topic, topic_id, tp.partition, replica_epoch)
        self._truncations = source.truncations
        self._start = source.log_start_offset  #: the first batch of the copy may begin before it
        self._unsynced_bytes = 0
        self._log: Log | None = None
        self._parent = layout.join(target_path, layout.MOVING_DIRECTORY)
        self._directory = layout.join(self._parent, name)
        self.target_directory = layout.join(target_path, name)
        self.is_named = False  #: whether the copy may have the name of the log
        self.retired: str | None = None  #: the name of a named copy that was discarded
        self.end: CleanEnd | None = None  #: the range of the copy, when it is complete

    @property
    def source(self) -> Log:
        return self._source

    @property
    def log(self) -> Log:
        assert self._log is not None, "begin was called"
        return self._log

    @property
    def log_end_offset(self) -> int:
        return 0 if self._log is None else self._log.log_end_offset

    @property
    def lag(self) -> int:
        """How many offsets the copy is behind the log."""
        return max(self._source.log_end_offset - self.log_end_offset, 0)

    @property
    def is_valid(self) -> bool:
        """Whether the copy is the beginning of the log: nothing was truncated, and no offset is missing."""
        source, next_offset = self._source, max(self.log_end_offset, self._start)
        return source.truncations == self._truncations and source.log_start_offset <= next_offset

    def begin(self, first: Slice) -> None:
        """Make an empty log for the copy. ``first`` is the first slice of the source, whose first batch may
        begin before the log start. Raises OSError, StorageError."""
        if self._fs.exists(self._directory):
            self._fs.remove_tree(self._directory)
        self._fs.make_dirs(self._parent)
        start = self._start
        if first.buffers:
            start = int.from_bytes(first.buffers[0][:8], "big")
        log = Log.create(self._fs, self._directory, self._source.config)
        file = self._fs.open(layout.join(self._directory, layout.PARTITION_FILE), create=True)
        file.write_at(0, self._identity)
        file.sync()
        file.close()
        if start:
            log.reset_to(start)
        self._log = log

    def read(self, max_bytes: int = STEP_BYTES) -> Slice:
        """Return the next batches of the source for ``append``. Raises LogOfflineError if the source is
        damaged or offline; StorageError."""
        source = self._source
        if source.offline_reason is not None:
            raise LogOfflineError(f"the log in {source.directory} is offline: {source.offline_reason}")
        offset = max(self.log_end_offset, self._start)
        return source.read(offset, max_bytes=max_bytes, up_to=source.log_end_offset)

    def append(self, found: Slice, now_ms: int) -> None:
        """Append the batches that ``read`` has returned. Raises OSError, StorageError."""
        for buffer in found.buffers:
            self.log.append_as_follower(buffer, now_ms=now_ms)
        self._unsynced_bytes += found.size_bytes
        if self._unsynced_bytes >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Sync the batches that were copied. Raises OSError, StorageError."""
        log = self.log
        work = log.begin_sync()
        if work is not None:
            work.run()
            log.finish_sync(work, None)
        self._unsynced_bytes = 0

    def complete(self) -> None:
        """Make the copy durable, then give it the name of the log, durably (R85).

        The copy must have all batches of the frozen source. Raises OSError, StorageError.
        """
        log, source = self.log, self._source
        assert log.log_end_offset == source.log_end_offset, "the copy lacks batches"
        log.delete_before(source.log_start_offset)
        self.make_durable()
        self.end = log.clean_end
        if self.end is None:
            raise StorageError(f"the copy in {self._directory} was not synced: {log.offline_reason}")
        self.is_named = True
        self._fs.rename(self._directory, self.target_directory)
        self._fs.sync_dir(self._target_path)
        self._fs.sync_dir(self._parent)

    def make_durable(self) -> None:
        """Sync the whole copy, and close it. Raises OSError, StorageError."""
        self.log.close(clean=True)
        self._fs.sync_dir(self._directory)
        self._fs.sync_dir(self._parent)

    def sync_retirement(self) -> None:
        """Sync the name to which the source was renamed when the copy replaced it. Raises OSError."""
        self._fs.sync_dir(layout.parent(self._source.directory))

    def discard(self) -> None:
        """Remove the files of the copy, durably. Raises OSError, StorageError.

        After an error a copy with the name of the log may stay, and become stale (``LogDirs.doubt``).
        """
        if self._log is not None:
            self._log.close(clean=False)
        if self.is_named and self._fs.exists(self.target_directory):
            self.retired = retired_name(self._fs, self.target_directory)
            self._fs.rename(self.target_directory, self.retired)
        if self.is_named:
            self._fs.sync_dir(self._target_path)
        if self._fs.exists(self._directory):
            self._fs.remove_tree(self._directory)
