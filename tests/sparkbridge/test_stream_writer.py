"""The stream's sink against a broker, without a JVM: the test plays tasks and driver."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from pyspark import TaskContext
from pyspark.serializers import CPickleSerializer
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import kafkalite
from kafkalite.client.blocking.admin import Admin
from kafkalite.client.blocking.transaction_group import TransactionGroup
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.errors import ConnectionFailedError
from kafkalite.model import TopicPartition
from kafkalite.testing import SyncCluster
from sparkbridge.errors import SinkCommitError, SinkSchemaError, SparkOptionError
from sparkbridge.sink import commit as sink_commit
from sparkbridge.sink import task_writer
from sparkbridge.sink.commit import Written
from sparkbridge.sink.stream_writer import KafkaliteStreamWriter

SCHEMA = StructType([StructField("key", StringType()), StructField("value", BinaryType())])

_numbers = count(1)


def through_pickle(value: Any) -> Any:
    """Pickle and unpickle a value with Spark's own pickle."""
    return CPickleSerializer().loads(CPickleSerializer().dumps(value))


class FakeTask:
    """The task context of Spark."""

    def __init__(
        self, query: str, batch: int, partition: int = 0, attempt: int = 0, run: str = "run"
    ) -> None:
        self._properties = {
            "sql.streaming.queryId": query,
            "streaming.sql.batchId": str(batch),
            "spark.jobGroup.id": run,
        }
        self._partition = partition
        self._attempt = attempt
        self._task_attempt = next(_numbers)

    def getLocalProperty(self, key: str) -> str | None:
        return self._properties.get(key)

    def partitionId(self) -> int:
        return self._partition

    def attemptNumber(self) -> int:
        return self._attempt

    def taskAttemptId(self) -> int:
        return self._task_attempt


Enter = Callable[[FakeTask | None], None]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Enter the context of a task."""
    return lambda task: monkeypatch.setattr(TaskContext, "_taskContext", task)


@pytest.fixture
def query() -> str:
    return f"query-{next(_numbers)}"


def writer(cluster: SyncCluster, topic: str, **options: str) -> KafkaliteStreamWriter:
    """Return a writer that Spark has pickled."""
    given = CaseInsensitiveDict({"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic})
    given.update(options)
    made = KafkaliteStreamWriter(given, SCHEMA, False)
    copy: KafkaliteStreamWriter = through_pickle(made)
    return copy


def rows(*values: str) -> Iterator[Any]:
    keys = pa.array([None] * len(values), pa.string())
    yield pa.record_batch([keys, pa.array([one.encode() for one in values])], names=["key", "value"])


def committed(cluster: SyncCluster, topic: str) -> list[str]:
    """Return the records that a read_committed reader sees now, up to the last stable offsets."""

    async def read() -> list[str]:
        settings: Any = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        found: list[str] = []
        async with kafkalite.Consumer(bootstrap_servers=cluster.bootstrap_servers, **settings) as consumer:
            partitions = [TopicPartition(topic, number) for number in range(3)]
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            async with asyncio.timeout(20):
                while any(end and not has_come_to(consumer, tp, end) for tp, end in ends.items()):
                    records = await consumer.get_many(timeout_ms=50)
                    found.extend((record.value or b"").decode() for record in records)
        return sorted(found)

    def has_come_to(consumer: Any, tp: TopicPartition, end: int) -> bool:
        position = consumer.positions().get(tp)
        return position is not None and position.offset >= end

    return asyncio.run(read())


def end_offsets(cluster: SyncCluster, topic: str) -> list[int]:
    with Admin(cluster.bootstrap_servers) as admin:
        found = admin.list_offsets([TopicPartition(topic, number) for number in range(3)], "latest")
    return [found[tp].offset for tp in sorted(found)]


def open_members(cluster: SyncCluster, sink_id: str) -> list[str]:
    with Admin(cluster.bootstrap_servers) as admin:
        writers = admin.describe_transaction_group(sink_id).writers
    return [one.writer for one in writers if one.state == "Ongoing" and one.partitions]


def fail_after(batches: Iterable[Any]) -> Iterator[Any]:
    yield from batches
    raise ZeroDivisionError("in the query's own code")


# --- a batch -----------------------------------------------------------------------------------------


def test_a_batch_is_visible_when_it_is_committed(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0, 0))
    first = sink.write(rows("a", "b"))
    enter(FakeTask(query, 0, 1))
    second = sink.write(rows("c"))
    assert committed(cluster, topic) == []
    enter(None)
    writer(cluster, topic).commit([through_pickle(first), second, None], 0)
    assert committed(cluster, topic) == ["a", "b", "c"]
    assert (first.rows, second.rows) == (2, 1)


def test_batches_follow_each_other_with_gaps(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    for batch in (0, 1, 5):
        enter(FakeTask(query, batch))
        sink.commit([sink.write(rows(f"batch {batch}"))], batch)
    assert committed(cluster, topic) == ["batch 0", "batch 1", "batch 5"]


def test_a_committed_batch_run_again_sends_nothing(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """The driver died between the commit and Spark's commit log."""
    sink = writer(cluster, topic)
    enter(FakeTask(query, 3))
    sink.commit([sink.write(rows("a", "b"))], 3)
    ends = end_offsets(cluster, topic)
    for partition in (0, 1):  # the second run may be split differently
        enter(FakeTask(query, 3, partition, run="run-2"))
        again = sink.write(rows("a" if partition == 0 else "b"))
        assert (again.rows, again.prepared) == (1, None)
        sink.commit([again], 3)
    assert end_offsets(cluster, topic) == ends
    assert committed(cluster, topic) == ["a", "b"]


