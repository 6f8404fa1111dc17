"""Walks: the files that a request passes on its way through a broker, determined from call stacks.

``python -m proof.walks`` prints each walk as a table. A broker runs over TCP and on a real disk in an event
loop of this module. Its clients run in another thread. While a request is served, these things are recorded:

* The call stack at every disk write and every socket write.
* The stack at which later work was scheduled, in a callback, a task or a thread. So the stack of the last
  callback can be joined to the arrival of the request.
* Every function of the product that was entered (``sys.setprofile``).

Only files of the product count. Frames of asyncio and of this module are omitted, and so is ``TaskSet``, the
broker's counterpart of ``asyncio.TaskGroup``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from asyncio import selector_events
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from kafkalite.model import NO_EPOCH
from kafkalite.protocol.messages import data, groups
from kafkalite.records.builder import build_batch
from kafkalite.testing import Cluster
from kafkalite.testing.wire import WireClient

_ROOT: Final = Path(__file__).resolve().parent.parent
_PRODUCT: Final = f"{_ROOT}/kafkalite/"
_DROPPED: Final = (f"{_ROOT}/kafkalite/testing/", f"{_ROOT}/kafkalite/broker/tasks.py")

Stack = tuple[str, ...]


class Write(NamedTuple):
    """A write to a file or socket, and the stacks that led to it."""

    kind: str  #: "disk" or "socket"
    where: str  #: the path of the file, or the address of the peer as host:port
    stacks: tuple[Stack, ...]  #: outermost frame first; each but the last ends where the next was scheduled
    calls: tuple[Stack, ...]  #: the stack at each call of a function of the product before the write


class Request:
    """Everything that followed from the arrival of one piece of data."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.calls: dict[Stack, None] = {}


class _Place(threading.local):
    """The request to which the running callback belongs, and the stacks that led to the callback."""

    request: Request | None = None
    stacks: tuple[Stack, ...] = ()


_place = _Place()


def _stack(frame: FrameType | None) -> Stack:
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PRODUCT) and not name.startswith(_DROPPED):
            file = name[len(_PRODUCT) :]
            if not files or files[-1] != file:
                files.append(file)
        frame = frame.f_back
    return tuple(reversed(files))


def _joined(frame: FrameType | None) -> tuple[Stack, ...]:
    stack = _stack(frame)
    return (*_place.stacks, stack) if stack else _place.stacks


def _continuing(callback: Callable[..., Any], *, stays: bool = False) -> Callable[..., Any]:
    """Return ``callback``, attributed to the request that is served now."""
    request, stacks = _place.request, _joined(sys._getframe(2))
    if request is None:
        return callback

    def run(*arguments: Any) -> Any:
        before = _place.request, _place.stacks
        _place.request, _place.stacks = request, stacks
        try:
            return callback(*arguments)
        finally:
            if not stays:  # in a thread, the callbacks of its future come after the call
                _place.request, _place.stacks = before

    return run


