"""Reads, transforms and writes exactly once: workers are killed, and yet each receipt is written once.

A worker turns purchases into receipts. One transaction contains receipts and the offsets of their purchases,
so a worker that is killed leaves both or neither, and the next worker continues after the last committed
transaction.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from kafkalite import Admin, Broker, Consumer, Producer

PURCHASES = 100
CUSTOMERS = [b"ann", b"bob", b"cyd"]
DEATHS = [17, 21, 22]  # steps: among the receipts, before a commit, after a commit; the next worker survives


async def work(servers: str, last_step: int) -> None:
    """Write receipts until no purchases are left. If ``last_step`` is not 0, die at that step."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == last_step:
            os.kill(os.getpid(), signal.SIGKILL)  # no cleanup code runs

    async with (
        Consumer(
            "purchases",
            bootstrap_servers=servers,
            group_id="receipts",
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            enable_auto_commit=False,
            max_poll_records=20,
        ) as consumer,
        Producer(
            servers, transactional_id="receipts-1"
        ) as producer,  # aborts the transaction that the previous worker left open
    ):
        while records := await consumer.get_many(timeout_ms=1200):
            async with producer.transaction():
                for record in records:
                    await producer.send("receipts", b"receipt for " + (record.value or b""), key=record.key)
                    step()
                await producer.send_offsets(consumer)
                step()
            step()


async def main() -> None:
    async with Broker(  # a member that is silent for half a second is expelled
        listeners="127.0.0.1:0",
        group_consumer_session_timeout_ms=500,
        group_consumer_heartbeat_interval_ms=100,
    ) as broker:
        servers = broker.bootstrap_servers
        async with Admin(servers) as admin, Producer(servers) as producer:
            for topic in ("purchases", "receipts"):
                await admin.create_topic(topic, partitions=3)
            for number in range(PURCHASES):
                customer = CUSTOMERS[number % len(CUSTOMERS)]
                producer.send_nowait("purchases", b"purchase %d" % number, key=customer)

        for last_step in [*DEATHS, 0]:
            worker = await asyncio.create_subprocess_exec(sys.executable, __file__, servers, str(last_step))
            code = await worker.wait()
            written, seen = await receipts(servers, "read_uncommitted"), await receipts(servers)
            fate = "was killed" if code == -signal.SIGKILL else "is done"
            print(f"a worker {fate}: {len(seen)} receipts, {len(written) - len(seen)} more written in vain")
            assert len(seen) == len(set(seen))

        for customer in CUSTOMERS:
            mine = [value for key, value in await receipts(servers) if key == customer]
            first = CUSTOMERS.index(customer)
            expected = [b"receipt for purchase %d" % n for n in range(first, PURCHASES, len(CUSTOMERS))]
            assert mine == expected, mine
        print(f"{PURCHASES} purchases, {PURCHASES} receipts, in order")


async def receipts(
    servers: str, isolation_level: str = "read_committed"
) -> list[tuple[bytes | None, bytes | None]]:
    """Return (key, value) of the records that a consumer reads at this isolation level."""
    async with Consumer(
        "receipts", bootstrap_servers=servers, auto_offset_reset="earliest", isolation_level=isolation_level
    ) as consumer:
        found = []
        while records := await consumer.get_many(timeout_ms=100):
            found += [(record.key, record.value) for record in records]
        return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        asyncio.run(main())
    elif len(sys.argv) == 3 and sys.argv[2].isdecimal():
        asyncio.run(work(sys.argv[1], int(sys.argv[2])))
    else:
        sys.exit("usage: exactly_once.py, without arguments: it starts a broker and workers of its own")
