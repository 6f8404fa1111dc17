"""The part of Admin that looks after consumer groups: who is in them, how far they are, where they go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafkalite.client.admin.connection import AdminConnection, error_of, raise_first, told
from kafkalite.client.cluster.coordinator import GROUP_KEY
from kafkalite.client.cluster.list_offsets import list_offsets
from kafkalite.client.group.committed_offsets import as_committed, to_commit
from kafkalite.errors import BrokerError, GroupIdNotFoundError
from kafkalite.model import LATEST, NO_OFFSET, OffsetAndMetadata, TopicPartition
from kafkalite.protocol.messages.groups import (
    AssignedTopic,
    CommittedOffset,
    DeleteGroupsRequest,
    DescribedGroup,
    DescribedMember,
    DescribeGroupsRequest,
    GroupEvent,
    GroupPartition,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)

#: As whom tools commit: without membership, which only a group without members allows (R39).
_NO_MEMBER: Final = ""
_NO_MEMBER_EPOCH: Final = -1


@dataclass(frozen=True, slots=True)
class GroupListing:
    group_id: str
    state: str  #: Empty, Assigning, Reconciling, Stable, Dead
    group_epoch: int  #: the generation
    member_count: int
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """One member of a group. Partitions are in order."""

    member_id: str
    instance_id: str | None  #: group.instance.id of a static member
    member_epoch: int
    client_id: str
    host: str
    subscribed_topics: tuple[str, ...]
    subscribed_pattern: str | None
    assignment: tuple[TopicPartition, ...]  #: what it holds
    target: tuple[TopicPartition, ...]  #: what it is to hold
    awaited_revocation: tuple[TopicPartition, ...]  #: what it must give back before another gets it
    last_heartbeat_ms_ago: int
    state: str  #: Stable, Unrevoked, Unreleased


@dataclass(frozen=True, slots=True)
class Generation:
    """Why a group has this generation."""

    group_epoch: int
    time_ms: int  #: wall clock
    cause: str
    detail: str
    member_count: int
    partition_count: int


@dataclass(frozen=True, slots=True)
class GroupDescription:
    group_id: str
    state: str
    group_epoch: int  #: of the members and subscriptions
    assignment_epoch: int  #: of the target that was computed from them
    assignor: str
    members: tuple[MemberDescription, ...]
    journal: tuple[Generation, ...]  #: oldest first; empty unless it was asked for


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a group is in one partition. Offsets are of the next record; None: nothing is committed."""

    partition: TopicPartition
    committed: OffsetAndMetadata | None
    commit_ms: int | None  #: wall clock
    end_offset: int
    member: MemberDescription | None  #: who holds it

    @property
    def lag(self) -> int | None:
        return None if self.committed is None else max(0, self.end_offset - self.committed.offset)


