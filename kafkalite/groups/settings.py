"""The broker options that a group coordinator uses."""

# Tests: tests/groups/test_heartbeat.py

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The coordinator's options. Each field is the broker option of that name, with underscores."""

    session_timeout_ms: int = (
        45_000  #: group.consumer.session.timeout.ms: a member silent for longer is expelled
    )
    heartbeat_interval_ms: int = 5_000  #: group.consumer.heartbeat.interval.ms: sent to every member
    assignors: tuple[str, ...] = ("uniform", "range")  #: group.consumer.assignors; the first is the default
    max_size: int = 2**31 - 1  #: group.max.size: maximum members of one group
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1_000  #: counted from when the group became empty
    retention_check_interval_ms: int = 600_000  #: offsets.retention.check.interval.ms
    offset_metadata_max_bytes: int = 4_096  #: offset.metadata.max.bytes, of one committed offset
