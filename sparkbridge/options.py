"""Declares the options of the source and the sink: those of Spark's Kafka connector and additional ones.

The fields of SourceOptions and SinkOptions declare the options. Parsing and the tables in docs/spark.md are
derived from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kafkalite.client.config import ADMIN_OPTIONS, CONSUMER_OPTIONS, PRODUCER_OPTIONS, admin_config
from kafkalite.errors import ConfigError
from kafkalite.tls_options import PLAINTEXT, WITH_LOGIN, WITH_TLS
from sparkbridge.errors import SparkOptionError
from sparkbridge.option_reader import OptionReader, declared, option, row, rows_of
from sparkbridge.option_values import (
    check_name_length,
    check_pattern,
    check_topic,
    parse_assign,
    parse_duration,
    parse_servers,
    parse_size,
    parse_subscribe,
)
from sparkbridge.position_specs import (
    EndingSpec,
    StartingSpec,
    parse_ending_offsets,
    parse_ending_times,
    parse_starting_offsets,
    parse_starting_times,
)

_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1
_LONG: Final[dict[str, Any]] = {"kind": "int", "minimum": 1, "maximum": _MAX_LONG}
_REQUEST_TIMEOUT_MS: Final[int] = CONSUMER_OPTIONS.get("request.timeout.ms").default

# Spark's connector guide lists this option for the sink too, but a sink needs only the column ``headers``.
_SILENT_AT_SINK: Final = {"includeheaders"}
#: The client settings that protect connections.
_SECURITY: Final = frozenset(
    each.name for each in ADMIN_OPTIONS if each.name.startswith(("security.", "ssl.", "sasl."))
)
# The consumer settings that the source uses. Other settings have no effect, because it fetches offset ranges.
_READ_BY_SOURCE: Final = _SECURITY | {
    "bootstrap.servers",
    "client.id",
    "client.rack",
    "fetch.max.bytes",
    "group.id",
    "isolation.level",
    "max.partition.fetch.bytes",
    "request.timeout.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "socket.connection.setup.timeout.ms",
}

# Options that a user cannot set, each with a hint.
_REFUSED_BY_BOTH: Final = {
    "kafka.interceptor.classes": "interceptors might change records under the query; transform them in Spark"
}
_REFUSED_BY_SOURCE: Final = _REFUSED_BY_BOTH | {
    "kafka.auto.offset.reset": "startingOffsets says where to start, failOnDataLoss what a loss means",
    "kafka.key.deserializer": "keys are bytes: cast or decode the column key",
    "kafka.value.deserializer": "values are bytes: cast or decode the column value",
    "kafka.enable.auto.commit": "Spark keeps the offsets; commitGroupOffsets shows them to group tools",
}
_REFUSED_BY_SINK: Final = _REFUSED_BY_BOTH | {
    "kafka.key.serializer": "keys are string or binary: cast the column key",
    "kafka.value.serializer": "values are string or binary: cast the column value",
    "kafka.partitioner.class": "choose with the option partitioner, or fill the column partition",
    "kafka.partitioner": "it is the option partitioner",
    "kafka.transactional.id": "it is made of transactionalIdPrefix and the sink's or the query's name",
}

_BOOTSTRAP: Final = row(
    "kafka.bootstrap.servers",
    "The brokers to connect to first: host:port,host:port. Required.",
    convert=parse_servers,
)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The client settings of a source or sink. The mappings hold other settings by dotted name.

    ``producer`` is empty for a source, and ``consumer`` is empty for a sink. ``security`` may contain
    passwords, so ``repr`` omits it (S19).
    """

    bootstrap_servers: str
    client_id: str = "spark"
    request_timeout_ms: int = _REQUEST_TIMEOUT_MS
    is_read_committed: bool = True
    security: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    producer: Mapping[str, str] = field(default_factory=dict, hash=False)
    consumer: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of ``spark.read`` and ``spark.readStream``.

    Exactly one of ``assign``, ``subscribe`` and ``subscribe_pattern`` is not None.
    """

    client: ClientOptions = declared(
        _BOOTSTRAP,
        row(
            "kafka.isolation.level",
            "Whether records of open and aborted transactions are read: read_committed or read_uncommitted.",
            default="read_committed",
            choices=("read_committed", "read_uncommitted"),
        ),
    )
    assign: Mapping[str, tuple[int, ...]] | None = option(
        'The partitions to read: {"t":[0,1]}. Set only one of assign, subscribe and subscribePattern.',
        convert=parse_assign,
    )
    subscribe: tuple[str, ...] | None = option(
        "The topics to read: t1,t2.", kind="list", convert=parse_subscribe
    )
    subscribe_pattern: str | None = option(
        "A Python regular expression. Topics whose whole name matches are read.", convert=check_pattern
    )
    starting: StartingSpec = declared(
        row(
            "startingOffsets",
            "Where a new query starts: earliest, latest (streams), group (the offsets that kafka.group.id "
            "has committed), "
            '-100 (that many before the end), or json by topic {"t":"earliest"} or partition '
            '{"t":{"0":23,"1":-2}}, where -2 is earliest and -1 latest.',
            default="latest (stream), earliest (batch)",
        ),
        row(
            "startingOffsetsByTimestamp",
            'Start at the first record with this timestamp or a later one: {"t":{"0":1431857103000}}, or '
            '{"t":"-10m"}. Overrides startingOffsets.',
        ),
        row(
            "startingTimestamp",
            "One time for all partitions: milliseconds, ISO 8601, or -10m. Overrides "
            "startingOffsetsByTimestamp.",
        ),
        row(
            "startingOffsetsByTimestampStrategy",
            "If all records of a partition are older: error, or latest, which starts at its end.",
            default="error",
            choices=("error", "latest"),
        ),
    )
    ending: EndingSpec | None = declared(
        row(
            "endingOffsets",
            "Where to end, exclusive: latest, -100 (that many before the end), or json of offsets, where "
            "-1 is latest. A stream never reads beyond it; a relative end counts from the end at the start "
            "of each run.",
            default="latest",
        ),
        row(
            "endingOffsetsByTimestamp",
            "End before the first record with this timestamp or a later one, by topic or partition. "
            "Overrides endingOffsets.",
        ),
        row("endingTimestamp", "One time for all partitions. Overrides endingOffsetsByTimestamp."),
    )
    fail_on_data_loss: bool = option(
        "Whether the query fails if records were deleted before they were read. If false, it warns.",
        default=True,
    )
    max_offsets_per_trigger: int | None = option(
        "The most offsets of one batch, divided in proportion to the lag of each partition.",
        applies="stream",
        **_LONG,
    )
    min_offsets_per_trigger: int | None = option(
        "The fewest offsets that make a batch; maxTriggerDelay limits the wait for them.",
        applies="stream",
        **_LONG,
    )
    max_trigger_delay_ms: int = option(
        "How long minOffsetsPerTrigger may delay a batch: 500ms, 30s, 15m, 1h.",
        name="maxTriggerDelay",
        default="15m",
        applies="stream",
        convert=parse_duration,
    )
    max_bytes_per_trigger: int | None = option(
        "The most bytes of one batch as stored in the log: 1000000, 10m, 1g. At least one record batch is "
        "read.",
        applies="stream",
        convert=parse_size,
    )
    min_partitions: int | None = option(
        "The number of tasks to aim for: large ranges are split to reach it.",
        kind="int",
        minimum=1,
        maximum=_MAX_INT,
    )
    max_records_per_partition: int | None = option(
        "The most offsets that one task reads. Applied before minPartitions.", **_LONG
    )
    include_headers: bool = option("Whether rows have the column headers.", default=False)
    headers_as_map: bool = option(
        "Whether headers is a map, with the last header of each name, instead of an array.", default=False
    )
    group_id: str | None = option(
        "The group whose committed offsets show the progress, and which startingOffsets=group reads.",
        name="kafka.group.id",
    )
    group_id_prefix: str = option(
        "The client id of the query if neither kafka.group.id nor kafka.client.id is set.",
        default="spark-kafka-source",
    )
    commit_group_offsets: bool = option(
        "Whether finished batches are committed for kafka.group.id, so that tools show the lag.",
        default=True,
        applies="stream",
    )
    fetch_offset_retries: int = option(
        "How often to retry before a missing topic, or an end that moved back, is accepted as it is.",
        name="fetchOffset.numRetries",
        default=3,
        minimum=0,
        maximum=1000,
    )
    fetch_offset_retry_interval_ms: int = option(
        "The pause between the retries of fetchOffset.numRetries.",
        name="fetchOffset.retryIntervalMs",
        default=10,
        minimum=0,
        maximum=_MAX_INT,
    )
    poll_timeout_ms: int = option(
        "How long a task may wait for records that were planned for it.",
        name="kafkaConsumer.pollTimeoutMs",
        default=120_000,
        minimum=1,
        maximum=_MAX_INT,
    )
    latest_offset_max_wait_ms: int = option(
        "How long an idle trigger waits at the brokers for new data. 0 does not wait.",
        name="latestOffset.maxWaitMs",
        default=150,
        applies="stream",
        minimum=0,
        maximum=60_000,
    )

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
        """Parse the options of a source.

        Raises SparkOptionError. Issues an UnknownSparkOptionWarning for each option without effect.
        """
        if not options:
            raise SparkOptionError(
                "no option is set; Spark passes none for a table that CREATE TABLE has made",
                hint="use CREATE TEMPORARY VIEW name USING kafkalite OPTIONS (…), or SELECT … FROM name WITH "
                "(…)",
            )
        given = OptionReader(options, SOURCE_OPTIONS, CONSUMER_OPTIONS, "source", is_stream=is_stream)
        given.refuse(_REFUSED_BY_SOURCE)
        settings = given.client_settings()
        _check_subscription(given)
        found = given.values_of(cls)
        min_offsets, max_offsets = found["min_offsets_per_trigger"], found["max_offsets_per_trigger"]
        if min_offsets is not None and max_offsets is not None and min_offsets > max_offsets:
            raise SparkOptionError(
                f"minOffsetsPerTrigger is {min_offsets}, more than maxOffsetsPerTrigger ({max_offsets})",
                hint="make the minimum the smaller one",
            )
        if found["headers_as_map"] and given.has("includeHeaders") and not found["include_headers"]:
            raise SparkOptionError(
                "headersAsMap is true, but includeHeaders is false", hint="leave one of them out"
            )
        group_id: str | None = found["group_id"]
        if given.has("commitGroupOffsets") and found["commit_group_offsets"] and group_id is None:
            raise SparkOptionError(
                "commitGroupOffsets is true, but there is no kafka.group.id to commit for",
                hint="set kafka.group.id",
            )
        client_id = group_id or found["group_id_prefix"]
        found |= {
            "client": _client(given, {"client.id": client_id} | settings),
            "starting": _starting(given, group_id),
            "ending": _ending(given),
            "include_headers": found["headers_as_map"] or found["include_headers"],
            "commit_group_offsets": found["commit_group_offsets"] and group_id is not None and is_stream,
        }
        if not is_stream:
            found |= {"max_offsets_per_trigger": None, "min_offsets_per_trigger": None}
        if group_id is not None:
            given.ignored("groupIdPrefix", "kafka.group.id is set")
        for name in sorted(settings.keys() - _READ_BY_SOURCE):
            given.ignored(f"kafka.{name}", "the source fetches ranges of offsets, where it has no effect")
        given.warn(SINK_OPTIONS, PRODUCER_OPTIONS)
        return cls(**found)


SOURCE_OPTIONS: Final = (
    *rows_of(SourceOptions),
    row(
        "kafka.*",
        "Any other setting of the consumer: kafka.client.id, kafka.client.rack, kafka.request.timeout.ms, "
        "kafka.max.partition.fetch.bytes...",
    ),
)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of ``df.write`` and ``df.writeStream``."""

    client: ClientOptions = declared(_BOOTSTRAP)
    topic: str | None = option("The topic of all rows; overrides the column topic.", convert=check_topic)
    partitioner: str = option(
        "How rows without a partition are distributed: roundrobin and sticky (by key with murmur2, rows "
        "without a key in turn or at random), random, hash.",
        default="roundrobin",
        choices=PRODUCER_OPTIONS.get("partitioner").choices,
    )
    exactly_once: bool = option(
        "Whether a batch becomes visible atomically and once, or at least once and as it is written.",
        default=True,
    )
    sink_name: str | None = option(
        "The name of this sink within one query; required if foreachBatch writes more than once.",
        convert=check_name_length,
    )
    transactional_id_prefix: str = option(
        "The prefix of the application id that identifies the sink to the brokers.",
        default="spark",
        convert=check_name_length,
    )
    txn_app_id: str | None = option(
        "With txnVersion: a job that is submitted again with the same pair writes nothing.",
        applies="batch",
        convert=check_name_length,
    )
    txn_version: int | None = option(
        "Grows with each job of txnAppId; repeating the last one writes nothing, an older one is refused.",
        kind="int",
        applies="batch",
        minimum=0,
        maximum=_MAX_LONG,
    )
    transaction_timeout_ms: int = option(
        "The brokers abort a batch that is not committed within this time. They limit the value.",
        name="kafka.transaction.timeout.ms",
        default=600_000,
        minimum=1,
        maximum=_MAX_INT,
    )

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_stream: bool) -> SinkOptions:
        """Parse the options of a sink.

        Raises SparkOptionError. Issues an UnknownSparkOptionWarning for each option without effect.
        """
        given = OptionReader(options, SINK_OPTIONS, PRODUCER_OPTIONS, "sink", is_stream=is_stream)
        given.refuse(_REFUSED_BY_SINK)
        settings = given.client_settings()
        found = given.values_of(cls)
        txn_app_id, txn_version = found["txn_app_id"], found["txn_version"]
        if found["exactly_once"]:
            _check_exactly_once(settings)
        if (txn_app_id is None) != (txn_version is None):
            raise SparkOptionError(
                f"{'txnVersion' if txn_app_id is None else 'txnAppId'} is set without the other",
                hint="both identify a job that is submitted again: set txnAppId and txnVersion",
            )
        if txn_app_id is not None and not is_stream and not found["exactly_once"]:
            raise SparkOptionError(
                "txnAppId needs exactlyOnce, which is false", hint="leave out txnAppId and txnVersion"
            )
        found["client"] = _client(given, settings)
        given.warn(SOURCE_OPTIONS, CONSUMER_OPTIONS, silent=_SILENT_AT_SINK)
        if is_stream:
            found |= {"txn_app_id": None, "txn_version": None}
        return cls(**found)


