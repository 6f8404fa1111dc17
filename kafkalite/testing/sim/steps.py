"""A program that is killed, or stands still, at a chosen step; and at every one, one world after the other.

A step is whatever the world could notice: a write to a connection, and what the program itself calls a step
(``await steps("process")`` just before it does something). Between two of them nothing has happened, so
dying at each is dying anywhere::

    def life(steps: Steps) -> None:
        with Simulation(seed=1) as simulation: ...
            steps.watch(host, host.kill)

    labels = at_every_step(life)
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

from kafkalite.testing.sim.host import Host
from kafkalite.testing.sim.loop import Process, SimLoop, current_process

_WRITE: Final = "write"


class Steps:
    """The steps of the first process that is watched. ``fatal``: at which of them, from 1; 0 for none."""

    def __init__(self, fatal: int = 0) -> None:
        self.fatal = fatal
        self.labels: list[str] = []  #: of all steps, up to the fatal one
        self._process: Process | None = None
        self._strike: Callable[[], None] = lambda: None

    @property
    def has_struck(self) -> bool:
        return 0 < self.fatal <= len(self.labels)

    def watch(self, host: Host, strike: Callable[[], None]) -> None:
        """Count the steps of what runs on ``host`` now; ``strike`` takes place before the fatal one does."""
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
        """The program does something next. Who was killed does not return, who was paused does later."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop), "steps are counted in a simulation"
        process = current_process.get(loop.root)
        self._count(process, label)
        if process.is_dead:
            await loop.create_future()
        await asyncio.sleep(0)


def at_every_step(life: Callable[[Steps], None], *, stride: int = 1) -> list[str]:
    """Live once untouched, then once for each step of that life, struck there. The labels of its steps.

    With a ``stride``, a sample: every so many steps.
    """
    gc.freeze()  # each world is collected at its end: nothing else has to be looked at then
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
