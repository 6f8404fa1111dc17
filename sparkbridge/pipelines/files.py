"""Finds, reads and checks pipeline files, and applies ``--set``. Uses neither Spark nor a broker."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sparkbridge.errors import PipelineError
from sparkbridge.pipelines.definition import FunctionRef, Pipeline, Table
from sparkbridge.pipelines.parsing import parse_pipeline
from sparkbridge.pipelines.section import Problem, nearest

_AT_LINE: Final = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # two letters or more: C:/ is not a URL
_HEADING: Final = re.compile(r"\s*\[\[?\s*(?P<name>[^\]]+?)\s*\]\]?\s*(?:#.*)?")
FILE_NAME: Final = "pipeline.toml"  #: the file name of a pipeline that is named by its directory


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """A pipeline file and its problems. ``pipeline`` is None if at least one problem is an error."""

    path: Path
    pipeline: Pipeline | None
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(each for each in self.problems if not each.is_warning)

    @property
    def directory(self) -> Path:
        return self.path.resolve().parent

    def resolve(self, path: str) -> Path:
        """Return the absolute path for a path in the file. Relative paths start at the file's directory."""
        return (self.directory / Path(path).expanduser()).resolve()

    def locate(self, path: str) -> str:
        """Return a URL unchanged, and any other path as ``resolve`` does."""
        return path if is_url(path) else str(self.resolve(path))


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL such as ``s3a://bucket/x`` or ``hdfs:/x`` instead of a local path."""
    return _URL.match(path) is not None


def read(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    has_checkpoint: bool = True,
    sql_problem: Callable[[str], str] | None = None,
) -> PipelineFile:
    """Read and check one file, or FILE_NAME in the directory ``path``. Raises OSError.

    ``overrides`` are texts ``table.key=value``; raises PipelineError if one cannot be applied. Unless
    ``has_checkpoint`` (the run names a checkpoint), there is a warning if the sinks need one and the file
    names none. ``sql_problem(query)`` returns the syntax error of a query, or ""; without it, queries are not
    parsed.
    """
    if path.is_dir():
        path = path / FILE_NAME
    text = path.read_text("utf-8", "replace")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        at = _AT_LINE.search(str(problem))
        line = int(at[1]) if at and at[1] else text.count("\n") + 1
        message = f"is not TOML: {_AT_LINE.sub('', str(problem))}"
        return PipelineFile(path, None, (Problem("", "", message, line=line),))
    for override in overrides:
        apply_override(document, override)
    pipeline, problems = parse_pipeline(document)
    problems += _check_files(PipelineFile(path, pipeline, ()), pipeline)
    if sql_problem is not None:
        problems += _check_syntax(pipeline, sql_problem)
    if pipeline.needs_checkpoint and not has_checkpoint:
        message = "is missing: run needs --checkpoint DIR"
        hint = 'checkpoint = "DIR" in [pipeline]'
        problems.append(Problem("pipeline", "checkpoint", message, hint, is_warning=True))
    found_at = (replace(each, line=find_line(text, each.table, each.key)) for each in problems)
    located = tuple(sorted(found_at, key=lambda problem: problem.line))
    is_wrong = any(not each.is_warning for each in located)
    return PipelineFile(path, None if is_wrong else pipeline, located)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Apply an override such as ``sink.topic=out``. A value that is not TOML is a plain string.

    Raises PipelineError.
    """
    name, equals, text = override.partition("=")
    parts = _key_parts(name)
    if not equals or not all(parts):
        raise PipelineError(
            f"--set {override!r} is not table.key=value", hint="for example sink.topic=totals"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    place: Any = document
    for number, part in enumerate(parts[:-1], 1):
        if part in {"options", "settings", "spark", "sql"} and number < len(parts) - 1:
            parts = [*parts[:number], ".".join(parts[number:])]  # option names contain dots
        if isinstance(place, list):
            place = _item(place, part, override)
        else:
            place = place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise PipelineError(f"--set {override!r}: {'.'.join(parts[:number])} is not a table")
        if number == len(parts) - 1:
            break
    if isinstance(place, list):
        raise PipelineError(f"--set {override!r}: select one, from 1: {name}.1.sql=…")
    place[parts[-1]] = value


def _key_parts(name: str) -> list[str]:
    """Return the parts of a dotted key. As in TOML, a part in quotes may contain dots."""
    try:
        place: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return [part.strip() for part in name.split(".")]
    parts: list[str] = []
    while isinstance(place, dict):
        ((part, place),) = place.items()
        parts.append(part)
    return parts


def _item(listed: list[Any], part: str, override: str) -> Any:
    if part.isdecimal() and 1 <= int(part) <= len(listed):
        return listed[int(part) - 1]
    raise PipelineError(f"--set {override!r}: {part!r} is not from 1 to {len(listed)}")


def find(directory: Path) -> list[Path]:
    """Return the pipeline files in a directory and one level below it, sorted by path."""
    found = [path for pattern in ("*.toml", "*/*.toml") for path in directory.glob(pattern)]
    return sorted(path for path in found if _looks_like_one(path))


def named_by(path: Path) -> Path:
    """Return the path that selects a pipeline: its directory if the file is FILE_NAME, else the file."""
    return path.parent if path.name == FILE_NAME else path


def short_name(path: Path) -> str:
    """Return a pipeline's name as derived from its path, not from the contents of the file."""
    return path.parent.name if path.name == FILE_NAME else path.stem


