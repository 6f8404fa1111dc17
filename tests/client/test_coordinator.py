"""Requests to a coordinator that moves, loads, dies, or does not respond."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.client.cluster import coordinator
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import GROUP_KEY, CoordinatorLink
from kafkalite.client.config import admin_config
from kafkalite.errors import (
    ClientClosedError,
    ErrorCode,
    InvalidGroupIdError,
    NotCoordinatorError,
    RequestTimeoutError,
    UnknownMemberIdError,
)
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages.groups import (
    Coordinator,
    FindCoordinatorResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kafkalite.rng import seeded_rng
from proof.waiting import eventually

REQUEST = OffsetFetchRequest("g", "", -1, False, [])
FIND, ASK = ApiKey.FIND_COORDINATOR, ApiKey.OFFSET_FETCH
SETTINGS = {
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 5,
    "reconnect_backoff_ms": 1,
    "reconnect_backoff_max_ms": 5,
}


class Group:
    """Both brokers name ``node_id`` as coordinator, and only that one responds."""

    def __init__(self, brokers: list[Any]) -> None:
        self.brokers = brokers
        self.node_id = 1
        self.find_codes: list[int] = []
        self.ask_codes: list[int] = []
        for broker in brokers:
            broker.handlers[FIND] = self._find
            broker.handlers[ASK] = lambda request, fault, broker=broker: self._ask(broker)

    def _find(self, request: Any, fault: Any) -> tuple[Any, list[bytes]]:
        code = self.find_codes.pop(0) if self.find_codes else 0
        (key,) = request.message.keys
        address = self.brokers[self.node_id - 1].address
        node_id = -1 if code else self.node_id
        return FindCoordinatorResponse(0, None, [Coordinator(key, code, None, node_id, address, 3)]), []

    def _ask(self, broker: Any) -> tuple[Any, list[bytes]]:
        code = self.ask_codes.pop(0) if self.ask_codes else 0
        if not code and broker.node_id != self.node_id:
            code = int(ErrorCode.NOT_COORDINATOR)
        return OffsetFetchResponse(code, None, []), []

    def count(self, api: ApiKey) -> int:
        return sum(broker.count(api) for broker in self.brokers)


@pytest.fixture
def group(fake_cluster: list[Any]) -> Group:
    return Group(fake_cluster)


@pytest_asyncio.fixture
async def cluster(fake_cluster: list[Any]) -> AsyncIterator[ClusterClient]:
    settings = {"bootstrap_servers": fake_cluster[0].address, **SETTINGS}
    client = ClusterClient(admin_config(settings), rng=seeded_rng(1))
    await client.start()
    yield client
    await client.close()


@pytest.fixture
def link(cluster: ClusterClient) -> CoordinatorLink:
    return CoordinatorLink(cluster, GROUP_KEY, "g")


async def test_concurrent_callers_share_one_lookup(group: Group, link: CoordinatorLink) -> None:
    await asyncio.gather(*(link.call(REQUEST) for _ in range(5)))
    assert (group.count(FIND), group.count(ASK), link.node_id) == (1, 5, 1)
    assert "g" in repr(link)


async def test_it_is_located_again_after_a_move(group: Group, link: CoordinatorLink) -> None:
    await link.call(REQUEST)
    group.node_id = 2
    await link.call(REQUEST)
    assert link.node_id == 2 and group.count(FIND) == 2
    assert await link.find() == 2


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.REQUEST_TIMED_OUT,
    ],
)
async def test_temporary_errors_are_retried(group: Group, link: CoordinatorLink, code: ErrorCode) -> None:
    group.ask_codes = [int(code)] * 3
    group.find_codes = [int(ErrorCode.COORDINATOR_NOT_AVAILABLE)] * 3
    await link.call(REQUEST)
    assert group.count(ASK) == 4


async def test_other_errors_are_raised(group: Group, link: CoordinatorLink) -> None:
    group.ask_codes = [int(ErrorCode.UNKNOWN_MEMBER_ID)]
    with pytest.raises(UnknownMemberIdError):
        await link.call(REQUEST)
    link.node_id = None
    group.find_codes = [int(ErrorCode.INVALID_GROUP_ID)]
    with pytest.raises(InvalidGroupIdError, match="'g'"):
        await link.call(REQUEST)


async def test_a_lost_connection_is_tried_again(group: Group, link: CoordinatorLink, make_fault: Any) -> None:
    group.brokers[0].fault(ASK, make_fault(close=True))
    await link.call(REQUEST)
    assert group.count(ASK) == 2


async def test_time_is_up_with_the_last_error_as_the_cause(group: Group, link: CoordinatorLink) -> None:
    group.ask_codes = [int(ErrorCode.NOT_COORDINATOR)] * 1000
    with pytest.raises(RequestTimeoutError, match=r"OffsetFetch .* of 'g'") as raised:
        await link.call(REQUEST, timeout_ms=30)
    assert isinstance(raised.value.__cause__, NotCoordinatorError)


async def test_a_silent_coordinator_is_abandoned_after_a_move(
    group: Group, link: CoordinatorLink, make_fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.02)
    group.brokers[0].fault(ASK, make_fault(drop=True))
    call = asyncio.ensure_future(link.call(REQUEST))
    await eventually(lambda: group.count(ASK))
    group.node_id = 2
    async with asyncio.timeout(30):
        await call
    assert link.node_id == 2


async def test_time_is_up_also_with_a_silent_coordinator(
    group: Group, link: CoordinatorLink, make_fault: Any
) -> None:
    group.brokers[0].fault(ASK, make_fault(drop=True))
    with pytest.raises(RequestTimeoutError):
        await link.call(REQUEST, timeout_ms=20)


async def test_time_is_up_also_during_the_lookup(
    group: Group, link: CoordinatorLink, make_fault: Any
) -> None:
    for broker in group.brokers:
        broker.fault(FIND, make_fault(drop=True), times=5)
    with pytest.raises(RequestTimeoutError, match="did not respond"):
        await link.call(REQUEST, timeout_ms=20)


async def test_an_attempt_is_not_retried(group: Group, link: CoordinatorLink) -> None:
    group.ask_codes = [int(ErrorCode.NOT_COORDINATOR)]
    with pytest.raises(NotCoordinatorError):
        await link.attempt(REQUEST)
    assert link.node_id is None and group.count(ASK) == 1
    await link.attempt(REQUEST)


async def test_closing_ends_the_search(
    group: Group, link: CoordinatorLink, cluster: ClusterClient, make_fault: Any
) -> None:
    group.brokers[0].fault(FIND, make_fault(drop=True))
    group.brokers[1].fault(FIND, make_fault(drop=True))
    call = asyncio.ensure_future(link.call(REQUEST))
    await eventually(lambda: group.count(FIND))
    await cluster.close()
    with pytest.raises(ClientClosedError):
        await call
