"""Calls of gRPC with one request and any number of responses, over HTTP/2 on an event loop, without gRPC's library.

grpc.aio takes each response with a thread of its own and several turns of the loop, which costs more processor time
than all else that is done for a short text. Here one read from the socket gives the responses of all calls that it
holds. This is the client's side of RFC 9113 as far as such calls need it; headers are packed and unpacked by hpack. The
only module that uses it.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, cast
from urllib.parse import unquote

import hpack

from .._core.deadline import Deadline
from .._core.url import TritonUrl
from .._route.addresses import Attempts
from .._route.asyncio_sockets import open_socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0x0, 0x1, 0x3, 0x4, 0x5, 0x6, 0x7, 0x8, 0x9,
)  # fmt: skip
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_CONCURRENT, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADER_LIST = 1, 2, 3, 4, 5, 6
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _REFUSED_STREAM, _CANCEL = 0x0, 0x1, 0x3, 0x7, 0x8
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_PREFIX = struct.Struct(">BI")  # of a message: whether it is compressed, and its length
_DEFAULT_WINDOW = 65535
_DEFAULT_FRAME = 16384
_MOST_WINDOW = 2**31 - 1
_MOST_STREAMS = 2**30
_MOST_HEADER_BYTES = 1 << 16
# A server may send this much of a stream ahead of its reader; with more, it has to wait.
_STREAM_WINDOW = 1 << 20
_SMALL_STEP = 1 << 15
_CONNECTION_WINDOW = 1 << 24
# The limit for connecting, whatever time the call has, as in gRPC.
_CONNECT_S = 20.0
# So many unwanted responses are dropped between two looks at the clock.
_MOST_DROPPED = 64
# After this long without calls, the connection may have been closed unnoticed.
_QUIET_S = 0.02
# How zlib reads compressed responses, by the name in the headers.
_COMPRESSIONS = {"gzip": 31, "deflate": 15}
# How gRPC understands the codes of RST_STREAM; the others are INTERNAL.
_RESET_STATUSES = {0x7: "UNAVAILABLE", 0x8: "CANCELLED", 0xB: "RESOURCE_EXHAUSTED", 0xC: "PERMISSION_DENIED"}
_STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip


class Http2Error(Exception):
    """A call ended with another status than OK.

    ``is_untouched``: the server has not processed it, so it may be sent again.
    """

    def __init__(self, status: str, text: str, *, is_untouched: bool = False) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text
        self.is_untouched = is_untouched


class _ProtocolError(Exception):
    """The server sent something that is not HTTP/2; the connection ends."""

    def __init__(self, text: str, code: int = _PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


class Http2Call:
    """A call, and those of its responses that nobody has taken yet."""

    __slots__ = (
        "_connection", "_due", "_error", "_loop", "_max_message_bytes", "_messages", "_number", "_partial", "_queued",
        "_timer", "_timer_due", "_uncredited", "_waiter", "encoding", "has_ended", "has_headers", "unsent", "window",
    )  # fmt: skip

    def __init__(self, connection: _Connection, number: int, max_message_bytes: int, window: int) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._number = number
        self._max_message_bytes = max_message_bytes
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._queued = 0
        self._uncredited = 0
        self._error: Http2Error | None = None
        self._waiter: asyncio.Future[None] | None = None
        # One timer serves many waits, because most of them end soon.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = self._due = 0.0
        self.encoding = ""
        self.has_ended = False
        self.has_headers = False
        self.unsent: memoryview | None = None
        self.window = window

    @property
    def is_readable(self) -> bool:
        """Whether ``receive`` would not wait."""
        return bool(self._messages) or self.has_ended

    async def receive_some(self, timeout_s: float, most: int) -> list[bytes]:
        """Return the responses that are there, ``most`` of them, at least one; none after the last one.

        Raises ``Http2Error`` or ``TimeoutError``.
        """
        if not self._messages and not await self._wait(timeout_s):
            return []
        messages = self._messages
        found = [messages.popleft() for _ in range(min(most, len(messages)))]
        self._queued -= sum(map(len, found)) + 5 * len(found)
        self._credit()
        return found

    async def _wait(self, timeout_s: float) -> bool:
        """Wait for a response; return False where none follows."""
        while not self._messages:
            if self.has_ended:
                if self._error is not None:
                    raise self._error
                return False
            self._due = self._loop.time() + timeout_s
            if self._timer is None or self._due < self._timer_due:
                self._set_timer()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._messages and not self.has_ended:  # so the timer ended the wait
                raise TimeoutError
        return True

    def _set_timer(self) -> None:
        self._stop_timer()
        self._timer_due = self._due
        self._timer = self._loop.call_at(self._due, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """End a wait that is too long; for one that began after the timer was set, set it anew."""
        self._timer = None
        if self._waiter is None:
            return
        if self._due > self._timer_due:
            self._set_timer()
        else:
            self._wake()

    def reset(self) -> None:
        """End a call whose responses nobody wants."""
        if not self.has_ended:
            self._connection.reset(self._number, _CANCEL)
            self.end(Http2Error("CANCELLED", "the caller has ended it"))

    def end(self, error: Http2Error | None) -> None:
        """Note the end of the call; responses that came before can still be received."""
        if not self.has_ended:
            self.has_ended = True
            if error is None and self._partial:
                error = Http2Error("INTERNAL", "the last response is not whole")
            self._error = error
            self._partial = bytearray()
            self.unsent = None
            self._stop_timer()
            self._wake()

    def feed(self, data: bytes, length: int) -> None:
        """Take a piece of the responses. ``length`` includes padding, which counts for the windows."""
        self._uncredited += length
        if self.has_ended:
            return
        partial: bytes | bytearray = data
        if self._partial:
            self._partial += data
            partial = self._partial
        position, available = 0, len(partial)
        while available - position >= 5:
            is_compressed, size = _PREFIX.unpack_from(partial, position)
            try:
                if size > self._max_message_bytes:
                    self._check_size(size)
                after = position + 5 + size
                if after > available:
                    break
                message = bytes(partial[position + 5 : after])
                if is_compressed:
                    message = self._decompressed(message)
            except Http2Error as error:
                self._connection.reset(self._number, _CANCEL)
                self.end(error)
                return
            self._messages.append(message)
            self._queued += len(message) + 5
            position = after
        if partial is self._partial:
            del self._partial[:position]
        else:
            self._partial += partial[position:]
        self._credit()
        if self._messages:
            self._wake()

    def _check_size(self, size: int) -> None:
        if size > self._max_message_bytes:
            text = f"Received message larger than max ({size} vs. {self._max_message_bytes})"
            raise Http2Error("RESOURCE_EXHAUSTED", text)

    def _decompressed(self, message: bytes) -> bytes:
        """Return a response as it was before a server compressed it, although it was asked not to."""
        bits = _COMPRESSIONS.get(self.encoding)
        if bits is None:
            raise Http2Error("INTERNAL", f"a response that is compressed in an unknown way: {self.encoding!r:.50}")
        reader = zlib.decompressobj(bits)
        try:
            plain = reader.decompress(message, self._max_message_bytes + 1)
        except zlib.error as error:
            raise Http2Error("INTERNAL", f"a response that cannot be decompressed: {error}") from error
        self._check_size(len(plain))
        return plain

    def _credit(self) -> None:
        """Let the server send as much more as was taken; for an incomplete response, as much as it needs."""
        # The decompressed data takes more room here than in the window.
        credit = self._uncredited - min(self._queued, self._uncredited)
        # In small steps while its reader is behind: the server holds who takes nothing for a minute for gone.
        least = _SMALL_STEP if self._queued else _STREAM_WINDOW // 2
        if credit >= least and not self.has_ended:
            self._uncredited -= credit
            self._connection.update_window(self._number, credit)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """A connection, and the calls on it."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._calls: dict[int, Http2Call] = {}
        self._next = 1
        self._window = _DEFAULT_WINDOW
        self._uncredited = 0
        self._their_window = _DEFAULT_WINDOW
        self._their_frame = _DEFAULT_FRAME
        self._their_streams = _MOST_STREAMS
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder(max_header_list_size=_MOST_HEADER_BYTES)
        self._block: tuple[int, int, bytearray] | None = None
        self._is_going = False
        self._heard = monotonic()
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self.loop.create_future()
        """Completed by the server's settings, which limit its simultaneous calls."""
        self.ready.add_done_callback(_retrieve)

    @property
    def has_room(self) -> bool:
        """Whether another call can be made on it."""
        if self._is_going or self._transport is None or self._transport.is_closing():
            return False
        return len(self._calls) < self._their_streams and self._next < _MOST_STREAMS

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has come for a while, because there are no calls."""
        return not self._calls and monotonic() - self._heard >= _QUIET_S

    @property
    def is_used(self) -> bool:
        """Whether a call on it has not ended."""
        return bool(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the server."""
        # The transports of uvloop share no base class with asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        ours = ((_ENABLE_PUSH, 0), (_INITIAL_WINDOW, _STREAM_WINDOW), (_MAX_HEADER_LIST, _MOST_HEADER_BYTES))
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in ours)))
        self.update_window(0, _CONNECTION_WINDOW - _DEFAULT_WINDOW)

    def call(self, headers: Sequence[tuple[str, str, bool]], message: bytes) -> Http2Call:
        """Make a call. Each header says whether it must not be stored in compression tables or logs."""
        number = self._next
        self._next += 2
        block = self._encoder.encode(headers)
        call = self._calls[number] = Http2Call(self, number, self._max_message_bytes, self._their_window)
        pieces = [block[at : at + self._their_frame] for at in range(0, len(block), self._their_frame)]
        frames = [
            _frame(_CONTINUATION if at else _HEADERS, _END_HEADERS if at == len(pieces) - 1 else 0, number, piece)
            for at, piece in enumerate(pieces)
        ]
        call.unsent = memoryview(b"\0" + _NUMBER.pack(len(message)) + message)
        self._send(number, call, b"".join(frames))
        return call

    def reset(self, number: int, code: int) -> None:
        """End a stream of a call."""
        if self._calls.pop(number, None) is not None:
            self._write(_frame(_RST_STREAM, 0, number, _NUMBER.pack(code)))

    def update_window(self, number: int, credit: int) -> None:
        """Let the server send more."""
        self._write(_frame(_WINDOW_UPDATE, 0, number, _NUMBER.pack(credit)))

    def close(self, code: int = _NO_ERROR) -> None:
        """Say goodbye and close it; calls on it end."""
        self._write(_frame(_GOAWAY, 0, 0, _NUMBER.pack(0) + _NUMBER.pack(code)))
        self._fail("CANCELLED", "channel closed")
        if self._transport is not None:
            # Otherwise a server that reads nothing would make this wait for ever.
            is_stuck = self._transport.get_write_buffer_size() > 0
            self._transport.abort() if is_stuck else self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what the server has sent."""
        self._heard = monotonic()
        if self._rest:
            data = self._rest + data
        position, available = 0, len(data)
        try:
            while available - position >= 9:
                after = position + 9 + int.from_bytes(data[position : position + 3], "big")
                if after - position > 9 + _DEFAULT_FRAME:
                    raise _ProtocolError("a frame that is larger than was agreed", 0x6)
                if after > available:
                    break
                kind, flags = data[position + 3], data[position + 4]
                number = int.from_bytes(data[position + 5 : position + 9], "big") & _MOST_WINDOW
                self._take(kind, flags, number, data[position + 9 : after])
                position = after
        except _ProtocolError as error:
            self._fail("UNAVAILABLE", f"connection reset: the server does not keep to HTTP/2 ({error})")
            self.close(error.code)
        except (hpack.HPACKError, UnicodeError, ValueError) as error:
            text = f"connection reset: headers of the server cannot be read ({type(error).__name__}: {error})"
            self._fail("UNAVAILABLE", text)
            self.close(_PROTOCOL_ERROR)
        self._rest = data[position:]

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls that are left."""
        self._fail("UNAVAILABLE", f"socket closed: {error or 'the server has closed the connection'}")
        self._transport = None

    def _fail(self, status: str, text: str) -> None:
        self._is_going = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(Http2Error(status, text))
        if not self.ready.done():
            self.ready.set_exception(Http2Error(status, text))

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Take one frame."""
        if kind == _DATA:
            self._take_data(flags, number, payload)
        elif self._block is not None and kind != _CONTINUATION:
            raise _ProtocolError("headers that do not end")
        elif kind in (_HEADERS, _CONTINUATION):
            self._take_block(kind, flags, number, payload)
        elif kind == _RST_STREAM and len(payload) == 4:
            call = self._calls.pop(number, None)
            code = _NUMBER.unpack(payload)[0]
            if call is not None:
                text = f"the server has reset the stream ({code})"
                call.end(Http2Error(_RESET_STATUSES.get(code, "INTERNAL"), text, is_untouched=code == _REFUSED_STREAM))
        elif kind == _SETTINGS:
            self._take_settings(flags, payload)
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY and len(payload) >= 8:
            self._is_going = True
            last = _NUMBER.unpack_from(payload)[0] & _MOST_WINDOW
            for after in [each for each in self._calls if each > last]:
                text = "goaway: the server takes no more calls here"
                self._calls.pop(after).end(Http2Error("UNAVAILABLE", text, is_untouched=True))
        elif kind == _WINDOW_UPDATE and len(payload) == 4:
            self._take_window(number, _NUMBER.unpack(payload)[0] & _MOST_WINDOW)
        elif kind == _PUSH_PROMISE:
            raise _ProtocolError("a push that was not allowed")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        length = len(payload)
        self._uncredited += length
        if self._uncredited >= _CONNECTION_WINDOW // 2:
            # The window of the connection opens again; the window of each stream holds back what nobody takes.
            self.update_window(0, self._uncredited)
            self._uncredited = 0
        call = self._calls.get(number)
        if call is None:
            return
        if flags & _PADDED:
            if not payload or payload[0] >= length:
                raise _ProtocolError("padding that is longer than its frame")
            payload = payload[1 : length - payload[0]]
        call.feed(payload, length)
        if flags & _END_STREAM and self._calls.pop(number, None) is not None:
            self._stop_sending(number, call)
            call.end(Http2Error("INTERNAL", "the server has ended the stream without a status"))

    def _take_block(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _HEADERS:
            end = len(payload)
            if flags & _PADDED:
                if not payload or payload[0] >= end:
                    raise _ProtocolError("padding that is longer than its frame")
                payload = payload[1 : end - payload[0]]
            self._block = (number, flags, bytearray(payload[5:] if flags & _PRIORITY else payload))
        elif self._block is None or self._block[0] != number:
            raise _ProtocolError("more headers of what has none")
        else:
            self._block[2].extend(payload)
        number, first_flags, block = self._block
        if len(block) > _MOST_HEADER_BYTES:
            raise _ProtocolError("headers that are too long", 0xB)
        if flags & _END_HEADERS:
            self._block = None
            # The headers of calls that have ended are decoded, too: later ones refer to them.
            headers = {str(name): str(value) for name, value in self._decoder.decode(bytes(block))}
            self._take_headers(number, headers, is_last=bool(first_flags & _END_STREAM))

    def _take_headers(self, number: int, headers: dict[str, str], *, is_last: bool) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        if not call.has_headers:
            call.has_headers = True
            call.encoding = headers.get("grpc-encoding", "")
            status = headers.get(":status", "")
            if status.startswith("1"):
                call.has_headers = False
                return
            if status != "200" and "grpc-status" not in headers:
                self.reset(number, _CANCEL)
                call.end(Http2Error("UNAVAILABLE", f"Received http2 header with status: {status}"))
                return
        if is_last:
            del self._calls[number]
            self._stop_sending(number, call)
            code = headers.get("grpc-status", "")
            status = _STATUSES[int(code)] if code.isascii() and code.isdigit() and int(code) < 17 else "UNKNOWN"
            text = unquote(headers.get("grpc-message", ""), errors="replace")
            call.end(None if status == "OK" else Http2Error(status, text))

    def _stop_sending(self, number: int, call: Http2Call) -> None:
        """Tell a server that has answered early that the rest of the request does not follow."""
        if call.unsent is not None:
            self._write(_frame(_RST_STREAM, 0, number, _NUMBER.pack(_NO_ERROR)))

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & _ACK:
            return
        if len(payload) % _SETTING.size:
            raise _ProtocolError("settings that are cut off", 0x6)
        for name, value in _SETTING.iter_unpack(payload):
            if name == _HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, 4096)
            elif name == _MAX_CONCURRENT:
                self._their_streams = value
            elif name == _MAX_FRAME and _DEFAULT_FRAME <= value < 1 << 24:
                self._their_frame = value
            elif name == _INITIAL_WINDOW:
                if value > _MOST_WINDOW:
                    raise _ProtocolError("a window that is too large", _FLOW_CONTROL_ERROR)
                for call in self._calls.values():
                    call.window += value - self._their_window
                self._their_window = value
        self._write(_frame(_SETTINGS, _ACK, 0, b""))
        self._send_all()
        if not self.ready.done():
            self.ready.set_result(None)

    def _take_window(self, number: int, credit: int) -> None:
        if number == 0:
            self._window += credit
            self._send_all()
        elif (call := self._calls.get(number)) is not None:
            call.window += credit
            self._send(number, call)

    def _send_all(self) -> None:
        for number, call in list(self._calls.items()):
            self._send(number, call)

    def _send(self, number: int, call: Http2Call, headers: bytes = b"") -> None:
        """Send as much of a request as the windows allow; ``headers`` go with its first piece, in one packet."""
        while call.unsent is not None:
            length = min(len(call.unsent), call.window, self._window, self._their_frame)
            if length <= 0:
                break
            piece, rest = call.unsent[:length], call.unsent[length:]
            call.unsent = rest if len(rest) else None
            call.window -= length
            self._window -= length
            self._write(headers + _frame(_DATA, 0 if len(rest) else _END_STREAM, number, piece))
            headers = b""
        if headers:
            self._write(headers)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _frame(kind: int, flags: int, number: int, payload: bytes | memoryview) -> bytes:
    return b"".join((len(payload).to_bytes(3, "big"), bytes((kind, flags)), _NUMBER.pack(number), payload))


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve an error, so that asyncio does not log it if its waiter has left."""
    if not future.cancelled():
        future.exception()


