"""Plain functions in warm child processes: what they say, how they end, and that nothing outlives them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.agents import census, child, children, processes
from orchestrator.agents.functions import AgentFunction, Context, agent
from orchestrator.agents.protocol import Stop
from orchestrator.agents.python import PythonAgent
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from tests import functions_for_children as functions
from tests.running import Heard, a_claim, is_running, run_async, until

ROOT = Path(__file__).parent.parent
OWNER = a_claim().claimed_by


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """No child process is left after a test, whatever happened in it."""
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("orchestrator.agents.child" in part or part == "sleep" for part in process.cmdline()):
                found.add(process.pid)
    return found


def run(
    fn: AgentFunction[..., Any],
    *inputs: Any,
    live: Heard | None = None,
    when: Callable[[Heard], Any] | None = None,
    reason: OutcomeClass = OutcomeClass.CANCELLED,
    **fields: Any,
) -> list[Outcome]:
    """Run one task after the other with each of *inputs*; with *when*, each is stopped as soon as that is true."""
    heard = live or Heard()

    async def main() -> list[Outcome]:
        made = PythonAgent.from_function(fn)
        outcomes = []
        try:
            for value in inputs:
                stop = Stop()
                running = asyncio.ensure_future(
                    made.execute(
                        a_claim(**{"input": value, "agent": fn.name, "claimed_by": OWNER, **fields}), heard, stop
                    )
                )
                if when is not None:
                    await until(lambda running=running: running.done() or when(heard))  # type: ignore[misc]
                    stop.request(reason, "because")
                outcomes.append(await running)
        finally:
            await made.aclose()
        return outcomes

    outcomes: list[Outcome] = run_async(main)
    return outcomes


def with_agent(fn: AgentFunction[..., Any], body: Callable[[PythonAgent], Awaitable[Any]]) -> Any:
    """Run *body* with the agent of *fn*, and close it."""

    async def main() -> Any:
        made = PythonAgent.from_function(fn)
        try:
            return await body(made)
        finally:
            await made.aclose()

    return run_async(main)


def test_everything_that_a_function_says_arrives() -> None:
    """Output, words, usage, session and result of a plain function are those of an agent."""
    heard = Heard()
    (outcome,) = run(functions.whole, {"a": [1]}, live=heard, params={"p": 1}, title="T")
    assert outcome.status is OutcomeClass.DONE
    assert outcome.result == {"input": {"a": [1]}, "params": {"p": 1}, "who": ["whole", 7, 1, "T"]}
    assert sorted(heard.text("stdout").splitlines()) == ["from a child's child", "printed {'a': [1]}"]
    assert heard.text("stderr") == "a complaint\n"
    assert heard.text("message") == "logged"
    assert heard.progressed == [(50.0, "half")]
    assert heard.sessions == ["s-1"]
    assert outcome.session == "s-1"
    assert outcome.usage is not None
    assert (outcome.usage.total_tokens, outcome.usage.cost_usd, outcome.usage.complete) == (10, 0.5, True)
    assert outcome.notes == ("usage without a valid number of tokens or USD was ignored",)


def test_children_are_warm_and_replaced_after_a_while() -> None:
    """One child runs task after task until it has run its share."""
    outcomes = run(functions.process, *range(3))
    assert len({outcome.result for outcome in outcomes}) == 1
    few = agent("few", tasks_per_child=2)(functions.process.function)
    pids = [outcome.result for outcome in run(few, *range(5))]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_child_that_dies_by_a_signal(number: int) -> None:
    """Death by a signal is transient, names it, and the next task gets a new child."""
    first, second = run(functions.dies, number, "exit")
    assert (first.status, first.cause, first.signal) == ("transient", "signal", number)
    assert first.message == f"its child process was killed by {functions.signal_name(number)}"
    assert (second.status, second.cause, second.exit_code) == ("transient", "exit_code", 3)


def test_exceptions_are_outcomes() -> None:
    """What a function raises is its outcome, with the traceback from its own lines on; the child lives on."""
    heard = Heard()
    plain, limit, permanent, leaves = run(functions.raises, "x\0y", "limit", "permanent", "exit", live=heard)
    assert (plain.status, plain.cause, plain.message) == ("transient", "ValueError", "ValueError: not x\0y")
    assert 'raise ValueError(f"not {ctx.input}")' in plain.notes[0]
    assert "child.py" not in plain.notes[0]
    assert plain.notes[0] in heard.text("error")
    assert (limit.status, limit.retry_after) == ("rate_limited", 30)
    assert (permanent.status, permanent.cause, permanent.message) == (
        "permanent",
        "unknown_order",
        "the order is unknown",
    )
    assert (leaves.status, leaves.cause) == ("transient", "SystemExit")


def test_results_that_json_holds() -> None:
    """Dataclasses and paths become JSON; odd characters arrive for the storage to judge."""
    found = run(functions.returns, "dataclass", "nested", "nan", "nul", "surrogate")
    assert [outcome.status for outcome in found] == ["done"] * 5
    assert found[0].result == {"number": 7, "paid": True}
    assert found[1].result == {"order": {"number": 8, "paid": False}, "path": "a/b"}
    assert repr(found[2].result) == "nan"
    assert (found[3].result, found[4].result) == ("a\0b", "\ud800")


def test_results_that_json_cannot_hold() -> None:
    """A result that cannot be stored is permanent and says why; the next task runs."""
    bad, odd, good = run(functions.returns, "object", "set", "dataclass")
    assert (bad.status, bad.cause) == ("permanent", "result_not_json")
    assert bad.message is not None
    assert "of type builtins.object, cannot be stored as JSON" in bad.message
    assert odd.cause == "result_not_json"
    assert good.status is OutcomeClass.DONE


@pytest.mark.slow
def test_a_result_beyond_all_measure() -> None:
    """A result of more than 64 MB is refused by name, not by breaking the pipe."""
    (outcome,) = run(functions.returns, "large")
    assert (outcome.status, outcome.cause) == ("permanent", "result_too_large")


def test_a_function_may_not_use_all_memory() -> None:
    """Beyond its limit a function gets MemoryError, and the child goes on."""

    @agent("hungry", memory_mb=512)
    def hungry(ctx: Context) -> int:
        return len(bytearray(ctx.input << 20))

    small, large, again = run(hungry, 1, 2_000, 1)
    assert (small.result, again.result) == (1 << 20, 1 << 20)
    assert (large.status, large.cause) == ("transient", "MemoryError")


def test_a_large_input_goes_through() -> None:
    """An input of many times the pipe's size arrives whole."""

    @agent("size")
    def size(ctx: Context) -> int:
        return len(ctx.input)

    (outcome,) = run(size, "x" * 3_000_000)
    assert outcome.result == 3_000_000


