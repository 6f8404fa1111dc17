"""The settings that make a node part of a cluster: roles, voters, the secret, replication, failover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import ConfigError
from kafkalite.limits import KIB, MAX_PAYLOAD_BYTES, MIB
from kafkalite.options import option_field
from kafkalite.transport import has_own_name

BROKER_ROLE: Final = "broker"
CONTROLLER_ROLE: Final = "controller"
ROLES: Final = (BROKER_ROLE, CONTROLLER_ROLE)
#: Shorter ones could be guessed by whoever has seen one handshake.
MIN_SECRET_LENGTH: Final = 16
WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "[::]"})
ADDRESS_WORDS: Final = "host:port (for example 127.0.0.1:9092 or [::1]:9092), or inproc://name"


def split_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_address(text: str, key: str) -> str:
    """``PLAINTEXT://:9092`` -> ``0.0.0.0:9092``. Raises ConfigError when it is no address."""
    if has_own_name(text):
        return text
    scheme, separator, rest = text.partition("://")
    if separator and scheme.upper() not in {"PLAINTEXT", "CONTROLLER"}:
        raise ConfigError(key=key, value=text, allowed=ADDRESS_WORDS)
    host, colon, port = (rest if separator else text).rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(key=key, value=text, allowed=ADDRESS_WORDS)
    return f"{host or '0.0.0.0'}:{int(port)}"


def parse_voters(voters: Iterable[str]) -> dict[int, str]:
    """``1@host:port`` … -> {node id: address of its controller listener}. Raises ConfigError."""
    key = "controller.quorum.voters"
    parsed: dict[int, str] = {}
    for voter in voters:
        number, at, address = voter.partition("@")
        if not at or not (number.isascii() and number.isdigit()) or int(number) > 2**31 - 1:
            raise ConfigError(key=key, value=voter, allowed="node.id@host:port, for example 1@10.0.0.1:9093")
        node_id = int(number)
        if node_id in parsed:
            raise ConfigError(key=key, value=voter, allowed="one address for each node id")
        parsed[node_id] = parse_address(address, key)
        if is_wildcard(parsed[node_id]):
            raise ConfigError(key=key, value=voter, allowed="an address that the other nodes can connect to")
    if len(set(parsed.values())) != len(parsed):
        raise ConfigError(key=key, value=",".join(voters), allowed="a different address for each voter")
    return parsed


