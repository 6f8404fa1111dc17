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
    """Exponential backoff (KIP-580).

    The first pause is ``initial_ms``, and each pause is twice the previous one, up to ``max_ms``. If
    ``max_ms`` is below ``initial_ms``, each pause is ``initial_ms``. Jitter then changes a pause by up to
    JITTER_PERCENT.
    """

    initial_ms: int
    max_ms: int

    def delay_ms(self, failures: int, chance: float) -> int:
        """Return the pause in ms after ``failures`` (1 or more) failures in a row.

        ``chance`` in [0, 1) sets the jitter; 0.5 means no jitter.
        """
        assert failures >= 1, "there is no pause without a failure"
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        base = min(max(self.initial_ms, 0) << doublings, max(self.max_ms, self.initial_ms))
        per_mille = 1000 + int((chance * 2 - 1) * JITTER_PERCENT * 10)
        return base * per_mille // 1000


# For CONCURRENT_TRANSACTIONS: the markers of the previous transaction are being written, which takes only
# milliseconds.
CONCURRENT_BACKOFF: Final = Backoff(2, 200)


def is_retriable(error: BaseException) -> bool:
    """Whether the same request may succeed later.

    True for Kafka's retriable codes, failed connections and timeouts.
    """
    if isinstance(error, BrokerError):
        return error.retriable
    return isinstance(error, ConnectionFailedError | RequestTimeoutError)


def needs_metadata(error: BaseException) -> bool:
    """Whether the metadata should be refreshed after the error, because the leader may be another broker."""
    if isinstance(error, BrokerError):
        return error.refresh_metadata
    return isinstance(error, ConnectionFailedError | RequestTimeoutError)
