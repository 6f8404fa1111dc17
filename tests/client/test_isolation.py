"""read_committed (R33), against a reading of the whole log, and the positions in between."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalite.client.cluster.routing import Leader
from kafkalite.client.config import ConsumerConfig
from kafkalite.client.consumer.assigned_partitions import AssignedPartitions
from kafkalite.model import IsolationLevel, TopicPartition
from kafkalite.protocol.messages.data import AbortedTransaction, FetchedPartition
from kafkalite.records.builder import build_batch
from kafkalite.records.control import build_marker
from kafkalite.records.header import stamp

T0 = TopicPartition("t", 0)


@dataclass
class Log:
    """One partition's log, its aborted transactions as a broker knows them, and its committed records."""

    batches: list[tuple[int, int, bytes]] = field(default_factory=list)  # base, next offset, bytes
    aborted: list[tuple[int, int, int]] = field(default_factory=list)  # producer, first offset, marker
    open: dict[int, tuple[int, list[bytes]]] = field(default_factory=dict)
    committed: dict[int, bytes] = field(default_factory=dict)  # by offset
    end: int = 0

    def _append(self, batch: bytearray, count: int) -> None:
        stamp(batch, base_offset=self.end, leader_epoch=1)
        self.batches.append((self.end, self.end + count, bytes(batch)))
        self.end += count

    def plain(self, *values: bytes) -> None:
        self.committed.update(enumerate(values, self.end))
        self._append(build_batch(list(values), None, 1), len(values))

    def write(self, producer: int, *values: bytes) -> None:
        _, offsets = self.open.setdefault(producer, (self.end, []))
        offsets += [b"%d " % offset + value for offset, value in enumerate(values, self.end)]
        batch = build_batch(
            list(values), None, 1, producer_id=producer, producer_epoch=0, base_sequence=0, transactional=True
        )
        self._append(batch, len(values))

    def end_transaction(self, producer: int, *, is_commit: bool) -> None:
        first, values = self.open.pop(producer, (self.end, []))
        if is_commit:
            for value in values:
                offset, _, rest = value.partition(b" ")
                self.committed[int(offset)] = rest
        elif values:
            self.aborted.append((producer, first, self.end))
        self._append(build_marker(producer, 1, 0, is_commit, 1), 1)

    @property
    def stable(self) -> int:
        return min((first for first, _ in self.open.values()), default=self.end)

    def answer(self, offset: int, max_batches: int) -> tuple[FetchedPartition, bytes]:
        """Respond as a broker: whole batches up to the last stable offset, and aborted transactions in
        them.
        """
        chosen = [one for one in self.batches if one[1] > offset and one[1] <= self.stable][:max_batches]
        data = b"".join(batch for _, _, batch in chosen)
        first, end = (chosen[0][0], chosen[-1][1]) if chosen else (offset, offset)
        aborted = [
            AbortedTransaction(producer, begun)
            for producer, begun, marker in sorted(self.aborted, key=lambda one: one[2])
            if begun < end and marker >= first
        ]
        return FetchedPartition(*T0, 0, None, self.end, self.stable, 0, len(data), aborted), data


def _consumer(start: int = 0, *, is_read_committed: bool = True) -> AssignedPartitions:
    level = IsolationLevel.READ_COMMITTED if is_read_committed else IsolationLevel.READ_UNCOMMITTED
    state = AssignedPartitions(ConsumerConfig(isolation_level=level))
    state.assign({T0: "earliest"})
    state.partitions[T0].seek(start)
    return state


def _fetch(state: AssignedPartitions, log: Log, max_batches: int = 1000) -> bool:
    """One round. Returns False if there was nothing to fetch."""
    plans, _ = state.plan(0, lambda tp: Leader(1, 1), lambda node: False)
    for plan in plans:
        result, data = log.answer(plan.requested[T0].fetch_offset, max_batches)
        state.on_fetched(plan.requested, [result], memoryview(data), 0, 0.5)
    return bool(plans)


def _read(state: AssignedPartitions, limit: int = 1000) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while len(found) < limit and (cursor := state.next_cursor()) is not None:
        found.update((record.offset, record.value or b"") for record in cursor.take(limit - len(found)))
    return found


