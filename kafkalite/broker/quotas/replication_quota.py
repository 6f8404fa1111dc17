"""Decides how many bytes of throttled replicas a broker may send or fetch now (KIP-73, R70). Pure."""

# Tests: tests/broker/test_replication_quota.py

from __future__ import annotations

import math
from typing import Final

from kafkalite.broker.quotas.rates import TokenBucket
from kafkalite.limits import KIB
from kafkalite.metadata.throttles import UNLIMITED, Throttle

#: The bytes that may follow at once after a pause are those of this time, but at least one.
BURST_MS: Final = 500
#: Nothing is allowed until the bytes of this time, or MAX_LEAST_BYTES, may be sent, so that a slow rate does
#: not become many small responses.
LEAST_MS: Final = 50
MAX_LEAST_BYTES: Final = 256 * KIB
#: How long a throttled replica waits at most before the quota is asked again.
MAX_WAIT_MS: Final = 100


class ReplicationQuota:
    """The quota of a broker in one direction: as leader or as follower.

    Invariants: over any time, the spent bytes exceed the rate times that time by at most the bytes of
    BURST_MS, but at least one, and those of one response, which later responses wait for. After a long enough
    time something is allowed, whatever the rate.
    """

    __slots__ = ("_bucket", "_least", "is_limited", "throttle")

    def __init__(self) -> None:
        self.throttle = Throttle()
        self._bucket: TokenBucket | None = None  # None without a limit
        self.is_limited = False  #: whether there is a limit; read for each replica without a call
        self._least = 1

    def __repr__(self) -> str:
        return f"<ReplicationQuota {self._bucket and self._bucket.bound} bytes/s>"

    def update(self, throttle: Throttle, now_ms: int) -> bool:
        """Apply ``throttle`` from now on. Return whether it differs from the present one. The spent bytes
        count on if the rate does not change."""
        if throttle == self.throttle:
            return False
        if throttle.rate != self.throttle.rate:
            self.is_limited = throttle.rate != UNLIMITED
            self._least = max(1, min(throttle.rate * LEAST_MS // 1000, MAX_LEAST_BYTES))
            # The bucket must have room for the least number of bytes, or none would ever be allowed.
            burst_ms = max(BURST_MS, math.ceil(1000 * self._least / throttle.rate))
            self._bucket = TokenBucket(throttle.rate, now_ms, burst_ms) if self.is_limited else None
        self.throttle = throttle
        return True

    def covers(self, topic: str, partition: int) -> bool:
        """Whether the replica is throttled while it is not in sync."""
        return self._bucket is not None and self.throttle.covers(topic, partition)

    def allowed_bytes(self, now_ms: int) -> int:
        """Return how many bytes of throttled replicas may be sent or fetched now, 0 if none.

        One batch that is larger is allowed if this is above 0, because a batch is never divided.
        """
        if self._bucket is None:
            return UNLIMITED
        tokens = int(self._bucket.tokens(now_ms))
        return tokens if tokens >= self._least else 0

    def spend(self, size_bytes: int, now_ms: int) -> None:
        """Count ``size_bytes`` of throttled replicas. A negative number returns bytes that were not used."""
        if self._bucket is not None:
            self._bucket.take(size_bytes, now_ms)

    def wait_ms(self, now_ms: int) -> int:
        """Return after how many ms to ask again, 0 to MAX_WAIT_MS; 0 if something is allowed now."""
        if self._bucket is None:
            return 0
        missing = self._least - self._bucket.tokens(now_ms)
        return min(max(0, math.ceil(missing * 1000 / self._bucket.bound)), MAX_WAIT_MS)
