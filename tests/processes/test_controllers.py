"""Separate controllers: kl shows the quorum through any broker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kafkalite.testing import ProcessCluster

pytestmark = pytest.mark.slow


class Said(NamedTuple):
    code: int
    out: str


async def kl(*arguments: str, **environment: str) -> Said:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kafkalite",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | environment,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return Said(process.returncode or 0, out.decode())


async def test_any_broker_shows_the_quorum_and_its_lost_members(tmp_path: Path) -> None:
    async with ProcessCluster(tmp_path, brokers=2, controllers=3) as cluster:
        at = {"KL_BOOTSTRAP_SERVERS": cluster.bootstrap_servers}
        assert (await kl("cluster", "status", "--check", **at)).code == 0
        quorum = json.loads((await kl("metadata", "quorum", "--check", "-o", "json", **at)).out)
        assert [node["node_id"] for node in quorum["nodes"]] == [101, 102, 103]
        leader = quorum["leader_id"]
        controller = await kl("cluster", "controller", "-o", "name", **at)
        assert controller == Said(0, f"{leader}\n")

        lost, left = (node_id for node_id in (101, 102, 103) if node_id != leader)
        of_controller = {
            "KAFKALITE_NODE_ID": str(left),
            "KAFKALITE_PROCESS_ROLES": "controller",
            "KAFKALITE_CONTROLLER_QUORUM_VOTERS": cluster.nodes[left].settings["controller.quorum.voters"],
            "KAFKALITE_CLUSTER_ID": "processes",
            "KAFKALITE_CLUSTER_SECRET": "not-needed-to-shake-hands",
        }
        health = ("cluster", "wait", "--this-node", "--quiet", "--timeout", "3s")
        assert (await kl(*health, **of_controller)).code == 0

        await cluster.kill(lost)
        async with asyncio.timeout(20):
            while (await kl("cluster", "status", "--check", **at)).code != 9:
                pass
        assert f"controller {lost} is silent" in (await kl("cluster", "describe", **at)).out
        assert (await kl("metadata", "quorum", "--check", **at)).code == 9

        await cluster.kill(left)
        async with asyncio.timeout(20):
            while (await kl("cluster", "controller", **at)).code != 4:
                pass
        assert (await kl(*health, **of_controller)).code == 7
        status = await kl("cluster", "status", **at)
        assert status.code == 0
        assert "no controller" in status.out
