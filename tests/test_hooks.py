"""Hooks of alerts: an episode is told once when it begins and once when it is over, by one of all processes, signed."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.domain.snapshot import Alert, Episode
from orchestrator.errors import InvalidInput
from orchestrator.hooks import Hook, read_hooks, signature
from orchestrator.repositories.alerting import AlertRepository, Wish
from orchestrator.service import Orchestrator
from orchestrator.settings import Settings
from orchestrator.worker import Watchdog, Worker
from orchestrator.worker.alerting import TRIES, Alerter
from tests.commands import Cli
from tests.conftest import WaitUntil
from tests.making import Making, new_worker
from tests.working import FakeAgent, Gate, Working

HOSTILE = "\x1b[2J\x07red\r\nalert no_worker: fake‮[/]"
EPISODE = Episode(7, Alert("no_worker", "agent", HOSTILE, "no live worker"), datetime(2026, 11, 30, tzinfo=UTC))
NEVER = threading.Event()


class Receiver:
    """A web server that keeps what it is sent and answers with ``status``; ``release`` lets held answers go."""

    def __init__(self) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.status = 204
        self.release = threading.Event()
        self.release.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.heard.append((dict(self.headers), body))
                receiver.release.wait(30)
                self.send_response(receiver.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the parent's name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/in?token=t0p-s3cret"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in list(self.heard)]

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A webhook that hears everything."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def made(engine: Engine) -> Making:
    """Tasks on the empty tables, of a worker that does not become silent while a test takes its time."""
    made = Making.on(engine)
    made.query("UPDATE workers SET heartbeat = interval '1 hour', lease = interval '3 hours'")
    return made


def with_hooks(url: str, **hooks: Any) -> Orchestrator:
    """An orchestrator whose hooks wait for nothing."""
    tables = {name: {"after": 0.0, "kinds": ["no_worker"], **table} for name, table in hooks.items()}
    return Orchestrator(
        url, settings=Settings(heartbeat=0.2, lease=20.0, sweep=0.2, poll=0.1, alerts={"hooks": tables})
    )


def forget_the_last_look(made: Making) -> None:
    made.query("DELETE FROM alert_looks")


def age_what_was_seen(made: Making) -> None:
    """As if nobody had seen any alert for a minute."""
    made.query("UPDATE alerts SET seen_at = seen_at - interval '1 minute', begun_at = begun_at - interval '1 minute'")


# -- episodes -----------------------------------------------------------------------------------------------------


def test_an_alert_that_goes_on_is_one_episode(made: Making) -> None:
    """It begins at the first look, goes on with other words, and ends when it has not been seen for a while."""
    alerts = AlertRepository(made.engine)
    assert alerts.look(0) == alerts.look(0)
    made.add("scraper")
    looked = alerts.look(0)
    assert looked is not None
    ((episode,), ended) = looked.begun, looked.ended
    assert (episode.alert.kind, episode.alert.name, ended) == ("no_worker", "scraper", ())
    made.add("scraper")
    looked = alerts.look(0)
    assert looked is not None
    assert (looked.begun, looked.ended) == ((), ())
    (goes_on,) = alerts.open()
    assert (goes_on.id, goes_on.alert.what) == (episode.id, "no live worker, 2 ready tasks wait")
    new_worker(made.engine, "s", ["scraper"])
    looked = alerts.look(0)
    assert looked is not None
    assert looked.ended == ()
    age_what_was_seen(made)
    looked = alerts.look(0)
    assert looked is not None
    (over,) = looked.ended
    assert (over.id, alerts.open()) == (episode.id, [])
    made.query("UPDATE workers SET stopped_at = now() WHERE name = 's'")
    looked = alerts.look(0)
    assert looked is not None
    assert looked.begun[0].id > episode.id


def test_agents_of_two_plans_are_two_episodes(made: Making) -> None:
    """What tells alerts apart is kind, subject, name or task, and plan."""
    for plan in ("a", "b"):
        made.query("INSERT INTO tasks (agent, definition, plan) VALUES ('coder', :h, :plan)", h=f"h-{plan}", plan=plan)
    looked = AlertRepository(made.engine).look(0)
    assert looked is not None
    assert [each.alert.plan for each in sorted(looked.begun, key=lambda each: each.alert.plan or "")] == ["a", "b"]


def test_one_process_looks_for_all(made: Making) -> None:
    """Of many that want to look at once one does, and nobody again before the time is over."""
    made.add("scraper")
    start = threading.Barrier(8)
    looked: list[Any] = []

    def look() -> None:
        start.wait()
        looked.append(AlertRepository(made.engine).look(3600))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(each is not None for each in looked) == 1
    assert made.query("SELECT count(*) FROM alerts")[0][0] == 1


def test_who_read_slowly_writes_nothing(made: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that another has overtaken neither begins nor ends anything."""
    slow, quick = AlertRepository(made.engine), AlertRepository(made.engine)

    def overtaken() -> list[Alert]:
        made.add("scraper")
        assert quick.look(0) is not None
        age_what_was_seen(made)
        return []

    monkeypatch.setattr(slow, "_read", overtaken)
    assert slow.look(0) is None
    assert [each.alert.name for each in quick.open()] == ["scraper"]


