"""Retries and dead letters: against an embedded broker, with time that only the test moves."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, Record, TopicPartition, retrying, serde
from kafkalite.errors import ConfigError, SerializationError
from kafkalite.testing import VirtualClock


class World:
    def __init__(self, broker: Broker, clock: VirtualClock) -> None:
        self.broker = broker
        self.clock = clock
        self.handled: list[Any] = []
        self.failing: dict[Any, int] = {}  #: how often each value fails
        self.task: asyncio.Task[None] | None = None

    async def handle(self, record: Record[Any, Any]) -> None:
        self.handled.append(record.value)
        if self.failing.get(record.value, 0) > 0:
            self.failing[record.value] -= 1
            raise ValueError(f"no {record.value}")

    async def produce(self, *values: bytes) -> None:
        async with Producer(self.broker.bootstrap_servers, linger_ms=0) as producer:
            for value in values:
                await producer.send("orders", value, headers=[("h", "x")], partition=0, timestamp_ms=7)

    @asynccontextmanager
    async def running(self, handler: Any = None, **settings: Any) -> AsyncIterator[None]:
        self.task = asyncio.create_task(
            retrying.run(
                handler or self.handle,
                "orders",
                group_id="billing",
                bootstrap_servers=self.broker.bootstrap_servers,
                clock=self.clock,
                **settings,
            )
        )
        try:
            yield
        finally:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def until(self, *handled: Any) -> None:
        async with asyncio.timeout(30):
            while self.handled != list(handled):
                assert self.task is not None and not self.task.done(), self.task
                assert len(self.handled) <= len(handled), self.handled
                await asyncio.sleep(0.005)

    async def read(self, topic: str, count: int) -> list[Record]:
        async with (
            asyncio.timeout(30),
            Consumer(
                topic, bootstrap_servers=self.broker.bootstrap_servers, auto_offset_reset="earliest"
            ) as consumer,
        ):
            return [await consumer.getone() for _ in range(count)]

    async def committed(self) -> dict[TopicPartition, int]:
        async with Admin(self.broker.bootstrap_servers) as admin:
            offsets = await admin.committed_offsets("billing")
            return {tp: at.offset for tp, at in offsets.items()}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock = VirtualClock()
    async with Broker(listeners="inproc://") as broker:
        yield World(broker, clock)


IN_PLACE = retrying.Policy(attempts=3, first_delay_ms=1_000)
DELAYED = retrying.Policy(attempts=3, first_delay_ms=60_000, max_delay_ms=10**9, delay_topics=True)


async def test_in_place_a_record_is_tried_again_after_the_backoff_and_keeps_the_order(world: World) -> None:
    world.failing = {b"a": 2}
    await world.produce(b"a", b"b")
    async with world.running(policy=IN_PLACE):
        await world.until(b"a")
        await world.clock.advance(790)
        assert world.handled == [b"a"]
        await world.clock.advance(420)
        await world.until(b"a", b"a")
        await world.clock.advance(1_180)  # 800 to 1,200 ms, then 1,600 to 2,400
        assert world.handled == [b"a", b"a"]
        await world.clock.advance(1_250)
        await world.until(b"a", b"a", b"a", b"b")


@pytest.mark.parametrize("policy", [IN_PLACE, DELAYED], ids=["in place", "delay topics"])
async def test_the_dead_letter_has_the_record_and_the_cause(world: World, policy: retrying.Policy) -> None:
    world.failing = {b"bad": 9}
    await world.produce(b"good", b"bad")
    async with world.running(policy=policy):
        async with asyncio.timeout(30):
            while len(world.handled) < 4:
                await world.clock.advance(10_000)
                await asyncio.sleep(0.005)
        (dead,) = await world.read("orders.billing.dead", 1)
    assert (dead.value, dead.headers[0]) == (b"bad", ("h", b"x"))
    assert retrying.cause_of(dead) == retrying.Cause("orders", 0, 1, 7, 3, 0, "ValueError", "no b'bad'")
    assert (await world.committed())[TopicPartition("orders", 0)] == 2


async def test_delay_topics_let_the_records_behind_pass(world: World) -> None:
    world.failing = {b"a": 1}
    await world.produce(b"a", b"b", b"c")
    seen: list[Record[Any, Any]] = []

    async def handle(record: Record[Any, Any]) -> None:
        seen.append(record)
        await world.handle(record)

    async with world.running(handle, policy=DELAYED):
        await world.until(b"a", b"b", b"c")
        (delayed,) = await world.read("orders.billing.retry-1", 1)
        cause = retrying.cause_of(delayed)
        assert cause is not None
        assert 48_000 <= cause.due_ms - world.clock.wall_ms() <= 72_000
        await world.clock.advance(47_000)
        await world.produce(b"d")
        await world.until(b"a", b"b", b"c", b"d")
        await world.clock.advance(26_000)
        await world.until(b"a", b"b", b"c", b"d", b"a")
        assert seen[-1] == seen[0]  # with its own address, timestamp and headers
        await world.clock.advance(10**6)
        assert len(world.handled) == 5


async def test_a_delayed_record_survives_a_restart_and_waits_for_its_time(world: World) -> None:
    world.failing = {b"a": 1}
    await world.produce(b"a")
    async with world.running(policy=DELAYED):
        await world.until(b"a")
        await world.read("orders.billing.retry-1", 1)
    async with world.running(policy=DELAYED):
        await world.clock.advance(10_000)
        assert world.handled == [b"a"]
        async with asyncio.timeout(30):
            while len(world.handled) < 2:
                await world.clock.advance(10_000)
                await asyncio.sleep(0.005)


async def test_a_record_in_progress_is_handled_again_after_a_restart(world: World) -> None:
    world.failing = {b"a": 1}
    await world.produce(b"a")
    async with world.running(policy=IN_PLACE):
        await world.until(b"a")
    assert (await world.committed()).get(TopicPartition("orders", 0), 0) == 0
    async with world.running(policy=IN_PLACE):
        await world.until(b"a", b"a")


async def test_a_dead_letter_that_is_sent_back_with_its_headers_begins_again(world: World) -> None:
    world.failing = {b"a": 4}
    await world.produce(b"a")
    once = retrying.Policy(attempts=1)
    async with world.running(policy=once):
        await world.until(b"a")
        (dead,) = await world.read("orders.billing.dead", 1)
    async with Producer(world.broker.bootstrap_servers) as producer:
        headers = [(name, b"8" if name == "retry.attempts" else value) for name, value in dead.headers]
        await producer.send("orders", b"a", headers=headers)
    async with world.running(policy=retrying.Policy(attempts=10, delay_topics=True)):
        await world.until(b"a", b"a")
        (delayed,) = await world.read("orders.billing.retry-1", 1)
    cause = retrying.cause_of(delayed)
    assert cause is not None and (cause.attempts, cause.offset) == (1, 1)
    assert [name for name, _ in delayed.headers].count("retry.attempts") == 1


async def test_options_of_a_consumer_may_stand_in_config(world: World) -> None:
    await world.produce(b"before")
    config = {"auto.offset.reset": "latest", "max.poll.records": 1, "client.id": "c"}
    config["auto.commit.interval.ms"] = 50
    async with world.running(config=config):
        async with asyncio.timeout(30):
            while not (world.handled and await world.committed()):
                await world.produce(b"a")
                await asyncio.sleep(0.02)
    assert set(world.handled) == {b"a"}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"enable_auto_commit": False}, "enable.auto.commit"),
        ({"config": {"processing.guarantee": "at_most_once"}}, "processing.guarantee"),
    ],
)
async def test_settings_that_break_at_least_once_are_refused(
    world: World, settings: dict[str, Any], key: str
) -> None:
    async with world.running(**settings):
        assert world.task is not None
        with pytest.raises(ConfigError, match=f"{key} .* after the records are handled"):
            await asyncio.wait_for(asyncio.shield(world.task), 30)


async def test_errors_for_which_no_retry_helps_are_buried_at_once(world: World) -> None:
    world.failing = {b"a": 9}
    await world.produce(b"a", b"b")
    async with world.running(policy=retrying.Policy(give_up_on=(ValueError,), dead_letter="dead-{topic}")):
        await world.until(b"a", b"b")
        cause = retrying.cause_of((await world.read("dead-orders", 1))[0])
        assert cause is not None and cause.attempts == 1


async def test_a_record_that_cannot_be_deserialized_is_buried_as_it_is(world: World) -> None:
    await world.produce(b"{", b"[1]")
    async with world.running(value_deserializer=serde.json):
        await world.until([1])
        (dead,) = await world.read("orders.billing.dead", 1)
    cause = retrying.cause_of(dead)
    assert cause is not None
    assert (dead.value, cause.attempts, cause.error_type) == (b"{", 0, SerializationError.__name__)


async def test_without_a_dead_letter_topic_the_last_error_ends_it(world: World) -> None:
    world.failing = {b"a": 9}
    await world.produce(b"a")
    async with world.running(policy=retrying.Policy(attempts=1, dead_letter=None)):
        assert world.task is not None
        with pytest.raises(ValueError, match="no b'a'"):
            await asyncio.wait_for(asyncio.shield(world.task), 30)
    assert (await world.committed()).get(TopicPartition("orders", 0), 0) == 0


async def test_an_ordinary_function_runs_in_a_thread(world: World) -> None:
    def handle(record: Record[Any, Any]) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        world.handled.append(record.value)

    await world.produce(b"a")
    async with world.running(handle):
        await world.until(b"a")


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"attempts": "3"}, "attempts is '3', but must be a whole number, 1 or more"),
        ({"attempts": 0.5}, "attempts is 0.5, but must be a whole number"),
        ({"first_delay_ms": -5}, "first_delay_ms is -5, but must be milliseconds, 0 or more"),
        ({"first_delay_ms": float("nan")}, "first_delay_ms is nan"),
        ({"max_delay_ms": "1s"}, "max_delay_ms is '1s', but must be milliseconds"),
    ],
)
def test_a_wrong_number_of_a_policy_is_named(wrong: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        retrying.Policy(**wrong)
    assert allowed in str(refused.value)


async def test_a_wrong_policy_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"policy is '3', but must be a Policy, such as Policy\(attempts=3\)"
    ):
        await retrying.run(print, "t", group_id="g", policy="3")  # type: ignore[arg-type]


def test_a_policy_needs_an_attempt() -> None:
    with pytest.raises(ConfigError, match="attempts is 0"):
        retrying.Policy(attempts=0)


def test_other_records_have_no_cause() -> None:
    record: Record = Record("t", 0, 0, 0, 0, None, None, (("retry.topic", b"t"),))  # type: ignore[arg-type]
    assert retrying.cause_of(record) is None


def test_headers_of_another_program_are_no_cause() -> None:
    headers = tuple((f"retry.{name}", b"\xff") for name in retrying.Cause._fields)
    record: Record = Record("t", 0, 0, 0, 0, None, None, headers)  # type: ignore[arg-type]
    assert retrying.cause_of(record) is None


async def test_a_function_in_a_thread_may_raise_stop_iteration(world: World) -> None:
    def handle(record: Record[Any, Any]) -> None:
        if record.value == b"a":
            next(iter([]))
        world.handled.append(record.value)

    await world.produce(b"a", b"b")
    async with world.running(handle, policy=retrying.Policy(attempts=1)):
        await world.until(b"b")
        cause = retrying.cause_of((await world.read("orders.billing.dead", 1))[0])
        assert cause is not None
        assert (cause.error_type, cause.error_message) == ("RuntimeError", "the handler raised StopIteration")


async def test_an_error_message_need_not_be_unicode(world: World) -> None:
    async def handle(record: Record[Any, Any]) -> None:
        raise ValueError("no file \udc80")

    await world.produce(b"a")
    async with world.running(handle, policy=retrying.Policy(attempts=1)):
        cause = retrying.cause_of((await world.read("orders.billing.dead", 1))[0])
        assert cause is not None and cause.error_message == "no file \\udc80"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


async def test_an_error_that_has_no_text_is_buried_with_its_type(world: World) -> None:
    async def handle(record: Record[Any, Any]) -> None:
        raise Unspeakable

    await world.produce(b"a")
    async with world.running(handle, policy=retrying.Policy(attempts=1)):
        cause = retrying.cause_of((await world.read("orders.billing.dead", 1))[0])
        assert cause is not None and cause.error_type == "Unspeakable"
        assert cause.error_message == "<Unspeakable: its __str__ raises ZeroDivisionError>"


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_that_raises_cancelled_error_has_failed(world: World, is_async: bool) -> None:
    def handle(record: Record[Any, Any]) -> None:
        world.handled.append(record.value)
        if record.value == b"a":
            raise asyncio.CancelledError

    async def handle_async(record: Record[Any, Any]) -> None:
        handle(record)

    await world.produce(b"a", b"b")
    async with world.running(handle_async if is_async else handle, policy=retrying.Policy(attempts=1)):
        await world.until(b"a", b"b")
        cause = retrying.cause_of((await world.read("orders.billing.dead", 1))[0])
        assert cause is not None
        assert (cause.error_type, cause.error_message) == (
            "RuntimeError",
            "the handler raised CancelledError",
        )


async def test_cancelling_it_ends_a_handler_that_waits_and_buries_nothing(world: World) -> None:
    async def handle(record: Record[Any, Any]) -> None:
        world.handled.append(record.value)
        await asyncio.Event().wait()

    await world.produce(b"a")
    async with world.running(handle, policy=retrying.Policy(attempts=1)):
        await world.until(b"a")
    assert world.task is not None and world.task.cancelled()
    async with Admin(world.broker.bootstrap_servers) as admin:
        (dead,) = (await admin.list_offsets([TopicPartition("orders.billing.dead", 0)], "latest")).values()
    assert dead.offset == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dead_letter": "{topic}.{name}"}, "{topic} and {group}"),
        ({"dead_letter": "{}"}, "{topic} and {group}"),
        ({"dead_letter": "{topic"}, "{topic} and {group}"),
        ({"give_up_on": [ValueError]}, "a tuple of exception types"),
    ],
)
def test_a_malformed_policy_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        retrying.Policy(**settings)


@pytest.mark.parametrize("dead_letter", ["orders", "{topic}", "{topic}.{group}.retry-1"])
async def test_a_dead_letter_topic_is_not_read_for_retries(world: World, dead_letter: str) -> None:
    policy = retrying.Policy(attempts=2, delay_topics=True, dead_letter=dead_letter)
    servers = world.broker.bootstrap_servers
    with pytest.raises(ConfigError, match="for ever"):
        async with asyncio.timeout(30):
            await retrying.run(
                world.handle, "orders", group_id="billing", bootstrap_servers=servers, policy=policy
            )


@pytest.mark.parametrize("is_delayed", [False, True])
async def test_the_largest_record_of_a_topic_can_be_buried(world: World, is_delayed: bool) -> None:
    servers = world.broker.bootstrap_servers
    large = b"x" * 3_000_000  # more than max.message.bytes, but less when it is compressed
    async with Producer(servers, max_request_size=4_000_000, compression_type="gzip") as producer:
        await producer.send("orders", large)

    async def handle(record: Record[Any, Any]) -> None:
        world.handled.append(len(record.value))
        raise ValueError

    policy = retrying.Policy(attempts=1 + is_delayed, first_delay_ms=0, delay_topics=is_delayed)
    async with world.running(handle, policy=policy):
        await world.until(*[len(large)] * policy.attempts)
        (dead,) = await world.read("orders.billing.dead", 1)
        assert dead.value == large


class _Takes:
    def nothing(self) -> None: ...

    async def two(self, record: Record, more: int) -> None: ...

    async def one(self, record: Record, more: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("handler", "named"),
    [
        (_Takes().nothing, "'_Takes.nothing()'"),
        (_Takes().two, "_Takes.two(record: "),
        (lambda: None, "<lambda>()"),
        (functools.partial(_Takes().one, 1, 2), "partial()"),
        ("handle", "handler is 'handle'"),
    ],
)
async def test_a_handler_that_does_not_accept_one_record_is_refused_before_a_record_is_read(
    world: World, handler: Any, named: str
) -> None:
    await world.produce(b"1")
    servers = world.broker.bootstrap_servers
    with pytest.raises(ConfigError, match=re.escape("'async def handle(record)'")) as refused:
        async with asyncio.timeout(30):
            await retrying.run(handler, "orders", group_id="billing", bootstrap_servers=servers)
    assert named in str(refused.value)
    async with Admin(servers) as admin:
        assert not await admin.list_groups(), "it did not join"
        assert [topic.name for topic in await admin.list_topics()] == ["orders"], "it created no topic"


@pytest.mark.parametrize("handler", [_Takes().one, functools.partial(_Takes().two, more=2), print, set().add])
async def test_any_function_that_accepts_one_record_is_a_handler(world: World, handler: Any) -> None:
    await world.produce(b"1")
    async with world.running(handler, auto_commit_interval_ms=10), asyncio.timeout(30):
        while await world.committed() != {TopicPartition("orders", 0): 1}:
            await asyncio.sleep(0.01)
