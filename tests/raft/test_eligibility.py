"""Which nodes may vote: bootstrap voters, and no node that might have forgotten a promise."""

from __future__ import annotations

import pytest

from kafkalite.raft.eligibility import Eligibility
from kafkalite.rng import seeded_rng
from proof.raft.world import STILL, World

VOTERS = {1: b"one", 2: b"two", 3: b"three"}


@pytest.fixture
def eligibility():
    return Eligibility(1, [2, 3], b"one", is_voter=False, bootstrap_voters={})


def answer(eligibility, peer, seq=None, *, is_new=True, bootstrap_voters=None, is_log_shared=True):
    return eligibility.on_response(
        peer,
        eligibility.round if seq is None else seq,
        VOTERS[peer],
        is_new=is_new,
        bootstrap_voters=bootstrap_voters or {},
        is_log_shared=is_log_shared,
    )


def test_all_must_be_new(eligibility):
    assert answer(eligibility, 2) is None
    assert answer(eligibility, 3, is_new=False) is None
    assert answer(eligibility, 3) == VOTERS


def test_a_response_of_an_earlier_round_does_not_count(eligibility):
    answer(eligibility, 2)
    eligibility.new_round()
    assert answer(eligibility, 3) is None
    assert answer(eligibility, 2, seq=eligibility.round - 1) is None
    assert answer(eligibility, 2) == VOTERS


def test_a_directory_that_is_no_longer_new_does_not_count(eligibility):
    answer(eligibility, 2)
    answer(eligibility, 2, is_new=False)
    assert answer(eligibility, 3) is None


def test_a_node_with_a_log_founds_nothing(eligibility):
    answer(eligibility, 2)
    assert answer(eligibility, 3, is_log_shared=False) is None


def test_a_bootstrap_voters_word_counts_in_any_round_for_this_directory_only(eligibility):
    assert answer(eligibility, 2, seq=0, is_new=False, bootstrap_voters={**VOTERS, 1: b"other"}) is None
    assert answer(eligibility, 2, seq=0, is_new=False, bootstrap_voters=VOTERS, is_log_shared=False) == VOTERS


def test_a_bootstrap_voter_of_another_cluster_is_none_here(eligibility):
    assert answer(eligibility, 2, bootstrap_voters={**VOTERS, 4: b"four"}) is None


def test_a_first_start_names_the_voters_that_are_not_there(eligibility):
    assert eligibility.missing_at_first_start([]) == [], "its disk may have been replaced"
    assert eligibility.missing_at_first_start([2]) == [], "it has not responded"
    answer(eligibility, 2)
    assert eligibility.missing_at_first_start([2]) == [3]
    assert eligibility.missing_at_first_start([2, 3]) == []
    answer(eligibility, 2, is_new=False)
    assert eligibility.missing_at_first_start([2]) == [], "no first start"
    eligibility.become_voter(VOTERS)
    assert eligibility.missing_at_first_start([2]) == []


def test_a_voter_asks_for_nothing():
    voter = Eligibility(1, [2, 3], b"one", is_voter=True, bootstrap_voters=VOTERS)
    assert not voter.abstains
    assert answer(voter, 2, bootstrap_voters=VOTERS) is None
    assert voter.bootstrap_now(is_log_shared=True) is None


def test_a_single_node_bootstraps_alone():
    assert Eligibility(1, [], b"one", is_voter=False, bootstrap_voters={}).bootstrap_now(
        is_log_shared=True
    ) == {1: b"one"}


def voters(world):
    return [i for i, member in world.up.items() if not member.abstains]


def pass_time(world, *ids):
    for _ in range(4):
        world.settle(*ids)
        world.clock[0] += STILL.heartbeat_ms / 1000 + 1


def test_a_cluster_does_not_begin_before_all_its_voters_are_there():
    world = World(3, seeded_rng(1))
    world.kill(3)
    pass_time(world)
    assert voters(world) == []
    world.restart(3)
    pass_time(world)
    assert voters(world) == [1, 2, 3]
    assert world.leaders() == [(1, 1)]


def test_a_bootstrap_voter_that_missed_the_bootstrap_votes_after_its_first_link():
    world = World(3, seeded_rng(1))
    for _ in range(2):  # all respond, but node 3 does not receive the result of the bootstrap
        world.settle(rounds=1)
    for i in (1, 2):
        world.forget(i, 3)
    world.isolate(3)
    pass_time(world, 1, 2)
    assert 3 not in voters(world) or voters(world) == [1, 2, 3]
    world.link(1, 3)
    pass_time(world)
    world.outwait()
    assert voters(world) == [1, 2, 3]


def test_two_new_disks_of_three_wait_forever():
    """Their acknowledged entries may be lost, and no majority is left that has them."""
    world = World(3, seeded_rng(1))
    world.found()
    for i in (2, 3):
        world.wipe(i)
        world.start(i)
    world.link_all()
    for _ in range(5):
        pass_time(world)
        world.clock[0] += 3 * STILL.election_timeout_ms / 1000
    assert voters(world) == [1]


def test_a_new_disk_among_five_waits_until_no_candidacy_can_count_its_old_vote():
    world = World(5, seeded_rng(1))
    world.found()
    world.wipe(5)
    world.start(5)
    world.link_all()
    pass_time(world)
    assert 5 not in voters(world)
    for _ in range(5):
        world.clock[0] += STILL.election_timeout_ms / 1000
        pass_time(world)
    assert voters(world) == [1, 2, 3, 4, 5]
