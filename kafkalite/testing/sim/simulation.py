"""Simulation: hosts, a network and a clock whose behavior one seed determines.

::

    with Simulation(seed=7) as simulation:
        server, client = simulation.host("server"), simulation.host("client")
        server.run(serve())
        assert simulation.run(ask(), on=client) == b"pong"

All random choices are drawn from the seed, with a separate generator for each part, so that a change in one
part does not affect the choices of another. ``trace_hash`` covers all notes and all arrivals of data, with
their times: two runs of the same program with the same seed have the same hash.
"""

# Tests: tests/sim/test_host.py, tests/sim/test_loop.py

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any, Final, Self, TypeVar

from kafkalite.rng import Rng
from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.loop import START_S, SimLoop, SimTask, current_process
from kafkalite.testing.sim.network import Link, Network
from kafkalite.testing.sim.streams import SCHEME, SimTransport
from kafkalite.transport import register_scheme

T = TypeVar("T")

register_scheme(SCHEME, SimTransport)

KEPT_EVENTS: Final = 400
_LOGGERS: Final = ("kafkalite", "pysyncobj")  #: loggers whose records are kept as events


class Violation(AssertionError):
    """A violated guarantee. ``check`` is its name; ``kind`` is safety, liveness or crash."""

    def __init__(self, check: str, message: str, *, kind: str = "safety") -> None:
        super().__init__(f"{check}: {message}")
        self.check = check
        self.message = message
        self.kind = kind


class _Watcher(logging.Handler):
    """Keeps the last log events of the simulated programs, and formats them only when they are read."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        simulation = self._simulation
        process = current_process.get(simulation.loop.root)
        simulation.events.append((simulation.now_ms, process.name, record))


class Simulation:
    """A simulation of hosts and their network. On exit, programs that still run are dropped."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimLoop(self.rng("loop"))
        self.network = Network(self.loop, self.rng("network"))
        self.hosts: dict[str, Host] = {}
        self.events: deque[tuple[int, str, logging.LogRecord | str]] = deque(maxlen=KEPT_EVENTS)
        self.violations: list[Violation] = []
        self.probes: Counter[str] = Counter()
        self._hash = hashlib.blake2b(digest_size=8)
        #: Set this to a list to collect every line of the trace, for a comparison of two runs.
        self.lines: list[str] | None = None
        self._watcher = _Watcher(self)
        self._loggers = [logging.getLogger(name) for name in _LOGGERS]
        self._before: list[tuple[int, bool]] = []
        self._collects = gc.isenabled()
        self.network.on_arrival = self._on_arrival
        self.loop.set_exception_handler(self._on_loop_error)

    def rng(self, name: str) -> Rng:
        """Return a new generator for the part ``name``. Generators of the same name draw the same numbers."""
        return random.Random(f"{self.seed}/{name}")

    def host(self, name: str) -> Host:
        """Return the host with this name, which is created on first use."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = Host(name, self.loop, self.network, self.rng(name))
        return host

    def __enter__(self) -> Self:
        self._before = [(logger.level, logger.propagate) for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self._watcher)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        self._collects = gc.isenabled()
        gc.disable()  # so that finalizers run at the same point in every run
        return self

    def __exit__(self, *_error: object) -> None:
        self.loop.dispose()
        for logger, (level, propagate) in zip(self._loggers, self._before, strict=True):
            logger.removeHandler(self._watcher)
            logger.setLevel(level)
            logger.propagate = propagate
        if self._collects:
            gc.enable()

    def run(self, story: Coroutine[Any, Any, T], *, on: Host | None = None) -> T:
        """Run ``story`` and return its result.

        ``story`` runs in the running process of the host ``on``, or in a new process if none runs there. If
        ``on`` is None, ``story`` runs outside of all hosts.
        """
        task: asyncio.Task[T]
        if on is None:
            task = SimTask(story, loop=self.loop, name="story")
        else:
            process = on.process if on.is_running and on.process is not None else on.new_process()
            task = self.loop.spawn(process, story)
        try:
            result: T = self.loop.run_until_complete(task)
            return result
        finally:
            task._log_destroy_pending = False

    @property
    def now_ms(self) -> int:
        """Milliseconds since the start of the simulation."""
        return int((self.loop.time() - START_S) * 1000)

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        """Add an event, such as a fault, a choice or an outcome, to the trace and to ``story``."""
        self.trace(text)
        self.events.append((self.now_ms, "simulation", text))

    def trace(self, text: str) -> None:
        """Add an event to the trace, but not to ``story``, because such events are too frequent."""
        line = f"{self.loop.time():.6f} {text}"
        self._hash.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def probe(self, name: str, times: int = 1) -> None:
        """Add ``times`` to the number of executions of the rare code path ``name``.

        The counts show which paths the simulations have tested at all.
        """
        self.probes[name] += times

    def violate(self, violation: Violation) -> None:
        """Add a violation to ``violations`` and to the trace."""
        self.note(f"VIOLATION {violation}")
        self.violations.append(violation)

    def _on_arrival(self, link: Link, kind: str, length: int) -> None:
        self.trace(f"{link.source}>{link.target} {kind} {length}")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        process = current_process.get(self.loop.root)
        error = context.get("exception")
        message = f"{process.name}: {context.get('message')}: {error!r}"
        violation = Violation("uncaught", message, kind="crash")
        violation.__cause__ = error
        self.violate(violation)

    def story(self, last: int = KEPT_EVENTS) -> list[str]:
        """Return the newest ``last`` events as lines of text, in order. The simulation keeps KEPT_EVENTS
        events."""
        lines: list[str] = []
        for now_ms, who, event in list(self.events)[max(0, len(self.events) - last) :]:
            text = event if isinstance(event, str) else f"{event.levelname.lower()} {event.getMessage()}"
            lines.append(f"{now_ms:>7} ms  {who:<12} {text}")
            if isinstance(event, logging.LogRecord) and event.exc_info and event.exc_info[1]:
                lines.append(f"{'':>24} {event.exc_info[1]!r}")
        return lines
