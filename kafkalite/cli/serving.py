"""A broker in the foreground, for ``dev`` and ``server``: signals, and an orderly stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kafkalite.cli import exit_codes

if TYPE_CHECKING:
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
    try:
        async with Broker(config) as broker:
            await when_up(broker)
            stopped = asyncio.ensure_future(stop.wait())
            failed = asyncio.ensure_future(broker.wait_stopped())
            try:
                await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
            finally:
                stopped.cancel()
                failed.cancel()
    finally:
        for number in _STOP_SIGNALS:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
