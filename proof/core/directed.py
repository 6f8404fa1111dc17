"""Directed schedules: each violates an invariant if its rule is removed, and none with all rules active.

They cover the rules whose removal random seeds rarely find, and some with an instructive history.
``DIRECTED`` is {mutant: schedule}. A schedule returns the violation, or None. Brokers are 1, 2 and 3; broker
1 leads in epoch 0, and all three are in sync. Schedules in which a power failure loses records use the page
cache without fsync.
"""

# Long because it is the list of the schedules of one world.

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NoReturn

from kafkalite.errors import TooManyOpenFilesError
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.core.filling import two_leaders
from proof.core.near_reader import NearReader
from proof.core.parts import Message, ViolationError
from proof.core.world import BROKERS, NEVER_MS, World


class Stage(World):
    """A world in which only the steps of a schedule happen."""

    def drain(self) -> None:
        while self.network:
            message = self.network.pop(0)
            self.deliver(message)
            if message.kind == "altered":  # the metadata of the decision follows
                self.publish(self.brokers[message.to], len(self.images) - 1)
            self.check()

    def take(self, kind: str) -> Message:
        """Remove and return the first message of a kind. The other messages are lost."""
        message = next(one for one in self.network if one.kind == kind)
        self.network.clear()
        return message

    def replicate(self, *node_ids: int, rounds: int = 2, synced: bool = True) -> None:
        """Let followers fetch ``rounds`` times in turn, and sync in between."""
        for _ in range(rounds):
            for node_id in node_ids:
                if synced:
                    self.brokers[node_id].sync()
                self.fetch(self.brokers[node_id])
                self.drain()

    def write(self, node_id: int, *, synced: bool = True, producer: int = 0) -> int:
        """Append one record at a leader. Return its value."""
        broker = self.brokers[node_id]
        value = self.new_value(self.producers[producer])
        self.on_produce(broker, self.producers[producer], value)
        if synced and broker.sync():
            self.acknowledge(broker)
        self.check()
        return value

    def tell(self, *node_ids: int, number: int = -1) -> None:
        """Publish the metadata of ``images[number]`` to the brokers."""
        for node_id in node_ids:
            self.publish(self.brokers[node_id], number % len(self.images))
            self.check()

    def confirm(self, leader: int) -> None:
        """Let ``leader`` propose the ISR as the controller has set it (R57)."""
        self.propose(self.brokers[leader], NEVER_MS)
        self.drain()

    def shrink(self, leader: int, gone: int) -> None:
        """Let ``leader`` remove ``gone``, which has stopped fetching, from the ISR."""
        self.now_ms += 100
        others = [one for one in self.state.isr if one not in (leader, gone)]
        self.replicate(*others)
        self.propose(self.brokers[leader], 50)
        self.drain()
        assert gone not in self.state.isr

    def lose(self, node_id: int) -> None:
        """Cut the power of a node, whose page cache is lost."""
        broker = self.brokers[node_id]
        self.crash(broker, "kill")
        broker.fs = MemoryFileSystem(crashable=True)
        broker.fs.make_dirs("/data")
        broker.boot()

    def return_of(self, node_id: int) -> None:
        """Let a booted broker register, receive the metadata and be unfenced."""
        self.register(self.brokers[node_id])
        self.check()
        self.tell(node_id)
        self.unfence(node_id)
        self.check()

    def is_acknowledged(self, value: int) -> bool:
        return value in self.acknowledged


def _stage(*, fsync: bool = False, node_ids: tuple[int, ...] = BROKERS) -> Stage:
    return Stage(1, fsync=fsync, node_ids=node_ids)


def any_answer() -> None:
    """Schedule: a fetch response that made a follower truncate arrives a second time."""
    stage = _stage()
    stage.write(1)
    stage.replicate(3, rounds=1)
    stage.move_leader(2)  # without the record
    stage.tell(2, 3)
    stage.fetch(stage.brokers[3])
    stage.deliver(stage.network.pop(0))
    answer = stage.take("fetched")
    stage.deliver(answer)
    stage.tell(1)
    value = stage.write(2, producer=1)
    stage.replicate(1, 3, rounds=3)
    assert stage.is_acknowledged(value)
    stage.deliver(answer)
    stage.check()