def test_a_stopped_function_cleans_up(tmp_path: Path) -> None:
    """A stop unwinds the function, ends what it started, and the outcome is the reason."""
    heard, pids = Heard(), tmp_path / "pids"
    (outcome,) = run(
        agent("sleeps", kill_grace=30.0)(functions.sleeps.function),
        "x",
        live=heard,
        when=lambda h: h.progressed,
        reason=OutcomeClass.TIMED_OUT,
        params={"pids": str(pids)},
    )
    assert (outcome.status, outcome.message, outcome.result) == ("timed_out", "because", None)
    assert "cleaned up" in heard.text()
    assert outcome.notes == ()
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


def test_a_function_that_refuses_to_stop_is_killed(tmp_path: Path) -> None:
    """After the grace the whole tree is killed, and the run says so."""
    heard, pids = Heard(), tmp_path / "pids"
    (outcome,) = run(functions.sleeps, "stubborn", live=heard, when=lambda h: h.progressed, params={"pids": str(pids)})
    assert outcome.status is OutcomeClass.CANCELLED
    assert outcome.notes == ("its process tree did not end by SIGTERM and was killed",)
    assert "no" in heard.text()
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


def test_what_a_function_leaves_behind_is_ended() -> None:
    """A process that still runs after the function has returned is ended; the result counts."""
    (outcome,) = run(functions.leaves, None)
    assert outcome.status is OutcomeClass.DONE
    assert outcome.notes == ("processes that the function had left running were ended with its child process",)
    assert not is_running(outcome.result)


def test_a_fork_that_returns_twice_is_one_result() -> None:
    """Only the child that we started answers for the task."""
    assert [outcome.result for outcome in run(functions.forks, None, None)] == ["parent", "parent"]


def test_a_context_of_a_task_before_is_silent() -> None:
    """A context that is used after its task has ended says nothing about the next one."""
    heard = Heard()
    run(functions.late, None, None, live=heard)
    assert heard.progressed == []
    assert heard.text("message") == ""


