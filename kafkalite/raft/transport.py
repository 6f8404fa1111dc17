"""Carries Raft messages between authenticated peers: encoding, links and order.

This module uses no sockets. The broker connects to a peer, authenticates it, and attaches a link for messages
to it. The broker passes each received message to ``receive`` with the authenticated id of the sender.

The voters rely on the following: a message may be lost but is never repeated, and the messages of one link
arrive in order. After ``attach`` no message of an earlier link arrives.
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
        """Send without blocking or raising. Messages may be dropped, but are never reordered."""
        ...


class RaftTransport:
    """Sends and receives the messages of one node. Use it on the Raft loop only."""

    def __init__(
        self,
        peers: Iterable[int],
        *,
        on_attached: Callable[[int], None],
        on_detached: Callable[[int], None],
        on_message: Callable[[int, Message], None],
    ) -> None:
        #: The number of refused messages and links: malformed, or from nodes that are no peers.
        self.refused_count = 0
        #: The voters and observers that this node knows, except itself.
        self.peers = frozenset(peers)
        self._links: dict[int, PeerLink] = {}
        self._versions: dict[int, int] = {}  # of RaftMessages, by the id of a peer with a link
        self._on_attached = on_attached
        self._on_detached = on_detached
        self._on_message = on_message

    def attach(self, peer_id: int, link: PeerLink, version: int = messages.VERSION) -> None:
        """Use ``link`` for messages to ``peer_id`` from now on. Has no effect if the node is no peer.

        ``version`` is the newest version of RaftMessages that both nodes support (R90).
        """
        if peer_id not in self.peers:
            self._refuse("a link to %d, which is no peer", peer_id)
            return
        former = self._links.get(peer_id)
        if former is not None:
            self.detach(peer_id, former)
        self._links[peer_id], self._versions[peer_id] = link, version
        self._on_attached(peer_id)

    def detach(self, peer_id: int, link: PeerLink) -> None:
        """Remove ``link``. Has no effect if another link has replaced it."""
        if self._links.get(peer_id) is link:
            del self._links[peer_id]
            self._on_detached(peer_id)

    def attached(self) -> list[int]:
        """Return the ids of the peers with a link, sorted."""
        return sorted(self._links)

    def receive(self, peer_id: int, message: bytes | memoryview) -> None:
        """Decode a message from ``peer_id`` and pass it to the node.

        Drops a message that is malformed, or from a node that is no peer and does not ask to become one.
        """
        try:
            decoded = messages.decode(message)
        except RemoteProtocolError as error:
            self._refuse("node %d: %s", peer_id, error)
            return
        if peer_id not in self.peers and decoded["type"] != "join":
            self._refuse("a message from %d, which is no peer", peer_id)
            return
        self._on_message(peer_id, decoded)

    def send(self, peer_id: int, message: Message) -> bool:
        """Send a message to a peer. Return False if there is no link to it."""
        link = self._links.get(peer_id)
        if link is None:
            return False
        link.send(messages.encode(message, self._versions[peer_id]))
        return True

    def _refuse(self, reason: str, *values: object) -> None:
        self.refused_count += 1
        if self.refused_count.bit_count() == 1:  # for refusals 1, 2, 4, 8, …
            _log.warning(f"raft refused {reason} refused_count=%d", *values, self.refused_count)