def old_epoch_fetch() -> None:
    """Schedule: a follower is still in the first epoch of a leader that was deposed and elected again
    (KIP-320).
    """
    stage = _stage()
    stage.move_leader(2)
    zombie = len(stage.images) - 1
    stage.tell(2)
    stage.fence(2)
    assert (stage.state.leader, stage.state.isr) == (1, (1, 3))
    stage.tell(1)
    stage.confirm(1)
    stage.write(1)
    stage.replicate(3, rounds=3)
    stage.tell(3, number=zombie)
    stage.replicate(3)


def truncate_to_high_watermark() -> None:
    """Schedule: the response with the new high watermark is lost; the leader begins a new epoch (KIP-101)."""
    stage = _stage()
    stage.shrink(1, 3)
    value = stage.write(1)
    stage.replicate(2, rounds=1)
    stage.fetch(stage.brokers[2])
    stage.deliver(stage.network.pop(0))
    stage.network.clear()
    assert stage.is_acknowledged(value) and stage.brokers[2].partition.high_watermark == 0
    for node_id in (1, 2):
        stage.fence(node_id)
        stage.unfence(node_id)
    stage.tell(1, 2)


def empty_epoch() -> None:
    """Schedule: a leader is deposed before it wrote: its epoch has no end offset on any other broker."""
    stage = _stage()
    stage.write(1)
    stage.replicate(2, 3)
    stage.move_leader(2)
    stage.tell(2)
    stage.move_leader(1)
    stage.tell(1, 2, 3)
    stage.write(1)
    problem = stage.heal()
    if problem is not None:
        raise ViolationError(problem)


def unsynced_leader() -> None:
    """Schedule: the leader loses records that it counted before they were synced."""
    stage = _stage(fsync=True)
    stage.shrink(1, 3)
    stage.write(1, synced=False)
    stage.replicate(2)
    stage.lose(1)
    stage.return_of(1)


def unsynced_follower() -> None:
    """Schedule: a follower loses records that it reported before they were synced."""
    stage = _stage(fsync=True)
    stage.shrink(1, 3)
    stage.write(1)
    stage.replicate(2, synced=False)
    stage.lose(2)
    stage.return_of(2)


def change_in_flight() -> None:
    """Schedule: the controller has admitted a replica, but its leader has not yet received that (KIP-497)."""
    stage = _stage()
    stage.shrink(1, 3)
    stage.fetch(stage.brokers[3])
    stage.deliver(stage.network.pop(0))
    stage.deliver(stage.take("alter"))
    stage.network.clear()
    assert stage.state.isr == (1, 2, 3)
    stage.write(1)
    stage.replicate(2)


def below_min_isr() -> None:
    """Schedule: a leader that is alone in the ISR exposes records to consumers, and loses them."""
    stage = _stage()
    stage.write(1)
    stage.fence(2)
    stage.fence(3)
    stage.tell(1)
    stage.consume()
    stage.lose(1)
    stage.return_of(1)
    stage.unfence(3)
    stage.tell(3)


def before_epoch_start() -> None:
    """Schedule: a new leader's high watermark lags, so that a replica at it may lack committed records."""
    stage = _stage()
    stage.shrink(1, 3)
    value = stage.write(1)
    stage.replicate(2, rounds=1)
    stage.fetch(stage.brokers[2])
    stage.deliver(stage.network.pop(0))
    stage.network.clear()
    assert stage.is_acknowledged(value)
    stage.fence(1)
    stage.tell(2, 3)
    stage.fetch(stage.brokers[3])
    stage.drain()