def test_old_episodes_are_forgotten(made: Making) -> None:
    """A month after their end, with what hooks were told of them."""
    alerts = AlertRepository(made.engine)
    made.add("scraper")
    alerts.look(0, [Wish("pager")])
    made.query("UPDATE tasks SET status = 'cancelled', finished_at = now()")
    made.query(
        "UPDATE alerts SET begun_at = now() - interval '40 days', seen_at = begun_at, ended_at = now() - interval '31 days'"
    )
    alerts.look(0)
    assert made.query("SELECT * FROM alerts") == made.query("SELECT * FROM alert_deliveries") == []


# -- deliveries ---------------------------------------------------------------------------------------------------


def test_a_hook_hears_of_begin_and_end_once(made: Making) -> None:
    """In this order, each until it was heard, and the end only of what it was told of."""
    alerts = AlertRepository(made.engine)
    made.add("scraper")
    alerts.look(0, [Wish("pager")])
    told = alerts.take("pager", 60)
    assert told is not None
    assert (told.event, told.episode.alert.name, told.failures) == ("begun", "scraper", 0)
    assert alerts.take("pager", 60) is None
    alerts.not_told(told, "answered with status 500", 0.0)
    again = alerts.take("pager", 60)
    assert again is not None
    assert (again.event, again.failures) == ("begun", 1)
    alerts.told(told)  # too late: it is somebody else's
    assert made.query("SELECT begun_told_at FROM alert_deliveries")[0][0] is None
    alerts.told(again)
    assert alerts.take("pager", 60) is None
    made.query("UPDATE tasks SET status = 'cancelled', finished_at = now()")
    age_what_was_seen(made)
    alerts.look(0, [Wish("pager")])
    over = alerts.take("pager", 60)
    assert over is not None
    assert over.event == "ended"
    assert over.episode.ended_at is not None
    alerts.told(over)
    alerts.look(0, [Wish("pager")])
    assert alerts.take("pager", 60) is None


def test_who_dies_while_telling_is_replaced(made: Making) -> None:
    """When its time is over another tells it again: at least once, then."""
    alerts = AlertRepository(made.engine)
    made.add("scraper")
    alerts.look(0, [Wish("pager")])
    first, second = alerts.take("pager", 0.0), alerts.take("pager", 60)
    assert first is not None
    assert second is not None
    assert first.episode == second.episode


def test_what_a_hook_wants_to_hear(made: Making) -> None:
    """Only its kinds, and only of what has gone on for long enough; one that comes later hears of what goes on."""
    alerts = AlertRepository(made.engine)
    made.add("scraper")
    wishes = [Wish("other", ("lock_hold",)), Wish("patient", None, 3600), Wish("same", ("no_worker", "lock_hold"))]
    alerts.look(0, wishes)
    assert alerts.take("other", 60) is None
    assert alerts.take("patient", 60) is None
    assert alerts.take("same", 60) is not None
    made.query("UPDATE alerts SET begun_at = begun_at - interval '2 hours'")
    assert alerts.look(3600, [*wishes, Wish("new")]) is None
    assert alerts.take("patient", 60) is not None
    assert alerts.take("new", 60) is not None


