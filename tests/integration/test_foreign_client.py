"""A client that shares no code with us, written from docs/protocol.md, against the real broker over TCP."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import kafkalite


async def test_a_stranger_produces_and_consumes(repository: Path) -> None:
    program = repository / "examples" / "foreign_client.py"
    async with kafkalite.Broker() as broker:
        for first_offset in (0, 3):  # the second time, the topic is there
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(program),
                broker.address,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            lines = [line.split(" ", 2) for line in out.decode().splitlines()]
            assert [(address, cells) for address, _, cells in lines] == [
                (f"foreign-0-{first_offset}", "b'CA' b'maple'"),
                (f"foreign-0-{first_offset + 1}", "None b'glazed'"),
                (f"foreign-0-{first_offset + 2}", "b'US' None"),
            ]
        async with kafkalite.Consumer(
            "foreign", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer:
            records = await consumer.get_many(6, timeout_ms=10_000)
            while len(records) < 6:
                records += await consumer.get_many(6 - len(records), timeout_ms=10_000)
        assert [record.value for record in records] == [b"maple", b"glazed", None] * 2
