"""Workspaces: made under generated names, carried from attempt to attempt, removed only when nothing is lost by it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from orchestrator.agents import git, workspaces
from orchestrator.agents.command import CommandAgent
from orchestrator.agents.python import PythonAgent
from orchestrator.agents.workspaces import Record, look, read_record, root, tidy
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import DatabaseUnavailable
from orchestrator.worker.loop import Worker
from tests.commands import Cli
from tests.making import BROKEN, Making
from tests.running import Heard, a_claim, execute
from tests.working import FakeAgent, orchestrator


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root of its own, and a git that asks nobody who he is."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@example.invalid")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def do(folder: Path | str, *arguments: str) -> str:
    """What git says."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, in a folder with a blank and an accent."""
    folder = tmp_path / "a repo é"
    (folder / "sub").mkdir(parents=True)
    (folder / "kept.txt").write_text("one\n")
    (folder / "sub" / "more.txt").write_text("two\n")
    (folder / ".gitignore").write_text("build/\n")
    do(folder, "init", "-q", "-b", "main")
    do(folder, "add", "-A")
    do(folder, "commit", "-q", "-m", "base")
    return folder


def agent(script: str, workspace: str = "worktree", **fields: Any) -> CommandAgent:
    """An agent that runs this shell script in a workspace."""
    return CommandAgent(
        AgentDefinition(name="coder", hash="h", command=("sh", "-c", script), workspace=workspace, **fields)
    )


def folders() -> list[Path]:
    return sorted(root().iterdir()) if root().is_dir() else []


def fine(_record: Record) -> None:
    """The queue has no objection."""


COMMIT = "echo more >> kept.txt && git commit -qam change"


# -- worktrees ---------------------------------------------------------------------------------------------------------


def test_a_worktree_has_a_branch_of_its_own(repository: Path) -> None:
    """The agent works on a copy; its commit is on a generated branch afterwards, and the worktree is gone."""
    heard = Heard()
    outcome = execute(agent(f"{COMMIT}; pwd", dir=str(repository)), a_claim(title="x/../../y"), heard)
    assert outcome.status == OutcomeClass.DONE, outcome
    assert outcome.workspace is not None
    branch = outcome.workspace["branch"]
    assert branch.startswith("orchestrator/task-7-")
    assert do(repository, "show", f"{branch}:kept.txt") == "one\nmore"
    assert (repository / "kept.txt").read_text() == "one\n"
    assert outcome.workspace["kept"] is False
    assert (outcome.workspace["commits"], outcome.workspace["files"], outcome.workspace["insertions"]) == (1, 1, 1)
    assert outcome.workspace["base"] == do(repository, "rev-parse", "HEAD")
    assert any(branch in note for note in outcome.notes)
    assert folders() == []
    assert do(repository, "worktree", "list").count("\n") == 0
    assert heard.spaces[0]["path"] == outcome.result.strip()


def test_nothing_changed_is_marked(repository: Path) -> None:
    """An agent that changes nothing leaves the note no_change, no branch and no worktree; ignored files do not count."""
    outcome = execute(agent("mkdir build && echo x > build/x", dir=str(repository)))
    assert outcome.status == OutcomeClass.DONE
    assert "no_change" in outcome.notes
    assert folders() == []
    assert do(repository, "branch", "--list", "orchestrator*") == ""


@pytest.mark.parametrize(
    "script",
    ["echo x > 'new file é.txt'", "echo x >> kept.txt", "rm kept.txt", "git mv kept.txt b.txt", ": > empty"],
)
def test_uncommitted_work_is_kept_and_told(repository: Path, script: str) -> None:
    """Whatever kind of change no commit holds: the worktree stays after success, and the run says where."""
    outcome = execute(agent(script, dir=str(repository)))
    assert outcome.status == OutcomeClass.DONE
    assert outcome.workspace is not None
    assert outcome.workspace["kept"] is True
    (folder,) = folders()
    assert any(str(folder / "tree") in note and "uncommitted" in note for note in outcome.notes)
    (found,) = look(fine)
    assert found.keep is not None
    assert tidy(folder, fine).keep is not None
    assert folder.exists()


