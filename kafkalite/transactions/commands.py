"""What a transaction coordinator is asked besides the protocol's requests, and what it asks for."""

from __future__ import annotations

from typing import NamedTuple

from kafkalite.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from kafkalite.protocol.messages.transactions import EndTxnRequest, JoinTxnGroupRequest, TxnPartition


class InitProducerId(NamedTuple):
    """A producer begins under a transactional id. Answered with an InitProducerIdResponse."""

    transactional_id: str  #: or the application id of a transaction group
    timeout_ms: int
    producer_id: int = NO_PRODUCER_ID  #: the caller's own, when it only wants the next epoch (KIP-360)
    producer_epoch: int = NO_PRODUCER_EPOCH
    spare_producer_id: int = NO_PRODUCER_ID  #: of nobody yet; lost when it is not needed


class WithSpareId(NamedTuple):
    """A request that may need a producer id of nobody yet. It is lost when it is not needed."""

    request: EndTxnRequest | JoinTxnGroupRequest
    spare_producer_id: int


class MarkersWritten(NamedTuple):
    """These partitions have the transaction's marker, committed; or they do not exist any more. No answer."""

    transactional_id: str  #: or the application id of a transaction group
    producer_id: int
    producer_epoch: int  #: the marker's
    partitions: tuple[TxnPartition, ...]


class PendingMarker(NamedTuple):
    """A decided transaction, and the partitions that are not yet known to have its marker."""

    transactional_id: str  #: or the application id of a transaction group
    producer_id: int
    producer_epoch: int  #: the marker's: the next one after that of the transaction's batches (R31)
    is_commit: bool
    partitions: tuple[TxnPartition, ...]