def shipped() -> Path | None:
    """Return the directory of the example pipelines in a checkout. None in an installed package."""
    directory = Path(__file__).resolve().parents[2] / "examples" / "pipelines"
    return directory if directory.is_dir() else None


def _looks_like_one(path: Path) -> bool:
    try:
        return re.search(r"^\s*\[pipeline\]", path.read_text("utf-8", "replace"), re.MULTILINE) is not None
    except OSError:
        return False


def find_line(text: str, table: str, key: str) -> int:
    """Return the line number (from 1) of ``key`` in ``[table]``; 0 if neither is found.

    If only the table is found, returns the line of its heading. Searches the text, because tomllib keeps no
    line numbers.
    """
    wanted, number = table, 0
    if match := re.fullmatch(r"(.+) (\d+)((?:\..+)?)", table):  # the second [[transform]] is "transform 2"
        wanted, number = match[1] + match[3], int(match[2])
    headings = _headings(text, number, match[1] if match else "")
    best = 0
    for name, at, lines in headings:
        if name == wanted or wanted.startswith(f"{name}.") or name == "":
            inner = (
                wanted[len(name) :].lstrip(".").split(".", 1)[0] if name != wanted else key.split(".", 1)[0]
            )
            inner = inner or key.split(".", 1)[0]
            line = _line_of_key(lines, at, inner) if inner else 0
            if name == wanted and (line or at):
                return line or at
            best = line or best
    if not table and not best:  # a top-level table
        best = next((at for name, at, _ in headings if name == key or name.startswith(f"{key}.")), 0)
    return best


def _headings(text: str, number: int, listed: str) -> list[tuple[str, int, list[str]]]:
    """Return (name, line number, lines of the body) of each table in ``text``. The first is the top level.

    Of the array of tables ``[[listed]]``, only the table ``number`` (from 1) gets its name; the name of the
    other tables of the array is "(another)".
    """
    found: list[tuple[str, int, list[str]]] = [("", 0, [])]
    seen = 0
    for at, line in enumerate(text.splitlines(), 1):
        match = _HEADING.fullmatch(line)
        if match is None:
            found[-1][2].append(line)
            continue
        name = match["name"].replace('"', "")
        seen += name == listed and line.lstrip().startswith("[[")
        is_other = listed and (name == listed or name.startswith(f"{listed}.")) and seen != number
        found.append(("(another)" if is_other else name, at, []))
    return found


def _line_of_key(lines: list[str], heading: int, key: str) -> int:
    pattern = re.compile(rf'\s*["\']?{re.escape(key)}["\']?\s*[=.]')
    return next((heading + at for at, line in enumerate(lines, 1) if pattern.match(line)), 0)


