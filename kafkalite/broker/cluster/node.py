"""The parts that only a node with configured voters has: quorum, links to voters, controller listener.

A voter runs Raft, on its own loop and thread unless ``is_inline``. A node that does not vote
follows the voters' metadata log. This module is imported only if voters are configured, so that a single-node
cluster never loads the Raft library.
"""

# Tests: tests/broker/test_cluster_parts.py, tests/integration/test_cluster_membership.py

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kafkalite.broker.cluster.controller_listener import ControllerListener, run_on
from kafkalite.broker.cluster.peers import MetadataSource, PeerConnections
from kafkalite.broker.cluster.raft_links import RaftLinks
from kafkalite.broker.config import BrokerConfig
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.responses import Pending, Response
from kafkalite.client.cluster.authentication import Authenticator
from kafkalite.clock import Clock
from kafkalite.errors import DataDirectoryError
from kafkalite.metadata.feature_commands import NodeRanges
from kafkalite.metadata.features import SUPPORTED
from kafkalite.protocol.connection import Request
from kafkalite.raft.controller_node import ControllerNode
from kafkalite.raft.observer_quorum import ObserverQuorum
from kafkalite.raft.quorum import Quorum
from kafkalite.raft.runner import InlineRunner, ThreadRunner
from kafkalite.rng import Rng
from kafkalite.storage.filesystem import FileSystem
from kafkalite.storage.layout import VOTERS_FILE, join
from kafkalite.transport.tls_context import TlsContext

if TYPE_CHECKING:
    from kafkalite.raft.node import RaftNode
    from kafkalite.raft.raft_quorum import RaftQuorum


class VotersFile:
    """Stores the node ids of the quorum's voters in a data directory.

    The file is written as soon as the Raft log exists. If a directory has this file but no log, then votes
    and entries on which other voters rely may be lost, and the node must not start as if it had never voted.
    """

    def __init__(
        self, filesystem: FileSystem, path: str, voters: Iterable[int], *, is_compared: bool = True
    ) -> None:
        """If ``is_compared``, compare ``voters`` with the stored ones. Raises DataDirectoryError if they
        differ."""
        self._filesystem = filesystem
        self._path = join(path, VOTERS_FILE)
        self._text = ",".join(map(str, sorted(voters))) + "\n"
        self.is_known = filesystem.exists(self._path)
        known = filesystem.read_bytes(self._path).decode(errors="replace") if self.is_known else self._text
        if is_compared and known != self._text:
            raise DataDirectoryError(
                f"{self._path} has the voters {known.strip()},"
                f" and controller.quorum.voters {self._text.strip()}",
                hint="controller.quorum.voters must name the first voters forever, though their addresses may"
                " change; 'kl metadata quorum add-voter' and remove-voter change the voters, and"
                " controller.quorum.bootstrap.servers can take the place of the list",
            )

    def remember(self) -> None:
        if not self.is_known:
            self._filesystem.write_atomically(self._path, self._text.encode())
            self.is_known = True


