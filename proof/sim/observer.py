"""Examines all brokers after each step, and checks the invariants that span several brokers.

The invariants have the numbers in docs/rules.md:

I1  the leader of a partition has every record that was ever committed or acknowledged
I2  every running member of the ISR and of the eligible leader replicas has them too
I3  two batches of a partition with the same offset and leader epoch are equal, on any two brokers
I4  a leader that may commit waits for every replica in the ISR and the ELR of the metadata
I5  a partition has one leader in each epoch
I6  records below any replica's high watermark are the same on all replicas and never change
I7  a log's epochs are those of its batches
I8  log start <= high watermark <= log end, and synced end <= log end
I9  the producer state of a replica equals a replay of its log
I10 in the image, the leader is in the ISR, and ISR and eligible replicas are disjoint and assigned
I11 committed entries of the metadata log never change, and every node applies the same entries
I12 a broker that is fenced in the image serves no client
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kafkalite.broker.broker import Broker
from kafkalite.metadata.image import ClusterImage, PartitionState
from kafkalite.model import TopicPartition
from kafkalite.records.header import BatchHeader
from kafkalite.storage import layout
from kafkalite.storage.log import Log
from kafkalite.storage.producer_state import KEPT_BATCHES
from kafkalite.testing.sim.simulation import Simulation, Violation
from proof.sim.compacted_logs import CompactedLogs, Told, read_batches, read_headers
from proof.sim.nodes import SimNode

Key = tuple[str, int, str]
"""(topic, partition, topic id): a topic that was created again under the same name is different."""


class _Seen:
    """The part of one replica's log that was checked during one run of its broker."""

    __slots__ = (
        "batches",
        "checked_to",
        "committed_to",
        "high_watermark",
        "log",
        "records",
        "run",
        "truncations",
    )

    def __init__(self, run: int, log: Log) -> None:
        self.run = run
        self.log = log  #: a replica that was removed and returns has another one
        self.checked_to = log.log_start_offset
        self.committed_to = log.log_start_offset
        self.truncations = 0
        self.high_watermark = 0
        self.batches: list[BatchHeader] = []
        self.records: deque[Told] = deque()  # of a compacted log: records not yet known to be committed


