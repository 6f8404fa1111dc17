"""kl pipeline without a JVM: list, validate, and the checks of run before Spark starts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalite import sync
from kafkalite.cli import pipeline
from kafkalite.cli.invocation import Invocation
from kafkalite.cli.pipeline_view import Watcher, print_report
from proof.certificates import DevCertificates
from sparkbridge.pipelines import sql_syntax

pytest.importorskip("pyspark")

Kl = Callable[..., Any]

GOOD = """
[pipeline]
name = "orders"
description = "What was ordered"
trigger = "5 seconds"
[source]
topic = "orders"
[sink]
topic = "copies"
"""
BAD = GOOD.replace("[sink]", "[snk]").replace('topic = "orders"', 'topc = "orders"')


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "orders.toml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    return path


def test_list_has_the_examples(kl: Kl) -> None:
    result = kl("pipeline", "list", "-o", "json")
    assert result.code == 0, result.told
    rows = {row["name"]: row for row in json.loads(result.out)}
    assert {"access-log", "donut-revenue", "topic-export"} <= rows.keys()
    assert rows["topic-export"]["sink"] == "parquet records.parquet"
    assert kl("pipeline", "list").text.startswith("NAME ")


def test_list_of_a_directory(kl: Kl, good: Path, bad: Path) -> None:
    result = kl("pipeline", "list", good.parent, "-o", "wide")
    assert result.code == 0, result.told
    head, *lines = result.text.splitlines()
    assert head.split() == ["NAME", "SOURCE", "SINK", "DESCRIPTION", "TRIGGER", "FILE"]
    assert any(line.startswith("bad ") and "has 2 problems: kl pipeline validate" in line for line in lines)
    assert any(line.startswith("orders") and "topic copies" in line and "5 seconds" in line for line in lines)


def test_list_of_nothing(kl: Kl, tmp_path: Path) -> None:
    result = kl("pipeline", "list", tmp_path)
    assert (result.code, result.text) == (0, "")
    assert "no pipelines in" in result.told


def test_validate_a_good_file(kl: Kl, good: Path) -> None:
    result = kl("pipeline", "validate", good)
    assert (result.code, result.told) == (0, "")
    assert "orders: orders to topic copies" in result.text


def test_validate_reports_every_mistake(kl: Kl, good: Path, bad: Path) -> None:
    result = kl("pipeline", "validate", good, bad)
    assert result.code == 9
    assert "kl: 1 of 2 files cannot run" in result.told
    assert f"{bad}:7: [source] topc is not known here; did you mean topic?" in result.text
    assert "snk is not known here; did you mean sink?" in result.text


def test_validate_for_machines(kl: Kl, good: Path, bad: Path) -> None:
    result = kl("pipeline", "validate", good, "-o", "json", "--set", "pipeline.checkpoint=c")
    assert (result.code, json.loads(result.out)) == (0, [])
    result = kl("pipeline", "validate", bad, "-o", "json")
    assert result.code == 9
    first = next(row for row in json.loads(result.out) if row["key"] == "topc")
    assert first == {
        "file": str(bad),
        "line": 7,
        "level": "error",
        "table": "source",
        "key": "topc",
        "message": "is not known here",
        "hint": "did you mean topic?",
    }


def test_validate_warns_of_a_checkpoint_without_which_run_refuses_the_file(kl: Kl, good: Path) -> None:
    result = kl("pipeline", "validate", good)
    assert result.code == 0, result.told
    warning, verdict = result.text.splitlines()
    assert warning.startswith(
        f"{good}:2: warning: [pipeline] checkpoint is missing: run needs --checkpoint DIR"
    )
    assert verdict.startswith(f"{good}: ok with --checkpoint DIR, orders:")
    assert kl("pipeline", "run", good).code == 2
    (row,) = json.loads(kl("pipeline", "validate", good, "-o", "json").out)
    assert (row["level"], row["table"], row["key"]) == ("warning", "pipeline", "checkpoint")
    for override in ("pipeline.checkpoint=c", "sink={console = true}"):
        result = kl("pipeline", "validate", good, "--set", override)
        assert f"{good}: ok, orders:" in result.text
        assert "warning" not in result.text


def test_validate_needs_neither_spark_nor_a_jvm(repository: Path, good: Path) -> None:
    """pyspark's JVM is not started, and pyspark.sql, which is slow to load, is not loaded."""
    program = (
        "import sys; from kafkalite.cli.app import run;"
        f" code = run(['pipeline', 'validate', {str(good)!r}]);"
        " print(code, [name for name in ('pyspark.sql', 'py4j', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=repository, timeout=240
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_validate_says_if_nothing_has_parsed_the_sql(
    kl: Kl, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = ("--set", 'transform=[{sql = "SELEC 1"}]')
    monkeypatch.setattr(sql_syntax, "missing_requirements", lambda: ["no working java was found"])
    result = kl("pipeline", "validate", good, *query)
    assert (result.code, result.told) == (0, "kl: the SQL was not parsed: no working java was found\n")
    assert kl("pipeline", "validate", good, *query, "--no-spark").told == ""
    monkeypatch.setattr(sql_syntax.SqlSyntax, "problem", lambda self, sql: f"{sql!r} is no SQL")
    result = kl("pipeline", "validate", good, *query)
    assert (result.code, "[transform 1] sql: 'SELEC 1' is no SQL" in result.text) == (9, True), result.text


def test_a_missing_file(kl: Kl) -> None:
    for command in ("validate", "run"):
        result = kl("pipeline", command, "nowhere.toml")
        assert result.code == 4
        assert "kl: there is no nowhere.toml\n    hint: kl pipeline list\n" in result.told


@pytest.mark.parametrize("name", ["donut_revenue", "donut-revenue", "donut_revenu.toml"])
def test_the_name_of_an_example_is_not_enough_and_its_path_is_suggested(
    kl: Kl, name: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    result = kl("pipeline", "run", name, "--demo")
    assert result.code == 4
    assert "hint: did you mean examples/pipelines/donut_revenue?" in result.told


def test_a_file_with_a_similar_name_is_suggested(kl: Kl, good: Path) -> None:
    result = kl("pipeline", "validate", good.with_name("order.toml"))
    assert (result.code, f"did you mean {good}?" in result.told) == (4, True), result.told


def test_a_directory_without_a_pipeline(kl: Kl, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    for directory, hint in (
        ("docs", "kl pipeline list"),
        ("examples/pipelines", "kl pipeline list examples/pipelines"),
    ):
        result = kl("pipeline", "run", directory, "--demo")
        assert result.code == 4
        assert f"there is no {directory}/pipeline.toml\n    hint: {hint}\n" in result.told


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "the pipeline has no checkpoint directory"),
        (["--once", "--trigger", "1 second"], 2, "give --once or --trigger, not both"),
        (["--trigger", "soon"], 2, "--trigger is 'soon', but must be"),
        (["--set", "sink.topic"], 2, "--set 'sink.topic' is not table.key=value"),
        (["--set", "sink.topic=a/b"], 2, "contains a character outside"),
        (["--set", "sink.topc=x", "--set", "source.topc=x"], 2, "has 2 problems"),
        (["--demo"], 4, "has no [demo]"),
        (
            ["--spark-log", "/nowhere/x"],
            2,
            "--spark-log /nowhere/x cannot be written: No such file or directory",
        ),
    ],
)
def test_run_refuses_before_spark_starts(
    kl: Kl, good: Path, arguments: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **settings: Any) -> None:
        raise AssertionError("Spark was asked for")

    monkeypatch.setattr(pipeline, "execute", never)
    result = kl("pipeline", "run", good, *arguments)
    assert result.code == code
    assert message in result.told


def test_run_asks_the_brokers_before_spark_starts(
    kl: Kl, good: Path, servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sparkbridge.pipelines.runner as runner

    asked: list[Any] = []
    monkeypatch.setattr(runner, "missing_requirements", list)
    monkeypatch.setattr(pipeline, "execute", lambda file, setting, *rest, **more: asked.append(setting))
    monkeypatch.setattr(pipeline, "print_report", lambda report, output: None)
    there = ["--checkpoint", good.parent / "c"]
    result = kl("pipeline", "run", good, *there, "-b", "127.0.0.1:1", "--timeout", "1s")
    assert result.code == 3, result.told
    assert kl("topic", "create", "order", "-b", servers).code == 0
    result = kl("pipeline", "run", good, *there, "-b", servers)
    assert result.code == 4
    assert "[source] topic 'orders' does not exist" in result.told
    assert "did you mean order?" in result.told
    assert asked == []


@pytest.mark.parametrize("origin", ["-X", "context", "environment"])
def test_the_settings_of_the_command_reach_the_queries(
    kl: Kl, good: Path, dev_certificates: DevCertificates, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sparkbridge.pipelines.runner as runner
    from sparkbridge.pipelines.engine import source_options, with_brokers

    pipelines: list[Any] = []
    settings: list[Any] = []
    monkeypatch.setattr(runner, "missing_requirements", list)
    monkeypatch.setattr(pipeline, "print_report", lambda *_: None)

    def execute(file: Any, setting: Any, *rest: Any, **more: Any) -> Any:
        pipelines.append(file.pipeline)
        settings.append(setting)
        return SimpleNamespace(failed=[], was_stopped=False)

    monkeypatch.setattr(pipeline, "execute", execute)
    monkeypatch.chdir(dev_certificates.directory)
    login = {
        "security.protocol": "SASL_SSL",
        "ssl.truststore.location": "ca.pem",
        "sasl.username": "alice",
        "sasl.password": "a long password",
    }
    (good.parent / "load.py").write_text("def load(demo):\n    return []\n")
    there = ["--checkpoint", good.parent / "c"]
    listeners = {"listeners": "SASL_SSL://127.0.0.1:0,inproc://pipelines-log-in"}
    with sync.Broker(**dev_certificates.broker() | listeners) as broker:
        with sync.Admin("inproc://pipelines-log-in") as admin:
            admin.set_user_password("alice", "a long password", iterations=4_096)
            admin.create_topic("orders")
        if origin == "environment":
            for name, text in login.items():
                monkeypatch.setenv(f"KAFKALITE_CLIENT_{name.replace('.', '_').upper()}", text)
            result = kl("pipeline", "run", good, *there, "-b", broker.addresses[0])
        else:
            given = [part for name, text in login.items() for part in ("-X", f"{name}={text}")]
            if origin == "context":
                assert kl("context", "add", "closed", "-b", broker.addresses[0], *given).code == 0
                given = ["--context", "closed"]
            else:
                given += ["-b", broker.addresses[0]]
            result = kl("pipeline", "run", good, *there, *given)
        assert result.code == 0, result.told
        demo = kl("pipeline", "run", good, "--demo", "--set", "demo.load=load.py:load")
        assert demo.code == 0, demo.told
    named, of_demo = settings
    expected = {**login, "ssl.truststore.location": str(dev_certificates / "ca.pem")}
    assert named.security == expected
    assert "a long password" not in repr(named)
    options = source_options(pipelines[0], pipelines[0].sinks[0], named)
    assert {f"kafka.{name}": text for name, text in expected.items()}.items() <= options.items()
    other = with_brokers({}, {"Kafka.Bootstrap.Servers": "other:9092"}, named.client_settings)
    assert other == {"Kafka.Bootstrap.Servers": "other:9092"}, "they are not sent to other brokers"
    own = with_brokers({}, {"kafka.SASL.username": "bob"}, named.client_settings)
    assert own["kafka.SASL.username"] == "bob" and "kafka.sasl.username" not in own
    assert of_demo.security == {}, "a demo has a broker of its own"


def test_without_java_it_says_what_is_missing(kl: Kl, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparkbridge.pipelines.runner as runner

    monkeypatch.setattr(runner, "missing_requirements", lambda: ["no working java was found; install one"])
    result = kl("pipeline", "run", good, "--checkpoint", good.parent / "c")
    assert result.code == 1
    assert result.told.strip().splitlines() == ["kl: no working java was found; install one"]


def test_without_sparkbridge_it_says_how_to_get_it(
    kl: Kl, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    result = kl("pipeline", "validate", good)
    assert result.code == 2
    assert 'pip install "kafkalite[cli,spark]"' in result.told


# --- output ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(*findings: Any, was_stopped: bool = False) -> Any:
    tally = SimpleNamespace(
        name="orders", batches=2, rows=1500, rows_per_second=750.0, batch_ms=1000.0, lag=7, late=3
    )
    sink = SimpleNamespace(text="topic copies")
    declared = SimpleNamespace(name="orders")
    run = SimpleNamespace(
        pipeline=declared, queries=[SimpleNamespace(tally=tally, sink=sink, group_id="orders")]
    )
    failed = [finding for finding in findings if not finding.holds]
    return SimpleNamespace(run=run, findings=list(findings), failed=failed, was_stopped=was_stopped)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    from sparkbridge.pipelines.checks import Finding

    print_report(report(Finding("once", True, "holds"), Finding("check", True, "5 are equal")), "table")
    out, err = capsys.readouterr()
    assert err.startswith("kl: orders: 3 rows were dropped: older than the watermark")
    head, row, *checks = out.splitlines()
    assert head.split("  ")[0] == "QUERY"
    assert row.split() == ["orders", "topic", "copies", "2", "1,500", "750", "1,000", "ms", "7", "orders"]
    assert checks == ["check: once: holds", "check: 5 are equal", "2 checks passed."]
    print_report(report(Finding("once", False, "3 came twice")), "table")
    assert "check: once: FAILED: 3 came twice" in capsys.readouterr().out
    print_report(report(), "json")
    document = json.loads(capsys.readouterr().out)
    assert (document["queries"][0]["lag"], document["queries"][0]["late"]) == (7, 3)


def test_the_line_is_painted_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with Watcher(stream=stream) as watcher:
            watcher.say("starting Spark")
    assert terminal.getvalue() == "\r\x1b[Kstarting Spark\r\x1b[K"
    assert file.getvalue() == ""


def test_long_steps_are_printed_without_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file, quiet = Terminal(), io.StringIO(), io.StringIO()
    Watcher(stream=terminal).begin("starting Spark")
    Watcher(stream=file).begin("starting Spark")
    Watcher(stream=quiet, is_quiet=True).begin("starting Spark")
    assert terminal.getvalue() == "\r\x1b[Kstarting Spark"
    assert file.getvalue() == "kl: starting Spark ...\n"
    assert quiet.getvalue() == ""


def test_a_long_step_shows_its_elapsed_time_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("kafkalite.cli.pipeline_view._TICK_SECONDS", 0.01)
    terminal, file = Terminal(), io.StringIO()
    deadline = time.monotonic() + 20
    with Watcher(stream=terminal).timed("starting Spark"):
        while "starting Spark, 0 s" not in terminal.getvalue():
            assert time.monotonic() < deadline
    with Watcher(stream=file).timed("starting Spark"):
        pass
    assert file.getvalue() == "kl: starting Spark ...\n"


@pytest.mark.parametrize(
    ("is_terminal", "can_make", "arguments", "is_told"),
    [
        (True, True, [], True),
        (False, True, [], False),
        (True, False, [], False),
        (True, True, ["-q"], False),
        (True, True, ["--master", "spark://master:7077"], False),
    ],
)
def test_a_terminal_gets_a_hint_about_the_missing_class_archive(
    kl: Kl,
    good: Path,
    is_terminal: bool,
    can_make: bool,
    arguments: list[str],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sparkbridge.pipelines.runner as runner
    from sparkbridge.local import fast_start

    monkeypatch.setattr(runner, "missing_requirements", list)
    monkeypatch.setattr(pipeline, "execute", lambda *rest, **more: report())
    monkeypatch.setattr(pipeline, "_check_topics", lambda declared: None)
    monkeypatch.setattr(fast_start, "can_make_class_archive", lambda: can_make)
    monkeypatch.setattr(pipeline, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: is_terminal)))
    result = kl("pipeline", "run", good, "--checkpoint", good.parent / "c", *arguments)
    assert result.code == 0, result.told
    assert ("in half the time, run once: kl pipeline warm-up" in result.told) is is_told


def test_warm_up_makes_the_archive_once(kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparkbridge.pipelines.runner as runner
    from sparkbridge.local import fast_start

    monkeypatch.setenv(fast_start.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "missing_requirements", list)
    monkeypatch.setattr(fast_start, "find_java", lambda: fast_start.Java("java", 17, "17"))
    monkeypatch.setattr(fast_start, "_record", lambda home, archive: archive.write_bytes(bytes(2_000_000)))
    result = kl("pipeline", "warm-up")
    archive = fast_start.class_archive()
    assert result.code == 0, result.told
    assert result.text.startswith(f"{archive}: 2 MB, created in ")
    assert "starting Spark once" in result.told
    again = kl("pipeline", "warm-up")
    assert (again.code, again.text, again.told) == (0, f"{archive} exists already.\n", "")


def test_warm_up_explains_its_failure(kl: Kl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparkbridge.pipelines.runner as runner
    from sparkbridge.local import fast_start

    (tmp_path / "file").write_text("")
    monkeypatch.setenv(fast_start.CACHE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(runner, "missing_requirements", list)
    monkeypatch.setattr(fast_start, "find_java", lambda: fast_start.Java("java", 17, "17"))
    result = kl("pipeline", "warm-up")
    assert result.code == 1
    assert f"kl: cannot write to {tmp_path / 'file'}" in result.told
    assert "KAFKALITE_SPARK_CACHE" in result.told


SHOWN = SimpleNamespace(
    query="orders",
    batch_id=3,
    columns=["country", "orders", "orders"],
    rows=[["NZ", "3", "4"], [None, "x" * 80, "a\n\x1b[2Jb"]],
    documents=['{"country": "NZ", "orders": 3}', '{"country": null, "orders": 4}'],
)


def test_rows_of_a_console_sink(capsys: pytest.CaptureFixture[str]) -> None:
    """Two columns may have the same name; control characters are escaped."""
    Watcher().on_rows(SHOWN)
    heading, head, first, second = capsys.readouterr().out.splitlines()
    assert heading == "-- batch 3, orders"
    assert (head.split(), first.split()) == (["country", "orders", "orders"], ["NZ", "3", "4"])
    assert second.split() == ["NULL", "x" * 59 + "…", "a\\n\\x1b[2Jb"]


def test_rows_of_a_console_sink_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per row, distinct from those of batches; with json they are part of the one document."""
    expected = [
        {"query": "orders", "batch_id": 3, "row": {"country": "NZ", "orders": 3}},
        {"query": "orders", "batch_id": 3, "row": {"country": None, "orders": 4}},
    ]
    Watcher("jsonl").on_rows(SHOWN)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    watcher = Watcher("json")
    watcher.on_rows(SHOWN)
    assert capsys.readouterr().out == ""
    run = SimpleNamespace(pipeline=SimpleNamespace(name="orders"), queries=[])
    report = SimpleNamespace(run=run, was_stopped=False, findings=[])
    print_report(report, "json", watcher.rows)
    assert json.loads(capsys.readouterr().out)["rows"] == expected


@pytest.mark.parametrize("given", [{"bootstrap": "there:1"}, {}])
def test_a_demo_makes_its_topics_on_other_brokers_only_if_the_command_line_names_them(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KL_BOOTSTRAP_SERVERS", "real:9092")
    with pipeline.brokers(Invocation(**given), is_demo=True) as servers:
        assert servers.startswith("there:1" if given else "127.0.0.1:")
    with pipeline.brokers(Invocation(**given), is_demo=False) as servers:
        assert servers == ("there:1" if given else "real:9092")
