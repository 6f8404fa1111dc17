"""@simulate: a user's test under random faults, the report of a failure, and its replay."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import kafkalite
from kafkalite import Consumer, Producer
from kafkalite.errors import CommitFailedError, ConfigError, RequestTimeoutError
from kafkalite.testing import SimulatedCluster, simulate
from kafkalite.testing.sim import Simulation
from kafkalite.testing.sim.network import Link
from kafkalite.testing.strikes import KINDS, MOST_STRIKES, Strike, draw_strikes

ORDERS = [b"%d" % number for number in range(5)]


async def ship(servers: str, shipped: list[bytes], *, commits_first: bool = False) -> None:
    """Ship each order, and commit it afterwards, or before."""
    consumer = Consumer(
        "orders",
        group_id="shipping",
        bootstrap_servers=servers,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer:
        async for order in consumer:
            if commits_first:
                await consumer.commit(order)
            await asyncio.sleep(0.01)
            assert order.value is not None
            shipped.append(order.value)
            if not commits_first:
                try:
                    await consumer.commit(order)
                except CommitFailedError:
                    continue  # another member ships it again


async def every_order(cluster: SimulatedCluster, *, commits_first: bool = False) -> list[bytes]:
    shipped: list[bytes] = []
    cluster.program("shop", lambda: ship(cluster.bootstrap_servers, shipped, commits_first=commits_first))
    async with Producer(cluster.bootstrap_servers) as producer:
        for order in ORDERS:
            await producer.send("orders", order)
    while set(shipped) != set(ORDERS):
        await asyncio.sleep(0.1)
    return shipped


@pytest.mark.parametrize("kind", KINDS)
def test_at_least_once_survives_every_kind_of_fault(kind: str) -> None:
    struck: Counter[str] = Counter()

    @simulate(seeds=8, faults=[kind])
    async def test(cluster: SimulatedCluster) -> None:
        shipped = await every_order(cluster)
        assert sorted(set(shipped)) == ORDERS
        struck.update(strike.kind for _, strike, _ in cluster.struck)

    test()
    assert set(struck) == {kind}


def failure_of(**arguments: Any) -> tuple[str, str]:
    """Return the message and the report of the failure of a consumer that commits too early."""

    @simulate(**arguments)
    async def test(cluster: SimulatedCluster) -> None:
        await every_order(cluster, commits_first=True)

    with pytest.raises(AssertionError) as caught:
        test()
    (note,) = caught.value.__notes__
    return str(caught.value), note


def test_a_failure_names_the_seed_the_fewest_faults_and_the_story() -> None:
    faults = ["kill_program"]  # a long pause would exceed the limit, too
    message, note = failure_of(seeds=50, limit_s=60, faults=faults)
    assert message == "the test did not end within 60 s of virtual time"
    headline, fault, *story = note.splitlines()
    assert "fails with 1 fault" in headline
    assert "@simulate(seed=" in headline
    assert "shop is killed" in fault
    assert story[0] == "what happened:"
    text = "\n".join(story)
    assert "test       Produce orders-0" in text
    # The commit and the fault may fall on the same millisecond; no consumer commits 1 after the restart.
    assert text.index("OffsetCommit orders-0 at 1") < text.rindex("shop       starts")
    assert text.index("FAULT: shop is killed") < text.rindex("shop       starts")

    seed = int(headline.split("seed=")[1].split(")")[0])
    assert failure_of(seed=seed, limit_s=60, faults=faults) == (message, note)  # the same, to the millisecond
    assert failure_of(seed=seed, limit_s=60, faults=faults, seeds=1) == (message, note)


def test_a_test_that_fails_without_faults_says_so() -> None:
    @simulate(seeds=5)
    async def test(cluster: SimulatedCluster) -> None:
        await cluster.create_topic("t")
        raise KeyError("always")

    with pytest.raises(KeyError) as caught:
        test()
    (note,) = caught.value.__notes__
    assert note.startswith("the test fails without any fault")
    assert "CreateTopics t" in note


def test_an_outcome_of_pytest_is_reported_as_a_failure() -> None:
    @simulate(seeds=1)
    async def test(cluster: SimulatedCluster) -> None:
        pytest.fail("as it should")

    with pytest.raises(pytest.fail.Exception) as caught:
        test()
    assert caught.value.__notes__[0].startswith("the test fails without any fault")


def test_other_threads_read_the_real_time() -> None:
    @simulate(seeds=1)
    async def test(cluster: SimulatedCluster) -> None:
        times: list[float] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: times.append(time.monotonic()))
            thread.start()
            thread.join()
            own = time.monotonic()
            await asyncio.sleep(250)
            assert time.monotonic() - own >= 250
            if len(times) == 2:
                assert times[1] - times[0] < 200
                return

    test()


def test_an_error_of_a_program_fails_the_run_at_once() -> None:
    @simulate(seeds=1)
    async def test(cluster: SimulatedCluster) -> None:
        async def broken() -> None:
            await asyncio.sleep(1)
            raise ZeroDivisionError("a bug")

        cluster.program("broken", broken)
        await asyncio.sleep(500)

    with pytest.raises(ZeroDivisionError) as caught:
        test()
    assert "broken raises ZeroDivisionError('a bug')" in caught.value.__notes__[0]
    assert "after 1002 ms" in caught.value.__notes__[1]


def test_a_program_starts_again_after_an_error_that_follows_a_fault() -> None:
    starts: list[int] = []

    @simulate(seeds=10, faults=["reset"])
    async def test(cluster: SimulatedCluster) -> None:
        starts.append(0)

        async def impatient() -> None:
            starts[-1] += 1
            while True:
                await asyncio.sleep(0.1)
                if cluster.struck and starts[-1] == 1:
                    raise RequestTimeoutError("too slow")

        cluster.program("impatient", impatient)
        for _ in range(30):
            await cluster.produce("t", [b"1"])
        await asyncio.sleep(5)

    test()
    assert starts[0] == 1  # the run without faults
    assert max(starts) == 2


def test_a_kafkalite_error_without_a_fault_fails_the_run() -> None:
    @simulate(seeds=1)
    async def test(cluster: SimulatedCluster) -> None:
        async def impatient() -> None:
            raise RequestTimeoutError("too slow")

        cluster.program("impatient", impatient)
        await asyncio.sleep(5)

    with pytest.raises(RequestTimeoutError, match="too slow"):
        test()


def test_calm_ends_the_faults() -> None:
    @simulate(seeds=20)
    async def test(cluster: SimulatedCluster) -> None:
        for _ in range(3):
            await cluster.produce("t", [b"1"])
        await cluster.calm()
        struck = len(cluster.struck)
        before_ms = cluster.simulation.now_ms
        for _ in range(20):
            await cluster.produce("t", [b"2"])
        assert len(cluster.struck) == struck
        assert cluster.simulation.now_ms - before_ms < 2_000

    test()


def test_time_and_chance_are_those_of_the_simulation() -> None:
    drawn: list[float] = []
    before = random.getstate()
    began_s, began = time.time(), time.perf_counter()

    @simulate(seed=3)
    async def test(cluster: SimulatedCluster) -> None:
        drawn.append(random.random())
        start_s, start_ns = time.time(), time.monotonic_ns()
        await asyncio.sleep(3_600 / 10)
        assert 360 <= time.time() - start_s < 361
        assert 360e9 <= time.monotonic_ns() - start_ns < 361e9
        async with Producer(cluster.bootstrap_servers) as producer:
            await producer.send("t", b"1")
        (record,) = await cluster.records("t")
        assert abs(record.timestamp_ms - time.time() * 1000) < 1_000

    test()
    test()
    assert drawn[:2] == drawn[2:]
    assert random.getstate() == before
    assert abs(time.time() - began_s) < 60
    assert time.perf_counter() - began < 60


def test_strikes_are_drawn_from_the_seed() -> None:
    kinds = tuple(KINDS)
    drawn = [draw_strikes(seed, kinds, 100) for seed in range(300)]
    assert drawn == [draw_strikes(seed, kinds, 100) for seed in range(300)]
    strikes = [strike for each in drawn for strike in each]
    assert {strike.kind for strike in strikes} == set(KINDS)
    assert {len(each) for each in drawn} == set(range(1, MOST_STRIKES + 1))
    assert min(strike.at_write for strike in strikes) <= 3
    assert 140 <= max(strike.at_write for strike in strikes) <= 151
    assert any(strike.duration_ms == 70_000 for strike in strikes)
    assert draw_strikes(1, (), 100) == []
    assert (
        Strike(1, "kill_program", 20, 0.5).describe("shop") == "shop is killed, and starts again 20 ms later"
    )


@pytest.mark.parametrize(
    ("kinds", "is_over"),
    [
        (("cut", "cut"), lambda link: not link.is_cut),
        (("cut", "lost_responses"), lambda link: not link.is_cut),
        (("slow", "slow"), lambda link: link.tuning is link.network.tuning),
    ],
)
def test_the_end_of_a_fault_does_not_end_a_longer_one(
    kinds: tuple[str, str], is_over: Callable[[Link], bool]
) -> None:
    long, short = (Strike(1, kind, ms, 0) for kind, ms in zip(kinds, (1_000, 300), strict=True))
    with Simulation(1) as simulation:
        cluster = SimulatedCluster(simulation, [long, short], {})
        link = simulation.network.link("broker", "test")

        async def main() -> None:
            await cluster.start()
            async with Producer(cluster.bootstrap_servers):
                """The strikes are before its first write."""

        async def watched() -> None:
            sending = asyncio.ensure_future(main())
            while len(cluster.struck) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.6)
            assert not is_over(link)
            await asyncio.sleep(0.5)
            assert is_over(link)
            await sending

        simulation.run(watched(), on=simulation.host("test"))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kill'"):
        simulate(faults=["kil"])
    for arguments in ({"seeds": 0}, {"limit_s": -1}):
        with pytest.raises(ConfigError, match="1 or more"):
            simulate(**arguments)  # type: ignore[call-overload]

    def synchronous(cluster: SimulatedCluster) -> None: ...

    async def without_cluster() -> None: ...

    for test in (synchronous, without_cluster):
        with pytest.raises(TypeError, match="must be 'async def' with the cluster as its first argument"):
            simulate()(test)  # type: ignore[arg-type]


def test_without_parentheses_a_test_runs_with_the_default_seeds() -> None:
    seeds: list[int] = []

    @simulate
    async def test(cluster: SimulatedCluster) -> None:
        seeds.append(cluster.seed)

    test()
    assert seeds == list(range(101)), "the calm run, and 100 seeds"
    with pytest.raises(TypeError, match=r"@simulate\(seeds=200\)"):
        simulate(200)  # type: ignore[call-overload]


def test_a_test_may_be_given_with_the_other_arguments() -> None:
    seeds: list[int] = []

    async def test(cluster: SimulatedCluster) -> None:
        seeds.append(cluster.seed)
        assert cluster.simulation.story(last=0) == []
        assert len(cluster.simulation.story(last=1)) <= 1

    simulate(test, seeds=2)()  # type: ignore[call-overload]
    assert seeds == [0, 1, 2]


@kafkalite.simulate(seeds=2)
async def test_pytest_provides_the_other_arguments(cluster: SimulatedCluster, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("written")
    assert cluster.seed in (0, 1, 2)


class TestMethods:
    @simulate(seeds=2)
    async def test_a_method_has_the_cluster_after_self(self, cluster: SimulatedCluster) -> None:
        await cluster.produce("t", [b"1"])
        assert isinstance(self, TestMethods)


def test_the_result_is_a_synchronous_function_without_the_cluster() -> None:
    assert not inspect.iscoroutinefunction(test_pytest_provides_the_other_arguments)
    assert list(inspect.signature(test_pytest_provides_the_other_arguments).parameters) == ["tmp_path"]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:9092"])
@pytest.mark.parametrize("kind", [kafkalite.Broker, Producer])
def test_sockets_in_a_simulation_are_refused_with_the_alternative(kind: type, address: str) -> None:
    @simulate(seed=1)
    async def test(cluster: SimulatedCluster) -> None:
        async with kind(**{"listeners" if kind is kafkalite.Broker else "bootstrap_servers": address}):
            pass

    with pytest.raises(RuntimeError, match=r"no sockets in a simulation: .* inproc://"):
        test()
