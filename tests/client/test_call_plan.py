"""The plan of a call: its steps by example, and for any errors, pauses and limits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.client.cluster.call_plan import (
    FINAL,
    RELOCATE,
    RESEND,
    CallPlan,
    CallRules,
    Dial,
    GiveUp,
    Locate,
    Pause,
    Send,
    Verdict,
    judge_broker_error,
    judge_by_class,
)
from kafkalite.client.cluster.retry import Backoff
from kafkalite.errors import (
    ConcurrentTransactionsError,
    ConnectionFailedError,
    KafkaliteError,
    MessageTooLargeError,
    NotCoordinatorError,
    NotEnoughReplicasError,
    NotLeaderOrFollowerError,
    RequestTimeoutError,
)

BACKOFF = Backoff(10, 40)
RULES = CallRules(judge_broker_error, BACKOFF, attempt_timeout_ms=100)
LOST = ConnectionFailedError("lost")


def test_the_target_is_located_dialled_and_sent_to() -> None:
    plan = CallPlan(RULES, now_ms=0, timeout_ms=1000)
    assert plan.next_step(0) == Locate()
    plan.located(3)
    assert plan.next_step(5) == Dial(3)
    plan.connected()
    assert plan.next_step(5) == Send(100)


def test_a_known_node_is_not_located() -> None:
    assert CallPlan(RULES, now_ms=0, timeout_ms=1000, node_id=7, is_located=True).next_step(0) == Dial(7)


def test_an_error_that_may_pass_pauses_and_dials_again() -> None:
    plan = CallPlan(RULES, now_ms=0, timeout_ms=1000, node_id=7, is_located=True)
    plan.failed(NotEnoughReplicasError(), 20)
    assert plan.next_step(20) == Pause(10)
    assert plan.next_step(24) == Pause(6)
    assert plan.next_step(30) == Dial(7)


def test_metadata_errors_locate_again_after_the_pause() -> None:
    plan = CallPlan(RULES, now_ms=0, timeout_ms=1000, node_id=7, is_located=True)
    plan.failed(NotLeaderOrFollowerError(), 20)
    assert (plan.next_step(20), plan.next_step(30)) == (Pause(10), Locate())


def test_a_lookup_in_the_background_starts_before_the_pause() -> None:
    rules = CallRules(judge_broker_error, BACKOFF, locates_in_background=True)
    plan = CallPlan(rules, now_ms=0, timeout_ms=1000, node_id=7, is_located=True)
    plan.failed(NotLeaderOrFollowerError(), 20)
    assert plan.next_step(20) == Locate()
    plan.located(7)
    assert (plan.next_step(20), plan.next_step(30)) == (Pause(10), Dial(7))


def test_other_errors_are_final() -> None:
    plan = CallPlan(RULES, now_ms=0, timeout_ms=1000, node_id=7, is_located=True)
    error = MessageTooLargeError()
    plan.failed(error, 20)
    assert plan.next_step(20) == plan.next_step(5000) == GiveUp(error)


def test_it_gives_up_when_the_next_pause_would_reach_the_deadline() -> None:
    plan = CallPlan(RULES, now_ms=0, timeout_ms=100, node_id=7, is_located=True)
    plan.failed(LOST, 89)
    assert plan.next_step(89) == Pause(10)
    plan = CallPlan(RULES, now_ms=0, timeout_ms=100, node_id=7, is_located=True)
    plan.failed(LOST, 90)
    assert plan.next_step(90) == GiveUp(LOST)


def test_a_plan_that_can_wake_pauses_until_its_deadline() -> None:
    plan = CallPlan(CallRules(judge_broker_error, BACKOFF, can_wake=True), now_ms=0, timeout_ms=100)
    plan.failed(LOST, 95)
    assert plan.next_step(95) == Pause(5)
    plan.wake()
    assert plan.next_step(95) == Locate()
    plan.failed(LOST, 100)
    assert plan.next_step(100) == GiveUp(LOST)


def test_the_timeout_error_is_caused_by_the_last_error() -> None:
    late = RequestTimeoutError("late")
    plan = CallPlan(RULES, now_ms=0, timeout_ms=0, timeout_error=lambda _: late)
    plan.failed(LOST, 0)
    assert plan.next_step(0) == GiveUp(late) and late.__cause__ is LOST


def test_a_free_retry_comes_at_once_and_later_failures_locate() -> None:
    rules = CallRules(judge_broker_error, BACKOFF, has_free_retry=True)
    plan = CallPlan(rules, now_ms=0, timeout_ms=1000, node_id=7, is_located=True)
    plan.failed(NotEnoughReplicasError(), 0)
    assert plan.next_step(0) == Dial(7)
    plan.failed(NotEnoughReplicasError(), 0)
    assert (plan.next_step(0), plan.next_step(10)) == (Pause(10), Locate())


def test_it_gives_up_after_its_number_of_failures() -> None:
    plan = CallPlan(CallRules(judge_broker_error, Backoff(0, 0), max_failures=2), now_ms=0, timeout_ms=1000)
    plan.failed(LOST, 0)
    assert plan.next_step(0) == Locate()
    plan.failed(LOST, 0)
    assert plan.next_step(0) == GiveUp(LOST)


def test_an_error_may_have_a_limit_of_its_own() -> None:
    def judge(_error: KafkaliteError) -> Verdict:
        return Verdict(limit_ms=50)

    plan = CallPlan(CallRules(judge, BACKOFF), now_ms=0, timeout_ms=1000, node_id=7, is_located=True)
    plan.failed(ConcurrentTransactionsError(), 30)
    assert plan.next_step(30) == Pause(10)
    plan.failed(ConcurrentTransactionsError(), 40)
    assert isinstance(plan.next_step(40), GiveUp)


def test_errors_are_judged() -> None:
    judge = judge_by_class((NotCoordinatorError,), (NotEnoughReplicasError,))
    assert judge(NotCoordinatorError()) == RELOCATE
    assert judge(NotEnoughReplicasError()) == RESEND
    assert judge(MessageTooLargeError()) == FINAL
    assert judge_broker_error(NotEnoughReplicasError()) == RESEND
    assert judge_broker_error(NotLeaderOrFollowerError()) == RELOCATE
    assert judge_broker_error(MessageTooLargeError()) == FINAL


ERRORS = st.sampled_from([NotCoordinatorError("moved"), NotEnoughReplicasError("busy"), LOST])


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(ERRORS, st.integers(0, 60), st.floats(0, 1, exclude_max=True)), max_size=60),
    st.integers(0, 500),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_it_always_ends_and_never_sends_after_its_deadline(
    failures: list[tuple[KafkaliteError, int, float]],
    timeout_ms: int,
    has_free_retry: bool,
    locates_in_background: bool,
    can_wake: bool,
) -> None:
    """Each attempt takes some time and fails; pauses are waited for. The plan gives up by its deadline,
    pauses never reach beyond it, and no step is asked for twice without progress."""
    rules = CallRules(
        judge_broker_error,
        BACKOFF,
        has_free_retry=has_free_retry,
        locates_in_background=locates_in_background,
        can_wake=can_wake,
    )
    now_ms = 0
    plan = CallPlan(rules, now_ms=now_ms, timeout_ms=timeout_ms)
    last_was_pause = False
    while True:
        step = plan.next_step(now_ms)
        assert step == plan.next_step(now_ms)
        if isinstance(step, Pause):
            assert not last_was_pause and step.duration_ms > 0 and now_ms + step.duration_ms <= timeout_ms
            now_ms += step.duration_ms
        elif isinstance(step, Locate):
            plan.located(1)
        elif isinstance(step, Dial):
            assert step.node_id == 1
            plan.connected()
        elif isinstance(step, GiveUp):
            assert not can_wake or now_ms >= timeout_ms
            return
        else:
            assert 1 <= step.timeout_ms <= max(1, timeout_ms)
            if not failures:
                return
            error, took_ms, chance = failures.pop()
            now_ms += min(took_ms, step.timeout_ms)
            plan.failed(error, now_ms, chance)
        last_was_pause = isinstance(step, Pause)
