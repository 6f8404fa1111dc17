"""Who leads a partition, who is in sync, who is eligible: one partition's next state, by the rules.

``PartitionEdit`` is Kafka's PartitionChangeBuilder: what happens to a partition is told to it step by step,
and ``build`` makes the state with its epochs. The rules:

* Every change of anything moves the partition epoch on by one, every change of the leader the leader epoch,
  however many steps came together in one edit.
* R16 (KIP-966): while fewer than min.insync.replicas are in sync the high watermark stands still (R9), so
  whoever leaves the ISR then still holds all that is committed: it stays eligible. The ISR may become empty.
  With enough in sync the high watermark may move, and nobody outside is believed any more.
* An election takes an ISR member; with an empty ISR an eligible one; otherwise nobody. Only an unclean
  election, which may lose committed records, takes any live replica, and only where that was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from kafkalite.metadata.image import PartitionState
from kafkalite.metadata.records import NO_LEADER


class PartitionEdit:
    """One partition between two states. Replica lists are kept in the order of ``replicas``."""

    __slots__ = (
        "_is_touched",
        "_is_unclean",
        "_leader_changed",
        "_min_isr",
        "before",
        "elr",
        "isr",
        "last_known_elr",
        "leader",
    )

    def __init__(self, before: PartitionState, min_isr: int) -> None:
        self.before = before
        self.leader = before.leader
        self.isr = before.isr
        self.elr = before.elr
        self.last_known_elr = before.last_known_elr
        self._min_isr = min(min_isr, len(before.replicas))
        self._leader_changed = False
        self._is_touched = False
        self._is_unclean = False

    @property
    def is_unclean(self) -> bool:
        """Whether a leader was taken that may lack committed records."""
        return self._is_unclean

    def lead(self, node_id: int) -> None:
        """Make an ISR member the leader, or NO_LEADER."""
        assert node_id == NO_LEADER or node_id in self.isr, f"{node_id} is not in sync: {self.isr}"
        if node_id != self.leader:
            self.leader = node_id
            self._leader_changed = True

    def set_isr(self, isr: Collection[int]) -> None:
        """The ISR, and by R16 what follows for those who leave it."""
        in_sync = tuple([node_id for node_id in self.before.replicas if node_id in isr])
        if not self.keeps_eligible(in_sync):
            self.elr = self.last_known_elr = ()
        else:
            eligible = {*self.elr, *self.isr}.difference(in_sync)
            self.elr = tuple([node_id for node_id in self.before.replicas if node_id in eligible])
            self.last_known_elr = tuple(
                [
                    node_id
                    for node_id in self.last_known_elr
                    if node_id not in in_sync and node_id not in eligible
                ]
            )
        self.isr = in_sync

    def keeps_eligible(self, in_sync: tuple[int, ...]) -> bool:
        """Whether replicas outside this ISR stay eligible: while the high watermark can't move (R9, R16)."""
        return len(in_sync) < self._min_isr

    def refresh_eligible(self) -> None:
        """Apply R16 to the ISR as it is: min.insync.replicas may have changed."""
        self.set_isr(self.isr)

    def fence(self, node_id: int) -> None:
        """The process of ``node_id`` is gone: it leads no more and leaves the ISR; its bytes are believed."""
        if self.leader == node_id:
            self.lead(NO_LEADER)
        if node_id in self.isr:
            self.set_isr(_without(self.isr, node_id))

    def distrust(self, node_id: int) -> None:
        """``node_id`` may have lost the end of its log (R20): it is only remembered, not eligible."""
        self.fence(node_id)
        if node_id in self.elr:
            self.elr = _without(self.elr, node_id)
            self.last_known_elr = tuple(
                each for each in self.before.replicas if each == node_id or each in self.last_known_elr
            )

    def forget(self, node_id: int) -> None:
        """The bytes of ``node_id`` are damaged or gone (R24): nothing may be expected of them."""
        self.fence(node_id)
        self.isr = _without(self.isr, node_id)
        self.elr = _without(self.elr, node_id)
        self.last_known_elr = _without(self.last_known_elr, node_id)

    def hand_over(self, node_id: int, live: Container[int]) -> None:
        """``node_id`` is about to stop: others that are in sync take over; where there are none it stays."""
        if self.leader == node_id:
            self._elect_from(_without(self.isr, node_id), live)
        others = _without(self.isr, node_id)
        if self.leader != node_id and any(each in live for each in others):
            self.set_isr(others)

    def elect(self, live: Container[int], *, unclean: bool = False) -> None:
        """Find a leader if there is none. ``unclean`` allows to lose committed records."""
        if self.leader != NO_LEADER or self._elect_from(self.isr, live):
            return
        if not self.isr and self._elect_from(self.elr, live):
            return
        if unclean and (
            self._elect_from(self.last_known_elr, live) or self._elect_from(self.before.replicas, live)
        ):
            self._is_unclean = True

    def _elect_from(self, candidates: tuple[int, ...], live: Container[int]) -> bool:
        """Let the first live one lead: candidates stand in the order of preference."""
        for node_id in candidates:
            if node_id in live:
                if node_id not in self.isr:
                    self.set_isr((node_id,))
                self.lead(node_id)
                return True
        return False

    def touch(self) -> None:
        """Move the partition epoch on, whatever else changes: makes a refusal durable (R14)."""
        self._is_touched = True

    def build(self) -> PartitionState | None:
        """The next state; None when nothing changed."""
        before = self.before
        is_changed = (
            self._leader_changed
            or self._is_touched
            or self.isr != before.isr
            or self.elr != before.elr
            or self.last_known_elr != before.last_known_elr
        )
        if not is_changed:
            return None
        return PartitionState(
            before.replicas,
            self.isr,
            self.leader,
            before.leader_epoch + self._leader_changed,
            before.partition_epoch + 1,
            self.elr,
            self.last_known_elr,
        )


def _without(node_ids: tuple[int, ...], node_id: int) -> tuple[int, ...]:
    return tuple([each for each in node_ids if each != node_id])
