"""Where agents work: nowhere in particular, a directory, a temporary one, a git worktree with a branch of its own.

Temporary ones and worktrees lie below one root of this host and user, each in a folder with a generated name: ``tree`` is
what the agent gets, ``record.json`` says whose it is. That record, not the place, makes a folder ours; nothing else below
the root is ever touched. While an attempt works in one, its process holds a lock of the kernel on the record: a worker
that is killed lets go of it, and the next attempt goes on there.

What an attempt leaves is removed when it is certain that nothing is lost: after success, when every change is in a
commit that a branch holds. All else is kept, and the run says where. ``tidy`` removes later what has become certain.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.agents import git
from orchestrator.agents.git import GitFailed
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.values import value
from orchestrator.domain.words import OutcomeClass

MADE = ("temporary", "worktree")
"""The kinds that are made for a task, and removed."""

RECORD = "record.json"
TREE = "tree"
_MARK = "orchestrator workspace"

PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EMFILE",
        "ENFILE",
        "ENOMEM",
        "EAGAIN",
        "EIO",
        "ESTALE",
        "EBUSY",
        "ETIMEDOUT",
        "EINTR",
    )
)
"""Errors that may pass: the attempt is transient. All others (no permission, read-only, a loop of links) stay."""


class Unusable(Exception):
    """No workspace could be made. ``passing``: another attempt may get one."""

    def __init__(self, cause: str, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.cause, self.message, self.passing = cause, message, passing


@dataclass(slots=True)
class Record:
    """What is written down of a workspace. Times are seconds since 1970; ``base`` is the commit that it began from."""

    name: str
    kind: str
    task: int
    attempt: int
    agent: str
    worker: str
    host: str
    created_at: float
    repository: str | None = None
    branch: str | None = None
    base: str | None = None
    prefix: str = ""
    ended: str | None = None
    """The outcome class of the last attempt that ended in it; None while one works, or after it was killed."""
    mark: str = _MARK


def root() -> Path:
    """Where this user's workspaces lie on this host: below ORCHESTRATOR_HOME, or where that would be."""
    from orchestrator.database.embedded import home_directory

    return home_directory() / "workspaces"


class Workspace:
    """Where one attempt works. ``path`` is its directory, None for that of this process; ``close`` it with the outcome."""

    def __init__(self, kind: str, path: str | None) -> None:
        self.kind = kind
        self.path = path
        self.notes: list[str] = []

    def told(self) -> dict[str, Any] | None:
        """What the task's row shows of it; None where there is nothing to say."""
        if self.path is None or self.kind == "none":
            return None
        return {"kind": self.kind, "path": self.path, "host": socket.gethostname()}

    async def close(self, outcome: Outcome) -> tuple[dict[str, Any] | None, list[str]]:
        """Say what became of it, with the sentences for the run. The attempt's processes are gone."""
        return self.told(), self.notes

    def release(self) -> None:
        """Let go of it without a word: its process ends, or its attempt was abandoned."""


