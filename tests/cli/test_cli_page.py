"""docs/cli.md is correct: its commands run, its tables are those of the program."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from kafkalite.cli import app, exit_codes

FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(repository: Path) -> str:
    return (repository / "docs" / "cli.md").read_text()


def test_the_commands_run(repository: Path, servers: str, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    script = "set -e -o pipefail\n" + f'kl() {{ {python} -m kafkalite "$@"; }}\n'
    script += "\n".join(FENCE.findall(page(repository))).replace("python3 -c", f"{python} -c")
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        env=os.environ
        | {
            "KL_BOOTSTRAP_SERVERS": servers,
            "PYTHONPATH": str(repository),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alice=1" in done.stdout
    assert "   alice 1 docs" in done.stdout


def test_every_command_is_named(repository: Path) -> None:
    text = page(repository)
    for name in app.COMMANDS:
        assert re.search(rf"`(kl )?{name}\b", text), name


def test_the_exit_codes_are_those_of_the_program(repository: Path) -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \| .* \|$", page(repository), re.MULTILINE)}
    assert documented == {value for value in vars(exit_codes).values() if isinstance(value, int)}
