"""An exactly-once job as a separate program that can be killed, or stopped until its session has expired.

::

    python -m proof.processes.transform_job localhost:9092 --id job-1

Each record of topic ``in`` becomes a record of topic ``out``. Its value is the place of the input record, and
the same transaction has the offsets. The name of each error that ends a run is printed on a separate line,
and the next run begins. SIGTERM ends the program.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import KafkaliteError

INPUT: Final = "in"
OUTPUT: Final = "out"
GROUP: Final = "jobs"
SETTINGS: Final[dict[str, Any]] = {
    "request_timeout_ms": 2_000,
    "default_api_timeout_ms": 15_000,
    "retry_backoff_max_ms": 200,
    "reconnect_backoff_max_ms": 200,
}
PRODUCER_SETTINGS: Final[dict[str, Any]] = SETTINGS | {
    "delivery_timeout_ms": 10_000,
    "transaction_timeout_ms": 6_000,
}
_POLL_MS: Final = 200
_PAUSE_S: Final = 0.1
_CLOSE_LIMIT_S: Final = 5.0


async def work(servers: str, transactional_id: str, is_over: asyncio.Event) -> None:
    """Transform until ``is_over``. Raises the KafkaliteError that ends this run."""
    producer = Producer(servers, transactional_id=transactional_id, **PRODUCER_SETTINGS)
    consumer = Consumer(
        INPUT,
        bootstrap_servers=servers,
        group_id=GROUP,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level="read_committed",
        **SETTINGS,
    )
    try:
        await producer.start()
        await consumer.start()
        while not is_over.is_set():
            records = await consumer.get_many(50, timeout_ms=_POLL_MS)
            if not records:
                continue
            async with producer.transaction() as transaction:
                for record in records:
                    value = f"{record.topic}/{record.partition}/{record.offset}".encode()
                    producer.send_nowait(OUTPUT, value, record.key, partition=record.partition)
                await transaction.send_offsets(consumer)
    finally:
        for client in (consumer, producer):
            with suppress(KafkaliteError, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await client.close()


async def _live(servers: str, transactional_id: str) -> None:
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    while not is_over.is_set():
        try:
            await work(servers, transactional_id, is_over)
        except KafkaliteError as error:
            sys.stdout.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
            sys.stdout.flush()
            await asyncio.sleep(_PAUSE_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.processes.transform_job", description=__doc__)
    parser.add_argument("servers")
    parser.add_argument("--id", required=True, help="the transactional id")
    chosen = parser.parse_args(arguments)
    logging.getLogger("kafkalite").setLevel(logging.CRITICAL)
    asyncio.run(_live(chosen.servers, chosen.id))
    return 0


if __name__ == "__main__":
    sys.exit(main())