class Made(Workspace):
    """A temporary directory or a worktree, locked while it is in use."""

    def __init__(self, folder: Path, record: Record, lock: int) -> None:
        super().__init__(record.kind, str(folder / TREE))
        self.folder, self.record, self._lock = folder, record, lock
        tree = Path(str(self.path))
        if record.prefix and (tree / record.prefix).is_dir():
            self.path = str(tree / record.prefix)

    def told(self) -> dict[str, Any]:
        """Name, place, and for a worktree repository, branch and base commit."""
        record = self.record
        said: dict[str, Any] = {"kind": record.kind, "name": record.name, "path": self.path, "host": record.host}
        if record.kind == "worktree":
            said |= {"repository": record.repository, "branch": record.branch, "base": record.base}
        return {**said, "kept": True}

    async def close(self, outcome: Outcome) -> tuple[dict[str, Any] | None, list[str]]:
        """Remove it after success if nothing is lost by that, else keep it; say which."""
        return await asyncio.get_running_loop().run_in_executor(None, self._close, outcome)

    def release(self) -> None:
        """As ``Workspace.release``."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close(self, outcome: Outcome) -> tuple[dict[str, Any] | None, list[str]]:
        said, notes, done = self.told(), list(self.notes), outcome.status is OutcomeClass.DONE
        self.record.ended = outcome.status.value
        try:
            write_record(self.folder, self.record)
            if self.record.kind == "worktree":
                self._close_worktree(said, notes, done)
            elif done:
                closed: list[OSError] = []  # folders that only root can look into
                count = sum(len(files) for _, _, files in os.walk(str(self.path), onerror=closed.append))
                if count or closed:
                    what = f"{count:,} file{'s' * (count != 1)}"
                    what += " and what was in folders without permission" if closed else ""
                    notes.append(f"its temporary workspace was removed with {what} in it")
                remove(self.folder)
                said["kept"] = False
            else:
                notes.append(f"its temporary workspace is kept: {self.path}")
        except (OSError, GitFailed) as error:
            notes.append(f"its workspace is kept, since it could not be looked at: {self.path} ({error})")
        finally:
            self.release()
        return said, notes

    def _close_worktree(self, said: dict[str, Any], notes: list[str], done: bool) -> None:
        record, tree = self.record, str(self.folder / TREE)
        if not Path(tree).is_dir():
            notes.append(f"the agent removed its own worktree {tree}")
            said |= {"kept": False}
            return
        found = git.changes(tree, record.base or "HEAD")
        said |= {
            "head": found.head,
            "branch": found.branch,
            "commits": found.commits,
            "uncommitted": len(found.uncommitted),
            "files": found.files,
            "insertions": found.insertions,
            "deletions": found.deletions,
        }
        if done and found.none:
            notes.append("no_change")
        if not done:
            notes.append(f"its worktree is kept: {tree}")
        elif found.uncommitted:
            count = len(found.uncommitted)
            notes.append(f"its worktree is kept: {count:,} uncommitted file{'s' * (count != 1)} in {tree}")
        elif not found.safe:
            notes.append(f"its worktree is kept: no branch holds its commits; they are in {tree}")
        else:
            stays = git.remove_worktree(record.repository or "", tree, record.branch, record.base)
            shutil.rmtree(self.folder, ignore_errors=True)
            said |= {"kept": False, "branch": stays}
            if stays:
                notes.append(f"commits on branch {stays}: {found.commits:,}")


# -- opening -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Repositories:
    """One worktree of a repository is added at a time in this process: git's own locks do not wait."""

    locks: dict[tuple[int, str], asyncio.Lock] = field(default_factory=dict)

    def of(self, common: str) -> asyncio.Lock:
        return self.locks.setdefault((id(asyncio.get_running_loop()), common), asyncio.Lock())


_REPOSITORIES = _Repositories()


async def open_workspace(
    kind: str,
    directory: str | None,
    *,
    task: int,
    attempt: int,
    agent: str,
    worker: str = "",
    before: dict[str, Any] | None = None,
    again: bool = True,
) -> Workspace:
    """Return the workspace of an attempt: the one of *before* if *again* and it is there, else a new one.

    *before* is what ``told`` said of the attempt before. *directory* is that of the agent; for a worktree the repository.
    Raises Unusable, which says whether another attempt may fare better.
    """
    if kind not in MADE:
        return Workspace(kind, directory)
    notes: list[str] = []
    if before and again and before.get("kept") and before.get("kind") == kind:
        adopted = _adopt(before, task, attempt, notes)
        if adopted is not None:
            return adopted
    loop = asyncio.get_running_loop()
    try:
        if kind == "temporary":
            made = await loop.run_in_executor(None, _temporary, (task, attempt, agent, worker))
        else:
            where = await loop.run_in_executor(None, _repository, directory or os.getcwd())  # noqa: PTH109
            async with _REPOSITORIES.of(where.common):
                made = await loop.run_in_executor(None, _worktree, where, (task, attempt, agent, worker))
    except FileNotFoundError as error:
        if error.filename == "git":
            raise Unusable("command_not_found", "workspace: worktree needs git, which was not found") from error
        raise _unusable(error) from error
    except OSError as error:
        raise _unusable(error) from error
    made.notes[:0] = notes
    return made


def _adopt(before: dict[str, Any], task: int, attempt: int, notes: list[str]) -> Made | None:
    """Take over what the attempt before left; None, with a note, if that cannot be."""
    name, host = str(before.get("name")), before.get("host")
    path = before.get("path")
    folder = root() / name
    if host != socket.gethostname() and not folder.is_dir():
        notes.append(f"the workspace of the attempt before is on host {host}: {path}; this is a new one")
        return None
    record = read_record(folder) if name and "/" not in name and name not in (".", "..") else None
    if record is None or record.task != task or record.kind != before.get("kind") or not (folder / TREE).is_dir():
        notes.append(f"the workspace of the attempt before is gone: {path}; this is a new one")
        return None
    lock = lock_folder(folder)
    if lock is None:
        notes.append(f"the workspace of the attempt before is still in use: {path}; this is a new one")
        return None
    record.attempt, record.ended = attempt, None
    with contextlib.suppress(OSError):
        write_record(folder, record)
    return Made(folder, record, lock)


