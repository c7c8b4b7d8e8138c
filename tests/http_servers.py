"""A service for tests of HTTP agents: it answers, fails, goes silent or trickles as the request's input asks it to.

It listens on the loopback address and speaks HTTP/1.1 by hand, so that it can break every rule.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """What the service was asked."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Service:
    """The service; ``respond`` gets each request and the connection that it came by."""

    respond: Callable[[Request, Connection], None]
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    hung_up: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/run"


class Connection:
    """One connection of a client."""

    def __init__(self, service: Service, sock: socket.socket) -> None:
        self.service = service
        self._socket = sock

    def send(self, text: str | bytes) -> None:
        """Write as it is."""
        self._socket.sendall(text.encode() if isinstance(text, str) else text)

    def answer(self, body: str | bytes, *, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        """Write a whole answer with its length."""
        data = body.encode() if isinstance(body, str) else body
        self.head(status, kind, **{"Content-Length": str(len(data)), **headers})
        self.send(data)

    def head(self, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        """Write the first line and the headers."""
        lines = [f"HTTP/1.1 {status} Something", f"Content-Type: {kind}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join(lines) + "\r\n\r\n")

    def wait_for_the_end(self) -> None:
        """Say nothing more until the client hangs up."""
        with contextlib.suppress(OSError):
            while self._socket.recv(65536):
                pass
        self.service.hung_up.release()


def _read(sock: socket.socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := sock.recv(65536)):
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += sock.recv(65536)
    return Request(first.split()[1], headers, body)


@contextlib.contextmanager
def serving(respond: Callable[[Request, Connection], None]) -> Iterator[Service]:
    """A service that treats every request by *respond*, each in a thread of its own, one a connection."""
    service = Service(respond)
    listener = socket.create_server(("127.0.0.1", 0))
    service.port = listener.getsockname()[1]
    open_: list[socket.socket] = []

    def treat(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            if (request := _read(sock)) is not None:
                service.requests.append(request)
                service.asked.release()
                respond(request, Connection(service, sock))

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            open_.append(sock)
            threading.Thread(target=treat, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in open_:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@contextlib.contextmanager
def never_accepting() -> Iterator[str]:
    """The address of a listener whose queue is full: the system answers no further attempt to connect."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(("127.0.0.1", port))
            except TimeoutError:
                break
        else:
            raise AssertionError("the queue of the listener does not fill up")
        yield f"http://127.0.0.1:{port}/run"


__all__ = ["Connection", "Request", "Service", "never_accepting", "serving"]
