"""``install(spark)`` ships the bridge to a cluster whose executors do not have it installed.

Spark's ``addPyFile`` reaches tasks but not the process of a stream's reader, which uses another directory.
The packages on which the bridge depends are not shipped: msgpack, crc32c and pyarrow must be installed
wherever tasks run.
"""

# Tests: tests/sparkbridge/test_datasource.py

from __future__ import annotations

import compileall
import shutil
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, Final

from sparkbridge.errors import SparkBridgeError

PACKAGES: Final = ("kafkalite", "sparkbridge", "pyspark_kafkalite")
#: Subpackages that tasks and stream readers do not need.
LEFT_OUT: Final = frozenset({"__pycache__", "testing", "cli", "broker", "raft"})
#: The directory from which Spark's process for stream readers imports, below the root of the added files.
STREAM_READER_DIRECTORY: Final = "streaming_job"


def install(spark: Any) -> None:
    """Ship PACKAGES to the executors and stream readers of ``spark``, and register the format.

    May be called again. It is not needed if the packages are installed everywhere. Raises SparkBridgeError
    for a Spark Connect session, because then the packages must be installed on the server.
    """
    from pyspark import SparkFiles

    from sparkbridge.datasource import KafkaliteDataSource
    from sparkbridge.local.spark_session import share_environment

    context = getattr(spark, "_sc", None)
    if context is None:
        raise SparkBridgeError(
            "a Spark Connect session has no SparkContext to ship files with",
            hint='install the package where the server and its executors run: pip install "kafkalite[spark]"',
        )
    root = Path(SparkFiles.getRootDirectory())
    name = f"kafkalite-{_version()}.zip"
    shipped = root / STREAM_READER_DIRECTORY / name
    if not shipped.exists():
        shipped.parent.mkdir(exist_ok=True)
        pack(shipped)
        context.addPyFile(str(shipped))
    spark.dataSource.register(KafkaliteDataSource)
    share_environment(spark)


def pack(archive: Path) -> None:
    """Write PACKAGES into a zip together with their bytecode, so that workers do not compile them."""
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "packages"
        for package in PACKAGES:
            _copy(files(package), copied / package)
        compileall.compile_dir(
            copied,
            quiet=2,
            legacy=True,
            invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
            stripdir=copied,
        )
        packed = Path(directory) / archive.name
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as zipped:
            for path in sorted(copied.rglob("*")):
                if path.is_file():
                    zipped.write(path, path.relative_to(copied).as_posix())
        shutil.move(packed, archive)


def _copy(source: Traversable, target: Path) -> None:
    """Copy a package without LEFT_OUT. It may be inside a zip, from which ``--py-files`` imports."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name in LEFT_OUT:
            continue
        if entry.is_dir():
            _copy(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())


def _version() -> str:
    try:
        return version("kafkalite")
    except PackageNotFoundError:  # a checkout on the path
        return "0"
