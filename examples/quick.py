"""Produces and consumes in one process with an embedded broker, so that nothing else must be started."""

from __future__ import annotations

import asyncio

from kafkalite import Broker, Consumer, Producer


async def main() -> None:
    async with Broker() as broker:
        async with Producer(broker.bootstrap_servers) as producer:
            for number in range(3):
                acknowledged = await producer.send("greetings", f"hello {number}".encode(), key=b"demo")
                print(f"sent     {acknowledged.topic}-{acknowledged.partition}-{acknowledged.offset}")

        async with Consumer(
            "greetings", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            async for record in consumer:
                print(f"received {record.address}: {record.value!r}")
                if record.offset == 2:
                    break


asyncio.run(main())
