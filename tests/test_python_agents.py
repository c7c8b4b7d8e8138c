"""Python functions as agents: the decorator, async functions on the worker's loop, and definitions by dotted path."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents.functions import AgentFunction, Context, Permanent, Session, agent
from orchestrator.agents.protocol import Stop
from orchestrator.agents.python import PythonAgent
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Budget, Outcome, RetryPolicy
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.errors import InvalidInput
from tests.running import Heard, a_claim, execute, run_async, until


def on_loop(function: Any, live: Heard | None = None, **fields: Any) -> Outcome:
    """Run an async function once as an agent."""
    return execute(PythonAgent.from_function(agent("it")(function)), a_claim(**fields), live)


# -- the decorator


def test_a_decorated_function_is_still_the_function() -> None:
    """Called directly it does what it did; what the decorator says is its defaults."""

    @agent("sum", max_retries=5, budget_seconds=60, budget_usd=1.5, on_limit="ask", retry={"initial": 1})
    def add(first: int, second: int) -> int:
        """Add."""
        return first + second

    assert add(1, 2) == 3
    assert (add.name, add.__name__, add.__doc__) == ("sum", "add", "Add.")
    assert add.budget == Budget(seconds=60, usd=1.5, on_limit=OnLimit.ASK)
    assert add.retry == RetryPolicy(initial=1)
    made = PythonAgent.from_function(add)
    assert (made.name, made.definition, made.defaults.max_retries) == ("sum", None, 5)
    assert made.describe()["isolation"] == "process"


def test_the_name_may_be_left_out() -> None:
    """Without a name the function's own is taken, with brackets or without."""

    @agent
    async def first(ctx: Context) -> None: ...

    @agent()
    async def second(ctx: Context) -> None: ...

    assert (first.name, second.name) == ("first", "second")
    assert isinstance(first, AgentFunction)


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": -1},
        {"max_retries": 1.5},
        {"max_retries": True},
        {"budget_seconds": float("nan")},
        {"budget_seconds": 10**400},
        {"budget_tokens": -1},
        {"budget_usd": "1"},
        {"on_limit": "explode"},
        {"isolation": "thread"},
        {"isolation": "loop"},
        {"retry": {"initially": 5}},
        {"tasks_per_child": 0},
        {"memory_mb": 1},
        {"name": " "},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    """A wrong value is refused where it is written, with what was expected and found."""
    with pytest.raises(InvalidInput, match=r"found|would block"):

        @agent(**{"name": "x", **options})
        def function(ctx: Context) -> None: ...


def test_generators_are_refused() -> None:
    """A function that yields has no result."""
    with pytest.raises(InvalidInput, match="yields"):

        @agent("x")
        def function(ctx: Context) -> Iterator[int]:
            yield 1


# -- on the loop


def test_everything_that_an_async_function_says_arrives() -> None:
    """Progress, usage, session, words and the result; in the same process."""

    async def function(ctx: Context) -> Any:
        assert ctx.session == "before"
        ctx.progress(10)
        ctx.progress("started")  # type: ignore[arg-type]
        ctx.usage(input_tokens=9, output_tokens=1, id="a")
        ctx.usage(input_tokens=9, output_tokens=1, id="a")
        ctx.usage(tokens=5, cost_usd=0.25)
        ctx.session("s-1")
        assert ctx.session == "s-1"
        ctx.session = "s-2"
        ctx.log("logged")
        await asyncio.sleep(0)
        return {"input": ctx.input, "pid": os.getpid(), "title": ctx.title, "params": ctx.params}

    heard = Heard()
    outcome = on_loop(function, heard, input=[1], title="T", params={"a": 1}, session="before")
    assert outcome.status is OutcomeClass.DONE
    assert outcome.result == {"input": [1], "pid": os.getpid(), "title": "T", "params": {"a": 1}}
    assert heard.progressed == [(10.0, None), (None, "started")]
    assert heard.sessions == ["s-1", "s-2"]
    assert heard.text("message") == "logged"
    assert outcome.session == "s-2"
    assert outcome.usage is not None
    assert (outcome.usage.total_tokens, outcome.usage.cost_usd, outcome.usage.complete) == (15, 0.25, True)
    assert heard.used[-1].total_tokens == 15


