"""Transactions (KIP-98, KIP-890) and transaction groups.

The coordinator of a transactional id is the leader of the partition of ``__transaction_state`` to which the
id hashes. A producer writes to partition leaders with its transactional id in the request. Before a
leader appends the first batch of a transaction in its partition, it asks the coordinator to add the partition
to the transaction (R31).

In a transaction group many producers write the transactions of one batch of an application. Each joins with
(application id, batch id) and uses the application id as its transactional id. One ``EndTxnGroup`` decides
all of these transactions.
"""

from __future__ import annotations

from typing import Annotated

from kafkalite.limits import MAX_IDS, MAX_STATES_PER_REQUEST, MAX_TXN_GROUP_MEMBERS
from kafkalite.protocol.structs import ApiResponse, AtMost, Distinct, PartitionItem, PartitionResult, Struct


class TxnPartition(PartitionItem):
    pass


class TxnPartitionResult(PartitionResult):
    pass


class AddPartitionsToTxnRequest(Struct):
    """Sent by a partition's leader before it appends the first batch, so that the partition gets a marker."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: Distinct[TxnPartition]


class AddPartitionsToTxnResponse(ApiResponse):
    partitions: list[TxnPartitionResult]


class EndTxnRequest(Struct):
    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_commit: bool


class EndTxnResponse(ApiResponse):
    """The producer id and epoch of the next transaction (R31). Sent when the decision is committed (R32)."""

    producer_id: int
    producer_epoch: int


class TxnMarker(Struct):
    producer_id: int
    producer_epoch: int  #: the epoch after the epoch of the transaction's batches
    coordinator_epoch: int  #: the leader epoch of the coordinator's partition
    is_commit: bool
    partitions: Distinct[TxnPartition]


class WriteTxnMarkersRequest(Struct):
    markers: list[TxnMarker]


class WrittenMarker(Struct):
    producer_id: int
    error_code: int
    error_message: str | None
    partitions: list[TxnPartitionResult]


class WriteTxnMarkersResponse(ApiResponse):
    """Sent when each marker has failed, or is committed and has made offsets take effect (R33, R35)."""

    markers: list[WrittenMarker]


class ListTransactionsRequest(Struct):
    #: Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort; an empty list selects all.
    states: Annotated[list[str], AtMost(MAX_STATES_PER_REQUEST)]
    min_duration_ms: int


class ListedTransaction(Struct):
    transactional_id: str
    producer_id: int
    state: str
    duration_ms: int  #: since the open transaction began; 0 if none is open


class ListTransactionsResponse(ApiResponse):
    """Contains only the transactions whose coordinator is the broker that responds."""

    transactions: list[ListedTransaction]


class DescribeTransactionsRequest(Struct):
    transactional_ids: Annotated[list[str], AtMost(MAX_IDS)]


class DescribedTransaction(Struct):
    transactional_id: str
    error_code: int
    error_message: str | None
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int  #: wall clock; NO_TIMESTAMP if no transaction is open
    partitions: list[TxnPartition]
    coordinator_epoch: int


class DescribeTransactionsResponse(ApiResponse):
    transactions: list[DescribedTransaction]


class DescribeProducersRequest(Struct):
    partitions: Distinct[TxnPartition]


class ActiveProducer(Struct):
    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int  #: NO_OFFSET if none is open


class DescribedProducers(PartitionResult):
    producers: list[ActiveProducer]


class DescribeProducersResponse(ApiResponse):
    """The producers of partitions that the responding broker leads."""

    partitions: list[DescribedProducers]


class AbortTransactionRequest(PartitionItem):
    """Ends a hanging transaction, which no coordinator knows (KIP-664). Sent by operators."""

    producer_id: int
    start_offset: int  #: from DescribeProducers; if another transaction is open now, nothing is aborted


class AbortTransactionResponse(ApiResponse):
    producer_id: int
    producer_epoch: int


class JoinTxnGroupRequest(Struct):
    """Makes the sender a writer of a batch. An earlier attempt of the same ``member`` is aborted."""

    application_id: str
    batch_id: int  #: 0 or more; greater than that of earlier batches; gaps are allowed
    member: str  #: the name of the writer; joining again under it restarts the attempt
    timeout_ms: int  #: the writer's records are aborted after this time if the batch is undecided


class JoinTxnGroupResponse(ApiResponse):
    """The producer id and epoch to use; -1 if ``is_finished``, because the batch was decided before."""

    producer_id: int
    producer_epoch: int
    last_batch_id: int  #: the last decided batch; -1 if none is decided
    is_finished: bool


class TxnWinner(Struct):
    """A winning writer: its name, and the producer id and epoch of the one attempt that is committed."""

    member: str
    producer_id: int
    producer_epoch: int


class EndTxnGroupRequest(Struct):
    application_id: str
    batch_id: int
    #: Writers whose records are committed; the records of all others are aborted.
    winners: Annotated[list[TxnWinner], AtMost(MAX_TXN_GROUP_MEMBERS)]


class EndTxnGroupResponse(ApiResponse):
    """The decision on a batch. A repeated request gets the same decision."""

    batch_id: int
    winners: list[str]  #: the names of the winners in the deciding call
    is_repeated: bool
    is_complete: bool  #: whether every marker is written


class DescribeTxnGroupRequest(Struct):
    application_id: str


class TxnGroupMember(Struct):
    member: str
    batch_id: int
    producer_id: int
    producer_epoch: int
    state: str  #: Ongoing, PrepareCommit, PrepareAbort
    start_ms: int
    partitions: list[TxnPartition]


class DescribeTxnGroupResponse(ApiResponse):
    application_id: str
    last_batch_id: int
    last_winners: list[str]
    members: list[TxnGroupMember]


class RetireTxnGroupRequest(Struct):
    """Declares that the application has no further batches, so that its state may be deleted."""

    application_id: str


class RetireTxnGroupResponse(ApiResponse):
    last_batch_id: int
