"""The parts of Raft that pysyncobj lacks: pre-vote, read-index, eligibility to vote (``eligibility``), the
check of a voter that has started again (``restart``), observers, and changes of the voters (``voter_set``).

Implements messages, terms and deadlines on top of ``adapter.RaftAdapter``. It uses none of the library's
private names (``_SyncObj__x``).
"""

# Tests: tests/raft/test_raft_schedules.py, tests/raft/test_eligibility.py

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kafkalite.errors import BrokerError, NotControllerError, RequestTimedOutError
from kafkalite.raft.adapter import LEADER, RaftAdapter
from kafkalite.raft.eligibility import UNKNOWN, BootstrapVoters
from kafkalite.raft.messages import Message
from kafkalite.raft.restart import NO_ENTRY, LogEnd, Restart
from kafkalite.raft.voter_set import LeaderView, Observer, VoterChange, VoterKey, VoterSet, next_voters

NO_CANDIDATE: Final = -1  #: stored as the vote in a term in which this node may already have voted
_NEVER: Final = 1e12
_LONG_AGO: Final = -1e12

#: An observer that has not asked for the log for this many election timeouts is forgotten.
_FORGET_FACTOR: Final = 20
_MAX_OBSERVERS: Final = 200

ReadDone = Callable[[bool], None]

ChangeDone = Callable[[BrokerError | None], None]
"""Called with None when a change of the voters is committed, or with the reason why it is not. After
RequestTimedOutError the change may still be committed."""


class _Read(NamedTuple):
    confirmed: set[int]
    term: int
    commit_index: int
    done: ReadDone


class _Confirmation(NamedTuple):
    seq: int
    term: int
    confirmed: set[int]
    asked: float


@dataclass(slots=True)
class _Observed:
    """An observer: its directory and address, and how far it has acknowledged this leader's log."""

    key: VoterKey
    asked: float  #: when it last asked for the log
    match_index: int = 0
    due_index: int = 0  #: this leader's commit index when the observer acknowledged last
    caught_up: float = (
        _LONG_AGO  #: when it last had all entries that were committed at its acknowledgement before
    )


