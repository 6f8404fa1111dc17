"""The blocking twin of Admin."""

from __future__ import annotations

from kafkalite.client.admin import admin as async_admin
from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of


@twin_of(async_admin.Admin)
class Admin(Twin[async_admin.Admin]):
    """Administers a cluster. The blocking twin of ``kafkalite.Admin``, with the same arguments."""

    @opened_with(async_admin.Admin)
    def __init__(self, original: async_admin.Admin) -> None:
        super().__init__(original)

    create_topic = blocking(async_admin.Admin.create_topic)
    create_topics = blocking(async_admin.Admin.create_topics)
    delete_topics = blocking(async_admin.Admin.delete_topics)
    list_topics = blocking(async_admin.Admin.list_topics)
    describe_topics = blocking(async_admin.Admin.describe_topics)
    describe_topic = blocking(async_admin.Admin.describe_topic)
    create_partitions = blocking(async_admin.Admin.create_partitions)
    describe_configs = blocking(async_admin.Admin.describe_configs)
    alter_configs = blocking(async_admin.Admin.alter_configs)
    describe_client_quotas = blocking(async_admin.Admin.describe_client_quotas)
    alter_client_quotas = blocking(async_admin.Admin.alter_client_quotas)
    list_offsets = blocking(async_admin.Admin.list_offsets)
    delete_records = blocking(async_admin.Admin.delete_records)
    describe_cluster = blocking(async_admin.Admin.describe_cluster)
    describe_quorum = blocking(async_admin.Admin.describe_quorum)
    describe_metadata = blocking(async_admin.Admin.describe_metadata)
    elect_leaders = blocking(async_admin.Admin.elect_leaders)
    alter_partition_reassignments = blocking(async_admin.Admin.alter_partition_reassignments)
    list_partition_reassignments = blocking(async_admin.Admin.list_partition_reassignments)
    unregister_broker = blocking(async_admin.Admin.unregister_broker)
    describe_features = blocking(async_admin.Admin.describe_features)
    update_features = blocking(async_admin.Admin.update_features)
    add_raft_voter = blocking(async_admin.Admin.add_raft_voter)
    remove_raft_voter = blocking(async_admin.Admin.remove_raft_voter)
    controlled_shutdown = blocking(async_admin.Admin.controlled_shutdown)
    describe_log_dirs = blocking(async_admin.Admin.describe_log_dirs)
    describe_directories = blocking(async_admin.Admin.describe_directories)
    alter_replica_log_dirs = blocking(async_admin.Admin.alter_replica_log_dirs)

    create_acls = blocking(async_admin.Admin.create_acls)
    describe_acls = blocking(async_admin.Admin.describe_acls)
    delete_acls = blocking(async_admin.Admin.delete_acls)
    describe_users = blocking(async_admin.Admin.describe_users)
    set_user_password = blocking(async_admin.Admin.set_user_password)
    delete_user = blocking(async_admin.Admin.delete_user)

    list_groups = blocking(async_admin.Admin.list_groups)
    describe_group = blocking(async_admin.Admin.describe_group)
    committed_offsets = blocking(async_admin.Admin.committed_offsets)
    group_lag = blocking(async_admin.Admin.group_lag)
    alter_group_offsets = blocking(async_admin.Admin.alter_group_offsets)
    delete_group_offsets = blocking(async_admin.Admin.delete_group_offsets)
    delete_groups = blocking(async_admin.Admin.delete_groups)

    list_transactions = blocking(async_admin.Admin.list_transactions)
    describe_transaction = blocking(async_admin.Admin.describe_transaction)
    describe_transaction_group = blocking(async_admin.Admin.describe_transaction_group)
    retire_transaction_group = blocking(async_admin.Admin.retire_transaction_group)
    abort_transaction = blocking(async_admin.Admin.abort_transaction)
    describe_producers = blocking(async_admin.Admin.describe_producers)
    find_hanging_transactions = blocking(async_admin.Admin.find_hanging_transactions)
    abort_hanging_transaction = blocking(async_admin.Admin.abort_hanging_transaction)
