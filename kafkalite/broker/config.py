"""BrokerConfig: every setting of a broker, with its name, type, default, bounds and documentation.

``BROKER_OPTIONS`` lists them. ``load_settings`` reads them from a TOML file, environment variables and flags.
"""

# Long because it is the one list of a broker's options.

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from kafkalite.broker.addresses import (
    CONTROLLER,
    is_wildcard,
    parse_address,
    parse_protocol_map,
    parse_voters,
    split_list,
)
from kafkalite.broker.quotas.address_limits import parse_overrides
from kafkalite.client.config import CLIENT_VARIABLES
from kafkalite.errors import ConfigError, InvalidRequestError
from kafkalite.limits import (
    KIB,
    MAX_ITEMS_PER_REQUEST,
    MAX_PARTITIONS_PER_TOPIC,
    MAX_PAYLOAD_BYTES,
    MAX_SEGMENT_BYTES,
    MIB,
    MIN_SEGMENT_BYTES,
)
from kafkalite.metadata.decision import ControllerSettings
from kafkalite.metadata.throttles import FOLLOWER_RATE, LEADER_RATE
from kafkalite.metadata.topic_config import (
    BROKER_DEFAULT_NAMES,
    BROKER_DEFAULT_OPTIONS,
    DYNAMIC_BROKER_OPTIONS,
    TOPIC_OPTIONS,
    topic_defaults,
)
from kafkalite.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from kafkalite.options import Option, option_field, options_of
from kafkalite.security.acls import check_principal, super_users_of
from kafkalite.security.principal_mapping import DEFAULT_RULES, PrincipalMapping
from kafkalite.security.sasl import REVEALING, SCRAM
from kafkalite.suggestions import did_you_mean
from kafkalite.tls_options import (
    CLIENT_AUTH,
    OAUTHBEARER,
    PLAINTEXT,
    SASL_MECHANISMS,
    ClientAuth,
    check_versions,
    tls_field,
)
from kafkalite.transport import is_tls, needs_login, security_scheme

ENVIRONMENT_PREFIX: Final = "KAFKALITE_"
DEFAULT_LISTENERS: Final = ("127.0.0.1:9092",)
EMBEDDED_LISTENERS: Final = ("127.0.0.1:0",)

BROKER_ROLE: Final = "broker"
CONTROLLER_ROLE: Final = "controller"
ROLES: Final = (BROKER_ROLE, CONTROLLER_ROLE)
#: In characters. Whoever observes a handshake could find a shorter secret by trial.
MIN_SECRET_LENGTH: Final = 16
_MAX_INT32: Final = 2**31 - 1

# {Kafka's name of an option in a coarser unit: (name of the option in ms, the unit in ms)}. If several are
# given, the finest unit takes precedence.
_COARSE: Final[dict[str, tuple[str, int]]] = {
    "log.retention.minutes": ("log.retention.ms", 60_000),
    "log.retention.hours": ("log.retention.ms", 3_600_000),
    "log.roll.hours": ("log.roll.ms", 3_600_000),
    "log.roll.jitter.hours": ("log.roll.jitter.ms", 3_600_000),
}
#: The attributes that are lists, but not of addresses.
_LISTS: Final = (
    "process_roles",
    "controller_quorum_voters",
    "controller_quorum_bootstrap_servers",
    "group_consumer_assignors",
    "listener_security_protocol_map",
    "ssl_enabled_protocols",
    "sasl_enabled_mechanisms",
    "sasl_oauthbearer_expected_audience",
)
_TOPIC_DEFAULTS: Final = tuple(name for name in BROKER_DEFAULT_NAMES if name not in _COARSE)


def _topic_default(name: str) -> Any:
    """Return a dataclass field for the broker setting that is the default of a topic option."""
    topic_option = TOPIC_OPTIONS.get(BROKER_DEFAULT_NAMES[name].topic_name)
    option = dataclasses.replace(BROKER_DEFAULT_OPTIONS.get(name), default=topic_option.default)
    return dataclasses.field(default=option.default, metadata={"option": option})


