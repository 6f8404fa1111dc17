"""Consumer groups (KIP-848): the heartbeat, committed offsets, and group administration.

The coordinator of a group is the leader of the partition of ``__consumer_offsets`` to which the group id
hashes (``FindCoordinator``). Any other broker responds with NOT_COORDINATOR.
"""

from __future__ import annotations

from typing import Annotated

from kafkalite.limits import (
    MAX_GROUPS_PER_REQUEST,
    MAX_KEYS,
    MAX_OWNED_PER_REQUEST,
    MAX_STATES_PER_REQUEST,
    MAX_TOPICS_PER_REQUEST,
)
from kafkalite.protocol.structs import ApiResponse, AtMost, Distinct, PartitionItem, Struct


class FindCoordinatorRequest(Struct):
    key_type: int  #: 0: a group; 1: a transactional id or a transaction group's application id
    keys: Annotated[list[str], AtMost(MAX_KEYS)]


class Coordinator(Struct):
    key: str
    error_code: int
    error_message: str | None
    node_id: int
    address: str
    partition: int  #: of the internal topic


class FindCoordinatorResponse(ApiResponse):
    coordinators: list[Coordinator]


class AssignedTopic(Struct):
    """Partitions of one topic, at most limits.MAX_INTEGERS_PER_LIST. Any others are in further items."""

    topic_id: str
    topic: str
    partitions: list[int]


class ConsumerGroupHeartbeatRequest(Struct):
    """A member's heartbeat, with its subscription and partitions.

    Except for ``instance_id``, a field that is None is unchanged. A request to join must set
    ``rebalance_timeout_ms``, and ``subscribed_topics`` or ``subscribed_pattern``.
    """

    group_id: str
    member_id: str  #: chosen by the member: 32 random hex digits
    member_epoch: int  #: 0: join, -1: leave, -2: a static member leaves and will return
    instance_id: str | None  #: group.instance.id
    rebalance_timeout_ms: int  #: max.poll.interval.ms: how long revoking a partition may take; -1: unchanged
    subscribed_topics: Annotated[list[str], AtMost(MAX_TOPICS_PER_REQUEST)] | None
    subscribed_pattern: str | None  #: must match a topic's whole name; "" ends the subscription
    assignor: str | None
    #: The partitions that the member owns now.
    owned: Annotated[list[AssignedTopic], AtMost(MAX_OWNED_PER_REQUEST)] | None
    max_wait_ms: int  #: how long the coordinator may hold the response; 0: respond at once


class ConsumerGroupHeartbeatResponse(ApiResponse):
    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    session_timeout_ms: int
    assignment: list[AssignedTopic] | None  #: all partitions that the member may own; None: unchanged


class CommittedOffset(PartitionItem):
    offset: int  #: the next offset to read; in a fetch, NO_OFFSET means that none is committed
    leader_epoch: int  #: of the last record read, or NO_EPOCH (R40)
    metadata: str | None
    commit_ms: int  #: when it was committed; set by the coordinator
    topic_id: str  #: the topic id at the time of the commit; "" in a commit means the current topic
    error_code: int
    error_message: str | None


class OffsetCommitRequest(Struct):
    group_id: str
    member_id: str  #: "" from a tool or a consumer without membership; the group must then have no members
    member_epoch: int  #: -1 without membership
    instance_id: str | None
    offsets: Distinct[CommittedOffset]


class OffsetCommitResponse(ApiResponse):
    offsets: list[CommittedOffset]


class GroupPartition(PartitionItem):
    pass


class OffsetFetchRequest(Struct):
    group_id: str
    member_id: str
    member_epoch: int
    require_stable: bool  #: UNSTABLE_OFFSET_COMMIT for partitions with an offset in an open transaction
    partitions: Distinct[GroupPartition] | None  #: None: all partitions with a committed offset


class OffsetFetchResponse(ApiResponse):
    offsets: list[CommittedOffset]


class OffsetDeleteRequest(Struct):
    group_id: str
    partitions: Distinct[GroupPartition]


class OffsetDeleteResponse(ApiResponse):
    offsets: list[CommittedOffset]


class ListGroupsRequest(Struct):
    #: Empty, Assigning, Reconciling, Stable, Dead; an empty list selects all states
    states: Annotated[list[str], AtMost(MAX_STATES_PER_REQUEST)]


class ListedGroup(Struct):
    group_id: str
    state: str
    group_epoch: int
    member_count: int


class ListGroupsResponse(ApiResponse):
    """Contains only the groups whose coordinator is the broker that responds."""

    groups: list[ListedGroup]


class DescribeGroupsRequest(Struct):
    group_ids: Annotated[list[str], AtMost(MAX_GROUPS_PER_REQUEST)]
    include_journal: bool


class DescribedMember(Struct):
    member_id: str
    instance_id: str | None
    member_epoch: int
    previous_epoch: int
    client_id: str
    host: str
    subscribed_topics: list[str]
    subscribed_pattern: str | None
    assignment: list[AssignedTopic]
    target: list[AssignedTopic]
    awaited_revocation: list[AssignedTopic]  #: to be revoked by this member before another member gets them
    last_heartbeat_ms_ago: int
    state: str  #: Stable, Unrevoked (must revoke) or Unreleased (waits for other members)


class GroupEvent(Struct):
    """The cause of one generation of a group."""

    group_epoch: int
    time_ms: int  #: wall clock
    #: MemberJoined, MemberLeft, MemberExpired, MemberFenced, SubscriptionChanged, TopicsChanged ...
    cause: str
    detail: str  #: a sentence
    member_count: int
    partition_count: int


class DescribedGroup(Struct):
    group_id: str
    error_code: int
    error_message: str | None
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor: str
    members: list[DescribedMember]
    journal: list[GroupEvent]  #: oldest first


class DescribeGroupsResponse(ApiResponse):
    groups: list[DescribedGroup]


class DeleteGroupsRequest(Struct):
    group_ids: Annotated[list[str], AtMost(MAX_GROUPS_PER_REQUEST)]


class DeletedGroup(Struct):
    group_id: str
    error_code: int
    error_message: str | None


class DeleteGroupsResponse(ApiResponse):
    groups: list[DeletedGroup]


class TxnOffsetCommitRequest(Struct):
    """Commits offsets as part of a transaction (KIP-98, KIP-447, R35)."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None
    offsets: Distinct[CommittedOffset]


class TxnOffsetCommitResponse(ApiResponse):
    offsets: list[CommittedOffset]
