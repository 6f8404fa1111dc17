"""A broker's membership: it registers, is fenced when silent, hands over when it goes, says why it waits."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import nullcontext
from typing import Any

import pytest

from kafkalite import Admin
from kafkalite.broker.broker import Broker
from kafkalite.broker.cluster import registration
from kafkalite.broker.server.responses import Pending
from kafkalite.client.cluster.authentication import Authenticator
from kafkalite.client.cluster.setbacks import SILENT_MS
from kafkalite.errors import (
    BrokerError,
    ClusterAuthorizationFailedError,
    ConnectionFailedError,
    DataDirectoryError,
    ErrorCode,
    InvalidRequestError,
    KafkaliteError,
    LogOfflineError,
    StaleBrokerEpochError,
)
from kafkalite.metadata.features import SUPPORTED
from kafkalite.model import NO_BROKER_EPOCH
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.connection import Request
from kafkalite.protocol.messages import admin, metadata
from kafkalite.protocol.messages import cluster as messages
from kafkalite.storage.log_store import LogStore
from kafkalite.storage.memory_filesystem import MemoryFileSystem
from kafkalite.testing import Cluster, WireClient, drop_next
from kafkalite.testing.virtual_clock import VirtualClock
from proof.mutants import without
from proof.waiting import eventually, settle

ON_BOTH_LOOPS = True

SECRET = "a secret of this test cluster"


def settings_of(node_id: int, voters: str, **more: Any) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "cluster_id": "alone",
        "cluster_secret": SECRET,
        "controller_quorum_voters": voters,
        "listeners": f"inproc://membership-{node_id}",
        "log_dirs": "/data",
        **more,
    }


class TestStarting:
    async def test_a_node_that_finds_no_majority_says_so_and_can_be_given_up(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kafkalite.broker.cluster.registration.REGISTER_TIMEOUT_MS", 50)
        voters = "1@inproc://lonely-1,2@inproc://lonely-2,3@inproc://lonely-3"
        broker = Broker(filesystem=MemoryFileSystem(), **settings_of(1, voters))
        starting = asyncio.ensure_future(broker.start())
        with caplog.at_level(logging.WARNING):
            await eventually(lambda: "waiting for a controller" in caplog.text)
        assert "no controller is known" in caplog.text
        assert not starting.done()
        with pytest.raises(ConnectionFailedError) as refused:
            async with Admin("inproc://membership-1", default_api_timeout_ms=100):
                pass
        assert "broker 1 is starting, and no controller has accepted it yet" in refused.value.message
        assert f"a majority of {voters} must run" in refused.value.message
        assert refused.value.hint == "a broker runs there; its log says more"
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert "failed" in repr(broker)

    async def test_a_node_that_waits_says_why_before_its_first_attempt_to_register_fails(self) -> None:
        voters = "1@inproc://lonely-1,2@inproc://lonely-2,3@inproc://lonely-3"
        clock = VirtualClock()
        broker = Broker(filesystem=MemoryFileSystem(), clock=clock, **settings_of(1, voters))
        starting = asyncio.ensure_future(broker.start())
        await settle()
        await clock.advance(registration.EXPLAIN_AFTER_MS)
        with pytest.raises(ConnectionFailedError) as refused:
            async with Admin("inproc://membership-1", default_api_timeout_ms=100):
                pass
        assert "no controller has accepted it yet: no controller has responded; " in refused.value.message
        assert min(SILENT_MS, registration.REGISTER_TIMEOUT_MS) > registration.EXPLAIN_AFTER_MS
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    async def test_a_first_start_without_all_voters_names_the_missing_ones(self) -> None:
        """A majority runs, but only all voters together may found a cluster (R17)."""
        voters = ",".join(f"{node_id}@inproc://first-{node_id}" for node_id in (1, 2, 3))
        brokers = [
            Broker(filesystem=MemoryFileSystem(), **settings_of(node_id, voters)) for node_id in (1, 2)
        ]
        starting = [asyncio.ensure_future(broker.start()) for broker in brokers]
        expected = "no controller has accepted it yet; first start: all voters must run; missing: 3"
        messages = []
        async with asyncio.timeout(60):
            while not any(expected in message for message in messages):
                with pytest.raises(ConnectionFailedError) as refused:
                    async with Admin("inproc://membership-1", default_api_timeout_ms=100):
                        pass
                messages.append(refused.value.message)
        assert "a majority" not in messages[-1]
        for each in starting:
            each.cancel()
        await asyncio.wait(starting)

    async def test_a_broker_that_finds_no_voter_can_be_given_up(self) -> None:
        broker = Broker(
            filesystem=MemoryFileSystem(), **settings_of(4, "1@inproc://absent-1", process_roles="broker")
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await broker.start()

    async def test_what_fails_while_it_waits_ends_the_wait(self) -> None:
        voters = "1@inproc://broken-1,2@inproc://broken-2"
        broker = Broker(filesystem=MemoryFileSystem(), **settings_of(1, voters))
        starting = asyncio.ensure_future(broker.start())
        await settle()
        broker.fail(LogOfflineError("by the test"))
        with pytest.raises(LogOfflineError, match="by the test"):
            await asyncio.wait_for(starting, 30)

    async def test_a_new_cluster_waits_for_all_its_voters_an_old_one_for_a_majority(self) -> None:
        cluster = Cluster(brokers=3)
        first = asyncio.ensure_future(cluster.start(1, 2))
        await asyncio.sleep(0.3)  # several election timeouts
        assert not first.done(), "voters without a log can't know what a third one has seen"
        await asyncio.wait_for(cluster.start(3), 60)
        await first
        await cluster.stop()
        await asyncio.wait_for(cluster.start(2, 3), 60)
        await cluster.close()

    async def test_a_lost_metadata_log_is_refused_until_the_node_may_rejoin(self) -> None:
        async with Cluster(brokers=3, storage="disk") as cluster:
            await cluster.create_topic("t")
            await cluster.stop(2)
            assert cluster._directory is not None
            directory = f"{cluster._directory.name}/node-2/__cluster_metadata"
            for name in os.listdir(directory):
                os.remove(f"{directory}/{name}")
            with pytest.raises(DataDirectoryError, match="--rejoin"):
                await cluster.start(2)
            cluster.nodes[2].settings["controller_quorum_rejoin"] = True
            await cluster.start(2)
            broker = cluster.brokers[2]
            await cluster.wait_until(lambda: "t" in broker.image.topics)

    async def test_other_voters_are_refused(self) -> None:
        cluster = Cluster(brokers=2)
        async with cluster:
            await cluster.stop(2)
            known = cluster.nodes[2].settings["controller_quorum_voters"]
            cluster.nodes[2].settings["controller_quorum_voters"] = f"{known},9@inproc://nine"
            with pytest.raises(DataDirectoryError, match="has the voters 1,2"):
                await cluster.start(2)


class TestLiving:
    async def test_a_killed_broker_is_fenced_long_before_its_session_ends(self) -> None:
        async with Cluster(brokers=3, broker_session_timeout_ms=600_000) as cluster:
            controller = cluster.controller_id
            victim = next(node_id for node_id in cluster.nodes if node_id != controller)
            assert controller is not None
            seen = cluster.brokers[controller]
            await cluster.kill(victim)
            await cluster.wait_until(lambda: seen.image.brokers[victim].is_fenced)
            async with WireClient(seen.address) as wire:
                alive = (await wire.call(metadata.MetadataRequest([], False))).brokers
                assert victim not in [broker.node_id for broker in alive]
                described = await wire.call(metadata.DescribeClusterRequest())
                assert {b.node_id: b.is_fenced for b in described.brokers}[victim]
            epoch = seen.image.brokers[victim].broker_epoch
            await cluster.start(victim)
            assert seen.image.brokers[victim].broker_epoch > epoch

    async def test_a_silent_broker_is_fenced_knows_it_and_comes_back(self) -> None:
        async with Cluster(brokers=3) as cluster:
            await cluster.create_topic("t", partitions=3)
            controller = cluster.controller_id
            victim = next(node_id for node_id in cluster.nodes if node_id != controller)
            broker = cluster.brokers[victim]
            epoch = broker.image.brokers[victim].broker_epoch
            silenced = [ApiKey.BROKER_HEARTBEAT]
            for api in silenced:
                cluster.intercept(api, drop_next(1_000_000), node_id=controller)
            # Of the two that heartbeat over the wire both go silent; the controller's own stays.
            await cluster.wait_until(lambda: not broker.partitions.may_serve())
            await cluster.wait_until(lambda: cluster.leader("t", 0) == controller)
            for api in silenced:
                cluster.intercept(api, None, node_id=controller)
            await cluster.wait_until(broker.partitions.may_serve)
            await cluster.wait_until(lambda: broker.image.live_brokers() == {1, 2, 3})
            assert broker.image.brokers[victim].broker_epoch == epoch, "the same process, the same epoch"

    async def test_a_process_whose_node_id_another_one_took_ends(self) -> None:
        async with Cluster(brokers=3) as cluster:
            controller = cluster.controller_id
            assert controller is not None
            victim = next(node_id for node_id in cluster.nodes if node_id != controller)
            node = cluster.nodes[victim]
            zombie = cluster.brokers[victim]
            for api in (ApiKey.BROKER_HEARTBEAT,):  # as if it had been paused for longer than its session
                cluster.intercept(api, drop_next(1_000_000), node_id=controller)
            seen = cluster.brokers[controller]
            await cluster.wait_until(lambda: seen.image.brokers[victim].is_fenced)
            own = Authenticator(
                node.settings["cluster_secret"], node.settings["cluster_id"], victim, os.urandom
            )
            voters = dict(v.split("@") for v in node.settings["controller_quorum_voters"].split(","))
            connection = await own.dial(voters[str(controller)], controller, client_id="t", timeout_ms=5_000)
            request = messages.RegisterBrokerRequestV1(
                victim,
                "f" * 32,
                "e" * 32,
                ["inproc://other"],
                None,
                NO_BROKER_EPOCH,
                True,
                [],
                0,
                list(SUPPORTED),
            )
            answer = await connection.call(request, timeout_ms=5_000)
            assert answer.message.broker_epoch > zombie._services.node.broker_epoch
            connection.close()
            cluster.intercept(ApiKey.BROKER_HEARTBEAT, None, node_id=controller)
            with pytest.raises(StaleBrokerEpochError):
                await asyncio.wait_for(zombie.wait_stopped(), 60)

    async def test_a_registration_asked_for_twice_is_one(self) -> None:
        async with Cluster(brokers=2, controllers=1) as cluster:
            broker = cluster.brokers[1]
            services = broker._services
            own = broker.image.brokers[1]
            request = messages.RegisterBrokerRequestV1(
                1,
                services.node.incarnation_id,
                own.directory_id,
                list(own.addresses),
                None,
                -1,
                True,
                [],
                1,
                list(SUPPORTED),
            )
            answer = await services.channel.send(request, 5_000)
            assert answer.broker_epoch == services.node.broker_epoch

    async def test_a_restarted_broker_takes_no_role_before_it_has_replayed_its_registration(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """R22: by what it knew before, it leads the partition; by what holds, it may not."""
        started: list[Broker] = []
        start = Broker.start

        async def remember(broker: Broker) -> None:
            started.append(broker)
            await start(broker)

        monkeypatch.setattr(Broker, "start", remember)
        async with Cluster(brokers=2, controllers=1) as cluster:
            await cluster.create_topic("t", partitions=2, replication_factor=1)
            led = next(n for n in (0, 1) if cluster.leader("t", n) == 1)
            await cluster.kill(1)
            answers_left = 1

            def hold_back(request: Request, _proceed: Any, _clock: Any) -> Pending | None:
                nonlocal answers_left
                if request.client_id != "metadata-1":
                    return None
                answers_left -= 1
                return None if answers_left >= 0 else Pending()

            cluster.intercept(ApiKey.FETCH_METADATA, hold_back, node_id=101)
            starting = asyncio.ensure_future(cluster.start(1))
            controller = cluster.nodes[101].broker
            assert controller is not None
            former = controller.image.brokers[1].broker_epoch
            await cluster.wait_until(lambda: controller.image.brokers[1].broker_epoch > former)
            broker = started[-1]
            await asyncio.sleep(0.25)  # two heartbeats, at which it could catch up
            assert "t" in broker.image.topics
            assert broker.image.brokers[1].broker_epoch == former, "its metadata is held back"
            assert not starting.done()
            with pytest.raises(BrokerError):
                broker.partitions.leader("t", led)
            cluster.intercept(ApiKey.FETCH_METADATA, None, node_id=101)
            await asyncio.wait_for(starting, 60)
            await cluster.wait_until(lambda: cluster.leader("t", led) == 1)

    async def test_a_node_whose_metadata_log_fails_ends_and_the_others_go_on(self) -> None:
        async with Cluster(brokers=3) as cluster:
            await cluster.create_topic("t", configs={"min.insync.replicas": "2"})
            victim = cluster.controller_id
            assert victim is not None
            node = cluster.nodes[victim]
            assert isinstance(node.filesystem, MemoryFileSystem)
            assert node.broker is not None
            node.filesystem.fail_next_sync()
            rest = next(broker for n, broker in cluster.brokers.items() if n != victim)
            async with WireClient(rest.address) as wire:
                for name in ("u", "v", "w"):
                    topic = admin.NewTopic(name, 1, 2, {})
                    request = admin.CreateTopicsRequest(10_000, False, [topic])
                    while (await wire.call(request)).error_code == ErrorCode.REQUEST_TIMED_OUT:
                        pass  # the outcome is not known, so it is asked again
            with pytest.raises(KafkaliteError):
                await asyncio.wait_for(node.broker.wait_stopped(), 60)
            await cluster.wait_until(lambda: cluster.controller_id not in {None, victim})
            await cluster.wait_until(lambda: "w" in rest.image.topics)
            await cluster.wait_until(lambda: cluster.leader("t") not in {-1, victim})
            await cluster.produce("t", [b"1"])
            await cluster.start(victim)


class TestGoing:
    async def test_what_it_led_is_led_by_others_before_it_is_gone(self) -> None:
        async with Cluster(brokers=3) as cluster:
            await cluster.create_topic("t", partitions=6)
            controller = cluster.controller_id
            assert controller is not None
            for victim in (next(n for n in cluster.nodes if n != controller), controller):
                rest = next(broker for n, broker in cluster.brokers.items() if n != victim)
                async with cluster.producer() as producer:
                    await producer.send_many("t", [b"x"] * 60)
                    await producer.flush()
                stopping = cluster.brokers[victim]
                leaders_at_end: list[int] = []
                close_server = stopping._close_server

                async def look(
                    close: Any = close_server, seen: Any = rest, leaders: list[int] = leaders_at_end
                ) -> None:
                    leaders.extend(p.leader for p in seen.image.topics["t"].partitions)
                    await close()

                stopping._started = [
                    (name, look if name == "server" else undo) for name, undo in stopping._started
                ]
                await cluster.stop(victim)
                assert len(leaders_at_end) == 6
                assert victim not in leaders_at_end
                await cluster.start(victim)

                def is_whole(seen: Broker = rest) -> bool:
                    return all(len(p.isr) == 3 for p in seen.image.topics["t"].partitions)

                await cluster.wait_until(is_whole)

    async def test_an_operator_may_ask_any_broker_to_stop_any(self) -> None:
        async with Cluster(brokers=3) as cluster:
            operators = Authenticator(cluster.secret, cluster.nodes[1].settings["cluster_id"], -2, os.urandom)
            wire = await operators.dial(cluster.brokers[1].address, 1, client_id="operator", timeout_ms=5_000)
            answer = (await wire.call(admin.ControlledShutdownRequest(2), timeout_ms=10_000)).message
            assert answer.node_id == 2
            await asyncio.wait_for(cluster.brokers[2].wait_stopped(), 60)
            with pytest.raises(InvalidRequestError):
                await wire.call(admin.ControlledShutdownRequest(9), timeout_ms=10_000)
            wire.close()
            wire = await operators.dial(cluster.brokers[3].address, 3, client_id="operator", timeout_ms=5_000)
            await wire.call(admin.ControlledShutdownRequest(3), timeout_ms=10_000)
            await asyncio.wait_for(cluster.brokers[3].wait_stopped(), 60)
            wire.close()

    async def test_s10_without_the_secret_no_broker_stops_and_no_election_is_unclean(self) -> None:
        async with Cluster(brokers=3) as cluster:
            election = admin.ElectLeadersRequest(1_000, True, [admin.ElectionPartition("t", 0)])
            for node_id in (1, 2, 3):
                async with WireClient(cluster.brokers[node_id].address) as wire:
                    for request in (admin.ControlledShutdownRequest(2), election):
                        refused = await wire.call(request)
                        assert refused.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
                    preferred = await wire.call(admin.ElectLeadersRequest(5_000, False, None))
                    assert preferred.error_code == ErrorCode.NONE
            assert all(broker.image is not None for broker in cluster.brokers.values())

    async def test_s10_a_single_node_is_stopped_only_with_its_own_secret(self) -> None:
        request = admin.ControlledShutdownRequest(1)
        async with Cluster() as cluster, WireClient(cluster.brokers[1].address) as wire:
            assert (await wire.call(request)).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        async with Cluster(cluster_secret=SECRET) as cluster, cluster.admin() as client:
            with pytest.raises(ClusterAuthorizationFailedError):
                await client.controlled_shutdown(1, cluster_secret="another one of sixteen")
            await client.controlled_shutdown(1, cluster_secret=SECRET)
            await asyncio.wait_for(cluster.brokers[1].wait_stopped(), 60)

    async def test_without_a_majority_a_broker_goes_all_the_same(self) -> None:
        async with Cluster(brokers=3) as cluster:
            await cluster.kill(2, 3)
            await asyncio.wait_for(cluster.stop(1), 60)


class TestCleanMarker:
    """R21: only a session that was registered leaves the marker of a clean stop, with its broker epoch."""

    @staticmethod
    def _marker(filesystem: Any, path: str) -> tuple[bool, int]:
        store = LogStore.open(filesystem, path, node_id=1)
        try:
            return store.clean_start, store.last_broker_epoch
        finally:
            store.close(clean=False)

    async def test_a_stop_in_order_leaves_the_epoch_of_the_session(self) -> None:
        async with Cluster(brokers=2) as cluster:
            epoch = cluster.brokers[1].image.brokers[1].broker_epoch
            await cluster.stop(1)
            assert self._marker(cluster.nodes[1].filesystem, "/cluster/node-1") == (True, epoch)

    async def test_a_kill_leaves_nothing(self) -> None:
        async with Cluster(brokers=2) as cluster:
            await cluster.kill(1)
            assert self._marker(cluster.nodes[1].filesystem, "/cluster/node-1") == (False, -1)

    @pytest.mark.parametrize("mutant", [None, "R21-marker-unregistered"])
    async def test_a_session_that_never_registered_leaves_nothing(self, mutant: str | None) -> None:
        """It started after a crash, found no controller, and was stopped: what it holds is still unclean."""
        disk = MemoryFileSystem()
        broker = Broker(filesystem=disk, **settings_of(1, "1@inproc://r21-1,2@inproc://r21-2"))
        with without(mutant) if mutant is not None else nullcontext():
            broker._state = "starting"
            await broker._open_storage()
            await broker._load_metadata()
            await broker._unwind(is_clean=True)
        is_clean, _ = self._marker(disk, "/data")
        assert is_clean == (mutant is not None)
