r"""Translates command lines of kcat and of Kafka's scripts into those of ``kl``. Pure.

::

    -C -b HOST -t events -o beginning -e -f '%k\n'       ->  consume events -b HOST -r start -e -f '%k\n'
    topic --create --topic events --partitions 3         ->  topic create events --partitions 3
    consume --topic events --max-messages 5              ->  consume events -n 5
    kafka-consumer-groups.sh --describe --group billing  ->  group describe billing

Flags without a translation stay as they are.
"""

# Tests: tests/cli/test_habits.py

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Final

from kafkalite.cli.exit_codes import UsageError

_SCRIPTS: Final = {
    "kafka-topics": "topic",
    "kafka-console-consumer": "consume",
    "kafka-console-producer": "produce",
    "kafka-consumer-groups": "group",
    "kafka-configs": "config",
    "kafka-log-dirs": "log",
    "kafka-get-offsets": "offsets",
    "topics": "topic",
    "groups": "group",
}
#: The commands of kl for scripts whose flags are not translated.
_COUNTERPARTS: Final = {
    "kafka-delete-records": "kl topic delete-records TOPIC",
    "kafka-metadata-quorum": "kl metadata quorum",
    "kafka-leader-election": "kl cluster elect",
    "kafka-dump-log": "kl log dump DIRECTORY",
    "kafka-transactions": "kl txn",
    "kafka-producer-perf-test": "kl bench produce",
    "kafka-consumer-perf-test": "kl bench consume",
    "kafka-server-start": "kl server start",
    "kafka-storage": "kl server format",
    "kafka-acls": "kl acl list', 'kl acl add' or 'kl acl remove",
    "kafka-server-stop": "kl cluster shutdown NODE",
    "kafka-metadata-shell": "kl metadata ls",
    "kafka-cluster": "kl cluster describe",
    "kafka-features": "kl cluster features describe' or 'kl cluster features upgrade",
}
_SHEET: Final = "'kl cheat'"
#: Options of a consumer that say where to begin.
_BEGINNINGS: Final = {"--from-beginning", "--offset", "-r", "--range", "--from", "--to"}
_KCAT_MODES: Final = {"-C": "consume", "-P": "produce", "-L": "topic", "-G": "consume"}
#: Verbs that the scripts spell as flags, by noun, and other spellings of verbs.
_VERBS: Final = {
    "topic": {"--create": "create", "--list": "list", "--describe": "describe", "--alter": "alter"}
    | {"--delete": "delete", "ls": "list", "rm": "delete", "show": "describe", "add": "create"},
    "group": {"--list": "list", "--describe": "describe", "--delete": "delete", "--members": "members"}
    | {"--reset-offsets": "reset-offsets", "ls": "list", "rm": "delete", "show": "describe"},
    "config": {"--describe": "show", "--alter": "set", "ls": "list"},
    "log": {"--describe": "dirs"},
    "cluster": {"ls": "brokers"},
    "txn": {"ls": "list"},
    "context": {"ls": "list", "rm": "delete"},
}
_PRINTED: Final = {
    "print.timestamp": "CreateTime:%T",
    "print.partition": "Partition:%p",
    "print.offset": "Offset:%o",
    "print.headers": "%h",
    "print.key": "%k",
    "print.value": "%s",
}


@dataclass(slots=True)
class _Line:
    """A command line of ``kl`` that is being built: its command, its arguments, and its options."""

    command: list[str]
    names: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)

    def words(self) -> list[str]:
        return [*self.command, *self.names, *self.rest, *self._of_properties()]

    def _of_properties(self) -> list[str]:
        """Return the options for ``--property`` values of the console consumer and producer."""
        given, separator = self.properties, self.properties.get("key.separator")
        if self.command == ["produce"]:
            is_keyed = given.get("parse.key", "false") == "true"
            return ["-K", "\\t" if separator is None else _visible(separator)] if is_keyed else []
        shown = [
            text
            for name, text in _PRINTED.items()
            if given.get(name, "true" if name == "print.value" else "false") == "true"
        ]
        if not given or shown == ["%s"]:
            return []
        between = "\\t" if separator is None else _visible(separator.replace("%", "%%"))
        return ["-f", between.join(shown) + "\\n"]


def _visible(text: str) -> str:
    """Return ``text`` with escapes for tabs and line breaks, because the command line is printed."""
    return text.replace("\t", "\\t").replace("\n", "\\n")


_Act = Callable[[_Line, str], object]
"""An action: adds the translation of one flag, given the flag's value, to a line."""


