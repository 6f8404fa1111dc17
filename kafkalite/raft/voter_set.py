"""The voters of the quorum as entries of the metadata log, and the rules by which they change (R93-R98).

A log without an entry of this kind has the voters of the first format, ``controller.quorum.voters``. Each
change appends one entry with all voters after the change::

    command      04 | msgpack [[node, directory, address], …]       sorted by node

A voter is a node together with the id of its metadata directory, so that a node whose disk was replaced is
another voter (KIP-853). ``UNKNOWN`` as the directory means that only the node id was known when the entry was
written; then ``eligibility`` decides whether the node may vote.

Voters are added and removed one at a time: any majority of the former voters and any majority of the next
ones then have a voter in common (Raft, dissertation, chapter 4). This module is pure.
"""

# Tests: tests/raft/test_voter_set.py, tests/raft/test_raft_schedules.py

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgpack

from kafkalite.errors import (
    DuplicateVoterError,
    InvalidRequestError,
    InvalidVoterKeyError,
    NotControllerError,
    RemoteProtocolError,
    VoterChangePendingError,
    VoterNotCaughtUpError,
    VoterNotFoundError,
)
from kafkalite.raft.eligibility import UNKNOWN
from kafkalite.raft.entries import VOTERS

MAX_VOTERS: Final = 99
_MAX_DIRECTORY_BYTES: Final = 64
_MAX_ADDRESS_CHARACTERS: Final = 1_000


class VoterKey(NamedTuple):
    """The directory of a voter, and where the other voters reach it."""

    directory: bytes  #: the id of its metadata directory, or ``UNKNOWN``
    address: str


Voters = Mapping[int, VoterKey]
"""{node id: directory and address}, sorted by node id."""


class VoterSet(NamedTuple):
    """All voters, and the offset of the entry that lists them; 0 for those of the first format."""

    offset: int
    voters: Voters

    def lists(self, node_id: int, directory: bytes) -> bool:
        """Whether ``node_id`` with this directory is a voter. ``UNKNOWN`` in the set stands for any
        directory."""
        return node_id in self.voters and is_same_directory(self.voters[node_id].directory, directory)


def is_same_directory(listed: bytes, directory: bytes) -> bool:
    """Whether a voter with ``directory`` is the one that is listed with ``listed`` (R97)."""
    return listed in {UNKNOWN, directory}


def command_of(voters: Voters) -> bytes:
    """Return the command of an entry that lists ``voters``."""
    listed = [[node, *key] for node, key in sorted(voters.items())]
    packed: bytes = msgpack.packb(listed)
    return bytes((VOTERS,)) + packed


def voters_in(command: bytes) -> Voters:
    """Return the voters that a command lists. Raises RemoteProtocolError if it is malformed."""
    try:
        values = msgpack.unpackb(command[1:])
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a list of voters is not valid msgpack: {error}") from error
    return parsed_voters(values)


def parsed_voters(values: Any) -> Voters:
    """Return the voters in ``[[node, directory, address], …]``. Raises RemoteProtocolError if a value has
    another form, or if a node is listed twice."""
    voters: dict[int, VoterKey] = {}
    for value in values if isinstance(values, list | tuple) else [None]:
        match value:
            case [int(node), bytes(directory), str(address)] if node >= 0 and node not in voters:
                voters[node] = VoterKey(directory, address)
            case _:
                raise RemoteProtocolError(f"not a list of voters: {str(values)[:80]}")
    if not 1 <= len(voters) <= MAX_VOTERS:
        raise RemoteProtocolError(f"a list of {len(voters)} voters; 1 to {MAX_VOTERS} are possible")
    return dict(sorted(voters.items()))


class VoterHistory:
    """The voter sets in a log, from the one that was in force at the log's snapshot on.

    Invariant: the indexes increase. An entry takes effect when it is appended, and no longer when it is
    truncated (R93).
    """

    def __init__(self) -> None:
        self._sets: list[VoterSet] = []

    @property
    def latest(self) -> VoterSet | None:
        """The voter set in force, or None if no entry has changed the voters of the first format."""
        return self._sets[-1] if self._sets else None

    @property
    def former(self) -> VoterSet | None:
        """The voter set before ``latest``, or None if that is the one of the first format."""
        return self._sets[-2] if len(self._sets) > 1 else None

    def at(self, index: int) -> VoterSet | None:
        """Return the voter set in force after entry ``index``."""
        return next((one for one in reversed(self._sets) if one.offset <= index), None)

    def append(self, index: int, voters: Voters) -> None:
        """Record that the entry ``index``, the last one of the log, lists ``voters``."""
        self.truncate(index)
        self._sets.append(VoterSet(index, voters))

    def truncate(self, index: int) -> None:
        """Forget the entries from ``index`` on: the former voters are in force again."""
        while self._sets and self._sets[-1].offset >= index:
            self._sets.pop()

    def rebase(self, base: VoterSet) -> None:
        """Continue ``base``, the voter set of a snapshot, with the later entries."""
        self._sets = [base, *(one for one in self._sets if one.offset > base.offset)]


