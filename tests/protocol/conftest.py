"""Joined connections, one example of every message, and messages drawn from the types alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import strategies as st

from kafkalite.protocol.api import ApiKey, supported_ranges
from kafkalite.protocol.connection import (
    BadRequest,
    ClientConnection,
    Request,
    RequestError,
    Response,
    ServerConnection,
)
from kafkalite.protocol.messages import admin, cluster, data, groups, metadata, security, transactions
from kafkalite.protocol.structs import AtMost, PartitionResult, Struct
from kafkalite.records.builder import build_batch

#: A real batch: that of the worked example in docs/protocol.md.
BATCH = bytes(build_batch([b"hello", b"world"], [None, b"k"], [1_700_000_000_000, 1_700_000_000_005]))
TOPIC_ID = "0123456789abcdef0123456789abcdef"


def feed(connection: Any, buffers: Iterable[Any], chunk: int = 1 << 30) -> list[Any]:
    """Let ``connection`` receive the buffers, at most ``chunk`` bytes a read; return its events."""
    events: list[Any] = []
    stream = memoryview(b"".join(bytes(buffer) for buffer in buffers))
    while stream:
        room = connection.get_buffer(-1)
        count = min(len(room), len(stream), chunk)
        assert count > 0
        room[:count] = stream[:count]
        stream = stream[count:]
        events += connection.buffer_updated(count)
    return events


@pytest.fixture(name="feed", scope="session")
def feed_fixture() -> Callable[..., list[Any]]:
    return feed


class ConnectionPair:
    """A client's and a server's connection joined, so that each assertion sees both ends."""

    def __init__(self, *, chunk: int = 1 << 30, **server_limits: int) -> None:
        self.chunk = chunk
        self.client = ClientConnection("test-client")
        self.server = ServerConnection(**server_limits)

    def handshake(self) -> ConnectionPair:
        _, buffers = self.client.handshake("tests", "1")
        (request,) = feed(self.server, buffers, self.chunk)
        answer = metadata.ApiVersionsResponse(0, None, "kafkalite", "1", supported_ranges())
        (response,) = feed(self.client, self.server.send(request, answer), self.chunk)
        assert response.message == answer
        return self

    def ask(self, message: Struct, payload: Iterable[bytes] = ()) -> Request | BadRequest:
        """Send a request to the server; return what it received."""
        correlation_id, buffers = self.client.send(message, payload)
        (event,) = feed(self.server, buffers, self.chunk)
        assert event.correlation_id == correlation_id
        return event

    def answer(self, request: Request, message: Struct, payload: Iterable[bytes] = ()) -> Response:
        """Respond to a request; return what the client received."""
        (response,) = feed(self.client, self.server.send(request, message, payload), self.chunk)
        assert response.correlation_id == request.correlation_id
        return response

    def refuse(self, request: Request | BadRequest, code: int, text: str | None) -> RequestError:
        (response,) = feed(self.client, self.server.send_error(request, code, text), self.chunk)
        assert response.correlation_id == request.correlation_id
        return response.message


@pytest.fixture
def pair() -> ConnectionPair:
    """After the handshake."""
    return ConnectionPair().handshake()


@pytest.fixture
def make_pair() -> type[ConnectionPair]:
    return ConnectionPair


def _examples() -> dict[int, tuple[Struct, Struct]]:
    error = (3, "no such topic")
    ok = (0, None)
    alice = [admin.QuotaEntityName("user", "alice"), admin.QuotaEntityName("client-id", None)]
    broker = metadata.BrokerMetadata(1, "127.0.0.1:9092", "rack-a")
    described = metadata.BrokerDescription(1, "127.0.0.1:9092", "rack-a", 17, False, True, 1_700_000_000_000)
    partition = metadata.PartitionMetadata(0, 0, 1, 7, 12, [1, 2, 3], [1, 3], [2])
    size = len(BATCH)
    return {
        ApiKey.PRODUCE: (
            data.ProduceRequest(-1, 30_000, None, [data.ProducePartition("orders", 3, size)]),
            data.ProduceResponse(
                *ok,
                [
                    data.ProducedPartition("orders", 3, *ok, 456_332, -1, 17),
                    data.ProducedPartition("odrers", 0, *error, -1, -1, -1),
                ],
            ),
        ),
        ApiKey.FETCH: (
            data.FetchRequest(500, 1, 1 << 20, 0, [data.FetchPartition("orders", 3, 7, 456_332, 1 << 20)]),
            data.FetchResponse(
                *ok, [data.FetchedPartition("orders", 3, *ok, 456_340, 456_340, 17, size, [])]
            ),
        ),
        ApiKey.LIST_OFFSETS: (
            data.ListOffsetsRequest(0, [data.ListOffsetsPartition("orders", 3, -1, 1_700_000_000_000)]),
            data.ListOffsetsResponse(
                *ok, [data.ListedOffset("orders", 3, *ok, 1_700_000_000_123, 456_000, 7)]
            ),
        ),
        ApiKey.OFFSETS_FOR_BYTES: (
            data.OffsetsForBytesRequest(
                1, [data.OffsetsForBytesPartition("orders", 3, 7, 456_000, 460_000, 1 << 20)]
            ),
            data.OffsetsForBytesResponse(
                *ok, [data.OffsetForBytes("orders", 3, *ok, 458_500, 1_040_000, 1_700_000)]
            ),
        ),
        ApiKey.METADATA: (
            metadata.MetadataRequest(["orders"], False),
            metadata.MetadataResponse(
                *ok,
                "cluster-1",
                1,
                [broker],
                [
                    metadata.TopicMetadata(*ok, "orders", TOPIC_ID, False, [partition]),
                    metadata.TopicMetadata(*error, "odrers", "", False, []),
                ],
            ),
        ),
        ApiKey.API_VERSIONS: (
            metadata.ApiVersionsRequest("kafkalite", "0.1.0"),
            metadata.ApiVersionsResponse(*ok, "kafkalite", "0.1.0", supported_ranges()),
        ),
        ApiKey.CREATE_TOPICS: (
            admin.CreateTopicsRequest(
                30_000, False, [admin.NewTopic("orders", 3, -1, {"retention.ms": "604800000"})]
            ),
            admin.CreateTopicsResponse(*ok, [admin.CreatedTopic("orders", *ok, TOPIC_ID, 3, 1)]),
        ),
        ApiKey.DELETE_TOPICS: (
            admin.DeleteTopicsRequest(30_000, ["orders", "odrers"]),
            admin.DeleteTopicsResponse(
                *ok, [admin.TopicResult("orders", *ok), admin.TopicResult("odrers", *error)]
            ),
        ),
        ApiKey.DELETE_RECORDS: (
            data.DeleteRecordsRequest(30_000, [data.DeleteRecordsPartition("orders", 3, 1000)]),
            data.DeleteRecordsResponse(*ok, [data.DeletedRecords("orders", 3, *ok, 1000)]),
        ),
        ApiKey.OFFSETS_FOR_LEADER_EPOCH: (
            data.OffsetsForLeaderEpochRequest([data.EpochPartition("orders", 3, 7, 6)]),
            data.OffsetsForLeaderEpochResponse(*ok, [data.EpochEnd("orders", 3, *ok, 6, 400_000)]),
        ),
        ApiKey.DESCRIBE_CONFIGS: (
            admin.DescribeConfigsRequest([admin.ConfigResource("topic", "orders")]),
            admin.DescribeConfigsResponse(
                *ok,
                [
                    admin.DescribedConfig(
                        "topic",
                        "orders",
                        *ok,
                        [admin.ConfigEntry("retention.ms", "604800000", "default", False, "How long.")],
                    )
                ],
            ),
        ),
        ApiKey.ALTER_REPLICA_LOG_DIRS: (
            admin.AlterReplicaLogDirsRequest([admin.ReplicaLogDir("orders", 3, "/disks/2")]),
            admin.AlterReplicaLogDirsResponse(
                *ok, [PartitionResult("orders", 3, 57, "/disks/2 is no working data directory")]
            ),
        ),
        ApiKey.DESCRIBE_LOG_DIRS: (
            admin.DescribeLogDirsRequest(None),
            admin.DescribeLogDirsResponse(
                *ok, "/var/lib/kafkalite", [admin.LogDirPartition("orders", 3, 4096, 1, 0, 100, None)]
            ),
        ),
        ApiKey.CREATE_PARTITIONS: (
            admin.CreatePartitionsRequest(30_000, True, [admin.PartitionCount("orders", 6)]),
            admin.CreatePartitionsResponse(*ok, [admin.TopicResult("orders", *ok)]),
        ),
        ApiKey.ALTER_CONFIGS: (
            admin.AlterConfigsRequest(False, [admin.ConfigChange("topic", "orders", "retention.ms", None)]),
            admin.AlterConfigsResponse(*ok, [admin.AlteredConfig("topic", "orders", *ok)]),
        ),
        ApiKey.DESCRIBE_CLIENT_QUOTAS: (
            admin.DescribeClientQuotasRequest([admin.QuotaFilter("user", "alice", 0)], False),
            admin.DescribeClientQuotasResponse(
                *ok, [admin.DescribedClientQuota(alice, {"producer_byte_rate": "1048576"})]
            ),
        ),
        ApiKey.ALTER_CLIENT_QUOTAS: (
            admin.AlterClientQuotasRequest(
                False,
                [admin.ClientQuotaAlteration(alice, [admin.ClientQuotaChange("request_percentage", "12.5")])],
            ),
            admin.AlterClientQuotasResponse(*ok, [admin.AlteredClientQuota(alice, *ok)]),
        ),
        ApiKey.DESCRIBE_CLUSTER: (
            metadata.DescribeClusterRequest(),
            metadata.DescribeClusterResponse(*ok, "cluster-1", 1, 42, [described]),
        ),
        **_examples_of_security(),
        **_examples_of_operating(),
        **_examples_of_groups(),
        **_examples_of_transactions(),
        **_examples_of_transaction_groups(),
        **_examples_within_the_cluster(),
    }


def _examples_of_security() -> dict[int, tuple[Struct, Struct]]:
    ok = (0, None)
    acl = security.Acl(2, 4, "orders-", "User:alice", "10.0.0.1", 3, 3)
    salt, salted = bytes(range(16)), bytes(range(32))
    return {
        ApiKey.CREATE_ACLS: (
            security.CreateAclsRequest([acl]),
            security.CreateAclsResponse(*ok, [security.AclResult(*ok)]),
        ),
        ApiKey.DESCRIBE_ACLS: (
            security.DescribeAclsRequest(2, None, "orders-", None, None, None, 3),
            security.DescribeAclsResponse(*ok, [acl]),
        ),
        ApiKey.DELETE_ACLS: (
            security.DeleteAclsRequest([security.AclSelection(None, 4, None, "User:alice", "*", 3, None)]),
            security.DeleteAclsResponse(*ok, [security.DeletedAcls(*ok, [acl])]),
        ),
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: (
            security.DescribeUserScramCredentialsRequest(["alice"]),
            security.DescribeUserScramCredentialsResponse(
                *ok, [security.UserScramCredentials("alice", *ok, [security.ScramMechanismInfo(1, 8192)])]
            ),
        ),
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (
            security.AlterUserScramCredentialsRequest(
                [security.ScramCredentialDeletion("bob", 2)],
                [security.ScramCredentialUpsertion("alice", 1, 8192, salt, salted)],
            ),
            security.AlterUserScramCredentialsResponse(*ok, [security.AlteredUser("alice", *ok)]),
        ),
        ApiKey.SASL_HANDSHAKE: (
            security.SaslHandshakeRequest("SCRAM-SHA-256"),
            security.SaslHandshakeResponse(*ok, ["SCRAM-SHA-256", "SCRAM-SHA-512"]),
        ),
        ApiKey.SASL_AUTHENTICATE: (
            security.SaslAuthenticateRequest(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"),
            security.SaslAuthenticateResponse(
                *ok, b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=", 3_600_000
            ),
        ),
    }


def _examples_of_operating() -> dict[int, tuple[Struct, Struct]]:
    ok = (0, None)
    voter = metadata.QuorumNode(1, "127.0.0.1:9093", True, 4711, 20)
    return {
        ApiKey.INIT_PRODUCER_ID: (
            data.InitProducerIdRequest(None, 60_000, -1, -1),
            data.InitProducerIdResponse(*ok, 5000, 0),
        ),
        ApiKey.ELECT_LEADERS: (
            admin.ElectLeadersRequest(30_000, False, [admin.ElectionPartition("orders", 3)]),
            admin.ElectLeadersResponse(*ok, [admin.ElectedPartition("orders", 3, *ok, 1)]),
        ),
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: (
            admin.AlterPartitionReassignmentsRequest(
                30_000,
                False,
                [
                    admin.PartitionReassignment("orders", 3, [1, 2]),
                    admin.PartitionReassignment("orders", 4, None),
                ],
            ),
            admin.AlterPartitionReassignmentsResponse(
                *ok, [PartitionResult("orders", 3, *ok), PartitionResult("orders", 4, 85, "not reassigned")]
            ),
        ),
        ApiKey.LIST_PARTITION_REASSIGNMENTS: (
            admin.ListPartitionReassignmentsRequest(30_000, [admin.ReassignedPartition("orders", 3)]),
            admin.ListPartitionReassignmentsResponse(
                *ok, [admin.OngoingReassignment("orders", 3, [3, 1, 2], [2], [3], [3, 1])]
            ),
        ),
        ApiKey.UPDATE_FEATURES: (
            admin.UpdateFeaturesRequest(30_000, True, [admin.FeatureUpdate("metadata.version", 2)]),
            admin.UpdateFeaturesResponse(
                *ok, [admin.UpdatedFeature("metadata.version", 95, "node 3 lacks it")]
            ),
        ),
        ApiKey.UNREGISTER_BROKER: (admin.UnregisterBrokerRequest(2), admin.UnregisterBrokerResponse(*ok, 2)),
        ApiKey.ADD_RAFT_VOTER: (
            admin.AddRaftVoterRequest(2, "00ff" * 8, 30_000),
            admin.AddRaftVoterResponse(*ok, 2),
        ),
        ApiKey.REMOVE_RAFT_VOTER: (
            admin.RemoveRaftVoterRequest(2, "", 30_000),
            admin.RemoveRaftVoterResponse(*ok, 2),
        ),
        ApiKey.CONTROLLED_SHUTDOWN: (
            admin.ControlledShutdownRequest(2),
            admin.ControlledShutdownResponse(*ok, 2),
        ),
        ApiKey.DESCRIBE_QUORUM: (
            metadata.DescribeQuorumRequest(),
            metadata.DescribeQuorumResponse(*ok, 1, 1, 5, 4711, 4710, 4712, 4000, [voter]),
        ),
        ApiKey.DESCRIBE_METADATA: (
            metadata.DescribeMetadataRequest("/topics", -1, 0),
            metadata.DescribeMetadataResponse(*ok, 4711, [metadata.MetadataNode("/topics/orders", "{}")]),
        ),
    }


def _examples_of_groups() -> dict[int, tuple[Struct, Struct]]:
    ok = (0, None)
    member = "ab" * 16
    held = [groups.AssignedTopic(TOPIC_ID, "orders", [0, 3])]
    offset = groups.CommittedOffset("orders", 3, 456_332, 7, "by hand", -1, "", *ok)
    committed = groups.CommittedOffset("orders", 3, 456_332, 7, "by hand", 1_700_000_000_000, TOPIC_ID, *ok)
    none = groups.CommittedOffset("orders", 4, -1, -1, None, -1, "", 88, "a transaction is open")
    partition = groups.GroupPartition("orders", 3)
    described = groups.DescribedMember(
        member, "till-1", 5, 4, "shop", "10.0.0.7", ["orders"], None, held, held, [], 700, "Stable"
    )
    event = groups.GroupEvent(5, 1_700_000_000_000, "MemberJoined", "till-1 joined", 1, 2)
    return {
        ApiKey.FIND_COORDINATOR: (
            groups.FindCoordinatorRequest(0, ["billing"]),
            groups.FindCoordinatorResponse(
                *ok, [groups.Coordinator("billing", *ok, 1, "127.0.0.1:9092", 17)]
            ),
        ),
        ApiKey.CONSUMER_GROUP_HEARTBEAT: (
            groups.ConsumerGroupHeartbeatRequest(
                "billing", member, 4, "till-1", 300_000, ["orders"], None, "uniform", held, 5_000
            ),
            groups.ConsumerGroupHeartbeatResponse(*ok, member, 5, 5_000, 45_000, held),
        ),
        ApiKey.OFFSET_COMMIT: (
            groups.OffsetCommitRequest("billing", member, 5, "till-1", [offset]),
            groups.OffsetCommitResponse(*ok, [committed]),
        ),
        ApiKey.OFFSET_FETCH: (
            groups.OffsetFetchRequest("billing", member, 5, True, [partition]),
            groups.OffsetFetchResponse(*ok, [committed, none]),
        ),
        ApiKey.OFFSET_DELETE: (
            groups.OffsetDeleteRequest("billing", [partition]),
            groups.OffsetDeleteResponse(*ok, [committed]),
        ),
        ApiKey.LIST_GROUPS: (
            groups.ListGroupsRequest(["Stable", "Empty"]),
            groups.ListGroupsResponse(*ok, [groups.ListedGroup("billing", "Stable", 5, 1)]),
        ),
        ApiKey.DESCRIBE_GROUPS: (
            groups.DescribeGroupsRequest(["billing"], True),
            groups.DescribeGroupsResponse(
                *ok, [groups.DescribedGroup("billing", *ok, "Stable", 5, 5, "uniform", [described], [event])]
            ),
        ),
        ApiKey.DELETE_GROUPS: (
            groups.DeleteGroupsRequest(["billing"]),
            groups.DeleteGroupsResponse(*ok, [groups.DeletedGroup("billing", 68, "it has members")]),
        ),
        ApiKey.TXN_OFFSET_COMMIT: (
            groups.TxnOffsetCommitRequest("copier", 5000, 3, "billing", member, 5, None, [offset]),
            groups.TxnOffsetCommitResponse(*ok, [committed]),
        ),
    }


def _examples_of_transactions() -> dict[int, tuple[Struct, Struct]]:
    ok = (0, None)
    partition = transactions.TxnPartition("orders", 3)
    result = transactions.TxnPartitionResult("orders", 3, *ok)
    began = 1_700_000_000_000
    return {
        ApiKey.ADD_PARTITIONS_TO_TXN: (
            transactions.AddPartitionsToTxnRequest("copier", 5000, 3, [partition]),
            transactions.AddPartitionsToTxnResponse(*ok, [result]),
        ),
        ApiKey.END_TXN: (
            transactions.EndTxnRequest("copier", 5000, 3, True),
            transactions.EndTxnResponse(*ok, 5000, 4),
        ),
        ApiKey.WRITE_TXN_MARKERS: (
            transactions.WriteTxnMarkersRequest([transactions.TxnMarker(5000, 4, 7, True, [partition])]),
            transactions.WriteTxnMarkersResponse(*ok, [transactions.WrittenMarker(5000, *ok, [result])]),
        ),
        ApiKey.LIST_TRANSACTIONS: (
            transactions.ListTransactionsRequest(["Ongoing"], 1_000),
            transactions.ListTransactionsResponse(
                *ok, [transactions.ListedTransaction("copier", 5000, "Ongoing", 1_500)]
            ),
        ),
        ApiKey.DESCRIBE_TRANSACTIONS: (
            transactions.DescribeTransactionsRequest(["copier"]),
            transactions.DescribeTransactionsResponse(
                *ok,
                [
                    transactions.DescribedTransaction(
                        "copier", *ok, 5000, 3, "Ongoing", 60_000, began, [partition], 7
                    )
                ],
            ),
        ),
        ApiKey.DESCRIBE_PRODUCERS: (
            transactions.DescribeProducersRequest([partition]),
            transactions.DescribeProducersResponse(
                *ok,
                [
                    transactions.DescribedProducers(
                        "orders", 3, *ok, [transactions.ActiveProducer(5000, 3, 41, began, 7, 456_332)]
                    )
                ],
            ),
        ),
        ApiKey.ABORT_TRANSACTION: (
            transactions.AbortTransactionRequest("orders", 3, 5000, 456_332),
            transactions.AbortTransactionResponse(*ok, 5000, 4),
        ),
    }


def _examples_of_transaction_groups() -> dict[int, tuple[Struct, Struct]]:
    ok = (0, None)
    partition = transactions.TxnPartition("orders", 3)
    member = transactions.TxnGroupMember("task-8", 42, 5001, 0, "Ongoing", 1_700_000_000_000, [partition])
    return {
        ApiKey.JOIN_TXN_GROUP: (
            transactions.JoinTxnGroupRequest("stream-1", 42, "task-7", 600_000),
            transactions.JoinTxnGroupResponse(*ok, 5000, 3, 41, False),
        ),
        ApiKey.END_TXN_GROUP: (
            transactions.EndTxnGroupRequest("stream-1", 42, [transactions.TxnWinner("task-7", 5000, 3)]),
            transactions.EndTxnGroupResponse(*ok, 42, ["task-7"], False, True),
        ),
        ApiKey.DESCRIBE_TXN_GROUP: (
            transactions.DescribeTxnGroupRequest("stream-1"),
            transactions.DescribeTxnGroupResponse(*ok, "stream-1", 41, ["task-3"], [member]),
        ),
        ApiKey.RETIRE_TXN_GROUP: (
            transactions.RetireTxnGroupRequest("stream-1"),
            transactions.RetireTxnGroupResponse(*ok, 42),
        ),
    }


def _examples_within_the_cluster() -> dict[int, tuple[Struct, Struct]]:
    ok = (0, None)
    nonce, proof = bytes(range(32)), bytes(range(32, 64))
    damaged = [cluster.DamagedReplica(TOPIC_ID, 3)]
    addresses = ["127.0.0.1:9092"]
    return {
        ApiKey.CLUSTER_HELLO: (
            cluster.ClusterHelloRequest("cluster-1", 2, nonce),
            cluster.ClusterHelloResponse(*ok, 1, nonce, proof),
        ),
        ApiKey.CLUSTER_PROOF: (cluster.ClusterProofRequest(proof), cluster.ClusterProofResponse(*ok, 2)),
        ApiKey.RAFT_MESSAGES: (
            cluster.RaftMessagesRequest([len(BATCH), len(BATCH)]),
            cluster.RaftMessagesResponse(*ok, 2),
        ),
        ApiKey.ENVELOPE: (
            cluster.EnvelopeRequest(int(ApiKey.CREATE_TOPICS), 0, "test-client"),
            cluster.EnvelopeResponse(*ok, 4711),
        ),
        ApiKey.BROKER_REGISTRATION: (
            cluster.RegisterBrokerRequest(2, "ab" * 16, "cd" * 16, addresses, "rack-a", 17, True, damaged, 4),
            cluster.RegisterBrokerResponse(*ok, 18, 4711),
        ),
        ApiKey.BROKER_HEARTBEAT: (
            cluster.BrokerHeartbeatRequest(2, 18, 4711, False, damaged),
            cluster.BrokerHeartbeatResponse(*ok, False, False),
        ),
        ApiKey.ALTER_PARTITION: (
            cluster.AlterPartitionRequest(
                1, 17, [cluster.PartitionChange(TOPIC_ID, 3, 7, 12, [1, 2], [-1, 18])]
            ),
            cluster.AlterPartitionResponse(
                *ok, [cluster.ChangedPartition(TOPIC_ID, 3, *ok, 1, 7, [1, 2], 13)]
            ),
        ),
        ApiKey.ALLOCATE_PRODUCER_IDS: (
            cluster.AllocateProducerIdsRequest(2, 18),
            cluster.AllocateProducerIdsResponse(*ok, 5000, 1000),
        ),
        ApiKey.REPLICA_FETCH: (
            cluster.ReplicaFetchRequest(
                2,
                18,
                99,
                4,
                500,
                1,
                10 << 20,
                1 << 20,
                [cluster.ReplicaFetchPartition(TOPIC_ID, 3, 7, 456_332, 7, 456_330, 17)],
                [cluster.ForgottenPartition(TOPIC_ID, 4)],
            ),
            cluster.ReplicaFetchResponse(
                *ok,
                99,
                [cluster.ReplicaFetchedPartition(TOPIC_ID, 3, *ok, 7, 456_331, 17, -1, -1, len(BATCH))],
            ),
        ),
        ApiKey.CHECKPOINT_HIGH_WATERMARKS: (
            cluster.CheckpointHighWatermarksRequest(
                1, 17, [cluster.PartitionHighWatermark(TOPIC_ID, 3, 7, 456_331)]
            ),
            cluster.CheckpointHighWatermarksResponse(*ok, 1),
        ),
        ApiKey.DESCRIBE_FEATURES: (
            metadata.DescribeFeaturesRequest(-1),
            metadata.DescribeFeaturesResponse(
                *ok,
                4711,
                [metadata.FeatureDescription("metadata.version", 1, [metadata.NodeFeature(3, 1, 2)])],
            ),
        ),
        ApiKey.DESCRIBE_RECOVERY: (
            metadata.DescribeRecoveryRequest(-1),
            metadata.DescribeRecoveryResponse(
                *ok,
                [
                    metadata.RecoveringPartition(
                        "orders", 3, -1, 1200, [2], [metadata.RecoveringReplica(1, "short", 7, 456_331)]
                    )
                ],
            ),
        ),
        ApiKey.REPORT_REPLICAS: (
            cluster.ReportReplicasRequest(
                2, 18, [cluster.ReplicaReport(TOPIC_ID, 3, 8, 7, 456_331, False, 456_300, -1)]
            ),
            cluster.ReportReplicasResponse(*ok, 1),
        ),
        ApiKey.FETCH_METADATA: (
            cluster.FetchMetadataRequest(4710, 1, 500, 1 << 20),
            cluster.FetchMetadataResponse(*ok, 1, 4711, False, [cluster.MetadataEntry(4711, len(BATCH))]),
        ),
    }


@pytest.fixture(scope="session")
def examples() -> dict[int, tuple[Struct, Struct]]:
    """For each API key, a request and a response with a distinctive value in every field."""
    return _examples()


@pytest.fixture(scope="session")
def later_examples() -> dict[tuple[int, int], tuple[Struct, Struct]]:
    """For each (API key, version) after version 0, a request and a response."""
    examples = _examples()
    request, response = examples[ApiKey.FETCH]
    near = [data.PreferredReplica("payments", 4, 2)]
    of_topics, stored = examples[ApiKey.DESCRIBE_LOG_DIRS]
    directories = [
        admin.LogDirectory(
            "/disks/1",
            "0123456789abcdef0123456789abcdef",
            None,
            1 << 40,
            1 << 39,
            [admin.LogDirItem("orders", 3)],
            [admin.LogDirCopy("payments", 4, 90, 10)],
        ),
        admin.LogDirectory("/disks/2", "", "input/output error", -1, -1, [], []),
    ]
    raft_request, raft_response = examples[ApiKey.RAFT_MESSAGES]
    _, quorum = examples[ApiKey.DESCRIBE_QUORUM]
    follow, log = examples[ApiKey.FETCH_METADATA]
    features = [cluster.FeatureRange("metadata.version", 1, 2)]
    registration, registered = examples[ApiKey.BROKER_REGISTRATION]
    heartbeat, alive = examples[ApiKey.BROKER_HEARTBEAT]
    hello, challenge = examples[ApiKey.CLUSTER_HELLO]
    return {
        (ApiKey.FETCH, 1): (data.FetchRequestV1(*request, "rack-a"), data.FetchResponseV1(*response, near)),
        (ApiKey.DESCRIBE_LOG_DIRS, 1): (
            admin.DescribeLogDirsRequestV1(*of_topics),
            admin.DescribeLogDirsResponseV1(*stored, directories),
        ),
        (ApiKey.BROKER_REGISTRATION, 1): (
            cluster.RegisterBrokerRequestV1(*registration, features),
            registered,
        ),
        (ApiKey.BROKER_HEARTBEAT, 1): (cluster.BrokerHeartbeatRequestV1(*heartbeat, features), alive),
        (ApiKey.CLUSTER_HELLO, 1): (
            cluster.ClusterHelloRequestV1(*hello),
            cluster.ClusterHelloResponseV1(*challenge, features),
        ),
        (ApiKey.RAFT_MESSAGES, 1): (cluster.RaftMessagesRequestV1(*raft_request), raft_response),
        (ApiKey.DESCRIBE_QUORUM, 1): (
            metadata.DescribeQuorumRequestV1(),
            metadata.DescribeQuorumResponseV1(*quorum, [metadata.QuorumDirectory(1, "00ff" * 8)]),
        ),
        (ApiKey.FETCH_METADATA, 1): (
            cluster.FetchMetadataRequestV1(*follow),
            cluster.FetchMetadataResponseV1(*log, [cluster.ControllerAddress(1, "127.0.0.1:9093")]),
        ),
    }


@pytest.fixture(scope="session")
def payload_of() -> Callable[[Struct], tuple[bytes, ...]]:
    """The payload parts that belong to an example."""

    def parts(message: Struct) -> tuple[bytes, ...]:
        if type(message) in (cluster.EnvelopeRequest, cluster.EnvelopeResponse):
            return (BATCH,)
        for name in ("lengths_bytes", "partitions", "entries"):
            parts = getattr(message, name, None)
            if parts and (name == "lengths_bytes" or hasattr(parts[0], "length_bytes")):
                return (BATCH,) * len(parts)
        return ()

    return parts


INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def values_of(hint: Any, most: int = 4) -> st.SearchStrategy[Any]:
    """Any value of a field's type hint; lists of up to ``most``."""
    simple = {int: INT64, bool: st.booleans(), str: TEXT, bytes: st.binary(max_size=40)}
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        assert arguments[1] is NoneType
        return st.none() | values_of(arguments[0], most)
    if origin is list:
        return st.lists(values_of(arguments[0], most), max_size=most)
    if origin is Annotated:
        (item,) = get_args(arguments[0])
        if isinstance(arguments[1], AtMost):
            return st.lists(values_of(item, most), max_size=min(most, arguments[1].max_items))
        # Distinct: no partition twice
        return st.lists(values_of(item, most), max_size=most, unique_by=itemgetter(0, 1))
    if origin is dict:
        return st.dictionaries(TEXT, TEXT, max_size=most)
    return messages_of(hint, most)


def messages_of(cls: type[Struct], most: int = 4) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, *(values_of(hints[name], most) for name in cls._fields))


@pytest.fixture(scope="session", name="messages_of")
def messages_of_fixture() -> Callable[..., st.SearchStrategy[Any]]:
    """A hypothesis strategy for any struct, made from its type hints."""
    return messages_of
