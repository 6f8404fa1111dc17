"""Compares a voter that has just started with the other voters, before it relies on its own files (R59).

A data directory that was restored from an older copy lacks the promises (votes and acknowledgements) that the
node made after the copy, and nothing in the directory shows that. The other voters rely on these promises:
entries were committed because of the acknowledgements, and leaders were elected by the votes.

Therefore a voter that starts asks the others for their terms and the ends of their logs. It repeats the
inquiry once per heartbeat interval until it has caught up with a leader or leads itself. Meanwhile:

- It makes no promise until all other voters have responded. After ``wait_s`` a majority is enough, counting
  this voter, so that a cluster with a dead voter continues. If the files of the directory were copied
  (``start_counter``), ``wait_s`` is longer.
- It does not vote in a term that another voter had reached when that other voter first responded, because
  this voter may already have voted in that term.
- It votes for no candidate, itself included, whose log ends before the log of another voter that still
  responds.

A node that becomes a voter because another voter lists its directory (``eligibility``) does the same: its
directory may be a copy from before it voted for the first time.

A committed entry is not lost as long as one voter that has the entry responds. If an older copy is restored
while no such voter can be reached, the others cannot distinguish the restored node from an intact voter.
"""

# Tests: tests/raft/test_restart.py, tests/raft/test_raft_schedules.py

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple


class LogEnd(NamedTuple):
    """The term and index of the last entry of a log. A log with a greater end is more complete (Raft, section
    5.4.1)."""

    last_term: int
    last_index: int


#: How many times longer a voter in a copied directory waits for missing responses: about a minute in all. The
#: missing voter may be the only one with entries that were committed because of forgotten acknowledgements.
COPY_WAIT_FACTOR: Final = 60

#: The end that counts for a node without a vote, because its acknowledgements did not count.
NO_ENTRY: Final = LogEnd(0, 0)


def wait_s(patience_s: float, *, is_copy: bool) -> float:
    """Return for how long a voter that has started waits for other voters that do not respond."""
    return patience_s * COPY_WAIT_FACTOR if is_copy else patience_s


class Restart:
    """The responses of the other voters to a voter that has started. Pure. Times are in seconds.

    A response counts for ``patience_s``. From its start, the voter waits for missing responses as ``wait_s``
    says; ``is_copy`` tells whether its directory was copied. Invariant: unless ``is_over``, this voter may
    lack promises that it has made.
    """

    def __init__(
        self, others: Iterable[int], *, started: float, patience_s: float, is_copy: bool = False
    ) -> None:
        self._others = frozenset(others)
        self._started = started
        self._patience_s = patience_s
        self._wait_s = wait_s(patience_s, is_copy=is_copy)
        self._responses: dict[int, tuple[float, LogEnd]] = {}
        self.is_over = not self._others

    def set_others(self, others: Iterable[int]) -> None:
        """Compare with these voters from now on: those of the log, which has changed."""
        self._others = frozenset(others)
        self.is_over = self.is_over or not self._others

    def on_response(self, peer: int, end: LogEnd, now: float) -> None:
        """Record ``end``, the present end of the log of ``peer``, or NO_ENTRY if ``peer`` may not vote."""
        self._responses[peer] = (now, end)

    def has_responded(self, peer: int) -> bool:
        """Whether ``peer`` has responded over the present link."""
        return peer in self._responses

    def forget(self, peer: int) -> None:
        """Discard the response of ``peer``, because its link has ended."""
        self._responses.pop(peer, None)

    def may_promise(self, now: float) -> bool:
        """Whether this voter may vote and acknowledge: ``is_over``, or all other voters have responded within
        ``patience_s``, or enough of them have and the wait for the others is over."""
        if self.is_over:
            return True
        count = len(self._present(now).keys() & self._others)
        has_majority = 2 * (1 + count) > 1 + len(self._others)
        return count == len(self._others) or (has_majority and now - self._started >= self._wait_s)

    def may_elect(self, candidate: LogEnd, now: float) -> bool:
        """Whether this voter may vote for a candidate whose log ends at ``candidate``."""
        return self.is_over or all(end <= candidate for end in self._present(now).values())

    def end(self) -> None:
        """Rely on this voter's own files from now on, because it has all committed entries."""
        self.is_over = True
        self._responses.clear()

    def _present(self, now: float) -> dict[int, LogEnd]:
        """Return the ends of the logs of the voters that have responded within ``patience_s``."""
        return {peer: end for peer, (at, end) in self._responses.items() if now - at <= self._patience_s}
