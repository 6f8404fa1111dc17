"""Checks that the checkpoints and outputs of a run belong to its queries, without Spark.

Only local directories are checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines.definition import Pipeline, Sink
from sparkbridge.pipelines.files import is_url

_METADATA: Final = "_spark_metadata"


def checkpoint_path(directory: str, pipeline: Pipeline, sink: Sink) -> str:
    """Return the checkpoint directory of ``sink``.

    It is ``directory`` for ``[sink]``, and its subdirectory NAME for ``[sinks.NAME]``.
    """
    return directory if pipeline.has_one_sink else f"{directory.rstrip('/')}/{sink.name}"


def require_own_checkpoint(directory: str, pipeline: Pipeline) -> None:
    """Raise PipelineError if ``[sinks.NAME]`` would use a checkpoint directory of ``[sink]``, or vice versa.

    The queries would not find their checkpoints, and would read and write all data again.
    """
    if is_url(directory):
        return
    home = Path(directory)
    if pipeline.has_one_sink:
        others = [] if _is_checkpoint(home) else sorted(at.parent.name for at in home.glob("*/metadata"))
        was = f"of the sinks {', '.join(others)}" if others else ""
        advice = f"move {others[0]}'s to {home}, if [sink] continues it" if others else ""
    else:
        was = "of a single [sink]" if _is_checkpoint(home) else ""
        advice = f"move it to {home / pipeline.sinks[0].name}, if that sink continues it"
    if was:
        raise PipelineError(
            f"checkpoint {home} is that {was}: this pipeline would read and write everything again",
            hint=f"{advice}; or give another --checkpoint DIR",
        )


def require_own_output(output: str, checkpoint: str) -> None:
    """Raise PipelineError if the directory ``output`` has later batches than the directory ``checkpoint``.

    Then a query with another checkpoint wrote these batches. Spark stores the numbers of written batches, but
    no query id, in ``output``. So it would silently skip the batches of this query with the same numbers.
    """
    if is_url(output) or is_url(checkpoint):
        return
    written = _latest_batch(Path(output) / _METADATA)
    if written > _latest_batch(Path(checkpoint) / "offsets"):
        raise PipelineError(
            f"parquet {output} holds batches 0 to {written} of another checkpoint than {checkpoint}:"
            " Spark would skip those of this run",
            hint="give another directory, move this one away, or give the --checkpoint it was written with",
        )


def written_files(output: Path) -> list[Path] | None:
    """Return the Parquet files of finished batches from Spark's metadata log; None if there is no log.

    Other Parquet files in the directory are left over from killed runs and must not be read.
    """
    log = output / _METADATA
    numbers = (
        {path.name: path.name.removesuffix(".compact") for path in log.iterdir()} if log.is_dir() else {}
    )
    batches = {int(number): name for name, number in numbers.items() if number.isdecimal()}
    if not batches:
        return None
    begin = max((batch for batch, name in batches.items() if name.endswith(".compact")), default=0)
    lines = [
        line
        for batch in sorted(batches)
        if batch >= begin
        for line in (log / batches[batch]).read_text("utf-8").splitlines()[1:]  # the first line is a version
    ]
    return [Path(unquote(urlsplit(json.loads(line)["path"]).path)) for line in lines]


def _latest_batch(log: Path) -> int:
    """Return the latest batch number in a Spark log (files 7, 8, 9.compact); -1 if it has none."""
    names = [path.name.removesuffix(".compact") for path in log.iterdir()] if log.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _is_checkpoint(directory: Path) -> bool:
    return (directory / "metadata").is_file()
