"""Parses the addresses in a broker's settings: listeners, advertised listeners, voters."""

# Tests: tests/broker/test_config.py

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Final

from kafkalite.broker.quotas.address_limits import KEY as OVERRIDES_KEY
from kafkalite.broker.quotas.address_limits import canonical
from kafkalite.errors import ConfigError
from kafkalite.tls_options import PLAINTEXT, SECURITY_PROTOCOLS, WITH_LOGIN
from kafkalite.transport import has_own_name, without_security

WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "[::]"})
ADDRESS_WORDS: Final = (
    "host:port (for example 127.0.0.1:9092 or [::1]:9092) with or without the listener's name before it"
    " (PLAINTEXT://, SSL://, SASL_PLAINTEXT://, SASL_SSL:// or one of listener.security.protocol.map), or"
    " inproc://name"
)

CONTROLLER: Final = "CONTROLLER"
#: {name of a listener: its protocol} without ``listener.security.protocol.map``.
DEFAULT_PROTOCOLS: Final[Mapping[str, str]] = {
    **{name: name for name in SECURITY_PROTOCOLS},
    CONTROLLER: PLAINTEXT,
}


def split_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_protocol_map(entries: Iterable[str]) -> dict[str, str]:
    """Return DEFAULT_PROTOCOLS with the entries ``NAME:PROTOCOL`` added. Raises ConfigError."""
    protocols = dict(DEFAULT_PROTOCOLS)
    for entry in entries:
        name, colon, protocol = entry.upper().partition(":")
        if not colon or not name or protocol not in SECURITY_PROTOCOLS:
            key = "listener.security.protocol.map"
            allowed = f"NAME:PROTOCOL, separated by commas; protocols are {', '.join(SECURITY_PROTOCOLS)}"
            raise ConfigError(key=key, value=entry, allowed=allowed)
        if name == CONTROLLER and protocol in WITH_LOGIN:
            key = "listener.security.protocol.map"
            allowed = (
                "CONTROLLER:PLAINTEXT or CONTROLLER:SSL: controllers prove that they know cluster.secret"
            )
            raise ConfigError(key=key, value=entry, allowed=allowed)
        protocols[name] = protocol
    return protocols


def parse_address(
    text: str, key: str, protocols: Mapping[str, str] = DEFAULT_PROTOCOLS, *, default: str = PLAINTEXT
) -> str:
    """Return the address of a listener: ``0.0.0.0:9092`` for ``PLAINTEXT://:9092``. Raises ConfigError.

    The address of a listener with TLS or logins begins with ``SSL://``, ``SASL_SSL://`` or
    ``SASL_PLAINTEXT://``. ``key`` is the option that contains ``text``, for the error message; ``protocols``
    maps names of listeners to protocols, and ``default`` is the name to use if ``text`` has none.
    """
    scheme, separator, rest = ("", "", text) if has_own_name(text) else text.partition("://")
    name, address = (scheme.upper(), rest) if separator else (default, text)
    if name not in protocols:
        raise ConfigError(key=key, value=text, allowed=ADDRESS_WORDS)
    if not has_own_name(address):
        host, colon, port = address.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(key=key, value=text, allowed=ADDRESS_WORDS)
        address = f"{host or '0.0.0.0'}:{int(port)}"
    return address if protocols[name] == PLAINTEXT else f"{protocols[name]}://{address}"


def parse_voters(voters: Iterable[str], protocols: Mapping[str, str] = DEFAULT_PROTOCOLS) -> dict[int, str]:
    """Return {node id: controller listener's address} for texts ``1@host:port``. Raises ConfigError.

    ``protocols`` is as in ``parse_address``. The listener is CONTROLLER if the text names no other.
    """
    key = "controller.quorum.voters"
    parsed: dict[int, str] = {}
    for voter in voters:
        number, at, address = voter.partition("@")
        if not at or not (number.isascii() and number.isdigit()) or int(number) > 2**31 - 1:
            raise ConfigError(key=key, value=voter, allowed="node.id@host:port, for example 1@10.0.0.1:9093")
        node_id = int(number)
        if node_id in parsed:
            raise ConfigError(key=key, value=voter, allowed="one address for each node id")
        parsed[node_id] = parse_address(address, key, protocols, default=CONTROLLER)
        if is_wildcard(parsed[node_id]):
            raise ConfigError(key=key, value=voter, allowed="an address that the other nodes can connect to")
    if len(set(parsed.values())) != len(parsed):
        raise ConfigError(key=key, value=",".join(voters), allowed="a different address for each voter")
    return parsed


def is_wildcard(address: str) -> bool:
    """Whether the host of ``address`` is a wildcard (all interfaces), to which no other node can connect."""
    address = without_security(address)
    return not has_own_name(address) and address.rpartition(":")[0] in WILDCARD_HOSTS


def resolve_overrides(overrides: Mapping[str, int]) -> dict[str, int]:
    """Return {address: limit}, with all addresses of host names. Raises ConfigError for unknown names."""
    found: dict[str, int] = {}
    for host, limit in overrides.items():
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError):
            raise ConfigError(
                key=OVERRIDES_KEY, value=host, allowed="an address, or a name that is known"
            ) from None
        found |= {canonical(address): limit for address in addresses}
    return found
