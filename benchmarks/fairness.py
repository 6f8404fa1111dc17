"""The latency of one quiet client while 20 others flood the broker (S24)."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from typing import Any

from benchmarks import wire
from benchmarks.harness import Row, plain_row, scratch_dir, server, time_row
from kafkalite.protocol.messages import admin, data, metadata
from kafkalite.records.builder import build_batch

MIB = 1024 * 1024
CONNECTIONS = 20
IN_FLIGHT = 4
SAMPLES = 200


def _produce(session: wire.Session, topic: str, size_bytes: int) -> bytes:
    batch = bytes(build_batch([os.urandom(size_bytes - 80)], timestamps_ms=1))
    message = data.ProduceRequest(1, 10_000, None, [data.ProducePartition(topic, 0, len(batch))])
    return session.encode(message, (batch,))


def _frame(session: wire.Session, kind: str) -> bytes:
    if kind == "Metadata":
        return session.encode(metadata.MetadataRequest(["flood"], False))
    if kind == "Fetch of 1 MiB":
        part = data.FetchPartition("flood", 0, -1, 0, MIB)
        return session.encode(data.FetchRequest(0, 0, MIB, 0, [part]))
    return _produce(session, "flood", 900_000 if "900 KB" in kind else 1_000)


def _flood(port: int, kind: str, stop: Any) -> None:
    def one() -> None:
        session = wire.Session(port)
        frame = _frame(session, kind)
        while not stop.is_set():
            wire.pump(session.sock, [frame], 5 * IN_FLIGHT, IN_FLIGHT, wire.skip_answer)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _p50_ms(session: wire.Session, frame: bytes) -> float:
    samples: list[float] = []
    for _ in range(SAMPLES):
        samples += wire.round_trips(session.sock, frame, 1, wire.skip_answer)
        time.sleep(0.005)
    return statistics.median(samples) * 1e3


def run() -> list[Row]:
    rows: list[Row] = []
    with scratch_dir() as path, server("kafkalite", "--dir", path) as broker:
        session = wire.Session(broker.port)
        sizes = {"segment.bytes": str(64 * MIB), "retention.bytes": str(256 * MIB)}
        topics = [admin.NewTopic("flood", 1, 1, sizes), admin.NewTopic("quiet", 1, 1, {})]
        session.call(admin.CreateTopicsRequest(10_000, False, topics))
        frame = _produce(session, "quiet", 1_000)
        _p50_ms(session, frame)
        for kind in ("Metadata", "Produce of 1 KB", "Produce of 900 KB", "Fetch of 1 MiB"):
            before = _p50_ms(session, frame)
            stop = multiprocessing.Event()
            flood = multiprocessing.Process(target=_flood, args=(broker.port, kind, stop))
            flood.start()
            time.sleep(0.5)
            during = _p50_ms(session, frame)
            stop.set()
            flood.join(10)
            flood.kill()
            alone = (before + _p50_ms(session, frame)) / 2
            workload = (
                f"produce 1 KB, one in flight; {CONNECTIONS} connections with {IN_FLIGHT} in flight each"
            )
            rows.append(
                time_row(f"quiet p50, flood of {kind}", workload, during, "ms", yardstick=alone, at_most=5)
            )
        rows.append(plain_row("quiet p50 without a flood", "the same client", alone, "ms"))
        session.close()
    return rows
