"""Limits the open connections of each address: ``max.connections.per.ip`` and its overrides (S16)."""

# Tests: tests/broker/test_address_limits.py

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Final

from kafkalite.errors import ConfigError

KEY: Final = "max.connections.per.ip.overrides"


class AddressLimits:
    """Counts the open connections of each address. An address without connections uses no memory."""

    def __init__(self, limit: int, overrides: Mapping[str, int]) -> None:
        """``overrides`` has the limits of single addresses, as ``resolve_overrides`` returns them."""
        self._limit = limit
        self._overrides = overrides
        self._counts: dict[str, int] = {}

    def limit_of(self, host: str) -> int:
        return self._overrides.get(host, self._limit)

    def admit(self, host: str) -> bool:
        """Count a connection from ``host`` and return True, or return False if its limit is reached."""
        host = canonical(host)
        count = self._counts.get(host, 0)
        if count >= self.limit_of(host):
            return False
        self._counts[host] = count + 1
        return True

    def forget(self, host: str) -> None:
        """Uncount a connection that ``admit`` has counted."""
        host = canonical(host)
        count = self._counts[host] - 1
        if count:
            self._counts[host] = count
        else:
            del self._counts[host]


def parse_overrides(texts: Iterable[str]) -> dict[str, int]:
    """Return {host: limit} of texts such as ``10.0.0.7:100`` and ``[::1]:5``. Raises ConfigError."""
    found: dict[str, int] = {}
    for text in texts:
        host, _, limit = text.strip().rpartition(":")
        host = host.strip().removeprefix("[").removesuffix("]")
        if not host or not (limit.isascii() and limit.isdigit()):
            allowed = "address:limit pairs, separated by commas, such as 10.0.0.7:100"
            raise ConfigError(key=KEY, value=text, allowed=allowed)
        found[host] = int(limit)
    return found


def canonical(host: str) -> str:
    """Return the address of a peer as rules, quotas and limits name it.

    That is 10.0.0.7 for ::ffff:10.0.0.7, which is what an IPv6 socket calls an IPv4 client, and an IPv6
    address without its zone. Other hosts are returned unchanged.
    """
    host = host.partition("%")[0]
    if host.startswith("::ffff:"):
        mapped = ipaddress.IPv6Address(host).ipv4_mapped
        return host if mapped is None else str(mapped)
    return host
