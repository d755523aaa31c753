"""Tries out whether the guard of a server that was just started is in force, before anybody else asks the server."""

import contextlib
import gzip
import http.client
import json
import logging
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from pytriton.server.control.http import fetch
from pytriton.server.settings.security import GRPC_HEADER_PREFIX
from pytriton.server.tritonserver.guard import Guard, GuardConfig, Part
from pytriton.server.tritonserver.handover import Handover, Protection
from pytriton.server.tritonserver.outcomes import OutcomeCounts
from pytriton.server.tritonserver.ports import Endpoint

# How long one answer may take, and then what the server does behind it, in seconds.
_ANSWER_S = 5.0
_SETTLED_S = 1.0
_PAUSE_S = 0.001
# Deeper JSON might harm a server whose guard is not in force.
_MOST_DEPTH = 2000

_NAME = "pytriton-self-test"
# A request that every model refuses, for an input and an output that none has.
_REQUEST = {
    "inputs": [{"name": _NAME, "datatype": "FP32", "shape": [1], "data": [0]}],
    "outputs": [{"name": _NAME}],
}
_OF_REQUESTS = frozenset(
    {Protection.SHAPES, Protection.REQUESTED_OUTPUTS, Protection.INPUT_DATA, Protection.REQUEST_ENDS}
)
_OF_HTTP = frozenset(
    {
        Protection.HTTP_REQUESTS,
        Protection.HTTP_RESPONSES,
        Protection.HTTP_THREADS,
        Protection.HTTP_DEFERRALS,
        Protection.HTTP_ENDS,
    }
)
# The guard keeps HTTP connections in its own hands by a system call that other processors have not.
_OF_X86 = frozenset({Protection.HTTP_CALLERS}) if platform.machine() == "x86_64" else frozenset()

logger = logging.getLogger(__name__)


