"""Which requests there are: key, versions, and the two structs of each.

Keys are Kafka's where Kafka has the API.
"""

from __future__ import annotations

import enum
from typing import Final

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


class Api(Struct):
    key: ApiKey
    request: type[Struct]
    response: type[Struct]
    min_version: int  #: inclusive
    max_version: int  #: inclusive


APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in (
        Api(ApiKey.PRODUCE, data.ProduceRequest, data.ProduceResponse, 0, 0),
        Api(ApiKey.FETCH, data.FetchRequest, data.FetchResponse, 0, 0),
        Api(ApiKey.LIST_OFFSETS, data.ListOffsetsRequest, data.ListOffsetsResponse, 0, 0),
        Api(ApiKey.METADATA, metadata.MetadataRequest, metadata.MetadataResponse, 0, 0),
        Api(ApiKey.API_VERSIONS, metadata.ApiVersionsRequest, metadata.ApiVersionsResponse, 0, 0),
        Api(ApiKey.CREATE_TOPICS, admin.CreateTopicsRequest, admin.CreateTopicsResponse, 0, 0),
        Api(ApiKey.DELETE_TOPICS, admin.DeleteTopicsRequest, admin.DeleteTopicsResponse, 0, 0),
        Api(ApiKey.DELETE_RECORDS, data.DeleteRecordsRequest, data.DeleteRecordsResponse, 0, 0),
        Api(
            ApiKey.OFFSETS_FOR_LEADER_EPOCH,
            data.OffsetsForLeaderEpochRequest,
            data.OffsetsForLeaderEpochResponse,
            0,
            0,
        ),
        Api(ApiKey.DESCRIBE_CONFIGS, admin.DescribeConfigsRequest, admin.DescribeConfigsResponse, 0, 0),
        Api(ApiKey.DESCRIBE_LOG_DIRS, admin.DescribeLogDirsRequest, admin.DescribeLogDirsResponse, 0, 0),
        Api(ApiKey.CREATE_PARTITIONS, admin.CreatePartitionsRequest, admin.CreatePartitionsResponse, 0, 0),
        Api(ApiKey.ALTER_CONFIGS, admin.AlterConfigsRequest, admin.AlterConfigsResponse, 0, 0),
        Api(ApiKey.DESCRIBE_CLUSTER, metadata.DescribeClusterRequest, metadata.DescribeClusterResponse, 0, 0),
    )
}

API_KEY_BY_REQUEST: Final[dict[type[Struct], ApiKey]] = {api.request: api.key for api in APIS.values()}


def supported_ranges() -> list[metadata.ApiVersionRange]:
    """What this build speaks, as an ApiVersions answer tells it, by ascending key."""
    return [metadata.ApiVersionRange(int(key), *APIS[key][3:]) for key in sorted(APIS)]
