"""Mutants of the rules of groups; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kafkalite.coordinator_types import Decision
from kafkalite.errors import BrokerError
from kafkalite.groups.group import Group
from kafkalite.groups.heartbeat import HeartbeatRules
from kafkalite.groups.machine import GroupMachine
from kafkalite.groups.member import JOIN_EPOCH
from kafkalite.groups.offset_rules import OffsetRules
from kafkalite.groups.offsets import OffsetKey
from kafkalite.groups.record_codec import OffsetValue
from kafkalite.groups.settings import GroupSettings
from kafkalite.model import NO_EPOCH, NO_PRODUCER_ID
from kafkalite.protocol.messages.groups import (
    CommittedOffset,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitRequest,
    TxnOffsetCommitRequest,
)
from proof.mutants import Mutant

_OFFSETS: Final = "kafkalite.groups.offset_rules:OffsetRules"


def _answer_expelled(
    self: HeartbeatRules,
    request: ConsumerGroupHeartbeatRequest,
    group: Group | None,
    original: Callable[..., Decision],
) -> Decision:
    if request.member_epoch <= JOIN_EPOCH:
        return original(self, request, group)
    settings = self._settings
    return Decision(
        reply=ConsumerGroupHeartbeatResponse(
            0,
            None,
            request.member_id,
            request.member_epoch,
            settings.heartbeat_interval_ms,
            settings.session_timeout_ms,
            None,
        )
    )


def _apply_at_once(
    self: GroupMachine, key: OffsetKey, value: bytes | None, producer_id: int, original: Callable[..., None]
) -> None:
    original(self, key, value, NO_PRODUCER_ID)


def _unchecked(kind: type) -> Callable[..., None]:
    def check_member(self: OffsetRules, request: Any, original: Callable[..., None]) -> None:
        if not isinstance(request, kind):
            original(self, request)

    return check_member


def _let_strangers_commit(self: OffsetRules, request: Any, original: Callable[..., None]) -> None:
    if request.member_id or request.member_epoch >= 0:
        original(self, request)


def _fetched_without_epoch(
    topic: str,
    partition: int,
    value: OffsetValue | None,
    error: BrokerError | None,
    *,
    original: Callable[..., CommittedOffset],
) -> CommittedOffset:
    return original(topic, partition, value, error)._replace(leader_epoch=NO_EPOCH)


def _fetched_without_metadata(
    topic: str,
    partition: int,
    value: OffsetValue | None,
    error: BrokerError | None,
    *,
    original: Callable[..., CommittedOffset],
) -> CommittedOffset:
    return original(topic, partition, value, error)._replace(metadata=None)


def _one_more_group(groups: Mapping[str, Group], group_id: str, settings: GroupSettings) -> Group:
    return Group(group_id)


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "S26-groups-unlimited",
        "a coordinator has any number of groups",
        {
            "kafkalite.groups.heartbeat:new_group": _one_more_group,
            "kafkalite.groups.offset_rules:new_group": _one_more_group,
        },
    ),
    Mutant(
        "S26-offsets-unlimited",
        "a group has any number of committed offsets",
        {f"{_OFFSETS}._check_offset_count": lambda self, group_id, left_count: None},
    ),
    Mutant(
        "S26-staged-uncounted",
        "offsets in open transactions do not count",
        {"kafkalite.groups.offsets:Offsets.stage": lambda *_: None},
    ),
    Mutant(
        "R35-member-unchecked",
        "offsets from any sender join a transaction",
        {f"{_OFFSETS}.check_member": _unchecked(TxnOffsetCommitRequest)},
    ),
    Mutant(
        "R35-visible-at-once",
        "offsets take effect before their transaction is committed",
        {"kafkalite.groups.machine:GroupMachine.replay_offset": _apply_at_once},
    ),
    Mutant(
        "R35-unstable-read",
        "a stable read of offsets ignores those of open transactions",
        {"kafkalite.groups.offsets:PendingOffsets.is_pending": lambda *_: False},
    ),
    Mutant(
        "R38-hand-over-early",
        "a partition is given to a member before its owner has given it back",
        {"kafkalite.groups.change:GroupChange.available_to": lambda self, member_id, wanted: wanted},
    ),
    Mutant(
        "R38-expelled-stays",
        "an expelled member's next heartbeat is accepted",
        {"kafkalite.groups.heartbeat:HeartbeatRules.refuse_unknown": _answer_expelled},
    ),
    Mutant(
        "R39-any-epoch",
        "offsets of a member's earlier epoch are committed",
        {f"{_OFFSETS}.check_member_epoch": lambda *_: None},
    ),
    Mutant(
        "R39-non-member",
        "a client that is no member commits for a group with members",
        {f"{_OFFSETS}.check_member": _let_strangers_commit},
    ),
    Mutant(
        "R40-epoch-forgotten",
        "a committed offset has no leader epoch",
        {"kafkalite.groups.offset_rules:_fetched": _fetched_without_epoch},
    ),
    Mutant(
        "R40-metadata-forgotten",
        "the metadata of a committed offset is not returned",
        {"kafkalite.groups.offset_rules:_fetched": _fetched_without_metadata},
    ),
    Mutant(
        "R56-late-commit",
        "a late commit from a closed connection replaces a newer one of the same member",
        {f"{_OFFSETS}.check_connection": lambda *_: None},
    ),
    Mutant(
        "R39-any-member",
        "offsets from any sender are committed",
        {f"{_OFFSETS}.check_member": _unchecked(OffsetCommitRequest)},
    ),
)