def _check_files(file: PipelineFile, pipeline: Pipeline) -> list[Problem]:
    named: list[tuple[str, str, str, Callable[[Path], tuple[str, str] | None]]] = [
        (f"tables.{each.name}", each.format, each.path, partial(_table_problem, each))
        for each in pipeline.tables
    ]
    named += [(each.table, "parquet", each.parquet, _no_problem) for each in pipeline.sinks]
    named.append(("pipeline", "checkpoint", pipeline.checkpoint, _no_problem))
    functions: list[tuple[str, str, FunctionRef | None]] = [
        (f"transform {number}", "python", step.python) for number, step in enumerate(pipeline.steps, 1)
    ]
    functions.append(("check", "python", pipeline.check.python))
    functions.append(("demo", "load", pipeline.demo.load if pipeline.demo else None))
    named += [
        (table, key, each.path, partial(_function_problem, each)) for table, key, each in functions if each
    ]
    problems: list[Problem] = []
    for table, key, path, problem_of in named:
        if not path or is_url(path):
            continue
        try:
            problem = problem_of(file.resolve(path))
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # a path that is too long, has a zero byte, or begins with ~ and an unknown user
            problem = f"{path!r} is not a valid path: {error}", ""
        if problem:
            problems.append(Problem(table, key, *problem))
    return problems


def _check_syntax(pipeline: Pipeline, sql_problem: Callable[[str], str]) -> list[Problem]:
    queries = [(f"transform {number}", "sql", step.sql) for number, step in enumerate(pipeline.steps, 1)]
    queries += [("check.sql", name, query) for name, query in pipeline.check.sql.items()]
    found = [(table, key, sql_problem(query)) for table, key, query in queries if query.strip()]
    return [Problem(table, key, message) for table, key, message in found if message]


def _no_problem(path: Path) -> None:
    """Return None, which means no problem, for a path that the run creates."""


def _table_problem(table: Table, path: Path) -> tuple[str, str] | None:
    return None if _is_there(path) else (f"there is no {table.path}", _nearest_file(path))


def _is_there(path: Path) -> bool:
    """Whether ``path``, which may be a pattern, matches a file or directory.

    Returns True for a path with ``{a,b}``, which is not checked.
    """
    if path.exists() or "{" in str(path):
        return True
    return any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    names = [each.name for each in path.parent.iterdir()]
    return nearest(path.name, names)


def _function_problem(function: FunctionRef, path: Path) -> tuple[str, str] | None:
    """Return (message, hint), or None if ``path`` defines or imports ``function``. Does not run the file."""
    try:
        tree = ast.parse(path.read_text("utf-8"), str(path))
    except FileNotFoundError:
        return f"there is no {function.path}", _nearest_file(path)
    except SyntaxError as problem:
        return f"{function.path}:{problem.lineno} is not Python: {problem.msg}", ""
    except (OSError, UnicodeDecodeError) as problem:
        return f"{function.path} can't be read: {problem}", ""
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    ]
    if function.function in {*names, *imported}:
        return None
    hint = nearest(function.function, names) or f"it has {', '.join(names) or 'no function'}"
    return f"{function.path} has no function {function.function!r}", hint


def describe(problem: Problem, path: Path) -> Mapping[str, Any]:
    """Return a problem as a JSON document."""
    return {
        "file": str(path),
        "line": problem.line or None,
        "level": "warning" if problem.is_warning else "error",
        "table": problem.table or None,
        "key": problem.key or None,
        "message": problem.message,
        "hint": problem.hint or None,
    }


def tell(problem: Problem, path: Path) -> str:
    """Return a problem as text, such as ``pipeline.toml:7: [source] topc is not known here``."""
    at = f"{path}:{problem.line}" if problem.line else str(path)
    hint = f"; {problem.hint}" if problem.hint else ""
    level = "warning: " if problem.is_warning else ""
    is_sentence = not problem.place or problem.message.startswith(
        ("is ", "must ", "has ", "reads ", "can't ")
    )
    between = " " if is_sentence else ": "
    return f"{at}: {level}{f'{problem.place}{between}{problem.message}'.lstrip()}{hint}"