def test_an_async_function_in_a_child() -> None:
    """isolation="process" puts an async function where plain ones run, with the same end."""
    first, second = run(functions.isolated, None, None)
    assert first.result == second.result != os.getpid()
    heard = Heard()
    (stopped,) = run(functions.isolated, "sleep", live=heard, when=lambda h: h.progressed)
    assert stopped.status is OutcomeClass.CANCELLED
    assert "cleaned up" in heard.text()


def test_functions_inside_functions() -> None:
    """A local function is sent by value, with what it closes over."""
    word = "closed over"

    def helper(text: str) -> str:
        return text.upper()

    @agent("local")
    def local(ctx: Context) -> list[Any]:
        return [helper(word), ctx.input]

    assert [outcome.result for outcome in run(local, 1)] == [["CLOSED OVER", 1]]


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    """What no child could ever run is refused at once, with the way out."""
    held = asyncio.Lock()
    frame = sys._getframe()

    @agent("stuck")
    def stuck(ctx: Context) -> str:
        return f"{held} {frame}"

    with pytest.raises(InvalidInput) as refused:
        PythonAgent.from_function(stuck)
    assert "cannot be sent" in str(refused.value)
    assert "make it async" in str(refused.value.hint)


def test_the_worker_keeps_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function sees no settings of the worker; what starts with the process holds no database URL."""
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://hidden@db/x")
    monkeypatch.setenv("DATABASE_URL", "postgresql://hidden@db/own")
    monkeypatch.setenv("HARMLESS", "yes")
    (outcome,) = run(functions.environment, None)
    found = outcome.result
    assert "ORCHESTRATOR_DATABASE_URL" not in found["variables"]
    assert found["variables"]["HARMLESS"] == "yes"
    assert found["variables"][census.MARK_NAME] in found["initial"]
    assert "hidden" not in found["initial"]
    assert all(name.startswith(("socket:", "pipe:", "/proc/")) for name in found["files"])


def test_many_tasks_share_few_children() -> None:
    """Short tasks wait for a warm child rather than start one each."""

    async def body(made: PythonAgent) -> set[int]:
        claims = [a_claim(agent="process", claimed_by=OWNER) for _ in range(100)]
        outcomes = await asyncio.gather(*(made.execute(claim, Heard(), Stop()) for claim in claims))
        assert all(outcome.status is OutcomeClass.DONE for outcome in outcomes)
        return {outcome.result for outcome in outcomes}

    assert 1 <= len(with_agent(functions.process, body)) < 50


def test_blocked_tasks_get_children_of_their_own(tmp_path: Path) -> None:
    """Functions that block do not wait for each other: as many children as needed are started."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()

    @agent("meets")
    def meets(ctx: Context) -> int:
        import time as clock

        (Path(ctx.input) / str(os.getpid())).touch()
        while len(os.listdir(ctx.input)) < 5:
            clock.sleep(0.01)
        return os.getpid()

    async def body(made: PythonAgent) -> int:
        claims = [a_claim(agent="meets", input=str(meeting), claimed_by=OWNER) for _ in range(5)]
        outcomes = await asyncio.gather(*(made.execute(claim, Heard(), Stop()) for claim in claims))
        return len({outcome.result for outcome in outcomes})

    assert with_agent(meets, body) == 5


def test_an_idle_child_that_dies_is_replaced(wait_until: Any) -> None:
    """A child that was killed between two tasks costs neither of them."""

    async def body(made: PythonAgent) -> list[Outcome]:
        first = await made.execute(a_claim(agent="process", claimed_by=OWNER), Heard(), Stop())
        os.kill(first.result, signal.SIGKILL)
        await until(lambda: not os.path.exists(f"/proc/{first.result}"))
        return [first, await made.execute(a_claim(agent="process", claimed_by=OWNER), Heard(), Stop())]

    first, second = with_agent(functions.process, body)
    assert second.status is OutcomeClass.DONE
    assert first.result != second.result


def test_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a single child the task fails for now, in words; with one it waits for that."""
    real = processes.spawn
    refused: list[bool] = []

    def refuse(*given: Any, **options: Any) -> Any:
        if len(refused) < 1 or refused[-1]:
            refused.append(True)
            raise OSError(11, "Resource temporarily unavailable")
        return real(*given, **options)

    async def body(made: PythonAgent) -> list[Outcome]:
        monkeypatch.setattr(children, "spawn", refuse)
        first = await made.execute(a_claim(agent="process", claimed_by=OWNER), Heard(), Stop())
        refused.append(False)
        second = await made.execute(a_claim(agent="process", claimed_by=OWNER), Heard(), Stop())
        refused.append(True)
        both = [made.execute(a_claim(agent="process", claimed_by=OWNER), Heard(), Stop()) for _ in range(2)]
        return [first, second, *await asyncio.gather(*both)]

    first, *rest = with_agent(functions.process, body)
    assert (first.status, first.cause) == ("transient", "child_start")
    assert "Resource temporarily unavailable" in str(first.message)
    assert len({outcome.result for outcome in rest}) == 1


def test_children_that_never_get_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that ends at once is not started for ever."""
    monkeypatch.setattr(child, "BOOT", "raise SystemExit(9)")
    (outcome,) = run(functions.process, None)
    assert (outcome.status, outcome.cause) == ("transient", "child_start")
    assert outcome.message == "the child process ended with 9 before it was ready"


