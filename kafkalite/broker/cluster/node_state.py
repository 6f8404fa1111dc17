"""The state of this process as a member of the cluster."""

# Tests: tests/integration/test_cluster_membership.py

from __future__ import annotations

from dataclasses import dataclass

from kafkalite.model import NO_BROKER_EPOCH


@dataclass(slots=True)
class NodeState:
    """Written by the registration and read by all parts of the broker that send requests for this process."""

    incarnation_id: str  #: identifies this process: 32 hex digits
    broker_epoch: int = NO_BROKER_EPOCH  #: assigned to this process by its registration
    #: No controller was reached for longer than the session timeout: this broker may have been fenced (R23).
    is_isolated: bool = False
