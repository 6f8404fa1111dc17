"""The leader's account of one partition: how far each replica is, and what that makes of the high watermark.

A replica's *progress* is the exclusive offset up to which it holds the log for good: its synced end, or its
log end with ``durability=page-cache`` (R7). The rules, by their numbers in the list of protocol rules:

R8  high watermark := max(high watermark, least progress over the in-sync replicas and the leader)
R9  it does not move while there are fewer in-sync replicas than min.insync.replicas, whatever the acks
R10 nothing monotonic may be answered from it before it has reached the offset where this epoch started
"""

from __future__ import annotations

from collections.abc import Iterable


class PartitionLeader:
    """One leadership: from becoming leader in ``leader_epoch`` to the next epoch.

    Invariant: ``high_watermark`` never goes back.
    """

    __slots__ = (
        "_broker_id",
        "_has_enough_in_sync",
        "_is_alone",
        "_min_insync_replicas",
        "_progress",
        "epoch_start_offset",
        "high_watermark",
        "isr",
        "leader_epoch",
    )

    def __init__(
        self,
        broker_id: int,
        *,
        leader_epoch: int,
        isr: Iterable[int],
        epoch_start_offset: int,
        high_watermark: int,
        min_insync_replicas: int,
    ) -> None:
        """``epoch_start_offset`` is the log end at the moment of becoming leader.

        ``high_watermark`` is what this replica knows already: of that much is certain.
        """
        self.leader_epoch = leader_epoch
        self.epoch_start_offset = epoch_start_offset
        self.high_watermark = high_watermark
        self._broker_id = broker_id
        self._progress: dict[int, int] = {}
        self.configure(isr, min_insync_replicas)

    def configure(self, isr: Iterable[int], min_insync_replicas: int) -> bool:
        """Take a new in-sync set or minimum. Returns whether the high watermark moved."""
        self.isr = frozenset(isr)
        self._min_insync_replicas = min_insync_replicas
        self._is_alone = self.isr <= {self._broker_id}
        self._has_enough_in_sync = len(self.isr) >= min_insync_replicas
        return self._advance()

    @property
    def has_enough_in_sync(self) -> bool:
        """Whether there are min.insync.replicas: otherwise acks=all is refused (R6)."""
        return self._has_enough_in_sync

    @property
    def is_settled(self) -> bool:
        """Whether the high watermark has reached the start of this epoch (R10)."""
        return self.high_watermark >= self.epoch_start_offset

    def on_progress(self, broker_id: int, offset: int) -> bool:
        """A replica, this one too, holds all below ``offset``. Returns whether the high watermark moved."""
        self._progress[broker_id] = offset
        if self._is_alone and self._has_enough_in_sync and broker_id == self._broker_id:
            if offset <= self.high_watermark:
                return False
            self.high_watermark = offset
            return True
        return self._advance()

    def _advance(self) -> bool:
        if not self._has_enough_in_sync:
            return False
        progress = self._progress
        least = min(progress.get(broker_id, 0) for broker_id in self.isr | {self._broker_id})
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True
