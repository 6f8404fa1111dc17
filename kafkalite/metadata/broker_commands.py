"""Decisions about brokers: registration, fencing, shutdown, lost replicas, producer ids.

The states of a broker, as in Kafka's BrokerHeartbeatManager::

    registered, fenced ──heartbeat from a process that has replayed its registration (R22)──▶ live
    live ──no heartbeat for a session, or another process registers (R20)──▶ fenced
    live ──heartbeat that wants to shut down──▶ shutting down
    shutting down ──leads no partition that another live broker could lead──▶ fenced
    any ──UnregisterBroker, when the broker has no replica──▶ removed; its node id is retired
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import (
    BrokerError,
    BrokerIdNotRegisteredError,
    InvalidRequestError,
    PolicyViolationError,
    StaleBrokerEpochError,
    UnsupportedVersionError,
)
from kafkalite.metadata.decision import (
    ControllerSettings,
    Decision,
    allows_unclean_election,
    edit_partitions,
    outcome,
)
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.features import UNREGISTERING, range_text, refusal, supports
from kafkalite.metadata.image import BrokerState, ClusterImage, PartitionState, TopicImage
from kafkalite.metadata.records import (
    BROKER,
    NO_LEADER,
    BrokerChangeRecord,
    ConfigRecord,
    MetadataRecord,
    ProducerIdsRecord,
    UnregisterBrokerRecord,
)
from kafkalite.protocol.messages.admin import UnregisterBrokerRequest, UnregisterBrokerResponse
from kafkalite.protocol.messages.cluster import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    BrokerHeartbeatRequest,
    DamagedReplica,
    FeatureRange,
    RegisterBrokerRequest,
    RegisterBrokerRequestV1,
    RegisterBrokerResponse,
)

PRODUCER_ID_BLOCK_SIZE: Final = 1_000


@dataclass(frozen=True, slots=True)
class FenceBroker:
    """Fence a broker whose session has expired, or whose requested shutdown may complete. ``broker_epoch``
    identifies the broker's process."""

    node_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class UnfenceBroker:
    """Unfence a broker that is alive and has replayed its registration."""

    node_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class BeginShutdown:
    """Begin a broker's shutdown: the broker gets no new role. Its leaderships are transferred to other live
    ISR members where there are any. Idempotent."""

    node_id: int
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class LoseReplicas:
    """End the roles of a broker's replicas that have gone offline or were found damaged (R26, R52)."""

    node_id: int
    broker_epoch: int
    damaged: tuple[DamagedReplica, ...]


BrokerChange = FenceBroker | UnfenceBroker | BeginShutdown | LoseReplicas


def broker_of(image: ClusterImage, node_id: int, broker_epoch: int) -> BrokerState:
    """Return the registered broker. Raises BROKER_ID_NOT_REGISTERED if there is none, or STALE_BROKER_EPOCH
    if ``broker_epoch`` is that of an earlier process."""
    broker = image.brokers.get(node_id)
    if broker is None:
        raise BrokerIdNotRegisteredError(f"broker {node_id} is not registered")
    if broker.broker_epoch != broker_epoch:
        raise StaleBrokerEpochError(
            f"broker {node_id} has registered again since epoch {broker_epoch}; it has {broker.broker_epoch}"
        )
    return broker


