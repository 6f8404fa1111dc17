"""Elects leaders after unclean stops by comparing the reports of the replicas about their logs. Pure.

A replica in the ISR or ELR has all committed records, unless its disk has lost or damaged some. After an
unclean stop such a loss can be invisible, because a damaged end of a log looks like an end that was never
synced. So a replica that restarted uncleanly leads only after a comparison or an unclean election.

Of two logs, the *greater* has the greater (last epoch, log end offset). Two logs are equal up to the offset
at which their epochs diverge, and the lesser log has no committed record beyond it (R3, R4). So the greatest
of the compared logs has every committed record that any of them has. If one of them is the undamaged log of
an ISR or ELR member, the greatest log has every committed record. A report is valid for one leader epoch in
which the partition has no leader, because no log changes in that epoch.

The active controller keeps reports in memory only. Brokers send them again to a new controller.
"""

# Tests: tests/metadata/test_recovery.py

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kafkalite.errors import BrokerError
from kafkalite.metadata.broker_commands import broker_of
from kafkalite.metadata.decision import ControllerSettings, Decision, edit_records, min_insync_replicas
from kafkalite.metadata.election import PartitionEdit
from kafkalite.metadata.image import ClusterImage, PartitionState
from kafkalite.metadata.records import NO_LEADER, MetadataRecord
from kafkalite.protocol.messages.cluster import DamagedReplica, ReplicaReport, ReportReplicasRequest
from kafkalite.protocol.messages.metadata import RecoveringPartition, RecoveringReplica

#: How long a partition with the report of only one replica waits for another one to compare it with.
COMPARE_WAIT_MS: Final = 5_000
MAX_ELECTIONS: Final = 1_000
_WITHOUT_LIMIT: Final = 2**62

# The states of a RecoveringReplica.
DAMAGED: Final = "damaged"
SHORT: Final = "short"
UNVERIFIED: Final = "unverified"
REPORTED: Final = "reported"
REFUSES: Final = "refuses to truncate"

PartitionKey = tuple[str, int]
"""(topic id, partition)"""


class ReplicaEnd(NamedTuple):
    """A replica's report about its log. Offsets are exclusive."""

    broker_epoch: int
    last_epoch: int  #: of the last batch; -1 in an empty log
    log_end_offset: int
    is_damaged: bool
    committed_end: int  #: the high watermark that the replica knows; of a damaged log, the end that it had


class Verdict(NamedTuple):
    """The result of comparing reports: the new leader, or NO_LEADER while the partition must wait."""

    leader: int
    waits_for: tuple[int, ...] = ()  #: replicas whose reports are missing
    short: tuple[int, ...] = ()  #: ISR and ELR members whose logs end below a committed offset (R48)
    is_late: bool = False  #: the wait for ``waits_for`` has ended: they may hold more committed records


@dataclass(frozen=True, slots=True)
class RecoverLeaders:
    """Elect leaders from the reports ``ends``. ``waited_ms`` is the time since the first report of each
    partition.

    The reply is a list of RecoveredPartition.
    """

    ends: Mapping[PartitionKey, Mapping[int, ReplicaEnd]]
    waited_ms: Mapping[PartitionKey, int]


@dataclass(frozen=True, slots=True)
class ReplaceShortLeaders:
    """Make the broker ``node_id`` the leader of partitions whose leaders lack committed records (R50).

    ``partitions`` has the reports of this broker. The reply is a list of (topic name, partition, whether the
    broker became the leader).
    """

    node_id: int
    broker_epoch: int
    partitions: tuple[ReplicaReport, ...]


class RecoveredPartition(NamedTuple):
    topic: str
    partition: int
    verdict: Verdict


# --- rules ---------------------------------------------------------------------------------------------


def lacks_committed(end: ReplicaEnd, committed_end: int) -> bool:
    """Whether a log has lost committed records although no damage was found in it (R48)."""
    return end.log_end_offset < committed_end


