"""A batch job of the source without a JVM: ranges, bounds, filters, losses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    StringStartsWith,
)
from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

from kafkalite import sync
from kafkalite.model import TopicPartition
from kafkalite.testing import SyncCluster
from pyspark_kafkalite import DefaultSource
from sparkbridge.errors import DataLossError, DataLossWarning, SourceSchemaError, SparkOptionError
from sparkbridge.source.batch_reader import KafkaliteReader
from sparkbridge.source.schema import source_schema
from sparkbridge.source.start_and_end import StartAfterEndError


def numbered(first: int, until: int) -> list[bytes]:
    return [b"%06d" % number for number in range(first, until)]


class Job:
    """A batch job up to its first action, as in Spark's planning worker."""

    def __init__(self, cluster: SyncCluster, *filters: Any, **options: Any) -> None:
        given = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
        given |= {name: str(value) for name, value in options.items()}
        self.source = cloudpickle.loads(cloudpickle.dumps(DefaultSource(CaseInsensitiveDict(given))))
        self.schema = self.source.schema()
        self.reader = self.source.reader(schema=self.schema)
        if filters:
            left = self.reader.pushFilters(list(filters))
            assert [id(each) for each in left] == [id(each) for each in filters], "all for Spark to check"
        self.partitions = self.reader.partitions()

    def ranges(self) -> list[tuple[int, int, int]]:
        return [(each.value.partition, each.value.start, each.value.end) for each in self.partitions]

    def read(self) -> list[tuple[int, int, bytes]]:
        rows = []
        for partition in self.partitions or [InputPartition(None)]:  # as Spark does
            task = cloudpickle.loads(cloudpickle.dumps(self.reader))
            given = task.read(cloudpickle.loads(cloudpickle.dumps(partition)))
            assert isinstance(given, Iterator)
            for batch in records_to_arrow_batches(given, 10_000, self.schema, self.source):
                table = batch.to_pydict()
                rows += zip(table["partition"], table["offset"], table["value"], strict=True)
        return sorted(rows)


@pytest.fixture
def filled(cluster: SyncCluster, topic: str) -> str:
    """100 records in partition 0, 50 in 1, none in 2; offset n has the timestamp 1000 n ms."""
    with sync.Producer(cluster.bootstrap_servers) as producer:
        for partition, size in ((0, 100), (1, 50)):
            times = [1000 * number for number in range(size)]
            producer.send_many(topic, numbered(0, size), partition=partition, timestamps_ms=times)
    return topic


def test_a_batch_reads_all_existing_records(cluster: SyncCluster, filled: str) -> None:
    job = Job(cluster, subscribe=filled)
    assert job.ranges() == [(0, 0, 100), (1, 0, 50)]
    expected = [(0, n, b"%06d" % n) for n in range(100)] + [(1, n, b"%06d" % n) for n in range(50)]
    assert job.read() == expected


def test_records_written_after_the_planning_are_not_read(cluster: SyncCluster, filled: str) -> None:
    job = Job(cluster, subscribe=filled)
    cluster.produce(filled, numbered(100, 200), partition=0)
    assert len(job.read()) == 150


def test_an_empty_topic_has_no_tasks_and_the_partition_that_spark_adds_is_empty(
    cluster: SyncCluster, topic: str
) -> None:
    job = Job(cluster, subscribe=topic)
    assert job.partitions == []
    assert job.read() == []


@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({"startingOffsets": '{"%s":{"0":90,"1":-2,"2":-2}}'}, [(0, 90, 100), (1, 0, 50)]),
        ({"startingOffsets": "-10"}, [(0, 90, 100), (1, 40, 50)]),
        ({"endingOffsets": '{"%s":{"0":5,"1":0,"2":-1}}'}, [(0, 0, 5)]),
        ({"startingTimestamp": 98_000, "startingOffsetsByTimestampStrategy": "latest"}, [(0, 98, 100)]),
        ({"endingTimestamp": 2_000}, [(0, 0, 2), (1, 0, 2)]),
        ({"endingTimestamp": 60_000}, [(0, 0, 60), (1, 0, 50)]),
        ({"maxRecordsPerPartition": 50}, [(0, 0, 50), (0, 50, 100), (1, 0, 50)]),
        ({"minPartitions": 3}, [(0, 0, 50), (0, 50, 100), (1, 0, 50)]),
    ],
)
def test_bounds(
    cluster: SyncCluster, filled: str, options: dict[str, Any], ranges: list[tuple[int, int, int]]
) -> None:
    told = {name: str(value).replace("%s", filled) for name, value in options.items()}
    assert Job(cluster, subscribe=filled, **told).ranges() == ranges


