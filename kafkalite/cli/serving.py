"""A broker in the foreground, for ``dev`` and ``server``: signals, and an orderly stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kafkalite.cli import exit_codes

if TYPE_CHECKING:
    import asyncio

    from kafkalite.broker.broker import Broker
    from kafkalite.broker.config import BrokerConfig

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def serve(config: BrokerConfig, when_up: Callable[[Broker], Awaitable[None]]) -> None:
    """Run a broker until SIGTERM, SIGINT or its own failure; then stop it in order.

    A second signal does not wait for the order. Raises what made the broker fail.
    """
    import asyncio

    from kafkalite.broker.broker import Broker

    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(exit_codes.INTERRUPTED)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        with suppress(NotImplementedError):  # an event loop without signals: Ctrl-C still cancels us
            loop.add_signal_handler(number, on_signal)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        broker = await _start(Broker(config), stopped)
        if broker is None:
            return
        failed = asyncio.ensure_future(broker.wait_stopped())
        try:
            await when_up(broker)
            await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await broker.stop()
            await failed
    finally:
        stopped.cancel()
        for number in _STOP_SIGNALS:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)


async def _start(broker: Broker, stopped: asyncio.Future[Any]) -> Broker | None:
    """The broker, running; None when a signal came while it still waited for the others of its cluster."""
    import asyncio

    starting: asyncio.Future[Any] = asyncio.ensure_future(broker.start())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
    if starting.cancelled():
        return None
    starting.result()
    return broker