def _dynamic(name: str) -> Any:
    """Return a dataclass field for a broker setting that can also be changed while the broker runs."""
    option = DYNAMIC_BROKER_OPTIONS.get(name)
    return dataclasses.field(default=option.default, metadata={"option": option})


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """A broker's settings, checked for contradictions. ``from_settings`` also checks the bounds of values."""

    # --- behaviour: the node
    node_id: int = option_field(
        1, "The number of this node in its cluster.", minimum=0, maximum=2**31 - 1, aliases=("broker.id",)
    )
    process_roles: tuple[str, ...] = option_field(
        ROLES,
        "The roles of this node: broker (stores partitions, serves clients), controller (votes in the "
        "metadata quorum), or both.",
    )
    cluster_id: str | None = option_field(
        None,
        "The cluster this node belongs to; a data directory of another cluster is refused. Unset takes the "
        "directory's id, or generates one; all nodes of a cluster need the same.",
    )
    cluster_secret: str | None = option_field(
        None,
        f"The secret by which the nodes of a cluster authenticate each other: at least {MIN_SECRET_LENGTH} "
        "characters, the same on every node. Never shown.",
        is_secret=True,
    )
    controller_quorum_voters: tuple[str, ...] = option_field(
        (),
        "The controllers, the same list on every node: node.id@host:port, separated by commas. They are the "
        "first voters of the metadata quorum, which 'kl metadata quorum add-voter' can change later. "
        "Unset: this node is a cluster of its own, unless controller.quorum.bootstrap.servers is set.",
    )
    controller_quorum_bootstrap_servers: tuple[str, ...] = option_field(
        (),
        "Controllers of a running cluster which this node joins, instead of controller.quorum.voters: "
        "node.id@host:port, separated by commas. A controller follows their metadata log as an observer "
        "until 'kl metadata quorum add-voter' makes it a voter.",
    )
    controller_listeners: tuple[str, ...] = option_field(
        (),
        "Where a controller listens for the other nodes. Unset: at its address in controller.quorum.voters "
        "or controller.quorum.bootstrap.servers.",
    )
    controller_quorum_rejoin: bool = option_field(
        False,
        "Lets a controller start whose metadata log is gone because its disk was replaced: it fetches "
        "everything from the others before it votes again. Set it for one start only.",
    )
    broker_rack: str | None = option_field(
        None, "The rack of this node, such as a data centre or an availability zone."
    )
    replica_selector_class: str = option_field(
        "LeaderSelector",
        "RackAwareReplicaSelector directs consumers with a client.rack to an in-sync follower in that rack "
        "(KIP-392). LeaderSelector lets all consumers read from leaders. Set it on every broker.",
        choices=("LeaderSelector", "RackAwareReplicaSelector"),
    )

    # --- behaviour: liveness and failover
    broker_heartbeat_interval_ms: int = option_field(
        500, "How often a broker sends a heartbeat to the controller.", minimum=1
    )
    broker_session_timeout_ms: int = option_field(
        3_000, "A broker that sends no heartbeat for this long is fenced: it leads no partition.", minimum=1
    )
    controller_quorum_election_timeout_ms: int = option_field(
        500,
        "A controller that receives nothing from the active one for this long, randomly up to twice as long, "
        "stands for election.",
        minimum=10,
    )
    controller_quorum_fetch_timeout_ms: int = option_field(
        1_000,
        "An active controller that receives nothing from a majority for this long steps down.",
        minimum=10,
    )
    metadata_log_max_record_bytes_between_snapshots: int = option_field(
        MIB,
        "A snapshot replaces the metadata log when the log has this many bytes, and at least as many as the "
        "last snapshot.",
        minimum=KIB,
    )
    controlled_shutdown_enable: bool = option_field(
        True, "Whether a broker transfers its leaderships to other brokers before it stops."
    )
    auto_leader_rebalance_enable: bool = option_field(
        True, "Whether the controller returns leadership to preferred replicas automatically."
    )
    auto_rebalance_enable: bool = option_field(
        False,
        "Whether the controller moves replicas by itself, a few at a time, to brokers that have fewer, as new"
        " ones do. Set it on every controller.",
    )
    leader_imbalance_check_interval_seconds: int = option_field(
        300, "How often the controller looks for partitions not led by their preferred replica.", minimum=1
    )
    leader_imbalance_per_broker_percentage: int = option_field(
        10,
        "The percentage of a broker's preferred partitions that others may lead before it is returned.",
        minimum=0,
        maximum=100,
    )

    unclean_recovery_strategy: str = option_field(
        "balanced",
        "What happens after unclean stops while replicas that may hold more have not returned. none: wait for"
        " them or an operator. balanced: wait for unclean.recovery.timeout.ms. aggressive: do not wait.",
        choices=("none", "balanced", "aggressive"),
    )
    unclean_recovery_timeout_ms: int = option_field(
        300_000,
        "How long a partition waits after unclean stops for replicas that may hold more committed records.",
        minimum=0,
    )

    # --- behaviour: replication
    replica_lag_time_max_ms: int = option_field(
        3_000,
        "A follower that has not caught up for this long is removed from the in-sync replicas.",
        minimum=1,
    )
    replica_fetch_wait_max_ms: int = option_field(
        500, "How long a leader holds a follower's fetch while there is nothing to send.", minimum=0
    )
    replica_fetch_min_bytes: int = option_field(
        1, "A follower's fetch is answered as soon as this many bytes are available.", minimum=0
    )
    replica_fetch_max_bytes: int = option_field(
        MIB,
        "Soft limit of the data of one partition in a follower's fetch.",
        minimum=KIB,
        maximum=MAX_PAYLOAD_BYTES,
    )
    replica_fetch_response_max_bytes: int = option_field(
        10 * MIB, "Soft limit of the response to a follower's fetch.", minimum=KIB, maximum=MAX_PAYLOAD_BYTES
    )
    replica_fetch_backoff_ms: int = option_field(
        100, "How long a follower waits after a failed fetch.", minimum=1
    )
    replica_high_watermark_checkpoint_interval_ms: int = option_field(
        5_000, "How often a leader records the high watermarks of its partitions.", minimum=1
    )

    leader_replication_throttled_rate: int = _dynamic(LEADER_RATE)
    follower_replication_throttled_rate: int = _dynamic(FOLLOWER_RATE)

    # --- behaviour: committed offsets
    offsets_topic_num_partitions: int = option_field(
        50,
        "Partitions of __consumer_offsets when it is created, over which groups are spread; 4 on a broker"
        " that keeps everything in memory. Cannot be changed later.",
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
    )
    offsets_topic_replication_factor: int = option_field(
        3,
        "Replicas of __consumer_offsets. If fewer brokers are alive when it is created, it gets more replicas"
        " when others join.",
        minimum=1,
        maximum=2**15 - 1,
    )
    offsets_topic_segment_bytes: int = option_field(
        100 * MIB,
        "segment.bytes of __consumer_offsets. Small segments are compacted and loaded sooner.",
        minimum=MIN_SEGMENT_BYTES,
        maximum=MAX_SEGMENT_BYTES,
    )
    offsets_retention_minutes: int = option_field(
        10_080, "How long the offsets of a group without members are kept.", minimum=1, maximum=_MAX_INT32
    )
    offsets_retention_check_interval_ms: int = option_field(
        600_000, "How often a coordinator looks for offsets that have expired.", minimum=1
    )
    offset_metadata_max_bytes: int = option_field(
        4_096, "The longest metadata text that may be committed with an offset.", minimum=0, maximum=MIB
    )

    # --- behaviour: consumer groups
    group_consumer_session_timeout_ms: int = option_field(
        45_000,
        "A member of a group that sends no heartbeat for this long is removed from the group.",
        minimum=1,
    )
    group_consumer_heartbeat_interval_ms: int = option_field(
        5_000, "The heartbeat interval that members of a group use.", minimum=1
    )
    group_consumer_assignors: tuple[str, ...] = option_field(
        ("uniform", "range"),
        "How partitions may be spread over members: uniform, range. The first is used for members that"
        " request none.",
    )
    group_max_size: int = option_field(
        10_000, "The maximum number of members of a group, static ones included.", minimum=1
    )
    group_max_count: int = option_field(
        10_000, "The maximum number of groups in each partition of __consumer_offsets.", minimum=1
    )
    group_max_offsets: int = option_field(
        100_000,
        "The maximum number of partitions for which a group has offsets. One of a partition without a"
        " committed offset counts once for each open transaction that has it.",
        minimum=1,
    )

    # --- behaviour: transactions
    transaction_state_log_num_partitions: int = option_field(
        50,
        "Partitions of __transaction_state when it is created, over which transactional ids are spread; 4 on"
        " a broker that keeps everything in memory. Cannot be changed later.",
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
    )
    transaction_state_log_replication_factor: int = option_field(
        3,
        "Replicas of __transaction_state. If fewer brokers are alive when it is created, it gets more"
        " replicas when others join.",
        minimum=1,
        maximum=2**15 - 1,
    )
    transaction_state_log_min_isr: int = option_field(
        2,
        "min.insync.replicas of __transaction_state and __consumer_offsets when they are created; at most"
        " their number of replicas.",
        minimum=1,
        maximum=2**15 - 1,
    )
    transaction_state_log_segment_bytes: int = option_field(
        100 * MIB,
        "segment.bytes of __transaction_state.",
        minimum=MIN_SEGMENT_BYTES,
        maximum=MAX_SEGMENT_BYTES,
    )
    transactional_id_expiration_ms: int = option_field(
        604_800_000,
        "How long an unused transactional id, or an unused retired transaction group, is kept.",
        minimum=1,
    )
    transactional_id_max_count: int = option_field(
        10_000,
        "The maximum number of transactional ids and transaction groups in each partition of"
        " __transaction_state.",
        minimum=1,
    )
    transaction_max_timeout_ms: int = option_field(
        900_000, "The longest transaction.timeout.ms that a producer may request.", minimum=1
    )
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = option_field(
        10_000,
        "Accepted as in Kafka, without effect: a transaction is aborted as soon as it times out.",
        minimum=1,
    )

    # --- behaviour: the data directory
    log_dirs: str | None = option_field(
        None,
        "The data directories, separated by commas, each on a disk of its own. The first one also has the"
        " node's identity and the metadata. Unset keeps everything in memory.",
        aliases=("log.dir", "data.dir"),
    )

    replica_alter_log_dirs_io_max_bytes_per_second: int = option_field(
        2**63 - 1,
        "The largest rate at which logs are copied between the data directories of this node.",
        minimum=1,
    )

    log_dirs_min_free_bytes: int = option_field(
        64 * MIB,
        "Records are refused while less would remain free on the disk of the data directory, at most a tenth"
        " of the disk: metadata and checkpoints need room.",
        minimum=0,
    )

    # --- behaviour: the network
    listeners: tuple[str, ...] = option_field(
        DEFAULT_LISTENERS,
        "Where to listen: host:port (port 0: the system chooses one; no host: every interface), "
        "or inproc://name inside the process (inproc:// generates a name). SSL://host:port speaks TLS, "
        "SASL_PLAINTEXT://host:port requires a login, and SASL_SSL://host:port both.",
    )
    advertised_listeners: tuple[str, ...] = option_field(
        (),
        "The addresses that clients are given, one for each listener. "
        "Unset: each client is given the address that it used.",
    )
    listener_security_protocol_map: tuple[str, ...] = option_field(
        (),
        "The protocols of named listeners, such as NAME:SSL, separated by commas. CONTROLLER:SSL encrypts the"
        " connections of controllers, on every node. The names of the protocols (PLAINTEXT, SSL,"
        " SASL_PLAINTEXT, SASL_SSL) and CONTROLLER (PLAINTEXT) are known.",
    )
    ssl_keystore_location: str | None = tls_field("ssl.keystore.location")
    ssl_keystore_type: str = tls_field("ssl.keystore.type")
    ssl_key_password: str | None = tls_field("ssl.key.password")
    ssl_truststore_location: str | None = tls_field("ssl.truststore.location")
    ssl_truststore_type: str = tls_field("ssl.truststore.type")
    ssl_enabled_protocols: tuple[str, ...] = tls_field("ssl.enabled.protocols")
    ssl_endpoint_identification_algorithm: str = tls_field("ssl.endpoint.identification.algorithm")
    ssl_client_auth: ClientAuth = option_field(  # noqa: RUF009
        "none",
        "Whether listeners with TLS ask connecting clients and nodes for a certificate that"
        " ssl.truststore.location trusts: none, requested (accept clients without one), required. Listeners"
        " that require logins ask for none.",
        choices=CLIENT_AUTH,
    )
    ssl_principal_mapping_rules: str = option_field(
        DEFAULT_RULES,
        "How the name in a client's certificate becomes its principal: RULE:pattern/replacement/[LU] and"
        " DEFAULT (the distinguished name), separated by commas; the first that matches.",
    )
    sasl_enabled_mechanisms: tuple[str, ...] = option_field(
        tuple(SCRAM),
        "The mechanisms of logins that SASL_SSL:// and SASL_PLAINTEXT:// listeners offer: SCRAM-SHA-256,"
        " SCRAM-SHA-512, PLAIN, OAUTHBEARER.",
    )
    sasl_allow_plain_without_tls: bool = option_field(
        False,
        "Whether SASL_PLAINTEXT:// listeners offer PLAIN and OAUTHBEARER, which send the password or token"
        " itself. For tests.",
    )
    sasl_oauthbearer_jwks_endpoint_url: str | None = option_field(
        None,
        "The key set (JWKS) of the issuer of tokens: the path of a file, or a file:, http: or https: URL."
        " Required by OAUTHBEARER.",
    )
    sasl_oauthbearer_jwks_endpoint_refresh_ms: int = option_field(
        3_600_000,
        "How long the key set is used before it is read again. It is also read again when a token names an"
        " unknown key, at most once a minute.",
        minimum=1,
        maximum=_MAX_INT32,
    )
    sasl_oauthbearer_expected_audience: tuple[str, ...] = option_field(
        (), "A token must be for one of these audiences (its claim aud). Empty accepts every audience."
    )
    sasl_oauthbearer_expected_issuer: str | None = option_field(
        None, "A token must be from this issuer (its claim iss). Unset accepts every one that has a key."
    )
    sasl_oauthbearer_scope_claim_name: str = option_field(
        "scope", "The claim with the scopes of a token: a text or a list of texts. It grants nothing here."
    )
    sasl_oauthbearer_sub_claim_name: str = option_field(
        "sub", "The claim with the name of the user: its principal is User:NAME."
    )
    sasl_oauthbearer_clock_skew_seconds: int = option_field(
        30, "How much the clocks of the issuer and this broker may differ.", minimum=0, maximum=600
    )
    connections_max_reauth_ms: int = option_field(
        0,
        "How long a connection may be used after a login before its client must log in again (KIP-368). 0: no"
        " limit.",
        minimum=0,
        maximum=_MAX_INT32,
    )
    connection_failed_authentication_delay_ms: int = option_field(
        100,
        "How long the answer to a failed login is delayed, which limits the guessing of passwords.",
        minimum=0,
        maximum=5_000,
    )
    authorizer_class_name: str = option_field(
        "",
        "StandardAuthorizer enforces access control rules: what no rule allows is refused. Empty allows"
        " everybody everything. Set it on every broker.",
        choices=("", "StandardAuthorizer"),
    )
    super_users: str = option_field(
        "", "Principals that may do everything, separated by semicolons: User:alice;User:CN=admin,O=example."
    )
    allow_everyone_if_no_acl_found: bool = option_field(
        False, "Whether everybody may do everything on a resource that no access control rule covers."
    )
    max_connections: int = option_field(
        2**31 - 1,
        "The maximum number of open connections; further ones are closed at once. Never more than half of the"
        " file descriptors that the process may open.",
        minimum=1,
    )
    max_connections_per_ip: int = option_field(
        2**31 - 1,
        "The maximum number of open connections from one address; further ones are closed at once. 0 allows"
        " only the addresses in max.connections.per.ip.overrides. Other nodes of the cluster count, too.",
        minimum=0,
    )
    max_connections_per_ip_overrides: tuple[str, ...] = option_field(
        (),
        "Limits of single addresses in place of max.connections.per.ip: 10.0.0.7:100,10.0.0.8:0. A host name"
        " stands for all of its addresses at the start of the broker.",
        kind="list",
    )
    connections_max_idle_ms: int = option_field(
        600_000, "A connection without traffic for this long is closed. -1: never.", minimum=-1
    )
    socket_request_max_bytes: int = option_field(
        100 * MIB, "The largest request that is accepted.", minimum=KIB, maximum=MAX_PAYLOAD_BYTES
    )
    max_request_partition_size_limit: int = option_field(
        20_000,
        "The maximum number of partitions that a client's request may name.",
        minimum=1_000,
        maximum=MAX_ITEMS_PER_REQUEST,
    )
    queued_max_request_bytes: int = option_field(
        512 * MIB,
        "Bytes of large requests that all connections together may be receiving or have unanswered; "
        "beyond it, the connections are closed whose unfinished requests have stood still longest.",
        minimum=MIB,
    )

    # --- behaviour: topics
    num_partitions: int = option_field(
        1,
        "Partitions of a topic that is created without a number of partitions.",
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
    )
    max_topics: int = option_field(50_000, "The maximum number of topics of the cluster.", minimum=1)
    max_partitions: int = option_field(
        100_000, "The maximum number of partitions of all topics of the cluster.", minimum=1
    )
    default_replication_factor: int = option_field(
        1, "Replicas of a topic that is created without a replication factor.", minimum=1, maximum=2**15 - 1
    )
    auto_create_topics_enable: bool = option_field(
        True, "Whether a request for a topic's metadata may create it."
    )
    delete_topic_enable: bool = option_field(True, "Whether topics can be deleted.")

    # --- behaviour: defaults of topic options
    durability: str = _topic_default("durability")
    log_retention_ms: int = _topic_default("log.retention.ms")
    log_retention_bytes: int = _topic_default("log.retention.bytes")
    log_retention_topic_bytes: int = _topic_default("log.retention.topic.bytes")
    log_segment_bytes: int = _topic_default("log.segment.bytes")
    log_roll_ms: int = _topic_default("log.roll.ms")
    log_roll_jitter_ms: int = _topic_default("log.roll.jitter.ms")
    log_index_interval_bytes: int = _topic_default("log.index.interval.bytes")
    log_index_size_max_bytes: int = _topic_default("log.index.size.max.bytes")
    log_cleanup_policy: str = _topic_default("log.cleanup.policy")
    log_cleaner_min_cleanable_ratio: float = _topic_default("log.cleaner.min.cleanable.ratio")
    log_cleaner_min_compaction_lag_ms: int = _topic_default("log.cleaner.min.compaction.lag.ms")
    log_cleaner_delete_retention_ms: int = _topic_default("log.cleaner.delete.retention.ms")
    log_segment_delete_delay_ms: int = _topic_default("log.segment.delete.delay.ms")
    log_message_timestamp_type: str = _topic_default("log.message.timestamp.type")
    log_message_timestamp_before_max_ms: int = _topic_default("log.message.timestamp.before.max.ms")
    log_message_timestamp_after_max_ms: int = _topic_default("log.message.timestamp.after.max.ms")
    log_preallocate: bool = _topic_default("log.preallocate")
    message_max_bytes: int = _topic_default("message.max.bytes")
    compression_type: str = _topic_default("compression.type")
    min_insync_replicas: int = _topic_default("min.insync.replicas")
    unclean_leader_election_enable: bool = _topic_default("unclean.leader.election.enable")

    # --- performance
    fetch_max_bytes: int = option_field(
        55 * MIB,
        "Soft limit of one fetch response, whatever the client requests; the first batch is always complete.",
        minimum=KIB,
        maximum=MAX_PAYLOAD_BYTES,
    )
    log_retention_check_interval_ms: int = option_field(
        300_000, "How often segments are rolled by age and deleted.", minimum=1
    )
    log_cleaner_enable: bool = option_field(True, "Whether logs with cleanup.policy=compact are compacted.")
    log_cleaner_backoff_ms: int = option_field(
        15_000, "How often the broker looks for logs to compact.", minimum=1
    )
    log_cleaner_dedupe_buffer_size: int = option_field(
        128 * MIB,
        "Memory for the keys of a compaction, about 200 bytes each; more keys need several passes.",
        minimum=MIB,
    )
    log_scrub_interval_ms: int = option_field(
        604_800_000,
        "How often every batch on disk is read and checked; the first time soon after the start. 0 is never.",
        minimum=0,
    )
    log_scrub_max_bytes_per_second: int = option_field(
        8 * MIB, "How fast this check reads.", minimum=64 * KIB
    )
    producer_id_expiration_ms: int = option_field(
        86_400_000,
        "How long a partition remembers the sequence numbers of a producer that does not write to it.",
        minimum=1,
    )
    log_initial_task_delay_ms: int = option_field(
        30_000, "How long after the start the first periodic pass runs.", minimum=0
    )
    log_flush_offset_checkpoint_interval_ms: int = option_field(
        60_000,
        "How often recovery points are written: a start after a crash scans only later records.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        for name in _LISTS:
            values = getattr(self, name)
            object.__setattr__(self, name, split_list(values) if isinstance(values, str) else tuple(values))
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        for name in ("listeners", "advertised_listeners", "controller_listeners"):
            addresses = getattr(self, name)
            if isinstance(addresses, str):
                addresses = split_list(addresses)
            key = name.replace("_", ".")
            default = CONTROLLER if name == "controller_listeners" else PLAINTEXT
            parsed = tuple(parse_address(each, key, protocols, default=default) for each in addresses)
            object.__setattr__(self, name, parsed)
        if self.log_dirs is not None:
            object.__setattr__(self, "log_dirs", str(self.log_dirs))
        self._check_relations()

    @property
    def log_directories(self) -> tuple[str, ...]:
        """The data directories in ``log.dirs``, in order; empty without any."""
        if self.log_dirs is None:
            return ()
        if "," not in self.log_dirs:
            return (self.log_dirs,)
        return tuple(path.strip().rstrip("/") for path in self.log_dirs.split(","))

    def _check_relations(self) -> None:
        """Raise ConfigError if settings contradict each other or a setting is invalid."""
        self._check_cluster()
        self._check_coordinators()
        self._check_tls()
        self._check_logins()
        self._check_super_users()
        self._require(not self.is_broker or bool(self.listeners), "listeners", "at least one address")
        self._require(
            len(self.advertised_listeners) in {0, len(self.listeners)},
            "advertised.listeners",
            f"one address for each of the {len(self.listeners)} listeners",
        )
        if self.log_dirs is not None and "," in self.log_dirs:
            directories = self.log_directories
            self._require(
                all(directories) and len(set(directories)) == len(directories),
                "log.dirs",
                "directories separated by commas, each of them once",
            )
        self._require(
            self.message_max_bytes <= self.socket_request_max_bytes,
            "message.max.bytes",
            f"at most socket.request.max.bytes, {self.socket_request_max_bytes}",
        )
        self._require(
            self.log_roll_jitter_ms <= self.log_roll_ms,
            "log.roll.jitter.ms",
            f"at most log.roll.ms, {self.log_roll_ms}",
        )

    def _check_cluster(self) -> None:
        self._check_roles()
        if not self.has_peers:
            return
        required = "required with controller.quorum.voters,"
        self._require(bool(self.cluster_id), "cluster.id", f"{required} the same on every node")
        self._require(
            len(self.cluster_secret or "") >= MIN_SECRET_LENGTH,
            "cluster.secret",
            f"{required} {MIN_SECRET_LENGTH} characters or more, the same on every node",
        )
        self._check_voters()
        self._require(
            self.broker_heartbeat_interval_ms < self.broker_session_timeout_ms,
            "broker.heartbeat.interval.ms",
            f"less than broker.session.timeout.ms, {self.broker_session_timeout_ms}",
        )
        is_reachable = self.advertised_listeners or not any(map(is_wildcard, self.listeners))
        self._require(
            not self.is_broker or bool(is_reachable),
            "advertised.listeners",
            "required when a listener is on every interface, for connections of other brokers",
        )

    def _check_voters(self) -> None:
        servers = self.controller_quorum_bootstrap_servers
        self._require(
            not servers or not self.controller_quorum_voters,
            "controller.quorum.bootstrap.servers",
            "unset with controller.quorum.voters, of which they take the place",
        )
        if not servers:
            allowed = "one of controller.quorum.voters, as process.roles has controller"
            if not self.is_controller:
                allowed = "none of controller.quorum.voters, unless process.roles has controller"
            self._require(self.is_controller == (self.node_id in self.voters), "node.id", allowed)
        elif self.is_controller:
            addresses = self.controller_addresses
            self._require(
                bool(addresses) and not is_wildcard(addresses[0]),
                "controller.listeners",
                "an address that other nodes can connect to, as this node is none of"
                " controller.quorum.bootstrap.servers",
            )

    def _check_super_users(self) -> None:
        """Raise ConfigError if a super user is no principal, or super users are set without an authorizer."""
        for principal in self.super_user_principals:
            try:
                check_principal(principal)
            except InvalidRequestError as error:
                self._require(False, "super.users", f"User:NAME, separated by semicolons ({error.message})")
        if not self.authorizer_class_name:
            self._require(
                not self.super_users,
                "super.users",
                "empty unless authorizer.class.name is StandardAuthorizer",
            )

    @property
    def super_user_principals(self) -> tuple[str, ...]:
        """The principals in ``super.users``."""
        return super_users_of(self.super_users)

    def _check_tls(self) -> None:
        check_versions(self.ssl_enabled_protocols)
        PrincipalMapping(self.ssl_principal_mapping_rules)  # raises ConfigError
        parse_overrides(self.max_connections_per_ip_overrides)
        for address, advertised in zip(self.listeners, self.advertised_listeners, strict=False):
            allowed = f"addresses with the protocols of listeners, which has {address}"
            is_same = security_scheme(address) == security_scheme(advertised)
            self._require(is_same, "advertised.listeners", allowed)
        listening = (*(self.listeners if self.is_broker else ()), *self.controller_addresses)
        if not any(map(is_tls, listening)):
            return
        allowed = "required by a listener with TLS: a PEM file with a private key and its certificate"
        self._require(self.ssl_keystore_location is not None, "ssl.keystore.location", allowed)
        allowed = (
            f"required with ssl.client.auth={self.ssl_client_auth}: a PEM file with the certificates of the"
            " authorities that issue those of clients"
        )
        is_met = self.ssl_client_auth == "none" or self.ssl_truststore_location is not None
        self._require(is_met, "ssl.truststore.location", allowed)

    def _check_logins(self) -> None:
        for address in self.controller_listeners:
            allowed = "PLAINTEXT:// or SSL://: controllers prove that they know cluster.secret"
            self._require(not needs_login(address), "controller.listeners", allowed)
        allowed = f"one or more of {', '.join(SASL_MECHANISMS)}"
        is_known = set(self.sasl_enabled_mechanisms) <= set(SASL_MECHANISMS)
        self._require(is_known, "sasl.enabled.mechanisms", allowed)
        for address in filter(needs_login, self.listeners):
            allowed = (
                f"a mechanism that the listener {address} can offer; PLAIN sends passwords and OAUTHBEARER"
                " tokens, so they need SASL_SSL, or sasl.allow.plain.without.tls=true"
            )
            offered = self.offered_mechanisms(is_encrypted=is_tls(address))
            self._require(bool(offered), "sasl.enabled.mechanisms", allowed)
        url = self.sasl_oauthbearer_jwks_endpoint_url
        is_needed = OAUTHBEARER in self.sasl_enabled_mechanisms
        is_valid = (
            not is_needed if not url else "://" not in url or url.startswith(("http:", "https:", "file:"))
        )
        allowed = "required by OAUTHBEARER: the path of a file, or a file:, http: or https: URL"
        self._require(is_valid, "sasl.oauthbearer.jwks.endpoint.url", allowed)

    def offered_mechanisms(self, *, is_encrypted: bool) -> tuple[str, ...]:
        """Return the mechanisms that a listener with logins offers. ``is_encrypted``: it uses TLS."""
        enabled = dict.fromkeys(self.sasl_enabled_mechanisms)
        if is_encrypted or self.sasl_allow_plain_without_tls:
            return tuple(enabled)
        return tuple(name for name in enabled if name not in REVEALING)

    def _check_roles(self) -> None:
        roles = self.process_roles
        is_valid = bool(roles) and set(roles) <= set(ROLES) and len(set(roles)) == len(roles)
        self._require(is_valid, "process.roles", "broker, controller, or broker,controller")
        self._require(
            self.has_peers or len(roles) == len(ROLES),
            "controller.quorum.voters",
            f"required on a node that is only a {roles[0]}: the controllers of its cluster",
        )

    def _check_coordinators(self) -> None:
        self._require(
            self.group_consumer_heartbeat_interval_ms < self.group_consumer_session_timeout_ms,
            "group.consumer.heartbeat.interval.ms",
            f"less than group.consumer.session.timeout.ms, {self.group_consumer_session_timeout_ms}",
        )
        assignors = self.group_consumer_assignors
        is_valid = bool(assignors) and set(assignors) <= {"uniform", "range"}
        self._require(is_valid, "group.consumer.assignors", "uniform, range, or both")

    def _require(self, is_met: bool, key: str, allowed: str) -> None:
        """Raise ConfigError for the option ``key`` unless ``is_met``. Secret values are not shown."""
        if not is_met:
            value = getattr(self, BROKER_OPTIONS.get(key).python_name)
            text = ",".join(value) if isinstance(value, tuple) else value
            shown = None if text == "" or key in SECRET_OPTIONS else text
            raise ConfigError(key=key, value=shown, allowed=allowed)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, source: str = "") -> BrokerConfig:
        """Return the config for settings with dotted names (``log.retention.ms``) or Python names.

        ``source`` is where the settings come from, for error messages. Raises ConfigError.
        """
        parsed = parse_settings(settings, source=source)
        return cls(**{BROKER_OPTIONS.get(name).python_name: value for name, value in parsed.items()})

    def settings(self) -> dict[str, Any]:
        """Return {dotted name: value} of every option."""
        return {option.name: getattr(self, option.python_name) for option in BROKER_OPTIONS}

    def topic_defaults(self) -> dict[str, Any]:
        """Return {topic option: default} of the topic options whose built-in default is overridden."""
        given = _topic_default_values(self)
        if given == _KAFKA_DEFAULTS:
            return {}
        each = zip(_TOPIC_DEFAULTS, given, _KAFKA_DEFAULTS, strict=True)
        return topic_defaults({name: value for name, value, default in each if value != default})

    def controller_settings(self) -> ControllerSettings:
        """Return the settings on which the controller's decisions depend."""
        return ControllerSettings(
            self.num_partitions,
            self.default_replication_factor,
            topic_defaults=self.topic_defaults(),
            node_id=self.node_id,
            is_single_node=not self.has_peers,
            session_timeout_ms=self.broker_session_timeout_ms,
            auto_leader_rebalance=self.auto_leader_rebalance_enable,
            auto_rebalance=self.auto_rebalance_enable,
            imbalance_check_interval_ms=self.leader_imbalance_check_interval_seconds * 1_000,
            imbalance_per_broker_percentage=self.leader_imbalance_per_broker_percentage,
            unclean_recovery_strategy=self.unclean_recovery_strategy,
            unclean_recovery_timeout_ms=self.unclean_recovery_timeout_ms,
            internal_topics=(
                (OFFSETS_TOPIC, self.offsets_topic_replication_factor),
                (TRANSACTIONS_TOPIC, self.transaction_state_log_replication_factor),
            ),
            voters=frozenset(self.voters or {self.node_id}),
            max_topics=self.max_topics,
            max_partitions=self.max_partitions,
        )

    # --- derived

    @property
    def is_broker(self) -> bool:
        return BROKER_ROLE in self.process_roles

    @property
    def is_controller(self) -> bool:
        return CONTROLLER_ROLE in self.process_roles

    @property
    def has_peers(self) -> bool:
        """Whether controllers are configured. Otherwise this node is a cluster of its own."""
        return bool(self.controller_quorum_voters or self.controller_quorum_bootstrap_servers)

    @property
    def voters(self) -> dict[int, str]:
        """Return {node id: address of the controller listener} of each of the first voters.

        Empty if this node joins a running cluster.
        """
        return self._controllers(self.controller_quorum_voters)

    @property
    def controllers(self) -> dict[int, str]:
        """Return {node id: address of the controller listener} of each configured controller.

        It includes this node if this node is a controller.
        """
        configured = self.voters or self._controllers(self.controller_quorum_bootstrap_servers)
        own = self.controller_addresses
        return configured if not own else {self.node_id: own[0], **configured}

    def _controllers(self, texts: tuple[str, ...]) -> dict[int, str]:
        return parse_voters(texts, parse_protocol_map(self.listener_security_protocol_map)) if texts else {}

    @property
    def controller_addresses(self) -> tuple[str, ...]:
        """Return the addresses of this node's controller listener; () if it has none."""
        if not self.has_peers or not self.is_controller:
            return ()
        configured = self.voters or self._controllers(self.controller_quorum_bootstrap_servers)
        own = configured.get(self.node_id)
        return self.controller_listeners or (() if own is None else (own,))


