"""docs/spark.md has every option, with the default and the text of the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkbridge.option_reader import SparkOption
from sparkbridge.options import SINK_OPTIONS, SOURCE_OPTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"
APPLIES = {"both": "s b", "stream": "s", "batch": "b"}


def _row(option: SparkOption) -> str:
    default = f"`{option.default}`" if option.default else ""
    return f"| `{option.name}` | {default} | {APPLIES[option.applies]} | {option.doc} |"


@pytest.mark.parametrize(
    ("heading", "options"), [("Options of the source", SOURCE_OPTIONS), ("Options of the sink", SINK_OPTIONS)]
)
def test_the_tables_are_those_of_the_code(heading: str, options: Sequence[SparkOption]) -> None:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [_row(option) for option in options]