def test_commits_on_no_branch_are_kept(repository: Path) -> None:
    """An agent that leaves its branch and commits on a detached head loses nothing."""
    outcome = execute(agent(f"git checkout -q --detach && {COMMIT}", dir=str(repository)))
    assert any("no branch holds its commits" in note for note in outcome.notes)
    (folder,) = folders()
    assert tidy(folder, fine).keep == "no branch holds its commits"


def test_a_failed_attempt_keeps_its_worktree(repository: Path) -> None:
    """For inspection, and for the next attempt; the run says where it is."""
    outcome = execute(agent("echo x > y; exit 1", dir=str(repository)))
    assert outcome.status == OutcomeClass.TRANSIENT
    (folder,) = folders()
    assert any(str(folder) in note for note in outcome.notes)
    assert (folder / "tree" / "y").read_text() == "x\n"


def test_a_retry_gets_the_same_worktree(repository: Path) -> None:
    """With session resume or resume-then-fresh; with fresh it gets a new one."""
    for session, same in (("resume", True), ("resume-then-fresh", True), ("fresh", False)):
        first = execute(agent("echo x > y; exit 1", dir=str(repository), session=session))
        claim = a_claim(attempt=2, workspace=first.workspace)
        second = execute(agent("cat y; exit 1", dir=str(repository), session=session), claim)
        assert first.workspace is not None
        assert second.workspace is not None
        assert (second.workspace["name"] == first.workspace["name"]) is same
        record = read_record(root() / second.workspace["name"])
        assert record is not None
        assert (record.attempt, record.ended) == (2, "transient")


@pytest.mark.parametrize("change", ["gone", "elsewhere", "another task", "in use", "odd name"])
def test_a_workspace_that_cannot_be_carried_on_is_replaced_and_told(repository: Path, change: str) -> None:
    """Deleted by hand, on another host, of another task, in somebody's hands: a new one, and a note says so."""
    first = execute(agent("exit 1", dir=str(repository)))
    assert first.workspace is not None
    before = dict(first.workspace)
    (folder,) = folders()
    lock = None
    if change == "gone":
        workspaces.remove(folder)
    elif change == "elsewhere":
        before |= {"host": "elsewhere", "name": "task-7-00000000"}
    elif change == "odd name":
        before["name"] = "../../etc"
    elif change == "in use":
        lock = workspaces.lock_folder(folder)
    claim = a_claim(attempt=2, workspace=before, task_id=8 if change == "another task" else 7)
    second = execute(agent("exit 1", dir=str(repository)), claim)
    if lock is not None:
        os.close(lock)
    assert second.workspace is not None
    assert second.workspace["name"] != first.workspace["name"]
    assert any("this is a new one" in note for note in second.notes), second.notes


def test_kinds_of_repositories(repository: Path, tmp_path: Path) -> None:
    """A bare one, a detached head, a directory inside, a link to one, and a branch called orchestrator in the way."""
    bare = tmp_path / "bare.git"
    do(tmp_path, "clone", "-q", "--bare", str(repository), str(bare))
    (tmp_path / "link").symlink_to(repository)
    detached = tmp_path / "detached"
    do(tmp_path, "clone", "-q", str(repository), str(detached))
    do(detached, "checkout", "-q", "--detach")
    blocked = tmp_path / "blocked"
    do(tmp_path, "clone", "-q", str(repository), str(blocked))
    do(blocked, "branch", "orchestrator")
    places = {
        str(bare): "one", str(tmp_path / "link"): "one", str(detached): "one", str(blocked): "one",
        f"{repository}/sub/../": "one", f"{repository}/sub": "two",
    }  # fmt: skip
    for place, content in places.items():
        outcome = execute(agent("cat *.txt; echo x > n && git add n && git commit -qm n", dir=place))
        assert (outcome.status, outcome.result) == (OutcomeClass.DONE, content), (place, outcome)
        assert outcome.workspace is not None
        assert outcome.workspace["kept"] is False, (place, outcome.notes)
        assert do(place, "rev-list", "--count", outcome.workspace["branch"]) == "2"


