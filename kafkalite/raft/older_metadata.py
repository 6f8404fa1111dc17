"""Accept an older copy of a single node's metadata, for ``kl log accept-loss`` (R25, R45).

The records that the copy lacks cannot be known, but some of them were used: leader epochs are in the batches
of the logs, and producer ids are in the hands of clients. An entry that is appended to the copy skips them,
so that no log is ahead of its metadata, and no producer id is assigned twice.

Blocking. Needs a directory that no broker uses. If it is interrupted, it can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kafkalite.errors import CorruptLogError, DataDirectoryError
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY, ClusterImage
from kafkalite.metadata.records import MetadataRecord, PartitionRecord, ProducerIdsRecord
from kafkalite.model import NO_EPOCH
from kafkalite.raft.metadata_log import DIRECTORY_ID_BYTES
from kafkalite.raft.single_quorum import SingleNodeLog
from kafkalite.rng import Rng
from kafkalite.storage import layout
from kafkalite.storage.accept_loss import AcceptedLoss
from kafkalite.storage.checkpoints import RecoveryPoint, decode_leader_epochs
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.log_store import METADATA_POINT, read_identity
from kafkalite.storage.recovery_points import RecoveryPointsFile

#: At least so many producer ids are skipped. A block of 1,000 takes a metadata record, so no copy lacks more.
MIN_SKIPPED_PRODUCER_IDS: Final = 1 << 32
#: A random number of ids below this is skipped as well, because the same copy may be restored again. All ids
#: stay below 2^53, which every JSON parser reads exactly, for the first 31 accepted losses at least.
RANDOM_PRODUCER_IDS: Final = 1 << 48
#: Leader epochs skipped after the last one that a log has recorded: each start of the node takes one, and a
#: client refuses metadata with an earlier epoch than it has received (KIP-320).
SKIPPED_LEADER_EPOCHS: Final = 1_000


def accept_older_metadata(fs: FileSystem, directory: str, rng: Rng) -> AcceptedLoss:
    """Make the metadata in ``directory`` usable if it is older than this node has recorded. Metadata that is
    not older stays as it is. ``log_end_offset`` of the result is the recorded metadata offset.

    Raises DataDirectoryError if the data directory is in use or not formatted, or if ``directory`` has no
    metadata of a single node; CorruptLogError, StorageError, StorageExhaustedError, OSError.
    """
    data_directory = layout.parent(directory)
    identity = read_identity(fs, data_directory)
    if identity is None:
        raise DataDirectoryError(f"{data_directory} is not formatted", hint="name a directory in log.dirs")
    lock = fs.lock(layout.join(data_directory, layout.LOCK_FILE))
    try:
        points = RecoveryPointsFile(fs, data_directory)
        points.open()
        known_offset = points.points.get(METADATA_POINT, RecoveryPoint()).recovery_point
        new_directory_id = rng.randbytes(DIRECTORY_ID_BYTES)
        log = SingleNodeLog(fs, directory, identity.node_id, new_directory_id, known_offset=0)
        recovered = log.open()
        try:
            last_index = log.journal.last_index
            if last_index < known_offset:
                image = Delta.to_snapshot(EMPTY, recovered.snapshot_records).apply(recovered.snapshot_offset)
                for offset, records in recovered.entries:
                    image = Delta(image).replay_all(records).apply(offset)
                log.append([(last_index + 1, list(_skip(fs, data_directory, image, rng)))])
        finally:
            log.close()
        points.write({METADATA_POINT: None})
    finally:
        lock.release()
    return AcceptedLoss(directory, 0, known_offset, 0, [])


def _skip(fs: FileSystem, data_directory: str, image: ClusterImage, rng: Rng) -> Iterator[MetadataRecord]:
    """Yield the records that skip the leader epochs and producer ids of the lost metadata."""
    for topic_id, topic in image.topics_by_id.items():
        for number, state in enumerate(topic.partitions):
            directory = layout.join(data_directory, layout.log_directory_name(topic_id, number))
            used = max(state.leader_epoch, _recorded_epoch(fs, directory))
            skipped = state._replace(
                leader_epoch=used + SKIPPED_LEADER_EPOCHS, partition_epoch=state.partition_epoch + 1
            )
            yield PartitionRecord(topic_id, number, *skipped)
    first = image.next_producer_id + MIN_SKIPPED_PRODUCER_IDS
    yield ProducerIdsRecord(first + rng.randrange(RANDOM_PRODUCER_IDS))


def _recorded_epoch(fs: FileSystem, directory: str) -> int:
    """Return the last leader epoch in a log's leader-epochs file; NO_EPOCH if no intact file has one. The
    epochs in the batches are no evidence, since no CRC covers them (R58)."""
    path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
    try:
        entries = decode_leader_epochs(fs.read_bytes(path), path).entries
    except (OSError, CorruptLogError, ValueError):
        return NO_EPOCH
    return max((one.leader_epoch for one in entries), default=NO_EPOCH)
