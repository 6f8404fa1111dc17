"""Builds clients from command-line options: -b, and each ``-X`` property for clients that define it."""

# Tests: tests/cli/test_app.py

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalite.cli.exit_codes import NotFoundError, UsageError
from kafkalite.cli.invocation import Invocation, current, run_command
from kafkalite.suggestions import did_you_mean

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.cluster.client import ClusterClient
    from kafkalite.client.cluster.login import Login
    from kafkalite.client.consumer.consumer import Consumer
    from kafkalite.client.producer.producer import Producer
    from kafkalite.options import OptionRegistry
    from kafkalite.transport.tls_context import TlsContext

T = TypeVar("T")

SECRET_VARIABLE: Final = "KAFKALITE_CLUSTER_SECRET"

# If no broker is reachable, fail after 5 s instead of Kafka's minute, because a person is waiting.
IMPATIENT: Final[dict[str, Any]] = {
    "default.api.timeout.ms": 5_000,
    "socket.connection.setup.timeout.ms": 5_000,
}


def _config(invocation: Invocation, registry: OptionRegistry, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a client's settings as {dotted name: value}. Raises UsageError for an unknown property.

    The properties of -X override those of the context, and these the variables ``KAFKALITE_CLIENT_…``.
    """
    from kafkalite.client.config import environment_settings

    config = {"client.id": "kl", **IMPATIENT, **defaults, **environment_settings(os.environ, registry)}
    config["bootstrap.servers"] = invocation.bootstrap_servers
    if invocation.timeout_ms is not None:
        config["default.api.timeout.ms"] = max(1, invocation.timeout_ms)
    for name, text in invocation.all_properties.items():
        if name in registry:
            option = registry.get(name)
            config[option.name] = option.parse(text, source="-X")
        else:
            _check_known(name)
    return config


def _check_known(name: str) -> None:
    """Raise UsageError unless a producer or consumer defines the property ``name``."""
    from kafkalite.client.config import CONSUMER_OPTIONS, PRODUCER_OPTIONS, elsewhere

    if name in PRODUCER_OPTIONS or name in CONSUMER_OPTIONS:
        return
    names = [option.name for registry in (PRODUCER_OPTIONS, CONSUMER_OPTIONS) for option in registry]
    everything = "'kl config list producer' and 'consumer' show them all"
    raise UsageError(
        f"-X {name}: no client has such a property",
        hint=elsewhere(name) or did_you_mean(name, names, otherwise=everything),
    )


def secured_servers(invocation: Invocation) -> tuple[list[str], TlsContext | None, Login | None]:
    """Return the addresses of the command's brokers as ``connect`` expects them, the TLS and the login."""
    from kafkalite.client.cluster.client import ClusterClient
    from kafkalite.client.config import ADMIN_OPTIONS, admin_config

    client = ClusterClient(admin_config(_config(invocation, ADMIN_OPTIONS, {})))
    return list(map(client.secured, client.config.bootstrap_servers)), client.tls, client.login


def cluster_secret(file: Path | None) -> str:
    """Return the cluster's secret from ``file``, or from the environment if ``file`` is None.

    ``file`` is a settings file with ``cluster.secret``, or contains only the secret. Raises UsageError if
    there is no secret.
    """
    if file is None:
        secret = os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise UsageError(
                "this command needs the cluster's secret",
                hint=f"set {SECRET_VARIABLE}, or name a node's settings with --secret-file",
            )
        return secret
    import tomllib

    text = file.read_text().strip()
    try:
        settings: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text
    nested = settings.get("cluster")
    found = settings.get("cluster.secret", nested.get("secret") if isinstance(nested, dict) else None)
    if not isinstance(found, str):
        raise UsageError(f"{file} has no cluster.secret", hint="name the settings file of a node")
    return found


def admin(invocation: Invocation) -> Admin:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.config import ADMIN_OPTIONS

    return Admin(config=_config(invocation, ADMIN_OPTIONS, {}))


@asynccontextmanager
async def cluster(
    invocation: Invocation, *, long_poll_ms: int = 0, **defaults: Any
) -> AsyncIterator[ClusterClient]:
    """Yield a client for requests that any broker serves. Raises ConnectionFailedError.

    A broker that holds a response for up to ``long_poll_ms`` is not reported as slow.
    """
    from kafkalite.client.cluster.client import ClusterClient, Purpose
    from kafkalite.client.config import ADMIN_OPTIONS, admin_config

    client = ClusterClient(admin_config(_config(invocation, ADMIN_OPTIONS, defaults)))
    client.long_poll_ms[Purpose.MAIN] = long_poll_ms
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def ask_admin(question: Callable[[Admin], Coroutine[Any, Any, T]]) -> T:
    """Return the result of ``question(admin)``. The Admin has the command's options. --timeout applies."""
    invocation = current()

    async def ask() -> T:
        async with admin(invocation) as client:
            return await question(client)

    return run_command(ask)


def ask_cluster(question: Callable[[ClusterClient], Coroutine[Any, Any, T]], *, long_poll_ms: int = 0) -> T:
    """Return the result of ``question(client)``, with a client for any broker. --timeout applies.

    ``long_poll_ms`` is that of ``cluster``.
    """
    invocation = current()

    async def ask() -> T:
        async with cluster(invocation, long_poll_ms=long_poll_ms) as client:
            return await question(client)

    return run_command(ask)


def producer(invocation: Invocation, **defaults: Any) -> Producer:
    """Return a producer. ``defaults`` are settings by dotted name; -X overrides them."""
    from kafkalite.client.config import PRODUCER_OPTIONS
    from kafkalite.client.producer.producer import Producer

    return Producer(config=_config(invocation, PRODUCER_OPTIONS, defaults))


def consumer(invocation: Invocation, **defaults: Any) -> Consumer:
    from kafkalite.client.config import CONSUMER_OPTIONS
    from kafkalite.client.consumer.consumer import Consumer

    defaults = {"allow.auto.create.topics": False, **defaults}
    return Consumer(config=_config(invocation, CONSUMER_OPTIONS, defaults))


def no_such_partition(topic: str, partition: int, count: int) -> NotFoundError:
    return NotFoundError(
        f"topic {topic!r} has no partition {partition}", hint=f"its partitions are 0 to {count - 1}"
    )


async def check_brokers(admin: Admin, node_ids: Iterable[str]) -> None:
    """Raise NotFoundError unless each of ``node_ids`` is the node id of a broker in the cluster."""
    known = [str(broker.node_id) for broker in (await admin.describe_cluster()).brokers]
    for node_id in node_ids:
        if node_id not in known:
            raise NotFoundError(
                f"there is no broker {node_id!r}", hint=f"the node ids are: {', '.join(known)}"
            )