SINK_OPTIONS: Final = (
    *rows_of(SinkOptions),
    row(
        "kafka.*",
        "Any other setting of the producer: kafka.compression.type, kafka.linger.ms, kafka.batch.size...",
    ),
)


def _client(given: OptionReader, settings: Mapping[str, str]) -> ClientOptions:
    if not given.has("kafka.bootstrap.servers"):
        near = ", but bootstrap.servers is" if given.has("bootstrap.servers") else ""
        raise SparkOptionError(
            f"kafka.bootstrap.servers is not set{near}",
            hint="name one broker or more: .option('kafka.bootstrap.servers', 'host:9092')",
        )
    is_source = given.kind == "source"
    own = {"bootstrap.servers", "client.id", "transaction.timeout.ms", "isolation.level", "group.id"}
    rest = {name: value for name, value in settings.items() if name not in own | _SECURITY}
    timeout_ms = settings.get("request.timeout.ms")
    servers = given.value("kafka.bootstrap.servers")
    return ClientOptions(
        bootstrap_servers=servers,
        security=_security(given, settings, servers),
        client_id=settings.get("client.id", "spark"),
        request_timeout_ms=_REQUEST_TIMEOUT_MS if timeout_ms is None else int(timeout_ms),
        is_read_committed=not is_source or given.value("kafka.isolation.level") == "read_committed",
        producer={} if is_source else rest,
        consumer=rest if is_source else {},
    )


