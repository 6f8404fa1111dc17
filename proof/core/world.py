"""The world of the core model: three brokers, their controller, a network, two producers, the invariants.

These parts are real: ``replication.Partition`` on a real ``storage.Log`` over a disk that loses unsynced
data, and ``metadata.controller.decide`` with its images. These are simulated: the network (messages are lost,
duplicated, reordered), metadata that arrives late or in several versions at once, producers that retry, and
processes that are killed, lose power or stop in an orderly way. min.insync.replicas is 2. ``check`` checks
the invariants I1 to I8, ``check_producers`` I9. ``proof.core.model`` chooses the events at random, and
``proof.core.directed`` by schedule.
"""

# Long because the controller, brokers, clients, faults and invariants of one world share its state.

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kafkalite.errors import (
    BrokerError,
    CorruptBatchError,
    ErrorCode,
    OffsetOutOfRangeError,
    ShortLeaderError,
)
from kafkalite.metadata.broker_commands import FenceBroker, UnfenceBroker
from kafkalite.metadata.controller import decide
from kafkalite.metadata.decision import ControllerSettings, edit_records
from kafkalite.metadata.delta import Delta
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.features import SUPPORTED, newest_levels
from kafkalite.metadata.image import EMPTY, ClusterImage, PartitionState
from kafkalite.metadata.reassignment_commands import ContinueReassignments
from kafkalite.metadata.records import TOPIC, ConfigRecord, MetadataRecord, PartitionRecord, TopicRecord
from kafkalite.metadata.recovery import ReplaceShortLeaders, ReplicaReports
from kafkalite.model import LATEST, Acks
from kafkalite.protocol.messages.admin import AlterPartitionReassignmentsRequest, PartitionReassignment
from kafkalite.protocol.messages.cluster import (
    AlterPartitionRequest,
    ChangedPartition,
    CheckpointHighWatermarksRequest,
    PartitionChange,
    PartitionHighWatermark,
    RegisterBrokerRequestV1,
    ReplicaFetchedPartition,
    ReplicaReport,
    ReportReplicasRequest,
)
from kafkalite.records.header import HEADER, HEADER_BYTES, LENGTH_OVERHEAD_BYTES, check, stored_crc
from kafkalite.replication.follower import FetchPosition
from kafkalite.storage.log_config import FSYNC, PAGE_CACHE, LogConfig
from kafkalite.storage.log_store import is_earlier_replica
from kafkalite.storage.producer_state import ProducerStates
from proof import mutants
from proof.core.near_reader import NearReader, rack_of
from proof.core.parts import (
    MIN_ISR,
    TOPIC_ID,
    TP,
    Broker,
    Entry,
    Message,
    Producer,
    ViolationError,
    Waiting,
    make_batch,
)

BROKERS: Final = (1, 2, 3)
HEALING_ROUNDS: Final = 80
NEVER_MS: Final = 10**9


