"""One blocking connection to the server under test, and the servers of one cluster.

A ``Peer`` sends frames that may be invalid, which a client of this package would refuse to send, and reads
the responses with the codec of this package. The error codes in each response are compared with those that
are declared for the API.
"""

# Tests: tests/conformance/test_suite.py

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgpack

from kafkalite.errors import ConnectionFailedError, ErrorCode, RemoteProtocolError
from kafkalite.limits import MAX_ENVELOPE_BYTES, MAX_PAYLOAD_BYTES
from kafkalite.protocol import codec
from kafkalite.protocol.api import API_BY_REQUEST, APIS, Api, ApiKey
from kafkalite.protocol.api_errors import undeclared_codes
from kafkalite.protocol.connection import RequestError
from kafkalite.protocol.messages.admin import CreateTopicsRequest, DeleteTopicsRequest, NewTopic
from kafkalite.protocol.messages.groups import DeleteGroupsRequest, FindCoordinatorRequest
from kafkalite.protocol.messages.metadata import ApiVersionsRequest, MetadataRequest
from kafkalite.protocol.structs import Struct
from kafkalite.transport.tcp import parse_address, reason_of

TIMEOUT_S: Final = 15.0  #: for connecting, and for each response
#: Shorter than the server's handshake deadline, after which it closes any connection without a handshake.
CLOSE_TIMEOUT_S: Final = 3.0
SHORT_MS: Final = 5_000  #: time-outs inside requests
MAX_VALUE_LENGTH: Final = 60  #: characters of a value in a message
CLIENT_ID: Final = "conformance"
_FRAME: Final = struct.Struct(">II")


class Violation(Exception):
    """The server violates the protocol. The message states what is wrong."""


class Answer(NamedTuple):
    """A response with its payload. ``message`` is a RequestError if the request failed as a whole."""

    message: Any
    payload: bytes

    @property
    def error(self) -> str:
        """The name of the error of the whole request, or NONE."""
        return name_of(self.message.error_code)


def name_of(code: int) -> str:
    """Return the name of an error code, or the number if it has none."""
    return ErrorCode(code).name if code in ErrorCode._value2member_map_ else str(code)


