"""One node's part in the metadata log: decide on an image, commit, replay, publish, reply.

::

    submit(command)
      decide   metadata.controller.decide(image, command) → records, reply                    pure
      commit   quorum.commit(records, after_offset=image.metadata_offset)                     durable
      replay   Delta(image).replay(records).apply(offset) → the next image                    every node
      publish  publisher(delta, image), each in turn                                          every node
      reply    when this node's image has reached the committed offset

Commands that arrive during a commit are decided together afterwards, each on what those before it will have
done, and share one entry. They are replayed once before the commit for that, so a record that can't be
replayed is never committed. When another node's entry came first (StaleImageError) the whole group is
decided again on the image that holds it: no decision takes effect on a state it was not made for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NoReturn

from kafkalite.clock import Clock
from kafkalite.errors import (
    LogOfflineError,
    NotControllerError,
    ShuttingDownError,
    ThrottlingQuotaExceededError,
)
from kafkalite.limits import MAX_PARTITIONS_PER_REQUEST, MAX_QUEUED_COMMANDS
from kafkalite.metadata.controller import Command, ControllerSettings, decide
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.image import EMPTY, ClusterImage
from kafkalite.metadata.records import MetadataRecord
from kafkalite.raft.quorum import Quorum, StaleImageError
from kafkalite.rng import Rng

Publisher = Callable[[Delta, ClusterImage], None]
"""Told of every new image, in order, on the event loop. What it raises ends the node (R18)."""

_MAX_COMMANDS_PER_ENTRY: Final = 1_000
_MAX_RECORDS_PER_ENTRY: Final = MAX_PARTITIONS_PER_REQUEST  # above it the rest of a group waits for the next

_Waiting = tuple[Command, asyncio.Future[Any]]


class ControllerNode:
    """The image of this node and the way to change it. Invariant: ``image`` never goes back."""

    def __init__(
        self,
        quorum: Quorum,
        node_id: int,
        clock: Clock,
        rng: Rng,
        settings: ControllerSettings | None = None,
    ) -> None:
        self.image: ClusterImage = EMPTY
        self.publishers: list[Publisher] = []  #: add to it before ``start``
        self._quorum = quorum
        self._node_id = node_id
        self._clock = clock
        self._rng = rng
        self._settings = settings or ControllerSettings()
        self._loading: Delta | None = None  # during start: everything since EMPTY, published once
        self._queue: deque[_Waiting] = deque()
        self._decider: asyncio.Task[None] | None = None
        self._offset_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._is_open = False
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    @property
    def controller_id(self) -> int | None:
        """The node that decides, None while there is none."""
        return self._quorum.leader_id

    async def start(self) -> None:
        """Load the stored state and publish it as one delta from EMPTY. Raises StorageError."""
        self._loading = Delta(EMPTY)
        self._quorum.attach(self)
        await self._quorum.start()
        delta, self._loading = self._loading, None
        self._advance(delta, self._quorum.offset)
        self._is_open = True

    async def stop(self) -> None:
        """Answer what was submitted, then let the quorum finish."""
        self._is_open = False
        if self._decider is not None:
            await self._decider
        await self._quorum.stop()

    async def watch(self) -> NoReturn:
        """Wait until this node can't go on, and raise why: to be run by whoever must stop then."""
        await self._failed.wait()
        assert self._failure is not None
        raise LogOfflineError(f"the controller has stopped: {self._failure}") from self._failure

    async def submit(self, command: Command) -> Any:
        """Decide ``command`` and return its reply once it holds, and this node's image shows it.

        Raises NotControllerError, ShuttingDownError, ThrottlingQuotaExceededError (queue full), and what
        the commit raises: DiskFullError (nothing was done), LogOfflineError (the outcome is not known).
        A cancelled submit may take effect all the same.
        """
        self._check_usable()
        if len(self._queue) >= MAX_QUEUED_COMMANDS:
            raise ThrottlingQuotaExceededError(f"{MAX_QUEUED_COMMANDS} commands wait for the controller")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((command, done))
        if self._decider is None:
            self._decider = asyncio.create_task(self._decide_all(), name="controller")
        return await done

    async def wait_for_offset(self, offset: int) -> None:
        """Return when the image has reached ``offset``. Raises LogOfflineError when it never will."""
        if self.image.metadata_offset >= offset:
            return
        self._check_not_failed()
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offset_waiters.append((offset, reached))
        await reached

    def _check_usable(self) -> None:
        self._check_not_failed()
        if not self._is_open:
            raise ShuttingDownError(f"node {self._node_id} is not up")
        if self._quorum.leader_id != self._node_id:
            raise NotControllerError(f"the controller is node {self._quorum.leader_id}")

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            raise LogOfflineError(f"the controller has stopped: {self._failure}") from self._failure

    async def _decide_all(self) -> None:
        try:
            while self._queue:
                await self._decide_group()
        finally:
            self._decider = None

    async def _decide_group(self) -> None:
        """Answer the first commands of the queue with one entry of the metadata log."""
        while True:
            records, outcomes = self._decide_on(self.image)
            try:
                is_decided = await self._commit(records)
            except Exception as error:
                is_decided, outcomes = True, [error] * len(outcomes)
            if is_decided:
                for outcome in outcomes:
                    _, done = self._queue.popleft()
                    _release(done, outcome)
                return

    def _decide_on(self, image: ClusterImage) -> tuple[list[MetadataRecord], list[Any]]:
        """Decide the first commands of the queue on ``image``, each after those before it.

        Returns the records of all, and per command its reply, or the exception that deciding it raised: a
        fault in one command's decision has changed nothing, and is that command's alone.
        """
        records: list[MetadataRecord] = []
        outcomes: list[Any] = []
        for command, done in islice(self._queue, _MAX_COMMANDS_PER_ENTRY):
            if len(records) >= _MAX_RECORDS_PER_ENTRY:
                break
            if done.done():  # cancelled before its turn: nobody waits for it
                outcomes.append(None)
                continue
            try:
                step = decide(
                    image,
                    command,
                    now_ms=self._clock.wall_ms(),
                    rng=self._rng,
                    settings=self._settings,
                )
                if step.records:
                    image = Delta(image).replay_all(step.records).apply(image.metadata_offset)
            except Exception as error:
                outcomes.append(error)
                continue
            records += step.records
            outcomes.append(step.replies[0][1])
        return records, outcomes

    async def _commit(self, records: Sequence[MetadataRecord]) -> bool:
        """Make the records hold, and the image show them; False when another entry came first."""
        if not records:
            return True
        decided_on = self.image.metadata_offset
        try:
            offset = await self._quorum.commit(records, decided_on)
        except StaleImageError as stale:
            assert stale.offset > decided_on, "stale, and yet nothing newer"
            await self.wait_for_offset(stale.offset)
            return False
        await self.wait_for_offset(offset)
        return True

    # --- what the quorum drives ------------------------------------------------------------------------

    def load(self, offset: int, records: Iterable[MetadataRecord]) -> None:
        """``StateMachine.load``."""
        if self._loading is not None:
            self._loading = Delta.to_snapshot(EMPTY, records)
        else:
            self._advance(Delta.to_snapshot(self.image, records), offset)

    def apply(self, offset: int, records: Sequence[MetadataRecord]) -> None:
        """``StateMachine.apply``."""
        if self._loading is not None:
            self._loading.replay_all(records)
        else:
            self._advance(Delta(self.image).replay_all(records), offset)

    def snapshot(self) -> tuple[int, Iterable[MetadataRecord]]:
        """``StateMachine.snapshot``."""
        return self.image.metadata_offset, self.image.to_records()

    def fail(self, error: BaseException) -> None:
        """``StateMachine.fail``: whoever waits for an image hears that it never comes."""
        self._failure = error
        self._failed.set()
        waiters, self._offset_waiters = self._offset_waiters, []
        for _, reached in waiters:
            _release(reached, LogOfflineError(f"the controller has stopped: {error}"))

    def _advance(self, delta: Delta, offset: int) -> None:
        """Make the next image, publish it, and release those who wait for it."""
        assert offset >= self.image.metadata_offset, f"the image would go back to {offset}"
        image = self.image = delta.apply(offset)
        for publisher in self.publishers:
            publisher(delta, image)
        waiters, self._offset_waiters = self._offset_waiters, []
        for waiter in waiters:
            if waiter[0] <= offset:
                _release(waiter[1], None)
            else:
                self._offset_waiters.append(waiter)


def _release(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.done():
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
