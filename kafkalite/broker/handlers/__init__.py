"""The handlers of requests, in one module for each family of messages, and the table of handlers by api."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafkalite.broker.handlers import (
    admin,
    cluster,
    data,
    fetch,
    groups,
    metadata,
    produce,
    replica_fetch,
    security,
    transactions,
)
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.responses import HandlerResult
from kafkalite.broker.server.turns import by_turns
from kafkalite.broker.services import Services
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import Request

HANDLERS: Final[dict[int, Callable[[Services, Request, Client], HandlerResult]]] = {
    # data
    ApiKey.PRODUCE: produce.produce,
    ApiKey.FETCH: fetch.fetch,
    ApiKey.LIST_OFFSETS: by_turns(data.list_offsets),
    ApiKey.DELETE_RECORDS: by_turns(data.delete_records),
    ApiKey.OFFSETS_FOR_BYTES: by_turns(data.offsets_for_bytes),
    ApiKey.OFFSETS_FOR_LEADER_EPOCH: by_turns(data.offsets_for_leader_epoch),
    ApiKey.INIT_PRODUCER_ID: data.init_producer_id,
    # admin
    ApiKey.CREATE_TOPICS: admin.create_topics,
    ApiKey.DELETE_TOPICS: admin.delete_topics,
    ApiKey.DESCRIBE_CONFIGS: admin.describe_configs,
    ApiKey.ALTER_REPLICA_LOG_DIRS: admin.alter_replica_log_dirs,
    ApiKey.DESCRIBE_LOG_DIRS: admin.describe_log_dirs,
    ApiKey.CREATE_PARTITIONS: admin.create_partitions,
    ApiKey.ALTER_CONFIGS: admin.alter_configs,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: admin.describe_client_quotas,
    ApiKey.ALTER_CLIENT_QUOTAS: admin.alter_client_quotas,
    ApiKey.CONTROLLED_SHUTDOWN: admin.controlled_shutdown,
    ApiKey.ELECT_LEADERS: admin.elect_leaders,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: admin.alter_partition_reassignments,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: admin.list_partition_reassignments,
    ApiKey.UNREGISTER_BROKER: admin.unregister_broker,
    ApiKey.UPDATE_FEATURES: admin.update_features,
    ApiKey.ADD_RAFT_VOTER: admin.add_raft_voter,
    ApiKey.REMOVE_RAFT_VOTER: admin.remove_raft_voter,
    # metadata
    ApiKey.METADATA: metadata.metadata,
    ApiKey.API_VERSIONS: metadata.api_versions,
    ApiKey.DESCRIBE_CLUSTER: metadata.describe_cluster,
    ApiKey.DESCRIBE_QUORUM: metadata.describe_quorum,
    ApiKey.DESCRIBE_METADATA: metadata.describe_metadata,
    # cluster
    ApiKey.ALTER_PARTITION: cluster.decide,
    ApiKey.ENVELOPE: cluster.envelope,
    ApiKey.BROKER_REGISTRATION: cluster.decide,
    ApiKey.BROKER_HEARTBEAT: cluster.broker_heartbeat,
    ApiKey.ALLOCATE_PRODUCER_IDS: cluster.decide,
    ApiKey.CLUSTER_HELLO: cluster.cluster_hello,
    ApiKey.CLUSTER_PROOF: cluster.cluster_proof,
    ApiKey.RAFT_MESSAGES: cluster.raft_messages,
    ApiKey.REPLICA_FETCH: replica_fetch.replica_fetch,
    ApiKey.CHECKPOINT_HIGH_WATERMARKS: cluster.decide,
    ApiKey.REPORT_REPLICAS: cluster.decide,
    ApiKey.DESCRIBE_RECOVERY: metadata.describe_recovery,
    ApiKey.DESCRIBE_FEATURES: metadata.describe_features,
    ApiKey.FETCH_METADATA: cluster.fetch_metadata,
    # security
    ApiKey.SASL_HANDSHAKE: security.sasl_handshake,
    ApiKey.SASL_AUTHENTICATE: security.sasl_authenticate,
    ApiKey.CREATE_ACLS: security.change_security,
    ApiKey.DELETE_ACLS: security.change_security,
    ApiKey.DESCRIBE_ACLS: security.describe_acls,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: security.alter_user_scram_credentials,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: security.describe_user_scram_credentials,
    # groups
    ApiKey.CONSUMER_GROUP_HEARTBEAT: groups.consumer_group_heartbeat,
    ApiKey.DELETE_GROUPS: groups.delete_groups,
    ApiKey.DESCRIBE_GROUPS: groups.describe_groups,
    ApiKey.FIND_COORDINATOR: groups.find_coordinator,
    ApiKey.LIST_GROUPS: groups.list_groups,
    ApiKey.OFFSET_COMMIT: groups.offset_commit,
    ApiKey.OFFSET_DELETE: groups.offset_delete,
    ApiKey.OFFSET_FETCH: groups.offset_fetch,
    ApiKey.TXN_OFFSET_COMMIT: groups.txn_offset_commit,
    # transactions
    ApiKey.DESCRIBE_PRODUCERS: by_turns(transactions.describe_producers),
    ApiKey.ABORT_TRANSACTION: transactions.abort_transaction,
    ApiKey.ADD_PARTITIONS_TO_TXN: transactions.add_partitions_to_txn,
    ApiKey.DESCRIBE_TRANSACTIONS: transactions.describe_transactions,
    ApiKey.DESCRIBE_TXN_GROUP: transactions.describe_txn_group,
    ApiKey.END_TXN: transactions.end_txn,
    ApiKey.END_TXN_GROUP: transactions.end_txn_group,
    ApiKey.JOIN_TXN_GROUP: transactions.join_txn_group,
    ApiKey.LIST_TRANSACTIONS: transactions.list_transactions,
    ApiKey.RETIRE_TXN_GROUP: transactions.retire_txn_group,
    ApiKey.WRITE_TXN_MARKERS: transactions.write_txn_markers,
}

assert HANDLERS.keys() == APIS.keys(), "every api has a handler"
