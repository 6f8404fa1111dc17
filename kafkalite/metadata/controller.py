"""The controller's decisions: (image, command) → records to commit, and the reply to send afterwards.

Commands and replies are the protocol's structs. Commands that are not sent in requests are defined in the
module that decides them: ``broker_commands``, ``partition_commands``,
``reassignment_commands`` or ``recovery``. A decision changes
nothing by itself. It is valid only for the image on which it was made, and takes effect when its records are
committed and replayed (R18). ``now_ms`` is the wall clock; it is stored in records but never compared.

Errors are Kafka's codes, usually one for each item, in the order of the request. A refused item does not
prevent the others. If a request to create topics, delete topics or add partitions names a topic more than
once, all items of this topic are refused, as in Kafka.

Deviation from Kafka: topics whose names differ only in ``.`` and ``_`` may coexist. Kafka refuses them
because its metric names would collide; kafkalite's metric names keep both characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, assert_never

from kafkalite.metadata.broker_commands import (
    BeginShutdown,
    FenceBroker,
    LoseReplicas,
    UnfenceBroker,
    allocate_producer_ids,
    change_broker,
    register_broker,
    unregister_broker,
)
from kafkalite.metadata.config_commands import alter_configs
from kafkalite.metadata.decision import ControllerSettings, Decision
from kafkalite.metadata.feature_commands import NodeRanges, update_features
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.partition_commands import (
    BalanceLeaders,
    alter_partition,
    balance_leaders,
    checkpoint_high_watermarks,
    elect_leaders,
)
from kafkalite.metadata.quota_commands import alter_client_quotas
from kafkalite.metadata.reassignment_commands import (
    ContinueReassignments,
    alter_partition_reassignments,
    continue_reassignments,
    list_partition_reassignments,
)
from kafkalite.metadata.rebalance_commands import RebalanceReplicas, rebalance_replicas
from kafkalite.metadata.recovery import (
    PartitionKey,
    RecoverLeaders,
    ReplaceShortLeaders,
    ReplicaEnd,
    recover_leaders,
    replace_short_leaders,
)
from kafkalite.metadata.security_commands import alter_user_scram_credentials, create_acls, delete_acls
from kafkalite.metadata.topic_commands import create_partitions, create_topics, delete_topics
from kafkalite.protocol.messages.admin import (
    AlterClientQuotasRequest,
    AlterConfigsRequest,
    AlterPartitionReassignmentsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from kafkalite.protocol.messages.cluster import (
    AllocateProducerIdsRequest,
    AlterPartitionRequest,
    CheckpointHighWatermarksRequest,
    RegisterBrokerRequest,
)
from kafkalite.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteAclsRequest,
)

if TYPE_CHECKING:
    from kafkalite.rng import Rng

Command = (
    CreateTopicsRequest
    | DeleteTopicsRequest
    | CreatePartitionsRequest
    | AlterConfigsRequest
    | AlterClientQuotasRequest
    | RegisterBrokerRequest
    | UnregisterBrokerRequest
    | UpdateFeaturesRequest
    | FenceBroker
    | UnfenceBroker
    | BeginShutdown
    | LoseReplicas
    | AllocateProducerIdsRequest
    | AlterPartitionRequest
    | CheckpointHighWatermarksRequest
    | ElectLeadersRequest
    | BalanceLeaders
    | AlterPartitionReassignmentsRequest
    | ListPartitionReassignmentsRequest
    | ContinueReassignments
    | RebalanceReplicas
    | RecoverLeaders
    | ReplaceShortLeaders
    | CreateAclsRequest
    | DeleteAclsRequest
    | AlterUserScramCredentialsRequest
)


def decide(
    image: ClusterImage,
    command: Command,
    *,
    now_ms: int,
    rng: Rng,
    settings: ControllerSettings,
    ends_of: Callable[[PartitionKey], Mapping[int, ReplicaEnd]] = lambda _: {},
    nodes: NodeRanges | None = None,
) -> Decision:
    """Decide ``command`` on the cluster state ``image``. Return the records and the reply.

    ``now_ms`` is the wall clock. ``ends_of`` returns, for a partition without a leader, the log ends that its
    replicas have reported. ``nodes`` has the feature levels that each node supports; None: those of the
    registered brokers are unknown.
    """
    match command:
        case AlterPartitionRequest():
            return alter_partition(image, command, settings)
        case CheckpointHighWatermarksRequest():
            return checkpoint_high_watermarks(image, command)
        case AllocateProducerIdsRequest():
            return allocate_producer_ids(image, command)
        case RegisterBrokerRequest():
            return register_broker(image, command, now_ms=now_ms, settings=settings)
        case UnregisterBrokerRequest():
            return unregister_broker(image, command, settings)
        case UpdateFeaturesRequest():
            return update_features(image, command, dict.fromkeys(image.brokers) if nodes is None else nodes)
        case FenceBroker() | UnfenceBroker() | BeginShutdown() | LoseReplicas():
            return change_broker(image, command, settings=settings)
        case CreateTopicsRequest():
            return create_topics(image, command, rng=rng, settings=settings)
        case DeleteTopicsRequest():
            return delete_topics(image, command)
        case CreatePartitionsRequest():
            return create_partitions(image, command, settings)
        case AlterConfigsRequest():
            return alter_configs(image, command, settings=settings)
        case AlterClientQuotasRequest():
            return alter_client_quotas(image, command)
        case ElectLeadersRequest():
            return elect_leaders(image, command, ends_of)
        case BalanceLeaders():
            return balance_leaders(image, command, settings=settings)
        case AlterPartitionReassignmentsRequest():
            return alter_partition_reassignments(image, command, settings)
        case ListPartitionReassignmentsRequest():
            return list_partition_reassignments(image, command)
        case ContinueReassignments():
            return continue_reassignments(image, command, settings)
        case RebalanceReplicas():
            return rebalance_replicas(image, command)
        case RecoverLeaders():
            return recover_leaders(image, command, settings)
        case ReplaceShortLeaders():
            return replace_short_leaders(image, command)
        case CreateAclsRequest():
            return create_acls(image, command)
        case DeleteAclsRequest():
            return delete_acls(image, command)
        case AlterUserScramCredentialsRequest():
            return alter_user_scram_credentials(image, command)
        case _:
            assert_never(command)
