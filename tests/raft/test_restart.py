"""What a voter that has started learns from the others before it votes (R59)."""

from __future__ import annotations

from kafkalite.raft.restart import COPY_WAIT_FACTOR, LogEnd, Restart

LOW, HIGH = LogEnd(1, 9), LogEnd(2, 3)


def started(*others: int) -> Restart:
    return Restart(others, started=100.0, patience_s=1.0)


def test_it_promises_nothing_before_all_others_have_responded():
    restart = started(2, 3)
    assert not restart.may_promise(100.0)
    restart.on_response(2, LOW, 100.1)
    assert not restart.may_promise(100.1)
    restart.on_response(3, LOW, 100.2)
    assert restart.may_promise(100.2)


def test_a_majority_suffices_when_the_patience_is_over():
    restart = started(2, 3, 4, 5)
    restart.on_response(2, LOW, 100.9)
    assert not restart.may_promise(101.0)
    restart.on_response(3, LOW, 101.0)
    assert not restart.may_promise(100.99)
    assert restart.may_promise(101.0)


def test_a_voter_in_a_copied_directory_waits_longer_for_each_other_voter():
    restart = Restart((2, 3), started=100.0, patience_s=1.0, is_copy=True)
    for now in (101.0, 100.0 + COPY_WAIT_FACTOR):
        restart.on_response(2, LOW, now)
        assert restart.may_promise(now) is (now == 100.0 + COPY_WAIT_FACTOR)
    restart = Restart((2, 3), started=100.0, patience_s=1.0, is_copy=True)
    restart.on_response(2, LOW, 100.1)
    restart.on_response(3, LOW, 100.1)
    assert restart.may_promise(100.1)


def test_an_old_response_and_one_of_an_ended_link_do_not_count():
    restart = started(2)
    restart.on_response(2, LOW, 100.0)
    assert restart.may_promise(101.0) and not restart.may_promise(101.01)
    restart.on_response(2, LOW, 102.0)
    assert restart.may_promise(102.0) and restart.has_responded(2)
    restart.forget(2)
    assert not restart.may_promise(102.0) and not restart.has_responded(2)


def test_a_candidate_needs_the_log_of_each_voter_that_responds():
    restart = started(2, 3)
    restart.on_response(2, HIGH, 100.0)
    restart.on_response(3, LOW, 100.0)
    assert restart.may_elect(HIGH, 100.0) and not restart.may_elect(LOW, 100.0)
    assert not restart.may_elect(LogEnd(2, 2), 100.0) and restart.may_elect(LogEnd(2, 4), 100.0)
    assert restart.may_elect(LOW, 101.01)  # the voter with more no longer responds


def test_it_is_over_once_the_voter_has_caught_up_and_at_once_without_others():
    restart = started(2, 3)
    restart.on_response(2, HIGH, 100.0)
    restart.end()
    for over in (restart, started()):
        assert over.is_over and over.may_promise(100.0) and over.may_elect(LOW, 100.0)
