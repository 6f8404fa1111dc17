"""Drivers that receive orders: processes that are started early and killed by a plan, or a session."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from proof.spark.copying import ANSWER
from sparkbridge.local import fast_start
from sparkbridge.local.spark_session import activate

START_LIMIT_S: Final = 120.0
QUERY_LIMIT_S: Final = 240.0
DIED: Final = "died"


class SessionDriver:
    """Runs orders on a session of this process, which its owner ends. No plan may kill its JVM."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    async def start(self) -> None:
        from proof.spark.faulty import FaultyDataSource

        self._spark.dataSource.register(FaultyDataSource)

    async def run(self, order: Mapping[str, Any], limit_s: float = QUERY_LIMIT_S) -> str:
        """Run an order in a thread and return the response. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            return await asyncio.to_thread(self._answer, order)

    def _answer(self, order: Mapping[str, Any]) -> str:
        from proof.spark.copy_job import answer

        activate(self._spark)
        return answer(self._spark, order)

    def tail(self, lines: int = 30) -> str:
        return "the driver is the session of this process"

    async def close(self) -> None:
        """Do nothing: the session belongs to the caller."""


class Driver:
    """One ``copy_job``. Its output goes to ``log``. ``close`` ends it in any state."""

    def __init__(
        self, settings: Mapping[str, Any], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._settings = dict(settings)
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._application_id = ""  #: known once the session has started

    async def start(self) -> None:
        """Start the process. It accepts orders at once, and responds faster after some time."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "proof.spark.copy_job",
                json.dumps(self._settings),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
                limit=1 << 20,
            )

    @property
    def process_id(self) -> int:
        assert self._process is not None, "start() first"
        return self._process.pid

    async def run(self, order: Mapping[str, Any], limit_s: float = QUERY_LIMIT_S) -> str:
        """Send an order. Return the response, or DIED. Raises TimeoutError with the end of the log."""
        assert self._process is not None and self._process.stdin is not None, "start() first"
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            if not self._application_id:
                async with asyncio.timeout(START_LIMIT_S):
                    self._application_id = await self._answer()
            async with asyncio.timeout(limit_s):
                return await self._answer()
        except TimeoutError:
            raise TimeoutError(f"a driver said nothing for too long:\n{self.tail()}") from None

    async def _answer(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        with self.log.open("ab") as log:
            while line := await self._process.stdout.readline():
                text = line.decode(errors="replace")
                if text.startswith(ANSWER):
                    return text.removeprefix(ANSWER).strip()
                log.write(line)
        await self.close()
        return DIED

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def close(self) -> None:
        """Kill it and its child processes."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        home = fast_start.shadow_home()
        if home is not None and self._application_id.startswith("app-"):
            # The work directory of a local cluster's executors, which ignores spark.local.dir.
            shutil.rmtree(home / "work" / self._application_id, ignore_errors=True)
        if self._process.stdin is not None:
            self._process.stdin.close()
