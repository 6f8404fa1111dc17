"""The sink of batch jobs and of foreachBatch, without a JVM: the test plays tasks and driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from pyspark import TaskContext
from pyspark.serializers import CPickleSerializer
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StringType, StructField, StructType

from kafkalite.client.blocking.transaction_group import TransactionGroup
from kafkalite.testing import SyncCluster
from sparkbridge import foreach_batch
from sparkbridge.errors import SinkCommitError, SinkSchemaError, SparkOptionError
from sparkbridge.sink.batch_writer import KafkaliteWriter

SCHEMA = StructType([StructField("value", StringType())])

_numbers = count(1)


def through_pickle(value: Any) -> Any:
    """Pickle and unpickle a value with Spark's own pickle."""
    return CPickleSerializer().loads(CPickleSerializer().dumps(value))


class FakeTask:
    def __init__(self, partition: int = 0, properties: dict[str, str] | None = None) -> None:
        self._partition = partition
        self._properties = properties or {}
        self._number = next(_numbers)

    def getLocalProperty(self, key: str) -> str | None:
        return self._properties.get(key)

    def partitionId(self) -> int:
        return self._partition

    def attemptNumber(self) -> int:
        return 0

    def taskAttemptId(self) -> int:
        return self._number


Enter = Callable[[FakeTask | None], None]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    return lambda task: monkeypatch.setattr(TaskContext, "_taskContext", task)


