"""kl produce --txn and kl txn."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import click
import pytest

from kafkalite import sync
from kafkalite.cli import txn
from kafkalite.cli.completion import complete_transactional_ids
from kafkalite.cli.invocation import Invocation
from kafkalite.errors import ProducerFencedError

Kl = Callable[..., Any]


def test_all_of_the_input_is_one_transaction(at: Kl) -> None:
    assert at("topic", "create", "ledger", "-p", "2").code == 0
    sent = at("produce", "ledger", "--txn", "transfer", stdin=b"debit\ncredit\n")
    assert sent.code == 0, sent.told
    read = at("consume", "ledger", "-e", "--read-committed")
    assert sorted(read.text.split()) == ["credit", "debit"]
    described = json.loads(at("txn", "describe", "transfer", "-o", "json").out)
    assert described["transactional_id"] == "transfer"
    assert described["state"] in {"PrepareCommit", "CompleteCommit"}
    assert "transfer" in at("txn", "list", "-o", "name").text.split()


def test_bad_input_aborts_what_came_before_it(at: Kl) -> None:
    assert at("topic", "create", "all-or-nothing", "-p", "1").code == 0
    bad = b'{"value": "good"}\n{"value": \n'
    failed = at("produce", "all-or-nothing", "--txn", "-i", "jsonl", stdin=bad)
    assert failed.code == 1 and "Traceback" not in failed.told
    assert at("produce", "all-or-nothing", "--txn", stdin=b"after\n").code == 0
    assert at("consume", "all-or-nothing", "-e", "--read-committed").text.split() == ["after"]


def test_abort_without_a_transaction_and_of_an_unknown_id(at: Kl) -> None:
    assert at("topic", "create", "quiet", "-p", "1").code == 0
    assert at("produce", "quiet", "--txn", "quiet-1", stdin=b"x\n").code == 0
    done = at("txn", "abort", "quiet-1")
    assert (done.code, done.told) == (
        0,
        "kl: 'quiet-1' has no open transaction now, and its producer is fenced\n",
    )
    assert at("consume", "quiet", "-e", "--read-committed").text.split() == ["x"]
    missing = at("txn", "describe", "nobody")
    assert missing.code == 4 and "kl txn list" in missing.told


def test_an_open_transaction_is_shown_and_aborted(at: Kl, servers: str) -> None:
    assert at("topic", "create", "held", "-p", "1").code == 0
    with sync.Producer(servers, transactional_id="held-1") as producer:
        producer.begin_transaction()
        producer.send("held", b"open").result(10)
        (row,) = json.loads(at("txn", "list", "--state", "ongoing", "-o", "json").out)
        assert (row["name"], row["state"]) == ("held-1", "Ongoing") and row["open_ms"] >= 0
        table = at("txn", "list").text.splitlines()
        assert "OPEN FOR" in table[0]
        assert at("txn", "list", "--open-for", "1h").told == "kl: no transactional ids open for 1h0m\n"
        described = json.loads(at("txn", "describe", "held-1", "-o", "json").out)
        assert described["partitions"] == ["held-0"]
        waiting = at("consume", "held", "-e", "--read-committed", "--timeout", "300ms")
        assert waiting.code == 7 and "'kl txn list' shows it" in waiting.told
        assert at("txn", "abort", "held-1").code == 0
        with pytest.raises(ProducerFencedError):
            producer.commit_transaction()
    after = {row["name"]: row["open_ms"] for row in json.loads(at("txn", "list", "-o", "json").out)}
    assert after["held-1"] is None
    assert at("consume", "held", "-e", "--read-committed", "--timeout", "10s").text == ""


def test_a_transaction_group_is_described_and_not_aborted_by_name(at: Kl, servers: str) -> None:
    assert at("topic", "create", "sunk", "-p", "1").code == 0
    with sync.TransactionGroupWriter("sink", 7, "task-0", servers) as writer:
        writer.send("sunk", b"x").result(10)
        prepared = writer.prepare()
    described = json.loads(at("txn", "describe", "sink", "-o", "json").out)
    assert [(each["name"], each["batch_id"]) for each in described["members"]] == [("task-0", 7)]
    refused = at("txn", "abort", "sink")
    assert refused.code == 1 and "transaction group" in refused.told
    with sync.TransactionGroup("sink", servers) as group:
        group.finish(7, [prepared], wait_ms=5000)
    text = at("txn", "describe", "sink").text
    assert "last batch id   7\nlast winners    task-0\n" in text


def test_a_transaction_group_is_retired(at: Kl, servers: str) -> None:
    unknown = at("txn", "retire", "one-shot")
    assert unknown.code == 4 and "no transaction group 'one-shot'" in unknown.told
    with sync.TransactionGroup("one-shot", servers) as group:
        group.finish(3, [])
        assert at("txn", "retire", "one-shot").told == (
            "kl: 'one-shot' is retired: batch 3 was its last; the brokers will forget it\n"
        )
        assert group.retire() == 3


def test_the_outcome_of_the_records_is_printed(at: Kl) -> None:
    assert at("topic", "create", "fates", "-p", "1").code == 0
    assert at("produce", "fates", "--txn", stdin=b"x\n").told.startswith(
        "kl: 1 record committed to fates in "
    )
    bad = at("produce", "fates", "--txn", "-i", "jsonl", stdin=b'{"value": "x"}\n{\n')
    assert bad.code == 1
    assert bad.told.endswith("    hint: the transaction was aborted: none of its records can be read\n")
    refused = at("produce", "__transaction_state", "--txn", stdin=b"x\n")
    assert refused.code == 2 and refused.told.count("__transaction_state-") == 1


def test_ctrl_c_aborts(spawn: Callable[..., Any], at: Kl, servers: str) -> None:
    assert at("topic", "create", "interrupted", "-p", "1").code == 0
    process = spawn("produce", "interrupted", "--txn", "ctrl-c", KL_BOOTSTRAP_SERVERS=servers)
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while at("consume", "interrupted", "-e").text != "one\ntwo\n":
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"2 records sent to interrupted and aborted" in told
    assert at("consume", "interrupted", "-e", "--read-committed", "--timeout", "10s").text == ""


def test_transactional_ids_are_completed(at: Kl, servers: str) -> None:
    assert at("produce", "completed", "--txn", "complete-me", stdin=b"x\n").code == 0
    context = click.Context(txn.describe, obj=Invocation(bootstrap=servers))
    assert complete_transactional_ids(context, txn.describe.params[0], "complete-") == ["complete-me"]


def test_nothing_hangs(at: Kl) -> None:
    assert at("topic", "create", "healthy", "-p", "2").code == 0
    found = at("txn", "find-hanging", "healthy", "--older-than", "0s")
    assert (found.code, found.told) == (0, "kl: none in 2 partitions\n")
