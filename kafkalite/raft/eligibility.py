"""Decides whether a node may vote (R17).

A *promise* is a vote or an acknowledgement of entries, on which other voters rely. The journal stores
promises.

A node with an empty directory cannot distinguish a new cluster from one in which its own disk was replaced.
If its disk was replaced, it has lost its promises. Therefore the node abstains: it does not vote, is no
candidate, and its acknowledgements do not count, until one of these conditions holds.

- *Bootstrap.* Within one round of inquiries, every other voter has responded that its directory is new too. A
  new link begins a new round, so all responses come from processes that were connected at the same time.
  Therefore no node has made a promise yet. All voters are recorded, each with the id of its directory, as the
  *bootstrap voters*.
- *Listed as a bootstrap voter.* Another voter lists this directory among the bootstrap voters. The node has
  abstained since it was listed, so it has made no promise, unless the directory is an older copy
  (``restart``).
- *Rejoin.* The node has applied all entries that the leader has committed, including one of the leader's
  term. A majority of the voters, not counting this node, confirms that this leader leads (``voter.Voter``).

A voter that has started again also compares its log with those of the others before it votes (``restart``).

A node that was the only voter also abstains after other voters were added. The others have empty logs: if all
became voters now, a majority without this node could elect a leader that lacks its log. If no other voter has
ever voted, this node leads the next term and sends its log to the others. Once all others have all committed
entries, it records all voters with their directory ids as the bootstrap voters. It never replaces its own log
by that of another node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kafkalite.errors import DataDirectoryError

BootstrapVoters = Mapping[int, bytes]
"""{node id: directory id at the bootstrap, or ``UNKNOWN``}: all voters, or empty."""

UNKNOWN: Final = b""  # stored by a voter that rejoined: it knows only the node ids of the bootstrap voters


class Eligibility:
    """Decides whether one node may vote. Pure: the caller writes the bootstrap voters to the journal before
    it calls ``become_voter``."""

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
        #: {peer: directory id} of the peers that have responded, in this round, that they have never voted.
        self._never_voted: dict[int, bytes] = {}
        #: Whether this node wrote the log as the only voter, so that no other voter has the log.
        self.was_alone = bool(self._others) and bootstrap_voters.keys() == {node_id}
        self.is_voter = is_voter and not self.was_alone

    @property
    def abstains(self) -> bool:
        return not self.is_voter

    def new_round(self) -> None:
        """Begin a new round of inquiries, and discard the responses of the previous round."""
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
        """Process a peer's response to an inquiry. Return the bootstrap voters if this node may now become a
        voter, else None.

        ``seq`` is the round of the inquiry, or 0 if the peer sent the message without an inquiry.
        ``directory`` is the id of the peer's directory. If ``is_new``, that directory never belonged to a
        voter. ``is_log_shared``: whether every other voter has this node's log, or the log is new. Raises
        DataDirectoryError if this node was the only voter, and the peer has bootstrap voters too.
        """
        if self.is_voter:
            return None
        if self.was_alone and bootstrap_voters:
            raise DataDirectoryError(
                f"node {self._node_id} was the only voter of its metadata, but voter {peer_id} has voted too",
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
        """Whether the peer has responded, in this round, that its directory never belonged to a voter."""
        return peer_id in self._never_voted

    def missing_at_first_start(self, attached: Iterable[int]) -> list[int]:
        """Return the voters, sorted, for whose first start this node waits, given the ``attached`` peers.

        Empty unless this directory and those of all attached peers are new. Empty without attached peers,
        too: then the disk of this node may have been replaced.
        """
        connected = self._others.intersection(attached)
        if self.is_voter or self.was_alone or not connected or connected - self._never_voted.keys():
            return []
        return sorted(self._others - connected)

    @property
    def is_round_complete(self) -> bool:
        """Whether all other voters have responded, in this round, that they have never voted."""
        return self._never_voted.keys() == self._others

    def bootstrap_now(self, *, is_log_shared: bool) -> BootstrapVoters | None:
        """Return the bootstrap voters if this node may not vote yet, the round is complete and
        ``is_log_shared``. Otherwise return None."""
        if self.is_voter or not is_log_shared or not self.is_round_complete:
            return None
        return dict(sorted({**self._never_voted, self._node_id: self.directory}.items()))

    def become_voter(self, bootstrap_voters: BootstrapVoters) -> None:
        self.is_voter, self.bootstrap_voters, self.was_alone = True, bootstrap_voters, False
