"""What may be said with ``.option(...)``: names, defaults and bounds of Spark's Kafka connector, and ours.

The tables are in ``option_tables``. Keys are case-insensitive, for Spark lower-cases them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from kafkalite.client.config import CONSUMER_OPTIONS, PRODUCER_OPTIONS
from kafkalite.errors import ConfigError
from kafkalite.limits import MAX_TRANSACTIONAL_ID_LENGTH
from kafkalite.model import topic_name_problem
from kafkalite.options import OptionRegistry
from sparkbridge.errors import SparkOptionError, UnknownSparkOptionWarning
from sparkbridge.option_tables import REFUSED_BY_SINK, REFUSED_BY_SOURCE
from sparkbridge.option_tables import SINK_OPTIONS as SINK_OPTIONS
from sparkbridge.option_tables import SOURCE_OPTIONS as SOURCE_OPTIONS
from sparkbridge.option_tables import SparkOption as SparkOption
from sparkbridge.source.starting import (
    EndingSpec,
    StartingSpec,
    parse_ending_offsets,
    parse_ending_times,
    parse_starting_offsets,
    parse_starting_times,
)

_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1

# What Spark puts there itself, and what has a meaning to it: no reason for a warning.
_OF_SPARK: Final = {"path", "paths", "checkpointlocation", "queryname", "outputmode", "header"}
# The connector's guide lists it for the sink too, where the column headers decides.
_SILENT_AT_SINK: Final = {"includeheaders"}
# What the source does with its consumer's settings; it fetches by ranges, so the others have no use.
_READ_BY_SOURCE: Final = {
    "bootstrap.servers",
    "client.id",
    "fetch.max.bytes",
    "group.id",
    "isolation.level",
    "max.partition.fetch.bytes",
    "request.timeout.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "socket.connection.setup.timeout.ms",
}
_SECURITY: Final = re.compile(r"kafka\.(sasl|ssl|security)\.")

_SIZE: Final = re.compile(r"(\d{1,19})\s*(?:([kmgt]?)i?b?)?", re.IGNORECASE)
_SIZE_FACTOR: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION: Final = re.compile(r"(\d{1,15})\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_DURATION_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_ADDRESS: Final = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How to reach the cluster. ``producer`` and ``consumer`` are dotted settings of our clients."""

    bootstrap_servers: str
    client_id: str = "spark"
    request_timeout_ms: int = 30_000
    is_read_committed: bool = True
    producer: Mapping[str, str] = field(default_factory=dict, hash=False)
    consumer: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What ``spark.read`` and ``spark.readStream`` were told. Exactly one of the first three is not None."""

    client: ClientOptions
    assign: Mapping[str, tuple[int, ...]] | None
    subscribe: tuple[str, ...] | None
    subscribe_pattern: str | None
    starting: StartingSpec
    ending: EndingSpec | None
    fail_on_data_loss: bool
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    max_bytes_per_trigger: int | None
    min_partitions: int | None
    max_records_per_partition: int | None
    include_headers: bool
    headers_as_map: bool
    group_id: str | None
    group_id_prefix: str
    commit_group_offsets: bool
    fetch_offset_retries: int
    fetch_offset_retry_interval_ms: int
    poll_timeout_ms: int
    latest_offset_max_wait_ms: int

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
        """Raises SparkOptionError; warns (UnknownSparkOptionWarning) of what nothing reads."""
        given = _Given(options, SOURCE_OPTIONS, "source", is_stream=is_stream)
        given.refuse(REFUSED_BY_SOURCE)
        settings = given.kafka_settings(CONSUMER_OPTIONS)
        assign, subscribe, pattern = _topics(given)
        group_id: str | None = given.text("kafka.group.id")
        min_offsets, max_offsets = given.number("minOffsetsPerTrigger"), given.number("maxOffsetsPerTrigger")
        if min_offsets is not None and max_offsets is not None and min_offsets > max_offsets:
            raise SparkOptionError(
                f"minOffsetsPerTrigger is {min_offsets}, more than maxOffsetsPerTrigger ({max_offsets})",
                hint="make the minimum the smaller one",
            )
        headers_as_map = given.flag("headersAsMap")
        if headers_as_map and given.has("includeHeaders") and not given.flag("includeHeaders"):
            raise SparkOptionError(
                "headersAsMap is true, but includeHeaders is false", hint="leave one of them out"
            )
        group_id_prefix = given.text("groupIdPrefix") or "spark-kafka-source"
        starting = _starting(given, group_id)
        ending = _ending(given)
        max_bytes = given.text("maxBytesPerTrigger")
        parsed = cls(
            client=_client(given, {"client.id": group_id or group_id_prefix} | settings, is_source=True),
            assign=assign,
            subscribe=subscribe,
            subscribe_pattern=pattern,
            starting=starting,
            ending=ending,
            fail_on_data_loss=given.flag("failOnDataLoss"),
            max_offsets_per_trigger=max_offsets if is_stream else None,
            min_offsets_per_trigger=min_offsets if is_stream else None,
            max_trigger_delay_ms=parse_duration(given.text("maxTriggerDelay") or "15m", "maxTriggerDelay"),
            max_bytes_per_trigger=None if max_bytes is None else parse_size(max_bytes, "maxBytesPerTrigger"),
            min_partitions=given.number("minPartitions"),
            max_records_per_partition=given.number("maxRecordsPerPartition"),
            include_headers=headers_as_map or given.flag("includeHeaders"),
            headers_as_map=headers_as_map,
            group_id=group_id,
            group_id_prefix=group_id_prefix,
            commit_group_offsets=given.flag("commitGroupOffsets") and group_id is not None and is_stream,
            fetch_offset_retries=given.value("fetchOffset.numRetries"),
            fetch_offset_retry_interval_ms=given.value("fetchOffset.retryIntervalMs"),
            poll_timeout_ms=given.value("kafkaConsumer.pollTimeoutMs"),
            latest_offset_max_wait_ms=given.value("latestOffset.maxWaitMs"),
        )
        if given.has("commitGroupOffsets") and given.flag("commitGroupOffsets") and group_id is None:
            raise SparkOptionError(
                "commitGroupOffsets is true, but there is no kafka.group.id to commit for",
                hint="set kafka.group.id",
            )
        if group_id is not None:
            given.ignored("groupIdPrefix", "kafka.group.id is set")
        for name in sorted(settings.keys() - _READ_BY_SOURCE):
            given.ignored(f"kafka.{name}", "the source fetches ranges of offsets, where it has no meaning")
        given.warn()
        return parsed


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What ``df.write`` and ``df.writeStream`` were told."""

    client: ClientOptions
    topic: str | None
    partitioner: str
    exactly_once: bool
    sink_name: str | None
    transactional_id_prefix: str
    txn_app_id: str | None
    txn_version: int | None
    transaction_timeout_ms: int

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_stream: bool) -> SinkOptions:
        """Raises SparkOptionError; warns (UnknownSparkOptionWarning) of what nothing reads."""
        given = _Given(options, SINK_OPTIONS, "sink", is_stream=is_stream)
        given.refuse(REFUSED_BY_SINK)
        settings = given.kafka_settings(PRODUCER_OPTIONS)
        topic = given.text("topic")
        problem = None if topic is None else topic_name_problem(topic)
        if problem is not None:
            raise SparkOptionError(f"topic is {topic!r}: {problem}", hint="name one topic")
        exactly_once = given.flag("exactlyOnce")
        if exactly_once:
            _check_exactly_once(settings)
        txn_app_id, txn_version = given.text("txnAppId"), given.number("txnVersion")
        if (txn_app_id is None) != (txn_version is None):
            raise SparkOptionError(
                f"{'txnVersion' if txn_app_id is None else 'txnAppId'} is set without the other",
                hint="a job submitted again is known by both, txnAppId and txnVersion",
            )
        if txn_app_id is not None and not is_stream and not exactly_once:
            raise SparkOptionError(
                "txnAppId needs exactlyOnce, which is false", hint="leave out txnAppId and txnVersion"
            )
        names = {name: given.text(name) for name in ("sinkName", "transactionalIdPrefix", "txnAppId")}
        for name, value in names.items():
            if value is not None and len(value) > MAX_TRANSACTIONAL_ID_LENGTH // 4:
                raise SparkOptionError(
                    f"{name} has {len(value)} characters, more than {MAX_TRANSACTIONAL_ID_LENGTH // 4}",
                    hint="it is part of a name that the brokers keep",
                )
        given.warn(silent=_SILENT_AT_SINK)
        return cls(
            client=_client(given, settings, is_source=False),
            topic=topic,
            partitioner=given.value("partitioner"),
            exactly_once=exactly_once,
            sink_name=names["sinkName"],
            transactional_id_prefix=names["transactionalIdPrefix"] or "spark",
            txn_app_id=None if is_stream else txn_app_id,
            txn_version=None if is_stream else txn_version,
            transaction_timeout_ms=given.value("kafka.transaction.timeout.ms"),
        )