def late_duplicate() -> None:
    """Schedule: a proposal arrives a second time, after the replica that it admits was removed again."""
    stage = _stage()
    stage.shrink(1, 3)
    stage.fetch(stage.brokers[3])
    stage.deliver(stage.network.pop(0))
    proposal = next(one for one in stage.network if one.kind == "alter")
    stage.drain()
    assert stage.state.isr == (1, 2, 3)
    value = stage.write(1)
    stage.shrink(1, 3)
    assert stage.is_acknowledged(value)
    stage.deliver(proposal)
    stage.check()


def stale_broker_epoch() -> None:
    """Schedule: a broker's process fetches, and then loses its page cache; its fetch must not admit the
    replica.
    """
    stage = _stage()
    stage.write(1)
    stage.replicate(2, 3)
    stage.write(1)
    stage.shrink(1, 3)
    stage.fetch(stage.brokers[3])
    stage.deliver(stage.network.pop(0))
    stage.deliver(stage.take("fetched"))
    stage.network.clear()
    stage.brokers[3].sync()
    stage.fetch(stage.brokers[3])
    held = stage.take("fetch")
    stage.lose(3)
    stage.return_of(3)
    stage.deliver(held)
    stage.drain()


def reverted_proposal() -> None:
    """Schedule: a proposal is refused; its duplicate is accepted once the replica is unfenced."""
    stage = _stage()
    stage.shrink(1, 3)
    stage.fetch(stage.brokers[3])
    stage.deliver(stage.network.pop(0))
    proposal = stage.take("alter")
    stage.fence(3)
    stage.deliver(proposal)
    stage.drain()
    stage.unfence(3)
    value = stage.write(1)
    stage.replicate(2)
    assert stage.is_acknowledged(value)
    stage.deliver(proposal)
    stage.check()


def last_replica_standing() -> None:
    """Schedule: the ISR shrinks to one replica, which then loses its page cache (KIP-966)."""
    stage = _stage()
    value = stage.write(1)
    stage.replicate(2, 3)
    assert stage.is_acknowledged(value)
    stage.fence(2)
    stage.fence(3)
    stage.lose(1)
    stage.return_of(1)


def an_eligible_replica_without_its_tail() -> None:
    """Schedule: the leader is killed, and an eligible replica returns first, without its page cache (R20)."""
    stage = _stage()
    value = stage.write(1)
    stage.replicate(2, 3)
    assert stage.is_acknowledged(value)
    stage.fence(3)
    stage.fence(2)
    stage.crash(stage.brokers[1], "kill")
    stage.fence(1)
    stage.lose(2)
    stage.return_of(2)


def longest_log() -> None:
    """Schedule: a deposed leader has a long end that was never committed; then all brokers are killed."""
    stage = _stage(fsync=True)
    for _ in range(5):
        stage.write(1)
    stage.network.clear()
    stage.fence(1)
    stage.tell(2, 3)
    stage.confirm(2)
    value = stage.write(2, producer=1)
    stage.replicate(3, rounds=3)
    assert stage.is_acknowledged(value)
    for node_id in (1, 2, 3):
        stage.crash(stage.brokers[node_id], "kill")
        stage.fence(node_id)
        stage.brokers[node_id].boot()
    for node_id in (1, 2, 3):
        stage.return_of(node_id)
    stage.tell(1, 2, 3)
    for node_id in (1, 2, 3):
        stage.report(stage.brokers[node_id])
    assert stage.state.leader > 0
    stage.check()


def registrations_before_the_fence() -> None:
    """Schedule: all brokers are killed. The followers return and register before the leader, which does not
    return, is fenced.
    """
    stage = _stage(fsync=True)
    value = stage.write(1)
    stage.replicate(2, 3, rounds=3)
    assert stage.is_acknowledged(value)
    for node_id in (1, 2, 3):
        stage.crash(stage.brokers[node_id], "kill")
    for node_id in (2, 3):
        stage.brokers[node_id].boot()
        stage.return_of(node_id)
    stage.fence(1)
    stage.tell(2, 3)
    for node_id in (2, 3):
        stage.report(stage.brokers[node_id])
    stage.check()
    if stage.state.leader < 0:
        raise ViolationError(f"R57: two complete logs do not suffice: {stage.state}")


