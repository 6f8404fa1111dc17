"""The seam to consensus: entries of records, appended by comparison, delivered in order once committed.

An entry is what one ``commit`` brings: it is applied whole or not at all. Offsets count entries, grow, and
may leave gaps. The rule that makes a deposed leader harmless, whoever believes to lead: an entry is appended
only if it was decided on the very state it lands on (``after_offset``); otherwise it is void, and its
author hears StaleImageError and decides again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kafkalite.errors import KafkaliteError
from kafkalite.metadata.records import MetadataRecord


class StaleImageError(KafkaliteError):
    """Another entry was appended since the image that this one was decided on. ``offset`` is that entry's."""

    def __init__(self, *, decided_on: int, offset: int) -> None:
        super().__init__(
            f"the decision was made at metadata offset {decided_on}, and the log is at {offset} by now",
            hint="decide again on the new image",
        )
        self.decided_on = decided_on
        self.offset = offset


class StateMachine(Protocol):
    """What a quorum drives. All calls come on the event loop, in the order of the log, none overlapping."""

    def load(self, offset: int, records: Iterable[MetadataRecord]) -> None:
        """Replace the whole state by a snapshot's, which stands at ``offset``."""
        ...

    def apply(self, offset: int, records: Sequence[MetadataRecord]) -> None:
        """Replay one committed entry. What it raises ends the quorum (R18)."""
        ...

    def snapshot(self) -> tuple[int, Iterable[MetadataRecord]]:
        """(offset, records that make the present state). The records may be read later and in a thread."""
        ...

    def fail(self, error: BaseException) -> None:
        """The quorum can't go on; nothing will be delivered any more."""
        ...


LeaderListener = Callable[[int | None, int], None]
"""Told (leader id or None, term) of every change, on the event loop."""


class Quorum(Protocol):
    on_leader_change: list[LeaderListener]

    @property
    def leader_id(self) -> int | None:
        """The node believed to lead, None while there is none."""
        ...

    @property
    def offset(self) -> int:
        """Of the last entry delivered here; 0 before the first."""
        ...

    def attach(self, machine: StateMachine) -> None:
        """Drive ``machine``. Once, before ``start``."""
        ...

    async def start(self) -> None:
        """Load what is stored here into the machine. Raises StorageError."""
        ...

    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        """Append one entry decided on the state at ``after_offset``; return its offset once committed.

        Raises StaleImageError (nothing took effect), DiskFullError (neither), NotControllerError (neither);
        RequestTimedOutError and LogOfflineError when the outcome is not known: the entry may still take
        effect, unless another that was decided on the same state does. So may that of a cancelled commit.
        """
        ...

    async def read_index(self) -> int:
        """Make sure that this node leads; return what ``offset`` must reach to hold all committed (R19).

        Raises NotControllerError, or RequestTimedOutError when a majority can't be asked.
        """
        ...

    async def stop(self) -> None:
        """Finish what was begun and take no more."""
        ...
