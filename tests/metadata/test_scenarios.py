"""Scenario files: commands to the controller, and the state that comes of them. UPDATE=1 rewrites them.

A file says in its first line what it shows. A line that starts with ``>`` is a command; what stands below it
up to the next one is what it prints::

    > brokers 1 2:rack-a                          registers brokers
    > create NAME... [partitions=] [factor=] [CONFIG=VALUE]
    > delete NAME...
    > grow NAME COUNT
    > alter topic|broker NAME KEY=VALUE|KEY-...
    > changes BROKER                              what the last entry means to that broker
    > state
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafkalite.errors import ErrorCode
from kafkalite.metadata.controller import RegisterBroker

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(new_metadata, path):
    metadata = new_metadata(brokers=0)
    written = path.read_text()
    title, *sections = written.split("\n> ")
    actual = [title.rstrip() + "\n"]
    for section in sections:
        command = section.splitlines()[0]
        printed = run(metadata, *command.split())
        actual.append("\n".join([f"> {command}", *printed]) + "\n")
    text = "\n".join(actual)
    if os.environ.get("UPDATE"):
        path.write_text(text)
    assert text == written


def run(metadata, verb, *words):
    names = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    before = metadata.image.metadata_offset
    match verb:
        case "brokers":
            printed = []
            for name in names:
                node_id, _, rack = name.partition(":")
                reply = metadata.submit(RegisterBroker(int(node_id), (f"h{node_id}:9092",), rack or None))
                printed.append(f"broker {node_id}: epoch {reply.broker_epoch}")
            return printed
        case "create":
            partitions, factor = (int(options.pop(key, -1)) for key in ("partitions", "factor"))
            response = metadata.create(*names, partitions=partitions, factor=factor, configs=options)
            printed = [outcome(topic.name, topic) for topic in response.topics]
        case "delete":
            printed = [outcome(topic.name, topic) for topic in metadata.delete(*names).topics]
        case "grow":
            printed = [outcome(topic.name, topic) for topic in metadata.grow(names[0], int(names[1])).topics]
        case "alter":
            removed = {name[:-1]: None for name in names[2:]}
            response = metadata.alter(names[0], names[1], {**options, **removed})
            printed = [outcome(item.name, item) for item in response.resources]
        case "changes":
            return local_changes(metadata, int(names[0]))
        case _:
            assert verb == "state"
            return state(metadata.image)
    if metadata.image.metadata_offset == before:
        printed.append("(nothing written)")
    return printed


def outcome(name, item):
    if item.error_code == 0:
        return f"{name}: done"
    return f"{name}: {ErrorCode(item.error_code).name}: {item.error_message}"


def state(image):
    printed = [f"offset {image.metadata_offset}"]
    for name, topic in sorted(image.topics.items()):
        printed.append(f"topic {name}")
        for number, partition in enumerate(topic.partitions):
            replicas = ",".join(map(str, partition.replicas))
            printed.append(f"  {number}: leader {partition.leader} of {replicas}")
    for (kind, name), configs in sorted(image.configs.items()):
        printed += [f"config {kind} {name} {key}={value}" for key, value in sorted(configs.items())]
    return printed


def local_changes(metadata, broker_id):
    changes = metadata.deltas[-1].local_changes(broker_id)
    printed = []
    for what in ("deleted", "created", "leaders"):
        items = getattr(changes, what)
        if items:
            printed.append(f"{what}: " + " ".join(str(item.topic_partition) for item in items))
    if changes.configs_changed:
        printed.append("configs: " + " ".join(changes.configs_changed))
    if changes.broker_configs_changed:
        printed.append("configs of the broker")
    return printed or ["nothing"]
