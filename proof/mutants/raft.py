"""Mutants of the rules in ``kafkalite.raft``; ``proof.mutants`` explains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafkalite.raft.adapter import LEADER, RaftAdapter
from kafkalite.raft.entries import Entry
from kafkalite.raft.journal import Journal
from proof.mutants import Mutant

_ADAPTER: Final = "kafkalite.raft.adapter:RaftAdapter"
_JOURNAL: Final = "kafkalite.raft.journal:Journal"
_NODE: Final = "kafkalite.raft.node:RaftNode"
_RESTART: Final = "kafkalite.raft.restart:Restart"
_VOTER: Final = "kafkalite.raft.voter:Voter"
_VOTER_SET: Final = "kafkalite.raft.voter_set"


def _truncate_overlap(self: Journal, start: int) -> None:
    kept = self[:start]
    self.clear()
    for entry in kept:
        self.add(*entry)


def _keep_only_a_compacted_log(self: Journal, previous: Entry, last: Entry) -> bool:
    return self[:2] == [previous, last]


def _forget_vote(self: Journal, term: int, vote: int | None) -> None:
    self._term, self._vote = term, vote


def _unclamped(self: Any, message: dict[str, Any]) -> Any:
    return message["commit_index"]


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def _committed_voters(self: RaftAdapter) -> Any:
    return self._journal.voters.at(self.raftCommitIndex) or self._first_voters


def _count_all(self: RaftAdapter, peer: int, message: dict[str, Any], original: Callable[..., bool]) -> bool:
    if not original(self, peer, message) and message["success"]:
        self._on_abstaining_ack(peer, message["next_node_idx"] - 1)
    return True


def _leads_at_once(self: RaftAdapter, original: Callable[..., int | None]) -> int | None:
    return int(self.selfNode.id) if self.raft_state() == LEADER else original(self)


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R54-voter-stops",
        "a voter whose disk is full stops until its process is started again",
        {f"{_NODE}._pause": lambda self, error: self._fail(error)},
    ),
    Mutant(
        "R54-voter-goes-on",
        "a voter whose disk is full continues with the state in its memory",
        {f"{_NODE}._pause": _returns(None)},
    ),
    Mutant(
        "R59-elects-any",
        "a restarted voter votes for a log that ends before the log of another voter",
        {f"{_RESTART}.may_elect": _returns(True)},
    ),
    Mutant(
        "R59-promises-at-once",
        "a restarted voter votes before the other voters have responded",
        {f"{_RESTART}.may_promise": _returns(True)},
    ),
    Mutant(
        "R59-trusts-copies",
        "a voter in a copied directory waits for the others no longer than any restarted voter",
        {"kafkalite.raft.restart:wait_s": lambda patience_s, *, is_copy: patience_s},
    ),
    Mutant(
        "R59-votes-again",
        "a restarted voter votes in a term that another voter had reached",
        {f"{_RESTART}.has_responded": _returns(True)},
    ),
    Mutant(
        "R90-newest-message",
        "a voter sends messages in the newest version to a voter that does not read it",
        {"kafkalite.raft.messages:field_names": lambda number, version, original: original(number, 1)},
    ),
    Mutant(
        "R93-on-commit",
        "a change of the voters takes effect when it is committed, not when it is appended",
        {f"{_ADAPTER}.voter_set": _committed_voters},
    ),
    Mutant(
        "R93-kept-after-truncation",
        "a change of the voters stays in force when its entry is truncated",
        {f"{_JOURNAL}.roll_back_voters": _returns(None)},
    ),
    Mutant(
        "R93-snapshot-forgets",
        "a snapshot does not have the voters that the entries before it list",
        {"kafkalite.raft.metadata_log:MetadataLog.voters_of_snapshot": _returns(None)},
    ),
    Mutant(
        "R94-any-term",
        "a leader changes the voters before it has committed an entry of its term",
        {f"{_VOTER_SET}:has_committed_in_term": _returns(True)},
    ),
    Mutant(
        "R95-two-changes",
        "a leader changes the voters again before the last change is committed",
        {f"{_VOTER_SET}:is_settled": _returns(True)},
    ),
    Mutant(
        "R96-empty-voter",
        "a node becomes a voter before it has the log",
        {f"{_VOTER_SET}:may_become_voter": _returns(True)},
    ),
    Mutant(
        "R97-any-directory",
        "a voter counts although its disk was replaced",
        {
            f"{_VOTER_SET}:is_same_directory": _returns(True),
            "kafkalite.raft.adapter:is_same_directory": _returns(True),
        },
    ),
    Mutant(
        "R98-leader-counts-itself",
        "a leader that removes itself counts itself towards the majority",
        {f"{_ADAPTER}.own_weight": _returns(1)},
    ),
    Mutant(
        "R98-observer-counts",
        "the votes and acknowledgements of observers count",
        {
            f"{_ADAPTER}.counted": lambda self: set(self._nodes),
            f"{_ADAPTER}.does_acknowledgement_count": _count_all,
            f"{_ADAPTER}.is_listed_as": _returns(True),
        },
    ),
    Mutant(
        "R98-removed-leader-stays",
        "a leader that has removed itself continues to lead",
        {f"{_VOTER}.is_removed": _returns(False)},
    ),
    Mutant(
        "RAFT-ack-unsynced",
        "a voter acknowledges entries before they are on its disk",
        {f"{_ADAPTER}.sync_before_acknowledgement": _returns(None)},
    ),
    Mutant(
        "RAFT-ack-unstamped",
        "an acknowledgement of another term counts",
        {f"{_ADAPTER}.is_of_present_term": _returns(True)},
    ),
    Mutant(
        "RAFT-alone-unshared",
        "new voters elect a leader before they hold the log of the node that was alone",
        {f"{_VOTER}.is_log_shared": _returns(True)},
    ),
    Mutant(
        "RAFT-commit-unclamped",
        "a follower commits more than the message at hand has verified",
        {f"{_ADAPTER}.verified_commit_index": _unclamped},
    ),
    Mutant(
        "RAFT-fresh-acks",
        "the acknowledgements of a voter with a new disk count",
        {f"{_ADAPTER}.do_acknowledgements_count": _returns(True)},
    ),
    Mutant(
        "RAFT-fresh-votes", "a voter with a new disk votes at once", {f"{_ADAPTER}.may_vote": _returns(True)}
    ),
    Mutant(
        "RAFT-leader-unsynced",
        "the leader counts its own copy before it is on disk",
        {f"{_ADAPTER}.sync_own_copy": _returns(None)},
    ),
    Mutant(
        "RAFT-match-kept",
        "what a voter acknowledged counts after it has come back with another disk",
        {f"{_ADAPTER}.forget_match": _returns(None), f"{_ADAPTER}.is_of_present_link": _returns(True)},
    ),
    Mutant(
        "RAFT-no-compare",
        "an entry takes effect on another state than it was decided on",
        {"kafkalite.raft.entries:is_void": _returns(False)},
    ),
    Mutant(
        "RAFT-read-before-no-op",
        "a new leader reads before it has applied its own first entry",
        {f"{_ADAPTER}.leader": _leads_at_once},
    ),
    Mutant(
        "RAFT-read-unconfirmed",
        "a leader reads without asking whether it still leads",
        {f"{_VOTER}.is_leadership_confirmed": _returns(True)},
    ),
    Mutant(
        "RAFT-stale-snapshot",
        "a snapshot replaces a newer state",
        {f"{_ADAPTER}.is_newer_state": _returns(True)},
    ),
    Mutant(
        "RAFT-tail-dropped",
        "a start drops the log after a snapshot that was not yet compacted",
        {f"{_JOURNAL}.contains_end_of_snapshot": _keep_only_a_compacted_log},
    ),
    Mutant(
        "RAFT-truncate-overlap",
        "a follower truncates its log at every append, not only at a conflict",
        {f"{_JOURNAL}.deleteEntriesFrom": _truncate_overlap},
    ),
    Mutant(
        "RAFT-vote-forgotten",
        "term and vote are not on disk before a message carries them",
        {f"{_JOURNAL}.setCurrentTerm": _forget_vote},
    ),
    Mutant("RAFT-vote-twice", "one voter's vote counts twice", {f"{_ADAPTER}.is_new_vote": _returns(True)}),
)
