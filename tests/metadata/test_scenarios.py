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
    > cluster 1 2:rack-a                          registers brokers as several nodes do, and unfences them
    > register NODE [clean] [synced]              the broker's next process
    > fence|unfence|shutdown NODE
    > isr TOPIC-NUMBER NODES [pe= le= be=]        what the leader proposes
    > elect TOPIC-NUMBER [unclean]
    > checkpoint TOPIC-NUMBER OFFSET
    > partitions
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafkalite.errors import ErrorCode

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
                reply = metadata.join(int(node_id), rack=rack or None)
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
        case "cluster":
            printed = []
            for name in names:
                node_id, _, rack = name.partition(":")
                metadata.register(int(node_id), rack=rack or None)
                metadata.unfence(int(node_id))
                printed.append(f"broker {node_id}: epoch {metadata.epoch(int(node_id))}")
            return printed
        case "register":
            flags = dict.fromkeys(names[1:], True)
            printed = [f"broker {names[0]}: epoch {metadata.register(int(names[0]), **flags).broker_epoch}"]
        case "fence" | "unfence" | "shutdown":
            change = {"shutdown": metadata.begin_shutdown}.get(verb) or getattr(metadata, verb)
            change(int(names[0]))
            printed = [f"broker {names[0]}: {liveness(metadata.image.brokers[int(names[0])])}"]
        case "isr":
            printed = [isr_proposal(metadata, *names, **options)]
        case "elect":
            (item,) = metadata.elect(partition_of(names[0]), unclean="unclean" in names).partitions
            printed = [outcome(names[0], item)]
        case "checkpoint":
            metadata.checkpoint(int(names[1]), *partition_of(names[0]))
            printed = [f"high watermarks: {sorted(metadata.image.high_watermarks.values())}"]
        case "partitions":
            return partition_states(metadata.image)
        case "changes":
            return local_changes(metadata, int(names[0]))
        case _:
            assert verb == "state"
            return state(metadata.image)
    if metadata.image.metadata_offset == before:
        printed.append("(nothing written)")
    return printed


def partition_of(text):
    name, _, number = text.rpartition("-")
    return name, int(number)


def liveness(broker):
    return "fenced" if broker.is_fenced else "shutting down" if broker.is_shutting_down else "live"


def isr_proposal(metadata, text, isr, **options):
    isr = [int(node_id) for node_id in isr.split(",")]
    fields = {"pe": "partition_epoch", "le": "leader_epoch"}
    changes = {fields[key]: int(value) for key, value in options.items() if key in fields}
    if "be" in options:
        changes["isr_broker_epochs"] = [int(options["be"])] * len(isr)
    answer = metadata.propose(isr, *partition_of(text), **changes)
    return f"{outcome(text, answer)} -> isr {joined(answer.isr)} at {answer.partition_epoch}"


def joined(node_ids):
    return ",".join(map(str, node_ids)) or "-"


def partition_states(image):
    printed = []
    for name, topic in sorted(image.topics.items()):
        for number, state in enumerate(topic.partitions):
            leader = "no broker" if state.leader == -1 else state.leader
            printed.append(
                f"{name}-{number}: {leader} leads in {state.leader_epoch}, isr {joined(state.isr)},"
                f" elr {joined(state.elr)}, last known {joined(state.last_known_elr)},"
                f" partition epoch {state.partition_epoch}"
            )
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
    for what in ("deleted", "created", "leaders", "followers"):
        items = getattr(changes, what)
        if items:
            printed.append(f"{what}: " + " ".join(str(item.topic_partition) for item in items))
    if changes.configs_changed:
        printed.append("configs: " + " ".join(changes.configs_changed))
    if changes.broker_configs_changed:
        printed.append("configs of the broker")
    return printed or ["nothing"]
