"""The blocking twin of a transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from kafkalite.client.config import ConsumerConfig
from kafkalite.client.producer import transaction_manager
from kafkalite.errors import TransactionAbortedError
from kafkalite.model import GroupMetadata, OffsetAndMetadata, TopicPartition

ABORTED_WHILE_QUEUED: Final = "the transaction was aborted while the record was queued"


class GivenPositions:
    """Where a blocking consumer stands, and as whom it would commit: asked in the loop's thread."""

    def __init__(
        self,
        positions: Mapping[TopicPartition, int | OffsetAndMetadata],
        group_metadata: Callable[[], GroupMetadata],
        config: ConsumerConfig,
    ) -> None:
        self.config = config
        self._positions = positions
        self._group_metadata = group_metadata

    def positions(self) -> Mapping[TopicPartition, int | OffsetAndMetadata]:
        return self._positions

    def group_metadata(self) -> GroupMetadata:
        return self._group_metadata()


class Transaction:
    """``with producer.transaction()``: the end of the block commits, an exception that leaves it aborts."""

    def __init__(
        self,
        transaction: transaction_manager.Transaction,
        run: Callable[..., Any],
        all_crossed: Callable[[], Awaitable[None]],
        refuse_queued: Callable[[Exception], None],
    ) -> None:
        self._transaction = transaction
        self._run = run
        self._all_crossed = all_crossed
        self._refuse_queued = refuse_queued

    def __repr__(self) -> str:
        return f"<sync {repr(self._transaction)[1:]}"

    @property
    def is_open(self) -> bool:
        """Whether it takes records and offsets."""
        return self._transaction.is_open

    def __enter__(self) -> Self:
        self._run(self._transaction.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._leave(kind, error, trace))

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._transaction.is_open:
            try:
                await self._all_crossed()
            except BaseException as refused:
                await self._leave(type(refused), refused, None)
                raise
        elif error is not None:
            self._refuse_queued(TransactionAbortedError(ABORTED_WHILE_QUEUED))
        await self._transaction.__aexit__(kind, error, trace)

    def abort(self) -> None:
        """End it without an exception; the block goes on, and nothing more can be sent in it."""

        async def abort() -> None:
            self._refuse_queued(TransactionAbortedError(ABORTED_WHILE_QUEUED))
            await self._transaction.abort()

        self._run(abort())
