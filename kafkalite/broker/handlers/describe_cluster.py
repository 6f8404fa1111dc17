"""DescribeCluster: who is in it, alive or not, who decides, and how far its metadata log is."""

from __future__ import annotations

from kafkalite.broker.handlers.metadata import NO_NODE, address_for
from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.metadata import BrokerDescription, DescribeClusterResponse


def handle(services: Services, _request: Request, client: Client) -> Reply:
    image = services.controller.image
    controller_id = services.controller.controller_id
    brokers = [
        BrokerDescription(
            node_id,
            address_for(services, broker, client),
            broker.rack,
            broker.broker_epoch,
            broker.is_fenced,
            broker.is_shutting_down,
            broker.registered_ms,
        )
        for node_id, broker in sorted(image.brokers.items())
    ]
    return Reply(
        DescribeClusterResponse(
            0,
            None,
            services.cluster_id,
            NO_NODE if controller_id is None else controller_id,
            image.metadata_offset,
            brokers,
        )
    )
