"""Calls a function for each record of some topics, and retries if the function fails.

::

    async def charge(record): ...                  # or an ordinary function, which runs in a thread

    await retrying.run(charge, "orders", group_id="billing", bootstrap_servers="localhost:9092")

A record for which the function raises an exception is retried after a backoff. A retry *in place* keeps the
order: all later records of this consumer wait. With *delay topics*, the record is sent to another topic and
read from there after the backoff; the later records do not wait. After the last attempt, the record is sent
to the dead-letter topic with the cause in its headers (``cause_of``).

The offset of a record is committed only after the function has returned, or after the delay or dead-letter
topic has acknowledged the record. So no record is lost in a crash, but a record may be handled twice.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from kafkalite.client.admin.admin import Admin
from kafkalite.client.cluster.retry import Backoff
from kafkalite.client.config import (
    ADMIN_OPTIONS,
    CONSUMER_OPTIONS,
    PRODUCER_OPTIONS,
    BootstrapServers,
    ConfigSource,
    ConsumerConfig,
    merged,
)
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.consumer.decoding import decoder
from kafkalite.client.producer.producer import Producer
from kafkalite.clock import Clock
from kafkalite.errors import ConfigError, SerializationError, TopicAlreadyExistsError
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields, text_of
from kafkalite.model import Headers, Record, TopicPartition
from kafkalite.options import OptionRegistry
from kafkalite.rng import Rng, system_rng
from kafkalite.serde import AnyDeserializer

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

_HEADER: Final = "retry."
_MAX_MESSAGE_LENGTH: Final = 1_000
# The largest record that is sent to a delay or dead-letter topic, and the max.message.bytes of those topics.
# It is as much as a producer buffers, because a record becomes larger: by its cause, and without the
# compression of its batch.
_MOST_BYTES: Final = 32 * MIB

Handler = Callable[[Record[Any, Any]], Awaitable[object] | object]
"""Handles one record. If it raises an exception, the record is retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How often, when and where a record is retried.

    The pause before attempt n + 1 is ``first_delay_ms`` doubled n - 1 times, at most ``max_delay_ms`` (but at
    least ``first_delay_ms``), varied by up to 20 %. In topic names, ``{topic}`` and ``{group}`` stand for the
    record's original topic and the consumer group.
    """

    #: The maximum number of attempts, including the first. In place, a crash resets the count; with delay
    #: topics it does not, because the count is in the record's headers.
    attempts: int = 5
    first_delay_ms: int = 1_000
    max_delay_ms: int = 60_000
    delay_topics: bool = False  #: retry through topics ``{topic}.{group}.retry-1`` and so on
    dead_letter: str | None = "{topic}.{group}.dead"  #: None: ``run`` raises the error of the last attempt
    give_up_on: tuple[type[Exception], ...] = ()  #: errors for which no retry helps

    def __post_init__(self) -> None:
        for key, least, types, unit in (
            ("attempts", 1, int, "a whole number"),
            ("first_delay_ms", 0, int | float, "milliseconds"),
            ("max_delay_ms", 0, int | float, "milliseconds"),
        ):
            value = getattr(self, key)
            if not isinstance(value, types) or not value >= least:
                raise ConfigError(key=key, value=value, allowed=f"{unit}, {least} or more")
        try:
            self.dead_letter_topic("", "")
        except (AttributeError, LookupError, ValueError) as error:
            allowed = "None, or a name with {topic} and {group} as its only fields"
            raise ConfigError(key="dead_letter", value=self.dead_letter, allowed=allowed) from error
        try:
            isinstance(None, self.give_up_on)
        except TypeError as error:
            allowed = "a tuple of exception types"
            raise ConfigError(key="give_up_on", value=self.give_up_on, allowed=allowed) from error

    def delay_topic(self, topic: str, group_id: str, attempts: int) -> str:
        """Return the delay topic for records of ``topic`` that have failed ``attempts`` times."""
        return f"{topic}.{group_id}.retry-{attempts}"

    def dead_letter_topic(self, topic: str, group_id: str) -> str | None:
        """Return the dead-letter topic for records of ``topic``, or None if ``dead_letter`` is None."""
        return None if self.dead_letter is None else self.dead_letter.format(topic=topic, group=group_id)


class Cause(NamedTuple):
    """The original address of a record in a delay or dead-letter topic, and the error of the last attempt."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    attempts: int  #: failed attempts; 0 if the record can't be deserialized
    due_ms: int  #: the time of the next attempt (Unix epoch); 0 in a dead-letter topic
    error_type: str
    error_message: str


