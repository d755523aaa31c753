"""What the tests share: the golden vectors, a proxy backend that a test moves step by step, the C++ programs."""

import array
import contextlib
import fcntl
import gc
import mmap
import os
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from pytriton.proxy_backend.runtime.plain import PlainBatches
from pytriton.proxy_backend.wire.accelerator import accelerator
from support.paths import load_program
from support.waiting import PATIENCE_S

TESTS = Path(__file__).parents[1]
NATIVE = TESTS.parent / "native"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MESSAGE = struct.Struct("<HHIQQIIQQ")
# Line numbers alone: with all that a debugger wants, compilers take half as long again.
TEST_FLAGS = ("-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread")
SANITIZERS: dict[str, Sequence[str]] = {
    "none": (),
    "memory": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "threads": ("-fsanitize=thread",),
}
# In place of a sanitizer: as the libraries are compiled, whose objects `dev.py native` has made.
AS_SHIPPED = "as shipped"


@pytest.fixture(scope="session")
def golden() -> ModuleType:
    """The script that made the golden vectors: it builds packets and records without any code of ours."""
    return load_program(TESTS / "golden" / "generate.py")


# ---- a proxy backend at the wire -----------------------------------------------------------------------------------


class Packet(NamedTuple):
    """One message as it came."""

    kind: int
    flags: int
    size: int
    batch: int
    consumed: int
    segment: int
    place: int
    offset: int
    length: int
    body: bytes
    fds: list[int]


class Response(NamedTuple):
    """One entry of a response record, with the tensors that it owns or its rows of the whole batch."""

    request: int
    flags: int
    code: int
    error: str
    parameters: dict[str, Any]
    outputs: dict[str, np.ndarray[Any, Any]]


def sealed_memfd(size: int, seals: int = SEALS) -> int:
    """A memfd of `size` bytes."""
    fd = os.memfd_create("pytriton-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Peer:
    """The proxy backend's end of one connection, moved by the test step by step."""

    def __init__(self, connection: socket.socket, generate: ModuleType) -> None:
        self.socket = connection
        self.socket.settimeout(PATIENCE_S)
        self.generate = generate
        self.arena: dict[int, mmap.mmap] = {}
        self.outputs: dict[int, mmap.mmap] = {}
        self.closed_outputs: list[int] = []
        self.released: list[tuple[int, int]] = []
        self.free = 0  # where the next record of segment 1 goes
        self.batches: dict[int, int] = {}  # where the records in segment 1 are
        self.consumed = 0  # responses that were read
        self.drained = threading.Event()  # for tests: the worker has read everything

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Sends one packet; closes `fds`."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([packet], ancillary)
        for fd in fds:
            os.close(fd)

    def message(self, kind: int, **fields: Any) -> None:
        """Sends one message."""
        self.send(self.generate.message(kind, **fields))

    def welcome(self, **fields: Any) -> Packet:
        """Reads HELLO, answers WELCOME and announces segment 1 of at most 4 MiB; returns the HELLO."""
        hello = self.receive()
        assert hello.kind == self.generate.HELLO
        values = {"model_flags": 1, "model_version": 1, "arena_budget": 64 << 20, "arena_idle_ms": 10_000, **fields}
        self.send(self.generate.greeting(self.generate.WELCOME, "model", **values))
        self.segment(1, min(4 << 20, values["arena_budget"]))
        return hello

    def segment(self, number: int, size: int) -> None:
        """Announces a segment of the arena that the worker reads."""
        fd = sealed_memfd(size)
        self.arena[number] = mmap.mmap(fd, size)
        self.send(self.generate.message(self.generate.SEGMENT, segment=number, length=size), [fd])

    def batch(self, number: int, record: bytes, *, consumed: int | None = None, offset: int | None = None) -> int:
        """Puts a record into segment 1 and rings, with `consumed` or all that was read; returns its offset."""
        consumed = self.consumed if consumed is None else consumed
        at = self.free if offset is None else offset
        self.arena[1][at : at + len(record)] = record
        self.batches[number] = at
        if offset is None:
            self.free += self.generate.align(len(record), 64)
        self.message(self.generate.BATCH, batch=number, consumed=consumed, segment=1, offset=at, length=len(record))
        return at

    def receive(self) -> Packet:
        """Reads one packet."""
        data, ancillary, flags, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(64))
        if not data:
            raise EOFError("the worker closed the connection")
        assert not flags & socket.MSG_TRUNC
        fds = array.array("i")
        for _, _, raw in ancillary:
            fds.frombytes(raw)
        packet = Packet._make((*MESSAGE.unpack_from(data), data[MESSAGE.size :], list(fds)))
        assert packet.size == len(data)
        return packet

    def answer(self) -> Packet:
        """Reads on until RESPONSE or FAIL; keeps account of everything else."""
        while True:
            packet = self.receive()
            if not self.keep_account(packet):
                return packet

    def keep_account(self, packet: Packet) -> bool:
        """Notes a segment or a release; says whether it was one."""
        if packet.kind == self.generate.SEGMENT:
            [fd] = packet.fds
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            assert os.fstat(fd).st_size == packet.length
            self.outputs[packet.segment] = mmap.mmap(fd, packet.length)
            os.close(fd)
        elif packet.kind == self.generate.SEGMENT_CLOSE:
            del self.outputs[packet.segment]
            self.closed_outputs.append(packet.segment)
        elif packet.kind == self.generate.RELEASE:
            self.released.append((packet.segment, packet.offset))
        else:
            self.consumed += packet.kind in (self.generate.RESPONSE, self.generate.RESPONSES)
            return False
        return True

    def responses(self, packet: Packet) -> list[Response]:
        """Reads the record that a RESPONSE names, with `struct` alone."""
        assert packet.kind == self.generate.RESPONSE, packet
        memory = self.outputs[packet.segment]
        record = memory[packet.offset : packet.offset + packet.length]
        magic, entry_count, tensor_count, _, batch, metadata_length, length, entries, tensors = struct.unpack_from(
            "<4sIIIQQQII", record
        )
        assert (magic, batch) == (b"PTR1", packet.batch)
        assert packet.offset % 64 == metadata_length % 64 == 0
        assert length <= packet.length

        def text(at: int, size: int) -> str:
            assert record[at + size] == 0
            return record[at : at + size].decode()

        made = []
        rows = []
        for number in range(entry_count):
            request, flags, row, code, *error, first, count = struct.unpack_from("<8I", record, entries + 48 * number)
            parameters: dict[str, Any] = {}
            for i in range(count):
                *key, kind, size, value = struct.unpack_from("<IIIIQ", record, first + 24 * i)
                raw = struct.pack("<Q", value)
                parameters[text(*key)] = (
                    text(value, size)
                    if kind == 0
                    else struct.unpack("<q", raw)[0]
                    if kind == 1
                    else bool(value)
                    if kind == 2
                    else struct.unpack("<d", raw)[0]
                )
            made.append(Response(request, flags, code, text(*error) if flags & 2 else "", parameters, {}))
            rows.append(0 if flags & 6 else row)
        for number in range(tensor_count):
            *name, dtype, dims_count, owner, dims, at, size, source = struct.unpack_from(
                "<6IQQQ", record, tensors + 48 * number
            )
            shape = struct.unpack_from(f"<{dims_count}q", record, dims)
            assert at % 64 == 0
            payload = record[at : at + size]
            if source:
                # One of the inputs.
                assert source == 1
                begin = self.batches[batch] + at
                payload = self.arena[1][begin : begin + size]
            tensor = unpack_tensor(dtype, shape, payload)
            if owner != 0xFFFFFFFF:
                made[owner].outputs[text(*name)] = tensor
                continue
            for entry, begin, count in zip(made, np.cumsum([0, *rows]), rows, strict=False):
                entry.outputs[text(*name)] = tensor[begin : begin + count]
        return made

    def close(self) -> None:
        """Closes the socket and lets go of the memory."""
        self.socket.close()
        self.arena.clear()
        self.outputs.clear()


