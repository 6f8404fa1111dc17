"""Directed schedules for the rules of groups: each violates a guarantee if its rule is removed.

``DIRECTED`` is {mutant: schedule}. A schedule returns the violation, or None. The group's topic t has three
partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafkalite.errors import BrokerError, ErrorCode
from proof.groups.world import Consumer, Coordinator, settle

T0: Final = ("t", 0)
_TXN: Final = 7_000
_UNSTABLE: Final = int(ErrorCode.UNSTABLE_OFFSET_COMMIT)


def _group() -> tuple[Coordinator, Consumer]:
    """Return a group with one member that reads all of t."""
    coordinator = Coordinator(t=3)
    first = Consumer(coordinator, "first", "t")
    first.join()
    settle(first)
    return coordinator, first


def hand_over_early() -> str | None:
    """Schedule: a second member joins while the first one still reads."""
    coordinator, first = _group()
    second = Consumer(coordinator, "second", "t")
    second.join()
    second.settle()
    both = first.owned & second.owned
    return f"two members read {sorted(both)}" if both else None


def expelled_stays() -> str | None:
    """Schedule: a member sleeps past its session timeout, and wakes up when another member has its
    partitions.
    """
    coordinator, first = _group()
    coordinator.advance(coordinator.settings.session_timeout_ms)
    second = Consumer(coordinator, "second", "t")
    second.join()
    settle(second)
    try:
        first.beat()
    except BrokerError:
        return None
    return f"an expelled member was allowed to keep {sorted(first.owned & second.owned)}"


def any_epoch() -> str | None:
    """Schedule: a commit from before a rebalance arrives after the new owner's first commit."""
    coordinator, first = _group()
    late_epoch = first.epoch
    second = Consumer(coordinator, "second", "t")
    second.join()
    settle(first, second)
    return _late_commit(coordinator, second, first.member_id, late_epoch)


def any_member() -> str | None:
    """Schedule: an expelled member commits after the new owner of its partitions has committed."""
    coordinator, first = _group()
    coordinator.advance(coordinator.settings.session_timeout_ms)
    second = Consumer(coordinator, "second", "t")
    second.join()
    settle(second)
    return _late_commit(coordinator, second, first.member_id, first.epoch)


def _late_commit(coordinator: Coordinator, owner: Consumer, late_id: str, late_epoch: int) -> str | None:
    partition = ("t", owner.numbers[0])
    coordinator.commit({partition: 20}, member_id=owner.member_id, epoch=owner.epoch)
    try:
        coordinator.commit({partition: 10}, member_id=late_id, epoch=late_epoch)
    except BrokerError:
        return None
    offset, _ = coordinator.committed(partition)[partition]
    return f"{late_id} set the offset of {owner.member_id} back to {offset}"


def late_commit() -> str | None:
    """Schedule: a member gives up a connection, commits on a new one, and its last commit on the old one
    arrives.
    """
    coordinator, first = _group()
    who: dict[str, Any] = {"member_id": first.member_id, "epoch": first.epoch}
    coordinator.commit({T0: 10}, **who, connection=1)
    coordinator.commit({T0: 30}, **who, connection=2)
    try:
        coordinator.commit({T0: 20}, **who, connection=1)
    except BrokerError:
        return None
    return f"a late commit set the offset back to {coordinator.committed(T0)[T0][0]}"


def member_unchecked() -> str | None:
    """Schedule: a producer that continues after its consumer was expelled sends its offsets (KIP-447)."""
    coordinator, first = _group()
    coordinator.advance(coordinator.settings.session_timeout_ms)
    second = Consumer(coordinator, "second", "t")
    second.join()
    settle(second)
    try:
        coordinator.commit({T0: 10}, member_id=first.member_id, epoch=first.epoch, producer_id=_TXN)
    except BrokerError:
        return None
    return "an expelled member's offsets are part of a transaction"


def visible_at_once() -> str | None:
    """Schedule: a transaction that contains an offset is aborted."""
    coordinator = Coordinator(t=3)
    coordinator.commit({T0: 10})
    coordinator.commit({T0: 20}, producer_id=_TXN)
    before, _ = coordinator.committed(T0)[T0]
    coordinator.end_transaction(_TXN, is_commit=False)
    after, _ = coordinator.committed(T0)[T0]
    if (before, after) != (10, 10):
        return (
            f"offset {before} while the transaction was open, {after} after it was aborted; 10 is committed"
        )
    return None


def unstable_read() -> str | None:
    """Schedule: a new member fetches its start offset between the records and the marker of a transaction."""
    coordinator = Coordinator(t=3)
    coordinator.commit({T0: 10})
    coordinator.commit({T0: 20}, producer_id=_TXN)
    offset, code = coordinator.committed(T0, require_stable=True)[T0]
    coordinator.end_transaction(_TXN, is_commit=True)
    if code != _UNSTABLE:
        return f"a reader begins at {offset}, and the records up to 20 are processed twice"
    return None


DIRECTED: Final[dict[str, Callable[[], str | None]]] = {
    "R35-member-unchecked": member_unchecked,
    "R35-unstable-read": unstable_read,
    "R35-visible-at-once": visible_at_once,
    "R38-expelled-stays": expelled_stays,
    "R38-hand-over-early": hand_over_early,
    "R39-any-epoch": any_epoch,
    "R39-any-member": any_member,
    "R56-late-commit": late_commit,
}
