"""Producers that are never closed: nothing is lost silently, and no noise of asyncio is printed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from kafkalite import Producer, TopicPartition, sync
from kafkalite.client import forgotten
from kafkalite.errors import ClientClosedError, DeliveryFailedError
from kafkalite.protocol.api import ApiKey

T0 = TopicPartition("t", 0)

AT_THE_END = """
import asyncio, sys, kafkalite

async def main():
    producer = await kafkalite.Producer(sys.argv[1], acks=ACKS).start()
    for i in range(1000):
        producer.send_nowait("t", b"%d" % i)
"""


def _run(broker: sync.Broker, program: str) -> tuple[str, int]:
    """Run a program against ``broker``. Return its stderr and the number of records in t-0.

    Newer versions of Python warn of each fork of a process that has threads.
    """
    options = ["-W", "ignore:This process:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program), broker.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    with sync.Admin(broker.address) as admin:
        topics = {topic.name for topic in admin.list_topics()}
        count = admin.list_offsets([T0], "latest")[T0].offset if "t" in topics else 0
    return done.stderr, count


@pytest.fixture
def broker() -> Any:
    with sync.Broker(listeners="127.0.0.1:0") as running:
        yield running


@pytest.mark.parametrize("acks", ["'all'", "1", "0"])
def test_the_end_of_asyncio_run_delivers(broker: sync.Broker, acks: str) -> None:
    program = AT_THE_END.replace("ACKS", acks) + "asyncio.run(main())"
    assert _run(broker, program) == ("", 1000)


def test_a_loop_that_is_closed_by_hand_reports_the_loss(broker: sync.Broker) -> None:
    program = AT_THE_END.replace("ACKS", "'all'")
    program += "loop = asyncio.new_event_loop()\nloop.run_until_complete(main())\nloop.close()"
    said = "a producer was never closed, and 1000 of its records were not acknowledged (t: 1000)\n"
    assert _run(broker, program) == (said, 0)


def test_a_producer_of_a_closed_loop_names_its_mistake(broker: sync.Broker) -> None:
    program = """
        import asyncio, gc, sys, kafkalite

        loop = asyncio.new_event_loop()
        producer = loop.run_until_complete(kafkalite.Producer(sys.argv[1]).start())
        loop.close()
        try:
            asyncio.run(producer.partitions_for("t"))
        except kafkalite.errors.ClientClosedError as error:
            assert "the event loop in which this client was opened is closed" in str(error)
        gc.collect()
    """
    assert _run(broker, program) == ("", 0)


@pytest.mark.parametrize("call", ["send('t', b'y')", "send_many('t', [b'y'])", "send('t', b'y', key=b'k')"])
def test_a_producer_that_has_sent_before_its_loop_was_closed_names_its_mistake(
    broker: sync.Broker, call: str
) -> None:
    program = f"""
        import asyncio, gc, sys, kafkalite

        async def open_and_send():
            producer = await kafkalite.Producer(sys.argv[1]).start()
            await producer.send("t", b"x")
            return producer

        loop = asyncio.new_event_loop()
        producer = loop.run_until_complete(open_and_send())
        loop.close()
        for _ in range(2):
            try:
                asyncio.run(producer.{call})
            except kafkalite.errors.ClientClosedError as error:
                assert "the event loop in which this client was opened is closed" in str(error)
            else:
                raise SystemExit("it was sent")
        gc.collect()
    """
    assert _run(broker, program)[1] == 1


def test_records_without_a_partition_are_reported_by_topic() -> None:
    text = str(DeliveryFailedError({("t", -1): 2, ("u", 0): 1}, ClientClosedError("closed")))
    assert text.startswith("3 records were not delivered (t: 2, u-0: 1); the first error: closed")


def test_a_producer_without_references_is_not_lost(broker: sync.Broker) -> None:
    program = AT_THE_END.replace("ACKS", "'all'")
    program += "import gc\nloop = asyncio.new_event_loop()\nloop.run_until_complete(main())\nloop.close()\n"
    program += "del loop\ngc.collect()"
    said = "a producer was never closed, and 1000 of its records were not acknowledged (t: 1000)\n"
    assert _run(broker, program) == (said, 0)


def test_a_forked_process_reports_its_own_loss_alone(broker: sync.Broker) -> None:
    program = """
        import asyncio, os, sys, kafkalite

        async def main(count):
            producer = await kafkalite.Producer(sys.argv[1]).start()
            for i in range(count):
                producer.send_nowait("t", b"x")
            return producer

        def lose(count):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(main(count))
            loop.close()

        lose(3)
        child = os.fork()
        if child == 0:
            lose(2)
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    said, _ = _run(broker, program)
    counts = [line.split(" of its records")[0].split()[-1] for line in said.splitlines()]
    assert counts == ["2", "3"]


