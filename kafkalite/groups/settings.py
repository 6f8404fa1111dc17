"""What a group coordinator decides by: the values of the broker's options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Each field is the broker option of that name, in Kafka's words with underscores."""

    session_timeout_ms: int = 45_000  #: group.consumer.session.timeout.ms: a member silent for so long is out
    heartbeat_interval_ms: int = 5_000  #: group.consumer.heartbeat.interval.ms: told to every member
    assignors: tuple[str, ...] = ("uniform", "range")  #: group.consumer.assignors; the first is the default
    max_size: int = 2**31 - 1  #: group.max.size: members of one group
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1_000  #: counted from when a group became empty
    retention_check_interval_ms: int = 600_000  #: offsets.retention.check.interval.ms
    offset_metadata_max_bytes: int = 4_096  #: offset.metadata.max.bytes, of one committed offset
