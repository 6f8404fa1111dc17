"""Decisions about reassignments: the replicas of a partition are replaced by others (KIP-455).

A reassignment has a target, the list of replicas afterwards. The new replicas are added to the partition,
copy its log and join the ISR as any replica does. When they are in sync, and enough replicas of the target
are (R60), the decision that accepts the ISR also ends the reassignment: the others leave, and if the leader
leaves, a replica of the target leads. A replica that leaves begins a new leader epoch (R61).

A reassignment can be replaced by one with another target, or cancelled, at any time. A cancellation is a
reassignment to the original replicas. It ends at once, unless replicas that it removes hold committed records
of which too few of the original replicas have a copy; then it ends when these are in sync again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import (
    BrokerError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    NoReassignmentInProgressError,
    UnknownTopicOrPartitionError,
)
from kafkalite.metadata.decision import (
    ControllerSettings,
    Decision,
    copies_to_keep,
    edit_records,
    min_insync_replicas,
    outcome,
)
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.features import REASSIGNMENTS, allows, refusal
from kafkalite.metadata.image import ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.placement import add_replicas
from kafkalite.metadata.records import MetadataRecord
from kafkalite.protocol.messages.admin import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    OngoingReassignment,
    PartitionReassignment,
)
from kafkalite.protocol.structs import PartitionResult

#: How many partitions ``continue_reassignments`` changes in one decision.
MAX_PARTITIONS_PER_DECISION: Final = 1_000


@dataclass(frozen=True, slots=True)
class ContinueReassignments:
    """Finish the reassignments that can finish, and add replicas to internal topics that have too few.

    ``factors`` has the replication factor of each internal topic by name. The reply is the number of
    partitions that were changed.
    """

    factors: tuple[tuple[str, int], ...] = ()


def alter_partition_reassignments(
    image: ClusterImage, command: AlterPartitionReassignmentsRequest, settings: ControllerSettings
) -> Decision:
    """Begin, replace and cancel reassignments. ``replicas`` of an item is the target; None cancels.

    Errors of an item: UNKNOWN_TOPIC_OR_PARTITION, NO_REASSIGNMENT_IN_PROGRESS (a cancellation),
    INVALID_REPLICA_ASSIGNMENT (the target is empty, names a broker twice, or names one that is not
    registered), INVALID_REPLICATION_FACTOR (another number of replicas without
    ``allow_replication_factor_change``, or fewer than min.insync.replicas). Error of the request:
    UNSUPPORTED_VERSION (the finalised level of metadata.version has no reassignments).
    """
    refused = refusal(image.levels, REASSIGNMENTS)
    if refused is not None:
        return Decision(AlterPartitionReassignmentsResponse(*outcome(refused), []))
    live = image.live_brokers()
    records: list[MetadataRecord] = []
    results: list[PartitionResult] = []
    for wanted in command.partitions:
        try:
            topic, state = _existing(image, wanted)
            target = _target(image, topic, state, wanted, command.allow_replication_factor_change)
        except BrokerError as error:
            results.append(PartitionResult(wanted.topic, wanted.partition, *outcome(error)))
            continue
        edit = PartitionEdit(state, min_insync_replicas(image, topic))
        edit.reassign(target)
        edit.finish_reassignment(live, copies_to_keep(image, topic, settings))
        records += edit_records(image, topic.topic_id, wanted.partition, edit)
        results.append(PartitionResult(wanted.topic, wanted.partition, 0, None))
    return Decision(AlterPartitionReassignmentsResponse(0, None, results), records)


def _existing(image: ClusterImage, wanted: PartitionReassignment) -> tuple[TopicImage, PartitionState]:
    topic, state = image.topics.get(wanted.topic), image.partition(wanted.topic, wanted.partition)
    if topic is None or state is None:
        raise UnknownTopicOrPartitionError(f"partition {wanted.topic}-{wanted.partition} does not exist")
    return topic, state


def _target(
    image: ClusterImage,
    topic: TopicImage,
    state: PartitionState,
    wanted: PartitionReassignment,
    may_change_factor: bool,
) -> tuple[int, ...]:
    """Return the requested replicas. Raises BrokerError if they are invalid."""
    name = f"{wanted.topic}-{wanted.partition}"
    if wanted.replicas is None:
        if not state.is_reassigning:
            raise NoReassignmentInProgressError(f"{name} is not being reassigned")
        return state.original_replicas
    target = tuple(wanted.replicas)
    if not target:
        raise InvalidReplicaAssignmentError(f"the target of {name} has no replica")
    if len(set(target)) != len(target):
        raise InvalidReplicaAssignmentError(f"the target {list(target)} of {name} has a broker twice")
    unknown = [node_id for node_id in target if node_id not in image.brokers]
    if unknown:
        raise InvalidReplicaAssignmentError(
            f"the target {list(target)} of {name} has brokers that are not registered: {unknown}"
        )
    before, after = len(state.final_replicas), len(target)
    if before != after and not may_change_factor:
        raise InvalidReplicationFactorError(
            f"{name} has {before} replicas, and the target {list(target)} has {after}: set"
            " allow_replication_factor_change to change the replication factor"
        )
    minimum = min_insync_replicas(image, topic)
    if after < min(minimum, before):
        raise InvalidReplicationFactorError(
            f"the target {list(target)} of {name} has fewer replicas than min.insync.replicas, {minimum}:"
            " acks=all would be refused"
        )
    return target


def list_partition_reassignments(image: ClusterImage, command: ListPartitionReassignmentsRequest) -> Decision:
    """Return the reassignments that are in progress, of all partitions or of those that the request names.

    A named partition that does not exist or is not being reassigned is omitted.
    """
    if command.partitions is None:
        keys: Iterable[tuple[str, int]] = sorted(
            (topic.name, number) for topic, number, _ in reassigning(image)
        )
    else:
        keys = [tuple(partition) for partition in command.partitions]
    found: list[OngoingReassignment] = []
    for name, number in keys:
        state = image.partition(name, number)
        if state is not None and state.is_reassigning:
            found.append(
                OngoingReassignment(
                    name,
                    number,
                    list(state.replicas),
                    list(state.adding_replicas),
                    list(state.removing_replicas),
                    list(state.isr),
                )
            )
    return Decision(ListPartitionReassignmentsResponse(0, None, found))


def reassigning(image: ClusterImage) -> Iterator[tuple[TopicImage, int, PartitionState]]:
    """Yield (topic, partition number, state) of each partition that is being reassigned."""
    for topic in image.topics.values():
        for number, state in enumerate(topic.partitions):
            if state.target_replicas:
                yield topic, number, state


def continue_reassignments(
    image: ClusterImage, command: ContinueReassignments, settings: ControllerSettings
) -> Decision:
    """Decide the command ``ContinueReassignments``.

    Most reassignments finish with the decision that accepts an ISR. This decision finishes those for which
    something else was missing: a live broker that can lead, or a lower min.insync.replicas. An internal topic
    that was created when fewer brokers were there gets its configured number of replicas, as far as there are
    live brokers, if the finalised levels allow reassignments.
    """
    if not allows(image.levels, REASSIGNMENTS):
        return Decision(0)
    live = image.live_brokers()
    racks = {node_id: image.brokers[node_id].rack for node_id in live}
    held = Counter({node_id: load.replicas for node_id, load in image.loads.items()})
    records: list[MetadataRecord] = []
    changed = 0
    for topic, number, state in (*reassigning(image), *_small_internal(image, command)):
        if changed == MAX_PARTITIONS_PER_DECISION:
            break
        edit = PartitionEdit(state, min_insync_replicas(image, topic))
        if not state.is_reassigning:
            target = add_replicas(state.replicas, dict(command.factors)[topic.name], racks, held)
            held.update(target[len(state.replicas) :])
            edit.reassign(target)
        edit.finish_reassignment(live, copies_to_keep(image, topic, settings))
        added = edit_records(image, topic.topic_id, number, edit)
        changed += bool(added)
        records += added
    return Decision(changed, records)


def _small_internal(
    image: ClusterImage, command: ContinueReassignments
) -> Iterator[tuple[TopicImage, int, PartitionState]]:
    """Yield the partitions of internal topics that have too few replicas although other brokers are live."""
    live = image.live_brokers()
    for name, factor in command.factors:
        topic = image.topics.get(name)
        for number, state in enumerate(() if topic is None else topic.partitions):
            assert topic is not None
            if len(state.replicas) < factor and not state.is_reassigning and live - set(state.replicas):
                yield topic, number, state