def test_a_context_without_a_session() -> None:
    """No session is an empty text, and a session is one everywhere."""

    async def function(ctx: Context) -> Any:
        assert not ctx.session
        assert isinstance(ctx.session, Session)
        with pytest.raises(InvalidInput):
            ctx.session = ""
        with pytest.raises(InvalidInput):
            ctx.progress(101)
        return None

    assert on_loop(function).status is OutcomeClass.DONE


def test_usage_goes_on_from_the_attempt_before() -> None:
    """What an earlier attempt of the session used is not this one's."""

    async def function(ctx: Context) -> None:
        ctx.usage(kind="session_total", tokens=3600)

    outcome = on_loop(function, session="s", meter={"amount": [None, None, 3000, None], "session": "s"})
    assert outcome.usage is not None
    assert outcome.usage.total_tokens == 600
    assert outcome.usage.carry == {"amount": [None, None, 3600, None], "session": "s"}


class OddError(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (ValueError("no"), "transient", "ValueError"),
        (Permanent("no"), "permanent", "orchestrator.Permanent"),
        (SystemExit(1), "transient", "SystemExit"),
        (asyncio.CancelledError(), "transient", "asyncio.exceptions.CancelledError"),
        (OddError("no"), "transient", "OddError"),
    ],
)
def test_whatever_it_raises_ends_its_attempt_alone(error: BaseException, status: str, cause: str) -> None:
    """No exception of a function reaches the worker's loop."""

    async def function(ctx: Context) -> None:
        await asyncio.sleep(0)
        raise error

    heard = Heard()
    outcome = on_loop(function, heard)
    assert (str(outcome.status), str(outcome.cause).rpartition("test_python_agents.")[2]) == (status, cause)
    assert "in function" in outcome.notes[0]
    assert "python.py" not in outcome.notes[0]
    assert heard.text("error") == outcome.notes[0]


def test_results_of_async_functions_are_checked() -> None:
    """What JSON cannot hold is permanent here, too."""

    async def function(ctx: Context) -> object:
        return object()

    assert (outcome := on_loop(function)).status is OutcomeClass.PERMANENT
    assert outcome.cause == "result_not_json"


def stopped(
    function: Any, *, grace: float = 600.0, when: Callable[[Heard], Any] | None = None
) -> tuple[Outcome, Heard, int]:
    """Run a function until it has shown progress, then cancel it; also how often the worker's task was left cancelled."""
    heard = Heard()

    async def main() -> tuple[Outcome, Heard, int]:
        made = PythonAgent.from_function(agent("it", kill_grace=grace)(function))
        stop = Stop()

        async def slot() -> tuple[Outcome, int]:
            outcome = await made.execute(a_claim(), heard, stop)
            await asyncio.sleep(0)  # a cancellation left behind would strike here
            task = asyncio.current_task()
            assert task is not None
            return outcome, task.cancelling()

        running = asyncio.ensure_future(slot())
        await until(lambda: running.done() or (when or (lambda h: h.progressed))(heard))
        stop.request(OutcomeClass.CANCELLED, "because")
        outcome, left = await running
        return outcome, heard, left

    found: tuple[Outcome, Heard, int] = run_async(main)
    return found


def test_a_stopped_function_gets_cancelled_error() -> None:
    """A stop is a cancellation, the function may clean up with await, and the outcome is the reason."""

    async def function(ctx: Context) -> None:
        ctx.progress(1)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ctx.log("cleaned up")
            ctx.usage(tokens=5)

    outcome, heard, left = stopped(function)
    assert (outcome.status, outcome.message, left) == ("cancelled", "because", 0)
    assert heard.text("message") == "cleaned up"
    assert outcome.usage is not None
    assert (outcome.usage.total_tokens, outcome.usage.complete) == (5, False)


def test_a_function_that_ignores_its_cancellation_is_closed() -> None:
    """After the grace the coroutine is closed: it runs no more, and the run says so."""
    lives = []

    async def function(ctx: Context) -> None:
        ctx.progress(1)
        while True:
            try:
                await asyncio.sleep(0.001)
                lives.append(1)
            except asyncio.CancelledError:
                ctx.log("no")

    outcome, heard, left = stopped(function, grace=0.05)
    seen = len(lives)
    assert (outcome.status, left) == ("cancelled", 0)
    assert outcome.notes == ("it ignored its cancellation and was closed after 0.05 s",)
    assert heard.text("note") == outcome.notes[0]

    async def later() -> None:
        for _ in range(5):
            await asyncio.sleep(0.001)

    asyncio.run(later())
    assert len(lives) == seen


