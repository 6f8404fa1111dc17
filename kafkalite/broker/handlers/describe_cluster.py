"""DescribeCluster: who is in it, who decides, and how far its metadata log is."""

from __future__ import annotations

from kafkalite.broker.answers import Reply
from kafkalite.broker.handlers.metadata import NO_LEADER, brokers
from kafkalite.broker.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.metadata import DescribeClusterResponse


def handle(services: Services, _request: Request, client: Client) -> Reply:
    image = services.controller.image
    controller_id = services.controller.controller_id
    return Reply(
        DescribeClusterResponse(
            0,
            None,
            services.cluster_id,
            NO_LEADER if controller_id is None else controller_id,
            image.metadata_offset,
            brokers(services, image, client),
        )
    )
