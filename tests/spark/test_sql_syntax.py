"""The syntax of queries, checked by Spark's own parser in a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkbridge.pipelines import files, sql_syntax
from sparkbridge.pipelines.sql_syntax import SqlSyntax

PIPELINE = """
[pipeline]
name = "orders"
checkpoint = "c"

[source]
topic = "orders"

[[transform]]
sql = "SELECT value FROM input"

[[transform]]
sql = '''
SELECT value
FORM step_1
'''

[sink]
topic = "copies"

[check.sql]
"all are there" = "SELECT count(* FROM output"
"""


@pytest.fixture(scope="module")
def syntax() -> Iterator[SqlSyntax]:
    with SqlSyntax() as syntax:
        yield syntax


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELECT a, count(*) AS n FROM input GROUP BY a", ""),
        ("WITH x AS (SELECT 1) SELECT no_such_function(b) FROM x TABLESAMPLE (1 ROWS)", ""),
        ("SELEC a FROM input", "near 'SELEC'"),
        ("SELECT a FROM input WHERE (", "PARSE_SYNTAX_ERROR"),
        ("SELECT 'a FROM input", "PARSE_SYNTAX_ERROR"),
        ("SELECT a\nFROM input\nGROUP a", ", in its line 3: GROUP a"),
    ],
)
def test_a_syntax_error_is_named_with_its_line(syntax: SqlSyntax, sql: str, problem: str) -> None:
    found = syntax.problem(sql)
    assert not syntax.unavailable
    assert (problem in found) if problem else not found, found


def test_every_query_of_a_file_is_checked_at_its_line(syntax: SqlSyntax, tmp_path: Path) -> None:
    path = tmp_path / "orders.toml"
    path.write_text(PIPELINE)
    assert files.read(path).pipeline is not None, "without a parser there is no mistake"
    file = files.read(path, sql_problem=syntax.problem)
    assert file.pipeline is None
    first, second = file.errors
    lines = PIPELINE.splitlines()
    assert lines[first.line - 1] == "sql = '''"
    assert "near 'FORM'" in first.message or "in its line 2: FORM step_1" in first.message
    assert lines[second.line - 1].startswith('"all are there"')


def test_the_jvm_ends_with_the_check() -> None:
    with SqlSyntax() as syntax:
        syntax.problem("SELECT 1")
        process = syntax._process
        assert process is not None
        assert process.poll() is None
    assert process.returncode is not None


def test_without_java_the_reason_is_known_and_no_query_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_syntax, "missing_requirements", lambda: ["no working java was found"])
    with SqlSyntax() as syntax:
        assert syntax.problem("SELEC") == ""
        assert syntax.unavailable == "no working java was found"