def unconfirmed_isr() -> None:
    """Schedule: the controller fences a follower that still runs. The leader writes at once in the smaller
    ISR.
    """
    stage = _stage(fsync=True)
    stage.fence(2)
    stage.tell(1, 3)
    value = stage.write(1)
    stage.replicate(3, rounds=3)
    assert not stage.is_acknowledged(value), "the check of the eligible replica has failed"
    stage.confirm(1)
    stage.replicate(3)
    assert stage.is_acknowledged(value)


def short_leader() -> None:
    """Schedule: the leader's disk loses all data, and the leader leads again, because the other member of the
    ISR does not return in time. The third replica, which was cut off but never stopped, has the records.
    """
    stage = _stage(fsync=True)
    value = stage.write(1)
    stage.replicate(2, 3, rounds=3)
    assert stage.is_acknowledged(value) and stage.brokers[3].partition.high_watermark == 1
    stage.fence(3)
    stage.crash(stage.brokers[2], "kill")
    stage.fence(2)
    stage.lose(1)
    stage.may_be_short = True
    stage.return_of(1)
    stage.report(stage.brokers[1])
    assert stage.state.leader == -1
    stage.recover(NEVER_MS)
    assert stage.state.leader == 1
    stage.tell(1, 3)
    stage.unfence(3)
    for _ in range(3):
        stage.replicate(3)
        stage.tell(1, 3)
        stage.replicate(1)
    stage.may_be_short = False
    stage.check()
    if stage.state.leader != 3:
        raise ViolationError(f"R50: a leader without a committed record stays: {stage.state}")


def two_histories() -> None:
    """Schedule: two disks lose all data, and their replicas acknowledge other records. One of the two is
    killed and returns, so that the ELR has only an unverified replica. Then the third replica returns with
    the first records.
    """
    stage = _stage(fsync=True)
    stage.write(1)
    stage.replicate(2, 3, rounds=3)
    assert stage.brokers[3].partition.high_watermark == 1
    stage.fence(3)
    stage.may_be_short = True
    for node_id in (2, 1):
        stage.fence(node_id)
        stage.lose(node_id)
        stage.return_of(node_id)
    stage.report(stage.brokers[1])
    stage.recover(NEVER_MS)
    assert stage.state.leader == 1
    stage.tell(1, 2)
    stage.replicate(2, rounds=3)
    stage.propose(stage.brokers[1], NEVER_MS)
    stage.drain()
    assert set(stage.state.isr) == {1, 2}
    second = stage.write(1, producer=1)
    stage.replicate(2, rounds=3)
    assert stage.is_acknowledged(second)
    stage.crash(stage.brokers[2], "kill")
    stage.fence(2)
    stage.brokers[2].boot()
    stage.return_of(2)
    assert list(stage.state.elr) == list(stage.state.unverified) == [2]
    stage.unfence(3)
    stage.tell(1, 3)
    for _ in range(3):
        stage.replicate(3)
        stage.tell(1, 3)
    if stage.state.leader == 3:
        raise ViolationError(f"R50: a leader that has committed records is replaced: {stage.state}")


def below_committed() -> None:
    """Schedule: disks lose all data, and the metadata has the high watermark: the empty log must not lead."""
    stage = _stage(fsync=True)
    value = stage.write(1)
    stage.replicate(2, 3, rounds=3)
    assert stage.is_acknowledged(value)
    stage.checkpoint(1)
    stage.fence(3)
    stage.crash(stage.brokers[2], "kill")
    stage.fence(2)
    stage.lose(1)
    stage.may_be_short = True
    stage.return_of(1)
    stage.report(stage.brokers[1])
    stage.recover(NEVER_MS)
    stage.tell(1)
    if stage.state.leader == 1:
        raise ViolationError(f"R48: a log that ends below the high watermark leads: {stage.state}")


