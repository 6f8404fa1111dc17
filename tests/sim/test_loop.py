"""The loop: time is a number, the seed decides the order, and a killed process runs no more code."""

from __future__ import annotations

import asyncio
import time

import pytest

from kafkalite.testing.sim import Simulation
from kafkalite.testing.sim.loop import Deadlock


def test_a_day_passes_at_once() -> None:
    began_s = time.monotonic()
    with Simulation(1) as simulation:
        simulation.run(asyncio.sleep(86_400))
        assert 86_400_000 <= simulation.now_ms < 86_400_100
    assert time.monotonic() - began_s < 5


def test_callbacks_of_one_process_keep_their_order() -> None:
    seen: list[int] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(0)

    with Simulation(1) as simulation:
        simulation.run(story(), on=simulation.host("a"))
    assert seen == list(range(20))


def test_processes_take_turns_as_the_seed_says() -> None:
    def order(seed: int) -> list[str]:
        seen: list[str] = []

        async def work(name: str) -> None:
            for _ in range(10):
                await asyncio.sleep(0)
                seen.append(name)

        with Simulation(seed) as simulation:
            tasks = [simulation.host(name).run(work(name)) for name in "abc"]

            async def wait() -> None:
                await asyncio.wait(tasks)

            simulation.run(wait())
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_a_killed_process_runs_no_cleanup() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            seen.append("cleaned up")

    async def story(simulation: Simulation) -> None:
        host = simulation.host("a")
        host.run(work())
        await asyncio.sleep(1)
        host.kill()
        await asyncio.sleep(100)
        assert seen == []

    with Simulation(1) as simulation:
        simulation.run(story(simulation))


def test_a_paused_process_goes_on_where_it_was() -> None:
    ticks: list[int] = []

    async def work(simulation: Simulation) -> None:
        while True:
            await asyncio.sleep(0.1)
            ticks.append(simulation.now_ms)

    async def story(simulation: Simulation) -> None:
        host = simulation.host("a")
        host.run(work(simulation))
        await asyncio.sleep(0.55)
        host.pause()
        await asyncio.sleep(5)
        assert len(ticks) == 5
        host.resume()
        await asyncio.sleep(0.25)

    with Simulation(1) as simulation:
        simulation.run(story(simulation))
    assert len(ticks) > 6
    assert ticks[5] - ticks[4] >= 5_000


def test_a_busy_process_has_one_turn_at_a_time_and_none_while_it_is_paused() -> None:
    turns = 0

    async def spin() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def story(simulation: Simulation) -> None:
        host = simulation.host("a")
        host.run(spin())
        await asyncio.sleep(0.001)
        assert turns > 10
        active = simulation.loop._active
        assert len(active) == len(set(active))
        host.pause()
        paused_at = turns
        await asyncio.sleep(0.001)
        assert turns == paused_at
        host.resume()
        await asyncio.sleep(0.001)
        assert turns > paused_at + 10

    with Simulation(1) as simulation:
        simulation.run(story(simulation))


def test_a_deadlock_is_raised() -> None:
    with Simulation(1) as simulation, pytest.raises(Deadlock):
        simulation.run(asyncio.Event().wait())


def test_a_program_that_never_waits_does_not_stop_time() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with Simulation(1) as simulation:
        simulation.host("a").run(spin())
        simulation.run(asyncio.sleep(0.1))


def test_an_uncaught_exception_is_a_violation() -> None:
    async def story() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with Simulation(1) as simulation:
        simulation.run(story())
        assert [violation.kind for violation in simulation.violations] == ["crash"]


def test_no_threads() -> None:
    async def story() -> None:
        await asyncio.to_thread(time.monotonic)

    with Simulation(1) as simulation, pytest.raises(RuntimeError, match="no threads"):
        simulation.run(story())


def test_tasks_have_an_order_in_sets() -> None:
    async def story() -> list[int]:
        tasks = {asyncio.ensure_future(asyncio.sleep(0.01 * number)) for number in range(30)}
        numbers = [hash(task) for task in tasks]
        await asyncio.wait(tasks)
        return [number - min(numbers) for number in numbers]

    orders = []
    for _ in range(3):
        with Simulation(1) as simulation:
            orders.append(simulation.run(story()))
    assert orders[0] == orders[1] == orders[2]
