"""Quick starts of Spark on one machine: unpacked Python modules, and an archive of loaded Java classes.

pyspark ships its Python modules to workers as a zip of sources, so each new worker compiles them again: 0.6 s
lost in each. ``shadow_home`` is a SPARK_HOME of symlinks where that zip is the installed package itself.
``class_archive`` is what the JVM calls AppCDS, classes already parsed and laid out: it halves the start of a
session.

Both live in a cache directory that may be removed at any time: ``KAFKALITE_SPARK_CACHE``, or
``kafkalite/spark`` below ``XDG_CACHE_HOME`` (``~/.cache``). Nothing here is needed: what can't be made is
done without. Two processes that make the same thing at once both end with a whole one.

``python -m sparkbridge.fast_start`` makes both; sessions of ``sparkbridge.session`` then use them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache as remembered
from importlib import metadata, util
from pathlib import Path
from typing import Final, NamedTuple

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


def class_archive(cache: str | os.PathLike[str] | None = None, *, makes: bool = False) -> Path | None:
    """The class archive for the Java and the pyspark that are here; None when there is none.

    With ``makes``, one that is missing is made by a Spark session of its own, which takes under a minute and
    200 MB of disk; a process that finds another one making it goes without. An archive fits only the exact
    paths it was made with: those of ``shadow_home(cache)``.
    """
    java, home = find_java(), shadow_home(cache)
    if java is None or home is None:
        return None
    archive = home.with_name(f"{home.name}-java{java.major}-{_digest(java.banner)}.jsa")
    if archive.exists() or not makes:
        return archive if _is_trusted(archive) else None
    try:
        with _alone(archive.with_suffix(".lock")) as is_alone:
            if is_alone and not archive.exists():
                _record(home, archive)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("no class archive at %s: %s", archive, error)
    return archive if _is_trusted(archive) else None


def _is_trusted(path: Path) -> bool:
    """Whether it is there, and of this user or root: Spark runs what is in it."""
    try:
        return path.stat().st_uid in {os.getuid(), 0}
    except OSError:
        return False


def _record(home: Path, archive: Path) -> None:
    """Run the warm-up under a JVM that writes its archive when it ends."""
    making = archive.with_suffix(f".{os.getpid()}")
    environment = {**os.environ, "SPARK_HOME": str(home)}
    command = [sys.executable, "-m", "sparkbridge.warm_up", str(making)]
    try:
        subprocess.run(
            command, env=environment, check=True, timeout=WARM_UP_TIMEOUT_S, capture_output=True, text=True
        )
        making.replace(archive)
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
    home, archive = shadow_home(), class_archive(makes=True)
    for what, path in (("SPARK_HOME", home), ("class archive", archive)):
        sys.stdout.write(f"{what}: {path or 'could not be made'}\n")
    return 0 if home is not None and archive is not None else 1


if __name__ == "__main__":
    sys.exit(main())
