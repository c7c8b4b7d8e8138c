"""How a child process finds the function of an agent: by its name where it has one, else by value.

A function at the top of an importable module is found by name. One inside another function, or in the main script, is
sent by value with what it uses, so that the script is not run a second time. Only if that cannot be, and the script has
its ``__main__`` guard, does the child load it under another name, as ``multiprocessing`` does.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from orchestrator.agents.functions import AgentFunction, where
from orchestrator.errors import InvalidInput


def _importable(function: Any) -> bool:
    """Whether a child that imports the module finds the same function under the same name."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found: Any = module
    for name in str(getattr(function, "__qualname__", "<none>")).split("."):
        found = getattr(found, name, None)
    if isinstance(found, AgentFunction):
        found = found.function
    return module is not None and found is function


def _file(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return str(Path(path).resolve()) if path else None


def _main() -> dict[str, str | None]:
    """What a child must run to have the main script's definitions."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name:
        return {"name": spec.name, "path": None}
    return {"name": None, "path": _file("__main__")}


def _guarded(path: str | None) -> bool:
    """Whether a script says what is only for its own run: ``if __name__ == "__main__":``."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError):
        for statement in ast.parse(Path(path or "").read_bytes()).body:
            if isinstance(statement, ast.If) and any(
                isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
            ):
                return True
    return False


def directions(function: Callable[..., Any]) -> dict[str, Any]:
    """What a child needs to load *function*, as JSON; InvalidInput if nothing would lead it there."""
    module = str(getattr(function, "__module__", None))
    importable = _importable(function)
    if importable and module != "__main__":
        return {"main": None, "module": module, "file": _file(module), "names": function.__qualname__}
    try:
        return {"main": None, "value": b64encode(cloudpickle.dumps(function)).decode()}
    except Exception as error:  # whatever the objects that it uses raise when they are copied
        if importable and _guarded(_file("__main__")):
            return {"main": _main(), "path": f"__main__:{function.__qualname__}"}
        raise InvalidInput(
            f"{where(function)} runs in a child process but cannot be sent there: {error}",
            hint="define it in a module of its own, or make it async"
            + (', or put what starts the worker below `if __name__ == "__main__":`' if module == "__main__" else ""),
        ) from error
