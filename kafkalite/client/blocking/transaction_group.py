"""The blocking twins of TransactionGroup and TransactionGroupWriter."""

from __future__ import annotations

from kafkalite.client.blocking.producer import Producer
from kafkalite.client.blocking.twin import Twin, blocking, opened_with, twin_of
from kafkalite.client.producer import transaction_group as txn_group
from kafkalite.client.producer.transaction_group import PreparedWriter


@twin_of(txn_group.TransactionGroupWriter)
class TransactionGroupWriter(Producer):
    """Writes one part of a batch. The blocking twin of ``kafkalite.TransactionGroupWriter``."""

    @opened_with(txn_group.TransactionGroupWriter)
    def __init__(self, original: txn_group.TransactionGroupWriter) -> None:
        self._writer = original
        self._set_up(original)

    @property
    def is_finished(self) -> bool:
        return self._writer.is_finished

    def prepare(self, timeout: float | None = None) -> PreparedWriter | None:
        return self._run_drained(self._writer.prepare, timeout)


@twin_of(txn_group.TransactionGroup)
class TransactionGroup(Twin[txn_group.TransactionGroup]):
    """Commits batches of one application. The blocking twin of ``kafkalite.TransactionGroup``."""

    @opened_with(txn_group.TransactionGroup)
    def __init__(self, original: txn_group.TransactionGroup) -> None:
        super().__init__(original)

    finish = blocking(txn_group.TransactionGroup.finish)
    last_batch_id = blocking(txn_group.TransactionGroup.last_batch_id)
    retire = blocking(txn_group.TransactionGroup.retire)
