"""``install(spark)`` ships the bridge to tasks and stream readers whose Python does not have it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark

from kafkalite.testing.sync_cluster import SyncCluster

DRIVER_TIMEOUT_S = 100
DRIVER = """
import sys
from sparkbridge import install, session

servers, topic, master, checkpoint = sys.argv[1:]
spark = session("shipped", master=master, is_short_lived=True, settings={"spark.log.level": "OFF"})

def source(reader):
    reader = reader.format("kafkalite").option("kafka.bootstrap.servers", servers)
    return reader.option("subscribe", topic).option("startingOffsets", "earliest").load()

try:
    source(spark.read)
except Exception as error:
    assert "DATA_SOURCE_NOT_FOUND" in str(error), error
else:
    raise AssertionError("the workers of this test must not have the package")

install(spark)
install(spark)
print("batch", source(spark.read).count())
rows = []
query = source(spark.readStream).writeStream.foreachBatch(lambda batch, _: rows.append(batch.count()))
query = query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
assert query.awaitTermination(60)
print("stream", sum(rows))
spark.stop()
"""


def test_install_ships_the_package_to_workers_without_it(
    broker: SyncCluster, new_topic_on: Callable[..., str], tmp_path: Path
) -> None:
    """The workers' Python reads no .pth file, so it does not find the development install."""
    topic = new_topic_on("shipped")
    broker.produce(topic, [b"%d" % number for number in range(50)])
    packages = Path(pyspark.__file__).parent.parent
    bare = tmp_path / "bare-python"
    bare.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{packages}"\nexec {shlex.quote(sys.executable)} -S "$@"\n'
    )
    bare.chmod(0o755)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            DRIVER,
            broker.bootstrap_servers,
            topic,
            "local[2,4]",
            str(tmp_path / "check"),
        ],
        env={**os.environ, "PYSPARK_PYTHON": str(bare), "PYSPARK_DRIVER_PYTHON": str(bare)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DRIVER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-2:] == ["batch 50", "stream 50"]
