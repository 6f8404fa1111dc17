"""Accept the loss of metadata of a single node, for ``kl log accept-loss`` (R25, R45).

The metadata is damaged, missing, or an older copy. The intact entries are kept. The other records are
unknown, but leader epochs and producer ids that they assigned were used: the logs' batches have these epochs,
and clients have these ids. One more entry skips such epochs and ids, so that no log has a later epoch than
its metadata, and no producer id is assigned twice. That entry also creates the topics and partitions of which
there are logs but no metadata.

Blocking. Needs a directory that no broker uses. If it is interrupted, it can be repeated: damaged files are
first saved under other names, and the entries take effect with the atomic replacement of the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kafkalite.errors import CorruptLogError, DataDirectoryError, WrongFileTypeError
from kafkalite.limits import MAX_INTERNAL_BATCH_BYTES
from kafkalite.metadata import record_codec
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY, ClusterImage
from kafkalite.metadata.records import (
    TOPIC,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from kafkalite.model import INTERNAL_PREFIX, NO_EPOCH, topic_name_problem
from kafkalite.raft import legacy_journal
from kafkalite.raft.entries import REGULAR, change_after, effective_records
from kafkalite.raft.intact_metadata import IntactMetadata, check_alone, in_doubt, read_intact_metadata
from kafkalite.raft.journal import JOURNAL_FILE, Identity, Journal
from kafkalite.raft.metadata_log import DIRECTORY_ID_BYTES, FIRST_TERM, MetadataLog
from kafkalite.raft.snapshot_store import SNAPSHOT_FILE
from kafkalite.rng import Rng
from kafkalite.storage import layout
from kafkalite.storage.checkpoints import (
    NodeIdentity,
    RecoveryPoint,
    decode_leader_epochs,
    decode_partition,
    restore_hint,
)
from kafkalite.storage.filesystem import FileSystem, set_aside
from kafkalite.storage.log_store import METADATA_POINT, read_identity
from kafkalite.storage.recovery_points import RecoveryPointsFile, read_points

#: At least so many producer ids are skipped. A block of 1,000 takes a metadata record, so no copy lacks more.
MIN_SKIPPED_PRODUCER_IDS: Final = 1 << 32
#: A random number of ids below this is skipped as well, because the same copy may be restored again. All ids
#: stay below 2^53, which every JSON parser reads exactly, for the first 31 accepted losses at least.
RANDOM_PRODUCER_IDS: Final = 1 << 48
#: Leader epochs skipped after the last one that a log has recorded: each start of the node takes one, and a
#: client refuses metadata with an earlier epoch than it has received (KIP-320).
SKIPPED_LEADER_EPOCHS: Final = 1_000


#: Nothing of a topic that was created again from its logs is deleted before an operator sets its retention.
_UNLIMITED: Final = {"retention.ms": "-1", "retention.bytes": "-1"}
_INTERNAL: Final = {
    "cleanup.policy": "compact",
    "max.message.bytes": str(MAX_INTERNAL_BATCH_BYTES),
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
}


class MetadataLoss(NamedTuple):
    """The loss of the metadata in ``directory``.

    ``lost_records``: how many records are in doubt; None if that is not known. ``known_offset``: the metadata
    offset that the node had reached. ``notes``: the damage and its consequences, one sentence each.
    ``created``: the names of the topics that were created from logs. ``kept``: the paths under which damaged
    files were saved.
    """

    directory: str
    lost_records: int | None
    known_offset: int
    notes: Sequence[str] = ()
    created: Sequence[str] = ()
    kept: Sequence[str] = ()


def expected_metadata_loss(fs: FileSystem, directory: str) -> MetadataLoss:
    """Return what ``accept_older_metadata`` would lose. Nothing is changed, and the data directory may be in
    use.

    Raises DataDirectoryError if the data directory is not formatted, or that of a node of a cluster;
    StorageError for another version; OSError.
    """
    data_directory = layout.parent(directory)
    identity = _identity(fs, data_directory)
    point = read_points(fs, data_directory).get(METADATA_POINT, RecoveryPoint())
    return _expected(fs, directory, identity, point.recovery_point)[1]


def _identity(fs: FileSystem, data_directory: str) -> NodeIdentity:
    identity = read_identity(fs, data_directory)
    names = fs.list_dir(data_directory) if identity is None and fs.exists(data_directory) else []
    if any(map(layout.parse_log_directory_name, names)):
        raise DataDirectoryError(
            f"{data_directory} has the data of a node, but no {layout.NODE_FILE}",
            hint=restore_hint(layout.join(data_directory, layout.NODE_FILE)),
        )
    if identity is None:
        raise DataDirectoryError(f"{data_directory} is not formatted", hint="name a directory in log.dirs")
    return identity


def _expected(
    fs: FileSystem, directory: str, identity: NodeIdentity, known_offset: int
) -> tuple[IntactMetadata, MetadataLoss]:
    data_directory, node_id = layout.parent(directory), identity.node_id
    state = read_intact_metadata(fs, directory, node_id)
    check_alone(fs, data_directory, node_id, state)
    count = state.records_in_doubt(known_offset)
    notes = [one if one.startswith(path) else f"{path}: {one}" for path, one in state.damage.items()]
    if state.damage or count:
        notes.append(f"{directory}: {in_doubt(count)}: the intact metadata ends at offset {state.last_index}")
        created = _names(_missing_topics(fs, data_directory, node_id, _image(state)))
        settings = "settings, ACLs, users and quotas"
        if state.last_index == 1:
            notes.append(f"{directory}: no metadata is left: all {settings} are lost, and must be set again")
        else:
            notes.append(f"{directory}: changes of {settings} after that offset are lost")
        if created:
            notes.append(
                f"{directory}: from their logs, with default settings and unlimited retention: "
                + ", ".join(created)
            )
    else:
        notes.append(f"{directory}: no damage was found, and nothing is lost")
    return state, MetadataLoss(directory, count, known_offset, notes)


def accept_older_metadata(fs: FileSystem, directory: str, rng: Rng) -> MetadataLoss:
    """Make the metadata in ``directory`` usable if it is damaged, missing, or older than this node has
    recorded. Intact metadata of an older version is converted. Other metadata stays as it is.

    Raises DataDirectoryError if the data directory is in use, not formatted, or that of a node of a cluster;
    StorageError for another version; StorageExhaustedError, LogOfflineError, OSError.
    """
    data_directory = layout.parent(directory)
    identity = _identity(fs, data_directory)
    lock = fs.lock(layout.join(data_directory, layout.LOCK_FILE))
    try:
        points = RecoveryPointsFile(fs, data_directory)
        points.open()
        known_offset = points.points.get(METADATA_POINT, RecoveryPoint()).recovery_point
        _convert(fs, directory, identity.node_id, rng)
        state, loss = _expected(fs, directory, identity, known_offset)
        if state.damage or state.is_older_than(known_offset):
            kept = [kept for path in _damaged_files(fs, directory, state) if (kept := _keep(fs, path))]
            created = _write(fs, directory, identity.node_id, state, rng)
            snapshot = layout.join(directory, SNAPSHOT_FILE)
            if state.snapshot is None and fs.exists(snapshot):  # damaged, and kept under another name
                fs.unlink(snapshot)
                fs.sync_dir(directory)
            loss = loss._replace(created=created, kept=kept)
        points.write({METADATA_POINT: None})
    finally:
        lock.release()
    return loss


def _convert(fs: FileSystem, directory: str, node_id: int, rng: Rng) -> None:
    """Convert intact metadata of an older version."""
    if legacy_journal.exists(fs, directory) and not fs.exists(layout.join(directory, JOURNAL_FILE)):
        log = MetadataLog(fs, directory, node_id=node_id)
        try:
            log.open(rng.randbytes(DIRECTORY_ID_BYTES), allow_new=False)
        except CorruptLogError:
            return  # it is damaged
        log.journal.close()


def _damaged_files(fs: FileSystem, directory: str, state: IntactMetadata) -> list[str]:
    names = [JOURNAL_FILE, SNAPSHOT_FILE, legacy_journal.LOG_FILE, legacy_journal.SNAPSHOT_FILE]
    paths = [layout.join(directory, name) for name in names]
    is_legacy = any(path in state.damage for path in paths[2:])
    wanted = [*filter(state.damage.__contains__, paths[:2]), *(paths[2:] if is_legacy else [])]
    return [path for path in wanted if fs.exists(path)]


def _keep(fs: FileSystem, path: str) -> str:
    """Copy the file at ``path`` to a free name with ``.damaged-N``, unless such a file already has the same
    content. Rename it if it is not a regular file. Return the name of the saved file."""
    try:
        data = fs.read_bytes(path)
    except WrongFileTypeError:
        return set_aside(fs, path)
    number = 1
    while fs.exists(kept := f"{path}{layout.DAMAGED_SUFFIX}{number}"):
        if fs.read_bytes(kept) == data:
            return kept
        number += 1
    fs.write_atomically(kept, data)
    return kept


def _write(fs: FileSystem, directory: str, node_id: int, state: IntactMetadata, rng: Rng) -> list[str]:
    """Replace the journal by one with the intact entries and one more entry. That entry creates the missing
    topics, and skips leader epochs and producer ids. Return the names of the created topics."""
    image = _image(state)
    data_directory = layout.parent(directory)
    missing = list(_missing_topics(fs, data_directory, node_id, image))
    offset = image.metadata_offset
    image = Delta(image).replay_all(missing).apply(offset)
    records = [*missing, *_skip(fs, data_directory, image, rng)]
    term = max(state.term, state.entries[-1][2], FIRST_TERM)
    command = bytes((REGULAR,)) + change_after(offset, record_codec.to_bytes(records))
    directory_id = state.identity.directory if state.identity else rng.randbytes(DIRECTORY_ID_BYTES)
    identity = Identity(node_id, directory_id, is_voter=True, bootstrap_voters={node_id: directory_id})
    journal = Journal(fs, directory)
    entries = [*state.entries, (command, state.last_index + 1, term)]
    journal.create(identity, entries, term=term, vote=node_id)
    journal.close()
    return _names(missing)


def _image(state: IntactMetadata) -> ClusterImage:
    image, offset, snapshot_index = EMPTY, 0, 0
    if state.snapshot is not None:
        snapshot_index, offset = state.snapshot.last_index, state.snapshot.offset
        records = record_codec.from_bytes(state.snapshot.records)
        image = Delta.to_snapshot(EMPTY, records).apply(offset)
    for command, index, _ in state.entries:
        if index > snapshot_index and command[0] == REGULAR:
            encoded = effective_records(command[1:], offset)
            if encoded is not None:
                image = Delta(image).replay_all(record_codec.from_bytes(encoded)).apply(index)
                offset = index
    return image


def _names(records: Sequence[MetadataRecord] | Iterator[MetadataRecord]) -> list[str]:
    return sorted(one.name for one in records if isinstance(one, TopicRecord))


def _missing_topics(
    fs: FileSystem, data_directory: str, node_id: int, image: ClusterImage
) -> Iterator[MetadataRecord]:
    """Yield the records that create the topics and partitions that have logs in ``data_directory`` but are
    not in ``image``.

    A topic is omitted if its name is unknown, or if another topic with logs has the same name. A topic in
    ``image`` without logs is removed if a created topic has the same name.
    """
    partitions: dict[str, list[int]] = {}
    names: dict[str, Counter[str]] = {}
    for entry in fs.list_dir(data_directory):
        log = layout.parse_log_directory_name(entry)
        if log is not None:
            partitions.setdefault(log.topic_id, []).append(log.partition)
            name = _topic_of(fs, layout.join(data_directory, entry))
            names.setdefault(log.topic_id, Counter()).update([name] if name else [])
    taken = {topic.name for topic_id, topic in image.topics_by_id.items() if topic_id in partitions}
    for topic_id, numbers in sorted(partitions.items(), key=lambda one: (-len(one[1]), one[0])):
        if (topic := image.topics_by_id.get(topic_id)) is not None:
            yield from _partitions(topic_id, range(len(topic.partitions), max(numbers) + 1), node_id)
            continue
        found = [name for name, _ in names[topic_id].most_common(1) if name not in taken]
        for name in found:  # if it is not known, the logs stay untouched
            taken.add(name)
            if name in image.topics:
                yield RemoveTopicRecord(image.topics[name].topic_id)
            yield TopicRecord(topic_id, name)
            yield from _partitions(topic_id, range(max(numbers) + 1), node_id)
            configs = _INTERNAL if name.startswith(INTERNAL_PREFIX) else _UNLIMITED
            for key, value in configs.items():
                yield ConfigRecord(TOPIC, name, key, value)


def _partitions(topic_id: str, numbers: range, node_id: int) -> Iterator[MetadataRecord]:
    for number in numbers:
        yield PartitionRecord(topic_id, number, (node_id,), (node_id,), node_id, 0, 0)


def _topic_of(fs: FileSystem, directory: str) -> str | None:
    """Return the name of the topic in a log's ``partition.json``. Return None if the file is missing, damaged
    or of another log, or if the name is invalid."""
    try:
        found = decode_partition(fs.read_bytes(layout.join(directory, layout.PARTITION_FILE)))
    except OSError:
        return None
    if found is None or f"{found.topic_id}-{found.partition}" != layout.name_of(directory):
        return None
    return None if topic_name_problem(found.topic) else found.topic


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
    """Return the highest leader epoch in a log's leader-epochs file; NO_EPOCH if the file is missing, damaged
    or empty. The epochs in the batches are no evidence, since no CRC covers them (R58)."""
    path = layout.join(directory, layout.LEADER_EPOCHS_FILE)
    try:
        entries = decode_leader_epochs(fs.read_bytes(path), path).entries
    except (OSError, CorruptLogError, ValueError):
        return NO_EPOCH
    return max((one.leader_epoch for one in entries), default=NO_EPOCH)