def _name(line: _Line, value: str) -> None:
    line.names.extend(value.split(","))


def _as(*words: str) -> _Act:
    """Return an action that adds ``words``, and then the value of the flag, to the options of kl."""
    return lambda line, value: line.rest.extend((*words, value))


def _drop(line: _Line, value: str) -> None:
    """Ignore the flag and its value."""


def _property(line: _Line, value: str) -> None:
    name, _, setting = value.partition("=")
    line.properties[name] = setting


def _kcat_range(line: _Line, value: str) -> None:
    words = {"beginning": "start", "earliest": "start", "latest": "end"}
    if value.startswith("s@"):
        line.rest += ["--from", value[2:]]
    elif value.startswith("e@"):
        line.rest += ["--to", value[2:]]
    elif value != "stored":  # a group always continues at its stored offsets
        line.rest += ["-r", words.get(value, value)]


def _isolation(line: _Line, value: str) -> None:
    line.rest += ["--read-committed"] * (value == "read_committed")


def _kind(line: _Line, value: str) -> None:
    line.names.insert(0, value.removesuffix("s"))


def _settings(line: _Line, value: str) -> None:
    """Add settings of the form a=1,b=[2,3], in which brackets enclose a value with commas."""
    for setting in re.split(r",(?![^\[]*\])", value):
        name, equals, text = setting.partition("=")
        is_enclosed = text.startswith("[") and text.endswith("]")
        line.rest.append(name + equals + (text[1:-1] if is_enclosed else text))


def _unset(line: _Line, value: str) -> None:
    for name in value.split(","):
        line.rest += ["--unset", name]


_SHARED: Final[dict[str, _Act]] = {"--zookeeper": _drop, "--command-config": _drop}
#: Switches of Kafka's scripts that are dropped, because kl always does what they request.
_NEEDLESS: Final = {"--all-topics", "--offsets"}
_CONSUME: Final[dict[str, _Act]] = {
    "--topic": _name,
    "--offset": _kcat_range,
    "--max-messages": _as("-n"),
    "--timeout-ms": lambda line, value: line.rest.extend(("--timeout", f"{value}ms")),
    "--isolation-level": _isolation,
    "--property": _property,
    "--formatter-property": _property,
    "--consumer-property": _as("-X"),
}
_PRODUCE: Final[dict[str, _Act]] = {
    "--topic": _name,
    "--broker-list": _as("-b"),
    "--property": _property,
    "--reader-property": _property,
    "--producer-property": _as("-X"),
    "--compression-codec": _as("-z"),
    "--request-required-acks": _as("--acks"),
}
#: Flags with a value, by the first words of the command.
_FLAGS: Final[dict[tuple[str, ...], dict[str, _Act]]] = {
    ("consume",): _CONSUME,
    ("produce",): _PRODUCE,
    ("offsets",): {"--topic": _name},
    ("topic", "create"): {"--topic": _name},
    ("topic", "describe"): {"--topic": _name},
    ("topic", "alter"): {"--topic": _name},
    ("topic", "delete"): {"--topic": _name},
    ("topic", "list"): {},
    ("group", "describe"): {"--group": _name},
    ("group", "members"): {"--group": _name},
    ("group", "lag"): {"--group": _name},
    ("group", "delete"): {"--group": _name},
    ("group", "reset-offsets"): {"--group": _name},
    ("group", "list"): {},
    ("config", "show"): {"--entity-type": _kind, "--entity-name": _name},
    ("config", "set"): {
        "--entity-type": _kind,
        "--entity-name": _name,
        "--add-config": _settings,
        "--delete-config": _unset,
    },
    ("log", "dirs"): {"--topic-list": _name, "--broker-list": _as("--broker")},
}
_KCAT: Final[dict[str, dict[str, _Act]]] = {
    "consume": {
        "-t": _name,
        "-o": _kcat_range,
        "-c": _as("-n"),
        "-G": _as("-g"),
        "-K": lambda line, value: line.rest.extend(("-f", f"%k{value.replace('%', '%%')}%s\\n")),
    },
    "produce": {"-t": _name, "-c": _drop},
    "topic": {"-t": _name},
}
#: kcat's switches without a value, with those of kl for ``consume``.
_KCAT_SWITCHES: Final = {"-J": ["-o", "jsonl"], "-q": [], "-u": [], "-E": [], "-v": [], "-l": [], "-O": []}
#: The same for ``-L``, whose output is one document.
_LISTING_SWITCHES: Final = {"-J": ["-o", "json"]}


