"""Hints between processes by LISTEN and NOTIFY: "there may be work for this agent".

A hint is never needed: polling goes on beneath it. It is sent after the commit, in a transaction of its own, because a
NOTIFY inside a writing transaction holds a lock of the whole database until that commit has reached the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import psycopg
from psycopg import pq
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.database.embedded import WORKER_APPLICATION
from orchestrator.database.engine import alone, connection_parameters
from orchestrator.database.transient import reason
from orchestrator.errors import OrchestratorError

log = logging.getLogger("orchestrator.database")

CHANNEL = "orchestrator"
CANCEL = "\x18"
"""Sent in the place of an agent's name: somebody asked to cancel a running task. No agent can have this name."""
INTERVAL = 0.02
"""Seconds between two hints for one agent from one process."""
PAYLOAD_BYTES = 200
PING_SECONDS = 15.0
ANSWER_SECONDS = 10.0
CONNECT_SECONDS = 5
BACKOFF_SECONDS = (0.2, 30.0)
QUIET_SECONDS = 60.0

_SEND = text("SELECT count(pg_notify(:channel, payload)) FROM unnest(CAST(:payloads AS text[])) AS payload")


def payload(agent: str) -> str:
    """What is sent for ``agent``: its name, or a digest where the name is longer than a payload should be."""
    encoded = agent.encode()
    return agent if len(encoded) <= PAYLOAD_BYTES else "sha256:" + hashlib.sha256(encoded).hexdigest()


class Notifier:
    """Sends hints, at most one an agent per ``INTERVAL`` seconds in this process.

    A hint that comes too early is not lost but sent at the end of its interval, since the listener may have looked
    before this commit. Works from any thread.
    """

    def __init__(self, engine: Engine, *, interval: float = INTERVAL) -> None:
        self._engine = engine
        self._interval = interval
        self._lock = threading.Lock()
        self._sent: dict[str, float] = {}
        self._late: set[str] = set()
        self._timer: threading.Timer | None = None
        self._last_timer: threading.Timer | None = None

    def notify(self, agents: Iterable[str]) -> None:
        """Hint that there is work for ``agents``. Call after the commit. Never raises: the poll will find the work."""
        now = time.monotonic()
        with self._lock:
            due = set()
            for agent in set(map(payload, agents)):
                if now - self._sent.get(agent, -self._interval) >= self._interval:
                    self._sent[agent] = now
                    due.add(agent)
                else:
                    self._late.add(agent)
            if len(self._sent) > 10_000:  # names come from users: forget what has no bearing any more
                self._sent = {agent: at for agent, at in self._sent.items() if now - at < self._interval}
            if self._late and self._timer is None:
                # Not a daemon: a process that ends right after adding its tasks still sends this, 20 ms later.
                timer = threading.Timer(self._interval, self._send_late)
                try:
                    timer.start()
                    self._timer = self._last_timer = timer
                except RuntimeError:  # no further thread can be had, at the interpreter's end for instance
                    due |= self._late
                    self._late = set()
        if due:
            self._send(due)

    def close(self) -> None:
        """Send what is still held back, and wait for it."""
        timer = self._last_timer  # not _timer: that is None while the late ones are being sent
        if timer is not None:
            timer.join()

    def _send_late(self) -> None:
        with self._lock:
            due, self._late, self._timer = self._late, set(), None
            now = time.monotonic()
            self._sent.update(dict.fromkeys(due, now))
        self._send(due)

    def _send(self, payloads: set[str]) -> None:
        try:
            with self._engine.begin() as connection:
                alone(connection).execute(_SEND, {"channel": CHANNEL, "payloads": sorted(payloads)})
        except (SQLAlchemyError, psycopg.Error, OrchestratorError) as error:
            log.debug("no hint was sent: %s", reason(error))


