"""Clients made from an invocation: its brokers, and its -X properties given to whom they concern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kafkalite.cli.exit_codes import NotFoundError
from kafkalite.cli.invocation import Invocation

if TYPE_CHECKING:
    from kafkalite.client.admin import Admin
    from kafkalite.client.consumer import Consumer
    from kafkalite.client.producer import Producer
    from kafkalite.options import OptionRegistry

# A person waits at the prompt: without a broker the answer comes after seconds, not after Kafka's minute.
IMPATIENT: Final[dict[str, Any]] = {"default.api.timeout.ms": 5_000}


def _settings(invocation: Invocation, registry: OptionRegistry, defaults: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for one kind of client. Raises ConfigError for a property no client knows."""
    from kafkalite.client.config import CONSUMER_OPTIONS, PRODUCER_OPTIONS

    settings = {registry.get(name).python_name: value for name, value in (IMPATIENT | defaults).items()}
    if invocation.timeout_ms is not None:
        settings["default_api_timeout_ms"] = max(1, invocation.timeout_ms)
    for name, text in invocation.properties.items():
        if name in registry:
            option = registry.get(name)
            settings[option.python_name] = option.parse(text, source="-X")
        elif name not in PRODUCER_OPTIONS:
            CONSUMER_OPTIONS.get(name, source="-X")
    settings.pop("bootstrap_servers", None)
    return settings


def servers(invocation: Invocation) -> str:
    return invocation.properties.get("bootstrap.servers", invocation.bootstrap_servers)


def admin(invocation: Invocation) -> Admin:
    from kafkalite.client.admin import Admin
    from kafkalite.client.config import ADMIN_OPTIONS

    return Admin(servers(invocation), **_settings(invocation, ADMIN_OPTIONS, {"client.id": "kl"}))


def producer(invocation: Invocation, **defaults: Any) -> Producer:
    """``defaults`` are dotted names; -X wins over them."""
    from kafkalite.client.config import PRODUCER_OPTIONS
    from kafkalite.client.producer import Producer

    settings = {"client.id": "kl", **defaults}
    return Producer(servers(invocation), **_settings(invocation, PRODUCER_OPTIONS, settings))


def consumer(invocation: Invocation, **defaults: Any) -> Consumer:
    from kafkalite.client.config import CONSUMER_OPTIONS
    from kafkalite.client.consumer import Consumer

    settings = {"client.id": "kl", "allow.auto.create.topics": False, **defaults}
    return Consumer(
        bootstrap_servers=servers(invocation), **_settings(invocation, CONSUMER_OPTIONS, settings)
    )


def no_such_partition(topic: str, partition: int, count: int) -> NotFoundError:
    return NotFoundError(
        f"topic {topic!r} has no partition {partition}", hint=f"its partitions are 0 to {count - 1}"
    )
