"""kl bench measures an embedded broker and a given one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Kl = Callable[..., Any]


@pytest.mark.parametrize("what", ["produce", "consume", "e2e"])
def test_an_embedded_broker_is_the_default(kl: Kl, what: str) -> None:
    in_bulk = () if what == "e2e" else ("--send", "50")
    result = kl("bench", what, "-n", "200", *in_bulk, "-o", "json")
    assert result.code == 0, result.told
    report = json.loads(result.out)
    assert (report["benchmark"], report["records"]) == (what, 200)
    assert report["records_per_send"] == (50 if in_bulk else 1)
    assert report["broker"].startswith("embedded")
    assert report["records_per_second"] > 0
    if what != "consume":
        latency = report["latency_ms"]
        assert latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]


def test_a_named_broker_keeps_no_topic(at: Kl, servers: str) -> None:
    result = at(
        "bench",
        "produce",
        "-n",
        "100",
        "--send",
        "1",
        "-z",
        "lz4",
        "--acks",
        "1",
        "--durability",
        "page-cache",
    )
    assert result.code == 0, result.told
    assert f"broker              {servers}" in result.text
    assert "kl-bench" not in at("topic", "list", "-o", "name").text
