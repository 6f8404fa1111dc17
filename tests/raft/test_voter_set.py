"""The rules by which voters change, and the history of voter sets in a log."""

from __future__ import annotations

import msgpack
import pytest

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
from kafkalite.raft.voter_set import (
    MAX_VOTERS,
    AddVoter,
    LeaderView,
    Observer,
    RemoveVoter,
    VoterHistory,
    VoterKey,
    VoterSet,
    command_of,
    next_voters,
    parsed_voters,
    voters_in,
)

ONE, TWO, THREE = (VoterKey(name, f"{name.decode()}:9093") for name in (b"one", b"two", b"three"))
PAIR = {1: ONE, 2: TWO}


def view(voters=PAIR, *, first=5, commit=9, offset=7, is_caught_up=True):
    return LeaderView(first, commit, VoterSet(offset, voters), {3: Observer(THREE, 9, is_caught_up)})


def test_voters_are_read_back_sorted():
    assert list(voters_in(command_of({2: TWO, 1: ONE})).items()) == [(1, ONE), (2, TWO)]


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        [],
        [[1, b"one"]],
        [[-1, b"one", "a:1"]],
        [[1, "one", "a:1"]],
        [[1, b"one", "a:1"], [1, b"two", "b:1"]],
        [[node, b"", ""] for node in range(MAX_VOTERS + 1)],
    ],
)
def test_malformed_voters_are_refused(values):
    with pytest.raises(RemoteProtocolError):
        parsed_voters(values)
    with pytest.raises(RemoteProtocolError):
        voters_in(b"\x04" + msgpack.packb(values))


def test_voters_that_are_no_msgpack_are_refused():
    with pytest.raises(RemoteProtocolError):
        voters_in(b"\x04\xc1")


def test_an_observer_becomes_a_voter():
    assert next_voters(AddVoter(3), view()) == {**PAIR, 3: THREE}
    assert next_voters(AddVoter(3, b"three"), view()) == {**PAIR, 3: THREE}


def test_a_voter_is_removed_dead_or_alive():
    assert next_voters(RemoveVoter(1), view()) == {2: TWO}
    assert next_voters(RemoveVoter(1, b"one"), view()) == {2: TWO}
    unknown = {1: VoterKey(b"", ""), 2: TWO}
    assert next_voters(RemoveVoter(1, b"any"), view(unknown)) == {2: TWO}


@pytest.mark.parametrize("change", [AddVoter(3), RemoveVoter(1)])
def test_r94_nothing_changes_before_an_entry_of_the_leaders_term_is_committed(change):
    with pytest.raises(NotControllerError, match="committed nothing in its term"):
        next_voters(change, view(first=10, commit=9))
    next_voters(change, view(first=9, commit=9))


@pytest.mark.parametrize("change", [AddVoter(3), RemoveVoter(1)])
def test_r95_one_change_is_uncommitted_at_a_time(change):
    with pytest.raises(VoterChangePendingError, match="at offset 10, is not committed"):
        next_voters(change, view(offset=10, commit=9))
    next_voters(change, view(offset=9, commit=9))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (AddVoter(2), DuplicateVoterError, "node 2 is a voter already, with the directory 74776f"),
        (AddVoter(4), VoterNotFoundError, "node 4 does not follow"),
        (AddVoter(3, b"other"), InvalidVoterKeyError, "has the directory 7468726565"),
        (RemoveVoter(3), VoterNotFoundError, r"the voters are \[1, 2\]"),
        (RemoveVoter(2, b"other"), InvalidVoterKeyError, "voter 2 has the directory 74776f"),
    ],
)
def test_an_impossible_change_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message) as refusal:
        next_voters(change, view())
    assert refusal.value.hint


def test_r96_an_observer_that_lags_is_refused():
    with pytest.raises(VoterNotCaughtUpError, match="observer 3 has the metadata up to offset 9"):
        next_voters(AddVoter(3), view(is_caught_up=False))


def test_the_last_voter_stays_and_their_number_is_bounded():
    with pytest.raises(InvalidRequestError, match="the only voter"):
        next_voters(RemoveVoter(1), view({1: ONE}))
    many = {100 + node: VoterKey(b"d", "") for node in range(MAX_VOTERS)}
    with pytest.raises(InvalidRequestError, match="the limit"):
        next_voters(AddVoter(3), view(many))


def test_r93_a_history_follows_appends_and_truncations():
    history = VoterHistory()
    assert (history.latest, history.former, history.at(99)) == (None, None, None)
    history.append(4, {1: ONE})
    history.append(9, PAIR)
    assert history.latest == VoterSet(9, PAIR)
    assert history.former == history.at(8) == VoterSet(4, {1: ONE})
    assert history.at(3) is None
    history.truncate(10)
    assert history.latest == VoterSet(9, PAIR)
    history.truncate(9)
    assert history.latest == VoterSet(4, {1: ONE})
    history.append(4, PAIR)  # another leader's entry at the same offset
    assert (history.latest, history.former) == (VoterSet(4, PAIR), None)


def test_r93_a_snapshot_is_the_base_of_later_entries():
    history = VoterHistory()
    history.append(4, {1: ONE})
    history.append(9, PAIR)
    history.rebase(VoterSet(4, {1: ONE}))
    assert (history.latest, history.former) == (VoterSet(9, PAIR), VoterSet(4, {1: ONE}))
    history.rebase(VoterSet(9, PAIR))
    assert (history.latest, history.former) == (VoterSet(9, PAIR), None)


def test_r97_unknown_stands_for_any_directory():
    voters = VoterSet(1, {1: ONE, 2: VoterKey(b"", "")})
    assert voters.lists(1, b"one") and not voters.lists(1, b"other")
    assert voters.lists(2, b"any") and not voters.lists(3, b"one")
