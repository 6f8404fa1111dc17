"""Computes the same revenue in Decimal, by a loop over the same purchases."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

DELAY_MS, MINUTE_MS = 30_000, 60_000


def check(run: Any) -> str:
    with Path(__file__).with_name("prices.csv").open(newline="") as stream:
        prices = {row["donut"]: Decimal(row["price"]) for row in csv.DictReader(stream)}

    purchases = [(json.loads(record.value), record.timestamp_ms) for record in run.input()]
    watermark_ms = max(time_ms for each, time_ms in purchases if each["quantity"] > 0) - DELAY_MS
    expected: dict[tuple[str, datetime], list[Any]] = defaultdict(lambda: [0, 0, Decimal(0)])
    for each, time_ms in purchases:
        minute_ms = time_ms - time_ms % MINUTE_MS
        if each["quantity"] == 0 or each["donut"] not in prices or minute_ms + MINUTE_MS > watermark_ms:
            continue
        row = expected[each["country"], datetime.fromtimestamp(minute_ms / 1000, UTC)]
        row[0] += 1
        row[1] += each["quantity"]
        row[2] += each["quantity"] * prices[each["donut"]]

    records = run.records("revenue")
    got: dict[tuple[str, datetime], list[Any]] = {}
    latest: dict[bytes, datetime] = {}
    for record in records:
        value = json.loads(record.value)
        minute = datetime.fromisoformat(value["minute"])
        assert (record.key.decode(), minute) not in got, f"{record.key} {minute} came twice"
        got[record.key.decode(), minute] = [value["purchases"], value["donuts"], Decimal(value["revenue"])]
        latest[record.key] = max(minute, latest.get(record.key, minute))
    run.equal("purchases, donuts and revenue per country and minute", got, expected)
    assert len({(record.key, record.partition) for record in records}) == len(latest), (
        "a country is in two partitions"
    )
    total = sum((row[2] for row in expected.values()), Decimal(0))
    return f"{len(got):,} minutes of {len(latest)} countries, {total:,} in all, are those of a plain loop"