_TEXTS: Final = {"topic", "error_type", "error_message"}


def cause_of(record: Record[Any, Any]) -> Cause | None:
    """Return the cause in the headers of a record, or None if the headers have no valid cause.

    Each record that ``run`` sends to a delay or dead-letter topic has a cause.
    """
    texts = {name[len(_HEADER) :]: value or b"" for name, value in record.headers if name.startswith(_HEADER)}
    if not texts.keys() >= set(Cause._fields):
        return None
    try:
        values: dict[str, Any] = {
            name: texts[name].decode() if name in _TEXTS else int(texts[name]) for name in Cause._fields
        }
    except ValueError:
        return None  # headers that another program has written
    return Cause(**values)


def _without_cause(headers: Headers) -> Headers:
    return tuple((name, value) for name, value in headers if not name.startswith(_HEADER))


async def run(
    handler: Handler,
    *topics: str,
    group_id: str,
    bootstrap_servers: BootstrapServers | None = None,
    policy: Policy = Policy(),
    key_deserializer: AnyDeserializer[K] | None = None,
    value_deserializer: AnyDeserializer[V] | None = None,
    config: ConfigSource | None = None,
    clock: Clock | None = None,
    rng: Rng | None = None,
    **settings: Any,
) -> None:
    """Consume ``topics`` as a member of the group, and call ``handler`` for each record, until cancelled.

    ``handler`` gets the record with its original address, also after a delay. A record that can't be
    deserialized goes to the dead-letter topic without an attempt. ``settings`` and ``config`` are those of a
    consumer; the default of auto.offset.reset is earliest. Missing delay and dead-letter topics are created
    with the partition count of the topic in ``topics`` (1 if that is missing, too) and a max.message.bytes of
    32 MiB.

    Raises the errors of consumer, producer and admin client. Raises ConfigError if ``policy`` is not a
    Policy, ``handler`` can't be called with one record, the settings turn auto-commit off or select
    at-most-once, or the dead-letter topic of one of ``topics`` is that topic itself or one of its delay
    topics. If ``policy.dead_letter`` is None, raises the error of the last attempt or the SerializationError.
    """
    _check_handler(handler)
    if not isinstance(policy, Policy):
        raise ConfigError(key="policy", value=policy, allowed="a Policy, such as Policy(attempts=3)")
    rng = rng or system_rng()
    decode = decoder(key_deserializer, value_deserializer) or (lambda record: record)
    delay_topics = {name: None for topic in topics for name in _delay_topics(policy, topic, group_id)}
    consumer = Consumer(
        *topics,
        *delay_topics,
        bootstrap_servers=bootstrap_servers,
        group_id=group_id,
        config={"auto.offset.reset": "earliest", **merged(config, {}, CONSUMER_OPTIONS)},
        clock=clock,
        rng=rng,
        **settings,
    )
    _check(consumer.config)
    for topic in topics:
        if policy.dead_letter_topic(topic, group_id) in (topic, *_delay_topics(policy, topic, group_id)):
            allowed = "a topic that is not read for retries: a dead record would be retried for ever"
            raise ConfigError(key="dead_letter", value=policy.dead_letter, allowed=allowed)

    def shared(registry: OptionRegistry) -> dict[str, Any]:
        given = merged(
            config, {name: value for name, value in settings.items() if value is not None}, registry
        )
        return {name: value for name, value in given.items() if name in registry}

    async with AsyncExitStack() as stack:
        async with Admin(bootstrap_servers, config=shared(ADMIN_OPTIONS), rng=rng) as admin:
            for topic in topics:
                await _create_topics(admin, policy, topic, group_id)
        options = shared(PRODUCER_OPTIONS)
        if not options.keys() & {"max.request.size", "buffer.memory"}:
            options["max.request.size"] = _MOST_BYTES
        producer = Producer(bootstrap_servers, linger_ms=0, clock=clock, config=options, rng=rng)
        await stack.enter_async_context(producer)
        await stack.enter_async_context(consumer)
        retrier = await stack.enter_async_context(
            _retrier(handler, decode, consumer, producer, policy, frozenset(delay_topics), rng)
        )
        async for record in consumer:
            await retrier.take(record)


