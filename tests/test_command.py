"""Commands as agents: what they are given, what is read from them, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents import processes
from orchestrator.agents.command import CommandAgent
from orchestrator.agents.launch import shell_script
from orchestrator.agents.protocol import Stop
from orchestrator.domain.given import AgentDefinition
from orchestrator.domain.outcome import Outcome
from orchestrator.domain.words import OutcomeClass
from orchestrator.errors import InvalidInput
from tests.running import FAKE, PART, Forgetful, Heard, a_claim, execute, is_running, pids_in, until

PYTHON = sys.executable


def agent(*command: str, **fields: Any) -> CommandAgent:
    """An agent with this command."""
    return CommandAgent(AgentDefinition(name="coder", hash="h", command=command, **fields))


def fake(*mode: str, **fields: Any) -> CommandAgent:
    """The stand-in agent in this mode, read as claude."""
    return agent(*FAKE, *mode, **{"output": "claude", **fields})


def script(code: str, *arguments: str, **fields: Any) -> CommandAgent:
    """An agent that runs this Python."""
    return agent(PYTHON, "-c", code, *arguments, **fields)


# -- what it is given --------------------------------------------------------------------------------------------------


def test_the_prompt_comes_on_stdin_and_then_the_end() -> None:
    """The agent reads exactly the prompt, whatever its size; what is no text arrives as JSON."""
    for given, size in (("fix it", 6), ("ä" * 3_000_000, 6_000_000), ({"a": [1, None]}, 16)):
        outcome = execute(agent(*FAKE, "stdin"), a_claim(input=given))
        assert outcome.status == OutcomeClass.DONE
        assert outcome.result.startswith(f"read {size} bytes\n")


def test_without_a_prompt_the_input_ends_at_once() -> None:
    """S29: an agent that reads its input to the end never hangs."""
    assert execute(agent(*FAKE, "stdin")).result.startswith("read 0 bytes\n")


def test_an_agent_need_not_read_its_prompt() -> None:
    """A prompt larger than a pipe that nobody reads neither blocks nor fails the attempt."""
    assert execute(agent("true"), a_claim(input="x" * 1_000_000)).status == OutcomeClass.DONE


def test_the_prompt_as_argument() -> None:
    """It stands where the command says, else at the end; the input is then empty."""
    code = "import sys; print(sys.argv[1:], sys.stdin.read() == '')"
    assert execute(script(code, prompt="argument"), a_claim(input="do {x}")).result == "['do {x}'] True"
    at = script(code, "--say={prompt}", "end", prompt="argument")
    assert execute(at, a_claim(input="it")).result == "['--say=it', 'end'] True"


def test_the_prompt_as_file() -> None:
    """The placeholder is the path of a private file, which is gone afterwards."""
    code = "import os, sys; p = sys.argv[1]; print(p, oct(os.stat(p).st_mode & 0o777), len(open(p).read()))"
    path, mode, size = execute(script(code, prompt="file"), a_claim(input="x" * 300_000)).result.split()
    assert (mode, size) == ("0o600", "300000")
    assert not Path(path).exists()


def test_a_prompt_too_long_for_an_argument_is_one_clear_refusal() -> None:
    """S28: the limit and the remedy are named, in bytes, and no retry is wasted."""
    for prompt in ("x" * 131_072, "😀" * 33_000):
        outcome = execute(agent("echo", prompt="argument"), a_claim(input=prompt))
        assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "argument_too_long")
        assert outcome.message is not None
        assert "131,071" in outcome.message
        assert "prompt: stdin" in outcome.message
    assert execute(agent("true", prompt="argument"), a_claim(input="x" * 131_071)).status == OutcomeClass.DONE


def test_arguments_that_are_too_long_together_are_refused_likewise() -> None:
    """The system's limit for all arguments ends in the same words."""
    many = {f"p{number}": "x" * 131_000 for number in range(80)}
    outcome = execute(agent("true", *(f"{{{name}}}" for name in many)), a_claim(params=many))
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "argument_too_long")


