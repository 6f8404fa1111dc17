"""Who may vote: founders, and nobody who might have forgotten a promise."""

from __future__ import annotations

import pytest

from kafkalite.raft.standing import Standing
from kafkalite.rng import seeded_rng
from proof.raft.world import STILL, World

FOUNDERS = {1: b"one", 2: b"two", 3: b"three"}


@pytest.fixture
def standing():
    return Standing(1, [2, 3], b"one", is_voter=False, founders={})


def answer(standing, peer, seq=None, *, is_fresh=True, founders=None, still_fresh=True):
    return standing.on_answer(
        peer,
        standing.round if seq is None else seq,
        FOUNDERS[peer],
        is_fresh=is_fresh,
        founders=founders or {},
        still_fresh=still_fresh,
    )


def test_all_must_be_new(standing):
    assert answer(standing, 2) is None
    assert answer(standing, 3, is_fresh=False) is None
    assert answer(standing, 3) == FOUNDERS


def test_an_answer_of_an_earlier_round_says_nothing(standing):
    answer(standing, 2)
    standing.new_round()
    assert answer(standing, 3) is None
    assert answer(standing, 2, seq=standing.round - 1) is None
    assert answer(standing, 2) == FOUNDERS


def test_who_is_new_no_more_is_not_counted(standing):
    answer(standing, 2)
    answer(standing, 2, is_fresh=False)
    assert answer(standing, 3) is None


def test_a_node_with_a_log_founds_nothing(standing):
    answer(standing, 2)
    assert answer(standing, 3, still_fresh=False) is None


def test_a_founders_word_counts_in_any_round_and_for_this_directory_only(standing):
    assert answer(standing, 2, seq=0, is_fresh=False, founders={**FOUNDERS, 1: b"other"}) is None
    assert answer(standing, 2, seq=0, is_fresh=False, founders=FOUNDERS, still_fresh=False) == FOUNDERS


def test_a_founder_of_a_cluster_of_others_is_none_here(standing):
    assert answer(standing, 2, founders={**FOUNDERS, 4: b"four"}) is None


def test_a_voter_asks_for_nothing():
    voter = Standing(1, [2, 3], b"one", is_voter=True, founders=FOUNDERS)
    assert not voter.abstains
    assert answer(voter, 2, founders=FOUNDERS) is None
    assert voter.founders_now() is None


def test_one_node_founds_alone():
    assert Standing(1, [], b"one", is_voter=False, founders={}).founders_now() == {1: b"one"}


def voters(world):
    return [i for i, member in world.up.items() if not member.node.wall.abstains()]


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


def test_a_founder_that_missed_the_founding_votes_with_its_first_link():
    world = World(3, seeded_rng(1))
    for _ in range(2):  # ask and be answered, but let the news of the founding be lost to node 3
        world.settle(rounds=1)
    for i in (1, 2):
        world.forget(i, 3)
    world.isolate(3)
    pass_time(world, 1, 2)
    assert 3 not in voters(world) or voters(world) == [1, 2, 3]
    world.link(1, 3)
    pass_time(world)
    assert voters(world) == [1, 2, 3]


def test_two_new_disks_of_three_wait_for_ever():
    """What they had acknowledged may be lost: no majority is left that could know."""
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
