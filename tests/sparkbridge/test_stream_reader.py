"""A stream reader without a JVM: Spark's calls in Spark's order, against a real broker."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.datasource_internal import ReadLimitRegistry, _streamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

from kafkalite import sync
from kafkalite.errors import (
    BrokerError,
    CoordinatorNotAvailableError,
    OffsetOutOfRangeError,
    UnknownTopicOrPartitionError,
)
from kafkalite.model import TopicPartition
from kafkalite.testing import SyncCluster
from pyspark_kafkalite import DefaultSource
from sparkbridge.brokers.cluster import SparkCluster
from sparkbridge.errors import DataLossError, DataLossWarning, SparkOptionError
from sparkbridge.source import snapshots, stream_reader
from sparkbridge.source.stream_reader import KafkaliteStreamReader

_groups = count(1)


class CrashError(Exception):
    """The driver of a query was killed."""


class Query:
    """Calls a source as Spark does, with its order of calls, its json and its pickles.

    ``offset_log`` and the number of ``finished`` batches are those of a checkpoint; ``start`` begins a run
    with a new reader.
    """

    def __init__(self, cluster: SyncCluster, **options: Any) -> None:
        self.options = {
            "kafka.bootstrap.servers": cluster.bootstrap_servers,
            "latestOffset.maxWaitMs": "0",
            **{name.replace("__", "."): str(value) for name, value in options.items()},
        }
        self.offset_log: list[str] = []
        self.finished = 0
        self.start()

    def start(self, *, is_available_now: bool = False, **options: Any) -> None:
        self.options |= {name: str(value) for name, value in options.items()}
        source = DefaultSource(CaseInsensitiveDict(self.options))
        self.schema = source.schema()
        self.source = cloudpickle.loads(cloudpickle.dumps(source))
        self.reader = _streamReader(self.source, self.schema)
        limit = self.reader.getDefaultReadLimit()
        self.limit = ReadLimitRegistry().get({**vars(limit), "_type": type(limit).__name__})
        if is_available_now:
            self.reader.prepareForTriggerAvailableNow()
        self._initial: str | None = None

    def trigger(self, limit: Any = None, *, crash: str = "") -> list[tuple[str, int, int, bytes]] | None:
        """Run one batch and return its (topic, partition, offset, value); None if there is no new data."""
        if len(self.offset_log) == self.finished:
            start = self._started()
            end = json.dumps(self.reader.latestOffset(json.loads(start), limit or self.limit))
            self.reader.reportLatestOffset()
            if end == start:
                return None
            if crash == "before the offset is logged":
                raise CrashError
            if self.offset_log:
                self.reader.commit(json.loads(start))
            self.offset_log.append(end)
        else:
            assert len(self.offset_log) == self.finished + 1
            start = self._started(before_last=True)
            end = self.offset_log[-1]
        if self.finished == 0:
            start = self._initial = json.dumps(self.reader.initialOffset())
        rows = self._read(json.loads(start), json.loads(end))
        if crash == "before the batch is committed":
            raise CrashError
        self.finished += 1
        return rows

    def run(self) -> list[list[tuple[str, int, int, bytes]]]:
        """Run batches until there is no new data."""
        return list(iter(self.trigger, None))

    def _started(self, *, before_last: bool = False) -> str:
        logged = self.offset_log[:-1] if before_last else self.offset_log
        if logged:
            return logged[-1]
        if self._initial is None:
            self._initial = json.dumps(self.reader.initialOffset())
        return self._initial

    def _read(self, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, int, int, bytes]]:
        planner = cloudpickle.dumps(_streamReader(self.source, self.schema))
        rows = []
        for partition in self.reader.partitions(start, end):
            task = cloudpickle.loads(planner)
            given = task.read(cloudpickle.loads(cloudpickle.dumps(partition)))
            assert isinstance(given, Iterator)
            for batch in records_to_arrow_batches(given, 10_000, self.schema, self.source):
                table = batch.to_pydict()
                rows += zip(table["topic"], table["partition"], table["offset"], table["value"], strict=True)
        return rows


def values(batches: Any) -> list[bytes]:
    """Return the values read, by topic, partition and offset; each record once."""
    rows = sorted(row for batch in batches for row in batch or ())
    assert len({row[:3] for row in rows}) == len(rows), "a record was read twice"
    return [row[3] for row in rows]


def numbered(first: int, until: int) -> list[bytes]:
    return [b"%06d" % number for number in range(first, until)]


@pytest.fixture
def admin(cluster: SyncCluster) -> Iterator[sync.Admin]:
    with sync.Admin(cluster.bootstrap_servers) as opened:
        yield opened


@pytest.fixture
def one(cluster: SyncCluster, topic: str) -> str:
    """A topic with records 0 to 99 in partition 0, and none in its two others."""
    cluster.produce(topic, numbered(0, 100), partition=0)
    return topic


# --- the interface for Spark ------------------------------------------------------------------------


def test_spark_sees_admission_control_and_available_now(cluster: SyncCluster, one: str) -> None:
    reader = Query(cluster, subscribe=one).reader
    assert isinstance(reader, KafkaliteStreamReader)
    assert isinstance(reader, SupportsTriggerAvailableNow)
    assert len(inspect.signature(reader.latestOffset).parameters) == 2


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": 5}, ReadMaxRows(5)),
        ({"minOffsetsPerTrigger": 4}, ReadMinRows(4)),
        ({"minOffsetsPerTrigger": 4, "maxOffsetsPerTrigger": 5}, ReadMaxRows(5)),
        ({"maxBytesPerTrigger": "1k"}, ReadMaxBytes(1024)),
        ({"maxBytesPerTrigger": "1k", "minOffsetsPerTrigger": 4}, ReadMaxBytes(1024)),
    ],
)
def test_the_limit_returned_to_spark(
    cluster: SyncCluster, one: str, options: dict[str, Any], limit: Any
) -> None:
    assert Query(cluster, subscribe=one, **options).limit == limit


def test_a_query_of_a_missing_topic_fails_with_its_name(cluster: SyncCluster, one: str) -> None:
    with pytest.raises(
        SparkOptionError, match="subscribe names missing topics or partitions: nothing-of-that-name"
    ):
        Query(cluster, subscribe=f"{one},nothing-of-that-name").trigger()
    assign = json.dumps({one: [0, 7]})
    with pytest.raises(SparkOptionError, match=f"assign names missing topics or partitions: {one}-7"):
        Query(cluster, assign=assign).trigger()


# --- batches ----------------------------------------------------------------------------------------


def test_everything_is_read_once_and_then_start_is_returned(cluster: SyncCluster, one: str) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    batches = query.run()
    assert [len(batch) for batch in batches] == [30, 30, 30, 10]
    assert values(batches) == numbered(0, 100)
    start = json.loads(query.offset_log[-1])
    assert query.reader.latestOffset(start, query.limit) is start
    cluster.produce(one, numbered(100, 110), partition=0)
    assert values(query.run()) == numbered(100, 110)


def test_a_clean_restart_continues_after_the_last_batch(cluster: SyncCluster, one: str) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    before = [query.trigger(), query.trigger()]
    query.start()
    assert values([*before, *query.run()]) == numbered(0, 100)


def test_a_repeated_batch_reads_the_same_records(cluster: SyncCluster, one: str, admin: sync.Admin) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    first = query.trigger()
    with pytest.raises(CrashError):
        query.trigger(crash="before the batch is committed")
    cluster.produce(one, numbered(100, 200), partition=0)
    admin.create_partitions(one, 5)
    cluster.produce(one, [b"new"], partition=4)
    query.start(minPartitions=7, maxOffsetsPerTrigger=1000)
    again = query.trigger()
    assert values([first, again]) == numbered(0, 60)
    assert values([first, again, *query.run()]) == [*numbered(0, 200), b"new"]


@pytest.mark.parametrize("crash", ["before the batch is committed", "before the offset is logged"])
def test_a_query_from_latest_loses_nothing_when_its_first_batch_crashes(
    cluster: SyncCluster, one: str, crash: str
) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="latest")
    assert query.trigger() == [], "the place of the start goes to the log at once"
    cluster.produce(one, numbered(100, 150), partition=0)
    with pytest.raises(CrashError):
        query.trigger(crash=crash)
    cluster.produce(one, numbered(150, 200), partition=0)
    query.start()
    assert values(query.run()) == numbered(100, 200)


def test_the_first_batch_is_replayed_from_the_first_start_of_the_query(
    cluster: SyncCluster, one: str
) -> None:
    """A Python source cannot store data in the checkpoint; Spark asks for the initial offset again."""
    query = Query(cluster, subscribe=one, startingOffsets="latest")
    query._started()  # Spark asked for the initial offset ...
    cluster.produce(one, numbered(100, 150), partition=0)
    with pytest.raises(CrashError):
        query.trigger(crash="before the batch is committed")
    cluster.produce(one, numbered(150, 200), partition=0)  # ... and "latest" is later now
    query.start()
    assert values(query.run()) == numbered(100, 200)


def test_a_new_partition_is_read_from_its_beginning_and_replayed_from_there(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="latest")
    query.run()
    admin.create_partitions(one, 4)
    cluster.produce(one, numbered(0, 10), partition=3)
    with pytest.raises(CrashError):
        query.trigger(crash="before the batch is committed")
    query.start()
    assert values(query.run()) == numbered(0, 10)


def test_a_pattern_adds_a_topic_created_later(cluster: SyncCluster, one: str) -> None:
    query = Query(cluster, subscribePattern=f"{one}(-later)?", startingOffsets="earliest")
    assert values(query.run()) == numbered(0, 100)
    cluster.create_topic(f"{one}-later")
    cluster.produce(f"{one}-later", [b"later"])
    cluster.create_topic(f"not-{one}-later")
    cluster.produce(f"not-{one}-later", [b"not asked for"])
    assert values(query.run()) == [b"later"]


def test_a_pattern_without_matches_waits(cluster: SyncCluster, one: str) -> None:
    query = Query(cluster, subscribePattern=f"{one}-yet", latestOffset__maxWaitMs=1)
    assert query.run() == [[]]
    cluster.create_topic(f"{one}-yet")
    cluster.produce(f"{one}-yet", [b"yet"])
    assert values(query.run()) == [b"yet"]


# --- AvailableNow and limits --------------------------------------------------------------------------


def test_available_now_ends_where_the_logs_ended_and_the_next_run_reads_the_rest(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    query.start(is_available_now=True)
    first = query.trigger()
    cluster.produce(one, numbered(100, 300), partition=0)
    admin.create_partitions(one, 4)
    cluster.produce(one, [b"new"], partition=3)
    batches = [first, *query.run()]
    assert values(batches) == numbered(0, 100)
    query.start(is_available_now=True)
    assert values([*batches, *query.run()]) == [*numbered(0, 300), b"new"]


def test_available_now_after_a_crash_runs_the_old_batch_first(cluster: SyncCluster, one: str) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=60)
    query.start(is_available_now=True)
    with pytest.raises(CrashError):
        query.trigger(crash="before the batch is committed")
    cluster.produce(one, numbered(100, 150), partition=0)
    query.start(is_available_now=True)
    batches = query.run()
    assert [len(batch) for batch in batches] == [60, 60, 30]
    assert values(batches) == numbered(0, 150)


def test_trigger_once_overrides_the_limits(cluster: SyncCluster, one: str) -> None:
    query = Query(
        cluster,
        subscribe=one,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=7,
        minOffsetsPerTrigger=5,
        maxBytesPerTrigger=1,
    )
    assert values([query.trigger(ReadAllAvailable())]) == numbered(0, 100)


def test_a_batch_waits_for_min_offsets_until_the_trigger_delay_is_over(
    cluster: SyncCluster, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = snapshots.now_ms()
    monkeypatch.setattr(snapshots, "now_ms", lambda: now_ms)
    query = Query(
        cluster, subscribe=one, startingOffsets="earliest", minOffsetsPerTrigger=50, maxTriggerDelay="10m"
    )
    assert len(query.trigger() or ()) == 100
    cluster.produce(one, numbered(100, 149), partition=0)
    assert query.trigger() is None
    cluster.produce(one, numbered(149, 150), partition=0)
    assert len(query.trigger() or ()) == 50
    cluster.produce(one, numbered(150, 151), partition=0)
    assert query.trigger() is None
    now_ms += 10 * 60_000
    assert len(query.trigger() or ()) == 1


def test_max_bytes_ends_a_batch_at_whole_record_batches(cluster: SyncCluster, topic: str) -> None:
    for number in range(10):
        cluster.produce(topic, [bytes([number]) * 1_000], partition=0)
    query = Query(cluster, subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger=2_300)
    assert [len(batch) for batch in query.run()] == [2, 2, 2, 2, 2]
    query = Query(cluster, subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger=1)
    assert [len(batch) for batch in query.run()] == [1] * 10, "never nothing"


def test_tasks_split_a_batch_by_min_partitions_and_max_records(cluster: SyncCluster, one: str) -> None:
    for options, task_count in (
        ({}, 1),
        ({"minPartitions": 4}, 4),
        ({"maxRecordsPerPartition": 30}, 4),
        ({"maxRecordsPerPartition": 50, "minPartitions": 4}, 4),
    ):
        query = Query(cluster, subscribe=one, startingOffsets="earliest", **options)
        assert values(query.run()) == numbered(0, 100)
        end = json.loads(query.offset_log[0])
        assert len(query.reader.partitions(query.reader.initialOffset(), end)) == task_count


# --- where to start and end ---------------------------------------------------------------------------


def test_a_query_starts_at_a_groups_offsets(cluster: SyncCluster, one: str, admin: sync.Admin) -> None:
    group = f"group-{next(_groups)}"
    admin.alter_group_offsets(group, {TopicPartition(one, 0): 90})
    query = Query(cluster, subscribe=one, startingOffsets="group", kafka__group__id=group)
    assert values(query.run()) == numbered(90, 100)


def test_a_query_starts_and_ends_at_a_time(cluster: SyncCluster, topic: str) -> None:
    with sync.Producer(cluster.bootstrap_servers) as producer:
        producer.send_many(topic, numbered(0, 10), partition=0, timestamps_ms=list(range(1000, 11_000, 1000)))
    query = Query(
        cluster,
        subscribe=topic,
        startingTimestamp=2500,
        startingOffsetsByTimestampStrategy="latest",
        endingTimestamp=7000,
    )
    assert values(query.run()) == numbered(2, 6)


@pytest.mark.parametrize(
    ("option", "first"), [("-3", 97), ('{"%s":{"0":42,"1":-2,"2":-1}}', 42), ("earliest", 0)]
)
def test_starting_offsets(cluster: SyncCluster, one: str, option: str, first: int) -> None:
    query = Query(cluster, subscribe=one, startingOffsets=option.replace("%s", one))
    assert values(query.run()) == numbered(first, 100)


def test_assign_reads_the_partitions_named(cluster: SyncCluster, one: str) -> None:
    cluster.produce(one, [b"two"], partition=2)
    query = Query(cluster, assign=json.dumps({one: [1, 2]}), startingOffsets="earliest")
    assert values(query.run()) == [b"two"]


# --- losses -------------------------------------------------------------------------------------------


def test_retention_that_overtakes_the_query_fails_it(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    query.trigger()
    admin.delete_records({TopicPartition(one, 0): 55})
    with pytest.raises(DataLossError, match=f"{one}-0 offsets 10 to 55.*failOnDataLoss"):
        query.trigger()


def test_without_fail_on_data_loss_the_query_continues_after_the_gap(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    query = Query(
        cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=10, failOnDataLoss="false"
    )
    first = query.trigger()
    admin.delete_records({TopicPartition(one, 0): 55})
    with pytest.warns(DataLossWarning, match=f"{one}-0 offsets 10 to"):
        batches = [first, *query.run()]
    assert values(batches) == [*numbered(0, 10), *numbered(55, 100)]


def test_a_deleted_topic_is_a_loss(cluster: SyncCluster, one: str, admin: sync.Admin) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest")
    query.run()
    admin.delete_topics([one])
    with pytest.raises(DataLossError, match=f"{one}-0.*was deleted or is no longer read"):
        query.trigger()
    query.start(failOnDataLoss="false")
    with pytest.warns(DataLossWarning, match=f"{one}-0.*was deleted or is no longer read"):
        query.run()
    cluster.create_topic(one)
    cluster.produce(one, [b"again"])
    assert values(query.run()) == [b"again"]


def test_a_topic_created_again_is_another_topic(cluster: SyncCluster, one: str, admin: sync.Admin) -> None:
    """It has as many records as before, so that its offsets alone show no difference."""
    query = Query(cluster, subscribe=one, startingOffsets="earliest")
    query.run()
    admin.delete_topics([one])
    cluster.create_topic(one, partitions=3)
    cluster.produce(one, numbered(500, 700), partition=0)
    with pytest.raises(DataLossError, match="deleted and created again"):
        query.trigger()
    query.start(failOnDataLoss="false")
    with pytest.warns(DataLossWarning, match="deleted and created again"):
        batches = query.run()
    assert values(batches) == numbered(500, 700)


def test_an_end_that_a_new_leader_does_not_know_yet_is_asked_again(
    cluster: SyncCluster, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = {"kafka.isolation.level": "read_uncommitted"}
    query = Query(cluster, subscribe=one, startingOffsets="earliest", fetchOffset__numRetries=3, **level)
    query.run()
    now, asked = snapshots.snapshot_now, count(1)

    def stale(*arguments: Any) -> Any:
        snapshot = now(*arguments)
        if next(asked) <= 2:
            known = snapshot[one]
            snapshot[one] = known._replace(ends=(50, *known.ends[1:]))
        return snapshot

    monkeypatch.setattr(snapshots, "snapshot_now", stale)
    assert query.trigger() is None
    assert next(asked) == 4
    asked = count(-10)
    with pytest.raises(DataLossError, match=f"{one}-0 offsets 50 to 100"):
        query.trigger()


def test_a_batch_is_repeated_completely_after_the_topics_of_the_query_changed(
    cluster: SyncCluster, one: str
) -> None:
    """The logged batch determines what is read; the options apply to the next one."""
    other = f"{one}-other"
    cluster.create_topic(other)
    cluster.produce(other, numbered(200, 210))
    query = Query(cluster, subscribe=f"{one},{other}", startingOffsets="earliest")
    with pytest.raises(CrashError):
        query.trigger(crash="before the batch is committed")
    query.start(subscribe=one)
    assert values([query.trigger()]) == [*numbered(0, 100), *numbered(200, 210)]
    with pytest.raises(DataLossError, match=f"{other}-0.*is no longer read"):
        query.trigger()


def test_a_first_batch_is_repeated_even_if_a_new_query_could_not_start(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    """Spark asks for the initial offset in this case too. The batch has its own start."""
    starting = json.dumps({one: {"0": 40, "1": 0, "2": 0}})
    query = Query(cluster, subscribe=one, startingOffsets=starting)
    with pytest.raises(CrashError):
        query.trigger(crash="before the batch is committed")
    admin.create_partitions(one, 4)
    cluster.produce(one, numbered(100, 110), partition=3)
    query.start()
    assert values(query.run()) == numbered(40, 110)
    fresh = Query(cluster, subscribe=one, startingOffsets=starting)
    with pytest.raises(SparkOptionError, match=f"startingOffsets must name exactly.* lacks {one}-3"):
        fresh.trigger()


@pytest.mark.parametrize("error", [UnknownTopicOrPartitionError, OffsetOutOfRangeError])
def test_a_topic_deleted_between_two_requests_is_looked_up_again(
    cluster: SyncCluster, one: str, error: type[BrokerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = SparkCluster.ends_by_bytes, [error("went"), error("went")]

    def ends_by_bytes(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(SparkCluster, "ends_by_bytes", ends_by_bytes)
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxBytesPerTrigger="1m")
    assert values([query.trigger()]) == numbered(0, 100)


def test_a_partition_that_waited_for_bytes_is_first(cluster: SyncCluster, topic: str) -> None:
    for number in range(20):
        cluster.produce(topic, numbered(number, number + 1), partition=0)
    cluster.produce(topic, [b"x" * 200], partition=1)
    query = Query(cluster, subscribe=topic, startingOffsets="earliest", maxBytesPerTrigger="250")
    partitions = [{row[1] for row in query.trigger() or ()} for _ in range(2)]
    assert partitions[0] == {0}
    assert 1 in partitions[1]


def test_an_open_transaction_that_was_read_uncommitted_is_neither_a_loss_nor_read_again(
    cluster: SyncCluster, one: str
) -> None:
    query = Query(
        cluster, subscribe=one, startingOffsets="earliest", kafka__isolation__level="read_uncommitted"
    )
    with sync.Producer(cluster.bootstrap_servers, transactional_id=one) as producer, producer.transaction():
        producer.send_and_wait(one, b"000100", partition=0)
        first = query.trigger()
        query.start(**{"kafka.isolation.level": "read_committed"})
        assert query.trigger() is None
    cluster.produce(one, numbered(101, 105), partition=0)
    assert values([first, *query.run()]) == numbered(0, 105)


@pytest.mark.parametrize("start", ["offset", "group"])
def test_a_start_hidden_by_an_open_transaction_is_no_loss_and_reading_begins_there(
    cluster: SyncCluster, one: str, admin: sync.Admin, start: str
) -> None:
    """A read_uncommitted reader, or a user, may know offsets beyond the last stable one."""
    group = f"{one}-group"
    places = {"offset": json.dumps({one: {"0": 103, "1": 0, "2": 0}}), "group": "group"}
    with sync.Producer(cluster.bootstrap_servers, transactional_id=one) as producer, producer.transaction():
        producer.send_and_wait(one, b"000100", partition=0)
        cluster.produce(one, numbered(101, 104), partition=0)
        positions = dict(zip((TopicPartition(one, number) for number in range(3)), (103, 0, 0), strict=True))
        admin.alter_group_offsets(group, positions)
        query = Query(cluster, subscribe=one, startingOffsets=places[start], kafka__group__id=group)
        assert query.run() == [[]]
    cluster.produce(one, numbered(105, 107), partition=0)
    assert values(query.run()) == [b"000103", *numbered(105, 107)]


# --- waiting, progress, groups ------------------------------------------------------------------------


def test_latest_offset_waits_for_new_data(cluster: SyncCluster, one: str) -> None:
    """The wait is a minute long: without the new data, this test would not end in time."""
    query = Query(cluster, subscribe=one, startingOffsets="earliest", latestOffset__maxWaitMs=60_000)
    query.trigger()
    writing = threading.Thread(target=cluster.produce, args=(one, [b"new"]), kwargs={"partition": 2})
    writing.start()
    assert values([query.trigger()]) == [b"new"]
    writing.join()


def test_data_that_makes_no_batch_is_followed_by_a_pause(
    cluster: SyncCluster, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(stream_reader, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(SparkCluster, "wait_for_data", lambda self, positions, max_wait_ms: True)
    query = Query(
        cluster,
        subscribe=one,
        startingOffsets="earliest",
        minOffsetsPerTrigger=50,
        latestOffset__maxWaitMs=60_000,
    )
    assert len(query.trigger() or ()) == 100
    assert pauses == []
    cluster.produce(one, numbered(100, 149), partition=0)
    assert query.trigger() is None
    assert pauses == [stream_reader.UNUSABLE_DATA_PAUSE_S]


def test_the_progress_has_the_ends_of_the_logs_without_a_request(
    cluster: SyncCluster, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    assert query.reader.reportLatestOffset() is None
    query.trigger()
    monkeypatch.setattr(SparkCluster, "shared", None)
    assert query.reader.reportLatestOffset() == {one: {"0": 100, "1": 0, "2": 0}}


def test_the_group_has_the_finished_offsets_and_an_idle_query_has_no_lag(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    group = f"group-{next(_groups)}"
    query = Query(
        cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=60, kafka__group__id=group
    )

    def lags() -> dict[int, int | None]:
        return {each.partition.partition: each.lag for each in admin.group_lag(group)}

    query.trigger()
    assert admin.committed_offsets(group) == {}, "the batch may still be run again"
    query.trigger()
    assert lags()[0] == 40
    assert query.trigger() is None
    assert lags()[0] == 0


def test_without_commit_group_offsets_nothing_is_committed(
    cluster: SyncCluster, one: str, admin: sync.Admin
) -> None:
    group = f"group-{next(_groups)}"
    query = Query(
        cluster, subscribe=one, startingOffsets="earliest", kafka__group__id=group, commitGroupOffsets="false"
    )
    query.run()
    assert admin.committed_offsets(group) == {}


def test_a_failed_group_commit_does_not_fail_the_query_and_is_not_repeated_at_once(
    cluster: SyncCluster, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count(1)

    def refuse(*arguments: Any) -> None:
        next(asked)
        raise CoordinatorNotAvailableError("there is no coordinator")

    monkeypatch.setattr(SparkCluster, "commit_offsets", refuse)
    query = Query(
        cluster, subscribe=one, startingOffsets="earliest", maxOffsetsPerTrigger=10, kafka__group__id="lost"
    )
    query.trigger()
    with pytest.warns(
        RuntimeWarning, match="offsets of group 'lost' were not committed.*the query continues"
    ):
        batches = query.run()
    assert len(batches) == 9
    assert next(asked) == 2


def test_a_leader_that_dies_only_delays_the_query() -> None:
    """Neither an end that the next leader does not know yet nor an unreachable broker is a loss."""
    with SyncCluster(3, transport="tcp") as brokers:
        brokers.create_topic("t", partitions=3)
        for partition in range(3):
            brokers.produce("t", numbered(100 * partition, 100 * partition + 100), partition=partition)
        with sync.Admin(brokers.bootstrap_servers) as admin:  # __consumer_offsets needs all three brokers
            admin.alter_group_offsets("g", {TopicPartition("t", 0): 0})
        query = Query(brokers, subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger=60)
        query.start(**{"kafka.group.id": "g"})
        batches = [query.trigger()]
        for partition in range(2):
            leader = brokers.leader("t", partition)
            brokers.kill(leader)
            batches += [query.trigger(), query.trigger()]
            brokers.start(leader)
            brokers.produce("t", numbered(1000 + partition, 1001 + partition), partition=partition)
        query.start()
        expected = [*numbered(0, 100), b"001000", *numbered(100, 200), b"001001", *numbered(200, 300)]
        assert values([*batches, *query.run()]) == expected


def test_a_broker_that_starts_again_costs_nothing_either() -> None:
    with SyncCluster(transport="tcp") as broker:
        broker.create_topic("t")
        broker.produce("t", numbered(0, 100))
        query = Query(broker, subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger=40)
        query.start(**{"kafka.group.id": "g", "latestOffset.maxWaitMs": "50"})
        batches = []
        for _ in range(2):
            batches.append(query.trigger())
            broker.restart()
        assert values([*batches, *query.run()]) == numbered(0, 100)
        broker.restart()
        assert query.trigger() is None
