"""The ports of a server: picked, checked, and reserved until the server has bound them.

A port is reserved by a socket that is bound but does not listen. Linux then gives it to nobody who asks for any free
port, but tritonserver, which sets SO_REUSEADDR as the reserving socket does, may bind it. The page of metrics is served
by this process: its socket listens from the beginning.
"""

import contextlib
import errno
import os
import random
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytriton.exceptions import PyTritonValidationError
from pytriton.proxy_backend.system.forks import close_in_child
from pytriton.proxy_backend.system.shortage import explain
from pytriton.server.errors import PortInUseError
from pytriton.server.settings.config import TritonConfig, vertex_ai_is_on
from pytriton.server.settings.rules import parse_port_range

_ANY_ADDRESS = "0.0.0.0"
_LISTENING = "0A"
_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")
# The system says this if an interface, or an address family, is missing.
_UNREACHABLE = (
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT,
)  # fmt: skip
_REACH_TIMEOUT_S = 5.0
_METRICS = "metrics_port"
_SAGEMAKER = "sagemaker_port"
# tritonserver writes: "Socket '127.0.0.1:8000' already in use".
_IN_USE = "already in use"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One place that the server listens at."""

    setting: str
    """Name of the `TritonConfig` field that holds the port."""
    address: str
    """Address to bind, a number: names are looked up, as tritonserver does not do for every service."""
    port: int
    picked: bool
    """Whether the port was chosen here, the setting being 0."""

    @property
    def is_ipv6(self) -> bool:
        """Whether the address is one of IPv6."""
        return ":" in self.address

    @property
    def host(self) -> str:
        """Address for a caller on this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.address, self.address)

    @property
    def authority(self) -> str:
        """`host:port` as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TcpSocket(NamedTuple):
    """A TCP socket as the system shows it."""

    state: str  # as in the kernel's net/tcp_states.h, two hexadecimal digits
    unsent_bytes: int  # how many bytes wait to be sent, or for their acknowledgement
    inode: str  # its number


class ReservedPorts:
    """The endpoints of one server by setting, their ports reserved until `release`."""

    def __init__(self, endpoints: dict[str, Endpoint], sockets: list[socket.socket]) -> None:
        self._endpoints = endpoints
        self._sockets = sockets
        self._triton_metrics: Endpoint | None = None
        self._metrics_listener: socket.socket | None = None

    @property
    def http(self) -> Endpoint | None:
        """Endpoint of HTTP; None if it is off."""
        return self._endpoints.get("http_port")

    @property
    def grpc(self) -> Endpoint | None:
        """Endpoint of gRPC; None if it is off."""
        return self._endpoints.get("grpc_port")

    @property
    def metrics(self) -> Endpoint | None:
        """Endpoint of the page of metrics; None if it is off."""
        return self._endpoints.get(_METRICS)

    @property
    def triton_metrics(self) -> Endpoint | None:
        """Endpoint of tritonserver's own metrics, which the page includes; None if they are off."""
        return self._triton_metrics

    @property
    def sagemaker(self) -> Endpoint | None:
        """Endpoint of SageMaker's calls; None if they are off."""
        return self._endpoints.get(_SAGEMAKER)

    @property
    def vertex_ai(self) -> Endpoint | None:
        """Endpoint of Vertex AI's calls; None if they are off."""
        return self._endpoints.get("vertex_ai_port")

    def for_successor(self) -> "ReservedPorts":
        """Return the ports for a server that replaces this one, with another port for Triton's metrics."""
        ports = ReservedPorts(self._endpoints, [])
        if self._triton_metrics is not None:
            ports._pick_triton_metrics()
        return ports

    def take_metrics_listener(self) -> socket.socket | None:
        """Hand over the socket that listens for the page of metrics: `release` leaves it alone from now on."""
        listener, self._metrics_listener = self._metrics_listener, None
        return listener

    def __iter__(self) -> Iterator[Endpoint]:
        """Go through the endpoints of tritonserver itself: the metrics' is not that of the page."""
        for setting, endpoint in self._endpoints.items():
            yield self._triton_metrics if setting == _METRICS and self._triton_metrics is not None else endpoint

    def has(self, address: str, port: int) -> bool:
        """Return whether this address and port belong to the server as long as it runs."""
        places = [*self, *filter(None, [self.metrics])]
        return any(each.port == port and _overlap(each.address, address) for each in places)

    def reserve_again(self) -> None:
        """Reserve tritonserver's ports again, for another start."""
        for endpoint in self:
            self._sockets.append(_reserve(endpoint.setting, endpoint.address, endpoint.port))

    def release(self) -> None:
        """Release the ports; called when the server has bound them, or never will."""
        while self._sockets:
            self._sockets.pop().close()
        listener = self.take_metrics_listener()
        if listener is not None:
            listener.close()

    def _listen_for_metrics(self, page: Endpoint, listener: socket.socket) -> None:
        """Keep the page's port, and pick one for tritonserver's own metrics, on this machine only."""
        self._metrics_listener = listener
        try:
            listener.listen()
        except OSError as error:
            # Several sockets may be bound to the port until one of them listens.
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(page) from error
            raise
        self._pick_triton_metrics()

    def _pick_triton_metrics(self) -> None:
        address = _reachable(_LOOPBACK_ADDRESSES)
        own = _reserve(_METRICS, address, 0)
        self._sockets.append(own)
        self._triton_metrics = Endpoint(setting=_METRICS, address=address, port=own.getsockname()[1], picked=True)


