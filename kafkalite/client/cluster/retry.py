"""Decides which errors are retried, and the pauses between retries. Pure: random numbers are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kafkalite.errors import BrokerError, ConnectionFailedError, RequestTimeoutError

# KIP-580: up to 20 % more or less, so that clients that failed at the same time retry at different times.
JITTER_PERCENT: Final = 20
#: How long a leader may respond with KAFKA_STORAGE_ERROR until a read fails. A leader with a damaged or
#: failed log is replaced within this time if another replica can lead; otherwise an operator must act (R24).
STORAGE_ERROR_PATIENCE_MS: Final = 5_000
_MAX_DOUBLINGS: Final = 30  # 2**30 times any backoff exceeds every limit


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff (KIP-580): initial_ms doubles with each failure up to max_ms, plus jitter."""

    initial_ms: int
    max_ms: int

    def delay_ms(self, failures: int, chance: float) -> int:
        """Return the pause after 1 or more failures in a row. ``chance`` in [0, 1) sets the jitter."""
        assert failures >= 1, "there is no pause without a failure"
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        base = min(max(self.initial_ms, 0) << doublings, max(self.max_ms, self.initial_ms))
        per_mille = 1000 + int((chance * 2 - 1) * JITTER_PERCENT * 10)
        return base * per_mille // 1000


# For CONCURRENT_TRANSACTIONS: the markers of the previous transaction are being written, which takes only
# milliseconds.
CONCURRENT_BACKOFF: Final = Backoff(2, 200)


def is_retriable(error: BaseException) -> bool:
    """Whether the same request may succeed later: Kafka's retriable codes, lost connections, timeouts."""
    if isinstance(error, BrokerError):
        return error.retriable
    return isinstance(error, ConnectionFailedError | RequestTimeoutError)


def needs_metadata(error: BaseException) -> bool:
    """Whether the error means that another broker may lead the partition now."""
    if isinstance(error, BrokerError):
        return error.refresh_metadata
    return isinstance(error, ConnectionFailedError | RequestTimeoutError)