# -- sending ------------------------------------------------------------------------------------------------------


def test_a_webhook_gets_a_signed_document(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert's own keys and the episode's; the signature is over timestamp and body; headers come from variables."""
    env = {"URL": receiver.url, "KEY": "k3y", "AUTH": "Bearer b34rer"}
    (hook,) = read_hooks({"p": {"url_env": "URL", "secret_env": "KEY", "header_env": {"Authorization": "AUTH"}}})
    monkeypatch.setattr(time, "time", lambda: 1_764_561_234.9)
    assert hook.tell(EPISODE, "begun", env, NEVER) is None
    headers, body = receiver.heard[0]
    document = json.loads(body)
    assert (document["event"], document["episode"], document["kind"]) == ("begun", 7, "no_worker")
    assert document.keys() == {
        "event", "episode", "kind", "subject", "name", "what", "task_id", "since", "command", "heals", "plan",
        "begun_at", "ended_at",
    }  # fmt: skip
    assert (document["name"], document["ended_at"]) == (HOSTILE, None)
    assert all(32 <= byte < 127 for byte in body)
    assert headers["Authorization"] == "Bearer b34rer"
    assert (headers["Orchestrator-Event"], headers["Orchestrator-Delivery"]) == ("begun", "7-begun")
    assert headers["Orchestrator-Timestamp"] == "1764561234"
    expected = hmac.new(b"k3y", b"1764561234." + body, hashlib.sha256).hexdigest()
    assert headers["Orchestrator-Signature"] == f"v1={expected}" == signature("k3y", 1764561234, body)


@pytest.mark.parametrize("status", [500, 404, 301])
def test_a_webhook_that_refuses_is_not_told(receiver: Receiver, status: int) -> None:
    """Only 2xx is heard; a redirect is not followed."""
    receiver.status = status
    assert Hook("p", url=receiver.url).tell(EPISODE, "begun", {}, NEVER) == f"answered with status {status}"
    assert len(receiver.heard) == 1


def test_a_webhook_that_does_not_answer(receiver: Receiver) -> None:
    """It is given up after the hook's timeout."""
    receiver.release.clear()
    assert Hook("p", url=receiver.url, timeout=0.1).tell(EPISODE, "begun", {}, NEVER) == "no answer within 0.1 s"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/t0p-s3cret", "nonsense://t0p-s3cret", "http://[t0p-s3cret/", "\x00"]
)
def test_no_error_has_the_address_in_it(url: str) -> None:
    """The address of a webhook is often its secret."""
    said = Hook("p", url_env="URL").tell(EPISODE, "begun", {"URL": url}, NEVER)
    assert said is not None
    assert said.startswith(("not reached: ", "URL is not set"))
    assert "s3cret" not in said


