"""Describes a topic from the responses of all brokers: settings, partitions, replicas, sizes."""

# Tests: tests/cli/test_topic.py

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalite.cli.offset_queries import Extent, list_or_fail
from kafkalite.cli.output import Column, human_bytes, pick, print_listing, write
from kafkalite.errors import KafkaliteError, UnknownTopicOrPartitionError
from kafkalite.model import TopicPartition
from kafkalite.protocol.messages.admin import DescribeLogDirsRequest, LogDirPartition
from kafkalite.protocol.messages.metadata import MetadataRequest, PartitionMetadata, TopicMetadata

if TYPE_CHECKING:
    from kafkalite.client.admin.admin import Admin
    from kafkalite.client.cluster.client import ClusterClient

#: The time limit for the sizes of one broker. Those of slower brokers are omitted.
_LOG_DIRS_TIMEOUT_MS: Final = 2_000


def _shown_lag(lag: dict[str, int]) -> str:
    """Return a text such as ``3:120`` (node 3 is 120 records behind), or ``0`` if no follower is behind."""
    return ",".join(f"{node_id}:{records}" for node_id, records in lag.items() if records) or "0"


_PARTITION_COLUMNS: Final = (
    Column("partition", "PARTITION"),
    Column("leader", "LEADER"),
    Column("replicas", "REPLICAS"),
    Column("isr", "ISR"),
    Column("elr", "ELR"),
    Column("earliest", "EARLIEST"),
    Column("latest", "LATEST"),
    Column("lag", "LAG", show=_shown_lag),
    Column("size_bytes", "SIZE", show=human_bytes),
    Column("segments", "SEGMENTS", wide=True),
    Column("leader_epoch", "LEADER EPOCH", wide=True),
    Column("partition_epoch", "PARTITION EPOCH", wide=True),
)

Logs = dict[tuple[int, int], LogDirPartition]
"""{(node id, partition): that broker's description of its replica}"""


async def description(admin: Admin, client: ClusterClient, name: str, *, all_configs: bool) -> dict[str, Any]:
    """Return the topic's description as a document. Raises UnknownTopicOrPartitionError."""
    import asyncio

    topic = await _topic(client, name)
    configs = await admin.describe_configs("topic", name)
    led = [TopicPartition(name, state.partition) for state in topic.partitions if state.leader_id >= 0]
    starts, ends, logs = await asyncio.gather(
        admin.list_offsets(led, "earliest"), list_or_fail(admin, led, "latest"), _logs(client, name)
    )
    known = {tp: Extent(starts[tp].offset, end) for tp, end in ends.items() if isinstance(end, int)}
    partitions = [
        _partition(state, known.get(TopicPartition(name, state.partition)), logs)
        for state in sorted(topic.partitions, key=lambda state: state.partition)
    ]
    return {
        "name": name,
        "topic_id": topic.topic_id,
        "records": sum(extent.log_end_offset - extent.log_start_offset for extent in known.values()),
        "size_bytes": sum(each["size_bytes"] for each in partitions),
        "configs": {
            entry.name: {"value": entry.value, "source": entry.source}
            for entry in configs.values()
            if all_configs or entry.source == "topic"
        },
        "partitions": partitions,
    }


async def _topic(client: ClusterClient, name: str) -> TopicMetadata:
    response = (await client.call(MetadataRequest([name], False))).message
    topic: TopicMetadata
    (topic,) = response.topics
    if topic.error_code != 0:
        raise UnknownTopicOrPartitionError(f"topic {name!r}: {topic.error_message or 'does not exist'}")
    return topic


async def _logs(client: ClusterClient, name: str) -> Logs:
    """Return the logs of the topic on each broker. Brokers that do not return them in time are omitted."""

    import asyncio

    async def one(node_id: int) -> Logs:
        request = DescribeLogDirsRequest([name])
        try:
            response = await client.call(request, node_id=node_id, timeout_ms=_LOG_DIRS_TIMEOUT_MS)
        except KafkaliteError:
            return {}
        return {(node_id, log.partition): log for log in response.message.partitions}

    found: Logs = {}
    for logs in await asyncio.gather(*map(one, sorted(client.metadata.addresses))):
        found |= logs
    return found


def _partition(state: PartitionMetadata, extent: Extent | None, logs: Logs) -> dict[str, Any]:
    """Return a partition's row, with the leader's sizes and each follower's lag behind the leader. Pure."""
    own = {
        node_id: logs[node_id, state.partition]
        for node_id in state.replicas
        if (node_id, state.partition) in logs
    }
    leader = own.get(state.leader_id)
    lag = {}
    if leader is not None:
        lag = {
            str(node_id): max(0, leader.log_end_offset - log.log_end_offset)
            for node_id, log in own.items()
            if node_id != state.leader_id
        }
    return {
        "partition": state.partition,
        "leader": state.leader_id if state.leader_id >= 0 else None,
        **pick(state, "leader_epoch", "partition_epoch"),
        "replicas": list(state.replicas),
        "isr": list(state.isr),
        "elr": list(state.elr),
        "earliest": extent.log_start_offset if extent is not None else None,
        "latest": extent.log_end_offset if extent is not None else None,
        "lag": lag,
        "size_bytes": leader.size_bytes if leader is not None else 0,
        "segments": leader.segment_count if leader is not None else 0,
        "offline_reason": leader.offline_reason if leader is not None else None,
        "offline_replicas": {
            str(node_id): log.offline_reason for node_id, log in own.items() if log.offline_reason is not None
        },
    }


def only_partitions(documents: Sequence[dict[str, Any]], problems: Sequence[str]) -> list[dict[str, Any]]:
    """Return ``documents`` without partitions that have none of the ``problems``. Pure.

    Documents without remaining partitions are omitted. ``problems`` contains "leaderless",
    "under_replicated" or both. If it is empty, ``documents`` are returned unchanged.
    """
    if not problems:
        return list(documents)

    def is_wanted(partition: dict[str, Any]) -> bool:
        is_leaderless = partition["leader"] is None
        is_under_replicated = len(partition["isr"]) < len(partition["replicas"])
        return ("leaderless" in problems and is_leaderless) or (
            "under_replicated" in problems and is_under_replicated
        )

    kept = [
        document | {"partitions": [each for each in document["partitions"] if is_wanted(each)]}
        for document in documents
    ]
    return [document for document in kept if document["partitions"]]


def print_descriptions(documents: Sequence[dict[str, Any]], output: str, *, is_filtered: bool) -> None:
    if output not in {"table", "wide"}:
        print_listing(documents, (), output)
        return
    if is_filtered:
        rows = [
            {"name": f"{document['name']}-{each['partition']}"} | each
            for document in documents
            for each in document["partitions"]
        ]
        print_listing(rows, (Column("name", "PARTITION"), *_PARTITION_COLUMNS[1:]), output)
        return
    for number, document in enumerate(documents):
        configs = [
            f"{name}={entry['value']}" + ("" if entry["source"] == "topic" else f" ({entry['source']})")
            for name, entry in document["configs"].items()
        ]
        write(
            ("\n" if number else "")
            + f"topic     {document['name']}\n"
            + f"id        {document['topic_id']}\n"
            + f"records   {document['records']:,}\n"
            + f"size      {human_bytes(document['size_bytes'])}\n"
            + f"settings  {(chr(10) + ' ' * 10).join(configs) or 'none of its own'}\n\n"
        )
        print_listing(document["partitions"], _PARTITION_COLUMNS, output)
        for partition in document["partitions"]:
            for node_id, reason in partition["offline_replicas"].items():
                write(f"partition {partition['partition']} is offline on broker {node_id}: {reason}\n")
