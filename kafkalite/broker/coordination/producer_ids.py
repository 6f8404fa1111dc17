"""Assigns producer ids from the blocks that the controller allocates to this broker."""

# Tests: tests/broker/test_cluster_parts.py

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kafkalite.protocol.messages.cluster import AllocateProducerIdsResponse


class ProducerIds:
    """The unused producer ids of this broker. Each id is assigned at most once; a stop discards the rest."""

    def __init__(self, allocate: Callable[[], Awaitable[AllocateProducerIdsResponse]]) -> None:
        """``allocate`` requests a block of ids from the controller."""
        self._allocate = allocate
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    def take(self) -> int | None:
        """Return the next id, or None if none is left. Only ``next`` allocates another block."""
        if self._next == self._end:
            return None
        self._next += 1
        return self._next - 1

    async def next(self) -> int:
        """Return the next id, from another block if necessary. Raises the errors of ``allocate``."""
        async with self._allocating:
            while (producer_id := self.take()) is None:
                block = await self._allocate()
                self._next = block.first_producer_id
                self._end = block.first_producer_id + block.id_count
            return producer_id