_Whose = tuple[int, int, str, str]


def _temporary(whose: _Whose) -> Made:
    folder, record, lock = _begin("temporary", whose)
    try:
        (folder / TREE).mkdir(mode=0o700)
        write_record(folder, record)
    except BaseException:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Made(folder, record, lock)


def _repository(directory: str) -> git.Repository:
    if not Path(directory).is_dir():
        raise Unusable("directory_missing", f"the repository {directory} does not exist; correct dir")
    try:
        where = git.repository(directory)
    except GitFailed as error:
        said = f"{directory} is no git repository that can be used: {error.message}; correct dir"
        raise Unusable("no_repository", said, passing=error.passing) from error
    if where.head is None:
        raise Unusable("no_commit", f"the repository {directory} has no commit that a worktree could begin from")
    return where


def _worktree(where: git.Repository, whose: _Whose) -> Made:
    folder, record, lock = _begin("worktree", whose)
    base = where.head or ""
    try:
        record.repository, record.base, record.prefix = where.common, base, where.prefix
        record.branch = git.branch_name(where, record.name)
        write_record(folder, record)  # before git is told: what is left behind is found by it
        git.add_worktree(where, str(folder / TREE), record.branch, base)
    except BaseException as error:
        os.close(lock)
        with contextlib.suppress(GitFailed, OSError):
            git.attempt(where.common, "worktree", "remove", "--force", str(folder / TREE))
            git.remove_worktree(where.common, str(folder / TREE), record.branch, base)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, GitFailed):
            said = f"a worktree of {where.directory} could not be made: {error.message}"
            raise Unusable("worktree", said, passing=error.passing) from error
        raise
    made = Made(folder, record, lock)
    if (late := git.behind(where)) is not None:
        made.notes.append(f"the worktree began from commit {base[:12]}, which is {late[0]:,} behind {late[1]}")
    if not where.bare and git.attempt(where.directory, "status", "--porcelain", "--untracked-files=no"):
        made.notes.append(
            f"{where.directory} has uncommitted changes; the worktree began from commit {base[:12]} without them"
        )
    return made


def _begin(kind: str, whose: _Whose) -> tuple[Path, Record, int]:
    top = root()
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"task-{whose[0]}-{secrets.token_hex(4)}"
    folder = top / name
    folder.mkdir(mode=0o700)
    try:
        lock = lock_folder(folder)
    except OSError:
        folder.rmdir()
        raise
    assert lock is not None, "nobody else knows its name"
    return folder, Record(name, kind, *whose, socket.gethostname(), time.time()), lock


def _unusable(error: OSError) -> Unusable:
    passing = error.errno in PASSING
    cause = "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "workspace"
    remedy = "" if passing else "; see who may write there, or set ORCHESTRATOR_HOME"
    return Unusable(cause, f"no workspace could be made: {error}{remedy}", passing=passing)


# -- on disk -------------------------------------------------------------------------------------------------------


def lock_folder(folder: Path) -> int | None:
    """Lock a workspace; return the descriptor that holds it, None if somebody else does."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_record(folder: Path, record: Record) -> None:
    """Write the record, whole or not at all."""
    new = folder / f"{RECORD}.new"
    new.write_text(json.dumps(asdict(record)))
    new.replace(folder / RECORD)


def read_record(folder: Path) -> Record | None:
    """Return the record of a workspace; None if the folder is none of ours."""
    try:
        value = json.loads((folder / RECORD).read_text())
        record = Record(**value)
    except (OSError, ValueError, TypeError):
        return None
    return record if record.mark == _MARK and record.name == folder.name and record.kind in MADE else None


def remove(folder: Path) -> None:
    """Remove a workspace's folder; directories that the agent closed to itself too. The record goes last."""

    def opened(_function: Any, path: str, _error: Any) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            Path(path).chmod(0o700)
            os.rmdir(path) if Path(path).is_dir() and not Path(path).is_symlink() else os.unlink(path)  # noqa: PTH106, PTH108

    tree = folder / TREE
    if tree.exists():
        shutil.rmtree(tree, onerror=opened)
        shutil.rmtree(tree, ignore_errors=True)
    if tree.exists():
        raise OSError(errno.EACCES, "some of it could not be removed", str(tree))
    shutil.rmtree(folder, ignore_errors=True)


# -- looking and tidying -------------------------------------------------------------------------------------------


@value
class Found:
    """A folder below the root. ``record`` None: not made by us. ``keep``: why it must stay; None: it may go."""

    folder: Path
    record: Record | None
    keep: str | None
    changes: git.Changes | None = None


