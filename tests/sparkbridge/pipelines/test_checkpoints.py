"""Checkpoints and outputs of a pipeline's queries, without a JVM."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines.checkpoints import (
    checkpoint_path,
    require_own_checkpoint,
    require_own_output,
    written_files,
)
from sparkbridge.pipelines.definition import Pipeline
from sparkbridge.pipelines.engine import Setting, output_path
from sparkbridge.pipelines.files import PipelineFile
from sparkbridge.pipelines.parsing import parse_pipeline


def pipeline(*sinks: str) -> Pipeline:
    """One sink for each heading."""
    text = '[pipeline]\nname = "p"\ntrigger = "1 second"\n[source]\ntopic = "t"\n'
    text += "".join(f'[{heading}]\nparquet = "{heading}"\n' for heading in sinks)
    found, problems = parse_pipeline(tomllib.loads(text))
    assert not any(each for each in problems if not each.is_warning), problems
    return found


@pytest.mark.parametrize(
    ("sinks", "directories"),
    [(["sink"], ["/cp"]), (["sinks.a"], ["/cp/a"]), (["sinks.a", "sinks.b"], ["/cp/a", "/cp/b"])],
)
def test_an_added_sink_does_not_move_the_others(sinks: list[str], directories: list[str]) -> None:
    found = pipeline(*sinks)
    assert [checkpoint_path("/cp", found, sink) for sink in found.sinks] == directories


def test_a_checkpoint_of_other_sinks_is_refused(tmp_path: Path) -> None:
    """Otherwise the queries would find no checkpoint and write everything again."""
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    (one / "metadata").touch()
    for name in ("a", "b"):
        (several / name).mkdir(parents=True)
        (several / name / "metadata").touch()
    require_own_checkpoint(str(one), pipeline("sink"))
    require_own_checkpoint(str(several), pipeline("sinks.a", "sinks.b", "sinks.c"))
    require_own_checkpoint(str(tmp_path / "new"), pipeline("sinks.a"))
    with pytest.raises(PipelineError, match=r"one is that of a single \[sink\]") as caught:
        require_own_checkpoint(str(one), pipeline("sinks.a", "sinks.b"))
    assert f"move it to {one / 'a'}" in caught.value.hint
    with pytest.raises(PipelineError, match=r"several is that of the sinks a, b") as caught:
        require_own_checkpoint(str(several), pipeline("sink"))
    assert f"move a's to {several}" in caught.value.hint


@pytest.mark.parametrize(
    ("written", "planned", "is_own"),
    [
        ([], [], True),
        ([], [0, 1], True),
        (["0", "1", ".0.crc"], ["0", "1"], True),
        (["0"], ["0", "1"], True),  # the last batch is repeated
        (["9.compact", "10"], ["9", "10", "11"], True),
        (["0"], [], False),
        (["9.compact", "10"], ["0", "1"], False),
        (["9.compact"], ["8"], False),
    ],
)
def test_files_of_another_checkpoint_are_refused(
    tmp_path: Path, written: list[str], planned: list[str], is_own: bool
) -> None:
    """Spark would skip batch 0 of a new query because batch 0 is written, without an error."""
    for directory, names in (("out/_spark_metadata", written), ("cp/offsets", planned)):
        (tmp_path / directory).mkdir(parents=True)
        for name in names:
            (tmp_path / directory / str(name)).touch()
    output, checkpoint = str(tmp_path / "out"), str(tmp_path / "cp")
    if is_own:
        require_own_output(output, checkpoint)
    else:
        with pytest.raises(PipelineError, match="of another checkpoint than"):
            require_own_output(output, checkpoint)
    require_own_output("s3a://bucket/out", checkpoint)


def test_only_files_of_finished_batches_are_read(tmp_path: Path) -> None:
    """Files of a killed run are not in Spark's list; a compacted list has all earlier files."""
    assert written_files(tmp_path) is None
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    for name, files in (("8", ["a"]), ("9.compact", ["a", "day=1/b%20c"]), ("10", ["d"]), (".10.crc", [])):
        lines = ["v1", *(json.dumps({"path": f"file:///out/{file}", "action": "add"}) for file in files)]
        (log / name).write_text("\n".join(lines))
    assert written_files(tmp_path) == [Path("/out/a"), Path("/out/day=1/b c"), Path("/out/d")]


def test_urls_are_not_paths_of_this_machine() -> None:
    file = PipelineFile(Path("/pipelines/p.toml"), None, ())
    assert file.locate("cp") == "/pipelines/cp"
    assert file.locate("s3a://bucket/cp") == "s3a://bucket/cp"
    assert file.locate("hdfs:/cp") == "hdfs:/cp"
    found = pipeline("sinks.a")
    assert checkpoint_path("s3a://bucket/cp/", found, found.sinks[0]) == "s3a://bucket/cp/a"
    require_own_checkpoint("s3a://bucket/cp", found)
    (sink,) = pipeline("sink").sinks
    assert output_path(file, sink, Setting("h:1")) == "/pipelines/sink"
