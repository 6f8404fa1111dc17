"""Decisions about partitions: ISR changes, checkpoints of high watermarks, and elections that users or the
balancer request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import (
    BrokerError,
    ElectionNotNeededError,
    EligibleLeadersNotAvailableError,
    ErrorCode,
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NewLeaderElectedError,
    PreferredLeaderNotAvailableError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from kafkalite.metadata.broker_commands import broker_of
from kafkalite.metadata.decision import (
    ControllerSettings,
    Decision,
    copies_to_keep,
    edit_partitions,
    edit_records,
    min_insync_replicas,
    outcome,
)
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.image import BrokerState, ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.records import NO_LEADER, HighWatermarksRecord, MetadataRecord, PartitionRecord
from kafkalite.metadata.recovery import PartitionKey, ReplicaEnd, most_complete
from kafkalite.protocol.messages.admin import (
    ElectedPartition,
    ElectionPartition,
    ElectLeadersRequest,
    ElectLeadersResponse,
)
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    AlterPartitionResponse,
    ChangedPartition,
    CheckpointHighWatermarksRequest,
    CheckpointHighWatermarksResponse,
    PartitionChange,
)

MAX_ELECTIONS_PER_BALANCE: Final = 1_000


@dataclass(frozen=True, slots=True)
class BalanceLeaders:
    """Elect preferred leaders where other brokers lead too many partitions. The reply is the number of
    elections."""


def alter_partition(
    image: ClusterImage, command: AlterPartitionRequest, settings: ControllerSettings
) -> Decision:
    """Decide ISR changes proposed by leaders (KIP-497). Each must state the current partition epoch (R13).

    A proposal is accepted only from the current process of the current leader. The request as a whole can
    fail with BROKER_ID_NOT_REGISTERED or STALE_BROKER_EPOCH. A single proposal can fail with
    UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION, FENCED_LEADER_EPOCH, NEW_LEADER_ELECTED or
    INVALID_UPDATE_VERSION. An accepted ISR may finish the partition's reassignment: then replicas that leave
    are removed from it, and the leader may change.

    If the proposed ISR itself is refused (INVALID_REQUEST, INELIGIBLE_REPLICA), the partition epoch is
    incremented (R14), so that a delayed copy of the request is refused too. The leader receives the new
    epoch, and need no longer wait for the replica that it wanted to add.
    """
    try:
        broker_of(image, command.node_id, command.broker_epoch)
    except BrokerError as error:
        return Decision(AlterPartitionResponse(*outcome(error), []))
    live = image.live_brokers()
    states: dict[
        tuple[str, int], PartitionState
    ] = {}  # the states after the preceding proposals of this request
    records: list[MetadataRecord] = []
    results: list[ChangedPartition] = []
    for proposal in command.partitions:
        topic = image.topics_by_id.get(proposal.topic_id)
        key = (proposal.topic_id, proposal.partition)
        try:
            state = states.get(key) or _proposed_upon(topic, proposal)
            _check_is_current(state, command.node_id, proposal)
        except BrokerError as error:
            results.append(_unchanged(topic, proposal, error, states.get(key)))
            continue
        assert topic is not None
        edit = PartitionEdit(state, min_insync_replicas(image, topic))
        code, message = 0, None
        try:
            _check_proposal(image, state, proposal)
            edit.set_isr(proposal.isr)
            edit.finish_reassignment(live, copies_to_keep(image, topic, settings))
            edit.touch()
        except BrokerError as error:
            code, message = outcome(error)
            record_refusal(edit)
        changed = edit.build()
        if changed is not None:
            records.append(PartitionRecord(proposal.topic_id, proposal.partition, *changed))
            state = states[key] = changed
        results.append(_changed(proposal, code, message, state))
    return Decision(AlterPartitionResponse(0, None, results), records)


def _proposed_upon(topic: TopicImage | None, proposal: PartitionChange) -> PartitionState:
    if topic is None:
        raise UnknownTopicIdError(f"there is no topic with the id {proposal.topic_id}")
    if not 0 <= proposal.partition < len(topic.partitions):
        raise UnknownTopicOrPartitionError(f"topic {topic.name!r} has no partition {proposal.partition}")
    return topic.partitions[proposal.partition]


def _check_is_current(state: PartitionState, node_id: int, proposal: PartitionChange) -> None:
    """Raise a BrokerError unless the proposal is from the current leader and based on the current state of
    the partition (R13)."""
    if proposal.leader_epoch < state.leader_epoch:
        raise FencedLeaderEpochError(
            f"leader epoch {proposal.leader_epoch} has ended; it is {state.leader_epoch}"
        )
    if proposal.leader_epoch > state.leader_epoch or state.leader != node_id:
        raise NewLeaderElectedError(
            f"the leader in epoch {state.leader_epoch} is {state.leader}, not {node_id}"
            f" in epoch {proposal.leader_epoch}"
        )
    if not knows_present_state(state, proposal):
        raise InvalidUpdateVersionError(
            f"the partition epoch is {state.partition_epoch}, not {proposal.partition_epoch}"
        )


def record_refusal(edit: PartitionEdit) -> None:
    """Increment the partition epoch although nothing else changes, so that the refusal is durable (R14)."""
    edit.touch()


def is_present_incarnation(broker: BrokerState, epoch: int) -> bool:
    """Whether a replica that fetched with the broker epoch ``epoch`` belongs to the current process of
    ``broker`` (R13)."""
    return epoch == broker.broker_epoch


def knows_present_state(state: PartitionState, proposal: PartitionChange) -> bool:
    """Whether the leader's proposal is based on the current state of the partition (R13)."""
    return proposal.partition_epoch == state.partition_epoch