def test_the_repository_is_that_of_the_defining_file(repository: Path) -> None:
    """Without ``dir`` the folder of the file decides, not the worker's directory."""
    assert execute(agent("cat kept.txt", base_dir=str(repository))).result == "one"


def test_a_dirty_repository_is_told(repository: Path) -> None:
    """The worktree begins from the commit; that the checkout has more is a note."""
    (repository / "kept.txt").write_text("changed\n")
    outcome = execute(agent("cat kept.txt", dir=str(repository)))
    assert outcome.result == "one"
    assert any("uncommitted changes" in note and "without them" in note for note in outcome.notes)


def test_a_base_behind_its_remote_is_told(repository: Path, tmp_path: Path) -> None:
    """The worktree begins from what is checked out; that the branch it follows has more is no secret, its id is known."""
    clone = tmp_path / "clone"
    do(tmp_path, "clone", "-q", str(repository), str(clone))
    base = do(clone, "rev-parse", "HEAD")
    for n in range(3):
        (repository / "kept.txt").write_text(f"{n}\n")
        do(repository, "commit", "-qam", f"c{n}")
    do(clone, "fetch", "-q")
    outcome = execute(agent("true", dir=str(clone)))
    assert f"the worktree began from commit {base[:12]}, which is 3 behind origin/main" in outcome.notes
    assert outcome.workspace is not None
    assert outcome.workspace["base"] == base


@pytest.mark.parametrize("kind", ["missing", "plain", "empty"])
def test_no_repository_is_one_clear_refusal(tmp_path: Path, kind: str) -> None:
    """A missing directory, one outside of git, one without a commit: permanent, with what to correct."""
    place = tmp_path / "place"
    if kind != "missing":
        place.mkdir()
    if kind == "empty":
        do(place, "init", "-q")
    outcome = execute(agent("true", dir=str(place)))
    cause = {"missing": "directory_missing", "plain": "no_repository", "empty": "no_commit"}[kind]
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, cause)
    assert str(place) in (outcome.message or "")
    assert folders() == []


def test_variables_of_git_do_not_lead_astray(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that a git hook started has GIT_DIR: neither the worktree nor the agent follows it."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    outcome = execute(
        agent(f"{COMMIT}; git rev-parse --show-toplevel; env | grep -c '^GIT_DIR' || true", dir=str(repository))
    )
    assert outcome.status == OutcomeClass.DONE
    assert outcome.result.splitlines()[-1] == "0"


def test_many_worktrees_at_once(repository: Path) -> None:
    """Twelve attempts at the same moment get twelve worktrees, and the repository stays whole."""

    async def all_of_them() -> list[Outcome]:
        from orchestrator.agents.protocol import Stop

        each = agent(COMMIT, dir=str(repository))
        return await asyncio.gather(*(each.execute(a_claim(task_id=n), Heard(), Stop()) for n in range(12)))

    outcomes = asyncio.run(all_of_them())
    assert {outcome.status for outcome in outcomes} == {OutcomeClass.DONE}
    assert len({outcome.workspace["branch"] for outcome in outcomes if outcome.workspace}) == 12
    do(repository, "fsck", "--strict")
    assert folders() == []


# -- temporary, directory, none ----------------------------------------------------------------------------------------


def test_a_temporary_directory(tmp_path: Path) -> None:
    """Empty and private; gone after success, which is said if there was something in it; kept after a failure."""
    outcome = execute(agent("pwd; ls -A; stat -c %a . $ORCHESTRATOR_WORKSPACE", "temporary"))
    path, *rest = outcome.result.split()
    assert rest == ["700", "700"]
    assert not Path(path).exists()
    assert outcome.notes == ()
    outcome = execute(agent("mkdir a && echo x > a/b; chmod 0 a", "temporary"))
    assert "its temporary workspace was removed with" in outcome.notes[0]
    assert folders() == []
    failed = execute(agent("echo x > y; exit 1", "temporary"))
    (folder,) = folders()
    assert any(str(folder) in note for note in failed.notes)
    again = execute(agent("cat y", "temporary"), a_claim(attempt=2, workspace=failed.workspace))
    assert (again.result, folders()) == ("x", [])


