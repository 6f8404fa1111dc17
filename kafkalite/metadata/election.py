"""The next state of one partition: its leader, its in-sync replicas, its eligible replicas.

``PartitionEdit`` is Kafka's PartitionChangeBuilder: callers describe the changes step by step, and
``build`` returns the state with its epochs. The rules:

* An edit that changes the state increments the partition epoch once, and, if it changes the leader, the
  leader epoch once, however many steps it has.
* R16 (KIP-966): with fewer than min.insync.replicas in sync the high watermark does not move (R9), so a
  replica that leaves the ISR then still holds all committed records and stays eligible. The ISR may become
  empty. With enough in sync the high watermark may move, and all other replicas lose eligibility.
* An election chooses an ISR member. If the ISR is empty, it chooses an eligible replica if there is one. Only
  an unclean election, which may lose committed records, chooses any live replica, and only if allowed.
"""

# Tests: tests/metadata/test_partition_commands.py

from __future__ import annotations

from collections.abc import Collection, Container

from kafkalite.metadata.image import PartitionState
from kafkalite.metadata.records import NO_LEADER


class PartitionEdit:
    """The change of one partition's state. Replica lists keep the order of ``replicas``."""

    __slots__ = (
        "_is_touched",
        "_leader_changed",
        "_min_isr",
        "before",
        "elr",
        "is_unclean",
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
        self.is_unclean = False  #: whether the new leader may lack committed records

    def lead(self, node_id: int) -> None:
        """Make an ISR member the leader, or NO_LEADER."""
        assert node_id == NO_LEADER or node_id in self.isr, f"{node_id} is not in sync: {self.isr}"
        if node_id != self.leader:
            self.leader = node_id
            self._leader_changed = True

    def set_isr(self, isr: Collection[int]) -> None:
        """Set the ISR, and by R16 the eligibility of the replicas that leave it."""
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
        """Whether replicas outside this ISR stay eligible because the high watermark can't move (R9, R16)."""
        return len(in_sync) < self._min_isr

    def refresh_eligible(self) -> None:
        """Apply R16 to the current ISR, because min.insync.replicas may have changed."""
        self.set_isr(self.isr)

    def fence(self, node_id: int) -> None:
        """End the roles of ``node_id``, whose process has stopped. Its replica's records still count."""
        if self.leader == node_id:
            self.lead(NO_LEADER)
        if node_id in self.isr:
            self.set_isr(_without(self.isr, node_id))

    def distrust(self, node_id: int) -> None:
        """Reduce ``node_id`` to a last known eligible replica: it may have lost the end of its log (R20)."""
        self.fence(node_id)
        if node_id in self.elr:
            self.elr = _without(self.elr, node_id)
            self.last_known_elr = tuple(
                each for each in self.before.replicas if each == node_id or each in self.last_known_elr
            )

    def forget(self, node_id: int) -> None:
        """Remove all roles of ``node_id``, whose records are damaged or lost (R24)."""
        self.fence(node_id)
        self.isr = _without(self.isr, node_id)
        self.elr = _without(self.elr, node_id)
        self.last_known_elr = _without(self.last_known_elr, node_id)

    def hand_over(self, node_id: int, live: Container[int]) -> None:
        """Transfer the roles of ``node_id``, which will stop soon, to in-sync replicas if possible."""
        if self.leader == node_id:
            self._elect_from(_without(self.isr, node_id), live)
        others = _without(self.isr, node_id)
        if self.leader != node_id and any(each in live for each in others):
            self.set_isr(others)

    def elect(self, live: Container[int], *, unclean: bool = False) -> None:
        """Choose a leader if there is none. ``unclean`` allows a replica that may lack committed records."""
        if self.leader != NO_LEADER or self._elect_from(self.isr, live):
            return
        if not self.isr and self._elect_from(self.elr, live):
            return
        if unclean and (
            self._elect_from(self.last_known_elr, live) or self._elect_from(self.before.replicas, live)
        ):
            self.is_unclean = True

    def _elect_from(self, candidates: tuple[int, ...], live: Container[int]) -> bool:
        """Make the first live candidate the leader. Candidates are in order of preference."""
        for node_id in candidates:
            if node_id in live:
                if node_id not in self.isr:
                    self.set_isr((node_id,))
                self.lead(node_id)
                return True
        return False

    def touch(self) -> None:
        """Increment the partition epoch even if nothing else changes, to make a refusal durable (R14)."""
        self._is_touched = True

    def build(self) -> PartitionState | None:
        """Return the next state, or None if nothing changed."""
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
