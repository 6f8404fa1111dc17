"""Numbers for people: percentiles and how they are written. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least ``percent`` of all do not exceed (nearest rank).

    Raises ValueError when there are none.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show_ms(seconds: float) -> str:
    """0.00123 -> ``1.23 ms``; below a tenth of a millisecond in µs."""
    if seconds < 0.0001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_rate(count: float, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "-"
