"""The structure of the source: import contracts, pure modules, tidiness, public names, weight of an
import.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kafkalite
import sparkbridge
from proof.pure import pattern, pure_modules
from proof.test_only import only_tests_use

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kafkalite", "sparkbridge", "pyspark_kafkalite")
MODULES = sorted(path for package in (*PACKAGES, "proof") for path in ROOT.glob(f"{package}/**/*.py"))

MAX_FUNCTION_LINES = 90
MAX_MODULE_LINES = 600  # a longer module carries the reason in a line "# Long because ..."

#: Names that only tests use, and why they are in the product: {path and name, or a prefix of them: reason}.
ONLY_TESTS_USE = {
    "kafkalite/broker/broker.py Broker.intercept": "the seam of kafkalite.testing's faults",
    "kafkalite/broker/config.py BrokerConfig.": "options, which are read by their configuration names",
    "kafkalite/cli/lazy_group.py LazyGroup.": "click calls them",
    "kafkalite/client/blocking/producer.py Producer.send_and_wait": "public API",
    "kafkalite/client/config.py CommonConfig.": "options, which are read by their configuration names",
    "kafkalite/client/config.py CommonSettings.": "options, which are read by their configuration names",
    "kafkalite/client/consumer/deduplication.py key_id": "an argument of the public Deduplicator",
    "kafkalite/errors.py ": "every error code of the protocol has a class",
    "kafkalite/raft/snapshot_store.py SnapshotStore.getTransmissionData": "pysyncobj calls it",
    "kafkalite/rng.py Rng.shuffle": "a seam; the simulations are handed the same object",
    "kafkalite/security/scram.py Mechanism.": "looked up by the names of the protocol",
    "kafkalite/storage/memory_filesystem.py MemoryFileSystem.": "the disk of kafkalite.testing's clusters",
    "kafkalite/transport/stream_end.py StreamEnd.": "asyncio.Transport's methods",
    "sparkbridge/datasource.py KafkaliteDataSource.": "Spark calls them",
    "sparkbridge/listener.py BatchProgress.": "public API",
    "sparkbridge/local/warm_up.py WarmUpSource.": "Spark calls them",
    "sparkbridge/source/batch_reader.py _PushFilters.__func__": "Spark reads it",
    "sparkbridge/source/stream_reader.py KafkaliteStreamReader.": "Spark calls them",
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_point_down() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--config", "setup.cfg"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_module_is_tidy(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    problems: list[str] = []
    if source.strip() and ast.get_docstring(tree) is None:
        problems.append("no module docstring")
    if len(source.splitlines()) > MAX_MODULE_LINES and "\n# Long because " not in source:
        problems.append(f"over {MAX_MODULE_LINES} lines without a line '# Long because ...'")
    if "TODO" in source or "FIXME" in source:
        problems.append("unfinished business")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(f"{node.name} has {length} lines")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            problems.append(f"bare except at line {node.lineno}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", "") or ""
            if "pickle" in names or module == "pickle":
                problems.append("pickle")
    assert not problems


def test_only_its_owner_reaches_into_a_partition() -> None:
    """Elsewhere a partition is used through its operations (``replication.partition``)."""
    owner = ROOT / "kafkalite/broker/partitions/hosted_partition.py"
    reaches = re.compile(r"\bhosted\.(?:partition|log)\.|\b_?(?:hosted|partition)\.log\b")
    found = {
        _name(path)
        for path in ROOT.glob("kafkalite/**/*.py")
        if path != owner and reaches.search(path.read_text())
    }
    assert not found


def test_the_product_has_no_code_that_only_tests_use() -> None:
    found = {f"{one.path} {one.name}" for one in only_tests_use()}
    assert {name for name in found if not name.startswith(tuple(ONLY_TESTS_USE))} == set()


@pytest.mark.parametrize("module", pure_modules())
def test_the_coverage_of_a_pure_module_is_measured(module: str) -> None:
    assert list(ROOT.glob(pattern(module).replace("*", "**/*.py")))


def test_the_wheel_has_the_product_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "from setuptools import setup\n"
        f"setup(script_args=['-q', 'egg_info', '--egg-base', {str(tmp_path)!r}, "
        f"'build_py', '--build-lib', {str(tmp_path / 'wheel')!r}])"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, check=True)
    built = {path.relative_to(tmp_path / "wheel").as_posix() for path in tmp_path.glob("wheel/**/*.*")}
    product = {_name(path) for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")}
    assert built == product | {f"{package}/py.typed" for package in PACKAGES}


def test_the_wheel_names_its_license() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["metadata"]["license_files"].split() == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_public_names() -> None:
    assert kafkalite.__all__ == [
        "__version__",
        "Admin",
        "Broker",
        "BrokerConfig",
        "Consumer",
        "ConsumerInterceptor",
        "Deduplicator",
        "GroupMetadata",
        "KafkaliteError",
        "OffsetAndMetadata",
        "OffsetAndTimestamp",
        "Producer",
        "ProducerInterceptor",
        "ProducerRecord",
        "QuotaEntity",
        "RebalanceListener",
        "Record",
        "RecordAddress",
        "RecordBatch",
        "RecordBatchBuilder",
        "RecordMetadata",
        "Table",
        "TopicPartition",
        "TransactionGroup",
        "TransactionGroupWriter",
        "simulate",
    ]
    for name in (*kafkalite.__all__, "errors", "retrying", "serde", "sync", "testing"):
        assert getattr(kafkalite, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kafkalite.Nothing  # noqa: B018


def test_public_names_of_the_spark_bridge() -> None:
    assert sparkbridge.__all__ == ["KafkaliteDataSource", "foreach_batch", "install", "session"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sparkbridge.nothing  # noqa: B018


def test_no_module_of_the_bridge_hides_a_public_name() -> None:
    """``sparkbridge.session`` must be the function, in any order of imports."""
    modules = {path.stem for path in ROOT.glob("sparkbridge/*.py")}
    assert modules.isdisjoint(sparkbridge.__all__)


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_pulls_in_nothing_heavy() -> None:
    loaded = _modules_after("import kafkalite")
    for heavy in ("asyncio", "uvloop", "msgpack", "pyarrow", "cramjam", "structlog", "click", "rich"):
        assert heavy not in loaded


def test_modules_are_attributes_of_the_package() -> None:
    statement = "import kafkalite; kafkalite.sync.Producer, kafkalite.errors.KafkaliteError"
    assert "kafkalite.testing" not in _modules_after(statement)


def test_the_client_does_not_load_the_server() -> None:
    loaded = _modules_after("from kafkalite import Producer, Consumer, Admin")
    for heavy in ("uvloop", "pyarrow", "structlog", "click", "rich", "kafkalite.broker", "kafkalite.storage"):
        assert heavy not in loaded


def test_the_pytest_plugin_costs_nothing_until_used() -> None:
    loaded = _modules_after("import pytest; import kafkalite.testing.plugin")
    for heavy in ("uvloop", "msgpack", "kafkalite.broker", "kafkalite.client", "kafkalite.protocol"):
        assert heavy not in loaded


def test_a_node_without_a_vote_does_not_load_the_raft_library() -> None:
    loaded = _modules_after("import kafkalite.broker.cluster.node")
    assert "pysyncobj" not in loaded
    assert "kafkalite.raft.observer_quorum" in loaded


def test_importing_the_spark_bridge_pulls_in_nothing_heavy() -> None:
    loaded = _modules_after("import sparkbridge")
    for heavy in ("pyspark", "pyarrow", "py4j", "asyncio", "kafkalite.client", "kafkalite.protocol"):
        assert heavy not in loaded


def test_the_module_that_spark_imports_for_the_format_loads_little() -> None:
    """Every session imports it, even if it does not use the format."""
    loaded = _modules_after("import pyspark.sql.datasource")
    more = _modules_after("import pyspark_kafkalite") - loaded
    assert {name for name in more if "kafkalite" in name or "sparkbridge" in name} == {
        "pyspark_kafkalite",
        "sparkbridge",
        "sparkbridge.datasource",
    }


def test_nothing_of_the_spark_bridge_loads_numpy_or_pandas() -> None:
    loaded = _modules_after(
        "import sparkbridge.source.range_reader, sparkbridge.source.stream_reader, sparkbridge.source.columns"
    )
    assert {"numpy", "pandas"}.isdisjoint(loaded)


def test_the_tests_of_every_module_are_found_by_name_or_named_in_it() -> None:
    """A module has a test file of its name, or a line "# Tests: tests/..." that names others."""
    names = {path.stem.removeprefix("test_") for path in ROOT.glob("tests/**/test_*.py")}
    lost: list[str] = []
    for package in PACKAGES:
        for path in ROOT.glob(f"{package}/**/*.py"):
            named = re.search(r"^# Tests: (.+)$", path.read_text(), re.MULTILINE)
            if named is not None:
                lost += [
                    f"{_name(path)}: {test}" for test in named[1].split(", ") if not (ROOT / test).is_file()
                ]
            elif path.stem not in names and not path.stem.startswith("__"):
                lost.append(_name(path))
    assert lost == []


def test_the_package_has_the_version_of_its_code() -> None:
    """setup.cfg repeats it, because an image installs the dependencies before the code is there."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["metadata"]["version"] == kafkalite.__version__
