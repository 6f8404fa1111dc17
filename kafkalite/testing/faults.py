"""Faults in request handling, for ``Cluster.intercept(api, fault)``.

Each fault applies to the next ``count`` requests that are passed to it, or to all if ``count`` is None. Later
requests are handled normally.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kafkalite.broker.server.responses import Pending, Refusal, Response
from kafkalite.clock import Clock
from kafkalite.errors import ConfigError, ErrorCode
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.rng import Rng
from kafkalite.suggestions import did_you_mean
from kafkalite.testing.requests import check_names, is_named, names_in

#: Handles the intercepted request and returns its response.
Proceed: TypeAlias = Callable[[], "Response | Pending"]

#: Returns the response to the request, or None to let the broker handle the request.
Fault: TypeAlias = "Callable[[Request, Proceed, Clock], Response | Pending | None]"


@dataclass(frozen=True, slots=True)
class Aim:
    """The conditions of the requests that are passed to a fault. None: any node, topic or partition."""

    api: ApiKey
    node_id: int | None
    topic: str | None
    partition: int | None

    def __post_init__(self) -> None:
        check_names(self.api, self.topic, self.partition)

    def is_hit_by(self, request: Request, node_id: int) -> bool:
        if request.api_key != self.api or self.node_id not in (None, node_id):
            return False
        if self.topic is None and self.partition is None:
            return True
        return is_named(*names_in(request.message), self.topic, self.partition)

    @property
    def precision(self) -> int:
        """The number of conditions that are not None. Faults with more conditions receive a request first."""
        return sum(each is not None for each in (self.node_id, self.topic, self.partition))


class Faults:
    """The faults of a cluster. A request is passed to the matching faults until one of them responds."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._aimed: dict[Aim, tuple[float, Fault]] = {}  # (probability, fault), highest precision first

    def set(self, aim: Aim, fault: Fault | None, probability: float) -> None:
        """Set or replace the fault for the requests that match ``aim``.

        If ``fault`` is None, removes the faults that have the API and ``node_id`` of ``aim`` and, if ``aim``
        has them, the same topic and partition. Raises ConfigError if ``fault`` is not callable or is a
        function that makes faults, such as ``fail_next``, and if ``probability`` is not above 0 and at most
        1.
        """
        if fault is None:
            for other in [other for other in self._aimed if _covers(aim, other)]:
                del self._aimed[other]
            return
        if not callable(fault) or any(fault is factory for factory in _FACTORIES):
            raise ConfigError(key="fault", value=fault, allowed="a fault, such as fail_next(), or None")
        is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
        if not is_number or not 0 < probability <= 1:
            raise ConfigError(key="probability", value=probability, allowed="above 0 and at most 1")
        self._aimed[aim] = (probability, fault)
        self._aimed = dict(sorted(self._aimed.items(), key=lambda item: -item[0].precision))

    def clear(self) -> None:
        self._aimed.clear()

    def respond(
        self, request: Request, node_id: int, proceed: Proceed, clock: Clock
    ) -> Response | Pending | None:
        """Return the first response of a matching fault, or None if the broker is to handle the request.

        ``proceed`` lets the broker handle the request, and ``clock`` is the broker's clock.
        """
        for aim, (probability, fault) in list(self._aimed.items()):  # a copy: a fault may call ``set``
            if aim.is_hit_by(request, node_id) and (probability == 1 or self._rng.random() < probability):
                response = fault(request, proceed, clock)
                if response is not None:
                    return response
        return None


def _covers(aim: Aim, other: Aim) -> bool:
    return (
        (aim.api, aim.node_id) == (other.api, other.node_id)
        and aim.topic in (None, other.topic)
        and aim.partition in (None, other.partition)
    )


class _Disconnection(Pending):
    """A response that is never sent: instead, the connection is aborted.

    That happens when ``done``, the broker's own response, is ready (None: at once). The connection is an
    attribute of the continuation that the server passes to ``then``.
    """

    def __init__(self, done: Pending | None = None) -> None:
        super().__init__(done.cancel if done is not None else None)
        self._done = done

    def then(self, continuation: Any) -> None:
        super().then(continuation)
        if self._done is None:
            continuation.connection.abort()
        else:
            self._done.then(lambda _response: continuation.connection.abort())


def _limited(count: int | None, act: Callable[[Request, Proceed, Clock], Response | Pending]) -> Fault:
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ConfigError(key="count", value=count, allowed="1 or more, or None for every request")
    left = math.inf if count is None else count

    def fault(request: Request, proceed: Proceed, clock: Clock) -> Response | Pending | None:
        nonlocal left
        if left <= 0:
            return None
        left -= 1
        return act(request, proceed, clock)

    return fault


def drop_next(count: int | None = 1) -> Fault:
    """Return a fault that drops the next ``count`` requests (None: all) without a response. Later responses
    on the same connection are not sent either, because responses keep the order of requests."""
    return _limited(count, lambda request, proceed, clock: Pending())


def fail_next(count: int | None = 1, error_code: ErrorCode | str = ErrorCode.NOT_LEADER_OR_FOLLOWER) -> Fault:
    """Return a fault that refuses the next ``count`` requests (None: all) as a whole with ``error_code``.

    Raises ConfigError if ``error_code`` is neither an ErrorCode nor the name of one.
    """
    refusal = Refusal(int(_error_code(error_code)), "refused by a test")
    return _limited(count, lambda request, proceed, clock: refusal)


def _error_code(code: ErrorCode | str) -> ErrorCode:
    if isinstance(code, ErrorCode):
        return code
    name = str(code).upper()
    if name in ErrorCode.__members__:
        return ErrorCode[name]
    hint = did_you_mean(name, ErrorCode.__members__, shown=repr)
    allowed = "; ".join(filter(None, ("an ErrorCode or its name", hint)))
    raise ConfigError(key="error_code", value=code, allowed=allowed)


def disconnect_next(count: int | None = 1, *, after: bool = False) -> Fault:
    """Return a fault that aborts the connection of the next ``count`` requests (None: all). Such a request is
    not handled or, if ``after``, handled but not responded to."""

    def act(_request: Request, proceed: Proceed, _clock: Clock) -> Response | Pending:
        done = proceed() if after else None
        return _Disconnection(done if isinstance(done, Pending) else None)

    return _limited(count, act)


def delay_next(count: int | None = 1, *, delay_ms: int) -> Fault:
    """Return a fault that handles the next ``count`` requests (None: all) ``delay_ms`` later, by the broker's
    clock."""

    def act(_request: Request, proceed: Proceed, clock: Clock) -> Response | Pending:
        pending = Pending()

        async def wait() -> None:
            await clock.sleep_ms(delay_ms)
            pending.on_cancel = None
            response = proceed()
            if isinstance(response, Pending):
                pending.on_cancel = response.cancel
                response.then(pending.resolve)
            else:
                pending.resolve(response)

        task = asyncio.get_running_loop().create_task(wait(), name="delayed request")
        pending.on_cancel = task.cancel
        return pending

    return _limited(count, act)


_FACTORIES: Final[tuple[object, ...]] = (delay_next, disconnect_next, drop_next, fail_next)
