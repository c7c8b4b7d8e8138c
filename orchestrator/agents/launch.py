"""What one execution of a command is started with: arguments, environment, directory, files; and the start itself.

A value never becomes syntax. In an argument vector each part stays one argument, whatever its values hold; in a shell
command, and in the text of ``sh -c``, the values are variables of the shell. What no program can be given is ``Refused``
in words that name the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.agents import processes
from orchestrator.agents.environment import Environment
from orchestrator.agents.git import PLACES
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Claim, Outcome
from orchestrator.domain.template import as_text, code_in, placeholders, render
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput

ARGUMENT_BYTES = 128 * 1024 - 1
"""Longest single argument or environment value that Linux passes to a program, without its NUL."""


class Refused(Exception):
    """This execution cannot be started, for a reason that another attempt would meet again (``status``)."""

    def __init__(self, cause: str, message: str, status: OutcomeClass = OutcomeClass.PERMANENT) -> None:
        super().__init__(message)
        self.outcome = Outcome(status=status, cause=cause, message=message)


@dataclass(slots=True)
class Start:
    """What one execution is started with, and the files made for it."""

    definition: AgentDefinition
    template: tuple[str, ...]
    claim: Claim
    session: str | None
    talks: bool = False
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    prompt: bytes = b""
    events: str = ""
    survived: bool = False
    _made: list[str] = field(default_factory=list)

    def prepare(self, around: Environment, directory: str | None) -> None:
        """Fill everything in; raise ``Refused`` for what cannot be given to a program."""
        claim, given = self.claim, self.definition
        text = "" if claim.input is None else as_text(claim.input)
        self.cwd = directory
        self.env = dict(around.variables)
        if given.workspace != "none":
            for name in PLACES:  # they would lead git away from the workspace
                if name not in given.env_set:
                    self.env.pop(name, None)
        self.events = self._events_file()
        workspace = self.cwd or os.getcwd()  # noqa: PTH109 - a text is wanted
        self.env.update(
            ORCHESTRATOR_TASK_ID=str(claim.task_id),
            ORCHESTRATOR_ATTEMPT=str(claim.attempt),
            ORCHESTRATOR_WORKSPACE=workspace,
            ORCHESTRATOR_EVENTS=self.events,
            ORCHESTRATOR_CHECKPOINTS=self._object("checkpoints"),
            ORCHESTRATOR_ANSWERS=self._object("answers"),
        )
        if claim.traceparent is not None:
            self.env["TRACEPARENT"] = claim.traceparent
        if self.session:
            self.env["ORCHESTRATOR_SESSION"] = self.session
        if "PWD" in self.env:
            self.env["PWD"] = workspace
        prompt = text
        if given.prompt == "file":
            prompt = self._file("prompt", _encoded(text))
            self.env["ORCHESTRATOR_PROMPT"] = prompt
        elif given.prompt == "stdin":
            self.prompt = _encoded(text)
        values: dict[str, Any] = {
            "prompt": prompt,
            "id": claim.task_id,
            "attempt": claim.attempt,
            "title": claim.title or "",
            "name": claim.name or "",
            "workspace": workspace,
            "session": self.session or "",
            **claim.params,
        }
        try:
            self.argv = self._shell(values) if given.shell else self._arguments(values)
        except InvalidInput as error:
            raise Refused("bad_template", f"agent {given.name!r}: command: {error}") from None
        self._check()

    def _arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Each part of the command becomes exactly one argument, whatever its values hold.

        A part that names ``{session}`` is left out when there is no session, with the option right before it.
        """
        parts: list[str] = []
        named = False
        code, shell = code_in(self.template) or (-1, False)
        for at, part in enumerate(self.template):
            names = placeholders(part)
            named = named or "prompt" in names
            if at == code and shell and names:  # of another language the plan let only numbers in: id and attempt
                parts.append(self._script(part, values)[0])
                continue
            if "session" in names and not values["session"]:
                if part == "{session}" and len(parts) > 1 and parts[-1].startswith("-"):
                    parts.pop()
                continue
            parts.append(render(part, values))
        if self.definition.prompt != "stdin" and not named:
            parts.append(str(values["prompt"]))
        return parts

    def _shell(self, values: Mapping[str, Any]) -> list[str]:
        """The command goes to the shell as it stands in the file; values are its variables, never its syntax."""
        script, used = self._script(self.template[0], values)
        named = any(reference.split(".")[0] == "prompt" for reference in used)
        if self.definition.prompt != "stdin" and not named:
            self.env["ORCHESTRATOR_PROMPT"] = str(values["prompt"])
        return ["/bin/sh", "-c", script]

    def _script(self, template: str, values: Mapping[str, Any]) -> tuple[str, list[str]]:
        script, used = shell_script(template)
        for variable, reference in used.items():
            self.env[variable] = render("{" + reference + "}", values)
        return script, list(used.values())

    def _check(self) -> None:
        """Refuse what the system would refuse, in words that name the remedy."""
        added = [(f"variable {name}", self.env[name]) for name in self.env if name.startswith("ORCHESTRATOR_")]
        for kind, value in [*(("argument", each) for each in self.argv), *added]:
            if "\0" in value:
                raise Refused("bad_input", f"{kind} holds a NUL character, which no program can be given")
            if len(value) > ARGUMENT_BYTES // 4 and len(_encoded(value)) > ARGUMENT_BYTES:
                raise Refused(
                    "argument_too_long",
                    f"{kind} has {len(_encoded(value)):,} bytes, but the system passes at most {ARGUMENT_BYTES:,} in one;"
                    f" set prompt: stdin or prompt: file for agent {self.definition.name!r}",
                )

    def spawn(self, mark: str) -> processes.ProcessTree:
        """Start the command; raise ``Refused`` when it cannot be started."""
        try:
            return processes.spawn(
                self.argv, env=self.env, mark=mark, cwd=self.cwd, stdin=self.talks or bool(self.prompt)
            )
        except OSError as error:
            raise self._refusal(error) from error
        except ValueError as error:
            raise Refused("bad_input", f"the command cannot be started: {error}") from error

    def _refusal(self, error: OSError) -> Refused:
        program, agent = self.argv[0], f"agent {self.definition.name!r}"
        if self.cwd is not None and error.filename == self.cwd:
            told = {errno.ENOENT: "does not exist", errno.ENOTDIR: "is not a directory"}.get(
                error.errno or 0, f"cannot be entered ({error.strerror})"
            )
            return Refused("directory_missing", f"{agent}: directory {self.cwd} {told}; correct its dir")
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            told = "was not found; install it, or correct its command"
            if "/" in program and Path(self.cwd or "", program).is_file():
                told = "names an interpreter in its first line that is not there; install it, or correct that line"
            return Refused("command_not_found", f"{agent}: command {program!r} {told}")
        if error.errno == errno.EACCES:
            return Refused("command_not_executable", f"{agent}: command {program!r} may not be executed")
        if error.errno == errno.ENOEXEC:
            told = "is not a program of this machine and names no interpreter in its first line"
            return Refused("command_not_executable", f"{agent}: command {program!r} {told}")
        if error.errno == errno.E2BIG:
            total = sum(len(_encoded(each)) + 1 for each in self.argv)
            return Refused(
                "argument_too_long",
                f"{agent}: the arguments have {total:,} bytes, which together with the environment is more than the"
                " system passes to a program; set prompt: stdin or prompt: file",
            )
        # no memory, no descriptors, no processes: this worker's trouble, which may pass
        return Refused("spawn", f"{agent}: {program!r} could not be started: {error}", OutcomeClass.TRANSIENT)

    def _file(self, name: str, data: bytes) -> str:
        """Make a private file for this execution and return its path."""
        claim = self.claim
        path = f"{processes.keeper().directory}/{name}-{claim.task_id}-{claim.attempt}-{os.urandom(4).hex()}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        self._made.append(path)
        return path

    def _events_file(self) -> str:
        """Return an empty file for events: one that an earlier execution left untouched, else a new one."""
        spare = processes.keeper().empty_files
        if spare:
            return spare.pop()
        path = f"{processes.keeper().directory}/events-{os.urandom(6).hex()}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return path

    def _put_back_events(self) -> None:
        """Keep the events file for the next execution if nobody has touched it, else remove it."""
        path = self.events
        if not path:
            return
        with contextlib.suppress(OSError):
            now = os.lstat(path)
            if (
                now.st_size == 0
                and now.st_nlink == 1
                and stat.S_IMODE(now.st_mode) == 0o600
                and stat.S_ISREG(now.st_mode)
            ):
                processes.keeper().empty_files.append(path)
            else:
                os.unlink(path)  # noqa: PTH108

    def _object(self, name: str) -> str:
        """Return a file with the claim's object of this *name* (checkpoints, answers); one empty one serves all."""
        held = getattr(self.claim, name, None)
        if held:
            return self._file(name, _encoded(json.dumps(held, ensure_ascii=False)))
        keep = processes.keeper()
        if "none" not in keep.files:
            path = f"{keep.directory}/none.json"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o400), "wb") as file:  # noqa: PTH123
                file.write(b"{}\n")
            keep.files["none"] = path
        return keep.files["none"]

    def clean(self) -> None:
        """Remove the files of this execution. Only when nothing of it runs any more."""
        self._put_back_events()
        for path in self._made:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - one call for each task; a Path costs more than the call


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_SHELL_PART = re.compile(
    r"\{\{[A-Za-z_][\w.-]*\}\}|\{[A-Za-z_][\w-]*(?:\.[\w-]+)*\}|\\.|'|\"|\$\(|\(|\)|`|.", re.DOTALL | re.ASCII
)


