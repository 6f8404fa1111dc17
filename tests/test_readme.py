"""README.md, typed from top to bottom into a fresh clone: with Java, and on a machine without it.

The clone has a virtual environment of its own, in which ``bin/setup`` really installs; packages of this
environment count as installed. The sections with a server on port 9092 run in a network of their own if
the system allows it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.deployment

BLOCK = re.compile(
    r"^## (?P<title>[^\n]+)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: The sections with `kl dev` on its default ports.
ON_FIXED_PORTS = {"In a shell", "A cluster"}
LIMIT_S = 600

#: Holds a network with nothing but a loopback interface until its input ends.
NETWORK = """
import fcntl, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
print("up", flush=True)
sys.stdin.read()
"""


class Block(NamedTuple):
    section: str
    language: str
    code: str


class Typed(NamedTuple):
    code: int
    out: str
    err: str


def blocks(text: str) -> Iterator[Block]:
    section = ""
    for found in BLOCK.finditer(text):
        if found["title"]:
            section = found["title"]
        else:
            yield Block(section, found["language"], found["code"])


def commands(code: str) -> Iterator[str]:
    """The lines of a shell block, without their comments."""
    for line in code.splitlines():
        command = re.sub(r"(^|\s+)# .*$", "", line).strip()
        if command:
            yield command


@dataclass
class Terminal:
    """A shell in the clone. ``network`` is a command prefix that enters the network of the servers."""

    clone: Path
    environment: dict[str, str]
    network: list[str]
    server: subprocess.Popen[str] | None = None
    printed: list[str] = field(default_factory=list)  #: by the server, until it is up

    def type(self, command: str, *, is_in_network: bool = False) -> Typed:
        prefix = self.network if is_in_network else []
        began = time.monotonic()
        done = subprocess.run(
            [*prefix, "bash", "-c", command],
            cwd=self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        print(f"{time.monotonic() - began:6.1f} s, exit code {done.returncode}: {command}", flush=True)
        return Typed(done.returncode, done.stdout, done.stderr)

    def serve(self, command: str) -> None:
        """Start a server in another terminal, and return when it has printed that it is up."""
        self.interrupt()
        self.server = subprocess.Popen(
            [*self.network, "bash", "-c", f"exec {command} 2>&1"],
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.server.stdout is not None
        self.printed = []
        for line in self.server.stdout:
            self.printed.append(line)
            if "Ctrl-C" in line:
                return
        raise AssertionError(f"{command} ended: {''.join(self.printed)}")

    def interrupt(self) -> None:
        """Press Ctrl-C in the server's terminal."""
        if self.server is None:
            return
        with self.server as server:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGINT)
            out, _ = server.communicate(timeout=60)
        self.server = None
        assert server.returncode in {0, 130, -signal.SIGINT}, out


