"""The list of pure modules in the contract ``pure`` of setup.cfg. ``python -m proof.pure`` prints the files.

The output is a comma-separated list of patterns for ``coverage report --include``.
"""

from __future__ import annotations

import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pure_modules() -> list[str]:
    """Return the modules and packages of the contract, as dotted names."""
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config["importlinter:contract:pure"]["source_modules"].split()


def pattern(module: str) -> str:
    """Return the pattern that matches the file of a module, or all files of a package."""
    path = module.replace(".", "/")
    return f"{path}/*" if (ROOT / path).is_dir() else f"{path}.py"


if __name__ == "__main__":
    sys.stdout.write(",".join(map(pattern, pure_modules())) + "\n")