def test_a_batch_not_committed_is_written_by_its_second_run_only(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """The driver died before the commit; the second run is split differently."""
    sink = writer(cluster, topic)
    for partition, value in enumerate(("a", "b")):
        enter(FakeTask(query, 0, partition))
        sink.write(rows(value))
    enter(FakeTask(query, 0, 0, run="run-2"))
    sink.commit([sink.write(rows("a", "b"))], 0)
    assert committed(cluster, topic) == ["a", "b"]


def test_a_losing_attempt_is_never_visible(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """A speculative copy, or a first attempt whose response was lost."""
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0, 0, attempt=0))
    sink.write(rows("a"))
    enter(FakeTask(query, 0, 0, attempt=1))
    sink.commit([sink.write(rows("a"))], 0)
    assert committed(cluster, topic) == ["a"]


def test_a_zombie_attempt_after_the_commit_is_refused(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)

    def slow() -> Iterator[Any]:
        yield from rows(*("x" * 300_000 for _ in range(8)))  # some of it has been sent by then
        enter(FakeTask(query, 0, 0, attempt=1))
        sink.commit([sink.write(rows("a"))], 0)
        yield from rows(*("x" * 300_000 for _ in range(8)))

    enter(FakeTask(query, 0, 0, attempt=0))
    with pytest.raises(SinkCommitError, match="transaction of task 0 in batch 0"):
        sink.write(slow())
    assert committed(cluster, topic) == ["a"]


def test_a_task_that_fails_aborts_what_it_wrote(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0))
    with pytest.raises(ZeroDivisionError):
        sink.write(fail_after(rows(*("x" * 300_000 for _ in range(8)))))
    assert open_members(cluster, f"spark-{query}") == []
    enter(FakeTask(query, 0, attempt=1))
    sink.commit([sink.write(rows("a"))], 0)
    assert committed(cluster, topic) == ["a"]


def test_after_an_abort_the_batch_can_run_again(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0, 0))
    written = sink.write(rows("a"))
    assert len(open_members(cluster, f"spark-{query}")) == 1
    sink.abort([written, None], 0)
    assert open_members(cluster, f"spark-{query}") == []
    enter(FakeTask(query, 0, 0, run="run-2"))
    sink.commit([sink.write(rows("b"))], 0)
    assert committed(cluster, topic) == ["b"]


@pytest.mark.parametrize("name", [None, "sink-of-its-own"])
def test_abort_finds_attempts_without_a_message(
    cluster: SyncCluster, topic: str, enter: Enter, query: str, name: str | None
) -> None:
    """A stopped query: Spark ends a task's input early, and its message is never delivered."""
    sink_name = {} if name is None else {"sinkName": f"{name}-{query}"}
    sink = writer(cluster, topic, checkpointLocation=f"/checkpoints/{query}", **sink_name)
    sink_id = f"spark-{sink_name.get('sinkName', query)}"
    for partition in (0, 1):
        enter(FakeTask(query, 3, partition))
        sink.write(rows("a"))
    assert len(open_members(cluster, sink_id)) == 2
    enter(None)
    again = writer(cluster, topic, checkpointLocation=f"/checkpoints/{query}", **sink_name)
    again.abort([None, None], 3)
    assert open_members(cluster, sink_id) == []
    enter(FakeTask(query, 3, run="run-2"))
    sink.commit([sink.write(rows("b"))], 3)
    assert committed(cluster, topic) == ["b"]


