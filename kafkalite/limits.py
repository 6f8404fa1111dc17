"""Every hard bound in one place, with its reason, and the relations between bounds asserted.

A bound here is not configurable; what users may set has its default in an options registry and its
ceiling here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- names -----------------------------------------------------------------------------------------
MAX_TOPIC_NAME_LENGTH: Final = 249  # Kafka's: leaves room for "-<partition>" in a 255-byte file name
MAX_CLIENT_ID_LENGTH: Final = 255
MAX_ERROR_MESSAGE_LENGTH: Final = 1000
MAX_TRANSACTIONAL_ID_LENGTH: Final = 1000  # also of an application id, and of a member of its group

# --- frames ----------------------------------------------------------------------------------------
FRAME_HEADER_BYTES: Final = 8  # u32 envelope length, u32 payload length
MAX_ENVELOPE_BYTES: Final = 4 * MIB  # 100,000 partitions of metadata fit
MAX_PAYLOAD_BYTES: Final = 128 * MIB  # above socket.request.max.bytes' default of 100 MiB
MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE: Final = 64 * KIB  # ApiVersions needs a hundred bytes
MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE: Final = 0
# Elements in all the arrays of one request envelope. Each becomes objects of up to 250 bytes, so
# the densest envelope that is accepted costs 25 MB, and one request may still fetch from 100,000 partitions.
MAX_ITEMS_PER_REQUEST: Final = 100_000
MAX_INTEGERS_PER_LIST: Final = 128  # replicas of a partition: read as a whole, before its count is checked
MAX_NESTING: Final = 16  # msgpack arrays in arrays; our deepest message has 5

# --- record batches --------------------------------------------------------------------------------
RECORD_BATCH_HEADER_BYTES: Final = 61
MAX_RECORDS_PER_BATCH: Final = 1_000_000
MAX_HEADERS_PER_RECORD: Final = 1_000
# What a compressed batch may unpack to. Builders keep a larger body uncompressed, so no honest batch
# is ever refused, and a bomb costs at most this.
MAX_DECOMPRESSED_BYTES: Final = 16 * MIB

# --- storage ---------------------------------------------------------------------------------------
MAX_SEGMENT_BYTES: Final = 2**31 - 1  # positions and relative offsets are stored in 32 bits
MIN_SEGMENT_BYTES: Final = 1 * KIB  # Kafka says 1 MiB; tests want many segments from little data

# --- queues ----------------------------------------------------------------------------------------
MAX_IN_FLIGHT_PER_CONNECTION: Final = 256  # requests read but not answered; reading stops above it
MAX_QUEUED_COMMANDS: Final = 10_000  # waiting for the controller; one more is told to come back later

# --- cluster ---------------------------------------------------------------------------------------
MAX_PARTITIONS_PER_TOPIC: Final = 10_000
MAX_TOPICS_PER_REQUEST: Final = 10_000
MAX_TXN_GROUP_MEMBERS: Final = 10_000  # undecided at a time: one decision writes a record for each
MAX_GROUPS_PER_REQUEST: Final = 1_000  # described or deleted: each may have a thousand members to tell of
MAX_PARTITIONS_PER_REQUEST: Final = 10_000  # added by one request: bounds one entry of the metadata log

assert MAX_PAYLOAD_BYTES + MAX_ENVELOPE_BYTES < 2**32, "both lengths of a frame fit in 32 bits"
assert MAX_PAYLOAD_BYTES < MAX_SEGMENT_BYTES, "a batch fits in a segment"
assert MAX_DECOMPRESSED_BYTES <= MAX_PAYLOAD_BYTES
assert MIN_SEGMENT_BYTES > RECORD_BATCH_HEADER_BYTES
assert MAX_PARTITIONS_PER_REQUEST >= MAX_PARTITIONS_PER_TOPIC, "a largest topic fits in a request"