BROKER_OPTIONS: Final = options_of(BrokerConfig)

#: The values in a BrokerConfig, and Kafka's values, of the options in ``_TOPIC_DEFAULTS``, in its order.
_topic_default_values: Final = attrgetter(*(BROKER_OPTIONS.get(name).python_name for name in _TOPIC_DEFAULTS))
_KAFKA_DEFAULTS: Final = tuple(BROKER_OPTIONS.get(name).default for name in _TOPIC_DEFAULTS)

#: Names of options whose values are never shown.
SECRET_OPTIONS: Final = frozenset(option.name for option in BROKER_OPTIONS if option.is_secret)


def parse_settings(settings: Mapping[str, Any], *, source: str = "") -> dict[str, Any]:
    """Return {dotted name: typed value} for dotted or Python names. Hours and minutes become ms.

    ``log.retention.ms`` overrides ``log.retention.minutes``, which overrides ``log.retention.hours``, as in
    Kafka. Raises ConfigError.
    """
    exact: dict[str, Any] = {}
    coarse: dict[str, tuple[int, int]] = {}  # fine name -> (unit, milliseconds)
    for name, value in settings.items():
        dotted = name if name in _COARSE else name.replace("_", ".")
        if dotted not in _COARSE:
            exact[name] = str(value) if isinstance(value, Path) else value
            continue
        fine, unit_ms = _COARSE[dotted]
        count = Option(dotted, "int", None, "", minimum=-1).parse(value, source=source)
        if fine not in coarse or unit_ms < coarse[fine][0]:
            coarse[fine] = (unit_ms, -1 if count == -1 else count * unit_ms)
    parsed = BROKER_OPTIONS.parse({fine: ms for fine, (_, ms) in coarse.items()}, source=source)
    parsed.update(BROKER_OPTIONS.parse(exact, source=source))
    return parsed


