"""A standalone Spark cluster of real processes on this machine: a master and workers, on loopback ports.

::

    with StandaloneCluster(directory, workers=2) as cluster:
        spark = session("job", master=cluster.master, settings=cluster.driver_settings)

The processes choose and log their ports. On exit all processes are ended, including the executors that they
started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from sparkbridge.local import fast_start
from sparkbridge.local.spark_session import LOCAL_ADDRESS, recommended_settings

START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 15.0
_POLL_S: Final = 0.1
_MASTER: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_INTERFACE: Final = re.compile(r"MasterWebUI.*started at (http://\S+)")


class StandaloneCluster:
    """A master and ``workers`` workers with ``cores`` cores and ``memory`` each. Writes to ``directory``."""

    def __init__(
        self, directory: Path | str, *, workers: int = 2, cores: int = 1, memory: str = "1g"
    ) -> None:
        self.directory = Path(directory)
        self.master = ""
        self._count = workers
        self._words = ("--cores", str(cores), "--memory", memory)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the master, the workers and a driver on this machine."""
        home = fast_start.shadow_home()
        return {
            **os.environ,
            **({"SPARK_HOME": str(home)} if home is not None else {}),
            "SPARK_LOCAL_IP": LOCAL_ADDRESS,
            "PYSPARK_PYTHON": sys.executable,
        }

    @property
    def driver_settings(self) -> dict[str, str]:
        """The settings that a local master would have, adapted to this cluster."""
        settings = recommended_settings(f"local[{self._count}]", is_short_lived=True)
        return settings | {"spark.master": self.master}

    def start(self) -> None:
        """Return when the master has registered every worker. Raises TimeoutError, RuntimeError, with
        logs.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._run("master", "org.apache.spark.deploy.master.Master", "--port", "0")
        deadline_s = time.monotonic() + START_LIMIT_S
        self.master = self._said("master", _MASTER, deadline_s)
        for number in range(1, self._count + 1):
            work = self.directory / f"work-{number}"
            where = ("--work-dir", str(work), self.master)
            self._run(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *self._words, *where)
        interface = self._said("master", _INTERFACE, deadline_s)
        while self._alive_workers(interface) < self._count:
            self._check("the workers did not register", deadline_s)

    def close(self) -> None:
        """Send SIGTERM to all processes, which ends the executors too. Kill those that do not end."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _run(self, name: str, class_name: str, *words: str) -> None:
        options = fast_start.java_options(fast_start.class_archive(), is_short_lived=True)
        environment = self.environment | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": options}
        command = Path(environment["SPARK_HOME"]) / "bin" / "spark-class"
        addresses = ("--host", LOCAL_ADDRESS, "--webui-port", "0")
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(command), class_name, *addresses, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _said(self, name: str, what: re.Pattern[str], deadline_s: float) -> str:
        while (found := what.search(self.log(name))) is None:
            self._check(f"{name} did not say {what.pattern!r}", deadline_s)
        return found[1]

    def _check(self, problem: str, deadline_s: float) -> None:
        """Wait briefly. Raise if the deadline has passed or a process has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended, status {process.returncode}:\n{self.log(name)[-3000:]}")
        if time.monotonic() > deadline_s:
            logs = "\n".join(self.log(name)[-2000:] for name in self._processes)
            raise TimeoutError(f"{problem}:\n{logs}")
        time.sleep(_POLL_S)

    def _alive_workers(self, interface: str) -> int:
        try:
            with urllib.request.urlopen(f"{interface}/json/", timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except OSError:
            return 0
