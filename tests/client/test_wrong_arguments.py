"""Arguments of wrong types raise an error that names the argument, never a TypeError from inside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from kafkalite import Admin, Broker, Consumer, Producer, ProducerInterceptor, Table, TopicPartition, sync
from kafkalite.client.admin.descriptions import NewTopic
from kafkalite.errors import ClientClosedError, ClientError, ConfigError, KafkaliteError

T0 = TopicPartition("t", 0)


class Clients(NamedTuple):
    producer: Any
    consumer: Any
    admin: Any


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    async with (
        Broker() as broker,
        Admin(broker.bootstrap_servers) as admin,
        Producer(broker.bootstrap_servers) as producer,
    ):
        await producer.send("t", b"x")
        async with Consumer("t", bootstrap_servers=broker.bootstrap_servers) as consumer:
            yield Clients(producer, consumer, admin)


async def called(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    result = function(*arguments, **named)
    if isinstance(result, Awaitable):
        await result


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda c: called(c.producer.send, "t", 5), "must be bytes or None, not int"),
        (lambda c: called(c.producer.send, "t", b"x", partition="0"), "partition '0' is not an int"),
        (lambda c: called(c.producer.send_nowait, "t", b"x", partition="0"), "partition '0' is not an int"),
        (
            lambda c: called(c.producer.send, "t", b"x", timestamp_ms="now"),
            "timestamp_ms 'now' is not an int",
        ),
        (lambda c: called(c.producer.send_many, "t", [b"x", 5]), "is int, but must be bytes"),
        (
            lambda c: called(c.producer.send_many, "t", b"abc"),
            "the values are one bytes, but must be a sequence",
        ),
        (lambda c: called(c.producer.send_many, "t", 5), "the values are int, but must be a sequence"),
        (lambda c: called(c.producer.send, ["t"], b"x"), "topic ['t'] is not a str"),
        (lambda c: called(c.producer.send_many, "t", [b"x"], partition=0.5), "partition 0.5 is not an int"),
        (
            lambda c: called(c.producer.send_many, "t", [b"x"], "k"),
            "the keys are one str, but must be a sequence",
        ),
        (lambda c: called(c.producer.send_many, "t", [b"x"], 5), "the keys are int, but must be a sequence"),
        (
            lambda c: called(c.producer.send_many, "t", [b"x"], ["k"]),
            "the key of a record must be bytes or None, not str",
        ),
        (
            lambda c: called(c.producer.send_many, "t", [b"x"], headers=["h"]),
            "headers must be pairs of a name and a value",
        ),
        (lambda c: called(c.producer.send, "t", b"x", headers=["ab"]), "'ab' is a str"),
        (
            lambda c: called(c.producer.send_nowait, "t", b"x", headers={"ab": b"1"}),
            """'ab' is a str (for example [("source", b"web")])""",
        ),
        (lambda c: called(c.producer.send, "\udcff", b"x"), "topic '\\udcff' is not UTF-8"),
        (lambda c: called(c.producer.send_nowait, "\udcff", b"x"), "topic '\\udcff' is not UTF-8"),
        (lambda c: called(c.producer.send_many, "\udcff", [b"x"]), "topic '\\udcff' is not UTF-8"),
        (lambda c: called(c.admin.create_topic, "\udcff"), "topic '\\udcff' is not UTF-8"),
        (lambda c: called(c.admin.describe_group, "\udcff"), "group id '\\udcff' is not UTF-8"),
        (lambda c: called(c.admin.describe_transaction, "\udcff"), "transactional id '\\udcff' is not UTF-8"),
        (lambda c: called(c.consumer.get_many, -1), "max_records -1 is below 0"),
        (lambda c: called(c.consumer.getmany, max_records=-1), "max_records -1 is below 0"),
        (lambda c: called(c.consumer.get_many, timeout_ms=float("nan")), "timeout_ms nan is not a number"),
        (lambda c: called(c.admin.create_topics, [("a", 1)]), "('a', 1) is not a NewTopic"),
        (lambda c: called(c.producer.send_batch, "t", 0, "x"), "str is not a record batch"),
        (lambda c: called(c.producer.wait_for_room, "x"), "timeout_ms 'x' is not a number"),
        (lambda c: called(c.producer.close, "x"), "timeout_ms 'x' is not a number"),
        (lambda c: called(c.consumer.get_many, "x"), "max_records 'x' is not an int"),
        (lambda c: called(c.consumer.get_many, timeout_ms="x"), "timeout_ms 'x' is not a number"),
        (lambda c: called(c.consumer.get_batches, timeout_ms="x"), "timeout_ms 'x' is not a number"),
        (lambda c: called(c.consumer.seek, T0, "5"), "offset '5' is not an int"),
        (lambda c: called(c.consumer.position, ["t", "0"]), "['t', '0'] is not a partition"),
        (lambda c: called(c.consumer.end_offsets, T0), "is not a list of partitions"),
        (lambda c: called(c.consumer.assign, "t"), "'t' is not a list of partitions"),
        (lambda c: called(c.consumer.pause, 5), "5 is not a partition"),
        (lambda c: called(c.consumer.offsets_for_times, [T0]), "is not a dict (for example {TopicPartition("),
        (lambda c: called(c.consumer.offsets_for_times, {T0: "x"}), "timestamp 'x' is not an int"),
        (lambda c: called(c.consumer.processing("x").__aenter__), "'x' is not a record"),
        (lambda c: called(c.admin.create_topic, "x", configs=["a"]), "configs ['a'] is not a dict"),
        (lambda c: called(c.admin.create_topic, "x", "3"), "partitions '3' is not an int"),
        (
            lambda c: called(c.admin.create_topics, ["x"]),
            "'x' is not a NewTopic (for example NewTopic(\"orders\", partitions=3))",
        ),
        (lambda c: called(c.admin.create_topics, NewTopic("x")), "is not a list of topics"),
        (lambda c: called(c.admin.create_partitions, "t", "3"), "total_count '3' is not an int"),
        (lambda c: called(c.admin.delete_topics, "t"), "'t' is not a list of names (for example ['t'])"),
        (lambda c: called(c.admin.delete_topics, [5]), "name 5 is not a str"),
        (lambda c: called(c.admin.delete_groups, 5), "5 is not a list of names"),
        (lambda c: called(c.admin.alter_configs, "topic", "t", ["a=b"]), "changes ['a=b'] is not a dict"),
        (lambda c: called(c.admin.delete_records, {T0: "x"}), "offset 'x' is not an int"),
        (lambda c: called(c.admin.delete_records, {"t": 5}), "'t' is not a partition"),
        (lambda c: called(c.admin.alter_group_offsets, "g", {T0: "x"}), "offset 'x' is not an int"),
        (lambda c: called(c.admin.committed_offsets, "g", ["t"]), "'t' is not a partition"),
        (lambda c: called(c.admin.elect_leaders, ["t"]), "'t' is not a partition"),
        (lambda c: called(c.admin.describe_quorum, [1]), "node_id [1] is not an int"),
        (lambda c: called(c.consumer.seek, "t", 0), "'t' is not a partition"),
        (lambda c: called(c.consumer.position, "t"), "'t' is not a partition"),
        (lambda c: called(c.consumer.pause, "t"), "'t' is not a partition"),
        (lambda c: called(c.consumer.assign, ["t"]), "'t' is not a partition"),
        (lambda c: called(c.consumer.end_offsets, ["t"]), "'t' is not a partition"),
        (lambda c: called(c.consumer.beginning_offsets, [("t", "0")]), "('t', '0') is not a partition"),
        (lambda c: called(c.consumer.offsets_for_times, {"t": 5}), "'t' is not a partition"),
        (lambda c: called(c.consumer.subscribe, pattern="("), "the pattern '(' is not a regular expression"),
        (lambda c: called(c.consumer.subscribe, pattern=5), "the pattern 5 is not a regular expression"),
        (lambda c: called(c.consumer.subscribe, pattern=b"t"), "the pattern b't' is not a str"),
        (lambda c: called(c.admin.list_offsets, ["t"], "earliest"), "'t' is not a partition"),
        (lambda c: called(c.admin.list_offsets, [T0], "first"), "'first' is no position"),
    ],
)
async def test_the_error_names_the_argument(
    clients: Clients, call: Callable[[Clients], Awaitable[None]], told: str
) -> None:
    with pytest.raises(KafkaliteError) as refused:
        await call(clients)
    assert told in str(refused.value)


async def test_pairs_are_partitions_as_before(clients: Clients) -> None:
    assert await clients.consumer.end_offsets([("t", 0)]) == {T0: 1}
    clients.consumer.assign([("t", 0)])
    assert set(clients.consumer.assignment()) == {T0}
    clients.consumer.pause([("t", 0)])
    assert clients.consumer.paused() == [T0]


async def test_a_refused_assignment_keeps_the_subscription(clients: Clients) -> None:
    with pytest.raises(ClientError):
        clients.consumer.assign(["t"])
    assert clients.consumer.subscription() == ["t"]


async def test_a_wrong_partition_leaves_no_record_behind() -> None:
    async with Broker() as broker, Producer(broker.bootstrap_servers) as producer:
        with pytest.raises(ClientError, match=r"partition 0\.5 is not an int"):
            await producer.send_many("t", [b"x"], partition=0.5)  # type: ignore[arg-type]
        assert (await producer.send("t", b"x")).offset == 0


async def test_a_commit_of_wrong_types_names_them() -> None:
    async with Broker() as broker:
        servers = broker.bootstrap_servers
        async with Consumer("t", group_id="g", bootstrap_servers=servers) as consumer:
            for what, told in (
                (5, "int can't be committed"),
                ({"t": 5}, "'t' is not a partition"),
                ({T0: "x"}, "offset 'x' is not an int"),
            ):
                with pytest.raises(ClientError) as refused:
                    await consumer.commit(what)  # type: ignore[arg-type]
                assert told in str(refused.value)


@pytest.mark.parametrize("method", ["get_one", "get_many", "getmany", "get_batches"])
async def test_a_consumer_that_is_not_open_says_how_to_open_it(method: str) -> None:
    with pytest.raises(ClientClosedError, match="open it with 'async with' or start"):
        await getattr(Consumer("t"), method)(timeout_ms=5)


async def test_a_blocking_consumer_refuses_a_negative_count() -> None:
    with pytest.raises(ClientError, match="max_records -1 is below 0"):
        sync.Consumer("t").get_many(-1)


def test_a_known_option_may_be_none() -> None:
    assert Producer(linger_ms=None).config == Producer().config
    assert Consumer("t", group_id=None, config={"client.id": None}).config == Consumer("t").config


SERVERS = "h1:9092,h2:9092"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Producer("t", SERVERS), f'call Producer("{SERVERS}"), and send("t", ...) with it'),
        (lambda: Producer("t", SERVERS.split(",")), f'call Producer("{SERVERS}")'),
        (lambda: Producer(SERVERS, "t"), f'call Producer("{SERVERS}"), and send("t", ...) with it'),
        (lambda: sync.Producer("t", SERVERS), f'call Producer("{SERVERS}"), and send("t", ...) with it'),
        (lambda: Table("t", SERVERS), f'call Table("t", bootstrap_servers="{SERVERS}")'),
        (lambda: sync.Table("t", SERVERS), f'call Table("t", bootstrap_servers="{SERVERS}")'),
        (lambda: Table("h:9092"), 'Table("orders", bootstrap_servers="h:9092")'),
        (lambda: Table(["t"]), "topic ['t'] is not a str"),
        (lambda: Admin("t", SERVERS), f'call Admin("{SERVERS}")'),
        (lambda: Consumer("t", "h:9092"), 'Consumer("t", bootstrap_servers="h:9092")'),
        (lambda: Consumer({"group.id": "g"}), 'Consumer("orders", config={...})'),
        (lambda: Producer({"linger.ms": "5"}), "the settings are a keyword argument: config={...}"),
        (lambda: Producer(config=["a"]), "config is ['a'], but must be a mapping"),
        (lambda: Producer(servers="h:9092"), "servers: no option of a client; set bootstrap.servers"),
        (lambda: Producer(partitioner=5), "partitioner is 5, but must be one of roundrobin"),
        (lambda: Producer(on_delivery=5), "on_delivery 5 is not a function"),
        (lambda: Producer(interceptors=5), "5 is not a list of interceptors"),
        (lambda: Consumer("t", interceptors=5), "5 is not a list of interceptors"),
        (lambda: Producer(interceptors=object()), "is not a list of interceptors"),
        (lambda: Producer(interceptors=[5]), "the interceptor 5 has no method on_send"),
        (lambda: Consumer("t", interceptors=[5]), "the interceptor 5 has no method on_consume"),
        (lambda: sync.Consumer("t", interceptors=[5]), "derive its class from ConsumerInterceptor"),
        (lambda: Producer(interceptors=[ProducerInterceptor]), "pass an instance: ProducerInterceptor()"),
        (lambda: Producer(linger=None), "linger: unknown option"),
        (lambda: Producer(config={"linger": None}), "linger: unknown option"),
        (lambda: Consumer("t", grupo=None), "grupo: unknown option"),
        (lambda: Consumer("t", session_timeout_ms=None), "no option of a client"),
        (lambda: Admin(nonsense=None), "nonsense: unknown option"),
        (lambda: sync.Admin(nonsense=None), "nonsense: unknown option"),
        (lambda: Table("t", nonsense=None), "nonsense: unknown option"),
    ],
)
def test_the_error_of_a_constructor_shows_the_right_call(make: Callable[[], Any], told: str) -> None:
    with pytest.raises((ClientError, ConfigError)) as refused:
        make()
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda: sync.Consumer("t").get_many(timeout_ms=5),
        lambda: sync.Admin().list_topics(),
        lambda: sync.Producer().partitions_for("t"),
        lambda: len(sync.Table("t")),
    ],
)
def test_a_blocking_client_that_is_not_open_says_how_to_open_it(use: Callable[[], Any]) -> None:
    with pytest.raises(ClientClosedError, match=r"\(open it with 'with' or start"):
        use()


@pytest.mark.parametrize("end", ["close", "nothing"])
def test_a_blocking_producer_that_is_not_open_refuses_records(end: str) -> None:
    """Otherwise the records of a program that forgets to open it are dropped without a word."""
    producer = sync.Producer("127.0.0.1:1")
    with pytest.raises(ClientClosedError, match=r"is new \(open it with 'with' or start"):
        producer.send("t", b"1")
    if end == "close":
        producer.close()
        with pytest.raises(ClientClosedError, match="is closed"):
            producer.send("t", b"1")
