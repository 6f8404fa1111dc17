"""One module per API, each with the function that answers it; and the table of them."""

from __future__ import annotations

from typing import Final

from kafkalite.broker.dispatch import Handler
from kafkalite.broker.handlers import (
    alter_configs,
    api_versions,
    create_partitions,
    create_topics,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_log_dirs,
    fetch,
    list_offsets,
    metadata,
    offsets_for_leader_epoch,
    produce,
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
}

assert HANDLERS.keys() == APIS.keys(), "every api has a handler"