class _Given:
    """The options of one source or sink, by lower-case name, with what its table says of them."""

    def __init__(
        self, options: Mapping[str, str], table: tuple[SparkOption, ...], kind: str, *, is_stream: bool
    ) -> None:
        self.values = {str(key).lower(): str(value) for key, value in options.items() if value is not None}
        self.table = {row.name.lower(): row for row in table if row.name != "kafka.*"}
        self.kind = kind
        self.is_stream = is_stream
        self.warnings: list[str] = []
        self.known: set[str] = set()  # those beginning with "kafka." that our client knows
        self.refused: Collection[str] = ()

    def has(self, name: str) -> bool:
        return name.lower() in self.values

    def value(self, name: str) -> Any:
        """As its type: what was given, or the default. None for a default that is empty."""
        row = self.table[name.lower()]
        text = self.values.get(name.lower())
        if text is not None:
            return row.parse(text)
        return row.parse(row.default) if row.default else None

    def text(self, name: str) -> str | None:
        """Raises SparkOptionError for an empty one."""
        value: str | None = self.value(name)
        if value is not None and not value.strip():
            raise SparkOptionError(f"{name} is empty", hint=self.table[name.lower()].doc)
        return value

    def number(self, name: str) -> int | None:
        value: int | None = self.value(name)
        return value

    def flag(self, name: str) -> bool:
        return bool(self.value(name))

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Raises SparkOptionError for an option that is ours to set, and for security that we don't have."""
        self.refused = refused
        for name in sorted(self.values):
            if name in refused:
                raise SparkOptionError(f"{name} is not supported by the {self.kind}", hint=refused[name])
            if name == "kafka.security.protocol" and self.values[name].upper() == "PLAINTEXT":
                self.known.add(name)
            elif _SECURITY.match(name):
                raise SparkOptionError(
                    f"{name} is set, but this client speaks plain TCP only",
                    hint="leave it out, and keep the brokers in a network that you trust",
                )

    def kafka_settings(self, registry: OptionRegistry) -> dict[str, str]:
        """The ``kafka.`` options that our client knows, without the prefix. Raises SparkOptionError."""
        settings: dict[str, str] = {}
        for name, value in self.values.items():
            dotted = name.removeprefix("kafka.")
            if dotted == name or dotted not in registry:
                continue
            try:
                registry.get(dotted).parse(value)
            except ConfigError as cause:
                raise SparkOptionError(
                    f"kafka.{cause}", hint=f"it is a setting of the {self.kind}'s Kafka client"
                ) from cause
            settings[registry.get(dotted).name] = value
            self.known.add(name)
        return settings

    def ignored(self, name: str, why: str) -> None:
        if self.has(name):
            self.warnings.append(f"{name} is ignored: {why}")

    def warn(self, silent: Collection[str] = ()) -> None:
        """One warning for each option that nothing reads, with the nearest name that there is."""
        way = "stream" if self.is_stream else "batch"
        for row in self.table.values():
            if row.applies not in {"both", way}:
                self.ignored(row.name, f"it is one of {'batch jobs' if self.is_stream else 'streams'}")
        for name in sorted(self.values):
            if name in self.table or name in self.known or name in silent or name in _OF_SPARK:
                continue
            near = self._nearest(name)
            other = "sink" if self.kind == "source" else "source"
            hint = f"; did you mean {near}?" if near else ""
            hint = f"; it is one of the {other}" if _is_option_of(other, name) else hint
            self.warnings.append(f"{name} is no option of the kafkalite {self.kind} and is ignored{hint}")
        for text in self.warnings:
            warnings.warn(text, UnknownSparkOptionWarning, stacklevel=3)

    def _nearest(self, name: str) -> str | None:
        spelling = {lower: row.name for lower, row in self.table.items()}
        registry = CONSUMER_OPTIONS if self.kind == "source" else PRODUCER_OPTIONS
        settings = [f"kafka.{option.name}" for option in registry]
        spelling |= {setting: setting for setting in settings if setting not in self.refused}
        if f"kafka.{name}" in spelling:
            return spelling[f"kafka.{name}"]
        near = get_close_matches(name, spelling, n=1, cutoff=0.75)
        return spelling[near[0]] if near else None


