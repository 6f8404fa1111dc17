"""The first start of a cluster needs all voters, and says which ones it waits for."""

from __future__ import annotations

import asyncio

import pytest

from kafkalite.raft import node
from kafkalite.testing import Cluster


async def test_the_first_start_names_the_voters_that_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_ABSTAINS_QUIETLY_S", 0.05)
    cluster = Cluster(brokers=3)
    starting = asyncio.ensure_future(cluster.start(1))
    try:
        async with asyncio.timeout(60):
            while "controller does not vote yet" not in caplog.text:
                await asyncio.sleep(0.02)
        assert "the first start needs all voters" in caplog.text
        assert "not_reached=[2, 3]" in caplog.text, caplog.text
        assert not starting.done()
        await cluster.start(2, 3)
        async with asyncio.timeout(60):
            await starting
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        await cluster.close()
