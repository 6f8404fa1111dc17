"""The tables of options: each declared once, for parsing, for the error texts and for the documentation.

Names and defaults are those of Spark's Kafka connector. A default stands here as the user would write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from kafkalite.client.config import PRODUCER_OPTIONS
from kafkalite.errors import ConfigError
from kafkalite.options import Kind, Option
from sparkbridge.errors import SparkOptionError

Applies = Literal["both", "stream", "batch"]


@dataclass(frozen=True, slots=True)
class SparkOption:
    """One row of the documentation's table. ``option`` parses what stands in ``default`` as text."""

    name: str
    default: str
    applies: Applies
    doc: str
    option: Option

    def parse(self, value: str) -> Any:
        """Raises SparkOptionError."""
        try:
            return self.option.parse(value)
        except ConfigError as cause:
            raise SparkOptionError(str(cause), hint=self.doc) from cause


def _row(name: str, kind: Kind, default: str, applies: Applies, doc: str, **bounds: Any) -> SparkOption:
    option = Option(name, kind, None, doc, **bounds)
    return SparkOption(name, default, applies, doc, option)


_MAX_INT: Final = 2**31 - 1
_MAX_LONG: Final = 2**63 - 1
_LONG: Final = {"minimum": 1, "maximum": _MAX_LONG}

_BOOTSTRAP: Final = _row(
    "kafka.bootstrap.servers",
    "string",
    "",
    "both",
    "Where to find a first broker: host:port,host:port. Required.",
)

SOURCE_OPTIONS: Final = (
    _BOOTSTRAP,
    _row("assign", "string", "", "both", 'The partitions to read: {"t":[0,1]}. One of these three.'),
    _row("subscribe", "list", "", "both", "The topics to read: t1,t2. One of these three."),
    _row(
        "subscribePattern",
        "string",
        "",
        "both",
        "A Python regular expression that a topic's whole name matches. One of these three.",
    ),
    _row(
        "startingOffsets",
        "string",
        "latest (stream), earliest (batch)",
        "both",
        "Where a new query starts: earliest, latest (streams), group (what kafka.group.id has committed), "
        '-100 (that many before the end), or json by topic {"t":"earliest"} or partition '
        '{"t":{"0":23,"1":-2}}, where -2 is earliest and -1 latest.',
    ),
    _row(
        "startingOffsetsByTimestamp",
        "string",
        "",
        "both",
        'Start at the first record of this time or a later one: {"t":{"0":1431857103000}}, or {"t":"-10m"}. '
        "Goes before startingOffsets.",
    ),
    _row(
        "startingTimestamp",
        "string",
        "",
        "both",
        "The same time for all partitions: milliseconds, ISO 8601, or -10m. Goes before "
        "startingOffsetsByTimestamp.",
    ),
    _row(
        "startingOffsetsByTimestampStrategy",
        "string",
        "error",
        "both",
        "What to do where all records are older: error, or latest, which starts at the end.",
        choices=("error", "latest"),
    ),
    _row(
        "endingOffsets",
        "string",
        "latest",
        "both",
        "Where to end, exclusive: latest, -100 (that many before the end), or json of offsets, where -1 is "
        "latest. In a stream it is a bound: nothing behind it is read, and a relative one counts from where "
        "each run begins.",
    ),
    _row(
        "endingOffsetsByTimestamp",
        "string",
        "",
        "both",
        "End before the first record of this time or a later one, by topic or partition. Goes before "
        "endingOffsets.",
    ),
    _row(
        "endingTimestamp",
        "string",
        "",
        "both",
        "The same time for all partitions. Goes before endingOffsetsByTimestamp.",
    ),
    _row(
        "failOnDataLoss",
        "bool",
        "true",
        "both",
        "Whether records that are gone before they were read fail the query, or are told in a warning.",
    ),
    _row(
        "maxOffsetsPerTrigger",
        "int",
        "",
        "stream",
        "The most offsets of one batch, shared out in proportion to each partition's lag.",
        **_LONG,
    ),
    _row(
        "minOffsetsPerTrigger",
        "int",
        "",
        "stream",
        "The fewest offsets that are worth a batch; maxTriggerDelay bounds the wait for them.",
        **_LONG,
    ),
    _row(
        "maxTriggerDelay",
        "string",
        "15m",
        "stream",
        "How long minOffsetsPerTrigger may hold a batch back: 500ms, 30s, 15m, 1h.",
    ),
    _row(
        "maxBytesPerTrigger",
        "string",
        "",
        "stream",
        "The most bytes of one batch as stored in the log: 1000000, 10m, 1g. At least one record batch is "
        "read.",
    ),
    _row(
        "minPartitions",
        "int",
        "",
        "both",
        "How many tasks to aim at: large ranges are split to get there.",
        minimum=1,
        maximum=_MAX_INT,
    ),
    _row(
        "maxRecordsPerPartition",
        "int",
        "",
        "both",
        "The most offsets one task reads. Applied first.",
        **_LONG,
    ),
    _row("includeHeaders", "bool", "false", "both", "Whether rows have the column headers."),
    _row(
        "headersAsMap",
        "bool",
        "false",
        "both",
        "Whether that column is a map, the last header of a name counting, instead of an array.",
    ),
    _row(
        "kafka.group.id",
        "string",
        "",
        "both",
        "The group whose committed offsets show the progress, and where startingOffsets=group starts.",
    ),
    _row(
        "groupIdPrefix",
        "string",
        "spark-kafka-source",
        "both",
        "The query's name in the brokers' logs when there is no kafka.group.id and no kafka.client.id.",
    ),
    _row(
        "commitGroupOffsets",
        "bool",
        "true",
        "stream",
        "Whether finished batches are committed for kafka.group.id, so that tools see the lag.",
    ),
    _row(
        "fetchOffset.numRetries",
        "int",
        "3",
        "both",
        "How often a topic that is gone, or an end that went back, is asked for again before it is believed.",
        minimum=0,
        maximum=1000,
    ),
    _row(
        "fetchOffset.retryIntervalMs",
        "int",
        "10",
        "both",
        "The pause between.",
        minimum=0,
        maximum=_MAX_INT,
    ),
    _row(
        "kafkaConsumer.pollTimeoutMs",
        "int",
        "120000",
        "both",
        "How long a task may wait for records that should be there.",
        minimum=1,
        maximum=_MAX_INT,
    ),
    _row(
        "latestOffset.maxWaitMs",
        "int",
        "150",
        "stream",
        "How long an idle trigger waits at the broker for news. 0 asks and returns.",
        minimum=0,
        maximum=60_000,
    ),
    _row(
        "kafka.isolation.level",
        "string",
        "read_committed",
        "both",
        "Whether records of open and aborted transactions are seen: read_committed or read_uncommitted.",
        choices=("read_committed", "read_uncommitted"),
    ),
    _row(
        "kafka.*",
        "string",
        "",
        "both",
        "Any other setting of the consumer: kafka.client.id, kafka.request.timeout.ms, "
        "kafka.max.partition.fetch.bytes...",
    ),
)