def _is_option_of(kind: str, name: str) -> bool:
    table, registry = (
        (SOURCE_OPTIONS, CONSUMER_OPTIONS) if kind == "source" else (SINK_OPTIONS, PRODUCER_OPTIONS)
    )
    is_setting = name.startswith("kafka.") and name.removeprefix("kafka.") in registry
    return is_setting or name in {row.name.lower() for row in table}


def _client(given: _Given, settings: Mapping[str, str], *, is_source: bool) -> ClientOptions:
    text = given.values.get("kafka.bootstrap.servers", "")
    servers = [part.strip() for part in text.split(",") if part.strip()]
    if not servers:
        near = "bootstrap.servers" if given.has("bootstrap.servers") else ""
        raise SparkOptionError(
            "kafka.bootstrap.servers is not set" + (f", but {near} is" if near else ""),
            hint="name one broker or more: .option('kafka.bootstrap.servers', 'host:9092')",
        )
    for server in servers:
        match = _ADDRESS.fullmatch(server)
        if match is None or not 1 <= int(match[1]) <= 65_535:
            raise SparkOptionError(
                f"kafka.bootstrap.servers has {server!r}, which is no address",
                hint="write host:port, several of them with commas",
            )
    own = {"bootstrap.servers", "client.id", "transaction.timeout.ms", "isolation.level", "group.id"}
    rest = {name: value for name, value in settings.items() if name not in own}
    level = given.value("kafka.isolation.level") if is_source else "read_committed"
    return ClientOptions(
        bootstrap_servers=",".join(servers),
        client_id=settings.get("client.id", "spark"),
        request_timeout_ms=int(settings.get("request.timeout.ms", "30000")),
        is_read_committed=level == "read_committed",
        producer={} if is_source else rest,
        consumer=rest if is_source else {},
    )


