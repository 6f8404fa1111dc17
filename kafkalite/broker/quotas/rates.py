"""The two measures behind quotas: a rate over sampled windows, and a token bucket.

Both take ``now_ms`` from a monotonic clock, whose values never decrease, and return throttle times in ms.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

#: Kafka's quota.window.num and quota.window.size.seconds.
WINDOW_COUNT: Final = 11
WINDOW_MS: Final = 1_000


class SampledRate:
    """A rate per second over the last WINDOW_COUNT samples, each of at least WINDOW_MS (Kafka's SimpleRate).

    The first sample counts as a whole window, so that the first request of a client has no infinite rate.

    Deviation from Kafka: the amount by which a sample exceeds ``bound`` is not forgotten with the sample, but
    moves to the next sample. Otherwise several connections that share a quota would exceed it again in each
    window. So the mean rate over a long time is at most ``bound``, if clients wait for the throttle times.
    """

    __slots__ = ("_samples", "_total", "bound")

    def __init__(self, bound: float) -> None:
        """``bound`` is the quota per second, above 0."""
        assert bound > 0, f"a quota is above 0: {bound}"
        self.bound = bound
        self._samples: deque[tuple[int, float]] = deque()  # (start in ms, recorded amount), the oldest first
        self._total = 0.0

    def record(self, amount: float, now_ms: int) -> int:
        """Add ``amount`` and return the throttle time in ms, 0 while the rate is within the bound.

        The throttle time is the time after which the rate would be the bound (Kafka's ClientQuotaManager):
        the excess divided by the bound, times the length of the window.
        """
        self._expire(now_ms)
        samples = self._samples
        if samples and now_ms - samples[-1][0] < WINDOW_MS:
            start_ms, before = samples[-1]
            samples[-1] = (start_ms, before + amount)
        else:
            samples.append((now_ms, amount))
        self._total += amount
        return self.excess_ms(now_ms)

    def excess_ms(self, now_ms: int) -> int:
        """Return the throttle time in ms that is left of what was recorded, 0 within the bound."""
        self._expire(now_ms)
        if not self._samples:
            return 0
        window_ms = max(WINDOW_MS, now_ms - self._samples[0][0])
        return max(0, math.ceil(self._total * 1000 / self.bound - window_ms))

    def is_idle(self, now_ms: int) -> bool:
        """Whether a new rate would measure the same from now on."""
        self._expire(now_ms)
        return not self._samples

    def _expire(self, now_ms: int) -> None:
        """Remove the samples that began at least WINDOW_COUNT windows ago. Move the amount by which such a
        sample exceeds the bound to the next sample."""
        samples = self._samples
        while samples and now_ms - samples[0][0] >= WINDOW_COUNT * WINDOW_MS:
            start_ms, amount = samples.popleft()
            end_ms = samples[0][0] if samples else now_ms
            excess = amount - self.bound * (end_ms - start_ms) / 1000
            self._total -= amount
            if excess > 0:
                self._total += excess
                next_ms, following = samples.popleft() if samples else (now_ms, 0.0)
                samples.appendleft((next_ms, following + excess))
        if not samples:
            self._total = 0.0


class TokenBucket:
    """Admits amounts while its number of tokens is not negative. An amount may make it negative (KIP-599).

    The bucket gains ``bound`` tokens per second and holds at most those of ``burst_ms``: by default
    WINDOW_COUNT windows.
    """

    __slots__ = ("_burst", "_filled_ms", "_tokens", "bound")

    def __init__(self, bound: float, now_ms: int, burst_ms: int = WINDOW_COUNT * WINDOW_MS) -> None:
        """``bound`` is the quota per second, above 0. The bucket is full at first."""
        assert bound > 0, f"a quota is above 0: {bound}"
        self.bound = bound
        self._tokens = self._burst = bound * burst_ms / 1000
        self._filled_ms = now_ms

    def admit(self, amount: float, now_ms: int) -> int:
        """Take ``amount`` tokens and return 0. If the number of tokens is negative, take nothing and return
        the time in ms after which it is 0."""
        self._fill(now_ms)
        if self._tokens < 0:
            return math.ceil(-self._tokens * 1000 / self.bound)
        self._tokens -= amount
        return 0

    def tokens(self, now_ms: int) -> float:
        """Return the number of tokens, which is negative after a larger amount."""
        self._fill(now_ms)
        return self._tokens

    def take(self, amount: float, now_ms: int) -> None:
        """Take ``amount`` tokens, however many there are. A negative amount returns tokens."""
        self._fill(now_ms)
        self._tokens = min(self._burst, self._tokens - amount)

    def is_idle(self, now_ms: int) -> bool:
        """Whether a new bucket would admit the same from now on."""
        self._fill(now_ms)
        return self._tokens == self._burst

    def _fill(self, now_ms: int) -> None:
        self._tokens = min(self._burst, self._tokens + self.bound * (now_ms - self._filled_ms) / 1000)
        self._filled_ms = now_ms