def register_broker(
    image: ClusterImage, command: RegisterBrokerRequest, *, now_ms: int, settings: ControllerSettings
) -> Decision:
    """Register a broker's new process under a new broker epoch, and end the roles of the earlier process
    (R20).

    The broker epoch is the image's offset plus one, or the earlier broker epoch plus one if that is greater.
    The entry is appended only if the image is still the newest one, so every image at the registration offset
    or later contains the registration. A repeated request of the same process gets the same response.

    After a clean stop, the broker's replicas stay eligible. After an unclean stop, replicas lose their
    eligibility if the effective durability of their topic is page-cache, because records that were not synced
    may be lost. Otherwise they stay eligible, but lead only after a comparison with the other replicas of
    their partitions (R46). Replicas also lose their eligibility if the data directory has changed or is an
    older copy (R51), or if they are damaged. An unclean stop alone does not change the eligibility of the
    only replica of a partition, because no other replica can have more records.

    Errors: POLICY_VIOLATION (the node id is retired), UNSUPPORTED_VERSION (the broker's program does not
    support a finalised level, R92).
    """
    earlier = image.brokers.get(command.node_id)
    if earlier is not None and command.incarnation_id and earlier.incarnation_id == command.incarnation_id:
        known = RegisterBrokerResponse(0, None, earlier.broker_epoch, earlier.registration_offset)
        return Decision(known)
    if command.node_id in image.retired_brokers:
        return Decision(RegisterBrokerResponse(*outcome(_retired(command.node_id)), -1, -1))
    ranges = command.features if isinstance(command, RegisterBrokerRequestV1) else []
    for feature, level in image.levels.items():
        if not supports(ranges, feature, level):
            refused = _too_old(command.node_id, ranges, feature, level)
            return Decision(RegisterBrokerResponse(*outcome(refused), -1, -1))
    registration_offset = image.metadata_offset + 1
    broker_epoch = registration_offset
    is_fenced = is_fenced_at_registration(earlier, settings)
    if earlier is not None:
        broker_epoch = max(broker_epoch, earlier.broker_epoch + 1)
    broker = BrokerState(
        command.node_id,
        broker_epoch,
        tuple(command.addresses),
        command.rack,
        now_ms,
        command.incarnation_id,
        command.directory_id,
        registration_offset,
        is_fenced,
        False,
        command.start_count,
        earlier is not None and is_restored_directory(command, earlier),
    )
    records: list[MetadataRecord] = [broker]
    if earlier is not None:
        records += _take_over(image, command, earlier, is_fenced=is_fenced, settings=settings)
    return Decision(RegisterBrokerResponse(0, None, broker_epoch, registration_offset), records)


def _retired(node_id: int) -> BrokerError:
    return PolicyViolationError(
        f"broker {node_id} was unregistered, and its node id is retired: give the node another node.id and an"
        " empty data directory"
    )


def _too_old(node_id: int, ranges: Sequence[FeatureRange], feature: str, level: int) -> BrokerError:
    return UnsupportedVersionError(
        f"broker {node_id} supports {range_text(ranges, feature)}, and {feature} {level} is finalised in this"
        " cluster: start the broker with a version that supports it, as the other nodes do"
    )


def unregister_broker(
    image: ClusterImage, command: UnregisterBrokerRequest, settings: ControllerSettings
) -> Decision:
    """Remove a broker from the cluster and retire its node id (KIP-631).

    A process that still runs under this id stops, because the controller refuses to register it again.
    Errors: BROKER_ID_NOT_REGISTERED, INVALID_REQUEST (the node is a voter of the metadata quorum, or the only
    node, or partitions have replicas on the broker), UNSUPPORTED_VERSION (the finalised level of
    metadata.version has no unregistered brokers).
    """
    node_id = command.node_id
    refused = refusal(image.levels, UNREGISTERING)
    if refused is not None:
        return Decision(UnregisterBrokerResponse(*outcome(refused), node_id))
    if node_id not in image.brokers:
        error: BrokerError = BrokerIdNotRegisteredError(f"broker {node_id} is not registered")
        return Decision(UnregisterBrokerResponse(*outcome(error), node_id))
    if node_id in settings.voters:
        error = InvalidRequestError(
            f"node {node_id} is a voter of the metadata quorum and stays registered: move its replicas with"
            f" 'kl cluster decommission {node_id}', and let it run without them"
        )
        return Decision(UnregisterBrokerResponse(*outcome(error), node_id))
    load = image.loads.get(node_id)
    if load is not None:
        error = InvalidRequestError(
            f"broker {node_id} has {load.replicas} replicas: move them first, with 'kl cluster decommission"
            f" {node_id}'"
        )
        return Decision(UnregisterBrokerResponse(*outcome(error), node_id))
    overrides = image.configs_of(BROKER, str(node_id))
    removed: list[MetadataRecord] = [ConfigRecord(BROKER, str(node_id), key, None) for key in overrides]
    return Decision(UnregisterBrokerResponse(0, None, node_id), [*removed, UnregisterBrokerRecord(node_id)])