def _security(given: OptionReader, settings: Mapping[str, str], servers: str) -> dict[str, str]:
    """Return the settings of TLS and of the login. Raises SparkOptionError if a client would refuse them."""
    security = {name: value for name, value in settings.items() if name in _SECURITY}
    if security:
        try:
            admin_config({"bootstrap.servers": servers, **security})
        except ConfigError as cause:
            hint = f"it is a setting of the {given.kind}'s Kafka client"
            raise SparkOptionError(f"kafka.{cause}", hint=hint) from cause
    protocol = security.get("security.protocol", PLAINTEXT)
    for prefix, protocols in (("ssl.", WITH_TLS), ("sasl.", WITH_LOGIN)):
        for name in sorted(security):
            if name.startswith(prefix) and protocol not in protocols:
                given.ignored(f"kafka.{name}", f"kafka.security.protocol is {protocol}")
    return security


def _check_subscription(given: OptionReader) -> None:
    names = [name for name in ("assign", "subscribe", "subscribePattern") if given.has(name)]
    if len(names) != 1:
        found = " and ".join(names) + " are set" if names else "none of them is set"
        raise SparkOptionError(
            f"exactly one of assign, subscribe and subscribePattern is needed, but {found}",
            hint=".option('subscribe', 'topic1,topic2')",
        )


