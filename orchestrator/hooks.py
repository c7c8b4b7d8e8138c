"""Hooks: who is told of alerts, by a command or a webhook. Reading the configuration, signing, and one delivery.

    [alerts.hooks.pager]
    url_env = "PAGER_URL"              # or url = "https://..."
    secret_env = "PAGER_SECRET"        # signs each delivery
    [alerts.hooks.mail]
    command = ["mail", "-s", "orchestrator", "ops"]

Both get the alert as JSON: a command on its standard input, a webhook as the body of a POST. Secrets are named, never
written here: they are read from the environment when they are needed, and no error or log line of ours has one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import field
from typing import Any

from orchestrator.domain.alerts import ORDER
from orchestrator.domain.shapes import episode_json
from orchestrator.domain.snapshot import Episode
from orchestrator.domain.values import value
from orchestrator.errors import InvalidInput, did_you_mean
from orchestrator.settings import __version__

TIMEOUT, LONGEST = 10.0, 60.0
"""Seconds that one delivery may take: by default, and at most."""
AFTER = 15.0
"""Seconds that an alert must have gone on before a hook hears of it."""

EVENT, DELIVERY = "Orchestrator-Event", "Orchestrator-Delivery"
TIMESTAMP, SIGNATURE = "Orchestrator-Timestamp", "Orchestrator-Signature"

_KEYS = ("command", "url", "url_env", "secret_env", "header_env", "kinds", "after", "timeout")


@value
class Hook:
    """One hook as it is configured; exactly one of ``command``, ``url``, ``url_env`` is set."""

    name: str
    command: tuple[str, ...] | None = None
    url: str | None = None
    url_env: str | None = None
    secret_env: str | None = None
    header_env: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] | None = None
    after: float = AFTER
    timeout: float = TIMEOUT

    def missing(self, env: Mapping[str, str]) -> list[str]:
        """The names of variables that it needs and *env* does not have."""
        wanted = [self.url_env, self.secret_env, *self.header_env.values()]
        return [name for name in wanted if name is not None and not env.get(name)]

    def tell(self, episode: Episode, event: str, env: Mapping[str, str], stop: threading.Event) -> str | None:
        """Deliver that *episode* has ``begun`` or ``ended``; return None, or what went wrong, without secrets.

        Blocks for at most ``timeout`` seconds or so; *stop* ends a command early.
        """
        if missing := self.missing(env):
            return f"{', '.join(missing)} is not set"
        # ASCII: a command may well print it, and no byte of it must mean something to a terminal.
        body = json.dumps(episode_json(episode, event), ensure_ascii=True).encode()
        if self.command is not None:
            return _run(self.command, body, _about(episode, event, env), self.timeout, stop)
        return self._post(body, event, f"{episode.id}-{event}", env)

    def _post(self, body: bytes, event: str, delivery: str, env: Mapping[str, str]) -> str | None:
        import httpx

        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"orchestrator/{__version__}",
            EVENT: event,
            DELIVERY: delivery,
            **{name: env[variable] for name, variable in self.header_env.items()},
        }
        if self.secret_env is not None:
            now = int(time.time())
            headers[TIMESTAMP] = str(now)
            headers[SIGNATURE] = signature(env[self.secret_env], now, body)
        url = self.url if self.url_env is None else env[self.url_env]
        with _silent():
            try:
                # Not followed: a redirect would carry headers and body to somebody who was not named.
                with (
                    httpx.Client(timeout=self.timeout, follow_redirects=False) as client,
                    client.stream("POST", url or "", content=body, headers=headers) as answer,
                ):
                    status = answer.status_code
            except httpx.TimeoutException:
                return f"no answer within {self.timeout:g} s"
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                # Its text may have the URL in it, which is often a secret itself.
                return f"not reached: {type(error).__name__}"
        return None if 200 <= status < 300 else f"answered with status {status}"


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """``v1=`` and the HMAC-SHA256, in hex, of the timestamp's digits, a dot and the body."""
    return "v1=" + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


def _about(episode: Episode, event: str, env: Mapping[str, str]) -> dict[str, str]:
    return {
        **env,
        "ORCHESTRATOR_ALERT_EVENT": event,
        "ORCHESTRATOR_ALERT_KIND": episode.alert.kind,
        "ORCHESTRATOR_ALERT_EPISODE": str(episode.id),
    }