def test_a_nul_cannot_be_passed_on() -> None:
    """A value with a NUL is refused by name instead of failing somewhere."""
    outcome = execute(agent("true", "{x}"), a_claim(params={"x": "a\0b"}))
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "bad_input")


HOSTILE = (
    "x; touch pwned1", "$(touch pwned2)", "`touch pwned3`", "' && touch pwned4 '", '" && touch pwned5 "',
    "line\ntouch pwned6", "--flag=evil", "{0.__class__}", "{secrets}", "%s", "  two  blanks ", "", "*", "\\", "${HOME}",
    "a'b\"c", "-n", "é😀",
)  # fmt: skip


def test_a_value_is_exactly_one_argument(tmp_path: Path) -> None:
    """S37: whatever a title or a prompt holds, it arrives unchanged as one argument and nothing is run."""
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    for value in HOSTILE:
        given = script(code, "{title}", "a {title} b", "{prompt}", "{x.y}", output="json", dir=str(tmp_path))
        outcome = execute(given, a_claim(title=value, input=value, params={"x": {"y": value}}))
        assert outcome.result == [value, f"a {value} b", value, value]
    assert list(tmp_path.iterdir()) == []


def test_a_value_in_a_shell_command_is_a_variable(tmp_path: Path) -> None:
    """S37: with ``shell: true`` a value is no syntax either: bare, in double and single quotes, in a substitution."""
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    (tmp_path / "say.py").write_text(code)
    command = f"""{PYTHON} say.py {{title}} "{{title}}" 'a {{title}} b' "$(printf '%s.' {{title}})" it\\'s {{x.y}} # {{title}}"""
    given = CommandAgent(
        AgentDefinition(name="coder", hash="h", command=command, shell=True, output="json", dir=str(tmp_path))
    )
    for value in HOSTILE:
        outcome = execute(given, a_claim(title=value, params={"x": {"y": value}}))
        assert outcome.result == [value, value, f"a {value} b", f"{value}.", "it's", value], value
    assert [path.name for path in tmp_path.iterdir()] == ["say.py"]


@pytest.mark.parametrize(
    "front", [["sh", "-c"], ["/bin/bash", "-euo", "pipefail", "-c"], ["bash", "-c", "-e"], ["env", "X=1", "sh", "-ec"]]
)
def test_a_value_in_the_text_of_a_shell_is_a_variable(front: list[str], tmp_path: Path) -> None:
    """S37: ``sh -c`` written out as a list is a shell as well, and its values are no syntax."""
    given = agent(
        *front, "printf '%s|' {title} \"{x.y}\" '{title}' {session} \"$1\"", "sh", "{title}", dir=str(tmp_path)
    )
    for value in HOSTILE[:12]:
        outcome = execute(given, a_claim(title=value, params={"x": {"y": value}}))
        assert outcome.result == f"{value}|{value}|{value}||{value}|".strip(), value
    assert list(tmp_path.iterdir()) == []


def test_a_shell_template_keeps_its_own_braces() -> None:
    """Only placeholders are replaced, each reference by one variable; doubled braces are the literal text."""
    text, used = shell_script("awk '{print $1}' {a} ${{HOME}} {{a}} \"{a}\" {b.c}")
    assert text == (
        'awk \'{print $1}\' "${ORCHESTRATOR_VALUE_1}" ${HOME} {a} "${ORCHESTRATOR_VALUE_1}" "${ORCHESTRATOR_VALUE_2}"'
    )
    assert used == {"ORCHESTRATOR_VALUE_1": "a", "ORCHESTRATOR_VALUE_2": "b.c"}


def test_without_shell_a_text_is_only_split() -> None:
    """A command that is one text is cut into arguments where the file says, not where a value does."""
    given = CommandAgent(AgentDefinition(name="coder", hash="h", command="printf '%s|' {title} '$HOME;'"))
    assert execute(given, a_claim(title="a b")).result == "a b|$HOME;|"


def test_an_unknown_placeholder_is_refused_by_name() -> None:
    """A template that this task cannot fill ends the task with the nearest name."""
    outcome = execute(agent("true", "{titel}"), a_claim(title="x"))
    assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, "bad_template")
    assert "title" in (outcome.message or "")