def is_wildcard(address: str) -> bool:
    """Whether ``address`` means every interface, so that nobody can connect to it under that name."""
    return not has_own_name(address) and address.rpartition(":")[0] in WILDCARD_HOSTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What a node needs to know of its cluster. A part of BrokerConfig."""

    # --- behaviour: who this node is
    node_id: int = option_field(
        "node.id",
        "int",
        1,
        "The number of this node in its cluster.",
        minimum=0,
        maximum=2**31 - 1,
        aliases=("broker.id",),
    )
    process_roles: tuple[str, ...] = option_field(
        "process.roles",
        "list",
        ROLES,
        "What this node is: broker (stores partitions, serves clients), controller (votes in the metadata "
        "quorum), or both.",
    )
    cluster_id: str | None = option_field(
        "cluster.id",
        "string",
        None,
        "The cluster this node belongs to; a data directory of another one is refused. Unset takes the "
        "directory's own, or makes one; nodes of one cluster need the same.",
    )
    cluster_secret: str | None = option_field(
        "cluster.secret",
        "string",
        None,
        f"What the nodes of a cluster prove to each other to know: at least {MIN_SECRET_LENGTH} characters, "
        "the same on every node. Never shown.",
        is_secret=True,
    )
    controller_quorum_voters: tuple[str, ...] = option_field(
        "controller.quorum.voters",
        "list",
        (),
        "The controllers, the same list on every node: node.id@host:port, separated by commas. "
        "Unset: this node is a cluster of its own.",
    )
    controller_listeners: tuple[str, ...] = option_field(
        "controller.listeners",
        "list",
        (),
        "Where a controller listens for the other nodes. Unset: at its own address in "
        "controller.quorum.voters.",
    )
    controller_quorum_rejoin: bool = option_field(
        "controller.quorum.rejoin",
        "bool",
        False,
        "Lets a controller start whose metadata log is gone, because its disk was replaced: it learns all "
        "from the others before it votes again. To be given once.",
    )
    broker_rack: str | None = option_field("broker.rack", "string", None, "Where this node stands.")

    # --- behaviour: liveness and failover
    broker_heartbeat_interval_ms: int = option_field(
        "broker.heartbeat.interval.ms",
        "int",
        500,
        "How often a broker tells the controller that it is alive.",
        minimum=1,
    )
    broker_session_timeout_ms: int = option_field(
        "broker.session.timeout.ms",
        "int",
        3_000,
        "A broker not heard of for so long leads nothing any more.",
        minimum=1,
    )
    controller_quorum_election_timeout_ms: int = option_field(
        "controller.quorum.election.timeout.ms",
        "int",
        500,
        "A controller that has not heard of the active one for so long, up to twice as long by chance, "
        "stands for election.",
        minimum=10,
    )
    controller_quorum_fetch_timeout_ms: int = option_field(
        "controller.quorum.fetch.timeout.ms",
        "int",
        1_000,
        "An active controller that has not heard of a majority for so long steps down.",
        minimum=10,
    )
    metadata_log_max_record_bytes_between_snapshots: int = option_field(
        "metadata.log.max.record.bytes.between.snapshots",
        "int",
        MIB,
        "The metadata log gives way to a snapshot when it has so many bytes, and no fewer than the last one.",
        minimum=KIB,
    )
    controlled_shutdown_enable: bool = option_field(
        "controlled.shutdown.enable",
        "bool",
        True,
        "Whether a broker that is stopped hands over what it leads before it goes.",
    )
    auto_leader_rebalance_enable: bool = option_field(
        "auto.leader.rebalance.enable",
        "bool",
        True,
        "Whether the controller gives leadership back to preferred replicas by itself.",
    )
    leader_imbalance_check_interval_seconds: int = option_field(
        "leader.imbalance.check.interval.seconds",
        "int",
        300,
        "How often it looks for partitions that others lead.",
        minimum=1,
    )
    leader_imbalance_per_broker_percentage: int = option_field(
        "leader.imbalance.per.broker.percentage",
        "int",
        10,
        "What share of a broker's preferred partitions others may lead before that is done.",
        minimum=0,
        maximum=100,
    )

    # --- behaviour: replication
    replica_lag_time_max_ms: int = option_field(
        "replica.lag.time.max.ms",
        "int",
        10_000,
        "A follower that has not caught up for so long is out of sync.",
        minimum=1,
    )
    replica_fetch_wait_max_ms: int = option_field(
        "replica.fetch.wait.max.ms",
        "int",
        500,
        "How long a leader holds back a follower's fetch while there is nothing to send.",
        minimum=0,
    )
    replica_fetch_min_bytes: int = option_field(
        "replica.fetch.min.bytes",
        "int",
        1,
        "A follower's fetch is answered as soon as so much is there.",
        minimum=0,
    )
    replica_fetch_max_bytes: int = option_field(
        "replica.fetch.max.bytes",
        "int",
        MIB,
        "Soft limit of one partition's part of a follower's fetch.",
        minimum=KIB,
        maximum=MAX_PAYLOAD_BYTES,
    )
    replica_fetch_response_max_bytes: int = option_field(
        "replica.fetch.response.max.bytes",
        "int",
        10 * MIB,
        "Soft limit of the answer to a follower's fetch.",
        minimum=KIB,
        maximum=MAX_PAYLOAD_BYTES,
    )
    replica_fetch_backoff_ms: int = option_field(
        "replica.fetch.backoff.ms",
        "int",
        100,
        "How long a follower waits after a fetch that failed.",
        minimum=1,
    )
    replica_high_watermark_checkpoint_interval_ms: int = option_field(
        "replica.high.watermark.checkpoint.interval.ms",
        "int",
        5_000,
        "How often a leader records how far its partitions are committed.",
        minimum=1,
    )

    # --- what follows from them

    @property
    def is_broker(self) -> bool:
        return BROKER_ROLE in self.process_roles

    @property
    def is_controller(self) -> bool:
        return CONTROLLER_ROLE in self.process_roles

    @property
    def has_peers(self) -> bool:
        """Whether this node belongs to a cluster of several, with a quorum that votes."""
        return bool(self.controller_quorum_voters)

    @property
    def voters(self) -> dict[int, str]:
        """{node id: address of its controller listener}"""
        return parse_voters(self.controller_quorum_voters)

    def check_cluster(self, listeners: tuple[str, ...], advertised: tuple[str, ...]) -> None:
        """Raises ConfigError where two settings cannot both hold."""
        self._check_roles()
        if not self.has_peers:
            return
        if not self.cluster_id:
            raise ConfigError(
                key="cluster.id",
                value=None,
                allowed="needed with controller.quorum.voters, on every node alike",
            )
        if not self.cluster_secret or len(self.cluster_secret) < MIN_SECRET_LENGTH:
            raise ConfigError(
                key="cluster.secret",
                value=None,
                allowed=f"needed with controller.quorum.voters, {MIN_SECRET_LENGTH} characters or more, "
                "on every node alike",
            )
        is_voter = self.node_id in self.voters
        if self.is_controller != is_voter:
            allowed = "among controller.quorum.voters, as a controller is"
            if is_voter:
                allowed = "none of controller.quorum.voters, unless process.roles has controller"
            raise ConfigError(key="node.id", value=self.node_id, allowed=allowed)
        if self.broker_heartbeat_interval_ms >= self.broker_session_timeout_ms:
            raise ConfigError(
                key="broker.heartbeat.interval.ms",
                value=self.broker_heartbeat_interval_ms,
                allowed=f"less than broker.session.timeout.ms, {self.broker_session_timeout_ms}",
            )
        if self.is_broker and not advertised and any(map(is_wildcard, listeners)):
            raise ConfigError(
                key="advertised.listeners",
                value=None,
                allowed="needed when a listener is every interface, so that the other brokers find this one",
            )

    def _check_roles(self) -> None:
        roles = self.process_roles
        if not roles or not set(roles) <= set(ROLES) or len(set(roles)) != len(roles):
            raise ConfigError(
                key="process.roles", value=",".join(roles), allowed="broker, controller, or broker,controller"
            )
        if not self.has_peers and len(roles) < len(ROLES):
            raise ConfigError(
                key="controller.quorum.voters",
                value=None,
                allowed=f"needed by a node that is only a {roles[0]}: the controllers of its cluster",
            )
