"""The blocking twin of Admin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack

from kafkalite.client.admin import admin as async_admin
from kafkalite.client.admin import descriptions as values
from kafkalite.client.blocking.twin import Twin, twin_of
from kafkalite.client.config import BootstrapServers, CommonSettings
from kafkalite.errors import BrokerError
from kafkalite.model import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition


@twin_of(async_admin.Admin)
class Admin(Twin[async_admin.Admin]):
    """Administers a cluster; the blocking twin of ``kafkalite.Admin``, with the same arguments."""

    def __init__(
        self,
        bootstrap_servers: BootstrapServers | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        **settings: Unpack[CommonSettings],
    ) -> None:
        super().__init__(async_admin.Admin(bootstrap_servers, config=config, **settings))

    def create_topic(
        self,
        name: str,
        partitions: int = values.BROKER_DEFAULT,
        replication_factor: int = values.BROKER_DEFAULT,
        *,
        configs: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> values.CreatedTopic:
        return self._run(
            self._original.create_topic(
                name, partitions, replication_factor, configs=configs, validate_only=validate_only
            )
        )

    def create_topics(
        self,
        topics: Iterable[values.NewTopic] | Mapping[str, int],
        *,
        validate_only: bool = False,
        return_exceptions: bool = False,
    ) -> dict[str, Any]:
        return self._run(
            self._original.create_topics(
                topics, validate_only=validate_only, return_exceptions=return_exceptions
            )
        )

    def delete_topics(
        self, names: Iterable[str], *, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        return self._run(self._original.delete_topics(names, return_exceptions=return_exceptions))

    def list_topics(self, *, internal: bool = False) -> list[values.TopicDescription]:
        return self._run(self._original.list_topics(internal=internal))

    def describe_topics(self, names: Sequence[str]) -> list[values.TopicDescription]:
        return self._run(self._original.describe_topics(names))

    def describe_topic(self, name: str) -> values.TopicDescription:
        return self._run(self._original.describe_topic(name))

    def create_partitions(self, name: str, total_count: int, *, validate_only: bool = False) -> None:
        self._run(self._original.create_partitions(name, total_count, validate_only=validate_only))

    def describe_configs(
        self, resource_type: Literal["topic", "broker"], name: str
    ) -> dict[str, values.ConfigValue]:
        return self._run(self._original.describe_configs(resource_type, name))

    def alter_configs(
        self,
        resource_type: Literal["topic", "broker"],
        name: str,
        changes: Mapping[str, str | None],
        *,
        validate_only: bool = False,
    ) -> None:
        self._run(self._original.alter_configs(resource_type, name, changes, validate_only=validate_only))

    def list_offsets(
        self, tps: Iterable[TopicPartition], at: Literal["earliest", "latest", "max-timestamp"] | int
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        return self._run(self._original.list_offsets(tps, at))

    def delete_records(
        self, before: Mapping[TopicPartition, int], *, return_exceptions: bool = False
    ) -> dict[TopicPartition, Any]:
        return self._run(self._original.delete_records(before, return_exceptions=return_exceptions))

    def describe_cluster(self) -> values.ClusterDescription:
        return self._run(self._original.describe_cluster())

    def describe_quorum(self, node_id: int | None = None) -> values.QuorumDescription:
        return self._run(self._original.describe_quorum(node_id))

    def describe_metadata(
        self, path: str = "/", *, after_offset: int = -1, max_wait_ms: int = 0
    ) -> values.MetadataDescription:
        return self._run(
            self._original.describe_metadata(path, after_offset=after_offset, max_wait_ms=max_wait_ms)
        )

    def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        is_unclean: bool = False,
        return_exceptions: bool = False,
    ) -> dict[TopicPartition, Any]:
        return self._run(
            self._original.elect_leaders(
                partitions, is_unclean=is_unclean, return_exceptions=return_exceptions
            )
        )

    def controlled_shutdown(self, node_id: int) -> None:
        self._run(self._original.controlled_shutdown(node_id))

    def describe_log_dirs(self, topics: Sequence[str] | None = None) -> list[values.LogDescription]:
        return self._run(self._original.describe_log_dirs(topics))

    # --- groups --------------------------------------------------------------------------------

    def list_groups(self, states: Sequence[str] = ()) -> list[values.GroupListing]:
        return self._run(self._original.list_groups(states))

    def describe_group(self, group_id: str, *, journal: bool = False) -> values.GroupDescription:
        return self._run(self._original.describe_group(group_id, journal=journal))

    def committed_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return self._run(self._original.committed_offsets(group_id, partitions))

    def group_lag(self, group_id: str) -> list[values.PartitionLag]:
        return self._run(self._original.group_lag(group_id))

    def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
    ) -> None:
        self._run(self._original.alter_group_offsets(group_id, offsets))

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, return_exceptions: bool = False
    ) -> dict[TopicPartition, BrokerError | None]:
        return self._run(
            self._original.delete_group_offsets(group_id, partitions, return_exceptions=return_exceptions)
        )

    def delete_groups(
        self, group_ids: Iterable[str], *, return_exceptions: bool = False
    ) -> dict[str, BrokerError | None]:
        return self._run(self._original.delete_groups(group_ids, return_exceptions=return_exceptions))

    # --- transactions --------------------------------------------------------------------------

    def list_transactions(
        self, states: Sequence[str] = (), *, min_duration_ms: int = 0
    ) -> list[values.TransactionListing]:
        return self._run(self._original.list_transactions(states, min_duration_ms=min_duration_ms))

    def describe_transaction(self, transactional_id: str) -> values.TransactionDescription:
        return self._run(self._original.describe_transaction(transactional_id))

    def describe_transaction_group(self, application_id: str) -> values.TransactionGroupDescription:
        return self._run(self._original.describe_transaction_group(application_id))

    def retire_transaction_group(self, application_id: str) -> int:
        return self._run(self._original.retire_transaction_group(application_id))

    def abort_transaction(self, transactional_id: str) -> None:
        self._run(self._original.abort_transaction(transactional_id))

    def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[values.ProducerDescription]]:
        return self._run(self._original.describe_producers(partitions))

    def find_hanging_transactions(
        self, partitions: Iterable[TopicPartition], *, min_age_ms: int
    ) -> list[values.HangingTransaction]:
        return self._run(self._original.find_hanging_transactions(partitions, min_age_ms=min_age_ms))

    def abort_hanging_transaction(self, tp: TopicPartition, producer_id: int, start_offset: int) -> None:
        self._run(self._original.abort_hanging_transaction(tp, producer_id, start_offset))