def test_without_a_session_its_option_is_left_out() -> None:
    """``--resume {session}`` stands in the command from the first attempt on, and counts from the second."""
    given = agent("echo", "run", "--resume", "{session}", "--sid={session}", "end")
    assert execute(given).result == "run end"
    assert execute(given, a_claim(session="s-1")).result == "run --resume s-1 --sid=s-1 end"
    fresh = agent("echo", "run", "--resume", "{session}", session="fresh")
    assert execute(fresh, a_claim(session="s-1")).result == "run"


def test_a_session_that_cannot_be_resumed_is_begun_afresh_if_asked() -> None:
    """``resume-then-fresh`` runs once more without the session when the resumed run fails without a word."""
    code = "import os, sys\nif 'ORCHESTRATOR_SESSION' in os.environ: sys.exit('no such session')\nprint('fresh')"
    outcome = execute(script(code, session="resume-then-fresh"), a_claim(session="s-1"))
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "fresh")
    assert "s-1 could not be resumed" in outcome.notes[0]
    assert execute(script(code), a_claim(session="s-1")).status == OutcomeClass.TRANSIENT


def test_the_variables_of_the_contract(tmp_path: Path) -> None:
    """Task, attempt, workspace, session and files are in the environment; nothing else of ours is."""
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    outcome = execute(script(code, output="json", dir=str(tmp_path)), a_claim(session="s-9", attempt=3))
    seen = {name: value for name, value in outcome.result.items() if name.startswith("ORCHESTRATOR_")}
    assert set(seen) == {
        f"ORCHESTRATOR_{name}"
        for name in ["TASK_ID", "ATTEMPT", "WORKSPACE", "SESSION", "EVENTS", "CHECKPOINTS", "ANSWERS", "TREE"]
    }
    assert (seen["ORCHESTRATOR_TASK_ID"], seen["ORCHESTRATOR_ATTEMPT"]) == ("7", "3")
    assert (seen["ORCHESTRATOR_WORKSPACE"], seen["ORCHESTRATOR_SESSION"]) == (str(tmp_path), "s-9")
    assert Path(seen["ORCHESTRATOR_EVENTS"]).read_bytes() == b""  # untouched: the next execution takes it
    assert json.loads(Path(seen["ORCHESTRATOR_CHECKPOINTS"]).read_text()) == {}


