"""WriteTxnMarkers: a coordinator ends a transaction in partitions that this broker leads. From brokers only.

Behaviour and errors: ``broker.marker_writer``.
"""

from __future__ import annotations

from kafkalite.broker.coordination.marker_writer import write_markers
from kafkalite.broker.server.responses import Pending
from kafkalite.broker.server.services import Client, Services
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages.transactions import WriteTxnMarkersRequest


def handle(services: Services, request: Request, _client: Client) -> Pending:
    message: WriteTxnMarkersRequest = request.message
    return write_markers(services, message.markers)
