"""Commands to a transaction coordinator that are not protocol requests, and markers still to be written."""

# Tests: tests/transactions/test_machine.py

from __future__ import annotations

from typing import NamedTuple

from kafkalite.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from kafkalite.protocol.messages.transactions import EndTxnRequest, JoinTxnGroupRequest, TxnPartition


class InitProducerId(NamedTuple):
    """Initialize a producer with a transactional id. The reply is an InitProducerIdResponse."""

    transactional_id: str
    timeout_ms: int
    producer_id: int = NO_PRODUCER_ID  #: the caller's current id, if it requests the next epoch (KIP-360)
    producer_epoch: int = NO_PRODUCER_EPOCH
    reserved_producer_id: int = NO_PRODUCER_ID  #: a reserved id, discarded if it is not used


class WithReservedId(NamedTuple):
    """A request together with a reserved producer id, which is discarded if it is not used."""

    request: EndTxnRequest | JoinTxnGroupRequest
    reserved_producer_id: int


class MarkersWritten(NamedTuple):
    """Reports partitions in which the transaction's marker is committed, or which were deleted."""

    transactional_id: str  #: for a transaction group, the application id
    producer_id: int
    producer_epoch: int  #: the epoch in the marker
    partitions: tuple[TxnPartition, ...]


class PendingMarker(NamedTuple):
    """A decided transaction, and the partitions that may still lack its marker."""

    transactional_id: str  #: for a transaction group, the application id
    producer_id: int
    producer_epoch: int  #: the epoch in the marker: the epoch of the transaction's batches plus one (R31)
    is_commit: bool
    partitions: tuple[TxnPartition, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """The transaction's identity: its transactional id, and the producer id and epoch of its marker."""
        return self[:3]
