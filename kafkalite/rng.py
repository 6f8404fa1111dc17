"""The Rng interface. Code that must be reproducible gets its random numbers from an Rng argument."""

# Tests: tests/sim/test_seeds.py

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence
from typing import Any, Protocol


class Rng(Protocol):
    def random(self, /) -> float:
        """Return a float in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Return an int in [0, stop)."""
        ...

    def randbytes(self, n: int, /) -> bytes: ...

    def shuffle(self, x: MutableSequence[Any], /) -> None: ...


#: What ``system_rng`` calls. ``kafkalite.testing.simulate`` replaces it while it runs.
_new: Callable[[], Rng] = random.Random


def system_rng() -> Rng:
    """Return an Rng seeded by the operating system. In a simulation, the simulation's seed is used."""
    return _new()


def seeded_rng(seed: int) -> Rng:
    """Return an Rng whose sequence is determined by ``seed``."""
    return random.Random(seed)
