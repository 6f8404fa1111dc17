"""Raft's timing and sizes, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from kafkalite.limits import KIB, MIB
from kafkalite.raft.raft_messages import MAX_COMMAND_BYTES


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """A follower waits for its leader between once and twice the election timeout, by chance."""

    election_timeout_ms: int = 500
    fetch_timeout_ms: int = 1_000  #: a leader that no majority answers for so long steps down
    heartbeat_ms: int = 100
    commit_timeout_ms: int = 10_000  #: then whoever waits for a commit hears that its outcome is not known
    snapshot_min_bytes: int = MIB  #: the log grows by as much, or by the last snapshot's size, between two
    retained_entries: int = 1_000  #: kept behind a snapshot, for followers that are a little late
    append_bytes: int = MAX_COMMAND_BYTES + MIB  #: of entries in one message; above any single command
    chunk_bytes: int = 256 * KIB  #: of a snapshot in one message
    recent_bytes: int = 4 * MIB  #: committed entries kept for brokers that follow from outside
    is_prevote_used: bool = True  #: False serves tests only: the protocol must be safe without

    def __post_init__(self) -> None:
        assert self.election_timeout_ms > 3 * self.heartbeat_ms, "a follower may miss two heartbeats"
