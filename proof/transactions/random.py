"""Random histories of one transaction coordinator and two partitions (R31, R32, R34).

Producers die, sleep past the timeout and go on, repeat the end of a transaction or decide the opposite;
batches, markers and reports of written markers arrive late; coordinators that were replaced still send
markers. One history of four has a transaction group instead, whose batches are run again, also after a long
time. ``run_transaction_seed`` returns the violation of a seed, or None.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kafkalite.errors import BrokerError, ConcurrentTransactionsError
from kafkalite.protocol.messages.transactions import EndTxnRequest, RetireTxnGroupRequest, TxnPartition
from kafkalite.records.header import check
from kafkalite.transactions.commands import MarkersWritten, PendingMarker, WithReservedId
from proof.core.parts import ViolationError
from proof.transactions.directed import NAME, PARTITIONS, TIMEOUT_MS, World, Writer

STEPS: Final = 120
GROUP_STEPS: Final = 30
LONG_MS: Final = 8 * 24 * 3_600_000  #: longer than transactional.id.expiration.ms
_Identity = tuple[int, int]


class RandomWorld(World):
    """A world in which any event may happen next."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.writers: list[Writer] = []
        self.decided: dict[_Identity, bool] = {}  # what producers were told
        self.sent: dict[tuple[_Identity, TxnPartition], list[bytes]] = {}
        self.late: list[tuple[TxnPartition, _Identity, bytearray, bytes, bool]] = []
        self.reports: list[MarkersWritten] = []

    def step(self) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.begin, 3),
            (self.write, 24),
            (self.arrive_late, 6),
            (self.finish, 10),
            (self.write_some_markers, 10),
            (self.repeat_report, 4),
            (self.sleep, 2),
            (self.replace_coordinator, 1),
            (self.stray_marker, 2),
            (self.expire, 2),
        ]
        calls, weights = zip(*steps, strict=True)
        self.rng.choices(calls, weights)[0]()

    def begin(self) -> None:
        with suppress(ConcurrentTransactionsError):
            self.writers.append(self.start())

    def _writer(self) -> Writer | None:
        """Return a producer, mostly the newest one."""
        return self.rng.choice(self.writers[-2:] + self.writers[-1:]) if self.writers else None

    def write(self) -> None:
        writer = self._writer()
        if writer is None:
            return
        partition = self.rng.choice(PARTITIONS)
        batch = writer.batch(partition)
        value = b"%d %d %d" % (*writer.identity, writer.sequences[partition] - 1)
        if self.rng.random() < 0.2:
            self.late.append((partition, writer.identity, batch, value, self._verified(partition, batch)))
            writer.sequences[partition] -= self.rng.random() < 0.7  # it is repeated, or it was the last one
            return
        try:
            self.arrive(partition, bytearray(batch))
        except BrokerError:
            writer.sequences[partition] -= 1
            return
        self._appended(writer.identity, partition, value)

    def _verified(self, partition: TxnPartition, batch: bytearray) -> bool:
        """Whether the partition's transaction is open, so that the batch needs no coordinator now."""
        return not self.nodes[partition].partition.needs_verification(check(batch))

    def _appended(self, identity: _Identity, partition: TxnPartition, value: bytes) -> None:
        values = self.sent.setdefault((identity, partition), [])
        if value in values:
            return
        if self.decided.get(identity):
            raise ViolationError(f"R31: a batch of {identity} was appended after its commit")
        values.append(value)

    def _is_in_doubt(self, identity: _Identity) -> bool:
        """Whether a batch of the transaction is on its way, so that its producer can't commit."""
        return any(
            one[1] == identity and one[3] not in self.sent.get((identity, one[0]), ()) for one in self.late
        )

    def arrive_late(self) -> None:
        if not self.late:
            return
        partition, identity, batch, value, is_verified = self.late.pop(self.rng.randrange(len(self.late)))
        node = self.nodes[partition]
        try:
            if is_verified:
                node.partition.append(batch, check(batch), self.now.wall_ms, is_verified=True)
                node.sync()
            else:
                self.arrive(partition, batch)
        except BrokerError:
            return
        self._appended(identity, partition, value)

    def finish(self) -> None:
        """End a transaction, twice if the response is lost, the second time perhaps with the opposite."""
        writer = self._writer()
        if writer is None:
            return
        identity = writer.identity
        for _ in range(self.rng.choice([1, 1, 2])):
            is_commit = self.rng.random() < 0.6 and not self._is_in_doubt(identity)
            try:
                answer = self.ask(WithReservedId(EndTxnRequest(NAME, *identity, is_commit), self._next_id()))
            except BrokerError:
                continue
            if self.decided.setdefault(identity, is_commit) != is_commit:
                raise ViolationError(f"R32: the transaction of {identity} was decided both ways")
            following = (answer.producer_id, answer.producer_epoch)
            if following in self.decided:
                raise ViolationError(f"R31: {following} names two transactions")
            if writer.identity == identity:
                writer.identity, writer.sequences = following, dict.fromkeys(PARTITIONS, 0)
            if self.rng.random() < 0.3:
                self.write_some_markers()

    def write_some_markers(self) -> None:
        for pending in self.machine.pending_markers():
            written = tuple(one for one in pending.partitions if self.rng.random() < 0.6)
            if written:
                self._write(pending, written)

    def _write(self, pending: PendingMarker, written: tuple[TxnPartition, ...]) -> None:
        for one in written:
            self.mark(one, *pending[1:3], is_commit=pending.is_commit)
        report = MarkersWritten(*pending[:3], written)
        self.reports.append(report)
        self.ask(report)

    def repeat_report(self) -> None:
        if self.reports:
            self.ask(self.rng.choice(self.reports[-4:]))

    def sleep(self) -> None:
        self.advance(self.rng.choice([TIMEOUT_MS // 4, TIMEOUT_MS]))

    def replace_coordinator(self) -> None:
        self.coordinator_epoch += 1

    def stray_marker(self) -> None:
        """Let a replaced coordinator abort a transaction where a marker of its successor has arrived."""
        for partition, node in self.nodes.items():
            for opened in node.partition.open_transactions():
                state = node.log.producers.get(opened.producer_id)
                if state is not None and state.coordinator_epoch > 0:
                    by = state.coordinator_epoch - 1
                    name = (opened.producer_id, opened.producer_epoch + 1)
                    with suppress(BrokerError):
                        self.mark(partition, *name, is_commit=False, coordinator_epoch=by)

    def expire(self) -> None:
        """Let the leaders forget idle producers, unless batches are in transit.

        A leader would refuse a late batch of a producer that it has forgotten.
        """
        if not self.late:
            for node in self.nodes.values():
                for _ in range(2):
                    node.log.expire_producers(self.now.wall_ms + LONG_MS, 1)

    def heal(self) -> None:
        """Let every open transaction time out and write all markers, then compare what readers see."""
        self.advance(2 * TIMEOUT_MS)
        for _ in range(4):
            for pending in self.machine.pending_markers():
                self._write(pending, pending.partitions)
        hanging = self.hanging()
        if hanging is not None:
            raise ViolationError(f"L4: {hanging}")
        for partition in PARTITIONS:
            expected = [
                value
                for (identity, where), values in self.sent.items()
                if where == partition and self.decided.get(identity)
                for value in values
            ]
            found = self.visible(partition)
            if sorted(found) != sorted(expected):
                lost, extra = sorted({*expected} - {*found}), sorted({*found} - {*expected})
                raise ViolationError(f"R32: committed and lost: {lost}, not committed and read: {extra}")

    def group_step(self, batch_id: int) -> int:
        """Run a batch, the last one again, or retire the group. Return the last batch."""
        chance = self.rng.random()
        if chance < 0.4:
            self.run_batch(batch_id + 1)
            return batch_id + 1
        if chance < 0.55 and batch_id >= 0:
            self.ask(RetireTxnGroupRequest(NAME))
            self.run_batch(batch_id + 1)  # which revokes that
            return batch_id + 1
        if chance < 0.75:
            for _ in range(2):
                self.advance(LONG_MS)
        elif batch_id >= 0:
            before = self.visible(PARTITIONS[0])
            self.run_batch(batch_id)
            if self.visible(PARTITIONS[0]) != before:
                raise ViolationError(f"R32: batch {batch_id} was committed, and is in the log twice")
        return batch_id


def run_transaction_seed(seed: int, steps: int = STEPS) -> str | None:
    """Return the violation of one seed's history, or None."""
    world = RandomWorld(seed)
    try:
        if seed % 4 == 3:
            batch_id = -1
            for _ in range(GROUP_STEPS):
                batch_id = world.group_step(batch_id)
        else:
            for _ in range(steps):
                world.step()
            world.heal()
    except (ViolationError, AssertionError) as error:
        return str(error)
    return None
