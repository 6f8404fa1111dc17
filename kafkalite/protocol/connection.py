"""Both ends of a connection as plain objects without sockets: bytes to events, messages to bytes.

The caller owns the socket. For each read, it calls::

    buffer = connection.get_buffer(hint)      # receive into it
    events = connection.buffer_updated(n)     # then handle each, in order

The caller writes, in order, the buffers that ``send``, ``send_error`` and ``handshake`` return.

Both ends follow these rules (S1, S20):

* The first request is ApiVersions, version 0. Until it arrives, the server applies
  ``limits.MAX_*_BEFORE_HANDSHAKE`` and accepts no other request. A client sends no other request before it
  has received the response.
* Every request gets exactly one response, even with ``acks=0``, and a server responds in the order of
  arrival.
* A response whose body is ``[error_code, error_message]`` means that the whole request failed.
* If a server can decode the header fields of a request but not its body, it responds with an error code, and
  the connection continues. If these fields or the lengths of a frame are invalid, the connection ends; the
  server may send the reason in an error response with correlation id -1.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Final

from kafkalite.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from kafkalite.limits import (
    MAX_CLIENT_ID_LENGTH,
    MAX_ENVELOPE_BYTES,
    MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE,
    MAX_ERROR_MESSAGE_LENGTH,
    MAX_ITEMS_PER_REQUEST,
    MAX_PAYLOAD_BYTES,
    MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE,
)
from kafkalite.protocol import codec
from kafkalite.protocol.api import API_BY_REQUEST, APIS, LATER_APIS, LOGIN_APIS, Api, ApiKey
from kafkalite.protocol.codec import Buffer
from kafkalite.protocol.frames import Frame, FrameReader, encode_frame
from kafkalite.protocol.messages.cluster import (
    EnvelopeRequest,
    EnvelopeResponse,
    FetchMetadataResponse,
    FetchMetadataResponseV1,
    RaftMessagesRequest,
    ReplicaFetchResponse,
)
from kafkalite.protocol.messages.data import FetchResponse, FetchResponseV1, ProduceRequest
from kafkalite.protocol.messages.metadata import ApiVersionsRequest, ApiVersionsResponse
from kafkalite.protocol.structs import Struct

_new: Final = tuple.__new__  # half the time of a struct's constructor
MAX_CORRELATION_ID: Final = 2**31 - 1
NO_CORRELATION_ID: Final = -1


class Request(Struct):
    """A request as a server has decoded it."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    message: Any  #: has the API's request type in ``api_version``
    payload: memoryview  #: writable, in its own buffer


class BadRequest(Struct):
    """A request that cannot be served. Respond with ``send_error(bad, bad.error_code, bad.error_message)``.

    If ``fatal``, close the connection afterwards; no more requests will be read.
    """

    correlation_id: int
    error_code: int
    error_message: str
    api_key: int
    api_version: int
    fatal: bool


class Response(Struct):
    """A response. ``message`` has the response type of the request's API, or is a RequestError."""

    correlation_id: int
    throttle_ms: int
    message: Any
    payload: memoryview


class RequestError(Struct):
    """The message of a response if the whole request failed. ``error_code`` is never 0."""

    error_code: int
    error_message: str | None