def unpack_tensor(dtype: int, shape: tuple[int, ...], payload: bytes) -> np.ndarray[Any, Any]:
    """A tensor from its wire form."""
    if dtype != 13:
        names = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
        return np.frombuffer(payload, np.dtype(names[dtype - 1])).reshape(shape)
    elements = []
    at = 0
    while at < len(payload):
        size = int.from_bytes(payload[at : at + 4], "little")
        elements.append(payload[at + 4 : at + 4 + size])
        at += 4 + size
    made = np.empty(len(elements), object)
    made[:] = elements
    return made.reshape(shape)


class FakeProxy:
    """Listens where a proxy backend would."""

    def __init__(self, endpoint: Path, generate: ModuleType) -> None:
        self.endpoint = endpoint
        self._generate = generate
        self._peers: list[Peer] = []
        self._socket: socket.socket | None = None

    def listen(self) -> None:
        """Begins to listen."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        self._socket.bind(str(self.endpoint))
        self._socket.listen(8)

    def accept(self) -> Peer:
        """Waits for the next worker."""
        assert self._socket is not None
        peer = Peer(self._socket.accept()[0], self._generate)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        """Stops listening and closes all connections."""
        for peer in self._peers:
            peer.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.endpoint.unlink()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder with a path that is short enough for a unix socket, wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        yield Path(folder)


@pytest.fixture
def proxy(socket_folder: Path, golden: ModuleType) -> Iterator[FakeProxy]:
    """A scripted proxy backend; it does not listen yet."""
    made = FakeProxy(socket_folder / "model.1.sock", golden)
    yield made
    made.close()


@pytest.fixture(scope="session")
def arena_descriptors() -> Callable[[], set[str]]:
    """Gives the memfds of arenas that this process has open."""
    return descriptors


def descriptors() -> set[str]:
    gc.collect()
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(entry.path)
            if "memfd:pytriton-" in target:
                found.add(f"{entry.name}: {target}")
    return found


# ---- the accelerator -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["accelerated", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the accelerator, which takes all it can from the first batch on, and without."""
    if request.param == "python":
        monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")
    else:
        monkeypatch.delenv("PYTRITON_ACCELERATOR", raising=False)
        assert accelerator() is not None, "run `python3 tools/dev.py native`"
        monkeypatch.setattr(PlainBatches, "_is_known", lambda *_: True)
    return str(request.param)


