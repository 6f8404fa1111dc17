"""Hosts: a disk that loses unsynced data, an executor that takes time, a clock that may jump."""

from __future__ import annotations

import asyncio

import pytest

from kafkalite.errors import DiskFullError
from kafkalite.testing.sim import Simulation


def test_the_executor_works_while_the_loop_goes_on() -> None:
    async def story(simulation: Simulation) -> None:
        host = simulation.host("a")
        host.disk.sync_s = 1.0
        executor = host.executor()
        loop = asyncio.get_running_loop()
        began_ms = simulation.now_ms
        done = [loop.run_in_executor(executor, lambda number=number: number * 2) for number in range(4)]
        await asyncio.sleep(0.5)
        assert not any(each.done() for each in done)
        assert await asyncio.gather(*done) == [0, 2, 4, 6]
        assert simulation.now_ms - began_ms >= 2_000  # two at a time

    with Simulation(1) as simulation:
        simulation.run(story(simulation), on=simulation.host("a"))


def test_pending_calls_of_the_executor_end_with_its_process() -> None:
    ran: list[int] = []

    async def work(simulation: Simulation) -> None:
        simulation.host("a").executor().submit(ran.append, 1)
        await asyncio.sleep(10)

    async def story(simulation: Simulation) -> None:
        host = simulation.host("a")
        host.disk.sync_s = 1.0
        host.run(work(simulation))
        await asyncio.sleep(0.5)
        host.kill()
        await asyncio.sleep(10)

    with Simulation(1) as simulation:
        simulation.run(story(simulation))
    assert ran == []


def test_an_orderly_end_waits_for_the_executor() -> None:
    with Simulation(1) as simulation:
        ran: list[int] = []

        async def story() -> None:
            executor = simulation.host("a").executor()
            executor.submit(ran.append, 1)
            failing = executor.submit(lambda: 1 / 0)
            executor.shutdown(wait=True)
            with pytest.raises(ZeroDivisionError):
                failing.result()

        simulation.run(story(), on=simulation.host("a"))
        assert ran == [1]


def test_a_kill_keeps_what_was_written_and_a_power_loss_does_not() -> None:
    def survives(*, power: bool, seed: int) -> bytes:
        with Simulation(seed) as simulation:
            host = simulation.host("a")
            fs = host.filesystem
            fs.make_dirs("/d")
            file = fs.open("/d/f", create=True)
            file.write_at(0, b"synced")
            file.sync()
            fs.sync_dir("/d")
            fs.sync_dir("/")
            file.write_at(6, b" and not")
            host.new_process()
            if power:
                host.lose_power()
            else:
                host.kill()
            return fs.read_bytes("/d/f")

    assert survives(power=False, seed=1) == b"synced and not"
    after = {survives(power=True, seed=seed) for seed in range(8)}
    assert {content[:6] for content in after} == {b"synced"}
    assert len(after) > 1


def test_a_full_disk() -> None:
    with Simulation(1) as simulation:
        host = simulation.host("a")
        host.fill_disk(10)
        file = host.filesystem.open("/f", create=True)
        with pytest.raises(DiskFullError):
            file.write_at(0, bytes(11))
        host.free_disk()
        file.write_at(0, bytes(11))


def test_the_wall_clock_jumps_and_the_other_one_does_not() -> None:
    with Simulation(1) as simulation:
        clock = simulation.host("a").clock
        wall_ms, monotonic_ms = clock.wall_ms(), clock.monotonic_ms()
        simulation.host("a").set_clock_ahead(-5_000)
        assert clock.wall_ms() == wall_ms - 5_000
        assert clock.monotonic_ms() == monotonic_ms
        simulation.run(clock.sleep_ms(250))
        assert clock.monotonic_ms() >= monotonic_ms + 250