def test_a_stop_while_waiting_for_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that has no child yet ends at once when it is stopped."""
    monkeypatch.setattr(children, "WAIT_BEFORE_MORE", 600.0)

    async def body(made: PythonAgent) -> Outcome:
        stop = Stop()
        running = asyncio.ensure_future(made.execute(a_claim(agent="process"), Heard(), stop))
        await asyncio.sleep(0)
        stop.request(OutcomeClass.INTERRUPTED, "shutdown")
        return await running

    outcome = with_agent(functions.process, body)
    assert (outcome.status, outcome.message) == ("interrupted", "shutdown")


def test_children_carry_the_mark_of_the_present_worker() -> None:
    """A worker that registered anew does not go on with children that carry its dead name."""

    async def body(made: PythonAgent) -> tuple[int, int, int]:
        found = [
            (await made.execute(a_claim(agent="process", **who), Heard(), Stop())).result
            for who in ({"claimed_by": OWNER}, {"claimed_by": OWNER}, {})
        ]
        return found[0], found[1], found[2]

    first, second, third = with_agent(functions.process, body)
    assert first == second != third


SCRIPT = """
    import asyncio, os, sys, time
    from orchestrator.agents.functions import agent
    from orchestrator.agents.protocol import Stop
    from orchestrator.agents.python import PythonAgent
    from tests.running import Heard, a_claim

    class Thing:
        def __init__(self, value): self.value = value

    FACTOR = 6

    def times(value): return Thing(value * FACTOR)

    print("loaded", flush=True)

    {extra}

    @agent("multiply")
    def multiply(ctx):
        {line}
        return times(ctx.input).value

    async def main():
        made = PythonAgent.from_function(multiply)
        outcome = await made.execute(a_claim(agent="multiply", input=7), Heard(), Stop())
        print(outcome.result, outcome.message, flush=True)
        await made.aclose()

    {guard}
        asyncio.run(main())
"""


def script(path: Path, *, guard: str = "if True:", extra: str = "", line: str = "") -> Path:
    """A main script with an agent function in it."""
    path.write_text(textwrap.dedent(SCRIPT).format(guard=guard, extra=extra, line=line))
    return path


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_function_of_the_main_script(tmp_path: Path) -> None:
    """A script without a guard is not run again in its children."""
    done = run_script(script(tmp_path / "script.py"))
    assert done.stdout == "loaded\n42 None\n", done.stderr


def test_a_script_with_a_guard_may_be_loaded_again(tmp_path: Path) -> None:
    """Where a function cannot be copied, the guarded script is loaded by the child as multiprocessing does it."""
    guard = 'if __name__ == "__main__":'
    extra = "import threading; lock = threading.Lock()"
    done = run_script(script(tmp_path / "script.py", guard=guard, extra=extra, line="assert lock"))
    assert done.stdout == "loaded\n42 None\n", done.stderr


def test_a_script_without_a_guard_is_refused_where_it_would_run_twice(tmp_path: Path) -> None:
    """Where a function cannot be copied and the script has no guard, the error says what to do."""
    extra = "import threading; lock = threading.Lock()"
    done = run_script(script(tmp_path / "script.py", extra=extra, line="assert lock"))
    assert done.returncode == 1
    assert "runs in a child process but cannot be sent there" in done.stderr
    assert done.stdout == "loaded\n"


def test_children_end_with_their_worker(tmp_path: Path, wait_until: Any) -> None:
    """SIGKILL of the worker ends its children, and what they started."""
    path = script(
        tmp_path / "script.py",
        line="import subprocess; p = subprocess.Popen(['sleep', '600']); "
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}.'); time.sleep(600)",
    )
    worker = subprocess.Popen(
        [sys.executable, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("."))
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().strip(".").split()]
        assert all(is_running(pid) for pid in pids)
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))
