"""The faults of a simulated cluster, drawn from a seed. A *strike* is one fault at one point of a run.

The point is given as a number of writes to connections, counted from the start of the test. Nothing that
another program can observe happens between two writes.
"""

# Tests: tests/testing/test_simulate.py

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kafkalite.errors import ConfigError
from kafkalite.suggestions import did_you_mean

#: {kind of fault: its description for the report of a failure}. ``{who}`` is a program of the test.
KINDS: Final = {
    "kill": "the broker is killed, and starts again {ms} ms later",
    "power_loss": "the broker loses power, and starts again {ms} ms later",
    "pause": "the broker is paused for {ms} ms",
    "cut": "{who} and the broker are cut off from each other for {ms} ms",
    "lost_responses": "responses of the broker to {who} are held back for {ms} ms",
    "reset": "the connections of {who} break",
    "slow": "every message between {who} and the broker takes 100 ms, for {ms} ms",
    "kill_program": "{who} is killed, and starts again {ms} ms later",
    "pause_program": "{who} is paused for {ms} ms",
}
MOST_STRIKES: Final = 5
#: Strikes are placed up to this multiple of the writes of a run without faults, because faults cause retries.
_SPREAD: Final = 1.5
_LEAST_MS: Final = 10
_MOST_MS: Final = 3_000
#: Longer than the default session timeout (45 s) and the default transaction timeout (60 s).
_LONG_MS: Final = 70_000


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault before write ``at_write``. ``pick``, in [0, 1), selects the program that the fault
    affects."""

    at_write: int
    kind: str
    duration_ms: int
    pick: float

    def describe(self, who: str) -> str:
        return KINDS[self.kind].format(who=who, ms=self.duration_ms)


def check_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return ``kinds`` as a tuple. Raises ConfigError if a kind is unknown."""
    for kind in kinds:
        if kind not in KINDS:
            hint = did_you_mean(str(kind), KINDS, shown=repr, otherwise=f"one of {', '.join(KINDS)}")
            raise ConfigError(key="faults", value=kind, allowed=f"the name of a fault; {hint}")
    return tuple(kinds)


def draw_strikes(seed: int, kinds: Sequence[str], write_count: int) -> list[Strike]:
    """Return the strikes that ``seed`` determines, ordered by ``at_write``.

    There are at most MOST_STRIKES. ``write_count`` is the number of writes of a run without faults.
    """
    rng = random.Random(f"{seed}/strikes")
    strikes: list[Strike] = []
    while kinds and len(strikes) < MOST_STRIKES:
        kind = kinds[rng.randrange(len(kinds))]
        at_write = 1 + int(write_count * _SPREAD * rng.random())
        is_long = rng.random() < 0.2 and kind == "pause_program"
        duration_ms = _LONG_MS if is_long else int(_LEAST_MS * (_MOST_MS / _LEAST_MS) ** rng.random())
        strikes.append(Strike(at_write, kind, duration_ms, rng.random()))
        if rng.random() < 0.3:
            break
    return sorted(strikes, key=lambda strike: strike.at_write)