def _check_handler(handler: object) -> None:
    """Raise ConfigError unless ``handler`` can be called with one record."""
    allowed = "a function of one record, such as 'async def handle(record)' or 'def handle(record)'"
    if not callable(handler):
        raise ConfigError(key="handler", value=handler, allowed=allowed)
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # a built-in without a signature: the first call shows
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(handler, "__qualname__", None) or type(handler).__qualname__
        shown = f"{name}{signature.replace(return_annotation=inspect.Signature.empty)}"
        raise ConfigError(key="handler", value=shown, allowed=allowed) from error


def _check(config: ConsumerConfig) -> None:
    allowed = "so that offsets are committed after the records are handled"
    if config.is_at_most_once:
        value = config.processing_guarantee
        raise ConfigError(key="processing.guarantee", value=value, allowed=f"at_least_once, {allowed}")
    if not config.enable_auto_commit:
        raise ConfigError(key="enable.auto.commit", value=False, allowed=f"true, {allowed}")


def _delay_topics(policy: Policy, topic: str, group_id: str) -> list[str]:
    attempts = range(1, policy.attempts) if policy.delay_topics else ()
    return [policy.delay_topic(topic, group_id, number) for number in attempts]


async def _create_topics(admin: Admin, policy: Policy, topic: str, group_id: str) -> None:
    wanted = _delay_topics(policy, topic, group_id)
    dead = policy.dead_letter_topic(topic, group_id)
    existing = {each.name for each in await admin.list_topics()}
    missing = [name for name in (*wanted, dead) if name is not None and name not in existing]
    if missing:
        partitions = len((await admin.describe_topic(topic)).partitions) if topic in existing else 1
        for name in missing:
            with suppress(TopicAlreadyExistsError):  # another member was faster
                await admin.create_topic(name, partitions, configs={"max.message.bytes": str(_MOST_BYTES)})


@asynccontextmanager
async def _retrier(*arguments: Any) -> AsyncIterator[_Retrier]:
    retrier = _Retrier(*arguments)
    try:
        yield retrier
    finally:
        retrier.close()


