"""FindCoordinator: which broker coordinates a group, a transactional id, or a transaction group.

Behaviour: that broker leads the partition of the internal topic which the key hashes to. The topic is created
when a coordinator is asked for the first time; the answer waits for it.

Errors, per key: COORDINATOR_NOT_AVAILABLE (the topic could not be created, or the partition has no leader
now), INVALID_REQUEST (an empty key); of the whole request INVALID_REQUEST (key type, too many keys).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.coordination.internal_topics import TOPICS
from kafkalite.broker.handlers.metadata import address_for
from kafkalite.broker.server.error_responses import Outcome, translate
from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.errors import BrokerError, CoordinatorNotAvailableError, InvalidRequestError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.groups import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse

MAX_KEYS: Final = 1_000
NO_NODE: Final = -1


def handle(services: Services, request: Request, client: Client) -> Answer | Coroutine[Any, Any, Answer]:
    message: FindCoordinatorRequest = request.message
    kind, keys = message
    if kind not in TOPICS:
        known = ", ".join(map(str, TOPICS))
        raise InvalidRequestError(f"key type {kind} is not known; these are: {known}")
    if len(keys) > MAX_KEYS:
        raise InvalidRequestError(f"at most {MAX_KEYS} keys in one request")
    if TOPICS[kind] not in services.controller.image.topics and any(keys):
        return _create_and_find(services, message, client)
    return Reply(_answer(services, message, client))


async def _create_and_find(services: Services, message: FindCoordinatorRequest, client: Client) -> Answer:
    try:
        await services.coordinators.creation.ensure(message.key_type, services.controller.image)
    except BrokerError as error:
        outcome = translate(error)
        return Reply(FindCoordinatorResponse(0, None, [_missing(key, outcome) for key in message.keys]))
    return Reply(_answer(services, message, client))


def _answer(services: Services, message: FindCoordinatorRequest, client: Client) -> FindCoordinatorResponse:
    found: list[Coordinator] = []
    for key in message.keys:
        try:
            found.append(_find(services, message.key_type, key, client))
        except BrokerError as error:
            found.append(_missing(key, translate(error)))
    return FindCoordinatorResponse(0, None, found)


def _find(services: Services, kind: int, key: str, client: Client) -> Coordinator:
    if not key:
        raise InvalidRequestError("a key has at least one character")
    image, topic = services.controller.image, TOPICS[kind]
    partition = services.coordinators.partition_of(kind, key)
    state = image.partition(topic, partition)
    broker = None if state is None else image.brokers.get(state.leader)
    if broker is None or broker.is_fenced:
        raise CoordinatorNotAvailableError(f"{topic}-{partition} has no leader now")
    address = address_for(services, broker, client)
    return Coordinator(key, 0, None, broker.node_id, address, partition)


def _missing(key: str, outcome: Outcome) -> Coordinator:
    return Coordinator(key, *outcome, NO_NODE, "", -1)
