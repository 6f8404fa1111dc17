"""The Rng seam: chance as an argument, so that a seed replays a run."""

from __future__ import annotations

import random
from collections.abc import MutableSequence
from typing import Any, Protocol


class Rng(Protocol):
    def random(self, /) -> float:
        """A float in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """An int in [0, stop)."""
        ...

    def randbytes(self, n: int, /) -> bytes: ...

    def shuffle(self, x: MutableSequence[Any], /) -> None: ...


def system_rng() -> Rng:
    """An Rng seeded by the operating system."""
    return random.Random()


def seeded_rng(seed: int) -> Rng:
    """An Rng whose whole sequence follows from ``seed``."""
    return random.Random(seed)
