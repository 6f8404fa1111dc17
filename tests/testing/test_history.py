"""The checker finds each anomaly that is put into a good history, and only that one."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from kafkalite.model import TopicPartition
from proof.histories.history import History, Poll, Send, check

KEY = TopicPartition("t", 0)
RECORDS = 12


def good() -> History:
    """Return two producers, one of them with unknown outcomes; two consumers; a final read."""
    history = History()
    values = [f"{'ab'[number % 2]}{number}" for number in range(RECORDS)]
    for number, value in enumerate(values):
        send = history.send(Send(value[0], *KEY, value, number, began_ms=number))
        if number in {3, 7}:
            history.info(send, "timed out", number + 5)
        else:
            history.ok(send, number if number < 7 else number - 1, number + 5)
    failed = history.send(Send("a", *KEY, "never", RECORDS, began_ms=50))
    history.fail(failed, "too large", 51)
    log = [
        value for number, value in enumerate(values) if number != 7
    ]  # one unknown send was written, one was not
    records = list(enumerate(log))
    for session in ("c1", "c2"):
        for start in range(0, len(records), 3):
            history.poll(Poll(session, *KEY, at_ms=100 + start, records=records[start : start + 3]))
    history.read_finally(KEY, records)
    return history


def test_a_good_history_passes() -> None:
    assert check(good()) == []


def _lose(history: History) -> None:
    history.polls.clear()
    history.finals[KEY] = [each for each in history.finals[KEY] if each[0] != 5]


def _cut_the_end(history: History) -> None:
    history.polls.clear()
    history.finals[KEY] = history.finals[KEY][:-2]


def _replace_at_an_offset(history: History) -> None:
    history.polls.clear()
    extra = history.send(Send("b", *KEY, "other", 99, began_ms=1, acks=1, is_idempotent=False))
    history.info(extra, "", 2)
    history.poll(Poll("c9", *KEY, at_ms=1, records=[(4, "other")]))


def _acknowledge_elsewhere(history: History) -> None:
    history.sends[2].offset = 4


def _duplicate(history: History) -> None:
    records = history.finals[KEY]
    history.finals[KEY] = [*records, (len(records), records[2][1])]


def _invent(history: History) -> None:
    history.finals[KEY].append((RECORDS, "nobody's"))


def _read_a_failed_send(history: History) -> None:
    history.finals[KEY].append((RECORDS, "never"))


def _vanish(history: History) -> None:
    extra = history.send(Send("b", *KEY, "gone", 99, began_ms=1))
    history.info(extra, "", 2)
    history.poll(Poll("c9", *KEY, at_ms=1, records=[(RECORDS, "gone")]))


def _read_again(history: History) -> None:
    history.poll(Poll("c1", *KEY, at_ms=900, records=[history.finals[KEY][3]]))


def _skip(history: History) -> None:
    del history.polls[1]


def _swap(history: History) -> None:
    history.polls.clear()
    records = history.finals[KEY]
    records[2], records[8] = (2, records[8][1]), (8, records[2][1])
    for send in history.sends:
        if send.outcome == "ok":
            send.offset = None


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (_lose, "lost-write"),
        (_cut_the_end, "unseen"),
        (_replace_at_an_offset, "inconsistent-offset"),
        (_acknowledge_elsewhere, "inconsistent-offset"),
        (_duplicate, "duplicate"),
        (_invent, "unexpected"),
        (_read_a_failed_send, "unexpected"),
        (_vanish, "vanished"),
        (_read_again, "nonmonotonic-poll"),
        (_skip, "poll-skip"),
        (_swap, "nonmonotonic-send"),
    ],
)
def test_an_anomaly_is_found(break_it: Callable[[History], None], kind: str) -> None:
    also = {"duplicate": {"nonmonotonic-send"}, "inconsistent-offset": {"vanished"}}.get(kind, set())
    history = good()
    break_it(history)
    found = {anomaly.kind for anomaly in check(history)}
    assert kind in found
    assert found <= {kind, *also}, "one thing is wrong, and not many"


def test_an_acknowledgement_of_the_leader_alone_may_be_lost() -> None:
    history = good()
    history.sends[5].acks = 1
    _lose(history)
    assert check(history) == []


def test_an_unread_partition_proves_nothing() -> None:
    history = good()
    history.finals.clear()
    assert check(history) == []


def test_a_history_survives_dump_and_load() -> None:
    history = good()
    file = io.StringIO()
    history.dump(file)
    again = History.load(file.getvalue().splitlines())
    assert again.sends == history.sends
    assert again.polls == history.polls
    assert again.finals == history.finals


def test_many_anomalies_are_counted_and_cut() -> None:
    history = good()
    history.finals[KEY] += [(offset, f"x{offset}") for offset in range(100, 200)]
    assert len(check(history)) == 20


def test_deleted_records_are_not_missing() -> None:
    history = good()
    records = history.finals[KEY][5:]
    history.read_finally(KEY, records, start=records[0][0])
    assert check(history) == []
    history.starts[KEY] = 0
    assert {anomaly.kind for anomaly in check(history)} == {"lost-write", "vanished"}