def test_the_abort_fences_an_attempt_that_still_writes(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic, checkpointLocation=f"/checkpoints/{query}")

    def stopped() -> Iterator[Any]:
        yield from rows(*("x" * 300_000 for _ in range(8)))
        sink.abort([None], 0)
        yield from rows(*("x" * 300_000 for _ in range(8)))

    enter(FakeTask(query, 0))
    with pytest.raises(SinkCommitError, match="transaction of task 0 in batch 0"):
        sink.write(stopped())
    assert open_members(cluster, f"spark-{query}") == []


def test_abort_does_not_touch_other_queries_and_batches(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """Another query with the same options, and another batch of this query."""
    mine, other = (
        writer(cluster, topic, checkpointLocation=f"/checkpoints/{name}") for name in (query, f"{query}-b")
    )
    enter(FakeTask(f"{query}-b", 0))
    message = other.write(rows("b"))
    enter(FakeTask(query, 1))
    next_one = mine.write(rows("c"))
    mine.abort([None], 0)
    other.commit([message], 0)
    mine.commit([next_one], 1)
    assert committed(cluster, topic) == ["b", "c"]


def test_abort_does_not_touch_another_topic(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """For example queries in containers, each with its own directory of the same path."""
    cluster.create_topic(f"{topic}-b", partitions=3)
    mine, other = (writer(cluster, name, checkpointLocation="/checkpoint") for name in (topic, f"{topic}-b"))
    enter(FakeTask(query, 0))
    message = other.write(rows("b"))
    mine.abort([None], 0)
    other.commit([message], 0)
    assert committed(cluster, f"{topic}-b") == ["b"]


def test_abort_without_a_checkpoint_location_aborts_finished_tasks(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0, 0))
    told = sink.write(rows("a"))
    enter(FakeTask(query, 0, 1))
    sink.write(rows("b"))
    sink.abort([told, None], 0)
    assert [name.split("-")[-4] for name in open_members(cluster, f"spark-{query}")] == ["1"]


def test_abort_after_the_commit_changes_nothing(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0))
    written = sink.write(rows("a"))
    sink.commit([written], 0)
    sink.abort([written], 0)
    assert committed(cluster, topic) == ["a"]


def test_a_batch_without_rows_is_recorded_as_finished(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 4))
    empty = sink.write(iter([]))
    assert (empty.rows, empty.prepared) == (0, None)
    sink.commit([empty], 4)
    with TransactionGroup(f"spark-{query}", cluster.bootstrap_servers) as group:
        assert group.last_batch_id() == 4


def test_without_messages_there_is_nothing_to_commit(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """Neither the topic nor the query's last batch changes."""
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0))
    sink.commit([sink.write(rows("a"))], 0)
    ends = end_offsets(cluster, topic)
    sink.commit([], 1)
    sink.commit([None], 1)
    sink.abort([None], 1)
    assert end_offsets(cluster, topic) == ends
    with TransactionGroup(f"spark-{query}", cluster.bootstrap_servers) as group:
        assert group.last_batch_id() == 0
    enter(FakeTask(query, 1))
    sink.commit([sink.write(rows("b"))], 1)
    assert committed(cluster, topic) == ["a", "b"]


# --- refusals ----------------------------------------------------------------------------------------


