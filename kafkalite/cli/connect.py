"""Builds clients from the command line's brokers and client properties, and runs requests with them."""

# Tests: tests/cli/test_app.py

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalite.cli.exit_codes import NotFoundError, UsageError
from kafkalite.cli.invocation import Invocation, current, run_command
from kafkalite.cli.this_node import own_admin
from kafkalite.suggestions import did_you_mean

if TYPE_CHECKING:
    from kafkalite.broker.config import BrokerConfig
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.cluster.client import ClusterClient
    from kafkalite.client.cluster.login import ConnectionLogin
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
    """Return a client's settings as {dotted name: value}, without properties of other types of clients.

    Properties of -X override those of the context, which override the variables ``KAFKALITE_CLIENT_…``.
    Raises UsageError for a property that no client has, and ConfigError for an invalid value.
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


def secured_servers(invocation: Invocation) -> tuple[list[str], TlsContext | None, ConnectionLogin | None]:
    """Return (addresses of the command's brokers, TLS, login), as ``cluster_health.look_from`` takes them."""
    from kafkalite.client.cluster.client import ClusterClient
    from kafkalite.client.config import ADMIN_OPTIONS, admin_config

    client = ClusterClient(admin_config(_config(invocation, ADMIN_OPTIONS, {})))
    return list(map(client.secured, client.config.bootstrap_servers)), client.tls, client.login


def security_settings(invocation: Invocation) -> dict[str, str]:
    """Return the command's settings of TLS and of the login, as {dotted name: text}.

    They are those that ``admin`` uses. Relative paths are absolute in the result, because other processes may
    have another current directory. Raises UsageError and ConfigError as ``admin`` does.
    """
    from kafkalite.client.config import ADMIN_OPTIONS, CLIENT_VARIABLES, admin_config

    admin_config(_config(invocation, ADMIN_OPTIONS, {}))
    given = {
        variable.removeprefix(CLIENT_VARIABLES).lower(): text
        for variable, text in os.environ.items()
        if variable.startswith(CLIENT_VARIABLES)
    }
    found: dict[str, str] = {}
    for name, text in {**given, **invocation.all_properties}.items():
        key = ADMIN_OPTIONS.get(name).name if name in ADMIN_OPTIONS else ""
        if key.startswith(("security.", "ssl.", "sasl.")):
            is_path = key.endswith((".location", ".url")) and text and not text.startswith("file:")
            found[key] = str(Path(text).absolute()) if is_path else text
    return found


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


async def call_with_secret(
    client: ClusterClient, file: Path | None, message: Any, *, node_id: int | None = None
) -> Any:
    """Return the response of ``node_id`` (None: any broker) to a request that needs the cluster's secret.

    Raises the errors of ``cluster_secret`` and of the client's ``call_with_secret``.
    """
    from kafkalite.client.cluster.authentication import call_with_secret as call

    name = f"the secret in {file or SECRET_VARIABLE}"
    return await call(client, cluster_secret(file), message, node_id=node_id, secret_name=name)


def admin(invocation: Invocation) -> Admin:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.config import ADMIN_OPTIONS

    return Admin(config=_config(invocation, ADMIN_OPTIONS, {}))


@asynccontextmanager
async def cluster(
    invocation: Invocation, *, long_poll_ms: int = 0, **defaults: Any
) -> AsyncIterator[ClusterClient]:
    """Yield a started client that can call any broker. Raises the errors of ``ClusterClient.start``.

    ``defaults`` are as in ``producer``. A broker that holds a response for up to ``long_poll_ms`` is not
    reported as slow.
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


def ask_admin(
    question: Callable[[Admin], Coroutine[Any, Any, T]], *, this_node: BrokerConfig | None = None
) -> T:
    """Return the result of ``question(admin)``. Raises TimedOutError if it takes longer than --timeout.

    The Admin has the options of the command line. If ``this_node``, the settings of a node, is given, the
    Admin connects to that node instead, and logs in with the node's cluster.secret.
    """
    invocation = current()

    async def ask() -> T:
        if this_node is None:
            chosen = admin(invocation)
        else:
            timeout_ms = invocation.timeout_ms
            default_ms = IMPATIENT["default.api.timeout.ms"]
            chosen = own_admin(this_node, default_ms if timeout_ms is None else max(1, timeout_ms))
        async with chosen as client:
            return await question(client)

    return run_command(ask)


def ask_cluster(question: Callable[[ClusterClient], Coroutine[Any, Any, T]], *, long_poll_ms: int = 0) -> T:
    """Return the result of ``question(client)``. Raises TimedOutError if it takes longer than --timeout.

    The client and ``long_poll_ms`` are as in ``cluster``.
    """
    invocation = current()

    async def ask() -> T:
        async with cluster(invocation, long_poll_ms=long_poll_ms) as client:
            return await question(client)

    return run_command(ask)


def producer(invocation: Invocation, **defaults: Any) -> Producer:
    """Return a producer. ``defaults`` are settings by dotted name that the user's properties override."""
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


def no_such_broker(node_id: int, known: Iterable[int]) -> NotFoundError:
    return NotFoundError(
        f"there is no broker {node_id}", hint=f"the brokers are {', '.join(map(str, known))}"
    )


async def check_brokers(admin: Admin, node_ids: Iterable[str]) -> None:
    """Raise NotFoundError unless each of ``node_ids`` is the node id of a broker in the cluster."""
    known = [str(broker.node_id) for broker in (await admin.describe_cluster()).brokers]
    for node_id in node_ids:
        if node_id not in known:
            raise NotFoundError(
                f"there is no broker {node_id!r}", hint=f"the node ids are: {', '.join(known)}"
            )
