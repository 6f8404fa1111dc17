"""The driver's check of the brokers before a job, as in Spark's planning process, without Spark."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.types import BinaryType, StructField, StructType

from kafkalite.client.blocking.admin import Admin
from kafkalite.errors import ConnectionFailedError
from kafkalite.testing import SyncCluster
from sparkbridge.datasource import KafkaliteDataSource
from sparkbridge.sink import servers as sink_servers

SCHEMA = StructType([StructField("value", BinaryType())])
UNREACHABLE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, sink_servers.PLANNING_MODULE, ModuleType("planning"))
    monkeypatch.setattr(sink_servers, "_reached", set())
    yield


def make(kind: str, servers: str, **more: str) -> Any:
    source = KafkaliteDataSource(
        {
            "kafka.bootstrap.servers": servers,
            "topic": "out",
            "kafka.request.timeout.ms": "300",
            "kafka.delivery.timeout.ms": "1000",
            **more,
        }
    )
    return source.streamWriter(SCHEMA, False) if kind == "stream" else source.writer(SCHEMA, False)


@pytest.mark.parametrize("kind", ["stream", "batch"])
def test_a_wrong_address_fails_before_the_job(kind: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(
        ConnectionFailedError, match=r"kafka\.bootstrap\.servers is '127\.0\.0\.1:1'"
    ) as caught:
        make(kind, UNREACHABLE)
    assert "names a broker's host and port" in str(caught.value)
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize(
    ("kind", "more", "is_patient"),
    [
        ("batch", {}, False),
        ("stream", {}, True),
        ("batch", {"sinkName": "name"}, True),
        ("batch", {"txnAppId": "app", "txnVersion": "1"}, True),
    ],
)
def test_only_an_unnamed_job_fails_early(
    monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, str], is_patient: bool
) -> None:
    """Other jobs may be a batch of a running stream."""
    monkeypatch.setattr(sink_servers, "JOB_PATIENCE_MS", 100)
    with pytest.raises(ConnectionFailedError, match=r"within 0\.3 s" if is_patient else r"within 0\.1 s"):
        make(kind, UNREACHABLE, **more)


def test_later_writers_send_no_request(cluster: SyncCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark makes a writer for every micro-batch, also while brokers restart."""
    make("stream", cluster.bootstrap_servers)

    def refuse(self: Admin) -> Admin:
        raise AssertionError("asked again")

    monkeypatch.setattr(Admin, "start", refuse)
    make("stream", cluster.bootstrap_servers)


def test_the_process_that_commits_sends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, sink_servers.PLANNING_MODULE)
    make("stream", UNREACHABLE)
    make("batch", UNREACHABLE)