def test_no_log_has_the_address_in_it(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """Not even when everything is logged."""
    with caplog.at_level(logging.DEBUG):
        assert Hook("p", url=receiver.url).tell(EPISODE, "begun", {}, NEVER) is None
    assert "s3cret" not in caplog.text


def test_a_secret_that_is_not_there_is_named() -> None:
    """By the variable, so that somebody can set it."""
    hook = Hook("p", url_env="URL", secret_env="KEY", header_env={"X": "AUTH"})
    assert hook.tell(EPISODE, "begun", {"URL": "http://127.0.0.1:1/"}, NEVER) == "KEY, AUTH is not set"


def test_a_command_reads_the_document(tmp_path: Path) -> None:
    """On its standard input, as ASCII, with event and kind in its environment; nothing that it prints is kept."""
    script = tmp_path / "hook.py"
    script.write_text(
        "import os, sys; print('secret'); open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())\n"
        "open(sys.argv[1] + '.env', 'w').write(os.environ['ORCHESTRATOR_ALERT_EVENT'] + os.environ['ORCHESTRATOR_ALERT_KIND'])"
    )
    hook = Hook("p", command=(sys.executable, str(script), str(tmp_path / "out")))
    assert hook.tell(EPISODE, "ended", os.environ, NEVER) is None
    body = (tmp_path / "out").read_bytes()
    assert json.loads(body)["event"] == "ended"
    assert b"\x1b" not in body
    assert b"\n" not in body
    assert (tmp_path / "out.env").read_text() == "endedno_worker"


def test_commands_that_fail(tmp_path: Path) -> None:
    """What is said is the exit code, or why it could not start; one that hangs is killed with all that it started."""

    def said(*command: str, timeout: float = 30.0, stop: threading.Event = NEVER) -> str | None:
        return Hook("p", command=command, timeout=timeout).tell(EPISODE, "begun", os.environ, stop)

    assert said("sh", "-c", "cat >&2; exit 3") == "the command ended with exit code 3"
    assert said(str(tmp_path / "nothing")) == "the command cannot be started: No such file or directory"
    mark = tmp_path / "pid"
    assert (
        said("sh", "-c", f"sleep 600 & echo $! > {mark}; wait", timeout=0.5) == "the command did not end within 0.5 s"
    )
    assert not Path(f"/proc/{mark.read_text().strip()}/cwd").exists()
    stop = threading.Event()
    stop.set()
    assert said("sleep", "600", stop=stop) == "stopped: the process ends"


# -- the configuration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("x", "alerts.hooks: expected tables"),
        ({"p": 1}, "alerts.hooks.p: expected a table"),
        ({"p": {}}, "expected one of command, url and url_env, found none of them"),
        ({"p": {"url": "https://a", "command": ["b"]}}, "found command and url"),
        ({"p": {"url": "s3cret"}}, "alerts.hooks.p.url: expected an address"),
        ({"p": {"url": 5}}, "alerts.hooks.p.url: expected a text"),
        ({"p": {"command": "mail ops"}}, "alerts.hooks.p.command: expected a list of texts, found a str"),
        ({"p": {"command": ["a"], "secret_env": "X"}}, "alerts.hooks.p.secret_env: is for webhooks"),
        ({"p": {"url": "https://a", "header_env": {"A": 1}}}, "alerts.hooks.p.header_env"),
        ({"p": {"url": "https://a", "kind": ["x"]}}, "unknown key 'alerts.hooks.p.kind'"),
        ({"p": {"url": "https://a", "kinds": ["no_workers"]}}, "there is no kind 'no_workers'"),
        ({"p": {"url": "https://a", "after": -1}}, "alerts.hooks.p.after: expected seconds from 0 to 86400"),
        ({"p": {"url": "https://a", "timeout": 1000}}, "alerts.hooks.p.timeout: expected seconds from 0.1 to 60"),
    ],
    ids=range(13),
)
def test_hooks_that_cannot_be(given: Any, words: str) -> None:
    """The key and what was expected; never a value that could be a secret."""
    with pytest.raises(InvalidInput) as refused:
        read_hooks(given)
    assert words in refused.value.message
    assert "s3cret" not in refused.value.message


# -- processes ----------------------------------------------------------------------------------------------------


def test_many_processes_tell_an_episode_once(
    made: Making, database_url: str, receiver: Receiver, wait_until: WaitUntil
) -> None:
    """Four alerters with the same hook: one POST when it begins, one when it is over."""
    made.add("scraper")
    with with_hooks(database_url, pager={"url": receiver.url}) as orc:
        alerters = [Alerter(orc, orc.hooks, every=0.0, pause=0.01) for _ in range(4)]
        for each in alerters:
            each.begin()
        try:
            wait_until(lambda: receiver.heard)
            wait_until(lambda: made.query("SELECT FROM alert_deliveries WHERE begun_told_at IS NOT NULL"))
            made.query("UPDATE tasks SET status = 'cancelled', finished_at = now()")

            def over() -> list[Any]:
                age_what_was_seen(made)
                return made.query("SELECT FROM alert_deliveries WHERE ended_told_at IS NOT NULL")

            wait_until(over)
        finally:
            for each in alerters:
                each.close(30)
    assert [each["event"] for each in receiver.documents()] == ["begun", "ended"]