class ServerConnection:
    """The server's end of a connection.

    ``max_envelope_bytes`` and ``max_payload_bytes`` (inclusive) apply after the client has sent ApiVersions.
    If ``needs_login``, they apply after ``open_limits`` was called; until then, the bodies of requests other
    than LOGIN_APIS are not decoded, and a BadRequest with ILLEGAL_SASL_STATE takes their place.

    ``max_partitions`` (inclusive) limits the partitions that one request may name. So that no call takes
    long, ``buffer_updated`` returns at most ``requests_per_turn`` requests and does not decode the body of a
    large one. If ``has_more``, call ``next_requests``, which returns the further requests in the same
    portions and decodes a large one in several calls.
    """

    __slots__ = (
        "_is_damaged",
        "_is_open",
        "_max_envelope_bytes",
        "_max_partitions",
        "_max_payload_bytes",
        "_needs_login",
        "_reader",
        "_requests_per_turn",
        "_turn",
        "_unread",
        "_unread_frames",
        "has_handshake",
        "has_more",
    )

    def __init__(
        self,
        *,
        max_envelope_bytes: int = MAX_ENVELOPE_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        max_partitions: int = MAX_ITEMS_PER_REQUEST,
        requests_per_turn: int = sys.maxsize,
        needs_login: bool = False,
    ) -> None:
        self._needs_login = needs_login
        self._requests_per_turn = requests_per_turn
        #: One by one before the login, which decides whether the body of the next request is decoded.
        self._turn = range(1 if needs_login else requests_per_turn)
        #: Complete frames after the last returned request; the last item may be the error that ends the
        #: stream.
        self._unread_frames: deque[Frame | RemoteProtocolError] = deque()
        self._is_damaged = False  # whether the stream is damaged after the last of these frames
        self._unread: Iterator[Request | BadRequest | None] | None = None  # a large request, partly decoded
        #: Whether ``next_requests`` has requests to return, or a large one to continue decoding.
        self.has_more = False
        self._max_partitions = max_partitions
        self._max_envelope_bytes = max_envelope_bytes
        self._max_payload_bytes = max_payload_bytes
        self._reader = FrameReader(
            max_envelope_bytes=min(max_envelope_bytes, MAX_ENVELOPE_BYTES_BEFORE_HANDSHAKE),
            max_payload_bytes=min(max_payload_bytes, MAX_PAYLOAD_BYTES_BEFORE_HANDSHAKE),
        )
        #: Whether the first request, ApiVersions, has arrived.
        self.has_handshake = False
        self._is_open = True

    def __repr__(self) -> str:
        state = "closing" if not self._is_open else "ready" if self.has_handshake else "before handshake"
        return f"<ServerConnection {state}>"

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Return a writable buffer of at least one byte for the next bytes of the stream."""
        return self._reader.get_buffer(size_hint)

    @property
    def held_bytes(self) -> int:
        """The size of the buffers of an unfinished large request."""
        return self._reader.held_bytes

    def abandon_frame(self) -> None:
        """Free the buffers of an unfinished frame. The caller closes the connection."""
        self._reader.abandon()

    def buffer_updated(self, byte_count: int) -> list[Request | BadRequest]:
        """Return the requests completed by ``byte_count`` bytes in the last ``get_buffer()``.

        While ``has_more``, call ``hold`` instead. Raises RemoteProtocolError if the stream is damaged; then
        close the connection. If this call has completed requests before the damage, it does not raise, but
        returns them and a fatal BadRequest with NO_CORRELATION_ID.
        """
        reader = self._reader
        reader.received(byte_count)
        events: list[Request | BadRequest] = []
        try:
            for _ in self._turn:
                if not self._is_open or (frame := reader.next_frame()) is None:
                    return events
                event = self._understand(frame)
                if event is None:
                    break
                events.append(event)
        except RemoteProtocolError as error:
            self._is_open = False
            if not events:
                raise
            events.append(_damage(error))
            return events
        self._keep_frames()
        return events

    def hold(self, byte_count: int) -> None:
        """Keep the requests completed by ``byte_count`` received bytes. ``next_requests`` returns them."""
        self._reader.received(byte_count)
        self._keep_frames()

    def _keep_frames(self) -> None:
        """Move complete frames out of the receive buffer to free its space, without decoding them."""
        frames = self._unread_frames
        try:
            while self._is_open and not self._is_damaged and (frame := self._reader.next_frame()) is not None:
                frames.append(frame)
        except RemoteProtocolError as error:
            self._is_damaged = True
            frames.append(error)
        self.has_more = bool(frames) or self._unread is not None

    def next_requests(self) -> list[Request | BadRequest]:
        """Return further requests. The list may be empty while a large request is being decoded.

        If the stream is damaged, the last item of the last list is a fatal BadRequest with NO_CORRELATION_ID.
        """
        events: list[Request | BadRequest] = []
        frames = self._unread_frames
        if self._unread is not None:
            event = next(self._unread)
            if event is None:
                return events
            self._unread = None
            events.append(event)
        try:
            while frames and self._is_open and len(events) < len(self._turn):
                frame = frames.popleft()
                if isinstance(frame, RemoteProtocolError):
                    raise frame
                event = self._understand(frame)
                if event is None:
                    break
                events.append(event)
        except RemoteProtocolError as error:
            self._is_open = False
            frames.clear()
            events.append(_damage(error))
        self.has_more = self._is_open and (bool(frames) or self._unread is not None)
        return events

    def eof(self) -> None:
        """Raise RemoteProtocolError if a frame is incomplete. Called at the end of the client's stream."""
        if self._is_open and self._reader.is_mid_frame:
            raise RemoteProtocolError("the stream ended inside a frame")

    def send(
        self, request: Request, message: Struct, payload_parts: Iterable[Buffer] = (), *, throttle_ms: int = 0
    ) -> list[Buffer]:
        """Return the buffers of the response to ``request``, to be written in order.

        ``throttle_ms`` is the time for which the caller will read no further request. The response contains
        it. Raises LocalProtocolError if a value cannot be encoded or the response is too large.
        """
        envelope = codec.encode((request.correlation_id, throttle_ms, message))
        return encode_frame(envelope, payload_parts)

    def send_error(
        self,
        request: Request | BadRequest,
        error_code: int,
        error_message: str | None = None,
        *,
        throttle_ms: int = 0,
    ) -> list[Buffer]:
        """Return the buffers of a response that reports an error of the whole request.

        ``error_code`` must not be NONE. A message longer than MAX_ERROR_MESSAGE_LENGTH is cut.
        """
        assert error_code != ErrorCode.NONE, "an error response needs an error code"
        if error_message is not None:
            error_message = error_message[:MAX_ERROR_MESSAGE_LENGTH]
        error = RequestError(int(error_code), error_message)
        return encode_frame(codec.encode((request.correlation_id, throttle_ms, error)))

    def _understand(self, frame: Frame) -> Request | BadRequest | None:
        """Return the request in ``frame``, or None if it is large: then ``_unread`` decodes it in steps.

        Raises RemoteProtocolError if the header fields of the request are invalid.
        """
        envelope, payload = frame
        head = codec.decode_request_head(envelope, self._max_partitions)
        key, version, correlation_id, client_id, body = head
        if not self.has_handshake and key != ApiKey.API_VERSIONS:
            self._is_open = False
            return _bad(head, ErrorCode.INVALID_REQUEST, "the first request must be ApiVersions", fatal=True)
        api = APIS.get(key)
        if api is None:
            return _bad(head, ErrorCode.UNKNOWN_API, f"there is no api {key}")
        if self._needs_login and key not in LOGIN_APIS:
            return _bad(head, ErrorCode.ILLEGAL_SASL_STATE, "the client has not logged in")
        if not api.min_version <= version <= api.max_version:
            return _bad(
                head,
                ErrorCode.UNSUPPORTED_VERSION,
                f"{api.key.name} has versions {api.min_version} to {api.max_version}, not {version}",
            )
        if version:
            api = LATER_APIS[key, version]
        if client_id is not None and len(client_id) > MAX_CLIENT_ID_LENGTH:
            return _bad(
                head, ErrorCode.INVALID_REQUEST, f"a client id has at most {MAX_CLIENT_ID_LENGTH} characters"
            )
        try:
            message = codec.decode_body(api.request, body)
            _match_payload(message, payload)
        except RemoteProtocolError as error:
            return _bad(head, ErrorCode.INVALID_REQUEST, error.message)
        except codec.LongBodyError:
            self._unread = self._understand_in_turns(head, api, frame)
            return None
        if not self.has_handshake:
            self.has_handshake = True
            if not self._needs_login:
                self.open_limits()
        return _new(Request, (key, version, correlation_id, client_id, message, payload))

    def _understand_in_turns(
        self, head: codec.RequestHead, api: Api, frame: Frame
    ) -> Iterator[Request | BadRequest | None]:
        """Decode a large request in steps. Yields None after each, and finally the request or the error."""
        try:
            for message in codec.decode_body_in_turns(api.request, head.body):
                if message is None:
                    yield None
                else:
                    _match_payload(message, frame.payload)
                    key, version, correlation_id, client_id, _ = head
                    yield Request(key, version, correlation_id, client_id, message, frame.payload)
        except RemoteProtocolError as error:
            yield _bad(head, ErrorCode.INVALID_REQUEST, error.message)

    def open_limits(self) -> None:
        """Apply ``max_envelope_bytes`` and ``max_payload_bytes``.

        If ``needs_login``, the caller calls this after the login of the client or the proof of a node.
        """
        self._needs_login = False
        self._turn = range(self._requests_per_turn)
        self._reader.max_envelope_bytes = self._max_envelope_bytes
        self._reader.max_payload_bytes = self._max_payload_bytes