def is_fenced_at_registration(earlier: BrokerState | None, settings: ControllerSettings) -> bool:
    """Whether a new process is fenced at first. False only in a single-node cluster (R20, R22)."""
    return not settings.is_single_node


def has_stopped_cleanly(command: RegisterBrokerRequest, earlier: BrokerState) -> bool:
    """Whether a shutdown marker proves that the earlier process lost no records (R20, R21)."""
    return command.clean_broker_epoch == earlier.broker_epoch


def is_restored_directory(command: RegisterBrokerRequest, earlier: BrokerState) -> bool:
    """Whether the data directory is an older copy: its count of starts has not grown (R51)."""
    is_same = command.directory_id == earlier.directory_id
    return is_same and 0 < command.start_count <= earlier.start_count


def end_earlier_process(change: PartitionEdit, node_id: int) -> None:
    """Remove ``node_id`` as leader and ISR member of a partition, because its process has ended (R20)."""
    change.fence(node_id)


def _take_over(
    image: ClusterImage,
    command: RegisterBrokerRequest,
    earlier: BrokerState,
    *,
    is_fenced: bool,
    settings: ControllerSettings,
) -> list[MetadataRecord]:
    """Return the records for the partitions in which the earlier process had a role, and for those of its
    partitions that have no leader."""
    node_id = command.node_id
    # A single node that has the metadata has the directory, too: only its node.json was written again.
    is_same_directory = settings.is_single_node or earlier.directory_id in {"", command.directory_id}
    has_lost_all = not is_same_directory or is_restored_directory(command, earlier)
    # The count of starts was missing or unreadable, so it does not show the age of the directory.
    has_lost_count = is_same_directory and command.start_count == 1
    was_clean = has_stopped_cleanly(command, earlier)
    damaged = {(replica.topic_id, replica.partition) for replica in command.damaged}
    live = image.live_brokers() - {node_id} if is_fenced else image.live_brokers() | {node_id}

    def is_affected(topic: TopicImage, state: PartitionState) -> bool:
        return has_part_in(state, node_id) or (state.leader == NO_LEADER and node_id in state.replicas)

    broker_override = image.configs_of(BROKER, str(node_id)).get("durability")

    def has_synced(topic: TopicImage) -> bool:
        # An override with fsync may be newer than records that were counted before.
        override = image.topic_configs(topic.name).get("durability", broker_override)
        return command.counts_synced_only and override != "page-cache"

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        end_earlier_process(change, node_id)
        is_only_copy = change.before.is_only_copy(node_id)
        if has_lost_all and not (has_lost_count and is_only_copy):
            change.forget(node_id)
        elif (topic.topic_id, number) in damaged:
            _forget_damaged(change, node_id)
        elif is_only_copy:
            change.restore(node_id)
        elif not was_clean and has_synced(topic):
            mark_unverified(change, node_id)
        elif not was_clean:
            change.distrust(node_id)
        change.elect(live, unclean=allows_unclean_election(image, topic, settings))

    return edit_partitions(image, is_affected, edit)


def mark_unverified(change: PartitionEdit, node_id: int) -> None:
    """Mark the replica as unverified if it is eligible: its disk may have lost synced records, so it leads
    only after a comparison of logs (R46)."""
    change.mark_unverified(node_id)