def test_a_function_that_ignores_everything_runs_no_more() -> None:
    """Even one that swallows GeneratorExit is left where it stands."""

    async def function(ctx: Context) -> None:
        ctx.progress(1)
        while True:
            try:
                await asyncio.Event().wait()
            except BaseException as error:
                caught.append(type(error))
                if len(caught) > 2:  # by then it is the garbage collector that asks
                    raise

    caught: list[type[BaseException]] = []
    outcome, _, left = stopped(function, grace=0.05)
    assert (outcome.status, left) == ("cancelled", 0)
    assert caught[:2] == [asyncio.CancelledError, GeneratorExit]


def test_a_result_after_the_stop_is_kept() -> None:
    """A function that returns although it was stopped keeps its result; the outcome is the reason."""

    async def function(ctx: Context) -> str:
        ctx.progress(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "partial"
        return "whole"

    outcome, _, left = stopped(function)
    assert (outcome.status, outcome.result, left) == ("cancelled", "partial", 0)


def test_timeouts_and_groups_inside_a_function_work() -> None:
    """The function's own cancellations stay its own."""

    async def function(ctx: Context) -> list[str]:
        said = []
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            said.append("timeout")
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())
                raise ValueError
        except* ValueError:
            said.append("group")
        assert await asyncio.wait_for(asyncio.sleep(0, "waited"), 5) == "waited"
        return said

    assert on_loop(function).result == ["timeout", "group"]


def test_a_stop_from_inside_the_function() -> None:
    """A stop that the function itself causes, by a report over its budget, leaves the worker's task clean."""

    async def main() -> tuple[Outcome, int]:
        stop = Stop()

        class Watching(Heard):
            def usage(self, usage: Any) -> None:
                stop.request(OutcomeClass.OVER_BUDGET, "too much")

        async def function(ctx: Context) -> str:
            ctx.usage(tokens=10)
            return "returned without another await"

        outcome = await PythonAgent.from_function(agent("it")(function)).execute(a_claim(), Watching(), stop)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        return outcome, task.cancelling()

    outcome, left = run_async(main)
    assert (outcome.status, left) == ("over_budget", 0)
    assert outcome.result == "returned without another await"


def test_a_stop_before_the_start() -> None:
    """A task that is to end before it began does nothing."""

    async def main() -> Outcome:
        stop = Stop()
        stop.request(OutcomeClass.INTERRUPTED)

        async def function(ctx: Context) -> None:
            raise AssertionError("it ran")

        return await PythonAgent.from_function(agent("it")(function)).execute(a_claim(), Heard(), stop)

    assert run_async(main).status is OutcomeClass.INTERRUPTED


def test_the_workers_own_cancellation_passes_through() -> None:
    """Without a stop, cancelling the task that executes is not the function's outcome."""

    async def main() -> None:
        async def function(ctx: Context) -> None:
            ctx.progress(1)
            await asyncio.Event().wait()

        heard = Heard()
        made = PythonAgent.from_function(agent("it")(function))
        running = asyncio.ensure_future(made.execute(a_claim(), heard, Stop()))
        await until(lambda: heard.progressed)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_async(main)


def test_a_late_stop_hits_nobody() -> None:
    """A stop that is asked for after the end does not cancel what the worker's task does next."""

    async def main() -> None:
        async def function(ctx: Context) -> None: ...

        stop = Stop()
        await PythonAgent.from_function(agent("it")(function)).execute(a_claim(), Heard(), stop)
        stop.request(OutcomeClass.CANCELLED)
        await asyncio.sleep(0)

    run_async(main)


def test_thousands_at_once_need_no_task_of_their_own() -> None:
    """An async function runs in the task that executes it."""

    async def main() -> tuple[int, int]:
        gate = asyncio.Event()
        tasks = 0

        async def function(ctx: Context) -> None:
            await gate.wait()

        made = PythonAgent.from_function(agent("it")(function))
        before = len(asyncio.all_tasks())
        running = [asyncio.ensure_future(made.execute(a_claim(), Heard(), Stop())) for _ in range(1000)]
        await asyncio.sleep(0)
        tasks = len(asyncio.all_tasks()) - before
        gate.set()
        outcomes = await asyncio.gather(*running)
        return tasks, sum(outcome.status is OutcomeClass.DONE for outcome in outcomes)

    assert run_async(main) == (1000, 1000)


