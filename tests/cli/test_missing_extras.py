"""A package of an extra that is not installed: one sentence, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def python(
    repository: Path, blocked: set[str], code: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.replace("{blocked}", repr(blocked)) + code, *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_kl_without_click_is_one_sentence(repository: Path) -> None:
    done = python(repository, {"click", "rich", "yaml"}, "from kafkalite.cli import main; main()", "--help")
    assert done.returncode == 1
    assert done.stderr == (
        "kl: the command line needs the package click, which is not installed\n"
        "    hint: pip install 'kafkalite[cli]'\n"
    )


def test_a_missing_package_of_one_command_is_one_sentence(repository: Path) -> None:
    code = "from kafkalite.cli import main; main()"
    done = python(repository, {"yaml"}, code, "config", "list", "topic", "-o", "yaml")
    assert done.returncode == 1
    assert done.stderr == (
        "kl: this command needs the package yaml, which is not installed\n"
        "    hint: pip install 'kafkalite[all]'\n"
    )


@pytest.mark.parametrize(
    ("blocked", "code", "sentence"),
    [
        (
            "pysyncobj",
            "from kafkalite.testing import SyncCluster\nwith SyncCluster(brokers=3): pass",
            "a quorum of several controllers needs the package pysyncobj, which is not installed "
            "(pip install 'kafkalite[server]')",
        ),
        (
            "cramjam",
            "import asyncio, kafkalite\n"
            "asyncio.run(kafkalite.Producer('inproc://none', compression_type='zstd').start())",
            "compression.type=zstd needs the package cramjam, which is not installed "
            "(pip install 'kafkalite[compression]')",
        ),
        (
            "pyarrow",
            "import kafkalite\nkafkalite.RecordBatchBuilder().extend_arrow([])",
            "Arrow data needs the package pyarrow, which is not installed (pip install 'kafkalite[arrow]')",
        ),
    ],
)
def test_a_missing_extra_of_the_library_names_the_extra(
    repository: Path, blocked: str, code: str, sentence: str
) -> None:
    done = python(repository, {blocked}, code)
    assert done.stderr.splitlines()[-1] == f"kafkalite.errors.MissingExtraError: {sentence}"


def test_the_fixture_without_pysyncobj_fails_with_one_sentence(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\n@pytest.mark.kafkalite(brokers=3)\ndef test_three(kafkalite): pass\n"
    )
    code = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    flags = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path))
    done = python(repository, {"pysyncobj"}, code, *flags, str(tmp_path / "test_three.py"))
    assert done.returncode == 1, done.stdout
    sentence = "needs the package pysyncobj, which is not installed (pip install 'kafkalite[server]')"
    failure = done.stdout.split("short test summary info")[0]
    assert failure.count(sentence) == 1 and "No module named" not in done.stdout, done.stdout
    assert "Traceback" not in done.stdout and "adapter.py" not in done.stdout


def test_data_frames_without_pandas_and_pyarrow_name_the_extra_that_contains_both(repository: Path) -> None:
    for code in (
        "asyncio.run(kafkalite.Consumer('t').to_pandas())",
        "kafkalite.Table('t', bootstrap_servers='inproc://none').to_pandas()",
    ):
        done = python(repository, {"pandas", "pyarrow"}, f"import asyncio, kafkalite\n{code}")
        assert done.stderr.splitlines()[-1] == (
            "kafkalite.errors.MissingExtraError: a DataFrame needs the package pandas, which is not "
            "installed (pip install 'kafkalite[pandas]')"
        )
