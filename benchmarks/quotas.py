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
from benchmarks.harness import Row, ServerProcess, scratch_dir, server, time_row
from kafkalite.protocol.messages import admin
from kafkalite.protocol.messages.metadata import MetadataRequest

CONNECTIONS = 4
IN_FLIGHT = 4
SECONDS = 30
QUOTA = 4 * MIB  # bytes per second
TOLERANCE = 0.1
ALL_TOPICS = "Metadata of 500 topics"
TOPICS = 500
PERCENTAGE = 20  # of the broker's event loop
WORKLOAD = f"{CONNECTIONS} connections, {IN_FLIGHT} in flight each, {SECONDS} s"


def _flood(port: int, kind: str, seconds: float, counted: Any) -> None:
    """Send requests of ``kind`` for a time, and add the bytes of the served batches to ``counted``.

    ALL_TOPICS asks for the metadata of all topics, which costs the broker time and hardly any bytes.
    """
    end = time.monotonic() + seconds

    def one() -> None:
        session = wire.Session(port)
        session.connection.client_id = "flood"
        asks = kind == ALL_TOPICS
        frame = session.encode(MetadataRequest(None, False)) if asks else _frame(session, kind)
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


def _is_enough(samples: int) -> bool:
    return samples >= 1_000


def _set(session: wire.Session, key: str, value: str | None) -> None:
    entity = [admin.QuotaEntityName("client-id", "flood")]
    change = admin.ClientQuotaAlteration(entity, [admin.ClientQuotaChange(key, value)])
    response: Any = session.call(admin.AlterClientQuotasRequest(False, [change])).message
    assert response.entries[0].error_code == 0, response


def _during_flood(port: int, session: wire.Session, frame: bytes, kind: str) -> tuple[float, float]:
    """Return (bytes per second of the flood, p99 of the quiet client in ms)."""
    flood, counted = _begun(port, kind)
    p99_ms = wire.quiet_p99_ms(session, frame, lambda _: not flood.is_alive())
    flood.join()
    return counted.value / SECONDS, p99_ms


def _begun(port: int, kind: str) -> tuple[multiprocessing.Process, Any]:
    counted = multiprocessing.Value("q", 0)
    flood = multiprocessing.Process(target=_flood, args=(port, kind, SECONDS, counted))
    flood.start()
    return flood, counted


def _request_time(broker: ServerProcess, session: wire.Session, frame: bytes) -> list[Row]:
    """Measure the share of the event loop that a flood gets. The quiet client's own share is subtracted."""

    def shares(is_over: Callable[[int], bool]) -> tuple[float, float]:
        cpu_s, begun = broker.loop_cpu_seconds(), time.monotonic()
        p99_ms = wire.quiet_p99_ms(session, frame, is_over)
        return (broker.loop_cpu_seconds() - cpu_s) / (time.monotonic() - begun) * 100, p99_ms

    topics = [admin.NewTopic(f"t{number}", 1, 1, {}) for number in range(TOPICS)]
    session.call(admin.CreateTopicsRequest(30_000, False, topics))
    own_percent, before_ms = shares(_is_enough)
    _set(session, "request_percentage", str(PERCENTAGE))
    flood, _ = _begun(broker.port, ALL_TOPICS)
    percent, p99_ms = shares(lambda _: not flood.is_alive())
    flood.join()
    _set(session, "request_percentage", None)
    alone_ms = (before_ms + wire.quiet_p99_ms(session, frame, _is_enough)) / 2
    ratio = (percent - own_percent) / PERCENTAGE
    return [
        Row(
            f"event loop's time of a flood of {ALL_TOPICS}",
            WORKLOAD,
            percent - own_percent,
            "%",
            PERCENTAGE,
            ratio,
            f"the quota ± {TOLERANCE:.0%}",
            abs(ratio - 1) <= TOLERANCE,
        ),
        _latency_row(ALL_TOPICS, p99_ms, alone_ms),
    ]


def _latency_row(kind: str, p99_ms: float, alone_ms: float) -> Row:
    name = f"quiet p99, flood of {kind} over its quota"
    return time_row(name, WORKLOAD, p99_ms, "ms", yardstick=alone_ms, at_most=2)


def run() -> list[Row]:
    rows: list[Row] = []
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
            before = wire.quiet_p99_ms(session, frame, _is_enough)
            _set(session, key, str(QUOTA))
            rate, p99_ms = _during_flood(broker.port, session, frame, kind)
            _set(session, key, None)
            alone = (before + wire.quiet_p99_ms(session, frame, _is_enough)) / 2
            ratio = rate / QUOTA
            rows.append(
                Row(
                    f"rate of a flood of {kind}",
                    WORKLOAD,
                    rate / MIB,
                    "MiB/s",
                    QUOTA / MIB,
                    ratio,
                    f"the quota ± {TOLERANCE:.0%}",
                    abs(ratio - 1) <= TOLERANCE,
                )
            )
            rows.append(_latency_row(kind, p99_ms, alone))
        rows += _request_time(broker, session, frame)
        session.close()
    return rows