def test_a_shared_directory_is_told_apart_by_its_real_path(tmp_path: Path) -> None:
    """What an agent says of its directory leads through links and dots; other kinds of workspace share nothing."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    given = agent("true", "directory", dir=str(tmp_path / "link"))
    assert given.shared_directory is not None
    assert given.shared_directory(None) == str(tmp_path / "real")
    assert given.shared_directory(f"{tmp_path}/x/../real/") == str(tmp_path / "real")
    inline = AgentDefinition(
        name="p", hash="h", python="os.path:join", workspace="directory", dir="link", base_dir=str(tmp_path)
    )
    shared = PythonAgent.from_definition(inline).shared_directory
    assert shared is not None
    assert shared(None) == str(tmp_path / "real")
    assert agent("true", "none").shared_directory is None
    assert agent("true", "worktree").shared_directory is None


# -- what stands in the way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status", "cause"),
    [
        (errno.ENOSPC, OutcomeClass.TRANSIENT, "no_space"),
        (errno.EDQUOT, OutcomeClass.TRANSIENT, "no_space"),
        (errno.EMFILE, OutcomeClass.TRANSIENT, "workspace"),
        (errno.EIO, OutcomeClass.TRANSIENT, "workspace"),
        (errno.EACCES, OutcomeClass.PERMANENT, "workspace"),
        (errno.EROFS, OutcomeClass.PERMANENT, "workspace"),
        (errno.ELOOP, OutcomeClass.PERMANENT, "workspace"),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else str(value),
)
def test_what_may_pass_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, number: int, status: OutcomeClass, cause: str
) -> None:
    """A full disk is worth another attempt; a directory that may not be written is not."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr(workspaces, "_begin", refuse)
    outcome = execute(agent("true", "temporary"))
    assert (outcome.status, outcome.cause) == (status, cause)
    assert "/somewhere" in (outcome.message or "")


@pytest.mark.parametrize(
    ("said", "passing"),
    [
        ("fatal: could not create leading directories: No space left on device", True),
        ("fatal: Unable to create '/x/.git/refs/heads/a.lock': File exists.", True),
        ("fatal: could not create work tree dir: Permission denied", False),
        ("fatal: detected dubious ownership in repository at '/x'", False),
    ],
)
def test_what_git_says_decides_likewise(
    repository: Path, monkeypatch: pytest.MonkeyPatch, said: str, passing: bool
) -> None:
    """The words of git are told apart by the same table, and nothing half-made is left."""

    def refuse(*_: object) -> None:
        raise git.GitFailed(said)

    monkeypatch.setattr(git, "add_worktree", refuse)
    outcome = execute(agent("true", dir=str(repository)))
    assert outcome.status == (OutcomeClass.TRANSIENT if passing else OutcomeClass.PERMANENT)
    assert said in (outcome.message or "")
    assert folders() == []


# -- tidying -----------------------------------------------------------------------------------------------------------


def _left(repository: Path, script: str) -> Path:
    """A workspace that a failed attempt left."""
    before = set(folders())
    execute(agent(f"{script}; exit 1", dir=str(repository)))
    (new,) = set(folders()) - before
    return new


def test_only_what_is_certain_goes(repository: Path) -> None:
    """S49: clean and recorded ones go; the dry run said the same; the repository and other worktrees stay whole."""
    clean = _left(repository, "true")
    committed = _left(repository, COMMIT)
    dirty = _left(repository, "echo x > y")
    waiting = _left(repository, "true")
    gone = _left(repository, "true")
    subprocess.run(["rm", "-rf", str(gone / "tree")], check=True)
    used = _left(repository, "true")
    shell = _left(repository, "true")
    own = root() / "task-9-mine"
    own.mkdir()
    (own / "precious").write_text("x")
    do(repository, "worktree", "add", "-q", str(root() / "by hand"), "-b", "hand")
    branch = read_record(committed)
    assert branch is not None
    lock = workspaces.lock_folder(used)
    inside = subprocess.Popen(["sleep", "600"], cwd=shell / "tree")

    def judge(record: Record) -> str | None:
        return "task 7 is waiting" if record.name == waiting.name else None

    try:
        said = {found.folder.name: found.keep for found in look(judge)}
        again = {folder.name: tidy(folder, judge).keep for folder in folders()}
    finally:
        inside.kill()
        inside.wait()
        assert lock is not None
        os.close(lock)
    assert said == again
    assert {name for name, keep in said.items() if keep is None} == {clean.name, committed.name, gone.name}
    assert said[dirty.name] == "1 uncommitted file"
    assert said[waiting.name] == "task 7 is waiting"
    assert said[used.name] == "in use"
    assert said[shell.name] == f"process {inside.pid} works in it"
    assert said[own.name] == said["by hand"] == "not made by orchestrator"
    assert {folder.name for folder in folders()} == {
        dirty.name, waiting.name, used.name, shell.name, own.name, "by hand"
    }  # fmt: skip
    assert do(repository, "show", f"{branch.branch}:kept.txt") == "one\nmore"
    assert str(gone) not in do(repository, "worktree", "list")
    do(repository, "fsck", "--strict")
    assert do(root() / "by hand", "status", "--porcelain") == ""


