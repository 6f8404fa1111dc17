"""Pipeline files: lines of problems, --set, referenced files, and the examples."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark import cloudpickle

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines import demo, files, frames
from sparkbridge.pipelines.definition import FunctionRef
from sparkbridge.pipelines.files import apply_override, find_line
from sparkbridge.pipelines.parsing import parse_pipeline

GOOD = """\
# a comment
[pipeline]
name = "orders"
trigger = "5 seconds"

[source]
topic = "orders"

[tables.prices]
csv = "prices.csv"

[[transform]]
sql = "SELECT * FROM source"

[[transform]]
name = "priced"
python = "steps.py:price"
watermark = { column = "time", delay = "1 minute" }

[sink]
topic = "priced"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "prices.csv").write_text("id,price\n")
    (tmp_path / "steps.py").write_text("def price(frame, views):\n    raise SystemExit('never run')\n")
    return tmp_path


def problem_lines(place: Path, text: str, *overrides: str) -> list[str]:
    path = place / "pipeline.toml"
    path.write_text(text)
    file = files.read(path, overrides)
    assert (file.pipeline is None) == bool(file.errors)
    return [files.tell(problem, Path("p.toml")) for problem in file.problems]


def test_a_good_file(place: Path) -> None:
    assert problem_lines(place, GOOD) == []
    assert files.read(place).path == place / "pipeline.toml"  # a directory is accepted


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('name = "orders"', "name = orders", "p.toml:3: is not TOML: Invalid value"),
        ('topic = "priced"\n', 'topic = "pri', "p.toml:21: is not TOML: Unterminated string"),
        (
            'topic = "orders"',
            'topc = "orders"',
            "p.toml:7: [source] topc is not known here; did you mean topic?",
        ),
        ("[source]", "[sorce]", "p.toml:6: sorce is not known here; did you mean source?"),
        (
            "prices.csv",
            "price.csv",
            "p.toml:10: [tables.prices] csv: there is no price.csv; did you mean prices.csv?",
        ),
        (
            "steps.py:price",
            "steps.py:prices",
            "p.toml:17: [transform 2] python: steps.py has no function 'prices'; did you mean price?",
        ),
        (
            "steps.py:price",
            "stops.py:price",
            "p.toml:17: [transform 2] python: there is no stops.py; did you mean steps.py?",
        ),
        ("FROM source", "FROM sourc", "p.toml:13: [transform 1] sql reads 'sourc', which is not a view"),
        ("1 minute", "1 minte", "p.toml:18: [transform 2.watermark] delay is '1 minte'"),
        (
            "[sink]",
            "[sink]\noptions = { exactlyOnc = true }",
            "p.toml:21: [sink] options.exactlyOnc is not an option",
        ),
    ],
)
def test_the_line_of_a_mistake(place: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    lines = problem_lines(place, GOOD.replace(old, new))
    assert [line for line in lines if line.startswith(expected)], lines


def test_invalid_python(place: Path) -> None:
    (place / "steps.py").write_text("def price(:\n")
    (line,) = problem_lines(place, GOOD)
    assert "steps.py:1 is not Python" in line


def test_an_imported_function_is_accepted(place: Path) -> None:
    (place / "steps.py").write_text("from elsewhere import work as price\n")
    assert problem_lines(place, GOOD) == []


def test_missing_files_are_reported_with_all_other_mistakes(place: Path) -> None:
    text = GOOD.replace('topic = "priced"', 'topic = 7\n[demo]\nload = ""').replace("prices.csv", "price.csv")
    assert [line.split(";")[0] for line in problem_lines(place, text)] == [
        "p.toml:10: [tables.prices] csv: there is no price.csv",
        "p.toml:21: [sink] topic is 7, but must be a string",
        "p.toml:23: [demo] load is empty",
    ]


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "x" * 300, "a\\u0000b"])
@pytest.mark.parametrize(
    "old", ['"prices.csv"', '"steps.py:price"', 'topic = "priced"', 'trigger = "5 seconds"']
)
def test_an_invalid_path(place: Path, old: str, path: str) -> None:
    new = {
        '"prices.csv"': f'"{path}"',
        '"steps.py:price"': f'"{path}.py:price"',
        'topic = "priced"': f'parquet = "{path}"',
        'trigger = "5 seconds"': f'checkpoint = "{path}"\ntrigger = "5 seconds"',
    }[old]
    lines = problem_lines(place, GOOD.replace(old, new))
    is_made = path == "x" * 300 and old in {
        'topic = "priced"',
        'trigger = "5 seconds"',
    }  # the run will report it
    assert is_made or [line for line in lines if "is not a valid path" in line or "can't be read" in line], (
        lines
    )


@pytest.mark.parametrize(
    ("path", "is_there"),
    [
        ("prices.csv", True),
        ("*.csv", True),
        ("./{prices,more}.csv", True),
        ("/PLACE/prices.csv", True),
        ("/PLACE/pri*.csv", True),
        ("/PLACE/price.csv", False),
        ("*.parquet", False),
        ("s3a://bucket/prices.csv", True),
    ],
)
def test_the_file_of_a_table(place: Path, path: str, is_there: bool) -> None:
    text = GOOD.replace("prices.csv", path.replace("/PLACE", str(place)))
    assert problem_lines(place, text) == [] if is_there else "there is no" in problem_lines(place, text)[0]


