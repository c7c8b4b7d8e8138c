"""The command line in tests: ``main`` called in this process, with what it printed and its exit code."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Characters that must not reach a terminal out of data; newline and tab are ours."""

CONFIG = """
[agents.coder]
command = ["cat"]

[agents.review]
command = ["sh", "-c", "echo reviewed"]

[agents.broken]
command = ["sh", "-c", "echo cannot >&2; exit 77"]
"""


@dataclass(frozen=True)
class Said:
    """What one call printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout, parsed strictly: nothing beside it, no NaN, ASCII only."""
        return strict(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the document."""
        error = self.json["error"]
        assert isinstance(error, dict)
        assert {"code", "message", "hint"} <= error.keys()
        return error


def strict(text: str) -> Any:
    """Parse *text* as one JSON document in ASCII without control characters or NaN."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    assert text.isascii(), text
    assert not CONTROL.search(text), repr(text)
    return json.loads(text, parse_constant=refuse)


class Cli:
    """Calls ``orchestrator.cli.app.main`` with a database and, unless a test writes another, a configuration."""

    def __init__(
        self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.url = url
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.config(CONFIG)
        monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", url)
        monkeypatch.setenv("ORCHESTRATOR_ACTOR", "ops")

    def config(self, text: str) -> None:
        """Write orchestrator.toml."""
        (self.folder / "orchestrator.toml").write_text(text)

    def write(self, name: str, text: str) -> str:
        """Write a file; return its name."""
        (self.folder / name).write_text(text)
        return name

    def __call__(self, *arguments: str, code: int | None = 0, stdin: bytes = b"") -> Said:
        """Run a command; with *code* its exit code must be that."""
        from orchestrator.cli.app import main

        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        self._capsys.readouterr()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            found = main(list(arguments))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        out, err = self._capsys.readouterr()
        said = Said(found, out, err)
        assert code is None or found == code, said
        return said

    def add(self, *arguments: str) -> int:
        """Add a task; return its id."""
        id_ = self("add", *(arguments or ("coder",)), "--json").json["id"]
        assert isinstance(id_, int)
        return id_


def environment(url: str | None, **more: str) -> dict[str, str]:
    """The environment of a real process of the command line: nothing of ours but the home of this test run."""
    home = "ORCHESTRATOR_HOME"
    env = {name: text for name, text in os.environ.items() if name == home or not name.startswith("ORCHESTRATOR_")}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    if url is not None:
        env["ORCHESTRATOR_DATABASE_URL"] = url
    return env | more


def start(
    *arguments: str, url: str | None, cwd: Path, env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start a real process of the command line; stdin is closed to it unless said otherwise."""
    options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        env=environment(url, **(env or {})),
        cwd=cwd,
        text=True,
        **options,
    )


def process(*arguments: str, url: str | None, cwd: Path, env: dict[str, str] | None = None, **options: Any) -> Said:
    """Run a real process of the command line to its end."""
    running = start(*arguments, url=url, cwd=cwd, env=env, **options)
    out, err = running.communicate(timeout=180)
    return Said(running.returncode, out or "", err or "")


__all__ = ["CONFIG", "CONTROL", "ROOT", "Cli", "Said", "environment", "process", "start", "strict"]