def test_nesting_marks_do_not_reach_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """S35: a worker that was started from inside an agent starts agents that do not see it."""
    for name in ("CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "AI_AGENT"):
        monkeypatch.setenv(name, "1")
    outcome = execute(fake("noenv", output="text", env_set={"TOKEN_OF_TEST": "hidden"}))
    assert outcome.status == OutcomeClass.DONE
    assert {"PATH", "TOKEN_OF_TEST", "ORCHESTRATOR_TASK_ID"} <= set(outcome.variables)
    assert not {"CLAUDECODE", "AI_AGENT"} & set(outcome.variables)


def test_directories(tmp_path: Path) -> None:
    """``dir`` is relative to the plan's folder, a task's goes before the agent's, a temporary one is gone afterwards."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    base = str(tmp_path)
    assert execute(agent("pwd", dir="a", base_dir=base)).result == f"{base}/a"
    assert execute(agent("pwd", dir="x", base_dir=base), a_claim(dir="a/b")).result == f"{base}/a/b"
    assert execute(agent("pwd", workspace="directory", base_dir=base)).result == base
    assert execute(agent("pwd", base_dir=base)).result == os.getcwd()
    made = Path(execute(agent("sh", "-c", "touch x; mkdir y; pwd", workspace="temporary")).result)
    assert made.parent.name.startswith("task-7-")
    assert not made.exists()


# -- what cannot be started --------------------------------------------------------------------------------------------


def test_what_cannot_be_started_is_permanent_and_named(tmp_path: Path) -> None:
    """S15: a missing command or directory, and what is no program, fail at once with their cause."""
    plain = tmp_path / "plain"
    plain.write_text("no program")
    strange = tmp_path / "strange"
    strange.write_bytes(b"\x01\x02\x03")
    strange.chmod(0o755)
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    for given, cause, named in (
        (agent(str(script)), "command_not_found", "interpreter in its first line"),
        (agent("no-such-command"), "command_not_found", "no-such-command"),
        (agent("/no/such/command"), "command_not_found", "/no/such/command"),
        (agent("true", dir="/no/such/dir"), "directory_missing", "/no/such/dir"),
        (agent("true", dir=str(plain)), "directory_missing", "is not a directory"),
        (agent(str(plain)), "command_not_executable", str(plain)),
        (agent(str(strange)), "command_not_executable", str(strange)),
    ):
        outcome = execute(given)
        assert (outcome.status, outcome.cause) == (OutcomeClass.PERMANENT, cause)
        assert named in (outcome.message or "")
    assert not processes.keeper().trees


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ()},
        {"command": ("a",), "shell": True},
        {"command": "a 'b"},
        {"command": ("a",), "prompt": "letter"},
        {"command": ("a",), "workspace": "moon"},
        {"command": ("a",), "output": "prose"},
    ],
)
def test_a_definition_that_can_never_work_is_refused(fields: dict[str, Any]) -> None:
    """Mistakes are found when the agent is built, not when a task has been claimed for it."""
    with pytest.raises(InvalidInput):
        CommandAgent(AgentDefinition(name="coder", hash="h", **fields))


# -- what it says ------------------------------------------------------------------------------------------------------


def test_zero_bytes_lose_no_result() -> None:
    """S24: a NUL in the output and in the result leaves the attempt done; the transcript shows a mark and says so."""
    live = Heard()
    outcome = execute(fake("nul"), live=live)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "a\0b")
    assert outcome.transcript.replaced
    assert live.text("stdout").startswith("a\ufffdb\n")
    assert live.text("stderr") == "\ufffd\n"


def test_bytes_that_are_no_utf8_lose_nothing_else() -> None:
    """S25: bad bytes are shown by a mark, everything behind them is there, the result is read."""
    live = Heard()
    outcome = execute(fake("badbytes"), live=live)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "ok")
    assert outcome.transcript.replaced
    text = live.text("stdout")
    assert text.startswith("start \ufffd\ufffd\ufffd end\n" + "y" * 299 + "\n" + "z" * 300_000 + "\n")


def test_a_character_that_is_cut_by_a_chunk_is_whole() -> None:
    """UTF-8 that arrives in two reads is one character, and an honest U+FFFD of the agent is no replacement."""
    code = PART + "for b in 'é😀\ufffd'.encode(): part(bytes([b]))"
    live = Heard()
    outcome = execute(script(code), live=live)
    assert live.text() == "é😀\ufffd"
    assert not outcome.transcript.replaced
    assert outcome.transcript.bytes == live.sizes == 9


def test_long_lines_and_full_pipes_block_nobody() -> None:
    """S26: 1 MB on stderr before anything on stdout, then a line of 8 MB, then the result."""
    live = Heard()
    outcome = execute(fake("walls"), live=live)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "ok")
    assert len(live.text("stderr")) == 1_000_000
    assert live.text("stdout").startswith("x" * 8_000_000 + "\n")
    assert outcome.transcript.bytes == live.sizes


@pytest.mark.slow
def test_gigabytes_cost_no_memory() -> None:
    """S27: three agents at once that say 1 GB each are done in memory that does not grow with it."""

    async def main() -> list[Outcome]:
        given = fake("flood", "1000")
        return await asyncio.gather(*(given.execute(a_claim(), Forgetful(), Stop()) for _ in range(3)))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = asyncio.run(main())
    assert [(outcome.status, outcome.result) for outcome in outcomes] == [(OutcomeClass.DONE, "ok")] * 3
    assert all(outcome.transcript.bytes > 1_000_000_000 for outcome in outcomes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_secrets_are_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """S38: printed whole, in two halves, in JSON and on stderr, the value of a secret reaches nobody."""
    value = 'tok-"ä"-0123456789'
    monkeypatch.setenv("API_TOKEN", value)
    live = Heard()
    whole = execute(fake("secret", "API_TOKEN", output="text", env_secret=("API_TOKEN",)), live=live)
    code = (
        "import json, os, sys; t = os.environ['API_TOKEN']\n"
        "open(os.environ['ORCHESTRATOR_EVENTS'], 'a').write(json.dumps({'type': 'result', 'value': {'k': t}}) + '\\n')\n"
        "sys.exit('it failed with ' + t)"
    )
    failed = execute(script(code, env_secret=("API_TOKEN",)), live=live)
    refused = execute(agent("/no/such/{t}", env_secret=("API_TOKEN",)), a_claim(params={"t": value}), live)
    shown = agent("x", f"--key={value}", env_secret=("API_TOKEN",)).describe()
    assert "tok [secret API_TOKEN]" in live.text()
    assert failed.result == {"k": "[secret API_TOKEN]"}
    assert "[secret API_TOKEN]" in (failed.message or "")
    for thing in (whole, failed, refused, live.written, shown):
        assert "0123456789" not in repr(thing)


def test_a_secret_that_is_short_or_missing_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run says that a secret could not be hidden, or was not there."""
    monkeypatch.setenv("PIN", "123")
    outcome = execute(agent("true", env_secret=("PIN", "NOT_THERE")))
    assert outcome.status == OutcomeClass.DONE
    assert any("PIN is too short" in note for note in outcome.notes)
    assert any("NOT_THERE is not set" in note for note in outcome.notes)


EVENTS = """
import json, os, sys, time
def say(**event):
    with open(os.environ["ORCHESTRATOR_EVENTS"], "a") as file: file.write(json.dumps(event) + "\\n")
say(type="session", id="s-1")
say(type="progress", percent=40, message="half way")
say(type="usage", id="a", input_tokens=900, output_tokens=100, cost_usd=0.5)
"""


def test_events_are_read_while_the_agent_runs() -> None:
    """Progress, usage and session arrive before the agent ends; its result counts, whatever it prints."""
    live = Heard()
    code = EVENTS + "say(type='result', value={'n': 1})\nprint('bye')\ntime.sleep(600)"
    outcome = execute(script(code), live=live, when=lambda heard: heard.used, reason=OutcomeClass.TIMED_OUT)
    assert outcome.status == OutcomeClass.TIMED_OUT
    assert live.progressed == [(40.0, "half way")]
    assert live.sessions == ["s-1"] == [outcome.session]
    assert outcome.usage is not None
    assert (outcome.usage.total_tokens, outcome.usage.cost_usd, outcome.usage.complete) == (1000, 0.5, False)
    assert outcome.result == {"n": 1}


@pytest.mark.parametrize("how", ["emptied", "replaced"])
def test_events_written_anew_are_read(tmp_path: Path, how: str) -> None:
    """``>`` instead of ``>>``, or a new file under the name: what stands there then is read too, with a note."""
    mark = tmp_path / "heard"
    code = (
        "import os, time\n"
        "path = os.environ['ORCHESTRATOR_EVENTS']\n"
        'with open(path, \'a\') as file: file.write(\'{"type": "progress", "percent": 40, "message": "half way"}\\n\')\n'
        f"while not os.path.exists({str(mark)!r}): time.sleep(0.005)\n"
        f"new = path if {how!r} == 'emptied' else path + '.new'\n"
        'with open(new, \'w\') as file: file.write(\'{"type": "result", "value": "ok"}\\n\')\n'
        "os.replace(new, path)"
    )

    class Marking(Heard):
        def progress(self, percent: float | None, message: str | None) -> None:
            super().progress(percent, message)
            mark.touch()

    live = Marking()
    outcome = execute(script(code), live=live)
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "ok")
    assert live.progressed == [(40.0, "half way")]
    assert any("written anew" in note for note in outcome.notes)


