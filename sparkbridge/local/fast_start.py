"""Makes Spark start quickly on one machine: Python modules are unpacked, and Java classes archived.

pyspark ships its Python modules to workers as a zip of sources, which each new worker compiles again (0.6 s).
``shadow_home`` makes a SPARK_HOME of symlinks in which this zip is replaced by the installed package.
``make_class_archive`` makes an AppCDS archive: a file of parsed classes, which about halves the JVM's start
time.

Both are in a cache directory that may be removed at any time: ``KAFKALITE_SPARK_CACHE``, or
``kafkalite/spark`` below ``XDG_CACHE_HOME`` (``~/.cache``). Both are optional: if they cannot be made, Spark
starts without them. Each is made under a temporary name and renamed when it is complete.

``sparkbridge.session`` with a local master makes the SPARK_HOME, and uses the archive if it exists. ``kl
pipeline warm-up`` or ``python -m sparkbridge.local.fast_start`` makes the archive.
"""

# Tests: tests/sparkbridge/test_spark_session.py

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache as remembered
from importlib import metadata, util
from pathlib import Path
from typing import Final, NamedTuple

from sparkbridge.errors import FastStartError

logger = logging.getLogger(__name__)

CACHE_VARIABLE: Final = "KAFKALITE_SPARK_CACHE"
MIN_JAVA: Final = 17
WARM_UP_TIMEOUT_S: Final = 240
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)[^"]*"')


class Java(NamedTuple):
    """An installed Java: the command, its major version, and the output of ``java -version``."""

    command: str
    major: int
    banner: str


@remembered
def find_java() -> Java | None:
    """Return the Java of JAVA_HOME or, if that is not set, of the PATH. The result is cached.

    Returns None if there is none, it cannot be run, or its version is not recognized.
    """
    home = os.environ.get("JAVA_HOME")
    command = f"{home}/bin/java" if home else shutil.which("java")
    if command is None:
        return None
    try:
        done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    banner = done.stderr + done.stdout
    version = _JAVA_VERSION.search(banner)
    return Java(command, int(version[1]), banner) if version is not None else None


def cache_directory(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return ``cache`` or, if it is None or "", the default directory (see the module). It may not exist."""
    named = cache or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "kafkalite" / "spark"
    except RuntimeError:  # the user has no home directory
        return Path(tempfile.gettempdir()) / f"kafkalite-spark-{os.getuid()}"


def shadow_home(cache: str | os.PathLike[str] | None = None) -> Path | None:
    """Return a SPARK_HOME whose Python workers start quickly. Make it if it is missing.

    Returns None if it cannot be made, or belongs to another user (see ``_is_trusted``).
    """
    found = util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    installed = Path(found.origin).parent
    name = f"home-{metadata.version('pyspark')}-{_digest(str(installed))}"
    home = cache_directory(cache) / name
    if home.exists():
        return home if _is_trusted(home) else None
    try:
        home.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        making = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=home.parent))
        try:
            _link_home(installed, making)
            making.rename(home)
        except OSError:
            shutil.rmtree(making, ignore_errors=True)
            return home if _is_trusted(home) else None  # another process was faster
    except OSError as error:
        logger.debug("no shadow SPARK_HOME at %s: %s", home, error)
        return None
    return home


def _link_home(installed: Path, home: Path) -> None:
    for directory in ("bin", "sbin", "jars"):
        if (installed / directory).exists():
            (home / directory).symlink_to(installed / directory)
    library = home / "python" / "lib"
    unzipped = library / "pyspark.zip"  # Spark requires this name, and Python accepts a directory
    unzipped.mkdir(parents=True)
    (unzipped / "pyspark").symlink_to(installed)
    for archive in (installed / "python" / "lib").glob("py4j-*.zip"):
        shutil.copy(archive, library / archive.name)


def quiet_daemon(home: Path) -> str | None:
    """Return the name of the module in ``home`` that starts Python workers quietly (see ``quiet_daemon.py``).

    ``home`` is the result of ``shadow_home``. Writes the module if it is missing. Returns None if it cannot
    be written or belongs to another user.
    """
    source = Path(__file__).with_name("quiet_daemon.py").read_text()
    name = f"kafkalite_daemon_{_digest(source)}"
    module = home / "python" / "lib" / "pyspark.zip" / f"{name}.py"
    if not module.exists():
        making = module.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            making.write_text(source)
            making.replace(module)
        except OSError as error:
            logger.debug("no quiet daemon at %s: %s", module, error)
            return None
    return name if _is_trusted(module) else None


def class_archive(cache: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the class archive for the installed Java and pyspark, or None if there is none to use.

    The archive was made with the SPARK_HOME ``shadow_home(cache)``. A JVM with other paths rejects it.
    """
    java, home = find_java(), shadow_home(cache)
    if java is None or home is None:
        return None
    archive = _archive_of(home, java)
    return archive if _is_trusted(archive) else None


def make_class_archive(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the class archive. If it is missing, run a Spark session that makes it.

    The session needs about 200 MB of disk space and usually less than a minute. Raises FastStartError if it
    fails, if another process is making the archive, or if the archive belongs to another user.
    """
    java, home = find_java(), shadow_home(cache)
    if java is None:
        raise FastStartError("no working java was found", hint="install one, or set JAVA_HOME")
    if home is None:
        raise FastStartError(
            f"cannot write to {cache_directory(cache)}", hint=f"set a directory in {CACHE_VARIABLE}"
        )
    archive = _archive_of(home, java)
    if not archive.exists():
        try:
            with _alone(archive.with_suffix(".lock")) as is_alone:
                if not is_alone:
                    raise FastStartError(f"another process is making {archive}")
                if not archive.exists():
                    _remove_stale(home, archive)
                    _record(home, archive)
        except OSError as error:
            raise FastStartError(
                f"{archive} can't be written: {error.strerror}", hint=f"set a directory in {CACHE_VARIABLE}"
            ) from error
    if not _is_trusted(archive):
        raise FastStartError(f"{archive} belongs to another user, and is not used")
    return archive


def can_make_class_archive(cache: str | os.PathLike[str] | None = None) -> bool:
    """Whether the archive is missing, Java is found and the cache directory is writable."""
    java, home = find_java(), shadow_home(cache)
    return (
        java is not None
        and home is not None
        and not _archive_of(home, java).exists()
        and os.access(home.parent, os.W_OK)
    )


def _archive_of(home: Path, java: Java) -> Path:
    return home.with_name(f"{home.name}-java{java.major}-{_digest(java.banner)}.jsa")


def _remove_stale(home: Path, archive: Path) -> None:
    """Remove the archive's temporary files, and what was made for pyspark installations that are gone."""
    for path in archive.parent.glob(f"{archive.stem}.*"):
        if path.suffix != ".lock":
            path.unlink(missing_ok=True)
    for other in archive.parent.glob("home-*"):
        if (other / "jars").is_symlink() and not (other / "jars").exists():
            shutil.rmtree(other, ignore_errors=True)
            for path in archive.parent.glob(f"{other.name}-java*"):
                path.unlink(missing_ok=True)


def _is_trusted(path: Path) -> bool:
    """Whether ``path`` exists and belongs to this user or root, so that its code may be run."""
    try:
        return path.stat().st_uid in {os.getuid(), 0}
    except OSError:
        return False


def _record(home: Path, archive: Path) -> None:
    """Run ``warm_up``, whose JVM writes the archive when the JVM ends. Raises FastStartError, OSError."""
    making = archive.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "sparkbridge.local.warm_up", str(making)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "SPARK_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the JVM, its child, is killed with it and writes no archive
    )
    try:
        _, stderr = process.communicate(timeout=WARM_UP_TIMEOUT_S)
        if process.returncode:
            last = (stderr.strip().splitlines() or ["no output"])[-1]
            raise FastStartError(f"Spark's warm-up failed: {last}")
        if not making.exists():
            raise FastStartError(f"Java wrote no archive to {making.parent}", hint="200 MB are needed there")
        making.replace(archive)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise FastStartError(f"Spark's warm-up did not end within {WARM_UP_TIMEOUT_S} s") from None
        raise
    finally:
        making.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Yield whether this process has acquired the lock. The lock is released when the block ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def java_options(archive: Path | None, *, is_short_lived: bool) -> str:
    """Return options for Spark's JVM. If ``archive`` is not None, the JVM loads classes from it.

    ``is_short_lived`` turns off the JVM's C2 compiler and selects the serial garbage collector.
    """
    options = ["-Xlog:disable", "-Xlog:all=error:stderr"]  # no messages about an archive that does not fit
    if is_short_lived:
        options += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    if archive is not None:
        options.append(f"-XX:SharedArchiveFile={archive}")
    return " ".join(options)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> int:
    """Make the SPARK_HOME and the archive if they are missing. Print their paths. Return the exit code."""
    try:
        archive = make_class_archive()
    except FastStartError as error:
        sys.stderr.write(f"no class archive: {error}\n")
        return 1
    sys.stdout.write(f"SPARK_HOME: {shadow_home()}\nclass archive: {archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