# ---- C++ test programs ---------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """What the C++ programs are compiled for, and run on."""

    compiler: Sequence[str]
    runner: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    sanitizers: Mapping[str, Sequence[str]] = SANITIZERS


def this_machine() -> Machine:
    """Find this machine's C++ compiler; skips the test where there is none."""
    given = os.environ.get("CXX")
    if given:
        return Machine(shlex.split(given))
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Machine([path])
    pytest.skip("there is no C++ compiler on this machine (set CXX)")


def emulated_aarch64() -> Machine:
    """Find Debian's compiler for aarch64 and qemu's emulator of programs; skips the test where either is missing."""
    libraries = Path("/usr/aarch64-linux-gnu")
    names = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")
    compiler, emulator = (shutil.which(name) for name in names)
    if compiler is None or emulator is None or not libraries.is_dir():
        pytest.skip(f"aarch64 needs {' and '.join(names)} (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    # In the emulator, LeakSanitizer cannot stop the threads, and ThreadSanitizer cannot start the program.
    sanitizers = {**SANITIZERS, "threads": SANITIZERS["memory"]}
    return Machine([compiler], [emulator, "-L", str(libraries)], {"ASAN_OPTIONS": "detect_leaks=0"}, sanitizers)


@pytest.fixture(
    scope="session",
    params=["here", pytest.param("aarch64", marks=pytest.mark.ci)],
)
def machine(request: pytest.FixtureRequest) -> Machine:
    """The machines that the native libraries are for."""
    return {"here": this_machine, "aarch64": emulated_aarch64}[request.param]()


def compile_program(folder: Path, machine: Machine, main: str, sources: Sequence[str], sanitizer: str) -> Path:
    """Compile one program, each file once for all programs and all test processes."""
    hook: Any = load_program(TESTS.parent / "hatch_build.py")
    # Without a limit: several compilers at once on a busy machine may take minutes.
    hook.COMPILE_TIMEOUT_S = None
    flags = hook.COMPILE_FLAGS if sanitizer == AS_SHIPPED else (*TEST_FLAGS, *machine.sanitizers[sanitizer])
    kept = os.environ.get(hook.OBJECTS_VARIABLE)
    objects = hook.Objects(Path(kept) if kept else folder, machine.compiler, flags, force=False)
    # Without `..`: an object is found by the name of its file, too.
    files = [Path(os.path.normpath(NATIVE / "proxy" / name)) for name in (f"../tests/{main}", *sources)]
    variant = f"{machine.compiler[0].replace('/', '-')}-{sanitizer}"
    try:
        compiled = compile_files(objects, {file: folder / f"{file.stem}-{variant}.lock" for file in files})
        program = folder / f"{Path(main).stem}-{variant}-{hook.digest_of(list(map(str, compiled)))[:16]}"
        with only_one(folder / f"{program.name}.lock"):
            if not program.exists():
                fresh = program.with_suffix(".new")
                # The guard looks for functions of a server among those that the program shows.
                hook.run_compiler([*machine.compiler, *flags, "-rdynamic", *map(str, compiled), "-o", str(fresh)])
                fresh.rename(program)
    except hook.CompileError as error:
        if "sanitize" not in str(error).partition("failed (")[2]:
            raise
        pytest.skip(f"this compiler has no sanitizers: {error}")
    return program


def compile_files(objects: Any, files: Mapping[Path, Path]) -> list[Path]:
    """Compile files, each with its lock; several at once, unless as many test processes do the same beside this one."""

    def compile_if_free(file: Path, *, patient: bool) -> Path | None:
        with only_one(files[file], patient=patient) as is_free:
            compiled: Path | None = objects.compile(file) if is_free else None
            return compiled

    at_once = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
        # A file that another process is compiling comes last: otherwise all of them would wait for the same one.
        begun = dict(zip(files, pool.map(lambda file: compile_if_free(file, patient=False), files), strict=True))
    made = [path or compile_if_free(file, patient=True) for file, path in begun.items()]
    return [path for path in made if path is not None]


@contextlib.contextmanager
def only_one(path: Path, *, patient: bool = True) -> Iterator[bool]:
    """Let one test process after the other in; say whether this one is in, which without patience it may not be."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@pytest.fixture(scope="session")
def compile_native(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a program of native/tests: its main file, the files of native/proxy that it needs, what it looks for."""
    folder = tmp_path_factory.getbasetemp().parent
    return lambda main, sources, sanitizer="none": compile_program(folder, machine, main, sources, sanitizer)


@pytest.fixture(scope="session")
def run_program(machine: Machine) -> Callable[..., str]:
    """Runs a program and returns what it printed; fails with what it said where it does not end well."""

    def run(program: Path, *arguments: object, timeout_s: float = PATIENCE_S) -> str:
        command = [*machine.runner, str(program), *map(str, arguments)]
        environment = {**os.environ, **machine.environment}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
        return done.stdout

    return run
