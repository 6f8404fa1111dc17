"""Raft's messages on their way: whose they are, that they are whole, and whom they may go to.

It knows no socket. The shell authenticates a peer, dials it, and attaches a link for what goes there; what
arrives it hands to ``receive`` with the id of the peer that has proved to be it.

A message may be lost; one that arrives does so once, and those of one link in order. After an ``attach``
nothing that was sent before it arrives on that link.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from kafkalite.errors import RemoteProtocolError
from kafkalite.raft import messages
from kafkalite.raft.messages import Message

_log = logging.getLogger(__name__)


class PeerLink(Protocol):
    def send(self, message: bytes) -> None:
        """Never blocks, never raises. May drop; keeps the order."""
        ...


class RaftTransport:
    """Used on the Raft loop only. The callbacks are the node's."""

    def __init__(
        self,
        peers: Iterable[int],
        *,
        on_attached: Callable[[int], None],
        on_detached: Callable[[int], None],
        on_message: Callable[[int, Message], None],
    ) -> None:
        self.refused_count = 0  #: messages from strangers, or without sense
        self._peers = frozenset(peers)
        self._links: dict[int, PeerLink] = {}
        self._on_attached = on_attached
        self._on_detached = on_detached
        self._on_message = on_message

    def attach(self, peer_id: int, link: PeerLink) -> None:
        """``link`` goes to ``peer_id`` from now on, instead of any before. For voters only."""
        if peer_id not in self._peers:
            self._refuse("a link to %d, which is no voter", peer_id)
            return
        former = self._links.get(peer_id)
        if former is not None:
            self.detach(peer_id, former)
        self._links[peer_id] = link
        self._on_attached(peer_id)

    def detach(self, peer_id: int, link: PeerLink) -> None:
        """``link`` is gone. Says nothing if another has taken its place already."""
        if self._links.get(peer_id) is link:
            del self._links[peer_id]
            self._on_detached(peer_id)

    def attached(self) -> list[int]:
        """The peers that a link goes to, in order."""
        return sorted(self._links)

    def receive(self, peer_id: int, message: bytes | memoryview) -> None:
        """A message has come from ``peer_id``. Whatever is not one is dropped."""
        if peer_id not in self._peers:
            self._refuse("a message from %d, which is no voter", peer_id)
            return
        try:
            decoded = messages.decode(message)
        except RemoteProtocolError as error:
            self._refuse("node %d: %s", peer_id, error)
            return
        self._on_message(peer_id, decoded)

    def send(self, peer_id: int, message: Message) -> bool:
        """Whether there is a link that the message could be given to."""
        link = self._links.get(peer_id)
        if link is None:
            return False
        link.send(messages.encode(message))
        return True

    def _refuse(self, reason: str, *values: object) -> None:
        self.refused_count += 1
        if self.refused_count.bit_count() == 1:  # the first, second, fourth, eighth …
            _log.warning(f"raft refused {reason} refused_count=%d", *values, self.refused_count)