class ClientConnection:
    """The client's end of a connection. Numbers the requests, and matches responses to them."""

    __slots__ = ("_awaited", "_next_id", "_reader", "_versions", "client_id")

    def __init__(
        self,
        client_id: str | None = None,
        *,
        max_envelope_bytes: int = MAX_ENVELOPE_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self.client_id = client_id
        self._reader = FrameReader(
            max_envelope_bytes=max_envelope_bytes,
            max_payload_bytes=max_payload_bytes,
            first_buffer_bytes=max(max_envelope_bytes, max_payload_bytes),  # a server sends what it announces
        )
        self._next_id = 0
        self._awaited: dict[int, Api] = {}
        self._versions: dict[int, int] | None = None

    def __repr__(self) -> str:
        state = "ready" if self.is_ready else "before handshake"
        return f"<ClientConnection {state}, {self.in_flight} in flight>"

    @property
    def in_flight(self) -> int:
        """The number of requests without a response."""
        return len(self._awaited)

    @property
    def is_ready(self) -> bool:
        """Whether the server's versions are known, so that ``send`` may be called."""
        return self._versions is not None

    def handshake(
        self, software_name: str = "kafkalite", software_version: str = ""
    ) -> tuple[int, list[Buffer]]:
        """Return the ApiVersions request that opens the connection: (correlation id, buffers to write)."""
        message = ApiVersionsRequest(software_name, software_version)
        return self._request(APIS[ApiKey.API_VERSIONS], 0, message, ())

    def send(self, message: Struct, payload_parts: Iterable[Buffer] = ()) -> tuple[int, list[Buffer]]:
        """Return (correlation id, buffers to write in order) of a request, in the version of its struct.

        Raises LocalProtocolError before the handshake is complete, if there is no version of this API that
        both sides know, or the broker lacks the version of ``message``, if a value cannot be encoded, and if
        the request is too large. In these cases nothing is to be written, and no response will come.
        """
        api = API_BY_REQUEST[type(message)]
        if self._versions is None:
            raise LocalProtocolError(f"{api.key.name} cannot be sent before the ApiVersions response")
        version = self._versions.get(api.key)
        if version is None:
            raise LocalProtocolError(f"the broker supports no common version of {api.key.name}")
        if version < api.version:
            raise LocalProtocolError(
                f"the broker supports {api.key.name} up to version {version}, not {api.version}"
            )
        return self._request(api, api.version, message, payload_parts)

    def supports(self, request: type[Struct]) -> bool:
        """Whether the server knows the version that ``request`` is of. False before the handshake."""
        api = API_BY_REQUEST[request]
        return self._versions is not None and self._versions.get(api.key, -1) >= api.version

    def get_buffer(self, size_hint: int = -1) -> memoryview:
        """Return a writable buffer of at least one byte for the next bytes of the stream."""
        return self._reader.get_buffer(size_hint)

    def buffer_updated(self, byte_count: int) -> list[Response]:
        """Return the responses completed by ``byte_count`` bytes in the last ``get_buffer()``.

        Raises RemoteProtocolError. Then close the connection, and fail all requests whose responses were not
        returned.
        """
        return [self._understand(frame) for frame in self._reader.buffer_updated(byte_count)]

    def eof(self) -> None:
        """Raise RemoteProtocolError if a frame is incomplete. Called at the end of the server's stream."""
        if self._reader.is_mid_frame:
            raise RemoteProtocolError("the stream ended inside a frame")

    def _request(
        self, api: Api, version: int, message: Struct, payload_parts: Iterable[Buffer]
    ) -> tuple[int, list[Buffer]]:
        correlation_id = self._next_id
        envelope = codec.encode((int(api.key), version, correlation_id, self.client_id, message))
        buffers = encode_frame(envelope, payload_parts)
        self._next_id = 0 if correlation_id == MAX_CORRELATION_ID else correlation_id + 1
        self._awaited[correlation_id] = api
        return correlation_id, buffers

    def _understand(self, frame: Frame) -> Response:
        head = codec.decode_response_head(frame.envelope)
        api = self._awaited.pop(head.correlation_id, None)
        if api is None and head.correlation_id == NO_CORRELATION_ID:
            farewell = codec.decode_body(RequestError, head.body)
            raise RemoteProtocolError(f"the broker refused the request: {farewell.error_message}")
        if api is None:
            raise RemoteProtocolError(
                f"a response to an unknown request: correlation id {head.correlation_id}"
            )
        message = codec.decode_response_body(api.response, RequestError, head.body)
        if type(message) is RequestError:
            if message.error_code == ErrorCode.NONE:
                raise RemoteProtocolError(f"{api.key.name} received an error response without a code")
        elif type(message) is ApiVersionsResponse and message.error_code == ErrorCode.NONE:
            self._versions = _common_versions(message)
        _match_payload(message, frame.payload)
        return Response(head.correlation_id, head.throttle_ms, message, frame.payload)


def _bad(
    head: codec.RequestHead, error_code: ErrorCode, error_message: str, *, fatal: bool = False
) -> BadRequest:
    return BadRequest(
        head.correlation_id, int(error_code), error_message, head.api_key, head.api_version, fatal
    )


def _damage(error: RemoteProtocolError) -> BadRequest:
    """Return the error to send to a client whose stream is damaged."""
    return BadRequest(NO_CORRELATION_ID, int(ErrorCode.INVALID_REQUEST), error.message, -1, -1, True)


def _common_versions(response: ApiVersionsResponse) -> dict[int, int]:
    """Return {api key: highest version that both sides know}."""
    common = {}
    for offered in response.apis:
        api = APIS.get(offered.api_key)
        if api is not None:
            version = min(api.max_version, offered.max_version)
            if version >= max(api.min_version, offered.min_version):
                common[offered.api_key] = version
    return common


#: For each message with such a list: the list whose items' ``length_bytes`` divide the payload.
_PARTS: Final[dict[type[Struct], Callable[[Any], list[Any]]]] = {
    ProduceRequest: attrgetter("partitions"),
    FetchResponse: attrgetter("partitions"),
    FetchResponseV1: attrgetter("partitions"),
    ReplicaFetchResponse: attrgetter("partitions"),
    FetchMetadataResponse: attrgetter("entries"),
    FetchMetadataResponseV1: attrgetter("entries"),
}


def _match_payload(message: Struct, payload: memoryview) -> None:
    """Raise RemoteProtocolError unless the lengths in the body add up to the length of the payload.

    EnvelopeRequest and EnvelopeResponse are exempt, because they contain no lengths.
    """
    told = 0
    parts = _PARTS.get(type(message))
    if parts is not None:
        for part in parts(message):
            length_bytes = part.length_bytes
            if length_bytes < 0:
                raise RemoteProtocolError(f"a negative length_bytes: {length_bytes}")
            told += length_bytes
    elif isinstance(message, RaftMessagesRequest):
        for length_bytes in message.lengths_bytes:
            if length_bytes < 0:
                raise RemoteProtocolError(f"a negative length: {length_bytes}")
            told += length_bytes
    elif type(message) is EnvelopeRequest or type(message) is EnvelopeResponse:
        return  # the whole payload is one encoded body
    if told != len(payload):
        raise RemoteProtocolError(f"the body announces {told} bytes of payload, the frame has {len(payload)}")