def job(cluster: SyncCluster, topic: str, **options: str) -> KafkaliteWriter:
    """Return a job's writer as in the tasks and the commit."""
    given = CaseInsensitiveDict({"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic})
    given.update(options)
    copy: KafkaliteWriter = through_pickle(KafkaliteWriter(given, SCHEMA, False))
    return copy


def rows(*values: str) -> Iterator[Any]:
    yield pa.record_batch([pa.array(values)], names=["value"])


def ends(cluster: SyncCluster, topic: str) -> int:
    from kafkalite.client.blocking.admin import Admin
    from kafkalite.model import TopicPartition

    with Admin(cluster.bootstrap_servers) as admin:
        found = admin.list_offsets([TopicPartition(topic, number) for number in range(3)], "latest")
    return sum(one.offset for one in found.values())


def last_batch(cluster: SyncCluster, sink_id: str) -> int:
    with TransactionGroup(sink_id, cluster.bootstrap_servers) as group:
        return group.last_batch_id()


def test_a_job_is_one_transaction(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    one = job(cluster, topic)
    messages = []
    for partition in range(2):
        enter(FakeTask(partition))
        messages.append(one.write(rows("a")))
    enter(None)
    one.commit(messages)
    assert last_batch(cluster, one.sink_id) == 0
    other = job(cluster, topic)
    assert one.sink_id.startswith("spark-")
    assert other.sink_id != one.sink_id


def test_a_job_submitted_again_writes_nothing(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    options = {"txnAppId": f"app-{topic}", "txnVersion": "3"}
    one = job(cluster, topic, **options)
    enter(FakeTask())
    one.commit([one.write(rows("a", "b"))])
    end = ends(cluster, topic)
    again = job(cluster, topic, **options)
    message = again.write(rows("a", "b"))
    again.commit([message])
    assert (message.rows, message.prepared) == (2, None)
    assert ends(cluster, topic) == end
    assert last_batch(cluster, f"app-{topic}") == 3


def test_an_older_version_is_refused(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    enter(FakeTask())
    for version in ("5", "4"):
        one = job(cluster, topic, txnAppId=f"app-{topic}", txnVersion=version)
        if version == "5":
            one.commit([one.write(rows("a"))])
        else:
            with pytest.raises(SinkCommitError, match="the last one is 5"):
                one.write(rows("a"))


@pytest.mark.parametrize(
    ("named", "query_id", "is_retired"),
    [
        ({}, "", True),
        ({}, "query", True),
        ({"sinkName": "name"}, "", True),
        ({"sinkName": "name"}, "query", False),
        ({"txnAppId": "app", "txnVersion": "1"}, "", False),
    ],
)
def test_a_name_that_is_not_used_again_is_retired(
    cluster: SyncCluster,
    topic: str,
    enter: Enter,
    monkeypatch: pytest.MonkeyPatch,
    named: dict[str, str],
    query_id: str,
    is_retired: bool,
) -> None:
    """Otherwise the brokers would store a name for every job; inside foreachBatch a name is used again."""
    retired: list[int] = []
    retire = TransactionGroup.retire
    monkeypatch.setattr(TransactionGroup, "retire", lambda group: retired.append(retire(group)))
    options = {name: value if name == "txnVersion" else f"{value}-{topic}" for name, value in named.items()}
    one = job(cluster, topic, **options)
    properties = {"sql.streaming.queryId": query_id, "streaming.sql.batchId": "0"} if query_id else {}
    enter(FakeTask(properties=properties))
    one.commit([one.write(rows("a"))])
    assert len(retired) == is_retired
    assert [record.value for record in cluster.records(topic)] == [b"a"]


@pytest.mark.parametrize("named", [{}, {"sinkName": "name"}, {"txnAppId": "app", "txnVersion": "1"}])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_failed_job_is_aborted(
    cluster: SyncCluster, topic: str, enter: Enter, named: dict[str, str], is_told: bool
) -> None:
    """Also what a task wrote without a message to the driver, as when a job is cancelled."""
    from kafkalite.client.blocking.admin import Admin

    options = {name: value if name == "txnVersion" else f"{value}-{topic}" for name, value in named.items()}
    one = job(cluster, topic, **options)
    enter(FakeTask())
    message = one.write(rows("a"))
    one.abort([None, message if is_told else None])
    with Admin(cluster.bootstrap_servers) as admin:
        writers = admin.describe_transaction_group(message.sink_id).writers
    assert [writer for writer in writers if writer.partitions] == []


def test_at_least_once_jobs(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    one = job(cluster, topic, exactlyOnce="false")
    enter(FakeTask())
    one.commit([one.write(rows("a"))])
    assert [record.value for record in cluster.records(topic)] == [b"a"]


def test_a_topic_is_not_overwritten(cluster: SyncCluster) -> None:
    with pytest.raises(SparkOptionError, match="can't be overwritten") as caught:
        KafkaliteWriter({"kafka.bootstrap.servers": "h:1", "topic": "out"}, SCHEMA, overwrite=True)
    assert '.mode("append")' in str(caught.value)


def test_errors_are_raised_by_the_writer() -> None:
    with pytest.raises(SinkSchemaError):
        KafkaliteWriter({"kafka.bootstrap.servers": "h:1"}, SCHEMA)
    with pytest.raises(SparkOptionError):
        KafkaliteWriter({"topic": "out"}, SCHEMA)


def test_outside_a_task(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    enter(None)
    with pytest.raises(SinkCommitError, match="not a task of Spark"):
        job(cluster, topic).write(rows("a"))


def test_a_named_sink_inside_a_stream_is_identified_by_its_batch(
    cluster: SyncCluster, topic: str, enter: Enter
) -> None:
    """df.write with sinkName in a user's own foreachBatch function."""
    properties = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "9"}
    for _ in range(2):
        one = job(cluster, topic, sinkName=f"name-{topic}")
        enter(FakeTask(0, properties))
        one.commit([one.write(rows("a"))])
    assert ends(cluster, topic) == 2  # a record and a marker
    assert last_batch(cluster, f"spark-name-{topic}") == 9


# --- foreach_batch -----------------------------------------------------------------------------------


class FakeFrame:
    """Writes like Spark, with the given options."""

    def __init__(self, cluster: SyncCluster, enter: Enter, *values: str) -> None:
        self.enter, self.values = enter, values
        self.given: dict[str, str] = {}

    @property
    def write(self) -> FakeFrame:
        return self

    def format(self, name: str) -> FakeFrame:
        assert name == "kafkalite"
        return self

    def mode(self, name: str) -> FakeFrame:
        assert name == "append"
        return self

    def options(self, **options: str) -> FakeFrame:
        self.given.update(options)
        return self

    def option(self, name: str, value: str) -> FakeFrame:
        self.given[name] = value
        return self

    def save(self) -> None:
        writer = KafkaliteWriter(self.given, SCHEMA, False)
        self.enter(FakeTask())
        writer.commit([writer.write(rows(*self.values))])


def test_foreach_batch_writes_each_batch_once(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    function = foreach_batch(
        {"kafka.bootstrap.servers": cluster.bootstrap_servers}, topic=topic, sinkName=f"sink-{topic}"
    )
    for batch in (0, 1, 1):
        function(FakeFrame(cluster, enter, f"batch {batch}"), batch)  # type: ignore[arg-type]
    assert ends(cluster, topic) == 4  # two records, two markers
    assert last_batch(cluster, f"spark-sink-{topic}") == 1


def test_two_sinks_of_one_batch(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic}
    for name in ("left", "right"):
        foreach_batch(servers, sinkName=f"{name}-{topic}")(FakeFrame(cluster, enter, name), 0)  # type: ignore[arg-type]
    assert ends(cluster, topic) == 4


def test_foreach_batch_needs_a_name() -> None:
    with pytest.raises(TypeError, match="sinkName"):
        foreach_batch({"kafka.bootstrap.servers": "h:1"})  # type: ignore[call-arg]
    with pytest.raises(SparkOptionError, match="sinkName is empty"):
        foreach_batch({"kafka.bootstrap.servers": "h:1"}, sinkName="")


def test_foreach_batch_raises_errors_before_the_query_starts() -> None:
    with pytest.raises(SparkOptionError, match=r"kafka\.bootstrap\.servers"):
        foreach_batch({"topic": "out"}, sinkName="s")
    with pytest.raises(SparkOptionError, match="txnversion"):
        foreach_batch({"kafka.bootstrap.servers": "h:1", "txnVersion": "1"}, sinkName="s")
    with pytest.raises(SparkOptionError, match=r"kafka\.retries"):
        foreach_batch({"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.retries": 0}, sinkName="s")