class Observer:
    """Records the past of all brokers, and compares the present with it."""

    def __init__(self, simulation: Simulation, nodes: Sequence[SimNode]) -> None:
        self._simulation = simulation
        self._nodes = list(nodes)
        self._seen: dict[tuple[int, Key], _Seen] = {}
        self._batches: dict[tuple[Key, int, int], tuple[int, int]] = {}  # I3: (crc, next offset)
        self._leaders: dict[tuple[Key, int], int] = {}  # I5
        #: I6: {base offset: (leader epoch, crc, next offset)} of all batches that were below a high
        # watermark.
        self._committed: dict[Key, dict[int, tuple[int, int, int]]] = {}
        self._committed_end: dict[Key, int] = {}
        self._acknowledged_end: dict[Key, int] = {}
        self._trimmed: set[Key] = set()  # partitions whose beginning has been deleted
        self._image = ClusterImage()
        self._images: dict[int, tuple[int, str]] = {}
        self._entries: dict[int, str] = {}  # I11: metadata offset -> image digest
        self.compacted_topics: Sequence[str] = ()  #: topics whose logs are compacted during the run
        self._compacted = CompactedLogs()
        self.check_count = 0

    # --- for the other parts of a run -------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        """The newest image of any node."""
        return self._image

    def on_acknowledged(self, key: TopicPartition, offset: int) -> None:
        """Called when a client has received the acknowledgement (acks=all) of its record at ``offset``."""
        topic = self._image.topics.get(key.topic)
        assert topic is not None, f"records were acknowledged to {key}, which no node knows"
        life = (*key, topic.topic_id)
        self._acknowledged_end[life] = max(self._acknowledged_end.get(life, 0), offset + 1)

    def node_of(self, node_id: int | None) -> SimNode | None:
        return next((node for node in self._nodes if node.node_id == node_id), None)

    def leader_of_any(self, number: int) -> SimNode | None:
        """Return the node that leads one of the partitions, or None."""
        states = list(_states(self._image))
        if not states:
            return None
        return self.node_of(states[number % len(states)][1].leader)

    # --- checks -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check all brokers. Raises Violation."""
        self.check_count += 1
        live = [(node, node.broker) for node in self._nodes if node.is_running and node.broker is not None]
        for node, broker in live:
            self._take_image(node, image_of(broker))
        for node, broker in live:
            if node.is_excused or not node.is_broker:
                continue
            for hosted in broker.partitions:
                if hosted.partition.log.offline_reason is None:
                    self._check_replica(node, (*hosted.key, hosted.partition.topic_id), hosted.partition)
        self._check_image(self._image)
        for node, broker in live:
            if node.is_broker and not node.is_excused:
                self._check_candidate(node, broker)
            if node.is_broker:
                self._check_session(node, broker)

    def _check_session(self, node: SimNode, broker: Broker) -> None:
        """Check I12."""
        known, state = self._image.brokers.get(node.node_id), broker._node
        if known is None or known.broker_epoch != state.broker_epoch:
            return
        if known.is_fenced and node.host.clock.monotonic_ms() < state.session_end_ms:
            raise Violation("I12", f"node {node.node_id} is fenced, and serves clients")

    def _take_image(self, node: SimNode, image: ClusterImage) -> None:
        offset = image.metadata_offset
        known = self._images.get(node.node_id)
        if known is not None and known[0] == offset:
            return
        digest = hashlib.blake2b(repr(list(image.to_records())).encode(), digest_size=8).hexdigest()
        self._images[node.node_id] = (offset, digest)
        before = self._entries.setdefault(offset, digest)
        if before != digest:
            raise Violation("I11", f"node {node.node_id} has another image of metadata offset {offset}")
        if offset > self._image.metadata_offset:
            self._note_changes(self._image, image)
            self._image = image

    def _note_changes(self, before: ClusterImage, after: ClusterImage) -> None:
        """Note each change of a partition, and count rare ones."""
        probe = self._simulation.probe
        for key, state in _states(after):
            old = before.partition(*key[:2])
            if old != state:
                self._simulation.note(f"metadata {after.metadata_offset}: {key[0]}-{key[1]} {_brief(state)}")
            if old is None:
                continue
            if state.leader_epoch > old.leader_epoch:
                probe("leader-change")
            if state.leader < 0 <= old.leader:
                probe("leaderless")
            if len(state.isr) < len(old.isr):
                probe("isr-shrink")
            if len(state.isr) > len(old.isr):
                probe("isr-expand")
            if getattr(state, "elr", ()):
                probe("eligible-leaders")
        for node_id, broker in after.brokers.items():
            known = before.brokers.get(node_id)
            if known != broker:
                self._simulation.note(
                    f"metadata {after.metadata_offset}: broker {node_id} epoch {broker.broker_epoch}"
                    f"{' fenced' if getattr(broker, 'is_fenced', False) else ''}"
                    f"{' shutting down' if getattr(broker, 'is_shutting_down', False) else ''}"
                )
            if getattr(broker, "is_fenced", False) and not getattr(known, "is_fenced", True):
                probe("fenced")

    def _check_image(self, image: ClusterImage) -> None:
        for key, state in _states(image):
            isr, elr = set(state.isr), set(getattr(state, "elr", ()))
            where = f"{key[0]}-{key[1]}: {state}"
            if state.leader >= 0 and state.leader not in isr:
                raise Violation("I10", f"the leader is not in sync: {where}")
            if not isr <= set(state.replicas) or not elr <= set(state.replicas):
                raise Violation("I10", f"no replica, but in sync or eligible: {where}")
            if isr & elr:
                raise Violation("I10", f"in sync and eligible at once: {where}")
            for node_id in state.isr:
                broker = image.brokers.get(node_id)
                if broker is not None and getattr(broker, "is_fenced", False):
                    raise Violation("I10", f"{node_id} is fenced and in sync: {where}")

    # --- replicas ---------------------------------------------------------------------------------------

    def _check_replica(self, node: SimNode, key: Key, partition: Any) -> None:
        log = partition.log
        where = f"{key[0]}-{key[1]} on {node.node_id}"
        high_watermark = partition.high_watermark
        if not log.log_start_offset <= high_watermark <= log.log_end_offset:
            raise Violation("I8", f"{where}: {log} with high watermark {high_watermark}")
        if log.synced_end_offset > log.log_end_offset:
            raise Violation("I8", f"{where}: {log} is synced to {log.synced_end_offset}")
        if partition.is_leader:
            self._check_leader(node, key, partition)
        if not log.is_open:
            return
        seen = self._seen.get((node.node_id, key))
        truncations = log.recovery_point.truncations
        if seen is None or seen.run != node.start_count or seen.log is not log:
            seen = self._seen[node.node_id, key] = _Seen(node.start_count, log)
            seen.truncations = truncations
        elif seen.truncations != truncations:
            self._simulation.probe("truncation")
            seen.truncations = truncations
            seen.checked_to = seen.committed_to = log.log_start_offset
            seen.batches.clear()
            seen.records.clear()
        if log.log_start_offset > 0:
            self._trimmed.add(key)
        seen.checked_to = max(seen.checked_to, log.log_start_offset)
        seen.committed_to = max(seen.committed_to, log.log_start_offset)
        if key[0] in self.compacted_topics:
            path = layout.join(log.directory, layout.COMPACTION_FILE)
            if node.host.filesystem.exists(path):
                self._simulation.probe("compacted")
            self._check_compacted(where, key, seen, partition)
            return
        if seen.checked_to < log.log_end_offset:
            for header in read_headers(log, seen.checked_to, log.log_end_offset):
                self._check_batch(where, key, header)
                seen.batches.append(header)
                seen.checked_to = header.next_offset
        if high_watermark > seen.committed_to:
            self._check_committed(where, key, seen, high_watermark)

    def _check_compacted(self, where: str, key: Key, seen: _Seen, partition: Any) -> None:
        """Check I3 and I6 by record. The first replica that shows a batch has not compacted it yet."""
        log, high_watermark = partition.log, partition.high_watermark
        for batch in read_batches(log, seen.checked_to, log.log_end_offset):
            seen.records += self._compacted.check(where, key, batch)
            seen.checked_to = batch.header.next_offset
        while seen.records and seen.records[0].offset < high_watermark:
            self._compacted.check_committed(where, key, seen.records.popleft())
        seen.committed_to = max(seen.committed_to, min(seen.checked_to, high_watermark))
        self._committed_end[key] = max(self._committed_end.get(key, 0), seen.committed_to)

    def _check_batch(self, where: str, key: Key, header: BatchHeader) -> None:
        name = (key, header.base_offset, header.leader_epoch)
        told = (header.crc, header.next_offset)
        if self._batches.setdefault(name, told) != told:
            raise Violation(
                "I3",
                f"{where}: offset {header.base_offset} of epoch {header.leader_epoch} is another batch"
                " than elsewhere",
            )

    def _check_leader(self, node: SimNode, key: Key, partition: Any) -> None:
        epoch = partition.leader_epoch
        before = self._leaders.setdefault((key, epoch), node.node_id)
        if before != node.node_id:
            raise Violation("I5", f"{key[0]}-{key[1]}: {before} and {node.node_id} lead in epoch {epoch}")
        topic = self._image.topics.get(key[0])
        if topic is None or topic.topic_id != key[2] or topic.partitions[key[1]].leader_epoch != epoch:
            return
        state = topic.partitions[key[1]]
        counted = set(partition._leader._quorum)
        if partition._leader._may_move and not counted.issuperset((*state.isr, *state.elr)):
            raise Violation(
                "I4",
                f"{key[0]}-{key[1]} on {node.node_id} counts {sorted(counted)}, in sync are {state.isr}, and"
                f" eligible {state.elr}",
            )

    def _check_committed(self, where: str, key: Key, seen: _Seen, high_watermark: int) -> None:
        committed = self._committed.setdefault(key, {})
        end = self._committed_end.get(key, 0)
        for header in seen.batches:
            if header.next_offset <= seen.committed_to:
                continue
            if header.next_offset > high_watermark:
                break
            told = (header.leader_epoch, header.crc, header.next_offset)
            known = committed.get(header.base_offset)
            was_skipped = known is None and key in self._trimmed  # deleted elsewhere before it was checked
            if header.base_offset < end and known != told and not was_skipped:
                raise Violation(
                    "I6",
                    f"{where}: offset {header.base_offset} is of epoch {header.leader_epoch}, and was"
                    f" committed as {known}",
                )
            committed[header.base_offset] = told
            seen.committed_to = header.next_offset
        self._committed_end[key] = max(end, seen.committed_to)

    def _check_candidate(self, node: SimNode, broker: Broker) -> None:
        """Check I1 and I2: every replica that may lead has all records."""
        for key, state in _states(self._image):
            if node.node_id not in (*state.isr, *getattr(state, "elr", ())):
                continue
            if node.node_id in state.unverified:
                continue  # its disk may have lost records; it leads only if it has the most (R46)
            hosted = broker.partitions._hosted.get(key[:2])
            if (
                hosted is None
                or hosted.partition.topic_id != key[2]
                or hosted.partition.log.offline_reason is not None
            ):
                continue
            wanted = max(self._committed_end.get(key, 0), self._acknowledged_end.get(key, 0))
            log = hosted.partition.log
            name = "I1" if state.leader == node.node_id else "I2"
            where = f"{key[0]}-{key[1]} on {node.node_id}"
            if log.log_end_offset < wanted:
                raise Violation(name, f"{where} ends at {log.log_end_offset} of {wanted}: {state}")
            seen = self._seen.get((node.node_id, key))
            if seen is not None and log.is_open and key[0] not in self.compacted_topics:
                self._compare(name, where, key, seen)

    def _compare(self, name: str, where: str, key: Key, seen: _Seen) -> None:
        committed = self._committed.get(key, {})
        end = self._committed_end.get(key, 0)
        for header in reversed(seen.batches):
            if header.next_offset > end:
                continue
            told = (header.leader_epoch, header.crc, header.next_offset)
            if committed.get(header.base_offset, told) != told:
                raise Violation(name, f"{where}: offset {header.base_offset} is not what was committed there")
            break  # the logs agree below: each batch has its epoch, and an epoch has one history (I3)

    # --- at rest ----------------------------------------------------------------------------------------

    def check_rest(self) -> None:
        """Check epochs and producers of every log, which is too slow for each step. Raises Violation."""
        for node in self._nodes:
            broker = node.live
            if broker is None or not node.is_broker:
                continue
            for hosted in broker.partitions:
                if hosted.partition.log.offline_reason is None:
                    self._check_epochs(node, (*hosted.key, ""), hosted.partition.log)
                    self._check_producers(node, (*hosted.key, ""), hosted.partition.log)

    def _check_producers(self, node: SimNode, key: Key, log: Any) -> None:
        """Check I9 for the producers in the state. A producer that was idle for long may be missing."""
        expected: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        for header in read_headers(log, log.log_start_offset, log.log_end_offset):
            if header.producer_id < 0:
                continue
            epoch, batches = expected.get(header.producer_id, (-1, []))
            if header.is_control or epoch != header.producer_epoch:  # a marker has an epoch of its own
                batches = []
            if header.base_sequence >= 0:
                batches = [*batches, (header.base_sequence, header.base_offset, header.last_offset)]
            expected[header.producer_id] = (header.producer_epoch, batches[-KEPT_BATCHES:])
        for producer_id, (epoch, batches) in expected.items():
            known = log.producers.get(producer_id)
            if known is None:
                continue
            told = [(batch.first_sequence, batch.base_offset, batch.last_offset) for batch in known.batches]
            if known.epoch != epoch or told[-len(batches) :] != batches[-len(told) :]:
                raise Violation(
                    "I9",
                    f"{key[0]}-{key[1]} on {node.node_id}: producer {producer_id} is in epoch {known.epoch}"
                    f" with {told}; the log has epoch {epoch}, {batches}",
                )

    def _check_epochs(self, node: SimNode, key: Key, log: Any) -> None:
        told = [tuple(entry) for entry in log.leader_epochs if entry[1] < log.log_end_offset]
        found: list[tuple[int, int]] = []
        for header in read_headers(log, log.log_start_offset, log.log_end_offset):
            if not found or header.leader_epoch != found[-1][0]:
                found.append((header.leader_epoch, header.base_offset))
        # An epoch may begin before the first remaining batch, and may have had none.
        if [epoch for epoch, _ in found if epoch not in dict(told)] or any(
            dict(told)[epoch] > max(start, log.log_start_offset) for epoch, start in found
        ):
            raise Violation("I7", f"{key[0]}-{key[1]} on {node.node_id}: {told}, but the log has {found}")

    def has_no_candidate(self) -> bool:
        """Whether some partition has no replica that may lead it, even when all brokers run again."""
        return any(state.leader < 0 and not state.isr and not state.elr for _, state in _states(self._image))

    def unconverged_isr(self) -> str | None:
        """Return why not every replica is in sync yet, or None if all are."""
        return self._unconverged(alike=False)

    def unconverged(self) -> str | None:
        """Return why the replicas are not equal yet (L1), or None if they are. No client may be writing."""
        return self._unconverged(alike=True)

    def _unconverged(self, *, alike: bool) -> str | None:
        image = self._image
        for node in self._nodes:
            if not node.is_running:
                return f"node {node.node_id} is {node.state}"
            assert node.broker is not None
            if image_of(node.broker).metadata_offset != image.metadata_offset:
                return f"node {node.node_id} is behind with the metadata"
        for key, state in _states(image):
            if set(state.isr) != set(state.replicas) or state.leader < 0:
                return f"{key[0]}-{key[1]} is not fully in sync: {state}"
            if state.is_reassigning:
                return f"{key[0]}-{key[1]} is being reassigned: {state}"
            ends: dict[int, tuple[int, int]] = {}
            for node_id in state.replicas:
                replica = self.node_of(node_id)
                assert replica is not None and replica.broker is not None
                hosted = replica.broker.partitions._hosted.get(key[:2])
                if hosted is None:
                    return f"{key[0]}-{key[1]} is not on {node_id}"
                if hosted.partition.log.offline_reason is not None:
                    return f"{key[0]}-{key[1]} is offline on {node_id}: {hosted.partition.log.offline_reason}"
                ends[node_id] = (hosted.high_watermark, hosted.partition.log.log_end_offset)
            if not alike:
                continue
            if len({*ends.values()}) > 1 or any(first != second for first, second in ends.values()):
                return f"{key[0]}-{key[1]}: (high watermark, log end) by broker: {ends}"
        return None


def image_of(broker: Broker) -> ClusterImage:
    return broker._services.controller.image


def _states(image: ClusterImage) -> Iterator[tuple[Key, PartitionState]]:
    for name in sorted(image.topics):
        for number, state in enumerate(image.topics[name].partitions):
            yield (name, number, image.topics[name].topic_id), state


def _brief(state: PartitionState) -> str:
    elr = getattr(state, "elr", ())
    return (
        f"leader {state.leader} epoch {state.leader_epoch}.{state.partition_epoch}"
        f" isr {list(state.isr)}{f' eligible {list(elr)}' if elr else ''}"
    )
