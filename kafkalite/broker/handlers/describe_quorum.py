"""DescribeQuorum: who votes, who leads, and how far the metadata log is, as this node sees it.

A node that is a cluster of its own describes itself as the only voter. Match offsets are known to the
leader alone.

Errors: INVALID_REQUEST (this node follows a quorum without being part of it).
"""

from __future__ import annotations

from kafkalite.broker.answers import Reply
from kafkalite.broker.services import Client, Services
from kafkalite.errors import InvalidRequestError
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.metadata import DescribeQuorumResponse, QuorumNode


def handle(services: Services, _request: Request, _client: Client) -> Reply:
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
        raise InvalidRequestError(f"node {config.node_id} is no voter; ask one of {sorted(config.voters)}")
    offset = services.controller.image.metadata_offset
    alone = QuorumNode(config.node_id, "", True, offset, 0)
    return Reply(
        DescribeQuorumResponse(
            0, None, config.node_id, config.node_id, 0, offset, offset, offset + 1, 0, [alone]
        )
    )
