"""Schedules of throttled moves in a cluster of real brokers, in virtual time (R70, KIP-73).

``DIRECTED`` is {mutant: schedule}, as in ``proof.sim.directed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kafkalite.client.admin.admin import Admin
from kafkalite.client.producer.producer import Producer
from kafkalite.errors import DeliveryTimeoutError
from kafkalite.metadata.throttles import FOLLOWER_RATE, FOLLOWER_REPLICAS, LEADER_RATE, LEADER_REPLICAS
from kafkalite.model import TopicPartition
from proof.sim.stage import Stage, play
from proof.sim.workload import CLIENT_SETTINGS

TOPIC: Final = "moved"
RATE: Final = 100_000  #: bytes per second
SIDES: Final = {"leader": (LEADER_RATE, LEADER_REPLICAS), "follower": (FOLLOWER_RATE, FOLLOWER_REPLICAS)}
_RECORD: Final = bytes(10_000)
_COUNT: Final = 100
_PATIENCE_S: Final = 60.0
#: How long a record may take that is written to throttled replicas in sync.
_SOON_S: Final = 0.25


async def _throttle(stage: Stage, sides: tuple[str, ...], rate: int) -> None:
    async def call() -> None:
        async with Admin(stage.bootstrap, **CLIENT_SETTINGS) as admin:
            for rate_option, replicas_option in map(SIDES.__getitem__, sides):
                await admin.alter_configs("topic", TOPIC, {replicas_option: "*"})
                for node in stage.nodes:
                    await admin.alter_configs("broker", str(node.node_id), {rate_option: str(rate)})

    await stage.on("admin", call())


async def _write(stage: Stage, partitions: int, count: int = _COUNT, *, pause_s: float = 0.0) -> float:
    """Write ``count`` records one after the other. Return the longest time of one in virtual seconds."""
    clock, rng = stage.simulation.host("writer").clock, stage.simulation.rng("writer")
    longest_ms = 0
    async with Producer(stage.bootstrap, clock=clock, rng=rng, **CLIENT_SETTINGS) as producer:
        for number in range(count):
            began_ms = clock.monotonic_ms()
            await producer.send(TOPIC, _RECORD, partition=number % partitions)
            longest_ms = max(longest_ms, clock.monotonic_ms() - began_ms)
            await asyncio.sleep(pause_s)
    return longest_ms / 1000


def _stored_bytes(stage: Stage, partitions: int) -> int:
    """Return the bytes of the leaders' logs."""
    total = 0
    for number in range(partitions):
        broker = stage.led(TOPIC, number).live
        hosted = broker and broker.partitions.find(TopicPartition(TOPIC, number))
        total += hosted.stored().size_bytes if hosted else 0
    return total


async def _move(stage: Stage, partitions: int, *target: int) -> float:
    """Move all partitions to the brokers ``target``. Return the virtual seconds that it takes."""

    async def call() -> None:
        async with Admin(stage.bootstrap, **CLIENT_SETTINGS) as admin:
            await admin.alter_partition_reassignments(
                {TopicPartition(TOPIC, number): target for number in range(partitions)},
                allow_replication_factor_change=True,
            )

    began_s = stage.simulation.loop.time()
    await stage.on("admin", call())
    await stage.until(
        lambda: all(set(state.isr) == set(target) for state in stage.observer.image.topics[TOPIC].partitions),
        _PATIENCE_S,
    )
    return stage.simulation.loop.time() - began_s


async def moves_at_the_rate(stage: Stage, sides: tuple[str, ...], partitions: int = 1) -> str | None:
    """Schedule: partitions move at a throttled rate. The bytes of their logs, over the time, are the rate
    within a tenth."""
    await stage.open(TOPIC, partitions=partitions, replication_factor=1, configs={"min.insync.replicas": "1"})
    await _move(stage, partitions, 1)
    await stage.on("writer", _write(stage, partitions))
    await _throttle(stage, sides, RATE)
    size_bytes = _stored_bytes(stage, partitions)
    seconds = await _move(stage, partitions, 2)
    if not 0.9 * RATE < size_bytes / seconds < 1.1 * RATE:
        of_rate = size_bytes / seconds / RATE
        return f"R70: {size_bytes} bytes moved in {seconds:.2f} s, at {of_rate:.2f} of the rate"
    return None


async def writes_while_throttled(stage: Stage, sides: tuple[str, ...]) -> str | None:
    """Schedule: all replicas are throttled to almost nothing, and a client writes to replicas in sync."""
    await stage.open(TOPIC)
    await _throttle(stage, sides, 1)
    try:
        longest_s = await stage.on("writer", _write(stage, 1, 20))
    except DeliveryTimeoutError as error:
        return f"R70: replicas in sync are throttled: {error}"
    if longest_s > _SOON_S:
        return f"R70: a record took {longest_s:.2f} s, because replicas in sync are throttled"
    return None


async def writes_to_a_moving_partition(stage: Stage) -> str | None:
    """Schedule: a client writes half as fast as the throttle allows to a partition that moves. The move
    completes, and no record waits for the replica that joins."""
    await stage.open(TOPIC, replication_factor=1, configs={"min.insync.replicas": "1"})
    await _move(stage, 1, 1)
    await stage.on("writer", _write(stage, 1, 5))
    rate = RATE // 10  # one batch is the bytes of a second
    await _throttle(stage, tuple(SIDES), rate)
    moving = asyncio.ensure_future(_move(stage, 1, 1, 2))
    longest_s = await stage.on("writer", _write(stage, 1, 15, pause_s=2 * len(_RECORD) / rate))
    if longest_s > _SOON_S:
        return f"R70: a record took {longest_s:.2f} s while a throttled replica joined"
    await stage.until(moving.done, 1.0)
    await moving
    return None


async def ends_with_its_option(stage: Stage) -> str | None:
    """Schedule: a move that is throttled to almost nothing completes when the options are removed."""
    await stage.open(TOPIC, replication_factor=1, configs={"min.insync.replicas": "1"})
    await _move(stage, 1, 1)
    await stage.on("writer", _write(stage, 1))
    await _throttle(stage, tuple(SIDES), 1_000)
    moving = asyncio.ensure_future(_move(stage, 1, 2))
    await stage.pass_time(5.0)
    if moving.done():
        return "R70: a move of 1 MB took 5 s at 1 kB/s"

    async def call() -> None:
        async with Admin(stage.bootstrap, **CLIENT_SETTINGS) as admin:
            for rate_option, _ in SIDES.values():
                for node in stage.nodes:
                    await admin.alter_configs("broker", str(node.node_id), {rate_option: None})

    await stage.on("operator", call())
    await stage.until(moving.done, 2.0)
    await moving
    return None


def run(schedule: Callable[..., Any], **arguments: Any) -> str | None:
    """Return the violation that the schedule finds, or None."""
    return play(partial(schedule, **arguments), settings={"replica_fetch_max_bytes": 20_000})


DIRECTED: Final[dict[str, Callable[[], str | None]]] = {
    "R70-leader-unlimited": partial(run, moves_at_the_rate, sides=("leader",)),
    "R70-follower-unlimited": partial(run, moves_at_the_rate, sides=("follower",)),
    "R70-leader-limits-in-sync": partial(run, writes_while_throttled, sides=("leader",)),
    "R70-follower-limits-in-sync": partial(run, writes_while_throttled, sides=("follower",)),
}
