"""Objects that Spark's workers exclude from garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sparkbridge.local import worker_garbage
from sparkbridge.local.worker_garbage import spare_collections


@pytest.fixture(autouse=True)
def _new_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_garbage, "_uses", {})
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    with monkeypatch.context() as patched:  # what earlier tests left behind must not be reported here
        patched.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()
    yield
    gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.me = self


def is_frozen(thing: Any) -> bool:
    return not any(thing is other for other in gc.get_objects())


def test_objects_of_the_second_use_are_excluded() -> None:
    kept = Cycle()
    spare_collections("write")
    assert not is_frozen(kept)
    spare_collections("write")
    assert is_frozen(kept)


def test_each_use_freezes_once() -> None:
    """Later objects are collected as usual."""
    for _ in range(2):
        spare_collections("write")
    later = Cycle()
    for _ in range(5):
        spare_collections("write")
    spare_collections("read")
    assert not is_frozen(later)
    spare_collections("read")
    assert is_frozen(later)


def test_existing_garbage_is_collected_first() -> None:
    import weakref

    garbage = weakref.ref(Cycle())
    gc.disable()
    try:
        for _ in range(2):
            spare_collections("commit")
    finally:
        gc.enable()
    assert garbage() is None


def test_a_process_that_is_not_a_worker_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER")
    kept = Cycle()
    for _ in range(3):
        spare_collections("write")
    assert not is_frozen(kept)


@pytest.mark.parametrize("kind", ["stream", "batch"])
def test_the_sink_excludes_objects_in_every_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the writer is made, where it writes, and where it commits."""
    pytest.importorskip("pyspark")
    pytest.importorskip("pyarrow")
    from pyspark.sql.types import BinaryType, StructField, StructType

    from sparkbridge.datasource import KafkaliteDataSource
    from sparkbridge.sink.task_writer import TaskIdentity, write_task

    monkeypatch.setattr(gc, "freeze", lambda: None)
    source = KafkaliteDataSource({"kafka.bootstrap.servers": "h:1", "topic": "out", "exactlyOnce": "false"})
    schema = StructType([StructField("value", BinaryType())])
    writer = source.streamWriter(schema, False) if kind == "stream" else source.writer(schema, False)
    task = TaskIdentity("sink", 0, "query", "attempt", 0)
    message = write_task(iter(()), writer.columns, writer.options, task)
    writer.commit([message], 0) if kind == "stream" else writer.commit([message])
    assert worker_garbage._uses == {"plan": 1, "write": 1, "commit": 1}
