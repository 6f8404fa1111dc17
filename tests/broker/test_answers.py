"""Pending: resolved once, cancelled quietly, releases what it held."""

from __future__ import annotations

import pytest

from kafkalite.broker.server.responses import Pending, Reply, Response


def test_the_continuation_hears_of_an_answer_before_and_after_it_is_there() -> None:
    heard: list[Response] = []
    early = Pending()
    early.then(heard.append)
    early.resolve(Reply("early"))
    late = Pending()
    late.resolve(Reply("late"))
    late.then(heard.append)
    assert heard == [Reply("early"), Reply("late")]


def test_only_the_first_answer_counts() -> None:
    heard: list[Response] = []
    pending = Pending()
    pending.then(heard.append)
    pending.resolve(Reply(1))
    pending.resolve(Reply(2))
    pending.cancel()
    assert heard == [Reply(1)]


def test_a_cancelled_answer_is_never_given() -> None:
    heard: list[Response] = []
    released: list[str] = []
    pending = Pending(lambda: released.append("released"))
    pending.then(heard.append)
    pending.cancel()
    pending.cancel()
    pending.resolve(Reply(1))
    assert heard == []
    assert released == ["released"]
    with pytest.raises(AssertionError, match="cancelled"):
        pending.then(heard.append)


def test_resolving_releases_before_it_tells() -> None:
    order: list[str] = []
    pending = Pending(lambda: order.append("released"))
    pending.then(lambda _answer: order.append("told"))
    pending.resolve(Reply(1))
    assert order == ["released", "told"]
