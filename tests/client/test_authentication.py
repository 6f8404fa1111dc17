"""Nodes prove to each other that they know the secret; nothing else gives access to a cluster's apis
(S10).

Also covers ``cluster/controller_listener.py`` and ``handlers/cluster.py``.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kafkalite.client.cluster.authentication import NONCE_BYTES, Authenticator, Challenge
from kafkalite.client.cluster.connection import connect
from kafkalite.errors import (
    BrokerIdNotRegisteredError,
    ClusterAuthorizationFailedError,
    ConnectionFailedError,
    ErrorCode,
    InconsistentClusterIdError,
    InvalidRequestError,
)
from kafkalite.limits import MIB
from kafkalite.protocol.api import APIS, CLUSTER_APIS, ApiKey
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import cluster as messages
from kafkalite.protocol.messages import transactions
from kafkalite.testing import Cluster, WireClient
from kafkalite.testing.cluster import Node
from proof.waiting import eventually, settle

SECRET = "a secret of sixteen or more"
TOPIC_ID = "ab" * 16


def authenticator(node_id: int, secret: str = SECRET, cluster_id: str = "c") -> Authenticator:
    return Authenticator(secret, cluster_id, node_id, os.urandom)


def greet(
    dialler: Authenticator, listener: Authenticator
) -> tuple[messages.ClusterHelloRequest, messages.ClusterHelloResponse, Challenge]:
    hello = dialler.hello()
    return hello, *listener.challenge(hello)


class TestProofs:
    def test_two_nodes_that_know_the_secret_accept_each_other(self) -> None:
        hello, answer, challenge = greet(authenticator(1), authenticator(2))
        proof = authenticator(1).prove(hello, answer, 2)
        assert challenge.is_met_by(proof)
        assert challenge.node_id == 1

    def test_a_listener_without_the_secret_is_refused(self) -> None:
        hello, answer, _ = greet(authenticator(1), authenticator(2, "another secret of the same length"))
        with pytest.raises(ClusterAuthorizationFailedError, match="does not know this cluster's secret"):
            authenticator(1).prove(hello, answer, 2)

    def test_a_dialler_without_the_secret_is_refused(self) -> None:
        hello, answer, challenge = greet(authenticator(1), authenticator(2))
        liar = authenticator(1, "another secret of the same length")
        forged = messages.ClusterProofRequest(liar._proof("dialler", 1, 2, hello.nonce, answer.nonce))
        assert not challenge.is_met_by(forged)
        for proof in (b"", answer.proof[:-1], answer.proof + b"x"):
            assert not challenge.is_met_by(messages.ClusterProofRequest(proof))

    def test_a_listeners_proof_is_not_valid_for_a_dialler(self) -> None:
        _, answer, challenge = greet(authenticator(1), authenticator(2))
        assert not challenge.is_met_by(messages.ClusterProofRequest(answer.proof))

    def test_a_challenge_forwarded_to_another_node_proves_nothing(self) -> None:
        """Node 3 dials an impostor, which forwards the nonces to node 2 as if it were node 1 or 3."""
        victim, target = authenticator(3), authenticator(2)
        hello = victim.hello()
        answer, challenge = target.challenge(
            messages.ClusterHelloRequest("c", 1, hello.nonce)  # the impostor claims to be node 1
        )
        posing = messages.ClusterHelloResponse(0, None, 9, answer.nonce, answer.proof)
        with pytest.raises(ClusterAuthorizationFailedError):
            victim.prove(hello, posing, 9)
        stolen = messages.ClusterProofRequest(victim._proof("dialler", 3, 9, hello.nonce, answer.nonce))
        assert not challenge.is_met_by(stolen)

    def test_an_old_proof_does_not_meet_a_new_challenge(self) -> None:
        hello, answer, challenge = greet(authenticator(1), authenticator(2))
        proof = authenticator(1).prove(hello, answer, 2)
        assert challenge.is_met_by(proof)
        _, again = authenticator(2).challenge(hello)  # the same hello, replayed
        assert not again.is_met_by(proof)

    def test_the_node_that_responds_must_be_the_one_that_was_dialled(self) -> None:
        hello, answer, _ = greet(authenticator(1), authenticator(2))
        with pytest.raises(ClusterAuthorizationFailedError, match="node 2 responded where node 3"):
            authenticator(1).prove(hello, answer, 3)

    def test_hellos_that_are_refused(self) -> None:
        with pytest.raises(InconsistentClusterIdError):
            greet(authenticator(1, cluster_id="other"), authenticator(2))
        with pytest.raises(ClusterAuthorizationFailedError, match="this node's own"):
            greet(authenticator(2), authenticator(2))
        for size in (0, NONCE_BYTES - 1, NONCE_BYTES + 1):
            with pytest.raises(InvalidRequestError, match="nonce"):
                authenticator(2).challenge(messages.ClusterHelloRequest("c", 1, b"n" * size))

    def test_the_secret_is_not_shown(self) -> None:
        assert SECRET not in repr(authenticator(1))


def requests_of_the_cluster() -> dict[ApiKey, Any]:
    """Return one request of each api that would change something, in the name of node 2."""
    damaged: list[Any] = []
    change = messages.PartitionChange(TOPIC_ID, 0, 0, 0, [1], [-1])
    return {
        ApiKey.BROKER_REGISTRATION: messages.RegisterBrokerRequest(
            2, "f" * 32, "e" * 32, ["inproc://forged"], None, -1, True, damaged, 1
        ),
        ApiKey.BROKER_HEARTBEAT: messages.BrokerHeartbeatRequest(2, 1, 0, True, damaged),
        ApiKey.ALTER_PARTITION: messages.AlterPartitionRequest(2, 1, [change]),
        ApiKey.ALLOCATE_PRODUCER_IDS: messages.AllocateProducerIdsRequest(2, 1),
        ApiKey.CHECKPOINT_HIGH_WATERMARKS: messages.CheckpointHighWatermarksRequest(2, 1, []),
        ApiKey.REPORT_REPLICAS: messages.ReportReplicasRequest(2, 1, []),
        ApiKey.ENVELOPE: messages.EnvelopeRequest(int(ApiKey.CREATE_TOPICS), 0, None),
        ApiKey.RAFT_MESSAGES: messages.RaftMessagesRequest([]),
        ApiKey.REPLICA_FETCH: messages.ReplicaFetchRequest(2, 1, 0, 0, 0, 0, 1, 1, [], []),
        ApiKey.FETCH_METADATA: messages.FetchMetadataRequest(0, -1, 0, 1),
        ApiKey.ADD_PARTITIONS_TO_TXN: transactions.AddPartitionsToTxnRequest("t", 1, 0, []),
        ApiKey.WRITE_TXN_MARKERS: transactions.WriteTxnMarkersRequest([]),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(brokers=2, controllers=1) as running:
        yield running


def controller_address(cluster: Cluster) -> str:
    (voter,) = cluster.nodes[1].settings["controller_quorum_voters"].split(",")
    return str(voter.partition("@")[2])


def of_node(node: Node, node_id: int, **changes: str) -> Authenticator:
    settings = {**node.settings, **changes}
    return Authenticator(settings["cluster_secret"], settings["cluster_id"], node_id, os.urandom)


@pytest.mark.asyncio(loop_scope="module")
class TestOnTheWire:
    async def test_without_a_proof_cluster_requests_are_refused_and_change_nothing(
        self, cluster: Cluster
    ) -> None:
        forged = requests_of_the_cluster()
        assert forged.keys() == CLUSTER_APIS
        before = cluster.broker.image
        async with WireClient(cluster.broker.address) as wire:
            for key, request in forged.items():
                answer = await wire.call(request)
                assert isinstance(answer, RequestError), APIS[key]
                assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        for key, request in forged.items():
            async with WireClient(controller_address(cluster)) as wire:
                answer = await wire.call(request)
                assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED, APIS[key]
                await wire.closed()
        assert cluster.broker.image.brokers == before.brokers
        assert cluster.broker.image.topics == before.topics

    async def test_a_controllers_listener_serves_only_nodes(self, cluster: Cluster) -> None:
        from kafkalite.protocol.messages.metadata import DescribeClusterRequest

        async with WireClient(controller_address(cluster)) as wire:
            answer = await wire.call(DescribeClusterRequest())
            assert answer.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            named = f"{controller_address(cluster)} is a controller's listener"
            assert named in answer.error_message and "brokers listen at other" in answer.error_message

    async def test_a_wrong_secret_is_refused_by_either_side(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        address = controller_address(cluster)
        stranger = of_node(cluster.nodes[1], 1, cluster_secret="not the secret of this cluster")
        with pytest.raises(ClusterAuthorizationFailedError, match="does not know"):
            await stranger.dial(address, 101, client_id="t", timeout_ms=2_000)
        async with WireClient(address) as wire:
            answer = await wire.call(stranger.hello())
            assert answer.node_id == 101
            refused = await wire.call(messages.ClusterProofRequest(b"x" * 32))
            assert refused.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            await wire.closed()
        (line,) = (one.getMessage() for one in caplog.records if one.name == "kafkalite.audit")
        assert line.startswith("node refused principal=User:ANONYMOUS host=")
        assert "it does not know the secret" in line

    async def test_one_proof_for_one_challenge(self, cluster: Cluster) -> None:
        address = cluster.brokers[2].address
        own = of_node(cluster.nodes[1], 1)
        async with WireClient(address) as wire:
            hello = own.hello()
            proof = own.prove(hello, await wire.call(hello), 2)
            assert (await wire.call(proof)).node_id == 1
            fetch = messages.FetchMetadataRequest(0, -1, 0, 1)
            assert (
                await wire.call(fetch)
            ).error_code == ErrorCode.INVALID_REQUEST  # authenticated, but not a voter
            again = await wire.call(proof)
            assert again.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            await wire.closed()
        async with WireClient(address) as wire:  # a recorded conversation, replayed
            await wire.call(hello)
            assert (await wire.call(proof)).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            await wire.closed()
        async with WireClient(address) as wire:
            assert (await wire.call(proof)).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED

    async def test_a_stranger_cannot_send_a_large_request(self, cluster: Cluster) -> None:
        """S3: a node may send one, and could not if strangers used up the memory."""
        frame = struct.pack(">II", 4 * MIB, 0) + bytes(MIB)
        async with WireClient(controller_address(cluster)) as wire:
            wire.send_raw(frame)
            async with asyncio.timeout(30):
                await wire.closed()
        own = of_node(cluster.nodes[1], 1)
        async with WireClient(controller_address(cluster)) as wire:
            hello = own.hello()
            await wire.call(own.prove(hello, await wire.call(hello), 101))
            wire.send_raw(frame)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await wire.closed()

    async def test_another_cluster_is_named(self, cluster: Cluster) -> None:
        stranger = of_node(cluster.nodes[1], 1, cluster_id="another")
        with pytest.raises(InconsistentClusterIdError):
            await stranger.dial(controller_address(cluster), 101, client_id="t", timeout_ms=2_000)

    async def test_a_node_cannot_ask_in_the_name_of_another(self, cluster: Cluster) -> None:
        own = of_node(cluster.nodes[1], 1)
        before = cluster.broker.image.brokers
        connection = await own.dial(controller_address(cluster), 101, client_id="t", timeout_ms=2_000)
        for key, request in requests_of_the_cluster().items():
            if not hasattr(request, "node_id") or key == ApiKey.REPLICA_FETCH:
                continue  # names no node, or is not for controllers
            with pytest.raises(ClusterAuthorizationFailedError, match="in the name of node 2"):
                await connection.call(request, timeout_ms=2_000)
        connection.close()
        assert cluster.broker.image.brokers == before

    async def test_a_session_continues_when_an_earlier_connection_ends_late(self, cluster: Cluster) -> None:
        """Otherwise a broker with rare heartbeats would be fenced before the next one."""
        own = of_node(cluster.nodes[1], 7)
        controller: Any = cluster.nodes[101].broker
        listener = controller._cluster._listener
        lost: list[int] = []
        listener._on_session_lost, former = lost.append, listener._on_session_lost
        heartbeat = messages.BrokerHeartbeatRequest(7, 1, 0, False, [])
        connections = [
            await own.dial(controller_address(cluster), 101, client_id="t", timeout_ms=2_000)
            for _ in range(2)
        ]
        for connection in connections:
            with pytest.raises(BrokerIdNotRegisteredError):
                await connection.call(heartbeat, timeout_ms=2_000)
        for connection, expected in zip(connections, ([], [7]), strict=True):
            connection.close()
            await settle()
            await eventually(lambda expected=expected: lost == expected)
        listener._on_session_lost = former

    async def test_a_new_hello_discards_the_authentication(self, cluster: Cluster) -> None:
        own = of_node(cluster.nodes[1], 1)
        connection = await own.dial(cluster.brokers[2].address, 2, client_id="t", timeout_ms=2_000)
        await connection.call(own.hello(), timeout_ms=2_000)
        with pytest.raises(ClusterAuthorizationFailedError):
            await connection.call(messages.FetchMetadataRequest(0, -1, 0, 1), timeout_ms=2_000)
        connection.close()

    async def test_a_cancelled_dial_leaves_no_connection(self, cluster: Cluster) -> None:
        own = of_node(cluster.nodes[1], 1)
        count = cluster.brokers[2].statistics().connection_count
        with pytest.raises(ClusterAuthorizationFailedError, match="where node 3 was expected"):
            await own.dial(cluster.brokers[2].address, 3, client_id="t", timeout_ms=2_000)
        for _ in range(5):
            await asyncio.sleep(0)
        assert cluster.brokers[2].statistics().connection_count == count
        with pytest.raises(ConnectionFailedError):
            await connect("inproc://nobody", client_id="t", timeout_ms=100)


async def test_a_cluster_of_one_has_no_secret_and_accepts_no_node() -> None:
    async with Cluster() as cluster, WireClient(cluster.bootstrap_servers) as wire:
        hello = authenticator(7).hello()
        assert (await wire.call(hello)).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        for request in requests_of_the_cluster().values():
            assert (await wire.call(request)).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