def has_impossible_epoch(report: ReplicaReport) -> bool:
    """Whether the last batch of a reported log has a leader epoch that no leader can have written (R46).

    A report is made in a leader epoch without a leader, so every batch must have an earlier epoch. The
    checksum of a batch does not show a damaged leader epoch, because it does not cover that field.
    """
    return report.last_epoch >= report.leader_epoch


def lacks_damaged(end: ReplicaEnd, ends: Mapping[int, ReplicaEnd]) -> bool:
    """Whether a damaged log among ``ends`` was longer, before the damage, than the log of ``end`` (R46).

    The shorter log may have the same damage without showing it: if the end of a log that was not synced
    lately is cut off, the log seems intact.
    """
    return any(other.is_damaged and end.log_end_offset < other.committed_end for other in ends.values())


def most_complete(state: PartitionState, ends: Mapping[int, ReplicaEnd]) -> int:
    """Return the replica that reported the greatest (last epoch, log end offset). Of equal replicas, prefer
    an ISR or ELR member."""
    members = state.isr + state.elr
    order = sorted(state.replicas, key=lambda node_id: node_id not in members)
    return max(
        (node_id for node_id in order if node_id in ends),
        key=lambda node_id: (ends[node_id].last_epoch, ends[node_id].log_end_offset),
    )


def is_compared(
    state: PartitionState, ends: Mapping[int, ReplicaEnd], *, min_isr: int, waited_ms: int
) -> bool:
    """Whether enough replicas have reported to determine the most complete log (R46).

    True in two cases. At least ``min_isr`` members of the ISR and ELR have reported, ``min_isr`` is at least
    2, and no reported log is damaged. Or all members have reported, and either there are at least two
    reports, or ``waited_ms`` is at least COMPARE_WAIT_MS.
    """
    members = state.isr + state.elr
    reported = [node_id for node_id in members if node_id in ends]
    if min_isr >= 2 and len(reported) >= min_isr and not any(end.is_damaged for end in ends.values()):
        return True
    return len(reported) == len(members) and (len(ends) > 1 or waited_ms >= COMPARE_WAIT_MS)


def wait_limit_ms(settings: ControllerSettings) -> int:
    """Return for how many milliseconds an election waits for members that have not reported (R47)."""
    if settings.unclean_recovery_strategy == "none":
        return _WITHOUT_LIMIT
    is_aggressive = settings.unclean_recovery_strategy == "aggressive"
    return COMPARE_WAIT_MS if is_aggressive else settings.unclean_recovery_timeout_ms


def compare(
    state: PartitionState,
    ends: Mapping[int, ReplicaEnd],
    *,
    min_isr: int,
    committed_end: int,
    waited_ms: int,
    limit_ms: int,
) -> Verdict:
    """Choose a leader for a partition without one. ``ends`` has the reports of live brokers.

    The leader of the verdict is NO_LEADER until enough replicas have reported, or ``waited_ms`` reaches
    ``limit_ms``. It is also NO_LEADER as long as no member of the ISR or ELR reports a log with all committed
    records; without such a report, only an unclean election gives a leader.
    """
    members = state.isr + state.elr
    sound = {node_id: end for node_id, end in ends.items() if not end.is_damaged}
    complete = {node_id: end for node_id, end in sound.items() if not lacks_committed(end, committed_end)}
    short = tuple([each for each in members if each in sound and each not in complete])
    missing = tuple([each for each in members if each not in ends])
    missing = missing or tuple([each for each in state.replicas if each not in ends])
    if not any(each in complete for each in members):
        return Verdict(NO_LEADER, missing, short)
    best = most_complete(state, complete)
    is_doubtful = lacks_damaged(complete[best], ends) and len(ends) < len(state.replicas)
    if is_compared(state, ends, min_isr=min_isr, waited_ms=waited_ms) and not is_doubtful:
        return Verdict(best, (), short)
    if waited_ms >= limit_ms:
        return Verdict(best, missing, short, is_late=True)
    return Verdict(NO_LEADER, missing, short)


# --- decisions -----------------------------------------------------------------------------------------


