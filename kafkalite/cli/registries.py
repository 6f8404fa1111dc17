"""The options of topics, brokers and clients by kind, and the completion of their names."""

# Tests: tests/cli/test_habits.py

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kafkalite.options import OptionRegistry


def registries() -> dict[str, OptionRegistry]:
    from kafkalite.broker.config import BROKER_OPTIONS
    from kafkalite.client.config import ADMIN_OPTIONS, CONSUMER_OPTIONS, PRODUCER_OPTIONS
    from kafkalite.metadata.topic_config import TOPIC_OPTIONS

    return {
        "topic": TOPIC_OPTIONS,
        "broker": BROKER_OPTIONS,
        "producer": PRODUCER_OPTIONS,
        "consumer": CONSUMER_OPTIONS,
        "admin": ADMIN_OPTIONS,
    }


def complete_setting(
    *kinds: str, suffix: str = ""
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function that completes names of options of these kinds, or of all kinds if none is given.

    ``kl config list`` shows the kinds. ``suffix`` is appended to each name.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        found = {
            option.name
            for kind, registry in registries().items()
            if kind in (kinds or (kind,))
            for option in registry
        }
        return sorted(f"{name}{suffix}" for name in found if name.startswith(incomplete))

    return complete
