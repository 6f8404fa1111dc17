"""Decides the steps of one request: locate the target, dial, send, pause, give up. Pure.

The *target* of a request is any broker, one node, the leaders of partitions, a coordinator, or the
controller. ``CallPlan`` returns the next step; the caller takes it and reports the result, in a loop of this
form::

    plan = CallPlan(rules, now_ms=now_ms(), timeout_ms=30_000)
    while True:
        step = plan.next_step(now_ms())
        if isinstance(step, GiveUp):
            raise step.error
        try:
            match step:
                case Locate():
                    plan.located(find_the_node())
                case Dial():
                    connection = open_connection(step.node_id)
                    plan.connected()
                case Pause():
                    sleep(step.duration_ms)
                    plan.wake()
                case Send():
                    return connection.call(request, step.timeout_ms)
        except KafkaliteError as error:
            plan.failed(error, now_ms(), chance())

``call_driver.drive`` is this loop on asyncio. ``CallRules`` define for each kind of target which errors are
retried, and the pauses between attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kafkalite.client.cluster.retry import Backoff, is_retriable, needs_metadata
from kafkalite.errors import KafkaliteError


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request is retried after an error, where, and for how long."""

    is_final: bool = False  #: no retry can succeed
    must_locate: bool = False  #: another node may be the target now
    limit_ms: int | None = None  #: retry only this long after the plan's start; None: until its deadline


FINAL: Final = Verdict(is_final=True)
RESEND: Final = Verdict()
RELOCATE: Final = Verdict(must_locate=True)

Judge: TypeAlias = Callable[[KafkaliteError], Verdict]


def judge_broker_error(error: KafkaliteError) -> Verdict:
    """Return the verdict for requests to any broker, to one node, and to the leaders of partitions.

    Errors with Kafka's retriable codes, failed connections and timeouts are retried. If ``needs_metadata``
    is True for the error, the target is located again.
    """
    if not is_retriable(error):
        return FINAL
    return RELOCATE if needs_metadata(error) else RESEND


def judge_by_class(
    moved: tuple[type[KafkaliteError], ...], passing: tuple[type[KafkaliteError], ...] = ()
) -> Judge:
    """Return a judge that retries errors in ``moved`` and ``passing``; all others are final.

    Before the retry of an error in ``moved``, the target is located again.
    """

    def judge(error: KafkaliteError) -> Verdict:
        if isinstance(error, moved):
            return RELOCATE
        return RESEND if isinstance(error, passing) else FINAL

    return judge


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules for retrying one kind of request."""

    judge: Judge
    backoff: Backoff
    #: The time limit of a single attempt. None: until the plan's deadline.
    attempt_timeout_ms: int | None = None
    #: Give up after this many failures. None: only the deadline ends the plan.
    max_failures: int | None = None
    #: Retry the first failure without a pause, because often the broker has closed an idle connection. Locate
    #: the target again after every later failure.
    has_free_retry: bool = False
    #: ``locate`` only starts a lookup that continues in the background, so it precedes the pause.
    locates_in_background: bool = False
    #: ``wake`` can end a pause, so a pause may last until the deadline. Otherwise the plan gives up as soon
    #: as the next pause would reach the deadline.
    can_wake: bool = False


@dataclass(frozen=True, slots=True)
class Locate:
    """The caller must find the target's node and then call ``CallPlan.located``."""


@dataclass(frozen=True, slots=True)
class Dial:
    """The caller must open or reuse a connection to the target and then call ``CallPlan.connected``."""

    node_id: int | None  #: None if the target is not exactly one node


