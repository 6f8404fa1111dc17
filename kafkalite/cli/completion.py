"""``kl completion``: the lines a shell needs to complete kl's words, topic names included."""

from __future__ import annotations

from typing import Final

import click

SHELLS: Final = ("bash", "zsh", "fish")
PROGRAMS: Final = ("kl", "kafkalite")


@click.command(
    epilog="""\b
Now:          eval "$(kl completion bash)"
For good:     kl completion bash >> ~/.bashrc
              kl completion zsh  >> ~/.zshrc
              kl completion fish > ~/.config/fish/completions/kl.fish"""
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import BashComplete, get_completion_class

    from kafkalite.cli.app import root

    cls = get_completion_class(shell)
    assert cls is not None, "click knows these three shells"
    for program in PROGRAMS:
        script = cls(root, {}, program, "_KL_COMPLETE")
        # click's bash class starts bash to ask its age first; whoever asks for the text has one.
        template_vars = script.source_vars()
        click.echo(script.source_template % template_vars if cls is BashComplete else script.source())
