"""Which requests there are: key, versions, and the two structs of each.

Keys are Kafka's where Kafka has the API.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from kafkalite.protocol.messages import admin, data, metadata
from kafkalite.protocol.structs import Struct


class ApiKey(enum.IntEnum):
    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    OFFSETS_FOR_LEADER_EPOCH = 23
    DESCRIBE_CONFIGS = 32
    DESCRIBE_LOG_DIRS = 35
    CREATE_PARTITIONS = 37
    ALTER_CONFIGS = 44  # Kafka's IncrementalAlterConfigs
    DESCRIBE_CLUSTER = 60


class Api(NamedTuple):
    key: ApiKey
    request: type[Struct]
    response: type[Struct]
    min_version: int = 0  #: inclusive
    max_version: int = 0  #: inclusive


APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in (
        Api(ApiKey.PRODUCE, data.ProduceRequest, data.ProduceResponse),
        Api(ApiKey.FETCH, data.FetchRequest, data.FetchResponse),
        Api(ApiKey.LIST_OFFSETS, data.ListOffsetsRequest, data.ListOffsetsResponse),
        Api(ApiKey.METADATA, metadata.MetadataRequest, metadata.MetadataResponse),
        Api(ApiKey.API_VERSIONS, metadata.ApiVersionsRequest, metadata.ApiVersionsResponse),
        Api(ApiKey.CREATE_TOPICS, admin.CreateTopicsRequest, admin.CreateTopicsResponse),
        Api(ApiKey.DELETE_TOPICS, admin.DeleteTopicsRequest, admin.DeleteTopicsResponse),
        Api(ApiKey.DELETE_RECORDS, data.DeleteRecordsRequest, data.DeleteRecordsResponse),
        Api(
            ApiKey.OFFSETS_FOR_LEADER_EPOCH,
            data.OffsetsForLeaderEpochRequest,
            data.OffsetsForLeaderEpochResponse,
        ),
        Api(ApiKey.DESCRIBE_CONFIGS, admin.DescribeConfigsRequest, admin.DescribeConfigsResponse),
        Api(ApiKey.DESCRIBE_LOG_DIRS, admin.DescribeLogDirsRequest, admin.DescribeLogDirsResponse),
        Api(ApiKey.CREATE_PARTITIONS, admin.CreatePartitionsRequest, admin.CreatePartitionsResponse),
        Api(ApiKey.ALTER_CONFIGS, admin.AlterConfigsRequest, admin.AlterConfigsResponse),
        Api(ApiKey.DESCRIBE_CLUSTER, metadata.DescribeClusterRequest, metadata.DescribeClusterResponse),
    )
}

API_KEY_BY_REQUEST: Final[dict[type[Struct], ApiKey]] = {api.request: api.key for api in APIS.values()}


def supported_ranges() -> list[metadata.ApiVersionRange]:
    """What this build speaks, as an ApiVersions answer tells it, by ascending key."""
    return [metadata.ApiVersionRange(int(key), *APIS[key][3:]) for key in sorted(APIS)]