def marker_of_the_unregistered() -> None:
    """Schedule: after a power failure, the broker boots, and is stopped in order before it has registered."""
    stage = _stage()
    value = stage.write(1)
    stage.replicate(2, 3)
    assert stage.is_acknowledged(value)
    stage.fence(2)
    stage.tell(1)
    stage.lose(3)
    stage.crash(stage.brokers[3], "stop")
    stage.fence(3)
    stage.brokers[3].boot()
    stage.register(stage.brokers[3])
    stage.check()


def silent_follower() -> None:
    """Schedule: a follower fetches repeatedly, but receives no response."""
    stage = _stage()
    stage.write(1)
    stage.replicate(2)
    for _ in range(4):
        stage.now_ms += 30
        stage.fetch(stage.brokers[3])
        stage.deliver(stage.network.pop(0))
        stage.network.clear()
    stage.replicate(2)
    stage.propose(stage.brokers[1], 50)
    stage.drain()
    if 3 in stage.state.isr:
        raise ViolationError("R15: a follower that receives nothing stays in the ISR")


def names_after_truncation() -> None:
    """Schedule: the power fails just after a truncation that removed whole segments."""
    for seed in range(8):
        stage = _stage(fsync=True)
        broker = stage.brokers[1]
        for _ in range(3):
            stage.write(1)
            broker.log.roll()
        broker.log.truncate_to(1)
        left = broker.segment_names()
        broker.fs.crash(random.Random(seed))
        if returned := broker.segment_names() - left:
            raise ViolationError(f"R4: a truncation had removed {sorted(returned)}")


def failed_sync() -> None:
    """Schedule: a sync fails, the next one succeeds and writes nothing, and the power fails."""
    stage = _stage(fsync=True)
    broker = stage.brokers[1]
    stage.write(1, synced=False)
    broker.fs.fail_next_sync(loses_pages=True)
    broker.sync()
    if broker.log.offline_reason is not None:
        return
    broker.sync()
    told = broker.log.synced_end_offset
    stage.crash(broker, "power")
    broker.boot()
    if broker.log.log_end_offset < told:
        raise ViolationError(f"R26: synced up to {told}, and the log ends at {broker.log.log_end_offset}")


def refused_sync() -> None:
    """Schedule: a sync finds no file descriptor, and the next one does."""
    stage = _stage(fsync=True)
    broker = stage.brokers[1]
    stage.write(1, synced=False)

    def refuse(path: str) -> NoReturn:
        raise TooManyOpenFilesError(f"no file descriptor left for {path}: simulated")

    vars(broker.fs)["sync_dir"] = refuse
    broker.sync()
    del vars(broker.fs)["sync_dir"]
    if broker.log.offline_reason is not None:
        raise ViolationError(f"R55: the log is offline: {broker.log.offline_reason}")
    broker.sync()
    if broker.log.synced_end_offset < broker.log.log_end_offset:
        raise ViolationError(f"R55: {broker.log} is synced up to {broker.log.synced_end_offset}")


def moved_unsynced() -> None:
    """Schedule: a record that is synced everywhere moves to nodes that have not synced it, and all nodes lose
    power."""
    stage = _stage(node_ids=(*BROKERS, 4, 5))
    stage.write(1)
    stage.replicate(2, 3)
    for broker in stage.brokers.values():
        broker.sync()
    stage.reassign([4, 5])
    stage.tell(*stage.brokers)
    stage.replicate(4, 5, rounds=3, synced=False)
    stage.propose(stage.brokers[1], NEVER_MS)
    stage.drain()
    holders = [stage.brokers[node_id] for node_id in stage.state.replicas]
    if max(broker.log.synced_end_offset for broker in holders) == 0:
        raise ViolationError(f"R68: a power failure of {stage.state.replicas} loses a synced record")
    stage.replicate(4, 5, rounds=3)
    assert stage.state.replicas == (4, 5), stage.state


def _near_stage() -> tuple[Stage, NearReader]:
    """Return a stage with one committed record, and a consumer in the rack of node 2."""
    stage = _stage()
    near = stage.near = NearReader(stage, 2)
    stage.write(1)
    stage.replicate(2, 3, rounds=3)
    return stage, near


