"""The public class Admin: manages topics, configs, consumer groups, transactions and the cluster."""

# Long because Admin is one class with one method per request. Its result types are in ``descriptions``.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self, TypeVar, Unpack

from kafkalite.client.admin.cluster_health import describe_quorum, directories_of, look_at_quorum
from kafkalite.client.admin.credentials import MECHANISMS, mechanism_label, mechanism_number, salted_passwords
from kafkalite.client.admin.descriptions import (
    BROKER_DEFAULT,
    ClusterDescription,
    ConfigValue,
    CreatedTopic,
    D,
    DirectoryDescription,
    FeatureDescription,
    GroupDescription,
    GroupListing,
    HangingTransaction,
    LogDescription,
    MemberDescription,
    MetadataDescription,
    NewTopic,
    PartitionLag,
    ProducerDescription,
    QuorumDescription,
    QuorumMember,
    ReassignmentDescription,
    TopicDescription,
    TransactionDescription,
    TransactionGroupDescription,
    TransactionListing,
    described,
    feature_description,
    producer_description,
    topic_description,
)
from kafkalite.client.arguments import (
    checked_int,
    checked_ints,
    checked_list,
    checked_mapping,
    checked_name,
    checked_names,
    checked_offsets,
    checked_partition,
    checked_partitions,
    takes_one,
)
from kafkalite.client.cluster.authentication import OperatorLogin, call_with_secret
from kafkalite.client.cluster.client import ClusterClient
from kafkalite.client.cluster.coordinator import GROUP_KEY, TRANSACTION_KEY, CoordinatorLink
from kafkalite.client.cluster.list_offsets import check_partitions, list_offsets, offsets_for_times
from kafkalite.client.cluster.routing import NO_NODE
from kafkalite.client.config import (
    ADMIN_OPTIONS,
    BootstrapServers,
    CommonSettings,
    ConfigSource,
    admin_config,
    merged,
)
from kafkalite.client.group.commits import as_committed, to_commit
from kafkalite.clock import Clock, SystemClock
from kafkalite.errors import (
    BrokerError,
    ClientClosedError,
    ClientError,
    ConcurrentTransactionsError,
    ElectionNotNeededError,
    GroupIdNotFoundError,
    LeaderNotAvailableError,
    LocalProtocolError,
    broker_error,
)
from kafkalite.model import (
    DEFAULT_ENTITY,
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    NO_OFFSET,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    QuotaEntity,
    TopicPartition,
)
from kafkalite.protocol.messages import admin as messages
from kafkalite.protocol.messages import security
from kafkalite.protocol.messages.data import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    InitProducerIdRequest,
)
from kafkalite.protocol.messages.groups import (
    CommittedOffset,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    GroupPartition,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
)
from kafkalite.protocol.messages.metadata import (
    DescribeClusterRequest,
    DescribeFeaturesRequest,
    DescribeMetadataRequest,
    DescribeQuorumResponse,
    MetadataRequest,
)
from kafkalite.protocol.messages.transactions import (
    AbortTransactionRequest,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    DescribeTxnGroupRequest,
    ListTransactionsRequest,
    RetireTxnGroupRequest,
    TxnPartition,
)
from kafkalite.rng import Rng
from kafkalite.security.acls import EVERY_ACL, AclBinding, AclFilter
from kafkalite.security.scram import DEFAULT_ITERATIONS

T = TypeVar("T")

_A_TOPIC: Final = 'NewTopic("orders", partitions=3)'
_AN_ACL: Final = 'AclBinding(ResourceType.TOPIC, PatternType.LITERAL, "orders", "User:alice", "*", ...)'
_A_SELECTION: Final = '[AclFilter(principal="User:alice")]'
_SOME_QUOTAS: Final = '{"producer_byte_rate": 1_000_000}'
_SOME_CONFIGS: Final = '{"retention.ms": "3600000"}'

#: A broker's time limit ends up to this much earlier than the client's, so that its response can arrive.
RESPONSE_MARGIN_MS: Final = 500

#: Admin commits offsets without being a member, which is allowed only while the group has no members (R39).
_NO_MEMBER: Final = ""
_NO_MEMBER_EPOCH: Final = -1


