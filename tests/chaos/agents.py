"""The Python agents of the fleet. Their input is ``STEPS ENDING``, as for ``agent.sh``.

A step lasts a fifth of a second and leaves a line in the ledger. Endings: ``done``; ``later`` (a transient failure in odd
attempts); ``transient``; ``permanent``. The first line comes before anything else, the last one is the last act.
"""

from __future__ import annotations

import asyncio
import time

from orchestrator import Permanent, Transient, agent
from orchestrator.agents.functions import Context
from tests.chaos.ledger import BEAT, BEGIN, END, FAIL, note

STEP = 0.2


def _plan(ctx: Context) -> tuple[int, str]:
    steps, ending = str(ctx.input).split()
    if ending == "later":
        ending = "transient" if ctx.attempt % 2 else "done"
    return int(steps), ending


def _finish(ctx: Context, kind: str, ending: str) -> str:
    if ending == "done":
        note(ctx.task_id, ctx.attempt, END, kind)
        return f"{ctx.task_id}.{ctx.attempt}"
    note(ctx.task_id, ctx.attempt, FAIL, kind)
    raise (Permanent if ending == "permanent" else Transient)(f"as it was told to: {ending}")


@agent("loop", kill_grace=0.5)
async def on_loop(ctx: Context) -> str:
    """On the worker's own event loop."""
    note(ctx.task_id, ctx.attempt, BEGIN, "loop")
    steps, ending = _plan(ctx)
    for step in range(steps):
        await asyncio.sleep(STEP)
        note(ctx.task_id, ctx.attempt, BEAT, "loop")
        ctx.progress(100 * step / steps, f"step {step}")
        ctx.log(f"step {step} of {steps}")
    return _finish(ctx, "loop", ending)


@agent("child", kill_grace=0.5)
def in_child(ctx: Context) -> str:
    """In a warm child process."""
    note(ctx.task_id, ctx.attempt, BEGIN, "child")
    steps, ending = _plan(ctx)
    for step in range(steps):
        time.sleep(STEP)
        note(ctx.task_id, ctx.attempt, BEAT, "child")
        ctx.log(f"step {step} of {steps}")
    return _finish(ctx, "child", ending)
