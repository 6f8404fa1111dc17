"""Generates purchases of a donut shop. The same seed generates the same purchases. Uses only an Rng."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from kafkalite.rng import Rng

COUNTRIES: Final = (
    ("US", 40),
    ("CA", 15),
    ("MX", 12),
    ("DE", 10),
    ("JP", 8),
    ("BR", 7),
    ("IN", 5),
    ("NZ", 3),
)
MENU: Final = (("glazed", 1.25), ("chocolate", 1.5), ("jelly", 1.75), ("maple", 2.0), ("cruller", 2.25))
_TOTAL_WEIGHT: Final = sum(weight for _, weight in COUNTRIES)


def purchases(count: int, rng: Rng) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) pairs: the country, and the purchase as a JSON object."""
    for number in range(1, count + 1):
        country = _weighted_country(rng.randrange(_TOTAL_WEIGHT))
        donut, price = MENU[rng.randrange(len(MENU))]
        quantity = 1 + rng.randrange(12)
        purchase = {
            "id": number,
            "country": country,
            "donut": donut,
            "quantity": quantity,
            "amount": round(price * quantity, 2),
        }
        yield country.encode(), json.dumps(purchase, separators=(",", ":")).encode()


def _weighted_country(ticket: int) -> str:
    for country, weight in COUNTRIES:
        if ticket < weight:
            return country
        ticket -= weight
    raise AssertionError("a ticket is below the total weight")
