"""The input of a demo on a broker, without a JVM."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import TopicAlreadyExistsError
from kafkalite.testing import SyncCluster
from sparkbridge.pipelines import demo, files

pytest.importorskip("pyspark")

TEXT = """
[pipeline]
name = "p"
trigger = "1 second"
[source]
topic = "demo-in"
[sink]
topic = "demo-out"
[demo]
load = "load.py:load"
topics = { demo-in = 2 }
"""
LOAD = """
def load(demo):
    yield "demo-in", b"k", b"v", 1
    yield "demo-in", b"l", b"w", 2
"""


@pytest.fixture
def file(tmp_path: Path) -> files.PipelineFile:
    (tmp_path / "pipeline.toml").write_text(TEXT)
    (tmp_path / "load.py").write_text(LOAD)
    return files.read(tmp_path)


def test_topics_that_exist_are_refused_before_any_is_made(
    cluster: SyncCluster, file: files.PipelineFile
) -> None:
    """Otherwise, after deleting the named topics, a second try would find the created ones."""
    cluster.create_topic("demo-in")
    with pytest.raises(TopicAlreadyExistsError, match="demo-in exists; a demo creates its topics") as caught:
        demo.fill(file, {"bootstrap.servers": cluster.bootstrap_servers})
    assert "kl topic delete demo-in," in caught.value.hint
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topics(["demo-in"])
    assert demo.fill(file, {"bootstrap.servers": cluster.bootstrap_servers}) == {"demo-in": 2}
    with pytest.raises(TopicAlreadyExistsError, match="demo-in, demo-out exist;"):
        demo.fill(file, {"bootstrap.servers": cluster.bootstrap_servers})
