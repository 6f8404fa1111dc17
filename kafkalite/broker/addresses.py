"""Parses the addresses in a broker's settings: listeners, advertised listeners, voters."""

# Tests: tests/broker/test_config.py

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kafkalite.errors import ConfigError
from kafkalite.transport import has_own_name

WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "[::]"})
ADDRESS_WORDS: Final = "host:port (for example 127.0.0.1:9092 or [::1]:9092), or inproc://name"


def split_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_address(text: str, key: str) -> str:
    """Return the host:port of a listener: ``0.0.0.0:9092`` for ``PLAINTEXT://:9092``. Raises ConfigError.

    ``key`` is the option that contains ``text``, for the error message.
    """
    if has_own_name(text):
        return text
    scheme, separator, rest = text.partition("://")
    if separator and scheme.upper() not in {"PLAINTEXT", "CONTROLLER"}:
        raise ConfigError(key=key, value=text, allowed=ADDRESS_WORDS)
    host, colon, port = (rest if separator else text).rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(key=key, value=text, allowed=ADDRESS_WORDS)
    return f"{host or '0.0.0.0'}:{int(port)}"


def parse_voters(voters: Iterable[str]) -> dict[int, str]:
    """Return {node id: controller listener's address} for texts ``1@host:port``. Raises ConfigError."""
    key = "controller.quorum.voters"
    parsed: dict[int, str] = {}
    for voter in voters:
        number, at, address = voter.partition("@")
        if not at or not (number.isascii() and number.isdigit()) or int(number) > 2**31 - 1:
            raise ConfigError(key=key, value=voter, allowed="node.id@host:port, for example 1@10.0.0.1:9093")
        node_id = int(number)
        if node_id in parsed:
            raise ConfigError(key=key, value=voter, allowed="one address for each node id")
        parsed[node_id] = parse_address(address, key)
        if is_wildcard(parsed[node_id]):
            raise ConfigError(key=key, value=voter, allowed="an address that the other nodes can connect to")
    if len(set(parsed.values())) != len(parsed):
        raise ConfigError(key=key, value=",".join(voters), allowed="a different address for each voter")
    return parsed


def is_wildcard(address: str) -> bool:
    """Whether ``address`` means all interfaces of its node, so that other nodes cannot connect to it."""
    return not has_own_name(address) and address.rpartition(":")[0] in WILDCARD_HOSTS