# -- by dotted path


@pytest.fixture
def plan_folder(tmp_path: Path) -> Iterator[Path]:
    """A plan's folder; what was imported from it is forgotten."""
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("planned"):
            del sys.modules[name]


def defined(folder: Path, python: str, *tasks: Any, **fields: Any) -> list[Outcome]:
    """Run tasks with the agent of a definition in a plan in *folder*."""

    async def main() -> list[Outcome]:
        made = PythonAgent.from_definition(AgentDefinition("it", "hash", python=python, base_dir=str(folder), **fields))
        claim = a_claim()
        try:
            return [
                await made.execute(a_claim(input=task, claimed_by=claim.claimed_by), Heard(), Stop()) for task in tasks
            ]
        finally:
            await made.aclose()

    outcomes: list[Outcome] = run_async(main)
    return outcomes


def test_functions_by_dotted_path(plan_folder: Path) -> None:
    """A module beside the plan is found; async functions run here, plain ones in a child, decorated or not."""
    (plan_folder / "planned_one.py").write_text(
        "import os\nfrom orchestrator.agents.functions import agent\n"
        "async def here(ctx): return [ctx.input, os.getpid()]\n"
        "def there(ctx): return [ctx.input, os.getpid()]\n"
        "class Box:\n    @staticmethod\n    @agent('other')\n    def inside(ctx): return [ctx.input, os.getpid()]\n"
    )
    (here,) = defined(plan_folder, "planned_one:here", 1)
    assert here.result == [1, os.getpid()]
    there, again = defined(plan_folder, "planned_one:there", 1, 2)
    assert there.result[1] == again.result[1] != os.getpid()
    (inside,) = defined(plan_folder, "planned_one:Box.inside", 3)
    assert inside.result[0] == 3
    assert inside.result[1] != os.getpid()


def test_a_definition_in_a_child_gets_its_environment(plan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """env and dir of a definition hold for its children."""
    monkeypatch.setenv("PGPASSWORD", "hidden")
    (plan_folder / "planned_two.py").write_text(
        "import os\nasync def look(ctx): return [os.environ.get('A'), os.environ.get('PGPASSWORD'), os.getcwd()]\n"
    )
    (outcome,) = defined(plan_folder, "planned_two:look", 1, isolation="process", env_set={"A": "b"}, dir=".")
    assert outcome.result == ["b", None, str(plan_folder.resolve())]


@pytest.mark.parametrize("isolation", ["loop", "process"])
def test_secrets_of_a_definition_are_hidden(plan_folder: Path, monkeypatch: pytest.MonkeyPatch, isolation: str) -> None:
    """S38: a value under env.secret is in nothing that a function says, returns, keeps or raises."""
    monkeypatch.setenv("API_TOKEN", 'tok"é-0123456789')
    (plan_folder / "planned_secret.py").write_text(
        "import os, sys\nfrom orchestrator.agents.functions import agent\n"
        "async def tells(ctx):\n"
        "    t = os.environ['API_TOKEN']\n"
        "    for part in (t[:5], t[5:]): print(end=part, flush=True)\n"
        "    ctx.progress(5, t); ctx.log(t); ctx.session(t); ctx.usage(tokens=5, model=t)\n"
        "    assert await ctx.step('one', lambda: [t]) == ['[secret API_TOKEN]']\n"
        "    if ctx.input == 1: return {t: [t]}\n"
        "    if ctx.input == 2: raise ValueError(t)\n"
        "    await ctx.ask('Use ' + t, choices=[t, 'no'])\n"
    )
    given = AgentDefinition(
        "it",
        "hash",
        python="planned_secret:tells",
        base_dir=str(plan_folder),
        isolation=isolation,
        env_secret=("API_TOKEN",),
    )
    live = Heard()

    async def main() -> list[Outcome]:
        made = PythonAgent.from_definition(given)
        try:
            return [await made.execute(a_claim(input=number), live, Stop()) for number in (1, 2, 3)]
        finally:
            await made.aclose()

    outcomes: list[Outcome] = run_async(main)
    assert outcomes[0].result == {"[secret API_TOKEN]": ["[secret API_TOKEN]"]}
    assert outcomes[1].message == "ValueError: [secret API_TOKEN]"
    assert outcomes[2].asks[0].question == "Use [secret API_TOKEN]"
    assert outcomes[2].asks[0].choices == ("[secret API_TOKEN]", "no")
    said = repr((outcomes, live.written, live.progressed, live.sessions, live.used, live.kept))
    assert "0123456789" not in said


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("planned_none:x", "No module named 'planned_none'"),
        ("planned_bad:x", "ZeroDivisionError"),
        ("planned_bad2:x", "sys.exit"),
        ("planned_good:x", "no attribute 'x'"),
        ("planned_good:five", "no function that returns a result"),
        ("planned_good", "expected package.module:function"),
    ],
)
def test_what_cannot_be_imported_is_permanent(plan_folder: Path, python: str, words: str) -> None:
    """An import error fails each task at once, with its words, and nothing else."""
    (plan_folder / "planned_bad.py").write_text("1 / 0\n")
    (plan_folder / "planned_bad2.py").write_text("import sys; sys.exit(1)\n")
    (plan_folder / "planned_good.py").write_text("five = 5\n")
    for outcome in defined(plan_folder, python, 1, 2):
        assert (outcome.status, outcome.cause) == ("permanent", "import_error")
        assert words in str(outcome.message)


