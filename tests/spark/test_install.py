"""``install(spark)`` ships the bridge to tasks and stream readers whose Python does not have it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from kafkalite.testing.sync_cluster import SyncCluster
from sparkbridge.local import fast_start
from sparkbridge.shipping import pack

DRIVER_TIMEOUT_S = 100
DRIVER = """
import sys
import sparkbridge
from sparkbridge import install, session
from sparkbridge.local.spark_session import STREAM_VARIABLES, environment_of_workers

servers, topic, master, checkpoint, shipped = sys.argv[1:]
spark = session("shipped", master=master, is_short_lived=True, settings={"spark.log.level": "OFF"})

def source(reader):
    reader = reader.format("kafkalite").option("kafka.bootstrap.servers", servers)
    return reader.option("subscribe", topic).option("startingOffsets", "earliest").load()

if shipped == "by-install":
    try:
        source(spark.read)
    except Exception as error:
        assert "DATA_SOURCE_NOT_FOUND" in str(error), error
    else:
        raise AssertionError("the workers of this test must not have the package")
else:
    assert ".zip/" in sparkbridge.__file__, sparkbridge.__file__

install(spark)
install(spark)
assert set(environment_of_workers(spark)) >= set(STREAM_VARIABLES)
print("batch", source(spark.read).count())
rows = []
query = source(spark.readStream).writeStream.foreachBatch(lambda batch, _: rows.append(batch.count()))
query = query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
assert query.awaitTermination(60)
print("stream", sum(rows))
spark.stop()
"""


@pytest.mark.parametrize("shipped", ["by-install", "by-py-files"])
def test_install_ships_the_package_to_workers_without_it(
    broker: SyncCluster, new_topic_on: Callable[..., str], tmp_path: Path, shipped: str
) -> None:
    """The workers' Python reads no .pth file, so it does not find the development install.

    With ``spark-submit --py-files kafkalite.zip`` the driver itself imports the package from the zip.
    """
    topic = new_topic_on("shipped")
    broker.produce(topic, [b"%d" % number for number in range(50)])
    packages = Path(pyspark.__file__).parent.parent
    bare = tmp_path / "bare-python"
    bare.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{packages}"\nexec {shlex.quote(sys.executable)} -S "$@"\n'
    )
    bare.chmod(0o755)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable]
    if shipped == "by-py-files":
        pack(tmp_path / "kafkalite.zip")
        quick = fast_start.java_options(fast_start.class_archive(), is_short_lived=True)
        command = [
            str((fast_start.shadow_home() or packages / "pyspark") / "bin" / "spark-submit"),
            *("--driver-java-options", quick, "--conf", "spark.ui.enabled=false"),
            *("--py-files", str(tmp_path / "kafkalite.zip")),
        ]
    arguments = [broker.bootstrap_servers, topic, "local[2,4]", str(tmp_path / "check"), shipped]
    code, out, err = _run([*command, str(driver), *arguments], tmp_path, bare)
    assert code == 0, err[-4000:]
    assert out.splitlines()[-2:] == ["batch 50", "stream 50"]


def _run(command: list[str], directory: Path, python: Path) -> tuple[int, str, str]:
    """Run a driver and return its exit code and output. If it takes too long, its JVM ends with it."""
    home = {} if (found := fast_start.shadow_home()) is None else {"SPARK_HOME": str(found)}
    with subprocess.Popen(
        command,
        env={**os.environ, **home, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=DRIVER_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err