def _check_proposal(image: ClusterImage, state: PartitionState, proposal: PartitionChange) -> None:
    isr, epochs = proposal.isr, proposal.isr_broker_epochs
    if len(isr) != len(epochs) or len(set(isr)) != len(isr):
        raise InvalidRequestError(f"the ISR {isr} has duplicates, or differs in length from its epochs")
    if state.leader not in isr or not set(isr) <= set(state.replicas):
        raise InvalidRequestError(
            f"the in-sync replicas {isr} must include the leader {state.leader}"
            f" and only replicas of {list(state.replicas)}"
        )
    for node_id, epoch in zip(isr, epochs, strict=True):
        if node_id in state.isr:
            continue
        broker = image.brokers.get(node_id)
        if broker is None or not broker.is_live:
            raise IneligibleReplicaError(f"broker {node_id} is not live")
        if not is_present_incarnation(broker, epoch):
            raise IneligibleReplicaError(
                f"broker {node_id} fetched with broker epoch {epoch}, but is registered with epoch"
                f" {broker.broker_epoch}; it must fetch again"
            )


def _changed(
    proposal: PartitionChange, code: int, message: str | None, state: PartitionState
) -> ChangedPartition:
    return ChangedPartition(
        proposal.topic_id,
        proposal.partition,
        code,
        message,
        state.leader,
        state.leader_epoch,
        list(state.isr),
        state.partition_epoch,
    )


def _unchanged(
    topic: TopicImage | None, proposal: PartitionChange, error: BrokerError, state: PartitionState | None
) -> ChangedPartition:
    """Return the result of a refused proposal, with the partition's current state if it exists."""
    if topic is None or not 0 <= proposal.partition < len(topic.partitions):
        return ChangedPartition(proposal.topic_id, proposal.partition, *outcome(error), NO_LEADER, -1, [], -1)
    return _changed(proposal, *outcome(error), state or topic.partitions[proposal.partition])


def checkpoint_high_watermarks(image: ClusterImage, command: CheckpointHighWatermarksRequest) -> Decision:
    """Store the high watermarks of partitions that a broker leads, all in one record, for later leaders.

    Partitions that the sender does not lead in the stated epoch, or whose high watermark has not grown, are
    skipped. Errors: BROKER_ID_NOT_REGISTERED, STALE_BROKER_EPOCH.
    """
    try:
        broker_of(image, command.node_id, command.broker_epoch)
    except BrokerError as error:
        return Decision(CheckpointHighWatermarksResponse(*outcome(error), 0))
    moved: dict[tuple[str, int], int] = {}
    for reported in command.partitions:
        state = image.partition_of(reported.topic_id, reported.partition)
        if state is None or (state.leader, state.leader_epoch) != (command.node_id, reported.leader_epoch):
            continue
        key = (reported.topic_id, reported.partition)
        if reported.high_watermark > moved.get(key, image.high_watermarks.get(key, 0)):
            moved[key] = reported.high_watermark
    records = [HighWatermarksRecord(tuple((*key, end) for key, end in moved.items()))] if moved else []
    return Decision(CheckpointHighWatermarksResponse(0, None, len(moved)), records)


