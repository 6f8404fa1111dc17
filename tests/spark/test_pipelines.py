"""The example pipelines, each on the shared session with its own broker, with their own checks."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quickstart import quickstart

from kafkalite.cli.app import run
from kafkalite.client.blocking.admin import Admin
from kafkalite.client.blocking.producer import Producer
from kafkalite.testing import SyncCluster
from sparkbridge.errors import PipelineError
from sparkbridge.pipelines import files, frames, runner
from sparkbridge.pipelines.engine import Setting
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.parsing import parse_pipeline

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "pipelines"


@pytest.fixture
def own_broker() -> Iterator[SyncCluster]:
    """A broker for one test: the examples always create topics with the same names."""
    with SyncCluster(transport="tcp") as cluster:
        yield cluster


def example(name: str, *overrides: str) -> PipelineFile:
    file = files.read(EXAMPLES / name, overrides)
    assert not file.problems, file.problems
    return file


def run_demo(
    spark: Any, file: PipelineFile, servers: str, **extra: Any
) -> tuple[runner.Report, dict[str, int]]:
    counts: dict[str, int] = {}
    with runner.demo_setting(servers) as setting:
        report = runner.execute_demo(spark, file, setting, on_filled=counts.update, **extra)
    return report, counts


def lag(servers: str, group: str) -> tuple[int, int]:
    """Return (records read, lag) as ``kl group lag`` counts them."""
    with Admin(servers) as admin:
        partitions = admin.group_lag(group)
    return sum(p.committed.offset for p in partitions), sum(
        p.end_offset - p.committed.offset for p in partitions
    )


def test_access_log(spark: Any, own_broker: SyncCluster) -> None:
    """With the real log if it exists, else with a generated one."""
    servers = own_broker.bootstrap_servers
    report, counts = run_demo(spark, example("access_log"), servers)
    assert [finding for finding in report.findings if not finding.holds] == []
    assert len(report.findings) == 3
    sent = counts["access-log"]
    assert sent == (10_000 if (ROOT.parent / "shared/data/apache_access.log").exists() else 3_000)
    for query in report.run.queries:
        assert query.tally.rows == sent
        assert lag(servers, f"access-log.{query.sink.name}") == (sent, 0)


def decoded(spark: Any, decode: str, *values: bytes) -> list[tuple[Any, ...]]:
    """Return the columns that ``[source.decode]`` makes from values, without a source."""
    text = f'[pipeline]\nname = "p"\ntrigger = "1 day"\n[source]\ntopic = "t"\n[source.decode]\n{decode}\n'
    pipeline, problems = parse_pipeline(tomllib.loads(text + "[sink]\nconsole = true"))
    assert problems == []
    listed = ", ".join(f"(X'{value.hex()}', {n}L)" for n, value in enumerate(values))
    frame = spark.sql(f"SELECT *, 't' AS topic, 7 AS partition FROM VALUES {listed} AS (value, offset)")
    rows = frames.decoded(frame, pipeline.source.decode, ["offset"]).selectExpr("*", "record.offset AS at")
    return [tuple(row) for row in rows.drop("record").collect()]


TEXT = """format = "text"
pattern = '^(?<client>\\S+) (?<status>\\d+) (?<size>\\S+)'
schema = "status INT, size INT"
"""
JSON = 'format = "json"\nschema = "id BIGINT, tags ARRAY<STRING>"\n'


def test_text_becomes_columns(spark: Any) -> None:
    lines = (b"a 200 17", b"no request", b"b 304 - and more")
    assert decoded(spark, TEXT, *lines) == [(200, 17, 0), (None, None, 1), (304, None, 2)]
    assert decoded(spark, TEXT + 'mode = "DROPMALFORMED"', *lines) == [(200, 17, 0), (304, None, 2)]
    refusal = "topic t, partition 7, offset 1: the value does not match the pattern: no request"
    with pytest.raises(Exception, match=refusal):
        decoded(spark, TEXT + 'mode = "FAILFAST"', *lines)


def test_json_becomes_columns(spark: Any) -> None:
    values = (b'{"id": 1, "tags": ["x"], "more": 2}', b"no json", b'{"id": "one"}')
    assert decoded(spark, JSON, *values)[:2] == [(1, ["x"], 0), (None, None, 1)]
    assert decoded(spark, JSON + 'mode = "DROPMALFORMED"', *values) == [(1, ["x"], 0)]


def test_failfast_refuses_the_values_that_sparks_own_mode_refuses(spark: Any) -> None:
    """The refusal names the record and its value."""
    values = (b'{"id": 1, "tags": ["x"], "more": 2}', b"no json", b'{"id": "one"}', b'{"id": 1', b"17")
    for value in (*values, b'{"tags": {}}', b'"x"', b"", b"null", b"{}", b'[{"id": 1}]', b"[]"):
        listed = f"SELECT * FROM VALUES (CAST(X'{value.hex()}' AS STRING)) AS (text)"
        schema = "id BIGINT, tags ARRAY<STRING>"
        query = f"SELECT from_json(text, '{schema}', map('mode', 'FAILFAST')) AS v FROM ({listed})"
        try:
            (row,) = spark.sql(query).collect()
            expected = (None, None) if row.v is None else tuple(row.v)
        except Exception:
            refusal = f"topic t, partition 7, offset 0: the value is not JSON of the schema: {value.decode()}"
            with pytest.raises(Exception, match=re.escape(refusal)):
                decoded(spark, JSON + 'mode = "FAILFAST"', value)
        else:
            assert decoded(spark, JSON + 'mode = "FAILFAST"', value) == [(*expected, 0)]


def test_failfast_names_topic_partition_offset_and_value_of_a_record(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    topic = new_topic_on("orders")
    produce(broker, topic, {"id": 1, "country": "US"}, b"poison", {"id": 2, "country": "NZ"})
    file = plain(tmp_path, topic, 'from = "source"\nconsole = true', DROPMALFORMED="FAILFAST")
    refusal = f"topic {topic}, partition 0, offset 1: the value is not JSON of the schema: poison"
    with pytest.raises(PipelineError, match=refusal):
        runner.execute(spark, file, Setting(broker.bootstrap_servers, checkpoint))


def test_a_check_queries_a_single_named_sink_by_its_name_and_as_output(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    topic, copies = new_topic_on("orders"), new_topic_on("copies")
    produce(broker, topic, {"id": 1, "country": "US"}, {"id": 2, "country": "NZ"})
    sink = f'from = "source"\ntopic = "{copies}"\n[check.sql]\n'
    sink += "".join(f'{name} = "SELECT sum(id) = 3 FROM {name}"\n' for name in ("all_copies", "output"))
    file = plain(tmp_path, topic, sink, **{"[sink]\n": "[sinks.all-copies]\n"})
    report = runner.execute(spark, file, Setting(broker.bootstrap_servers, checkpoint))
    assert [(each.name, each.holds) for each in report.findings] == [("all_copies", True), ("output", True)]


def test_a_check_queries_files_of_a_run_without_rows(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    """Without rows there is no file of a partition."""
    sink = 'from = "source"\nparquet = "out"\npartition_by = ["country"]\n[check.sql]\n'
    sink += 'empty = "SELECT count(id) = 0 FROM output"\n'
    file = plain(tmp_path, new_topic_on("orders"), sink)
    report = runner.execute(spark, file, Setting(broker.bootstrap_servers, checkpoint))
    assert [(each.name, each.holds) for each in report.findings] == [("empty", True)]


def test_settings_of_tls_and_the_login_reach_queries_and_checks(
    spark: Any, checkpoint: str, tmp_path: Path
) -> None:
    """The brokers require a login of all clients: source, sink, and both kinds of checks."""
    pytest.importorskip("cryptography")
    with SyncCluster(transport="tcp", security_protocol="SASL_SSL") as secured:
        for topic in ("orders", "copies"):
            secured.create_topic(topic)
        sink = 'from = "source"\ntopic = "copies"\n[check]\npython = "check.py:check"\n'
        sink += '[check.sql]\nsum = "SELECT sum(id) = 3 FROM output"\n'
        code = 'def check(run):\n    run.equal("ids", {row["id"]: 1 for row in run.rows()}, {3: 1})\n'
        (tmp_path / "check.py").write_text(code)
        security = {name.replace("_", "."): text for name, text in secured.client_settings.items()}
        setting = Setting(secured.bootstrap_servers, checkpoint, security=security)
        with Producer(config=setting.client_settings) as producer:
            producer.send("orders", b'{"id": 3, "country": "US"}').result(20)
        report = runner.execute(spark, plain(tmp_path, "orders", sink), setting)
    assert [each.holds for each in report.findings] == [True, True], report.findings


def test_donut_revenue(spark: Any, own_broker: SyncCluster) -> None:
    servers = own_broker.bootstrap_servers
    lags: list[int] = []
    listener = runner.Listener(on_batch=lambda query, batch: lags.append(batch.lag))
    report, counts = run_demo(spark, example("donut_revenue"), servers, listener=listener)
    assert [finding.holds for finding in report.findings] == [True]
    assert counts == {"purchases": 6_000}
    assert lag(servers, "donut-revenue") == (6_000, 0)
    (tally,) = report.run.tallies
    assert tally.batches >= 3  # maxOffsetsPerTrigger is 2500
    assert lags[:3] == [3_500, 1_000, 0]
    assert tally.lag == 0


def test_topic_export(spark: Any, own_broker: SyncCluster) -> None:
    report, counts = run_demo(spark, example("topic_export"), own_broker.bootstrap_servers)
    assert [finding.holds for finding in report.findings] == [True, True]
    assert f"{counts['access-log']:,} records of 3 partitions are the same" in report.findings[-1].text


def test_a_failed_check_is_reported(spark: Any, own_broker: SyncCluster, tmp_path: Path) -> None:
    """The example's own check finds a price that is wrong by one cent."""
    for name in ("pipeline.toml", "check.py", "load.py", "transform.py"):
        (tmp_path / name).write_text((EXAMPLES / "donut_revenue" / name).read_text())
    prices = (EXAMPLES / "donut_revenue" / "prices.csv").read_text()
    (tmp_path / "prices.csv").write_text(prices)
    (tmp_path / "wrong.csv").write_text(prices.replace("maple,2.00", "maple,2.01"))
    file = files.read(tmp_path, ["tables.prices.csv=wrong.csv", "demo.settings.purchases=2000"])
    report, _ = run_demo(spark, file, own_broker.bootstrap_servers)
    (finding,) = report.failed
    assert "revenue per country and minute" in finding.text
    assert "differ" in finding.text


