"""Decides how long each client is throttled, from its quotas and its recorded use. Pure.

As in Kafka, a broker counts only the requests that it serves itself: a client of three brokers may use its
whole quota on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from kafkalite.broker.quotas.rates import WINDOW_COUNT, WINDOW_MS, SampledRate, TokenBucket
from kafkalite.metadata.client_quotas import (
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    Quotas,
    applied_quota,
    connection_rate,
)

K = TypeVar("K")
L = TypeVar("L", SampledRate, TokenBucket)

#: The number of clients and addresses above which those that use nothing are forgotten.
MIN_KEPT: Final = 1_024
#: A client over its request_percentage is throttled for at most this long at a time. Kafka's limit is one
#: window. A client with enough connections exceeds its quota then, as each is served once in a window.
MAX_REQUEST_THROTTLE_MS: Final = WINDOW_COUNT * WINDOW_MS
_NS_PER_PERCENT: Final = 10_000_000

#: (quota key, user, client id) of the clients that share a rate; see ``AppliedQuota``.
RateKey = tuple[str, str | None, str | None]


@dataclass(slots=True)
class ThrottleCount:
    """How often, and for how long, the clients that share a quota were throttled."""

    responses: int = 0
    total_ms: int = 0


@dataclass(slots=True)
class _ClientRates:
    """The rates that apply to one (user, client id); None where it has no quota."""

    produced: SampledRate | None
    fetched: SampledRate | None
    busy: SampledRate | None  #: percent of a second
    mutations: TokenBucket | None
    keys: dict[str, RateKey]  #: by quota key


class QuotaManager:
    """Measures the clients of one broker against their quotas.

    ``now_ms`` is monotonic. To bound the memory, clients and addresses that used nothing in the last
    WINDOW_COUNT windows are forgotten when there are many. That changes no later throttle time.
    """

    def __init__(self) -> None:
        self.has_quotas = False
        self._quotas: Quotas = {}
        self._clients: dict[tuple[str, str], _ClientRates] = {}
        self._rates: dict[RateKey, SampledRate] = {}
        self._mutations: dict[RateKey, TokenBucket] = {}
        self._connections: dict[str, TokenBucket] = {}  # by address
        self._kept = MIN_KEPT
        #: Counts since the quotas last changed.
        self.throttled: dict[RateKey, ThrottleCount] = {}

    def __repr__(self) -> str:
        return f"<QuotaManager {len(self._quotas)} entities, {len(self._clients)} clients>"

    def update(self, quotas: Quotas) -> None:
        """Apply ``quotas`` from now on. A rate whose bound does not change keeps its samples, unless
        ``quotas`` is empty."""
        self._quotas = quotas
        self.has_quotas = bool(quotas)
        self._clients.clear()
        self.throttled.clear()
        if not quotas:
            self._rates.clear()
            self._mutations.clear()
            self._connections.clear()

    def charge(
        self,
        user: str,
        client_id: str,
        now_ms: int,
        *,
        produced_bytes: int = 0,
        fetched_bytes: int = 0,
        busy_ns: int = 0,
    ) -> int:
        """Record costs of one request, and return the throttle time of the client in ms.

        ``busy_ns`` is the time for which the request used the event loop. Of several exceeded quotas, the
        longest throttle time counts.
        """
        rates = self._rates_of(user, client_id, now_ms)
        longest = (0, "")
        if produced_bytes and rates.produced is not None:
            longest = max(longest, (rates.produced.record(produced_bytes, now_ms), PRODUCER_BYTE_RATE))
        if fetched_bytes and rates.fetched is not None:
            longest = max(longest, (rates.fetched.record(fetched_bytes, now_ms), CONSUMER_BYTE_RATE))
        if busy_ns and rates.busy is not None:
            wait_ms = rates.busy.record(busy_ns / _NS_PER_PERCENT, now_ms)
            longest = max(longest, (min(wait_ms, MAX_REQUEST_THROTTLE_MS), REQUEST_PERCENTAGE))
        throttle_ms, key = longest
        if throttle_ms:
            self._count(rates.keys[key], throttle_ms)
        return throttle_ms

    def owed_ms(self, user: str, client_id: str, now_ms: int, *, is_fetch: bool) -> int:
        """Return the throttle time in ms that is left for the bytes that the client has fetched or produced.

        It counts the bytes of all its connections, also of closed ones.
        """
        rates = self._rates_of(user, client_id, now_ms)
        rate = rates.fetched if is_fetch else rates.produced
        owed_ms = 0 if rate is None else rate.excess_ms(now_ms)
        if owed_ms:
            self._count(rates.keys[CONSUMER_BYTE_RATE if is_fetch else PRODUCER_BYTE_RATE], owed_ms)
        return owed_ms

    def max_fetch_bytes(self, user: str, client_id: str, now_ms: int) -> int | None:
        """Return the maximum size in bytes of one response to a Fetch: the bytes that the client's quota
        allows in WINDOW_COUNT - 1 windows. Return None if the client has no quota for fetched bytes.

        The first batch of a response may be larger, as always.
        """
        rate = self._rates_of(user, client_id, now_ms).fetched
        return None if rate is None else max(1, int(rate.bound * (WINDOW_COUNT - 1) * WINDOW_MS / 1000))

    def admit_mutations(self, user: str, client_id: str, count: int, now_ms: int) -> int:
        """Record ``count`` mutations of the metadata and return 0, or return the time in ms after which they
        would be admitted (KIP-599)."""
        rates = self._rates_of(user, client_id, now_ms)
        if rates.mutations is None:
            return 0
        wait_ms = rates.mutations.admit(count, now_ms)
        if wait_ms:
            self._count(rates.keys[CONTROLLER_MUTATION_RATE], wait_ms)
        return wait_ms

    def admit_connection(self, ip: str, now_ms: int) -> int:
        """Record a connection from ``ip`` and return 0, or return the time in ms after which it would be
        admitted."""
        bound = connection_rate(self._quotas, ip)
        if bound is None:
            return 0
        bucket = self._connections.get(ip)
        if bucket is None or bucket.bound != bound:
            self._forget_idle(now_ms)
            bucket = self._connections[ip] = TokenBucket(bound, now_ms)
        return bucket.admit(1, now_ms)

    def _rates_of(self, user: str, client_id: str, now_ms: int) -> _ClientRates:
        rates = self._clients.get((user, client_id))
        if rates is None:
            self._forget_idle(now_ms)
            keys: dict[str, RateKey] = {}
            of = user, client_id, keys
            bucket = partial(TokenBucket, now_ms=now_ms)
            rates = self._clients[user, client_id] = _ClientRates(
                self._limiter(self._rates, SampledRate, PRODUCER_BYTE_RATE, *of),
                self._limiter(self._rates, SampledRate, CONSUMER_BYTE_RATE, *of),
                self._limiter(self._rates, SampledRate, REQUEST_PERCENTAGE, *of),
                self._limiter(self._mutations, bucket, CONTROLLER_MUTATION_RATE, *of),
                keys,
            )
        return rates

    def _limiter(
        self,
        limiters: dict[RateKey, L],
        make: Callable[[float], L],
        key: str,
        user: str,
        client_id: str,
        keys: dict[str, RateKey],
    ) -> L | None:
        """Return the rate or bucket of the quota ``key`` that applies to a client, or None if no such quota
        applies.

        Makes a new one if there is none or its bound has changed. Adds its RateKey to ``keys``.
        """
        quota = applied_quota(self._quotas, key, user, client_id)
        if quota is None:
            return None
        name = keys[key] = (key, quota.user, quota.client_id)
        limiter = limiters.get(name)
        if limiter is None or limiter.bound != quota.bound:
            limiter = limiters[name] = make(quota.bound)
        return limiter

    def _count(self, name: RateKey, throttle_ms: int) -> None:
        count = self.throttled.setdefault(name, ThrottleCount())
        count.responses += 1
        count.total_ms += throttle_ms

    def _forget_idle(self, now_ms: int) -> None:
        """Forget the clients and addresses that use nothing, if there are at least ``_kept``."""
        if len(self._clients) + len(self._connections) < self._kept:
            return
        self._clients.clear()
        self._rates = {name: rate for name, rate in self._rates.items() if not rate.is_idle(now_ms)}
        self._mutations = _active(self._mutations, now_ms)
        self._connections = _active(self._connections, now_ms)
        self.throttled = {
            name: count
            for name, count in self.throttled.items()
            if name in self._rates or name in self._mutations
        }
        self._kept = max(MIN_KEPT, 2 * len(self._connections))


def _active(buckets: dict[K, TokenBucket], now_ms: int) -> dict[K, TokenBucket]:
    return {name: bucket for name, bucket in buckets.items() if not bucket.is_idle(now_ms)}
