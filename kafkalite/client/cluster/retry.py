"""When to try again, how long to pause, when to give up. Pure: the clock and chance come as arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kafkalite.errors import BrokerError, ConnectionFailedError, RequestTimeoutError

# KIP-580: a fifth more or less, so that clients that failed together do not come back together.
JITTER_PERCENT: Final = 20
_MAX_DOUBLINGS: Final = 30  # 2**30 times any backoff is above every ceiling


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff (KIP-580): initial_ms doubles with each failure up to max_ms, then jitter."""

    initial_ms: int
    max_ms: int

    def delay_ms(self, failures: int, chance: float) -> int:
        """The pause after ``failures`` (1 or more) failures in a row.

        ``chance`` is in [0, 1): 0.5 is no jitter.
        """
        assert failures >= 1, "nothing failed, so nothing to wait for"
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        base = min(max(self.initial_ms, 0) << doublings, max(self.max_ms, self.initial_ms))
        per_mille = 1000 + int((chance * 2 - 1) * JITTER_PERCENT * 10)
        return base * per_mille // 1000


# The transaction before is being ended (CONCURRENT_TRANSACTIONS): its markers take milliseconds.
CONCURRENT_BACKOFF: Final = Backoff(2, 200)


def is_retriable(error: BaseException) -> bool:
    """Whether the same request may succeed later.

    Kafka's retriable codes, lost connections, no answer in time.
    """
    if isinstance(error, BrokerError):
        return error.retriable
    return isinstance(error, ConnectionFailedError | RequestTimeoutError)


def needs_metadata(error: BaseException) -> bool:
    """Whether the error says that somebody else may lead now."""
    if isinstance(error, BrokerError):
        return error.refresh_metadata
    return isinstance(error, ConnectionFailedError | RequestTimeoutError)