def near_failover() -> None:
    """Schedule: the leader dies with a record that only one follower has, which is read near (R65)."""
    stage, near = _near_stage()
    near.read()
    assert near.follower_reads == 1
    stage.write(1)
    stage.replicate(2, rounds=1)  # node 3 does not fetch it, so it is not committed
    near.read()
    stage.crash(stage.brokers[1], "kill")
    stage.move_leader(3)
    stage.fence(1)
    stage.tell(2, 3)
    stage.confirm(3)
    stage.tell(2)
    near.read()
    value = stage.write(3, producer=1)
    stage.replicate(2, rounds=4)
    assert stage.is_acknowledged(value)
    near.read()
    assert list(near.values) == [0, 1] and near.values[1] == value and near.follower_reads == 2


def near_out_of_sync() -> None:
    """Schedule: the follower in the consumer's rack leaves the ISR before the consumer arrives (R66)."""
    stage, near = _near_stage()
    stage.write(1)
    stage.shrink(1, 2)
    near.read()
    assert near.values and not near.follower_reads


def near_out_of_range() -> None:
    """Schedule: a consumer seeks to the end, and the follower it reads is behind and does not know (R67)."""
    stage, near = _near_stage()
    near.read()
    assert near.follower_reads == 1
    value = stage.write(1)
    stage.shrink(1, 2)  # node 2 does not know
    stage.replicate(3)
    assert stage.is_acknowledged(value)
    near.seek_to_end()
    near.read()
    value = stage.write(1)
    stage.replicate(3)
    near.read()
    assert list(near.values) == [0, 2] and near.values[2] == value


def _outcome(schedule: Callable[[], None]) -> Callable[[], str | None]:
    def run() -> str | None:
        try:
            schedule()
        except ViolationError as error:
            return f"{error} ({schedule.__name__})"
        return None

    run.__name__, run.__doc__ = schedule.__name__, schedule.__doc__
    return run


DIRECTED: Final[dict[str, Callable[[], str | None]]] = {
    "R3-any-answer": _outcome(any_answer),
    "R3-epoch-unchecked": _outcome(old_epoch_fetch),
    "R4-truncate-to-hw": _outcome(truncate_to_high_watermark),
    "R4-names-unsynced": _outcome(names_after_truncation),
    "R5-keep-empty-epochs": _outcome(empty_epoch),
    "R7-leader-unsynced": _outcome(unsynced_leader),
    "R7-follower-leo": _outcome(unsynced_follower),
    "R8-current-isr-only": _outcome(change_in_flight),
    "R9-below-min-isr": _outcome(below_min_isr),
    "R12-no-epoch-start": _outcome(before_epoch_start),
    "R68-joins-unsynced": _outcome(moved_unsynced),
    "R69-two-leaders": _outcome(two_leaders),
    "R13-no-cas": _outcome(late_duplicate),
    "R13-no-broker-epoch": _outcome(stale_broker_epoch),
    "R14-revert": _outcome(reverted_proposal),
    "R65-to-log-end": _outcome(near_failover),
    "R66-out-of-sync": _outcome(near_out_of_sync),
    "R67-follower-believed": _outcome(near_out_of_range),
    "R15-any-fetch": _outcome(silent_follower),
    "R16-no-elr": _outcome(last_replica_standing),
    "R20-unclean-stays": _outcome(an_eligible_replica_without_its_tail),
    "R57-controller-clears": _outcome(registrations_before_the_fence),
    "R57-unconfirmed": _outcome(unconfirmed_isr),
    "R26-sync-retried": _outcome(failed_sync),
    "R55-refusal-final": _outcome(refused_sync),
    "R21-marker-unregistered": _outcome(marker_of_the_unregistered),
    "R46-longest": _outcome(longest_log),
    "R48-clamped": _outcome(below_committed),
    "R49-any-truncation": _outcome(short_leader),
    "R50-short-leader-stays": _outcome(short_leader),
    "R50-restart-hides-commits": _outcome(two_histories),
}
