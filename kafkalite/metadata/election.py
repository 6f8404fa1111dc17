"""Computes the next state of one partition: its leader, in-sync replicas and eligible replicas.

``PartitionEdit`` corresponds to Kafka's PartitionChangeBuilder: callers describe changes step by step, and
``build`` returns the state with its epochs. The rules:

* An edit that changes the state increments the partition epoch once. If it changes the leader or renews the
  leader epoch, it also increments the leader epoch once. The number of steps does not matter.
* R16 (KIP-966): with fewer than min.insync.replicas in sync, the high watermark does not move (R9). A replica
  that then leaves the ISR still has all committed records and stays eligible; the ISR may become empty. If a
  leader proposes an ISR with enough replicas, the high watermark may move, and all other replicas lose their
  eligibility.
* R57: a replica that the controller removes from the ISR stays eligible until the leader has proposed an ISR
  with enough replicas, however many replicas remain in sync. Until then the leader commits nothing without
  that replica, because a leader does not move the high watermark while there is an eligible replica.
* An election without a comparison of logs chooses an ISR member, or an eligible replica if the ISR is empty.
  Only an unclean election, which must be allowed and may lose committed records, chooses any live replica;
  an automatic one chooses none that a reassignment has added and that has never been in sync (R60).
* R60, R61: a reassignment finishes when its new replicas and enough of its target are in sync; a replica that
  leaves begins a new leader epoch.
* R46: an eligible replica that has restarted uncleanly is unverified, because its disk may have lost synced
  records unnoticed. It leads only after a comparison of logs (``recovery``), or by an unclean election.
"""

# Tests: tests/metadata/test_partition_commands.py

from __future__ import annotations

from collections.abc import Collection, Container

from kafkalite.metadata.image import PartitionState
from kafkalite.metadata.records import NO_LEADER
from kafkalite.model import NO_EPOCH


