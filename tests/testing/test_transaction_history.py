"""The checker of transactions finds each anomaly, and none in a good history."""

from __future__ import annotations

from proof.histories.transaction_history import (
    ABORTED,
    COMMITTED,
    OPEN,
    UNKNOWN,
    TransactionHistory,
    TransformHistory,
    check_transactions,
    check_transform,
)


def history(**outcomes: str) -> TransactionHistory:
    """A transaction of two values for each name."""
    made = TransactionHistory()
    for name, outcome in outcomes.items():
        transaction = made.begin("c", name, outcome)
        for number in range(2):
            made.write(transaction, f"{name}/{number}")
    return made


def kinds(made: TransactionHistory) -> list[str]:
    return [anomaly.kind for anomaly in check_transactions(made)]


def test_complete_transactions_have_no_anomaly() -> None:
    made = history(a=COMMITTED, b=ABORTED, c=UNKNOWN, d=UNKNOWN, e=OPEN)
    made.read(["a/0"])
    made.read_finally(["a/0", "a/1", "c/0", "c/1"])
    assert kinds(made) == []
    assert made.committed == 1


def test_a_torn_transaction() -> None:
    made = history(a=UNKNOWN)
    made.read_finally(["a/1"])
    assert kinds(made) == ["torn"]


def test_a_lost_transaction() -> None:
    made = history(a=COMMITTED, b=UNKNOWN)
    made.read(["b/0"])
    made.read_finally([])
    assert kinds(made) == ["lost", "lost"]


def test_an_aborted_transaction_that_was_read() -> None:
    made = history(a=ABORTED, b=OPEN)
    made.read(["a/0", "b/1"])
    assert kinds(made) == ["aborted-read", "aborted-read"]


def test_a_value_that_occurs_twice() -> None:
    made = history(a=COMMITTED)
    made.read_finally(["a/0", "a/1", "a/1"])
    assert kinds(made) == ["duplicate"]


def test_a_zombie_that_commits() -> None:
    made = history(a=COMMITTED)
    made.transactions[0].is_zombie = True
    assert kinds(made) == ["zombie"]


def test_a_value_read_before_its_commit_was_requested() -> None:
    made = history(a=OPEN)
    made.read_at(("t", 0, 0), "a/0")
    made.transactions[0].outcome = COMMITTED
    made.read_finally_at({("t", 0, 0): "a/0", ("t", 0, 1): "a/1"})
    assert kinds(made) == ["undecided-read"]


def test_a_value_read_that_is_a_different_record_at_the_end() -> None:
    made = history(a=UNKNOWN, b=UNKNOWN)
    made.read_at(("t", 0, 0), "a/0")
    made.read_at(("t", 0, 0), "b/0")
    made.read_finally_at({("t", 0, 0): "b/0", ("t", 0, 1): "b/1", ("t", 0, 2): "a/0", ("t", 0, 3): "a/1"})
    assert kinds(made) == ["vanished", "vanished"]


def test_a_job_wrote_one_record_for_each_input() -> None:
    made = TransformHistory({("t", 0): [0, 1], ("t", 1): [0]}, {0: [("t", 0, 0), ("t", 1, 0), ("t", 0, 1)]})
    assert check_transform(made) == []


def test_a_job_that_lost_repeated_and_reordered() -> None:
    made = TransformHistory({("t", 0): [0, 1, 2]}, {0: [("t", 0, 1), ("t", 0, 0), ("t", 0, 1), ("t", 0, 9)]})
    found = [anomaly.kind for anomaly in check_transform(made)]
    assert found == ["order", "duplicate", "missing", "unexpected"]
