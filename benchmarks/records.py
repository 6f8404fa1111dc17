"""Record batches: building, reading, Arrow, single records, scanning headers.

Workloads: values of 100 bytes, one core, best of several runs (garbage collection or other processes
make a run slower, nothing makes one faster). The yardstick of each is a memory copy of the same
batches: the least time of a program that touches every byte once. The targets are 0.7 of the table in
the design's section on record batches, and the headroom that the client needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from benchmarks.harness import Row
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import RecordBatchBuilder, build_batch
from kafkalite.records.header import Codec, check, scan

VALUE_BYTES = 100
RUNS = 15


def _best_seconds(action: Callable[[], object], repeat: int) -> float:
    """Return the seconds of one call in the best of RUNS runs of ``repeat`` calls."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(repeat):
            action()
        best = min(best, time.perf_counter() - start)
    return best / repeat


def _row(
    name: str,
    workload: str,
    action: Callable[[], object],
    count: int,
    copied: bytes | bytearray,
    *,
    at_least: float | None = None,
    unit: str = "records/s",
) -> Row:
    repeat = max(1, 20_000 // count)
    value = count / _best_seconds(action, repeat)
    copy = count / _best_seconds(lambda: bytearray(copied), repeat)
    target = f"≥ {at_least:,.0f} {unit}" if at_least else ""
    met = value >= at_least if at_least else None
    return Row(name, workload, value, unit, copy, value / copy, target, met)


def _builds(values: list[bytes], varied: list[bytes], keys: list[bytes]) -> list[Row]:
    count = len(values)
    times = list(range(1_700_000_000_000, 1_700_000_000_000 + count))
    batch = build_batch(values, timestamps_ms=1)

    def extended() -> None:
        builder = RecordBatchBuilder()
        builder.extend(values, timestamps_ms=1)
        builder.build()

    def appended() -> None:
        append = RecordBatchBuilder().append
        for value in values:
            append(value, None, 1)

    def appended_with_keys() -> None:
        append = RecordBatchBuilder().append
        for value, key in zip(values, keys, strict=True):
            append(value, key, 1)

    size = f"{count:,} records of {VALUE_BYTES} B"
    return [
        _row(
            "build",
            f"build_batch, {size}",
            lambda: build_batch(values, timestamps_ms=1),
            count,
            batch,
            at_least=0.7 * 13.8e6,
        ),
        _row(
            "build, varied",
            f"build_batch, {count:,} records of 50 to 150 B",
            lambda: build_batch(varied, timestamps_ms=1),
            count,
            build_batch(varied),
        ),
        _row(
            "build, keys and timestamps",
            f"build_batch, {size}, keys of 1 to 3 B, all timestamps different",
            lambda: build_batch(values, keys, times),
            count,
            build_batch(values, keys, times),
        ),
        _row("build, builder", f"extend and build, {size}", extended, count, batch, at_least=0.7 * 13.8e6),
        _row("append", f"append one by one, {size}, without build", appended, count, batch, at_least=2.5e6),
        _row(
            "append with keys", f"append one by one, {size}, without build", appended_with_keys, count, batch
        ),
        _row(
            "build, lz4",
            f"build_batch, {size} (noise: nothing to gain)",
            lambda: build_batch(values, timestamps_ms=1, codec=Codec.LZ4),
            count,
            batch,
        ),
    ]


def _reads(values: list[bytes], varied: list[bytes], keys: list[bytes]) -> list[Row]:
    count = len(values)
    times = list(range(1_700_000_000_000, 1_700_000_000_000 + count))
    batch = memoryview(bytes(build_batch(values, timestamps_ms=1)))
    rich = bytes(build_batch(varied, keys, times))
    size = f"{count:,} records of {VALUE_BYTES} B, CRC checked"
    return [
        _row(
            "read",
            f"columns().values, {size}",
            lambda: RecordBatch(batch).columns().values,
            count,
            bytes(batch),
            at_least=0.7 * 6.0e6,
        ),
        _row(
            "read, varied",
            f"columns(), {count:,} records of 50 to 150 B, keys and timestamps, CRC checked",
            lambda: RecordBatch(rich).columns(),
            count,
            rich,
        ),
        _row(
            "records",
            f"records(), {size}",
            lambda: RecordBatch(batch).records("t", 0),
            count,
            bytes(batch),
            at_least=3e6,
        ),
        _row(
            "records, varied",
            f"records(), {count:,} records of 50 to 150 B, keys and timestamps, CRC checked",
            lambda: RecordBatch(rich).records("t", 0),
            count,
            rich,
        ),
    ]


def _arrow(count: int) -> list[Row]:
    try:
        import pyarrow
    except ImportError:
        return []
    values = [os.urandom(VALUE_BYTES)] * count
    batch = build_batch(values, timestamps_ms=1)
    array = pyarrow.array(values)

    def built() -> None:
        builder = RecordBatchBuilder()
        builder.extend_arrow(array, timestamps_ms=1)
        builder.build()

    size = f"{count:,} records of {VALUE_BYTES} B"
    return [
        _row(
            "to Arrow, values",
            f'to_arrow(["value"]), {size}, CRC checked before',
            lambda: RecordBatch(batch, check_crc=False).to_arrow(["value"]),
            count,
            batch,
            at_least=0.7 * 1e9,
        ),
        _row(
            "to Arrow, all columns",
            f"to_arrow(), {size}, CRC checked before",
            lambda: RecordBatch(batch, check_crc=False).to_arrow(),
            count,
            batch,
        ),
        _row(
            "to Arrow, all columns and CRC",
            f"to_arrow(), {size}",
            lambda: RecordBatch(batch).to_arrow(),
            count,
            batch,
        ),
        _row("from Arrow", f"extend_arrow and build, {size}", built, count, batch),
    ]


def _headers() -> list[Row]:
    count = 10_000
    one = build_batch([bytes(VALUE_BYTES)])
    log = b"".join([one] * count)
    return [
        _row(
            "scan",
            f"headers of {count:,} batches of one record of {VALUE_BYTES} B",
            lambda: sum(1 for _ in scan(log, 0, len(log))),
            count,
            log,
            unit="batches/s",
        ),
        _row(
            "check",
            f"header and CRC of a batch of one record of {VALUE_BYTES} B",
            lambda: check(one),
            1,
            one,
            unit="batches/s",
        ),
    ]


def run() -> list[Row]:
    count = 1000
    values = [os.urandom(VALUE_BYTES) for _ in range(count)]
    varied = [os.urandom(50 + i % 101) for i in range(count)]
    keys = [b"%d" % (i % 1000) for i in range(count)]
    return [*_builds(values, varied, keys), *_reads(values, varied, keys), *_arrow(100_000), *_headers()]
