"""The parts of the core model's world: nodes with their disks, producers, batches, messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kafkalite.errors import StorageExhaustedError
from kafkalite.model import TopicPartition
from kafkalite.records.header import HEADER, HEADER_BYTES, LENGTH_OVERHEAD_BYTES, MAGIC, seal
from kafkalite.replication.partition import Partition, PartitionSettings
from kafkalite.storage.checkpoints import CleanEnd, RecoveryPoint
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem

MIN_ISR: Final = 2
TOPIC_ID: Final = "a" * 32
TP: Final = TopicPartition("t", 0)
DIRECTORY: Final = "/data/log"

#: The content of one offset: (leader epoch, value, producer id, sequence, position in its batch).
Entry = tuple[int, int, int, int, int]


class ViolationError(Exception):
    """Raised if an invariant does not hold."""


class Broker:
    """One node: its disk, and, while it is up, its process."""

    def __init__(self, node_id: int, config: LogConfig) -> None:
        self.node_id = node_id
        self.config = config
        self.fs = MemoryFileSystem(crashable=True)
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.point = RecoveryPoint()
        self.clean_end: CleanEnd | None = None
        self.clean_epoch = -1  # from the marker found at the start
        self.last_epoch = -1
        self.life = 0
        self.end_before = 0  # the log end when the last process died
        self.truncated_names: set[str] = set()  # segments that this process removed by truncating
        self.is_up = False
        self.replica_epoch = 0  # of the log on the disk
        self.contents: list[Entry | None] = []
        self.sequences: dict[int, int] = {}

    def boot(self) -> None:
        self.life += 1
        end, self.clean_end = self.clean_end, None
        if not self.fs.exists(DIRECTORY):
            self.log = Log.create(self.fs, DIRECTORY, self.config)
        elif end is not None:
            self.log = Log.open_clean(self.fs, DIRECTORY, self.config, end)
        else:
            self.fs.sync_dir("/data")  # like LogStore, because the directory's own name may not be synced yet
            self.log = Log.recover(self.fs, DIRECTORY, self.config, self.point, may_lack_unsynced=True)
        if self.log.log_end_offset > self.end_before:
            raise ViolationError(f"R4: {self.log} ended at {self.end_before} when its process died")
        self._host()
        self.is_up = True
        self.broker_epoch = -1
        self.registration_offset = 0
        self.replayed = 0
        self.waiting: list[Waiting] = []
        self.seen = (-1, -1)
        self.verified: object = None

    def _host(self) -> None:
        settings = PartitionSettings(min_insync_replicas=MIN_ISR)
        self.partition = Partition(TP, TOPIC_ID, self.log, broker_id=self.node_id, settings=settings)

    def delete_log(self, replica_epoch: int = 0) -> None:
        """Replace the log by an empty one, because the replica was removed or added again (R62, R63)."""
        self.log.close(clean=False)
        self.fs.remove_tree(DIRECTORY)
        self.fs.sync_dir("/data")
        self.log = Log.create(self.fs, DIRECTORY, self.config)
        self.replica_epoch, self.point = replica_epoch, RecoveryPoint()
        self.truncated_names.clear()
        self.contents.clear()
        self.sequences.clear()
        self.waiting.clear()
        self.seen, self.verified = (-1, -1), None
        self._host()

    def segment_names(self) -> set[str]:
        names = self.fs.list_dir(DIRECTORY) if self.fs.exists(DIRECTORY) else ()
        return {name for name in names if name.endswith(".log")}

    @property
    def is_registered(self) -> bool:
        return self.is_up and self.broker_epoch >= 0

    @property
    def leads(self) -> bool:
        return self.is_registered and self.partition.is_leader

    def sync(self) -> bool:
        """Run one round of group commit. Return whether the high watermark moved."""
        work = self.log.begin_sync()
        if work is not None:
            try:
                work.run()
            except (OSError, StorageExhaustedError) as error:
                self.log.finish_sync(work, error)
            else:
                self.log.finish_sync(work, None)
        return self.partition.on_synced()


@dataclass(slots=True)
class Producer:
    """Retries unacknowledged batches in any order. The broker must restore the order.

    The oldest of them is among the last five batches that were sent (R28).
    """

    producer_id: int
    next_sequence: int = 0
    unacknowledged: dict[int, None] = field(default_factory=dict)  # values, in order
    is_forged: bool = False  # another client used its id: its own batches may be refused


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch that waits for the high watermark at its leader."""

    last_offset: int
    base_offset: int
    value: int
    producer: Producer


@dataclass(frozen=True, slots=True)
class Message:
    """A message in transit. ``kind`` selects the method that receives it. It is lost if the process of its
    receiver has been replaced.
    """

    kind: str
    to: int
    life: int
    body: tuple[Any, ...]


def make_batch(value: int, count: int, producer_id: int, sequence: int) -> bytearray:
    batch = bytearray(HEADER_BYTES + 8)
    size = len(batch) - LENGTH_OVERHEAD_BYTES
    fields = (0, size, 0, MAGIC, 0, 0, count - 1, 1, 1, producer_id, 0, sequence, count)
    HEADER.pack_into(batch, 0, *fields)
    batch[HEADER_BYTES:] = value.to_bytes(8, "big")
    seal(batch)
    return batch