def _starting(given: OptionReader, group_id: str | None) -> StartingSpec:
    """Return the start from startingTimestamp, else startingOffsetsByTimestamp, else startingOffsets.

    The default is latest for a stream, and earliest for a batch job. Raises SparkOptionError.
    """
    is_latest = given.value("startingOffsetsByTimestampStrategy") == "latest"
    spec: StartingSpec | None = None
    for name in ("startingTimestamp", "startingOffsetsByTimestamp"):
        text = given.value(name)
        if text is not None and spec is None:
            spec = parse_starting_times(text, name, is_latest_without_match=is_latest)
    if spec is not None:
        return spec
    by_default = "latest" if given.is_stream else "earliest"
    text = given.value("startingOffsets") if given.has("startingOffsets") else by_default
    spec = parse_starting_offsets(text or by_default)
    kinds = {where.kind for where in spec.places()}
    if "latest" in kinds and not given.is_stream:
        raise SparkOptionError(
            "startingOffsets can't be latest (-1) in a batch, which would read nothing",
            hint="take earliest, an offset, -100 for the last 100, or startingTimestamp",
        )
    if "group" in kinds and group_id is None:
        raise SparkOptionError(
            "startingOffsets is group, but there is no kafka.group.id", hint="set kafka.group.id"
        )
    return spec


def _ending(given: OptionReader) -> EndingSpec | None:
    """Return the end from endingTimestamp, else endingOffsetsByTimestamp, else endingOffsets.

    Returns None for a stream without an end. Raises SparkOptionError.
    """
    for name in ("endingTimestamp", "endingOffsetsByTimestamp"):
        text = given.value(name)
        if text is not None:
            return parse_ending_times(text, name)
    spec = parse_ending_offsets(given.value("endingOffsets") or "latest")
    is_bound = any(where.kind != "latest" for where in spec.places())
    return spec if is_bound or not given.is_stream else None


def _check_exactly_once(settings: Mapping[str, str]) -> None:
    for name, allowed in (("acks", {"all", "-1"}), ("enable.idempotence", {"true", "yes", "on", "1"})):
        value = settings.get(name)
        if value is not None and value.strip().lower() not in allowed:
            raise SparkOptionError(
                f"kafka.{name} is {value}, which exactlyOnce does not allow",
                hint="leave it out, or set exactlyOnce=false",
            )