def test_an_import_that_only_fails_in_the_child_is_permanent(plan_folder: Path) -> None:
    """A module that imports here and not there is an import error with the child's traceback."""
    (plan_folder / "planned_three.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}, 'only there'\ndef function(ctx): ...\n"
    )
    (outcome,) = defined(plan_folder, "planned_three:function", 1)
    assert (outcome.status, outcome.cause) == ("permanent", "import_error")
    assert "only there" in str(outcome.message)
    assert "planned_three.py" in outcome.notes[0]


def test_definitions_of_plans_are_known_by_their_hash() -> None:
    """Only an agent of a plan claims by its definition's hash."""
    local = PythonAgent.from_definition(AgentDefinition("it", "h", local=True, python="a:b", max_retries=4))
    assert (local.definition, local.defaults.max_retries) == ("h", 4)
    assert PythonAgent.from_definition(AgentDefinition("it", "h", python="a:b")).definition is None
    with pytest.raises(InvalidInput):
        PythonAgent.from_definition(AgentDefinition("it", "h", python="a:b", isolation="thread"))


# -- sessions


async def goes_on(ctx: Context) -> dict[str, str]:
    """Fail in a session, after a word if the input says so."""
    if ctx.input == "speaks":
        ctx.log("working")
    if ctx.session:
        raise RuntimeError("no such session")
    return {"session": ctx.session}


async def in_session(ctx: Context) -> dict[str, str]:
    """Say in which session it works."""
    return {"session": ctx.session}


def of_policy(function: str, policy: str, given: str | None = None) -> Outcome:
    """One execution with the session of an attempt before."""
    definition = AgentDefinition("it", "hash", python=f"tests.test_python_agents:{function}", session=policy)
    return execute(PythonAgent.from_definition(definition), a_claim(session="s-1", input=given))


def test_the_session_of_the_attempt_before_by_policy() -> None:
    """It is given to the function, unless its agent says fresh."""
    assert of_policy("in_session", "resume").result == {"session": "s-1"}
    assert of_policy("in_session", "resume-then-fresh").result == {"session": "s-1"}
    assert of_policy("in_session", "fresh").result == {"session": ""}


def test_a_session_that_cannot_be_resumed_is_left() -> None:
    """resume-then-fresh: what fails before its first word is called once more without the session, and a note says so."""
    outcome = of_policy("goes_on", "resume-then-fresh")
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, {"session": ""})
    assert outcome.notes[0] == "session s-1 could not be resumed (RuntimeError: no such session); started a fresh one"
    assert of_policy("goes_on", "resume-then-fresh", "speaks").status is OutcomeClass.TRANSIENT
    assert of_policy("goes_on", "resume").status is OutcomeClass.TRANSIENT
