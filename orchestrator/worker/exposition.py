"""What a worker or a watchdog serves over HTTP: ``/metrics`` for Prometheus, ``/live`` and ``/ready`` for probes.

On the loopback address unless told otherwise: a port is ``9465``, ``0.0.0.0:9465`` or ``[::]:9465``.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput

log = logging.getLogger(__name__)

METRICS = "text/plain; version=0.0.4; charset=utf-8"
PLAIN = "text/plain; charset=utf-8"
LOOPBACK = "127.0.0.1"

Port = int | str
Page = Callable[[], tuple[int, str, str]]
"""Status, content type and text of an answer."""


@value
class Health:
    """What a probe hears. ``fault``: only a new process helps. ``wait``: why no work is taken now, which passes."""

    fault: str | None = None
    wait: str | None = None


@contextmanager
def exposed(
    text: Callable[[], str], health: Callable[[], Health], *, metrics: Port | None, probes: Port | None
) -> Iterator[None]:
    """Serve *text* at the port *metrics* and *health* at the port *probes* for the length of the block; None: not at all.

    Both may be one port. Raises InvalidInput when a port cannot be had.
    """
    wanted: dict[tuple[str, int], tuple[str, dict[str, Page]]] = {}
    for option, port, pages in (
        ("--metrics-port", metrics, {"/metrics": lambda: (200, METRICS, text())}),
        ("--health-port", probes, {"/live": lambda: _live(health()), "/ready": lambda: _ready(health())}),
    ):
        if port is not None:
            wanted.setdefault(address(port, option), (option, {}))[1].update(pages)
    with ExitStack() as stack:
        for (host, port), (option, served) in wanted.items():
            stack.callback(Exposition(served, port, host, option=option).close)
        yield


def address(port: Port, option: str) -> tuple[str, int]:
    """Return host and port of ``9465`` or ``HOST:9465``. Raises InvalidInput that names *option*."""
    host, colon, number = str(port).strip().rpartition(":")
    if not (number.isascii() and number.isdecimal()) or not 0 < int(number[:9]) < 65_536 or (colon and not host):
        raise InvalidInput(f"{option}: expected a port from 1 to 65535, or HOST:PORT, found {str(port)!r}")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(number)


def _live(health: Health) -> tuple[int, str, str]:
    return (200, PLAIN, "live\n") if health.fault is None else (503, PLAIN, f"not live: {health.fault}\n")


def _ready(health: Health) -> tuple[int, str, str]:
    why = health.fault or health.wait
    return (200, PLAIN, "ready\n") if why is None else (503, PLAIN, f"not ready: {why}\n")


class Exposition:
    """Serves *pages* by their paths. Port 0 takes a free one; ``port`` says which. Raises InvalidInput for one that is taken."""

    def __init__(
        self, pages: Mapping[str, Page], port: int, host: str = LOOPBACK, *, option: str = "--metrics-port"
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                self._answer(body=True)

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def _answer(self, *, body: bool) -> None:
                page = pages.get(self.path.partition("?")[0])
                if page is None:
                    self.send_error(404, f"here are {', '.join(sorted(pages))}")
                    return
                status, kind, text = page()
                content = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the parent's name
                log.debug(format, *arguments)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                # Most often somebody who did not wait for the answer; never a reason to write to a worker's stderr.
                log.debug("no answer to %s", client_address, exc_info=True)

        what = option.strip("-").partition("-")[0]
        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InvalidInput(
                f"the {what} port {port} cannot be opened: {error}", hint=f"choose another: {option}"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name=what, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is open."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


__all__ = ["Exposition", "Health", "Port", "address", "exposed"]