def test_no_execution_sees_the_events_of_another() -> None:
    """A file that was written to is removed, and the next execution begins with an empty one."""
    code = "import os; p = os.environ['ORCHESTRATOR_EVENTS']; print(p, os.path.getsize(p)); open(p, 'a').write('x')"
    seen = [execute(script(code)).result.split() for _ in range(3)]
    assert {size for _, size in seen} == {"0"}
    assert len({path for path, _ in seen}) == 3
    assert not any(Path(path).exists() for path, _ in seen)


def test_events_are_read_to_the_end() -> None:
    """What was appended just before the exit counts."""
    outcome = execute(script(EVENTS + "say(type='result', value=[1])"))
    assert (outcome.status, outcome.result, outcome.session) == (OutcomeClass.DONE, [1], "s-1")
    assert outcome.usage is not None
    assert outcome.usage.complete


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "mapped", "status"),
    [
        (0, {}, OutcomeClass.DONE),
        (75, {}, OutcomeClass.TRANSIENT),
        (77, {}, OutcomeClass.PERMANENT),
        (3, {}, OutcomeClass.TRANSIENT),
        (3, {3: "permanent"}, OutcomeClass.PERMANENT),
        (4, {4: "done"}, OutcomeClass.DONE),
    ],
)
def test_exit_codes(code: int, mapped: dict[int, str], status: OutcomeClass) -> None:
    """The contract's exit codes, and an agent's own."""
    outcome = execute(fake("exit", str(code), output="text", exit_codes=mapped))
    assert (outcome.status, outcome.exit_code, outcome.signal) == (status, code, None)