def client_urls(config: TritonConfig, ports: ReservedPorts) -> dict[str, str]:
    """Return `scheme://host:port` of each service for clients on this machine, by its name in `ReservedPorts`."""
    names = ("http", "grpc", "metrics", "sagemaker", "vertex_ai")
    found = {name: endpoint for name in names if (endpoint := getattr(ports, name)) is not None}
    schemes = {"grpc": "grpcs" if config.has_grpc_tls else "grpc"}
    return {name: f"{schemes.get(name, 'http')}://{endpoint.authority}" for name, endpoint in found.items()}


def reserve_ports(config: TritonConfig) -> ReservedPorts:
    """Pick and reserve the ports of a server."""
    endpoints: dict[str, Endpoint] = {}
    sockets: list[socket.socket] = []
    reserved = ReservedPorts(endpoints, sockets)
    try:
        # Fixed ports first, so that a free port is none of them.
        for setting, named, port in sorted(_wanted(config), key=lambda item: item[2] == 0):
            address = _resolved(setting, named)
            _check_apart(setting, address, port, ((it.setting, it.address, it.port) for it in endpoints.values()))
            reserving = _reserve_allowed(config, setting, address, port)
            _check_reachable(setting, address)
            endpoint = endpoints[setting] = Endpoint(
                setting=setting, address=address, port=reserving.getsockname()[1], picked=port == 0
            )
            if setting == _METRICS:
                reserved._listen_for_metrics(endpoint, reserving)
            else:
                sockets.append(reserving)
    except BaseException:
        reserved.release()
        raise
    return reserved


def check_ports(config: TritonConfig) -> None:
    """Check that all addresses are valid, and that no two services use one port, without binding any."""
    seen: list[tuple[str, str, int]] = []
    for setting, named, port in _wanted(config):
        address = _resolved(setting, named)
        if port:
            _check_apart(setting, address, port, seen)
            _allowed_range(config, setting, address, port)
            seen.append((setting, address, port))


def _check_apart(setting: str, address: str, port: int, others: Iterable[tuple[str, str, int]]) -> None:
    for other, other_address, other_port in others:
        if other_port == port and _overlap(other_address, address):
            raise PyTritonValidationError(
                f"TritonConfig.{other} and TritonConfig.{setting} are both {port}: each service needs "
                "a port of its own. Set one of them to another port, or to 0 for any free one.",
                received=port,
            )


def fixed_addresses(config: TritonConfig) -> list[tuple[str, int]]:
    """Return the addresses and ports of a server, except those that are picked for it."""
    return [(_resolved(setting, named), port) for setting, named, port in _wanted(config) if port]


def listening_address(config: TritonConfig) -> str:
    """Return the address or name where a server listens: that of HTTP, or of gRPC where HTTP is switched off."""
    return next((_plain(named) for _, named, _ in _wanted(config)), _ANY_ADDRESS)


def port_setting_of_bind_failure(lines: list[str], ports: ReservedPorts) -> Endpoint | None:
    """Return the setting of the endpoint that tritonserver could not bind, by the last lines of its log."""
    for line in reversed(lines):
        if _IN_USE in line:
            for endpoint in ports:
                if f":{endpoint.port}'" in line:
                    return endpoint
    return None