def _log() -> Log:
    log = Log()
    log.plain(b"0")
    log.write(1, b"1", b"2")
    log.write(2, b"3")
    log.plain(b"4")
    log.end_transaction(1, is_commit=False)  # 5
    log.write(1, b"6")
    log.end_transaction(2, is_commit=True)  # 7
    log.end_transaction(1, is_commit=True)  # 8
    log.write(3, b"9")
    log.plain(b"10")
    return log


def test_aborted_and_open_transactions_are_not_seen_r33() -> None:
    log, state = _log(), _consumer()
    _fetch(state, log)
    assert _read(state) == {0: b"0", 3: b"3", 4: b"4", 6: b"6"}
    assert state.partitions[T0].position == 9, "past the markers: nothing is left to read"
    assert state.partitions[T0].readable_end == 9, "the last stable offset"
    log.end_transaction(3, is_commit=False)
    _fetch(state, log)
    assert _read(state) == {10: b"10"}
    assert state.partitions[T0].position == 12


def test_with_read_uncommitted_only_markers_are_skipped() -> None:
    log, state = _log(), _consumer(is_read_committed=False)
    log.end_transaction(3, is_commit=False)
    _fetch(state, log)
    assert sorted(_read(state)) == [0, 1, 2, 3, 4, 6, 9, 10]
    assert state.partitions[T0].position == 12


def test_a_response_that_begins_inside_an_aborted_transaction() -> None:
    log = _log()
    for start in range(9):
        state = _consumer(start)
        while state.partitions[T0].fetch_offset < 9:
            _fetch(state, log, 1)
            _read(state)
        assert state.partitions[T0].position == 9
        state = _consumer(start)
        _fetch(state, log)
        assert _read(state) == {at: v for at, v in log.committed.items() if start <= at < 9}


def test_the_position_moves_over_dropped_batches_in_order() -> None:
    log, state = Log(), _consumer()
    partition = state.partitions[T0]
    log.plain(b"0", b"1")
    log.write(1, b"2")
    log.end_transaction(1, is_commit=False)  # 3
    _fetch(state, log)
    assert _read(state, 1) == {0: b"0"}
    assert partition.position == 1
    assert _read(state, 1) == {1: b"1"}
    assert partition.position == 4, "after the last record, the filtered records behind it are skipped"
    log.write(1, b"4")
    log.end_transaction(1, is_commit=False)  # 5
    _fetch(state, log)
    assert partition.position == 6
    assert not partition.has_records
    assert state.next_batch() is None
    log.plain(b"6")
    log.write(1, b"7")
    log.end_transaction(1, is_commit=False)  # 8
    log.write(1, b"9")
    log.end_transaction(1, is_commit=False)  # 10
    log.plain(b"11")
    log.end_transaction(1, is_commit=True)  # 12
    _fetch(state, log)
    batch = state.next_batch()
    assert batch is not None and len(batch) == 1
    assert partition.position == 11
    assert _read(state) == {11: b"11"}
    assert partition.position == 13


def test_no_fetch_ahead_of_the_last_stable_offset() -> None:
    log, state = Log(), _consumer()
    log.plain(b"0")
    log.write(1, b"1")
    log.plain(b"2")
    _fetch(state, log)
    assert state.partitions[T0].has_records
    assert not _fetch(state, log), "what is open is not there yet"


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["plain", "write", "write", "commit", "abort", "fetch", "read"]), st.integers(1, 3)
    ),
    max_size=40,
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(_STEPS, st.integers(1, 4))
def test_any_interleaving_returns_the_committed_and_stable_records(
    steps: list[tuple[str, int]], max_batches: int
) -> None:
    log, state = Log(), _consumer()
    found: dict[int, bytes] = {}
    for number, (step, producer) in enumerate([*steps, ("commit", 1), ("abort", 2), ("commit", 3)]):
        match step:
            case "plain":
                log.plain(b"p%d" % number)
            case "write":
                log.write(producer, *[b"t%d" % number] * producer)
            case "commit" | "abort":
                log.end_transaction(producer, is_commit=step == "commit")
            case "fetch":
                _fetch(state, log, max_batches)
            case "read":
                found.update(_read(state, producer))
        position = state.partitions[T0].position
        assert position is not None and position <= log.stable
        assert all(at < position for at in found)
    while state.partitions[T0].position != log.end:
        _fetch(state, log, max_batches)
        found.update(_read(state))
    assert found == log.committed