class GuardTest:
    """What was found of the guard of one server. No request of it is served, or harms a server without a guard."""

    def __init__(
        self,
        handover: Handover,  # where the guard says what it has come to do
        settings: str,  # those of the guard, as in the variable `PYTRITON_GUARD`
        http: Endpoint | None,  # where the server listens for HTTP; None if it does not
        grpc: Endpoint | None,  # where it listens for gRPC
        *,
        is_encrypted: bool,  # whether gRPC is encrypted there
        # Whether Triton traces requests. A request that fails then keeps Triton from writing the file of its traces,
        # and takes the place of one that was to be traced: no inference is tried.
        is_traced: bool,
        http_headers: Mapping[str, str],  # headers by which requests pass every restriction
        grpc_headers: Mapping[str, str],  # the same over gRPC
        outcomes: OutcomeCounts | None = None,  # where the guard counts requests; those of this test are taken back
    ) -> None:
        self._handover = handover
        self._settings = dict(re.findall(r"(\w+)=(\d+)", settings))
        self._off = Guard(settings=settings).parts_off
        self._http = http
        self._grpc = grpc
        self._is_encrypted = is_encrypted
        self._is_traced = is_traced
        self._http_headers = {**http_headers, "Connection": "close"}
        self._grpc_headers = grpc_headers
        self._outcomes = outcomes
        self._expected: frozenset[Protection] = frozenset()
        self._failed: frozenset[Protection] = frozenset()
        self._told: frozenset[Protection] = frozenset()
        self.has_tried_model = False
        """Whether a model was there to be asked."""

    @property
    def states(self) -> dict[Protection, bool]:
        """Whether each protection is in force; without those that nothing has come to yet, and those switched off."""
        reached = self._handover.reached()
        if not reached:
            # The server has ended: what it did first always is reached.
            return {}
        return {
            each: each not in self._failed and each in reached
            for each in Protection
            if each in reached | self._expected and each.part not in self._off
        }

    def run(self, models: Mapping[str, bool]) -> None:
        """Try out what can be, and log what is not in force.

        Of each model is known whether one response is its answer.
        """
        began = time.monotonic()
        expected = {Protection.CRASHES, Protection.REPLACEMENT, Protection.MODEL_DELETION}
        with self._handover.tried():
            if self._http is not None:
                expected |= _OF_HTTP
                self._try_json(self._http)
                expected |= self._try_shared_memory(self._http)
            expected |= self._try_grpc()
            for name, is_plain in models.items():
                found = self._try_model(name, is_plain=is_plain)
                expected |= found
                self.has_tried_model = bool(found)
                if found:
                    break
            expected |= {Protection.INSTANCES} if any(models.values()) else set()
            self._expect(expected)
        self._tell(time.monotonic() - began)

    def run_model(self, name: str, *, is_plain: bool) -> None:
        """Try out what takes a model, where there was none at the start.

        One response is all that a plain one answers with.
        """
        began = time.monotonic()
        with self._handover.tried():
            found = self._try_model(name, is_plain=is_plain)
            self.has_tried_model = bool(found)
            self._expect(found)
        if found:
            self._tell(time.monotonic() - began)

    def _expect(self, expected: Iterable[Protection]) -> None:
        """Wait for what the requests that were sent are to lead to."""
        self._expected |= {each for each in expected if each.part not in self._off}
        # A server finishes a request, or a connection, after it has answered.
        deadline = time.monotonic() + _SETTLED_S
        while not self._expected <= self._handover.reached() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def _tell(self, spent_s: float) -> None:
        states = self.states
        for protection in [each for each, is_in_force in states.items() if not is_in_force]:
            if protection not in self._told:
                logger.warning(
                    "A protection of the guard is not in force: %s. That is: NOT %s. Is a library preloaded that "
                    "hides a function of the guard, or is this server newer than any that was tried?",
                    protection.name, protection.value,
                )  # fmt: skip
                self._told |= {protection}
        logger.info(
            "The guard was tried out in %.0f ms. Protections in force, by part: %s. Not tried: %s.",
            spent_s * 1000, ", ".join(self._describe(part, states) for part in Part),
            ", ".join(each.name for each in Protection if each not in states and each.part not in self._off) or "none",
        )  # fmt: skip

    def _describe(self, part: Part, states: Mapping[Protection, bool]) -> str:
        """Return how many of the protections of a part that were tried are in force."""
        tried = [is_in_force for each, is_in_force in states.items() if each.part is part]
        return f"{part.value} {'off' if part in self._off else f'{sum(tried)} of {len(tried)}'}"

    def _try_json(self, endpoint: Endpoint) -> None:
        """Send JSON that nests one level too deep, which the guard refuses in its own words."""
        depth = int(self._settings.get("max_json_depth", GuardConfig.max_json_depth))
        if Part.REFUSE in self._off:
            self._post(endpoint, f"/v2/models/{_NAME}/infer", b"[")
            self._leave_out("", "http")
        elif depth < _MOST_DEPTH:
            answer = self._post(endpoint, f"/v2/models/{_NAME}/infer", b"[" * (depth + 1))
            self._leave_out("", "http")
            if answer is not None and b"max_json_depth" not in answer[1]:
                self._failed |= {Protection.HTTP_REQUESTS}

    def _try_shared_memory(self, endpoint: Endpoint) -> set[Protection]:
        """Ask tritonserver to register a region by the name for which the guard opens a file that nobody can map."""
        if Part.REFUSE in self._off:
            return set()
        region = f"/v2/systemsharedmemory/region/{_NAME}"
        body = json.dumps({"key": f"/{_NAME}", "offset": 0, "byte_size": 16}).encode()
        answer = self._post(endpoint, f"{region}/register", body)
        if answer is None or b"disabled" in answer[1]:
            return set()
        if answer[0] == http.HTTPStatus.OK:
            self._post(endpoint, f"{region}/unregister", b"{}")
        elif answer[0] not in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.INTERNAL_SERVER_ERROR):
            return set()
        is_opened = Protection.SHARED_MEMORY in self._handover.reached()
        return {Protection.SHARED_MEMORY, *([Protection.SHARED_FILES] if is_opened else [])}

    def _try_model(self, name: str, *, is_plain: bool) -> set[Protection]:
        if self._is_traced:
            return set()
        if self._http is not None:
            body = gzip.compress(json.dumps(_REQUEST).encode(), 1)
            answer = self._post(self._http, f"/v2/models/{name}/infer", body, {"Content-Encoding": "gzip"})
            self._leave_out(name, "http")
            if answer is not None and answer[0] == http.HTTPStatus.BAD_REQUEST and _NAME.encode() in answer[1]:
                return {*_OF_REQUESTS, *_OF_X86, Protection.COMPRESSED_BODIES, Protection.CLASSIFICATION}
        elif self._grpc is not None and not self._is_encrypted and is_plain:
            with contextlib.suppress(OSError):
                self._call(self._grpc, name)
                self._leave_out(name, "grpc")
                return {*_OF_REQUESTS}
        return set()

    def _try_grpc(self) -> set[Protection]:
        if self._grpc is None:
            return set()
        has_front_end = self._settings.get("grpc_front_end") != "0" and Part.FRONTEND not in self._off
        expected = {Protection.GRPC_FRONT_END if has_front_end else Protection.GRPC_CONNECTIONS}
        if not self._is_encrypted:
            with contextlib.suppress(OSError):
                self._call(self._grpc, _NAME)
                self._leave_out("", "grpc")
                expected |= {Protection.GRPC_CALLS} if has_front_end else set()
        return expected

    def _leave_out(self, model: str, protocol: str) -> None:
        if self._outcomes is not None:
            self._outcomes.leave_out(model, protocol)

    def _post(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes] | None:
        """Return status and body of the answer; None if there is none."""
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_ANSWER_S)
        sent = {**self._http_headers, **(headers or {})}
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            return fetch(connection, "POST", path, body, sent, timeout_s=_ANSWER_S)
        return None

    def _call(self, endpoint: Endpoint, model: str) -> None:
        """Make one call of ModelInfer, and wait for its end.

        By hand: the import of a library for it would take longer than the start of the server.
        """
        tensor = _field(1, _NAME.encode())
        shaped = tensor + _field(2, b"FP32") + _field(3, b"\1")
        message = _field(1, model.encode()) + _field(5, shaped) + _field(6, tensor) + _field(7, bytes(4))
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/inference.GRPCInferenceService/ModelInfer",
            ":authority": endpoint.authority,
            "te": "trailers",
            "content-type": "application/grpc",
            **{GRPC_HEADER_PREFIX + name.lower(): value for name, value in self._grpc_headers.items()},
        }
        head = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        body = b"\0" + len(message).to_bytes(4, "big") + message
        with socket.create_connection((endpoint.host, endpoint.port), _ANSWER_S) as connection:
            connection.sendall(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                + _frame(_SETTINGS, 0, 0, b"")
                + _frame(_HEADERS, _END_HEADERS, 1, head)
                + _frame(_DATA, _END_STREAM, 1, body)
            )
            with connection.makefile("rb") as answer:
                for kind, flags in _frames_of(answer.read):
                    if kind in (_HEADERS, _DATA) and flags & _END_STREAM:
                        return


_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_FRAME_HEAD = 9


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _frames_of(read: Callable[[int], bytes]) -> Iterator[tuple[int, int]]:
    """Yield kind and flags of the frames that a server sends."""
    while len(head := read(_FRAME_HEAD)) == _FRAME_HEAD:
        read(int.from_bytes(head[:3], "big"))
        yield head[3], head[4]


def _varint(number: int) -> bytes:
    """Return a number in pieces of seven bits, as protobuf and HTTP/2 have it."""
    digits = []
    while number >> 7:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*digits, number))


def _field(number: int, value: bytes) -> bytes:
    """Return a field of a message of protobuf that has a length."""
    return bytes((number << 3 | 2,)) + _varint(len(value)) + value


def _text(text: str) -> bytes:
    """Return a text as a header of HTTP/2 has it, not compressed."""
    value = text.encode("latin-1", "replace")
    full = 0x7F
    length = bytes((len(value),)) if len(value) < full else bytes((full,)) + _varint(len(value) - full)
    return length + value
