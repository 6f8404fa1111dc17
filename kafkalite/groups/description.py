"""Builds the responses to requests that list and describe groups."""

# Tests: tests/groups/test_machine.py

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kafkalite.coordinator_types import Instant
from kafkalite.errors import ErrorCode, GroupIdNotFoundError
from kafkalite.groups.group import DEAD, Group
from kafkalite.groups.member import assigned_topics
from kafkalite.protocol.messages.groups import (
    DescribedGroup,
    DescribedMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)

_NONE = int(ErrorCode.NONE)


def list_groups(groups: Iterable[Group], request: ListGroupsRequest) -> ListGroupsResponse:
    """Return the groups in the requested states, sorted by group id; all groups if no state is requested."""
    wanted = {state.lower() for state in request.states}
    listed = [
        ListedGroup(group.group_id, state, group.group_epoch, len(group.members))
        for group in sorted(groups, key=lambda group: group.group_id)
        if (state := group.describe_state()).lower() in wanted or not wanted
    ]
    return ListGroupsResponse(_NONE, None, listed)


def describe_groups(
    groups: Mapping[str, Group], request: DescribeGroupsRequest, now: Instant
) -> DescribeGroupsResponse:
    """Describe the requested groups. A missing group has the state Dead and the error GROUP_ID_NOT_FOUND."""
    described = []
    for group_id in request.group_ids:
        group = groups.get(group_id)
        if group is None:
            error = GroupIdNotFoundError(f"there is no group {group_id!r}")
            described.append(DescribedGroup(group_id, int(error.code), str(error), DEAD, 0, 0, "", [], []))
        else:
            described.append(_describe(group, now, include_journal=request.include_journal))
    return DescribeGroupsResponse(_NONE, None, described)


def _describe(group: Group, now: Instant, *, include_journal: bool) -> DescribedGroup:
    names = group.names
    members = []
    for member_id in sorted(group.members):
        member = group.members[member_id]
        subscription, current = member.subscription, member.current
        members.append(
            DescribedMember(
                member_id,
                subscription.instance_id,
                current.member_epoch,
                current.previous_epoch,
                subscription.client_id,
                subscription.host,
                list(subscription.topics),
                subscription.pattern,
                assigned_topics(current.assigned, names),
                assigned_topics(member.target, names),
                assigned_topics(current.revoking | (current.assigned - member.target), names),
                max(0, now.monotonic_ms - group.sessions[member_id].last_seen_ms),
                member.state,
            )
        )
    return DescribedGroup(
        group.group_id,
        _NONE,
        None,
        group.describe_state(),
        group.group_epoch,
        group.group_epoch,  # the assignment epoch, because a decision contains both epoch and targets
        group.state.assignor,
        members,
        group.journal if include_journal else [],
    )
