"""The state of one process's own membership in the cluster."""

# Tests: tests/integration/test_cluster_membership.py

from __future__ import annotations

from dataclasses import dataclass

from kafkalite.model import NO_BROKER_EPOCH


@dataclass(slots=True)
class NodeState:
    """Written by the registration, read by everything that acts for this process."""

    incarnation_id: str  #: of this process: 32 hex digits
    broker_epoch: int = NO_BROKER_EPOCH  #: of this process's registration
    #: No controller was reached for longer than a session lasts: this broker may have been fenced (R23).
    is_isolated: bool = False
