"""Groups and transactions in a simulated cluster: the programs that use them, and their invariants.

During faults no partition may have two owners (R38). After healing, every group must be stable and own every
partition once (L3), and no transaction may be open or hold readers back (L4). At the end, each transaction is
complete or absent, the exactly-once job has written one record for each input, and its group has read every
record of the load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kafkalite.broker.coordination.internal_topics import GROUP, KINDS, TRANSACTION
from kafkalite.client.admin.admin import Admin
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.errors import KafkaliteError
from kafkalite.groups.group import STABLE
from kafkalite.model import TopicPartition
from kafkalite.testing.sim.simulation import Violation
from proof.durable_state import durable_state
from proof.histories.transaction_history import (
    Place,
    TransactionHistory,
    TransformHistory,
    check_transactions,
    check_transform,
)
from proof.sim.compacted_logs import replayed
from proof.sim.group_clients import JOBS, LEDGER, OUTPUT, READERS, WATCHED, WATCHERS, make_clients
from proof.sim.nodes import SimNode
from proof.sim.workload import CLIENT_SETTINGS, Client, Workload

READ_PATIENCE_MS: Final = 5_000


class Holder(NamedTuple):
    """A member that considers itself the owner of a partition."""

    client: str
    member_id: str
    consumer: Consumer


class Coordination:
    """The state that all programs of a run share."""

    def __init__(self, workload: Workload, nodes: Sequence[SimNode]) -> None:
        self.workload = workload
        self.nodes = nodes
        self.transactions = TransactionHistory()
        self.processed: set[tuple[str, int, int]] = set()  #: the records that the readers' group received
        self.output_partitions = 2
        self.ledger_partitions = 2
        self.is_over = False
        self.on_decided: Callable[[], None] = lambda: (
            None
        )  #: called when a client receives the acknowledgement of a commit
        self._epochs: dict[TopicPartition, int] = {}  # the epoch of each partition's latest coordinator
        #: Committed values that never decrease: offsets, epochs of groups and of members.
        self._reached: dict[tuple[Any, ...], int] = {}
        #: By group, the assignment at the last check at which all of its log was committed.
        self._assignments: dict[str, dict[str, tuple[int, frozenset[Any]]]] = {}
        #: The offset from which an owner may have started that came while a commit was pending.
        self._floors: dict[tuple[str, TopicPartition], int] = {}
        self._holders: dict[tuple[str, TopicPartition], Holder] = {}  #: according to the clients
        self.clients: list[Client] = make_clients(self, workload)

    @property
    def written(self) -> list[TopicPartition]:
        """The partitions that transactions write to, in order."""
        return [
            *(TopicPartition(OUTPUT, number) for number in range(self.output_partitions)),
            *(TopicPartition(LEDGER, number) for number in range(self.ledger_partitions)),
        ]

    @property
    def is_used(self) -> bool:
        return bool(self.clients)

    def start(self) -> None:
        for client in self.clients:
            client.start()

    async def create_topics(self, replication_factor: int, configs: dict[str, str]) -> None:
        """Create the topics. Runs on the client host that calls it."""
        settings: dict[str, Any] = CLIENT_SETTINGS | {"default_api_timeout_ms": 20_000}
        rng = self.workload.simulation.rng("admin of groups")
        count = self.nodes[0].settings["offsets_topic_num_partitions"]
        self.workload.coordinator_keys = [
            TopicPartition(topic, number) for topic in KINDS for number in range(count)
        ]
        async with Admin(self.workload.bootstrap, rng=rng, **settings) as admin:
            for topic, partitions in ((OUTPUT, self.output_partitions), (LEDGER, self.ledger_partitions)):
                await admin.create_topic(topic, partitions, replication_factor, configs=configs)

    # --- reports of clients

    def on_assigned(self, client: str, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Record that a member owns partitions. No other current member may consider itself their owner.

        A member that was expelled after its heartbeat was answered learns that from its next heartbeat only.
        """
        group_id = consumer.config.group_id
        assert group_id is not None
        member_id = consumer.group_metadata().member_id
        group = self._group(group_id)
        if group is not None and member_id not in group.members:
            self.workload.simulation.probe("assigned-to-expelled")
            return
        for tp in partitions:
            holder = self._holders.get((group_id, tp))
            if holder is not None and holder.member_id != member_id and self._holds(group_id, holder):
                self.workload.simulation.violate(
                    Violation(
                        "D1", f"{client} was given {tp} of {group_id}, which {holder.client} still holds"
                    )
                )
            self._holders[group_id, tp] = Holder(client, member_id, consumer)
        self.workload.simulation.probe("assigned")

    def on_given_back(self, client: str, partitions: Sequence[TopicPartition]) -> None:
        """Record that a member has revoked partitions."""
        for key in [key for key, holder in self._holders.items() if holder.client == client]:
            if key[1] in partitions:
                del self._holders[key]
                self.workload.simulation.probe("given-back")

    def forget(self, client: str) -> None:
        """Remove the ownerships of a client that has ended or restarts."""
        for key in [key for key, holder in self._holders.items() if holder.client == client]:
            del self._holders[key]

    def forget_host(self, name: str) -> None:
        """Remove the ownerships of all clients on a host."""
        for key in [key for key, holder in self._holders.items() if holder.client.startswith(f"{name}.")]:
            del self._holders[key]

    def _holds(self, group_id: str, holder: Holder) -> bool:
        """Whether the holder is a member, and not an expelled one that has not yet noticed."""
        group = self._group(group_id)
        if group is None or holder.member_id not in group.members:
            return False
        try:
            holder.consumer.group_metadata()
        except KafkaliteError:
            return False
        return True

    # --- state of brokers

    def _machines(self, kind: int) -> Iterator[Any]:
        """Yield the state machine of each partition's latest coordinator."""
        for shard in self._shards(kind):
            yield shard.machine

    def _shards(self, kind: int) -> Iterator[Any]:
        """Yield each partition's latest coordinator that is loaded."""
        latest: dict[int, Any] = {}
        for node in self.nodes:
            broker = node.live
            if broker is None or not node.is_broker:
                continue
            for shard in broker.coordinators.shards(kind):
                key, epoch = shard.partition.key, shard.coordinator_epoch
                if epoch >= self._epochs.get(key, 0):
                    self._epochs[key] = epoch
                    latest[key.partition] = shard
        for number in sorted(latest):
            shard = latest[number]
            if shard.is_loaded and shard.coordinator_epoch == self._epochs[shard.partition.key]:
                yield shard

    def _group(self, group_id: str) -> Any:
        for machine in self._machines(GROUP):
            if group_id in machine.groups:
                return machine.groups[group_id]
        return None

    def check(self) -> None:
        """Check the invariants that hold at every moment. Raises Violation."""
        if not self.is_used:
            return
        for shard in self._shards(GROUP):
            for group_id, group in shard.machine.groups.items():
                self._check_owners(group_id, group.members)
            if shard.high_watermark >= shard.end_offset:
                self._check_progress(shard)
        for shard in self._shards(TRANSACTION):
            self._note_failover(shard)

    def _check_owners(self, group_id: str, members: dict[str, Any]) -> None:
        owners: dict[Any, str] = {}
        for member_id, member in members.items():
            for partition in member.current.assigned | member.current.revoking:
                other = owners.setdefault(partition, member_id)
                if other != member_id:
                    raise Violation("R38", f"{partition} of {group_id}: {other} and {member_id} own it")

    def _check_progress(self, shard: Any) -> None:
        """Check that committed values do not decrease. Uncommitted ones may."""
        groups = shard.machine.groups
        for group_id in (READERS, JOBS, WATCHERS):
            group = groups.get(group_id)
            if group is None:
                continue
            self._note_generation(group)
            self._reach("R39", group.group_epoch, "epoch of group", group_id)
            for tp in self.workload.keys:
                committed = group.offsets.get(*tp)
                if committed is not None:
                    self._check_offset(group, tp, committed.offset)
            self._assignments[group_id] = _assignment(group)
            for member_id, member in group.members.items():
                epoch = member.current.member_epoch
                if epoch > group.group_epoch:
                    raise Violation("R38", f"{member_id} of {group_id} is ahead of its group: {epoch}")
                if epoch >= 0:  # else a static member that is away
                    self._reach("R38", epoch, "epoch of member", group_id, member_id)

    def _check_offset(self, group: Any, tp: TopicPartition, offset: int) -> None:
        """Check that a committed offset does not decrease.

        It may once if the partition got another owner while the greater offset was in the log and not yet
        committed. OffsetFetch does not return such an offset (R40), so that owner started at the one before:
        records are read again, and none is skipped.
        """
        key, what = (group.group_id, tp), ("offset of group", group.group_id, tp)
        known = self._reached.get(what, offset)
        if offset > known:
            self._floors.pop(key, None)
            if self._assignments.get(group.group_id) != _assignment(group):
                self._floors[key] = known
        elif offset < known and offset >= self._floors.pop(key, offset + 1):
            self._reached[what] = offset
        self._reach("R39", offset, *what)

    def _reach(self, rule: str, value: int, *what: Any) -> None:
        known = self._reached.get(what, value)
        if value < known:
            raise Violation(rule, f"{' '.join(map(str, what))} was {known}, and is {value}")
        self._reached[what] = value

    def _note_generation(self, group: Any) -> None:
        """Count rebalances and expulsions of members."""
        known = self._reached.get(("epoch of group", group.group_id), 0)
        if group.group_epoch > known:
            self.workload.simulation.probe("rebalance")
            for event in group.journal:
                if event.group_epoch > known and event.cause in ("MemberExpired", "MemberFenced"):
                    self.workload.simulation.probe("member-expelled")

    def _note_failover(self, shard: Any) -> None:
        what = ("coordinator", shard.partition.key)
        before = self._reached.get(what)
        if before is not None and shard.coordinator_epoch > before:
            self.workload.simulation.probe("coordinator-failover")
            if any(transaction.is_open for transaction in shard.machine._table):
                self.workload.simulation.probe("failover-in-transaction")
        self._reached[what] = shard.coordinator_epoch

    # --- at rest

    def unsettled(self) -> str | None:
        """Return why groups or transactions are not at rest, or None if they are (L3, L4)."""
        for group_id, clients in ((READERS, "g"), (JOBS, "x"), (WATCHERS, "v")):
            if not any(client.host.name.startswith(clients) for client in self.clients):
                continue
            group = self._group(group_id)
            if group is None:
                return f"group {group_id} has no coordinator"
            if group.describe_state() != STABLE:
                return f"group {group_id} is {group.describe_state()}"
            owned = sorted(
                partition for member in group.members.values() for partition in member.current.assigned
            )
            wanted = self._partitions(WATCHED if group_id == WATCHERS else self.workload.keys[0].topic)
            if owned != wanted:
                return f"group {group_id} owns {owned} of {wanted}"
        return None

    def _partitions(self, pattern: str) -> list[tuple[str, int]]:
        """Return (topic id, partition) of every existing topic whose name matches."""
        broker = next(node.live for node in self.nodes if node.live is not None and node.is_broker)
        return sorted(
            (shape.topic_id, number)
            for name, shape in broker.coordinators.topics.items()
            if re.fullmatch(pattern, name)
            for number in range(shape.partition_count)
        )

    def uncommitted(self) -> str | None:
        """Return a record that the job or the readers have not consumed yet, or None."""
        for tp in self.workload.keys:
            end = self._end(tp)
            if end is None:
                return f"{tp} has no leader"
            if any(client.host.name.startswith("x") for client in self.clients):
                group = self._group(JOBS)
                value = None if group is None else group.offsets.get(*tp)
                done = 0 if value is None else value.offset
                if done < end:
                    return f"group {JOBS} is at {done} of {end} in {tp}"
            if any(client.host.name.startswith("g") for client in self.clients) and not self._trims:
                missing = next((n for n in range(end) if (*tp, n) not in self.processed), None)
                if missing is not None:
                    return f"group {READERS} was not given {tp}@{missing}, of {end}"
        return None

    @property
    def _trims(self) -> bool:
        return self.workload.load.deletes_records

    def _end(self, tp: TopicPartition) -> int | None:
        for partition in self._led(tp.topic):
            if partition.key == tp:
                end: int = partition.high_watermark
                return end
        return None

    def _led(self, *topics: str) -> Iterator[Any]:
        for node in self.nodes:
            broker = node.live
            if broker is None or not node.is_broker:
                continue
            for hosted in broker.partitions:
                if hosted.is_leader and hosted.key.topic in topics:
                    yield hosted.partition

    def open_transactions(self) -> str | None:
        """Return an open transaction, or a partition that holds readers back, or None (L4).

        Called when all programs have ended.
        """
        for machine in self._machines(TRANSACTION):
            for pending in machine.pending_markers():
                return f"markers of {pending.transactional_id!r} are not written in {pending.partitions}"
        for partition in self._led(OUTPUT, LEDGER, "__consumer_offsets"):
            stable, high_watermark = partition.last_stable_offset, partition.high_watermark
            if stable < high_watermark:
                return f"{partition} is held back at {stable} of {high_watermark}"
        return None

    def check_rest(self) -> None:
        """Check R36: each coordinator's state equals a replay of every replica. Raises Violation."""
        for kind in (GROUP, TRANSACTION):
            for shard in self._shards(kind):
                known = durable_state(shard.machine)
                for node in self.nodes:
                    hosted = node.live.partitions.find(shard.partition.key) if node.live is not None else None
                    if hosted is None or hosted.log_end_offset != shard.end_offset:
                        continue
                    machine = replayed(type(shard.machine)(), hosted, shard.now())
                    if durable_state(machine) != known:
                        raise Violation(
                            "R36",
                            f"{hosted.key} on {node.node_id} has another state than the coordinator: "
                            + _difference(known, durable_state(machine)),
                        )
                    self.workload.simulation.probe("replayed")

    # --- at the end

    async def read_everything(self) -> None:
        """Read all that transactions wrote, with read_committed, at the end."""
        self.transactions.read_finally_at(await self._read(self.written))

    async def _read(self, keys: Sequence[TopicPartition]) -> dict[Place, str]:
        read: dict[Place, str] = {}
        settings: dict[str, Any] = CLIENT_SETTINGS
        async with Consumer(
            bootstrap_servers=self.workload.bootstrap,
            rng=self.workload.simulation.rng("final reader of transactions"),
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            **settings,
        ) as consumer:
            consumer.assign(keys)
            ends = await consumer.end_offsets(keys)
            for key in keys:
                await consumer.seek(key, 0)
            while any((consumer.position(key) or 0) < ends[key] for key in keys):
                before = {key: consumer.position(key) for key in keys}
                records = await consumer.get_many(timeout_ms=READ_PATIENCE_MS)
                if not records and before == {key: consumer.position(key) for key in keys}:
                    raise Violation("final-read", f"nothing came, of {ends}", kind="liveness")
                for record in records:
                    assert record.value is not None
                    read[record.topic, record.partition, record.offset] = record.value.decode()
        return read

    def judge(self) -> None:
        """Raise Violation for the first anomaly in the whole run."""
        found = check_transactions(self.transactions)
        if any(client.host.name.startswith("x") for client in self.clients) and not self._trims:
            found += check_transform(self._transformed())
        if found:
            raise Violation(found[0].kind, f"{found[0].message} (and {len(found) - 1} more)")

    def _transformed(self) -> TransformHistory:
        history = TransformHistory()
        for tp in self.workload.keys:
            end = self._end(tp)
            history.inputs[tp.topic, tp.partition] = list(range(end or 0))
        for (topic, partition, _), value in sorted((self.transactions.final_places or {}).items()):
            if topic == OUTPUT:
                history.outputs.setdefault(partition, []).append(_source(value))
        return history


def _source(value: str) -> tuple[str, int, int]:
    topic, partition, offset = value.rsplit("/", 2)
    return topic, int(partition), int(offset)


def _difference(one: Any, other: Any) -> str:
    """Return the first difference, as text."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if one.get(key) != other.get(key):
                return f"{key}: {_difference(one.get(key), other.get(key))}"
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return next(_difference(*pair) for pair in zip(one, other, strict=True) if pair[0] != pair[1])
    return f"{one!r} and {other!r}"


def _assignment(group: Any) -> dict[str, tuple[int, frozenset[Any]]]:
    """Return {member id: (member epoch, assigned partitions)}."""
    return {
        member_id: (member.current.member_epoch, frozenset(member.current.assigned))
        for member_id, member in group.members.items()
    }
