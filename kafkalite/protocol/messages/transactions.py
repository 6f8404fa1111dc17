"""Transactions (KIP-98, KIP-890) and transaction groups.

The coordinator of a transactional id leads the partition of ``__transaction_state`` that the id hashes
to. A producer writes to partition leaders with its transactional id in the request; a leader that
receives the first batch of a transaction has the coordinator add the partition (R31). A transaction
group is one unit of work written by many producers: each joins (application id, batch id) and writes
under the application id as its transactional id, and one ``EndTxnGroup`` decides for all of them.
"""

from __future__ import annotations

from kafkalite.protocol.structs import ApiResponse, PartitionResult, Struct


class TxnPartition(Struct):
    topic: str
    partition: int


class TxnPartitionResult(PartitionResult):
    pass


class AddPartitionsToTxnRequest(Struct):
    """Sent by a leader before it appends a transaction's first batch: the transaction must also end there."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    partitions: list[TxnPartition]


class AddPartitionsToTxnResponse(ApiResponse):
    partitions: list[TxnPartitionResult]


class EndTxnRequest(Struct):
    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_commit: bool


class EndTxnResponse(ApiResponse):
    """Sent when the decision is committed (R32), with the identity of the next transaction (R31)."""

    producer_id: int
    producer_epoch: int


class TxnMarker(Struct):
    producer_id: int
    producer_epoch: int  #: the epoch after that of the transaction's batches
    coordinator_epoch: int  #: leader epoch of the coordinator's partition
    is_commit: bool
    partitions: list[TxnPartition]


class WriteTxnMarkersRequest(Struct):
    markers: list[TxnMarker]


class WrittenMarker(Struct):
    producer_id: int
    error_code: int
    error_message: str | None
    partitions: list[TxnPartitionResult]


class WriteTxnMarkersResponse(ApiResponse):
    """Sent when the markers are committed and offsets in the transactions have taken effect (R33, R35)."""

    markers: list[WrittenMarker]


class ListTransactionsRequest(Struct):
    #: Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort; empty: all
    states: list[str]
    min_duration_ms: int


class ListedTransaction(Struct):
    transactional_id: str
    producer_id: int
    state: str
    duration_ms: int  #: since the open transaction began; 0 without one


class ListTransactionsResponse(ApiResponse):
    """Only the transactions coordinated by the broker that responds."""

    transactions: list[ListedTransaction]


class DescribeTransactionsRequest(Struct):
    transactional_ids: list[str]


class DescribedTransaction(Struct):
    transactional_id: str
    error_code: int
    error_message: str | None
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int  #: wall clock; NO_TIMESTAMP without an open one
    partitions: list[TxnPartition]
    coordinator_epoch: int


class DescribeTransactionsResponse(ApiResponse):
    transactions: list[DescribedTransaction]


class DescribeProducersRequest(Struct):
    partitions: list[TxnPartition]


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
    """The response of each partition's leader."""

    partitions: list[DescribedProducers]


class AbortTransactionRequest(Struct):
    """End a transaction that hangs in a partition, unknown to coordinators (KIP-664). For operators."""

    topic: str
    partition: int
    producer_id: int
    start_offset: int  #: from DescribeProducers; nothing is aborted if another transaction is open by now


class AbortTransactionResponse(ApiResponse):
    producer_id: int
    producer_epoch: int


class JoinTxnGroupRequest(Struct):
    """Become a writer of a batch. Repeating a name aborts the earlier attempt of that name."""

    application_id: str
    batch_id: int  #: 0 or more; greater than earlier batches, gaps are allowed
    member: str  #: name of the writer, unique to the attempt
    timeout_ms: int  #: after which the writer's records are aborted if the batch is undecided


class JoinTxnGroupResponse(ApiResponse):
    """``is_finished``: the batch is already decided, so there is nothing to write and no producer id."""

    producer_id: int
    producer_epoch: int
    last_batch_id: int  #: the last decided batch; -1 before any
    is_finished: bool


class TxnWinner(Struct):
    """A writer as it was after its last write. A later attempt under its name never wins."""

    member: str
    producer_id: int
    producer_epoch: int


class EndTxnGroupRequest(Struct):
    application_id: str
    batch_id: int
    winners: list[TxnWinner]  #: writers whose records are committed; those of all others are aborted


class EndTxnGroupResponse(ApiResponse):
    """The result of the first call for this batch, also when it is repeated."""

    batch_id: int
    winners: list[str]  #: names of writers, as the deciding call gave them
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
    """The application has no further batches. Its name is not used again and may be forgotten."""

    application_id: str


class RetireTxnGroupResponse(ApiResponse):
    last_batch_id: int
