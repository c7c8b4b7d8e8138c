"""The few things that workspaces ask of git: where a repository is, a worktree, what was changed in it.

Every call is one process with a time limit, without a terminal to ask at, and without the worker's own secrets. Commands
that look at a tree which an agent has worked in run neither its hooks nor its file-system monitor.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agents.environment import withheld
from orchestrator.domain.values import value

LIMIT = 600.0
"""Seconds that one call may take: a checkout of a large repository is slow."""

PLACES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_CEILING_DIRECTORIES",
)
"""Variables that point git at a repository whatever its directory is: a worker started by a hook has them."""


class GitFailed(Exception):
    """A call of git failed; ``message`` is the last thing that it said."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def passing(self) -> bool:
        """Whether the same call may well succeed later: no room, no memory, somebody else's lock."""
        return any(word in self.message for word in _PASSING)


_PASSING = (
    "No space left on device",
    "Disk quota exceeded",
    "Cannot allocate memory",
    "Resource temporarily unavailable",
    "Too many open files",
    "Input/output error",
    "Stale file handle",
    "index.lock",
    ".lock': File exists",
    "took longer than",
)


@value
class Repository:
    """A repository as a directory leads to it. ``prefix``: the way from the top of its checkout to that directory.

    ``head`` is the commit that is checked out (None: there is none yet), ``branch`` its branch (None: detached).
    """

    directory: str
    common: str
    bare: bool
    prefix: str
    head: str | None
    branch: str | None


@value
class Changes:
    """What a worktree holds beyond its base: commits, files that no commit has, and whether any branch has its head."""

    head: str | None
    branch: str | None
    commits: int
    uncommitted: tuple[str, ...]
    files: int
    insertions: int
    deletions: int
    safe: bool

    @property
    def none(self) -> bool:
        return not self.commits and not self.uncommitted


def run(directory: str, *arguments: str, quiet: bool = True, environ: Mapping[str, str] = os.environ) -> str:
    """Return what git says to *arguments* in *directory*. Raises GitFailed; FileNotFoundError where there is no git.

    *quiet* keeps hooks and monitors of the repository from being run.
    """
    env = {name: value for name, value in environ.items() if name not in PLACES and not withheld(name, value)}
    env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    calm = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null") if quiet else ()
    try:
        done = subprocess.run(
            ["git", *calm, *arguments],
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GitFailed(f"git {arguments[0]} took longer than {LIMIT:g} s") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        told = [line for line in said if line.startswith(("fatal:", "error:"))] or said
        raise GitFailed(told[-1] if told else f"git {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout.decode("utf-8", "surrogateescape")


def repository(directory: str) -> Repository:
    """Return the repository that *directory* lies in, a bare one too. Raises GitFailed."""
    bare, common = run(directory, "rev-parse", "--is-bare-repository", "--git-common-dir").rstrip("\n").split("\n", 1)
    prefix = "" if bare == "true" else run(directory, "rev-parse", "--show-prefix").rstrip("\n")
    head = attempt(directory, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    branch = attempt(directory, "symbolic-ref", "--quiet", "--short", "HEAD")
    top = str(Path(directory, common).resolve())
    return Repository(directory, top, bare == "true", prefix.rstrip("/"), head, branch)


def behind(where: Repository) -> tuple[int, str] | None:
    """By how many commits the checked out branch is behind the one that it follows, as last fetched; None: by none."""
    upstream = attempt(where.directory, "rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}")
    count = None if upstream is None else attempt(where.directory, "rev-list", "--count", "HEAD..@{upstream}")
    return None if upstream is None or count in (None, "0") else (int(count or 0), upstream)


def attempt(directory: str, *arguments: str) -> str | None:
    """As ``run``, without the line's end; None where git fails."""
    try:
        return run(directory, *arguments).rstrip("\n") or None
    except GitFailed:
        return None


def branch_name(where: Repository, name: str) -> str:
    """Return a free branch for the workspace *name*: below ``orchestrator/``, unless a branch of that name is in the way."""
    taken = attempt(where.directory, "show-ref", "--verify", "refs/heads/orchestrator") is not None
    return f"orchestrator-{name}" if taken else f"orchestrator/{name}"


def add_worktree(where: Repository, path: str, branch: str, base: str) -> None:
    """Make a worktree of commit *base* at *path* with the new *branch*. The repository's own hooks run, as for anybody."""
    run(where.directory, "worktree", "add", "--quiet", "--no-track", "-b", branch, path, base, quiet=False)


def changes(tree: str, base: str) -> Changes:
    """Say what the worktree *tree* holds beyond the commit *base*; ignored files do not count."""
    status = run(tree, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--ignore-submodules=none")
    uncommitted, entries = [], iter(status.split("\0"))
    for entry in entries:
        if not entry:
            continue
        uncommitted.append(entry[3:])
        if entry[0] in "RC":
            next(entries, None)  # where it came from
    head = attempt(tree, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    branch = attempt(tree, "symbolic-ref", "--quiet", "--short", "HEAD")
    commits = int(attempt(tree, "rev-list", "--count", f"{base}..HEAD") or 0) if head else 0
    files = insertions = deletions = 0
    for line in (attempt(tree, "diff", "--numstat", "--no-renames", base, "--") or "").splitlines():
        added, removed, _ = line.split("\t", 2)
        files += 1
        insertions += int(added) if added.isdecimal() else 0
        deletions += int(removed) if removed.isdecimal() else 0
    files += status.count("\0?? ") + status.startswith("?? ")
    safe = head is None or head == base or attempt(tree, "for-each-ref", "--count=1", "--contains", head) is not None
    return Changes(head, branch, commits, tuple(uncommitted), files, insertions, deletions, safe)


def remove_worktree(common: str, path: str, branch: str | None, base: str | None) -> str | None:
    """Remove the worktree at *path*, there or not, and *branch* if it holds nothing new; return the branch that stays.

    Refuses (GitFailed) what git finds dirty or locked.
    """
    attempt(common, "worktree", "remove", path) if not Path(path).exists() else run(common, "worktree", "remove", path)
    if branch is None:
        return None
    tip = attempt(common, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}")
    if tip is None:
        return None
    if tip == base:
        attempt(common, "branch", "-D", "--", branch)
        return None
    return branch


__all__ = [
    "PLACES",
    "Changes",
    "GitFailed",
    "Repository",
    "add_worktree",
    "behind",
    "branch_name",
    "changes",
    "repository",
]
