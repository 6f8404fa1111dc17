"""Blocking clients and a blocking Broker for scripts, notebooks, tests and threads.

::

    from kafkalite import sync

    with sync.Broker() as broker, sync.Producer(broker.bootstrap_servers) as producer:
        print(producer.send("orders", b"...").result(timeout=10).offset)

Clients and brokers share one event loop in a background thread. Ctrl-C interrupts a waiting call in the main
thread.
"""

# Tests: tests/client/test_twin.py

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from kafkalite.client.blocking.admin import Admin
from kafkalite.client.blocking.consumer import Consumer
from kafkalite.client.blocking.producer import PendingBatchDelivery, PendingDelivery, Producer
from kafkalite.client.blocking.table import Table
from kafkalite.client.blocking.transaction_group import TransactionGroup, TransactionGroupWriter
from kafkalite.loop_thread import shared_loop_thread

if TYPE_CHECKING:
    from kafkalite.broker.config import BrokerConfig
    from kafkalite.broker.server.metrics import BrokerStatistics

__all__ = [
    "Admin",
    "Broker",
    "Consumer",
    "PendingBatchDelivery",
    "PendingDelivery",
    "Producer",
    "Table",
    "TransactionGroup",
    "TransactionGroupWriter",
]


class Broker:
    """Runs a broker in the background: the blocking twin of ``kafkalite.Broker``, with the same arguments."""

    def __init__(self, config: BrokerConfig | None = None, **settings: Any) -> None:
        self._config = config
        self._settings = settings
        self._thread = shared_loop_thread()
        self._broker: Any = None

    def __repr__(self) -> str:
        return f"<sync {repr(self._broker)[1:]}" if self._broker is not None else "<sync Broker new>"

    def start(self) -> Self:
        """Start the broker and return when it accepts requests."""

        async def start() -> None:
            from kafkalite.broker.broker import Broker as AsyncBroker

            self._broker = AsyncBroker(self._config, **self._settings)
            await self._broker.start()

        self._thread.run(start())
        return self

    def stop(self) -> None:
        """Wait a limited time for the requests in flight, then stop. May be called more than once."""
        if self._broker is not None:
            self._thread.run(self._broker.stop())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The first of ``addresses``."""
        address: str = self._started.address
        return address

    @property
    def addresses(self) -> tuple[str, ...]:
        """The advertised address of each listener or, without one, its own address with its actual port."""
        addresses: tuple[str, ...] = self._started.addresses
        return addresses

    @property
    def bootstrap_servers(self) -> str:
        """The address to pass as ``bootstrap_servers`` to clients in any thread of this process."""
        servers: str = self._started.bootstrap_servers
        return servers

    @property
    def is_running(self) -> bool:
        """Whether the broker accepts requests."""
        return self._broker is not None and bool(self._broker.is_running)

    @property
    def _started(self) -> Any:
        assert self._broker is not None, "the broker is not started"
        return self._broker

    def statistics(self) -> BrokerStatistics:
        """Return the broker's current counters."""

        async def ask() -> BrokerStatistics:
            statistics: BrokerStatistics = self._started.statistics()
            return statistics

        return self._thread.run(ask())
