"""Whether a configured agent could start here: its program, its directory, its secrets. Starts and imports nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agents.environment import environment
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.template import placeholders


def obstacles(given: AgentDefinition, own: Mapping[str, str]) -> list[tuple[str, str]]:
    """What would stop the agent of *given* in a process with the environment *own*: pairs of fault and remedy."""
    around = environment(given, own)
    base = Path(given.base_dir or Path.cwd())
    folder = base if given.dir is None else base / Path(given.dir).expanduser()
    found: list[tuple[str, str]] = []
    if given.dir is not None and not folder.is_dir():
        found.append((f"its directory {folder} does not exist", "make it, or correct dir"))
    if given.command is not None or given.acp is not None:
        program = _program(given)
        where = folder if given.dir is not None or given.workspace == "directory" else Path.cwd()
        if program is not None and not _found(program, around.variables.get("PATH"), where):
            found.append((f"its command {program} was not found", "install it, or correct command or PATH"))
    elif given.python is not None:
        module = given.python.partition(":")[0].partition(".")[0]
        if not _module(module, base):
            found.append((f"its module {module} was not found", "install it, or correct python"))
    elif given.plugin is not None:
        from orchestrator.agents.plugins import names

        if given.plugin not in (known := names()):
            told = ", ".join(known) or "none"
            found.append(
                (f"its plug-in {given.plugin} is not installed", f"install it, or correct plugin; there: {told}")
            )
    if given.acp is not None and importlib.util.find_spec("acp") is None:
        found.append(("the package agent-client-protocol is missing", 'pip install "orchestrator[acp]"'))
    for name in around.missing:
        found.append((f"its secret {name} is not set here", f"set {name} in the worker's environment"))
    return found


def _program(given: AgentDefinition) -> str | None:
    """The program that is started; None when that is known with the task only."""
    if given.shell:
        return "/bin/sh"
    command = given.command or given.acp
    first = command if isinstance(command, str) else command[0] if command else ""
    return None if placeholders(first) else first


def _found(program: str, path: str | None, folder: Path) -> bool:
    if os.sep in program:
        return os.access(folder / program, os.X_OK)
    return shutil.which(program, path=path) is not None


def _module(name: str, base: Path) -> bool:
    if (base / name).is_dir() or (base / f"{name}.py").is_file():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


__all__ = ["obstacles"]
