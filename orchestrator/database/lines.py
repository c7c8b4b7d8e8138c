"""Connections that find out what lies between them and the server, and do not wait for ever for an answer.

A server that dies in silence is noticed by TCP. A middleman that goes on acknowledging bytes which nobody reads (a
frozen proxy, a load balancer that lost its way) is not: the statement would wait for ever, and with it the thread that
records, claims or renews. So after some silence the server is asked, on a new connection, whether it still works on it.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Generator
from typing import Any, Self

import psycopg
from psycopg import generators, pq

SILENCE = 10.0
"""Seconds without a byte from the server until it is asked."""
ASK_SECONDS = 5
"""Seconds that the question may take; what cannot be asked counts as lost."""

ABANDONED = 15
"""Seconds after which the server ends a session whose client says nothing in the middle of a transaction.

Units of work take milliseconds. A client that was cut off in the middle of one would keep its locks for as long as the
server takes to notice, by default two hours: nobody could take back its tasks, or declare it dead.
"""


class Line(psycopg.Connection[Any]):
    """A connection that is given up when the server is silent and no longer at work for it.

    Not when the server is merely slow: a commit that waits for a synchronous standby, cut and tried again, would leave
    one more session behind with each try.
    """

    silence = SILENCE
    pooled = False
    """Whether the session is not the server's own: a pooler answered. Known after ``look``."""
    alone = False
    """Whether each statement is a transaction of its own, committed with its answer. Until the pool has it back."""
    _given: dict[str, Any]

    @classmethod
    def open(cls, parameters: dict[str, Any], *, silence: float = SILENCE, **options: Any) -> Self:
        """Connect. ``silence`` is in seconds."""
        line = cls.connect(**parameters, **options)
        line._given = dict(parameters)
        line.silence = silence
        return line

    def look(self) -> None:
        """Find out whether a pooler is in between: it gives numbers of its own to sessions. One round trip."""
        self.autocommit = True  # no transaction, so that no rollback is needed
        try:
            row = self.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
        finally:
            if not self.closed:
                self.autocommit = False
        self.pooled = row is not None and row[0] != self.info.backend_pid

    def _start_query(self) -> Generator[Any, Any, None]:
        if self.alone:
            self._check_connection_ok()
            return
        if self.autocommit or self._pipeline or self.pgconn.transaction_status != pq.TransactionStatus.IDLE:
            yield from super()._start_query()
            return
        # With BEGIN in one round trip, and over with the transaction: behind a pooler it reaches nobody else.
        self._check_connection_ok()
        limit = b"; SET LOCAL idle_in_transaction_session_timeout = '%ds'" % ABANDONED
        self.pgconn.send_query(self._get_tx_start_command() + limit)
        for result in (yield from generators.execute(self.pgconn)):
            if result.status != pq.ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result, encoding="utf-8")

    def ended(self) -> bool:
        """Whether the server has ended this session while nobody used it. No round trip: it has said so, or closed it."""
        try:
            while _readable(self.pgconn.socket, 0):
                self.pgconn.consume_input()
        except psycopg.Error:
            return True
        return False

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        """As psycopg's; raises OperationalError, with the connection closed, when nobody answers any more."""
        return super().wait(self._heard(gen), *arguments, **options)

    def _heard(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            wanted = next(gen)
            silent_at = time.monotonic() + self.silence
            while True:
                ready = yield wanted
                if ready:
                    silent_at = time.monotonic() + self.silence
                elif time.monotonic() > silent_at:
                    # What came while the server was asked is the answer.
                    if (why := self._lost()) is not None and not _readable(self.pgconn.socket, 0.1):
                        self.close()
                        raise psycopg.OperationalError(f"the server has not answered for {self.silence:g} s: {why}")
                    silent_at = time.monotonic() + self.silence
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value

    def _lost(self) -> str | None:
        """Why the answer will not come; None when the server still works on it, or cannot tell."""
        info = self.info
        # The server that was connected to, of several.
        where = {"host": info.host, "port": info.port, "hostaddr": info.hostaddr} if info.host else {}
        asking: dict[str, Any] = {**self._given, **where, "connect_timeout": ASK_SECONDS}
        asking.pop("target_session_attrs", None)  # whatever it is by now
        try:
            with contextlib.closing(psycopg.Connection.connect(**asking, autocommit=True)) as other:
                return None if self.pooled else self._verdict(other)
        except psycopg.Error as error:
            return " ".join(str(error).split())

    def _verdict(self, other: psycopg.Connection[Any]) -> str | None:
        # Without waiting for an answer in the driver: this line may be as dead as the other.
        other.pgconn.send_query_params(
            b"SELECT state FROM pg_stat_activity WHERE pid = $1::int", [str(self.info.backend_pid).encode()]
        )
        deadline = time.monotonic() + ASK_SECONDS
        result = None
        while other.pgconn.is_busy():
            if time.monotonic() > deadline:
                return "nor does it answer anybody else"
            _readable(other.pgconn.socket, deadline - time.monotonic())
            other.pgconn.consume_input()
        while (found := other.pgconn.get_result()) is not None:
            result = found
        if result is None or result.ntuples == 0:
            return "the session is gone"
        state = (result.get_value(0, 0) or b"").decode()
        return f"the session is {state}" if state.startswith("idle") else None


def _readable(descriptor: int, seconds: float) -> bool:
    # Not select(): a worker with a thousand agents has file descriptors that are too large for it.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds * 1000)))


__all__ = ["SILENCE", "Line"]
