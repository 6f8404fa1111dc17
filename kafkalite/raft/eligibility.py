"""Decides whether a node may vote. A voter's promises are in its journal; an empty directory has none
(R17).

A node with an empty directory can't distinguish a new cluster from one in which its own disk was
replaced. In the second case it has lost votes and acknowledgements that other voters rely on. So it
abstains: it does not vote, is no candidate and its acknowledgements do not count, until one of these
holds.

- *Bootstrap.* Within one round of inquiries every other voter has responded that its directory is new, too.
  A new link begins a new round, so all responses come from processes that were connected at the same time,
  and no node has promised anything yet. The directory ids of all become the bootstrap voters.
- *Listed as a bootstrap voter.* Another voter lists this directory among the bootstrap voters. The node
  has abstained since then, so it has lost nothing.
- *Rejoin.* The node has everything that the leader has committed, in the leader's own term, and a majority
  without it confirms that leader (``voter.Voter``).

A node that was the only voter and is now configured as one of several abstains, too. A majority without
the node must not elect a leader before it has this node's log. So the node, the only voter until now,
leads the next term and sends its log to the others, if no other voter has ever voted. Once all of them
hold all committed entries, it records the directory ids of all as the bootstrap voters. It never
accepts another log in place of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kafkalite.errors import DataDirectoryError

BootstrapVoters = Mapping[int, bytes]
"""Node id → id of the directory it bootstrapped the cluster with, or ``UNKNOWN``. All voters, or empty."""

UNKNOWN: Final = b""  # of a voter that rejoined: only the node ids of bootstrap voters are known


class Eligibility:
    """Whether one node may vote. Pure: callers persist a change before they assign it here."""

    def __init__(
        self,
        node_id: int,
        others: Iterable[int],
        directory: bytes,
        *,
        is_voter: bool,
        bootstrap_voters: BootstrapVoters,
    ) -> None:
        self.directory = directory
        self.bootstrap_voters: BootstrapVoters = bootstrap_voters
        self.round = 1
        self._node_id = node_id
        self._others = frozenset(others)
        self._never_voted: dict[int, bytes] = {}  # peer → directory; responses of this round
        #: Whether the log was written by this node as the only voter, so that no other voter has it.
        self.was_alone = bool(self._others) and bootstrap_voters.keys() == {node_id}
        self.is_voter = is_voter and not self.was_alone

    @property
    def abstains(self) -> bool:
        return not self.is_voter

    def new_round(self) -> None:
        """Discard earlier responses, because a process may have been replaced."""
        self.round += 1
        self._never_voted.clear()

    def on_response(
        self,
        peer_id: int,
        seq: int,
        directory: bytes,
        *,
        is_new: bool,
        bootstrap_voters: BootstrapVoters,
        is_log_shared: bool,
    ) -> BootstrapVoters | None:
        """Return the bootstrap voters if this response makes the node one of them.

        ``is_new``: the peer's log is new. ``is_log_shared``: every other voter holds this node's log,
        which is also true if the log is new. Raises DataDirectoryError if this node was alone and the
        peer has voted.
        """
        if self.is_voter:
            return None
        if self.was_alone and bootstrap_voters:
            raise DataDirectoryError(
                f"node {self._node_id} has kept its metadata alone, and so has voter {peer_id}",
                hint="start the other voters with empty data directories; to give up this node's topics"
                " instead, start it with an empty data directory and --rejoin",
            )
        is_listed = bootstrap_voters.get(self._node_id) == self.directory
        if is_listed and bootstrap_voters.keys() == self._others | {self._node_id}:
            return bootstrap_voters
        if seq != self.round:
            return None
        if not is_new and not self.was_alone:
            self._never_voted.pop(peer_id, None)
            return None
        self._never_voted[peer_id] = directory
        return self.bootstrap_now(is_log_shared=is_log_shared)

    def has_never_voted(self, peer_id: int) -> bool:
        """Whether the peer responded in this round that its directory never belonged to a voter."""
        return peer_id in self._never_voted

    @property
    def is_round_complete(self) -> bool:
        """Whether all other voters have responded in this round that they have never voted."""
        return self._never_voted.keys() == self._others

    def bootstrap_now(self, *, is_log_shared: bool) -> BootstrapVoters | None:
        """Return the directories of all voters if no other voter has ever voted and all have the same log."""
        if self.is_voter or not is_log_shared or not self.is_round_complete:
            return None
        return dict(sorted({**self._never_voted, self._node_id: self.directory}.items()))

    def become_voter(self, bootstrap_voters: BootstrapVoters) -> None:
        self.is_voter, self.bootstrap_voters, self.was_alone = True, bootstrap_voters, False