def _forget_damaged(change: PartitionEdit, node_id: int) -> None:
    if change.before.is_only_copy(node_id):
        change.remember_damaged(node_id)
    else:
        change.forget(node_id)


def change_broker(image: ClusterImage, command: BrokerChange, *, settings: ControllerSettings) -> Decision:
    """Decide a change of a broker's state. The reply is None, or the BrokerError of ``broker_of``."""
    try:
        broker = broker_of(image, command.node_id, command.broker_epoch)
    except BrokerError as error:
        return Decision(error)
    match command:
        case FenceBroker():
            records = _fence(image, broker, settings)
        case UnfenceBroker():
            records = _unfence(image, broker, settings)
        case BeginShutdown():
            records = _begin_shutdown(image, broker)
        case LoseReplicas():
            records = _lose_replicas(image, broker, command.damaged, settings)
    return Decision(None, records)


def _fence(image: ClusterImage, broker: BrokerState, settings: ControllerSettings) -> list[MetadataRecord]:
    """Return the records that fence the broker, and end its leaderships and ISR memberships (R23, R16).

    A broker that was shutting down keeps this flag. It distinguishes an orderly stop from a broker whose
    heartbeats stopped unexpectedly.
    """
    if broker.is_fenced:
        return []
    node_id = broker.node_id
    live = image.live_brokers() - {node_id}

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        change.fence(node_id)
        change.elect(live, unclean=allows_unclean_election(image, topic, settings))

    return [
        _change(broker, is_fenced=True, is_shutting_down=broker.is_shutting_down),
        *edit_partitions(image, lambda _, state: node_id in state.isr, edit),
    ]


def _unfence(image: ClusterImage, broker: BrokerState, settings: ControllerSettings) -> list[MetadataRecord]:
    """Return the records that unfence the broker and, if possible, elect leaders of its partitions that have
    none."""
    if not broker.is_fenced:
        return []
    node_id = broker.node_id
    live = image.live_brokers() | {node_id}

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        change.elect(live, unclean=allows_unclean_election(image, topic, settings))

    return [
        _change(broker, is_fenced=False, is_shutting_down=False),
        *edit_partitions(
            image, lambda _, state: state.leader == NO_LEADER and node_id in state.replicas, edit
        ),
    ]


def _begin_shutdown(image: ClusterImage, broker: BrokerState) -> list[MetadataRecord]:
    if broker.is_fenced:
        return []
    node_id = broker.node_id
    live = image.live_brokers() - {node_id}

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        change.hand_over(node_id, live)

    records = edit_partitions(image, lambda _, state: node_id in state.isr, edit)
    if broker.is_shutting_down:
        return records
    return [_change(broker, is_fenced=False, is_shutting_down=True), *records]


def _lose_replicas(
    image: ClusterImage,
    broker: BrokerState,
    damaged: tuple[DamagedReplica, ...],
    settings: ControllerSettings,
) -> list[MetadataRecord]:
    lost = {(replica.topic_id, replica.partition) for replica in damaged}
    live = image.live_brokers()

    def edit(topic: TopicImage, number: int, change: PartitionEdit) -> None:
        if (topic.topic_id, number) not in lost:
            return
        _forget_damaged(change, broker.node_id)
        change.renew_epoch()  # the replica starts with an empty log
        change.elect(live - {broker.node_id}, unclean=allows_unclean_election(image, topic, settings))

    def is_affected(_: TopicImage, state: PartitionState) -> bool:
        node_id = broker.node_id
        return has_part_in(state, node_id) or (state.leader != NO_LEADER and node_id in state.replicas)

    return edit_partitions(image, is_affected, edit)


def has_part_in(state: PartitionState, node_id: int) -> bool:
    """Whether the broker is in the ISR, the ELR or the last known ELR of the partition."""
    return node_id in state.isr or node_id in state.elr or node_id in state.last_known_elr