class GroupAdmin(AdminConnection):
    """Mixed into Admin."""

    async def list_groups(self, states: Sequence[str] = ()) -> list[GroupListing]:
        """Every group of the cluster, or those in one of ``states``, by name."""
        answers = await self._call_every_broker(ListGroupsRequest(list(states)))
        return sorted(
            (
                GroupListing(group.group_id, group.state, group.group_epoch, group.member_count, node_id)
                for node_id, answer in answers.items()
                for group in answer.groups
            ),
            key=lambda listing: listing.group_id,
        )

    async def describe_group(self, group_id: str, *, journal: bool = False) -> GroupDescription:
        """Its members and what each holds; with ``journal`` also the cause of its latest generations.

        Raises GroupIdNotFoundError.
        """
        answer = await self._call_coordinator(GROUP_KEY, group_id, DescribeGroupsRequest([group_id], journal))
        raise_first(answer.groups, f"group {group_id!r}")
        return _description(answer.groups[0])

    async def committed_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What the group has committed, of ``partitions`` or of all; what has nothing is left out."""
        offsets = await self._committed(group_id, partitions)
        return {tp: as_committed(one) for tp, one in offsets.items()}

    async def _committed(
        self, group_id: str, partitions: Iterable[TopicPartition] | None
    ) -> dict[TopicPartition, CommittedOffset]:
        asked = None if partitions is None else [GroupPartition(*tp) for tp in partitions]
        request = OffsetFetchRequest(group_id, _NO_MEMBER, _NO_MEMBER_EPOCH, False, asked)
        answer = await self._call_coordinator(GROUP_KEY, group_id, request)
        found: dict[TopicPartition, CommittedOffset] = {}
        for one in sorted(answer.offsets, key=lambda one: (one.topic, one.partition)):
            tp = TopicPartition(one.topic, one.partition)
            raise_first([one], f"{tp} in group {group_id!r}")
            if one.offset != NO_OFFSET:
                found[tp] = one
        return found

    async def group_lag(self, group_id: str) -> list[PartitionLag]:
        """How far the group is in each partition that it holds or has committed, in order.

        Raises GroupIdNotFoundError for a group that has neither members nor offsets.
        """
        committed = await self._committed(group_id, None)
        holders: dict[TopicPartition, MemberDescription] = {}
        try:
            for member in (await self.describe_group(group_id)).members:
                holders.update(dict.fromkeys((*member.assignment, *member.awaited_revocation), member))
        except GroupIdNotFoundError:
            if not committed:
                raise
        wanted = sorted(committed.keys() | holders.keys())
        ends = await list_offsets(self._cluster, dict.fromkeys(wanted, LATEST))
        lags: list[PartitionLag] = []
        for tp in wanted:
            one = committed.get(tp)
            offset = None if one is None else as_committed(one)
            commit_ms = None if one is None else one.commit_ms
            lags.append(PartitionLag(tp, offset, commit_ms, ends[tp].offset, holders.get(tp)))
        return lags

    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
    ) -> None:
        """Let the group go on at these offsets. Only while it has no members.

        Raises UnknownMemberIdError when it has some, UnknownTopicOrPartitionError.
        """
        entries = [to_commit(tp, offset) for tp, offset in offsets.items()]
        request = OffsetCommitRequest(group_id, _NO_MEMBER, _NO_MEMBER_EPOCH, None, entries)
        answer = await self._call_coordinator(GROUP_KEY, group_id, request)
        told(_errors(group_id, answer.offsets), return_exceptions=False)

    async def delete_group_offsets(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition],
        *,
        return_exceptions: bool = False,
    ) -> dict[TopicPartition, BrokerError | None]:
        """Forget what the group has committed there. Raises GroupSubscribedToTopicError while it reads it."""
        request = OffsetDeleteRequest(group_id, [GroupPartition(*tp) for tp in partitions])
        answer = await self._call_coordinator(GROUP_KEY, group_id, request)
        return told(_errors(group_id, answer.offsets), return_exceptions)

    async def delete_groups(
        self, group_ids: Iterable[str], *, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        """Forget groups and their offsets; {name: None}. Raises NonEmptyGroupError, GroupIdNotFoundError."""
        results: dict[str, BrokerError | None] = {}
        for group_id in group_ids:
            answer = await self._call_coordinator(GROUP_KEY, group_id, DeleteGroupsRequest([group_id]))
            results[group_id] = error_of(answer.groups[0], f"group {group_id!r}")
        return told(results, return_exceptions)


def _errors(group_id: str, offsets: Iterable[CommittedOffset]) -> dict[TopicPartition, Any]:
    tps = {TopicPartition(one.topic, one.partition): one for one in offsets}
    return {tp: error_of(one, f"{tp} in group {group_id!r}") for tp, one in tps.items()}


def _description(group: DescribedGroup) -> GroupDescription:
    return GroupDescription(
        group.group_id,
        group.state,
        group.group_epoch,
        group.assignment_epoch,
        group.assignor,
        tuple(_member(member) for member in group.members),
        tuple(_generation(event) for event in group.journal),
    )


def _generation(event: GroupEvent) -> Generation:
    return Generation(*event)


def _member(member: DescribedMember) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.instance_id,
        member.member_epoch,
        member.client_id,
        member.host,
        tuple(member.subscribed_topics),
        member.subscribed_pattern,
        _partitions(member.assignment),
        _partitions(member.target),
        _partitions(member.awaited_revocation),
        member.last_heartbeat_ms_ago,
        member.state,
    )


def _partitions(topics: Iterable[AssignedTopic]) -> tuple[TopicPartition, ...]:
    return tuple(sorted(TopicPartition(one.topic, number) for one in topics for number in one.partitions))
