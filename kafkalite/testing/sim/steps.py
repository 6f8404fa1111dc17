"""Kills or pauses a program before a chosen step. ``at_every_step`` repeats a simulation, each time with
another step.

A step is an event that can be observed from outside: a write to a connection, or a point that the program
declares as a step (``await steps("process")`` just before an effect). Nothing observable happens between two
steps, so a kill at each step covers a kill at any time::

    def life(steps: Steps) -> None:
        with Simulation(seed=1) as simulation:
            host = simulation.host("server")
            host.run(serve(steps))
            steps.watch(host, host.kill)
            simulation.run(ask(), on=simulation.host("client"))

    labels = at_every_step(life)
"""

# Tests: tests/sim/test_every_step.py

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.loop import Process, SimLoop, current_process

_WRITE: Final = "write"


class Steps:
    """Counts the steps of a program, and kills or pauses it before step ``fatal`` (from 1; 0: never).

    ``watch`` sets the program and the function ``strike``, which kills or pauses the program.
    """

    def __init__(self, fatal: int = 0) -> None:
        self.fatal = fatal
        self.labels: list[str] = []  #: the labels of all steps up to the fatal one
        self._process: Process | None = None
        self._strike: Callable[[], None] = lambda: None

    @property
    def has_struck(self) -> bool:
        return 0 < self.fatal <= len(self.labels)

    def watch(self, host: Host, strike: Callable[[], None]) -> None:
        """Count the steps of the program that runs on ``host``, and call ``strike`` before the fatal step."""
        self._process = host.process
        self._strike = strike
        host.network.before_write = lambda process: self._count(process, _WRITE)

    def _count(self, process: Process, label: str) -> None:
        if process is not self._process or self.has_struck:
            return
        self.labels.append(label)
        if len(self.labels) == self.fatal:
            self._strike()

    async def __call__(self, label: str) -> None:
        """Declare a step. Does not return if the program is killed; returns later if it is paused."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop), "steps are counted in a simulation"
        process = current_process.get(loop.root)
        self._count(process, label)
        if process.is_dead:
            await loop.create_future()
        await asyncio.sleep(0)


def at_every_step(life: Callable[[Steps], None], *, stride: int = 1) -> list[str]:
    """Run one simulation many times: first without a fault, to count its steps, then with a fault at each
    step.

    ``life`` runs the simulation with the given ``Steps``, which cause the fault. Returns the labels of all
    steps. With a ``stride``, only every ``stride``-th step has a run with a fault.
    """
    gc.freeze()  # garbage collection at the end of a simulation then skips older objects
    try:
        untouched = Steps()
        life(untouched)
        labels = untouched.labels
        for fatal in range(1, len(labels) + 1, stride):
            steps = Steps(fatal)
            try:
                life(steps)
            except BaseException as error:
                error.add_note(f"struck at step {fatal} of {len(labels)}, before {labels[fatal - 1]!r}")
                raise
            assert steps.labels == labels[:fatal], "the same world takes the same steps"
    finally:
        gc.unfreeze()
    return labels
