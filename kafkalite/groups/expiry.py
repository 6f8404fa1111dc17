"""Changes of groups that no request causes: expired members, offsets and groups, and changed topics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from kafkalite.coordinator_types import Instant, StateRecord, Topics
from kafkalite.groups.change import GroupChange
from kafkalite.groups.group import Group
from kafkalite.groups.offset_rules import offset_tombstone
from kafkalite.groups.pattern_cache import PatternCache
from kafkalite.groups.record_codec import EVENT, GROUP, key_of
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_TIMESTAMP

MAX_RECORDS_PER_TICK: Final = 1_000
MAX_OFFSETS_PER_TICK: Final = 10_000  # checked in one tick, at 0.6 µs each


class Expiry:
    """Decides when members, offsets and groups expire, and when changed topics require new targets.

    ``tick`` examines no further group once it has MAX_RECORDS_PER_TICK records, so that a mass expiry does
    not block the event loop for long. Invariant: no member is to be expelled before ``_members_due_ms``.
    """

    def __init__(self, groups: Mapping[str, Group], settings: GroupSettings, patterns: PatternCache) -> None:
        self._groups = groups
        self._settings = settings
        self._patterns = patterns
        self._topics: Topics | None = None  # topics at the last comparison
        self._members_due_ms: int | None = None
        self._retention_due_ms: int | None = None
        self._to_check: deque[str] = deque()  # groups whose offsets must still be checked

    def begin(self, now: Instant) -> None:
        """Schedule a check of members, topics and offsets. Called when the groups are loaded."""
        self._topics = None
        self._members_due_ms = now.monotonic_ms
        self._retention_due_ms = now.monotonic_ms + self._settings.retention_check_interval_ms

    def expect(self, deadline_ms: int) -> None:
        """Schedule a check of the members at ``deadline_ms`` (monotonic) or earlier."""
        if self._members_due_ms is None or deadline_ms < self._members_due_ms:
            self._members_due_ms = deadline_ms

    def next_deadline_ms(self) -> int | None:
        """Return the monotonic time at which ``tick`` must run next, or None if nothing is scheduled."""
        dues = [due_ms for due_ms in (self._members_due_ms, self._retention_due_ms) if due_ms is not None]
        if self._to_check:
            return 0  # a check is incomplete and must continue now
        return min(dues, default=None)

    def tick(self, now: Instant, topics: Topics) -> list[StateRecord]:
        """Return records of changes that are due at ``now``. Further changes follow in the next calls."""
        records: list[StateRecord] = []
        if topics is not self._topics:
            self._compare_topics(records, now, topics)
            if records:
                return records  # members of these groups may be due too; the next tick checks them
            self._topics = topics
        if self._members_due_ms is not None and now.monotonic_ms >= self._members_due_ms:
            self._expel(records, now, topics)
            if records:
                return records
        if self._retention_due_ms is None or now.monotonic_ms >= self._retention_due_ms:
            self._retention_due_ms = now.monotonic_ms + self._settings.retention_check_interval_ms
            self._to_check.extend(group_id for group_id, group in self._groups.items() if not group.members)
        if self._to_check:
            self._check_retention(records, now, topics)
        return records

    def _compare_topics(self, records: list[StateRecord], now: Instant, topics: Topics) -> None:
        for group in self._groups.values():
            if len(records) >= MAX_RECORDS_PER_TICK:
                return
            if group.members:
                change = GroupChange(group, self._settings, self._patterns, topics, now)
                detail = _difference(group.state.topics, change.subscribed_shapes())
                if detail:
                    change.rebalance("TopicsChanged", detail)
                    records += change.records
            for topic in group.offsets.topics:
                if topic not in topics:
                    room = max(1, MAX_RECORDS_PER_TICK - len(records))
                    records += [
                        offset_tombstone(group.group_id, topic, partition)
                        for partition in group.offsets.partitions(topic)[:room]
                    ]

    def _expel(self, records: list[StateRecord], now: Instant, topics: Topics) -> None:
        """Add the records that expel members whose session or rebalance timeout has expired."""
        timeout_ms = self._settings.session_timeout_ms
        next_due_ms: int | None = None
        for group in self._groups.values():
            silent: list[str] = []
            slow: list[str] = []
            for member_id, session in group.sessions.items():
                deadline_ms = group.session_deadline_ms(member_id, timeout_ms)
                if deadline_ms > now.monotonic_ms:
                    next_due_ms = deadline_ms if next_due_ms is None else min(next_due_ms, deadline_ms)
                elif session.last_seen_ms + timeout_ms <= now.monotonic_ms:
                    silent.append(member_id)
                else:
                    slow.append(member_id)
            if not silent and not slow:
                continue
            change = GroupChange(group, self._settings, self._patterns, topics, now)
            change.remove([*silent, *slow])
            details = []
            if silent:
                details.append(f"{_listed(silent)} sent nothing for {timeout_ms} ms")
            if slow:
                details.append(f"{_listed(slow)} did not give partitions back in the rebalance timeout")
            change.rebalance("MemberExpired" if silent else "MemberFenced", "; ".join(details))
            records += change.records
            if len(records) >= MAX_RECORDS_PER_TICK:
                return  # ``_members_due_ms`` is unchanged, so the next tick continues
        if not records:
            self._members_due_ms = next_due_ms

    def _check_retention(self, records: list[StateRecord], now: Instant, topics: Topics) -> None:
        looked_at = 0
        while self._to_check and len(records) < MAX_RECORDS_PER_TICK and looked_at < MAX_OFFSETS_PER_TICK:
            group = self._groups.get(self._to_check.popleft())
            if group is None or group.members:
                continue
            emptied_ms = group.state.emptied_ms
            if not group.offsets:
                is_due = now.wall_ms - emptied_ms >= self._settings.retention_check_interval_ms
                if is_due:
                    records += self.tombstones(group)
                continue
            if emptied_ms != NO_TIMESTAMP and now.wall_ms - emptied_ms < self._settings.offsets_retention_ms:
                continue
            looked_at += len(group.offsets)
            records += self._expired_offsets(group, now)

    def _expired_offsets(self, group: Group, now: Instant) -> list[StateRecord]:
        """Return tombstones for the group's offsets whose retention time is over, except those that an open
        transaction may change."""
        pending = set(group.offsets.staged)
        expired: list[StateRecord] = []
        for topic, partition in group.offsets:
            value = group.offsets.get(topic, partition)
            assert value is not None, "a listed offset has a value"
            since_ms = max(group.state.emptied_ms, value.commit_ms)
            is_expired = now.wall_ms - since_ms >= self._settings.offsets_retention_ms
            if is_expired and (topic, partition) not in pending:
                expired.append(offset_tombstone(group.group_id, topic, partition))
        return expired

    def tombstones(self, group: Group) -> list[StateRecord]:
        """Return tombstones for the records of a group without members, except the records of its offsets."""
        group_id = group.group_id
        keys = [key_of(EVENT, group_id, slot) for slot in group.event_slots]
        return [StateRecord(key, None) for key in [*keys, key_of(GROUP, group_id)]]


def _difference(before: Mapping[str, tuple[str, int]], after: Mapping[str, tuple[str, int]]) -> str:
    """Return text that describes how the topics of a group have changed, or "" if they have not."""
    if before == after:
        return ""
    parts = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name not in before:
            parts.append(f"{name} was created, with {after[name][1]} partitions")
        elif name not in after:
            parts.append(f"{name} was deleted")
        elif before[name][0] != after[name][0]:
            parts.append(f"{name} was created again, with {after[name][1]} partitions")
        else:
            parts.append(f"{name} has {after[name][1]} partitions, not {before[name][1]}")
    more = f" and {len(parts) - 5} more topics" if len(parts) > 5 else ""
    return "; ".join(parts[:5]) + more


def _listed(member_ids: list[str]) -> str:
    more = f" and {len(member_ids) - 5} more" if len(member_ids) > 5 else ""
    return f"member{'s' if len(member_ids) > 1 else ''} {', '.join(member_ids[:5])}{more}"