class Http2Channel:
    """Connections of one event loop to a server; a connection is made when a call needs one."""

    def __init__(self, url: TritonUrl, context: ssl.SSLContext | None, max_message_bytes: int) -> None:
        self._url = url
        self._context = context
        self._max_message_bytes = max_message_bytes
        self._connections: list[_Connection] = []
        self._connecting: asyncio.Task[_Connection] | None = None
        self._left: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def call(
        self, method: str, metadata: Sequence[tuple[str, str]], message: bytes, deadline: Deadline
    ) -> Http2Call:
        """Make a call. Raises ``Http2Error`` or ``TimeoutError`` if no connection can be made."""
        connection = self._free_connection()
        if connection is not None and connection.is_quiet:
            # The server may have closed it while the loop did not run; three turns of the loop read what has come.
            for _ in range(3):
                await asyncio.sleep(0)
            connection = self._free_connection()
        while connection is None:
            made = await self._connected(deadline)
            if not made.has_room and not made.is_used:
                raise Http2Error("UNAVAILABLE", "socket closed: the server has closed a new connection")
            # More calls than one connection takes may have waited for it.
            connection = self._free_connection()
        headers = [
            (":method", "POST", False),
            (":scheme", "https" if self._context is not None else "http", False),
            (":path", method, False),
            (":authority", self._url.without_scheme, False),
            ("te", "trailers", False),
            ("content-type", "application/grpc", False),
            ("grpc-accept-encoding", "identity", False),
            ("user-agent", "pytriton-client", False),
            *((name, value, True) for name, value in metadata),
        ]
        return connection.call(headers, message)

    def leave(self, call: Http2Call, timeout_s: float) -> None:
        """Take over a call whose responses nobody wants; it is reset if it does not end in time."""
        if not call.has_ended:
            task = asyncio.get_running_loop().create_task(_end(call, timeout_s))
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    async def close(self) -> None:
        """Close the connections; calls that are left end."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._left:
            await asyncio.wait(self._left)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _free_connection(self) -> _Connection | None:
        return next((each for each in self._connections if each.has_room), None)

    async def _connected(self, deadline: Deadline) -> _Connection:
        if self._is_closed:
            raise Http2Error("CANCELLED", "channel closed")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(_retrieve)
        # If one caller leaves, the connection is still made for those that wait for it.
        connecting = self._connecting
        await asyncio.wait({connecting}, timeout=deadline.remaining_s())
        if not connecting.done():
            raise TimeoutError
        if connecting.cancelled():
            raise Http2Error("CANCELLED", "channel closed")
        return connecting.result()

    async def _connect(self) -> _Connection:
        for each in [each for each in self._connections if not (each.has_room or each.is_used)]:
            self._connections.remove(each)
            each.close()
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.wait({opening}, timeout=_CONNECT_S)
        finally:
            # A host may answer nothing; the next call then begins anew.
            opening.cancel()
        try:
            connection = await opening
        except asyncio.CancelledError:
            raise Http2Error("UNAVAILABLE", f"connection attempt timed out after {_CONNECT_S:g} s") from None
        except OSError as error:
            raise Http2Error("UNAVAILABLE", f"failed to connect to all addresses; last error: {error}") from error
        self._connections.append(connection)
        return connection

    async def _open(self) -> _Connection:
        opened = await open_socket(self._url.hostname, self._url.port, Attempts(self._url.hostname))
        hostname = self._url.hostname if self._context is not None else None
        make = functools.partial(_Connection, self._max_message_bytes)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(make, sock=opened, ssl=self._context, server_hostname=hostname)
        try:
            await connection.ready
        except BaseException:
            connection.close()
            raise
        return connection


async def _end(call: Http2Call, timeout_s: float) -> None:
    """Take what still comes of a call until it ends, or its time is over."""
    deadline = Deadline(timeout_s)
    try:
        # A server that sends faster than this reads never makes it wait, so no wait would time out.
        while (remaining_s := deadline.remaining_s()) > 0 and await call.receive_some(remaining_s, _MOST_DROPPED):
            pass
    except (Http2Error, TimeoutError):
        pass  # nobody waits for the rest
    finally:
        call.reset()