class PartitionEdit:
    """Changes one partition's state step by step. Its lists keep the order of ``replicas``."""

    __slots__ = (
        "_is_touched",
        "_leader_changed",
        "_min_insync",
        "added",
        "before",
        "elr",
        "idle_epoch",
        "is_unclean",
        "isr",
        "last_known_elr",
        "leader",
        "loss_epoch",
        "replicas",
        "target",
        "unverified",
    )

    def __init__(self, before: PartitionState, min_isr: int) -> None:
        self.before = before
        self.replicas = before.replicas
        self.target = before.target_replicas
        self.added = before.added_replicas
        self.leader = before.leader
        self.isr = before.isr
        self.elr = before.elr
        self.last_known_elr = before.last_known_elr
        self.unverified = before.unverified
        self.loss_epoch = before.loss_epoch
        self.idle_epoch = before.idle_epoch
        self._min_insync = min_isr
        self._leader_changed = False
        self._is_touched = False
        self.is_unclean = False  #: whether the new leader may lack committed records

    def lead(self, node_id: int) -> None:
        """Make an ISR member the leader; NO_LEADER removes the leader."""
        assert node_id == NO_LEADER or node_id in self.isr, f"{node_id} is not in sync: {self.isr}"
        if node_id != self.leader:
            self.leader = node_id
            self._leader_changed = True

    def set_isr(self, isr: Collection[int]) -> None:
        """Set the ISR that the leader proposes. The replicas outside it stay eligible if R16 requires it."""
        self._set_isr(isr, is_proposed=True)

    def _set_isr(self, isr: Collection[int], *, is_proposed: bool) -> None:
        in_sync = tuple([node_id for node_id in self.replicas if node_id in isr])
        if not (self.keeps_eligible(in_sync) or self.keeps_removed(is_proposed=is_proposed)):
            self.elr = self.last_known_elr = ()
            self.idle_epoch = NO_EPOCH
        else:
            eligible = {*self.elr, *self.isr}.difference(in_sync)
            self.elr = tuple([node_id for node_id in self.replicas if node_id in eligible])
            self.last_known_elr = tuple(
                [
                    node_id
                    for node_id in self.last_known_elr
                    if node_id not in in_sync and node_id not in eligible
                ]
            )
        self.unverified = _both(self.unverified, self.elr)
        self.isr = in_sync

    def keeps_eligible(self, in_sync: tuple[int, ...]) -> bool:
        """Whether replicas outside this ISR stay eligible, because the ISR is below min.insync.replicas
        (R16)."""
        return len(in_sync) < min(self._min_insync, len(self.replicas))

    def keeps_removed(self, *, is_proposed: bool) -> bool:
        """Whether replicas outside the ISR stay eligible because the leader has not proposed this ISR
        (R57)."""
        return not is_proposed

    def refresh_eligible(self) -> None:
        """Decide again which replicas stay eligible (R16), because min.insync.replicas may have changed."""
        self.set_isr(self.isr)

    def fence(self, node_id: int) -> None:
        """Remove ``node_id`` as leader and ISR member, because its process has stopped (R57)."""
        if self.leader == node_id:
            self.lead(NO_LEADER)
        if node_id in self.isr:
            self._set_isr(_without(self.isr, node_id), is_proposed=False)

    def mark_unverified(self, node_id: int) -> None:
        """Mark ``node_id`` as unverified if it is eligible, because its process has restarted uncleanly
        (R46)."""
        if node_id in self.elr:
            self.unverified = _both(self.elr, (*self.unverified, node_id))

    def distrust(self, node_id: int) -> None:
        """Move ``node_id`` from the ISR or ELR to the last known ELR, because the end of its log may be lost
        (R20)."""
        self.fence(node_id)
        if node_id in self.elr:
            self.elr = _without(self.elr, node_id)
            self.unverified = _without(self.unverified, node_id)
            self.last_known_elr = tuple(
                [each for each in self.replicas if each == node_id or each in self.last_known_elr]
            )

    def forget(self, node_id: int) -> None:
        """End all roles of ``node_id`` and its eligibility, because its records are damaged or lost (R24)."""
        self.fence(node_id)
        self.isr = _without(self.isr, node_id)
        self.elr = _without(self.elr, node_id)
        self.unverified = _without(self.unverified, node_id)
        self.last_known_elr = _without(self.last_known_elr, node_id)

    def remember_damaged(self, node_id: int) -> None:
        """Make the only replica of a partition ineligible, because its log is damaged. ``restore`` undoes
        this (R24)."""
        self.forget(node_id)
        self.last_known_elr = (node_id,)

    def restore(self, node_id: int) -> None:
        """Make the only replica of a partition eligible again, because its process has started with a sound
        log."""
        if node_id in self.last_known_elr:
            self.elr, self.last_known_elr = (node_id,), ()

    def renew_epoch(self) -> None:
        """Begin a new leader epoch of the same leader, so that the leader ignores fetches of earlier
        epochs."""
        if self.leader != NO_LEADER:
            self._leader_changed = True

    def hand_over(self, node_id: int, live: Container[int]) -> None:
        """If another ISR member is live, remove ``node_id``, which is about to stop, as leader and ISR
        member."""
        if self.leader == node_id:
            self._elect_from(_without(self.isr, node_id), live)
        others = _without(self.isr, node_id)
        if self.leader != node_id and any(each in live for each in others):
            self._set_isr(others, is_proposed=False)

    def elect(self, live: Container[int], *, unclean: bool = False) -> None:
        """Elect a leader if there is none. If ``unclean``, a replica that may lack committed records can be
        elected, but none that a reassignment has added and that has never been in sync: its log may be empty,
        and the original replicas, which may return, would follow it (R60)."""
        if self.leader != NO_LEADER or self._elect_from(self.isr, live):
            return
        if not self.isr and self._elect_from(self.verified_eligible(), live):
            return
        if unclean and (
            self._elect_from(self.elr, live)
            or self._elect_from(self.last_known_elr, live)
            or self._elect_from(self.before.original_replicas, live)
        ):
            self._accept_loss()

    def elect_any(self, live: Container[int]) -> None:
        """Elect a leader if there is none: any live replica, also one that a reassignment has added. Only an
        operator may decide that."""
        self.elect(live, unclean=True)
        if self.leader == NO_LEADER and self._elect_from(self.replicas, live):
            self._accept_loss()

    def verified_eligible(self) -> tuple[int, ...]:
        """Return the eligible replicas that may lead without a comparison of logs (R46)."""
        return tuple([each for each in self.elr if each not in self.unverified])

    def elect_compared(self, node_id: int) -> None:
        """Make ``node_id`` the leader, because a comparison has shown that its log is complete (R46).

        The members of the ELR become unverified: they may lack records that the new leader has. If fewer than
        min.insync.replicas are in sync, the leader commits nothing until it proposes a larger ISR (R50).
        """
        self._elect_from((node_id,), {node_id})
        self.unverified = self.elr
        self.idle_epoch = self.before.leader_epoch + 1 if self.keeps_eligible(self.isr) else NO_EPOCH

    def elect_uncleanly(self, node_id: int) -> None:
        """Make ``node_id`` the leader, and record that committed records may be lost (R49)."""
        self.elect_compared(node_id)
        self._accept_loss()

    def _accept_loss(self) -> None:
        self.is_unclean = True
        self.loss_epoch = self.before.leader_epoch + 1

    def _elect_from(self, candidates: tuple[int, ...], live: Container[int]) -> bool:
        """Make the first live candidate the leader. Return whether there is one."""
        for node_id in candidates:
            if node_id in live:
                if node_id not in self.isr:
                    self._set_isr((node_id,), is_proposed=False)
                self.lead(node_id)
                return True
        return False

    # --- reassignment (KIP-455)

    def reassign(self, target: tuple[int, ...]) -> None:
        """Begin to replace the replicas by ``target``, in place of the present reassignment if there is one.

        The original replicas stay those from before the first reassignment that is not complete. Replicas
        that an earlier one has added and that are not in ``target`` are removed at once if they have no role;
        otherwise they leave when the reassignment finishes. Call ``finish_reassignment`` afterwards.
        """
        original, epochs = self.before.original_replicas, dict(self.added)
        members = {*self.isr, *self.elr, *self.last_known_elr}
        epoch = self.before.partition_epoch + 1
        added = [(each, epochs.get(each, epoch)) for each in target if each not in original]
        added += [(each, since) for each, since in self.added if each not in target and each in members]
        self.added, self.target = tuple(added), target
        self._set_replicas(original + tuple([node_id for node_id, _ in added]))

    def finish_reassignment(self, live: Container[int], copies: int) -> None:
        """End the reassignment if ``may_finish_reassignment``: the replicas are the target, which leads.
        ``copies`` is the effective min.insync.replicas."""
        if not self.target or not self.may_finish_reassignment(copies):
            return
        if self.leader not in self.target and self.leader != NO_LEADER:
            candidates = _both(self.target, self.isr)
            if not any(node_id in live for node_id in candidates):
                return
            self._elect_from(candidates, live)
        target, self.target, self.added = self.target, (), ()
        self._set_replicas(target)

    def may_finish_reassignment(self, copies: int) -> bool:
        """Whether the reassignment may finish (R60): its new replicas are in sync, and if others leave, at
        least ``copies`` of the target, or all of a smaller one, are in sync."""
        original = self.before.original_replicas
        if not all(node_id in self.isr for node_id in self.target if node_id not in original):
            return False
        has_leaving = any(node_id not in self.target for node_id in self.replicas)
        return not has_leaving or len(_both(self.target, self.isr)) >= min(copies, len(self.target))

    def _set_replicas(self, replicas: tuple[int, ...]) -> None:
        """Replace the list of replicas. A replica that leaves loses all roles; it must not lead."""
        if not set(self.replicas).issubset(replicas):
            self.renew_epoch_for_removal()
        self.replicas = replicas
        self.isr, self.elr = _both(replicas, self.isr), _both(replicas, self.elr)
        self.last_known_elr = _both(replicas, self.last_known_elr)
        self.unverified = _both(self.elr, self.unverified)

    def renew_epoch_for_removal(self) -> None:
        """Begin a new leader epoch, because a replica is removed: if it is added again, it begins with an
        empty log, and no position that it reported before may count (R61)."""
        self._leader_changed = True

    def touch(self) -> None:
        """Increment the partition epoch even if nothing else changes, for example to record that the
        controller has refused an ISR (R14)."""
        self._is_touched = True

    def build(self) -> PartitionState | None:
        """Return the next state, or None if nothing has changed."""
        before = self.before
        if not (self.elr or self.keeps_eligible(self.isr)):
            self.last_known_elr = ()
        is_changed = (
            self._leader_changed
            or self._is_touched
            or self.replicas != before.replicas
            or self.target != before.target_replicas
            or self.added != before.added_replicas
            or self.isr != before.isr
            or self.elr != before.elr
            or self.last_known_elr != before.last_known_elr
            or self.unverified != before.unverified
            or self.idle_epoch != before.idle_epoch
        )
        if not is_changed:
            return None
        return PartitionState(
            self.replicas,
            self.isr,
            self.leader,
            before.leader_epoch + self._leader_changed,
            before.partition_epoch + 1,
            self.elr,
            self.last_known_elr,
            self.unverified,
            self.loss_epoch,
            self.idle_epoch,
            self.target,
            self.added,
        )


def _both(node_ids: tuple[int, ...], others: Collection[int]) -> tuple[int, ...]:
    return tuple([each for each in node_ids if each in others])


def _without(node_ids: tuple[int, ...], node_id: int) -> tuple[int, ...]:
    return tuple([each for each in node_ids if each != node_id])
