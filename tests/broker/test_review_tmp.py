import asyncio
from typing import Any
from kafkalite.errors import CorruptLogError
from kafkalite.metadata.controller import LoseReplicas
from kafkalite.protocol.messages.cluster import DamagedReplica
from tests.broker.test_replication import *  # noqa


async def test_replaced_stale_progress() -> None:
    async with running() as net:
        await net.create()
        for number in range(5):
            await produce(net.leader(), b"%d" % number)
        leader = net.leader()
        await until(lambda: leader.hosted().partition.follower_lags(0) and all(l.synced_end_offset == 5 for l in leader.hosted().partition.follower_lags(0).values()))
        victim = net.followers()[0]
        # damage found while running (a read), in the same life
        victim.hosted().log._read_failed(CorruptLogError(path="x", position=0, expected="a", actual="b"))
        victim.is_cut = True   # only from the other brokers
        await net.controller.submit(LoseReplicas(victim.node_id, victim.services.broker_epoch, (DamagedReplica(net.controller.image.topics["t"].topic_id, 0),)))
        print("isr after loss", net.state().isr, "victim log", victim.hosted().log, "damaged", victim.partitions.damaged())
        leader.manager._isr.look_around()
        await asyncio.sleep(0.3)
        print("isr", net.state().isr, victim.hosted().log)
        assert victim.node_id not in net.state().isr
