"""Directed schedules for the rules of a transaction coordinator. Each violates a guarantee if its rule is
removed.

The coordinator is the real state machine with its records. The partitions are real replicas that lead alone.
The schedule decides which messages are late, lost or repeated. ``DIRECTED`` is {mutant: schedule}. A schedule
returns the violation, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kafkalite.coordinator_types import Caller, Decision, Instant
from kafkalite.errors import BrokerError, ConcurrentTransactionsError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_PRODUCER_EPOCH
from kafkalite.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    EndTxnGroupRequest,
    EndTxnRequest,
    JoinTxnGroupRequest,
    RetireTxnGroupRequest,
    TxnPartition,
    TxnWinner,
)
from kafkalite.records.builder import build_batch
from kafkalite.records.header import check
from kafkalite.transactions.commands import InitProducerId, MarkersWritten, WithReservedId
from kafkalite.transactions.machine import TransactionMachine
from proof.transactions.log import Node, read_committed

CALLER: Final = Caller("app", "10.0.0.1")
PARTITIONS: Final = (TxnPartition("orders", 0), TxnPartition("orders", 1))
TIMEOUT_MS: Final = 1_000
_LONG_MS: Final = 8 * 24 * 3_600_000  # longer than transactional.id.expiration.ms
NAME: Final = "app"


class Writer:
    """A transactional producer and its own view of its state."""

    def __init__(self, identity: tuple[int, int]) -> None:
        self.identity = identity
        self.sequences = dict.fromkeys(PARTITIONS, 0)

    def batch(self, partition: TxnPartition) -> bytearray:
        """Return its next batch, which may arrive much later."""
        sequence = self.sequences[partition]
        self.sequences[partition] += 1
        return build_batch(
            [b"%d %d %d" % (*self.identity, sequence)],
            timestamps_ms=1,
            producer_id=self.identity[0],
            producer_epoch=self.identity[1],
            base_sequence=sequence,
            transactional=True,
        )


class World:
    """One coordinator, and the leaders of the partitions that it writes markers to."""

    def __init__(self) -> None:
        self.machine = TransactionMachine()
        self.now = Instant(1_000_000, 1_700_000_000_000)
        self.nodes = {partition: Node(1, 1 << 20) for partition in PARTITIONS}
        for node in self.nodes.values():
            node.partition.become_leader(PartitionState((1,), (1,), 1, 0, 0))
        self.coordinator_epoch = 0
        self._spare_id = 7_000

    # --- the coordinator -------------------------------------------------------------------------------

    def ask(self, command: Any) -> Any:
        """Return the coordinator's reply. Raises BrokerError."""
        return self._take(self.machine.decide(command, CALLER, self.now, {}))

    def _take(self, decision: Decision) -> Any:
        for record in decision.records:
            self.machine.replay(record, self.now)
        return decision.reply

    def _next_id(self) -> int:
        self._spare_id += 1
        return self._spare_id

    def advance(self, ms: int) -> None:
        """Advance the time, and apply everything that becomes due."""
        self.now = Instant(self.now.monotonic_ms + ms, self.now.wall_ms + ms)
        while (decision := self.machine.tick(self.now, {})).records:
            self._take(decision)

    def write_markers(self, *partitions: TxnPartition) -> None:
        """Write the markers that are due, to all partitions or only to some."""
        for pending in self.machine.pending_markers():
            written = tuple(one for one in pending.partitions if not partitions or one in partitions)
            for one in written:
                self.mark(one, *pending[1:3], is_commit=pending.is_commit)
            self.ask(MarkersWritten(*pending[:3], written))

    def mark(
        self,
        partition: TxnPartition,
        producer_id: int,
        epoch: int,
        *,
        is_commit: bool,
        coordinator_epoch: int | None = None,
    ) -> None:
        """Deliver one marker, from a coordinator with ``coordinator_epoch`` if given. Raises BrokerError."""
        by = self.coordinator_epoch if coordinator_epoch is None else coordinator_epoch
        node = self.nodes[partition]
        node.partition.append_marker(producer_id, epoch, by, is_commit, self.now.wall_ms)
        node.sync()

    # --- producers and leaders -------------------------------------------------------------------------

    def start(self) -> Writer:
        """Initialize a producer of the transactional id. Raises ConcurrentTransactionsError if it must
        retry.
        """
        answer = self.ask(
            InitProducerId(NAME, TIMEOUT_MS, -1, NO_PRODUCER_EPOCH, reserved_producer_id=self._next_id())
        )
        if answer.error_code:
            raise ConcurrentTransactionsError(answer.error_message)
        return Writer((answer.producer_id, answer.producer_epoch))

    def arrive(self, partition: TxnPartition, batch: bytearray) -> None:
        """Deliver a batch to the leader, which first requests the coordinator to add the partition. Raises
        BrokerError.
        """
        header, node = check(batch), self.nodes[partition]
        if is_new := node.partition.needs_verification(header):
            self.ask(AddPartitionsToTxnRequest(NAME, header.producer_id, header.producer_epoch, [partition]))
        node.partition.append(batch, header, self.now.wall_ms, is_verified=is_new)
        node.sync()

    def send(self, writer: Writer, *partitions: TxnPartition) -> None:
        for partition in partitions:
            self.arrive(partition, writer.batch(partition))

    def end(self, writer: Writer, *, is_commit: bool) -> None:
        """End the transaction. Raises BrokerError."""
        self.ask(WithReservedId(EndTxnRequest(NAME, *writer.identity, is_commit), self._next_id()))

    def run_batch(self, batch_id: int) -> None:
        """Run a batch as a Spark driver does: a task joins, writes, and wins. Raises BrokerError."""
        join = JoinTxnGroupRequest(NAME, batch_id, "task", TIMEOUT_MS)
        answer = self.ask(WithReservedId(join, self._next_id()))
        winners = []
        if not answer.is_finished:
            writer = Writer((answer.producer_id, answer.producer_epoch))
            self.send(writer, PARTITIONS[0])
            winners.append(TxnWinner("task", *writer.identity))
        self.ask(EndTxnGroupRequest(NAME, batch_id, winners))
        self.write_markers()

    # --- what readers see ------------------------------------------------------------------------------

    def visible(self, partition: TxnPartition) -> list[bytes]:
        """Return the values that a read_committed reader receives."""
        return read_committed(self.nodes[partition].partition)

    def hanging(self) -> str | None:
        """Return a transaction that holds readers back although the coordinator has finished (L4), or
        None.
        """
        if self.machine.pending_markers():
            return None
        for partition, node in self.nodes.items():
            if node.partition.open_transactions():
                where = f"{partition.topic}-{partition.partition}"
                return f"readers are held back in {where}, and no marker will come"
        return None