@pytest.fixture(scope="module")
def network() -> Iterator[list[str]]:
    """A command prefix that enters a network without other programs, or none if this network will do."""
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    tools = shutil.which("unshare") and shutil.which("nsenter")
    with ExitStack() as ending:
        if tools:
            holder = ending.enter_context(
                subprocess.Popen(
                    [*command, sys.executable, "-c", NETWORK],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            assert holder.stdout is not None
            if holder.stdout.readline() == "up\n":
                users = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
                yield ["nsenter", "--target", str(holder.pid), "--net", *users]
                return
        for port in (9092, 9093, 9094):
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    pytest.skip(
                        f"README NOT TYPED: port {port} is in use, and `unshare --net` is not allowed"
                    )
        yield []


def path_without_java(places: str, directory: Path) -> str:
    """``places``, a PATH, in which directories with a java are replaced by links to their other programs."""
    kept: list[str] = []
    for number, place in enumerate(places.split(os.pathsep)):
        if not (Path(place) / "java").exists():
            kept.append(place)
            continue
        copy = directory / str(number)
        copy.mkdir(parents=True)
        for program in Path(place).iterdir():
            if not program.name.startswith("java"):
                (copy / program.name).symlink_to(program)
        kept.append(str(copy))
    return os.pathsep.join(kept)


@pytest.fixture
def terminal(tmp_path: Path, repository: Path, network: list[str], has_java: bool) -> Iterator[Terminal]:
    if not (repository / ".git").exists() or not shutil.which("git"):
        pytest.skip("README NOT TYPED: a fresh clone needs git and a repository")
    clone = tmp_path / "kafkalite"
    trusted = tmp_path / "gitconfig"  # the repository may belong to another user
    trusted.write_text("[safe]\n\tdirectory = *\n")
    subprocess.run(
        ["git", "clone", "-q", str(repository), str(clone)],
        check=True,
        timeout=LIMIT_S,
        env=os.environ | {"GIT_CONFIG_GLOBAL": str(trusted)},
    )
    subprocess.run([sys.executable, "-m", "venv", str(clone / ".venv")], check=True, timeout=LIMIT_S)
    (own,) = clone.glob(".venv/lib/python*/site-packages")
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")

    settings = ("KAFKALITE_", "KL_", "PYTHON", "VIRTUAL_ENV", "COLUMNS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    environment |= {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "KAFKALITE_SPARK_CACHE": str(tmp_path / "spark"),
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
    }
    if not has_java:
        environment.pop("JAVA_HOME", None)
        environment["PATH"] = path_without_java(environment["PATH"], tmp_path / "bin")
    opened = Terminal(clone, environment, network)
    assert (opened.type("java -version").code == 0) is has_java
    try:
        yield opened
    finally:
        opened.interrupt()


def check_shell(terminal: Terminal, block: Block, *, has_java: bool) -> None:
    is_in_network = block.section in ON_FIXED_PORTS
    for command in commands(block.code):
        if re.match(r"bin/kl dev\b", command):
            terminal.serve(command)
            continue
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            assert command in "".join(terminal.printed), "kl dev prints this line"
            terminal.environment[name] = value
            continue
        if command == "bin/test":
            command = "bin/test tests/vocabulary/test_durations.py"  # .ci/run runs all of it
        if "--secret-file FILE" in command:
            (named,) = set(re.findall(r"--secret-file (\S+)", "".join(terminal.printed)))
            command = command.replace("FILE", named)
        typed = terminal.type(command, is_in_network=is_in_network)
        if not has_java and re.search("pipeline (run|warm-up)", command):
            assert typed.code != 0, command
            check_that_java_is_missed(typed)
            continue
        assert typed.code == 0, (command, *typed)
        check_output(command, typed, has_java=has_java)


def check_that_java_is_missed(typed: Typed) -> None:
    """One sentence names Java and what to do, and no other error stands beside it."""
    assert re.search("Java 17 or newer is needed: install one", typed.err), typed
    assert typed.err.count("Traceback (most recent call last)") <= 1, typed


def check_output(command: str, typed: Typed, *, has_java: bool) -> None:
    """What the README says about the output of its commands."""
    if command == "bin/quickstart":
        assert "records by country" in typed.out
        assert ("The Spark pipeline over the same records does not run here" in typed.out) is not has_java
    elif "kl consume purchases" in command:
        keys = sorted(line.split("  ")[1] for line in typed.out.splitlines())
        assert keys == ["CA: maple", "CA: plain", "US: glazed"]
    elif "kl fetch purchases-1-0" in command:
        assert typed.out.strip() in {"maple", "glazed"}
    elif "topic describe purchases -o json" in command:
        assert typed.out.lstrip().startswith(("{", "["))
    elif "cluster status" in command:
        assert re.search(r"3", typed.out)
    elif "pipeline run" in command:
        assert "check passed" in typed.out and "donut-revenue" in typed.out


def check_python(terminal: Terminal, block: Block, number: int, *, has_java: bool) -> None:
    names = [node.name for node in ast.parse(block.code).body if isinstance(node, ast.FunctionDef)]
    path = terminal.clone / f"test_readme_{number}.py"
    path.write_text(block.code)
    is_test = any(name.startswith("test_") for name in names)
    pytest_flags = "-m pytest -q -p no:cacheprovider -c /dev/null " if is_test else ""
    typed = terminal.type(f".venv/bin/python {pytest_flags}{path.name}")
    path.unlink()
    if "sparkbridge" in block.code and not has_java:
        assert typed.code != 0
        check_that_java_is_missed(typed)
        return
    assert typed.code == 0, (block.section, *typed)
    if is_test:
        assert re.search(r"\d+ passed", typed.out)
    elif "stored as" in block.code:
        assert re.fullmatch(r"stored as purchases-\d+-0\nb'CA' b'glazed'\n", typed.out)


@pytest.mark.parametrize("has_java", [True, False], ids=["with Java", "without Java"])
def test_the_readme_works_in_a_fresh_clone(terminal: Terminal, has_java: bool) -> None:
    readme = (terminal.clone / "README.md").read_text()
    assert terminal.type("bin/setup cli").code == 0, "the first line of its section Install"
    typed = 0
    for number, block in enumerate(blocks(readme)):
        if block.section not in ON_FIXED_PORTS:
            terminal.interrupt()
        if block.language == "sh":
            check_shell(terminal, block, has_java=has_java)
        else:
            assert block.language == "python", f"a block of {block.language} that this test does not type"
            check_python(terminal, block, number, has_java=has_java)
        typed += 1
    assert typed == readme.count("\n```") // 2
    terminal.interrupt()
    changed = terminal.type("git status --porcelain").out.splitlines()
    assert not changed, "the README leaves nothing in the checkout that git does not ignore"


def test_the_blocks_of_a_page_are_found_in_order() -> None:
    page = "# t\n\n```sh\na   # why\n# alone\n```\n\n## One\n\n```python\nx = 1\n```\n```sh\nb '#c'\n```\n"
    found = list(blocks(page))
    assert found == [
        ("", "sh", "a   # why\n# alone\n"),
        ("One", "python", "x = 1\n"),
        ("One", "sh", "b '#c'\n"),
    ]
    assert [list(commands(block.code)) for block in found if block.language == "sh"] == [["a"], ["b '#c'"]]
