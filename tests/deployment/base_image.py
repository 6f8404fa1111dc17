"""A base image for the Dockerfile, made of Debian's packages where no registry of images can be reached.

It holds Debian's Python and the wheels that kafkalite needs, so that the build inside needs no network; the
one for Spark holds Debian's Java as well. Made once: the packed image stays in a cache directory, under a
name that changes with what went into it. Can be run by itself: ``base_image.py``, or ``base_image.py spark``,
prints the tag.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
#: What the project's own setup.cfg asks for on top of these.
BUILD_REQUIREMENTS = ("setuptools>=64", "wheel")
LIMIT_SECONDS = 540


class Base(NamedTuple):
    """One of the images: its name, what Debian gives to it, which of kafkalite's extras it has wheels for."""

    name: str
    packages: str
    extras: str


NODE = Base("base", "python3-venv", "server,cli,tls")
SPARK = Base("spark-base", "python3-venv,default-jre-headless", "server,cli,spark")

#: Everything in the image that no Python needs.
_DEAD_WEIGHT = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
)


def cache_directory() -> Path:
    """Outside the repository, private to the user."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "kafkalite-deployment"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory


def missing_tools() -> list[str]:
    """Commands that the build needs and this machine has not."""
    return [tool for tool in ("debootstrap", "docker", "tar", "chroot") if shutil.which(tool) is None]


def ensure(base: Base = NODE) -> str:
    """The tag of a base image that the engine has; built at the first call. Raises CalledProcessError."""
    tag = f"kafkalite-test-{base.name}:{_fingerprint(base)}"
    if _run("docker", "image", "inspect", tag, check=False).returncode == 0:
        return tag
    packed = cache_directory() / f"{tag.replace(':', '-')}.tar"
    if not packed.exists():
        _pack(base, packed)
        for outdated in packed.parent.glob(f"kafkalite-test-{base.name}-*.tar"):
            if outdated != packed:
                outdated.unlink()
    environment = ["ENV PIP_NO_INDEX=1", "ENV PIP_FIND_LINKS=/wheels", "ENV LANG=C.UTF-8"]
    changes = [word for change in environment for word in ("--change", change)]
    _run("docker", "import", *changes, str(packed), tag)
    return tag


def _fingerprint(base: Base) -> str:
    content = [SUITE, *base, *BUILD_REQUIREMENTS]
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    content.append(setup["options"]["install_requires"])
    content += [setup["options.extras_require"][name] for name in base.extras.split(",")]
    content.append(Path(__file__).read_text())
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]


def _pack(base: Base, packed: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="base-image-", dir=cache_directory()) as name:
        root = Path(name) / "root"
        root.mkdir()
        _run("tar", "-C", str(root), "-xf", str(_debian(base.packages)))
        _add_wheels(root, base.extras)
        unfinished = Path(name) / "packed.tar"
        _run("tar", "-C", str(root), "-cf", str(unfinished), ".")
        unfinished.replace(packed)


def _debian(packages: str) -> Path:
    """Debian with Python, packed; it changes more rarely than the wheels do."""
    packed = cache_directory() / f"debian-{SUITE}-{packages}.tar"
    if packed.exists():
        return packed
    with tempfile.TemporaryDirectory(prefix="debian-", dir=cache_directory()) as name:
        root = Path(name) / "root"
        words = ("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root))
        if _run(*words, check=False).returncode != 0:  # a mirror may have a bad moment
            shutil.rmtree(root, ignore_errors=True)
            _run(*words)
        for each in _DEAD_WEIGHT:
            shutil.rmtree(root / each, ignore_errors=True)
        unfinished = Path(name) / "packed.tar"
        _run("tar", "-C", str(root), "-cf", str(unfinished), ".")
        unfinished.replace(packed)
    return packed


def _add_wheels(root: Path, extras: str) -> None:
    """Let the image's own Python fetch what setup.cfg asks for, with this machine's way to the index."""
    source = root / "source"
    (source / "kafkalite").mkdir(parents=True)
    (source / "kafkalite" / "__init__.py").touch()
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    for name, value in os.environ.items():
        is_pip = name.startswith("PIP_") and name not in {"PIP_FIND_LINKS", "PIP_CERT"}
        if is_pip or name.lower() in {"http_proxy", "https_proxy", "no_proxy"}:
            environment[name] = value
    bundle = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
    certificates = root / "certificates.pem"
    if Path(bundle).exists():
        shutil.copy(bundle, certificates)
        environment["PIP_CERT"] = "/certificates.pem"
    for arguments in (
        ("/usr/bin/python3", "-m", "venv", "/builder"),
        ("/builder/bin/pip", "install", "-q", *BUILD_REQUIREMENTS),
        ("/builder/bin/pip", "wheel", "-q", "-w", "/wheels", f"/source[{extras}]", *BUILD_REQUIREMENTS),
    ):
        _run("chroot", str(root), *arguments, env=environment)
    for wheel in (root / "wheels").glob("kafkalite-*"):
        wheel.unlink()
    certificates.unlink(missing_ok=True)
    for name in ("source", "builder", "root/.cache"):
        shutil.rmtree(root / name, ignore_errors=True)


def _run(
    *command: str, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_SECONDS)
    if check and done.returncode != 0:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        done.check_returncode()
    return done


if __name__ == "__main__":
    print(ensure(SPARK if "spark" in sys.argv[1:] else NODE))