class Voter(RaftAdapter):
    """A ``RaftAdapter`` with pre-vote, read-index, eligibility to vote, and the check after a start
    (``restart``)."""

    def __init__(
        self, *args: Any, is_copy: bool = False, is_new: bool = False, address: str = "", **kwargs: Any
    ) -> None:
        """``is_new``: this process has created the directory, of an observer, so it has made no promise yet.
        ``address`` is this node's own, at which other controllers connect."""
        self._address = address
        self._observed: dict[int, _Observed] = {}
        self._directories: dict[int, bytes] = {}  # by peer: the directory behind the present link
        self._next_join = 0.0
        self._leaves_at = _NEVER  # when this leader, which is removed, stops leading
        self._prevote_seq, self._prevote_term = 0, -1
        self._prevotes: set[int] = set()
        self._has_won_prevote = False
        self._probe_seq = 0
        self._reads: dict[int, _Read] = {}  # reads that wait until a majority confirms the leader
        self._reads_ready: list[_Read] = []  # confirmed reads that wait until their commit index is applied
        self._next_inquiry = 0.0
        self._confirmation: _Confirmation | None = None
        self._postponed: tuple[int, Message] | None = (
            None  # the last request for a vote while this node waits
        )
        self._log_holders: set[int] = set()  # peers that have all entries of this node, the former only voter
        super().__init__(*args, **kwargs)
        self._started = self._loop_time()
        self._restart = Restart(
            self.counted() if self._voter_set.voters else self._nodes,
            started=self._started,
            patience_s=self.conf.raftMaxTimeout,
            is_copy=is_copy,
        )
        if is_new:
            self._restart.end()

    def adopt_voters(self) -> None:
        former = self._voter_set
        super().adopt_voters()
        if self._voter_set is not former and former.offset >= 0:
            self._restart.set_others(self.counted())

    def next_deadline(self) -> float:
        if self._is_inquiring():
            return min(self._next_inquiry, super().next_deadline())
        return super().next_deadline()

    def has_ended_restart(self) -> bool:
        """Whether this voter relies on its own files again after its start (R59)."""
        return self._restart.is_over

    def _is_inquiring(self) -> bool:
        return self._seeks_eligibility() or not self._restart.is_over

    def _seeks_eligibility(self) -> bool:
        """Whether this node is listed as a voter without a directory, and may not vote yet."""
        own = self._voter_set.voters.get(self.selfNode.id)
        return own is not None and own.directory == UNKNOWN and self._eligibility.abstains

    def may_promise(self) -> bool:
        return self._restart.may_promise(self._loop_time())

    def on_message(self, peer: int, message: Message) -> None:
        kind = message["type"]
        if kind == "join":
            self._on_join(peer, message)
        elif (
            kind in {"prevote", "request_vote"}
            and not self.may_promise()
            and self.is_listed_as(message["directory"])
        ):
            self._postponed = (peer, message)  # the candidate does not ask again in its term
        else:
            super().on_message(peer, message)

    def may_elect(self, candidate: LogEnd) -> bool:
        return self._restart.may_elect(candidate, self._loop_time())

    def begin_link(self, peer: int) -> None:
        self._begin_round()
        self._restart_link(peer)
        self._next_join = 0.0
        super().begin_link(peer)

    def end_link(self, peer: int) -> None:
        self._begin_round()
        self._restart.forget(peer)
        self._restart_link(peer)
        super().end_link(peer)

    def _restart_link(self, peer: int) -> None:
        """Forget the directory behind the former link, and how far it had caught up: its disk may have been
        replaced."""
        self._directories.pop(peer, None)
        if peer in self._observed:
            observed = self._observed[peer]
            observed.match_index, observed.caught_up = 0, _LONG_AGO

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803
        if self._eligibility.was_alone:
            self._share_log(self._loop_time())
        self.adopt_voters()
        super()._onTick(timeToWait)
        self._step_down_if_removed()
        self._forget_observers()
        if not self._restart.is_over and self.leader() == self.selfNode.id:
            self._restart.end()
        self._release_reads()

    def _before_election(self, now: float) -> None:
        if self._is_inquiring():
            self._seek_eligibility(now)
        if not self.is_voter():
            self._ask_for_log(now)
        if not self.may_stand():
            self.set_deadline(_NEVER)
        elif not self._restart.is_over and not self.may_elect_itself():
            self.set_deadline(max(self.deadline(), now + self.conf.appendEntriesPeriod / 10))
        elif self.is_prevote_due(now):
            self._ask_for_prevotes(now)
        self._has_won_prevote = False

    def _on_resigned(self) -> None:
        reads = [*self._reads.values(), *self._reads_ready]
        self._reads.clear()
        self._reads_ready.clear()
        for read in reads:
            read.done(False)
        if self._eligibility.was_alone:
            self._begin_round()  # lead again only after all others have responded again

    def _on_append_entries(self, node: Any, message: Message) -> None:
        if self._eligibility.was_alone:
            return  # this log has committed entries that no other possible leader has
        super()._on_append_entries(node, message)
        if message["term"] != self.raftCurrentTerm:
            return
        if self._seeks_eligibility():
            self._seek_confirmation(node.id)
        elif not self._restart.is_over and self.may_promise() and self._has_caught_up():
            self._restart.end()

    def is_prevote_due(self, now: float) -> bool:
        """Whether to request pre-votes now, before an election. Raft is safe without them, but less
        stable."""
        return bool(
            self.counted()
            and not self._has_won_prevote
            and self.deadline() < now
            and not self.is_handed_over_to()
        )

    def _ask_for_prevotes(self, now: float) -> None:
        """Request pre-votes. The election, and with it a new term, follows only if a majority grants them."""
        self._ask_for_log(now)  # a voter without a leader may have been removed meanwhile
        self.set_deadline(now + self.draw_timeout())
        self.forget_leader()
        self._prevote_seq += 1
        self._prevotes, self._prevote_term = set(), self.raftCurrentTerm
        for peer in sorted(self.counted()):
            self._host.send(
                peer,
                {
                    "type": "prevote",
                    "term": self.raftCurrentTerm + 1,
                    "seq": self._prevote_seq,
                    "last_log_index": self._journal.last_index,
                    "last_log_term": self._journal.last_term,
                    "directory": self.listed_directory(peer),
                },
            )

    def _on_prevote(self, node: Any, message: Message) -> None:
        if not self.may_vote(message["directory"]):
            return
        if message["directory"] == UNKNOWN and not self.is_known_voter(node.id):
            return
        if message["term"] <= self.raftCurrentTerm:
            self._send(node, {"type": "stale_term", "term": self.raftCurrentTerm})
            return
        silence = self._loop_time() - self._leader_seen
        is_quiet = silence >= self.conf.raftMinTimeout - self.conf.appendEntriesPeriod
        candidate = LogEnd(message["last_log_term"], message["last_log_index"])
        is_complete = candidate >= self.log_end() and self.may_elect(candidate)
        if self.raft_state() != LEADER and is_quiet and is_complete:
            self._send(node, {"type": "prevote_ok", "seq": message["seq"]})

    def _on_prevote_ok(self, node: Any, message: Message) -> None:
        if (message["seq"], self.raftCurrentTerm) != (self._prevote_seq, self._prevote_term):
            return
        if self.raft_state() == LEADER or not self.may_elect_itself():
            return
        self._prevotes.add(node.id)
        if self._majority(self.own_weight() + len(self._prevotes & self.counted())):
            self._has_won_prevote = True
            self.set_deadline(0.0)

    def read_index(self, done: ReadDone) -> None:
        """Call ``done(True)`` once every entry committed anywhere before this call is applied here (R19).

        Call ``done(False)`` if this node does not lead or stops leading.
        """
        own_id = self.selfNode.id
        if self.leader() != own_id:
            done(False)
            return
        self._probe_seq += 1
        seq, term = self._probe_seq, self.raftCurrentTerm
        self._reads[seq] = _Read(set(), term, self.raftCommitIndex, done)
        self.send_all({"type": "probe", "term": term, "seq": seq, "leader": own_id})
        self._check_read(seq)
        self._host.kick()

    def _on_probe(self, node: Any, message: Message) -> None:
        """Send ``probe_ok`` if the probe has this node's current term and names the leader of that term.

        This node may be that leader. A node that abstains sends nothing.
        """
        if self.abstains() or message["term"] != self.raftCurrentTerm or not self.is_known_voter(node.id):
            return
        if self.followed() == message["leader"]:
            self._send(node, {"type": "probe_ok", "seq": message["seq"]})

    def _on_probe_ok(self, node: Any, message: Message) -> None:
        seq = message["seq"]
        if self._seeks_eligibility():
            self._on_confirmation(node.id, seq)
        elif seq in self._reads:
            self._reads[seq].confirmed.add(node.id)
            self._check_read(seq)

    def _check_read(self, seq: int) -> None:
        read = self._reads[seq]
        if not self.is_leadership_confirmed(len(read.confirmed & self.counted())):
            return
        del self._reads[seq]
        if self.raftCurrentTerm == read.term and self.raft_state() == LEADER:
            self._reads_ready.append(read)
        else:
            read.done(False)

    def is_leadership_confirmed(self, confirmations: int) -> bool:
        """Whether a leader may serve a read: ``confirmations`` other voters and the leader itself are a
        majority (R19)."""
        return self._majority(self.own_weight() + confirmations)

    def _release_reads(self) -> None:
        ready, self._reads_ready = self._reads_ready, []
        for read in ready:
            if read.commit_index <= self.raftLastApplied:
                read.done(True)
            else:
                self._reads_ready.append(read)

    def _begin_round(self) -> None:
        self._eligibility.new_round()
        self._log_holders.clear()
        self._next_inquiry = 0.0

    def _is_log_new(self) -> bool:
        return self._journal.last_index == 1 and self.raftCurrentTerm == 0

    def is_log_shared(self) -> bool:
        """Whether the log is new or, on a node that was the only voter, all other voters have acknowledged
        its committed entries in this round."""
        return self._is_log_new() or self._log_holders == self.counted()

    def _seek_eligibility(self, now: float) -> None:
        """Become a voter if ``Eligibility.bootstrap_now`` allows it, otherwise send an inquiry to all
        other voters. Does nothing until a heartbeat interval after the last inquiry, unless a new round
        has begun."""
        if now < self._next_inquiry:
            return
        self._next_inquiry = now + self.conf.appendEntriesPeriod
        bootstrap_voters = None
        if self._seeks_eligibility():
            bootstrap_voters = self._eligibility.bootstrap_now(is_log_shared=self.is_log_shared())
        if bootstrap_voters is not None:
            self._bootstrap(bootstrap_voters)
        else:
            self.send_all({"type": "inquire", "seq": self._eligibility.round})

    def _share_log(self, now: float) -> None:
        """Called in each tick of a node that was the only voter. Once all other voters have responded that
        they have never voted, lead them until they have this node's log."""
        if self.raft_state() == LEADER:
            self._seek_eligibility(now)
        elif self._eligibility.is_round_complete:
            self.lead_next_term()

    def _may_append_to(self, peer: int) -> bool:
        return not self._eligibility.was_alone or self._eligibility.has_never_voted(peer)

    def _on_abstaining_ack(self, peer: int, match_index: int) -> None:
        observed = self._observed.get(peer)
        if observed is not None and self._directories.get(peer) == observed.key.directory:
            observed.match_index = match_index
            if match_index >= observed.due_index:
                observed.caught_up = self._loop_time()
            observed.due_index = self.raftCommitIndex
        if self._eligibility.was_alone:
            self.note_response(peer)
            if match_index >= self.raftCommitIndex:
                self._log_holders.add(peer)

    def _on_inquire(self, node: Any, message: Message) -> None:
        self._send(node, self._own_eligibility(message["seq"]))

    def _own_eligibility(self, seq: int) -> Message:
        eligibility = self._eligibility
        return {
            "type": "eligibility",
            "seq": seq,
            "directory": eligibility.directory,
            "is_new": self._seeks_eligibility() and self._is_log_new(),
            "bootstrap_voters": list(eligibility.bootstrap_voters.items()),
            "is_voter": self.is_voter(),
            "term": self.raftCurrentTerm,
            "last_log_index": self._journal.last_index,
            "last_log_term": self._journal.last_term,
        }

    def _on_eligibility(self, node: Any, message: Message) -> None:
        if not self._restart.is_over and not self._seeks_eligibility():
            self._compare_logs(node.id, message)
        if not self._seeks_eligibility():
            return
        bootstrap_voters = self._eligibility.on_response(
            node.id,
            message["seq"],
            message["directory"],
            is_new=message["is_new"],
            bootstrap_voters=dict(message["bootstrap_voters"]),
            is_log_shared=self.is_log_shared(),
        )
        if bootstrap_voters is not None:
            self._bootstrap(bootstrap_voters)

    def _compare_logs(self, peer: int, message: Message) -> None:
        """Record the end of the log of ``peer``. After the first response over a link, cast no more votes in
        the term of that response, because this node may already have voted in it (R59)."""
        term = message["term"]
        if not self._restart.has_responded(peer):  # later terms began after the start
            if term > self.raftCurrentTerm:
                self.follow_in_term(term, NO_CANDIDATE)
            elif term == self.raftCurrentTerm and self._journal.getVotedForNodeId() is None:
                self.take_term(term, NO_CANDIDATE)
        end = LogEnd(message["last_log_term"], message["last_log_index"]) if message["is_voter"] else NO_ENTRY
        self._restart.on_response(peer, end, self._loop_time())
        if self._postponed is not None and self.may_promise():
            (candidate, request), self._postponed = self._postponed, None
            super().on_message(candidate, request)

    def _bootstrap(self, bootstrap_voters: BootstrapVoters) -> None:
        """Record ``bootstrap_voters``, of which this node is one, and send them to all other voters. From now
        on this node is a voter."""
        self._become_voter(bootstrap_voters)
        if self._eligibility.is_round_complete:
            self._restart.end()  # no voter has made a promise yet
        self._next_inquiry = 0.0
        self.send_all(self._own_eligibility(0))
        if self.selfNode.id == min(bootstrap_voters) and self._is_log_new():
            self.set_deadline(0.0)  # the voter with the lowest id becomes a candidate at once

    def _become_voter(self, bootstrap_voters: BootstrapVoters) -> None:
        self._journal.set_eligibility(is_voter=True, bootstrap_voters=bootstrap_voters)
        self._eligibility.become_voter(bootstrap_voters)
        self._confirmation = None
        self.set_deadline(self._loop_time() + self.draw_timeout())
        self._host.kick()

    def _has_caught_up(self) -> bool:
        """Whether all entries that the leader has reported as committed are applied here, and the last
        applied entry has the current term."""
        last = self._journal.entry(self.raftLastApplied)
        is_of_term = last is not None and last[2] == self.raftCurrentTerm
        return is_of_term and self.raftLastApplied >= self._leader_commit

    def _seek_confirmation(self, leader: int) -> None:
        """If this node has all entries that ``leader`` has committed, ask all other voters whether ``leader``
        leads the current term. Ask at most once per election timeout in a term."""
        now, term = self._loop_time(), self.raftCurrentTerm
        former = self._confirmation
        if not self._has_caught_up():
            return
        if former is not None and former.term == term and now - former.asked < self.conf.raftMinTimeout:
            return
        self._probe_seq += 1
        self._confirmation = _Confirmation(self._probe_seq, term, set(), now)
        self.send_all({"type": "probe", "term": term, "seq": self._probe_seq, "leader": leader})

    def _on_confirmation(self, peer: int, seq: int) -> None:
        asked = self._confirmation
        if asked is None or (asked.seq, asked.term) != (seq, self.raftCurrentTerm):
            return
        asked.confirmed.add(peer)
        # With more than three voters, the confirming majority may not know of a candidate that still counts a
        # vote from the lost disk. No candidacy lasts longer than the longest election timeout.
        lived = self._loop_time() - self._started
        is_candidate_gone = len(self.counted()) <= 2 or lived > 2 * self.conf.raftMaxTimeout
        if self._majority(len(asked.confirmed)) and self._has_caught_up() and is_candidate_gone:
            # This node may have voted in this term before its disk was lost.
            self.take_term(self.raftCurrentTerm, NO_CANDIDATE)
            self._become_voter(dict.fromkeys([self.selfNode.id, *sorted(self.counted())], UNKNOWN))
            self._restart.end()

    # --- observers and changes of the voters -----------------------------------------------------------

    def _ask_for_log(self, now: float) -> None:
        """Ask all peers for their log, once per election timeout and at each new link."""
        if now < self._next_join:
            return
        self._next_join = now + self.conf.raftMinTimeout
        message = {"type": "join", "directory": self._eligibility.directory, "address": self._address}
        for peer in self._nodes:
            self._host.send(peer, dict(message))

    def _on_join(self, peer: int, message: Message) -> None:
        """Record an observer, and send it the log whenever this node leads."""
        now = self._loop_time()
        key = VoterKey(message["directory"], message["address"])
        known = self._observed.get(peer)
        if known is not None and known.key == key:
            known.asked = now
            return
        if len(self._observed) >= _MAX_OBSERVERS and known is None:
            return
        self._observed[peer] = _Observed(key, now)
        self.add_peer(peer)
        self.announce_peers()

    def addresses(self) -> dict[int, str]:
        return {peer: one.key.address for peer, one in self._observed.items()} | super().addresses()

    def note_directory(self, peer: int, directory: bytes) -> None:
        if directory != UNKNOWN:
            self._directories[peer] = directory

    def _forget_observers(self) -> None:
        """Forget the observers that have not asked for the log for long, and no longer connect to them."""
        since = self._loop_time() - _FORGET_FACTOR * self.conf.raftMaxTimeout
        gone = [peer for peer, one in self._observed.items() if one.asked < since]
        for peer in gone:
            del self._observed[peer]
            if peer not in self.counted() and not self.is_linked(peer):
                self.drop_peer(peer)
        if gone:
            self.announce_peers()

    def observers(self) -> dict[int, Observer]:
        """As the leader, return the observers."""
        now = self._loop_time()
        return {
            peer: Observer(one.key, one.match_index, self.is_recent(one.caught_up, now))
            for peer, one in sorted(self._observed.items())
            if peer not in self._voter_set.voters
        }

    def is_recent(self, caught_up: float, now: float) -> bool:
        """Whether an observer had the whole log at ``caught_up``, at most an election timeout ago (R96)."""
        return bool(now - caught_up <= self.conf.raftMinTimeout)

    def named_voter_set(self) -> VoterSet:
        """Return the voter set in force with the directories that this leader knows: its own, those of the
        voters that have acknowledged its entries, and those of the bootstrap."""
        own_id, founders = self.selfNode.id, self._eligibility.bootstrap_voters
        known = {**founders, **self._directories, own_id: self._eligibility.directory}
        addresses = self.addresses() | {own_id: self._address}
        voters = {
            node: VoterKey(key.directory or known.get(node, UNKNOWN), key.address or addresses.get(node, ""))
            for node, key in self._voter_set.voters.items()
        }
        return VoterSet(self._voter_set.offset, voters)

    def leader_view(self) -> LeaderView:
        """Return the facts on which ``next_voters`` decides (R94)."""
        return LeaderView(
            self.first_index_of_term(), self.raftCommitIndex, self.named_voter_set(), self.observers()
        )

    def change_voters(self, change: VoterChange, done: ChangeDone) -> None:
        """Append the voters after ``change`` if ``next_voters`` allows it, and call ``done`` once."""
        if self.raft_state() != LEADER:
            done(NotControllerError(f"the controller is node {self.leader()}"))
            return
        try:
            voters = next_voters(change, self.leader_view())
        except BrokerError as refusal:
            done(refusal)
            return

        def on_outcome(index: int | None, is_known: bool) -> None:
            if index is not None:
                done(None)
            elif is_known:
                done(NotControllerError("another controller was elected, and the voters are unchanged"))
            else:
                done(RequestTimedOutError("the controller has changed; the outcome is not known"))

        self.append_voters(voters, on_outcome)

    def _step_down_if_removed(self) -> None:
        """As a leader that has removed itself, stop leading once the change is committed (R98).

        A heartbeat interval passes before, in which the responses are sent, and nothing is proposed.
        """
        if self.raft_state() != LEADER or not self.is_removed():
            self._leaves_at = _NEVER
            return
        now = self._loop_time()
        self._leaves_at = min(self._leaves_at, now + self.conf.appendEntriesPeriod)
        if now >= self._leaves_at and self._journal.last_index == self.raftLastApplied:
            self.resign()

    def takes_proposals(self) -> bool:
        return self._leaves_at == _NEVER

    def is_removed(self) -> bool:
        """Whether a committed voter set lacks this node."""
        is_committed = self._voter_set.offset <= min(self.raftCommitIndex, self.raftLastApplied)
        return is_committed and not self.own_weight()
