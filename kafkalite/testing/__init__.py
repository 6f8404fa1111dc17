"""Tools for tests of kafkalite and of applications: brokers in this process or in others, a virtual clock,
and faults.

A module is loaded when one of its names is first used. So the pytest plugin loads none of these modules in a
run that requests no fixture of the plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkalite.testing.cluster import Cluster as Cluster
    from kafkalite.testing.faults import delay_next as delay_next
    from kafkalite.testing.faults import disconnect_next as disconnect_next
    from kafkalite.testing.faults import drop_next as drop_next
    from kafkalite.testing.faults import fail_next as fail_next
    from kafkalite.testing.process_cluster import ProcessCluster as ProcessCluster
    from kafkalite.testing.proxy import FaultyProxy as FaultyProxy
    from kafkalite.testing.requests import ClientRequest as ClientRequest
    from kafkalite.testing.seeds import simulate as simulate
    from kafkalite.testing.simulated_cluster import SimulatedCluster as SimulatedCluster
    from kafkalite.testing.sync_cluster import SyncCluster as SyncCluster
    from kafkalite.testing.virtual_clock import VirtualClock as VirtualClock
    from kafkalite.testing.wire import WireClient as WireClient

_HOME = {
    "ClientRequest": "kafkalite.testing.requests",
    "Cluster": "kafkalite.testing.cluster",
    "FaultyProxy": "kafkalite.testing.proxy",
    "ProcessCluster": "kafkalite.testing.process_cluster",
    "SimulatedCluster": "kafkalite.testing.simulated_cluster",
    "SyncCluster": "kafkalite.testing.sync_cluster",
    "VirtualClock": "kafkalite.testing.virtual_clock",
    "WireClient": "kafkalite.testing.wire",
    "delay_next": "kafkalite.testing.faults",
    "disconnect_next": "kafkalite.testing.faults",
    "drop_next": "kafkalite.testing.faults",
    "fail_next": "kafkalite.testing.faults",
    "simulate": "kafkalite.testing.seeds",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        hint = "; import it from kafkalite, or use Cluster or SyncCluster" if name == "Broker" else ""
        raise AttributeError(f"module 'kafkalite.testing' has no attribute {name!r}{hint}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
