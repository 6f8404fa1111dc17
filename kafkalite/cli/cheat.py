"""``kl cheat``: the commands of kcat and Kafka's scripts, and those of ``kl`` beside them."""

# Tests: tests/cli/test_habits.py

from __future__ import annotations

from typing import Final

import click

SHEET: Final = (
    (
        "Records",
        (
            ("kcat -P -t events", "kl produce events"),
            ("kcat -P -t events -K:", "kl produce events -K :"),
            ("kcat -C -t events -o beginning -e", "kl consume events -e"),
            ("kcat -C -t events -o -10", "kl consume events -r -10"),
            ("kcat -C -t events -J", "kl consume events -o jsonl"),
            ("kafka-console-consumer --from-beginning", "kl consume events"),
            ("kafka-console-consumer", "kl consume events -r end"),
            ("kafka-console-consumer --group g", "kl consume events -g g -X auto.offset.reset=latest"),
            ("", "kl fetch events-0-42"),
        ),
    ),
    (
        "Topics",
        (
            ("kcat -L", "kl topic list"),
            ("kafka-topics --create --partitions 3", "kl topic create events -p 3"),
            ("kafka-topics --describe", "kl topic describe events"),
            ("kafka-configs --alter --add-config", "kl topic alter events -c retention.ms=7d"),
            ("kafka-delete-records", "kl topic delete-records events --before -7d"),
            ("kafka-get-offsets", "kl offsets events"),
        ),
    ),
    (
        "Groups",
        (
            ("kafka-consumer-groups --list", "kl group list"),
            ("kafka-consumer-groups --describe", "kl group describe g"),
            ("", "kl group lag g"),
            ("", "kl group explain g"),
            ("kafka-consumer-groups --reset-offsets", "kl group reset-offsets g --to-earliest --execute"),
        ),
    ),
    (
        "Cluster",
        (
            ("kafka-metadata-quorum describe", "kl metadata quorum"),
            ("kafka-log-dirs --describe", "kl log dirs"),
            ("kafka-configs --entity-type brokers", "kl config show broker 1"),
            ("kafka-leader-election", "kl cluster elect"),
            ("kafka-dump-log", "kl log dump DIRECTORY"),
            ("", "kl cluster status"),
        ),
    ),
)


@click.command()
def cheat() -> None:
    """Print commands of kcat and Kafka's scripts beside those of kl.

    Many commands of kcat and of the scripts also run after 'kl', as in 'kl kcat -L'.
    """
    width = max(len(theirs) for _, rows in SHEET for theirs, _ in rows)
    for number, (title, rows) in enumerate(SHEET):
        click.echo(f"{chr(10) * bool(number)}{title}")
        for theirs, ours in rows:
            click.echo(f"  {theirs.ljust(width)}  {ours}")
