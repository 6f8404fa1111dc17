"""The quorum of a node that is not a voter: it follows any voter's metadata log and never commits.

It stores nothing on disk. After a start it fetches the whole state from a voter, and then the later entries.
Voters return only committed entries, so any voter can serve the requests, even if it lags.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kafkalite.errors import CorruptLogError, KafkaliteError, NotControllerError
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.metadata import record_codec
from kafkalite.metadata.records import MetadataRecord
from kafkalite.protocol.messages.cluster import FetchMetadataRequest, FetchMetadataResponse
from kafkalite.raft.quorum import Quorum, StateMachine

MetadataFetch = Callable[[FetchMetadataRequest], Awaitable[tuple[FetchMetadataResponse, memoryview]]]
"""Sends the request to any voter. Raises KafkaliteError if none is reachable, or if the voter refuses."""

MAX_WAIT_MS: Final = 500
MAX_BYTES: Final = 8 * MIB
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0

_log = logging.getLogger(__name__)


class ObserverQuorum(Quorum):
    """The ``Quorum`` of a node that is not a voter and only follows the log."""

    def __init__(self, fetch: MetadataFetch, *, node_id: int) -> None:
        super().__init__(node_id)
        self._fetch = fetch
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the task that fetches entries. The state is loaded later, once a voter responds."""
        self._follower = asyncio.create_task(self._follow(self.machine), name="metadata observer")

    async def commit(self, records: Sequence[MetadataRecord], after_offset: int) -> int:
        raise NotControllerError(
            f"node {self._node_id} has no vote; the controller is node {self._leader_id}"
        )

    async def read_index(self) -> int:
        raise NotControllerError(f"node {self._node_id} has no vote")

    async def stop(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower])

    async def _follow(self, machine: StateMachine) -> None:
        """Fetch and apply entries until cancelled. If an entry cannot be applied, fail the machine."""
        try:
            await self._fetch_forever(machine)
        except Exception as error:
            self._note_leader(None)
            machine.fail(error)

    async def _fetch_forever(self, machine: StateMachine) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                response, payload = await self._fetch(
                    FetchMetadataRequest(
                        self._offset,
                        -1 if self._leader_id is None else self._leader_id,
                        MAX_WAIT_MS,
                        MAX_BYTES,
                    )
                )
            except KafkaliteError as error:
                if backoff_s == FIRST_BACKOFF_S:
                    _log.warning("no metadata from any voter %s", Fields(error=error))
                self._note_leader(None)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            self._apply(machine, response, payload)
            self._note_leader(None if response.leader_id < 0 else response.leader_id)

    def _apply(self, machine: StateMachine, response: FetchMetadataResponse, payload: memoryview) -> None:
        """Apply the new entries. Raises StorageError if the response is malformed."""
        position = 0
        for offset, length_bytes in response.entries:
            data = payload[position : position + length_bytes]
            position += length_bytes
            if len(data) != length_bytes:
                raise CorruptLogError(
                    path="metadata from a voter",
                    position=position,
                    expected=f"{length_bytes} bytes",
                    actual=f"{len(data)}",
                    hint="check the log of that voter",
                )
            if offset <= self._offset:
                continue  # the voter lags, and this node has already applied the entry
            if response.is_snapshot:
                machine.load(offset, record_codec.from_bytes(data))
            else:
                machine.apply(offset, record_codec.from_bytes(data))
            self._offset = offset

    def _note_leader(self, leader_id: int | None) -> None:
        if leader_id != self._leader_id:
            self._set_leader(leader_id, 0)
