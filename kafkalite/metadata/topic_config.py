"""The options of a topic, the broker settings that are their defaults, and their effective values.

An option's value is the first of these that is set: the topic's override, the broker's override in the
metadata log (``kl config``), the broker's configuration, the default defined here. Names, meanings and
defaults are Kafka's; ``durability`` and ``retention.topic.bytes`` are kafkalite's own options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from kafkalite.errors import ConfigError
from kafkalite.limits import (
    MAX_PAYLOAD_BYTES,
    MAX_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    RECORD_BATCH_HEADER_BYTES,
)
from kafkalite.metadata.image import ClusterImage
from kafkalite.metadata.records import BROKER
from kafkalite.metadata.throttles import (
    FOLLOWER_RATE,
    FOLLOWER_REPLICAS,
    LEADER_RATE,
    LEADER_REPLICAS,
    REPLICA_ITEMS,
    UNLIMITED,
)
from kafkalite.options import KINDS, Option, OptionRegistry
from kafkalite.suggestions import did_you_mean

MAX_INT64: Final = 2**63 - 1
_DAY_MS: Final = 86_400_000

Source = Literal["default", "broker", "topic"]


class Setting(NamedTuple):
    """An effective, typed value and its source."""

    value: Any
    source: Source


def _option(
    name: str,
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float = MAX_INT64,
    choices: tuple[str, ...] | None = None,
    items: tuple[str, str] | None = None,
) -> Option:
    """Return a dynamic option of the same type as ``default``. A numeric option requires ``minimum``."""
    upper = None if minimum is None else maximum
    return Option(
        name,
        KINDS[type(default)],
        default,
        doc,
        minimum=minimum,
        maximum=upper,
        choices=choices,
        dynamic=True,
        items=items,
    )


TOPIC_OPTIONS: Final = OptionRegistry(
    [
        _option(
            "retention.ms",
            7 * _DAY_MS,
            "How long records are kept. A segment is deleted once its youngest record is older. -1 keeps all"
            " forever.",
            minimum=-1,
        ),
        _option(
            "retention.bytes",
            -1,
            "How large a partition may grow before its oldest whole segments are deleted. -1 sets no limit.",
            minimum=-1,
        ),
        _option(
            "retention.topic.bytes",
            -1,
            "How large a topic may grow before its oldest whole segments are deleted. Each partition has an"
            " equal share, unless retention.bytes is less. -1 sets no limit.",
            minimum=-1,
        ),
        _option(
            "segment.bytes",
            1024**3,
            "The largest size of a segment file; a batch that does not fit any more starts the next one.",
            minimum=MIN_SEGMENT_BYTES,
            maximum=MAX_SEGMENT_BYTES,
        ),
        _option(
            "segment.ms",
            7 * _DAY_MS,
            "The age at which a segment is closed even if it is not full, so that retention can delete it.",
            minimum=1,
        ),
        _option(
            "segment.jitter.ms",
            0,
            "A segment is closed up to this much earlier than segment.ms, at random, so that many partitions"
            " do not roll at once.",
            minimum=0,
        ),
        _option(
            "index.interval.bytes",
            4096,
            "How many bytes of log lie between two index entries: a read scans at most this much.",
            minimum=0,
            maximum=2**31 - 1,
        ),
        _option(
            "segment.index.bytes",
            10 * 1024**2,
            "The largest size of a segment's indexes; a segment whose offset index is full is closed.",
            minimum=8,
            maximum=2**31 - 1,
        ),
        _option(
            "cleanup.policy",
            "delete",
            "What happens to old records: delete removes segments by age and size; compact keeps the latest"
            " record of each key; compact,delete does both.",
            choices=("delete", "compact", "compact,delete", "delete,compact"),
        ),
        _option(
            "min.cleanable.dirty.ratio",
            0.5,
            "A log is compacted once this part of its closed segments, by bytes, has not been compacted yet.",
            minimum=0,
            maximum=1,
        ),
        _option(
            "min.compaction.lag.ms",
            0,
            "The minimum time for which a record is not compacted. The active segment never is.",
            minimum=0,
        ),
        _option(
            "delete.retention.ms",
            _DAY_MS,
            "How long a tombstone, a record without a value, is kept after its first compaction: a consumer"
            " that reads the whole log within that time sees the deletion.",
            minimum=0,
        ),
        _option(
            "file.delete.delay.ms",
            60_000,
            "How long the files of a deleted segment stay on disk under a .deleted name.",
            minimum=0,
        ),
        _option(
            "max.message.bytes",
            1024**2 + 12,
            "The largest record batch the broker takes, in bytes as sent: compressed, with its header.",
            minimum=RECORD_BATCH_HEADER_BYTES,
            maximum=MAX_PAYLOAD_BYTES,
        ),
        _option(
            "message.timestamp.type",
            "CreateTime",
            "Whose clock stamps the records: the producer's (CreateTime) or the broker's (LogAppendTime).",
            choices=("CreateTime", "LogAppendTime"),
        ),
        _option(
            "message.timestamp.before.max.ms",
            MAX_INT64,
            "How far before the broker's clock a batch's first timestamp may lie with CreateTime.",
            minimum=0,
        ),
        _option(
            "message.timestamp.after.max.ms",
            3_600_000,
            "How far after the broker's clock a batch's largest timestamp may lie with CreateTime.",
            minimum=0,
        ),
        _option(
            "compression.type",
            "producer",
            "The codec of stored batches. Only producer can be chosen: the broker keeps the bytes as they"
            " were sent.",
            choices=("producer",),
        ),
        _option(
            "min.insync.replicas",
            1,
            "With fewer replicas in sync, acks=all is refused and the high watermark does not move.",
            minimum=1,
            maximum=2**31 - 1,
        ),
        _option(
            "unclean.leader.election.enable",
            False,
            "Whether a replica that may lack committed records may lead if no other can: the partition"
            " becomes available, and records may be lost.",
        ),
        _option(
            "preallocate",
            False,
            "Reserve the whole segment on disk when it is opened instead of chunk by chunk.",
        ),
        _option(
            "durability",
            "fsync",
            "What an acknowledgement means: fsync counts only records on the disk, page-cache counts"
            " records that the operating system has accepted, as Kafka does.",
            choices=("fsync", "page-cache"),
        ),
        _option(
            LEADER_REPLICAS,
            (),
            "The replicas whose broker, while it leads the partition, sends records to followers that are"
            " not in sync at most at its leader.replication.throttled.rate.",
            items=REPLICA_ITEMS,
        ),
        _option(
            FOLLOWER_REPLICAS,
            (),
            "The replicas whose broker, while they are not in sync, fetches their records at most at its"
            " follower.replication.throttled.rate.",
            items=REPLICA_ITEMS,
        ),
    ]
)


class BrokerDefault(NamedTuple):
    """Names the topic option for which a broker setting is the default. ``factor`` converts the setting to
    the unit of the option."""

    topic_name: str
    factor: int = 1


_HOUR_MS: Final = 3_600_000

BROKER_DEFAULT_NAMES: Final[Mapping[str, BrokerDefault]] = {
    "log.retention.ms": BrokerDefault("retention.ms"),
    "log.retention.minutes": BrokerDefault("retention.ms", 60_000),
    "log.retention.hours": BrokerDefault("retention.ms", _HOUR_MS),
    "log.retention.bytes": BrokerDefault("retention.bytes"),
    "log.retention.topic.bytes": BrokerDefault("retention.topic.bytes"),
    "log.segment.bytes": BrokerDefault("segment.bytes"),
    "log.roll.ms": BrokerDefault("segment.ms"),
    "log.roll.hours": BrokerDefault("segment.ms", _HOUR_MS),
    "log.roll.jitter.ms": BrokerDefault("segment.jitter.ms"),
    "log.roll.jitter.hours": BrokerDefault("segment.jitter.ms", _HOUR_MS),
    "log.index.interval.bytes": BrokerDefault("index.interval.bytes"),
    "log.index.size.max.bytes": BrokerDefault("segment.index.bytes"),
    "log.cleanup.policy": BrokerDefault("cleanup.policy"),
    "log.cleaner.min.cleanable.ratio": BrokerDefault("min.cleanable.dirty.ratio"),
    "log.cleaner.min.compaction.lag.ms": BrokerDefault("min.compaction.lag.ms"),
    "log.cleaner.delete.retention.ms": BrokerDefault("delete.retention.ms"),
    "log.segment.delete.delay.ms": BrokerDefault("file.delete.delay.ms"),
    "message.max.bytes": BrokerDefault("max.message.bytes"),
    "log.message.timestamp.type": BrokerDefault("message.timestamp.type"),
    "log.message.timestamp.before.max.ms": BrokerDefault("message.timestamp.before.max.ms"),
    "log.message.timestamp.after.max.ms": BrokerDefault("message.timestamp.after.max.ms"),
    "compression.type": BrokerDefault("compression.type"),
    "min.insync.replicas": BrokerDefault("min.insync.replicas"),
    "unclean.leader.election.enable": BrokerDefault("unclean.leader.election.enable"),
    "log.preallocate": BrokerDefault("preallocate"),
    "durability": BrokerDefault("durability"),
}
"""{broker setting: topic option}. If several set one option, the first here is used: ms, minutes, hours."""


def _broker_option(name: str, default: BrokerDefault) -> Option:
    option = TOPIC_OPTIONS.get(default.topic_name)
    minimum, maximum = option.minimum, option.maximum
    if maximum is not None:
        maximum = int(maximum) // default.factor
    return Option(
        name,
        option.kind,
        None,
        f"The default of the topic option {option.name}. {option.doc}",
        minimum=minimum,
        maximum=maximum,
        choices=option.choices,
        dynamic=True,
    )


BROKER_DEFAULT_OPTIONS: Final = OptionRegistry(
    _broker_option(name, default) for name, default in BROKER_DEFAULT_NAMES.items()
)
"""The broker settings of BROKER_DEFAULT_NAMES as options, for the broker's own registry.

