"""The settings of ``sparkbridge.session``, read inside the JVM and its Python workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kafkalite.testing.sync_cluster import SyncCluster
from sparkbridge import session
from sparkbridge.local import fast_start
from sparkbridge.local.spark_session import STREAM_VARIABLES, environment_of_workers


def test_workers_of_the_session_use_the_unpacked_pyspark(spark: Any) -> None:
    home = fast_start.shadow_home()
    assert home is not None
    assert spark._jvm.System.getenv("SPARK_HOME") == str(home)

    def where(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    (path,) = spark.sparkContext.parallelize([0], 1).map(where).collect()
    assert path.startswith(str(home / "python/lib/pyspark.zip")), "workers compile nothing"


def test_the_recommended_settings_are_in_effect(spark: Any) -> None:
    for name, value in (
        ("spark.python.unix.domain.socket.enabled", "true"),
        ("spark.sql.python.filterPushdown.enabled", "true"),
        ("spark.sql.shuffle.partitions", "2"),
        ("spark.ui.enabled", "false"),
    ):
        assert spark.conf.get(name) == value
    assert "FileSystemBased" in spark.conf.get("spark.sql.streaming.checkpointFileManagerClass")


def test_a_second_call_returns_the_running_session(spark: Any) -> None:
    assert session("another", master="local[2,4]").sparkContext is spark.sparkContext


def test_another_thread_writes_after_it_asked_for_the_session(
    spark: Any, broker: SyncCluster, new_topic_on: Callable[..., str]
) -> None:
    topic = new_topic_on("from-a-thread")

    def write() -> None:
        rows = session("another", master="local[2,4]").sql("SELECT 'value' AS value")
        writer = rows.write.format("kafkalite").mode("append").option("topic", topic)
        writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).save()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(write).result()
    assert [record.value for record in broker.records(topic)] == [b"value"]


def test_a_query_adds_no_variable_to_the_environment_that_queries_share(
    spark: Any, broker: SyncCluster, new_topic_on: Callable[..., str], checkpoint: str
) -> None:
    """Two that start at the same time could damage the map: "Illegal size 5 of collection, expected 6"."""
    before = set(environment_of_workers(spark))
    assert before >= set(STREAM_VARIABLES)
    topic = new_topic_on("shared-environment")
    broker.produce(topic, [b"value"])
    options = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic}
    rows = spark.readStream.format("kafkalite").options(**options, startingOffsets="earliest").load()
    query = rows.writeStream.format("noop").option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    environment = environment_of_workers(spark)
    assert set(environment) == before, "Spark adds another variable: add it to STREAM_VARIABLES"
    assert all(environment[name] for name in STREAM_VARIABLES), "Spark sets the values"