def test_a_signal_that_is_not_ours() -> None:
    """S15: an agent that somebody kills is a crash, with the signal on record."""
    outcome = execute(agent("sh", "-c", "kill -9 $$"))
    assert (outcome.status, outcome.cause, outcome.signal) == (OutcomeClass.TRANSIENT, "signal", signal.SIGKILL)


def test_a_stop_reaches_the_whole_tree_and_keeps_its_reason(tmp_path: Path) -> None:
    """S30: SIGTERM, then SIGKILL for the child that ignores it; the class is what was asked for."""
    beats = tmp_path / "beats"
    outcome = execute(
        agent(*FAKE, "tree", str(beats), kill_grace=0.2),
        when=lambda _: len(pids_in(beats)) == 3,
        reason=OutcomeClass.TIMED_OUT,
    )
    assert outcome.status == OutcomeClass.TIMED_OUT
    assert any("was killed" in note for note in outcome.notes)
    assert not [pid for pid in pids_in(beats) if is_running(pid)]


def test_a_stopped_attempt_keeps_its_usage_and_its_words() -> None:
    """S34: five usage reports and the text are there, marked as incomplete, the cost unknown and not 0."""
    live = Heard()
    outcome = execute(
        fake("usage-then-hang"), live=live, when=lambda heard: len(heard.used) == 5, reason=OutcomeClass.TIMED_OUT
    )
    assert outcome.status == OutcomeClass.TIMED_OUT
    assert outcome.usage is not None
    assert (outcome.usage.total_tokens, outcome.usage.cost_usd, outcome.usage.complete) == (5000, None, False)
    assert live.text("message") == "".join(f"step {number}" for number in range(5))
    assert outcome.transcript.bytes == live.sizes > 0


def test_words_after_the_request_to_end_are_kept() -> None:
    """What an agent says on SIGTERM belongs to the transcript, to the last byte."""
    code = (
        "import os, signal, sys, time\n"
        "def end(*_): os.write(1, b'w' * 200000 + b'last'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nos.write(1, b'first')\ntime.sleep(600)"
    )
    live = Heard()
    outcome = execute(script(code, kill_grace=60.0), live=live, when=lambda heard: heard.text())
    assert outcome.status == OutcomeClass.CANCELLED
    assert live.text() == "first" + "w" * 200_000 + "last"