def translate(arguments: Sequence[str], commands: Container[str]) -> list[str]:
    """Return the command line translated to ``kl``, or unchanged if there is nothing to translate.

    ``commands`` are the names of kl's commands. Raises UsageError for a line that cannot be translated.
    """
    words = list(arguments)
    if words[:1] in (["kcat"], ["kafkacat"]):
        del words[0]
    if not words or words[0].startswith("-"):
        for before, word in zip(("", *words), words, strict=False):
            if word in commands and before != "-t":  # a topic may have the name of a command
                break
            if word[:2] in _KCAT_MODES:
                return _from_kcat(word[:2], words)
            if word == "-Q":
                raise UsageError("kcat's -Q is not translated", hint=f"use 'kl offsets TOPIC'; see {_SHEET}")
        return words
    file = words[0].rpartition("/")[2]
    script = file.removesuffix(".sh")
    if script in _COUNTERPARTS:
        raise UsageError(
            f"the flags of {script} are not translated", hint=f"use '{_COUNTERPARTS[script]}'; see {_SHEET}"
        )
    if script not in _SCRIPTS and (script != file or script.startswith("kafka-")):
        raise UsageError(f"kl has no counterpart of {file}", hint=f"see {_SHEET} and 'kl --help'")
    if script == "kafka-console-consumer":
        words += _of_console_consumer(words)
    noun = _SCRIPTS.get(script, words[0])
    verbs = _VERBS.get(noun, {})
    chosen = next((each for each in words[1:2] if each in verbs), None)
    if chosen is None and words[1:2] and words[1].startswith("-"):
        chosen = next((each for each in words[1:] if each in verbs), None)
    line = _Line([noun])
    left = words[1:]
    if chosen is not None:
        left.remove(chosen)
        line.command.append(verbs[chosen])
        if verbs[chosen] == "describe" and "--members" in left:
            left.remove("--members")
            line.command[-1] = "members"
    elif left and not left[0].startswith("-") and (noun, left[0]) in _FLAGS:
        line.command.append(left.pop(0))
    flags = _FLAGS.get(tuple(line.command))
    if flags is None and line.command == words[:1]:
        return words
    _take(line, [word for word in left if word not in _NEEDLESS], {**_SHARED, **(flags or {})})
    return line.words()


def _of_console_consumer(words: list[str]) -> list[str]:
    """Return the options with which kl begins at the log end, as Kafka's console consumer does by default.

    Return [] if ``words`` has an option that says where to begin.
    """
    if any(word.partition("=")[0] in _BEGINNINGS or "auto.offset.reset=" in word for word in words):
        return []
    is_member = any(word.partition("=")[0] in {"--group", "-g"} for word in words)
    return ["-X", "auto.offset.reset=latest"] if is_member else ["-r", "end"]


def _take(line: _Line, words: list[str], flags: dict[str, _Act]) -> None:
    """Add the translation of ``words`` to ``line``. ``flags`` are actions by flag, for flags with a value.

    A flag's value is the next word, or follows an equals sign. Raises UsageError if a value is missing.
    """
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        position += 1
        act = flags.get(flag)
        if act is None:
            line.rest.append(words[position - 1])
            continue
        if not equals:
            if position == len(words):
                raise UsageError(f"{flag} needs a value")
            value = words[position]
            position += 1
        act(line, value)


def _from_kcat(mode: str, words: list[str]) -> list[str]:
    line = _Line([_KCAT_MODES[mode]])
    flags = _KCAT[line.command[0]]
    split: list[str] = []
    for word in words:
        if word == mode != "-G":
            continue
        if word in _KCAT_SWITCHES:
            meant = {"consume": _KCAT_SWITCHES, "topic": _LISTING_SWITCHES}.get(line.command[0], {})
            split += meant.get(word, [])
        elif word[:2] in flags and not word.startswith("--") and len(word) > 2:
            split += [word[:2], word[2:]]  # kcat accepts -tevents
        else:
            split.append(word)
    _take(line, _protected(split), flags)
    if line.command == ["topic"]:
        line.command.append("describe" if line.names else "list")
    return line.words()


def _protected(words: list[str]) -> list[str]:
    """Replace ``-o jsonl``, the translation of -J, by ``--output=jsonl``, because kcat's -o is an offset."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "-o" and word == "jsonl":
            joined[-1] = "--output=jsonl"
        else:
            joined.append(word)
    return joined