def port_in_use(
    endpoint: Endpoint, *, exit_code: int | None = None, log_lines: list[str] | None = None
) -> PortInUseError:
    """Make the error for a port that another process uses."""
    return _port_in_use(endpoint.setting, endpoint.address, endpoint.port, exit_code, log_lines or [])


def find_listener(port: int) -> str | None:
    """Return which process listens on a TCP port, such as `process 123 (python)`; None if unknown."""
    pid = process_with_sockets({each.inode for each in tcp_sockets([port]) if each.state == _LISTENING})
    if pid is None:
        return None
    with contextlib.suppress(OSError):
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return f"process {pid}"


def tcp_sockets(ports: Collection[int]) -> Iterator[TcpSocket]:
    """Yield the TCP sockets of this machine at these local ports; none if the system does not show them."""
    for table in _TCP_TABLES:
        with contextlib.suppress(OSError):
            for row in table.read_text().splitlines()[1:]:
                # Number local remote state unsent:unread ..., in hexadecimal.
                columns = row.split()
                if int(columns[1].rpartition(":")[2], 16) in ports:
                    yield TcpSocket(columns[3], int(columns[4].partition(":")[0], 16), columns[9])


def process_with_sockets(inodes: Collection[str]) -> int | None:
    """Return a process that has one of these sockets open; None if unknown."""
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        # Processes come and go, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                if os.readlink(process / "fd" / descriptor) in links:
                    return int(process.name)
    return None


def _wanted(config: TritonConfig) -> Iterator[tuple[str, str, int]]:
    http_address = config.http_address or _ANY_ADDRESS
    if config.allow_http is not False:
        yield "http_port", http_address, _default(config.http_port, 8000)
    if config.allow_grpc is not False:
        yield "grpc_port", config.grpc_address or _ANY_ADDRESS, _default(config.grpc_port, 8001)
    if config.allow_metrics is not False:
        yield _METRICS, config.metrics_address or http_address, _default(config.metrics_port, 8002)
    if config.allow_sagemaker:
        yield "sagemaker_port", _ANY_ADDRESS, _default(config.sagemaker_port, 8080)
    if vertex_ai_is_on(config):
        yield "vertex_ai_port", _ANY_ADDRESS, _default(config.vertex_ai_port, _vertex_ai_port())


def _overlap(one: str, other: str) -> bool:
    return one == other or bool({one, other} & {"0.0.0.0", "::"})


def _default(port: int | None, default: int) -> int:
    return default if port is None else port


def _vertex_ai_port() -> int:
    text = os.environ.get("AIP_HTTP_PORT") or "8080"
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        raise PyTritonValidationError(
            f"environment variable AIP_HTTP_PORT must be a port, 1 to 65535; got {text!r}.",
            expected="1 to 65535",
            received=text,
        )
    return int(text)


def _plain(named: str) -> str:
    """Return an address without what tritonserver's own forms for IPv6 put around it, `ipv6:::1` and `[::1]`."""
    return named.removeprefix("ipv6:").removeprefix("ipv4:").removeprefix("[").removesuffix("]")


def _resolved(setting: str, named: str) -> str:
    """Return the numeric form of an address."""
    field = _address_field(setting)
    if named.startswith("unix:"):
        raise PyTritonValidationError(
            f"TritonConfig.{field} must be the address of a network interface, for clients reach no unix socket; got "
            f"{named!r}. Set 127.0.0.1 for callers on this machine only.",
            expected="a network address",
            received=named,
        )
    host = _plain(named)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise PyTritonValidationError(
            f"The address {named!r} of TritonConfig.{field} is none: {error}. Set an address or a name of this "
            "machine, such as 127.0.0.1, ::1 or 0.0.0.0.",
            expected="an address or a name of this machine",
            received=named,
        ) from error
    # IPv4 first, because callers without IPv6 reach it, too.
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    # Every machine has the name localhost, but some resolve it to one address only.
    others = _LOOPBACK_ADDRESSES if host.lower() == "localhost" else ()
    return _reachable(list(dict.fromkeys([*(str(item[4][0]) for item in found), *others])))