class Settings(NamedTuple):
    """A config, and {option: its source}: ``default``, a file, an environment variable or ``flag``."""

    config: BrokerConfig
    sources: dict[str, str]


def load_settings(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the broker's settings. ``overrides`` (flags) override ``env``, which overrides ``file``.

    ``file`` is TOML, with nested tables or quoted dotted names. ``env`` has variables such as
    ``KAFKALITE_LOG_RETENTION_MS``. A variable that looks like a misspelt option raises ConfigError, and
    other unknown variables are ignored. Raises ConfigError for invalid settings, OSError if ``file`` is
    unreadable.
    """
    values: dict[str, Any] = {}
    sources = {option.name: "default" for option in BROKER_OPTIONS}

    def take(settings: Mapping[str, Any], source: str) -> None:
        for name, value in parse_settings(settings, source=source).items():
            values[name] = value
            sources[name] = source

    if file is not None:
        take(_read_toml(Path(file)), str(file))
    for variable, name in broker_variables(env or {}).items():
        take({name: (env or {})[variable]}, variable)
    take({name: value for name, value in (overrides or {}).items() if value is not None}, "flag")
    try:
        config = BrokerConfig.from_settings(values)
    except ConfigError as error:
        source = error.source or sources.get(error.key, "")
        raise ConfigError(key=error.key, value=error.value, allowed=error.allowed, source=source) from None
    return Settings(config, sources)


def broker_variables(env: Iterable[str]) -> dict[str, str]:
    """Return {variable: dotted name of the broker's option} for the variables of brokers in ``env``.

    Raises ConfigError for a variable that looks like a misspelt option.
    """
    found: dict[str, str] = {}
    for variable in sorted(env):  # ..._HOURS before ..._MS, which overrides it
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(CLIENT_VARIABLES):
            continue
        python_name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        dotted = python_name.replace("_", ".")
        if python_name in BROKER_OPTIONS:
            found[variable] = BROKER_OPTIONS.get(python_name).name
        elif dotted in _COARSE:
            found[variable] = dotted
        else:
            _refuse_misspelt(variable, python_name)
    return found


def _refuse_misspelt(variable: str, python_name: str) -> None:
    """Raise ConfigError if ``variable`` looks like a misspelt option.

    Other variables, such as KAFKALITE_UVLOOP, are ignored.
    """
    names = [option.python_name for option in BROKER_OPTIONS]
    hint = did_you_mean(
        python_name, names, shown=lambda name: f"{ENVIRONMENT_PREFIX}{name.upper()}", cutoff=0.8
    )
    if hint:
        raise ConfigError(key=variable, value=None, allowed=f"unknown option; {hint}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(key="config file", value=str(path), allowed="a file that exists") from None
    except IsADirectoryError:
        raise ConfigError(key="config file", value=str(path), allowed="a file, not a directory") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(key="config file", value=str(path), allowed=f"TOML: {error}") from None
    return dict(_flatten(document, ""))


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, value))
    return flat