class _Retrier:
    """Handles the records of one consumer."""

    def __init__(
        self,
        handler: Handler,
        decode: Callable[[Record], Record[Any, Any]],
        consumer: Consumer,
        producer: Producer,
        policy: Policy,
        delay_topics: frozenset[str],
        rng: Rng,
    ) -> None:
        self._handler = handler
        self._is_async = inspect.iscoroutinefunction(handler)
        self._decode = decode
        self._consumer = consumer
        self._producer = producer
        self._policy = policy
        self._delay_topics = delay_topics
        self._rng = rng
        self._backoff = Backoff(policy.first_delay_ms, policy.max_delay_ms)
        self._clock = consumer.clock
        self._resuming: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._resuming:
            task.cancel()

    async def take(self, record: Record) -> None:
        """Handle ``record``, and return when its offset may be committed.

        If the record is in a delay topic and not due yet, seek back to it, pause its partition until it is
        due, and return at once.
        """
        # Outside of delay topics, the headers are ignored: an operator may have sent a dead letter back to
        # its original topic, where its attempts are counted from 0.
        cause = cause_of(record) if record.topic in self._delay_topics else None
        if cause is None:
            cause = Cause(*record.address, record.timestamp_ms, 0, 0, "", "")
        elif cause.due_ms > self._clock.wall_ms():
            await self._wait_until_due(record, cause.due_ms)
            return
        original = record._replace(
            topic=cause.topic,
            partition=cause.partition,
            offset=cause.offset,
            timestamp_ms=cause.timestamp_ms,
            headers=_without_cause(record.headers),
        )
        async with self._consumer.processing(record):
            try:
                decoded = self._decode(original)
            except SerializationError as error:
                await self._bury(original, cause, error)
                return
            await self._try(original, decoded, cause)

    async def _try(self, original: Record, decoded: Record[Any, Any], cause: Cause) -> None:
        policy = self._policy
        while True:
            try:
                await self._handle(decoded)
                return
            except Exception as error:
                cause = cause._replace(attempts=cause.attempts + 1)
                logger.info(
                    "attempt failed %s", Fields(number=cause.attempts, record=original.address, error=error)
                )
                if cause.attempts >= policy.attempts or isinstance(error, policy.give_up_on):
                    await self._bury(original, cause, error)
                    return
                delay_ms = self._backoff.delay_ms(cause.attempts, self._rng.random())
                if policy.delay_topics:
                    topic = policy.delay_topic(cause.topic, self._group_id, cause.attempts)
                    due_ms = self._clock.wall_ms() + delay_ms
                    await self._send(topic, original, cause._replace(due_ms=due_ms), error)
                    return
            await self._clock.sleep_ms(delay_ms)

    async def _handle(self, record: Record[Any, Any]) -> None:
        """Call the handler and wait for its end. Raises its error.

        Raises RuntimeError if the handler raises CancelledError although this task was not cancelled, or if a
        handler that is not a coroutine function raises StopIteration.
        """
        try:
            if self._is_async:
                result = self._handler(record)
            else:
                result = await asyncio.to_thread(self._call, record)
            if inspect.isawaitable(result):
                await result
        except asyncio.CancelledError as error:  # for example of a task that the handler awaits
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RuntimeError("the handler raised CancelledError") from error

    def _call(self, record: Record[Any, Any]) -> object:
        try:
            return self._handler(record)
        except StopIteration as error:  # a future can't have it, so the wait for the thread would never end
            raise RuntimeError("the handler raised StopIteration") from error

    @property
    def _group_id(self) -> str:
        group_id = self._consumer.config.group_id
        assert group_id is not None, "run() requires one"
        return group_id

    async def _bury(self, record: Record, cause: Cause, error: Exception) -> None:
        topic = self._policy.dead_letter_topic(cause.topic, self._group_id)
        if topic is None:
            raise error
        logger.warning(
            "a record goes to the dead-letter topic %s",
            Fields(record=record.address, topic=topic, attempts=cause.attempts, error=error),
        )
        await self._send(topic, record, cause._replace(due_ms=0), error)

    async def _send(self, topic: str, record: Record, cause: Cause, error: Exception) -> None:
        message = text_of(error)[:_MAX_MESSAGE_LENGTH]
        cause = cause._replace(error_type=type(error).__name__, error_message=message)
        headers = [
            (_HEADER + name, str(value).encode(errors="backslashreplace"))
            for name, value in cause._asdict().items()
        ]
        await self._producer.send(topic, record.value, record.key, headers=[*record.headers, *headers])

    async def _wait_until_due(self, record: Record, due_ms: int) -> None:
        """Seek back to ``record`` and pause its partition. A task resumes the partition at ``due_ms``."""
        tp = TopicPartition(record.topic, record.partition)
        self._consumer.pause(tp)
        await self._consumer.seek(tp, record.offset)
        task = asyncio.get_running_loop().create_task(self._resume(tp, due_ms))
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)

    async def _resume(self, tp: TopicPartition, due_ms: int) -> None:
        await self._clock.sleep_ms(due_ms - self._clock.wall_ms())
        if tp in self._consumer.paused():  # otherwise another member owns the partition now
            self._consumer.resume(tp)
