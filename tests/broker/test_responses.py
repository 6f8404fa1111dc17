"""Pending responses: resolved once, with many results, or held until an update or a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kafkalite.broker.server.responses import HeldResponse, Pending, PendingResults, Reply, Response
from kafkalite.limits import MAX_WAIT_MS


def test_the_continuation_is_called_now_or_later() -> None:
    heard: list[Response] = []
    early = Pending()
    early.then(heard.append)
    early.resolve(Reply("early"))
    late = Pending()
    late.resolve(Reply("late"))
    late.then(heard.append)
    assert heard == [Reply("early"), Reply("late")]


def test_only_the_first_response_counts() -> None:
    heard: list[Response] = []
    pending = Pending()
    pending.then(heard.append)
    pending.resolve(Reply(1))
    pending.resolve(Reply(2))
    pending.cancel()
    assert heard == [Reply(1)]


def test_a_cancelled_response_is_never_sent() -> None:
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


def test_resolving_releases_before_it_calls_the_continuation() -> None:
    order: list[str] = []
    pending = Pending(lambda: order.append("released"))
    pending.then(lambda _answer: order.append("told"))
    pending.resolve(Reply(1))
    assert order == ["released", "told"]


class FakeWaiters:
    """Registers waits for offsets; ``reach`` calls back for all that are not cancelled."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, Callable[[Exception | None], None]]] = []

    def __call__(self, _key: object, _offset: int, callback: Callable[[Exception | None], None]) -> Any:
        waiter = type("Waiter", (), {"is_cancelled": False})()
        self.registered.append((waiter, callback))
        return waiter

    def reach(self, error: Exception | None = None) -> None:
        for waiter, callback in self.registered:
            if not waiter.is_cancelled:
                callback(error)


def a_response(*results: str) -> PendingResults:
    return PendingResults(
        asyncio.get_running_loop(), list(results), lambda result, error: f"{result}: {error}", Reply
    )


async def test_a_response_is_sent_with_its_last_result() -> None:
    wait = FakeWaiters()
    response = a_response("known", "expected", "waits")
    response.expect(1)
    response.wait(2, wait, "t-0", 5)
    assert not response.begin(60_000, "late").is_done
    wait.reach()
    assert not response.is_done
    assert response.is_expected(1)
    response.set(1, "set")
    assert response.response == Reply(["known", "set", "waits"])


async def test_results_that_are_all_known_wait_for_nothing() -> None:
    response = a_response("one")
    assert not response.is_done
    assert response.begin(60_000, "late").response == Reply(["one"])


async def test_an_error_takes_the_place_of_a_result() -> None:
    wait = FakeWaiters()
    response = a_response("a", "b")
    response.expect(0)
    response.wait(1, wait, "t-0", 5)
    response.begin(60_000, "late")
    response.set_error(0, ValueError("no"))
    wait.reach(ValueError("gone"))
    assert response.response == Reply(["a: no", "b: gone"])


async def test_open_items_fail_at_the_deadline_and_later_results_are_ignored() -> None:
    wait = FakeWaiters()
    response = a_response("a", "b")
    response.expect(0)
    response.wait(1, wait, "t-0", 5)
    done = asyncio.get_running_loop().create_future()
    response.begin(1, "late after %d ms", "not asked after %d ms").then(done.set_result)
    results = (await done).message
    assert "not asked after 1 ms" in results[0]
    assert "late after 1 ms" in results[1]
    response.set(0, "set")
    wait.reach()
    assert response.response == Reply(results)
    assert wait.registered[0][0].is_cancelled


async def test_a_client_that_is_gone_withdraws_the_waits() -> None:
    wait = FakeWaiters()
    response = a_response("a")
    response.wait(0, wait, "t-0", 5)
    response.begin(60_000, "late")
    response.cancel()
    assert wait.registered[0][0].is_cancelled
    assert not response.is_expected(0)


class Subject:
    """Something that a held response depends on."""

    def __init__(self, wait_ms: int = 60_000) -> None:
        self.state: Response | Pending = Reply("before")
        self.asked = 0
        self.held = HeldResponse(
            asyncio.get_running_loop(), wait_ms, self.ask, lambda response: response == Reply("due")
        )

    def ask(self) -> Response | Pending:
        self.asked += 1
        return self.state


async def test_a_response_is_asked_for_again_once_for_all_updates_of_a_turn() -> None:
    subject = Subject()
    subject.held.offer(subject.ask())
    for _ in range(3):
        subject.held.update()
    assert subject.asked == 1
    await asyncio.sleep(0)
    assert subject.asked == 2
    assert not subject.held.is_done
    subject.state = Reply("due")
    subject.held.update()
    await asyncio.sleep(0)
    assert subject.held.response == Reply("due")
    subject.held.update()
    await asyncio.sleep(0)
    assert subject.asked == 3


class RecordingLoop:
    """Records the seconds of each timer."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    def call_later(self, delay_s: float, _callback: object) -> Any:
        self.delays_s.append(delay_s)


@pytest.mark.parametrize("wait_ms", [2**31, 2**63 - 1])
def test_s25_no_request_waits_longer_than_the_limit(wait_ms: int) -> None:
    loop: Any = RecordingLoop()
    HeldResponse(loop, wait_ms, lambda: None).offer(None)
    results = PendingResults(loop, ["a"], lambda result, _error: result, Reply)
    results.expect(0)
    results.begin(wait_ms, "late after %d ms")
    assert loop.delays_s == [MAX_WAIT_MS / 1000] * 2


async def test_a_response_that_is_due_is_never_held() -> None:
    subject = Subject()
    subject.held.offer(Reply("due"))
    assert subject.held.response == Reply("due")


async def test_at_the_deadline_the_response_of_that_moment_is_sent() -> None:
    subject = Subject(wait_ms=1)
    subject.held.offer(Reply("first"))
    done = asyncio.get_running_loop().create_future()
    subject.held.then(done.set_result)
    assert await done == Reply("before")
    assert subject.held.is_over


async def test_no_time_to_wait_sends_what_is_offered() -> None:
    subject = Subject(wait_ms=0)
    subject.held.offer(Reply("first"))
    assert subject.held.response == Reply("first")


async def test_an_update_while_the_response_is_pending_asks_again_when_it_is_known() -> None:
    subject = Subject()
    pending = Pending()
    subject.held.offer(pending)
    subject.state = Reply("due")
    subject.held.update()
    await asyncio.sleep(0)
    assert subject.asked == 0
    pending.resolve(Reply("outdated"))
    assert subject.held.response == Reply("due")


async def test_a_response_that_must_be_sent_while_it_is_pending_is_sent_when_it_is_known() -> None:
    subject = Subject()
    pending = Pending()
    subject.held.offer(pending)
    subject.held.finish()
    assert not subject.held.is_done
    pending.resolve(Reply("late"))
    assert subject.held.response == Reply("late")


async def test_a_cancelled_response_is_not_asked_for_again() -> None:
    subject = Subject()
    subject.held.offer(Reply("first"))
    subject.held.update()
    subject.held.cancel()
    await asyncio.sleep(0)
    subject.held.finish()
    assert subject.asked == 0
