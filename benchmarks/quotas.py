"""A client that sends as fast as it can against its quota, and the latency of another one beside it (S16).

The flood offers far more than ten times its quota: its connections send whenever the broker reads.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks import wire
from benchmarks.fairness import MIB, _frame, _produce
from benchmarks.harness import Row, percentile, scratch_dir, server, time_row
from kafkalite.protocol.messages import admin

CONNECTIONS = 4
IN_FLIGHT = 4
SECONDS = 30
QUOTA = 4 * MIB  # bytes per second
TOLERANCE = 0.1


def _flood(port: int, kind: str, seconds: float, counted: Any) -> None:
    """Send requests of ``kind`` for a time, and add the bytes of the served batches to ``counted``."""
    end = time.monotonic() + seconds

    def one() -> None:
        session = wire.Session(port)
        session.connection.client_id = "flood"
        frame = _frame(session, kind)
        sent_bytes = len(frame) if kind.startswith("Produce") else 0
        head, body = bytearray(8), bytearray(1 << 20)
        for _ in range(IN_FLIGHT):
            session.sock.sendall(frame)
        while True:
            received_bytes = wire.skip_answer(session.sock, head, body)
            if time.monotonic() >= end:
                return
            with counted.get_lock():
                counted.value += sent_bytes or received_bytes
            session.sock.sendall(frame)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    time.sleep(max(0, end - time.monotonic()))


def _set(session: wire.Session, key: str, value: str | None) -> None:
    entity = [admin.QuotaEntityName("client-id", "flood")]
    change = admin.ClientQuotaAlteration(entity, [admin.ClientQuotaChange(key, value)])
    response: Any = session.call(admin.AlterClientQuotasRequest(False, [change])).message
    assert response.entries[0].error_code == 0, response


def _p99_ms(session: wire.Session, frame: bytes, is_over: Callable[[int], bool]) -> float:
    samples: list[float] = []
    while not is_over(len(samples)):
        samples += wire.round_trips(session.sock, frame, 1, wire.skip_answer)
        time.sleep(0.005)
    return percentile(samples, 0.99) * 1e3


def _during_flood(port: int, session: wire.Session, frame: bytes, kind: str) -> tuple[float, float]:
    """Return (bytes per second of the flood, p99 of the quiet client in ms)."""
    counted = multiprocessing.Value("q", 0)
    flood = multiprocessing.Process(target=_flood, args=(port, kind, SECONDS, counted))
    flood.start()
    p99_ms = _p99_ms(session, frame, lambda _: not flood.is_alive())
    flood.join()
    return counted.value / SECONDS, p99_ms


def run() -> list[Row]:
    rows: list[Row] = []
    workload = f"{CONNECTIONS} connections, {IN_FLIGHT} in flight each, {SECONDS} s"
    with scratch_dir() as path, server("kafkalite", "--dir", path) as broker:
        session = wire.Session(broker.port)
        sizes = {"retention.ms": "-1"}  # the batches have a timestamp of 1970
        topics = [admin.NewTopic("flood", 1, 1, sizes), admin.NewTopic("quiet", 1, 1, {})]
        session.call(admin.CreateTopicsRequest(10_000, False, topics))
        frame = _produce(session, "quiet", 1_000)
        for kind, key in (
            ("Produce of 900 KB", "producer_byte_rate"),
            ("Fetch of 1 MiB", "consumer_byte_rate"),
        ):
            alone = _p99_ms(session, frame, lambda count: count >= 1_000)
            _set(session, key, str(QUOTA))
            rate, p99_ms = _during_flood(broker.port, session, frame, kind)
            _set(session, key, None)
            ratio = rate / QUOTA
            rows.append(
                Row(
                    f"rate of a flood of {kind}",
                    workload,
                    rate / MIB,
                    "MiB/s",
                    QUOTA / MIB,
                    ratio,
                    f"the quota ± {TOLERANCE:.0%}",
                    abs(ratio - 1) <= TOLERANCE,
                )
            )
            rows.append(
                time_row(
                    f"quiet p99, flood of {kind} over its quota",
                    workload,
                    p99_ms,
                    "ms",
                    yardstick=alone,
                    at_most=2,
                )
            )
        session.close()
    return rows
