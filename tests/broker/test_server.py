"""Connections: order of responses, back-pressure, limits, reaping; with fake transports and dispatchers."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

from kafkalite.broker.server.metrics import Metrics
from kafkalite.broker.server.responses import Pending, Refusal, Reply, Response
from kafkalite.broker.server.server import (
    FLUSH_BYTES,
    FRAME_DEADLINE_MS,
    FRAME_PROGRESS_BYTES,
    HANDSHAKE_DEADLINE_MS,
    HEAVY_COST,
    HEAVY_SECONDS,
    LARGE_REQUEST_BYTES,
    LINGER_MS,
    REAP_INTERVAL_MS,
    REQUEST_COST,
    REQUESTS_PER_TURN,
    TURN_BYTES,
    WRITE_BUFFER_HIGH_BYTES,
    Connection,
    Server,
)
from kafkalite.errors import ErrorCode, RemoteProtocolError
from kafkalite.limits import MAX_IN_FLIGHT_PER_CONNECTION
from kafkalite.protocol.api import APIS, ApiKey
from kafkalite.protocol.connection import BadRequest, ClientConnection, Request, RequestError
from kafkalite.protocol.messages import data, metadata
from kafkalite.testing.virtual_clock import VirtualClock

IDLE_MS = 600_000


class Transport:
    """The transport of a connection, as the connection sees it."""

    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol
        self.written = bytearray()
        self.is_reading = True
        self.is_closed = False
        self.is_aborted = False
        self.has_ended = False
        self.buffered = 0

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("127.0.0.1", 40000), "sockname": ("::1", 9092, 0, 0)}.get(name)

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        assert low < high
        if self.buffered > high:
            self.protocol.pause_writing()  # type: ignore[attr-defined]

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: Any) -> None:
        assert not self.is_closed and not self.has_ended
        self.written += data

    def writelines(self, buffers: Any) -> None:
        for buffer in buffers:
            self.write(buffer)

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True

    def write_eof(self) -> None:
        assert not self.is_closed
        self.has_ended = True

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.protocol.connection_lost(None)

    def abort(self) -> None:
        self.is_aborted = True
        self.close()


class Peer:
    """A client on the other side of one Connection, without a network."""

    def __init__(self, server: Server, connection: Connection | None = None) -> None:
        self.connection = connection or Connection(server, None)
        self.transport = Transport(self.connection)
        self.wire = ClientConnection("test")
        self.taken = 0
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def receive(self, *buffers: Any) -> None:
        """Pass bytes to the server's side."""
        rest = b"".join(bytes(buffer) for buffer in buffers)
        while rest and not self.transport.is_closed:
            buffer: Any = self.connection.get_buffer(-1)
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            self.connection.buffer_updated(count)

    def handshake(self) -> None:
        self.receive(*self.wire.handshake()[1])
        assert self.answers()[0].error_code == 0

    def ask(self, tag: str) -> None:
        self.receive(*self.wire.send(metadata.MetadataRequest([tag], False))[1])

    def answers(self) -> list[Any]:
        """Return the messages written since the last call."""
        fresh = bytes(self.transport.written[self.taken :])
        self.taken += len(fresh)
        found: list[Any] = []
        while fresh:
            buffer = self.wire.get_buffer(-1)
            count = min(len(buffer), len(fresh))
            buffer[:count] = fresh[:count]
            fresh = fresh[count:]
            found += [response.message for response in self.wire.buffer_updated(count)]
        return found

    def tags(self) -> list[str]:
        return [message.cluster_id for message in self.answers()]


