"""One module per API, each with the function that answers it; and the table of them."""

from __future__ import annotations

from typing import Final

from kafkalite.broker.dispatch import Handler
from kafkalite.broker.handlers import (
    allocate_producer_ids,
    alter_configs,
    alter_partition,
    api_versions,
    broker_heartbeat,
    broker_registration,
    checkpoint_high_watermarks,
    cluster_hello,
    cluster_proof,
    controlled_shutdown,
    create_partitions,
    create_topics,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_log_dirs,
    describe_metadata,
    describe_quorum,
    elect_leaders,
    envelope,
    fetch,
    fetch_metadata,
    init_producer_id,
    list_offsets,
    metadata,
    offsets_for_leader_epoch,
    produce,
    raft_messages,
    replica_fetch,
)
from kafkalite.protocol.api import APIS, ApiKey

HANDLERS: Final[dict[int, Handler]] = {
    ApiKey.PRODUCE: produce.handle,
    ApiKey.FETCH: fetch.handle,
    ApiKey.LIST_OFFSETS: list_offsets.handle,
    ApiKey.METADATA: metadata.handle,
    ApiKey.API_VERSIONS: api_versions.handle,
    ApiKey.CREATE_TOPICS: create_topics.handle,
    ApiKey.DELETE_TOPICS: delete_topics.handle,
    ApiKey.DELETE_RECORDS: delete_records.handle,
    ApiKey.OFFSETS_FOR_LEADER_EPOCH: offsets_for_leader_epoch.handle,
    ApiKey.DESCRIBE_CONFIGS: describe_configs.handle,
    ApiKey.DESCRIBE_LOG_DIRS: describe_log_dirs.handle,
    ApiKey.CREATE_PARTITIONS: create_partitions.handle,
    ApiKey.ALTER_CONFIGS: alter_configs.handle,
    ApiKey.DESCRIBE_CLUSTER: describe_cluster.handle,
    ApiKey.CONTROLLED_SHUTDOWN: controlled_shutdown.handle,
    ApiKey.INIT_PRODUCER_ID: init_producer_id.handle,
    ApiKey.ELECT_LEADERS: elect_leaders.handle,
    ApiKey.DESCRIBE_QUORUM: describe_quorum.handle,
    ApiKey.ALTER_PARTITION: alter_partition.handle,
    ApiKey.ENVELOPE: envelope.handle,
    ApiKey.BROKER_REGISTRATION: broker_registration.handle,
    ApiKey.BROKER_HEARTBEAT: broker_heartbeat.handle,
    ApiKey.ALLOCATE_PRODUCER_IDS: allocate_producer_ids.handle,
    ApiKey.CLUSTER_HELLO: cluster_hello.handle,
    ApiKey.CLUSTER_PROOF: cluster_proof.handle,
    ApiKey.RAFT_MESSAGES: raft_messages.handle,
    ApiKey.REPLICA_FETCH: replica_fetch.handle,
    ApiKey.CHECKPOINT_HIGH_WATERMARKS: checkpoint_high_watermarks.handle,
    ApiKey.DESCRIBE_METADATA: describe_metadata.handle,
    ApiKey.FETCH_METADATA: fetch_metadata.handle,
}

assert HANDLERS.keys() == APIS.keys(), "every api has a handler"