def recover_leaders(image: ClusterImage, command: RecoverLeaders, settings: ControllerSettings) -> Decision:
    """Elect a leader for each partition for which the reports suffice, at most MAX_ELECTIONS."""
    records: list[MetadataRecord] = []
    recovered: list[RecoveredPartition] = []
    for key, ends in command.ends.items():
        found = verdict_on(image, key, ends, command.waited_ms[key], settings)
        if found is None or found[1].leader == NO_LEADER or len(recovered) == MAX_ELECTIONS:
            continue
        edit, verdict = found
        for node_id in verdict.short:
            edit.forget(node_id)
        edit.elect_compared(verdict.leader)
        records += edit_records(image, *key, edit)
        recovered.append(RecoveredPartition(image.topics_by_id[key[0]].name, key[1], verdict))
    return Decision(recovered, records)


def verdict_on(
    image: ClusterImage,
    key: PartitionKey,
    ends: Mapping[int, ReplicaEnd],
    waited_ms: int,
    settings: ControllerSettings,
) -> tuple[PartitionEdit, Verdict] | None:
    """Return (a new edit of the partition ``key``, the verdict on its leader). Return None if the partition
    has a leader or does not exist."""
    topic, state = image.topics_by_id.get(key[0]), image.partition_of(*key)
    if topic is None or state is None or state.leader != NO_LEADER:
        return None
    present = present_ends(image, state, ends)
    min_isr = min(min_insync_replicas(image, topic), len(state.replicas))
    verdict = compare(
        state,
        present,
        min_isr=min_isr,
        committed_end=committed_end(image, key, state, present.values()),
        waited_ms=waited_ms,
        limit_ms=wait_limit_ms(settings),
    )
    return PartitionEdit(state, min_isr), verdict


def present_ends(
    image: ClusterImage, state: PartitionState, ends: Mapping[int, ReplicaEnd]
) -> dict[int, ReplicaEnd]:
    """Return those reports that are from the current processes of live brokers."""
    brokers = image.brokers
    return {
        node_id: end
        for node_id, end in ends.items()
        if node_id in state.replicas
        and node_id in brokers
        and brokers[node_id].is_live
        and brokers[node_id].broker_epoch == end.broker_epoch
    }


def committed_end(
    image: ClusterImage, key: PartitionKey, state: PartitionState, ends: Iterable[ReplicaEnd]
) -> int:
    """Return the exclusive end of the offsets that are known to be committed.

    Ignores the reports of damaged logs, and those of replicas without a batch since the last unclean election
    (R49).
    """
    known = (end.committed_end for end in ends if end.last_epoch >= state.loss_epoch and not end.is_damaged)
    return max(image.high_watermarks.get(key, 0), *known, 0)


def replace_short_leaders(image: ClusterImage, command: ReplaceShortLeaders) -> Decision:
    """Decide the command ``ReplaceShortLeaders``.

    The reply is the one described at ``ReplaceShortLeaders``, or the BrokerError of ``broker_of``.
    """
    try:
        broker = broker_of(image, command.node_id, command.broker_epoch)
    except BrokerError as error:
        return Decision(error)
    records: list[MetadataRecord] = []
    outcomes: list[tuple[str, int, bool]] = []
    for report in command.partitions:
        key = (report.topic_id, report.partition)
        topic, state = image.topics_by_id.get(report.topic_id), image.partition_of(*key)
        if topic is None or state is None or state.leader_epoch != report.leader_epoch:
            continue
        may_lead = (
            state.leader not in {NO_LEADER, broker.node_id}
            and broker.is_live
            and broker.node_id in state.replicas
            and not report.is_damaged
        )
        min_isr = min(min_insync_replicas(image, topic), len(state.replicas))
        if may_lead and has_committed_nothing(state):
            edit = PartitionEdit(state, min_isr)
            edit.forget(state.leader)
            edit.elect_compared(broker.node_id)
            records += edit_records(image, *key, edit)
        else:
            may_lead = False
        outcomes.append((topic.name, report.partition, may_lead))
    return Decision(outcomes, records)


def is_present_refusal(image: ClusterImage, key: PartitionKey, leader_epoch: int) -> bool:
    """Whether a refusal to truncate that was reported in ``leader_epoch`` refers to the partition's current
    leader."""
    state = image.partition_of(*key)
    return state is not None and state.leader != NO_LEADER and state.leader_epoch == leader_epoch