def test_a_batch_before_the_last_is_refused(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    """A new checkpoint with an old name would lose its first batches."""
    sink = writer(cluster, topic, sinkName=f"sink-{query}")
    enter(FakeTask(query, 7))
    sink.commit([sink.write(rows("a"))], 7)
    enter(FakeTask("another-query", 0))
    with pytest.raises(SinkCommitError, match="the checkpoint is new"):
        sink.write(rows("b"))
    empty = Written(f"spark-sink-{query}", 6, query, 0, None)
    with pytest.raises(SinkCommitError, match="is older than the last committed one"):
        sink.commit([empty], 6)


def test_the_same_batch_of_another_query_does_not_count_as_written(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic, sinkName=f"sink-{query}")
    enter(FakeTask(query, 0))
    sink.commit([sink.write(rows("a"))], 0)
    enter(FakeTask("another-query", 0))
    stranger = sink.write(rows("b"))
    with pytest.raises(SinkCommitError, match="committed by another query"):
        sink.commit([stranger], 0)


def test_a_batch_without_rows_of_another_query_is_refused_too(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic, sinkName=f"sink-{query}")
    for _ in range(2):  # the same query may
        enter(FakeTask(query, 0))
        sink.commit([sink.write(iter([]))], 0)
    enter(FakeTask("another-query", 0))
    stranger = sink.write(rows("b"))
    with pytest.raises(SinkCommitError, match="committed by another query"):
        sink.commit([stranger], 0)
    enter(FakeTask(query, 1))
    sink.commit([sink.write(rows("a"))], 1)
    assert committed(cluster, topic) == ["a"]


def test_a_task_whose_transaction_timed_out_is_reported(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic, **{"kafka.transaction.timeout.ms": "300"})
    enter(FakeTask(query, 0))
    written = sink.write(rows("a"))
    wait_until_closed(cluster, f"spark-{query}")
    with pytest.raises(SinkCommitError, match=r"kafka\.transaction\.timeout\.ms, now 300"):
        sink.commit([written], 0)
    enter(FakeTask(query, 0, run="run-2"))
    retried = writer(cluster, topic)
    retried.commit([retried.write(rows("a"))], 0)
    assert committed(cluster, topic) == ["a"]


def test_a_task_that_writes_past_the_timeout_is_reported(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    def slow() -> Iterator[Any]:
        yield from rows(*("x" * 300_000 for _ in range(8)))
        wait_until_closed(cluster, f"spark-{query}")
        yield from rows(*("x" * 300_000 for _ in range(8)))

    sink = writer(cluster, topic, **{"kafka.transaction.timeout.ms": "300"})
    enter(FakeTask(query, 0))
    with pytest.raises(SinkCommitError, match=r"kafka\.transaction\.timeout\.ms, now 300"):
        sink.write(slow())
    assert committed(cluster, topic) == []


def wait_until_closed(cluster: SyncCluster, sink_id: str) -> None:
    """Wait until the coordinator has aborted the transaction, by its own clock."""
    deadline_s = time.monotonic() + 20
    with Admin(cluster.bootstrap_servers) as admin:
        while any(one.state == "Ongoing" for one in admin.describe_transaction_group(sink_id).writers):
            assert time.monotonic() < deadline_s, "the transaction stays open"
            time.sleep(0.02)


def test_a_timeout_above_the_brokers_limit_is_lowered(topic: str, enter: Enter, query: str) -> None:
    with SyncCluster(transport="tcp", transaction_max_timeout_ms=5_000) as small:
        small.create_topic("out", partitions=3)
        sink = writer(small, "out")
        enter(FakeTask(query, 0))
        sink.commit([sink.write(rows("a"))], 0)
        assert committed(small, "out") == ["a"]


def test_outside_a_task(cluster: SyncCluster, topic: str, enter: Enter) -> None:
    enter(None)
    with pytest.raises(SinkCommitError, match="not a task of a streaming query"):
        writer(cluster, topic).write(rows("a"))


def test_errors_are_raised_by_the_writer(cluster: SyncCluster) -> None:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers}
    with pytest.raises(SinkSchemaError):
        KafkaliteStreamWriter(servers, SCHEMA, overwrite=False)
    with pytest.raises(SparkOptionError):
        KafkaliteStreamWriter({"topic": "out"}, SCHEMA, overwrite=True)


@pytest.mark.parametrize(
    "setting", [("retries", "0"), ("linger.ms", "200000"), ("buffer.memory", "1000")], ids=lambda one: one[0]
)
def test_contradictory_settings_are_refused_by_the_writer(setting: tuple[str, str]) -> None:
    name, value = setting
    options = {"kafka.bootstrap.servers": "h:1", "topic": "out", f"kafka.{name}": value}
    with pytest.raises(SparkOptionError, match=rf"kafka\.{name}"):
        KafkaliteStreamWriter(options, SCHEMA)


def test_complete_mode_overwrites_by_name_only(cluster: SyncCluster, topic: str) -> None:
    options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic}
    assert KafkaliteStreamWriter(options, SCHEMA, True).options.topic == topic