@dataclass(frozen=True, slots=True)
class Send:
    """The caller must send the request and wait for the response at most ``timeout_ms`` (1 or more)."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The caller must wait for ``duration_ms`` before the next step. ``CallPlan.wake`` ends the pause."""

    duration_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller must raise ``error``."""

    error: KafkaliteError


Step: TypeAlias = Locate | Dial | Send | Pause | GiveUp

_LOCATE: Final = Locate()


class CallPlan:
    """Decides the steps of one request, including its retries.

    ``node_id`` is the target's node, if known. If ``is_located``, the first step is ``Dial`` instead of
    ``Locate``. When time or attempts have run out, ``timeout_error`` converts the last error into the error
    to raise; without it, the last error is raised. Invariant: after a ``GiveUp``, ``next_step`` always
    returns the same ``GiveUp``.
    """

    def __init__(
        self,
        rules: CallRules,
        *,
        now_ms: int,
        timeout_ms: int,
        node_id: int | None = None,
        is_located: bool = False,
        timeout_error: Callable[[KafkaliteError], KafkaliteError] | None = None,
    ) -> None:
        self.node_id = node_id
        self.failures = 0
        self._rules = rules
        self._timeout_error = timeout_error
        self._started_ms = now_ms
        self._deadline_ms = now_ms + timeout_ms
        self._is_located = is_located
        self._is_connected = False
        self._not_before_ms = now_ms
        self._give_up: GiveUp | None = None

    def __repr__(self) -> str:
        return f"<CallPlan to node {self.node_id}, {self.failures} failures>"

    def next_step(self, now_ms: int) -> Step:
        """Return the next step.

        Until the caller reports the result of a Locate, Dial or Send, each call returns this kind of step
        again. The step after a Pause is returned when its time has passed, or after ``wake``.
        """
        if self._give_up is not None:
            return self._give_up
        if not self._is_located and self._rules.locates_in_background:
            return _LOCATE
        if now_ms < self._not_before_ms:
            return Pause(self._not_before_ms - now_ms)
        if not self._is_located:
            return _LOCATE
        if not self._is_connected:
            return Dial(self.node_id)
        left_ms = self._deadline_ms - now_ms
        if self._rules.attempt_timeout_ms is not None:
            left_ms = min(left_ms, self._rules.attempt_timeout_ms)
        return Send(max(1, left_ms))

    def located(self, node_id: int | None = None) -> None:
        """Record that the target is at ``node_id``. None means that it is not a single node."""
        self.node_id = node_id
        self._is_located = True

    def connected(self) -> None:
        """Record that a connection to the target is open."""
        self._is_connected = True

    def wake(self) -> None:
        """End the current pause, if there is one."""
        self._not_before_ms = self._started_ms

    def failed(self, error: KafkaliteError, now_ms: int, chance: float = 0.5) -> None:
        """Record the failure of the last step. ``chance`` in [0, 1) sets the jitter; 0.5 means no jitter."""
        rules = self._rules
        self.failures += 1
        self._is_connected = False
        verdict = rules.judge(error)
        if verdict.is_final:
            self._give_up = GiveUp(error)
            return
        pause_ms = self._pause_ms(chance)
        if self._is_over(verdict, now_ms, pause_ms):
            if self._timeout_error is None:
                self._give_up = GiveUp(error)
            else:
                late = self._timeout_error(error)
                if late is not error and late.__cause__ is None:
                    late.__cause__ = error
                self._give_up = GiveUp(late)
            return
        self._not_before_ms = min(now_ms + pause_ms, self._deadline_ms)
        if verdict.must_locate or (rules.has_free_retry and self.failures > 1):
            self._is_located = False

    def _pause_ms(self, chance: float) -> int:
        failures = self.failures - self._rules.has_free_retry
        return self._rules.backoff.delay_ms(failures, chance) if failures else 0

    def _is_over(self, verdict: Verdict, now_ms: int, pause_ms: int) -> bool:
        """Whether the attempts are used up, or the time limit will have passed after a pause of ``pause_ms``.

        A pause that ``wake`` can end does not count.
        """
        if self._rules.max_failures is not None and self.failures >= self._rules.max_failures:
            return True
        deadline_ms = self._deadline_ms
        if verdict.limit_ms is not None:
            deadline_ms = min(deadline_ms, self._started_ms + verdict.limit_ms)
        return now_ms + (0 if self._rules.can_wake else pause_ms) >= deadline_ms