def test_a_function_can_be_pickled_for_a_process_that_cannot_import_it(place: Path) -> None:
    """A UDF is pickled for Spark's workers, with the objects of its file that it uses."""
    pickled = place / "function.pickle"
    (place / "steps.py").write_text(
        "MARK = '!'\n\ndef louder(text):\n    return text.upper() + MARK\n\ndef price(): return louder\n"
    )
    (place / "pipeline.toml").write_text(GOOD)
    price = frames.function(files.read(place), FunctionRef("steps.py", "price"))
    pickled.write_bytes(cloudpickle.dumps(price()))
    program = f"import pickle; print(pickle.load(open({str(pickled)!r}, 'rb'))('loud'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout == "LOUD!\n", done.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sink.topic=out", {"sink": {"topic": "out"}}),
        ("sink.rows=5", {"sink": {"rows": 5}}),
        ("sink.console=true", {"sink": {"console": True}}),
        ("source.topics=['a', 'b']", {"source": {"topics": ["a", "b"]}}),
        ("source.options.kafka.group.id=g", {"source": {"options": {"kafka.group.id": "g"}}}),
        ("spark.spark.ui.enabled=false", {"spark": {"spark.ui.enabled": False}}),
        ("a.b=c=d", {"a": {"b": "c=d"}}),
    ],
)
def test_an_override_sets_a_value(override: str, expected: Any) -> None:
    document: dict[str, Any] = {}
    apply_override(document, override)
    assert document == expected


def test_an_override_in_a_list() -> None:
    document = {"transform": [{"sql": "a"}, {"sql": "b"}]}
    apply_override(document, "transform.2.sql=SELECT 1")
    assert document["transform"] == [{"sql": "a"}, {"sql": "SELECT 1"}]


def test_a_part_of_an_override_in_quotes_may_contain_dots() -> None:
    document: dict[str, Any] = {"pipeline": {"name": "p"}}
    apply_override(document, 'spark."spark.sql.session.timeZone"=UTC')
    apply_override(document, "spark.spark.log.level=OFF")
    assert document["spark"] == {"spark.sql.session.timeZone": "UTC", "spark.log.level": "OFF"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sink.topic", "is not table.key=value"),
        ("=x", "is not table.key=value"),
        ("pipeline.name.x=1", "pipeline.name is not a table"),
        ("transform.options.kafka.acks=1", "'options' is not from 1 to 1"),
        ("source.options.kafka.acks=1", "source.options is not a table"),
        ("transform.3.sql=x", "'3' is not from 1 to 1"),
        ("transform.sql=x", "select one, from 1"),
    ],
)
def test_an_invalid_override(override: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        document = {"pipeline": {"name": "p"}, "source": {"options": "none"}, "transform": [{"sql": "a"}]}
        apply_override(document, override)


def test_lines_of_keys_in_tables_of_one_line() -> None:
    text = "[source]\ntopic = 'a'\ndecode = { format = 'json' }\n"
    text += "[[transform]]\nsql = 'x'\n[transform.watermark]\n"
    assert find_line(text, "source.decode", "schema") == 3
    assert find_line(text, "transform 1", "sql") == 5
    assert find_line(text, "transform 1.watermark", "delay") == 6
    assert find_line(text, "", "sorce") == 0
    assert find_line("sorce = 1\n", "", "sorce") == 1


def test_pipelines_are_found_in_a_directory_and_one_below(place: Path) -> None:
    (place / "pipeline.toml").write_text(GOOD)
    (place / "pyproject.toml").write_text("[project]\n")
    below = place / "b"
    below.mkdir()
    (below / "x.toml").write_text("[pipeline]\n")
    assert files.find(place) == [below / "x.toml", place / "pipeline.toml"]


def test_the_examples_are_valid_and_their_input_is_the_same_twice() -> None:
    shipped = files.shipped()
    assert shipped is not None
    found = files.find(shipped)
    assert [path.parent.name for path in found] == ["access_log", "donut_revenue", "topic_export"]
    for path in found:
        file = files.read(path, ["demo.settings.file=", "demo.settings.lines=200"])
        assert file.problems == ()
        assert file.pipeline is not None
        first = list(demo.records(file))
        assert first == list(demo.records(file))
        assert {record.topic for record in first} == set(file.pipeline.source.subscribe)


def test_the_file_of_the_documentation_is_valid() -> None:
    page = Path(__file__).parents[3] / "docs" / "pipelines.md"
    whole, check = re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    pipeline, problems = parse_pipeline(tomllib.loads(whole))
    assert problems == []
    assert pipeline.sinks[0].json_columns == ("minute", "revenue")
    pipeline, problems = parse_pipeline(tomllib.loads(whole + check))
    assert problems == []
    assert list(pipeline.check.sql) == ["no order twice"]


@pytest.mark.parametrize(
    ("old", "new"), [('topic = "orders"', 'topc = "orders"'), ("[source]", "[sorce]"), ("[sink]", "[sinc]")]
)
def test_a_typing_error_is_one_mistake(place: Path, old: str, new: str) -> None:
    (line,) = [line for line in problem_lines(place, GOOD.replace(old, new)) if "view" not in line]
    assert "did you mean" in line