def test_a_hook_that_fails_is_tried_again_and_given_up(
    made: Making, database_url: str, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """With growing pauses; the row says why, without the address; after the last try nobody tries again."""
    made.add("scraper")
    receiver.status = 503
    with with_hooks(database_url, pager={"url": receiver.url}) as orc:
        alerter = Alerter(orc, orc.hooks)
        for number in range(1, TRIES + 2):
            alerter.once()
            if number == 3:
                wait = made.query("SELECT extract(epoch FROM next_try_at - now()) FROM alert_deliveries")[0][0]
                assert 15 < wait < 21
            made.query("UPDATE alert_deliveries SET next_try_at = now()")
    assert len(receiver.heard) == TRIES
    (row,) = made.query("SELECT error, failures, gave_up_at FROM alert_deliveries")
    assert (row.error, row.failures) == ("answered with status 503", TRIES)
    assert row.gave_up_at is not None
    assert [record.levelname for record in caplog.records if "pager" in record.message] == ["WARNING", "ERROR"]
    assert "s3cret" not in caplog.text


def test_a_webhook_that_hangs_holds_no_work_up(
    made: Making, database_url: str, receiver: Receiver, wait_until: WaitUntil
) -> None:
    """While it does not answer, the worker claims, runs and records, and then it ends at once."""
    made.add("scraper")
    receiver.release.clear()
    with with_hooks(database_url, pager={"url": receiver.url, "timeout": 60}) as orc:
        with Working(Worker(orc, [FakeAgent("a")], 4, signals=False)):
            wait_until(lambda: receiver.heard)
            made.query("INSERT INTO tasks (agent) SELECT 'a' FROM generate_series(1, 50)")
            wait_until(lambda: made.query("SELECT count(*) FROM tasks WHERE status = 'done'")[0][0] == 50)
            assert len(receiver.heard) == 1
        receiver.release.set()
        wait_until(lambda: all(thread.name != "alerts" for thread in threading.enumerate()))


def test_a_worker_without_hooks_does_not_look(made: Making, database_url: str, wait_until: WaitUntil) -> None:
    """It costs nothing where nobody wants to hear; a standalone watchdog always looks, and says what it saw."""
    made.add("scraper")
    with with_hooks(database_url) as orc:
        gate = Gate()
        made.query("INSERT INTO tasks (agent) VALUES ('a')")
        with Working(Worker(orc, [FakeAgent(behave=gate)], signals=False)):
            gate.entered()
            gate.open()
        assert made.query("SELECT * FROM alert_looks") == []
        seen: list[tuple[str, str]] = []
        dog = Watchdog(orc, on_alert=lambda event, episode: seen.append((event, episode.alert.name)))
        thread = threading.Thread(target=dog.run)
        thread.start()
        try:
            wait_until(lambda: seen)
        finally:
            dog.stop()
            thread.join()
    assert seen == [("begun", "scraper")]


def test_the_watchdog_command_tells_once(cli: Cli, made: Making, tmp_path: Path) -> None:
    """``watchdog --once`` prints what began and runs the hooks; a second one has nothing new. No byte is for the terminal."""
    made.query("UPDATE workers SET renewing_since = renewing_since - interval '1 hour'")
    made.query("INSERT INTO tasks (agent) VALUES (:name)", name=HOSTILE)
    out = tmp_path / "heard"
    cli.config(f'[alerts.hooks.file]\ncommand = ["sh", "-c", "cat >> {out}; echo >> {out}"]\nafter = 0\n')
    said = cli("watchdog", "--once").err
    assert "alert no_worker: agent " in said
    assert all(byte not in said for byte in "\x1b\x07\r‮")
    assert len([line for line in said.splitlines() if line.startswith("alert no_worker")]) == 1
    assert "alert" not in cli("watchdog", "--once").err
    made.query("UPDATE tasks SET status = 'cancelled', finished_at = now()")
    age_what_was_seen(made)
    assert "alert no_worker is over: agent" in cli("watchdog", "--once").err
    heard = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["event"] for each in heard] == ["begun", "ended"]
    assert datetime.fromisoformat(heard[1]["ended_at"]) - datetime.fromisoformat(heard[0]["begun_at"]) > timedelta(0)