Judge = Callable[[Record], str | None]
"""What the queue knows of a workspace: why it must stay, or None."""


def look(judge: Judge, *, older_than: float = 0.0) -> Iterator[Found]:
    """Each folder below the root, with the reason why it must stay, by name. Changes nothing."""
    top = root()
    if not top.is_dir():
        return
    for folder in sorted(top.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        record = read_record(folder)
        if record is None:
            yield Found(folder, None, "not made by orchestrator")
            continue
        yield _judged(folder, record, judge, older_than)


def survey(
    stays: Callable[[list[tuple[str, int, int, str]]], Mapping[str, str | None]],
    *,
    remove: bool,
    older_than: float,
    force: Sequence[str],
    abandoned: bool,
) -> list[Found]:
    """Each folder below the root with the reason why it must stay; with *remove* those without are removed.

    *stays* is what the queue knows of some (name, task id, attempt, worker id): why each must stay, or None. *force* names
    some that are removed with what is in them. *abandoned*: only what an attempt that was killed, or had succeeded, left.
    """
    found = list(look(lambda _: None))
    records = [each.record for each in found if each.record is not None]
    if abandoned:
        records = [record for record in records if record.ended in (None, OutcomeClass.DONE.value)]
    if not records:
        return [] if abandoned else found
    known = stays([(each.name, each.task, each.attempt, each.worker) for each in records])

    def judge(record: Record) -> str | None:
        return known.get(record.name, "no task of this queue knows it")

    if not remove:
        return list(look(judge, older_than=older_than))
    return [
        tidy(each.folder, judge, older_than=older_than, force=each.folder.name in force)
        for each in found
        if not abandoned or each.record in records
    ]


def tidy(folder: Path, judge: Judge, *, older_than: float = 0.0, force: bool = False) -> Found:
    """Remove one workspace if it may go; return how it was found. *force* also removes what would be lost by it.

    What a running task or a person's shell is in stays, whatever is asked for. Safe beside other cleaners, and after one
    was killed.
    """
    record = read_record(folder)
    if record is None:
        return Found(folder, None, "not made by orchestrator")
    lock = lock_folder(folder)
    if lock is None:
        return Found(folder, record, "in use")
    try:
        found = _judged(folder, record, judge, older_than, locked=True)
        if found.keep is not None and not (force and found.keep not in _NEVER and not found.keep.startswith("process")):
            return found
        tree = folder / TREE
        if record.kind == "worktree":
            if force and tree.exists():
                git.run(record.repository or "", "worktree", "remove", "--force", str(tree))
            git.remove_worktree(record.repository or "", str(tree), record.branch, record.base)
        remove(folder)
        return Found(folder, record, None, found.changes)
    except (OSError, GitFailed) as error:
        return Found(folder, record, f"could not be removed: {error}")
    finally:
        os.close(lock)


_NEVER = ("in use", "not made by orchestrator")


def _judged(folder: Path, record: Record, judge: Judge, older_than: float, *, locked: bool = False) -> Found:
    if not locked:
        lock = lock_folder(folder)
        if lock is None:
            return Found(folder, record, "in use")
        os.close(lock)
    tree = folder / TREE
    inside = users(folder)
    if inside:
        return Found(folder, record, f"process {inside[0]} works in it")
    if (why := judge(record)) is not None:
        return Found(folder, record, why)
    if time.time() - record.created_at < older_than:
        return Found(folder, record, "younger than asked for")
    if record.kind != "worktree" or not tree.exists():
        return Found(folder, record, None)
    try:
        found = git.changes(str(tree), record.base or "HEAD")
    except (OSError, GitFailed) as error:
        return Found(folder, record, f"cannot be looked at: {error}")
    if found.uncommitted:
        count = len(found.uncommitted)
        return Found(folder, record, f"{count:,} uncommitted file{'s' * (count != 1)}", found)
    if not found.safe:
        return Found(folder, record, "no branch holds its commits", found)
    return Found(folder, record, None, found)


def users(folder: Path) -> list[int]:
    """The processes of this host whose working directory lies in *folder*, as far as they may be looked at."""
    real = os.path.realpath(folder)
    found = []
    with contextlib.suppress(OSError):
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                with contextlib.suppress(OSError):
                    cwd = str((process / "cwd").readlink())
                    if cwd == real or cwd.startswith(real + "/"):
                        found.append(int(process.name))
    return sorted(found)


__all__ = [
    "MADE",
    "Found",
    "Judge",
    "Made",
    "Record",
    "Unusable",
    "Workspace",
    "look",
    "open_workspace",
    "read_record",
    "root",
    "survey",
    "tidy",
]