def no_epoch_bump() -> str | None:
    """Schedule: a batch of a transaction arrives after the transaction was aborted and its marker written."""
    world = World()
    writer = world.start()
    world.send(writer, PARTITIONS[0])
    late = writer.batch(PARTITIONS[0])
    world.end(writer, is_commit=False)
    world.write_markers()
    try:
        world.arrive(PARTITIONS[0], late)
    except BrokerError:
        return None
    return "R31: a batch of a transaction was appended after its end"


def marker_epoch_ignored() -> str | None:
    """Schedule: a batch that the coordinator verified in time is appended late, after the marker."""
    world = World()
    writer = world.start()
    world.send(writer, PARTITIONS[0])
    late = writer.batch(PARTITIONS[0])
    world.end(writer, is_commit=False)
    world.write_markers()
    try:
        world.nodes[PARTITIONS[0]].partition.append(late, check(late), world.now.wall_ms, is_verified=True)
    except BrokerError:
        return None
    return "R31: a batch of a transaction was appended behind the marker that had ended it"


def any_producer_id() -> str | None:
    """Schedule: a producer with an id of its own writes in the transaction of another one."""
    world = World()
    writer = world.start()
    world.send(writer, PARTITIONS[0])
    stranger = Writer((world._next_id(), writer.identity[1]))
    with suppress(BrokerError):
        world.send(stranger, PARTITIONS[1])
    world.end(writer, is_commit=True)
    world.write_markers()
    hanging = world.hanging()
    return hanging and f"R37: no marker ends the batch of another producer: {hanging}"


