"""What an agent says, from its pipe to every screen: order, raw bytes, and the time that a limit states."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine

from orchestrator.agents.building import build
from orchestrator.cli.following import Teller
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.snapshot import RunEvent
from orchestrator.worker import Worker
from tests.commands import Cli
from tests.conftest import WaitUntil
from tests.running import PART
from tests.working import Working, add, orchestrator, query

RESULT = '{"type":"result","subtype":"success","is_error":false,"result":"fine","usage":{"input_tokens":1}}'


def claude(code: str, **fields: Any) -> Any:
    """An agent that runs this Python and is read as claude."""
    return build(AgentDefinition("a", "h", command=(sys.executable, "-c", code), output="claude", **fields))


def work(url: str, agent: Any, **options: Any) -> None:
    """Work on all that is there, to its end."""
    orc = orchestrator(url)
    with Working(Worker(orc, [agent], 4, **options), until_idle=True) as working:
        working.join()
    orc.close()


def test_what_is_read_from_a_line_stands_behind_it(cli: Cli, database_url: str, engine: Engine) -> None:
    """A result line that comes in two writes is whole on every screen, and --raw has nothing but what was written."""
    code = f"{PART}\npart(b'before\\n'); part(b'''{RESULT}'''); part(b'\\n'); os.write(2, b'warned\\n')"
    (id_,) = add(engine)
    work(database_url, claude(code))
    kinds = [json.loads(line)["kind"] for line in cli("logs", str(id_), "--json").out.splitlines()]
    assert [kind for kind in kinds if kind != "stderr"] == ["stdout", "result"]
    shown = cli("logs", str(id_)).out.splitlines()
    assert [line for line in shown if line != "warned"] == ["before", RESULT, "fine"]
    raw = cli("logs", str(id_), "--raw").out
    assert sorted(raw.splitlines()) == sorted(["before", RESULT, "warned"])
    assert cli("logs", str(id_), "--raw", "--tail", "1").out in ("warned\n", RESULT + "\n")
    assert f"  {RESULT}\n" in cli("show", str(id_)).out


def test_the_time_that_a_limit_states_is_the_one_that_is_told(
    cli: Cli, database_url: str, engine: Engine, wait_until: WaitUntil
) -> None:
    """S15: a usage limit with a reset time costs one attempt; line, task and show all have that time."""
    reset = int(time.time()) + 3600
    words = json.dumps({"type": "result", "is_error": True, "result": f"Claude AI usage limit reached|{reset}"})
    (id_,) = add(engine)
    told: list[RunEvent] = []
    orc = orchestrator(database_url)
    teller = Teller(told.append, datetime.now(UTC), 1.0)
    with Working(Worker(orc, [claude(f"print({words!r}); raise SystemExit(1)")], 4, observers=[teller])):
        (event,) = wait_until(lambda: [event for event in told if event.kind == "retry"])
        task = cli("show", str(id_), "--json").json
    orc.close()
    at = datetime.fromtimestamp(reset, UTC)
    assert event.next_at == at
    assert datetime.fromisoformat(task["next_attempt_at"]) == at
    assert (task["status"], task["attempt"], task["retry_count"]) == ("pending", 1, 0)
    assert (task["error"]["class"], task["error"]["cause"]) == ("rate_limited", "usage_limit")
    assert [tuple(row) for row in query(engine, "SELECT status, attempt FROM runs")] == [("rate_limited", 1)]
    assert "usage limit reached" in cli("list").out