@pytest.mark.parametrize("talks", [False, True])
def test_a_background_child_does_not_delay_the_end(tmp_path: Path, talks: bool) -> None:
    """S31: a child that holds the pipes, silent or writing for ever, is ended and named; the run is done."""
    says = "while :; do echo noise; done" if talks else "sleep 600"
    command = f"({says}) & echo $! > {tmp_path}/pid; echo said; exit 0"
    outcome = execute(agent("sh", "-c", command))
    assert (outcome.status, outcome.exit_code) == (OutcomeClass.DONE, 0)
    assert "said" in outcome.result or talks  # a talker may push it out of the kept end
    assert any("still running after the agent had ended" in note for note in outcome.notes)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_daemon_without_a_mark_is_found_by_the_pipe(tmp_path: Path) -> None:
    """Forked twice, in a session of its own, its environment emptied: it still holds our pipe, and is ended."""
    code = (
        "import os, sys\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execve('/bin/sh', ['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 600'], {{}})\n    os._exit(0)\n"
        f"os.wait()\nimport time\nwhile not os.path.exists('{tmp_path}/pid'): time.sleep(0.01)"
    )
    outcome = execute(script(code))
    assert outcome.status == OutcomeClass.DONE
    assert any("1 process was still running" in note for note in outcome.notes)
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("reason", [OutcomeClass.CANCELLED, OutcomeClass.TIMED_OUT])
def test_a_stop_finds_a_daemon_without_a_mark_by_the_pipe(tmp_path: Path, reason: OutcomeClass) -> None:
    """The same of an agent that is asked to end: its outcome does not come before the daemon is gone."""
    pids = tmp_path / "pids"
    daemon = f"trap '' TERM; echo $$ > {pids}; echo ready; while :; do sleep 0.1; done"
    started = f"(setsid env -i PATH=$PATH sh -c {shlex.quote(daemon)} &); sleep 600"
    outcome = execute(
        agent("sh", "-c", started, kill_grace=0.2), when=lambda heard: "ready" in heard.text(), reason=reason
    )
    assert outcome.status is reason
    assert not is_running(int(pids.read_text()))


def test_the_end_of_a_pipeline_is_not_a_leftover() -> None:
    """Helpers that end by themselves in the moment after the agent are neither signalled nor mentioned."""
    outcome = execute(agent("sh", "-c", "(sleep 0.02; echo late) & echo early"))
    assert (outcome.status, outcome.result, outcome.notes) == (OutcomeClass.DONE, "early\nlate", ())


def test_alive_after_its_result() -> None:
    """S33: an agent that has given its result and does not end is ended, and the result counts."""
    outcome = execute(fake("hang-after-result", result_grace=0.05))
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "ok")
    assert any("after its result" in note for note in outcome.notes)
    assert (outcome.exit_code, outcome.signal) == (None, None)


def test_an_agent_that_goes_on_after_a_result_is_not_ended() -> None:
    """S33: the time to end counts from the last result, not from one after which another step began."""
    code = (
        "import json, os, time\n"
        "def say(*events): os.write(1, ''.join(json.dumps(event) + chr(10) for event in events).encode())\n"
        "end = {'type': 'step_finish', 'part': {'reason': 'stop'}}\n"
        "say(end, {'type': 'step_start'})\ntime.sleep(0.3)\nsay({'type': 'text', 'part': {'text': 'whole'}}, end)"
    )
    outcome = execute(script(code, output="opencode", result_grace=0.05))
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "whole")


def test_a_result_before_the_request_to_end_counts() -> None:
    """S33: a budget that strikes while the agent only tidies up takes no paid result away."""
    outcome = execute(
        fake("hang-after-result", result_grace=600.0),
        when=lambda heard: heard.text("result"),
        reason=OutcomeClass.TIMED_OUT,
    )
    assert (outcome.status, outcome.result) == (OutcomeClass.DONE, "ok")


def test_a_result_that_answers_the_request_to_end_does_not_count() -> None:
    """An agent that says success because it got SIGTERM has not succeeded."""
    code = (
        "import json, signal, sys, time\n"
        "def end(*_): print(json.dumps({'type': 'result', 'subtype': 'success', 'is_error': False, 'result': 'x'}),"
        " flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    outcome = execute(
        script(code, output="claude", kill_grace=60.0), when=lambda heard: heard.text(), reason=OutcomeClass.CANCELLED
    )
    assert outcome.status == OutcomeClass.CANCELLED