def test_the_coordinator_fails_over_during_a_commit(topic: str, enter: Enter, query: str) -> None:
    with SyncCluster(brokers=3, transport="tcp") as three:
        three.create_topic("out", partitions=3)
        sink = writer(three, "out")
        enter(FakeTask(query, 0))
        written = sink.write(rows("a"))
        for node_id in (1, 2, 3):  # one of them is the coordinator
            three.restart(node_id)
        sink.commit([written], 0)
        assert committed(three, "out") == ["a"]


@pytest.mark.parametrize("exactly_once", ["true", "false"])
def test_a_broker_that_restarts_is_waited_for(
    enter: Enter, query: str, exactly_once: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the task and by the commit, which have no connection at that time."""
    with SyncCluster(transport="tcp") as lone:
        lone.create_topic("out", partitions=3)
        sink = writer(lone, "out", exactlyOnce=exactly_once)
        pauses = count()

        def pause(_: float) -> None:
            if next(pauses) % 3 == 2:
                lone.start(1)

        # Not time.sleep itself: other threads of this process sleep, too.
        monkeypatch.setattr(sink_commit, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
        lone.kill(1)
        enter(FakeTask(query, 0))
        written = sink.write(rows("a"))
        lone.kill(1)
        if exactly_once == "false":
            lone.start(1)
        sink.commit([written], 0)
        assert committed(lone, "out") == ["a"]


def test_brokers_that_stay_unreachable_are_reported(
    enter: Enter, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_commit, "COMMIT_TIMEOUT_MS", 0)
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "out"}
    sink = KafkaliteStreamWriter({**options, "kafka.request.timeout.ms": "1"}, SCHEMA)
    enter(FakeTask(query, 0))
    with pytest.raises(ConnectionFailedError):
        sink.write(rows("a"))
    with pytest.raises(SinkCommitError, match="it is unknown"):
        sink.commit([sink.write(iter([]))], 0)


def test_no_state_is_left_of_a_batch(cluster: SyncCluster, topic: str, enter: Enter, query: str) -> None:
    """A worker runs many tasks, of which some fail."""

    def run(batch: int) -> int:
        sink = writer(cluster, topic, sinkName=f"sink-{query}")
        enter(FakeTask(query, batch))
        with pytest.raises(ZeroDivisionError):
            sink.write(fail_after(rows("a")))
        sink.abort([sink.write(rows("a"))], batch)
        sink.commit([sink.write(rows(*"a" * (batch % 2)))], batch)
        gc.collect()
        return sum(isinstance(one, ClusterClient) for one in gc.get_objects())

    first = run(0)
    assert [run(batch) for batch in range(1, 7)] == [first] * 6


# --- at least once -----------------------------------------------------------------------------------


def test_at_least_once_is_visible_as_it_is_written(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic, exactlyOnce="false")
    enter(FakeTask(query, 0))
    written = sink.write(rows("a", "b"))
    assert committed(cluster, topic) == ["a", "b"]
    sink.commit([written], 0)
    sink.abort([written], 0)
    sink.write(rows("a", "b"))
    assert committed(cluster, topic) == ["a", "a", "b", "b"]


def test_the_tasks_of_a_process_share_a_producer(
    cluster: SyncCluster, topic: str, enter: Enter, query: str
) -> None:
    sink = writer(cluster, topic, exactlyOnce="false")
    enter(FakeTask(query, 0))
    sink.write(rows("a"))
    pooled = dict(task_writer._producers)
    sink.write(rows("b"))
    assert dict(task_writer._producers) == pooled
    with pytest.raises(ZeroDivisionError):
        sink.write(fail_after(rows("c")))
    assert not set(task_writer._producers.values()) & set(pooled.values())
    sink.write(rows("d"))
    assert {"a", "b", "d"} <= set(committed(cluster, topic))


@pytest.fixture(autouse=True)
def _own_producers() -> Iterator[None]:
    """Start without producers that tests of other files left in this process, and leave none."""
    _forget_producers()
    yield
    _forget_producers()


def _forget_producers() -> None:
    for producer in list(task_writer._producers.values()):
        task_writer._forget_producer(producer)


def test_the_commit_waits_for_the_markers(cluster: SyncCluster, topic: str, enter: Enter, query: str) -> None:
    sink = writer(cluster, topic)
    enter(FakeTask(query, 0))
    result = sink_commit.commit_batch(sink.options, [sink.write(rows("a"))])
    assert result is not None
    assert result.is_complete
