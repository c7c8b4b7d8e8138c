"""Probes: what ``/live`` and ``/ready`` of a worker and a watchdog say, and the ports that they are asked at."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text

from orchestrator.errors import InvalidInput
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Watchdog, Worker
from orchestrator.worker.exposition import Health, address, exposed
from tests.commands import Cli
from tests.conftest import WaitUntil
from tests.servers import free_port
from tests.working import FakeAgent, Gate, Working, add, orchestrator


def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text that *path* answers; 0 when nobody does."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return 0, ""


@pytest.mark.parametrize(
    ("health", "live", "ready"),
    [
        (Health(), (200, "live\n"), (200, "ready\n")),
        (Health(wait="not registered"), (200, "live\n"), (503, "not ready: not registered\n")),
        (Health("it hangs"), (503, "not live: it hangs\n"), (503, "not ready: it hangs\n")),
    ],
)
def test_what_probes_are_told(health: Health, live: tuple[int, str], ready: tuple[int, str]) -> None:
    """What passes makes a process not ready, what only a new process heals makes it not live; HEAD has no body."""
    port = free_port()
    with exposed(lambda: "", lambda: health, metrics=None, probes=port):
        assert asked(port, "/live") == live
        assert asked(port, "/ready?verbose") == ready
        assert asked(port, "/ready", "HEAD") == (ready[0], "")
        assert asked(port, "/metrics")[0] == 404
    assert asked(port, "/live")[0] == 0


def test_metrics_and_probes_may_share_a_port() -> None:
    """One port answers all three paths; a second process is told which option is in its way."""
    port = free_port()
    with exposed(lambda: "a 1\n", Health, metrics=port, probes=f"127.0.0.1:{port}"):
        assert asked(port, "/metrics") == (200, "a 1\n")
        assert asked(port, "/live") == (200, "live\n")
        with pytest.raises(InvalidInput, match=f"the health port {port} cannot be opened") as refused:
            with exposed(str, Health, metrics=None, probes=port):
                pass
        assert refused.value.hint == "choose another: --health-port"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (8080, ("127.0.0.1", 8080)),
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:8080", ("0.0.0.0", 8080)),
        ("[::1]:8080", ("::1", 8080)),
        ("localhost:8080", ("localhost", 8080)),
    ],
)
def test_addresses(given: int | str, found: tuple[str, int]) -> None:
    """A port alone is one of the loopback address."""
    assert address(given, "--health-port") == found


@pytest.mark.parametrize("given", ["", "0", "65536", "x", ":8080", "host:", "-1", 0.5, "\u0663", "9" * 12])
def test_what_is_no_address(given: Any) -> None:
    """It is refused by the option's name."""
    with pytest.raises(InvalidInput, match="--health-port: expected a port"):
        address(given, "--health-port")


def test_the_commands_refuse_what_is_no_port(cli: Cli) -> None:
    """Both commands say it before they touch the database."""
    assert "--health-port" in cli("worker", "--health-port", "99999", code=2).err
    assert "--health-port" in cli("watchdog", "--health-port", "here:", code=2).err
    assert "--once" in cli("watchdog", "--once", "--health-port", "8080", code=2).err


@contextmanager
def working(worker: Worker) -> Iterator[Working]:
    with Working(worker) as running:
        yield running


def test_a_worker_is_ready_while_it_takes_work(database_url: str, engine: Engine, wait_until: WaitUntil) -> None:
    """Ready once it is registered, live but not ready while it drains, and gone afterwards."""
    port, gate = free_port(), Gate()
    add(engine)
    with orchestrator(database_url) as orc:
        worker = Worker(orc, [FakeAgent(behave=gate)], 1, signals=False, health_port=port)
        assert worker.health() == Health(wait="not registered")
        with working(worker):
            wait_until(lambda: asked(port, "/ready") == (200, "ready\n"))
            gate.entered()
            worker.stop(60)
            wait_until(lambda: asked(port, "/ready") == (503, "not ready: claims no more: told to stop\n"))
            assert asked(port, "/live") == (200, "live\n")
            gate.open()
    assert asked(port, "/live")[0] == 0


def test_a_worker_without_its_lease_is_live_and_not_ready(
    database_url: str, engine: Engine, wait_until: WaitUntil
) -> None:
    """A database that does not let it renew is no reason to restart the worker; when it does again, it is ready."""
    settings = Settings(heartbeat=0.1, lease=2.2, sweep=60, poll=0.1, grace=1.0)
    with orchestrator(database_url, settings) as orc:
        worker = Worker(orc, [FakeAgent()], 1, signals=False, watchdog=False)
        with working(worker):
            wait_until(lambda: worker.health() == Health())
            with engine.connect() as connection:
                connection.execute(text("SELECT FROM workers FOR UPDATE"))
                told = wait_until(lambda: worker.health().wait)
                assert told is not None
                assert told.startswith("the lease was renewed ")
                assert worker.health().fault is None
            wait_until(lambda: worker.health() == Health())


def test_a_worker_whose_loop_stands_still_is_not_live(database_url: str) -> None:
    """An agent that blocks the loop for more than half of the lease is what a restart heals."""
    with orchestrator(database_url) as orc:
        worker = Worker(orc, [FakeAgent()], 1, signals=False)
        worker._ticked = time.monotonic() - 9
        assert worker.health().fault is None
        worker._ticked = time.monotonic() - 11
        assert (worker.health().fault or "").startswith("the event loop has not moved for 11 s")


def test_a_watchdog_is_ready_when_it_has_looked(database_url: str, wait_until: WaitUntil) -> None:
    """Its last look decides: none yet or a failed one is not ready, one that hangs is not live."""
    port = free_port()
    with Orchestrator(database_url, settings=Settings(sweep=0.05)) as orc:
        dog = Watchdog(orc, health_port=port)
        assert dog.health() == Health(wait="it has not looked yet")
        thread = threading.Thread(target=dog.run)
        thread.start()
        try:
            wait_until(lambda: asked(port, "/ready") == (200, "ready\n"))
            assert asked(port, "/live") == (200, "live\n")
        finally:
            dog.stop()
            thread.join()
        assert dog.health() == Health(wait="it was told to stop")
        dog._turned = time.monotonic() - 130
        assert (dog.health().fault or "").startswith("its last look began 13")
