"""The dispatcher and the coroutines of handlers."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from typing import Any

from kafkalite.broker.server.client import Client
from kafkalite.broker.server.dispatch import Dispatcher
from kafkalite.broker.server.responses import Pending, Reply, Response
from kafkalite.broker.tasks import TaskSet

API = 1


class _Metrics:
    def __init__(self) -> None:
        self.requests = [0] * 64
        self.failed_requests = 0


def _dispatcher(tasks: TaskSet) -> Dispatcher:
    async def decide() -> Response:
        return Reply(None)

    services: Any = SimpleNamespace(metrics=_Metrics(), is_stopping=False)
    return Dispatcher(services, {API: lambda *_: decide()}, tasks, lambda error: None)


async def test_a_handler_cancelled_before_its_first_step_leaves_no_coroutine_behind() -> None:
    """A broker that dies between receiving a request and the next turn of the loop."""
    tasks = TaskSet(lambda error: None)
    request: Any = SimpleNamespace(api_key=API)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(_dispatcher(tasks).dispatch(request, Client("peer", "address")), Pending)
        await tasks.cancel()
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert len(tasks) == 0
