"""Outcomes that could not be recorded before the process had to end, as files that the next worker here offers again.

One file an outcome, below the home directory, apart for each database. Files are private and appear whole (written under
another name, synced, renamed). A file is taken by one process at a time (an flock that ends with its holder), and
removed once the database has answered; the fence alone decides what is still wanted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from orchestrator.database.embedded import home_directory
from orchestrator.database.engine import connection_parameters
from orchestrator.domain.asking import Ask, QuestionKind
from orchestrator.domain.outcome import Budget, Claim, Outcome, RetryPolicy, TranscriptSize, Usage
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.repositories.events import Piece
from orchestrator.repositories.runs import Ended

log = logging.getLogger(__name__)

VERSION = 1


class Spool:
    """The files of one database. Nothing is created before there is something to keep."""

    def __init__(self, url: str, home: Path | None = None) -> None:
        self.directory = (home or home_directory()) / "spool" / _database(url)

    def keep(self, ended: Ended, pieces: Iterable[Piece] = ()) -> Path:
        """Write one outcome, with what of its transcript was not written; on disk when it returns. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        claim = ended.claim
        path = self.directory / f"{claim.task_id}-{claim.attempt}-{uuid4().hex[:8]}.json"
        draft = path.with_suffix(".new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_packed(ended, list(pieces)))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        except BaseException:
            draft.unlink(missing_ok=True)  # half a file on a full disk helps nobody
            raise
        _sync(self.directory)
        return path

    def offer(self, record: Callable[[Ended, list[Piece]], object]) -> int:
        """Call *record* for each outcome that no other process has taken; remove its file when that returns.

        What *record* raises ends the offering and leaves the rest for later. A file that cannot be read is moved aside
        with a line in the log. Returns how many were recorded.
        """
        offered = 0
        for path in self._files():
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(path.open("rb"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(file.fileno()).st_nlink == 0:
                        continue  # another process has just recorded it
                    data = file.read()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if not isinstance(error, BlockingIOError):
                        log.warning("cannot read the kept outcome %s: %s", path, error)
                    continue
                try:
                    ended, pieces = _unpacked(data)
                except (ValueError, TypeError, KeyError) as error:
                    self._set_aside(path, error)
                    continue
                record(ended, pieces)
                path.unlink(missing_ok=True)
                offered += 1
        return offered

    def _files(self) -> list[Path]:
        try:
            return sorted(self.directory.glob("*.json"))
        except OSError:
            return []

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_suffix(".unreadable")
        try:
            path.rename(aside)
        except OSError:
            aside = path
        log.error("a kept outcome cannot be read (%s); it was moved to %s", error, aside)


def _database(url: str) -> str:
    """A name for the database of *url*, without its password and the same for every spelling of its parameters."""
    parameters = connection_parameters(url)
    where = {name: str(parameters.get(name) or "") for name in ("host", "hostaddr", "port", "dbname", "service")}
    where["port"] = where["port"] or "5432"
    return hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()[:16]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot; the file itself is synced
    finally:
        os.close(descriptor)


# -- values as JSON, without a class of any module's name in them --------------------------------------------------


def _packed(ended: Ended, pieces: list[Piece]) -> bytes:
    value = {
        "version": VERSION,
        # What the agent was started with is not needed any more, and may be large.
        "claim": asdict(replace(ended.claim, answered=(), checkpoints={})),
        "outcome": asdict(ended.outcome),
        "worker": ended.worker,
        "host": ended.host,
        "pieces": [list(piece) for piece in pieces],
    }
    # repr() of what JSON has no form for: an agent's result must not be lost for it.
    return json.dumps(value, default=_plain).encode()


def _plain(value: object) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    return repr(value)


def _unpacked(data: bytes) -> tuple[Ended, list[Piece]]:
    value = json.loads(data)
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ValueError("it is of another version")
    claim, outcome = dict(value["claim"]), dict(value["outcome"])
    claim["claimed_by"] = UUID(claim["claimed_by"])
    for name in ("started_at", "limited_since"):
        claim[name] = _instant(claim[name])
    budget = dict(claim["budget"])
    claim["budget"] = Budget(**{**budget, "on_limit": OnLimit(budget["on_limit"])})
    claim["retry"] = RetryPolicy(**claim["retry"])
    outcome["status"] = OutcomeClass(outcome["status"])
    outcome["retry_at"] = _instant(outcome["retry_at"])
    outcome["usage"] = None if outcome["usage"] is None else Usage(**outcome["usage"])
    outcome["transcript"] = TranscriptSize(**outcome["transcript"])
    outcome["notes"] = tuple(outcome["notes"])
    outcome["variables"] = tuple(outcome.get("variables", ()))
    outcome["asks"] = tuple(_ask(each) for each in outcome.get("asks", ()))
    claim.pop("answered", None)
    return (
        Ended(Claim(**_known(Claim, claim)), Outcome(**_known(Outcome, outcome)), value["worker"], value["host"]),
        [Piece(*piece) for piece in value["pieces"]],
    )


def _known(kind: type[Claim] | type[Outcome] | type[Ask], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _ask(value: dict[str, Any]) -> Ask:
    changed = {"kind": QuestionKind(value["kind"]), "choices": tuple(value["choices"])}
    return Ask(**{**_known(Ask, value), **changed, "deadline": _instant(value["deadline"])})


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


__all__ = ["Spool"]
