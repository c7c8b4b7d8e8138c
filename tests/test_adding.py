"""Adding tasks: positions, unique keys, parents, the caller's own transaction, and what is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from hashlib import md5
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from orchestrator.domain.given import NewTask
from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.domain.words import TaskStatus
from orchestrator.errors import InvalidInput, NotFound
from orchestrator.repositories import adding
from orchestrator.repositories.adding import Added, AddingRepository, after_commit
from tests.making import BROKEN, CRASHED, Making


@pytest.fixture
def made(engine: Engine) -> Making:
    return Making.on(engine)


@pytest.fixture
def tasks(engine: Engine) -> AddingRepository:
    return AddingRepository(engine)


def drawn(made: Making) -> int:
    """The last id that was drawn from the sequence."""
    return int(made.query("SELECT last_value FROM pg_sequences WHERE sequencename = 'tasks_id_seq'")[0][0] or 0)


# -- values -------------------------------------------------------------------------------------------------------


def test_results_are_positional(tasks: AddingRepository, made: Making) -> None:
    """Ids come in the order given, whatever the size of the chunks."""
    added = tasks.add_many([NewTask("coder", title=str(n)) for n in range(7)])
    assert [each.id for each in added] == sorted(each.id for each in added)
    assert [made.row(each.id).title for each in added] == [str(n) for n in range(7)]
    assert added[0] == Added(added[0].id, True, TaskStatus.PENDING)
    assert tasks.add_many([]) == []


def test_chunks_make_no_difference(tasks: AddingRepository, made: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tasks than one INSERT takes are all or nothing, too, with parents across chunks."""
    monkeypatch.setattr(adding, "CHUNK", 3)
    new = [NewTask("coder", name=f"n{n}", after=(f"n{n - 1}",) if n else (), unique_key=f"k{n}") for n in range(10)]
    added = tasks.add_many(new)
    assert [each.status for each in added] == [TaskStatus.PENDING] + [TaskStatus.BLOCKED] * 9
    assert len(made.query("SELECT 1 FROM task_dependencies")) == 9
    with pytest.raises(NotFound):
        tasks.add_many([*[NewTask("coder")] * 10, NewTask("coder", after=(10**6,))])
    assert len(made.query("SELECT 1 FROM tasks")) == 10
    assert [each.id for each in tasks.add_many(new)] == [each.id for each in added]


