"""Transactions in one partition's logs: two real replicas, producers, a coordinator, a reader.

A world without network and event loop, like ``proof.core.world``: the next event is random, and messages are
late, lost or duplicated. The coordinator is an oracle that decides each transaction once. Its markers and the
producers' batches arrive at random times. A read_committed reader reads as a consumer does.
``run_txn_log_seed`` returns one of these violations:

- A record is read although its transaction is undecided or aborted, or its marker is not committed.
- The open or aborted transactions, or the stable offset, differ from a replay of the log (I9, R33).
- After healing a transaction is still open, or the reader lacks a record of a committed one (L4).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kafkalite.errors import BrokerError, OutOfOrderSequenceNumberError, UnknownProducerIdError
from kafkalite.metadata.image import PartitionState
from kafkalite.model import NO_EPOCH, TopicPartition
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.records.batch import RecordBatch
from kafkalite.records.builder import build_batch
from kafkalite.records.control import parse_marker
from kafkalite.records.header import check, total_length
from kafkalite.replication.partition import Partition
from kafkalite.storage.checkpoints import RecoveryPoint
from kafkalite.storage.log import Log
from kafkalite.storage.log_config import LogConfig
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.storage.producer_state import ProducerStates
from proof.core.parts import ViolationError

NODES: Final = (1, 2)
PRODUCERS: Final = (7, 8, 9)
STEPS: Final = 250
TRIES: Final = 200  #: the maximum number of seeds to find a mutant
HEALING_ROUNDS: Final = 60
_TOPIC_ID: Final = "c" * 32
_DIRECTORY: Final = f"/data/{_TOPIC_ID}-0"
_LIMIT: Final = 1 << 20

Name = tuple[int, int]
"""(producer id, epoch) of a transaction."""


class Part(NamedTuple):
    """A batch in transit. ``is_verified`` is as of the time when the batch was sent."""

    producer_id: int
    epoch: int
    sequence: int
    is_verified: bool


class Decided(NamedTuple):
    """A marker in transit."""

    producer_id: int
    epoch: int
    coordinator_epoch: int
    is_commit: bool


class Node:
    """One replica, on a disk that survives its crashes."""

    def __init__(self, node_id: int, segment_bytes: int) -> None:
        self.node_id = node_id
        self.config = LogConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=100,
            preallocate_min_bytes=0,
            file_delete_delay_ms=0,
        )
        self.fs = MemoryFileSystem(crashable=True)
        self.fs.make_dirs("/data")
        self.fs.sync_dir("/")
        self.point = RecoveryPoint()
        self._host(Log.create(self.fs, _DIRECTORY, self.config))
        self.fs.sync_dir("/data")

    def _host(self, log: Log) -> None:
        self.log = log
        topic_partition = TopicPartition("orders", 0)
        self.partition = Partition(topic_partition, _TOPIC_ID, log, broker_id=self.node_id)

    def sync(self) -> None:
        work = self.log.begin_sync()
        if work is not None:
            work.run()
            self.log.finish_sync(work, None)
            self.point = self.log.recovery_point
            self.partition.on_synced()

    def restart(self, rng: random.Random, how: str) -> None:
        """Restart the replica. ``how`` is clean, kill or power."""
        if how == "clean":
            self.log.close(clean=True)
            end = self.log.clean_end
            assert end is not None
            self._host(Log.open_clean(self.fs, _DIRECTORY, self.config, end))
            return
        if how == "power":
            self.fs.crash(rng)
        self._host(Log.recover(self.fs, _DIRECTORY, self.config, self.point, may_lack_unsynced=True))


class World:
    """Two replicas that are always in sync, so that both disks have every committed record."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.nodes = {node_id: Node(node_id, rng.choice([1024, 4096])) for node_id in NODES}
        self.leader_epoch = 0
        self.leader = self.nodes[1]
        self.epochs = dict.fromkeys(PRODUCERS, 0)
        self.sequences = dict.fromkeys(PRODUCERS, 0)
        self.added: set[Name] = set()  # transactions to which the coordinator has added the partition
        self.decisions: dict[Name, bool] = {}
        self.committing: set[int] = set()  # producers that no longer write to their transaction
        self.counts: dict[Name, int] = {}  # the number of batches of each decided transaction
        self.coordinator_epoch = 0
        self.markers: list[Decided] = []
        self.parts: list[Part] = []
        self.position = 0
        self.read: list[tuple[int, int, int]] = []
        self._assign()

    def _assign(self) -> None:
        for node_id, node in self.nodes.items():
            state = PartitionState(NODES, NODES, self.leader.node_id, self.leader_epoch, self.leader_epoch)
            if node_id == self.leader.node_id:
                node.partition.become_leader(state)
            else:
                node.partition.become_follower(state)

    # --- events ----------------------------------------------------------------------------------------

    def step(self) -> None:
        happenings: list[tuple[Callable[[], object], int]] = [
            (self.send, 16),
            (self.deliver, 24),
            (self.decide, 6),
            (self.fetch, 30),
            (self.sync_one, 30),
            (self.poll, 12),
            (self.elect_coordinator, 1),
            (self.stray_marker, 1),
            (self.crash, 1),
        ]
        calls, weights = zip(*happenings, strict=True)
        self.rng.choices(calls, weights)[0]()
        self.check_states()

    def send(self) -> None:
        """Send a producer's next batch. Before its first one the coordinator adds the partition."""
        producer_id = self.rng.choice(PRODUCERS)
        name = (producer_id, self.epochs[producer_id])
        if producer_id in self.committing:
            return
        self.added.add(name)
        part = Part(*name, self.sequences[producer_id], is_verified=True)
        self.sequences[producer_id] += 1
        self.parts += [part] * self.rng.choice([1, 1, 2])

    def deliver(self) -> None:
        """Deliver one of the messages in transit. A marker stays in transit until it is committed."""
        number = self.rng.randrange(len(self.parts) + len(self.markers) + 1)
        if number < len(self.parts):
            self.arrive(self.parts.pop(number))
        elif number - len(self.parts) < len(self.markers):
            self.mark(self.markers[number - len(self.parts)])

    def arrive(self, part: Part) -> None:
        value = f"{part.producer_id} {part.epoch} {part.sequence}".encode()
        batch = build_batch(
            [value],
            timestamps_ms=1,
            producer_id=part.producer_id,
            producer_epoch=part.epoch,
            base_sequence=part.sequence,
            transactional=True,
        )
        try:
            self.leader.partition.append(batch, check(batch), 1, is_verified=part.is_verified)
        except (OutOfOrderSequenceNumberError, UnknownProducerIdError):
            if (part.producer_id, part.epoch) not in self.decisions:
                self.parts.append(part)  # an earlier batch must be appended first
        except BrokerError:
            return  # too late

    def mark(self, marker: Decided) -> None:
        try:
            appended = self.leader.partition.append_marker(*marker[:3], marker.is_commit, 1)
        except BrokerError:
            return
        if self.leader.partition.high_watermark > appended.last_offset and marker in self.markers:
            self.markers.remove(marker)

    def decide(self) -> None:
        """End a transaction, by its producer or by its coordinator. The next one has the next epoch."""
        producer_id = self.rng.choice(PRODUCERS)
        name = (producer_id, self.epochs[producer_id])
        pending = any(one.producer_id == producer_id for one in self.markers)
        if name not in self.added or pending:
            return
        is_commit = producer_id in self.committing or self.rng.random() < 0.7
        if is_commit:
            self.committing.add(producer_id)
            missing = set(range(self.sequences[producer_id])) - self.committed(name)
            if missing:  # the producer retries its batches before it commits
                self.parts += [Part(*name, sequence, is_verified=True) for sequence in sorted(missing)]
                return
        self.committing.discard(producer_id)
        self.decisions[name] = is_commit
        self.counts[name] = self.sequences[producer_id]
        self.epochs[producer_id] += 1
        self.sequences[producer_id] = 0
        self.markers.append(Decided(producer_id, name[1] + 1, self.coordinator_epoch, is_commit))

    def committed(self, name: Name) -> set[int]:
        """Return the sequences of a transaction's batches that are committed."""
        high_watermark = self.leader.partition.high_watermark
        return {
            header.base_sequence
            for header, marker in _headers(self.leader.log)
            if marker is None
            and (header.producer_id, header.producer_epoch) == name
            and header.last_offset < high_watermark
        }

    def elect_coordinator(self) -> None:
        """Let another coordinator load the decided transactions and continue with them."""
        self.coordinator_epoch += 1
        self.markers = [one._replace(coordinator_epoch=self.coordinator_epoch) for one in self.markers]

    def stray_marker(self) -> None:
        """Let a former coordinator end a transaction after this partition has received a marker of its
        successor.
        """
        producer_id = self.rng.choice(PRODUCERS)
        state = self.leader.log.producers.get(producer_id)
        name = (producer_id, self.epochs[producer_id])
        if state is not None and state.coordinator_epoch > 0 and name not in self.decisions:
            self.mark(Decided(producer_id, name[1] + 1, state.coordinator_epoch - 1, is_commit=False))

    def sync_one(self) -> None:
        self.nodes[self.rng.choice(NODES)].sync()

    def fetch(self) -> None:
        """Run the follower's fetch, with its response."""
        follower = next(one for one in self.nodes.values() if one is not self.leader)
        asked = follower.partition.fetch_position()
        leader = self.leader.partition
        result = leader.on_replica_fetch(
            follower.node_id,
            broker_epoch=1,
            leader_epoch=asked.leader_epoch,
            fetch_offset=asked.fetch_offset,
            last_epoch=asked.last_epoch,
            synced_end_offset=asked.synced_end_offset,
            log_start_offset=0,
            now_ms=1,
        )
        batches, diverging = b"", (NO_EPOCH, -1)
        if result.diverging is None:
            batches = b"".join(leader.read_for_replica(asked.fetch_offset, 600).buffers)
        else:
            diverging = (result.diverging.leader_epoch, result.diverging.end_offset)
        answer = ReplicaFetchedPartition(
            _TOPIC_ID, 0, 0, None, self.leader_epoch, leader.high_watermark, 0, *diverging, len(batches)
        )
        follower.partition.on_fetched(answer, memoryview(batches), now_ms=1, asked=asked)

    def crash(self) -> None:
        """Restart a node; if it led, the other one leads."""
        node = self.nodes[self.rng.choice(NODES)]
        node.restart(self.rng, self.rng.choice(["clean", "kill", "power"]))
        if node is self.leader:
            self.leader = next(one for one in self.nodes.values() if one is not node)
        self.leader_epoch += 1
        self._assign()

    # --- reading ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read committed records as a consumer does."""
        partition, log = self.leader.partition, self.leader.log
        if self.position > partition.high_watermark:
            return  # a new leader that does not know the committed end yet
        read = partition.read(self.position, 500, is_committed_only=True)
        pending = sorted(log.aborted_between(self.position, read.next_offset), key=lambda one: one[1])
        aborted: set[int] = set()
        for batch in _batches(read.buffers):
            header = batch.header
            while pending and pending[0][1] <= header.base_offset:
                aborted.add(pending.pop(0)[0])
            self.position = header.next_offset
            if header.is_control:
                if not parse_marker(batch.buffer).is_commit:
                    aborted.discard(header.producer_id)
            elif header.producer_id not in aborted:
                for value in batch.columns().values:
                    assert value is not None
                    self.consume(*map(int, value.split()))

    def consume(self, producer_id: int, epoch: int, sequence: int) -> None:
        decision = self.decisions.get((producer_id, epoch))
        if decision is not True:
            what = "undecided" if decision is None else "aborted"
            raise ViolationError(f"R33: a record of an {what} transaction of producer {producer_id} was read")
        if (producer_id, epoch, sequence) in self.read:
            raise ViolationError(f"I6: a record of producer {producer_id} was read twice")
        self.read.append((producer_id, epoch, sequence))

    # --- checking --------------------------------------------------------------------------------------

    def check_states(self) -> None:
        """Check that the producer state of each replica equals a replay of its log."""
        for node in self.nodes.values():
            log = node.log
            states, ended = ProducerStates(), []
            for header, marker in _headers(log):
                if marker is not None:
                    first = states.open.get(header.producer_id)
                    if first is not None:
                        ended.append((first, header.base_offset))
                    states.note_marker(
                        header.producer_id,
                        header.producer_epoch,
                        marker.coordinator_epoch,
                        header.base_offset,
                        1,
                        is_commit=marker.is_commit,
                    )
                else:
                    self._note(states, header)
            if log.producers != states:
                raise ViolationError(f"I9: the producers of {node.node_id} are not those of its log")
            high_watermark = node.partition.high_watermark
            held_back = [*states.open.values(), *(one[0] for one in ended if one[1] >= high_watermark)]
            if log.last_stable_offset(high_watermark) > min([high_watermark, *held_back]):
                raise ViolationError(f"R33: what is not stable counts as stable on {node.node_id}")

    def _note(self, states: ProducerStates, header: Any) -> None:
        states.note_open(header.producer_id, header.producer_epoch, header.base_offset, 1)
        states.note(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.base_offset,
            header.last_offset,
            1,
            1,
            header.crc,
        )

    def heal(self) -> None:
        """Deliver everything. No transaction may stay open, and every committed record must be read (L4)."""
        for _ in range(HEALING_ROUNDS):
            parts, self.parts = self.parts, []
            for part in parts:
                self.arrive(part)
            for producer_id in PRODUCERS:
                name = (producer_id, self.epochs[producer_id])
                if name in self.added and not any(one.producer_id == producer_id for one in self.markers):
                    self.decisions[name] = False
                    self.counts[name] = 0
                    self.epochs[producer_id] += 1
                    self.markers.append(Decided(producer_id, name[1] + 1, self.coordinator_epoch, False))
            for marker in list(self.markers):
                self.mark(marker)
            self.fetch()
            for node in self.nodes.values():
                node.sync()
            self.poll()
            self.check_states()
        self._check_healed()

    def _check_healed(self) -> None:
        if self.markers:
            raise ViolationError(f"L2: markers were never committed: {self.markers}")
        still = self.leader.partition.open_transactions()
        if still:
            raise ViolationError(f"L4: transactions hang after healing: {still}")
        expected = {
            (*name, sequence)
            for name, is_commit in self.decisions.items()
            if is_commit
            for sequence in range(self.counts[name])
        }
        if set(self.read) != expected:
            raise ViolationError(f"L1: the reader has {len(self.read)} records of {len(expected)}")


