"""Generates purchases as JSON, keyed by country, about seven a second by the records' timestamps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kafkalite.rng import seeded_rng

START_MS = 1_431_856_800_000  # 2015-05-17 10:00 UTC
COUNTRIES = ("US",) * 8 + ("CA",) * 3 + ("MX", "MX", "DE", "DE", "JP", "BR", "NZ")
DONUTS = ("glazed", "chocolate", "jelly", "maple", "cruller", "of yesterday")  # the last has no price


def load(demo: Any) -> Iterator[tuple[str, bytes, bytes, int]]:
    """Yield (topic, country, purchase, timestamp in ms). The setting ``purchases`` is their number."""
    rng = seeded_rng(11)
    for number in range(int(demo.settings.get("purchases", "6000"))):
        country = COUNTRIES[rng.randrange(len(COUNTRIES))]
        purchase = {
            "id": number,
            "country": country,
            "donut": DONUTS[rng.randrange(len(DONUTS))],
            "quantity": rng.randrange(13),  # 0 if the customer bought nothing
        }
        late_ms = rng.randrange(2_000)
        value = json.dumps(purchase, separators=(",", ":")).encode()
        yield "purchases", country.encode(), value, START_MS + number * 140 - late_ms
