"""The main job, on the real access log and without a file; its counts against a plain script's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalite.cli.donuts import COUNTRIES, purchases
from kafkalite.cli.quickstart import Tally, _Job
from kafkalite.rng import seeded_rng

Kl = Callable[..., Any]


def test_access_log(kl: Kl, access_log: Path) -> None:
    result = kl("quickstart", access_log, "--no-spark", "-o", "json")
    assert result.code == 0, result.told
    report = json.loads(result.out)

    lines = access_log.read_text("utf-8", "replace").splitlines()
    statuses = Counter(line.split('" ')[1].split()[0] for line in lines)
    clients = {line.split()[0] for line in lines}
    assert (report["records_in"], report["records_out"]) == (len(lines), len(lines)) == (10_000, 10_000)
    assert report["count_by_status"] == dict(statuses)
    assert report["unparseable"] == 0
    assert report["keys"] == len(clients)
    assert report["in_equals_out"] is True
    assert sum(report["records_per_partition"].values()) == len(lines)
    assert all(report["records_per_partition"].values())


def test_tables_for_people(kl: Kl, tmp_path: Path) -> None:
    log = tmp_path / "a log"
    line = '1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET /a\\"b HTTP/1.1" {} 10 "-" "x"\n'
    log.write_text(line.format(200) * 3 + line.format(404) + "\nsomething else")
    result = kl("quickstart", log, "--no-spark")
    assert result.code == 0, result.told
    rows = [line.replace("│", " ").split() for line in result.text.splitlines()]
    assert ["200", "3", "75.0%"] in [row[:3] for row in rows]
    assert ["404", "1", "25.0%"] in [row[:3] for row in rows]
    assert "lines of another shape: 2" in result.text
    assert "6 records in, 6 out" in result.text
    assert f"produce access-log '{log}'" in result.text


def test_a_file_of_another_kind(kl: Kl, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("alpha beta\ngamma\n")
    result = kl("quickstart", tmp_path / "words", "--no-spark")
    assert result.code == 0
    assert "No line looks like an access log's" in result.text


def test_donuts(kl: Kl) -> None:
    first, second = (
        json.loads(kl("quickstart", "--no-spark", "--records", "500", "-o", "json").out) for _ in range(2)
    )
    assert first["count_by_country"] == second["count_by_country"]
    assert sum(first["count_by_country"].values()) == first["records_out"] == 500
    assert first["acknowledged_ms"]["p50"] <= first["acknowledged_ms"]["p99"]
    assert "records by country" in kl("quickstart", "--no-spark", "--records", "500").text


def test_a_missing_file_is_usage(kl: Kl) -> None:
    result = kl("quickstart", "nowhere.log")
    assert result.code == 2
    assert "nowhere.log" in result.told


def test_purchases_follow_from_the_seed() -> None:
    first = list(purchases(200, seeded_rng(1)))
    assert first == list(purchases(200, seeded_rng(1)))
    assert first != list(purchases(200, seeded_rng(2)))
    for key, value in first:
        purchase = json.loads(value)
        assert purchase["country"] == key.decode() in dict(COUNTRIES)
        assert purchase["amount"] > 0


def tally(*pairs: tuple[bytes | None, bytes]) -> Tally:
    found = Tally()
    for key, value in pairs:
        found.add(key, value)
    return found


@pytest.mark.parametrize(
    ("received", "problem"),
    [
        (tally((b"a", b"1"), (b"a", b"2"), (None, b"x")), None),
        (tally((b"a", b"2"), (b"a", b"1"), (None, b"x")), "1 keys whose records differ"),
        (tally((b"a", b"12"), (b"a", b""), (None, b"x")), "1 keys whose records differ"),
        (tally((b"a", b"1"), (b"b", b"2"), (None, b"x")), "2 keys whose records differ"),
        (tally((b"a", b"1"), (b"a", b"2")), "3 records in, 2 out"),
    ],
)
def test_what_differs_is_found(received: Tally, problem: str | None) -> None:
    job = _Job(None, 0, 0)
    job.sent = tally((b"a", b"1"), (b"a", b"2"), (None, b"x"))
    job.received = received
    assert (problem is None) == (not job.problems())
    assert problem is None or problem in "; ".join(job.problems())


def test_a_key_in_two_partitions_is_found() -> None:
    job = _Job(None, 0, 0)
    job.strayed = 1
    assert "in another partition" in job.problems()[0]
