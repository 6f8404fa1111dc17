"""Batches as columns: a million records a second without an object for each, and Arrow without a copy."""

from __future__ import annotations

import asyncio

from kafkalite import Broker, Consumer, Producer

COUNT = 100_000


async def main() -> None:
    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers) as producer:
            values = [b"measurement %d" % number for number in range(COUNT)]
            keys = [b"sensor %d" % (number % 10) for number in range(COUNT)]
            batches = await producer.send_many("measurements", values, keys)
            print(f"{COUNT:,} records acknowledged in {len(batches)} batches")

        async with Consumer(
            "measurements", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            seen = 0
            while seen < COUNT:
                for fetched in await consumer.get_batches(timeout_ms=5_000):
                    table = fetched.batch.to_arrow()  # the values remain in the received buffer
                    seen += table.num_rows
            print(f"{seen:,} records read; columns: {', '.join(table.schema.names)}")


asyncio.run(main())