def test_a_task_that_is_cancelled_closes_its_producer_itself(broker: sync.Broker) -> None:
    program = """
        import asyncio, sys, warnings, kafkalite
        warnings.simplefilter("always")

        async def work():
            async with kafkalite.Producer(sys.argv[1], linger_ms=60_000) as producer:
                opened.set()
                try:
                    await asyncio.gather(asyncio.sleep(60))
                finally:
                    for _ in range(5):
                        await asyncio.sleep(0)
                    producer.send_nowait("t", b"x")

        async def main():
            global opened
            opened = asyncio.Event()
            task = asyncio.create_task(work())
            await opened.wait()
            await asyncio.sleep(0)
            return task

        asyncio.run(main())
    """
    assert _run(broker, program) == ("", 1)


def test_the_end_of_the_process_delivers_for_threads(broker: sync.Broker) -> None:
    program = """
        import sys
        from kafkalite import sync

        def forget():
            lost = sync.Producer(sys.argv[1]).start()
            for i in range(500):
                lost.send("t", b"%d" % i)

        forget()
        kept = sync.Producer(sys.argv[1]).start()
        for i in range(500):
            kept.send("t", b"%d" % i)
    """
    assert _run(broker, program) == ("", 1000)


def test_what_a_dead_broker_did_not_get_is_reported(broker: sync.Broker) -> None:
    program = """
        import sys
        from kafkalite import sync
        from kafkalite.client.blocking import producer as module

        module.CLOSE_FORGOTTEN_MS = 300
        broker = sync.Broker().start()
        producer = sync.Producer(broker.bootstrap_servers).start()
        producer.send_and_wait("t", b"0", partition=0)
        broker.stop()
        for i in range(7):
            producer.send("t", b"%d" % i, partition=0)
    """
    said, _ = _run(broker, program)
    assert "at the end of the process 7 records were not delivered (t-0: 7)" in said
    assert said.count("\n") == 1


def test_several_dead_brokers_delay_the_end_as_one_does(broker: sync.Broker) -> None:
    program = """
        import atexit, sys, time
        atexit.register(lambda: print(round(time.monotonic() - started), file=sys.stderr))

        from kafkalite import sync
        from kafkalite.client.blocking import producer as module

        module.CLOSE_FORGOTTEN_MS = 1_000
        brokers = [sync.Broker().start() for _ in range(6)]
        producers = [sync.Producer(broker.bootstrap_servers).start() for broker in brokers]
        for producer in producers:
            producer.send_and_wait("t", b"0", partition=0)
        for broker in brokers:
            broker.stop()
        for producer in producers:
            producer.send("t", b"1", partition=0)
        started = time.monotonic()
    """
    said, _ = _run(broker, program)
    assert said.count("at the end of the process 1 record was not delivered (t-0: 1)") == 6
    assert int(said.splitlines()[-1]) < 4


def test_a_forked_process_must_open_its_own_clients(broker: sync.Broker) -> None:
    program = """
        import os, sys
        from kafkalite import errors, sync

        producer = sync.Producer(sys.argv[1]).start()
        admin = sync.Admin(sys.argv[1]).start()
        producer.send_and_wait("t", b"0", partition=0)
        child = os.fork()
        if child == 0:
            code = 0
            for call in (
                lambda: producer.send("t", b"1"),
                lambda: producer.send_many("t", [b"1"]),
                producer.flush,
                admin.list_topics,
            ):
                try:
                    call()
                except errors.ForkedClientError as error:
                    assert "open clients after the fork" in str(error)
                else:
                    code = 1
            producer.close()
            with sync.Producer(sys.argv[1]) as own:
                own.send_and_wait("t", b"1", partition=0)
            sys.exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        producer.send_and_wait("t", b"2", partition=0)
    """
    assert _run(broker, program) == ("", 3)


async def test_cancelling_every_task_delivers_first(fake_broker: Any) -> None:
    producer = await Producer(fake_broker.address, linger_ms=60_000).start()
    producer.send_nowait("t", b"x")
    assert producer.undelivered() == {"t": 1}
    assert producer._guard is not None
    producer._guard.cancel()
    with pytest.warns(ResourceWarning, match="never closed"):
        await asyncio.wait({producer._guard})
    assert fake_broker.values("t") == [b"x"]
    assert not producer.is_open
    assert producer.undelivered() == {}