def test_force_removes_by_name_what_would_be_lost(repository: Path) -> None:
    """A dirty one goes when it is named with force; what is in use does not."""
    dirty = _left(repository, "echo x > y")
    lock = workspaces.lock_folder(dirty)
    assert lock is not None
    assert tidy(dirty, fine, force=True).keep == "in use"
    os.close(lock)
    assert tidy(dirty, fine, force=True).keep is None
    assert folders() == []
    assert do(repository, "worktree", "list").count("\n") == 0


def test_age_keeps_too(repository: Path) -> None:
    """What is younger than asked for stays."""
    folder = _left(repository, "true")
    assert tidy(folder, fine, older_than=3600).keep == "younger than asked for"
    assert tidy(folder, fine).keep is None


def test_a_workspace_half_removed_goes_the_next_time(repository: Path) -> None:
    """A cleaner that was killed after any of its steps left something that the next one ends."""
    for step in ("worktree", "tree", "record"):
        folder = _left(repository, "true")
        record = read_record(folder)
        assert record is not None
        assert record.repository is not None
        if step == "worktree":
            git.remove_worktree(record.repository, str(folder / "tree"), record.branch, record.base)
        elif step == "tree":
            subprocess.run(["rm", "-rf", str(folder / "tree")], check=True)
        elif step == "record":
            (folder / "record.json.new").write_text("{")
        assert tidy(folder, fine).keep is None
        assert not folder.exists()
        assert do(repository, "worktree", "list").count("\n") == 0


def test_a_killed_worker_leaves_its_workspace_to_the_next(repository: Path) -> None:
    """The lock goes with its process: what a killed one held is adopted, with what the agent had written."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from orchestrator.agents import workspaces as w\n"
        "async def main():\n"
        "    made = await w.open_workspace('worktree', sys.argv[1], task=7, attempt=1, agent='coder')\n"
        "    open(made.path + '/half', 'w').write('done')\n"
        "    import json; print(json.dumps(made.told()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(repository)], capture_output=True, text=True, check=False)
    before = json.loads(done.stdout)
    outcome = execute(agent("cat half; exit 1", dir=str(repository)), a_claim(attempt=2, workspace=before))
    assert outcome.workspace is not None
    assert outcome.workspace["name"] == before["name"]
    assert outcome.workspace["uncommitted"] == 1
    assert replace(outcome, notes=()).status == OutcomeClass.TRANSIENT


# -- with the queue ----------------------------------------------------------------------------------------------------


CONFIG = """
[agents.coder]
command = ["sh", "-c", "echo try$ORCHESTRATOR_ATTEMPT >> log; cat log; test $ORCHESTRATOR_ATTEMPT = 2 || exit 75"]
workspace = "worktree"
dir = "a repo é"
retry = {initial = 0.01, max = 0.01}

