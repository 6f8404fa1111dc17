"""The blocking twins of TransactionGroup and TransactionGroupWriter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from kafkalite.client.blocking.producer import Producer
from kafkalite.client.blocking.twin import Twin, blocking, twin_of
from kafkalite.client.config import BootstrapServers, CommonSettings, ProducerSettings
from kafkalite.client.producer import transaction_group as txn_group
from kafkalite.client.producer.transaction_group import PreparedWriter
from kafkalite.rng import Rng


@twin_of(txn_group.TransactionGroupWriter)
class TransactionGroupWriter(Producer):
    """Writes one part of a batch; the blocking twin of ``kafkalite.TransactionGroupWriter``."""

    def __init__(
        self,
        application_id: str,
        batch_id: int,
        writer: str,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        rng: Rng | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        self._writer = txn_group.TransactionGroupWriter(
            application_id, batch_id, writer, bootstrap_servers, config=config, rng=rng, **settings
        )
        self._set_up(self._writer)

    @property
    def is_finished(self) -> bool:
        return self._writer.is_finished

    def prepare(self, timeout: float | None = None) -> PreparedWriter | None:
        return self._run_drained(self._writer.prepare, timeout)


@twin_of(txn_group.TransactionGroup)
class TransactionGroup(Twin[txn_group.TransactionGroup]):
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
        super().__init__(
            txn_group.TransactionGroup(application_id, bootstrap_servers, config=config, rng=rng, **settings)
        )

    finish = blocking(txn_group.TransactionGroup.finish)
    last_batch_id = blocking(txn_group.TransactionGroup.last_batch_id)
    retire = blocking(txn_group.TransactionGroup.retire)
