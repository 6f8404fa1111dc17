"""kl produce, consume, fetch and offsets against a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kl = Callable[..., Any]

T0 = 1431857103000


@pytest.fixture
def topic(at: Kl, request: pytest.FixtureRequest) -> str:
    """A topic of two partitions, for one test."""
    name = request.node.name.replace("[", "-").rstrip("]").replace(" ", "")[:100]
    name = "".join(char if char.isalnum() or char in "-_" else "." for char in name)
    assert at("topic", "create", name, "-p", "2").code == 0
    return name


def jsonl(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def ten(at: Kl, topic: str) -> None:
    """0 to 9 in partition 0, a second apart."""
    lines = [{"partition": 0, "timestamp": T0 + 1000 * n, "key": f"k{n}", "value": str(n)} for n in range(10)]
    assert at("produce", topic, "-i", "jsonl", stdin=jsonl(*lines)).code == 0


def test_lines_in_lines_out(at: Kl, topic: str) -> None:
    produced = at("produce", topic, "-p", "0", stdin=b"one\ntwo\n\nthree")
    assert produced.code == 0, produced.told
    assert produced.out == b""
    assert produced.told.startswith(f"kl: 4 records acknowledged to {topic} in ")
    assert at("consume", topic, "-e").out == b"one\ntwo\n\nthree\n"
    assert at("cat", topic, "-e").out == b"one\ntwo\n\nthree\n"


def test_without_acknowledgements_nothing_is_said_to_be_acknowledged(at: Kl, topic: str) -> None:
    produced = at("produce", topic, "--acks", "0", stdin=b"one\ntwo\n")
    assert produced.code == 0
    assert produced.told.startswith(f"kl: 2 records sent unacknowledged to {topic} in ")
    refused = at("produce", topic, "--acks", "0", "-i", "jsonl", stdin=b'{"value": "three"}\n{\n')
    assert refused.code == 1
    assert "record sent unacknowledged before it" in refused.told.replace("records", "record")
    assert " acknowledged" not in refused.told


def test_a_topic_that_produce_creates_is_named(at: Kl, topic: str) -> None:
    new, other = f"{topic}-new", f"{topic}-other"
    first = at("produce", new, stdin=b"x\n")
    assert first.code == 0
    assert f"kl: created topic {new} (1 partition)\n" in first.told
    assert "created" not in at("produce", new, stdin=b"x\n").told
    lines = jsonl({"topic": new, "value": "1"}, {"topic": other, "value": "2"})
    both = at("produce", "-", "-i", "jsonl", stdin=lines).told
    assert f"created topic {other} (1 partition)" in both
    assert f"created topic {new} " not in both


def test_quiet(at: Kl, topic: str) -> None:
    assert at("produce", topic, "-q", stdin=b"x\n") == (0, b"", b"")


def test_files_keys_headers(at: Kl, topic: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one file", tmp_path / "two"
    one.write_bytes(b"a:1\nb:2\n")
    two.write_bytes(b"c:3")
    arguments = ["-K", ":", "-H", "source=test", "-H", "flag", "-p", "1", "-z", "zstd", "--acks", "1"]
    assert at("produce", topic, one, two, *arguments).code == 0
    records = [json.loads(line) for line in at("consume", topic, "-e", "-o", "jsonl").out.splitlines()]
    assert [(r["key"], r["value"], r["partition"]) for r in records] == [
        ("a", "1", 1),
        ("b", "2", 1),
        ("c", "3", 1),
    ]
    assert records[0]["headers"] == [["source", "test"], ["flag", None]]


def test_raw_is_the_whole_file(at: Kl, topic: str, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(range(256)))
    assert at("produce", topic, blob, "-i", "raw", "-k", "blob").code == 0
    assert at("consume", topic, "-e", "-f", "%k=%s").out == b"blob=" + bytes(range(256))


def test_an_unknown_file_is_usage_or_not_found(at: Kl, topic: str) -> None:
    result = at("produce", topic, "no-such-file")
    assert result.code == 4
    assert "no-such-file: No such file or directory" in result.told


def test_a_consumed_jsonl_stream_produced_again_is_identical(at: Kl, topic: str) -> None:
    originals = [
        {
            "partition": 0,
            "timestamp": T0,
            "key": "k",
            "value": "text é \n \u2028",
            "headers": [["h", "1"], ["h", None]],
        },
        {"partition": 1, "timestamp": T0 + 5, "key": None, "value": None, "headers": []},
        {
            "partition": 1,
            "timestamp": 0,
            "key": {"b64": "/wA="},
            "value": {"b64": "gIGC"},
            "headers": [["b", {"b64": "/w=="}]],
        },
        {"partition": 0, "timestamp": T0 - 9, "key": "", "value": "", "headers": [["", ""]]},
        {"partition": 0, "timestamp": T0, "key": '{"b64":"AA=="}', "value": '{"json":1}', "headers": []},
    ]
    assert at("produce", topic, "-i", "jsonl", stdin=jsonl(*originals)).code == 0
    first = at("consume", topic, "-e", "-o", "jsonl").out
    assert len(first.splitlines()) == len(originals)

    copy = f"{topic}-copy"
    assert at("topic", "create", copy, "-p", "2").code == 0
    assert at("produce", copy, "-i", "jsonl", stdin=first).code == 0
    second = at("consume", copy, "-e", "-o", "jsonl").out
    assert second.replace(copy.encode(), topic.encode()) == first

    stored = {(r["partition"], r["offset"]): r for r in map(json.loads, first.splitlines())}
    assert stored[0, 0]["value"] == "text é \n \u2028"
    assert (stored[1, 0]["key"], stored[1, 0]["value"]) == (None, None)
    assert stored[1, 1]["key"] == {"b64": "/wA="}


def test_json_goes_round_too(at: Kl, topic: str) -> None:
    ten(at, topic)
    first = at("consume", topic, "-e", "-o", "json").out
    assert [record["value"] for record in json.loads(first)] == [str(n) for n in range(10)]
    copy = f"{topic}-copy"
    assert at("topic", "create", copy, "-p", "2").code == 0
    assert at("produce", copy, "-i", "json", stdin=first).code == 0
    assert at("consume", copy, "-e", "-o", "json").out.replace(copy.encode(), topic.encode()) == first


def test_an_empty_json_array(at: Kl, topic: str) -> None:
    assert json.loads(at("consume", topic, "-e", "-o", "json").out) == []


def test_each_line_may_name_its_topic(at: Kl, topic: str) -> None:
    assert at("produce", "-", "-i", "jsonl", stdin=jsonl({"topic": topic, "value": "v"})).code == 0
    assert at("consume", topic, "-e").out == b"v\n"


def test_a_bad_line_names_its_place(at: Kl, topic: str) -> None:
    result = at("produce", topic, "-i", "jsonl", stdin=b'{"value":"1"}\nplain\n')
    assert result.code == 1
    assert "stdin:2: not JSON" in result.told
    assert "use -i lines" in result.told


def test_dry_run_sends_nothing(at: Kl, topic: str) -> None:
    result = at("produce", topic, "--dry-run", stdin=b"a\nb\n")
    assert "2 records would go to" in result.told
    assert at("consume", topic, "-e").out == b""


def test_a_missing_partition(at: Kl, topic: str) -> None:
    result = at("produce", topic, "-p", "7", stdin=b"x\n")
    assert result.code == 4, result.told
    assert at("consume", topic, "-e", "-p", "7").code == 4
    assert "its partitions are 0 to 1" in at("consume", topic, "-e", "-p", "7").told


def test_rate_spreads_records(at: Kl, topic: str) -> None:
    result = at("produce", topic, "--rate", "100/s", stdin=b"x\n" * 20)
    assert result.code == 0
    seconds = float(result.told.split(" in ")[1].split(" s")[0])
    assert 0.1 <= seconds < 5


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["-e"], "0123456789"),
        (["-r", ":end"], "0123456789"),
        (["-n", "3"], "012"),
        (["-r", "start", "-n", "1"], "0"),
        (["-r", "7", "-e"], "789"),
        (["-r", "2:5"], "234"),
        (["-r", "+8", "-e"], "89"),
        (["-r", "-2", "-e"], "89"),
        (["-r", "-3:end"], "789"),
        (["-r", "end", "-e"], ""),
        (["-r", f"@{T0 + 3000}:{T0 + 5000}"], "34"),
        (["-r", f"@{T0 + 7000}", "-e"], "789"),
        (["-r", "@2015-05-17T10:05:03Z:+2s"], "01"),
        (["--from", f"{T0 + 8000}", "-e"], "89"),
        (["--from", f"{T0 + 2000}", "--to", f"{T0 + 4000}"], "23"),
        (["--to", "end"], "0123456789"),
        (["-P", "1", "-e"], ""),
        (["-P", "0", "-e"], "0123456789"),
        (["-o", "-2", "-e"], "89"),
        (["-o", "beginning", "-n", "1"], "0"),
        (["--from-beginning", "-e"], "0123456789"),
        (["-n", "0"], ""),
    ],
    ids=" ".join,
)
def test_ranges(at: Kl, topic: str, arguments: list[str], values: str) -> None:
    ten(at, topic)
    result = at("consume", topic, "--timeout", "20s", *arguments)
    assert result.code == 0, result.told
    assert result.text.replace("\n", "") == values


def test_a_range_given_to_o_is_explained(at: Kl, topic: str) -> None:
    ten(at, topic)
    assert "-o is the output format here; a range is -r -1" in at("consume", topic, "-o", "-1", "-e").told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "which topic?"),
        (["t", "-r", "x"], "'x' is not a range; write for example start"),
        (["t", "-r", "1:2", "--from", "-1h"], "-r gives both bounds"),
        (["t", "--from", "x"], "'x' is not a time"),
        (["t", "-o", "xml"], "'xml' is none of value, json, jsonl, table"),
        (["t", "-o", "5:6", "-r", "1"], "both -o and -r give a range"),
        (["t", "-f", "hello"], "selects no field of a record"),
    ],
)
def test_consume_usage(at: Kl, arguments: list[str], problem: str) -> None:
    result = at("consume", *arguments)
    assert result.code == 2
    assert problem in result.told


def test_formats(at: Kl, topic: str) -> None:
    ten(at, topic)
    assert at("consume", topic, "-n", "1", "-f", "%t[%p]@%o %k=%s %T\\n").text == f"{topic}[0]@0 k0=0 {T0}\n"
    assert at("consume", topic, "-n", "1", "-f", "{partition}:{key:>4}").text == "0:  k0\n"


def test_a_table_is_for_eyes(at: Kl, topic: str) -> None:
    ten(at, topic)
    head, row, *_ = at("consume", topic, "-e", "-o", "table").text.splitlines()
    assert head.split() == ["TOPIC", "PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE"]
    assert row.split()[-5:] == ["0", "0", "2015-05-17T10:05:03.000Z", "k0", "0"]


def test_a_count_that_is_not_reached_times_out(at: Kl, topic: str) -> None:
    ten(at, topic)
    result = at("consume", topic, "-n", "11", "--timeout", "1s")
    assert result.code == 7
    assert result.text.count("\n") == 10
    assert "timed out after 10 records of 11" in result.told


def test_an_open_ended_consume_ends_well_with_its_time(at: Kl, topic: str) -> None:
    ten(at, topic)
    result = at("consume", topic, "--timeout", "1s")
    assert (result.code, result.text.count("\n")) == (0, 10)


def test_consuming_does_not_create_a_topic(at: Kl) -> None:
    result = at("consume", "no-such-topic", "-e")
    assert result.code == 4
    assert "no-such-topic" not in at("topic", "list", "-o", "name").text


def test_several_topics(at: Kl, topic: str) -> None:
    ten(at, topic)
    other = f"{topic}-other"
    at("topic", "create", other)
    at("produce", other, stdin=b"x\n")
    assert sorted(at("consume", topic, other, "-e").text.split()) == [*map(str, range(10)), "x"]


def test_fetch(at: Kl, topic: str) -> None:
    ten(at, topic)
    assert at("fetch", f"{topic}-0-7").out == b"7\n"
    assert at("fetch", f"{topic}-0-7", f"{topic}-0-2", "-f", "%o:%s ").out == b"7:7 2:2 "
    assert json.loads(at("fetch", f"{topic}-0-7", "-o", "jsonl").out)["key"] == "k7"


def test_fetch_of_a_missing_record(at: Kl, topic: str) -> None:
    ten(at, topic)
    result = at("fetch", f"{topic}-0-10")
    assert result.code == 4
    assert f"there is no record {topic}-0-10" in result.told
    assert f"{topic}-0 holds offsets 0 to 9" in result.told
    assert f"{topic}-1 is empty" in at("fetch", f"{topic}-1-0").told
    assert at("fetch", f"{topic}-9-0").code == 4
    assert at("fetch", "nowhere-0-0").code == 4


def test_fetch_of_a_transaction_marker(at: Kl, topic: str) -> None:
    assert at("produce", topic, "-p", "0", "--txn", stdin=b"x\n").code == 0
    at_the_end = at("fetch", f"{topic}-0-1")
    assert at_the_end.code == 4
    assert f"there is no record {topic}-0-1" in at_the_end.told
    assert "no record follows" in at_the_end.told
    assert at("produce", topic, "-p", "0", stdin=b"y\n").code == 0
    before_another = at("fetch", f"{topic}-0-1")
    assert before_another.code == 4
    assert f"the next record is {topic}-0-2" in before_another.told


def test_fetch_of_no_address(at: Kl) -> None:
    result = at("fetch", "nothing")
    assert result.code == 2
    assert "Purchases-1-456332" in result.told


def test_offsets(at: Kl, topic: str) -> None:
    ten(at, topic)
    rows = json.loads(at("offsets", topic, "-o", "json").out)
    assert [(r["partition"], r["earliest"], r["latest"], r["count"]) for r in rows] == [
        (0, 0, 10, 10),
        (1, 0, 0, 0),
    ]
    assert at("offsets", topic).text.splitlines()[0].split() == [
        "TOPIC",
        "PARTITION",
        "EARLIEST",
        "LATEST",
        "COUNT",
    ]
    (latest, _) = [
        json.loads(line) for line in at("offsets", topic, "--latest", "-o", "jsonl").out.splitlines()
    ]
    assert (latest["latest"], "earliest" in latest) == (10, False)
    assert at("offsets", topic, "-o", "name").text.split() == [f"{topic}-0", f"{topic}-1"]


def test_offsets_at_a_time(at: Kl, topic: str) -> None:
    ten(at, topic)
    rows = json.loads(at("offsets", topic, "--at", "2015-05-17T10:05:05.500Z", "-o", "json").out)
    assert [row["offset"] for row in rows] == [3, None]
    assert at("offsets", topic, "--at", "never").code == 2
    assert at("offsets", topic, "--at", "now", "--latest").code == 2
    assert at("offsets").code == 2


def test_properties_reach_the_clients(at: Kl, topic: str) -> None:
    assert at("-X", "linger.ms=1", "produce", topic, "-X", "fetch.min.bytes=1", stdin=b"x\n").code == 0
    result = at("produce", topic, "-X", "linger.ms=soon", stdin=b"x\n")
    assert result.code == 2
    assert "linger.ms is 'soon', but must be a whole number" in result.told
    result = at("produce", topic, "-X", "linger.sm=5", stdin=b"x\n")
    assert result.code == 2
    assert "linger.ms" in result.told


def test_a_value_that_is_too_large_is_reported(at: Kl, topic: str, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(3 << 20))
    result = at("produce", topic, blob, "-i", "raw")
    assert result.code == 1
    assert "max" in result.told


def test_a_time_range_finds_its_records_if_timestamps_are_out_of_order(at: Kl) -> None:
    """The first record at or after the first time is also at or after the second: offsets cannot bound it."""
    base = 1_431_857_103_000
    lines = b"".join(
        b'{"value":"%d","timestamp":%d}\n' % (each, base + each)
        for each in (9_000, 1_000, 5_000, 8_000, 2_000)
    )
    assert at("topic", "create", "disordered", "-p", "1").code == 0
    assert at("produce", "disordered", "-i", "jsonl", stdin=lines).code == 0
    found = at("consume", "disordered", "-r", f"@{base + 1_000}:{base + 6_000}")
    assert found.text == "1000\n5000\n2000\n"
    assert "no record in order in this time range; searching to its end" in found.told
    later = at("consume", "disordered", "-r", f"@{base + 10_000}:{base + 20_000}")
    assert later.text == ""
    assert later.told == "kl: no records in this range: disordered-0 ends at offset 5\n", "all are older"


def test_a_failed_line_says_how_many_records_were_acknowledged_before(at: Kl) -> None:
    lines = b'{"value":"1"}\n{"value":"2"}\nnot json\n{"value":"4"}\n'
    failed = at("produce", "partly", "-i", "jsonl", stdin=lines)
    assert failed.code == 1
    assert "stdin:3" in failed.told
    stored = len(at("consume", "partly", "-e").text.split())
    assert f"{stored} records acknowledged before it, and the rest was not read" in failed.told


@pytest.mark.parametrize(
    ("how", "lines", "place"),
    [
        ("lines", [b"a", b"x" * 2_000_000, b"c"], "stdin:2"),
        ("jsonl", [b'{"value":"a"}', b"", b'{"value":"%s"}' % (b"x" * 2_000_000)], "stdin:3"),
        ("json", [b'[{"value":"a"},', b'{"value":"%s"}]' % (b"x" * 2_000_000)], "stdin: record 2"),
        ("raw", [b"x" * 2_000_000], "stdin"),
    ],
)
def test_a_record_that_is_too_large_is_named_by_its_place_in_the_input(
    at: Kl, how: str, lines: list[bytes], place: str
) -> None:
    failed = at("produce", "large", "-i", how, stdin=b"\n".join(lines))
    assert failed.code in {1, 8}
    assert f": {place}: the record has 2000" in failed.told
    assert "max.request.size is 1048576" in failed.told


def test_a_time_limit_before_the_first_record_is_an_error_if_there_are_records(
    at: Kl, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert at("topic", "create", "unfetched", "-p", "1").code == 0
    nothing = at("consume", "unfetched", "--timeout", "2s")
    assert (nothing.code, nothing.told) == (0, "")
    assert at("produce", "unfetched", stdin=b"x\n").code == 0

    async def no_records(*_arguments: Any, **_named: Any) -> list[Any]:
        return []

    monkeypatch.setattr("kafkalite.client.consumer.consumer.Consumer.get_many", no_records)
    late = at("consume", "unfetched", "--timeout", "2s")
    assert late.code == 7
    assert "timed out after 0 records" in late.told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-r", "100:110"), "no records in this range: {topic}-0 (of 2 partitions) ends at offset 10"),
        (("-r", "100:", "-e"), "no records in this range: {topic}-0 (of 2 partitions) ends at offset 10"),
        (("-r", "5:5"), "no records in this range"),
        (("-p", "0", "-r", "100:", "--timeout", "1s"), "{topic}-0 ends at offset 10; waiting for new ones"),
        (("-r", "10:5"), "the range ends before it begins"),
        (("--from", "2015-05-18", "--to", "2015-05-17"), "the range ends before it begins"),
    ],
)
def test_a_range_without_records_is_explained(
    at: Kl, topic: str, arguments: tuple[str, ...], told: str
) -> None:
    ten(at, topic)
    result = at("consume", topic, *arguments)
    assert result.out == b""
    assert told.format(topic=topic) in result.told


def test_an_empty_topic_needs_no_word(at: Kl, topic: str) -> None:
    assert at("consume", topic, "-e") == (0, b"", b"")


def test_a_full_disk_under_stdout_is_one_sentence(repository: Path, servers: str, topic: str, at: Kl) -> None:
    ten(at, topic)
    for arguments in (("consume", topic, "-e"), ("topic", "list")):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "kafkalite", *arguments, "-b", servers],
                cwd=repository,
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=240,
            )
        assert done.returncode == 1
        assert done.stderr == b"kl: stdout can't be written: No space left on device\n"
