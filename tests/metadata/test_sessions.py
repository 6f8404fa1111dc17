"""Sessions: who counts as alive, and how soon it is noticed that a broker does not (R23)."""

from __future__ import annotations

from kafkalite.metadata.sessions import LATE_CHECK_MS, BrokerSessions

TIMEOUT_MS = 3_000


def sessions_at(now_ms=0, *node_ids):
    sessions = BrokerSessions(TIMEOUT_MS)
    for node_id in node_ids:
        sessions.on_heartbeat(node_id, 7, 40, now_ms)
    return sessions


def first_expiry(sessions, until_ms, *, since_ms=0):
    """When a check every 100 ms first finds an expired session."""
    for now_ms in range(since_ms, until_ms, 100):
        expired = sessions.expired(now_ms)
        if expired:
            return now_ms, expired
    return None


def test_r23_a_session_lasts_its_timeout_from_the_last_heartbeat():
    sessions = sessions_at(0, 1, 2)
    sessions.on_heartbeat(2, 7, 41, 1_000)
    assert first_expiry(sessions, 9_000) == (TIMEOUT_MS, [(1, 7)])
    assert first_expiry(sessions, 9_000, since_ms=TIMEOUT_MS)[1] == [(1, 7)]  # until it is ended
    sessions.end(1)
    assert first_expiry(sessions, 9_000, since_ms=TIMEOUT_MS) == (1_000 + TIMEOUT_MS, [(2, 7)])


def test_r23_a_closed_connection_does_not_end_it():
    sessions = sessions_at(0, 1)
    sessions.on_disconnect(1)
    sessions.on_disconnect(9)
    assert sessions.unconnected() == [1]
    assert not sessions.is_alive(1, 7, 200)
    assert first_expiry(sessions, 9_000) == (TIMEOUT_MS, [(1, 7)])


def test_r23_a_refused_connection_after_a_closed_one_ends_it_at_once():
    sessions = sessions_at(0, 1, 2)
    sessions.on_disconnect(1)
    sessions.on_refused(1, 6, 200)  # an earlier process
    sessions.on_refused(2, 7, 200)  # still connected
    sessions.on_refused(9, 7, 200)
    assert sessions.expired(200) == []
    sessions.on_refused(1, 7, 200)
    assert sessions.expired(200) == [(1, 7)]


def test_a_refusal_never_lengthens_it():
    sessions = sessions_at(0, 1)
    sessions.on_disconnect(1)
    sessions.on_refused(1, 7, TIMEOUT_MS + 100)
    assert sessions.expired(TIMEOUT_MS) == [(1, 7)]


def test_a_heartbeat_on_another_connection_renews_the_session():
    sessions = sessions_at(0, 1)
    sessions.on_disconnect(1)
    sessions.on_heartbeat(1, 7, 41, 400)
    sessions.on_refused(1, 7, 400)
    assert sessions.unconnected() == []
    assert sessions.is_alive(1, 7, 400)
    assert first_expiry(sessions, 9_000) == (400 + TIMEOUT_MS, [(1, 7)])


def test_an_expected_broker_has_a_whole_session():
    sessions = BrokerSessions(TIMEOUT_MS)
    sessions.expect(1, 7, 0)
    sessions.expect(1, 7, 500)  # asked at every check; the first one counts
    assert sessions.unconnected() == [1]
    assert not sessions.is_alive(1, 7, 0)
    assert first_expiry(sessions, 9_000) == (TIMEOUT_MS, [(1, 7)])
    sessions.on_heartbeat(2, 7, 40, 0)
    sessions.expect(2, 7, 0)
    assert sessions.is_alive(2, 7, 10)
    sessions.expect(2, 8, 10)  # another process: the session of the one before is not its own
    assert not sessions.is_alive(2, 8, 10)


def test_only_the_process_of_that_epoch_is_alive():
    sessions = sessions_at(0, 1)
    assert sessions.is_alive(1, 7, 10)
    assert not sessions.is_alive(1, 6, 10)
    assert not sessions.is_alive(2, 7, 10)
    assert not sessions.is_alive(1, 7, TIMEOUT_MS)


def test_a_controller_that_was_paused_fences_no_broker_for_that_time():
    sessions = sessions_at(0, 1)
    assert sessions.expired(100) == []
    stopped_ms = 60_000
    assert sessions.expired(100 + stopped_ms) == []
    assert first_expiry(sessions, 99_000, since_ms=100 + stopped_ms) == (TIMEOUT_MS + stopped_ms, [(1, 7)])
    sessions = sessions_at(0, 1)
    sessions.expired(TIMEOUT_MS - LATE_CHECK_MS)
    assert sessions.expired(TIMEOUT_MS) == [(1, 7)]  # this is not late


def test_a_controller_that_is_not_active_any_more_forgets_them():
    sessions = sessions_at(0, 1)
    sessions.expired(0)
    sessions.clear()
    assert sessions.expired(50_000) == []


def test_replayed_offsets_are_compared():
    sessions = sessions_at(0, 1, 2)
    assert sessions.have_replayed(frozenset({1, 2}), 40)
    assert not sessions.have_replayed(frozenset({1, 2}), 41)
    assert not sessions.have_replayed(frozenset({1, 3}), 0)
    assert sessions.have_replayed(frozenset(), 99)