class WalkLoop(asyncio.SelectorEventLoop):
    """An event loop that records for which request each callback was scheduled, and from where."""

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(_continuing(callback), *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon_threadsafe(_continuing(callback), *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when, _continuing(callback), *args, context=context)


class Recorder:
    """Patches asyncio's transports and ``os.pwrite`` inside its block. Records when it is on."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._is_on = False
        self._thread = threading.get_ident()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open every connection inside this block, because a transport remembers its methods."""
        transport: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
        before = {name: transport.__dict__.get(name) for name in ("_read_ready", "write", "writelines")}
        pwrite, submit = os.pwrite, ThreadPoolExecutor.submit

        def read_ready(connection: Any) -> None:
            if not self._is_on or threading.get_ident() != self._thread:
                before["_read_ready"](connection)
                return
            _place.request, _place.stacks = Request(), ()
            self.requests.append(_place.request)
            try:
                before["_read_ready"](connection)
            finally:
                _place.request, _place.stacks = None, ()

        def write(connection: Any, data: Any) -> None:
            _note("socket", _address(connection))
            before["write"](connection, data)

        def writelines(connection: Any, data: Any) -> None:
            _note("socket", _address(connection))
            before["writelines"](connection, data)

        def disk_write(fd: int, buffer: Any, position: int) -> int:
            if _place.request is not None:
                _note("disk", str(Path(f"/proc/self/fd/{fd}").readlink()))
            return pwrite(fd, buffer, position)

        transport._read_ready, transport.write = read_ready, write
        if before["writelines"] is not None:  # since Python 3.12
            transport.writelines = writelines
        os.pwrite = disk_write
        executor: Any = ThreadPoolExecutor
        executor.submit = lambda pool, job, *arguments, **keywords: submit(
            pool, _continuing(job, stays=True), *arguments, **keywords
        )
        try:
            yield
        finally:
            os.pwrite, executor.submit = pwrite, submit
            for name, method in before.items():
                if method is not None:
                    setattr(transport, name, method)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record all data that arrives inside this block, and what follows from it."""
        self.requests.clear()
        self._is_on = True
        sys.setprofile(_note_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._is_on = False


def _note(kind: str, where: str) -> None:
    if _place.request is not None:
        stacks, calls = _joined(sys._getframe(2)), tuple(_place.request.calls)
        _place.request.writes.append(Write(kind, where, stacks, calls))


def _note_call(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call" and _place.request is not None and frame.f_code.co_filename.startswith(_PRODUCT):
        stack = _stack(frame)
        if stack:
            _place.request.calls[stack] = None


def _address(transport: Any) -> str:
    host, port = transport.get_extra_info("peername")[:2]
    return f"{host}:{port}"


class Clients:
    """An event loop in a separate thread, for everything except the broker."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Walk(NamedTuple):
    """One counted walk."""

    name: str
    begin: str
    end: str
    #: On the call stacks from the arrival to the last write, each once, in order. If the response is returned
    #: before it is written, the deepest stack before the write.
    files: tuple[str, ...]
    returns: tuple[Stack, ...]  #: parts of a stack that leave a file and enter it again: (a, b, a)
    #: Every file of which a function was entered before the write, in the order of the first calls. Without
    #: codecs (``protocol/``, ``records/``) and what all floors share (``kafkalite/*.py``).
    entered: tuple[str, ...]


def _walk(name: str, begin: str, end: str, writes: Sequence[Write]) -> Walk:
    assert writes, f"{name}: nothing was written"
    calls = tuple(dict.fromkeys(call for write in writes for call in write.calls))
    stacks = [stack for write in writes for stack in write.stacks]
    if len(stacks) == 1 and len(stacks[0]) == 1:
        own = [call for call in calls if not any(file.startswith(_CODECS) for file in call)]
        stacks = [max(own, key=len)]
    returns = dict.fromkeys(part for stack in (*calls, *stacks) for part in _returns(stack))
    entered = dict.fromkeys(call[-1] for call in calls)
    return Walk(
        name,
        begin,
        end,
        tuple(dict.fromkeys(file for stack in stacks for file in stack)),
        tuple(returns),
        tuple(file for file in entered if "/" in file and not file.startswith(_CODECS)),
    )


def _returns(stack: Stack) -> Iterator[Stack]:
    for start, file in enumerate(stack):
        end = next((at for at in range(start + 2, len(stack)) if stack[at] == file), None)
        if end is not None:
            yield stack[start : end + 1]


_CODECS: Final = ("protocol/", "records/")
_GROUP: Final = "g"
_MEMBER: Final = "1".rjust(32, "0")


async def walks_of_one_broker(recorder: Recorder, clients: Clients) -> list[Walk]:
    """Return the walks of produce, fetch, an idle member's heartbeat, and the commit of a transaction."""
    walks: list[Walk] = []

    def count(name: str, begin: str, end: str, kind: str, *, is_first: bool = True) -> None:
        writes = [
            write
            for request in recorder.requests
            for write in request.writes
            if not kind or write.kind == kind
        ]
        walks.append(_walk(name, begin, end, writes[:1] if is_first else writes))

    async with Cluster(transport="tcp", storage="disk") as cluster:
        await cluster.create_topic("t")
        wire: WireClient = await clients.run(_opened(cluster.bootstrap_servers))
        await clients.run(_produce(wire))
        with recorder.on():
            await clients.run(_produce(wire))
        count("produce", "Produce arrives", "pwrite", "disk")
        count("produce, acknowledged", "Produce arrives", "the response is written", "", is_first=False)
        fetch = data.FetchRequest(0, 1, 1 << 20, 0, [data.FetchPartition("t", 0, NO_EPOCH, 0, 1 << 20)])
        await clients.run(wire.call(fetch))
        with recorder.on():
            await clients.run(wire.call(fetch))
        count("fetch", "Fetch arrives", "the response is written", "socket")
        await clients.run(wire.call(groups.FindCoordinatorRequest(0, [_GROUP])))
        joined = await clients.run(_join_group(wire))
        with recorder.on():
            await clients.run(wire.call(_heartbeat(joined.member_epoch, joined.assignment)))
        count("heartbeat, idle", "ConsumerGroupHeartbeat arrives", "the response is written", "socket")
        producer = cluster.producer(transactional_id="x")
        await clients.run(producer.start())
        for _ in range(2):
            await clients.run(_transaction(producer))
            with recorder.on():
                await clients.run(producer.commit_transaction())
                await cluster.wait_until(
                    lambda: (
                        sum(write.kind == "disk" for one in recorder.requests for write in one.writes) == 3
                    )
                )
        count(
            "commit of a transaction", "EndTxn arrives", "decision, marker, end, response", "", is_first=False
        )
        await clients.run(producer.close())
        await clients.run(wire.__aexit__(None, None, None))
    return walks


async def walks_of_two_brokers(recorder: Recorder, clients: Clients) -> list[Walk]:
    """Return the walk of a follower's append of its leader's records."""
    async with Cluster(brokers=2, transport="tcp", storage="disk") as cluster:
        await cluster.create_topic("t")
        leader = cluster.leader("t")
        follower = next(node_id for node_id in cluster.nodes if node_id != leader)
        wire: WireClient = await clients.run(_opened(cluster.brokers[leader].bootstrap_servers))
        await clients.run(_produce(wire))
        with recorder.on():
            await clients.run(_produce(wire))
        writes = [
            write
            for request in recorder.requests
            for write in request.writes
            if f"/node-{follower}/" in write.where and write.where.endswith(".log")
        ]
        await clients.run(wire.__aexit__(None, None, None))
    return [_walk("replicate", "the leader's response arrives", "pwrite of the follower", writes[:1])]


async def _opened(address: str) -> WireClient:
    return await WireClient(address).__aenter__()


async def _produce(wire: WireClient) -> None:
    batch = build_batch([b"value"], timestamps_ms=time.time_ns() // 1_000_000)
    response = await wire.call(
        data.ProduceRequest(-1, 5000, None, [data.ProducePartition("t", 0, len(batch))]), batch
    )
    assert not response.partitions[0].error_code, response


async def _transaction(producer: Any) -> None:
    await producer.begin_transaction()
    await producer.send("t", b"value")
    await producer.flush()


def _heartbeat(epoch: int, owned: Any) -> groups.ConsumerGroupHeartbeatRequest:
    topics = ["t"] if epoch == 0 else None
    return groups.ConsumerGroupHeartbeatRequest(
        _GROUP, _MEMBER, epoch, None, 60_000, topics, None, None, owned, 0
    )


async def _join_group(wire: WireClient) -> groups.ConsumerGroupHeartbeatResponse:
    while True:
        response: groups.ConsumerGroupHeartbeatResponse = await wire.call(_heartbeat(0, []))
        if not response.error_code:
            return response
        await asyncio.sleep(0.01)  # the coordinator is loading


def all_walks() -> dict[str, Walk]:
    """Return every walk by its name. Takes a few seconds; must be called outside an event loop."""
    recorder, clients = Recorder(), Clients()
    walks: list[Walk] = []
    try:
        for scene in (walks_of_one_broker, walks_of_two_brokers):
            with asyncio.Runner(loop_factory=WalkLoop) as runner, recorder.installed():
                walks += runner.run(scene(recorder, clients))
    finally:
        clients.close()
    return {walk.name: walk for walk in walks}


def main() -> None:
    for walk in all_walks().values():
        lines = [
            f"{walk.name}: {walk.begin} -> {walk.end}",
            f"  {len(walk.files)} files on the call stacks, {len(walk.entered)} entered",
        ]
        for number in range(max(len(walk.files), len(walk.entered))):
            left = walk.files[number] if number < len(walk.files) else ""
            right = walk.entered[number] if number < len(walk.entered) else ""
            lines.append(f"  {number + 1:>3}  {left:<44}{right}".rstrip())
        lines += [f"  twice: {' -> '.join(part)}" for part in walk.returns]
        sys.stdout.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
