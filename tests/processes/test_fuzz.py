"""The generators of mutated requests and logins; ``make fuzz`` sends them to a real broker."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kafkalite.errors import ErrorCode
from kafkalite.protocol import connection
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.messages.metadata import ApiVersionsResponse
from kafkalite.security import sasl, scram
from kafkalite.testing import Cluster
from proof.processes.drawn_logins import FEW, MECHANISMS, PASSWORD, DrawnLogin, served
from proof.processes.drawn_requests import Generator, frame_of
from proof.processes.fuzz import Talk, bad_codes
from proof.token_issuer import AUDIENCE, ISSUER, Issuer

LOGINS = 200


def test_a_frame_that_a_mutation_has_emptied_can_be_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generator, "_mutate_bytes", lambda self, frame: b"")
    last = [Generator(random.Random(number), list(ApiKey)).script()[-1] for number in range(300)]
    assert b"" in last


def _response(body: list[Any]) -> bytes:
    envelope: bytes = msgpack.packb([7, 0, body])
    return struct.pack(">II", len(envelope), 0) + envelope


def test_only_responses_of_the_requested_api_are_judged() -> None:
    """A mutated frame may contain a request of another API with the same correlation id."""
    keys = {7: int(ApiKey.DELETE_ACLS)}
    for body, problems in (
        ([0, None, [[0, None, []]]], 0),
        ([0, None, [[-1, "a bug", []]]], 1),
        ([0, None, [["orders", 42, []]]], 0),
        ([12345, "unknown"], 1),
    ):
        assert len(bad_codes(_response(body), keys)[1]) == problems, body


def test_before_a_login_only_its_own_responses_and_refusals_are_right() -> None:
    refusal = [int(ErrorCode.ILLEGAL_SASL_STATE), "log in"]
    of_login = [[0, None, "kafkalite", "1", [[18, 0, 0]]], [0, None, ["PLAIN"]], [0, None, b"r=", 0]]
    assert len(of_login[0]) == len(ApiVersionsResponse._fields)
    assert served([refusal, *of_login]) == []
    for body in ([0, None], [0, None, [["orders", 0, 3, None, []]]], [0, None, 1], [0, None, "c", 1, [], []]):
        assert served([body]), body


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Issuer]]:
    issuer = Issuer()
    keys = tmp_path / "keys.json"
    keys.write_bytes(issuer.key_set)
    async with Cluster(
        transport="tcp",
        security_protocol="SASL_PLAINTEXT",
        connection_failed_authentication_delay_ms=1,
        sasl_enabled_mechanisms=",".join(MECHANISMS),
        sasl_allow_plain_without_tls=True,
        sasl_oauthbearer_jwks_endpoint_url=str(keys),
        sasl_oauthbearer_expected_issuer=ISSUER,
        sasl_oauthbearer_expected_audience=AUDIENCE,
    ) as cluster:
        await cluster.add_user(FEW, PASSWORD)
        yield cluster, issuer


async def play(cluster: Cluster, issuer: Issuer, count: int = LOGINS) -> list[str]:
    """Return what is wrong with ``count`` drawn logins, most of them mutants."""
    problems: list[str] = []
    host, _, port = cluster.broker.addresses[0].rpartition(":")
    for number in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        talk = Talk(reader, writer)
        talk.send(frame_of(ApiKey.API_VERSIONS, 0, ["fuzz", "1"]))
        await talk.response()
        async with asyncio.timeout(30):
            login = DrawnLogin(random.Random(number), issuer, is_mutant=number % 4 > 0)
            problems += await login.play(talk)
        writer.close()
    return problems


async def test_right_logins_succeed_and_wrong_ones_do_not(cluster: tuple[Cluster, Issuer]) -> None:
    """S7, S8: of all mechanisms, with steps and messages that the number of the login determines."""
    assert await play(*cluster) == []


@pytest.mark.parametrize("weakness", ["any proof", "no login", "no user"])
async def test_a_weakness_of_logins_is_found(
    cluster: tuple[Cluster, Issuer], weakness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weakness == "any proof":
        monkeypatch.setattr(scram.hmac, "compare_digest", lambda a, b: True)
    elif weakness == "no login":
        monkeypatch.setattr(sasl.Login, "problem", None)
        monkeypatch.setattr(connection, "LOGIN_APIS", frozenset(APIS))
    else:
        monkeypatch.setattr(sasl.Login, "advance", lambda self: setattr(self, "username", "anybody") or 0)
    assert any("was accepted" in problem for problem in await play(*cluster))