def old_coordinator() -> str | None:
    """Schedule: a replaced coordinator aborts a transaction that its successor commits."""
    world = World()
    world.coordinator_epoch = 1
    writer = world.start()
    world.send(writer, PARTITIONS[0])
    world.end(writer, is_commit=True)
    world.write_markers()
    writer = Writer((writer.identity[0], writer.identity[1] + 1))
    world.send(writer, PARTITIONS[0])
    with suppress(BrokerError):
        producer_id, epoch = writer.identity
        world.mark(PARTITIONS[0], producer_id, epoch + 1, is_commit=False, coordinator_epoch=0)
    world.end(writer, is_commit=True)
    world.write_markers()
    there = len(world.visible(PARTITIONS[0]))
    return None if there == 2 else f"R32: {there} of 2 transactions that were committed can be read"


def complete_early() -> str | None:
    """Schedule: only one of two partitions has its marker when the coordinator is asked to complete the
    transaction.
    """
    world = World()
    writer = world.start()
    world.send(writer, *PARTITIONS)
    world.end(writer, is_commit=True)
    world.write_markers(PARTITIONS[0])
    hanging = world.hanging()
    return hanging and f"R32: the transaction counts as complete: {hanging}"


def opposite_accepted() -> str | None:
    """Schedule: the response to a commit is lost, one marker is written, and the producer aborts instead."""
    world = World()
    writer = world.start()
    world.send(writer, *PARTITIONS)
    world.end(writer, is_commit=True)
    pending = world.machine.pending_markers()[0]
    world.mark(PARTITIONS[0], *pending[1:3], is_commit=True)
    try:
        world.end(writer, is_commit=False)
    except BrokerError:
        return None
    world.write_markers()
    there = [bool(world.visible(partition)) for partition in PARTITIONS]
    return f"R32: the transaction is torn: {there} by partition" if len({*there}) > 1 else None


def init_keeps_open() -> str | None:
    """Schedule: a producer dies in the middle of a transaction, and another one takes over."""
    world = World()
    world.send(world.start(), PARTITIONS[0])
    for _ in range(2):  # the first request is refused, and retried once
        try:
            world.start()
            break
        except ConcurrentTransactionsError:
            world.write_markers()
    world.advance(10 * TIMEOUT_MS)
    world.write_markers()
    hanging = world.hanging()
    return hanging and f"R34: the earlier producer's transaction was left open: {hanging}"


def timeout_no_bump() -> str | None:
    """Schedule: a producer sleeps past the timeout of its transaction, and goes on."""
    world = World()
    writer = world.start()
    world.send(writer, PARTITIONS[0])
    world.advance(TIMEOUT_MS)
    world.write_markers()
    try:
        world.send(writer, PARTITIONS[0])
    except BrokerError:
        return None
    return "R34: a producer goes on in a transaction that was aborted meanwhile"


def unretired_forgotten() -> str | None:
    """Schedule: a driver commits a batch and stops before it has recorded that. It returns after a long time.

    Its name was retired once by mistake, and the next batch has revoked that.
    """
    world = World()
    world.run_batch(0)
    world.ask(RetireTxnGroupRequest(NAME))
    world.run_batch(1)
    before = world.visible(PARTITIONS[0])
    for _ in range(2):
        world.advance(_LONG_MS)
    world.run_batch(1)
    if world.visible(PARTITIONS[0]) != before:
        return "R32: a batch was committed, and is in the log twice"
    return None


DIRECTED: Final[dict[str, Callable[[], str | None]]] = {
    "R31-no-epoch-bump": no_epoch_bump,
    "R31-marker-epoch-ignored": marker_epoch_ignored,
    "R32-complete-early": complete_early,
    "R32-old-coordinator": old_coordinator,
    "R32-opposite-accepted": opposite_accepted,
    "R32-unretired-forgotten": unretired_forgotten,
    "R34-init-keeps-open": init_keeps_open,
    "R34-timeout-no-bump": timeout_no_bump,
    "R37-any-producer-id": any_producer_id,
}
