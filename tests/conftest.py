"""Fixtures for every test (no task left behind, bounded time), and the requests that many tests send."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from kafkalite.broker.server.responses import Reply
from kafkalite.broker.server.server import Connection
from kafkalite.client import forgotten
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.api_errors import undeclared_codes
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages import admin, data
from kafkalite.records.builder import build_batch
from proof.certificates import DevCertificates
from proof.mutants import without

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Accept Ctrl-C and hangups. Background jobs of a shell ignore SIGINT, and nohup makes a program ignore
    SIGHUP; so would the commands under test.

    ``make coverage`` measures the workers of xdist, but not the processes that tests start: some check
    what an import loads.
    """
    hypothesis.settings.register_profile("without deadlines", deadline=None)  # machines may be busy
    hypothesis.settings.load_profile("without deadlines")
    if hasattr(config, "workerinput"):
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.fixturenames.insert(0, "_no_leaked_tasks")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``, send any test to any worker, but all those that share a Spark session to one.

    xdist_group would do that, but xdist 3.8 finds no group under pytest 9.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class SparkTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "spark" if nodeid.startswith("tests/spark/") else nodeid

    return SparkTogether(config, log)


@pytest.fixture(scope="session")
def dev_certificates(tmp_path_factory: pytest.TempPathFactory) -> DevCertificates:
    """An authority and the certificates that it issued. Tests may add others, but change none."""
    return DevCertificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture
async def _no_leaked_tasks() -> AsyncIterator[None]:
    """An async test that leaves a task or a connection behind fails."""
    before = asyncio.all_tasks()
    yield
    for client, guarded in list(forgotten._open.items()):
        if not client.is_open():  # the test has killed the client instead of closing it
            guarded.guard.cancel()
    for _ in range(3):  # callbacks scheduled by the last line of the test may still be due
        await asyncio.sleep(0)
    leaked = {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()}
    assert not leaked, f"tasks left running: {leaked}"
    transports: Any = getattr(asyncio.get_running_loop(), "_transports", {})  # of asyncio's own loop
    for _ in range(500):  # a connection that the peer has closed at the end of the test may not know it yet
        if not (unclosed := [one for one in list(transports.values()) if not one.is_closing()]):
            break
        await asyncio.sleep(0.01)
    assert not unclosed, f"connections left open: {unclosed}"


@pytest.fixture(autouse=True)
def _logging_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that runs a command or a server in this process leaves no log configuration behind."""
    plugin: Any = request.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler):  # PySpark's loggers change formatters
        handler.setFormatter(plugin.formatter)
    loggers = (logging.getLogger(), logging.getLogger("kafkalite"))
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in list(logger.handlers):
            if handler not in handlers and not type(handler).__module__.startswith("_pytest"):
                logger.removeHandler(handler)


#: The directories whose tests start brokers in this process.
BROKER_TESTS = {"broker", "client", "cli", "conformance", "groups", "integration", "transactions"}


@pytest.fixture(autouse=True)
def _only_declared_codes(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails if a broker sends an error code that ``protocol.api_errors`` does not declare.

    Errors that a test injects have the message "refused by a test".
    """
    if request.node.path.relative_to(ROOT / "tests").parts[0] not in BROKER_TESTS:
        yield
        return
    undeclared: list[str] = []
    encode = Connection._encode

    def checked(self: Any, asked: Any, response: Any, out: list[Any]) -> int:
        if asked.api_key in APIS and getattr(response, "error_message", "") != "refused by a test":
            message = response.message if isinstance(response, Reply) else RequestError(*response[:2])
            undeclared.extend(undeclared_codes(ApiKey(asked.api_key), message))
        return encode(self, asked, response, out)

    with pytest.MonkeyPatch.context() as patches:  # a context of its own: tests may undo their patches
        patches.setattr(Connection, "_encode", checked)
        yield
    assert not undeclared, undeclared


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def access_log() -> Path:
    """10,000 real lines of a web server's access log, beside the checkout."""
    path = ROOT.parent / "shared" / "data" / "apache_access.log"
    if not path.exists():
        pytest.skip("../shared/data/apache_access.log is not here: the test needs the real access log")
    return path


@pytest.fixture
def new_topic() -> Callable[..., Any]:
    """Return a function for the request that creates one topic: ``new_topic("t", partitions=2,
    **configs)``.
    """

    def make(name: str, partitions: int = 1, **configs: str) -> admin.CreateTopicsRequest:
        return admin.CreateTopicsRequest(1000, False, [admin.NewTopic(name, partitions, 1, configs)])

    return make


@pytest.fixture
def batch_of() -> Callable[..., bytearray]:
    """Return a function for a record batch of some values, with the current timestamp."""

    def make(*values: bytes, timestamp_ms: int | None = None, **options: Any) -> bytearray:
        now_ms = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
        return bytearray(build_batch(list(values) or [b"value"], timestamps_ms=now_ms, **options))

    return make


@pytest.fixture
def produce() -> Callable[..., Any]:
    """Return a function for a produce request: ``produce(batch, "t", acks=1)``, to be sent with the batch."""

    def make(
        batch: bytes | bytearray,
        topic: str = "t",
        partition: int = 0,
        *,
        acks: int = -1,
        timeout_ms: int = 5000,
    ) -> data.ProduceRequest:
        return data.ProduceRequest(
            acks, timeout_ms, None, [data.ProducePartition(topic, partition, len(batch))]
        )

    return make


@pytest.fixture
def mutant() -> Iterator[Callable[[str], None]]:
    """Return a function that activates a mutant until the test ends."""
    with ExitStack() as active:
        yield lambda name: active.enter_context(without(name))