def _obstacle(address: str) -> OSError | None:
    """Return why nobody on this machine can connect to an address; None if that is possible."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen()
            socket.create_connection(listener.getsockname()[:2], _REACH_TIMEOUT_S).close()
    except OSError as error:
        return error if error.errno in _UNREACHABLE else None
    return None


def _reachable(addresses: Sequence[str]) -> str:
    """Return the first address that this machine can reach; the first of all if there is none."""
    if len(addresses) == 1:
        return addresses[0]
    return next((address for address in addresses if _obstacle(address) is None), addresses[0])


def _check_reachable(setting: str, address: str) -> None:
    """Refuse an address at which a server listens that not even this process could ask anything."""
    host = Endpoint(setting=setting, address=address, port=0, picked=False).host
    error = _obstacle(host)
    if error is None:
        return
    other = next((each for each in _LOOPBACK_ADDRESSES if _obstacle(each) is None), None)
    field = f"TritonConfig.{_address_field(setting)}"
    advice = "Is the loopback interface up (`ip link set lo up`)?"
    if other is not None:
        wildcard = "::" if ":" in other else _ANY_ADDRESS
        advice = f"It reaches itself at {other} alone: set {field}={wildcard!r}, or {other!r}."
    raise PyTritonValidationError(
        f"A server at the address {address!r} of {field} cannot be asked anything by this machine, which does not "
        f"reach {host}: {error.strerror}. {advice}",
        received=address,
    )


def _address_field(setting: str) -> str:
    field = setting.removesuffix("_port") + "_address"
    return field if hasattr(TritonConfig, field) else setting


def _reserve_allowed(config: TritonConfig, setting: str, address: str, port: int) -> socket.socket:
    """Reserve a port within the range that SageMaker allows to others, if it is served and there is one."""
    allowed = _allowed_range(config, setting, address, port)
    if allowed is None or port:
        return _reserve(setting, address, port)
    for candidate in random.sample(allowed, len(allowed)):
        with contextlib.suppress(PortInUseError):
            return _reserve(setting, address, candidate)
    raise PortInUseError(
        f"No port in TritonConfig.sagemaker_safe_port_range={config.sagemaker_safe_port_range} is free for "
        f"TritonConfig.{setting}: widen the range, or end what listens there.",
        setting=setting,
        address=address,
    )


def _allowed_range(config: TritonConfig, setting: str, address: str, port: int) -> range | None:
    """Return the ports that SageMaker leaves to a service, None if that is any; refuse a port beside them."""
    text = config.sagemaker_safe_port_range
    if text is None or not config.allow_sagemaker or setting == _SAGEMAKER:
        return None
    first, last = parse_port_range(text, "TritonConfig.sagemaker_safe_port_range")
    # tritonserver itself checks the services that share SageMaker's address.
    if port and address == _ANY_ADDRESS and not first <= port <= last:
        raise PyTritonValidationError(
            f"TritonConfig.{setting}={port} is outside of TritonConfig.sagemaker_safe_port_range={text}. Set a port in "
            "the range, or 0 for any free one of it.",
            expected=text,
            received=port,
        )
    return range(first, last + 1)


def _reserve(setting: str, address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        reserving = socket.socket(family, socket.SOCK_STREAM)
        close_in_child(reserving)
        try:
            reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserving.bind(target)
        except BaseException:
            reserving.close()
            raise
        return reserving
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(setting, address, port, None, []) from error
        if error.errno == errno.EACCES:
            raise PyTritonValidationError(
                f"TritonConfig.{setting}={port} may not be bound by this user ({error.strerror}): ports below 1024 "
                "usually need special rights. Set a higher one, or 0 for any free one.",
                received=port,
            ) from error
        raise PyTritonValidationError(
            f"The address {address!r} of TritonConfig.{_address_field(setting)} cannot be bound: "
            + explain(error, "Set an address of this machine, such as 127.0.0.1 or 0.0.0.0."),
            received=address,
        ) from error


def _port_in_use(setting: str, address: str, port: int, exit_code: int | None, log_lines: list[str]) -> PortInUseError:
    holder = find_listener(port)
    return PortInUseError(
        f"TritonConfig.{setting}={port} cannot be bound on {address}: {holder or 'another process'} listens on it "
        f"already. Stop that one, or set {setting} to another port, or to 0 for any free one.",
        setting=setting,
        address=address,
        port=port,
        holder=holder,
        exit_code=exit_code,
        log_lines=log_lines,
    )
