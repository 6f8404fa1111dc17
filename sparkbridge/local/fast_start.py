"""Quick starts of Spark on one machine: unpacked Python modules, and an archive of loaded Java classes.

pyspark ships its Python modules to workers as a zip of sources, so each new worker compiles them again: 0.6 s
lost in each. ``shadow_home`` is a SPARK_HOME of symlinks where that zip is the installed package itself.
``class_archive`` is what the JVM calls AppCDS, classes already parsed and laid out: it halves the start of a
session.

Both live in a cache directory that may be removed at any time: ``KAFKALITE_SPARK_CACHE``, or
``kafkalite/spark`` below ``XDG_CACHE_HOME`` (``~/.cache``). Nothing here is needed: what can't be made is
done without. Two processes that make the same thing at once both end with a whole one.

Sessions of ``sparkbridge.session`` make the first, which is small, and use the second where it is there:
``kl pipeline warm-up`` makes it, as does ``python -m sparkbridge.local.fast_start``.
"""

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
    """A Java that was found: the command, its major version, and all that it says of itself."""

    command: str
    major: int
    banner: str


@remembered
def find_java() -> Java | None:
    """The Java that Spark would start: below JAVA_HOME, else on the PATH. None: there is none that runs."""
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
    """Where what makes starts quick is kept; not made yet."""
    named = cache or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "kafkalite" / "spark"
    except RuntimeError:  # this user has no home
        return Path(tempfile.gettempdir()) / f"kafkalite-spark-{os.getuid()}"


def shadow_home(cache: str | os.PathLike[str] | None = None) -> Path | None:
    """A SPARK_HOME for this machine whose Python workers start quickly; None when it can't be made."""
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
            return home if _is_trusted(home) else None  # another process was quicker
    except OSError as error:
        logger.debug("no shadow SPARK_HOME at %s: %s", home, error)
        return None
    return home


def _link_home(installed: Path, home: Path) -> None:
    for directory in ("bin", "sbin", "jars"):
        if (installed / directory).exists():
            (home / directory).symlink_to(installed / directory)
    library = home / "python" / "lib"
    unzipped = library / "pyspark.zip"  # Spark asks for this name, and Python takes a directory as well
    unzipped.mkdir(parents=True)
    (unzipped / "pyspark").symlink_to(installed)
    for archive in (installed / "python" / "lib").glob("py4j-*.zip"):
        shutil.copy(archive, library / archive.name)


def quiet_daemon(home: Path) -> str | None:
    """The name of the module in ``home``, one of ``shadow_home``, that starts Python workers quietly.

    See ``quiet_daemon.py``. None when it is not there and can't be put there.
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


def class_archive(cache: str | os.PathLike[str] | None = None, *, makes: bool = False) -> Path | None:
    """The class archive for the Java and the pyspark that are here; None when there is none.

    With ``makes``, one that is missing is made, if that works (``make_class_archive``). An archive fits only
    the exact paths it was made with: those of ``shadow_home(cache)``.
    """
    if makes:
        try:
            return make_class_archive(cache)
        except FastStartError as error:
            logger.debug("no class archive: %s", error)
            return None
    java, home = find_java(), shadow_home(cache)
    if java is None or home is None:
        return None
    archive = _archive_of(home, java)
    return archive if _is_trusted(archive) else None


def make_class_archive(cache: str | os.PathLike[str] | None = None) -> Path:
    """The same, made if it is missing: by a Spark session of its own, in under a minute and 200 MB of disk.

    Raises FastStartError that says why there is none; that another process is making it is a reason, too.
    """
    java, home = find_java(), shadow_home(cache)
    if java is None:
        raise FastStartError("there is no java that runs", hint="install one, or set JAVA_HOME")
    if home is None:
        raise FastStartError(
            f"nothing can be kept in {cache_directory(cache)}", hint=f"name a directory by {CACHE_VARIABLE}"
        )
    archive = _archive_of(home, java)
    if not archive.exists():
        try:
            with _alone(archive.with_suffix(".lock")) as is_alone:
                if not is_alone:
                    raise FastStartError(f"another process is making {archive} just now")
                if not archive.exists():
                    _remove_stale(home, archive)
                    _record(home, archive)
        except OSError as error:
            raise FastStartError(
                f"{archive} can't be written: {error.strerror}", hint=f"name a directory by {CACHE_VARIABLE}"
            ) from error
    if not _is_trusted(archive):
        raise FastStartError(f"{archive} belongs to another user, and is not used")
    return archive


def can_make_class_archive(cache: str | os.PathLike[str] | None = None) -> bool:
    """Whether there is none, and a place for one."""
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
    """What a killed process left of this archive, and homes with their archives whose pyspark is gone."""
    for path in archive.parent.glob(f"{archive.stem}.*"):
        if path.suffix != ".lock":
            path.unlink(missing_ok=True)
    for other in archive.parent.glob("home-*"):
        if (other / "jars").is_symlink() and not (other / "jars").exists():
            shutil.rmtree(other, ignore_errors=True)
            for path in archive.parent.glob(f"{other.name}-java*"):
                path.unlink(missing_ok=True)


def _is_trusted(path: Path) -> bool:
    """Whether it is there, and of this user or root: Spark runs what is in it."""
    try:
        return path.stat().st_uid in {os.getuid(), 0}
    except OSError:
        return False


def _record(home: Path, archive: Path) -> None:
    """Run the warm-up under a JVM that writes its archive when it ends. Raises FastStartError, OSError."""
    making = archive.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "sparkbridge.local.warm_up", str(making)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "SPARK_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the JVM is its child, and would write the archive still when it is stopped
    )
    try:
        _, told = process.communicate(timeout=WARM_UP_TIMEOUT_S)
        if process.returncode:
            last = (told.strip().splitlines() or ["it said nothing"])[-1]
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
    """Whether this process is the only one here; the lock ends with the process, however that ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def java_options(archive: Path | None, *, is_short_lived: bool) -> str:
    """Options for a JVM; ``is_short_lived`` gives up peak speed (no C2, one collector thread)."""
    options = ["-Xlog:disable", "-Xlog:all=error:stderr"]  # an archive that doesn't fit is nobody's concern
    if is_short_lived:
        options += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    if archive is not None:
        options.append(f"-XX:SharedArchiveFile={archive}")
    return " ".join(options)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main() -> int:
    """Make what is missing, and tell where it is."""
    try:
        archive = make_class_archive()
    except FastStartError as error:
        sys.stderr.write(f"no class archive: {error}\n")
        return 1
    sys.stdout.write(f"SPARK_HOME: {shadow_home()}\nclass archive: {archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
