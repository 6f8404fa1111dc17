"""The blocking twins of ``txn_group``: for executors and drivers that are plain functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from kafkalite.client.blocking.producer import Producer, _Face
from kafkalite.client.config import BootstrapServers, CommonSettings, ProducerSettings
from kafkalite.client.producer import transaction_group as txn_group
from kafkalite.client.producer.transaction_group import GroupResult, PreparedWriter
from kafkalite.loop_thread import shared_loop_thread
from kafkalite.rng import Rng


class TransactionGroupWriter(Producer):
    """Writes one share of a batch; the blocking twin of ``kafkalite.TransactionGroupWriter``."""

    def __init__(
        self,
        application_id: str,
        batch_id: int,
        member: str,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        _Face.__init__(self)
        self._writer = txn_group.TransactionGroupWriter(
            application_id, batch_id, member, bootstrap_servers, config=config, rng=rng, **settings
        )
        self._begin_with(self._writer)

    @property
    def is_finished(self) -> bool:
        """Whether the batch was decided before this writer joined."""
        return self._writer.is_finished

    def prepare(self, timeout: float | None = None) -> PreparedWriter | None:
        """As ``kafkalite.TransactionGroupWriter.prepare``, of all that was sent until now."""

        async def prepare() -> PreparedWriter | None:
            await self._all_crossed()
            return await self._writer.prepare()

        return self._run(prepare(), timeout)


class TransactionGroup:
    """Decides over the batches of one application; the blocking twin of ``kafkalite.TransactionGroup``."""

    def __init__(
        self,
        application_id: str,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        rng: Rng | None = None,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self._thread = shared_loop_thread()
        self._group = txn_group.TransactionGroup(
            application_id, bootstrap_servers, config=config, rng=rng, **settings
        )

    def __repr__(self) -> str:
        return f"<sync {repr(self._group)[1:]}"

    def start(self) -> Self:
        self._thread.run(self._group.start())
        return self

    def close(self) -> None:
        self._thread.run(self._group.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def finish(
        self, batch_id: int, winners: Iterable[PreparedWriter | None], *, wait_ms: int = 0
    ) -> GroupResult:
        """As ``kafkalite.TransactionGroup.finish``."""
        return self._thread.run(self._group.finish(batch_id, winners, wait_ms=wait_ms))

    def last_batch_id(self) -> int:
        """The last batch decided; -1 before any."""
        return self._thread.run(self._group.last_batch_id())

    def retire(self) -> int:
        """As ``kafkalite.TransactionGroup.retire``."""
        return self._thread.run(self._group.retire())