SINK_OPTIONS: Final = (
    _BOOTSTRAP,
    _row("topic", "string", "", "both", "The topic of all rows; goes before the column topic."),
    _row(
        "partitioner",
        "string",
        "roundrobin",
        "both",
        "Who chooses where the column partition does not: roundrobin and sticky (by key with murmur2, rows "
        "without a key in turn or by chance), random, hash.",
        choices=PRODUCER_OPTIONS.get("partitioner").choices,
    ),
    _row(
        "exactlyOnce",
        "bool",
        "true",
        "both",
        "Whether a batch becomes visible as a whole and once, or at least once and as it is written.",
    ),
    _row(
        "sinkName",
        "string",
        "",
        "both",
        "The name of this sink among those of one query; needed where foreachBatch writes more than once.",
    ),
    _row(
        "transactionalIdPrefix",
        "string",
        "spark",
        "both",
        "The begin of the application id that the brokers know the sink by.",
    ),
    _row(
        "txnAppId",
        "string",
        "",
        "batch",
        "With txnVersion: a job of the same pair that is submitted again writes nothing.",
    ),
    _row(
        "txnVersion",
        "int",
        "",
        "batch",
        "Grows with each job of txnAppId; the last one again writes nothing, an older one is refused.",
        minimum=0,
        maximum=_MAX_LONG,
    ),
    _row(
        "kafka.transaction.timeout.ms",
        "int",
        "600000",
        "both",
        "A batch not committed for so long is aborted by the broker, within what the broker allows.",
        minimum=1,
        maximum=_MAX_INT,
    ),
    _row(
        "kafka.*",
        "string",
        "",
        "both",
        "Any other setting of the producer: kafka.compression.type, kafka.linger.ms, kafka.batch.size...",
    ),
)

# What the connector keeps for itself, and what to do instead.
REFUSED_BY_BOTH: Final = {
    "kafka.interceptor.classes": "interceptors might change records under the query; transform them in Spark",
}
REFUSED_BY_SOURCE: Final = REFUSED_BY_BOTH | {
    "kafka.auto.offset.reset": "startingOffsets says where to start, failOnDataLoss what a loss means",
    "kafka.key.deserializer": "keys are bytes: cast or decode the column key",
    "kafka.value.deserializer": "values are bytes: cast or decode the column value",
    "kafka.enable.auto.commit": "Spark keeps the offsets; commitGroupOffsets shows them to group tools",
}
REFUSED_BY_SINK: Final = REFUSED_BY_BOTH | {
    "kafka.key.serializer": "keys are string or binary: cast the column key",
    "kafka.value.serializer": "values are string or binary: cast the column value",
    "kafka.partitioner.class": "choose with the option partitioner, or fill the column partition",
    "kafka.partitioner": "it is the option partitioner",
    "kafka.transactional.id": "it is made of transactionalIdPrefix and the sink's or the query's name",
}
