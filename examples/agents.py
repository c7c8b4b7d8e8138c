"""A Python agent: a function of one argument, the context of its task.

A plan names it as ``python: "agents:report"``; an application gives it to ``Worker(agents=[report])``.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator import agent


@agent("report")
async def report(ctx: Any) -> str:
    """Put the answers of the surveys together to one page of Markdown."""
    title = ctx.input["title"]
    answers = {name: json.loads(text) for name, text in ctx.input["answers"].items()}
    page = [f"# {title}", ""]
    for number, (name, answer) in enumerate(answers.items()):
        ctx.progress(100 * number / len(answers), name)
        page += [f"## {name.capitalize()}", "", *_rows(answer), ""]
        ctx.log(f"{name}: {len(answer)} facts")
    ctx.progress(100, "done")
    return "\n".join(page)


def _rows(answer: dict[str, Any]) -> list[str]:
    rows: list[str] = []
    for key, value in answer.items():
        if isinstance(value, dict):
            rows.append(f"- {key}: " + ", ".join(f"{name} {_short(each)}" for name, each in value.items()))
        elif isinstance(value, list):
            rows.append(f"- {key}: " + (", ".join(map(_short, value)) or "none"))
        else:
            rows.append(f"- {key}: {value}")
    return rows


def _short(value: Any) -> str:
    return " ".join(str(each) for each in value.values()) if isinstance(value, dict) else str(value)
