"""Compares counts and digests of each partition: kafkalite's consumer reads the topic, pyarrow the files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def check(run: Any) -> str:
    topic: dict[int, list[tuple[Any, ...]]] = {}
    for record in run.records("access-log"):
        headers = [(name, value) for name, value in record.headers]
        row = (record.offset, record.timestamp_ms, record.key, record.value, headers)
        topic.setdefault(record.partition, []).append(row)
    files: dict[int, list[tuple[Any, ...]]] = {}
    for row in run.rows():
        headers = [(each["key"], each["value"]) for each in row["headers"] or ()]
        time_ms = (row["timestamp"].replace(tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)
        files.setdefault(row["partition"], []).append(
            (row["offset"], time_ms, row["key"], row["value"], headers)
        )

    run.equal(
        "records per partition",
        {p: len(rows) for p, rows in files.items()},
        {p: len(r) for p, r in topic.items()},
    )
    run.equal(
        "digest of each partition",
        {partition: digest(rows) for partition, rows in files.items()},
        {partition: digest(rows) for partition, rows in topic.items()},
    )
    count = sum(map(len, topic.values()))
    every = digest((partition, *row) for partition, rows in sorted(topic.items()) for row in rows)
    return f"{count:,} records of {len(topic)} partitions are the same in the files, SHA-256 {every[:16]}…"


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    """Return the SHA-256 of the rows in offset order. Each field is preceded by its length."""
    found = hashlib.sha256()
    for row in sorted(rows):
        for part in row:
            data = part if isinstance(part, bytes) else repr(part).encode()
            found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()
