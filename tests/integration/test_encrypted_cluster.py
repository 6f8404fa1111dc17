"""A cluster whose clients, brokers and controllers connect over TLS, and prove who they are (S6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from kafkalite.broker.broker import Broker
from kafkalite.errors import ConnectionFailedError, SslAuthenticationError
from kafkalite.testing import Cluster
from kafkalite.transport.dev_certificates import CA_CERTIFICATE
from proof.certificates import DevCertificates
from proof.waiting import eventually

ON_BOTH_LOOPS = True


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
async def test_replication_groups_and_failover_over_mutual_tls(transport: Literal["inproc", "tcp"]) -> None:
    async with Cluster(
        brokers=3, transport=transport, security_protocol="SSL", ssl_client_auth="required"
    ) as cluster:
        await cluster.create_topic("orders", partitions=3, replication_factor=3)
        await cluster.produce("orders", [b"%d" % number for number in range(300)])
        assert len(await cluster.records("orders")) == 300
        registered = next(iter(cluster.brokers.values())).image.brokers.values()
        assert all(address.startswith("SSL://") for broker in registered for address in broker.addresses)
        leader = cluster.leader("orders", 0)
        await cluster.kill(leader)
        await cluster.produce("orders", [b"after"], partition=0)
        await cluster.start(leader)
        await eventually(lambda: cluster.brokers[leader].is_running)
        assert len(await cluster.records("orders")) == 301


async def test_controllers_of_their_own() -> None:
    async with Cluster(brokers=2, controllers=1, transport="tcp", security_protocol="SSL") as cluster:
        await cluster.create_topic("orders", replication_factor=2)
        await cluster.produce("orders", [b"x"])
        assert [record.value for record in await cluster.records("orders")] == [b"x"]


async def test_no_connection_of_an_encrypted_cluster_is_in_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every stream that a node opens or accepts begins with a TLS record."""
    from kafkalite.transport import inproc

    begun: list[bytes] = []
    fill = inproc.InprocEnd._receive

    def watch(end: Any, data: memoryview) -> None:
        if end not in seen:
            seen[end] = None
            begun.append(bytes(data[:1]))
        fill(end, data)

    seen: dict[Any, None] = {}
    monkeypatch.setattr(inproc.InprocEnd, "_receive", watch)
    async with Cluster(brokers=3, security_protocol="SSL") as cluster:
        await cluster.create_topic("orders", replication_factor=3)
        await cluster.produce("orders", [b"x"])
    assert len(begun) > 12
    assert set(begun) <= {b"\x16", b""}, "a handshake, or the end of a stream that was never used"


async def test_an_authority_is_replaced_one_step_at_a_time(tmp_path: Path) -> None:
    """Trust both, use certificates of the new one, trust only the new one. A node that starts again after
    each step connects to all others, which have read the new files without a restart."""
    async with Cluster(brokers=3, security_protocol="SSL", ssl_client_auth="required") as cluster:
        await cluster.create_topic("orders", replication_factor=3)
        assert cluster._certificates is not None
        here = Path(cluster._certificates.name)
        old_ca, old_client = (here / CA_CERTIFICATE).read_bytes(), (here / "client.pem").read_bytes()
        new = DevCertificates(tmp_path)
        new_ca = (new / CA_CERTIFICATE).read_bytes()
        steps = [
            {CA_CERTIFICATE: old_ca + new_ca},
            {name: (new / name).read_bytes() for name in ("broker.pem", "client.pem")},
            {CA_CERTIFICATE: new_ca},
        ]
        for node_id, files in enumerate(steps, start=1):
            for name, content in files.items():
                (here / f"{name}.new").write_bytes(content)
                (here / f"{name}.new").rename(here / name)
            await cluster.kill(node_id)
            await cluster.start(node_id)
            await cluster.produce("orders", [b"x"])
            await eventually(lambda: all(is_whole(broker) for broker in cluster.brokers.values()))
        assert len(await cluster.records("orders")) == 3
        (here / "old.pem").write_bytes(old_client)
        with pytest.raises(SslAuthenticationError, match="does not trust the issuer"):
            async with cluster.admin(ssl_keystore_location=str(here / "old.pem")):
                pass


def is_whole(broker: Broker) -> bool:
    state = broker.image.partition("orders", 0)
    return state is not None and len(state.isr) == 3


async def test_a_client_in_plain_text_is_refused() -> None:
    async with Cluster(security_protocol="SSL", transport="tcp") as cluster:
        with pytest.raises(ConnectionFailedError, match="the peer speaks TLS"):
            async with cluster.admin(security_protocol="PLAINTEXT"):
                pass
