"""BrokerConfig: every setting of a broker, with Kafka's name, type, default, bounds and meaning in one place.

``BROKER_OPTIONS`` is the same as a registry. ``load_settings`` reads a TOML file, the environment and flags;
everything below the broker receives values, never this object.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from kafkalite.broker.cluster.config import parse_address, split_list
from kafkalite.broker.coordination.config import CoordinatorConfig
from kafkalite.errors import ConfigError
from kafkalite.limits import (
    KIB,
    MAX_PARTITIONS_PER_TOPIC,
    MAX_PAYLOAD_BYTES,
    MIB,
)
from kafkalite.metadata.topic_config import (
    BROKER_DEFAULT_NAMES,
    BROKER_DEFAULT_OPTIONS,
    TOPIC_OPTIONS,
    topic_defaults,
)
from kafkalite.options import Option, OptionRegistry, option_field

ENVIRONMENT_PREFIX: Final = "KAFKALITE_"
DEFAULT_LISTENERS: Final = ("127.0.0.1:9092",)
EMBEDDED_LISTENERS: Final = ("127.0.0.1:0",)

# Kafka's coarser spellings, and what one unit is in milliseconds. The finest one given wins.
_COARSE: Final[dict[str, tuple[str, int]]] = {
    "log.retention.minutes": ("log.retention.ms", 60_000),
    "log.retention.hours": ("log.retention.ms", 3_600_000),
    "log.roll.hours": ("log.roll.ms", 3_600_000),
    "log.roll.jitter.hours": ("log.roll.jitter.ms", 3_600_000),
}
_TOPIC_DEFAULTS: Final = tuple(name for name in BROKER_DEFAULT_NAMES if name not in _COARSE)


def _topic_default(name: str) -> Any:
    """A dataclass field for the broker's default of a topic option; Kafka's default is ours."""
    topic_option = TOPIC_OPTIONS.get(BROKER_DEFAULT_NAMES[name].topic_name)
    option = dataclasses.replace(BROKER_DEFAULT_OPTIONS.get(name), default=topic_option.default)
    return dataclasses.field(default=option.default, metadata={"option": option})


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(CoordinatorConfig):
    """A broker's settings. Bounds are checked on the way in (``from_settings``), relations always."""

    # --- behaviour: where the data is
    log_dirs: str | None = option_field(
        "log.dirs",
        "string",
        None,
        "The data directory (one). Unset keeps everything in memory.",
        aliases=("log.dir", "data.dir"),
    )

    # --- behaviour: the network
    listeners: tuple[str, ...] = option_field(
        "listeners",
        "list",
        DEFAULT_LISTENERS,
        "Where to listen: host:port (port 0 lets the system choose; no host means every interface), "
        "or inproc://name inside the process (inproc:// makes up a name).",
    )
    advertised_listeners: tuple[str, ...] = option_field(
        "advertised.listeners",
        "list",
        (),
        "What clients are told to connect to, one for each listener. "
        "Unset tells each client the address that it used.",
    )
    max_connections: int = option_field(
        "max.connections", "int", 2**31 - 1, "Connections at one time; one more is closed at once.", minimum=1
    )
    connections_max_idle_ms: int = option_field(
        "connections.max.idle.ms",
        "int",
        600_000,
        "A connection on which nothing moves for so long is closed. -1: never.",
        minimum=-1,
    )
    socket_request_max_bytes: int = option_field(
        "socket.request.max.bytes",
        "int",
        100 * MIB,
        "The largest request taken from a connection.",
        minimum=KIB,
        maximum=MAX_PAYLOAD_BYTES,
    )
    queued_max_request_bytes: int = option_field(
        "queued.max.request.bytes",
        "int",
        512 * MIB,
        "Bytes of large requests that all connections together may have in receipt or unanswered; "
        "a connection that would pass it is closed.",
        minimum=MIB,
    )

    # --- behaviour: topics
    num_partitions: int = option_field(
        "num.partitions",
        "int",
        1,
        "Partitions of a topic created without a number.",
        minimum=1,
        maximum=MAX_PARTITIONS_PER_TOPIC,
    )
    default_replication_factor: int = option_field(
        "default.replication.factor",
        "int",
        1,
        "Replicas of a topic created without a number.",
        minimum=1,
        maximum=2**15 - 1,
    )
    auto_create_topics_enable: bool = option_field(
        "auto.create.topics.enable", "bool", True, "Whether asking for a topic's metadata may create it."
    )
    delete_topic_enable: bool = option_field(
        "delete.topic.enable", "bool", True, "Whether topics can be deleted."
    )

    # --- behaviour: defaults of the topic level
    durability: str = _topic_default("durability")
    log_retention_ms: int = _topic_default("log.retention.ms")
    log_retention_bytes: int = _topic_default("log.retention.bytes")
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
        "fetch.max.bytes",
        "int",
        55 * MIB,
        "Soft limit of one fetch answer, whatever the client asks; the first batch always comes whole.",
        minimum=KIB,
        maximum=MAX_PAYLOAD_BYTES,
    )
    log_retention_check_interval_ms: int = option_field(
        "log.retention.check.interval.ms",
        "int",
        300_000,
        "How often segments are rolled by age and deleted.",
        minimum=1,
    )
    log_cleaner_enable: bool = option_field(
        "log.cleaner.enable", "bool", True, "Whether logs with cleanup.policy=compact are compacted."
    )
    log_cleaner_backoff_ms: int = option_field(
        "log.cleaner.backoff.ms",
        "int",
        15_000,
        "How often logs are looked for that are to be compacted.",
        minimum=1,
    )
    log_cleaner_dedupe_buffer_size: int = option_field(
        "log.cleaner.dedupe.buffer.size",
        "int",
        128 * MIB,
        "Memory for the keys of a compaction, about 200 bytes each; for more keys it takes several passes.",
        minimum=MIB,
    )
    producer_id_expiration_ms: int = option_field(
        "producer.id.expiration.ms",
        "int",
        86_400_000,
        "How long a partition remembers the sequence numbers of a producer that writes nothing to it.",
        minimum=1,
    )
    log_initial_task_delay_ms: int = option_field(
        "log.initial.task.delay.ms",
        "int",
        30_000,
        "How long after the start the first such pass comes.",
        minimum=0,
    )
    log_flush_offset_checkpoint_interval_ms: int = option_field(
        "log.flush.offset.checkpoint.interval.ms",
        "int",
        60_000,
        "How often recovery points are written: what a start after a crash need not scan.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        for name in ("process_roles", "controller_quorum_voters", "group_consumer_assignors"):
            values = getattr(self, name)
            object.__setattr__(self, name, split_list(values) if isinstance(values, str) else tuple(values))
        for name in ("listeners", "advertised_listeners", "controller_listeners"):
            addresses = getattr(self, name)
            if isinstance(addresses, str):
                addresses = split_list(addresses)
            key = name.replace("_", ".")
            object.__setattr__(self, name, tuple(parse_address(each, key) for each in addresses))
        if self.log_dirs is not None:
            object.__setattr__(self, "log_dirs", str(self.log_dirs))
        self._check_relations()

    def _check_relations(self) -> None:
        """Raises ConfigError where two settings cannot both hold."""
        self.check_cluster(self.listeners, self.advertised_listeners)
        self.check_coordinators()
        if self.is_broker and not self.listeners:
            raise ConfigError(key="listeners", value="", allowed="at least one address")
        if self.advertised_listeners and len(self.advertised_listeners) != len(self.listeners):
            raise ConfigError(
                key="advertised.listeners",
                value=",".join(self.advertised_listeners),
                allowed=f"one address for each of the {len(self.listeners)} listeners",
            )
        if self.log_dirs is not None and "," in self.log_dirs:
            raise ConfigError(
                key="log.dirs", value=self.log_dirs, allowed="one directory (several are not supported)"
            )
        if self.message_max_bytes > self.socket_request_max_bytes:
            raise ConfigError(
                key="message.max.bytes",
                value=self.message_max_bytes,
                allowed=f"at most socket.request.max.bytes, {self.socket_request_max_bytes}",
            )
        if self.log_roll_jitter_ms > self.log_roll_ms:
            raise ConfigError(
                key="log.roll.jitter.ms",
                value=self.log_roll_jitter_ms,
                allowed=f"at most log.roll.ms, {self.log_roll_ms}",
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, source: str = "") -> BrokerConfig:
        """From settings in any spelling (``log.retention.ms``, ``log_retention_ms``). Raises ConfigError."""
        parsed = parse_settings(settings, source=source)
        return cls(**{BROKER_OPTIONS.get(name).python_name: value for name, value in parsed.items()})

    def settings(self) -> dict[str, Any]:
        """{dotted name: value} of every option."""
        return {option.name: getattr(self, option.python_name) for option in BROKER_OPTIONS}

    def topic_defaults(self) -> dict[str, Any]:
        """Typed defaults by topic option name, where this broker's differ from Kafka's."""
        given = {name: getattr(self, BROKER_OPTIONS.get(name).python_name) for name in _TOPIC_DEFAULTS}
        return topic_defaults(
            {name: value for name, value in given.items() if value != BROKER_OPTIONS.get(name).default}
        )


BROKER_OPTIONS: Final = OptionRegistry(field.metadata["option"] for field in fields(BrokerConfig))

#: Names of options whose values nobody is shown.
SECRET_OPTIONS: Final = frozenset(
    field.metadata["option"].name for field in fields(BrokerConfig) if field.metadata.get("is_secret")
)

assert [option.python_name for option in BROKER_OPTIONS] == [f.name for f in fields(BrokerConfig)]


def parse_settings(settings: Mapping[str, Any], *, source: str = "") -> dict[str, Any]:
    """Settings in any spelling -> {dotted name: typed value}; coarse units become milliseconds.

    ``log.retention.ms`` wins over ``.minutes`` and that over ``.hours``, as in Kafka. Raises ConfigError.
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
    """A config, and where each value came from: ``default``, a file, a variable, or ``flag``."""

    config: BrokerConfig
    sources: dict[str, str]


def load_settings(
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """The broker's settings: flags over environment over file over defaults.

    ``file`` is TOML, with nested tables or quoted dotted names. ``env`` holds ``KAFKALITE_LOG_RETENTION_MS``
    and the like; variables that name no option of the broker are somebody else's and are left alone.
    Raises ConfigError that names key, value, what is allowed, and the source.
    """
    values: dict[str, Any] = {}
    sources = {option.name: "default" for option in BROKER_OPTIONS}

    def take(settings: Mapping[str, Any], source: str) -> None:
        for name, value in parse_settings(settings, source=source).items():
            values[name] = value
            sources[name] = source

    if file is not None:
        take(_read_toml(Path(file)), str(file))
    for variable, text in sorted((env or {}).items()):  # ..._HOURS before ..._MS, which wins
        python_name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        is_ours = python_name in BROKER_OPTIONS or python_name.replace("_", ".") in _COARSE
        if variable.startswith(ENVIRONMENT_PREFIX) and is_ours:
            take({python_name: text}, variable)
    take({name: value for name, value in (overrides or {}).items() if value is not None}, "flag")
    try:
        config = BrokerConfig.from_settings(values)
    except ConfigError as error:
        source = error.source or sources.get(error.key, "")
        raise ConfigError(key=error.key, value=error.value, allowed=error.allowed, source=source) from None
    return Settings(config, sources)


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
