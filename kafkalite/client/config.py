"""What producer, consumer and admin may be told: Kafka's names, defaults and bounds, and the frozen results.

One registry per object declares each option once; parsing, documentation and error texts follow from
it. A setting may be spelled ``linger.ms`` (in a mapping) or ``linger_ms`` (as an argument).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, TypeVar

from kafkalite.errors import ConfigError
from kafkalite.limits import KIB, MAX_PAYLOAD_BYTES, MAX_TRANSACTIONAL_ID_LENGTH, MIB
from kafkalite.model import Acks, IsolationLevel
from kafkalite.options import Option, OptionRegistry
from kafkalite.records.header import Codec

_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1

_COMMON: Final = (
    Option(
        "bootstrap.servers",
        "list",
        ("localhost:9092",),
        "Where to find a first broker: host:port pairs, or inproc://name for a broker in this process.",
    ),
    Option("client.id", "string", "kafkalite", "A name for this client in the broker's logs."),
    Option(
        "request.timeout.ms",
        "int",
        30_000,
        "How long a request may stay unanswered.",
        minimum=1,
        maximum=_MAX_INT,
    ),
    Option(
        "default.api.timeout.ms",
        "int",
        60_000,
        "How long a call without a timeout of its own may take, retries included.",
        minimum=1,
        maximum=_MAX_INT,
    ),
    Option(
        "retry.backoff.ms", "int", 100, "The pause before the first retry; it doubles from there.", minimum=0
    ),
    Option("retry.backoff.max.ms", "int", 1_000, "The longest pause between retries.", minimum=0),
    Option(
        "reconnect.backoff.ms",
        "int",
        50,
        "The pause before a first reconnect; it doubles from there.",
        minimum=0,
    ),
    Option("reconnect.backoff.max.ms", "int", 1_000, "The longest pause between reconnects.", minimum=0),
    Option(
        "socket.connection.setup.timeout.ms",
        "int",
        10_000,
        "How long one connection may take to be set up, its version handshake included.",
        minimum=1,
    ),
    Option("metadata.max.age.ms", "int", 300_000, "Metadata older than this is fetched again.", minimum=1),
)

_COMPRESSION: Final = ("none", "gzip", "snappy", "lz4", "zstd")

PRODUCER_OPTIONS: Final = OptionRegistry(
    (
        *_COMMON,
        Option(
            "acks",
            "string",
            "all",
            "What is acknowledged: 0 sent, 1 on the leader, all (-1) on every in-sync replica.",
            choices=("0", "1", "all", "-1"),
            aliases=("request.required.acks",),
        ),
        Option("linger.ms", "int", 5, "How long a batch waits for company. 0 sends at once.", minimum=0),
        Option(
            "batch.size",
            "int",
            16 * KIB,
            "A partition's batch closes at this many bytes. Closed batches that must wait for the request "
            "before them travel together, up to max.request.size.",
            minimum=0,
            maximum=MAX_PAYLOAD_BYTES,
        ),
        Option(
            "batch.max.messages",
            "int",
            0,
            "A batch closes at this many records, and none on the wire has more. 0 is no bound.",
            minimum=0,
        ),
        Option(
            "buffer.memory",
            "int",
            32 * MIB,
            "Bytes of records that may wait; above it send() waits and send_nowait() raises BufferFullError.",
            minimum=1,
            maximum=_MAX_LONG,
        ),
        Option(
            "max.block.ms",
            "int",
            60_000,
            "How long send() may wait for room in the buffer, and a record for its topic's metadata.",
            minimum=0,
        ),
        Option(
            "max.request.size",
            "int",
            MIB,
            "The most bytes of records in one request, before compression. Bounds a batch too.",
            minimum=1,
            maximum=MAX_PAYLOAD_BYTES,
        ),
        Option(
            "enable.idempotence",
            "bool",
            None,
            "Whether brokers are to recognise a batch sent again, so that a retry never makes a duplicate. "
            "Unset it is on with acks=all and retries above 0.",
        ),
        Option(
            "transactional.id",
            "string",
            None,
            "Who this producer is to the coordinator of its transactions, across restarts. A new producer of "
            "the same id ends the open transaction of the one before it and shuts it out.",
        ),
        Option(
            "transaction.timeout.ms",
            "int",
            60_000,
            "A transaction open for longer is aborted by its coordinator, and its producer shut out. At most "
            "transaction.max.timeout.ms of the brokers.",
            minimum=1,
            maximum=_MAX_INT,
        ),
        Option(
            "max.in.flight.requests.per.connection",
            "int",
            5,
            "Produce requests not yet answered. A partition has at most 5 of them, without idempotence only "
            "one, so retries keep the order.",
            minimum=1,
            maximum=256,
        ),
        Option("compression.type", "string", "none", "The codec of record batches.", choices=_COMPRESSION),
        Option("compression.level", "int", None, "The codec's level; unset is the codec's default."),
        Option(
            "partitioner",
            "string",
            "roundrobin",
            "Who chooses a record's partition when send() does not.",
            choices=("roundrobin", "sticky", "random", "hash"),
        ),
        Option(
            "retries", "int", _MAX_INT, "How often a batch may be sent again.", minimum=0, maximum=_MAX_INT
        ),
        Option(
            "delivery.timeout.ms",
            "int",
            120_000,
            "Within this time from send() the record is acknowledged or its error reported.",
            minimum=1,
            maximum=_MAX_INT,
        ),
    )
)

CONSUMER_OPTIONS: Final = OptionRegistry(
    (
        *_COMMON,
        Option(
            "auto.offset.reset",
            "string",
            "latest",
            "Where to start without a valid position: earliest, latest, or none, which is an error.",
            choices=("earliest", "latest", "none"),
        ),
        Option(
            "fetch.min.bytes",
            "int",
            1,
            "A fetch is answered as soon as this many bytes are there.",
            minimum=0,
        ),
        Option(
            "fetch.max.wait.ms", "int", 500, "A fetch is answered at the latest after this time.", minimum=0
        ),
        Option(
            "fetch.max.bytes",
            "int",
            50 * MIB,
            "The most bytes of one answer and of all fetched ahead; a first batch always comes whole.",
            minimum=1,
        ),
        Option(
            "max.partition.fetch.bytes",
            "int",
            MIB,
            "The most bytes of one partition in one answer; fetching ahead stops there too.",
            minimum=1,
        ),
        Option("max.poll.records", "int", 500, "The most records of one get_many().", minimum=1),
        Option("check.crcs", "bool", True, "Check each batch's CRC-32C."),
        Option(
            "isolation.level",
            "string",
            "read_uncommitted",
            "Whether records of open and aborted transactions are seen.",
            choices=("read_uncommitted", "read_committed"),
        ),
        Option(
            "allow.auto.create.topics",
            "bool",
            True,
            "Whether subscribing to an unknown topic may create it; the broker must allow it too.",
        ),
        Option(
            "group.id",
            "string",
            None,
            "The consumer group: its members share the partitions, and it remembers how far they are.",
        ),
        Option(
            "group.instance.id",
            "string",
            None,
            "A name of this member that outlives its process: back within the session timeout, it has its "
            "partitions again and nobody else moved.",
        ),
        Option(
            "group.remote.assignor",
            "string",
            None,
            "How partitions are shared out: uniform or range. Unset is the broker's first choice.",
        ),
        Option(
            "enable.auto.commit",
            "bool",
            True,
            "Whether a member of a group commits by itself what it is done with.",
        ),
        Option(
            "auto.commit.interval.ms",
            "int",
            5_000,
            "How often it does; besides at every rebalance and when it closes.",
            minimum=0,
            maximum=_MAX_INT,
        ),
        Option(
            "max.poll.interval.ms",
            "int",
            300_000,
            "A member that does not ask for records for so long leaves its group, for it seems to hang.",
            minimum=1,
            maximum=_MAX_INT,
        ),
        Option(
            "processing.guarantee",
            "string",
            "at_least_once",
            "What auto-commit does: at_least_once commits what the user came back after, at_most_once what "
            "is about to be given.",
            choices=("at_least_once", "at_most_once"),
        ),
    )
)

ADMIN_OPTIONS: Final = OptionRegistry(_COMMON)


class CommonSettings(TypedDict, total=False):
    """Keyword arguments all three objects take; ``ADMIN_OPTIONS`` documents them."""

    client_id: str
    request_timeout_ms: int
    default_api_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    reconnect_backoff_ms: int
    reconnect_backoff_max_ms: int
    socket_connection_setup_timeout_ms: int
    metadata_max_age_ms: int


class ProducerSettings(CommonSettings, total=False):
    """Keyword arguments of Producer; ``PRODUCER_OPTIONS`` documents them."""

    acks: int | Literal["0", "1", "all", "-1"]
    enable_idempotence: bool
    transactional_id: str
    transaction_timeout_ms: int
    linger_ms: int
    batch_size: int
    batch_max_messages: int
    buffer_memory: int
    max_block_ms: int
    max_request_size: int
    max_in_flight_requests_per_connection: int
    compression_type: str | None
    compression_level: int | None
    retries: int
    delivery_timeout_ms: int


class ConsumerSettings(CommonSettings, total=False):
    """Keyword arguments of Consumer; ``CONSUMER_OPTIONS`` documents them."""

    auto_offset_reset: Literal["earliest", "latest", "none"]
    fetch_min_bytes: int
    fetch_max_wait_ms: int
    fetch_max_bytes: int
    max_partition_fetch_bytes: int
    max_poll_records: int
    check_crcs: bool
    isolation_level: Literal["read_uncommitted", "read_committed"]
    allow_auto_create_topics: bool
    group_id: str | None
    group_instance_id: str | None
    group_remote_assignor: Literal["uniform", "range"] | None
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    max_poll_interval_ms: int
    processing_guarantee: Literal["at_least_once", "at_most_once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """How to reach a cluster, and how patiently."""

    bootstrap_servers: tuple[str, ...]
    client_id: str
    request_timeout_ms: int
    default_api_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    reconnect_backoff_ms: int
    reconnect_backoff_max_ms: int
    socket_connection_setup_timeout_ms: int
    metadata_max_age_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(CommonConfig):
    """Invariants: batch_size <= max_request_size <= buffer_memory; linger_ms <= delivery_timeout_ms; with a
    transactional_id, enable_idempotence and acks=all.
    """

    acks: Acks
    enable_idempotence: bool
    transactional_id: str | None
    transaction_timeout_ms: int
    linger_ms: int
    batch_size: int
    batch_max_messages: int
    buffer_memory: int
    max_block_ms: int
    max_request_size: int
    max_in_flight_requests_per_connection: int
    codec: Codec
    compression_level: int | None
    partitioner: str
    retries: int
    delivery_timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(CommonConfig):
    """Invariant: an instance id and at_most_once have a group; at_most_once commits automatically."""

    auto_offset_reset: str
    fetch_min_bytes: int
    fetch_max_wait_ms: int
    fetch_max_bytes: int
    max_partition_fetch_bytes: int
    max_poll_records: int
    check_crcs: bool
    isolation_level: IsolationLevel
    allow_auto_create_topics: bool
    group_id: str | None
    group_instance_id: str | None
    group_remote_assignor: str | None
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    max_poll_interval_ms: int
    processing_guarantee: str

    @property
    def is_at_most_once(self) -> bool:
        return self.processing_guarantee == "at_most_once"


BootstrapServers = str | Sequence[str]
"""``"host:port,host:port"``, ``"inproc://name"``, or a list of such."""

C = TypeVar("C", bound=CommonConfig)


def admin_config(settings: Mapping[str, Any], *, source: str = "") -> CommonConfig:
    """Settings in either spelling -> a config. Raises ConfigError."""
    return CommonConfig(**_by_python_name(ADMIN_OPTIONS, settings, source))


def producer_config(settings: Mapping[str, Any], *, source: str = "") -> ProducerConfig:
    """Settings in either spelling -> a config. Raises ConfigError, also where two settings contradict.

    A ``batch.size`` above ``max.request.size`` is lowered to it, for a batch must fit in a request.
    """
    values = _by_python_name(PRODUCER_OPTIONS, settings, source)
    values["acks"] = Acks.ALL if values["acks"] == "all" else Acks(int(values["acks"]))
    values["enable_idempotence"] = _idempotence(values, source)
    values["codec"] = Codec.parse(values.pop("compression_type") or "none")
    values["batch_size"] = min(values["batch_size"], values["max_request_size"])
    if values["buffer_memory"] < values["max_request_size"]:
        raise ConfigError(
            key="buffer.memory",
            value=values["buffer_memory"],
            allowed=f"max.request.size ({values['max_request_size']}) or more, for a request must fit",
            source=source,
        )
    if values["linger_ms"] >= values["delivery_timeout_ms"]:
        raise ConfigError(
            key="linger.ms",
            value=values["linger_ms"],
            allowed=f"less than delivery.timeout.ms ({values['delivery_timeout_ms']})",
            source=source,
        )
    return ProducerConfig(**values)


def _idempotence(values: Mapping[str, Any], source: str) -> bool:
    """Whether to be idempotent, as Kafka decides: by default if the other settings allow it."""
    asked: bool | None = values["enable_idempotence"]
    because = "enable.idempotence=true"
    if values["transactional_id"] is not None:
        _check_transactional_id(values["transactional_id"], source)
        because = "transactional.id"
        if asked is False:
            raise ConfigError(
                key="enable.idempotence", value=asked, allowed=f"true with {because}", source=source
            )
        asked = True
    for key, value, is_fit, allowed in (
        ("acks", int(values["acks"]), values["acks"] is Acks.ALL, "all"),
        ("retries", values["retries"], values["retries"] > 0, "1 or more"),
    ):
        if not is_fit:
            if asked:
                raise ConfigError(key=key, value=value, allowed=f"{allowed} with {because}", source=source)
            return False
    return True if asked is None else asked


def _check_transactional_id(transactional_id: str, source: str) -> None:
    if not 1 <= len(transactional_id) <= MAX_TRANSACTIONAL_ID_LENGTH:
        raise ConfigError(
            key="transactional.id",
            value=transactional_id[:50],
            allowed=f"a name of 1 to {MAX_TRANSACTIONAL_ID_LENGTH} characters",
            source=source,
        )


def consumer_config(settings: Mapping[str, Any], *, source: str = "") -> ConsumerConfig:
    """Settings in either spelling -> a config. Raises ConfigError, also where two settings contradict."""
    values = _by_python_name(CONSUMER_OPTIONS, settings, source)
    values["isolation_level"] = IsolationLevel[values["isolation_level"].upper()]
    config = ConsumerConfig(**values)
    if config.group_id == "":
        raise ConfigError(key="group.id", value="", allowed="a name, or unset for no group", source=source)
    if config.is_at_most_once and not config.enable_auto_commit:
        raise ConfigError(
            key="enable.auto.commit",
            value=False,
            allowed="true with processing.guarantee=at_most_once, which commits before it gives records",
            source=source,
        )
    for key in ("group.instance.id", "group.remote.assignor"):
        if config.group_id is None and getattr(config, key.replace(".", "_")) is not None:
            raise ConfigError(key="group.id", value=None, allowed=f"set with {key}", source=source)
    if config.group_id is None and config.is_at_most_once:
        raise ConfigError(
            key="group.id",
            value=None,
            allowed="set with processing.guarantee=at_most_once, for a group remembers what was given",
            source=source,
        )
    return config


def merged(config: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` in any spelling, with the arguments that are given (not None) over it, dotted."""
    settings = {name.replace("_", "."): value for name, value in (config or {}).items()}
    settings.update((name.replace("_", "."), value) for name, value in arguments.items() if value is not None)
    return settings


def _by_python_name(registry: OptionRegistry, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    given = {name: value for name, value in settings.items() if value is not None}
    parsed = registry.defaults() | registry.parse(given, source=source)
    if not parsed["bootstrap.servers"]:
        raise ConfigError(
            key="bootstrap.servers",
            value="",
            allowed="at least one host:port or inproc://name",
            source=source,
        )
    return {registry.get(name).python_name: value for name, value in parsed.items()}