def heartbeat_change(
    image: ClusterImage,
    request: BrokerHeartbeatRequest,
    fenced_offset: int = 0,
    known_damaged: Container[DamagedReplica] = (),
) -> list[BrokerChange]:
    """Return the changes that a broker's heartbeat requires; usually there are none.

    A fenced broker stays fenced until it has replayed its registration and the metadata up to
    ``fenced_offset``. ``known_damaged`` has the replicas that the broker's previous heartbeat or registration
    listed as damaged.
    """
    broker = image.brokers[request.node_id]
    node_id, broker_epoch = broker.node_id, broker.broker_epoch
    changes: list[BrokerChange] = []
    lost = tuple(
        replica
        for replica in request.damaged
        if _counts(image, node_id, replica)
        or (replica not in known_damaged and must_renew_epoch(image, node_id, replica))
    )
    if lost:
        changes.append(LoseReplicas(node_id, broker_epoch, lost))
    if request.wants_shutdown:
        if not broker.is_fenced and not (broker.is_shutting_down and may_shut_down(image, node_id)):
            changes.append(BeginShutdown(node_id, broker_epoch))
    elif (
        broker.is_fenced
        and has_replayed_registration(request, broker)
        and has_replayed_fence(request, fenced_offset)
    ):
        changes.append(UnfenceBroker(node_id, broker_epoch))
    return changes


def has_replayed_registration(request: BrokerHeartbeatRequest, broker: BrokerState) -> bool:
    """Whether the broker has replayed its own registration, so that it may be unfenced (R22)."""
    return request.metadata_offset >= broker.registration_offset


def has_replayed_fence(request: BrokerHeartbeatRequest, fenced_offset: int) -> bool:
    """Whether the broker has replayed the metadata up to ``fenced_offset``, so that it knows the leaders
    elected in its place and may be unfenced (R23)."""
    return request.metadata_offset >= fenced_offset


def _counts(image: ClusterImage, node_id: int, replica: DamagedReplica) -> bool:
    state = image.partition_of(replica.topic_id, replica.partition)
    if state is None or not has_part_in(state, node_id):
        return False
    return not state.is_only_copy(node_id) or node_id not in state.last_known_elr


def must_renew_epoch(image: ClusterImage, node_id: int, replica: DamagedReplica) -> bool:
    """Whether a replica that was found damaged needs a new leader epoch before it can start with an empty log
    (R52).

    This also holds for a replica that is not in sync, because it may have reported a position of its damaged
    log to the leader.
    """
    state = image.partition_of(replica.topic_id, replica.partition)
    return state is not None and state.leader not in (NO_LEADER, node_id) and node_id in state.replicas


def may_shut_down(image: ClusterImage, node_id: int) -> bool:
    """Whether the broker may stop: it leads no partition of which another ISR member is live."""
    live = image.live_brokers() - {node_id}
    return not any(
        state.leader == node_id and any(each in live for each in state.isr)
        for topic in image.topics.values()
        for state in topic.partitions
    )


def _change(broker: BrokerState, *, is_fenced: bool, is_shutting_down: bool) -> BrokerChangeRecord:
    return BrokerChangeRecord(broker.node_id, broker.broker_epoch, is_fenced, is_shutting_down)


def allocate_producer_ids(image: ClusterImage, command: AllocateProducerIdsRequest) -> Decision:
    """Allocate a block of producer ids that were never allocated before. The errors are those of
    ``broker_of``; the reply has their code."""
    try:
        broker_of(image, command.node_id, command.broker_epoch)
    except BrokerError as error:
        return Decision(AllocateProducerIdsResponse(*outcome(error), -1, 0))
    first = image.next_producer_id
    response = AllocateProducerIdsResponse(0, None, first, PRODUCER_ID_BLOCK_SIZE)
    return Decision(response, [ProducerIdsRecord(first + PRODUCER_ID_BLOCK_SIZE)])