def _topics(
    given: _Given,
) -> tuple[dict[str, tuple[int, ...]] | None, tuple[str, ...] | None, str | None]:
    """(assign, subscribe, subscribePattern), exactly one of them. Raises SparkOptionError."""
    names = [name for name in ("assign", "subscribe", "subscribePattern") if given.has(name)]
    if len(names) != 1:
        said = " and ".join(names) + " are set" if names else "none of them is set"
        raise SparkOptionError(
            f"exactly one of assign, subscribe and subscribePattern says what to read, but {said}",
            hint=".option('subscribe', 'topic1,topic2')",
        )
    if names == ["assign"]:
        return _assign(given.values["assign"]), None, None
    if names == ["subscribe"]:
        topics: tuple[str, ...] = tuple(dict.fromkeys(given.value("subscribe")))
        if not topics:
            raise SparkOptionError("subscribe names no topic", hint=".option('subscribe', 'topic1,topic2')")
        for topic in topics:
            problem = topic_name_problem(topic)
            if problem is not None:
                raise SparkOptionError(
                    f"subscribe: {problem}", hint="subscribePattern takes a regular expression"
                )
        return None, topics, None
    pattern = given.text("subscribePattern")
    try:
        re.compile(pattern or "")
    except (re.error, OverflowError, RecursionError) as cause:
        raise SparkOptionError(
            f"subscribePattern is {(pattern or '')[:200]!r}, which is no regular expression: {cause}",
            hint="it is Python's, and matches a topic's whole name: logs-.*",
        ) from cause
    return None, None, pattern


