"""What a voter does beyond the library's Raft: pre-vote, read-index, and abstaining with a new disk.

Pure protocol on top of ``wall.Wall``: it knows messages, terms and deadlines, and nothing of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kafkalite import mutants
from kafkalite.raft.raft_messages import Message
from kafkalite.raft.standing import UNKNOWN, Founders
from kafkalite.raft.wall import LEADER, Wall

NOBODY: Final = -1  #: voted for, in a term in which a vote might be the second
_NEVER: Final = 1e12

ReadDone = Callable[[bool], None]


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


class Voter(Wall):
    """``Wall``, and the messages that the library does not know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._prevote_seq, self._prevote_term = 0, -1
        self._prevotes: set[int] = set()
        self._is_elected_to_run = False
        self._probe_seq = 0
        self._reads: dict[int, _Read] = {}  # which wait for a majority to confirm the leader
        self._reads_ready: list[_Read] = []  # ... for what was committed by then to be applied
        self._next_inquiry = 0.0
        self._confirmation: _Confirmation | None = None
        super().__init__(*args, **kwargs)
        self._started = self._loop_time()

    def next_deadline(self) -> float:
        if self._standing.abstains:
            return self._next_inquiry
        return super().next_deadline()

    def begin_link(self, peer: int) -> None:
        self._standing.new_round()
        self._next_inquiry = 0.0
        super().begin_link(peer)

    def end_link(self, peer: int) -> None:
        self._standing.new_round()
        super().end_link(peer)

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803
        super()._onTick(timeToWait)
        self._release_reads()

    def _before_election(self, now: float) -> None:
        if self._standing.abstains:
            self.set_deadline(_NEVER)
            self._ask_who_is_there(now)
        elif self._is_prevote_due(now):
            self._ask_for_prevotes(now)
        self._is_elected_to_run = False

    def _on_resigned(self) -> None:
        reads = [*self._reads.values(), *self._reads_ready]
        self._reads.clear()
        self._reads_ready.clear()
        for read in reads:
            read.done(False)

    def _on_append_entries(self, node: Any, message: Message) -> None:
        super()._on_append_entries(node, message)
        if self._standing.abstains and message["term"] == self.raftCurrentTerm:
            self._seek_confirmation(node.id)

    # --- pre-vote --------------------------------------------------------------------------------------

    def _is_prevote_due(self, now: float) -> bool:
        return bool(
            self._settings.is_prevote_used
            and self._nodes
            and not self._is_elected_to_run
            and self.deadline() < now
            and not self.is_handed_over_to()
        )

    def _ask_for_prevotes(self, now: float) -> None:
        """The leader is silent. Begin a new term only if a majority is of the same opinion."""
        self.set_deadline(now + self.draw_timeout())
        self.forget_leader()
        self._prevote_seq += 1
        self._prevotes, self._prevote_term = set(), self.raftCurrentTerm
        self.send_all(
            {
                "type": "prevote",
                "term": self.raftCurrentTerm + 1,
                "seq": self._prevote_seq,
                "last_log_index": self._journal.last_index,
                "last_log_term": self._journal.last_term,
            }
        )

    def _on_prevote(self, node: Any, message: Message) -> None:
        if self._standing.abstains:
            return
        if message["term"] <= self.raftCurrentTerm:
            self._send(node, {"type": "stale_term", "term": self.raftCurrentTerm})
            return
        silence = self._loop_time() - self._leader_seen
        is_quiet = silence >= self.conf.raftMinTimeout - self.conf.appendEntriesPeriod
        own = (self._journal.last_term, self._journal.last_index)
        is_complete = (message["last_log_term"], message["last_log_index"]) >= own
        if self.raft_state() != LEADER and is_quiet and is_complete:
            self._send(node, {"type": "prevote_ok", "seq": message["seq"]})

    def _on_prevote_ok(self, node: Any, message: Message) -> None:
        if (message["seq"], self.raftCurrentTerm) != (self._prevote_seq, self._prevote_term):
            return
        if self.raft_state() == LEADER or self._standing.abstains:
            return
        self._prevotes.add(node.id)
        if self._majority(1 + len(self._prevotes)):
            self._is_elected_to_run = True
            self.set_deadline(0.0)

    # --- read-index ------------------------------------------------------------------------------------

    def read_index(self, done: ReadDone) -> None:
        """Call ``done(True)`` once this node has applied all that was committed anywhere by now (R19)."""
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
        """Is that node the leader of that term, as far as is known here?"""
        if self._standing.abstains or message["term"] != self.raftCurrentTerm:
            return
        if self.followed() == message["leader"]:
            self._send(node, {"type": "probe_ok", "seq": message["seq"]})

    def _on_probe_ok(self, node: Any, message: Message) -> None:
        seq = message["seq"]
        if self._standing.abstains:
            self._on_confirmation(node.id, seq)
        elif seq in self._reads:
            self._reads[seq].confirmed.add(node.id)
            self._check_read(seq)

    def _check_read(self, seq: int) -> None:
        read = self._reads[seq]
        if not self._majority(1 + len(read.confirmed)) and "RAFT-read-unconfirmed" not in mutants.ACTIVE:
            return
        del self._reads[seq]
        if self.raftCurrentTerm == read.term and self.raft_state() == LEADER:
            self._reads_ready.append(read)
        else:
            read.done(False)

    def _release_reads(self) -> None:
        ready, self._reads_ready = self._reads_ready, []
        for read in ready:
            if read.commit_index <= self.raftLastApplied:
                read.done(True)
            else:
                self._reads_ready.append(read)

    # --- abstaining: see ``standing`` --------------------------------------------------------------------

    def _is_log_new(self) -> bool:
        return self._journal.last_index == 1 and self.raftCurrentTerm == 0

    def _ask_who_is_there(self, now: float) -> None:
        """Find out, every heartbeat, whether this node need not abstain."""
        if now < self._next_inquiry:
            return
        self._next_inquiry = now + self.conf.appendEntriesPeriod
        founders = self._standing.founders_now() if self._is_log_new() else None
        if founders is not None:  # there is nobody else to ask
            self._found(founders)
        else:
            self.send_all({"type": "inquire", "seq": self._standing.round})

    def _on_inquire(self, node: Any, message: Message) -> None:
        self._send(node, self._own_standing(message["seq"]))

    def _own_standing(self, seq: int) -> Message:
        standing = self._standing
        return {
            "type": "standing",
            "seq": seq,
            "directory": standing.directory,
            "is_fresh": standing.abstains and self._is_log_new(),
            "founders": list(standing.founders.items()),
        }

    def _on_standing(self, node: Any, message: Message) -> None:
        founders = self._standing.on_answer(
            node.id,
            message["seq"],
            message["directory"],
            is_fresh=message["is_fresh"],
            founders=dict(message["founders"]),
            still_fresh=self._is_log_new(),
        )
        if founders is not None:
            self._found(founders)

    def _found(self, founders: Founders) -> None:
        """This directory is a founder's: it has promised nothing that it could have forgotten."""
        self._become_voter(founders)
        self.send_all(self._own_standing(0))
        if self.selfNode.id == min(founders) and self._is_log_new():
            self.set_deadline(0.0)  # somebody must be first

    def _become_voter(self, founders: Founders) -> None:
        self._journal.set_standing(is_voter=True, founders=founders)
        self._standing.is_voter, self._standing.founders = True, founders
        self._confirmation = None
        self.set_deadline(self._loop_time() + self.draw_timeout())
        self._host.kick()

    def _has_caught_up(self) -> bool:
        """Whether an entry of the leader's own term is applied here, and all that it has committed."""
        last = self._journal.entry(self.raftLastApplied)
        is_of_term = last is not None and last[2] == self.raftCurrentTerm
        return is_of_term and self.raftLastApplied >= self._leader_commit

    def _seek_confirmation(self, leader: int) -> None:
        """Everything is here that the leader has committed: ask all others whether it is the leader."""
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
        # With more than three voters the confirming majority may not know of a candidate that still counts
        # the vote of the lost disk. No candidacy lasts longer than the longest election timeout.
        lived = self._loop_time() - self._started
        is_candidate_gone = len(self._nodes) <= 2 or lived > 2 * self.conf.raftMaxTimeout
        if self._majority(len(asked.confirmed)) and self._has_caught_up() and is_candidate_gone:
            self.take_term(self.raftCurrentTerm, NOBODY)  # a vote in this term might be the second
            self._become_voter(dict.fromkeys([self.selfNode.id, *self._nodes], UNKNOWN))