class Observer(NamedTuple):
    """A node that receives the leader's log and does not vote, as the leader knows it."""

    key: VoterKey
    match_index: int  #: the last index up to which its log agrees with the leader's
    is_caught_up: bool


class AddVoter(NamedTuple):
    """Make the observer ``node_id`` a voter. ``directory`` must be that of the observer; ``UNKNOWN`` accepts
    any."""

    node_id: int
    directory: bytes = UNKNOWN


class RemoveVoter(NamedTuple):
    """Remove the voter ``node_id``. ``directory`` must be the listed one; ``UNKNOWN`` accepts any."""

    node_id: int
    directory: bytes = UNKNOWN


VoterChange = AddVoter | RemoveVoter


class LeaderView(NamedTuple):
    """The facts on which a leader decides a change of the voters."""

    first_index: int  #: of the first entry of its term
    commit_index: int
    voter_set: VoterSet
    observers: Mapping[int, Observer]


def has_committed_in_term(view: LeaderView) -> bool:
    """Whether the leader has committed an entry of its own term. Before that, a former leader's change may
    still be uncommitted elsewhere (R94)."""
    return view.commit_index >= view.first_index


def is_settled(view: LeaderView) -> bool:
    """Whether the last change of the voters is committed, so that the next one may begin (R95)."""
    return view.voter_set.offset <= view.commit_index


def may_become_voter(observer: Observer) -> bool:
    """Whether an observer has the leader's log. Otherwise the quorum would wait for it (R96)."""
    return observer.is_caught_up


def next_voters(change: VoterChange, view: LeaderView) -> Voters:
    """Return all voters after ``change``.

    Raises NotControllerError before the leader has committed an entry of its term, VoterChangePendingError
    while another change is not committed, and the errors of a change that is not possible.
    """
    if not has_committed_in_term(view):
        raise NotControllerError(
            "the controller has just been elected, and has committed nothing in its term"
        )
    if not is_settled(view):
        raise VoterChangePendingError(
            f"the last change of the voters, at offset {view.voter_set.offset}, is not committed yet"
        )
    if isinstance(change, AddVoter):
        return _with_voter(change, view)
    return _without_voter(change, view.voter_set.voters)


def _with_voter(change: AddVoter, view: LeaderView) -> Voters:
    node_id, voters = change.node_id, view.voter_set.voters
    if node_id in voters:
        listed = voters[node_id].directory.hex() or "unknown"
        raise DuplicateVoterError(f"node {node_id} is a voter already, with the directory {listed}")
    observer = view.observers.get(node_id)
    if observer is None:
        raise VoterNotFoundError(
            f"node {node_id} does not follow the metadata log as an observer, so it cannot become a voter",
            hint="start it with process.roles=controller or broker,controller, and"
            " controller.quorum.bootstrap.servers",
        )
    if not is_same_directory(change.directory, observer.key.directory):
        raise InvalidVoterKeyError(
            f"node {node_id} has the directory {observer.key.directory.hex()}, not {change.directory.hex()}"
        )
    if not may_become_voter(observer):
        raise VoterNotCaughtUpError(
            f"observer {node_id} has the metadata up to offset {observer.match_index}, and the log is"
            f" committed up to {view.commit_index}: as a voter it would delay every change"
        )
    if len(voters) >= MAX_VOTERS:
        raise InvalidRequestError(f"the quorum has {len(voters)} voters, which is the limit")
    return dict(sorted({**voters, node_id: observer.key}.items()))


def _without_voter(change: RemoveVoter, voters: Voters) -> Voters:
    node_id = change.node_id
    if node_id not in voters:
        raise VoterNotFoundError(f"node {node_id} is not a voter; the voters are {sorted(voters)}")
    listed = voters[node_id].directory
    if not is_same_directory(listed, change.directory) and not is_same_directory(change.directory, listed):
        raise InvalidVoterKeyError(
            f"voter {node_id} has the directory {listed.hex()}, not {change.directory.hex()}"
        )
    if len(voters) == 1:
        raise InvalidRequestError(f"node {node_id} is the only voter, and cannot be removed")
    return {node: key for node, key in voters.items() if node != node_id}
