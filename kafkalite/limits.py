"""Limits that are not configurable, and assertions about the relations between them.

Some of them are the maximum or the minimum of an option, whose default is declared with the option.
"""

# Tests: tests/protocol/test_codec_properties.py

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_TOPIC_NAME_LENGTH: Final = 249  # as in Kafka: leaves room for "-<partition>" in a 255-byte file name
MAX_CLIENT_ID_LENGTH: Final = 255
MAX_ERROR_MESSAGE_LENGTH: Final = 1000
MAX_TRANSACTIONAL_ID_LENGTH: Final = (
    1000  # also of application ids and of writer names in a transaction group
)

FRAME_HEADER_BYTES: Final = 8  # u32 envelope length, u32 payload length
MAX_ENVELOPE_BYTES: Final = 4 * MIB  # room for the metadata of 100,000 partitions
MAX_PAYLOAD_BYTES: Final = 128 * MIB  # above socket.request.max.bytes' default of 100 MiB
MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE: Final = 64 * KIB  # an ApiVersions request takes about 100 bytes
MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE: Final = 0
# The maximum number of elements in all arrays of one request envelope. Each element becomes objects of up to
# 250 bytes, so an envelope costs 25 MB at most. A client's request may name fewer partitions
# (max.request.partition.size.limit).
MAX_ITEMS_PER_REQUEST: Final = 100_000
MAX_INTEGERS_PER_LIST: Final = 128  # replicas of a partition; not counted until the list is decoded
MAX_ENTRIES_PER_MAP: Final = 128  # options of a new topic, of which there are fewer
MAX_NESTING: Final = 16  # levels of nested msgpack arrays; the deepest message has 5

RECORD_BATCH_HEADER_BYTES: Final = 61
MAX_RECORDS_PER_BATCH: Final = 1_000_000
MAX_HEADERS_PER_RECORD: Final = 1_000
# ``max.message.bytes`` of internal topics. Each decision, such as an assignment of 10,000 partitions, is one
# batch.
MAX_INTERNAL_BATCH_BYTES: Final = 32 * MIB
# The largest decompressed size of a batch. Builders store larger bodies uncompressed, so no valid batch is
# refused, and a decompression bomb allocates this much at most.
MAX_DECOMPRESSED_BYTES: Final = 16 * MIB

MAX_SEGMENT_BYTES: Final = 2**31 - 1  # positions and relative offsets are stored in 32 bits
MIN_SEGMENT_BYTES: Final = 1 * KIB  # Kafka's minimum is 1 MiB; tests need small segments

MAX_IN_FLIGHT_PER_CONNECTION: Final = 256  # requests without a response; at the limit, reading stops
MAX_QUEUED_COMMANDS: Final = 10_000  # commands that wait for the controller; more fail with a retriable error

# The longest time that a broker holds a request to wait for data, a change, replicas or the controller. A
# request for a longer wait is held for this time, which is the default of connections.max.idle.ms.
MAX_WAIT_MS: Final = 600_000
MAX_REBALANCE_TIMEOUT_MS: Final = 24 * 60 * 60 * 1_000  # how long a member may hold a revoked partition

MAX_PARTITIONS_PER_TOPIC: Final = 10_000
MAX_PRODUCERS_PER_PARTITION: Final = 100_000  # with idempotence; each takes about 1 KB until it expires
MAX_TOPICS_PER_REQUEST: Final = 10_000
MAX_TXN_GROUP_MEMBERS: Final = 10_000  # writers with an open transaction; finish() writes a record for each
MAX_RESOURCES_PER_REQUEST: Final = 200  # in DescribeConfigs: each has about 40 options of 200 bytes
MAX_GROUPS_PER_REQUEST: Final = 1_000  # in requests to describe or delete; a group may have 1,000 members
MAX_OWNED_PER_REQUEST: Final = 20_000  # in a heartbeat: parts of topics, with up to 128 partitions each
MAX_KEYS: Final = 1_000  # in FindCoordinator
MAX_IDS: Final = 1_000  # in DescribeTransactions
MAX_STATES_PER_REQUEST: Final = 16  # in ListGroups and ListTransactions; there are fewer states
MAX_FEATURES_PER_REQUEST: Final = 16  # levels to finalise; there are fewer features
MAX_QUOTA_PARTS: Final = 16  # of an entity or a filter, and quotas of an entity; there are fewer
MAX_ACLS: Final = 10_000  # of the cluster; every node keeps them in memory, about 1 KB each
MAX_ACLS_PER_REQUEST: Final = 1_000  # ACLs or credentials in a request that changes them
MAX_USERS_PER_REQUEST: Final = 1_000  # in DescribeUserScramCredentials
MAX_CREDENTIALS: Final = 10_000  # of users; one for each user and mechanism
MAX_USER_NAME_BYTES: Final = 255  # in UTF-8, so that a response can list all users
MAX_PARTITIONS_PER_REQUEST: Final = 10_000  # to create; bounds the size of one entry in the metadata log

assert MAX_PAYLOAD_BYTES + MAX_ENVELOPE_BYTES < 2**32, "both lengths of a frame fit in 32 bits"
assert MAX_PAYLOAD_BYTES < MAX_SEGMENT_BYTES, "a batch fits in a segment"
assert MAX_DECOMPRESSED_BYTES <= MAX_PAYLOAD_BYTES
assert MIN_SEGMENT_BYTES > RECORD_BATCH_HEADER_BYTES
assert MAX_PARTITIONS_PER_REQUEST >= MAX_PARTITIONS_PER_TOPIC, "a largest topic fits in a request"


def bounded_wait_ms(wait_ms: int) -> int:
    """Return how long a request that asks for ``wait_ms`` may wait: at most MAX_WAIT_MS (S25)."""
    return min(wait_ms, MAX_WAIT_MS)