PLAIN = """
[pipeline]
name = "{name}"
[source]
topic = "{topic}"
options = {{ startingOffsets = "earliest" }}
[source.decode]
format = "json"
schema = "id BIGINT, country STRING"
mode = "DROPMALFORMED"
[[transform]]
name = "counts"
sql = "SELECT country, count(*) AS orders FROM source GROUP BY country"
[sink]
"""


def plain(tmp_path: Path, topic: str, sink: str, **changes: str) -> PipelineFile:
    text = PLAIN.format(name=f"plain-{topic}", topic=topic) + sink
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "pipeline.toml").write_text(text)
    file = files.read(tmp_path)
    assert not file.errors, file.errors
    return file


def produce(broker: SyncCluster, topic: str, *values: Any) -> None:
    from kafkalite.client.blocking.producer import Producer

    with Producer(broker.bootstrap_servers) as producer:
        producer.send_many(
            topic, [each if isinstance(each, bytes) else json.dumps(each).encode() for each in values]
        )


def test_console_in_complete_mode(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    topic = new_topic_on("orders")
    orders = [{"id": n, "country": "US" if n % 3 else "NZ"} for n in range(9)]
    produce(broker, topic, *orders, b"no json", b'{"id": "seven"}')
    file = plain(tmp_path, topic, 'console = true\noutput_mode = "complete"')
    shown: list[Any] = []
    listener = runner.Listener(on_rows=lambda *told: shown.append(told))
    report = runner.execute(spark, file, Setting(broker.bootstrap_servers, checkpoint), listener=listener)
    assert report.run.tallies[0].rows == 11
    ((rows,),) = shown
    assert (rows.query, rows.batch_id, list(rows.columns)) == (f"plain-{topic}", 0, ["country", "orders"])
    assert sorted(rows.rows) == [("NZ", "3"), ("US", "6")]
    assert sorted(rows.documents) == ['{"country":"NZ","orders":3}', '{"country":"US","orders":6}']


def test_console_shows_some_rows_and_reads_all(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    """The state of every partition is committed, also for rows that are not shown."""
    topic = new_topic_on("orders")
    file = plain(tmp_path, topic, 'console = true\nrows = 1\noutput_mode = "complete"')
    shown: list[Any] = []
    listener = runner.Listener(on_rows=lambda rows: shown.extend(rows.rows))
    for number in (1, 2):
        produce(broker, topic, *({"id": n, "country": f"c-{n}"} for n in range(40)))
        setting = Setting(broker.bootstrap_servers, checkpoint)
        report = runner.execute(spark, file, setting, listener=listener)
        assert report.run.tallies[0].rows == 40
        assert [row[1] for row in shown] == [str(n + 1) for n in range(number)]


def test_update_mode_and_a_second_run(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    """Only changed rows are written, each batch once; the second run continues from the checkpoint."""
    topic, counts = new_topic_on("orders"), new_topic_on("counts")
    file = plain(tmp_path, topic, f'topic = "{counts}"\nkey = "country"\noutput_mode = "update"')
    setting = Setting(broker.bootstrap_servers, checkpoint)
    for orders in ([{"id": 1, "country": "US"}, {"id": 2, "country": "NZ"}], [{"id": 3, "country": "NZ"}]):
        produce(broker, topic, *orders)
        runner.execute(spark, file, setting)
    values = [json.loads(record.value) for record in broker.records(counts)]
    assert sorted((value["country"], value["orders"]) for value in values) == [
        ("NZ", 1),
        ("NZ", 2),
        ("US", 1),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count(*) AS orders", "cuont(*) AS orders", r"\[transform 1\] counts: .*cuont"),
        ("count(*) AS orders", "count(*) AS orders, citty", r"\[transform 1\] counts: .*citty"),
        ("console = true", 'topic = "out"\nkey = "contry"', r"\[sink\]: .*contry"),
        ('output_mode = "complete"', 'output_mode = "append"', r"watermark"),
    ],
)
def test_a_refusal_by_spark_is_one_sentence_with_its_place(
    spark: Any, broker: SyncCluster, checkpoint: str, tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = plain(tmp_path, "nowhere", 'console = true\noutput_mode = "complete"', **{old: new})
    with pytest.raises(PipelineError, match=message) as caught:
        runner.execute(spark, file, Setting(broker.bootstrap_servers, checkpoint))
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message


def test_a_failing_function_stops_the_other_query_too(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    topic = new_topic_on("orders")
    produce(broker, topic, {"id": 1, "country": "US"})
    text = PLAIN.format(name=f"failing-{topic}", topic=topic).replace("[sink]\n", "")
    text += '[[transform]]\nname = "bad"\nsql = "SELECT 1 / (id - id) AS x FROM source"\n'
    text += '[sinks.bad]\nfrom = "bad"\nconsole = true\n[sinks.good]\nfrom = "source"\nconsole = true\n'
    (tmp_path / "pipeline.toml").write_text(text)
    file = files.read(tmp_path)
    setting = Setting(broker.bootstrap_servers, checkpoint, "1 second")
    with pytest.raises(PipelineError, match="DIVIDE_BY_ZERO"):
        runner.execute(spark, file, setting)
    assert [query.name for query in spark.streams.active if str(query.name).startswith("failing-")] == []


def test_ctrl_c_stops_in_order(
    spark: Any, broker: SyncCluster, new_topic_on: Any, checkpoint: str, tmp_path: Path
) -> None:
    topic = new_topic_on("orders")
    produce(broker, topic, {"id": 1, "country": "US"})
    file = plain(tmp_path, topic, 'console = true\noutput_mode = "complete"')

    def interrupt(query: Any, batch: Any) -> None:
        raise KeyboardInterrupt

    setting = Setting(broker.bootstrap_servers, checkpoint, "1 second")
    report = runner.execute(spark, file, setting, listener=runner.Listener(on_batch=interrupt))
    assert report.was_stopped
    assert not report.run.queries[0].query.isActive
    assert report.run.tallies[0].rows == 1


@pytest.fixture
def kl(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run kl in this process, on the shared session."""

    @contextlib.contextmanager
    def shared(*args: Any, **settings: Any) -> Iterator[Any]:
        yield spark

    monkeypatch.setattr(runner, "spark_session", shared)
    monkeypatch.delenv("KL_BOOTSTRAP_SERVERS", raising=False)

    def invoke(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return invoke


def test_the_quickstart_ends_with_a_pipeline(
    kl: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The pipeline over the file counts the same as the quickstart, without the last hours."""
    log = tmp_path / "access.log"
    line = '10.0.0.{} - - [{}/May/2015:10:00:00 +0000] "GET /{} HTTP/1.1" {} 7 "-" "-"\n'
    log.write_text(
        "".join(line.format(n % 5, 17 + n % 3, n % 2, 404 if n % 9 == 0 else 200) for n in range(90))
    )
    capsys.readouterr()
    code = run([str(log), "-o", "json"], command=quickstart)
    out, err = capsys.readouterr()
    assert code == 0, err
    document = json.loads(out)
    assert document["count_by_status"] == {"200": 80, "404": 10}
    pipeline = document["pipeline"]
    assert [check["holds"] for check in pipeline["checks"]] == [True, True, True]
    assert [query["rows"] for query in pipeline["queries"]] == [90, 90]
    assert pipeline["closed_hours"] == 2  # the third day's hour is still open
    assert pipeline["count_by_status"] == {"200": 50, "404": 10}
    assert pipeline["busiest_clients"][0]["requests"] == 6


def test_an_example_from_one_command_and_its_failing_check(kl: Any, tmp_path: Path) -> None:
    demo = ("pipeline", "run", EXAMPLES / "topic_export", "--demo", "--set", "demo.settings.file=")
    few = ("--set", "demo.settings.lines=100")
    code, out, err = kl(*demo, *few, "-o", "json")
    assert code == 0, err
    assert err == "kl: starting Spark (local[*]) ...\nkl: input: 100 records in access-log\n"
    assert [query["rows"] for query in json.loads(out)["queries"]] == [100]
    code, out, err = kl(
        *demo, *few, "--set", 'transform.1.sql="SELECT * EXCEPT (key), value AS key FROM source"'
    )
    assert code == 9
    assert "FAILED: digest of each partition: 3 of 3 differ" in out
    assert err.splitlines()[-1].startswith("kl: the check failed: check: digest of each partition")
