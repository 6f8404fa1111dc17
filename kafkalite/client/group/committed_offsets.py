"""An offset of a group as a program has it, and as requests and answers carry it (R40)."""

from __future__ import annotations

from kafkalite.model import NO_TIMESTAMP, OffsetAndMetadata, TopicPartition
from kafkalite.protocol.messages.groups import CommittedOffset


def to_commit(tp: TopicPartition, at: int | OffsetAndMetadata) -> CommittedOffset:
    """The entry of a commit; when it was committed, and for which topic id, is for the coordinator to say."""
    if isinstance(at, int):
        at = OffsetAndMetadata(at)
    topic, partition = tp
    return CommittedOffset(
        topic, partition, at.offset, at.leader_epoch, at.metadata, NO_TIMESTAMP, "", 0, None
    )


def as_committed(entry: CommittedOffset) -> OffsetAndMetadata:
    """What an answer tells; NO_OFFSET where nothing is committed."""
    return OffsetAndMetadata(entry.offset, entry.leader_epoch, entry.metadata)
