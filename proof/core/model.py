"""The core model: one partition's real replicas and the real controller, in a world drawn from a seed.

There is no event loop and no socket. Each step is one event in a ``proof.core.world.World``, chosen with
weights drawn from the seed. After each step the invariants are checked. After healing, the replicas must
converge (L1) and every producer must finish (L2).

``run_core_seed(seed, fsync=...)`` returns the violation, or None. ``python -m proof.core --seeds 1000`` runs
many seeds on all cores, with ``--mutant`` without one rule.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kafkalite.errors import KafkaliteError
from kafkalite.metadata.reassignment_commands import ContinueReassignments
from kafkalite.protocol.messages.cluster import ReplicaFetchedPartition
from kafkalite.replication.follower import FetchPosition
from proof.core.parts import Broker, Message, ViolationError
from proof.core.world import BROKERS, NEVER_MS, World

STEPS: Final = 400
SPARE: Final = 4  #: a broker that has no replica at first; only in every third world


class RandomWorld(World):
    """A world in which any event may happen next."""

    def __init__(self, seed: int, *, fsync: bool) -> None:
        self.may_reassign = seed % 3 == 0
        node_ids = (*BROKERS, SPARE) if self.may_reassign else BROKERS
        super().__init__(seed, fsync=fsync, duplicates=0.08, losses=0.10, node_ids=node_ids)
        self._draw_weights()

    def _draw_weights(self) -> None:
        rng = self.rng
        fault = rng.choice([0.15, 0.4, 1.0, 2.0])
        weights: dict[Callable[[], None], float] = {
            self.produce: rng.uniform(4, 16),
            self._step_fetch: rng.uniform(14, 30),
            self._step_deliver: rng.uniform(30, 60),
            self._step_sync: rng.choice([2, 8, 20]),
            self._step_publish: rng.choice([2, 8, 20]),
            self._step_shrink: fault * rng.choice([0, 1, 4]),
            self._step_timeout: rng.choice([1, 4]),
            self._step_fence: fault * rng.choice([0, 1, 3]),
            self._step_unfence: rng.choice([2, 5, 10]),
            self._step_report: rng.choice([2, 5, 10]),
            self._step_move: fault * rng.choice([0, 0, 1, 3]),
            self._step_crash: fault * rng.choice([0, 1, 3]),
            self._step_restart: rng.choice([2, 5, 10]),
            self.consume: 3.0,
            self.near.step: rng.choice([0, 0, 10, 30]),
            self._step_checkpoint: rng.choice([0, 1]),
            self._step_roll: rng.choice([0, 1, 8]),
            self._step_delete: fault * rng.choice([0, 0, 0, 0.5]),
            self.forge: rng.choice([0, 0, 0, 0.2]),
        }
        if self.may_reassign:
            weights[self._step_reassign] = rng.choice([0.3, 1, 3])
            weights[self._step_continue] = 1.0
        self._actions = list(weights)
        self._bounds: list[float] = []
        for weight in weights.values():
            self._bounds.append(weight + (self._bounds[-1] if self._bounds else 0.0))
        self._order = rng.choice([0.0, 0.5, 0.9, 1.0])

    def step(self) -> None:
        self.now_ms += 1
        self._actions[bisect(self._bounds, self.rng.random() * self._bounds[-1])]()
        self.check()

    def _any(self) -> Broker:
        return self.brokers[self.rng.choice(list(self.brokers))]

    def _step_fetch(self) -> None:
        broker = self._any()
        if broker.is_registered:
            self.fetch(broker)

    def _step_deliver(self) -> None:
        if not self.network:
            return
        number = 0 if self.rng.random() < self._order else self.rng.randrange(len(self.network))
        message = self.network[number]
        if self.rng.random() >= self.duplicates:
            del self.network[number]
        if self.rng.random() > self.losses:
            self.deliver(self._damaged(message) if self.rng.random() < 0.02 else message)

    def _damaged(self, message: Message) -> Message:
        """Return a fetch response with one bit flipped in its last record, and any other message as it is."""
        if message.kind != "fetched" or not message.body[2]:
            return message
        *rest, data = message.body
        return replace(message, body=(*rest, data[:-1] + bytes([data[-1] ^ 1])))

    def _step_sync(self) -> None:
        broker = self._any()
        if broker.is_up and self.fsync and self.rng.random() < 0.01:
            self._fail_sync(broker)
        elif broker.is_up and broker.sync():
            self.acknowledge(broker)

    def on_fetched(
        self, broker: Broker, position: FetchPosition, answer: ReplicaFetchedPartition, data: bytes
    ) -> None:
        """Process a fetch response, and note the segments that a truncation removes."""
        truncations, before = broker.log.recovery_point.truncations, broker.segment_names()
        super().on_fetched(broker, position, answer, data)
        if broker.log.recovery_point.truncations != truncations:
            broker.truncated_names |= before - broker.segment_names()
            if broker.truncated_names and self.fsync and self.rng.random() < 0.8:
                self.crash(broker, "power")

    def crash(self, broker: Broker, kind: str) -> None:
        """Crash a broker. A segment that a truncation removed does not return (R4)."""
        before = broker.segment_names()
        super().crash(broker, kind)
        if returned := (broker.truncated_names - before) & broker.segment_names():
            raise ViolationError(f"R4: a truncation of {broker.log} had removed {sorted(returned)}")
        broker.truncated_names.clear()

    def _fail_sync(self, broker: Broker) -> None:
        """Let a sync fail. If the log goes offline because of that, cut the power (R26)."""
        broker.fs.fail_next_sync(loses_pages=True)
        broker.sync()
        broker.fs.fail_next_sync(0)
        if broker.log.offline_reason is not None:
            self.crash(broker, "power")

    def _step_publish(self) -> None:
        broker = self._any()
        if broker.is_registered and broker.replayed < self.image.metadata_offset:
            self.publish(broker, self.rng.randrange(broker.replayed + 1, len(self.images)))

    def _step_shrink(self) -> None:
        broker = self._any()
        if broker.leads:
            self.propose(broker, self.rng.choice([0, 5, 30]))

    def _step_timeout(self) -> None:
        broker = self._any()
        if broker.leads:
            broker.partition.on_undecided()
            self.propose(broker, NEVER_MS)

    def _step_fence(self) -> None:
        self.fence(self._any().node_id)

    def _step_unfence(self) -> None:
        self.unfence(self._any().node_id)

    def _step_report(self) -> None:
        self.report(self._any())

    def publish(self, broker: Broker, number: int) -> None:
        """Let a broker replay metadata. Often consumers turn to a new leader at once (R10, R11)."""
        led = broker.leads
        super().publish(broker, number)
        if broker.leads and not led and self.rng.random() < 0.5:
            self.consume()

    def _step_move(self) -> None:
        self.move_leader(self._any().node_id)

    def _step_reassign(self) -> None:
        """Move the partition to other brokers, replace the target of a running reassignment, or cancel it.

        Half of the targets prefer brokers that are not in sync.
        """
        if self.rng.random() < 0.2:
            self.reassign(None)
            return
        node_ids = self.rng.sample(list(self.brokers), len(self.brokers))
        if self.rng.random() < 0.5:
            node_ids.sort(key=self.state.isr.__contains__)
        self.reassign(node_ids[: self.rng.choice([2, 2, 3, 3])])

    def _step_continue(self) -> None:
        self.command(ContinueReassignments())

    def _step_crash(self) -> None:
        broker, chance = self._any(), self.rng.random()
        if not broker.is_up:
            return
        if chance < 0.45:
            self.crash(broker, "kill")
        elif chance >= 0.75:
            self.crash(broker, "stop")
        elif self.power_losses_left > 0:
            self.power_losses_left -= 1
            self.crash(broker, "power")

    def _step_restart(self) -> None:
        broker = self._any()
        if not broker.is_up:
            broker.boot()
        elif not broker.is_registered:
            self.register(broker)

    def _step_checkpoint(self) -> None:
        """Run one of the periodic jobs: recovery points, the high watermark for the controller."""
        broker = self._any()
        if not broker.is_registered:
            return
        broker.point = broker.log.recovery_point
        if broker.leads:
            self.checkpoint(broker.node_id)

    def _step_roll(self) -> None:
        """Close a segment, as after segment.ms. A later truncation may then remove whole segments (R4)."""
        broker = self._any()
        if broker.is_registered:
            broker.log.roll()

    def _step_delete(self) -> None:
        broker = self._any()
        if broker.leads:
            offset = self.rng.randint(0, broker.partition.high_watermark)
            broker.log.delete_before(broker.partition.deletion_end(offset))


def run_core_seed(seed: int, *, fsync: bool, steps: int = STEPS) -> str | None:
    """Return the violation in the world of this seed, with its step, or None.

    A failed assertion of the product, and damage that it reports, are violations too.
    """
    world = RandomWorld(seed, fsync=fsync)
    number = 0
    try:
        for number in range(steps):
            world.step()
            if number % 40 == 0:
                world.check_producers()
        number = steps
        return world.heal()
    except (ViolationError, AssertionError, KafkaliteError) as error:
        when = f"step {number}" if number < steps else "healing"
        name = "" if isinstance(error, ViolationError) else f"{type(error).__name__}: "
        return f"{name}{error} ({when})"
