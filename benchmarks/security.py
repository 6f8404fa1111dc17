"""What security costs: TLS against plain text, a storm of logins, slow peers, access control (S3 to S9)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import wire
from benchmarks.fairness import MIB, _produce
from benchmarks.harness import Row, paired, plain_row, rate_row, scratch_dir, server, time_row
from kafkalite import sync
from kafkalite.broker.server.client import Client
from kafkalite.broker.server.descriptors import raise_limit
from kafkalite.client.cluster.connection import connect
from kafkalite.client.cluster.login import Login
from kafkalite.client.config import admin_config
from kafkalite.client.consumer.consumer import Consumer
from kafkalite.client.producer.producer import Producer
from kafkalite.protocol.api import ApiKey
from kafkalite.protocol.messages import admin, data
from kafkalite.records.builder import build_batch
from kafkalite.security.acls import AclBinding, Authorizer, Operation, PatternType, Permission, ResourceType
from kafkalite.security.required import is_decided_by_item
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, make_dev_certificates
from proof.processes.slow_peers import SlowPeers

KB = 1000
LOGINS_PER_SECOND = 200
STORM_SECONDS = 10
SLOW_PEERS = 2_000
SLOW_PEERS_PER_SECOND = 400
HALF_SENT = 500
DRIPS = 25  # s: until the half-sent frames reach their deadline of 30 s
ACLS = 1_000
BATCHES = 700  # 70 MB
FETCHES = 600  # of 1 MiB each
RECORDS = 200_000  # of 1 KB each


def _topic(session: wire.Session, name: str) -> None:
    session.call(
        admin.CreateTopicsRequest(10_000, False, [admin.NewTopic(name, 1, 1, {"retention.ms": "-1"})])
    )


# --- TLS


def tls() -> list[Row]:
    with scratch_dir() as path:
        certificates = Path(path) / "certificates"
        make_dev_certificates(certificates, ["broker"], [], ["localhost", "127.0.0.1"])
        listeners = "--set", "listeners=127.0.0.1:0,SSL://127.0.0.1:0"
        keystore = "--set", f"ssl.keystore.location={certificates / 'broker.pem'}"
        context = ssl.create_default_context(cafile=certificates / CA_CERTIFICATE)
        with server("kafkalite", "--dir", f"{path}/data", *listeners, *keystore) as broker:
            plain, encrypted = wire.Session(broker.ports[0]), wire.Session(broker.ports[1], context)
            _topic(plain, "t")
            trust = {
                "security_protocol": "SSL",
                "ssl_truststore_location": str(certificates / CA_CERTIFICATE),
            }
            open_port, closed_port = broker.ports
            uvloop.run(_fill(open_port))
            rows = [
                _tls_row("ingest", lambda: _produced(plain), lambda: _produced(encrypted)),
                _tls_row(
                    "fetch by a consumer",
                    lambda: uvloop.run(_consumed(open_port, {})),
                    lambda: uvloop.run(_consumed(closed_port, trust)),
                    f"{RECORDS:,} records of 1 KB, async for; against plain text",
                ),
                _tls_row(
                    "fetch by a client that discards",
                    lambda: _fetched(plain),
                    lambda: _fetched(encrypted),
                    at_least=None,  # plain text is sent as fast as memory is copied, which no cipher is
                ),
            ]
            plain.close()
            encrypted.close()
            return rows


def _tls_row(
    name: str,
    plain: Callable[[], float],
    encrypted: Callable[[], float],
    workload: str = "one connection of a blocking client, 16 in flight, page-cache, acks=1; against plain text",
    *,
    at_least: float | None = 0.5,
) -> Row:
    plain(), encrypted()
    yardstick, value = paired(plain, encrypted, 5)
    name = f"{name} over TLS, 100 KB batches"
    if at_least is None:
        return Row(name, workload, value, "GB/s", yardstick, value / yardstick)
    return rate_row(name, workload, value, "GB/s", yardstick=yardstick, at_least=at_least)


async def _fill(port: int) -> None:
    """Write RECORDS records of 1 KB to the topic ``records``, in batches of 100 KB."""
    async with Producer(f"127.0.0.1:{port}", acks=1, batch_size=100 * KB) as producer:
        await producer.send_many("records", [os.urandom(KB)] * RECORDS, partition=0)


async def _consumed(port: int, settings: dict[str, Any]) -> float:
    """Return the GB per second of a consumer of the topic ``records``."""
    consumer = Consumer(
        "records", bootstrap_servers=f"localhost:{port}", auto_offset_reset="earliest", **settings
    )
    async with consumer:
        start, count = time.perf_counter(), 0
        async for _ in consumer:
            count += 1
            if count == RECORDS:
                break
        return RECORDS * KB / (time.perf_counter() - start) / 1e9


def _produced(session: wire.Session) -> float:
    """Return the GB per second of produce requests."""
    frame = _produce(session, "t", 100 * KB)
    seconds, _ = wire.pump(session.sock, [frame], BATCHES, 16, wire.skip_answer)
    return BATCHES * 100 * KB / seconds / 1e9


def _fetched(session: wire.Session) -> float:
    """Return the GB per second of fetches of 1 MiB, which have ten batches."""
    frames = [
        session.encode(data.FetchRequest(500, 1, 64 * MIB, 0, [data.FetchPartition("t", 0, -1, offset, MIB)]))
        for offset in range(0, 600, 10)
    ]
    seconds, received = wire.pump(session.sock, frames, FETCHES, 4, wire.skip_answer)
    return received / seconds / 1e9


# --- logins


def _storm(port: int, password: str, count: Any) -> None:
    """Log in LOGINS_PER_SECOND times a second, on a new connection each. Add the logins to ``count``."""
    config = admin_config(
        {"security.protocol": "SASL_PLAINTEXT", "sasl.username": "alice", "sasl.password": password}
    )
    login = Login(config)

    async def one() -> None:
        connection = await connect(f"127.0.0.1:{port}", client_id="storm", timeout_ms=30_000, login=login)
        connection.close()
        with count.get_lock():
            count.value += 1

    async def main() -> None:
        begun = time.monotonic()
        async with asyncio.TaskGroup() as logins:
            for number in range(LOGINS_PER_SECOND * STORM_SECONDS):
                await asyncio.sleep(max(0.0, begun + number / LOGINS_PER_SECOND - time.monotonic()))
                logins.create_task(one())

    asyncio.run(main())


def logins() -> list[Row]:
    password = "correct horse battery staple"
    listeners = "--set", "listeners=127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0"
    with scratch_dir() as path, server("kafkalite", "--dir", path, *listeners) as broker:
        with sync.Admin(f"127.0.0.1:{broker.port}") as users:
            users.set_user_password("alice", password)
        session = wire.Session(broker.port)
        _topic(session, "quiet")
        frame = _produce(session, "quiet", 1_000)
        before = wire.quiet_p99_ms(session, frame, lambda samples: samples >= 1_000)
        count = multiprocessing.Value("q", 0)
        storm = multiprocessing.Process(target=_storm, args=(broker.ports[1], password, count))
        cpu, begun = broker.cpu_seconds(), time.monotonic()
        storm.start()
        during = wire.quiet_p99_ms(session, frame, lambda _: not storm.is_alive())
        storm.join()
        rate = count.value / (time.monotonic() - begun)
        cpu_ms = (broker.cpu_seconds() - cpu) / count.value * 1e3
        alone = (before + wire.quiet_p99_ms(session, frame, lambda samples: samples >= 1_000)) / 2
        session.close()
    workload = (
        f"produce 1 KB, one in flight; {LOGINS_PER_SECOND} SCRAM-SHA-512 logins a second, {STORM_SECONDS} s"
    )
    return [
        time_row("quiet p99 during a storm of logins", workload, during, "ms", yardstick=alone, at_most=2),
        plain_row("logins served", workload, rate, "1/s"),
        plain_row("CPU of the broker for a login", "with its connection, and the quiet client", cpu_ms, "ms"),
    ]


# --- peers that do not finish what they begin


def _slow_peers(ports: list[int], cafile: str, are_open: Any) -> None:
    """Open SLOW_PEERS connections that send a byte a second, and then HALF_SENT frames at once."""

    async def main() -> None:
        tls = ssl.create_default_context(cafile=cafile)
        peers = SlowPeers([f"127.0.0.1:{port}" for port in ports], tls)
        await peers.open(SLOW_PEERS, per_second=SLOW_PEERS_PER_SECOND)
        are_open.set()
        await peers.drip(1.0)
        await peers.send_halves(HALF_SENT, 256 * 1024)
        for _ in range(DRIPS):
            await peers.drip(1.0)
        peers.close()

    asyncio.run(main())


def slow_peers() -> list[Row]:
    raise_limit()
    with scratch_dir() as path:
        certificates = Path(path) / "certificates"
        make_dev_certificates(certificates, ["broker"], [], ["localhost", "127.0.0.1"])
        listeners = "--set", "listeners=127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0"
        keystore = "--set", f"ssl.keystore.location={certificates / 'broker.pem'}"
        budget = "--set", f"queued.max.request.bytes={64 * MIB}"
        with server("kafkalite", "--dir", f"{path}/data", *listeners, *keystore, *budget) as broker:
            session = wire.Session(broker.port)
            _topic(session, "quiet")
            frame = _produce(session, "quiet", 1_000)
            before = wire.quiet_p99_ms(session, frame, lambda samples: samples >= 1_000)
            are_open = multiprocessing.Event()
            arguments = broker.ports, str(certificates / CA_CERTIFICATE), are_open
            peers = multiprocessing.Process(target=_slow_peers, args=arguments)
            resident_mib, most_mib = broker.resident_mib(), 0.0

            def is_over(samples: int) -> bool:
                nonlocal most_mib
                if samples % 20 == 0:
                    most_mib = max(most_mib, broker.resident_mib())
                return not peers.is_alive()

            peers.start()
            opening = wire.quiet_p99_ms(session, frame, lambda _: are_open.is_set() or is_over(0))
            during = wire.quiet_p99_ms(session, frame, is_over)
            peers.join()
            assert peers.exitcode == 0, "the slow peers failed"
            alone = (before + wire.quiet_p99_ms(session, frame, lambda samples: samples >= 1_000)) / 2
            session.close()
    workload = (
        f"produce 1 KB, one in flight; {SLOW_PEERS:,} connections that send a byte a second, before the login and"
        f" over TLS, too; {HALF_SENT} half-sent frames of 100 MB"
    )
    return [
        time_row("quiet p99 with slow peers", workload, during, "ms", yardstick=alone, at_most=2),
        plain_row("quiet p99 while they connect", f"{SLOW_PEERS_PER_SECOND} a second", opening, "ms"),
        plain_row(
            "memory of the broker for slow peers",
            "at most, with queued.max.request.bytes of 64 MiB",
            most_mib - resident_mib,
            "MiB",
        ),
    ]


# --- access control


def authorization() -> list[Row]:
    rules = [
        AclBinding(
            ResourceType.TOPIC,
            PatternType.PREFIXED if number % 2 else PatternType.LITERAL,
            f"topic-{number}",
            f"User:user-{number % 50}",
            "*",
            Operation.WRITE,
            Permission.ALLOW,
        )
        for number in range(ACLS)
    ]
    client = Client("10.0.0.7:1", "localhost:9092", principal="User:user-40", authorizer=Authorizer(rules))
    batch = build_batch([bytes(920)], timestamps_ms=1)
    message = data.ProduceRequest(1, 10_000, None, [data.ProducePartition("topic-40", 0, len(batch))])
    count, produce = 10_000, ApiKey.PRODUCE

    def decide() -> float:
        begun = time.process_time()
        for _ in range(count):
            assert is_decided_by_item(produce, message)
            assert not client.refusals(produce, Operation.WRITE, ["topic-40"])
        return (time.process_time() - begun) / count * 1e6

    with scratch_dir() as path, server("kafkalite", "--dir", path) as broker:
        session = wire.Session(broker.port)
        _topic(session, "topic-40")
        frame = _produce(session, "topic-40", 1_000)

        def serve() -> float:
            begun = broker.cpu_seconds()
            wire.pump(session.sock, [frame], count, 16, wire.skip_answer)
            return (broker.cpu_seconds() - begun) / count * 1e6

        serve(), decide()
        request_us, decision_us = paired(serve, decide)
        session.close()
    workload = (
        f"{ACLS:,} rules of 50 users, half of them prefixed; produce of 1 KB; against the CPU of the request"
    )
    return [
        time_row(
            "authorization of a produce request",
            workload,
            decision_us,
            "µs",
            yardstick=request_us,
            at_most=0.03,
        )
    ]


def run() -> list[Row]:
    return [*tls(), *logins(), *slow_peers(), *authorization()]
