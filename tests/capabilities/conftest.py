"""Abrupt ends of a program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kafkalite import Consumer


@pytest.fixture
def kill() -> Callable[[Consumer], Awaitable[None]]:
    """End a consumer as kill -9 ends its process: connections break, and not a word is said."""

    async def end(consumer: Consumer) -> None:
        group = consumer._group
        if group is not None:
            group._is_closing = True
            for timer in (group._watch_timer, group._commit_timer):
                if timer is not None:
                    timer.cancel()
            if group._heartbeats._task is not None:
                group._heartbeats._task.cancel()
        consumer._life = "closed"
        consumer._fetcher.close()
        await consumer._cluster.close()

    return end
