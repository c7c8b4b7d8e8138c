"""Agent functions that child processes of the tests import by name."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.agents.functions import Context, Permanent, RateLimited, agent


@dataclasses.dataclass
class Order:
    """A result with fields."""

    number: int
    paid: bool


@agent("whole", tasks_per_child=3)
def whole(ctx: Context) -> dict[str, Any]:
    """Say everything that can be said."""
    print("printed", ctx.input)
    print("a complaint", file=sys.stderr)
    subprocess.run(["echo", "from a child's child"], check=True)
    ctx.progress(50, "half")
    ctx.usage(input_tokens=9, output_tokens=1, cost_usd=0.5)
    ctx.usage(tokens="many")
    ctx.session("s-1")
    ctx.log("logged")
    return {"input": ctx.input, "params": ctx.params, "who": [ctx.agent, ctx.task_id, ctx.attempt, ctx.title]}


@agent("process")
def process(ctx: Context) -> int:
    """Name the child."""
    return os.getpid()


@agent("environment")
def environment(ctx: Context) -> dict[str, Any]:
    """What a child has been given: variables, and descriptors that lead anywhere."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    initial = Path("/proc/self/environ").read_bytes().decode("utf-8", "replace")
    return {"variables": dict(os.environ), "initial": initial, "files": files}


@agent("dies")
def dies(ctx: Context) -> None:
    """End the child by the signal that is the input, or exit."""
    if ctx.input == "exit":
        os._exit(3)
    os.kill(os.getpid(), ctx.input)
    time.sleep(600)


@agent("raises")
def raises(ctx: Context) -> None:
    """Raise what the input names."""
    if ctx.input == "limit":
        raise RateLimited(30)
    if ctx.input == "permanent":
        raise Permanent("the order is unknown", cause="unknown_order")
    if ctx.input == "exit":
        sys.exit(4)
    raise ValueError(f"not {ctx.input}")


@agent("returns")
def returns(ctx: Context) -> Any:
    """Return what the input names."""
    known: dict[str, Any] = {
        "dataclass": Order(7, True),
        "nan": float("nan"),
        "nested": {"order": Order(8, False), "path": Path("a/b")},
        "object": object(),
        "set": {1},
        "surrogate": "\ud800",
        "large": "x" * (65 << 20),
        "nul": "a\0b",
    }
    return known[ctx.input]


@agent("sleeps", kill_grace=0.2)
def sleeps(ctx: Context) -> None:
    """Sleep; clean up when told to end, or refuse with input ``stubborn``."""
    child = subprocess.Popen(["sleep", "600"])
    Path(ctx.params["pids"]).write_text(f"{os.getpid()} {child.pid}")
    while ctx.input == "stubborn":
        try:
            ctx.progress(1, "asleep")
            time.sleep(600)
        except BaseException:
            print("no")
    try:
        ctx.progress(1, "asleep")
        time.sleep(600)
    finally:
        print("cleaned up")


@agent("leaves")
def leaves(ctx: Context) -> int:
    """Return while a process that was started still runs."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


@agent("forks")
def forks(ctx: Context) -> str:
    """Fork, and return on both sides."""
    return "child" if os.fork() == 0 else "parent"


@agent("late")
def late(ctx: Context) -> Any:
    """Keep the context and use it in the next task."""
    held = getattr(late, "held", None)
    late.held = ctx  # type: ignore[attr-defined]
    if held is not None:
        held.progress(99, "from the task before")
        held.log("from the task before")
    return None


@agent("isolated", isolation="process", kill_grace=0.2)
async def isolated(ctx: Context) -> int:
    """An async function in a child."""
    await asyncio.sleep(0)
    if ctx.input == "sleep":
        try:
            ctx.progress(1, "asleep")
            await asyncio.sleep(600)
        finally:
            print("cleaned up")
    return os.getpid()


def plain(ctx: Context) -> str:
    """A function without a decorator, for definitions."""
    return f"plain {ctx.input}"


async def on_loop(ctx: Context) -> int:
    """An async one."""
    return os.getpid()


def wrapper(ctx: Context) -> Any:
    """A plain function that makes a coroutine."""
    return on_loop(ctx)


not_a_function = 5


def signal_name(number: int) -> str:
    """The name of a signal."""
    return signal.Signals(number).name


@agent("asks")
def asks(ctx: Context) -> dict[str, Any]:
    """Ask a person, blocking."""
    return {"answer": ctx.ask("Send it?", choices=["yes", "no"], deadline=60, default="no"), "pid": os.getpid()}


@agent("steps")
def steps(ctx: Context) -> dict[str, Any]:
    """Take two steps, blocking."""
    called = []

    def pid() -> int:
        called.append(1)
        return os.getpid()

    return {"pid": ctx.step("pid", pid), "twice": ctx.step("twice", lambda a: a * 2, 1), "called": len(called)}


@agent("dies_behind_a_step")
def dies_behind_a_step(ctx: Context) -> str:
    """Take a step; in the first attempt, be killed right behind it."""
    value = ctx.step("a", lambda: "first" if ctx.attempt == 1 else "second")
    if ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(value)
