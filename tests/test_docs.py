"""The documents are executed: Python examples run, named files exist, the README's shell session works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(language: str) -> list[pytest.ParameterSet]:
    return [
        pytest.param(found[2], id=f"{page.name}-{number}")
        for page in PAGES
        for number, found in enumerate(FENCE.finditer(page.read_text()), 1)
        if found[1] == language
    ]


@pytest.mark.parametrize("code", _blocks("python"))
def test_python_example_runs(code: str, tmp_path: Path) -> None:
    """A block with tests is run by pytest, any other by Python. Warnings are errors."""
    tree = ast.parse(code)
    is_test = any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for node in tree.body
    )
    path = tmp_path / "test_example.py"
    path.write_text(code)
    command = [sys.executable, "-W", "error", str(path)]
    if is_test:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        command += ["-o", "asyncio_mode=auto", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:docs|tests|bin|examples|benchmarks|kafkalite)/[\w./-]+\.\w+|bin/[\w-]+)`", page.read_text()
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_files_that_hints_name_exist() -> None:
    """In the sources of the product, so that no hint leads to a file that was removed."""
    sources = [path for room in ("kafkalite", "sparkbridge") for path in (ROOT / room).rglob("*.py")]
    named = {
        name
        for path in sources
        for name in re.findall(
            r"(?:docs|examples|benchmarks)/[\w/-]+\.\w+|bin/(?:kl|setup)[\w-]*", path.read_text()
        )
    }
    assert "docs/protocol.md" in named
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    }
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif "://" not in link:
            assert (page.parent / link.partition("#")[0]).exists(), link
    assert links or page.name != "README.md"


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md"], ids=lambda p: p.name)
def test_the_map_names_real_modules(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page.read_text())
    missing = [
        n
        for n in named
        if not (ROOT / n).exists()
        and not (ROOT / "kafkalite" / n).exists()
        and not (ROOT / "kafkalite/broker" / n).exists()
    ]
    assert not missing


def test_the_readme_session(tmp_path: Path) -> None:
    """The shell session of the README, line by line, against a broker that `kl dev` started."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    server = subprocess.Popen(
        [sys.executable, "-m", "kafkalite", "dev", "--topic", "purchases:3", "--port", "0", "--print-env"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    try:
        assert server.stdout is not None
        address = ""
        for line in server.stdout:
            found = re.search(r"KL_BOOTSTRAP_SERVERS=(\S+)", line)
            if found:
                address = found[1].strip("'\"")
                break
        assert address
        session = FENCE.findall((ROOT / "README.md").read_text())
        shell = [code for language, code in session if language == "sh" and "kl fetch" in code]
        assert len(shell) == 1
        # Keys decide the partition, so the fetched address may be empty here.
        for line in shell[0].strip().splitlines():
            command = line.replace("bin/kl", f"{sys.executable} -m kafkalite")
            if "fetch" in command:
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=240,
                env={**environment, "KL_BOOTSTRAP_SERVERS": address},
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if "consume" in command:
                assert sorted(out.split("  ")[1] for out in done.stdout.splitlines()) == [
                    "CA: maple",
                    "CA: plain",
                    "US: glazed",
                ]
    finally:
        server.terminate()
        server.communicate(timeout=20)


def test_the_readme_simulation_finds_the_mistake_that_the_readme_names(tmp_path: Path) -> None:
    """Seed 0 fails if the consumer commits before it bills."""
    code = next(
        found[2] for found in FENCE.finditer((ROOT / "README.md").read_text()) if "Simulation" in found[2]
    )
    bill, commit = (line for line in code.splitlines(keepends=True) if "(record" in line)
    swapped = code.replace(bill + commit, commit + bill)
    assert swapped != code
    (tmp_path / "test_swapped.py").write_text(swapped)
    flags = ("-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path))
    command = [
        sys.executable,
        "-m",
        "pytest",
        *flags,
        f"{tmp_path}/test_swapped.py::test_no_order_is_lost[0]",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert "seed 0 lost orders" in done.stdout, done.stdout + done.stderr
