"""The scripts of a checkout: any working directory, a path with spaces, a second run that is instant."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = ("bin/setup", "bin/kl", "bin/kl-dev-cluster", "bin/quickstart", "bin/test", ".ci/run")

# Replaces Python where only the script is tested: `-m venv` makes a directory with itself inside,
# anything else is recorded.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
-c*) exit 0 ;;
--version) echo "Python 3.99" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip" ;;
*) printf '%s\\n' "$PWD: $*" >>"$FAKE_LOG" ;;
esac
"""

#: The environment without what selects this run's own Python and virtual environment.
_OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("KAFKALITE_")}


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """The scripts alone, in a directory with spaces, with a Python that installs nothing."""
    root = tmp_path / "a check out"
    for name in (*SCRIPTS, "setup.cfg", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, root / name)
    fake = tmp_path / "fake python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    return root


def run(checkout: Path, *command: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    log = checkout.parent / "calls"
    log.write_text("")
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        env=_OUTSIDE | {"KAFKALITE_PYTHON": str(checkout.parent / "fake python"), "FAKE_LOG": str(log)},
    )
    return done, log.read_text().splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_executable_and_plain_sh(name: str, repository: Path) -> None:
    script = repository / name
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n", script]).returncode == 0


def test_kl_sets_itself_up_once_and_passes_its_arguments(checkout: Path, tmp_path: Path) -> None:
    done, calls = run(checkout, str(checkout / "bin/kl"), "produce", "a topic", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "setting up .venv with Python 3.99" in done.stderr
    assert done.stderr.endswith("ready.\n")
    install, kl = calls
    assert install.startswith(f"{checkout}: -m pip install ")
    assert install.endswith(" --editable .[cli]")
    assert kl == f"{tmp_path}: -m kafkalite produce a topic"

    again, calls = run(checkout, str(checkout / "bin/kl"), "version", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert [call.partition(": ")[2] for call in calls] == ["-m kafkalite version"]
    assert not (checkout / ".venv.lock").exists()


def test_a_changed_setup_cfg_installs_again(checkout: Path, tmp_path: Path) -> None:
    run(checkout, str(checkout / "bin/setup"), "all", cwd=tmp_path)
    assert run(checkout, str(checkout / "bin/setup"), "all", cwd=tmp_path)[0].stderr == ""
    with (checkout / "setup.cfg").open("a") as stream:
        stream.write("\n# changed\n")
    assert "installing" in run(checkout, str(checkout / "bin/setup"), "all", cwd=tmp_path)[0].stderr


def test_setup_without_arguments_is_for_all(checkout: Path, tmp_path: Path) -> None:
    done, calls = run(checkout, str(checkout / "bin/setup"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [call.rpartition(" ")[2] for call in calls] == [".[all]"]


def test_setup_describes_itself(checkout: Path, tmp_path: Path) -> None:
    done, calls = run(checkout, str(checkout / "bin/setup"), "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr, calls) == (0, "", [])
    assert done.stdout.startswith("Make .venv ready for the extras named as arguments")


def test_a_superset_is_not_installed_again(checkout: Path, tmp_path: Path) -> None:
    """bin/kl after bin/quickstart, and extras that came one by one."""

    def setup(*extras: str) -> list[str]:
        done, calls = run(checkout, str(checkout / "bin/setup"), *extras, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return [call.rpartition(" ")[2] for call in calls]

    assert setup("spark", "all") == [".[all,spark]"]
    assert setup("all") == setup("spark") == setup("all", "spark") == []
    assert setup("compression", "server", "cli", "arrow") == [], "all has them"
    assert setup("test") == [".[test]"]
    assert setup("all", "test") == setup("test", "spark") == []
    with (checkout / "pyproject.toml").open("a") as stream:
        stream.write("\n# changed\n")
    assert setup("all") == [".[all]"]
    assert setup("all", "test") == [".[all,test]"], "the stamp of before does not count"


def test_all_contains_every_extra_but_pandas(repository: Path) -> None:
    """Where pandas is installed, pyarrow loads it in every process of Spark: 20 MB each."""
    declared = configparser.ConfigParser()
    declared.read(repository / "setup.cfg")
    extras = declared["options.extras_require"]
    parts = re.findall(r"installed=\$installed-([a-z-]+)-\s", (repository / "bin/setup").read_text())[
        0
    ].split("-")
    assert {*parts, "pandas", "all", "test", "dev"} == set(extras)
    names = {part: set(re.findall(r"^[\w-]+", extras[part], re.MULTILINE)) for part in (*parts, "all")}
    assert set.union(*(names[part] for part in parts)) == names["all"]


def test_an_extra_that_does_not_exist_is_refused(checkout: Path, tmp_path: Path) -> None:
    done, calls = run(checkout, str(checkout / "bin/setup"), "all", "sparks", cwd=tmp_path)
    assert (done.returncode, calls) == (2, [])
    extras = "compression server cli arrow pandas spark tls oauth all test dev"
    assert f"no extra called 'sparks'; there are: {extras}\n" in done.stderr
    assert not (checkout / ".venv").exists()


def test_quickstart_and_test_pass_their_arguments(checkout: Path, tmp_path: Path) -> None:
    _, calls = run(checkout, str(checkout / "bin/quickstart"), "my file", cwd=tmp_path)
    assert calls[-1] == f"{tmp_path}: {checkout}/bin/../examples/quickstart/quickstart.py my file"
    _, calls = run(checkout, str(checkout / "bin/test"), "-k", "x", cwd=tmp_path)
    assert calls[-1] == f"{checkout}: -m pytest -k x"
    _, calls = run(checkout, str(checkout / "bin/test"), cwd=tmp_path)
    assert calls[-1] == f"{checkout}: -m pytest -n 4 -m not deployment"


def test_the_dev_cluster_is_kl_dev_with_a_place_for_its_data(checkout: Path, tmp_path: Path) -> None:
    _, calls = run(checkout, str(checkout / "bin/kl-dev-cluster"), "--topic", "events:3", cwd=tmp_path)
    data = f"{checkout}/bin/../data/dev-cluster"
    assert calls[-1] == f"{tmp_path}: -m kafkalite dev -n 3 --data {data} --topic events:3"


def test_a_lock_of_a_dead_process_is_free(checkout: Path, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (checkout / ".venv.lock").write_text(f"{gone.pid}\n")
    assert run(checkout, str(checkout / "bin/setup"), "all", cwd=tmp_path)[0].returncode == 0


def test_a_failed_installation_reports_the_cause(checkout: Path, tmp_path: Path) -> None:
    fake = tmp_path / "fake python"
    fake.write_text(
        FAKE_PYTHON.replace('printf \'%s\\n\' "$PWD: $*" >>"$FAKE_LOG"', "echo no network; exit 1")
    )
    done, _ = run(checkout, str(checkout / "bin/kl"), cwd=tmp_path)
    assert done.returncode == 1
    assert "pip could not install it" in done.stderr
    assert "no network" in done.stderr
    assert "ready" not in done.stderr


def test_no_recent_python(checkout: Path, tmp_path: Path) -> None:
    old = tmp_path / "path" / "python3"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\ncase "$*" in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    for tool in ("sh", "dirname", "pwd", "sort", "tr", "sed", "cat", "cksum", "rm", "sleep"):
        found = shutil.which(tool)
        if found:
            (old.parent / tool).symlink_to(found)
    done = subprocess.run(
        [str(checkout / "bin/kl")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": str(old.parent)},
    )
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, and found: Python 3.9.2" in done.stderr