class ClusterNode:
    """The parts of a Broker that only a cluster needs. The Broker starts and stops them step by step."""

    def __init__(
        self,
        config: BrokerConfig,
        filesystem: FileSystem,
        path: str,
        metadata_directory: str,
        *,
        cluster_id: str,
        clock: Clock,
        rng: Rng,
        known_offset: int | None,
        is_copy: bool,
        is_deterministic: bool,
        is_inline: bool,
    ) -> None:
        """``path`` is the data directory. ``is_copy``: it was copied since the node last used it (R59).

        ``known_offset``, if given, is a metadata offset that this node had reached. If this node is the only
        voter, it refuses a metadata log that ends below that offset, as an older copy (R25).

        If ``is_inline``, no threads are used. If ``is_deterministic``, all randomness comes from ``rng``
        (simulation). Raises DataDirectoryError.
        """
        assert config.cluster_secret is not None, "checked with the settings"
        self._config = config
        self._clock = clock
        self._rng = rng
        #: {node id: address} of the controllers as far as this node knows them. Kept current.
        self.controllers: Mapping[int, str] = config.controllers
        self.authenticator = Authenticator(
            config.cluster_secret,
            cluster_id,
            config.node_id,
            rng.randbytes if is_deterministic else os.urandom,
            tls=TlsContext(config),
            features=SUPPORTED,
        )
        self.raft: RaftQuorum | None = None
        self.quorum: Quorum
        self._runner: InlineRunner | ThreadRunner | None = None
        self._source: MetadataSource | None = None
        self._links: RaftLinks | None = None
        self._voters_file: VotersFile | None = None
        self._listener: ControllerListener | None = None
        if config.is_controller:
            from kafkalite.raft.adapter import RaftSettings
            from kafkalite.raft.raft_quorum import RaftQuorum  # a node without a vote needs no Raft library

            self._runner = InlineRunner() if is_inline else ThreadRunner(f"kafkalite-raft-{config.node_id}")
            voters = config.voters
            self._voters_file = VotersFile(
                filesystem, path, voters or self.controllers, is_compared=bool(voters)
            )
            self.raft = self.quorum = RaftQuorum(
                filesystem,
                metadata_directory,
                node_id=config.node_id,
                voters=sorted(voters),
                addresses=config.controllers,
                runner=self._runner,
                rng=rng,
                settings=RaftSettings(
                    election_timeout_ms=config.controller_quorum_election_timeout_ms,
                    fetch_timeout_ms=config.controller_quorum_fetch_timeout_ms,
                    heartbeat_ms=max(min(100, config.controller_quorum_election_timeout_ms // 5), 1),
                    snapshot_min_bytes=config.metadata_log_max_record_bytes_between_snapshots,
                ),
                allow_new=config.controller_quorum_rejoin or not self._voters_file.is_known,
                known_offset=known_offset if len(voters) == 1 else None,
                is_copy=is_copy,
            )
            self.controllers = self.raft.addresses
        else:
            self._source = MetadataSource(
                config.controllers, self.authenticator, f"metadata-{config.node_id}"
            )
            self.controllers = self._source.controllers
            self.quorum = ObserverQuorum(self._source.fetch, node_id=config.node_id)

    @property
    def has_caught_up(self) -> bool:
        """Whether this voter has all entries that were committed before its start (R59)."""
        return self.raft is not None and self.raft.node.has_caught_up

    def voter_features(self) -> NodeRanges:
        """Return the feature levels that each connected voter supports; None if it does not say so."""
        return {} if self._links is None else dict(self._links.features)

    def peers(self, controller: ControllerNode) -> PeerConnections:
        return PeerConnections(lambda: controller.image, self.authenticator, f"broker-{self._config.node_id}")

    def start_runner(self) -> None:
        if self._runner is not None:
            self._runner.start()

    async def stop_runner(self) -> None:
        if self._source is not None:
            self._source.close()
        if self._runner is not None:
            self._runner.stop()

    async def join(
        self,
        greet: Callable[[Request, Client], Response],
        dispatch: Callable[[Request, Client], Response | Pending],
        on_session_lost: Callable[[int], None],
    ) -> tuple[str, ...]:
        """Listen for other nodes, begin to connect to the other voters, and return the listener's addresses.

        If this node does not vote, only return (). Raises ListenError. The arguments are those of
        ControllerListener.
        """
        if self.raft is None or self._runner is None or self._voters_file is None:
            return ()
        self._voters_file.remember()
        config, loop, transport = self._config, self._runner.loop, self.raft.node.transport
        self._listener = ControllerListener(
            loop,
            transport,
            greet,
            dispatch,
            on_session_lost,
            self._clock,
            TlsContext(config, client_auth=config.ssl_client_auth),
        )
        await run_on(loop, partial(self._listener.start, config.controller_addresses))
        self._links = RaftLinks(
            transport,
            node_id=config.node_id,
            voters=config.controllers,
            authenticator=self.authenticator,
            rng=self._rng,
        )
        await run_on(loop, partial(self._begin_links, self.raft.node, self._links))
        return self._listener.addresses

    async def _begin_links(self, node: RaftNode, links: RaftLinks) -> None:
        await links.start()
        node.on_peers = links.use
        links.use(node.peer_addresses)

    async def leave(self, *, is_clean: bool) -> None:
        if self._runner is None:
            return
        if self._links is not None:
            await run_on(self._runner.loop, self._links.stop)
        if self._listener is not None:
            await run_on(self._runner.loop, partial(self._listener.stop, is_clean=is_clean))
