"""Hints: that they arrive, how few they are, and that losing the connection is survived and said once."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator.database import notify
from orchestrator.database.embedded import WORKER_APPLICATION
from orchestrator.database.engine import make_engine
from orchestrator.database.notify import Listener, Notifier, payload
from tests.conftest import WaitUntil
from tests.servers import PgBouncer, TcpProxy


class Ears:
    """A listener and what it heard."""

    def __init__(self, url: str, **options: Any) -> None:
        self.heard: queue.Queue[str] = queue.Queue()
        self.connected = threading.Semaphore(0)
        self.listener = Listener(url, self.heard.put, connected=self.connected.release, **options)

    def next(self) -> str:
        return self.heard.get(timeout=30)


@contextlib.contextmanager
def listening(url: str, **options: Any) -> Iterator[Ears]:
    """A listener that has begun to listen."""
    ears = Ears(url, **options)
    ears.listener.start()
    try:
        assert ears.connected.acquire(timeout=30)
        yield ears
    finally:
        ears.listener.stop(30)
        assert not ears.listener._thread.is_alive()


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "BACKOFF_SECONDS", (0.005, 0.02))


@pytest.fixture
def notifier(engine: Engine) -> Iterator[Notifier]:
    """A notifier with the usual interval."""
    made = Notifier(engine)
    yield made
    made.close()


def test_a_hint_arrives(database_url: str, notifier: Notifier) -> None:
    """Names arrive as their payloads, each agent of a batch once."""
    with listening(database_url) as ears:
        notifier.notify(["coder", "агент'; --", "coder"])
        assert {ears.next(), ears.next()} == {"coder", "агент'; --"}
        assert ears.heard.empty()


def test_a_long_name_is_shortened(database_url: str, notifier: Notifier) -> None:
    """A name longer than a payload may be is sent as a digest that both sides compute."""
    long = "я" * 5000
    assert len(payload(long)) < 100
    assert payload(long) != payload(long + "я")
    with listening(database_url) as ears:
        notifier.notify([long])
        assert ears.next() == payload(long)


def test_a_burst_is_two_hints(database_url: str, engine: Engine) -> None:
    """A thousand hints within one interval are one at once and one at its end, so the last commit is heard of."""
    notifier = Notifier(engine, interval=0.5)
    with listening(database_url) as ears:
        for _ in range(1000):
            notifier.notify(["a"])
        notifier.close()
        notifier.notify(["end"])
        assert [ears.next(), ears.next(), ears.next()] == ["a", "a", "end"]


def test_agents_do_not_hold_each_other_back(database_url: str, engine: Engine) -> None:
    """The interval is for each agent."""
    notifier = Notifier(engine, interval=600)
    with listening(database_url) as ears:
        for name in ("a", "b", "c"):
            notifier.notify([name])
        assert [ears.next() for _ in range(3)] == ["a", "b", "c"]


def test_a_failure_to_send_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The database is gone: no error, no warning; the poll will find the work."""
    engine = make_engine("postgresql://127.0.0.1:1/nothing")
    Notifier(engine).notify(["a"])
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_sending_holds_no_connection(engine: Engine, notifier: Notifier) -> None:
    """After the hint its connection is back in the pool."""
    notifier.notify(["a"])
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def _end_listeners(engine: Engine) -> int:
    with engine.begin() as connection:
        found = connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'orchestrator worker listener' AND datname = current_database()"
            )
        )
        return len(found.all())