class World:
    """The whole world. ``step`` lets one event happen, chosen by the seed's own weights."""

    def __init__(
        self,
        seed: int,
        *,
        fsync: bool = True,
        duplicates: float = 0.0,
        losses: float = 0.0,
        node_ids: tuple[int, ...] = BROKERS,
    ) -> None:
        """``node_ids`` has the nodes ``BROKERS``, which have the replicas at first, and may have others."""
        self.rng = random.Random(seed)
        self.fsync = fsync
        self.duplicates, self.losses = duplicates, losses
        self.power_losses_left = NEVER_MS if fsync else 1
        self.now_ms = 1
        self.settings = ControllerSettings()
        self.reports = ReplicaReports(self.settings)
        config = LogConfig(
            durability=FSYNC if fsync else PAGE_CACHE,
            segment_bytes=self.rng.choice([1024, 3000, 1 << 20]),
            index_interval_bytes=100,
            preallocate_min_bytes=0,
            preallocate_max_bytes=256,
            file_delete_delay_ms=0,
        )
        self.brokers = {node_id: Broker(node_id, config) for node_id in node_ids}
        self.network: list[Message] = []
        self.producers = [Producer(7), Producer(8)]
        self.values = 0
        self.sent: dict[int, tuple[int, int]] = {}  # {value: (sequence, record count)}
        self.acknowledged: dict[int, int] = {}
        self.consumed: list[int | None] = []
        self.committed_end = 0  # the greatest high watermark of any leader
        self.near = NearReader(self, self.rng.choice(BROKERS[1:]))
        self.synced_before = 0  # end of the committed records that the ISR had synced when a move began
        self.told_end = 0  # the last answer to the question where the partition ends
        self.written: dict[tuple[int, int], Entry] = {}
        self.leaders: dict[int, tuple[int, int]] = {}
        self.images = [Delta(EMPTY).replay_all(newest_levels()).apply(0)]
        self.checked: PartitionState | None = None  # the state when the replicas last changed
        self.may_be_short = False  #: whether a leader may lack records: no other one returned in time
        self._begin()

    def _begin(self) -> None:
        for broker in self.brokers.values():
            broker.boot()
            self.register(broker)
        for broker in self.brokers.values():
            self.command(UnfenceBroker(broker.node_id, broker.broker_epoch))
        first = PartitionState(BROKERS, BROKERS, BROKERS[0], leader_epoch=0, partition_epoch=0)
        self.commit(
            [
                TopicRecord(TOPIC_ID, TP.topic),
                PartitionRecord(TOPIC_ID, 0, *first),
                ConfigRecord(TOPIC, TP.topic, "min.insync.replicas", str(MIN_ISR)),
            ]
        )
        for broker in self.brokers.values():
            self.publish(broker, len(self.images) - 1)

    # --- the controller --------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self.images[-1]

    @property
    def state(self) -> PartitionState:
        state = self.image.partition(*TP)
        assert state is not None
        return state

    def commit(self, records: list[MetadataRecord] | tuple[MetadataRecord, ...]) -> None:
        if not records:
            return
        delta = Delta(self.image)
        for record in records:
            delta.replay(record)
        self.images.append(delta.apply(self.image.metadata_offset + 1))

    def command(self, command: Any) -> Any:
        step = decide(self.image, command, now_ms=self.now_ms, rng=self.rng, settings=self.settings)
        self.commit(list(step.records))
        return step.reply

    def register(self, broker: Broker) -> None:
        incarnation = f"{broker.node_id:016x}{broker.life:016x}"
        answer = self.command(
            RegisterBrokerRequestV1(
                broker.node_id,
                incarnation,
                f"{broker.node_id:032x}",
                ["inproc://x"],
                rack_of(broker.node_id),
                broker.clean_epoch,
                self.fsync,
                [],
                broker.life,
                list(SUPPORTED),
            )
        )
        assert answer.error_code == 0, answer
        broker.broker_epoch = broker.last_epoch = answer.broker_epoch
        broker.clean_epoch = -1
        broker.registration_offset = self.image.brokers[broker.node_id].registration_offset

    def fence(self, node_id: int) -> None:
        known = self.image.brokers[node_id]
        if not known.is_fenced:
            self.command(FenceBroker(node_id, known.broker_epoch))

    def unfence(self, node_id: int) -> None:
        broker, known = self.brokers[node_id], self.image.brokers[node_id]
        is_alive = broker.is_registered and broker.broker_epoch == known.broker_epoch
        if known.is_fenced and is_alive and broker.replayed >= broker.registration_offset:
            self.command(UnfenceBroker(node_id, known.broker_epoch))

    def report(self, broker: Broker) -> None:
        """Let a broker report its log if it knows that the partition has no leader (R46)."""
        state, partition = self.state, broker.partition
        if not broker.is_registered or partition.role != "follower" or partition.leader_epoch < 0:
            return
        if state.leader < 0 <= state.leader_epoch == partition.leader_epoch:
            request = ReportReplicasRequest(broker.node_id, broker.broker_epoch, [self._report_of(broker)])
            self.reports.take(self.image, request, self.now_ms)
            self.recover(self.now_ms)

    def _report_of(self, broker: Broker) -> ReplicaReport:
        partition, log = broker.partition, broker.log
        return ReplicaReport(
            TOPIC_ID,
            0,
            partition.leader_epoch,
            log.latest_epoch,
            log.log_end_offset,
            log.is_damaged,
            max(partition.committed_end, 0 if log.damage is None else log.damage.known_end_offset),
            -1,
        )

    def recover(self, now_ms: int) -> None:
        """Elect leaders by comparing the reported logs. A ``now_ms`` far in the future ends all waits."""
        command = self.reports.due(self.image, now_ms)
        if command is not None:
            self.command(command)

    def checkpoint(self, node_id: int) -> None:
        """Store the leader's high watermark in the metadata."""
        broker = self.brokers[node_id]
        known = PartitionHighWatermark(
            TOPIC_ID, 0, broker.partition.leader_epoch, broker.partition.high_watermark
        )
        self.command(CheckpointHighWatermarksRequest(node_id, broker.broker_epoch, [known]))

    def reassign(self, target: list[int] | None) -> None:
        """Begin to move the partition to the brokers ``target``, or cancel that (R60)."""
        in_sync = [self.brokers[node_id].log.synced_end_offset for node_id in self.state.isr]
        known = min([*in_sync, self.committed_end]) if in_sync else 0
        self.synced_before = max(self.synced_before, known)
        item = PartitionReassignment(TP.topic, 0, target)
        self.command(AlterPartitionReassignmentsRequest(1_000, True, [item]))

    def move_leader(self, node_id: int) -> None:
        """Let a live member of the ISR lead, as a preferred-leader election does."""
        edit = PartitionEdit(self.state, MIN_ISR)
        if node_id in self.state.isr and self.image.brokers[node_id].is_live:
            edit.lead(node_id)
            self.commit(edit_records(self.image, TOPIC_ID, 0, edit))

    # --- brokers ---------------------------------------------------------------------------------------

    def publish(self, broker: Broker, number: int) -> None:
        """Publish the metadata up to ``images[number]`` to a broker, with all versions in between at once."""
        broker.replayed = self.images[number].metadata_offset
        is_before = broker.replayed < broker.registration_offset
        if is_before and "R22-stale-metadata" not in mutants.ACTIVE:
            return
        state = self.images[number].partition(*TP)
        if state is None:
            return
        if not self._has_replica(broker, state):
            return
        partition, epoch = broker.partition, broker.partition.leader_epoch
        if state.leader == broker.node_id:
            known = self.images[number].high_watermarks.get((TOPIC_ID, 0), 0)
            moved = partition.become_leader(state, now_ms=self.now_ms, known_high_watermark=known)
            who = (broker.node_id, broker.life)
            if self.leaders.setdefault(state.leader_epoch, who) != who:
                raise ViolationError("I5: two leaders in one epoch")
            if moved:
                self.acknowledge(broker)
        else:
            known = self.images[number].high_watermarks.get((TOPIC_ID, 0), 0)
            partition.become_follower(state, known_high_watermark=known)
        if partition.leader_epoch != epoch:
            broker.waiting.clear()

    def _has_replica(self, broker: Broker, state: PartitionState) -> bool:
        """Delete the log of a removed replica, and that of an earlier one (R62). Return whether the broker
        has a replica."""
        epoch, members = state.replica_epoch(broker.node_id), state.isr + state.elr + state.last_known_elr
        is_new = epoch > 0 and broker.node_id not in members
        if broker.node_id not in state.replicas:
            broker.delete_log()
        elif is_new and is_earlier_replica(broker.replica_epoch, epoch):
            broker.delete_log(epoch)
        return broker.node_id in state.replicas

    def send(self, kind: str, to: int, *body: Any) -> None:
        self.network.append(Message(kind, to, self.brokers[to].life if to else 0, body))

    def deliver(self, message: Message) -> None:
        if message.kind == "alter":
            self.on_alter(*message.body)
            return
        broker = self.brokers[message.to]
        if broker.is_registered and broker.life == message.life:
            handlers: dict[str, Callable[..., None]] = {
                "fetch": self.on_fetch,
                "fetched": self.on_fetched,
                "altered": self.on_altered,
                "produce": self.on_produce,
            }
            handlers[message.kind](broker, *message.body)

    def fetch(self, broker: Broker) -> None:
        partition = broker.partition
        if partition.role == "follower" and partition.leader_id > 0:
            position = partition.fetch_position()
            self.send(
                "fetch", partition.leader_id, broker.node_id, broker.life, broker.broker_epoch, position
            )

    def on_fetch(
        self, broker: Broker, source: int, life: int, broker_epoch: int, position: FetchPosition
    ) -> None:
        partition, answer = (
            broker.partition,
            ReplicaFetchedPartition(TOPIC_ID, 0, 0, None, 0, 0, 0, -1, -1, 0),
        )
        epoch = position.leader_epoch if "R3-epoch-unchecked" in mutants.ACTIVE else partition.leader_epoch
        data = b""
        try:
            result = partition.on_replica_fetch(
                source, broker_epoch=broker_epoch, now_ms=self.now_ms, **_asked(position)
            )
            diverging = result.diverging or (-1, -1)
            if result.moved:
                self.acknowledge(broker)
            if result.may_join:
                self.propose(broker, NEVER_MS)
            if result.diverging is None:
                found = partition.read_for_replica(position.fetch_offset, self.rng.choice([1, 150, 400]))
                data = b"".join(found.buffers)
            answer = answer._replace(diverging_epoch=diverging[0], diverging_end_offset=diverging[1])
        except OffsetOutOfRangeError:
            answer = answer._replace(error_code=int(ErrorCode.OFFSET_OUT_OF_RANGE))
        except BrokerError:
            return
        answer = answer._replace(
            leader_epoch=epoch,
            high_watermark=partition.high_watermark,
            log_start_offset=broker.log.log_start_offset,
            length_bytes=len(data),
        )
        self.network.append(Message("fetched", source, life, (position, answer, data)))

    def on_fetched(
        self, broker: Broker, position: FetchPosition, answer: ReplicaFetchedPartition, data: bytes
    ) -> None:
        partition = broker.partition
        try:
            partition.on_fetched(answer, memoryview(data), now_ms=self.now_ms, asked=position)
        except ShortLeaderError as error:
            report = self._report_of(broker)._replace(refused_offset=error.offset)
            self.command(ReplaceShortLeaders(broker.node_id, broker.broker_epoch, (report,)))
        except (BrokerError, CorruptBatchError):  # refused: it will be fetched again
            pass

    def propose(self, broker: Broker, lag_time_max_ms: int) -> None:
        image = next(one for one in reversed(self.images) if one.metadata_offset <= broker.replayed)

        def live(node_id: int) -> int | None:
            known = image.brokers.get(node_id)
            return known.broker_epoch if known is not None and known.is_live else None

        change = broker.partition.propose_isr(self.now_ms, lag_time_max_ms=lag_time_max_ms, live=live)
        self.acknowledge(broker)
        if change is not None:
            self.send_alter(broker, change)

    def send_alter(self, broker: Broker, change: PartitionChange) -> None:
        self.send("alter", 0, broker.node_id, broker.life, broker.broker_epoch, change)

    def on_alter(self, source: int, life: int, broker_epoch: int, change: PartitionChange) -> None:
        answer = self.command(AlterPartitionRequest(source, broker_epoch, [change]))
        changed = answer.partitions[0] if not answer.error_code and answer.partitions else None
        self.network.append(Message("altered", source, life, (changed,)))

    def on_altered(self, broker: Broker, answer: ChangedPartition | None) -> None:
        """Process a response to a proposal. The new state itself arrives with the metadata (R14)."""
        if answer is None or answer.partition_epoch <= broker.partition.partition_epoch:
            broker.partition.on_undecided()

    # --- clients ---------------------------------------------------------------------------------------

    def produce(self) -> None:
        """Send a new or an unacknowledged batch to a broker that claims to lead."""
        producer = self.rng.choice(self.producers)
        waiting = len(producer.unacknowledged)
        is_full = waiting and producer.next_sequence - self.sent[next(iter(producer.unacknowledged))][0] >= 5
        if not waiting or (waiting < 3 and not is_full and self.rng.random() < 0.8):
            value = self.new_value(producer, self.rng.choice([1, 1, 1, 2, 3]))
        else:
            value = self.rng.choice(list(producer.unacknowledged))
        leaders = [broker.node_id for broker in self.brokers.values() if broker.leads]
        if leaders:
            self.send("produce", self.rng.choice(leaders), producer, value)

    def forge(self) -> None:
        """Let another client send a batch with a producer's id and next sequence (R28)."""
        producer = self.rng.choice(self.producers)
        producer.is_forged = True
        self.values += 1
        self.sent[self.values] = (producer.next_sequence, 1)
        for broker in self.brokers.values():
            if broker.leads:
                self.send("produce", broker.node_id, producer, self.values)

    def new_value(self, producer: Producer, count: int = 1) -> int:
        self.values += 1
        self.sent[self.values] = (producer.next_sequence, count)
        producer.next_sequence += count
        producer.unacknowledged[self.values] = None
        return self.values

    def on_produce(self, broker: Broker, producer: Producer, value: int) -> None:
        sequence, count = self.sent[value]
        batch = make_batch(value, count, producer.producer_id, sequence)
        partition = broker.partition
        try:
            appended = partition.append(batch, check(batch), self.now_ms)
        except BrokerError:
            return
        if not appended.is_duplicate and len(partition.in_sync_replicas) < MIN_ISR:
            raise ViolationError(f"R6: appended with {len(partition.in_sync_replicas)} replicas in sync")
        base_offset, last_offset = appended.base_offset, appended.last_offset
        broker.waiting.append(Waiting(last_offset, base_offset, value, producer))
        self.acknowledge(broker)

    def acknowledge(self, broker: Broker) -> None:
        """Acknowledge every batch below the high watermark; a response may be lost."""
        partition, end = broker.partition, broker.partition.acknowledged_end(int(Acks.ALL))
        if partition.acknowledgement_error is not None:
            broker.waiting.clear()
            return
        left: list[Waiting] = []
        for one in broker.waiting:
            if one.last_offset >= end:
                left.append(one)
                continue
            if self.acknowledged.setdefault(one.value, one.base_offset) != one.base_offset:
                raise ViolationError("R28: a batch acknowledged at two offsets")
            if self.rng.random() >= self.losses:
                one.producer.unacknowledged.pop(one.value, None)
        broker.waiting = left

    def consume(self) -> None:
        for broker in self.brokers.values():
            state = self.state
            if broker.leads and state.leader == broker.node_id == broker.partition.leader_id:
                if broker.partition.leader_epoch != state.leader_epoch:
                    continue
                self.look(broker)
                self._ask_end(broker)
                with suppress(BrokerError):  # a new leader may not know yet what is committed
                    start = max(len(self.consumed), broker.log.log_start_offset)
                    known = broker.contents[len(self.consumed) : broker.partition.readable_end(start)]
                    self.consumed += [None if entry is None else entry[1] for entry in known]

    def _ask_end(self, broker: Broker) -> None:
        """Ask for the end of the partition, as a consumer that starts at the end does (R10)."""
        with suppress(BrokerError):
            end = broker.partition.list_offset(LATEST).offset
            if end < self.told_end:
                raise ViolationError(f"R10: the partition ended at {self.told_end}, and ends at {end}")
            self.told_end = end

    # --- faults ----------------------------------------------------------------------------------------

    def crash(self, broker: Broker, kind: str) -> None:
        """Crash a broker. ``kill`` keeps the page cache, ``power`` may lose unsynced data, and ``stop`` is a
        controlled shutdown.
        """
        if kind == "stop":
            if broker.is_registered:
                self.fence(broker.node_id)
                broker.log.close(clean=True)
                broker.fs.sync_dir("/data")  # like LogStore, with the marker of the clean stop
                broker.clean_end, broker.clean_epoch = broker.log.clean_end, broker.broker_epoch
            elif "R21-marker-unregistered" in mutants.ACTIVE:
                broker.log.close(clean=True)
                broker.clean_end, broker.clean_epoch = broker.log.clean_end, broker.last_epoch
        else:
            broker.clean_epoch = -1
            if kind == "power":
                broker.fs.crash(self.rng)
        broker.end_before = broker.log.log_end_offset
        broker.is_up = False

    # --- invariants ------------------------------------------------------------------------------------

    def look(self, broker: Broker) -> None:
        """Update ``contents`` from the log, and check each new batch against the whole history."""
        log = broker.log
        version = (broker.life, log.recovery_point.truncations)
        end, contents = log.log_end_offset, broker.contents
        if version != broker.seen:
            broker.seen, broker.verified = version, None
            contents.clear()
            broker.sequences.clear()
        elif end == len(contents):
            return
        start = log.log_start_offset
        contents += [None] * (start - len(contents))
        while len(contents) < end:
            found = log.read(len(contents), max_bytes=1 << 20, up_to=end)
            for view in found.buffers:
                self._take(broker, view)

    def _take(self, broker: Broker, view: memoryview) -> None:
        contents, position = broker.contents, 0
        while position < len(view):
            header = HEADER.unpack_from(view, position)
            base, size, epoch, producer_id, sequence, count = (*header[:3], header[9], header[11], header[12])
            value = int.from_bytes(view[position + HEADER_BYTES : position + HEADER_BYTES + 8], "big")
            position += size + LENGTH_OVERHEAD_BYTES
            expected = broker.sequences.get(producer_id)
            if sequence != (expected or 0) and (expected is not None or base == 0):
                raise ViolationError(f"R28: sequence {sequence} of producer {producer_id} after {expected}")
            broker.sequences[producer_id] = sequence + count
            for number in range(len(contents) - base, count):
                entry = (epoch, value, producer_id, sequence, number)
                if self.written.setdefault((base + number, epoch), entry) != entry:
                    raise ViolationError("I3: same offset and epoch, other bytes")
                contents.append(entry)

    def check(self) -> None:
        state = self.state
        up = [broker for broker in self.brokers.values() if broker.is_registered]
        for broker in up:
            self.look(broker)
            log = broker.log
            if broker.leads:
                self.committed_end = max(self.committed_end, broker.partition.high_watermark)
            if not log.synced_end_offset <= log.log_end_offset >= broker.partition.high_watermark:
                raise ViolationError(f"I8: high watermark beyond the end of {log}")
        if self.may_be_short:
            return
        self._check_copies(state)
        for broker in up:
            is_candidate = broker.node_id in state.isr or broker.node_id in state.elr
            if is_candidate and broker.broker_epoch == self.image.brokers[broker.node_id].broker_epoch:
                self._check_complete(broker)
                if broker.node_id in state.isr and broker.log.synced_end_offset < self.synced_before:
                    raise ViolationError(f"R68: {broker.node_id} joined before it has synced old records")
        for number, one in enumerate(up):
            for other in up[number + 1 :]:
                low = max(one.log.log_start_offset, other.log.log_start_offset)
                high = min(one.partition.high_watermark, other.partition.high_watermark)
                if one.contents[low:high] != other.contents[low:high]:
                    raise ViolationError("I3: logs differ below both high watermarks")
        for broker in up:
            partition = broker.partition
            if partition.is_leader and (partition.leader_epoch, broker.node_id) == (
                state.leader_epoch,
                state.leader,
            ):
                self._check_consumed(broker)

    def _check_copies(self, state: PartitionState) -> None:
        """Check I13 when replicas were removed: enough of the others are in sync and, on disks that lose
        nothing, have what was acknowledged."""
        before = self.checked
        if before is not None and state.replicas == before.replicas:
            return
        self.checked = state
        if before is not None and not set(before.original_replicas) <= set(state.replicas):
            enough = min(MIN_ISR, len(state.replicas))
            if len(state.isr) < enough:
                raise ViolationError(
                    f"I13: {before.original_replicas} were replaced, in sync are {state.isr}"
                )
        if not self.fsync:
            return
        replicas = [self.brokers[node_id] for node_id in state.replicas]
        start = max(broker.log.log_start_offset for broker in replicas)
        for value, offset in self.acknowledged.items():
            copies = [one for one in replicas if offset < len(one.contents)]
            count = sum(_value(one.contents[offset]) == value for one in copies)
            if offset >= start and count < min(MIN_ISR, len(replicas)):
                raise ViolationError(f"I13: {count} replicas of {state.replicas} have what was acknowledged")

    def _check_complete(self, broker: Broker) -> None:
        key = (len(broker.contents), broker.seen, len(self.acknowledged))
        if key == broker.verified:
            return
        broker.verified = key
        contents, start = broker.contents, broker.log.log_start_offset
        for value, offset in self.acknowledged.items():
            if offset >= start and not (offset < len(contents) and _value(contents[offset]) == value):
                raise ViolationError(f"I2: {broker.node_id} is eligible, and lacks what was acknowledged")

    def _check_consumed(self, broker: Broker) -> None:
        start, contents = broker.log.log_start_offset, broker.contents
        self.near.check(start, lambda at: _value(contents[at]) if at < len(contents) else None)
        if len(contents) < len(self.consumed):
            raise ViolationError("I6: consumed records are gone")
        for offset in range(start, len(self.consumed)):
            value = self.consumed[offset]
            if value is not None and _value(contents[offset]) != value:
                raise ViolationError("I6: a consumed record has changed")

    def check_producers(self) -> None:
        """Check I9: the producer state of a log equals a replay of its batches."""
        for broker in self.brokers.values():
            if not broker.is_registered or broker.log.log_start_offset:
                continue
            self.look(broker)
            states, position = ProducerStates(), 0
            while position < len(broker.contents):
                entry = broker.contents[position]
                assert entry is not None
                _, value, producer_id, sequence, _ = entry
                count = self.sent[value][1]
                crc = stored_crc(make_batch(value, count, producer_id, sequence))
                states.note(producer_id, 0, sequence, position, position + count - 1, 1, 1, crc)
                position += count
            if broker.log.producers != states and "R27-no-rebuild" not in mutants.ACTIVE:
                raise ViolationError(f"I9: the producers of {broker.node_id} are not those of its log")

    # --- healing ---------------------------------------------------------------------------------------

    def heal(self) -> str | None:
        """Stop all faults: the replicas must converge (L1), and every producer must finish (L2)."""
        self.duplicates = self.losses = 0.0
        for number in range(HEALING_ROUNDS):
            self.now_ms += 1
            for broker in self.brokers.values():
                if not broker.is_up:
                    broker.boot()
                if not broker.is_registered:
                    self.register(broker)
            self._publish_all()
            for broker in self.brokers.values():
                self.unfence(broker.node_id)
            self._publish_all()
            for broker in self.brokers.values():
                self.report(broker)
            self.recover(self.now_ms + NEVER_MS)
            self.command(ContinueReassignments())
            self._publish_all()
            for broker in self.brokers.values():
                if broker.sync():
                    self.acknowledge(broker)
                self.fetch(broker)
            self._retry_all()
            messages, self.network = self.network, []
            for message in messages:
                self.deliver(message)
            for broker in self.brokers.values():
                if broker.leads:
                    if number % 4 == 3:
                        broker.partition.on_undecided()
                    self.propose(broker, NEVER_MS)
            self.check()
            if self._is_whole():
                return None
        state = self.state
        if state.leader < 0 and not state.isr and not state.elr and not self.fsync:
            return None  # the page cache of the last complete replica is lost: an operator must decide
        return f"L1: no convergence after healing: {state}"

    def _publish_all(self) -> None:
        for broker in self.brokers.values():
            if broker.replayed < self.image.metadata_offset:
                self.publish(broker, len(self.images) - 1)

    def _retry_all(self) -> None:
        for producer in self.producers:
            for value in producer.unacknowledged:
                if self.state.leader > 0 and self.brokers[self.state.leader].leads:
                    self.send("produce", self.state.leader, producer, value)

    def _is_whole(self) -> bool:
        state = self.state
        leader = self.brokers.get(state.leader)
        if leader is None or not leader.leads or len(state.isr) < len(state.replicas) or state.is_reassigning:
            return False
        end = leader.log.log_end_offset
        replicas = [self.brokers[node_id] for node_id in state.replicas]
        start = max(broker.log.log_start_offset for broker in replicas)
        are_equal = all(broker.contents[start:] == leader.contents[start:] for broker in replicas)
        alone = [one for one in self.producers if not one.is_forged]
        gets_through = start > 0 or not any(one.unacknowledged for one in alone)
        return are_equal and leader.partition.high_watermark == end and gets_through


def _value(entry: Entry | None) -> int | None:
    return None if entry is None else entry[1]


def _asked(position: FetchPosition) -> dict[str, int]:
    asked = position._asdict()
    del asked["version"]
    return asked