Their default is None, which stands for the default of the topic option.
"""

DYNAMIC_BROKER_OPTIONS: Final = OptionRegistry(
    [
        *BROKER_DEFAULT_OPTIONS,
        _option(
            LEADER_RATE,
            UNLIMITED,
            "How many bytes per second this broker may send of the partitions that it leads and that"
            " leader.replication.throttled.replicas lists, to followers that are not in sync.",
            minimum=1,
        ),
        _option(
            FOLLOWER_RATE,
            UNLIMITED,
            "How many bytes per second this broker may fetch of its replicas that"
            " follower.replication.throttled.replicas lists, while they are not in sync.",
            minimum=1,
        ),
    ]
)
"""The broker settings that can be changed while the broker runs."""


def topic_defaults(settings: Mapping[str, Any], *, source: str = "") -> dict[str, Any]:
    """Return {topic option: typed default} from broker settings. Ignores settings that are None, and settings
    that are not the default of a topic option.

    Raises ConfigError for a value that the option does not allow. -1 minutes or hours means -1 ms.
    """
    defaults: dict[str, Any] = {}
    for name, (topic_name, factor) in BROKER_DEFAULT_NAMES.items():
        given = settings.get(name)
        if given is None or topic_name in defaults:
            continue
        value = BROKER_DEFAULT_OPTIONS.get(name).parse(given, source=source)
        defaults[topic_name] = value * factor if factor != 1 and value > 0 else value
    return defaults


def topic_settings(
    image: ClusterImage, topic: str, broker_defaults: Mapping[str, Any], *, node_id: int | None = None
) -> dict[str, Setting]:
    """Return the effective value of every option of ``topic``: {option name: (typed value, source)}.

    ``broker_defaults`` has typed values by topic option name, as ``topic_defaults`` returns them. With
    ``node_id``, the overrides of that broker in the image apply too. A topic that is not in the image has no
    overrides.
    """
    settings = {option.name: Setting(option.default, "default") for option in TOPIC_OPTIONS}
    for name, value in broker_defaults.items():
        settings[name] = Setting(value, "broker")
    if node_id is not None:
        overrides = image.configs_of(BROKER, str(node_id))
        for name, value in topic_defaults(overrides).items() if overrides else ():
            settings[name] = Setting(value, "broker")
    for name, text in image.topic_configs(topic).items():
        settings[name] = Setting(TOPIC_OPTIONS.get(name).parse(text), "topic")
    return settings


def parse_topic_config(name: str, text: str | None) -> tuple[str, str | None]:
    """Return (dotted option name, canonical text) of an override. A text of None stays None.

    Raises ConfigError for an unknown name or an invalid value.
    """
    return _canonical(TOPIC_OPTIONS, name, text)


def parse_broker_config(name: str, text: str | None) -> tuple[str, str | None]:
    """Return a broker override as ``parse_topic_config`` does.

    Raises ConfigError for a name that is not in DYNAMIC_BROKER_OPTIONS, or an invalid value.
    """
    if name not in DYNAMIC_BROKER_OPTIONS:
        names = [option.name for option in DYNAMIC_BROKER_OPTIONS]
        advice = did_you_mean(name, names, otherwise=f"these can: {', '.join(names)}", cutoff=0.8)
        problem = "no option that can be changed while the broker runs"
        raise ConfigError(key=name, value=None, allowed=f"{problem}; {advice}")
    return _canonical(DYNAMIC_BROKER_OPTIONS, name, text)


_ONLY_CHOICE_BECAUSE: Final = {"compression.type": "the broker keeps batches as they were sent"}


def _canonical(options: OptionRegistry, name: str, text: str | None) -> tuple[str, str | None]:
    option = options.get(name)
    if text is None:
        return option.name, None
    try:
        return option.name, value_text(option.parse(text))
    except ConfigError as error:
        reason = _ONLY_CHOICE_BECAUSE.get(option.name.removeprefix("log."))
        if reason is None:
            raise
        raise ConfigError(key=option.name, value=text, allowed=f"{error.allowed}: {reason}") from error


def value_text(value: Any) -> str:
    """Return text that parses to the same typed value, for example true, 604800000 or a,b."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ",".join(value)
    return str(value)
