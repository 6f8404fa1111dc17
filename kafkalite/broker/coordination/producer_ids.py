"""Producer ids that this broker may give out, in blocks that the controller allocated to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kafkalite.protocol.messages.cluster import AllocateProducerIdsResponse


class ProducerIds:
    """Invariant: no id is given out twice, by this broker or any other. A rest is forgotten at the end."""

    def __init__(self, allocate: Callable[[], Awaitable[AllocateProducerIdsResponse]]) -> None:
        """``allocate`` has the controller reserve a block."""
        self._allocate = allocate
        self._next = 0
        self._end = 0
        self._allocating = asyncio.Lock()

    def take(self) -> int | None:
        """The next id, or None when a block must be allocated first: ``next`` does that."""
        if self._next == self._end:
            return None
        self._next += 1
        return self._next - 1

    async def next(self) -> int:
        """The next id. Raises what allocating raises."""
        async with self._allocating:
            while (producer_id := self.take()) is None:
                block = await self._allocate()
                self._next = block.first_producer_id
                self._end = block.first_producer_id + block.id_count
            return producer_id
