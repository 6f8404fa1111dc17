"""The internal topics: their names, the partition of a key, and their creation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from kafkalite.broker.config import BROKER_OPTIONS, BrokerConfig
from kafkalite.broker.tasks import SharedTasks
from kafkalite.clock import Clock
from kafkalite.coordinator_types import TopicShape
from kafkalite.errors import CoordinatorNotAvailableError, ErrorCode, InvalidTopicError, KafkaliteError
from kafkalite.limits import MAX_INTERNAL_BATCH_BYTES
from kafkalite.metadata.image import ClusterImage, TopicImage
from kafkalite.model import INTERNAL_PREFIX, OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from kafkalite.protocol.messages.admin import CreateTopicsRequest, CreateTopicsResponse, NewTopic
from kafkalite.records.partitioners import murmur2

if TYPE_CHECKING:
    from kafkalite.broker.cluster.controller_channel import ControllerChannel

#: The key types of FindCoordinator.
GROUP: Final = 0
TRANSACTION: Final = 1
TOPICS: Final[Mapping[int, str]] = {GROUP: OFFSETS_TOPIC, TRANSACTION: TRANSACTIONS_TOPIC}
KINDS: Final[Mapping[str, int]] = {name: kind for kind, name in TOPICS.items()}

#: The default number of partitions on a broker without a data directory.
MEMORY_PARTITIONS: Final = 4
CREATE_TIMEOUT_MS: Final = 15_000
#: A client may look for a coordinator before all brokers of a starting cluster are up. A topic created then
# would permanently have too few replicas, so its creation waits this long for the other brokers.
GATHERING_MS: Final = 10_000

_PARTITIONS: Final = {
    GROUP: "offsets.topic.num.partitions",
    TRANSACTION: "transaction.state.log.num.partitions",
}


def refuse_internal(topic: str) -> None:
    """Raise InvalidTopicError if ``topic`` is internal."""
    if topic.startswith(INTERNAL_PREFIX):
        raise InvalidTopicError(
            f"topic {topic!r} is internal: names that begin with {INTERNAL_PREFIX} are for brokers only",
            hint="choose another name",
        )


def partition_of(key: str, partition_count: int) -> int:
    """Return the partition that a group id, transactional id or application id hashes to."""
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partition_count


def new_topic(kind: int, config: BrokerConfig, live_broker_count: int) -> NewTopic:
    """Return the entry of a CreateTopics request for the internal topic of ``kind``."""
    if kind == GROUP:
        partition_count = config.offsets_topic_num_partitions
        wanted_replicas = config.offsets_topic_replication_factor
        segment_bytes = config.offsets_topic_segment_bytes
    else:
        partition_count = config.transaction_state_log_num_partitions
        wanted_replicas = config.transaction_state_log_replication_factor
        segment_bytes = config.transaction_state_log_segment_bytes
    is_default = partition_count == BROKER_OPTIONS.get(_PARTITIONS[kind]).default
    if config.log_dirs is None and is_default:
        partition_count = MEMORY_PARTITIONS
    replication_factor = min(wanted_replicas, max(live_broker_count, 1))
    configs = {
        "cleanup.policy": "compact",
        "segment.bytes": str(segment_bytes),
        "max.message.bytes": str(MAX_INTERNAL_BATCH_BYTES),
        "min.insync.replicas": str(min(config.transaction_state_log_min_isr, replication_factor)),
        "unclean.leader.election.enable": "false",
    }
    return NewTopic(TOPICS[kind], partition_count, replication_factor, configs)


def expected_brokers(config: BrokerConfig, image: ClusterImage) -> int:
    """Return how many brokers the cluster is expected to have, whether or not they are running."""
    if config.is_broker and config.is_controller:
        return max(len(image.brokers), len(config.voters))
    return len(image.brokers)


class TopicCreation:
    """Creates internal topics when they are needed. Concurrent callers wait for the same creation."""

    def __init__(self, config: BrokerConfig, channel: ControllerChannel, clock: Clock) -> None:
        self._config = config
        self._channel = channel
        self._clock = clock
        self._asked_ms: dict[int, int] = {}  # by kind: when its creation was first requested
        self._creations: SharedTasks[int, None] = SharedTasks()

    async def ensure(self, kind: int, image: ClusterImage) -> None:
        """Create the internal topic of ``kind``, unless it exists. Return when this broker's image has it.

        Raises CoordinatorNotAvailableError.
        """
        await self._creations.run(kind, partial(self._create, kind, image), name=f"create {TOPICS[kind]}")

    async def _create(self, kind: int, image: ClusterImage) -> None:
        live_count, now_ms = len(image.live_brokers()), self._clock.monotonic_ms()
        topic = new_topic(kind, self._config, live_count)
        wanted = new_topic(kind, self._config, expected_brokers(self._config, image)).replication_factor
        waited_ms = now_ms - self._asked_ms.setdefault(kind, now_ms)
        if topic.replication_factor < wanted and waited_ms < GATHERING_MS:
            alive = "1 broker is alive" if live_count == 1 else f"{live_count} brokers are alive"
            raise CoordinatorNotAvailableError(
                f"{TOPICS[kind]} needs {wanted} replicas, and {alive};"
                f" after {GATHERING_MS} ms it is created with fewer"
            )
        command = CreateTopicsRequest(0, False, [topic])
        try:
            created: CreateTopicsResponse = await self._channel.decide(command, timeout_ms=CREATE_TIMEOUT_MS)
        except KafkaliteError as error:
            raise CoordinatorNotAvailableError(f"{TOPICS[kind]} was not created: {error.message}") from error
        code, message = created.error_code, created.error_message
        if not code:
            code, message = created.topics[0].error_code, created.topics[0].error_message
        if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
            raise CoordinatorNotAvailableError(f"{TOPICS[kind]} was not created: {message}")

    async def close(self) -> None:
        await self._creations.close()


class TopicShapes(Mapping[str, TopicShape]):
    """{topic name: its id and number of partitions}, read from a metadata image without copying it."""

    __slots__ = ("_topics",)

    def __init__(self, topics: Mapping[str, TopicImage]) -> None:
        self._topics = topics

    def __getitem__(self, name: str) -> TopicShape:
        topic = self._topics[name]
        return TopicShape(topic.topic_id, len(topic.partitions))

    def __iter__(self) -> Iterator[str]:
        return iter(self._topics)

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, name: object) -> bool:
        return name in self._topics