[agents.fails]
command = ["false"]
workspace = "temporary"
max_retries = 0
"""


def test_a_task_keeps_its_worktree_to_its_end(repository: Path, cli: Cli) -> None:
    """Task and runs tell where; the second attempt goes on in it; clean-up knows the task, and force removes by name."""
    cli.config(CONFIG.replace("a repo é", str(repository)))
    task, failed = cli.add("coder"), cli.add("fails")
    cli("worker", "--until-idle", "--concurrency", "1")
    shown = cli("show", str(task), "--json").json
    assert (shown["status"], shown["attempt"], shown["result"]) == ("done", 2, "try1\ntry2")
    first, second = shown["runs"]
    assert first["workspace"]["name"] == second["workspace"]["name"] == shown["workspace"]["name"]
    assert shown["workspace"]["kept"] is True
    assert shown["workspace"]["path"] in cli("show", str(task)).out.replace("\n", "")
    listed = {row["task_id"]: row for row in cli("workspaces", "--json").json["workspaces"]}
    assert listed[task]["kept_because"] == "1 uncommitted file"
    assert listed[failed]["kept_because"] is None
    cleaned = {row["task_id"]: row for row in cli("workspaces", "--clean", "--json").json["workspaces"]}
    assert (cleaned[task]["removed"], cleaned[failed]["removed"]) == (False, True)
    name = shown["workspace"]["name"]
    assert name in cli("workspaces").out
    cli("workspaces", "--clean", "--force", "task-0-nothing", code=2)
    assert cli("workspaces", "--clean", "--force", name, "--json").json["workspaces"][0]["removed"] is True
    assert folders() == []


def test_the_queue_keeps_what_its_tasks_need(repository: Path, cli: Cli, engine: Engine) -> None:
    """Of a pending or waiting task, of an unrecorded attempt, of another queue: kept, each with its own reason."""
    cli.config(CONFIG)
    task = cli.add("fails")
    cli("worker", "--until-idle", "--concurrency", "1")
    (row,) = cli("workspaces", "--json").json["workspaces"]
    assert row["kept_because"] is None
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tasks SET status = 'waiting', finished_at = NULL")
    assert cli("workspaces", "--json").json["workspaces"][0]["kept_because"] == f"task {task} is waiting"
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tasks SET status = 'failed', finished_at = now()")
        connection.exec_driver_sql("UPDATE runs SET attempt = 7")
    found = cli("workspaces", "--json").json["workspaces"][0]["kept_because"]
    assert found == f"attempt 1 of task {task} is not recorded yet"
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM tasks")
    said = cli("workspaces", "--clean", "--json").json["workspaces"][0]
    assert (said["kept_because"], said["removed"]) == ("no task of this queue knows it", False)
    assert len(folders()) == 1


def test_a_worker_removes_what_killed_ones_left(database_url: str, engine: Engine, repository: Path) -> None:
    """At its start: a clean worktree of a lost attempt that the task has left goes, one with work in it stays."""
    made = Making.on(engine)
    names = []
    for script in ("true", "echo x > y"):
        task = made.add("gone")
        (claim,) = made.claim(1, "gone")
        execute(agent(f"{script}; exit 1", dir=str(repository)), replace(claim, agent="coder"))
        names.append(folders()[-1] if len(folders()) == 1 else next(f for f in folders() if f not in names))
        record = read_record(names[-1])
        assert record is not None
        assert record.task == task
        workspaces.write_record(names[-1], replace(record, ended=None))
        made.end(claim, BROKEN)
    with orchestrator(database_url) as orc:
        found = {each.folder: each.keep for each in orc.workspaces(remove=True, abandoned=True)}
    assert found == {names[0]: None, names[1]: "1 uncommitted file"}
    assert folders() == [names[1]]


def test_workspaces_without_the_database(database_url: str, engine: Engine) -> None:
    """What lies here is then nobody's to judge: the error is the one that people know, and a worker's start goes on."""
    made = Making.on(engine)
    made.add("gone")
    (claim,) = made.claim(1, "gone")
    execute(agent("exit 1", workspace="temporary"), replace(claim, agent="coder"))
    (folder,) = folders()
    record = read_record(folder)
    assert record is not None
    workspaces.write_record(folder, replace(record, ended=None))
    with orchestrator("postgresql://nobody@127.0.0.1:1/nothing") as orc:
        with pytest.raises(DatabaseUnavailable):
            orc.workspaces(remove=True)
        Worker(orc, [FakeAgent()])._tidy()
    assert folders() == [folder]