def has_committed_nothing(state: PartitionState) -> bool:
    """Whether the leader has certainly committed nothing since its election by comparison (R50).

    That is the case until the leader proposes an ISR of at least min.insync.replicas members. Later, the
    leader and a replica that refuses to truncate may both have committed records, and an operator must
    choose.
    """
    return state.idle_epoch == state.leader_epoch


# --- the reports of the active controller ---------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    leader_epoch: int
    since_ms: int
    ends: dict[int, ReplicaEnd] = field(default_factory=dict)


class WaitingPartition(NamedTuple):
    """A partition that has no leader, the reports of its replicas, and the verdict on them so far."""

    waited_ms: int
    ends: Mapping[int, ReplicaEnd]
    verdict: Verdict


class ReplicaReports:
    """Stores the reports that brokers send to the active controller. ``now_ms`` is always monotonic.

    A comparison uses only reports of the current leader epoch of a partition without a leader, and drops all
    others.
    """

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._partitions: dict[PartitionKey, _Waiting] = {}
        self._damaged: dict[int, frozenset[DamagedReplica]] = {}
        # By partition: the leader epoch in which replicas refused to truncate, and those replicas.
        self._refusals: dict[PartitionKey, tuple[int, dict[int, ReplicaReport]]] = {}
        self._seen: ClusterImage | None = None  # the image of the last comparison
        self._due_ms = 0  # the end of the next wait, unless the image changes before

    def clear(self) -> None:
        """Drop all reports, because this controller is not the active one."""
        self._partitions.clear()
        self._damaged.clear()
        self._refusals.clear()

    def take_damaged(self, node_id: int, damaged: Sequence[DamagedReplica]) -> None:
        """Store which replicas are damaged or offline, as a broker's registration or heartbeat lists them."""
        if damaged:
            self._damaged[node_id] = frozenset(damaged)
        else:
            self._damaged.pop(node_id, None)

    def damaged_on(self, node_id: int) -> frozenset[DamagedReplica]:
        """Return the replicas that the broker's last registration or heartbeat listed as damaged or
        offline."""
        return self._damaged.get(node_id, frozenset())

    def take_refusals(self, image: ClusterImage, request: ReportReplicasRequest) -> list[ReplicaReport]:
        """Store reports of replicas that refuse to truncate (R49). Return those of replicas that had not
        reported a refusal in the current leader epoch."""
        new: list[ReplicaReport] = []
        for report in request.partitions:
            key = (report.topic_id, report.partition)
            if report.refused_offset < 0 or not is_present_refusal(image, key, report.leader_epoch):
                continue
            epoch, known = self._refusals.get(key, (-1, {}))
            if epoch != report.leader_epoch:
                known = {}
            if request.node_id not in known:
                new.append(report)
            self._refusals[key] = (report.leader_epoch, known | {request.node_id: report})
        return new

    def take(self, image: ClusterImage, request: ReportReplicasRequest, now_ms: int) -> None:
        """Store the reports about partitions without a leader. Ignore outdated reports."""
        for report in request.partitions:
            key = (report.topic_id, report.partition)
            state = image.partition_of(*key)
            if state is None or state.leader != NO_LEADER or state.leader_epoch != report.leader_epoch:
                continue
            waiting = self._partitions.get(key)
            if waiting is None or waiting.leader_epoch != report.leader_epoch:
                waiting = self._partitions[key] = _Waiting(report.leader_epoch, now_ms)
            waiting.ends[request.node_id] = ReplicaEnd(
                request.broker_epoch,
                report.last_epoch,
                report.log_end_offset,
                report.is_damaged or has_impossible_epoch(report),
                report.committed_end,
            )
        self._seen = None

    def due(self, image: ClusterImage, now_ms: int) -> RecoverLeaders | None:
        """Return the elections that are possible now, or None. Cheap if nothing has changed."""
        if not self._partitions or (image is self._seen and now_ms < self._due_ms):
            return None
        self._seen = image
        self._due_ms = _WITHOUT_LIMIT
        ends: dict[PartitionKey, Mapping[int, ReplicaEnd]] = {}
        waited_ms: dict[PartitionKey, int] = {}
        for key, waiting, verdict in self._compare(image, now_ms):
            if verdict.leader != NO_LEADER:
                ends[key], waited_ms[key] = dict(waiting.ends), now_ms - waiting.since_ms
                continue
            for wait_ms in (COMPARE_WAIT_MS, wait_limit_ms(self._settings)):
                if waiting.since_ms + wait_ms > now_ms:
                    self._due_ms = min(self._due_ms, waiting.since_ms + wait_ms)
        return RecoverLeaders(ends, waited_ms) if ends else None

    def waiting(self, image: ClusterImage, now_ms: int) -> dict[PartitionKey, WaitingPartition]:
        """Return the partitions that have no leader and for which at least one replica has reported."""
        return {
            key: WaitingPartition(now_ms - waiting.since_ms, dict(waiting.ends), verdict)
            for key, waiting, verdict in self._compare(image, now_ms)
        }

    def describe(self, image: ClusterImage, now_ms: int) -> list[RecoveringPartition]:
        """Describe the partitions that ``waiting`` returns, and those with damaged, unverified or refusing
        replicas."""
        waiting = self.waiting(image, now_ms)
        damaged = {
            (replica.topic_id, replica.partition, node_id)
            for node_id, replicas in self._damaged.items()
            for replica in replicas
        }
        found: list[RecoveringPartition] = []
        for name in sorted(image.topics):
            topic = image.topics[name]
            for number, state in enumerate(topic.partitions):
                key = (topic.topic_id, number)
                waits = waiting.get(key)
                epoch, refused = self._refusals.get(key, (-1, {}))
                replicas: list[RecoveringReplica] = []
                for node_id in state.replicas:
                    end = None if waits is None else waits.ends.get(node_id)
                    is_damaged = (*key, node_id) in damaged or (end is not None and end.is_damaged)
                    is_short = waits is not None and node_id in waits.verdict.short
                    if epoch == state.leader_epoch and node_id in refused:
                        report = refused[node_id]
                        replicas.append(
                            RecoveringReplica(node_id, REFUSES, report.last_epoch, report.log_end_offset)
                        )
                    elif is_damaged or node_id in state.unverified or end is not None:
                        name_of_state = (
                            DAMAGED if is_damaged else SHORT if is_short else REPORTED if end else UNVERIFIED
                        )
                        ends = (-1, -1) if end is None else (end.last_epoch, end.log_end_offset)
                        replicas.append(RecoveringReplica(node_id, name_of_state, *ends))
                if replicas or waits is not None:
                    found.append(
                        RecoveringPartition(
                            name,
                            number,
                            state.leader,
                            -1 if waits is None else waits.waited_ms,
                            [] if waits is None else list(waits.verdict.waits_for),
                            replicas,
                        )
                    )
        return found

    def ends_of(self, image: ClusterImage, key: PartitionKey) -> Mapping[int, ReplicaEnd]:
        """Return the reports of a leaderless partition's live replicas whose logs are undamaged."""
        waiting, state = self._partitions.get(key), image.partition_of(*key)
        if waiting is None or state is None or state.leader_epoch != waiting.leader_epoch:
            return {}
        ends = present_ends(image, state, waiting.ends)
        return {node_id: end for node_id, end in ends.items() if not end.is_damaged}

    def _compare(self, image: ClusterImage, now_ms: int) -> Iterator[tuple[PartitionKey, _Waiting, Verdict]]:
        """Yield the verdict on each partition that waits for a leader. Drop the reports of all others."""
        for key, waiting in list(self._partitions.items()):
            state = image.partition_of(*key)
            waited_ms = now_ms - waiting.since_ms
            found = verdict_on(image, key, waiting.ends, waited_ms, self._settings)
            if found is None or state is None or state.leader_epoch != waiting.leader_epoch:
                del self._partitions[key]
            else:
                yield key, waiting, found[1]
