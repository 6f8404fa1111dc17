"""The quorum for a node without a vote: it follows the metadata log at some voter, and never commits.

It keeps nothing on disk. At the start it takes the state that a voter has, then every entry behind it. What
a voter hands out is committed, so it does not matter which is asked, nor whether it is behind for a while.
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
from kafkalite.raft.quorum import LeaderListener, StateMachine

MetadataFetch = Callable[[FetchMetadataRequest], Awaitable[tuple[FetchMetadataResponse, memoryview]]]
"""Asks some voter. Raises KafkaliteError when none can be reached, or the one that answered refuses."""

MAX_WAIT_MS: Final = 500
MAX_BYTES: Final = 8 * MIB
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0

_log = logging.getLogger(__name__)


class ObserverQuorum:
    """``Quorum`` for one that only listens. Invariant: ``offset`` is the machine's, and grows."""

    def __init__(self, fetch: MetadataFetch, *, node_id: int) -> None:
        self.on_leader_change: list[LeaderListener] = []
        self._fetch = fetch
        self._node_id = node_id
        self._machine: StateMachine | None = None
        self._leader_id: int | None = None
        self._offset = 0
        self._follower: asyncio.Task[None] | None = None

    @property
    def leader_id(self) -> int | None:
        return self._leader_id

    @property
    def is_leader(self) -> bool:
        return False

    @property
    def offset(self) -> int:
        return self._offset

    def attach(self, machine: StateMachine) -> None:
        assert self._machine is None, "the quorum drives a state machine already"
        self._machine = machine

    async def start(self) -> None:
        """Begin to follow. The state comes once a voter is reached."""
        assert self._machine is not None, "attach a state machine first"
        self._follower = asyncio.create_task(self._follow(self._machine), name="metadata observer")

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
        """Until cancelled, or until something comes that can't be applied."""
        try:
            await self._fetch_for_ever(machine)
        except Exception as error:
            self._set_leader(None)
            machine.fail(error)

    async def _fetch_for_ever(self, machine: StateMachine) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                answer, payload = await self._fetch(
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
                self._set_leader(None)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            self._take(machine, answer, payload)
            self._set_leader(None if answer.leader_id < 0 else answer.leader_id)

    def _take(self, machine: StateMachine, answer: FetchMetadataResponse, payload: memoryview) -> None:
        """Apply what is new. Raises StorageError for what can't be read."""
        position = 0
        for offset, length_bytes in answer.entries:
            data = payload[position : position + length_bytes]
            position += length_bytes
            if len(data) != length_bytes:
                raise CorruptLogError(
                    path="metadata from a voter",
                    position=position,
                    expected=f"{length_bytes} bytes",
                    actual=f"{len(data)}",
                    hint="see that voter's log",
                )
            if offset <= self._offset:
                continue  # from a voter that is behind
            if answer.is_snapshot:
                machine.load(offset, record_codec.from_bytes(data))
            else:
                machine.apply(offset, record_codec.from_bytes(data))
            self._offset = offset

    def _set_leader(self, leader_id: int | None) -> None:
        if leader_id != self._leader_id:
            self._leader_id = leader_id
            for listener in self.on_leader_change:
                listener(leader_id, 0)
