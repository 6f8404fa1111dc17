"""Keeps a ledger, crashes in the middle, and continues. Every payment counts once."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from ledger import Ledger, keep_ledger, ledger_consumer

from kafkalite import Broker, Producer


class PowerCut(Exception):
    """Stands for any event that ends a process between two lines."""


async def main() -> None:
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps % 70 == 0:
            raise PowerCut

    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers) as producer:
            for number in range(100):
                await producer.send("payments", b"1", key=b"alice" if number % 2 else b"bob")
        with tempfile.TemporaryDirectory() as folder:
            while True:
                ledger = Ledger(Path(folder) / "ledger.db")
                try:
                    async with ledger_consumer(broker.bootstrap_servers, ledger) as consumer:
                        await keep_ledger(consumer, ledger, step)
                    print(f"the ledger says {ledger.balances()}")
                    break
                except PowerCut:
                    print(f"crashed after {steps} steps, the ledger says {ledger.balances()}")
                finally:
                    ledger.close()


asyncio.run(main())
