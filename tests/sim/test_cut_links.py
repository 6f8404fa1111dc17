"""R15, R23: one cut link between two brokers, in one or both directions, delays acks=all by at most 5 s."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise

import pytest

from kafkalite.client.producer.producer import Producer
from proof.sim.nodes import SimNode
from proof.sim.stage import Stage, play

TOPIC = "t"
PARTITIONS = 3
CUT_S = 7.0
LIMIT_S = 5.0
SETTINGS = {"broker_session_timeout_ms": 3_000}  # the default


async def write_on(stage: Stage, partition: int, acknowledged_s: list[float]) -> None:
    """Write a record every 50 ms, and note the time of each acknowledgement."""
    host, loop = stage.simulation.host("writer"), asyncio.get_running_loop()
    async with Producer(stage.bootstrap, clock=host.clock, rng=stage.simulation.rng("writer")) as producer:
        while True:
            delivery = producer.send_nowait(TOPIC, b"x", partition=partition)
            delivery.add_callback(lambda done: done.exception() or acknowledged_s.append(loop.time()))
            await asyncio.sleep(0.05)


def ends_of(stage: Stage, controller: str) -> tuple[int, SimNode, SimNode]:
    """Return a partition, its leader, and a follower, of which ``controller`` is the active controller."""
    active = stage.controller()
    for number in range(PARTITIONS):
        leader = stage.led(TOPIC, number)
        for follower in stage.others(leader):
            if {"leader": leader, "follower": follower}.get(
                controller, stage.others(leader, follower)[0]
            ) is active:
                return number, leader, follower
    raise AssertionError(f"the controller is no {controller}")


async def longest_pause(stage: Stage, controller: str, cut: str) -> str | None:
    await stage.open(TOPIC, partitions=PARTITIONS)
    number, leader, follower = ends_of(stage, controller)
    acknowledged_s: list[float] = []
    stage.simulation.host("writer").run(write_on(stage, number, acknowledged_s))
    await stage.pass_time(1.5)
    links = {"to follower": (leader, follower), "to leader": (follower, leader)}
    for name, (source, target) in links.items():
        if cut in (name, "both"):
            stage.simulation.network.link(source.host.name, target.host.name).cut()
    await asyncio.sleep(CUT_S)
    acknowledged_s.append(asyncio.get_running_loop().time())
    pause_s = max(later - earlier for earlier, later in pairwise(acknowledged_s))
    await stage.whole()
    return None if pause_s <= LIMIT_S else f"no acknowledgement for {pause_s:.1f} s"


@pytest.mark.parametrize("controller", ["leader", "follower", "third node"])
@pytest.mark.parametrize("cut", ["both", "to follower", "to leader"])
def test_r15_one_cut_link_delays_acknowledgements_by_at_most_5_s(controller: str, cut: str) -> None:
    assert play(partial(longest_pause, controller=controller, cut=cut), settings=SETTINGS) is None
