"""Directed schedules: each violates an invariant when one rule is removed, and none while all are in
force.

They cover the rules whose loss random seeds rarely find, and a few whose story is worth reading.
``DIRECTED`` is {mutant: schedule}; a schedule returns None, or the violation. Brokers are 1, 2 and 3;
broker 1 leads in epoch 0, and all three are in sync. Schedules in which a power failure loses records
run on the page cache, without fsync.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafkalite.storage.memory_filesystem import MemoryFileSystem
from proof.core.parts import Message, ViolationError
from proof.core.world import World


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
        """Take the first message of a kind off the network; the others are lost."""
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
        """Publish the metadata of ``images[number]`` to brokers."""
        for node_id in node_ids:
            self.publish(self.brokers[node_id], number % len(self.images))
            self.check()

    def shrink(self, leader: int, gone: int) -> None:
        """Let ``leader`` remove ``gone``, which no longer fetches, from the ISR."""
        self.now_ms += 100
        others = [one for one in self.state.isr if one not in (leader, gone)]
        self.replicate(*others)
        self.propose(self.brokers[leader], 50)
        self.drain()
        assert gone not in self.state.isr

    def lose(self, node_id: int) -> None:
        """Cut the power: all of the page cache is lost."""
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


def _stage(*, fsync: bool = False) -> Stage:
    return Stage(1, fsync=fsync)


def any_answer() -> None:
    """A fetch response that made a follower truncate arrives a second time."""
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
    """A follower is still in the first epoch of a leader that was deposed and elected again (KIP-320)."""
    stage = _stage()
    stage.move_leader(2)
    zombie = len(stage.images) - 1
    stage.tell(2)
    stage.fence(2)
    assert (stage.state.leader, stage.state.isr) == (1, (1, 3))
    stage.tell(1)
    stage.write(1)
    stage.replicate(3, rounds=3)
    stage.tell(3, number=zombie)
    stage.replicate(3)


def truncate_to_high_watermark() -> None:
    """The response that reports the commit is lost; then the leader begins a new epoch (KIP-101)."""
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
    """A leader is deposed before it wrote: its epoch has no end offset on any other broker."""
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
    """The leader loses records that it counted before they were synced."""
    stage = _stage(fsync=True)
    stage.shrink(1, 3)
    stage.write(1, synced=False)
    stage.replicate(2)
    stage.lose(1)
    stage.return_of(1)


def unsynced_follower() -> None:
    """A follower loses records that it reported before they were synced."""
    stage = _stage(fsync=True)
    stage.shrink(1, 3)
    stage.write(1)
    stage.replicate(2, synced=False)
    stage.lose(2)
    stage.return_of(2)


def change_in_flight() -> None:
    """The controller has admitted a replica, and its leader has not received that yet (KIP-497)."""
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
    """A leader that is alone in the ISR exposes records to consumers, and loses them."""
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
    """A new leader's high watermark lags: a replica that has reached it may lack committed records."""
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
    """A proposal arrives a second time, after the replica that it admits was removed again."""
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
    """A fetch of a process that has since lost its page cache counts as proof that it is in sync."""
    stage = _stage()
    stage.write(1)
    stage.replicate(2, 3)
    stage.write(1)
    stage.shrink(1, 3)
    stage.fetch(stage.brokers[3])
    stage.deliver(stage.network.pop(0))
    stage.deliver(stage.take("fetched"))
    stage.network.clear()
    stage.fetch(stage.brokers[3])
    held = stage.take("fetch")
    stage.lose(3)
    stage.return_of(3)
    stage.deliver(held)
    stage.drain()


def reverted_proposal() -> None:
    """A proposal is refused; its duplicate is accepted once the replica is unfenced."""
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
    """The ISR shrinks to one replica, which then loses its page cache (KIP-966)."""
    stage = _stage()
    value = stage.write(1)
    stage.replicate(2, 3)
    assert stage.is_acknowledged(value)
    stage.fence(2)
    stage.fence(3)
    stage.lose(1)
    stage.return_of(1)


def marker_of_the_unregistered() -> None:
    """Power fails; the broker boots and is stopped in order before it has registered."""
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
    "R5-keep-empty-epochs": _outcome(empty_epoch),
    "R7-leader-unsynced": _outcome(unsynced_leader),
    "R7-follower-leo": _outcome(unsynced_follower),
    "R8-current-isr-only": _outcome(change_in_flight),
    "R9-below-min-isr": _outcome(below_min_isr),
    "R12-no-epoch-start": _outcome(before_epoch_start),
    "R13-no-cas": _outcome(late_duplicate),
    "R13-no-broker-epoch": _outcome(stale_broker_epoch),
    "R14-revert": _outcome(reverted_proposal),
    "R16-no-elr": _outcome(last_replica_standing),
    "R21-marker-unregistered": _outcome(marker_of_the_unregistered),
}
