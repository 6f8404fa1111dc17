"""The broker options that a group coordinator uses."""

# Tests: tests/groups/test_heartbeat.py

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The broker options of a group coordinator. The comment of each field begins with the option's name."""

    #: group.consumer.session.timeout.ms: a member without a heartbeat for longer is expelled
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000  #: group.consumer.heartbeat.interval.ms, sent to every member
    assignors: tuple[str, ...] = ("uniform", "range")  #: group.consumer.assignors; the first is the default
    max_size: int = 10_000  #: group.max.size: the maximum number of members in one group
    max_count: int = 10_000  #: group.max.count: the maximum number of groups of one coordinator
    max_offsets: int = 100_000  #: group.max.offsets: the maximum number of committed offsets of one group
    #: offsets.retention.minutes: how long offsets are kept after the last commit and the last member
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1_000
    retention_check_interval_ms: int = 600_000  #: offsets.retention.check.interval.ms
    offset_metadata_max_bytes: int = 4_096  #: offset.metadata.max.bytes: the limit for one committed offset