def frame(envelope: bytes, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame with correct lengths."""
    return _FRAME.pack(len(envelope), len(payload)) + envelope + payload


def envelope(
    key: int, body: Any, *, correlation_id: int = 1, version: int = 0, client: Any = CLIENT_ID
) -> bytes:
    """Return the envelope of a request. ``body`` is any value that msgpack can encode."""
    packed: bytes = msgpack.packb([key, version, correlation_id, client, body])
    return packed


class Peer:
    """One blocking connection, closed at the end of ``with``."""

    def __init__(self, address: str, *, handshake: bool = True) -> None:
        """Connect, and send ApiVersions if ``handshake``. Raises ConnectionFailedError, Violation."""
        host, port = parse_address(address)
        try:
            self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        except (OSError, UnicodeError) as error:
            raise ConnectionFailedError(f"{address} cannot be reached: {reason_of(error)}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._numbers = itertools.count()
        self.address = address
        self._highest: dict[int, int] = {}
        if handshake:
            try:
                answer = self.ask(ApiVersionsRequest("conformance", "1"))
                expect(answer.error, "NONE", "ApiVersions")
                self._highest = {one.api_key: one.max_version for one in answer.message.apis}
            except Violation:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes. Errors are ignored: if the server has closed the connection, the next read fails."""
        try:
            self._socket.sendall(data)
        except OSError:
            return

    def offers(self, request: type[Struct]) -> bool:
        """Whether the server has the version that ``request`` is of."""
        api = API_BY_REQUEST[request]
        return self._highest.get(api.key, -1) >= api.version

    def post(self, message: Struct, payload: bytes = b"") -> int:
        """Send a request without reading its response. Returns its correlation id."""
        number = next(self._numbers)
        api = API_BY_REQUEST[type(message)]
        self.send(frame(codec.encode((int(api.key), api.version, number, CLIENT_ID, message)), payload))
        return number

    def ask(self, message: Struct, payload: bytes = b"") -> Answer:
        """Send a request and return its response. Raises Violation."""
        number = self.post(message, payload)
        return self._answer(API_BY_REQUEST[type(message)], number)

    def answer(self, key: ApiKey, number: int) -> Answer:
        """Read the response to request ``number``, which had version 0. Raises Violation."""
        return self._answer(APIS[key], number)

    def _answer(self, api: Api, number: int) -> Answer:
        found, body, payload = self.read()
        if found != number:
            raise Violation(f"the response to request {number} has the correlation id {found}")
        try:
            response: Any = codec.decode_response_body(api.response, RequestError, body)
        except RemoteProtocolError as error:
            raise Violation(
                f"the response of {api.key.name} is no {api.response.__name__}: {error}"
            ) from None
        problems = undeclared_codes(api.key, response)
        if problems:
            raise Violation(f"an error code that the API does not have: {problems[0]}")
        lengths = [getattr(part, "length_bytes", 0) for part in getattr(response, "partitions", ())]
        if sum(lengths) != len(payload):
            raise Violation(f"the parts of {api.key.name} add up to {sum(lengths)} bytes, not {len(payload)}")
        return Answer(response, payload)

    def read(self) -> tuple[int, Any, bytes]:
        """Read a response. Return (correlation id, body, payload). Raises Violation if there is none or it is
        malformed."""
        header = self._exactly(_FRAME.size)
        if header is None:
            raise Violation("the connection was closed instead of a response")
        if header.startswith(b"HTTP"):
            raise Violation("the peer speaks HTTP")
        envelope_bytes, payload_bytes = _FRAME.unpack(header)
        if not 0 < envelope_bytes <= MAX_ENVELOPE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise Violation(f"a response of {envelope_bytes} and {payload_bytes} bytes")
        data, payload = self._exactly(envelope_bytes), self._exactly(payload_bytes)
        if data is None or payload is None:
            raise Violation("the connection was closed inside a response")
        try:
            head = codec.decode_response_head(data)
        except RemoteProtocolError as error:
            raise Violation(f"a malformed response: {error}") from None
        return head.correlation_id, head.body, payload

    def error(self) -> tuple[int, str]:
        """Read a response that must be an error. Return (correlation id, name of the error). Raises
        Violation."""
        number, body, _ = self.read()
        try:
            failed = codec.decode_body(RequestError, body)
        except RemoteProtocolError:
            raise Violation("a response, where an error was expected") from None
        return number, name_of(failed.error_code)

    def is_closed(self) -> bool:
        """Whether the server closes the connection within CLOSE_TIMEOUT_S. False if it sends a byte first."""
        self._socket.settimeout(CLOSE_TIMEOUT_S)
        try:
            return not self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True

    def _exactly(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            try:
                piece = self._socket.recv(min(length - len(data), 1 << 20))
            except TimeoutError:
                raise Violation(f"no response within {TIMEOUT_S:g} s") from None
            except OSError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)


class Cluster:
    """The servers behind one address. Finds leaders and coordinators, and makes and deletes topics."""

    def __init__(self, address: str, run_id: str) -> None:
        """``run_id`` makes the names of this run unique."""
        self.address = address
        self.run_id = run_id
        self._peers: dict[str, Peer] = {}
        self._numbers = itertools.count(1)
        self._topics: list[str] = []
        self._groups: list[str] = []

    def connect(self, *, handshake: bool = True) -> Peer:
        """Return a new connection to the server at the address given by the user."""
        return Peer(self.address, handshake=handshake)

    def name(self, what: str) -> str:
        """Return a name that no other check uses."""
        return f"{self.run_id}-{what}-{next(self._numbers)}"

    def group(self) -> str:
        """Return the name of a new group, which ``clean_up`` deletes."""
        self._groups.append(self.name("group"))
        return self._groups[-1]

    def topic(self, partitions: int = 1, **configs: str) -> str:
        """Create a topic, wait for its leaders, and return its name. Raises Violation.

        ``configs`` are the topic's settings, by name with underscores instead of dots.
        """
        name = self.name("topic")
        options = {key.replace("_", "."): value for key, value in configs.items()}
        new = NewTopic(name, partitions, -1, options)
        created = self.peer().ask(CreateTopicsRequest(SHORT_MS, False, [new]))
        self._topics.append(name)
        expect(created.error, "NONE", "CreateTopics")
        expect(name_of(created.message.topics[0].error_code), "NONE", "CreateTopics")
        for number in range(partitions):
            retry(partial(self._leader_address, name, number), lambda found: found is not None)
        return name

    def peer(self, address: str = "") -> Peer:
        """Return the shared connection to the server at ``address``, which is opened at first use. "" means
        the address given by the user."""
        address = address or self.address
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address)
        return peer

    def leader(self, topic: str, partition: int = 0) -> Peer:
        """Return the connection to the leader of a partition. Raises Violation."""
        address = self._leader_address(topic, partition)
        if address is None:
            raise Violation(f"Metadata names no leader of {topic}-{partition}")
        return self.peer(address)

    def _leader_address(self, topic: str, partition: int) -> str | None:
        response = self.peer().ask(MetadataRequest([topic], False)).message
        addresses = {broker.node_id: broker.address for broker in response.brokers}
        partitions = {one.partition: one for one in response.topics[0].partitions}
        return addresses.get(partitions[partition].leader_id) if partition in partitions else None

    def coordinator(self, key_type: int, key: str) -> Peer:
        """Return the connection to the coordinator of ``key``: a group id if ``key_type`` is 0, or a
        transactional id if it is 1. Raises Violation."""
        peer = self.peer()
        found = retry(
            lambda: peer.ask(FindCoordinatorRequest(key_type, [key])).message.coordinators[0],
            lambda one: one.error_code == ErrorCode.NONE,
        )
        return self.peer(found.address)

    def clean_up(self) -> None:
        """Delete the topics and groups of all checks, and close the connections."""
        for group in self._groups:
            try:
                self.coordinator(0, group).ask(DeleteGroupsRequest([group]))
            except (Violation, ConnectionFailedError):
                continue
        if self._topics:
            with suppress(Violation, ConnectionFailedError), Peer(self.address) as peer:
                peer.ask(DeleteTopicsRequest(SHORT_MS, self._topics))
        self.forget()

    def forget(self) -> None:
        """Close all connections. The next requests open others."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()


def expect(found: Any, expected: Any, what: str) -> None:
    """Raise Violation unless ``found`` equals ``expected``."""
    if found != expected:
        raise Violation(f"{what}: expected {_short(expected)}, found {_short(found)}")


def expect_one_of(found: Any, expected: Sequence[Any], what: str) -> None:
    """Raise Violation unless ``found`` is in ``expected``."""
    if found not in expected:
        raise Violation(f"{what}: expected {' or '.join(map(_short, expected))}, found {_short(found)}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "…"


def retry(read: Callable[[], Any], is_good: Callable[[Any], bool], tries: int = 200) -> Any:
    """Call ``read`` every 20 ms until ``is_good(result)``, and return that result.

    Raises Violation after ``tries`` calls.
    """
    found = None
    for _ in range(tries):
        found = read()
        if is_good(found):
            return found
        time.sleep(0.02)
    raise Violation(f"still {found!r} after {tries * 20} ms")
