"""The follower from which a consumer reads one partition, because it is in the consumer's rack (KIP-392).

The leader names the follower. The consumer reads from it until the metadata's maximum age has passed, the
partition has another leader epoch, or the follower fails. Then the consumer returns to the leader, which may
name a follower again. If the connection to the follower is not open within CONNECT_MS, the leader serves
until it is. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kafkalite.client.cluster.routing import NO_NODE, Leader

#: A follower that learns of commits late is asked this often, with a pause of retry.backoff.ms, before the
#: consumer returns to the leader.
MAX_UNAVAILABLE: Final = 4
#: After a failure of a follower, the leader serves for this long, and twice as long after each further one.
FIRST_PAUSE_MS: Final = 1_000
#: The partition is not fetched for at most this long while the connection to the follower is opened.
CONNECT_MS: Final = 200


#: While the leader must not name a follower for some of its partitions, it is asked for others this often.
ASK_APART_MS: Final = 1_000


@dataclass(slots=True)
class NearReplica:
    """Where one partition is read: at its leader, or at the follower ``node_id`` in ``leader_epoch``."""

    node_id: int = NO_NODE
    leader_epoch: int = -1
    until_ms: int = 0  #: when the leader is asked again
    connects_until_ms: int = 0  #: until when the partition waits for the connection
    unavailable: int = 0  #: consecutive times that the follower did not know the offset to be committed
    failures: int = 0  #: consecutive times that a follower failed
    leader_until_ms: int = 0  #: after a failure: when the leader may name a follower again
    asks_apart_at_ms: int = 0  #: when the leader may be asked in a fetch without other partitions again

    def follower(self, leader: Leader, now_ms: int) -> int:
        """Return the follower to read from, or NO_NODE: then read from ``leader``."""
        if self.node_id != NO_NODE and (leader.leader_epoch != self.leader_epoch or now_ms >= self.until_ms):
            self.node_id = NO_NODE
        return self.node_id

    def may_move(self, now_ms: int) -> bool:
        """Whether a fetch from the leader states the rack, so that the leader may name a follower."""
        return self.node_id == NO_NODE and now_ms >= self.leader_until_ms

    def asks_apart(self, now_ms: int) -> bool:
        """Whether the leader should be asked to name a follower in a fetch without other partitions. If so,
        the next such fetch is due in ASK_APART_MS."""
        is_due = now_ms >= self.asks_apart_at_ms
        if is_due:
            self.asks_apart_at_ms = now_ms + ASK_APART_MS
        return is_due

    def prefer(self, node_id: int, leader_epoch: int, now_ms: int, max_age_ms: int) -> None:
        """Read from a follower that the leader has named, for ``max_age_ms``."""
        self.node_id, self.leader_epoch, self.until_ms = node_id, leader_epoch, now_ms + max_age_ms
        self.connects_until_ms = now_ms + CONNECT_MS
        self.unavailable = 0

    def on_records(self) -> None:
        """Record that the follower has served a fetch."""
        self.unavailable = self.failures = 0

    def is_patient(self) -> bool:
        """Record that the follower does not know the offset to be committed. Return whether to ask again."""
        self.unavailable += 1
        return self.unavailable <= MAX_UNAVAILABLE

    def leave(self, now_ms: int, max_pause_ms: int) -> None:
        """Return to the leader for a pause of at most ``max_pause_ms``, because the follower has failed."""
        self.node_id = NO_NODE
        self.leader_until_ms = now_ms + min(FIRST_PAUSE_MS << min(self.failures, 16), max_pause_ms)
        self.failures += 1
