"""``kl log``: look into log files, offline; no broker is needed, and none is disturbed."""

from __future__ import annotations

import click


@click.group()
def log() -> None:
    """Look into segment files and partition directories. Nothing is changed."""
