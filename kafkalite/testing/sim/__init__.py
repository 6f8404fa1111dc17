"""Simulates hosts, disks and a network in one thread, in virtual time, from one seed.

``Simulation`` is for tests of your own programs; see docs/simulation.md. ``python -m proof.sim`` uses it to
inject random faults into brokers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkalite.testing.sim.host import Host as Host
    from kafkalite.testing.sim.simulation import Simulation as Simulation
    from kafkalite.testing.sim.simulation import Violation as Violation

_HOME = {
    "Host": "kafkalite.testing.sim.host",
    "Simulation": "kafkalite.testing.sim.simulation",
    "Violation": "kafkalite.testing.sim.simulation",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kafkalite.testing.sim' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
