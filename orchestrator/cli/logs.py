"""``logs``: what the attempts of a task said, as it is stored or as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options, printing, state
from orchestrator.cli.options import IdArgument
from orchestrator.errors import InvalidInput, OrchestratorError

if TYPE_CHECKING:
    from orchestrator.dashboard.frame import Line
    from orchestrator.repositories.events import Event
    from orchestrator.service import Orchestrator

FOLLOW_SECONDS = 0.5
"""Seconds between two looks of ``-f``."""
PAGE = 2_000
"""Pieces that are read at once."""
STREAMS = ("stdout", "stderr")
"""What the agent wrote; pieces of other kinds are what was read from it."""


def logs(
    context: typer.Context,
    task_id: IdArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the task has ended, over retries.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", min=1, help="This attempt, else the last.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Its stdout and stderr as they are, controls included.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last N lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each piece, one a line.")] = False,
) -> None:
    """Print what an attempt said.

    \b
    Examples:
      orchestrator logs 7 --tail 50
      orchestrator logs 7 -f
      orchestrator logs 7 --attempt 1 --json
    """
    own = state.of(context, as_json)
    wanted = options.number(task_id, "task")
    if raw and as_json:
        raise InvalidInput("give either --raw or --json, not both: JSON has every character already")
    with own.open() as orchestrator:
        _Log(orchestrator, wanted, as_json=as_json, raw=raw).print(attempt, tail, follow)


class _Log:
    """Prints transcripts of one task."""

    def __init__(self, orchestrator: Orchestrator, task_id: int, *, as_json: bool, raw: bool) -> None:
        from orchestrator.dashboard.show import LogLines
        from orchestrator.dashboard.terminal import is_terminal, look_for

        self._orchestrator = orchestrator
        self._id = task_id
        self._json, self._raw = as_json, raw
        self._look = look_for(sys.stdout)
        self._framed = is_terminal(sys.stdout) and not raw and not as_json
        self._lines = LogLines(self._look)
        self._away = False

    def print(self, attempt: int | None, tail: int | None, follow: bool) -> None:
        task = self._orchestrator.reading.task(self._id)
        current = int(task["attempt"]) if attempt is None else attempt
        if attempt is not None and attempt > int(task["attempt"]):
            had = f"has had {task['attempt']}" if task["attempt"] else "has not been started yet"
            raise InvalidInput(f"task {self._id} has no attempt {attempt}: it {had}", task=self._id, attempt=attempt)
        if not current and not follow:
            printing.note(f"task {self._id} has not been started yet ({task['status']})")
            return
        last = -1
        if current:
            self._head(task, current)
            last = self._replay(current, tail)
        if follow:
            self._follow(current, last, attempt is not None)
        else:
            self._foot(current)

    def _replay(self, attempt: int, tail: int | None) -> int:
        """Print what there is; return the place of its last piece."""
        if tail is not None:
            return self._print_tail(attempt, tail)
        last = -1
        while True:
            events = self._orchestrator.events.of_attempt(self._id, attempt, after=last, limit=PAGE)
            self._emit(attempt, events)
            if not events:
                return last
            last = events[-1].seq

    def _print_tail(self, attempt: int, tail: int) -> int:
        events = self._orchestrator.events.last(self._id, attempt, max(200, tail * 2)) if tail else []
        last = events[-1].seq if events else -1
        if self._json:
            self._emit(attempt, events[-tail:] if tail else [])
            return last
        if self._raw:
            events = [event for event in events if event.kind in STREAMS]
        whole = "".join(e.text if e.kind in STREAMS else e.text.rstrip("\n") + "\n" for e in events)
        kept = "".join(whole.splitlines(keepends=True)[-tail:]) if tail else ""
        if self._raw:
            printing.raw(kept)
        else:
            printing.lines(self._lines.add("stdout", kept) + self._lines.rest())
        sys.stdout.flush()
        if not tail:
            newest = self._orchestrator.events.last(self._id, attempt, 1)
            last = newest[-1].seq if newest else -1
        return last

    def _follow(self, attempt: int, last: int, only_this: bool) -> None:
        """Print what comes until the task, or the one attempt that was asked for, has ended."""
        while True:
            try:
                task = self._orchestrator.reading.task(self._id)
                if attempt:
                    while events := self._orchestrator.events.of_attempt(self._id, attempt, after=last, limit=PAGE):
                        self._emit(attempt, events)
                        last = events[-1].seq
                self._back()
            except OrchestratorError as error:
                if error.exit_code != 6:
                    raise
                self._lost(error.message)
                time.sleep(1.0)
                continue
            except Exception as error:
                from orchestrator.database.transient import classify, reason

                if classify(error) is None:
                    raise
                self._lost(reason(error))
                time.sleep(1.0)
                continue
            # The task was read first: what is there of an attempt that had ended by then is all of it.
            newest = int(task["attempt"])
            over = task["status"] in ("done", "failed", "cancelled")
            if newest > attempt and not (only_this and attempt):
                if attempt:
                    self._foot(attempt)
                attempt, last = attempt + 1, -1
                self._head(task, attempt)
                continue
            if over or (only_this and (newest > attempt or task["status"] != "running")):
                if attempt:
                    self._foot(attempt)
                return
            time.sleep(FOLLOW_SECONDS)

    def _lost(self, why: str) -> None:
        if not self._away:
            self._away = True
            printing.note(f"database away: {why}; trying again")

    def _back(self) -> None:
        if self._away:
            self._away = False
            printing.note("database back")

    def _emit(self, attempt: int, events: Sequence[Event]) -> None:
        if self._json:
            for event in events:
                printing.json_line(
                    {
                        "task_id": self._id,
                        "attempt": attempt,
                        "seq": event.seq,
                        "kind": event.kind,
                        "at": event.at.astimezone(UTC).isoformat(),
                        "bytes": event.bytes,
                        "text": event.text,
                    }
                )
            return
        if self._raw:
            printing.raw("".join(event.text for event in events if event.kind in STREAMS))
        else:
            from orchestrator.dashboard.show import logs_gap

            drawn: list[Line] = []
            for event in events:
                if event.kind == "dropped":
                    drawn += [*self._lines.rest(), logs_gap(event.bytes or 0, self._look)]
                else:
                    drawn += self._lines.add(event.kind, event.text)
            printing.lines(drawn)
        if events:
            sys.stdout.flush()

    def _head(self, task: Mapping[str, Any], attempt: int) -> None:
        if self._framed:
            from orchestrator.dashboard.show import logs_head

            printing.lines([logs_head(task, self._run(attempt), attempt, datetime.now(UTC), self._look)])

    def _foot(self, attempt: int) -> None:
        if not self._json and not self._raw:
            printing.lines(self._lines.rest())
        if self._framed and (run := self._run(attempt)) is not None:
            from orchestrator.dashboard.show import logs_end

            printing.lines([logs_end(run, self._look)])
        sys.stdout.flush()

    def _run(self, attempt: int) -> dict[str, Any] | None:
        return next((run for run in self._orchestrator.reading.runs(self._id) if run["attempt"] == attempt), None)
