"""Fetches the committed offsets of consumer groups, and commits offsets for groups without members."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from kafkalite.client.cluster.retry import is_retriable
from kafkalite.errors import KafkaliteError, broker_error
from kafkalite.model import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP, TopicPartition
from kafkalite.protocol.messages.groups import (
    CommittedOffset,
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
)
from sparkbridge.brokers.brokers import Brokers
from sparkbridge.offsets import Positions

_GROUP_KEY: Final = 0

# If a coordinator does not respond within this time, it may be dead, and the coordinator is looked up again.
# Replicating a commit takes less time than this.
PATIENCE_S: Final = 6.0


class GroupOffsets:
    """Fetches and commits offsets of groups. Caches the address of each group's coordinator."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._coordinators: dict[str, str] = {}  #: address by group

    def fetch(self, group: str) -> Positions:
        """Return the group's committed offsets. Raises the same errors as ``Brokers.until_answered``."""
        entries = self._call(group, OffsetFetchRequest(group, "", NO_EPOCH, False, None), ())
        return {
            TopicPartition(entry.topic, entry.partition): entry.offset
            for entry in entries
            if entry.offset != NO_OFFSET
        }

    def commit(self, group: str, positions: Positions, metadata: str) -> None:
        """Commit ``positions``. Raises BrokerError if the group has members.

        Also raises the errors of ``Brokers.until_answered``.
        """
        entries = [
            CommittedOffset(tp.topic, tp.partition, offset, NO_EPOCH, metadata, NO_TIMESTAMP, "", 0, None)
            for tp, offset in positions.items()
        ]
        if entries:
            self._call(group, OffsetCommitRequest(group, "", NO_EPOCH, None, entries), positions)

    def _call(self, group: str, request: Any, tps: Collection[TopicPartition]) -> list[CommittedOffset]:
        brokers = self._brokers

        def attempt(deadline_s: float) -> list[CommittedOffset]:
            try:
                address = self._coordinators.get(group) or self._find(group, deadline_s)
                return self._ask(address, request, deadline_s)
            except KafkaliteError as error:
                if is_retriable(error):  # the coordinator may have moved to another broker
                    self._coordinators.pop(group, None)
                raise

        name = type(request).__name__.removesuffix("Request")
        return brokers.until_answered(f"{name} of group {group!r}", tps, attempt)

    def _ask(self, address: str, request: Any, deadline_s: float) -> list[CommittedOffset]:
        try:
            limit_s = self._brokers.patient_until_s(deadline_s, PATIENCE_S)
            reply = self._brokers.connection(address, limit_s).call(request, limit_s)
        except KafkaliteError as error:
            self._brokers.record_failure(address, error)
            raise
        entries: list[CommittedOffset] = reply.message.offsets
        for entry in entries:
            if entry.error_code:
                about = f"{entry.topic}-{entry.partition}"
                raise broker_error(entry.error_code, entry.error_message or "", about=about)
        return entries

    def _find(self, group: str, deadline_s: float) -> str:
        reply = self._brokers.ask_any(FindCoordinatorRequest(_GROUP_KEY, [group]), deadline_s)
        (found,) = reply.message.coordinators
        if found.error_code:
            raise broker_error(found.error_code, found.error_message or "", about=f"group {group!r}")
        self._coordinators[group] = found.address
        return str(found.address)
