"""Surveys of the files around this one. A command agent like any other: it knows nothing of orchestrator but its variables.

    python3 survey.py size | functions | imports | links    (links reads names of documents from standard input)

The answer is one JSON object on standard output; what it is doing goes to standard error; progress goes, as JSON lines, to
the file that ORCHESTRATOR_EVENTS names. Only reads, needs Python 3.8 and nothing else.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent if (HERE.parent / "pyproject.toml").is_file() else HERE
SKIP = {"__pycache__", "node_modules", "build", "dist", "venv"}
MOST_FILES = 2_000
BUSY = 75
"""Exit code for: not now, try again."""


def say(text: str) -> None:
    """Write a line for the log."""
    print(text, file=sys.stderr, flush=True)


def progress(percent: float, message: str) -> None:
    """Tell how far this is; works without orchestrator as well."""
    events = os.environ.get("ORCHESTRATOR_EVENTS")
    if events:
        with open(events, "a", encoding="utf-8") as file:
            file.write(json.dumps({"type": "progress", "percent": round(percent), "message": message}) + "\n")


def walk(suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files with these suffixes in a fixed order; nothing hidden, no links, no more than MOST_FILES."""
    found: list[Path] = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIP)
        for name in sorted(files):
            path = Path(folder, name)
            if name.endswith(suffixes) and not name.startswith(".") and not path.is_symlink():
                found.append(path)
    return found[:MOST_FILES]


def texts(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file that can be read, at a pace that can be watched."""
    pause = float(os.environ.get("SURVEY_SECONDS", "0")) / max(len(paths), 1)
    for number, path in enumerate(paths):
        name = path.relative_to(ROOT).as_posix()
        progress(100 * number / len(paths), name)
        time.sleep(pause)
        try:
            yield name, path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            say(f"left out {name}: {error.strerror}")


def size() -> dict[str, Any]:
    """Lines of each kind of file, and the longest files."""
    kinds: dict[str, dict[str, int]] = {}
    lines: dict[str, int] = {}
    for name, text in texts(walk((".py", ".md", ".sql", ".toml", ".yaml"))):
        kind = kinds.setdefault(Path(name).suffix, {"files": 0, "lines": 0})
        lines[name] = text.count("\n")
        kind["files"] += 1
        kind["lines"] += lines[name]
        say(f"{lines[name]:6} {name}")
    longest = sorted(lines, key=lambda name: (-lines[name], name))[:5]
    return {"kinds": dict(sorted(kinds.items())), "longest": [{"file": name, "lines": lines[name]} for name in longest]}


def functions() -> dict[str, Any]:
    """How many functions there are, how many say what they do, and the longest ones."""
    found: list[tuple[int, str]] = []
    documented = 0
    for name, text in texts(walk((".py",))):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            say(f"left out {name}: {error}")
            continue
        here = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        documented += sum(ast.get_docstring(node) is not None for node in here)
        found.extend(((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.name}") for node in here)
        say(f"{len(here):4} functions in {name}")
    found.sort(key=lambda each: (-each[0], each[1]))
    longest = [{"function": name, "lines": lines} for lines, name in found[:5]]
    return {"functions": len(found), "documented": documented, "longest": longest}


def imports() -> dict[str, Any]:
    """Which packages are imported, and by how many files. The first attempt finds them busy."""
    if os.environ.get("ORCHESTRATOR_ATTEMPT") == "1":
        say("the list of packages is busy; try again in a moment")
        sys.exit(BUSY)
    files: dict[str, int] = {}
    for name, text in texts(walk((".py",))):
        roots = set(re.findall(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", text, re.MULTILINE))
        for root in roots:
            files[root] = files.get(root, 0) + 1
        say(f"{len(roots):4} packages in {name}")
    standard: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset())
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()} | {path.stem for path in HERE.glob("*.py")}
    most = sorted((name for name in files if name not in standard and name not in ours), key=lambda n: (-files[n], n))
    return {"packages": len(files), "foreign": {name: files[name] for name in most[:8]}}


def links() -> dict[str, Any]:
    """Which links lead nowhere, in the documents and folders that standard input names."""
    wanted = sys.stdin.read().split()
    names = [(path.relative_to(ROOT).as_posix(), path) for path in walk((".md",))]
    paths = [path for name, path in names if any(name == each or name.startswith(each + "/") for each in wanted)]
    broken: list[str] = []
    count = 0
    for name, text in texts(paths):
        targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
        count += len(targets)
        broken.extend(f"{name}: {target}" for target in targets if not (ROOT / name).parent.joinpath(target).exists())
        say(f"{len(targets):4} links in {name}")
    return {"documents": len(paths), "links": count, "broken": broken[:20]}


if __name__ == "__main__":
    survey = {"size": size, "functions": functions, "imports": imports, "links": links}.get("".join(sys.argv[1:]))
    if survey is None:
        sys.exit("usage: survey.py size | functions | imports | links")
    json.dump(survey(), sys.stdout, indent=1)
    progress(100, "done")