def read_committed(partition: Partition) -> list[bytes]:
    """Return all records that a read_committed reader receives from a leader, filtered as the client does."""
    read = partition.read(0, _LIMIT, is_committed_only=True)
    pending = sorted(partition.log.aborted_between(0, read.next_offset), key=lambda one: one[1])
    aborted: set[int] = set()
    found: list[bytes] = []
    for batch in _batches(read.buffers):
        header = batch.header
        while pending and pending[0][1] <= header.base_offset:
            aborted.add(pending.pop(0)[0])
        if header.is_control:
            aborted.discard(header.producer_id)
        elif header.producer_id not in aborted:
            found += [value for value in batch.columns().values if value is not None]
    return found


def _batches(buffers: list[memoryview]) -> list[RecordBatch]:
    found = []
    for buffer in buffers:
        position = 0
        while position < len(buffer):
            length = total_length(buffer, position)
            found.append(RecordBatch(buffer[position : position + length]))
            position += length
    return found


def _headers(log: Log) -> list[tuple[Any, Any]]:
    """Return (header, marker or None) of every batch."""
    read = log.read(0, max_bytes=_LIMIT, up_to=_LIMIT)
    return [
        (one.header, parse_marker(one.buffer) if one.header.is_control else None)
        for one in _batches(read.buffers)
    ]


def run_txn_log_seed(seed: int, steps: int = STEPS) -> str | None:
    """Return the violation of one seed's history, or None."""
    world = World(seed)
    try:
        for _ in range(steps):
            world.step()
        world.heal()
    except ViolationError as violation:
        return str(violation)
    return None


def _any_seed() -> str | None:
    return next(filter(None, map(run_txn_log_seed, range(1, TRIES))), None)


#: {mutant: schedule}: random seeds find them quickly.
DIRECTED: Final[dict[str, Callable[[], str | None]]] = dict.fromkeys(
    (
        "R31-marker-epoch-ignored",
        "R32-old-coordinator",
        "R33-lso-ignores-open",
        "R33-lso-uncommitted-marker",
        "R33-index-forgotten",
    ),
    _any_seed,
)
