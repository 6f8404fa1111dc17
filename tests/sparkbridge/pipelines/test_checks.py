"""The methods of CheckRun: a topic's records over several partitions, and shown differences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite.testing import SyncCluster
from sparkbridge.errors import PipelineError
from sparkbridge.pipelines.checks import CheckRun
from sparkbridge.pipelines.definition import Sink
from sparkbridge.pipelines.engine import Setting


def check_run(servers: str, *sinks: Sink) -> CheckRun:
    run: Any = SimpleNamespace(setting=Setting(servers), pipeline=SimpleNamespace(sinks=sinks))
    return CheckRun(run, None)  # type: ignore[arg-type]


def test_records_and_rows(cluster: SyncCluster, topic: str) -> None:
    from kafkalite.client.blocking.producer import Producer

    run = check_run(cluster.bootstrap_servers, Sink("sink", "source", topic=topic))
    assert run.records(topic) == []
    with Producer(cluster.bootstrap_servers) as producer:
        for partition in range(2):
            producer.send_many(topic, [b'{"n": %d}' % n for n in range(50)], partition=partition)
    assert [(record.partition, record.offset) for record in run.records(topic)] == [
        (partition, offset) for partition in range(2) for offset in range(50)
    ]
    assert sum(row["n"] for row in run.rows()) == 2 * sum(range(50))


def test_aborted_records_are_not_read(cluster: SyncCluster, topic: str) -> None:
    from kafkalite.client.blocking.producer import Producer

    run = check_run(cluster.bootstrap_servers)
    with Producer(cluster.bootstrap_servers, transactional_id="checks") as producer:
        producer.begin_transaction()
        producer.send_many(topic, [b"1", b"2"], partition=0)
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send_many(topic, [b"3"], partition=0)
        producer.flush()
        producer.abort_transaction()
    assert [record.value for record in run.records(topic)] == [b"1", b"2"]


def test_differences_are_shown() -> None:
    run = check_run("")
    run.equal("counts", {1: 2}, {1: 2})
    with pytest.raises(AssertionError) as caught:
        run.equal("counts", {1: 2, 2: 3, 9: 9}, {1: 2, 2: 4, 5: 5, 6: 6, 7: 7})
    assert str(caught.value) == (
        "counts: 5 of 5 differ: 2 is 3, expected 4; 5 is None, expected 5; 6 is None, expected 6, and 2 more"
    )


def test_sinks_by_name() -> None:
    one, other = Sink("one", "source", topic="a"), Sink("other", "source", topic="b")
    assert check_run("", one).sink() == one
    assert check_run("", one, other).sink("other") == other
    with pytest.raises(PipelineError, match="asks for the sink 'x'; there are one, other"):
        check_run("", one, other).sink("x")
