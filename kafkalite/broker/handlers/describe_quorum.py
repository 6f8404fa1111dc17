"""DescribeQuorum: who votes, who leads, and how far the metadata log is, as this node sees it.

A node that is a cluster of its own describes itself as the only voter. Match offsets are known to the
leader alone. A node that follows a quorum without being part of it passes the question on to the leader.

Errors: REQUEST_TIMED_OUT (such a node reaches no leader).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kafkalite.broker.server.responses import Answer, Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.metadata import DescribeQuorumRequest, DescribeQuorumResponse, QuorumNode

LEADER_PATIENCE_MS: Final = 2_000


def handle(services: Services, request: Request, _client: Client) -> Answer | Coroutine[Any, Any, Answer]:
    config = services.config
    if services.raft is not None:
        status = services.raft.status()
        voters = config.voters
        nodes = [
            QuorumNode(
                node.node_id,
                voters.get(node.node_id, ""),
                node.node_id in voters,
                node.match_offset,
                node.last_contact_ms,
            )
            for node in status.nodes
        ]
        return Reply(
            DescribeQuorumResponse(
                0,
                None,
                config.node_id,
                -1 if status.leader_id is None else status.leader_id,
                status.term,
                status.commit_offset,
                status.applied_offset,
                status.log_end_offset,
                status.snapshot_offset,
                nodes,
            )
        )
    if config.has_peers:
        return _as_the_leader_tells(services, request.message)
    offset = services.controller.image.metadata_offset
    alone = QuorumNode(config.node_id, "", True, offset, 0)
    return Reply(
        DescribeQuorumResponse(
            0, None, config.node_id, config.node_id, 0, offset, offset, offset + 1, 0, [alone]
        )
    )


async def _as_the_leader_tells(services: Services, question: DescribeQuorumRequest) -> Answer:
    return Reply(await services.channel.send(question, LEADER_PATIENCE_MS))
