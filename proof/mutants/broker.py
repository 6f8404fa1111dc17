"""Mutants of the rules in ``kafkalite.broker``; ``proof.mutants`` explains them."""

from __future__ import annotations

from typing import Any, Final

from kafkalite.protocol.messages.transactions import EndTxnGroupResponse, EndTxnResponse
from proof.mutants import Mutant


def _yes(*_: Any) -> bool:
    return True


def _never(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    return None


async def _at_once(*_: Any) -> None:
    """Do not wait."""


def _may_send_an_end(shard: Any, response: Any, original: Any) -> bool:
    is_end = isinstance(getattr(response, "message", None), EndTxnResponse | EndTxnGroupResponse)
    return is_end or original(shard, response)


def _append_unverified(
    waiting: Any, partition: Any, batch: Any, header: Any, transactional_id: str, acks: int, then: Any
) -> Any:
    return partition.append(batch, header, waiting._clock.wall_ms(), acks, is_verified=True)


def _extend_from_now(registration: Any, sent_ms: int, original: Any) -> None:
    original(registration, registration._clock.monotonic_ms())


_SHARD: Final = "kafkalite.broker.coordination.shard:Shard"


def _no_damage(partition: Any) -> None:
    pass


def _all_at_once(_server: Any, connection: Any) -> None:
    if not connection.is_waiting:
        connection.is_waiting = True
        while connection.has_more:
            connection.take_turn()
        connection.is_waiting = False


def _expire_as_final(waiting: Any) -> None:
    for index in waiting._waiting:
        waiting.results[index] = waiting._fail(waiting.results[index], RuntimeError("not acknowledged"))
    waiting._waiting.clear()
    waiting._finish_if_complete()


def _fail_every_directory(dirs: Any, path: str, reason: str, original: Any) -> Any:
    return [tp for store in list(dirs._stores) for tp in original(dirs, store.path, reason)]


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "R81-takes-all",
        "a failed disk takes the logs in all data directories offline",
        {"kafkalite.storage.log_dirs:LogDirs.fail": _fail_every_directory},
    ),
    Mutant(
        "R81-unnoticed",
        "a failed disk is not noticed as long as nothing is written to a log",
        {"kafkalite.broker.partitions.partitions:Partitions.probe_disks": _nothing},
    ),
    Mutant(
        "R81-created-again",
        "a log that may be in a directory that cannot be opened is created again in another one",
        {"kafkalite.storage.log_dirs:LogDirs._may_be_elsewhere": _never},
    ),
    Mutant(
        "R81-begun-again",
        "a log whose data directory failed while it was to be opened again begins empty in another one",
        {"kafkalite.storage.log_dirs:LogDirs._hold_back": _nothing},
    ),
    Mutant(
        "R62-old-log-kept",
        "a replica that is added again continues the log that it had before its removal",
        {
            "kafkalite.storage.log_store:is_earlier_replica": lambda stored_epoch, replica_epoch: False,
            # R69 would empty the log of a compacted topic after the restart, too.
            "kafkalite.replication.partition:Partition.must_start_over": (
                lambda self, filled_from, leader_id: False
            ),
        },
    ),
    Mutant(
        "R71-lost-deleted",
        "the end of a reassignment deletes a log with records that an unclean election has lost",
        {"kafkalite.broker.partitions.partitions:Partitions.is_better_log": lambda partition, state: False},
    ),
    Mutant(
        "R71-lost-later",
        "a removal that is replayed before an unclean election deletes the log",
        {"kafkalite.broker.partitions.partitions:Partitions.has_lost_since": lambda state, loss_epoch: False},
    ),
    Mutant(
        "R63-replay-deletes",
        "a broker that starts deletes a log when it replays an old removal of its replica",
        {
            "kafkalite.broker.partitions.partitions:Partitions.is_removed_for_good": (
                lambda self, local, image: True
            )
        },
    ),
    Mutant(
        "S22-unreadable",
        "a batch that no reader can unpack is appended",
        {"kafkalite.broker.handlers.produce:check_readable": _nothing},
    ),
    Mutant(
        "S23-repeated",
        "a request may name a partition any number of times",
        {"kafkalite.protocol.codec:_refuse_repeated": _nothing},
    ),
    Mutant(
        "S24-all-at-once",
        "all requests of a connection are served before those of others",
        {"kafkalite.broker.server.server:Server.wait_for_turn": _all_at_once},
    ),
    Mutant(
        "S25-wait-uncut",
        "a request may make the broker wait for as long as it likes",
        {"kafkalite.broker.server.responses:bounded_wait_ms": lambda wait_ms: wait_ms},
    ),
    Mutant(
        "S25-uncounted",
        "a request may name any number of groups, states or users",
        {"kafkalite.protocol.codec:_check_count": _nothing},
    ),
    Mutant(
        "R30-unknown-is-final",
        "an unknown outcome is reported as UNKNOWN_SERVER_ERROR",
        {"kafkalite.broker.server.responses:PendingResults._expire": _expire_as_final},
    ),
    Mutant(
        "R44-damaged-served",
        "a coordinator serves the state that the sound part of a damaged log gives",
        {"kafkalite.broker.coordination.loader:refuse_damaged": _no_damage},
    ),
    Mutant(
        "R21-marker-unregistered",
        "a session that never registered leaves a clean-shutdown marker",
        {"kafkalite.broker.broker:Broker.may_leave_marker": _yes},
    ),
    Mutant(
        "R22-stale-metadata",
        "a restarted broker acts on metadata older than its registration",
        {
            "kafkalite.broker.partitions.partitions:Partitions.may_take_roles": _yes,
            "kafkalite.broker.cluster.registration:Registration.replay": _at_once,
            "kafkalite.metadata.broker_commands:has_replayed_registration": _yes,
        },
    ),
    Mutant(
        "R23-isolated-serves",
        "a broker without a session serves clients",
        {"kafkalite.broker.partitions.partitions:Partitions.may_serve": _yes},
    ),
    Mutant(
        "R23-from-receipt",
        "a broker counts its session from the receipt of a response",
        {"kafkalite.broker.cluster.registration:Registration.extend_session": _extend_from_now},
    ),
    Mutant(
        "R23-unconfirmed",
        "a controller that has been replaced answers the heartbeats of its own broker",
        {"kafkalite.raft.controller_node:ControllerNode.confirm_leadership": _at_once},
    ),
    Mutant(
        "R31-unverified",
        "a leader appends a transaction's first batch before the coordinator has added the partition",
        {"kafkalite.broker.coordination.verification:Verifications.append": _append_unverified},
    ),
    Mutant(
        "R32-answer-early",
        "the response to the end of a transaction is sent before the decision is committed",
        {f"{_SHARD}.may_send": _may_send_an_end},
    ),
    Mutant(
        "R33-marker-uncommitted",
        "a marker is acknowledged before it is committed",
        {"kafkalite.broker.coordination.marker_writer:MarkerWriter.is_committed": _yes},
    ),
    Mutant(
        "R36-answer-uncommitted",
        "a coordinator responds before the records that the response rests on are committed",
        {f"{_SHARD}.may_send": _yes},
    ),
    Mutant(
        "R36-keep-serving",
        "a coordinator keeps serving after another one has taken over its partition",
        {"kafkalite.broker.coordination.coordinators:Coordinators.on_not_leading": _nothing},
    ),
    Mutant(
        "R36-serve-unloaded",
        "a coordinator serves before it has replayed its partition",
        {f"{_SHARD}.may_serve": _yes},
    ),
    Mutant(
        "R41-forgets-unheard",
        "a tombstone is removed while a replica is away that does not have it",
        {"kafkalite.broker.partitions.cleaner:Cleaner.may_forget": _yes},
    ),
)
