"""A relay between a client and a server: it counts, speaks TLS or IPv6 to one side, and can drop connections."""

from __future__ import annotations

import selectors
import socket
import ssl
import threading
from types import TracebackType
from urllib.parse import urlsplit

from support.waiting import PATIENCE_S


class Relay:
    """Passes bytes on between whoever connects and a server.

    Args:
        target: The address of the server, `scheme://host:port`.
        context: TLS towards the client; `None` is none.
        host: Where to listen.
    """

    def __init__(self, target: str, context: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        parts = urlsplit(target)
        self._target = (str(parts.hostname), int(parts.port or 0))
        self._context = context
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.port = int(self._listening.getsockname()[1])  # where it listens
        self.connections = 0  # how many there were
        self.sent = b""  # all that clients have sent
        self._ending = threading.Event()
        self._dropped = 0
        self._threads = [threading.Thread(target=self._accept, name="relay")]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listening.close()

    def drop(self) -> None:
        """End the connections that there are; a caller that connects again is served."""
        self._dropped = self.connections

    def _accept(self) -> None:
        self._listening.settimeout(0.02)
        while not self._ending.is_set():
            try:
                accepted, _ = self._listening.accept()
            except TimeoutError:
                continue
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(accepted, self.connections), name="relay-connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, accepted: socket.socket, number: int) -> None:
        accepted.settimeout(PATIENCE_S)
        try:
            client = self._context.wrap_socket(accepted, server_side=True) if self._context else accepted
        except OSError:
            accepted.close()
            return  # the client did not like the certificate
        with client, socket.create_connection(self._target, PATIENCE_S) as server:
            self._pass_on(client, server, number)

    def _pass_on(self, client: socket.socket, server: socket.socket, number: int) -> None:
        """Pass on what comes until one side ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while not self._ending.is_set() and number > self._dropped:
                for key, _ in selector.select(0.02):
                    source, target = key.fileobj, key.data
                    if not isinstance(source, socket.socket):
                        raise TypeError(type(source))
                    try:
                        data = source.recv(1 << 16)
                        while isinstance(source, ssl.SSLSocket) and source.pending():
                            data += source.recv(1 << 16)
                        if not data:
                            return
                        target.sendall(data)
                    except OSError:
                        return
                    if source is client:
                        self.sent += data
