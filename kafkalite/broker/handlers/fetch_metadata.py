"""FetchMetadata: committed entries of the metadata log, for a broker that is no voter. Long poll.

A change of the leader ends the wait as an entry does: who asks must know whom to turn to.

Errors: INVALID_REQUEST (this node keeps no metadata log of a quorum).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import InvalidRequestError
from kafkalite.limits import MIB
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.cluster import FetchMetadataRequest, FetchMetadataResponse, MetadataEntry

if TYPE_CHECKING:
    from kafkalite.raft.raft_quorum import RaftQuorum

MAX_WAIT_MS: Final = 5_000
MAX_BYTES: Final = 16 * MIB


def handle(services: Services, request: Request, _client: Client) -> Coroutine[Any, Any, Answer]:
    if services.raft is None:
        raise InvalidRequestError("this node is no voter")
    return _fetch(services, request.message)


async def _news(raft: RaftQuorum, after_offset: int, wait_ms: int) -> None:
    """Return when there is another entry or another leader, or when time is over."""
    changed = asyncio.Event()

    def on_leader_change(_leader_id: int | None, _term: int) -> None:
        changed.set()

    waits = [
        asyncio.ensure_future(raft.wait_beyond(after_offset, wait_ms)),
        asyncio.ensure_future(changed.wait()),
    ]
    raft.on_leader_change.append(on_leader_change)
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        raft.on_leader_change.remove(on_leader_change)
        for wait in waits:
            wait.cancel()


async def _fetch(services: Services, message: FetchMetadataRequest) -> Answer:
    raft = services.raft
    assert raft is not None
    knows_leader = message.leader_id == (-1 if raft.leader_id is None else raft.leader_id)
    if message.max_wait_ms > 0 and knows_leader and not services.is_stopping:
        await _news(raft, message.after_offset, min(message.max_wait_ms, MAX_WAIT_MS))
    chunk = raft.entries_after(message.after_offset, min(message.max_bytes, MAX_BYTES))
    leader_id = raft.leader_id
    entries = [MetadataEntry(offset, len(data)) for offset, data in chunk.entries]
    return Reply(
        FetchMetadataResponse(
            0, None, -1 if leader_id is None else leader_id, raft.offset, chunk.is_snapshot, entries
        ),
        [data for _, data in chunk.entries],
    )