def _run(
    command: Sequence[str], body: bytes, env: Mapping[str, str], timeout: float, stop: threading.Event
) -> str | None:
    """Run *command* with *body* on its standard input; what it prints is not kept: it could be anything."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"the command cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"
    assert process.stdin is not None
    # A body is smaller than a pipe's buffer: this does not wait for the command.
    with contextlib.suppress(OSError), process.stdin as pipe:
        pipe.write(body)
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline and not stop.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    late = process.poll() is None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if late:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if late:
        return "stopped: the process ends" if stop.is_set() else f"the command did not end within {timeout:g} s"
    return None if code == 0 else f"the command ended with exit code {code}"


_quiet: ContextVar[bool] = ContextVar("_quiet", default=False)


class _WithoutUrls(logging.Filter):
    """httpx logs each URL; those of hooks are secrets often enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _quiet.get()


_FILTER = _WithoutUrls()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    for name in ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy"):
        logging.getLogger(name).addFilter(_FILTER)  # the same one again is not added twice
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


# -- the configuration --------------------------------------------------------------------------------------------


def read_hooks(table: Any) -> tuple[Hook, ...]:
    """Return the hooks of ``[alerts.hooks]``. Raises InvalidInput that names the key."""
    if not isinstance(table, Mapping):
        raise InvalidInput(f"alerts.hooks: expected tables like [alerts.hooks.NAME], found {table!r}")
    return tuple(_read(str(name), given) for name, given in table.items())


def _read(name: str, given: Any) -> Hook:
    where = f"alerts.hooks.{name}"
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{where}: expected a table, found {given!r}")
    for key in given:
        if key not in _KEYS:
            raise InvalidInput(f"unknown key '{where}.{key}'{did_you_mean(str(key), _KEYS)}")
    values: dict[str, Any] = dict(given)
    ways = [key for key in ("command", "url", "url_env") if key in values]
    if len(ways) != 1:
        found = f"{' and '.join(ways)}" if ways else "none of them"
        raise InvalidInput(f"{where}: expected one of command, url and url_env, found {found}")
    if "command" in values:
        values["command"] = _texts(f"{where}.command", values["command"])
        if other := [key for key in ("secret_env", "header_env") if key in values]:
            raise InvalidInput(f"{where}.{other[0]}: is for webhooks, not for a command")
    for key in ("url", "url_env", "secret_env"):
        if key in values and not (isinstance(values[key], str) and values[key]):
            raise InvalidInput(f"{where}.{key}: expected a text, found {_kind(values[key])}")
    if "url" in values and not values["url"].startswith(("https://", "http://")):
        raise InvalidInput(f"{where}.url: expected an address that begins with https:// or http://")
    headers = values.get("header_env", {})
    if not isinstance(headers, Mapping) or not all(isinstance(each, str) and each for each in headers.values()):
        raise InvalidInput(f"{where}.header_env: expected a table of header names and variables")
    if "kinds" in values:
        values["kinds"] = _texts(f"{where}.kinds", values["kinds"])
        for kind in values["kinds"]:
            if kind not in ORDER:
                raise InvalidInput(f"{where}.kinds: there is no kind {kind!r}{did_you_mean(kind, ORDER)}")
    _seconds(f"{where}.after", values.get("after", AFTER), 0.0, 86_400.0)
    _seconds(f"{where}.timeout", values.get("timeout", TIMEOUT), 0.1, LONGEST)
    return Hook(name, **values)


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(each, str) and each for each in value):
        raise InvalidInput(f"{where}: expected a list of texts, found {_kind(value)}")
    return tuple(value)


def _seconds(where: str, value: Any, least: float, most: float) -> None:
    well = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not well or not least <= value <= most:
        raise InvalidInput(f"{where}: expected seconds from {least:g} to {most:g}, found {_kind(value)}")


def _kind(value: Any) -> str:
    # What stands at the wrong key may be the secret itself.
    return f"a {type(value).__name__}" if isinstance(value, (str, bytes)) else repr(value)


__all__ = ["DELIVERY", "EVENT", "SIGNATURE", "TIMESTAMP", "Hook", "read_hooks", "signature"]