def test_every_field_is_stored(tasks: AddingRepository, made: Making) -> None:
    """What was given is what is there; what was left open is null."""
    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    (added,) = tasks.add_many(
        [
            NewTask(
                "coder",
                input={"a": [1, None, "ä"]},
                params={"p": 1},
                title="T",
                name="n",
                priority=-7,
                at=at,
                max_retries=0,
                retry=RetryPolicy(1, 2, 3),
                budget=Budget(1.5, 2, 0.25, 4),
                unique_key="u",
                concurrency_key="c",
                tags={"k": "v"},
                definition="d",
                task_hash="h",
                template=True,
                dir="/somewhere",
            )
        ]
    )
    row = made.row(added.id)
    assert (row.input, row.params, row.title, row.name, row.priority) == ({"a": [1, None, "ä"]}, {"p": 1}, "T", "n", -7)
    assert (row.available_at, row.due, row.max_retries) == (at, False, 0)
    assert row.retry == {"initial": 1, "factor": 2, "max": 3}
    budget = (row.budget_seconds, row.budget_tokens, row.budget_usd, row.budget_turns, row.on_limit)
    assert budget == (1.5, 2, 0.25, 4, "fail")
    assert (row.unique_key, row.concurrency_key, row.tags, row.dir) == ("u", "c", {"k": "v"}, "/somewhere")
    assert (row.definition, row.task_hash, row.template, row.route) == (
        "d",
        "h",
        True,
        f"coder\x1fd\x1e{md5(b'c').hexdigest()}",
    )
    bare = made.row(made.add())
    assert (bare.input, bare.params, bare.retry, bare.max_retries, bare.on_limit, bare.tags) == (None,) * 6
    assert bare.due is True


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, "null", 0.1, 12345678901234567890, "\\u0000", "\x7f"])
def test_inputs_come_back_as_they_were(made: Making, value: Any) -> None:
    """An input of any JSON value is claimed as it was given."""
    made.add(input=value)
    assert made.claim()[0].input == value


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"agent": ""}, "agent"),
        ({"agent": "  "}, "agent"),
        ({"agent": "x" * 501}, "agent"),
        ({"agent": "a\x00"}, "agent"),
        ({"title": "\ud800"}, "title"),
        ({"unique_key": "k\x00"}, "unique_key"),
        ({"input": {"a": float("nan")}}, "input"),
        ({"input": object()}, "input"),
        ({"params": {"a": "\x00"}}, "params"),
        ({"tags": {"k": "\x00"}}, "tags"),
        ({"dir": "a\x00b"}, "dir"),
        ({"priority": 2**31}, "priority"),
        ({"priority": "5"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": 2**31}, "max_retries"),
        ({"at": datetime(2030, 1, 1)}, "at"),
        ({"budget": Budget(seconds=0)}, "budget seconds"),
        ({"budget": Budget(seconds=float("inf"))}, "budget seconds"),
        ({"budget": Budget(usd=float("nan"))}, "budget usd"),
        ({"budget": Budget(usd=10**400)}, "budget usd"),
        ({"budget": Budget(tokens=2**63)}, "budget tokens"),
        ({"budget": Budget(turns=2**31)}, "budget turns"),
        ({"budget": Budget(tokens=-1)}, "budget tokens"),
        ({"retry": RetryPolicy(float("inf"), 2, 3)}, "retry initial"),
        ({"retry": RetryPolicy(1, 0.5, 3)}, "retry factor"),
        ({"retry": RetryPolicy(1, 2, -3)}, "retry max"),
        ({"after": (0,)}, "after"),
        ({"after": (2**70,)}, "after"),
        ({"after": ("nobody",)}, "after"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    tasks: AddingRepository, made: Making, wrong: dict[str, Any], field: str
) -> None:
    """InvalidInput names the field; nothing is written, not even what was right beside it."""
    with pytest.raises(InvalidInput, match=rf"^{field}\b"):
        tasks.add_many([NewTask("coder"), NewTask(**{"agent": "coder", **wrong})])
    assert made.query("SELECT 1 FROM tasks") == []


# -- unique keys --------------------------------------------------------------------------------------------------


def test_a_live_twin_is_returned(made: Making, tasks: AddingRepository) -> None:
    """While one lives in any live status, an add of its key gives its id; afterwards a new one is made."""
    (first,) = tasks.add_many([NewTask("coder", unique_key="k")])
    for change in ("held_at = now()", "held_at = NULL, status = 'blocked'", "status = 'waiting'", "status = 'pending'"):
        made.query(f"UPDATE tasks SET {change}")
        (again,) = tasks.add_many([NewTask("other", unique_key="k", title="different")])
        assert (again.id, again.created) == (first.id, False)
    (claim,) = made.claim()
    assert tasks.add_many([NewTask("coder", unique_key="k")]) == [Added(first.id, False, TaskStatus.RUNNING)]
    made.end(claim)
    (second,) = tasks.add_many([NewTask("coder", unique_key="k")])
    assert (second.created, second.id > first.id) == (True, True)


def test_refused_adds_use_up_no_ids(made: Making, tasks: AddingRepository) -> None:
    """A thousand refused adds leave the sequence where it was."""
    made.add(unique_key="k")
    before = drawn(made)
    for _ in range(20):
        tasks.add_many([NewTask("coder", unique_key="k")] * 50)
    assert drawn(made) == before


@pytest.mark.parametrize("own", [False, True], ids=["own transaction", "caller's transaction"])
def test_fifty_at_once_make_one(made: Making, tasks: AddingRepository, own: bool) -> None:
    """Of fifty parallel adds of one key exactly one creates; all give the same id; at most one id is drawn a round."""
    threads = 18  # as many as there are connections; three adds each
    for round_ in range(3):
        start = threading.Barrier(threads)
        before = drawn(made)

        def add(number: int, round_: int = round_, start: threading.Barrier = start) -> list[Added]:
            start.wait()
            new = [NewTask("coder", unique_key=f"nightly-{round_}", title=str(number))]
            if not own:
                return [tasks.add_many(new)[0] for _ in range(3)]
            with Session(made.engine) as session, session.begin():
                found = [tasks.add_many(new, session)[0] for _ in range(3)]
                session.execute(text("SELECT 1"))  # still usable
            return found

        with ThreadPoolExecutor(threads) as pool:
            results = [added for each in pool.map(add, range(threads)) for added in each]
        assert len({added.id for added in results}) == 1
        assert sum(added.created for added in results) == 1
        assert drawn(made) - before <= 1
    assert len(made.query("SELECT 1 FROM tasks")) == 3


def test_more_keys_than_are_locked_still_make_one_each(
    made: Making, tasks: AddingRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bulk adds of the same keys at once: the unique index decides, both get the same ids, none fails."""
    monkeypatch.setattr(adding, "LOCKED_KEYS", 0)
    start = threading.Barrier(4)

    def add(number: int) -> list[Added]:
        new = [
            NewTask("coder", name=f"n{n}", unique_key=f"k{n}", after=(f"n{n - 1}",) if n % 3 else (), priority=number)
            for n in range(90)
        ]
        start.wait()
        return tasks.add_many(new)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(add, range(4)))
    assert [each.id for each in results[0]] == [each.id for each in results[1]] == [each.id for each in results[3]]
    assert all(sum(each[n].created for each in results) == 1 for n in range(90))
    assert len(made.query("SELECT 1 FROM tasks")) == 90
    assert len(made.query("SELECT 1 FROM task_dependencies")) == 60


def test_a_child_follows_the_twin_of_its_parent(
    made: Making, tasks: AddingRepository, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """When the parent in the same call loses to a twin, the child hangs on that one, also if that one has just failed."""
    monkeypatch.setattr(adding, "LOCKED_KEYS", 0)
    for ending, expected in ((None, "pending"), (BROKEN, "cancelled"), (CRASHED, "blocked")):
        key = f"k-{expected}"
        results: list[list[Added]] = []
        new = [NewTask("coder", name="p", unique_key=key), NewTask("coder", name="c", after=("p",))]
        with Session(made.engine) as session, session.begin():
            (twin,) = tasks.add_many([NewTask("twins", unique_key=key)], session)
            thread = threading.Thread(target=lambda new=new, results=results: results.append(tasks.add_many(new)))
            thread.start()
            wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
        thread.join()
        ((parent, child),) = results
        assert (parent.id, parent.created, child.status) == (twin.id, False, TaskStatus.BLOCKED)
        (claim,) = made.claim(1, "twins")
        made.end(claim) if ending is None else made.end(claim, ending)
        assert made.status(child.id) == [expected]


def test_one_call_with_a_key_twice(made: Making, tasks: AddingRepository) -> None:
    """The second line of a key is the first one's task, and who needs the second by name needs that task."""
    a, b, c = tasks.add_many(
        [
            NewTask("coder", name="a", unique_key="k"),
            NewTask("coder", name="b", unique_key="k"),
            NewTask("coder", name="c", after=("b",)),
        ]
    )
    assert (b.id, b.created, a.created) == (a.id, False, True)
    assert [row.depends_on for row in made.query("SELECT * FROM task_dependencies")] == [a.id]
    assert c.status is TaskStatus.BLOCKED


def test_a_key_twice_whose_first_is_closed_at_once(made: Making, tasks: AddingRepository) -> None:
    """A first line that is cancelled at once, because its parent failed, is the answer for the second as well."""
    parent = made.add()
    made.run(parent, BROKEN)
    new = [NewTask("coder", unique_key="k", after=(parent,)), NewTask("coder", unique_key="k")]
    first, second = tasks.add_many(new)
    assert (first.status, second.id, second.created) == (TaskStatus.CANCELLED, first.id, False)


# -- parents (S14) ------------------------------------------------------------------------------------------------


def test_parents_decide_where_a_task_starts(made: Making, tasks: AddingRepository) -> None:
    """Done: pending. Pending, running, blocked: blocked. Failed or cancelled: cancelled at once, naming the parent."""
    done, failed, running = made.add(), made.add(), made.add()
    made.run(done)
    made.run(failed, BROKEN)
    made.claim()
    pending = made.add()
    blocked = made.add(after=(pending,))
    cases = {
        (done,): "pending",
        (running,): "blocked",
        (pending, done): "blocked",
        (blocked,): "blocked",
        (failed,): "cancelled",
        (failed, running): "cancelled",
    }
    ids = {after: made.add(after=after) for after in cases}
    assert {after: made.status(id_)[0] for after, id_ in ids.items()} == cases
    row = made.row(ids[(failed, running)])
    assert (row.error_class, row.error_cause) == ("cancelled", "parent_failed")
    assert f"needs {failed}" in row.error_message
    assert row.finished_at is not None
    below = made.add(after=(ids[(failed,)],))
    assert made.row(below).error_cause == "parent_cancelled"


def test_a_chain_within_one_call(made: Making, tasks: AddingRepository) -> None:
    """A→B→C→D by name; a failed parent of A closes the whole chain."""
    chain = [NewTask("coder", name=n, after=(p,) if p else ()) for p, n in (("", "a"), ("a", "b"), ("b", "c"))]
    a, b, c = tasks.add_many(chain)
    assert [each.status.value for each in (a, b, c)] == ["pending", "blocked", "blocked"]
    made.run(a.id, BROKEN)
    late = tasks.add_many([NewTask("coder", name="x", after=(a.id,)), NewTask("coder", name="y", after=("x",))])
    assert [each.status.value for each in late] == ["cancelled", "cancelled"]
    assert f"needs {a.id}" in made.row(late[1].id).error_message
    assert made.status(b.id, c.id) == ["cancelled", "cancelled"]


def test_names_count_only_backwards(made: Making, tasks: AddingRepository) -> None:
    """A task cannot need itself or one that comes after it: nothing would ever start."""
    for after in ("self", "later"):
        with pytest.raises(InvalidInput, match=f"no task named '{after}' comes before"):
            tasks.add_many([NewTask("coder", name="self", after=(after,)), NewTask("coder", name="later")])
    assert made.query("SELECT 1 FROM tasks") == []


def test_a_parent_that_does_not_exist(made: Making, tasks: AddingRepository) -> None:
    """NotFound names the id."""
    with pytest.raises(NotFound, match="task 999 does not exist"):
        tasks.add_many([NewTask("coder", after=(999,))])


@pytest.mark.parametrize(("outcome", "expected"), [(None, "pending"), (BROKEN, "cancelled")], ids=["done", "failed"])
def test_a_child_added_while_its_parent_ends(
    made: Making, tasks: AddingRepository, wait_until: Any, outcome: Any, expected: str
) -> None:
    """In either order of add and record, the child is neither missed nor left blocked."""
    parent = made.add()
    (claim,) = made.claim()
    end = (lambda: made.end(claim)) if outcome is None else (lambda: made.end(claim, outcome))
    with Session(made.engine) as session, session.begin():  # the add comes first, its commit after the record's start
        (child,) = tasks.add_many([NewTask("coder", after=(parent,))], session)
        assert child.status is TaskStatus.BLOCKED
        recorder = threading.Thread(target=end)
        recorder.start()
        wait_until(lambda: made.query("SELECT 1 FROM pg_locks WHERE NOT granted"))
    recorder.join()
    assert made.status(child.id) == [expected]


@pytest.mark.parametrize("outcome", [None, BROKEN], ids=["done", "failed"])
def test_many_children_added_while_parents_end(made: Making, tasks: AddingRepository, outcome: Any) -> None:
    """However adds and records interleave: afterwards no child of an ended parent is blocked."""
    made.add_all([NewTask("coder") for _ in range(30)])
    claims = made.claim(30)
    start = threading.Barrier(2)

    def record() -> None:
        start.wait()
        for claim in claims:
            made.end(claim) if outcome is None else made.end(claim, outcome)

    thread = threading.Thread(target=record)
    thread.start()
    start.wait()
    children = [made.add("other", after=(claim.task_id,)) for claim in claims]
    thread.join()
    assert set(made.status(*children)) == {"pending" if outcome is None else "cancelled"}


# -- the caller's transaction -------------------------------------------------------------------------------------


def test_the_callers_transaction_decides(made: Making, tasks: AddingRepository) -> None:
    """Rolled back, nothing is there; committed, it is; a Connection serves as well as a Session."""
    with Session(made.engine) as session:
        tasks.add_many([NewTask("coder")], session)
        session.rollback()
    assert made.claim() == []
    with Session(made.engine) as session, session.begin():
        tasks.add_many([NewTask("coder")], session)
        assert made.claim() == []
    assert len(made.claim()) == 1
    parent = made.add()
    with made.engine.begin() as connection:
        (child,) = tasks.add_many([NewTask("coder", after=(parent,), unique_key="k")], connection)
        assert tasks.add_many([NewTask("coder", unique_key="k")], connection)[0].id == child.id
    assert made.status(child.id) == ["blocked"]


def test_a_refused_add_leaves_the_callers_transaction_usable(made: Making, tasks: AddingRepository) -> None:
    """InvalidInput and NotFound do not break the transaction of the caller."""
    with Session(made.engine) as session, session.begin():
        for wrong in (NewTask("coder", after=(999,)), NewTask("coder", input=float("nan")), NewTask("")):
            with pytest.raises((InvalidInput, NotFound)):
                tasks.add_many([wrong], session)
        (added,) = tasks.add_many([NewTask("coder")], session)
    assert made.status(added.id) == ["pending"]


def test_a_serializable_caller_gets_a_serialization_failure(made: Making, tasks: AddingRepository) -> None:
    """Under a snapshot that cannot see the twin, the database says so with its own code: the caller tries again."""
    with made.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        connection.execute(text("SELECT 1"))
        twin = made.add(unique_key="k")
        with pytest.raises(DBAPIError) as caught:
            tasks.add_many([NewTask("coder", unique_key="k")], connection)
        assert getattr(caught.value.orig, "sqlstate", None) == "40001"
        connection.rollback()
        assert tasks.add_many([NewTask("coder", unique_key="k")], connection)[0].id == twin
        connection.rollback()


def test_after_commit_is_called_once_and_only_then(made: Making) -> None:
    """Not at a savepoint, not at a rollback, once after the commit that writes, and not again later."""
    calls: list[str] = []
    with Session(made.engine) as session:
        with session.begin():
            with session.begin_nested():
                session.execute(text("SELECT 1"))
                after_commit(session, lambda: calls.append("nested"))
            assert calls == []
            after_commit(session, lambda: calls.append("outer"))
            savepoint = session.begin_nested()
            session.execute(text("SELECT 1"))
            savepoint.rollback()
        assert sorted(calls) == ["nested", "outer"]
        session.execute(text("SELECT 1"))
        session.commit()
        assert len(calls) == 2
        after_commit(session, lambda: calls.append("rolled back"))
        session.execute(text("SELECT 1"))
        session.rollback()
        session.execute(text("SELECT 1"))
        session.commit()
        assert len(calls) == 2
    with made.engine.begin() as connection:
        after_commit(connection, lambda: calls.append("connection"))
    assert len(calls) == 2


def test_bulk_is_a_few_statements(made: Making, tasks: AddingRepository) -> None:
    """A thousand tasks with keys and parents take a constant number of statements."""
    parent = made.add()
    statements: list[str] = []
    listener = lambda *args: statements.append(args[2])  # noqa: E731
    event.listen(made.engine, "before_cursor_execute", listener)
    try:
        tasks.add_many([NewTask("coder", unique_key=f"k{n}", after=(parent,)) for n in range(1000)])
    finally:
        event.remove(made.engine, "before_cursor_execute", listener)
    assert len(statements) <= 8
