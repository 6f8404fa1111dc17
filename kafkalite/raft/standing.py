"""Who may vote: a voter's promises stand in its journal, so one without a journal has none to give (R17).

A node with an empty directory can't tell a new cluster from one in which its own disk was replaced, and
in the second case it has forgotten votes and acknowledgements that others rely on. So it abstains: it
neither votes nor stands nor counts, until one of these holds.

- *Founding.* In one round of questions every other voter says that its directory is new as well. The round
  begins again with every new link, so all answers were given by processes that were there together: nobody
  has promised anything yet. The ids of all directories are written down as the founders'.
- *A founder's word.* Some voter names this very directory among the founders': it has abstained ever since,
  so nothing was forgotten.
- *Rejoining.* It has everything the leader has committed, in the leader's own term, and a majority without
  it confirms that leader (``wall.Wall``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

Founders = Mapping[int, bytes]
"""Node id → id of the directory that it founded the cluster with, or ``UNKNOWN``. All voters, or empty."""

UNKNOWN: Final = b""  # known to a voter that has rejoined: who votes, but not with which directories


class Standing:
    """One node's standing. Pure; whoever changes it writes ``is_voter`` and ``founders`` down first."""

    def __init__(
        self,
        node_id: int,
        others: Iterable[int],
        directory: bytes,
        *,
        is_voter: bool,
        founders: Founders,
    ) -> None:
        self.directory = directory
        self.is_voter = is_voter
        self.founders: Founders = founders
        self.round = 1
        self._node_id = node_id
        self._others = frozenset(others)
        self._fresh: dict[int, bytes] = {}

    @property
    def abstains(self) -> bool:
        return not self.is_voter

    def new_round(self) -> None:
        """A process may have come or gone: what was answered before says nothing any more."""
        self.round += 1
        self._fresh.clear()

    def on_answer(
        self,
        peer_id: int,
        seq: int,
        directory: bytes,
        *,
        is_fresh: bool,
        founders: Founders,
        still_fresh: bool,
    ) -> Founders | None:
        """The founders, if by this answer the node is one of them. ``still_fresh``: its own log is."""
        if self.is_voter:
            return None
        if founders.get(self._node_id) == self.directory and founders.keys() == self._others | {
            self._node_id
        }:
            return founders
        if seq != self.round:
            return None
        if not is_fresh:
            self._fresh.pop(peer_id, None)
            return None
        self._fresh[peer_id] = directory
        return self.founders_now() if still_fresh else None

    def founders_now(self) -> Founders | None:
        """All directories, once every other voter has said in this round that its own is new."""
        if self.is_voter or self._fresh.keys() != self._others:
            return None
        return dict(sorted({**self._fresh, self._node_id: self.directory}.items()))
