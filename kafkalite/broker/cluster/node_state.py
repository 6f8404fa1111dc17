"""The state of this process as a member of the cluster."""

# Tests: tests/integration/test_cluster_membership.py

from __future__ import annotations

import math
from dataclasses import dataclass

from kafkalite.model import NO_BROKER_EPOCH


@dataclass(slots=True)
class NodeState:
    """The identity and session of this process in the cluster. ``Registration`` changes the broker epoch and
    the end of the session, and other parts read them."""

    incarnation_id: str  #: identifies this process: 32 hex digits
    broker_epoch: int = NO_BROKER_EPOCH  #: assigned to this process by its registration
    #: The end of the session in ms of the monotonic clock. Earlier, no other broker is elected in its place
    #: (R23).
    session_end_ms: float = math.inf
