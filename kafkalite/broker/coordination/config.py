"""The settings of coordinators: groups, offsets, transactions, and the topics that these are kept in."""

from __future__ import annotations

from dataclasses import dataclass

from kafkalite.broker.cluster.config import ClusterConfig
from kafkalite.errors import ConfigError
from kafkalite.limits import MAX_PARTITIONS_PER_TOPIC, MAX_SEGMENT_BYTES, MIB, MIN_SEGMENT_BYTES
from kafkalite.options import option_field

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(ClusterConfig):
    """The part of a broker's settings that its coordinators go by."""

    # --- behaviour: committed offsets
    offsets_topic_num_partitions: int = option_field(
        "offsets.topic.num.partitions",
        "int",
        50,
        "Partitions of __consumer_offsets when it is created, over which groups are spread; 4 on a broker"
        " that keeps everything in memory. Does not change afterwards.",
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
    )
    offsets_topic_replication_factor: int = option_field(
        "offsets.topic.replication.factor",
        "int",
        3,
        "Replicas of __consumer_offsets when it is created; fewer if fewer brokers are alive.",
        minimum=1,
        maximum=2**15 - 1,
    )
    offsets_topic_segment_bytes: int = option_field(
        "offsets.topic.segment.bytes",
        "int",
        100 * MIB,
        "segment.bytes of __consumer_offsets: small ones are compacted and loaded sooner.",
        minimum=MIN_SEGMENT_BYTES,
        maximum=MAX_SEGMENT_BYTES,
    )
    offsets_retention_minutes: int = option_field(
        "offsets.retention.minutes",
        "int",
        10_080,
        "How long the offsets of a group without members are kept.",
        minimum=1,
        maximum=_MAX_INT32,
    )
    offsets_retention_check_interval_ms: int = option_field(
        "offsets.retention.check.interval.ms",
        "int",
        600_000,
        "How often a coordinator looks for offsets that have expired.",
        minimum=1,
    )
    offset_metadata_max_bytes: int = option_field(
        "offset.metadata.max.bytes",
        "int",
        4_096,
        "The longest text that may be committed with an offset.",
        minimum=0,
        maximum=MIB,
    )

    # --- behaviour: consumer groups
    group_consumer_session_timeout_ms: int = option_field(
        "group.consumer.session.timeout.ms",
        "int",
        45_000,
        "A member of a group that was not heard of for so long is expelled.",
        minimum=1,
    )
    group_consumer_heartbeat_interval_ms: int = option_field(
        "group.consumer.heartbeat.interval.ms",
        "int",
        5_000,
        "How often members are told to send heartbeats.",
        minimum=1,
    )
    group_consumer_assignors: tuple[str, ...] = option_field(
        "group.consumer.assignors",
        "list",
        ("uniform", "range"),
        "How partitions may be spread over members: uniform, range. The first is the one for members that ask"
        " for none.",
    )
    group_max_size: int = option_field(
        "group.max.size", "int", _MAX_INT32, "The most members that a group may have.", minimum=1
    )

    # --- behaviour: transactions
    transaction_state_log_num_partitions: int = option_field(
        "transaction.state.log.num.partitions",
        "int",
        50,
        "Partitions of __transaction_state when it is created, over which transactional ids are spread; 4 on"
        " a broker that keeps everything in memory. Does not change afterwards.",
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
    )
    transaction_state_log_replication_factor: int = option_field(
        "transaction.state.log.replication.factor",
        "int",
        3,
        "Replicas of __transaction_state when it is created; fewer if fewer brokers are alive.",
        minimum=1,
        maximum=2**15 - 1,
    )
    transaction_state_log_min_isr: int = option_field(
        "transaction.state.log.min.isr",
        "int",
        2,
        "min.insync.replicas of __transaction_state and __consumer_offsets when they are created; at most"
        " their replicas.",
        minimum=1,
        maximum=2**15 - 1,
    )
    transaction_state_log_segment_bytes: int = option_field(
        "transaction.state.log.segment.bytes",
        "int",
        100 * MIB,
        "segment.bytes of __transaction_state.",
        minimum=MIN_SEGMENT_BYTES,
        maximum=MAX_SEGMENT_BYTES,
    )
    transactional_id_expiration_ms: int = option_field(
        "transactional.id.expiration.ms",
        "int",
        604_800_000,
        "How long a transactional id, or a retired transaction group, is remembered that does nothing.",
        minimum=1,
    )
    transaction_max_timeout_ms: int = option_field(
        "transaction.max.timeout.ms",
        "int",
        900_000,
        "The longest transaction.timeout.ms that a producer may ask for.",
        minimum=1,
    )
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = option_field(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        "int",
        10_000,
        "Taken, as Kafka has it, and without effect: a transaction is aborted as soon as its time is over.",
        minimum=1,
    )

    def check_coordinators(self) -> None:
        """Raises ConfigError where two settings cannot both hold."""
        if self.group_consumer_heartbeat_interval_ms >= self.group_consumer_session_timeout_ms:
            raise ConfigError(
                key="group.consumer.heartbeat.interval.ms",
                value=self.group_consumer_heartbeat_interval_ms,
                allowed="less than group.consumer.session.timeout.ms, "
                f"{self.group_consumer_session_timeout_ms}",
            )
        assignors = self.group_consumer_assignors
        if not assignors or not set(assignors) <= {"uniform", "range"}:
            raise ConfigError(
                key="group.consumer.assignors",
                value=",".join(assignors),
                allowed="uniform, range, or both",
            )