def test_a_lost_connection_is_made_anew(
    database_url: str, engine: Engine, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends the session: one warning, a new connection, one line that it is back, and a call to look."""
    caplog.set_level(logging.INFO, "orchestrator.database")
    with listening(database_url) as ears:
        assert _end_listeners(engine) == 1
        assert ears.connected.acquire(timeout=30)
        notifier.notify(["a"])
        assert ears.next() == "a"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("lost the connection that hears of new tasks: ")
    assert lines[1].startswith("listening for new tasks again after ")


def test_a_long_outage_is_one_warning(
    database_url: str, notifier: Notifier, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    """Many failed tries to reconnect say no more than the first."""
    caplog.set_level(logging.INFO, "orchestrator.database")
    with TcpProxy(database_url) as proxy, listening(proxy.url) as ears:
        proxy.refuse()
        wait_until(lambda: proxy.refused >= 5)
        proxy.thaw()
        assert ears.connected.acquire(timeout=30)
        notifier.notify(["a"])
        assert ears.next() == "a"
    assert len(caplog.records) == 2


def test_a_line_that_died_in_silence_is_noticed(database_url: str, notifier: Notifier, wait_until: WaitUntil) -> None:
    """Nothing is refused and nothing arrives: the question without an answer ends the connection."""
    with TcpProxy(database_url) as proxy, listening(proxy.url, ping=0.05, answer=0.2) as ears:
        proxy.mute()
        wait_until(lambda: proxy.accepted >= 2)  # it has given the first one up
        proxy.cut()
        proxy.thaw()
        assert ears.connected.acquire(timeout=30)
        notifier.notify(["a"])
        assert ears.next() == "a"


def test_a_quiet_connection_is_kept(
    database_url: str, engine: Engine, notifier: Notifier, wait_until: WaitUntil
) -> None:
    """Questions that are answered keep the same connection for good."""
    with TcpProxy(database_url) as proxy, listening(proxy.url, ping=0.005) as ears:
        asked = text(
            "SELECT query = 'SELECT 1' FROM pg_stat_activity"
            " WHERE application_name = 'orchestrator worker listener' AND datname = current_database()"
        )

        def was_asked() -> bool:
            with engine.connect() as connection:
                return bool(connection.scalar(asked))

        wait_until(was_asked)
        notifier.notify(["a"])
        assert ears.next() == "a"
        assert proxy.accepted == 1


def test_a_listener_counts_as_a_worker(database_url: str, engine: Engine) -> None:
    """By its listener a worker is known to be alive when somebody stops the embedded server."""
    with listening(database_url), engine.connect() as connection:
        names = connection.scalars(
            text("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
        ).all()
    assert any(name.startswith(WORKER_APPLICATION) for name in names)


def test_a_fault_of_the_callback_is_survived(
    database_url: str, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    """What the callback raises is logged, and the next hint is heard."""
    heard: queue.Queue[str] = queue.Queue()
    ready = threading.Event()

    def callback(said: str) -> None:
        heard.put(said)
        if said == "first":
            raise ValueError("a fault")

    listener = Listener(database_url, callback, connected=ready.set)
    listener.start()
    try:
        assert ready.wait(30)
        notifier.notify(["first"])
        assert heard.get(timeout=30) == "first"
        notifier.notify(["second"])
        assert heard.get(timeout=30) == "second"
    finally:
        listener.stop(30)
    assert "a listener's callback failed" in caplog.text


def test_off_behind_a_transaction_mode_pooler(database_url: str) -> None:
    """Notifications would never arrive there, so no connection is made."""
    ears = Ears(database_url, pooler="transaction")
    ears.listener.start()
    assert ears.listener._thread.ident is None
    ears.listener.stop()


def test_stop_before_start_and_while_nothing_answers() -> None:
    """A stop works at any moment, also while the database cannot be reached."""
    never = Ears("postgresql://127.0.0.1:1/nothing")
    never.listener.stop()
    failing = Ears("postgresql://127.0.0.1:1/nothing")
    failing.listener.start()
    failing.listener.stop(30)
    assert not failing.listener._thread.is_alive()


def test_file_descriptors_beyond_a_thousand(database_url: str, notifier: Notifier) -> None:
    """A worker with a thousand agents has large descriptor numbers; select() would fail on them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2048)) if hard > 0 else 2048, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        with listening(database_url) as ears:
            notifier.notify(["a"])
            assert ears.next() == "a"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.real
def test_sending_works_through_a_pooler(database_url: str) -> None:
    """Workers that listen directly hear of tasks that were added through PgBouncer."""
    with PgBouncer(database_url) as pooler, listening(database_url) as ears:
        engine = make_engine(pooler.url, pooler="transaction")
        try:
            Notifier(engine).notify(["a"])
            assert ears.next() == "a"
        finally:
            engine.dispose()