class Admin:
    """Administers a cluster.

    ::

        async with Admin("localhost:9092") as admin:
            await admin.create_topic("orders", partitions=3)

    Methods raise the BrokerError of an object that fails. A method with the argument ``return_exceptions``
    first processes all objects. It then raises the first error, with a note on the number of failures if
    there were several objects. With ``return_exceptions=True``, it returns these errors as the results of the
    failed objects instead. With ``validate_only=True``, the cluster checks the request but changes nothing.
    """

    _opener: str = "'async with'"  # the statement that opens it, for hints

    @takes_one('Admin("{servers}")')
    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: ConfigSource | None = None,
        clock: Clock | None = None,
        rng: Rng | None = None,
        operator: OperatorLogin | None = None,
        **settings: Unpack[CommonSettings],
    ) -> None:
        """``operator`` logs in with the cluster's secret in place of a user, and may do everything."""
        given = {"bootstrap_servers": bootstrap_servers, **settings}
        self.config = admin_config(merged(config, given, ADMIN_OPTIONS))
        self._cluster = ClusterClient(self.config, rng=rng)
        if operator is not None:
            self._cluster.login = operator
        self._clock = clock or SystemClock()
        self._state = "new"

    def __repr__(self) -> str:
        return f"<Admin {self._state}, {len(self._cluster.metadata.addresses)} brokers>"

    async def start(self) -> Self:
        """Connect to the cluster. ``async with`` calls this.

        Raises ConnectionFailedError if no broker can be reached, and ClientClosedError if the admin was
        started or closed before.
        """
        if self._state != "new":
            raise ClientClosedError(f"an admin starts once; this one is {self._state}")
        self._state = "closed"
        await self._cluster.start()
        self._state = "open"
        return self

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        self._state = "closed"
        await self._cluster.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    # --- topics --------------------------------------------------------------------------------

    async def create_topic(
        self,
        name: str,
        partitions: int = BROKER_DEFAULT,
        replication_factor: int = BROKER_DEFAULT,
        *,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> CreatedTopic:
        """Create a topic. BROKER_DEFAULT selects num.partitions or default.replication.factor of the brokers.

        Raises TopicAlreadyExistsError, InvalidTopicError, InvalidPartitionsError,
        InvalidReplicationFactorError, InvalidConfigError.
        """
        topic = NewTopic(name, partitions, replication_factor, configs)
        created: CreatedTopic = (await self.create_topics([topic], validate_only=validate_only))[name]
        return created

    async def create_topics(
        self,
        topics: Iterable[NewTopic] | Mapping[str, int],
        *,
        validate_only: bool = False,
        return_exceptions: bool = False,
    ) -> dict[str, Any]:
        """Create topics, given as NewTopics or as {name: partition count}. Returns {name: CreatedTopic}."""
        if isinstance(topics, Mapping):
            topics = [NewTopic(name, partitions) for name, partitions in topics.items()]
        new = [_new_topic(topic) for topic in checked_list("topics", topics, f"[{_A_TOPIC}]")]
        response = await self._call(messages.CreateTopicsRequest(self._timeout_ms, validate_only, new))
        results: dict[str, CreatedTopic | BrokerError] = {}
        for topic in response.topics:
            results[topic.name] = _error_of(topic, f"topic {topic.name!r}") or CreatedTopic(
                topic.name, topic.topic_id, topic.num_partitions, topic.replication_factor
            )
        return _results(results, return_exceptions)

    async def delete_topics(
        self, names: Iterable[str], *, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        """Delete topics with all their records. Returns {name: None}.

        The error of a missing topic is UnknownTopicOrPartitionError.
        """
        response = await self._call(messages.DeleteTopicsRequest(self._timeout_ms, checked_names(names)))
        results = {topic.name: _error_of(topic, f"topic {topic.name!r}") for topic in response.topics}
        return _results(results, return_exceptions)

    async def list_topics(self, *, internal: bool = False) -> list[TopicDescription]:
        """Return every topic. Internal topics are included only if ``internal``."""
        response = await self._call(MetadataRequest(None, False))
        return [topic_description(topic) for topic in response.topics if internal or not topic.is_internal]

    async def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        """Return the topics in the order of ``names``. Raises UnknownTopicOrPartitionError."""
        response = await self._call(MetadataRequest(checked_names(names), False))
        found = {}
        for topic in response.topics:
            error = _error_of(topic, f"topic {topic.name!r}")
            if error is not None:
                raise error
            found[topic.name] = topic_description(topic)
        return [found[name] for name in names]

    async def describe_topic(self, name: str) -> TopicDescription:
        """Return one topic with the state of each partition. Raises UnknownTopicOrPartitionError."""
        (description,) = await self.describe_topics([name])
        return description

    async def create_partitions(self, name: str, total_count: int, *, validate_only: bool = False) -> None:
        """Increase the number of partitions of a topic to ``total_count``. Raises InvalidPartitionsError."""
        request = messages.CreatePartitionsRequest(
            self._timeout_ms,
            validate_only,
            [messages.PartitionCount(checked_name("topic", name), checked_int("total_count", total_count))],
        )
        _raise_first((await self._call(request)).topics, f"topic {name!r}")

    # --- settings ------------------------------------------------------------------------------

    async def describe_configs(
        self, resource_type: Literal["topic", "broker"], name: str
    ) -> dict[str, ConfigValue]:
        """Return {setting name: value} of the topic ``name``, or of the broker whose node id is ``name``."""
        request = messages.DescribeConfigsRequest([messages.ConfigResource(resource_type, str(name))])
        node_id = int(name) if resource_type == "broker" and str(name).isdecimal() else None
        resources = (await self._call(request, node_id=node_id)).resources
        _raise_first(resources, f"{resource_type} {name!r}")
        return {entry.name: ConfigValue(*entry) for entry in resources[0].entries}

    async def alter_configs(
        self,
        resource_type: Literal["topic", "broker"],
        name: str,
        changes: Mapping[str, str | None],
        *,
        validate_only: bool = False,
    ) -> None:
        """Change the settings in ``changes``, {setting name: value}. A value of None restores the default.

        ``name`` is a topic or a broker's node id. If one change is invalid, raises InvalidConfigError, and no
        setting is changed.
        """
        request = messages.AlterConfigsRequest(
            validate_only,
            [
                messages.ConfigChange(resource_type, str(name), key, None if value is None else str(value))
                for key, value in checked_mapping("changes", changes, _SOME_CONFIGS).items()
            ],
        )
        _raise_first((await self._call(request)).resources, f"{resource_type} {name!r}")

    # --- quotas --------------------------------------------------------------------------------

    async def describe_client_quotas(
        self, entity: QuotaEntity | None = None
    ) -> dict[QuotaEntity, dict[str, float]]:
        """Return {entity: {key: value}} of all quotas, or only those of exactly ``entity`` (KIP-546)."""
        filters = [] if entity is None else [_quota_filter(part) for part in _entity_parts(entity)]
        response = await self._call(messages.DescribeClientQuotasRequest(filters, entity is not None))
        _raise_first([response], "quotas")
        return {
            _entity_of(entry.entity): {key: float(text) for key, text in entry.values.items()}
            for entry in response.entries
        }

    async def alter_client_quotas(
        self, entity: QuotaEntity, changes: Mapping[str, float | None], *, validate_only: bool = False
    ) -> None:
        """Set the quotas in ``changes``, {key: value}. A value of None removes the quota.

        The keys for users and client ids are producer_byte_rate and consumer_byte_rate (bytes per second),
        request_percentage, and controller_mutation_rate (partitions per second). The key for IP addresses is
        connection_creation_rate (connections per second). Each broker enforces the quotas for its own
        connections. If one change is invalid, raises InvalidConfigError, and no quota is changed. Raises
        InvalidRequestError unless ``entity`` is a user, a client id, both, or an IP address.
        """
        entry = messages.ClientQuotaAlteration(
            _entity_parts(entity),
            [
                messages.ClientQuotaChange(str(key), None if value is None else str(value))
                for key, value in checked_mapping("changes", changes, _SOME_QUOTAS).items()
            ],
        )
        response = await self._call(messages.AlterClientQuotasRequest(validate_only, [entry]))
        _raise_first([response, *response.entries], str(entity))

    # --- records and offsets -------------------------------------------------------------------

    async def list_offsets(
        self, tps: Iterable[TopicPartition], at: Literal["earliest", "latest", "max-timestamp"] | int
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Return {partition: offset and timestamp} for the position ``at`` in each partition.

        ``at`` selects the log start, the high watermark (exclusive end), the record with the highest
        timestamp or, as a time in ms, the first record at or after that time. The offset is -1 if there is no
        such record.
        """
        self._check_open()
        translate = {"earliest": EARLIEST, "latest": LATEST, "max-timestamp": MAX_TIMESTAMP}
        if isinstance(at, str) and at not in translate:
            raise ClientError(
                f"{at!r} is no position", hint=f"one of {', '.join(translate)}, or a time in ms"
            )
        timestamp_ms = translate[at] if isinstance(at, str) else checked_int("at", at)
        wanted = dict.fromkeys(checked_partitions(tps), timestamp_ms)
        if timestamp_ms in {EARLIEST, LATEST}:
            listed = await list_offsets(self._cluster, wanted)
            return {
                tp: OffsetAndTimestamp(entry.offset, entry.timestamp_ms, entry.leader_epoch)
                for tp, entry in listed.items()
            }
        found = await offsets_for_times(self._cluster, wanted)
        return {tp: entry or OffsetAndTimestamp(NO_OFFSET, -1, -1) for tp, entry in found.items()}

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, return_exceptions: bool = False
    ) -> dict[TopicPartition, Any]:
        """Delete the records below the given offset in each partition of ``before``.

        The offset -1 stands for the high watermark. Returns {partition: new log start offset}.
        """
        self._check_open()
        offsets = checked_ints("offset", before)
        await check_partitions(self._cluster, offsets)
        by_leader: dict[int, list[DeleteRecordsPartition]] = {}
        for tp, offset in offsets.items():
            node_id = self._cluster.metadata.leader(tp).node_id
            by_leader.setdefault(node_id, []).append(DeleteRecordsPartition(*tp, offset))
        results: dict[TopicPartition, int | BrokerError] = {}
        for node_id, partitions in by_leader.items():
            response = await self._call(
                DeleteRecordsRequest(self._timeout_ms, partitions), node_id=node_id if node_id >= 0 else None
            )
            for deleted in response.partitions:
                tp = TopicPartition(deleted.topic, deleted.partition)
                results[tp] = _error_of(deleted, str(tp)) or deleted.log_start_offset
        return _results(results, return_exceptions)

    # --- cluster -------------------------------------------------------------------------------

    async def describe_cluster(self) -> ClusterDescription:
        """Return the brokers, including fenced ones, and the active controller."""
        response = await self._call(DescribeClusterRequest())
        return described(ClusterDescription, response)

    async def describe_quorum(self, node_id: int | None = None) -> QuorumDescription:
        """Return the controller quorum's state as ``node_id`` reports it.

        If ``node_id`` is None, the leader reports it, or another node if the leader cannot be reached.
        """
        if node_id is None:
            self._check_open()
            return _quorum(await look_at_quorum(self._cluster))
        self._check_open()
        return _quorum(await describe_quorum(self._cluster, checked_int("node_id", node_id)))

    async def describe_metadata(
        self, path: str = "/", *, after_offset: int = -1, max_wait_ms: int = 0
    ) -> MetadataDescription:
        """Return the metadata at ``path`` (such as ``/topics/orders/0``) and the names one level below.

        With ``after_offset``, waits up to ``max_wait_ms`` until the metadata log has passed that offset.
        Raises InvalidRequestError if the path does not exist.
        """
        import json

        response = await self._call(DescribeMetadataRequest(path, after_offset, max_wait_ms))
        nodes = {node.path: json.loads(node.value) if node.value else None for node in response.nodes}
        return MetadataDescription(response.metadata_offset, nodes)

    async def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        is_unclean: bool = False,
        cluster_secret: str | None = None,
        return_exceptions: bool = False,
    ) -> dict[TopicPartition, Any]:
        """Make the preferred replicas lead ``partitions`` (None: all partitions that need an election).

        Returns {partition: leader's node id}. With ``is_unclean``, instead elects a live replica in those
        partitions that have no leader, even a replica that lacks committed records. This requires the nodes'
        ``cluster_secret``. Raises PreferredLeaderNotAvailableError, EligibleLeadersNotAvailableError,
        ClusterAuthorizationFailedError.
        """
        chosen = (
            None
            if partitions is None
            else [messages.ElectionPartition(*tp) for tp in checked_partitions(partitions)]
        )
        request = messages.ElectLeadersRequest(self._timeout_ms, is_unclean, chosen)
        if is_unclean:
            response = await call_with_secret(self._cluster, cluster_secret, request)
        else:
            response = await self._call(request)
        results: dict[TopicPartition, int | BrokerError] = {}
        for elected in response.partitions:
            tp = TopicPartition(elected.topic, elected.partition)
            error = _error_of(elected, str(tp))
            is_led_already = isinstance(error, ElectionNotNeededError)
            results[tp] = elected.leader_id if error is None or is_led_already else error
        return _results(results, return_exceptions)

    async def alter_partition_reassignments(
        self,
        reassignments: Mapping[TopicPartition, Sequence[int] | None],
        *,
        allow_replication_factor_change: bool = False,
        return_exceptions: bool = False,
    ) -> dict[TopicPartition, Any]:
        """Move partitions to other brokers (KIP-455). Returns when the reassignments have begun.

        ``reassignments`` has the node ids of the replicas afterwards, the preferred leader first, for each
        partition; None cancels the partition's reassignment. A later call replaces the target of an earlier
        one. ``list_partition_reassignments`` returns those that are in progress. Raises
        UnknownTopicOrPartitionError, NoReassignmentInProgressError, InvalidReplicaAssignmentError,
        InvalidReplicationFactorError (another number of replicas without
        ``allow_replication_factor_change``, or fewer than min.insync.replicas).
        """
        example = "{TopicPartition('orders', 0): [1, 2, 3]}"
        wanted = [
            messages.PartitionReassignment(
                *checked_partition(tp),
                None if replicas is None else [checked_int("node id", one) for one in replicas],
            )
            for tp, replicas in checked_mapping("reassignments", reassignments, example).items()
        ]
        response = await self._call(
            messages.AlterPartitionReassignmentsRequest(
                self._timeout_ms, allow_replication_factor_change, wanted
            )
        )
        results: dict[TopicPartition, BrokerError | None] = {}
        for altered in response.partitions:
            tp = TopicPartition(altered.topic, altered.partition)
            results[tp] = _error_of(altered, str(tp))
        return _results(results, return_exceptions)

    async def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, ReassignmentDescription]:
        """Return the reassignments in progress of ``partitions`` (None: of all partitions)."""
        chosen = (
            None
            if partitions is None
            else [messages.ReassignedPartition(*tp) for tp in checked_partitions(partitions)]
        )
        response = await self._call(messages.ListPartitionReassignmentsRequest(self._timeout_ms, chosen))
        return {
            TopicPartition(one.topic, one.partition): ReassignmentDescription(*map(tuple, one[2:]))
            for one in response.partitions
        }

    async def unregister_broker(self, node_id: int) -> None:
        """Remove a broker without replicas from the cluster. Its node id can't be used again.

        A process that still runs as this broker stops. Raises BrokerIdNotRegisteredError, and
        InvalidRequestError if partitions have replicas on the broker.
        """
        await self._call(messages.UnregisterBrokerRequest(checked_int("node_id", node_id)))

    async def describe_features(self) -> dict[str, FeatureDescription]:
        """Return the features by name: finalised levels, and the levels that each node supports (KIP-584)."""
        response = await self._call(DescribeFeaturesRequest(NO_NODE))
        return {each.feature: feature_description(each) for each in response.features}

    async def update_features(
        self, levels: Mapping[str, int], *, validate_only: bool = False, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        """Finalise levels of features, such as ``{"metadata.version": 2}``. There is no way back.

        ``validate_only`` changes nothing. Raises InvalidUpdateVersionError for a feature that the controller
        does not know, for a lower level than the finalised one, and for a level that a broker or voter does
        not support or, because it does not run, may not support; the message names these nodes.
        """
        wanted = [
            messages.FeatureUpdate(checked_name("feature", feature), checked_int("level", level))
            for feature, level in checked_mapping("levels", levels, '{"metadata.version": 2}').items()
        ]
        response = await self._call(messages.UpdateFeaturesRequest(self._timeout_ms, validate_only, wanted))
        return _results(
            {each.feature: _error_of(each, each.feature) for each in response.results}, return_exceptions
        )

    async def add_raft_voter(self, node_id: int, *, directory_id: str = "") -> None:
        """Make an observer of the metadata quorum a voter. Returns when the change is committed (KIP-853).

        ``directory_id``, if given, must be that of the observer, as ``describe_quorum`` shows it. Raises
        VoterNotFoundError (no such observer), VoterNotCaughtUpError, VoterChangePendingError,
        DuplicateVoterError, InvalidVoterKeyError, InvalidRequestError. After RequestTimedOutError the change
        may still be committed.
        """
        await self._call(
            messages.AddRaftVoterRequest(checked_int("node_id", node_id), directory_id, self._timeout_ms)
        )

    async def remove_raft_voter(self, node_id: int, *, directory_id: str = "") -> None:
        """Remove a voter from the metadata quorum. Returns when the change is committed (KIP-853).

        The voter need not run. ``directory_id``, if given, must be the listed one. Raises VoterNotFoundError,
        VoterChangePendingError, InvalidVoterKeyError, and InvalidRequestError for the only voter. After
        RequestTimedOutError the change may still be committed.
        """
        await self._call(
            messages.RemoveRaftVoterRequest(checked_int("node_id", node_id), directory_id, self._timeout_ms)
        )

    async def controlled_shutdown(self, node_id: int, *, cluster_secret: str) -> None:
        """Make a broker transfer its leaderships and stop. Returns when the shutdown has begun.

        ``cluster_secret`` is the setting cluster.secret of the nodes. Raises InvalidRequestError if there is
        no such broker, and ClusterAuthorizationFailedError.
        """
        request = messages.ControlledShutdownRequest(checked_int("node_id", node_id))
        await call_with_secret(self._cluster, cluster_secret, request, node_id=node_id)

    async def describe_log_dirs(self, topics: Sequence[str] | None = None) -> list[LogDescription]:
        """Return the size and offsets of each log of ``topics`` (None: all topics) on each broker."""
        found: list[LogDescription] = []
        for node_id, response in (await self._describe_log_dirs(topics)).items():
            paths = {tuple(item): one.path for one in _directories(response) for item in one.partitions}
            for log in response.partitions:
                path = paths.get((log.topic, log.partition), response.path)
                found.append(LogDescription(node_id, path, *log))
        return found

    async def describe_directories(
        self, topics: Sequence[str] | None = None
    ) -> dict[int, list[DirectoryDescription]]:
        """Return {node id: its data directories, in the order of log.dirs} of every broker, with their disks
        and the logs of ``topics`` (None: all topics) in them.

        A broker of a version with one data directory has an empty list.
        """
        found: dict[int, list[DirectoryDescription]] = {}
        for node_id, response in (await self._describe_log_dirs(topics)).items():
            sizes = {(log.topic, log.partition): log.size_bytes for log in response.partitions}
            found[node_id] = [
                DirectoryDescription(
                    one.path,
                    one.directory_id,
                    one.failure,
                    one.total_bytes,
                    one.free_bytes,
                    {TopicPartition(*item): sizes.get(tuple(item), 0) for item in one.partitions},
                    {TopicPartition(copy.topic, copy.partition): copy.offset_lag for copy in one.copies},
                )
                for one in _directories(response)
            ]
        return found

    async def _describe_log_dirs(self, topics: Sequence[str] | None) -> dict[int, Any]:
        names = None if topics is None else checked_names(topics)
        try:
            return await self._call_every_broker(messages.DescribeLogDirsRequestV1(names))
        except LocalProtocolError:  # a broker of an earlier version
            return await self._call_every_broker(messages.DescribeLogDirsRequest(names))

    async def alter_replica_log_dirs(
        self, node_id: int, paths: Mapping[TopicPartition, str], *, return_exceptions: bool = False
    ) -> dict[TopicPartition, Any]:
        """Begin to move logs of a broker to other data directories of it: {partition: path} (KIP-113).

        ``describe_directories`` shows the copies, and the log in its new directory when the move is complete.
        The path of the directory that has the log cancels its move. A move ends with the broker's process.
        Raises LogDirNotFoundError, NotLeaderOrFollowerError (no replica there), KafkaStorageError (the log is
        offline).
        """
        items = [
            messages.ReplicaLogDir(*checked_partition(tp), checked_name("path", path))
            for tp, path in paths.items()
        ]
        request = messages.AlterReplicaLogDirsRequest(items)
        response = await self._call(request, node_id=checked_int("node_id", node_id))
        results = {
            TopicPartition(one.topic, one.partition): _error_of(one, f"{one.topic}-{one.partition}")
            for one in response.partitions
        }
        return _results(results, return_exceptions)

    # --- access control and users ------------------------------------------------------------------------

    async def create_acls(self, acls: Iterable[AclBinding]) -> None:
        """Add access control rules. It is no error if a rule exists already.

        Raises InvalidRequestError for a rule that could never apply; the valid rules of the call are added.
        """
        request = security.CreateAclsRequest([security.Acl(*acl) for acl in _acls(acls)])
        response = await self._call(request)
        for acl, result in zip(request.acls, response.results, strict=True):
            _raise_first([result], f"{acl.principal} on {acl.name!r}")

    async def describe_acls(self, selection: AclFilter = EVERY_ACL) -> list[AclBinding]:
        """Return the access control rules that ``selection`` selects (by default all), sorted."""
        response = await self._call(security.DescribeAclsRequest(*selection))
        return [AclBinding(*acl) for acl in response.acls]

    async def delete_acls(self, selections: Iterable[AclFilter]) -> list[AclBinding]:
        """Remove the access control rules that any of ``selections`` selects, and return them, sorted."""
        wanted = [security.AclSelection(*one) for one in checked_list("selections", selections, _A_SELECTION)]
        response = await self._call(security.DeleteAclsRequest(wanted))
        return sorted(AclBinding(*acl) for result in response.results for acl in result.acls)

    async def describe_users(self, users: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
        """Return {user: {SCRAM mechanism: iterations}} of ``users``, or of all users sorted by name if None.

        Raises ResourceNotFoundError for a user without a credential.
        """
        wanted = None if users is None else checked_names(users)
        response = await self._call(security.DescribeUserScramCredentialsRequest(wanted))
        described_users: dict[str, dict[str, int]] = {}
        for user in response.users:
            _raise_first([user], f"user {user.user!r}")
            described_users[user.user] = {
                mechanism_label(one.mechanism): one.iterations for one in user.credentials
            }
        return described_users

    async def set_user_password(
        self,
        user: str,
        password: str,
        *,
        mechanisms: Sequence[str] = MECHANISMS,
        iterations: int = DEFAULT_ITERATIONS,
    ) -> None:
        """Set the password of a user for ``mechanisms``. Creates the user if it does not exist.

        The password itself is not sent: this client computes a salted password, which costs some
        milliseconds for each mechanism. Raises InvalidRequestError for a name or password that SASLprep
        refuses (RFC 4013), and UnacceptableCredentialError if ``iterations`` is not from 4,096 to 100,000.
        """
        upsertions = [
            security.ScramCredentialUpsertion(*one)
            for one in salted_passwords(user, password, mechanisms, iterations)
        ]
        response = await self._call(security.AlterUserScramCredentialsRequest([], upsertions))
        _raise_first(response.users, f"user {user!r}")

    async def delete_user(self, user: str) -> None:
        """Remove all credentials of a user. Raises ResourceNotFoundError if it has none.

        Access control rules for the user stay.
        """
        credentials = (await self.describe_users([user]))[user]
        deletions = [security.ScramCredentialDeletion(user, mechanism_number(one)) for one in credentials]
        response = await self._call(security.AlterUserScramCredentialsRequest(deletions, []))
        _raise_first(response.users, f"user {user!r}")

    # --- groups ------------------------------------------------------------------------------------------

    async def list_groups(self, states: Sequence[str] = ()) -> list[GroupListing]:
        """Return the groups in one of ``states`` (empty: any state), sorted by name."""
        listings = await self._list(GroupListing, "groups", ListGroupsRequest(checked_names(states)))
        return sorted(listings, key=lambda listing: listing.group_id)

    async def describe_group(self, group_id: str, *, journal: bool = False) -> GroupDescription:
        """Return the group's state, its members and their partitions. Raises GroupIdNotFoundError.

        With ``journal``, also return the causes of the latest generations.
        """
        response = await self._call_coordinator(
            GROUP_KEY, group_id, DescribeGroupsRequest([group_id], journal)
        )
        _raise_first(response.groups, f"group {group_id!r}")
        return described(GroupDescription, response.groups[0])

    async def committed_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offset in each of ``partitions`` (None: all) that has one."""
        offsets = await self._committed(group_id, partitions)
        return {tp: as_committed(one) for tp, one in offsets.items()}

    async def _committed(
        self, group_id: str, partitions: Iterable[TopicPartition] | None
    ) -> dict[TopicPartition, CommittedOffset]:
        asked = None if partitions is None else [GroupPartition(*tp) for tp in checked_partitions(partitions)]
        request = OffsetFetchRequest(group_id, _NO_MEMBER, _NO_MEMBER_EPOCH, False, asked)
        response = await self._call_coordinator(GROUP_KEY, group_id, request)
        found: dict[TopicPartition, CommittedOffset] = {}
        for one in sorted(response.offsets, key=lambda one: (one.topic, one.partition)):
            tp = TopicPartition(one.topic, one.partition)
            _raise_first([one], f"{tp} in group {group_id!r}")
            if one.offset != NO_OFFSET:
                found[tp] = one
        return found

    async def group_lag(self, group_id: str) -> list[PartitionLag]:
        """Return the lag of each partition that is assigned or has a committed offset, sorted by partition.

        The lag is None if the partition was deleted or has no committed offset. Raises GroupIdNotFoundError
        if there is no such group.
        """
        committed = await self._committed(group_id, None)
        holders: dict[TopicPartition, MemberDescription] = {}
        try:
            for member in (await self.describe_group(group_id)).members:
                holders.update(dict.fromkeys((*member.assignment, *member.awaited_revocation), member))
        except GroupIdNotFoundError:
            if not committed:
                raise
        wanted = sorted(committed.keys() | holders.keys())
        counts = {topic.name: len(topic.partitions) for topic in await self.list_topics(internal=True)}
        existing = [tp for tp in wanted if tp.partition < counts.get(tp.topic, 0)]
        ends = await list_offsets(self._cluster, dict.fromkeys(existing, LATEST))
        lags: list[PartitionLag] = []
        for tp in wanted:
            one = committed.get(tp)
            offset = None if one is None else as_committed(one)
            commit_ms = None if one is None else one.commit_ms
            end_offset = ends[tp].offset if tp in ends else None
            lags.append(PartitionLag(tp, offset, commit_ms, end_offset, holders.get(tp)))
        return lags

    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
    ) -> None:
        """Set the group's committed offsets to ``offsets``. Allowed only while the group has no members.

        Raises UnknownMemberIdError if it has members, and UnknownTopicOrPartitionError.
        """
        entries = [to_commit(tp, at) for tp, at in checked_offsets(offsets).items()]
        request = OffsetCommitRequest(group_id, _NO_MEMBER, _NO_MEMBER_EPOCH, None, entries)
        response = await self._call_coordinator(GROUP_KEY, group_id, request)
        _results(_errors(group_id, response.offsets), return_exceptions=False)

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, return_exceptions: bool = False
    ) -> dict[TopicPartition, BrokerError | None]:
        """Delete the group's committed offsets in ``partitions``. Returns {partition: None}.

        The error of a partition is GroupSubscribedToTopicError if members subscribe to its topic. Raises
        GroupIdNotFoundError.
        """
        request = OffsetDeleteRequest(
            group_id, [GroupPartition(*tp) for tp in checked_partitions(partitions)]
        )
        response = await self._call_coordinator(GROUP_KEY, group_id, request)
        return _results(_errors(group_id, response.offsets), return_exceptions)

    async def delete_groups(
        self, group_ids: Iterable[str], *, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        """Delete groups and their offsets. Returns {name: None}.

        The error of a group is NonEmptyGroupError if it has members, or GroupIdNotFoundError.
        """
        results: dict[str, BrokerError | None] = {}
        for group_id in checked_names(group_ids):
            response = await self._call_coordinator(GROUP_KEY, group_id, DeleteGroupsRequest([group_id]))
            results[group_id] = _error_of(response.groups[0], f"group {group_id!r}")
        return _results(results, return_exceptions)

    # --- transactions ------------------------------------------------------------------------------------

    async def list_transactions(
        self, states: Sequence[str] = (), *, min_duration_ms: int = 0
    ) -> list[TransactionListing]:
        """Return the transactional ids, and writers of transaction groups, in one of ``states`` (empty: any).

        Unless ``min_duration_ms`` is 0, returns only those with a transaction that has been open for at least
        ``min_duration_ms``.
        """
        request = ListTransactionsRequest(checked_names(states), min_duration_ms)
        listings = await self._list(TransactionListing, "transactions", request)
        return sorted(listings, key=lambda listing: (listing.transactional_id, listing.producer_id))

    async def describe_transaction(self, transactional_id: str) -> TransactionDescription:
        """Return the state of a transactional id. Raises TransactionalIdNotFoundError."""
        request = DescribeTransactionsRequest([transactional_id])
        response = await self._call_coordinator(TRANSACTION_KEY, transactional_id, request)
        _raise_first(response.transactions, f"transactional id {transactional_id!r}")
        return described(TransactionDescription, response.transactions[0])

    async def describe_transaction_group(self, application_id: str) -> TransactionGroupDescription:
        """Return the last decided batch and the open writers of a transaction group.

        Raises TransactionalIdNotFoundError if the application id is unknown.
        """
        request = DescribeTxnGroupRequest(application_id)
        response = await self._call_coordinator(TRANSACTION_KEY, application_id, request)
        return described(TransactionGroupDescription, response)

    async def retire_transaction_group(self, application_id: str) -> int:
        """Let the brokers forget a transaction group's decisions. Return the id of its last decided batch.

        Does the same as ``TransactionGroup.retire``, for an application that no longer runs. Raises
        TransactionalIdNotFoundError, and InvalidTxnStateError if no batch was decided or a writer is active.
        """
        request = RetireTxnGroupRequest(application_id)
        response = await self._call_coordinator(TRANSACTION_KEY, application_id, request)
        last: int = response.last_batch_id
        return last

    async def abort_transaction(self, transactional_id: str) -> None:
        """Abort the open transaction of a transactional id, if any, and fence its producer (R34).

        Raises TransactionalIdNotFoundError, and InvalidTxnStateError for the application id of a transaction
        group.
        """
        timeout_ms = (await self.describe_transaction(transactional_id)).timeout_ms
        request = InitProducerIdRequest(transactional_id, timeout_ms, NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
        with contextlib.suppress(ConcurrentTransactionsError):  # the abort has begun but is not complete yet
            await self._call_coordinator(TRANSACTION_KEY, transactional_id, request)

    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[ProducerDescription]]:
        """Return {partition: producers whose state its leader keeps} (KIP-664). Raises the first error."""
        found: dict[TopicPartition, list[ProducerDescription]] = {}
        for tp in checked_partitions(partitions):
            leader = await self._leader(tp)
            response = await self._call(DescribeProducersRequest([TxnPartition(*tp)]), node_id=leader)
            _raise_first(response.partitions, str(tp))
            found[tp] = [producer_description(one) for one in response.partitions[0].producers]
        return found

    async def find_hanging_transactions(
        self, partitions: Iterable[TopicPartition], *, min_age_ms: int
    ) -> list[HangingTransaction]:
        """Return the transactions that are open in ``partitions`` and unknown to every coordinator (KIP-664).

        Transactions whose last batch is younger than ``min_age_ms`` are omitted, because a coordinator may
        not know them yet.
        """
        now_ms = self._clock.wall_ms()
        known: set[int] | None = None
        hanging: list[HangingTransaction] = []
        for tp, producers in (await self.describe_producers(partitions)).items():
            for producer in producers:
                is_old = now_ms - producer.last_timestamp_ms >= min_age_ms
                if producer.transaction_start_offset is None or not is_old:
                    continue
                if known is None:
                    open_now = await self.list_transactions()
                    known = {one.producer_id for one in open_now if not _is_at_rest(one.state)}
                if producer.producer_id not in known:
                    hanging.append(HangingTransaction(tp, producer))
        return hanging

    async def abort_hanging_transaction(
        self, tp: TopicPartition, producer_id: int, start_offset: int
    ) -> None:
        """Abort the hanging transaction of ``producer_id`` that starts at ``start_offset`` in ``tp``.

        Raises InvalidTxnStateError if no such transaction is open.
        """
        tp = checked_partition(tp)
        request = AbortTransactionRequest(*tp, producer_id, start_offset)
        response = await self._call(request, node_id=await self._leader(tp))
        error = _error_of(response, str(tp))
        if error is not None:
            raise error

    async def _leader(self, tp: TopicPartition) -> int:
        await check_partitions(self._cluster, {tp: None})
        leader_id = self._cluster.metadata.leader(tp).node_id
        if leader_id == NO_NODE:
            raise LeaderNotAvailableError(f"{tp} has no leader now")
        return leader_id

    # --- requests ----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClientClosedError(
                f"the admin is {self._state}", hint=f"open it with {self._opener} or start()"
            )

    async def _call(self, request: Any, *, node_id: int | None = None) -> Any:
        self._check_open()
        return (await self._cluster.call(request, node_id=node_id)).message

    async def _call_coordinator(self, key_type: int, key: str, request: Any) -> Any:
        """Send ``request`` to the coordinator of ``key``. Raises the response's BrokerError."""
        self._check_open()
        checked_name("group id" if key_type == GROUP_KEY else "transactional id", key)
        return await CoordinatorLink(self._cluster, key_type, key).call(request)

    async def _call_every_broker(self, request: Any) -> dict[int, Any]:
        """Send ``request`` to all brokers in the metadata and return {node id: response}.

        Raises the first error.
        """
        self._check_open()
        nodes = sorted(self._cluster.metadata.addresses)
        responses = await asyncio.gather(*(self._call(request, node_id=node_id) for node_id in nodes))
        for node_id, response in zip(nodes, responses, strict=True):
            _raise_first([response], f"broker {node_id}")
        return dict(zip(nodes, responses, strict=True))

    async def _list(self, kind: type[D], name: str, request: Any) -> list[D]:
        """Send ``request`` to all brokers in the metadata.

        Return the items in the field ``name`` of all responses, converted to ``kind``.
        """
        responses = await self._call_every_broker(request)
        return [
            described(kind, one, coordinator_id=node_id)
            for node_id, response in responses.items()
            for one in getattr(response, name)
        ]

    @property
    def _timeout_ms(self) -> int:
        """The time limit for the broker: shorter than request.timeout.ms, so that its response arrives."""
        timeout_ms = self.config.request_timeout_ms
        return max(timeout_ms - RESPONSE_MARGIN_MS, (timeout_ms + 1) // 2)


def _directories(response: messages.DescribeLogDirsResponse) -> Sequence[messages.LogDirectory]:
    return response.directories if isinstance(response, messages.DescribeLogDirsResponseV1) else ()


def _quorum(response: DescribeQuorumResponse) -> QuorumDescription:
    directories = directories_of(response)
    members = tuple(
        QuorumMember(
            node.node_id,
            node.address,
            node.is_voter,
            node.match_offset,
            node.last_contact_ms,
            directories.get(node.node_id, ""),
        )
        for node in response.nodes
    )
    return described(QuorumDescription, response, members=members)


def _error_of(result: Any, what: str) -> BrokerError | None:
    """Return the error in ``result``, or None. ``what`` names the object in the error's message."""
    if result.error_code == 0:
        return None
    return broker_error(result.error_code, result.error_message or "", about=what)


def _acls(acls: Iterable[object]) -> list[AclBinding]:
    """Return ``acls`` as a list. Raises ClientError unless it is an iterable of AclBindings."""
    listed = checked_list("acls", acls, _AN_ACL)
    for acl in listed:
        if not isinstance(acl, AclBinding):
            raise ClientError(f"{acl!r} is not an AclBinding", hint=f"for example {_AN_ACL}")
    return listed


#: {field of QuotaEntity: its type on the wire}
_ENTITY_TYPES: Final = {"user": "user", "client_id": "client-id", "ip": "ip"}


def _entity_parts(entity: QuotaEntity) -> list[messages.QuotaEntityName]:
    """Return ``entity`` as requests contain it. Raises ClientError if it is not a QuotaEntity."""
    if not isinstance(entity, QuotaEntity):
        raise ClientError(f"{entity!r} is not a QuotaEntity", hint='for example QuotaEntity(user="alice")')
    return [
        messages.QuotaEntityName(_ENTITY_TYPES[field], name or None)
        for field, name in entity._asdict().items()
        if name is not None
    ]


def _entity_of(parts: Iterable[messages.QuotaEntityName]) -> QuotaEntity:
    fields = {kind: field for field, kind in _ENTITY_TYPES.items()}
    return QuotaEntity(**{fields[kind]: name or DEFAULT_ENTITY for kind, name in parts})


def _quota_filter(part: messages.QuotaEntityName) -> messages.QuotaFilter:
    return messages.QuotaFilter(part.entity_type, part.name, 1 if part.name is None else 0)


def _new_topic(topic: object) -> messages.NewTopic:
    """Return ``topic`` as an entry of a request. Raises ClientError for wrong types."""
    if not isinstance(topic, NewTopic):
        raise ClientError(f"{topic!r} is not a NewTopic", hint=f"for example {_A_TOPIC}")
    configs = checked_mapping("configs", topic.configs or {}, _SOME_CONFIGS)
    return messages.NewTopic(
        checked_name("topic", topic.name),
        checked_int("partitions", topic.partitions),
        checked_int("replication_factor", topic.replication_factor),
        {str(key): str(value) for key, value in configs.items()},
    )


def _raise_first(results: Iterable[Any], what: str) -> None:
    """Raise the first error among ``results``, if any. ``what`` names the object in the error's message."""
    for result in results:
        error = _error_of(result, what)
        if error is not None:
            raise error


def _results(results: dict[T, Any], return_exceptions: bool) -> dict[T, Any]:
    """Return ``results``. Unless ``return_exceptions``, raise the first error among its values, if any."""
    errors = [result for result in results.values() if isinstance(result, BrokerError)]
    if errors and not return_exceptions:
        if len(results) > 1:
            errors[0].add_note(f"{len(errors)} of {len(results)} failed")
        raise errors[0]
    return results


def _errors(group_id: str, offsets: Iterable[CommittedOffset]) -> dict[TopicPartition, Any]:
    tps = {TopicPartition(one.topic, one.partition): one for one in offsets}
    return {tp: _error_of(one, f"{tp} in group {group_id!r}") for tp, one in tps.items()}


def _is_at_rest(state: str) -> bool:
    return state == "Empty" or state.startswith("Complete")
