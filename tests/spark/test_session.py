"""The settings of ``sparkbridge.session``, read inside the JVM and its Python workers."""

from __future__ import annotations

from typing import Any

from sparkbridge import session
from sparkbridge.local import fast_start


def test_the_session_uses_the_archive_and_the_unpacked_pyspark(spark: Any) -> None:
    home, archive = fast_start.shadow_home(), fast_start.class_archive()
    assert home is not None
    assert archive is not None, (
        "the warm-up could not make one: python -m sparkbridge.local.warm_up /tmp/x.jsa"
    )
    options = spark.sparkContext.getConf().get("spark.driver.extraJavaOptions")
    assert f"-XX:SharedArchiveFile={archive}" in options
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
