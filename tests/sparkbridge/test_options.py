"""Each option: its effect on the parsed options, and the values that it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from kafkalite.model import TopicPartition
from sparkbridge.errors import SparkOptionError, UnknownSparkOptionWarning
from sparkbridge.option_values import parse_duration, parse_size
from sparkbridge.options import SINK_OPTIONS, SOURCE_OPTIONS, ClientOptions, SinkOptions, SourceOptions
from sparkbridge.position_specs import EARLIEST, GROUP, LATEST, Where

SERVERS = {"kafka.bootstrap.servers": "one:9092,two:9093"}
LEAST = SERVERS | {"subscribe": "t"}
T0 = TopicPartition("t", 0)


def source(options: Mapping[str, str] | None = None, *, is_stream: bool = True, **more: Any) -> SourceOptions:
    return SourceOptions.parse(LEAST | dict(options or {}) | more, is_stream=is_stream)


def sink(options: Mapping[str, str] | None = None, *, is_stream: bool = True, **more: Any) -> SinkOptions:
    return SinkOptions.parse(SERVERS | dict(options or {}) | more, is_stream=is_stream)


# --- defaults --------------------------------------------------------------------------------------
def test_defaults_of_a_stream() -> None:
    options = source()
    assert options.client == ClientOptions("one:9092,two:9093", "spark-kafka-source")
    assert options.client.is_read_committed
    assert (options.assign, options.subscribe, options.subscribe_pattern) == (None, ("t",), None)
    assert (options.starting.everywhere, options.ending) == (LATEST, None)
    assert options.fail_on_data_loss
    assert (options.max_offsets_per_trigger, options.min_offsets_per_trigger) == (None, None)
    assert (options.max_trigger_delay_ms, options.max_bytes_per_trigger) == (900_000, None)
    assert (options.min_partitions, options.max_records_per_partition) == (None, None)
    assert (options.include_headers, options.headers_as_map) == (False, False)
    assert (options.group_id, options.group_id_prefix) == (None, "spark-kafka-source")
    assert not options.commit_group_offsets
    assert (options.fetch_offset_retries, options.fetch_offset_retry_interval_ms) == (3, 10)
    assert (options.poll_timeout_ms, options.latest_offset_max_wait_ms) == (120_000, 150)


def test_defaults_of_a_batch() -> None:
    options = source(is_stream=False)
    assert options.starting.everywhere == EARLIEST
    assert options.ending is not None
    assert options.ending.everywhere == LATEST


@pytest.mark.parametrize("is_stream", [True, False])
def test_defaults_of_a_sink(is_stream: bool) -> None:
    options = sink(is_stream=is_stream)
    assert options == SinkOptions(
        client=ClientOptions("one:9092,two:9093"),
        topic=None,
        partitioner="roundrobin",
        exactly_once=True,
        sink_name=None,
        transactional_id_prefix="spark",
        txn_app_id=None,
        txn_version=None,
        transaction_timeout_ms=600_000,
    )


def test_every_option_is_declared_once() -> None:
    for table in (SOURCE_OPTIONS, SINK_OPTIONS):
        names = [row.name.lower() for row in table]
        assert len(names) == len(set(names))
        for row in table:
            assert row.applies in {"both", "stream", "batch"}
            assert row.doc.endswith("."), row.name
            assert row.option.name == row.name


def test_keys_are_case_insensitive_and_none_is_not_set() -> None:
    options = SourceOptions.parse(
        {
            "KAFKA.BOOTSTRAP.SERVERS": "h:1",
            "SubScribe": "t",
            "startingoffsets": "earliest",
            "minPartitions": None,
        },  # type: ignore[dict-item]
        is_stream=True,
    )
    assert options.client.bootstrap_servers == "h:1"
    assert options.starting.everywhere == EARLIEST
    assert options.min_partitions is None


def test_options_are_values() -> None:
    assert source() == source()
    assert hash(source().client) == hash(source({"kafka.fetch.max.bytes": "100"}).client)
    assert source().client != source({"kafka.fetch.max.bytes": "100"}).client


# --- each option of the source ---------------------------------------------------------------------
PARSED: dict[str, list[tuple[str, str, Any]]] = {
    "kafka.bootstrap.servers": [(" a:1 , [::1]:2,", "client.bootstrap_servers", "a:1,[::1]:2")],
    "startingOffsets": [
        ("earliest", "starting.everywhere", EARLIEST),
        ("-100", "starting.everywhere", Where("back", 100)),
        ('{"t":{"0":23}}', "starting.partitions", {T0: Where("offset", 23)}),
        ('{"t":"earliest"}', "starting.topics", {"t": EARLIEST}),
    ],
    "startingOffsetsByTimestamp": [('{"t":{"0":1000}}', "starting.partitions", {T0: Where("time", 1000)})],
    "startingTimestamp": [
        ("1000", "starting.everywhere", Where("time", 1000)),
        ("-10m", "starting.everywhere", Where("ago", 600_000)),
    ],
    "endingOffsets": [
        ('{"t":{"0":23}}', "ending.partitions", {T0: Where("offset", 23)}),
        ("-7", "ending.everywhere", Where("back", 7)),
    ],
    "endingOffsetsByTimestamp": [('{"t":{"0":1000}}', "ending.partitions", {T0: Where("time", 1000)})],
    "endingTimestamp": [("2015-05-17", "ending.everywhere", Where("time", 1431820800000))],
    "failOnDataLoss": [("false", "fail_on_data_loss", False), ("TRUE", "fail_on_data_loss", True)],
    "maxOffsetsPerTrigger": [("5000", "max_offsets_per_trigger", 5000)],
    "minOffsetsPerTrigger": [("10", "min_offsets_per_trigger", 10)],
    "maxTriggerDelay": [("5m", "max_trigger_delay_ms", 300_000), ("250", "max_trigger_delay_ms", 250)],
    "maxBytesPerTrigger": [("10m", "max_bytes_per_trigger", 10 * 2**20), ("7", "max_bytes_per_trigger", 7)],
    "minPartitions": [("12", "min_partitions", 12)],
    "maxRecordsPerPartition": [("1000", "max_records_per_partition", 1000)],
    "includeHeaders": [("true", "include_headers", True)],
    "headersAsMap": [("true", "headers_as_map", True), ("true", "include_headers", True)],
    "kafka.group.id": [("g", "group_id", "g"), ("g", "commit_group_offsets", True)],
    "groupIdPrefix": [("mine", "group_id_prefix", "mine")],
    "fetchOffset.numRetries": [("0", "fetch_offset_retries", 0)],
    "fetchOffset.retryIntervalMs": [("25", "fetch_offset_retry_interval_ms", 25)],
    "kafkaConsumer.pollTimeoutMs": [("5000", "poll_timeout_ms", 5000)],
    "latestOffset.maxWaitMs": [("0", "latest_offset_max_wait_ms", 0)],
    "kafka.isolation.level": [
        ("read_uncommitted", "client.is_read_committed", False),
        ("read_committed", "client.is_read_committed", True),
    ],
    "kafka.*": [],
}
OTHERWISE = {
    "assign",
    "subscribe",
    "subscribePattern",
    "startingOffsetsByTimestampStrategy",
    "commitGroupOffsets",
}


def test_every_option_of_the_source_is_tried() -> None:
    assert set(PARSED) | OTHERWISE == {row.name for row in SOURCE_OPTIONS}


@pytest.mark.parametrize(
    ("name", "text", "where", "value"), [(name, *case) for name, cases in PARSED.items() for case in cases]
)
def test_an_option_of_the_source_is_parsed(name: str, text: str, where: str, value: Any) -> None:
    found: Any = source({name: text})
    for part in where.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("startingOffsets", ["first", "", "{"]),
        ("startingOffsetsByTimestamp", ["x", '{"t":{"0":-1}}']),
        ("startingTimestamp", ["latest", ""]),
        ("startingOffsetsByTimestampStrategy", ["earliest", ""]),
        ("endingOffsets", ["earliest", '{"t":{"0":-2}}', "x"]),
        ("endingOffsetsByTimestamp", ["x"]),
        ("endingTimestamp", ["x"]),
        ("failOnDataLoss", ["maybe", ""]),
        ("maxOffsetsPerTrigger", ["0", "-1", "x", "1.5", "", str(2**63)]),
        ("minOffsetsPerTrigger", ["0", "x"]),
        ("maxTriggerDelay", ["soon", "-1s", " "]),
        ("maxBytesPerTrigger", ["0", "x", "1p", "9999999t"]),
        ("minPartitions", ["0", "x", str(2**31)]),
        ("maxRecordsPerPartition", ["0", "x"]),
        ("includeHeaders", ["x"]),
        ("headersAsMap", ["x"]),
        ("kafka.group.id", ["", " "]),
        ("groupIdPrefix", [""]),
        ("commitGroupOffsets", ["x"]),
        ("fetchOffset.numRetries", ["-1", "x"]),
        ("fetchOffset.retryIntervalMs", ["-1"]),
        ("kafkaConsumer.pollTimeoutMs", ["0"]),
        ("latestOffset.maxWaitMs", ["-1", "60001"]),
        ("kafka.isolation.level", ["serializable"]),
        ("kafka.fetch.max.bytes", ["0", "many"]),
        (
            "kafka.bootstrap.servers",
            [
                "",
                ",",
                "host",
                "host:",
                "host:0",
                "host:70000",
                "inproc://x",
                "a b:1",
                "a..b:1",
                "a" * 64 + ":1",
                "h\udcff:1",
            ],
        ),
    ],
)
def test_a_bad_value_is_named_with_what_to_do(name: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(SparkOptionError) as caught:
            source({name: text})
        assert name in str(caught.value), text
        assert caught.value.hint, text


# --- what to read ----------------------------------------------------------------------------------
def test_assign() -> None:
    options = SourceOptions.parse(SERVERS | {"assign": '{"t":[2,0,2],"u":[1]}'}, is_stream=True)
    assert options.assign == {"t": (0, 2), "u": (1,)}


def test_subscribe() -> None:
    options = source(subscribe=" b, a ,,b ")
    assert options.subscribe == ("b", "a")


def test_subscribe_pattern() -> None:
    options = SourceOptions.parse(SERVERS | {"subscribePattern": "logs-.*"}, is_stream=True)
    assert options.subscribe_pattern == "logs-.*"
    assert (options.assign, options.subscribe) == (None, None)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "none of them is set"),
        ({"assign": '{"t":[0]}', "subscribe": "t"}, "assign and subscribe are set"),
        ({"subscribe": "t", "subscribePattern": "t"}, "subscribe and subscribePattern are set"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribe": "a/b"}, "subscribePattern takes a regular expression"),
        ({"subscribePattern": "["}, "not a regular expression"),
        ({"subscribePattern": "a{99999999999999999999}"}, "not a regular expression"),
        ({"subscribePattern": "(" * 5_000}, "not a regular expression"),
        ({"assign": '{"t":' * 100_000}, "is not json"),
        ({"subscribePattern": ""}, "subscribePattern is empty"),
        ({"assign": "t"}, "is not json"),
        ({"assign": "{}"}, "names no topic"),
        ({"assign": "[]"}, "names no topic"),
        ({"assign": '{"t":[]}'}, "names no partition of topic t"),
        ({"assign": '{"t":0}'}, "names no partition of topic t"),
        ({"assign": '{"t":[-1]}'}, "the partition -1 of topic t"),
        ({"assign": '{"t":["0"]}'}, "the partition '0' of topic t"),
        ({"assign": '{"t":[true]}'}, "the partition True of topic t"),
        ({"assign": '{"t/u":[0]}'}, "outside"),
    ],
)
def test_exactly_one_subscription_is_required(given: dict[str, str], problem: str) -> None:
    with pytest.raises(SparkOptionError) as caught:
        SourceOptions.parse(SERVERS | given, is_stream=True)
    assert problem in str(caught.value)


# --- where to start and end ------------------------------------------------------------------------
def test_a_timestamp_overrides_timestamps_which_override_offsets() -> None:
    given = {"startingOffsets": "earliest"}
    assert source(given).starting.option == "startingOffsets"
    given["startingOffsetsByTimestamp"] = '{"t":{"0":5}}'
    assert source(given).starting.option == "startingOffsetsByTimestamp"
    given["startingTimestamp"] = "7"
    assert source(given).starting.option == "startingTimestamp"


@pytest.mark.parametrize("is_stream", [True, False])
def test_endings_override_each_other_in_the_same_order(is_stream: bool) -> None:
    given = {"endingOffsets": '{"t":{"0":5}}'}
    for name, text in (("", ""), ("endingOffsetsByTimestamp", '{"t":{"0":5}}'), ("endingTimestamp", "7")):
        if name:
            given[name] = text
        ending = source(given, is_stream=is_stream).ending
        assert ending is not None
        assert ending.option == (name or "endingOffsets")


def test_a_stream_to_the_latest_has_no_bound() -> None:
    assert source(endingOffsets="latest").ending is None
    assert source(endingOffsets='{"t":{"0":-1}}').ending is None
    assert source(endingOffsets='{"t":{"0":-1,"1":5}}').ending is not None


def test_the_strategy_applies_to_times() -> None:
    given = {"startingTimestamp": "7"}
    assert not source(given).starting.is_latest_without_match
    assert not source(
        given | {"startingOffsetsByTimestampStrategy": "error"}
    ).starting.is_latest_without_match
    assert source(given | {"startingOffsetsByTimestampStrategy": "latest"}).starting.is_latest_without_match


@pytest.mark.parametrize("text", ["latest", '{"t":{"0":-1}}', '{"t":"latest"}'])
def test_a_batch_does_not_start_at_the_latest(text: str) -> None:
    with pytest.raises(SparkOptionError, match="latest"):
        source(startingOffsets=text, is_stream=False)


def test_a_start_at_a_group_needs_the_group() -> None:
    with pytest.raises(SparkOptionError, match=r"kafka\.group\.id"):
        source(startingOffsets="group")
    assert source({"startingOffsets": "group", "kafka.group.id": "g"}).starting.everywhere == GROUP


# --- conflicts -------------------------------------------------------------------------------------
def test_the_minimum_is_at_most_the_maximum() -> None:
    options = source(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="5")
    assert (options.min_offsets_per_trigger, options.max_offsets_per_trigger) == (5, 5)
    with pytest.raises(SparkOptionError, match="minOffsetsPerTrigger is 6, more than maxOffsetsPerTrigger"):
        source(minOffsetsPerTrigger="6", maxOffsetsPerTrigger="5")


def test_headers_as_a_map_are_headers() -> None:
    with pytest.raises(SparkOptionError, match="headersAsMap is true, but includeHeaders is false"):
        source(headersAsMap="true", includeHeaders="false")
    assert source(headersAsMap="true", includeHeaders="true").headers_as_map


def test_commits_need_a_group() -> None:
    with pytest.raises(SparkOptionError, match=r"no kafka\.group\.id"):
        source(commitGroupOffsets="true")
    assert not source(commitGroupOffsets="false").commit_group_offsets
    assert not source({"commitGroupOffsets": "false", "kafka.group.id": "g"}).commit_group_offsets
    assert not source({"kafka.group.id": "g"}, is_stream=False).commit_group_offsets


@pytest.mark.parametrize(
    "name",
    [
        "kafka.auto.offset.reset",
        "kafka.key.deserializer",
        "kafka.value.deserializer",
        "kafka.enable.auto.commit",
        "kafka.interceptor.classes",
        "kafka.sasl.jaas.config",
        "kafka.ssl.keystore.password",
    ],
)
def test_options_that_the_source_sets_itself_are_refused(name: str) -> None:
    with pytest.raises(SparkOptionError) as caught:
        source({name: "s3cret"})
    assert name in str(caught.value)
    assert caught.value.hint
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "kafka.key.serializer",
        "kafka.value.serializer",
        "kafka.interceptor.classes",
        "kafka.partitioner.class",
        "kafka.partitioner",
        "kafka.transactional.id",
        "kafka.sasl.jaas.config",
    ],
)
def test_options_that_the_sink_sets_itself_are_refused(name: str) -> None:
    with pytest.raises(SparkOptionError) as caught:
        sink({name: "s3cret"})
    assert name in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_servers_without_the_prefix_are_mentioned() -> None:
    with pytest.raises(
        SparkOptionError, match=r"kafka.bootstrap.servers is not set, but bootstrap.servers is"
    ):
        SourceOptions.parse({"bootstrap.servers": "h:1", "subscribe": "t"}, is_stream=True)


def test_a_table_of_create_table_which_has_no_options_is_explained() -> None:
    with pytest.raises(SparkOptionError, match="CREATE TEMPORARY VIEW name USING kafkalite OPTIONS"):
        SourceOptions.parse({}, is_stream=False)


def test_words_may_be_written_in_any_case() -> None:
    assert source(startingOffsets="EARLIEST").starting == source(startingOffsets="earliest").starting
    assert (
        source(startingOffsets='{"t":"Latest"}').starting == source(startingOffsets='{"t":"latest"}').starting
    )
    assert source(endingOffsets="Latest", is_stream=False).ending == source(is_stream=False).ending
    times = {"startingTimestamp": "0", "startingOffsetsByTimestampStrategy": "LATEST"}
    assert source(times).starting.is_latest_without_match
    assert sink(partitioner="Sticky").partitioner == "sticky"


# --- settings of the Kafka client ------------------------------------------------------------------
def test_settings_of_the_client_pass_through() -> None:
    client = source(
        {
            "kafka.client.id": "me",
            "kafka.request.timeout.ms": "7000",
            "kafka.fetch.max.bytes": "1000",
            "kafka.group.id": "g",
            "kafka.security.protocol": "plaintext",
        }
    ).client
    assert (client.client_id, client.request_timeout_ms) == ("me", 7000)
    assert client.consumer == {"request.timeout.ms": "7000", "fetch.max.bytes": "1000"}
    assert client.producer == {}
    assert client.security == {"security.protocol": "PLAINTEXT"}


def test_a_setting_in_milliseconds_may_have_a_unit() -> None:
    given = {
        "kafka.request.timeout.ms": "7s",
        "kafka.retry.backoff.ms": "1m",
        "kafka.fetch.max.bytes": "1_000",
    }
    client = source(given).client
    assert client.request_timeout_ms == 7000
    assert client.consumer == {
        "request.timeout.ms": "7000",
        "retry.backoff.ms": "60000",
        "fetch.max.bytes": "1000",
    }
    assert sink({"kafka.request.timeout.ms": "7s"}).client.request_timeout_ms == 7000


def test_a_setting_without_effect_on_the_source_warns() -> None:
    with pytest.warns(UnknownSparkOptionWarning, match=r"kafka\.max\.poll\.records is ignored"):
        source({"kafka.max.poll.records": "10"})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "spark-kafka-source"),
        ({"groupIdPrefix": "mine"}, "mine"),
        ({"kafka.group.id": "g"}, "g"),
        ({"kafka.group.id": "g", "kafka.client.id": "me"}, "me"),
    ],
)
def test_the_name_in_the_brokers_logs(options: dict[str, str], name: str) -> None:
    assert source(options).client.client_id == name


def test_settings_of_the_producer_pass_through() -> None:
    client = sink({"kafka.client.id": "me", "kafka.compression.type": "zstd", "kafka.linger.ms": "50"}).client
    assert client.client_id == "me"
    assert client.producer == {"compression.type": "zstd", "linger.ms": "50"}
    assert client.consumer == {}
    with pytest.raises(SparkOptionError, match=r"kafka\.compression\.type is 'zip'"):
        sink({"kafka.compression.type": "zip"})


# --- options without effect ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("startingOfsets", "startingOffsets"),
        ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"),
        ("group.id", "kafka.group.id"),
        ("client.id", "kafka.client.id"),
        ("kafka.fetch.max.byte", "kafka.fetch.max.bytes"),
        ("kafka.isolationlevel", "kafka.isolation.level"),
        ("fail_on_data_loss", "failOnDataLoss"),
    ],
)
def test_an_unknown_option_warns_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.warns(UnknownSparkOptionWarning) as caught:
        source({name: "1"})
    assert len(caught) == 1
    assert f"{name.lower()} is not an option of the kafkalite source" in str(caught[0].message)
    assert str(caught[0].message).endswith(f"did you mean {near}?")


def test_an_option_without_a_similar_name_has_no_suggestion() -> None:
    with pytest.warns(UnknownSparkOptionWarning, match="zzzz.* is ignored$"):
        source(zzzz="1")


def test_an_option_of_the_other_side_is_recognized() -> None:
    for name in ("kafka.linger.ms", "topic"):
        with pytest.warns(
            UnknownSparkOptionWarning, match=f"{name} is not an option.*it is an option of the sink$"
        ):
            source({name: "5"})
    for name in ("kafka.fetch.max.bytes", "subscribe", "startingOffsets"):
        with pytest.warns(UnknownSparkOptionWarning, match=f"{name.lower()} is not .*option of the source$"):
            sink({name: "5"})


def test_a_refused_option_is_never_suggested() -> None:
    with pytest.warns(UnknownSparkOptionWarning) as caught:
        source({"kafka.enable.autocommit": "1"})
    assert "kafka.enable.auto.commit" not in str(caught[0].message)


def test_options_of_spark_itself_cause_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source(path="x", checkpointLocation="/tmp/c", queryName="q")
        sink(path="x", checkpointLocation="/tmp/c", includeHeaders="true")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("maxOffsetsPerTrigger", "5"),
        ("minOffsetsPerTrigger", "5"),
        ("maxTriggerDelay", "5m"),
        ("maxBytesPerTrigger", "5"),
        ("latestOffset.maxWaitMs", "5"),
        ("commitGroupOffsets", "false"),
    ],
)
def test_a_batch_warns_of_ignored_options(name: str, text: str) -> None:
    assert {row.name for row in SOURCE_OPTIONS if row.applies != "both"} >= {name}
    with pytest.warns(UnknownSparkOptionWarning, match=f"{name} is ignored: it is an option of streams"):
        options = source({name: text}, is_stream=False)
    assert options.max_offsets_per_trigger is None
    assert options.min_offsets_per_trigger is None


def test_a_group_makes_the_prefix_idle() -> None:
    with pytest.warns(UnknownSparkOptionWarning, match=r"groupIdPrefix is ignored: kafka\.group\.id is set"):
        source({"kafka.group.id": "g", "groupIdPrefix": "p"})


# --- each option of the sink -----------------------------------------------------------------------
SINK_PARSED: dict[str, list[tuple[str, str, Any]]] = {
    "kafka.bootstrap.servers": [("a:1", "client", ClientOptions("a:1"))],
    "topic": [("out", "topic", "out")],
    "partitioner": [("hash", "partitioner", "hash"), ("sticky", "partitioner", "sticky")],
    "exactlyOnce": [("false", "exactly_once", False)],
    "sinkName": [("totals", "sink_name", "totals")],
    "transactionalIdPrefix": [("shop", "transactional_id_prefix", "shop")],
    "kafka.transaction.timeout.ms": [("5000", "transaction_timeout_ms", 5000)],
    "kafka.*": [],
}


def test_every_option_of_the_sink_is_tried() -> None:
    assert set(SINK_PARSED) | {"txnAppId", "txnVersion"} == {row.name for row in SINK_OPTIONS}


@pytest.mark.parametrize(
    ("name", "text", "where", "value"),
    [(name, *case) for name, cases in SINK_PARSED.items() for case in cases],
)
def test_an_option_of_the_sink_is_parsed(name: str, text: str, where: str, value: Any) -> None:
    assert getattr(sink({name: text}), where) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("topic", ""),
        ("topic", "a,b"),
        ("partitioner", "crc32"),
        ("exactlyOnce", "x"),
        ("sinkName", ""),
        ("sinkName", "x" * 251),
        ("transactionalIdPrefix", ""),
        ("txnVersion", "-1"),
        ("kafka.transaction.timeout.ms", "0"),
        ("kafka.linger.ms", "x"),
        ("kafka.bootstrap.servers", ""),
    ],
)
def test_a_bad_value_of_the_sink_is_named(name: str, text: str) -> None:
    with pytest.raises(SparkOptionError) as caught:
        sink({name: text}, is_stream=False)
    assert name in str(caught.value)
    assert caught.value.hint


def test_a_job_that_may_be_submitted_again() -> None:
    options = sink(txnAppId="nightly", txnVersion="7", is_stream=False)
    assert (options.txn_app_id, options.txn_version) == ("nightly", 7)
    for given in ({"txnAppId": "nightly"}, {"txnVersion": "7"}):
        with pytest.raises(SparkOptionError, match="is set without the other"):
            sink(given, is_stream=False)
    with pytest.raises(SparkOptionError, match="txnAppId needs exactlyOnce"):
        sink(txnAppId="nightly", txnVersion="7", exactlyOnce="false", is_stream=False)


def test_a_stream_ignores_txn_app_id() -> None:
    with pytest.warns(UnknownSparkOptionWarning, match="is an option of batch jobs") as caught:
        options = sink(txnAppId="nightly", txnVersion="7")
    assert len(caught) == 2
    assert (options.txn_app_id, options.txn_version) == (None, None)


@pytest.mark.parametrize(
    ("name", "bad", "good"), [("acks", "1", "all"), ("enable.idempotence", "false", "true")]
)
def test_exactly_once_needs_acks_and_idempotence(name: str, bad: str, good: str) -> None:
    assert sink({f"kafka.{name}": good}).client.producer == {name: good}
    with pytest.raises(SparkOptionError, match=f"kafka.{name} is {bad}, which exactlyOnce does not allow"):
        sink({f"kafka.{name}": bad})
    assert sink({f"kafka.{name}": bad, "exactlyOnce": "false"}).client.producer == {name: bad}


def test_an_unknown_option_of_the_sink_warns() -> None:
    with pytest.warns(UnknownSparkOptionWarning, match=r"of the kafkalite sink.*did you mean exactlyOnce\?"):
        sink(exactlyonc="true")
    with pytest.warns(UnknownSparkOptionWarning, match=r"did you mean kafka\.linger\.ms\?"):
        sink({"linger.ms": "5"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1k", 2**10), ("2KB", 2**11), ("3 MiB", 3 * 2**20), ("1g", 2**30), ("5b", 5)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "x") == size


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("5", 5),
        ("5ms", 5),
        ("5s", 5000),
        ("2min", 120_000),
        ("1h", 3_600_000),
        ("1 D", 86_400_000),
        ("1h30m", 5_400_000),
    ],
)
def test_durations(text: str, duration_ms: int) -> None:
    assert parse_duration(text, "x") == duration_ms
