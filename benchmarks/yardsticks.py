"""The bare machine: memory copy, checksum, append, sync. Other results are ratios to these."""

from __future__ import annotations

import os
import time

import crc32c

from benchmarks.harness import Row, plain_row, scratch_dir

MIB = 1024 * 1024


def _rate(repeat: int, size: int, action: object) -> float:
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for i in range(repeat):
            action(i)  # type: ignore[operator]
        best = max(best, repeat * size / (time.perf_counter() - start))
    return best / 1e9


def run() -> list[Row]:
    block = os.urandom(MIB)
    with scratch_dir() as path:
        fd = os.open(f"{path}/append", os.O_RDWR | os.O_CREAT)
        append = _rate(256, MIB, lambda i: os.pwrite(fd, block, i * MIB))
        small = block[:4096]
        start = time.perf_counter()
        for i in range(100):
            os.pwrite(fd, small, i * 4096)
            os.fdatasync(fd)
        sync_ms = (time.perf_counter() - start) / 100 * 1e3
        os.close(fd)
    return [
        plain_row(
            "memory copy", "bytearray(1 MiB), one core", _rate(500, MIB, lambda _: bytearray(block)), "GB/s"
        ),
        plain_row("CRC-32C", "1 MiB blocks", _rate(500, MIB, lambda _: crc32c.crc32c(block)), "GB/s"),
        plain_row("bare append", "pwrite of 1 MiB into the page cache", append, "GB/s"),
        plain_row("append + fdatasync", "4 KiB each, mean", sync_ms, "ms"),
    ]