class Listener:
    """A thread on a connection of its own that calls ``callback(payload)`` for every hint.

    - Compare with ``payload(agent)``, not with the name.
    - ``connected()`` is called whenever listening begins: what was sent before went unheard, so look now.
    - Both are called on the listener's thread and must not block; what they raise is logged.
    - A lost connection is made anew, with growing pauses; one that is silently dead is found by a question every
      ``ping`` seconds that must be answered within ``answer`` seconds.
    - Behind a transaction-mode pooler notifications never arrive: with ``pooler="transaction"`` nothing is started, and
      with None it ends, and says so, when it finds a pooler. ``pooler="session"`` is for one that can be listened through.
    """

    def __init__(
        self,
        url: str,
        callback: Callable[[str], None],
        *,
        connected: Callable[[], None] | None = None,
        pooler: str | None = None,
        application_name: str = f"{WORKER_APPLICATION} listener",
        ping: float = PING_SECONDS,
        answer: float = ANSWER_SECONDS,
    ) -> None:
        self._parameters = connection_parameters(url, application_name=application_name)
        self._parameters["connect_timeout"] = CONNECT_SECONDS
        self._callback = callback
        self._connected = connected or (lambda: None)
        self._enabled = pooler != "transaction"
        self._any_pooler = pooler is None
        self._ping = ping
        self._answer = answer
        self._lost_at: float | None = None
        self._said_at = -math.inf
        self._level = logging.WARNING
        self._hearing = False
        self._stopping = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="orchestrator-listener", daemon=True)

    @property
    def deaf(self) -> bool:
        """Whether it should hear and does not: the connection is lost, or not there yet."""
        return self._thread.is_alive() and not self._hearing and not self._stopping.is_set()

    def start(self) -> None:
        """Begin to listen. Returns at once; the connection is made by the thread."""
        if self._enabled:
            self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop listening; wait at most ``timeout`` seconds for the thread (it may be connecting to a dead address)."""
        self._stopping.set()
        self._wake.close()  # wakes the select, for good
        if self._thread.ident is not None:
            self._thread.join(timeout)
        else:
            self._woken.close()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    # Not as a context manager: that would commit, and wait for the answer to a question under way.
                    with contextlib.closing(psycopg.connect(**self._parameters, autocommit=True)) as connection:
                        self._listen(connection)
                except (psycopg.Error, OSError) as error:
                    self._hearing = False
                    if self._stopping.is_set():
                        return
                    if self._lost_at is None:
                        self._lost_at, failures = time.monotonic(), 0
                        self._complain(reason(error))
                    low, high = BACKOFF_SECONDS
                    self._stopping.wait(min(high, low * 2**failures) * random.uniform(0.5, 1.0))
                    failures = min(failures + 1, 16)
        finally:
            self._woken.close()

    def _listen(self, connection: psycopg.Connection[Any]) -> None:
        """Wait for notifications until told to stop. Raises the driver's error when the connection is lost.

        Sends its few statements without waiting for the answer in the driver, which would wait for ever on a connection
        that died in silence.
        """
        wire = connection.pgconn
        # A pooler gives sessions numbers of its own. LISTEN would stay behind on a session that is somebody else's next.
        wire.send_query(b"SELECT pg_backend_pid()" if self._any_pooler else f"LISTEN {CHANNEL}".encode())
        looking = self._any_pooler
        asked = True
        listening = False
        since = time.monotonic()
        # Not select(): a worker with a thousand agents has file descriptors that are too large for it.
        with selectors.DefaultSelector() as selector:
            selector.register(wire.socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping.is_set():
                remaining = since + (self._answer if asked else self._ping) - time.monotonic()
                if remaining <= 0 and asked:
                    raise psycopg.OperationalError(f"the server has not answered for {self._answer:.0f} s")
                if remaining <= 0:
                    wire.send_query(b"SELECT 1")
                    asked, since = True, time.monotonic()
                    continue
                if all(key.fileobj is self._woken for key, _ in selector.select(remaining)):
                    continue
                wire.consume_input()
                while (heard := wire.notifies()) is not None:
                    self._call(partial(self._callback, heard.extra.decode("utf-8", "replace")))
                if asked and not wire.is_busy():
                    while (result := wire.get_result()) is not None:
                        if result.status == pq.ExecStatus.FATAL_ERROR:
                            raise psycopg.OperationalError(result.get_error_message())
                        if looking and int(result.get_value(0, 0) or 0) != wire.backend_pid:
                            self._pooled()
                            return
                    if looking:
                        looking, since = False, time.monotonic()
                        wire.send_query(f"LISTEN {CHANNEL}".encode())
                        continue
                    asked = False
                    if not listening:
                        listening = True
                        self._heard_again()
                if not asked:
                    since = time.monotonic()

    def _pooled(self) -> None:
        self._stopping.set()
        log.warning(
            "a connection pooler is in between: new tasks are found by polling alone;"
            ' set pooler = "transaction" to confirm it, or "session" if it leaves a session to its client'
        )

    def _complain(self, why: str) -> None:
        """Say that the connection is lost, unless that was said within the last minute: something may cut it regularly."""
        now = time.monotonic()
        self._level = logging.WARNING if now - self._said_at >= QUIET_SECONDS else logging.DEBUG
        if self._level == logging.WARNING:
            self._said_at = now
        log.log(self._level, "lost the connection that hears of new tasks: %s; polling goes on", why)

    def _heard_again(self) -> None:
        self._hearing = True
        if self._lost_at is not None:
            log.log(self._level, "listening for new tasks again after %.1f s", time.monotonic() - self._lost_at)
            self._lost_at = None
        self._call(self._connected)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:  # a fault of the callback's must not end the listening
            log.exception("a listener's callback failed")