def test_assign_reads_the_partitions_named(cluster: SyncCluster, filled: str) -> None:
    assert Job(cluster, assign=json.dumps({filled: [1]})).ranges() == [(1, 0, 50)]


def test_a_start_beyond_the_end_is_refused(cluster: SyncCluster, filled: str) -> None:
    with pytest.raises(StartAfterEndError, match=f"{filled}-0"):
        Job(
            cluster,
            subscribe=filled,
            startingOffsets=json.dumps({filled: {"0": 50, "1": 0, "2": 0}}),
            endingOffsets=json.dumps({filled: {"0": 40, "1": 1, "2": 0}}),
        )


@pytest.mark.parametrize(
    ("filters", "ranges"),
    [
        ([EqualTo(("partition",), 1)], [(1, 0, 50)]),
        ([In(("partition",), (1, 2))], [(1, 0, 50)]),
        ([GreaterThanOrEqual(("offset",), 45)], [(0, 45, 100), (1, 45, 50)]),
        ([GreaterThan(("offset",), 45), LessThan(("offset",), 48)], [(0, 46, 48), (1, 46, 48)]),
        ([EqualTo(("topic",), "another")], []),
        ([GreaterThanOrEqual(("timestamp",), datetime(1970, 1, 1, 0, 1, 30, tzinfo=UTC))], [(0, 90, 100)]),
        ([StringStartsWith(("topic",), "x"), EqualTo(("value",), b"1")], [(0, 0, 100), (1, 0, 50)]),
    ],
)
def test_filters_limit_the_ranges(
    cluster: SyncCluster, filled: str, filters: list[Any], ranges: list[tuple[int, int, int]]
) -> None:
    assert Job(cluster, *filters, subscribe=filled).ranges() == ranges


def test_spark_does_not_see_push_filters_as_an_override(cluster: SyncCluster, filled: str) -> None:
    """Spark refuses a reader with such a method while the setting is false, its default."""
    reader = Job(cluster, subscribe=filled).reader
    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters
    assert "pushFilters" not in KafkaliteReader.__dict__


def test_deleted_offsets_fail_the_job_or_warn(cluster: SyncCluster, filled: str) -> None:
    with sync.Admin(cluster.bootstrap_servers) as admin:
        admin.delete_records({TopicPartition(filled, 0): 30})
    starting = json.dumps({filled: {"0": 10, "1": 0, "2": 0}})
    with pytest.raises(DataLossError, match=f"{filled}-0 offsets 10 to 30"):
        Job(cluster, subscribe=filled, startingOffsets=starting)
    with pytest.warns(DataLossWarning, match=f"{filled}-0 offsets 10 to 30"):
        job = Job(cluster, subscribe=filled, startingOffsets=starting, failOnDataLoss="false")
    assert job.ranges() == [(0, 30, 100), (1, 0, 50)]
    assert Job(cluster, subscribe=filled).ranges() == [(0, 30, 100), (1, 0, 50)], "earliest loses nothing"


def test_a_start_that_an_open_transaction_hides_is_no_loss(cluster: SyncCluster, filled: str) -> None:
    start = json.dumps({filled: {"0": 101, "1": 0, "2": 0}})
    with (
        sync.Producer(cluster.bootstrap_servers, transactional_id=filled) as producer,
        producer.transaction(),
    ):
        producer.send_and_wait(filled, b"open", partition=0)
        assert [each[0] for each in Job(cluster, subscribe=filled, startingOffsets=start).ranges()] == [1]


def test_a_missing_topic(cluster: SyncCluster) -> None:
    with pytest.raises(SparkOptionError, match="subscribe names missing topics or partitions: not-there"):
        Job(cluster, subscribe="not-there")
    assert Job(cluster, subscribePattern="not-there.*").read() == []


def test_a_schema_of_the_user_is_checked_when_the_reader_is_made(cluster: SyncCluster, filled: str) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": filled}
    source = DefaultSource(CaseInsensitiveDict(options))
    with pytest.raises(SourceSchemaError, match="no column 'ofset'; did you mean 'offset'"):
        source.reader(schema=StructType([StructField("ofset", LongType())]))
    only = StructType([field for field in source_schema().fields if field.name == "offset"])
    reader = source.reader(schema=only)
    batches = [batch for each in reader.partitions() for batch in reader.read(each)]
    assert {tuple(batch.schema.names) for batch in batches} == {("offset",)}
    assert sum(batch.num_rows for batch in batches) == 150