def elect_leaders(
    image: ClusterImage,
    command: ElectLeadersRequest,
    ends_of: Callable[[PartitionKey], Mapping[int, ReplicaEnd]] = lambda _: {},
) -> Decision:
    """Elect leaders on request (KIP-183, KIP-460).

    A preferred election makes the first replica the leader. This replica must be live, and it must be in sync
    or, if the ISR is empty, eligible and verified. Otherwise the error is PREFERRED_LEADER_NOT_AVAILABLE.

    An unclean election is for a partition without a leader. It elects a live replica that is in sync or, if
    the ISR is empty, eligible and verified. If there is none, it elects the replica with the most complete
    log among those in ``ends_of(partition)``, or any live replica if none has reported, even if committed
    records may be lost. If no replica is live, the error is ELIGIBLE_LEADERS_NOT_AVAILABLE.

    Other errors: ELECTION_NOT_NEEDED, UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST (repeated partition). The
    response to a request for all partitions contains only those that needed an election.
    """
    live = image.live_brokers()
    records: list[MetadataRecord] = []
    results: list[ElectedPartition] = []
    seen: set[tuple[str, int]] = set()
    for wanted in _every_partition(image) if command.partitions is None else command.partitions:
        topic, state = image.topics.get(wanted.topic), image.partition(wanted.topic, wanted.partition)
        try:
            if topic is None or state is None:
                raise UnknownTopicOrPartitionError(
                    f"partition {wanted.topic}-{wanted.partition} does not exist"
                )
            if (wanted.topic, wanted.partition) in seen:
                raise InvalidRequestError("the request names this partition twice")
            seen.add((wanted.topic, wanted.partition))
            edit = PartitionEdit(state, min_insync_replicas(image, topic))
            if command.is_unclean:
                _elect_unclean(edit, live, ends_of((topic.topic_id, wanted.partition)))
            else:
                _elect_preferred(edit, live)
        except BrokerError as error:
            if command.partitions is None and error.code == ErrorCode.ELECTION_NOT_NEEDED:
                continue
            leader = NO_LEADER if state is None else state.leader
            results.append(ElectedPartition(wanted.topic, wanted.partition, *outcome(error), leader))
            continue
        records += edit_records(image, topic.topic_id, wanted.partition, edit)
        results.append(ElectedPartition(wanted.topic, wanted.partition, 0, None, edit.leader))
    return Decision(ElectLeadersResponse(0, None, results), records)


def _every_partition(image: ClusterImage) -> Iterator[ElectionPartition]:
    for name in sorted(image.topics):
        for number in range(len(image.topics[name].partitions)):
            yield ElectionPartition(name, number)


def _elect_preferred(edit: PartitionEdit, live: frozenset[int]) -> None:
    preferred = edit.before.replicas[0]
    if edit.leader == preferred:
        raise ElectionNotNeededError(f"broker {preferred} leads already")
    if preferred not in edit.isr and edit.leader == NO_LEADER:
        edit.elect(live & {preferred})
    elif preferred in edit.isr and preferred in live:
        edit.lead(preferred)
    if edit.leader != preferred:
        raise PreferredLeaderNotAvailableError(
            f"broker {preferred} is not {'in sync' if preferred in live else 'live'}"
        )


def _elect_unclean(edit: PartitionEdit, live: frozenset[int], ends: Mapping[int, ReplicaEnd]) -> None:
    if edit.leader != NO_LEADER:
        raise ElectionNotNeededError(f"broker {edit.leader} leads")
    edit.elect(live)
    if edit.leader == NO_LEADER and ends:
        edit.elect_uncleanly(most_complete(edit.before, ends))
    edit.elect_any(live)
    if edit.leader == NO_LEADER:
        raise EligibleLeadersNotAvailableError(f"none of the replicas {list(edit.before.replicas)} is live")


def balance_leaders(
    image: ClusterImage, command: BalanceLeaders, *, settings: ControllerSettings
) -> Decision:
    """Elect preferred leaders for the brokers that lead too few of the partitions of which they are the
    preferred leader.

    Works like Kafka's automatic rebalance, with at most MAX_ELECTIONS_PER_BALANCE elections per call.
    """
    live = image.live_brokers()
    astray: Counter[int] = Counter()
    for topic in image.topics.values():
        for state in topic.partitions:
            if state.leader != state.replicas[0] and not state.target_replicas:
                astray[state.replicas[0]] += 1
    percentage = settings.imbalance_per_broker_percentage
    wanted = {
        node_id
        for node_id, count in astray.items()
        if node_id in live and 100 * count > percentage * image.loads[node_id].preferred_leaders
    }
    elected = 0

    def is_affected(topic: TopicImage, state: PartitionState) -> bool:
        preferred = state.replicas[0]
        if state.target_replicas:  # when the reassignment ends, another replica may be preferred
            return False
        return state.leader not in {NO_LEADER, preferred} and preferred in wanted and preferred in state.isr

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        nonlocal elected
        if elected < MAX_ELECTIONS_PER_BALANCE:
            change.lead(change.before.replicas[0])
            elected += 1

    records = edit_partitions(image, is_affected, edit) if wanted else []
    return Decision(elected, records)
