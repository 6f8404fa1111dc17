"""All fixed limits with their reasons, and assertions on the relations between them.

A limit here is not configurable. The default of a configurable value is in an option registry, its
maximum here.
"""

# Tests: tests/protocol/test_codec_properties.py

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- names -----------------------------------------------------------------------------------------
MAX_TOPIC_NAME_LENGTH: Final = 249  # as in Kafka: leaves room for "-<partition>" in a 255-byte file name
MAX_CLIENT_ID_LENGTH: Final = 255
MAX_ERROR_MESSAGE_LENGTH: Final = 1000
MAX_TRANSACTIONAL_ID_LENGTH: Final = (
    1000  # also of application ids and of writer names in a transaction group
)

# --- frames ----------------------------------------------------------------------------------------
FRAME_HEADER_BYTES: Final = 8  # u32 envelope length, u32 payload length
MAX_ENVELOPE_BYTES: Final = 4 * MIB  # room for the metadata of 100,000 partitions
MAX_PAYLOAD_BYTES: Final = 128 * MIB  # above socket.request.max.bytes' default of 100 MiB
MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE: Final = 64 * KIB  # ApiVersions needs about a hundred
MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE: Final = 0
# Elements in all arrays of one request envelope. Each becomes objects of up to 250 bytes, so the densest
# accepted envelope costs 25 MB, and one request may still fetch from 100,000 partitions.
MAX_ITEMS_PER_REQUEST: Final = 100_000
MAX_INTEGERS_PER_LIST: Final = 128  # replicas of a partition: decoded before the count is checked
MAX_NESTING: Final = 16  # nested msgpack arrays; the deepest message has 5

# --- record batches --------------------------------------------------------------------------------
RECORD_BATCH_HEADER_BYTES: Final = 61
MAX_RECORDS_PER_BATCH: Final = 1_000_000
MAX_HEADERS_PER_RECORD: Final = 1_000
# The largest decompressed size of a batch. Builders leave larger bodies uncompressed, so no valid batch is
# refused, and a decompression bomb costs at most this.
MAX_DECOMPRESSED_BYTES: Final = 16 * MIB

# --- storage ---------------------------------------------------------------------------------------
MAX_SEGMENT_BYTES: Final = 2**31 - 1  # positions and relative offsets are stored in 32 bits
MIN_SEGMENT_BYTES: Final = 1 * KIB  # Kafka's is 1 MiB; small segments let tests use many

# --- queues ----------------------------------------------------------------------------------------
MAX_IN_FLIGHT_PER_CONNECTION: Final = 256  # requests without a response; reading stops above it
MAX_QUEUED_COMMANDS: Final = 10_000  # waiting for the controller; further commands must be retried

# --- cluster ---------------------------------------------------------------------------------------
MAX_PARTITIONS_PER_TOPIC: Final = 10_000
MAX_TOPICS_PER_REQUEST: Final = 10_000
MAX_TXN_GROUP_MEMBERS: Final = 10_000  # undecided at a time, because one decision writes a record for each
MAX_GROUPS_PER_REQUEST: Final = 1_000  # described or deleted: each may have a thousand members
MAX_PARTITIONS_PER_REQUEST: Final = 10_000  # added by one request: bounds one entry of the metadata log

assert MAX_PAYLOAD_BYTES + MAX_ENVELOPE_BYTES < 2**32, "both lengths of a frame fit in 32 bits"
assert MAX_PAYLOAD_BYTES < MAX_SEGMENT_BYTES, "a batch fits in a segment"
assert MAX_DECOMPRESSED_BYTES <= MAX_PAYLOAD_BYTES
assert MIN_SEGMENT_BYTES > RECORD_BATCH_HEADER_BYTES
assert MAX_PARTITIONS_PER_REQUEST >= MAX_PARTITIONS_PER_TOPIC, "a largest topic fits in a request"