def shell_script(template: str) -> tuple[str, dict[str, str]]:
    """Return a shell template with variables for placeholders, and which variable stands for which reference.

    The value of a placeholder reaches the shell as the value of a variable, expanded once and never read as syntax.
    The expansion is quoted to fit where the placeholder stands: bare, in double or in single quotes.
    """
    parts: list[str] = []
    used: dict[str, str] = {}
    states: list[str] = [""]
    for found in _SHELL_PART.finditer(template):
        part = found.group()
        state = states[-1]
        if len(part) > 2 and part[0] == "{":
            references = placeholders(part)
            if not references:
                parts.append(part[1:-1])
                continue
            variable = next((name for name, each in used.items() if each == references[0]), None)
            if variable is None:
                variable = f"ORCHESTRATOR_VALUE_{len(used) + 1}"
                used[variable] = references[0]
            expansion = "${" + variable + "}"
            parts.append({"": f'"{expansion}"', '"': expansion, "'": f"'\"{expansion}\"'"}[state])
            continue
        parts.append(part)
        if state == "'":
            if part == "'" or part == "\\'":
                states.pop()
        elif part in ("'", '"'):
            if part == state:
                states.pop()
            elif part == '"' or not state:
                states.append(part)
        elif part == "$(" or (part == "(" and not state):
            states.append("")
        elif part == ")" and not state and len(states) > 1:
            states.pop()
    return "".join(parts), used