class Desk:
    """A dispatcher: ``ready`` tags are answered at once, others when the test says so."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.cancelled: list[str] = []
        self.seen: list[str] = []
        self.special: dict[str, Response] = {}
        self.fetched: Response | None = None

    def __call__(self, request: Request | BadRequest, client: Any) -> Response | Pending:
        if isinstance(request, BadRequest):
            return Refusal(request.error_code, request.error_message, request.fatal)
        if request.api_key == ApiKey.API_VERSIONS:
            ranges = [metadata.ApiVersionRange(int(key), 0, 0) for key in APIS]
            return Reply(metadata.ApiVersionsResponse(0, None, "test", "0", ranges))
        if request.api_key == ApiKey.PRODUCE:
            return Reply(data.ProduceResponse(0, None, []))
        if request.api_key == ApiKey.FETCH:
            assert self.fetched is not None
            return self.fetched
        tag: str = request.message.topics[0]
        self.seen.append(tag)
        if tag in self.special:
            return self.special[tag]
        if tag.startswith("later"):
            self.pending[tag] = Pending(lambda: self.cancelled.append(tag))
            return self.pending[tag]
        if tag.startswith("done"):
            done = Pending()
            done.resolve(self.reply(tag))
            return done
        return self.reply(tag)

    @staticmethod
    def reply(tag: str) -> Reply:
        return Reply(metadata.MetadataResponse(0, None, tag, 1, [], []))

    def finish(self, tag: str) -> None:
        self.pending[tag].resolve(self.reply(tag))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(wall_ms=0)


@pytest.fixture
def new_server(desk: Desk, clock: VirtualClock) -> Callable[..., Server]:
    def make(**limits: int) -> Server:
        server = Server(
            desk,
            clock,
            Metrics(),
            **{
                "max_connections": 10,
                "max_idle_ms": IDLE_MS,
                "max_request_bytes": 2**20,
                "max_queued_bytes": 2**20,
                **limits,
            },
        )
        server.open()
        return server

    return make


@pytest.fixture
def server(new_server: Callable[..., Server]) -> Server:
    return new_server()


@pytest.fixture
def peer(server: Server) -> Peer:
    peer = Peer(server)
    peer.handshake()
    return peer


def test_the_client_is_given_the_address_it_used(peer: Peer) -> None:
    assert peer.connection.client.address == "[::1]:9092"
    assert peer.connection.client.peer == "127.0.0.1:40000"
    assert "127.0.0.1:40000" in repr(peer.connection)


def test_responses_are_sent_in_the_order_of_requests(peer: Peer, desk: Desk) -> None:
    for tag in ("a", "later 1", "b", "later 2", "c"):
        peer.ask(tag)
    assert peer.tags() == ["a"]
    desk.finish("later 2")
    assert peer.tags() == []
    desk.finish("later 1")
    assert peer.tags() == ["later 1", "b", "later 2", "c"]


def test_a_response_that_is_ready_at_once_does_not_pass_those_before_it(peer: Peer) -> None:
    requests = [
        peer.wire.send(metadata.MetadataRequest([tag], False))[1] for tag in ("a", "done 1", "b", "done 2")
    ]
    peer.receive(*(buffer for request in requests for buffer in request))
    assert peer.tags() == ["a", "done 1", "b", "done 2"]


async def test_pipelined_requests_of_one_read_are_answered_in_turns(peer: Peer) -> None:
    frames = [b"".join(peer.wire.send(metadata.MetadataRequest([str(i)], False))[1]) for i in range(50)]
    peer.receive(*frames)
    assert peer.tags() == [str(i) for i in range(REQUESTS_PER_TURN)]
    assert not peer.transport.is_reading
    for turn in range(1, 4):
        await asyncio.sleep(0)
        assert peer.tags() == [str(i) for i in range(50)][turn * REQUESTS_PER_TURN :][:REQUESTS_PER_TURN]
    assert peer.transport.is_reading


async def test_s24_a_quiet_connection_is_served_between_the_turns_of_a_flood(
    new_server: Callable[..., Server], desk: Desk
) -> None:
    server = new_server(max_connections=100)
    flood = [Peer(server) for _ in range(20)]
    quiet = Peer(server)
    for one in (*flood, quiet):
        one.handshake()
    for one in flood:
        one.receive(*(one.wire.send(metadata.MetadataRequest(["flood"], False))[1][0] for _ in range(150)))
    desk.seen.clear()
    for number in range(100):
        quiet.ask("quiet")
        assert quiet.tags() == ["quiet"], "not behind the flood"
        await asyncio.sleep(0)
        for one in flood:
            if one.transport.is_reading:
                frames = [one.wire.send(metadata.MetadataRequest(["flood"], False))[1][0] for _ in range(150)]
                one.receive(*frames)
        between = len(desk.seen)
        desk.seen.clear()
        assert between <= 1 + REQUESTS_PER_TURN, f"{between} requests in iteration {number}"
    assert min(one.connection.received_requests for one in flood) >= 2 * REQUESTS_PER_TURN, "in turns"


@pytest.fixture
async def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the event loop stands still, as uvloop's does within an iteration."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1.0)


def make_heavy(peer: Peer) -> None:
    """Send requests one by one until the connection has cost more than a light one may."""
    while not peer.connection.is_heavy:
        peer.ask("heavy")
    peer.answers()


@pytest.mark.usefixtures("still")
async def test_s24_connections_with_few_requests_at_a_time_take_turns_if_they_are_many(
    new_server: Callable[..., Server], desk: Desk
) -> None:
    server = new_server(max_connections=100)
    flood = [Peer(server) for _ in range(20)]
    quiet = Peer(server)
    for one in (*flood, quiet):
        one.handshake()
    for one in flood:
        make_heavy(one)
        await asyncio.sleep(0)  # it may have waited for a turn
    while server.is_turning:
        await asyncio.sleep(0)
    desk.seen.clear()
    for one in flood:
        one.receive(*(one.wire.send(metadata.MetadataRequest(["flood"], False))[1][0] for _ in range(4)))
    assert len(desk.seen) <= 4, "one connection is served at once"
    for _ in range(10):
        quiet.ask("quiet")
        assert quiet.tags() == ["quiet"], "not behind the flood"
        desk.seen.clear()
        await asyncio.sleep(0)
        assert len(desk.seen) == 4
    while server.is_turning:
        await asyncio.sleep(0)
    assert sum(len(one.answers()) for one in flood) >= 80, "all are served"


@pytest.mark.usefixtures("still")
async def test_s24_a_heavy_connection_alone_is_served_at_once(server: Server, peer: Peer) -> None:
    make_heavy(peer)
    for _ in range(1_000):
        peer.ask("at once")
        assert peer.tags() == ["at once"]
    assert not server.is_turning


async def test_s24_a_connection_is_light_again_when_it_sends_less(
    server: Server, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_heavy(peer)
    seconds = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: seconds)
    for _ in range(2 * HEAVY_COST // REQUEST_COST):
        seconds += 2 * HEAVY_SECONDS * REQUEST_COST / HEAVY_COST
        peer.ask("seldom")
    assert not peer.connection.is_heavy


@pytest.mark.usefixtures("still")
async def test_s24_large_responses_end_a_turn(server: Server, peer: Peer, desk: Desk) -> None:
    make_heavy(peer)
    partition = data.FetchedPartition("t", 0, 0, None, 0, 0, 0, FLUSH_BYTES, [])
    response = data.FetchResponse(0, None, [partition])
    desk.fetched = Reply(response, [bytes(FLUSH_BYTES)])
    message = data.FetchRequest(0, 0, 2**20, 0, [data.FetchPartition("t", 0, -1, 0, 2**20)])
    peer.receive(*(peer.wire.send(message)[1][0] for _ in range(3)))
    answered = [len(peer.answers())]
    for _ in range(3):
        await asyncio.sleep(0)
        answered.append(len(peer.answers()))
    assert answered == [1, 1, 1, 0]
    assert peer.transport.is_reading


async def test_s24_a_connection_that_cannot_be_written_to_takes_no_turns(
    server: Server, peer: Peer, desk: Desk
) -> None:
    """The peer sends many fetches at once, and does not read the responses."""
    partition = data.FetchedPartition("t", 0, 0, None, 0, 0, 0, FLUSH_BYTES, [])
    desk.fetched = Reply(data.FetchResponse(0, None, [partition]), [bytes(FLUSH_BYTES)])
    peer.connection.pause_writing()
    message = data.FetchRequest(0, 0, 2**20, 0, [data.FetchPartition("t", 0, -1, 0, 2**20)])
    peer.receive(*(peer.wire.send(message)[1][0] for _ in range(3 * REQUESTS_PER_TURN)))
    for _ in range(4):
        await asyncio.sleep(0)
    assert not server.is_turning
    assert peer.answers() == []
    peer.connection.resume_writing()
    while server.is_turning:
        await asyncio.sleep(0)
    assert len(peer.answers()) == 3 * REQUESTS_PER_TURN


async def test_s24_a_flood_that_hangs_up_is_forgotten(new_server: Callable[..., Server]) -> None:
    server = new_server(max_connections=100)
    flood = Peer(server)
    flood.handshake()
    flood.receive(*(flood.wire.send(metadata.MetadataRequest(["flood"], False))[1][0] for _ in range(150)))
    forgotten = ref(flood.connection)
    flood.transport.abort()
    await asyncio.sleep(0)
    del flood
    gc.collect()
    assert forgotten() is None


def large_request(peer: Peer, size_bytes: int) -> bytes:
    message = data.ProduceRequest(1, 1, None, [data.ProducePartition("t", 0, size_bytes)])
    return b"".join(peer.wire.send(message, [bytes(size_bytes)])[1])


async def test_s24_large_requests_of_many_connections_take_turns(new_server: Callable[..., Server]) -> None:
    server = new_server(max_connections=100, max_queued_bytes=2**24)
    flood = [Peer(server) for _ in range(5)]
    for one in flood:
        one.handshake()
        one.receive(large_request(one, TURN_BYTES))
    answered = [sum(len(one.answers()) for one in flood)]
    while server.is_turning:
        await asyncio.sleep(0)
        answered.append(sum(len(one.answers()) for one in flood))
    assert max(answered) == 1
    assert sum(answered) == 5


@pytest.mark.parametrize("size_bytes", [TURN_BYTES, TURN_BYTES // 16])
async def test_s24_a_connection_waits_for_a_turn_after_so_many_bytes_of_large_requests(
    new_server: Callable[..., Server], size_bytes: int
) -> None:
    peer = Peer(new_server(max_queued_bytes=2**24))
    peer.handshake()
    for _ in range(TURN_BYTES // size_bytes):
        peer.receive(large_request(peer, size_bytes))
        assert len(peer.answers()) == 1
    peer.receive(large_request(peer, size_bytes))
    assert peer.answers() == []
    await asyncio.sleep(0)
    assert len(peer.answers()) == 1


async def test_s24_a_burst_of_large_requests_is_received_in_turns(
    new_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one iteration, parts are received of one connection that has never completed a large request."""
    server = new_server(max_connections=100, max_queued_bytes=2**24)
    peers = [Peer(server) for _ in range(3)]
    known, *_, second = peers
    for peer in peers:
        peer.handshake()
    known.receive(large_request(known, LARGE_REQUEST_BYTES))
    wires = [large_request(peer, LARGE_REQUEST_BYTES) for peer in peers]
    seconds = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: seconds)
    for peer, wire in zip(peers, wires, strict=True):
        peer.receive(wire[: LARGE_REQUEST_BYTES // 2])
    assert [peer.transport.is_reading for peer in peers] == [True, True, False]
    for _ in range(2):
        await asyncio.sleep(0)
    assert second.transport.is_reading
    for peer, wire in zip(peers, wires, strict=True):
        peer.receive(wire[LARGE_REQUEST_BYTES // 2 :])
    assert [len(peer.answers()) for peer in peers] == [2, 1, 1]


async def test_s24_a_large_request_is_received_in_turns_while_others_wait(
    new_server: Callable[..., Server],
) -> None:
    server = new_server(max_connections=100, max_queued_bytes=2**24)
    large, flood = Peer(server), Peer(server)
    large.handshake()
    flood.handshake()
    large.receive(large_request(large, TURN_BYTES))
    wire = large_request(large, 2 * LARGE_REQUEST_BYTES)
    large.receive(wire[:LARGE_REQUEST_BYTES])
    assert large.transport.is_reading, "only this connection waits"
    flood.receive(*(flood.wire.send(metadata.MetadataRequest(["flood"], False))[1][0] for _ in range(50)))
    large.receive(wire[LARGE_REQUEST_BYTES : LARGE_REQUEST_BYTES + 1])
    assert not large.transport.is_reading
    for _ in range(2):
        await asyncio.sleep(0)
    assert large.transport.is_reading
    large.receive(wire[LARGE_REQUEST_BYTES + 1 :])
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(large.answers()) == 2


async def test_s24_a_large_request_is_decoded_in_turns(new_server: Callable[..., Server], desk: Desk) -> None:
    server = new_server(max_connections=100)
    large, other = Peer(server), Peer(server)
    large.handshake()
    other.handshake()
    partitions = [data.ProducePartition("t", number, 0) for number in range(5_000)]
    large.receive(*large.wire.send(data.ProduceRequest(1, 1, None, partitions))[1])
    large.ask("after it")
    for _ in range(4):
        assert large.answers() == []
        other.ask("other")
        assert other.tags() == ["other"]
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [type(one) for one in large.answers()] == [data.ProduceResponse, metadata.MetadataResponse]


async def test_damage_behind_requests_that_wait_for_a_turn_ends_the_connection(
    peer: Peer, desk: Desk
) -> None:
    frames = [b"".join(peer.wire.send(metadata.MetadataRequest([str(i)], False))[1]) for i in range(20)]
    peer.receive(*frames, b"\xff" * 8)
    for _ in range(3):
        await asyncio.sleep(0)
    assert desk.seen == [str(i) for i in range(20)]
    with pytest.raises(RemoteProtocolError, match="envelope of"):
        peer.answers()
    assert peer.transport.is_closed


def test_frames_split_at_every_byte_are_understood(peer: Peer) -> None:
    frame = b"".join(peer.wire.send(metadata.MetadataRequest(["x"], False))[1])
    for position in range(len(frame)):
        peer.receive(frame[position : position + 1])
    assert peer.tags() == ["x"]


def test_too_many_unanswered_requests_stop_the_reading(peer: Peer, desk: Desk) -> None:
    for number in range(MAX_IN_FLIGHT_PER_CONNECTION):
        peer.ask(f"later {number}")
    assert not peer.transport.is_reading
    peer.ask("one more")  # was on its way when reading paused
    assert "one more" not in desk.seen
    desk.finish("later 0")
    assert "one more" in desk.seen
    assert peer.tags() == ["later 0"]
    assert not peer.transport.is_reading  # "one more" took the free place
    desk.finish("later 1")
    assert peer.transport.is_reading


def test_a_peer_that_does_not_read_its_responses_is_not_read_from(peer: Peer, desk: Desk) -> None:
    peer.connection.pause_writing()
    assert not peer.transport.is_reading
    peer.ask("a")
    peer.ask("b")
    assert desk.seen == []
    peer.connection.resume_writing()
    assert peer.tags() == ["a", "b"]
    assert peer.transport.is_reading


def test_responses_written_together_pause_the_reading_too(peer: Peer) -> None:
    """From Python 3.12 on, asyncio's ``writelines`` fills the buffer without calling ``pause_writing``."""
    peer.transport.buffered = WRITE_BUFFER_HIGH_BYTES + 1
    both = [peer.wire.send(metadata.MetadataRequest([tag], False))[1] for tag in "ab"]
    peer.receive(*both[0], *both[1])
    assert peer.tags() == ["a", "b"]
    assert not peer.transport.is_reading


def test_a_lost_connection_cancels_pending_responses(peer: Peer, desk: Desk, server: Server) -> None:
    peer.ask("later 1")
    peer.ask("later 2")
    peer.transport.abort()
    assert desk.cancelled == ["later 1", "later 2"]
    assert server.connection_count == 0
    desk.finish("later 1")
    peer.connection.on_response(None)  # type: ignore[arg-type]
    peer.connection.buffer_updated(1)


def test_an_unknown_api_is_answered_and_the_connection_lives(peer: Peer) -> None:
    frame = b"".join(peer.wire.send(metadata.MetadataRequest(["x"], False))[1])
    unknown = frame.replace(bytes([ApiKey.METADATA, 0]), bytes([99, 0]), 1)
    peer.receive(unknown)
    (answer,) = peer.answers()
    assert isinstance(answer, RequestError)
    assert answer.error_code == ErrorCode.UNKNOWN_API
    peer.ask("next")
    assert peer.tags() == ["next"]


def test_anything_before_the_handshake_is_answered_and_closed(server: Server) -> None:
    peer = Peer(server)
    stranger = ClientConnection("x")
    stranger._versions = {ApiKey.METADATA: 0}
    peer.receive(*stranger.send(metadata.MetadataRequest(["x"], False))[1])
    assert peer.transport.is_closed
    assert b"ApiVersions" in peer.transport.written


def test_a_fatal_response_waits_for_those_before_it(peer: Peer, desk: Desk) -> None:
    desk.special["fatal"] = Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, "over", closes=True)
    peer.ask("later 1")
    peer.ask("fatal")
    peer.ask("after")
    assert not peer.transport.is_closed
    desk.finish("later 1")
    first, second = peer.answers()
    assert first.cluster_id == "later 1"
    assert second.error_message == "over"
    assert peer.transport.is_closed
    assert "after" not in desk.seen


def test_a_response_that_cannot_be_sent_becomes_an_error(peer: Peer, desk: Desk) -> None:
    huge = metadata.MetadataResponse(0, None, "x" * 5 * 2**20, 1, [], [])
    desk.special["huge"] = Reply(huge)
    peer.ask("huge")
    (answer,) = peer.answers()
    assert answer.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert "cannot be sent" in answer.error_message


def test_invalid_frames_end_the_connection(peer: Peer, server: Server) -> None:
    peer.receive(b"\xff" * 8)
    assert peer.transport.is_aborted
    assert server.metrics.protocol_errors == 1


def test_the_end_of_the_stream_inside_a_frame_ends_the_connection(peer: Peer, server: Server) -> None:
    peer.receive(b"\x00\x00")
    assert peer.connection.eof_received() is False
    assert peer.transport.is_aborted
    assert server.metrics.protocol_errors == 1


def test_a_half_closed_connection_still_receives_its_responses(peer: Peer, desk: Desk) -> None:
    assert Peer(peer.connection._server).connection.eof_received() is False
    peer.ask("later 1")
    assert peer.connection.eof_received() is True
    desk.finish("later 1")
    assert peer.tags() == ["later 1"]
    assert peer.transport.is_closed


async def test_the_end_of_a_connection_that_its_peer_has_reset(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio raises the error of the socket before it reports the connection as lost."""
    loop, failures, ends = asyncio.get_running_loop(), [], []

    def write_eof() -> None:
        ends.append(1)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(peer.transport, "write_eof", write_eof)
    loop.set_exception_handler(lambda _loop, context: failures.append(context))
    monkeypatch.setattr("kafkalite.broker.server.server.LINGER_MS", 1)
    peer.connection.end()
    async with asyncio.timeout(30):
        while not peer.transport.is_closed:
            await asyncio.sleep(0.001)
    assert (len(ends), failures) == (1, [])


def test_more_connections_than_allowed_are_closed_at_once(new_server: Callable[..., Server]) -> None:
    server = new_server(max_connections=1)
    first, second = Peer(server), Peer(server)
    assert not first.transport.is_closed
    assert second.transport.is_aborted
    assert server.connection_count == 1
    assert server.metrics.connections_refused == 1
    first.transport.close()
    assert not Peer(server).transport.is_closed


def test_r55_a_connection_in_the_reserve_of_descriptors_is_closed_at_once(
    new_server: Callable[..., Server],
) -> None:
    server = new_server(max_connections=10, max_descriptor=900)
    assert server.admit(Connection(server, None), 899)
    assert not server.admit(Connection(server, None), 900)
    assert server.metrics.connections_refused == 1


async def test_half_sent_frames_share_one_budget(new_server: Callable[..., Server]) -> None:
    server = new_server(max_queued_bytes=100_000)
    peers = [Peer(server) for _ in range(3)]
    header = (30).to_bytes(4, "big") + (90_000).to_bytes(4, "big")
    for peer in peers:
        peer.handshake()
    peers[0].receive(header, b"x" * 60_000)
    peers[1].receive(header, b"x" * 60_000)
    assert peers[0].transport.is_aborted
    assert not peers[1].transport.is_closed
    peers[2].ask("healthy")
    assert peers[2].tags() == ["healthy"]
    peers[1].transport.abort()
    assert server.free_bytes == 100_000


async def test_the_frame_that_has_stood_still_longest_gives_way(new_server: Callable[..., Server]) -> None:
    """S3: frames that are never completed shut out neither large requests nor small ones."""
    server = new_server(max_queued_bytes=200_000)
    first, second, third, small = (Peer(server) for _ in range(4))
    for peer in (first, second, third, small):
        peer.handshake()
    header = (30).to_bytes(4, "big") + (90_000).to_bytes(4, "big")
    first.receive(header, b"x" * 40_000)
    second.receive(header, b"x" * 40_000)
    first.receive(b"x" * 100)
    small.receive(header[:3])
    third.receive(header, b"x" * 80_000)
    closed = [peer.transport.is_closed for peer in (first, second, third, small)]
    assert closed == [False, True, False, False]
    assert 0 <= server.free_bytes < 200_000
    for peer in (first, third):
        peer.transport.abort()
    assert server.free_bytes == 200_000
    assert not any(server.receivers.values())


async def test_a_peer_that_has_completed_a_large_request_gives_way_last(
    new_server: Callable[..., Server],
) -> None:
    server = new_server(max_queued_bytes=200_000)
    good, first, second = (Peer(server) for _ in range(3))
    for peer in (good, first, second):
        peer.handshake()
    payload = bytes(90_000)
    message = data.ProduceRequest(1, 1, None, [data.ProducePartition("t", 0, len(payload))])
    good.receive(*good.wire.send(message, [payload])[1])
    request = b"".join(map(bytes, good.wire.send(message, [payload])[1]))
    good.receive(request[:50_000])
    header = (30).to_bytes(4, "big") + (90_000).to_bytes(4, "big")
    for peer in (first, second):
        peer.receive(header, b"x" * 80_000)
    assert [peer.transport.is_closed for peer in (good, first, second)] == [False, True, False]
    good.receive(request[50_000:])
    assert len(good.answers()) == 2


async def test_large_payloads_give_their_budget_back(peer: Peer, server: Server) -> None:
    payload = bytes(200_000)
    message = data.ProduceRequest(1, 1, None, [data.ProducePartition("t", 0, len(payload))])
    peer.receive(*peer.wire.send(message, [payload])[1])
    assert len(peer.answers()) == 1
    assert server.free_bytes == 2**20


def test_before_it_opens_a_server_accepts_and_waits(desk: Desk, clock: VirtualClock) -> None:
    server = Server(
        desk,
        clock,
        Metrics(),
        max_connections=1,
        max_idle_ms=1,
        max_request_bytes=1000,
        max_queued_bytes=2**20,
    )
    peer = Peer(server)
    peer.receive(*peer.wire.handshake()[1])
    assert peer.transport.written == b""
    server.open()
    assert peer.answers()[0].error_code == 0


def test_until_the_opening_a_handshake_is_refused_with_the_reason(desk: Desk, clock: VirtualClock) -> None:
    limits = {"max_connections": 9, "max_idle_ms": 1, "max_request_bytes": 1000, "max_queued_bytes": 2**20}
    server = Server(desk, clock, Metrics(), **limits)
    early, late, silent = Peer(server), Peer(server), Peer(server)
    early.receive(*early.wire.handshake()[1])
    assert early.transport.written == b""
    server.refuse("it waits for a controller")
    late.receive(*late.wire.handshake()[1])
    for peer in (early, late):
        (refused,) = peer.answers()
        assert refused.error_code == ErrorCode.LEADER_NOT_AVAILABLE
        assert refused.error_message == "it waits for a controller"
        assert peer.transport.is_closed
    server.open()
    silent.receive(*silent.wire.handshake()[1])
    assert silent.answers()[0].error_code == 0


def test_a_connection_accepted_just_before_the_opening_and_made_after_it_is_served(
    desk: Desk, clock: VirtualClock
) -> None:
    """Event loops create the protocol when they accept, and call connection_made in their next turn."""
    server = Server(
        desk,
        clock,
        Metrics(),
        max_connections=1,
        max_idle_ms=1,
        max_request_bytes=1000,
        max_queued_bytes=2**20,
    )
    accepted = Connection(server, None)
    server.open()
    peer = Peer(server, accepted)
    peer.receive(*peer.wire.handshake()[1])
    assert peer.answers()[0].error_code == 0


def _reap(server: Server, clock: VirtualClock, duration_ms: int) -> None:
    """Advance the clock, with a pass of the reaper at each interval."""
    end_ms = clock.monotonic_ms() + duration_ms
    while clock.monotonic_ms() < end_ms:
        clock._now_ms = min(clock.monotonic_ms() + REAP_INTERVAL_MS, end_ms)
        server.reap(clock.monotonic_ms())


def test_without_a_handshake_a_connection_is_reaped(server: Server, clock: VirtualClock) -> None:
    peer = Peer(server)
    _reap(server, clock, HANDSHAKE_DEADLINE_MS - 1)
    assert not peer.transport.is_closed
    _reap(server, clock, 1)
    assert peer.transport.is_aborted
    assert server.metrics.connections_reaped == 1


def test_a_connection_without_the_required_proof_is_reaped(
    new_server: Callable[..., Server], clock: VirtualClock
) -> None:
    """S1: strangers that complete the handshake and stay would block the nodes of the cluster."""
    server = new_server(max_unproven_bytes=1000)
    stranger, node = Peer(server), Peer(server)
    for peer in (stranger, node):
        peer.handshake()
    node.connection.client.node_id = 1
    _reap(server, clock, HANDSHAKE_DEADLINE_MS - 1)
    assert not stranger.transport.is_closed
    _reap(server, clock, 1)
    assert stranger.transport.is_aborted
    assert not node.transport.is_closed


def test_an_idle_connection_is_reaped_and_a_used_one_is_not(server: Server, clock: VirtualClock) -> None:
    idle, used = Peer(server), Peer(server)
    idle.handshake()
    used.handshake()
    _reap(server, clock, IDLE_MS)
    used.ask("x")
    _reap(server, clock, REAP_INTERVAL_MS)
    assert idle.transport.is_aborted
    assert not used.transport.is_closed


def test_a_connection_with_a_pending_response_is_not_idle(
    peer: Peer, server: Server, clock: VirtualClock
) -> None:
    peer.ask("later 1")
    _reap(server, clock, 2 * IDLE_MS)
    assert not peer.transport.is_closed


def test_a_peer_that_never_reads_is_reaped(peer: Peer, server: Server, clock: VirtualClock) -> None:
    peer.connection.pause_writing()
    peer.transport.buffered = 1000
    _reap(server, clock, IDLE_MS // 2)
    peer.transport.buffered = 900  # some bytes were sent
    _reap(server, clock, IDLE_MS)
    assert not peer.transport.is_closed
    _reap(server, clock, REAP_INTERVAL_MS)
    assert peer.transport.is_aborted


def test_idle_reaping_can_be_switched_off(new_server: Callable[..., Server], clock: VirtualClock) -> None:
    server = new_server(max_idle_ms=-1)
    peer = Peer(server)
    peer.handshake()
    _reap(server, clock, 10 * IDLE_MS)
    assert not peer.transport.is_closed


def test_a_frame_that_drips_is_reaped(peer: Peer, server: Server, clock: VirtualClock) -> None:
    peer.receive((30).to_bytes(4, "big"))
    _reap(server, clock, REAP_INTERVAL_MS)
    for _ in range(FRAME_DEADLINE_MS // REAP_INTERVAL_MS):
        assert not peer.transport.is_closed
        peer.receive(b"\x00")
        _reap(server, clock, REAP_INTERVAL_MS)
    assert peer.transport.is_aborted


def test_a_frame_that_drips_between_pauses_of_the_reading_is_reaped(
    peer: Peer, server: Server, clock: VirtualClock
) -> None:
    """Only the time during which the connection was read counts, but a pause does not begin it again."""
    peer.receive((30).to_bytes(4, "big"))
    _reap(server, clock, REAP_INTERVAL_MS)
    passes = 0
    while not peer.transport.is_aborted and passes < 3 * FRAME_DEADLINE_MS // REAP_INTERVAL_MS:
        passes += 1
        peer.receive(b"\x00" * (passes % 4 == 0))
        peer.connection._is_reading = passes % 2 == 0  # as while other connections take turns
        _reap(server, clock, REAP_INTERVAL_MS)
        peer.connection._is_reading = True
    assert peer.transport.is_aborted
    assert 1.5 < passes * REAP_INTERVAL_MS / FRAME_DEADLINE_MS < 2.5


async def test_a_large_frame_gets_time_as_long_as_it_moves(
    new_server: Callable[..., Server], clock: VirtualClock
) -> None:
    server = new_server(max_request_bytes=2**26, max_queued_bytes=2**26)
    peer = Peer(server)
    peer.handshake()
    peer.receive((30).to_bytes(4, "big") + (2**25).to_bytes(4, "big") + bytes(30))
    _reap(server, clock, REAP_INTERVAL_MS)
    for _ in range(3 * FRAME_DEADLINE_MS // REAP_INTERVAL_MS):
        peer.receive(bytes(FRAME_PROGRESS_BYTES * REAP_INTERVAL_MS // 1000))
        _reap(server, clock, REAP_INTERVAL_MS)
        assert not peer.transport.is_closed


def test_frames_one_after_the_other_have_each_its_own_time(
    peer: Peer, server: Server, clock: VirtualClock
) -> None:
    frame = b"".join(peer.wire.send(metadata.MetadataRequest(["x"], False))[1])
    peer.receive(frame[:5])
    for _ in range(FRAME_DEADLINE_MS // REAP_INTERVAL_MS + 2):
        _reap(server, clock, REAP_INTERVAL_MS)
        again = b"".join(peer.wire.send(metadata.MetadataRequest(["x"], False))[1])
        peer.receive(frame[5:], again[:5])
        frame = again
    assert not peer.transport.is_closed


async def test_the_reaper_sleeps_without_connections(server: Server, clock: VirtualClock) -> None:
    reaper = asyncio.create_task(server.reap_forever())
    await clock.advance(10_000_000)
    assert clock.sleeper_count == 0
    peer = Peer(server)
    await clock.advance(2 * HANDSHAKE_DEADLINE_MS)
    assert peer.transport.is_aborted
    reaper.cancel()


async def test_a_server_that_ends_finishes_requests_in_progress(
    peer: Peer, server: Server, desk: Desk
) -> None:
    idle = Peer(server)
    peer.ask("later 1")
    server.end()
    peer.ask("just arrived")
    for _ in range(6):
        await asyncio.sleep(0)
    assert idle.transport.has_ended and not peer.transport.has_ended
    desk.finish("later 1")
    assert peer.tags() == ["later 1", "just arrived"]
    assert peer.transport.has_ended and not peer.transport.is_closed
    peer.ask("too late")
    assert "too late" not in desk.seen
    closing = asyncio.create_task(server.wait_closed(600_000))
    for one in (idle, peer):  # their clients close when they receive the end
        one.transport.close()
    await asyncio.wait_for(closing, 30)


async def test_a_peer_that_does_not_close_is_closed_by_a_server_that_ends(peer: Peer, server: Server) -> None:
    server.end()
    await server.wait_closed(LINGER_MS + 1_000)
    assert peer.transport.is_closed and not peer.transport.is_aborted


async def test_connections_not_answered_in_time_are_cut(peer: Peer, server: Server, desk: Desk) -> None:
    peer.ask("later 1")
    server.end()
    await server.wait_closed(1)
    assert peer.transport.is_aborted
    assert desk.cancelled == ["later 1"]


def test_a_connection_accepted_just_before_the_end_and_made_after_it_is_refused(
    new_server: Callable[..., Server],
) -> None:
    """Otherwise nothing would close it: the server has ended the connections that it had."""
    for end in (Server.end, Server.close_listeners):
        server = new_server()
        end(server)
        late = Peer(server)
        assert late.transport.is_closed
        assert server.connection_count == 0
