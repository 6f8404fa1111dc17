"""``kl version``: prints the versions of kafkalite and its dependencies."""

# Tests: tests/cli/test_app.py

from __future__ import annotations

import platform
from importlib import metadata
from typing import Final

import click

from kafkalite import __version__
from kafkalite.cli import invocation
from kafkalite.cli.invocation import debug_option, output_option
from kafkalite.cli.output import print_document

_PARTS: Final = ("uvloop", "msgpack", "crc32c", "cramjam", "structlog", "click", "rich", "pyarrow")


@click.command()
@output_option
@debug_option
def version() -> None:
    """Print the versions of kafkalite, Python and the dependencies."""
    document = {"kafkalite": __version__, "python": f"{platform.python_version()} on {platform.system()}"}
    for part in _PARTS:
        try:
            document[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            document[part] = "not installed"
    print_document(document, invocation.current().output)
