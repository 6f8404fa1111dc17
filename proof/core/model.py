"""The core model: one partition's real replicas and the real controller, in a world drawn from a seed.

No event loop and no socket: each step is one event in a ``proof.core.world.World``, chosen by the
seed's own weights. The invariants are checked after each step; after healing, that replicas converge
(L1) and that every producer finishes (L2).

``run_core_seed(seed, fsync=...)`` returns None, or the violation. ``python -m proof.core --seeds 1000``
runs many on all cores, ``--mutant`` with one rule removed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import Final

from kafkalite.errors import KafkaliteError
from kafkalite.protocol.messages.cluster import CheckpointHighWatermarksRequest, PartitionHighWatermark
from proof.core.parts import TOPIC_ID, Broker, ViolationError
from proof.core.world import (
    BROKERS,
    NEVER_MS,
    World,
)

STEPS: Final = 400


class RandomWorld(World):
    """A world in which any event may happen next."""

    def __init__(self, seed: int, *, fsync: bool) -> None:
        super().__init__(seed, fsync=fsync, duplicates=0.08, losses=0.10)
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
            self._step_move: fault * rng.choice([0, 0, 1, 3]),
            self._step_crash: fault * rng.choice([0, 1, 3]),
            self._step_restart: rng.choice([2, 5, 10]),
            self.consume: 3.0,
            self._step_checkpoint: rng.choice([0, 1]),
            self._step_delete: fault * rng.choice([0, 0, 0, 0.5]),
        }
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
        return self.brokers[self.rng.choice(BROKERS)]

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
            self.deliver(message)

    def _step_sync(self) -> None:
        broker = self._any()
        if broker.is_up and broker.sync():
            self.acknowledge(broker)

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

    def _step_move(self) -> None:
        self.move_leader(self._any().node_id)

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
        """Run one of the periodic jobs: recovery points, rolls, the high watermark for the controller."""
        broker = self._any()
        if not broker.is_registered:
            return
        broker.point = broker.log.recovery_point
        if self.rng.random() < 0.3:
            broker.log.roll()
        if broker.leads:
            partition = broker.partition
            known = PartitionHighWatermark(TOPIC_ID, 0, partition.leader_epoch, partition.high_watermark)
            self.command(CheckpointHighWatermarksRequest(broker.node_id, broker.broker_epoch, [known]))

    def _step_delete(self) -> None:
        broker = self._any()
        if broker.leads:
            offset = self.rng.randint(0, broker.partition.high_watermark)
            broker.log.delete_before(broker.partition.deletion_end(offset))


def run_core_seed(seed: int, *, fsync: bool, steps: int = STEPS) -> str | None:
    """Return the violation in the world of this seed, with its step; None if there is none.

    A failed assertion of the product, or damage that it reports, is a violation too.
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