def test_silence_beyond_the_limit_is_stalled() -> None:
    """S33: an agent that goes silent is ended as stalled, its words kept."""
    live = Heard()
    outcome = execute(agent("sh", "-c", "echo so far; sleep 600", idle_seconds=0.1), live=live)
    assert outcome.status == OutcomeClass.STALLED
    assert live.text() == "so far\n"
    assert "no sign of life" in (outcome.message or "")


def test_events_and_stderr_are_signs_of_life() -> None:
    """An agent that only appends to its events file or to stderr is not silent."""
    code = EVENTS + (
        "for n in range(12): say(type='progress', percent=n); time.sleep(0.05)\n"
        "for n in range(12): print(n, file=sys.stderr, flush=True); time.sleep(0.05)\n"
    )
    assert execute(script(code, idle_seconds=0.5)).status == OutcomeClass.DONE


def test_an_open_tool_is_no_silence() -> None:
    """While a tool runs the idle limit is a longer one, and the message names the tool."""
    call = {"type": "assistant", "message": {"id": "m", "content": [{"type": "tool_use", "id": "t", "name": "Bash"}]}}
    command = ("sh", "-c", 'echo "$1"; sleep 600', "sh", json.dumps(call))
    live = Heard()
    started = time.monotonic()
    outcome = execute(agent(*command, output="claude", idle_seconds=0.1), live=live)
    assert outcome.status == OutcomeClass.STALLED
    assert time.monotonic() - started >= 0.4
    assert "Bash" in (outcome.message or "")


def test_asked_to_end_before_it_began(tmp_path: Path) -> None:
    """An attempt that is not wanted any more is not started."""

    async def main() -> Outcome:
        stop = Stop()
        stop.request(OutcomeClass.INTERRUPTED, "shutdown")
        return await agent("touch", str(tmp_path / "started")).execute(a_claim(), Heard(), stop)

    outcome = asyncio.run(main())
    assert (outcome.status, outcome.message) == (OutcomeClass.INTERRUPTED, "shutdown")
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_execution_leaves_nothing(tmp_path: Path) -> None:
    """When the worker drops the coroutine itself, the tree is ended before it lets go."""
    beats = tmp_path / "beats"

    async def main() -> None:
        running = asyncio.ensure_future(agent(*FAKE, "tree", str(beats)).execute(a_claim(), Heard(), Stop()))
        await until(lambda: len(pids_in(beats)) == 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not [pid for pid in pids_in(beats) if is_running(pid)]
        assert not processes.keeper().trees

    asyncio.run(main())


def test_fifty_at_once_leave_nothing() -> None:
    """200 agents, 50 at a time: all done, no zombie, no descriptor, no file."""

    async def main() -> None:
        given = agent("echo", "ok")
        gate = asyncio.Semaphore(50)

        async def one() -> OutcomeClass:
            async with gate:
                return (await given.execute(a_claim(input="p"), Heard(), Stop())).status

        await one()
        before = sorted(os.listdir("/proc/self/fd"))
        assert set(await asyncio.gather(*(one() for _ in range(200)))) == {OutcomeClass.DONE}
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert not processes.keeper().strangers()
        assert all(path.stat().st_size == 0 for path in Path(processes.keeper().directory).glob("events-*"))
        assert len(list(Path(processes.keeper().directory).iterdir())) <= 52

    asyncio.run(main())


def test_a_worker_with_an_endless_stdin_of_its_own() -> None:
    """S29: the worker's stdin, here a pipe that never ends, is not the agent's."""
    code = (
        "from tests.running import FAKE, execute\nfrom tests.test_command import agent\n"
        "print(execute(agent(*FAKE, 'stdin')).result)"
    )
    root = str(Path(__file__).parents[1])
    worker = subprocess.Popen(
        [PYTHON, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.read().startswith(b"read 0 bytes")
    worker.stdin.close()
    worker.stdout.close()
    assert worker.wait() == 0


def test_what_an_agent_is_for_people() -> None:
    """``describe`` has the names of the variables and the template of the command, no values."""
    given = agent("claude", "-p", "{prompt}", env_set={"SOME_NAME": "some value"}).describe()
    assert given["command"] == ["claude", "-p", "{prompt}"]
    assert "SOME_NAME" in given["environment"]
    assert "some value" not in repr(given)