def _assign(text: str) -> dict[str, tuple[int, ...]]:
    example = 'write {"topic1":[0,1],"topic2":[0]}'
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise SparkOptionError(
            f"assign is {text[:200]!r}, which is no json: {cause}", hint=example
        ) from cause
    if not isinstance(told, dict) or not told:
        raise SparkOptionError(f"assign is {text[:200]!r}, which names no topic", hint=example)
    assign: dict[str, tuple[int, ...]] = {}
    for topic, numbers in told.items():
        problem = topic_name_problem(topic)
        if problem is not None:
            raise SparkOptionError(f"assign: {problem}", hint=example)
        if not isinstance(numbers, list) or not numbers:
            raise SparkOptionError(f"assign names no partition of topic {topic}", hint=example)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MAX_INT:
                raise SparkOptionError(f"assign has the partition {number!r} of topic {topic}", hint=example)
        assign[topic] = tuple(sorted(set(numbers)))
    return assign


def _starting(given: _Given, group_id: str | None) -> StartingSpec:
    """startingTimestamp goes before startingOffsetsByTimestamp before startingOffsets."""
    is_latest = given.value("startingOffsetsByTimestampStrategy") == "latest"
    spec: StartingSpec | None = None
    for name in ("startingTimestamp", "startingOffsetsByTimestamp"):
        text = given.text(name)
        if text is not None and spec is None:
            spec = parse_starting_times(text, name, is_latest_without_match=is_latest)
    if spec is not None:
        return spec
    by_default = "latest" if given.is_stream else "earliest"
    text = given.text("startingOffsets") if given.has("startingOffsets") else by_default
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


def _ending(given: _Given) -> EndingSpec | None:
    """As the starting ones. None in a stream without a bound."""
    for name in ("endingTimestamp", "endingOffsetsByTimestamp"):
        text = given.text(name)
        if text is not None:
            return parse_ending_times(text, name)
    spec = parse_ending_offsets(given.text("endingOffsets") or "latest")
    is_bound = any(where.kind != "latest" for where in spec.places())
    return spec if is_bound or not given.is_stream else None


def _check_exactly_once(settings: Mapping[str, str]) -> None:
    for name, allowed in (("acks", {"all", "-1"}), ("enable.idempotence", {"true", "yes", "on", "1"})):
        value = settings.get(name)
        if value is not None and value.strip().lower() not in allowed:
            raise SparkOptionError(
                f"kafka.{name} is {value}, which can't be with exactlyOnce",
                hint="leave it out, or set exactlyOnce=false",
            )


def parse_size(text: str, name: str) -> int:
    """``10m`` -> bytes, as Spark reads sizes: k, m, g, t are powers of 1024. Raises SparkOptionError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(match[1]) * _SIZE_FACTOR[(match[2] or "").lower()]
    if not 1 <= size <= _MAX_LONG:
        raise SparkOptionError(
            f"{name} is {text!r}, but must be a size above 0", hint="write 1000000, 512k, 10m or 1g"
        )
    return size


def parse_duration(text: str, name: str) -> int:
    """``15m`` -> milliseconds, as Spark reads durations; a bare number is ms. Raises SparkOptionError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise SparkOptionError(
            f"{name} is {text!r}, but must be a duration", hint="write 500ms, 30s, 15m or 1h"
        )
    return int(match[1]) * _DURATION_MS[(match[2] or "ms").lower()]