async def test_a_start_that_is_cancelled_at_any_point_leaves_nothing(fake_broker: Any) -> None:
    before = asyncio.all_tasks()
    for turns in range(1_000):
        producer = Producer(fake_broker.address)
        start = asyncio.create_task(producer.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        if start.done():
            await producer.close()
            break
        start.cancel()
        await asyncio.wait({start})
        assert start.cancelled() and not producer.is_open, turns
        assert producer not in [one.client for one in forgotten._open], turns
    assert turns > 5
    async with asyncio.timeout(30):
        while [task for task in asyncio.all_tasks() - before if "_close_at_the_end" in repr(task)]:
            await asyncio.sleep(0)


def test_records_whose_tasks_the_end_of_the_loop_cancels_are_reported(broker: sync.Broker) -> None:
    program = """
        import asyncio
        import kafkalite
        from kafkalite.client import forgotten

        forgotten.CLOSE_FORGOTTEN_MS = 300

        async def main():
            broker = kafkalite.Broker()
            await broker.start()
            producer = await kafkalite.Producer(broker.bootstrap_servers).start()
            await producer.send("t", b"0", partition=0)
            await broker.stop()
            sends = [asyncio.ensure_future(producer.send("t", b"x", partition=0)) for _ in range(10)]
            await asyncio.sleep(0)
            return sends

        asyncio.run(main())
    """
    said, _ = _run(broker, program)
    assert "at the end of its event loop 10 records were not delivered (t-0: 10)" in said


async def test_undeliverable_records_are_logged_with_their_number(
    fake_broker: Any, make_fault: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(forgotten, "CLOSE_FORGOTTEN_MS", 50)
    fake_broker.topics["t"] = 1
    fake_broker.always[ApiKey.PRODUCE] = make_fault(drop=True)
    producer = await Producer(fake_broker.address, linger_ms=0).start()
    for _ in range(3):
        producer.send_nowait("t", b"x")
    assert producer._guard is not None
    producer._guard.cancel()
    with pytest.warns(ResourceWarning, match="never closed"):
        await asyncio.wait({producer._guard})
    assert "at the end of its event loop 3 records were not delivered (t-0: 3)" in caplog.text


LEFT = """
import asyncio, sys, kafkalite
from kafkalite import sync

SETTINGS = {"group_id": "g", "bootstrap_servers": sys.argv[1], "auto_offset_reset": "earliest"}

class Listener(kafkalite.RebalanceListener):
    def on_revoked(self, partitions):
        print("the program has ended", file=sys.stderr)

async def main():
    consumer = await kafkalite.Consumer("t", listener=Listener(), **SETTINGS).start()
    assert [r.value for r in await consumer.get_many(1, timeout_ms=5000)] == [b"0"]
    assert [r.value for r in await consumer.get_many(1, timeout_ms=5000)] == [b"1"]

def block():
    consumer = sync.Consumer("t", listener=Listener(), **SETTINGS).start()
    for number, record in enumerate(consumer):
        if number == 1:
            return consumer
"""


@pytest.mark.parametrize("end", ["asyncio.run(main())", "kept = block()", "block()"])
def test_a_consumer_that_is_not_closed_leaves_its_group(broker: sync.Broker, end: str) -> None:
    """At once: its session would last 45 s. The records of its last call are returned again."""
    with sync.Producer(broker.address) as producer:
        producer.send_many("t", [b"0", b"1", b"2"])
    said, _ = _run(broker, LEFT + end)
    assert said == ""
    with sync.Admin(broker.address) as admin:
        assert list(admin.describe_group("g").members) == []
    settings = {"group_id": "g", "bootstrap_servers": broker.address, "auto_offset_reset": "earliest"}
    with sync.Consumer("t", **settings) as next_one:
        assert next_one.get_many(1, timeout_ms=5_000)[0].value in {b"0", b"1"}


def test_a_dead_broker_does_not_hold_up_the_end(broker: sync.Broker) -> None:
    program = LEFT.replace("SETTINGS =", "forgotten.CLOSE_FORGOTTEN_MS = 300\nSETTINGS =", 1)
    program = program.replace("import asyncio", "from kafkalite.client import forgotten\nimport asyncio", 1)
    program += "kept = block()\nprint('stop', flush=True)\nsys.stdin.read()"
    with sync.Producer(broker.address) as producer:
        producer.send_many("t", [b"0", b"1", b"2"])
    running = subprocess.Popen(
        [sys.executable, "-c", program, broker.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None and running.stdout.readline() == "stop\n"
    broker.stop()
    _, said = running.communicate("", timeout=20)
    assert running.returncode == 0
    assert "Traceback" not in said and "was destroyed" not in said


FROZEN = """
import os, signal, subprocess, sys
from kafkalite.client import forgotten
forgotten.CLOSE_FORGOTTEN_MS = 300

SERVER = '''
import asyncio, kafkalite

async def serve():
    async with kafkalite.Broker(listeners="127.0.0.1:0") as broker:
        async with kafkalite.Producer(broker.address) as producer:
            await producer.send("t", b"0", partition=0)
            await producer.send("t", b"1", partition=0)
        print(broker.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(serve())
'''
server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
sys.argv[1:] = [server.stdout.readline().strip()]
"""


def test_a_silent_broker_does_not_hold_up_the_end() -> None:
    """It keeps its connections and sends no responses."""
    program = FROZEN + LEFT.replace("async def main():", "async def forget():")
    program += """
async def main():
    await forget()
    os.kill(server.pid, signal.SIGSTOP)

try:
    asyncio.run(main())
finally:
    server.kill()
    server.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "unhandled exception" not in done.stderr
    assert "a consumer was never closed, and at the end of its event loop" in done.stderr
