"""Reading what agents say: pieces of any size, bytes of any kind, and the streams of real CLIs (S24-S27, S32)."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.agents import reading
from orchestrator.agents.readers import OUTPUTS, EventsFile, Findings, make_reader, merge
from orchestrator.errors import InvalidInput
from tests.told import Told, lines

INPUTS = Path(__file__).parent / "inputs"
TRANSCRIPTS = INPUTS / "agent-transcripts"
GOOD = b'{"type":"result","subtype":"success","is_error":false,"result":"ok","total_cost_usd":0.01}\n'


def read(output: str, *pieces: bytes, stderr: bytes = b"") -> tuple[Findings, Told]:
    """Everything that a reader of *output* makes of *pieces* of stdout."""
    told = Told()
    reader = make_reader(output, told)
    if stderr:
        reader.feed("stderr", stderr)
    for piece in pieces:
        reader.feed("stdout", piece)
    return reader.close(), told


# -- text and JSON


def test_text_is_the_result() -> None:
    """A text agent's result is its whole stdout, without the space around it."""
    findings, _ = read("text", b"  hello\n", b"world\n\n", stderr=b"noise")
    assert findings.result == "hello\nworld"
    assert findings.last_line == "noise"
    assert findings.succeeded is False


def test_long_text_keeps_its_end() -> None:
    """Of more than 64 KB the end is kept, cut between characters, and a note says so."""
    findings, _ = read("text", "é".encode() * 100_000, b"x the end")
    assert findings.result.endswith("the end")
    assert "�" not in findings.result
    assert len(findings.result.encode()) <= 64 * 1024
    assert findings.notes == ["the result is the last 64 KB of 200009 bytes of output"]


def test_a_whole_json_document() -> None:
    """A document over many lines is one value, whatever its shape."""
    findings, told = read("json", b'\xef\xbb\xbf{"a":\n', b" [1, 2]}\n")
    assert findings.result == {"a": [1, 2]}
    assert told.results == [{"a": [1, 2]}]
    assert read("json", b'"text"')[0].result == "text"


def test_the_last_line_that_is_json() -> None:
    """With other text around it, the last line that is JSON counts."""
    findings, _ = read("json", b'starting\n{"a": 1}\n{"a": 2}\ndone.\n')
    assert findings.result == {"a": 2}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('note\n{\n  "ok": false,\n  "items": [\n    "a",\n    "b"\n  ]\n}\n', {"ok": False, "items": ["a", "b"]}),
        ("note\n[\n  1,\n  2\n]\n", [1, 2]),
        ('{\n  "ok": 1\n}\nall done\n', {"ok": 1}),
        ('{\n  "ok": 1\n}\n42\n', 42),
        ('[1/3] begins\n{"a": 1}\n', {"a": 1}),
        ('{\n{"a": 1}\n', {"a": 1}),
        ("note\n[\n  1,\n  2\n", None),
        ("note\n[\n  1\n  2\n]\n", None),
        ('note\n{"a": [\n  oops\n  {"b": 1}\n]}\n', None),
    ],
)
def test_a_document_with_noise_around_it(text: str, result: Any) -> None:
    """A document over many lines is found among other text, and a piece of one is never taken for the whole."""
    findings, _ = read("json", text.encode())
    assert (findings.result, findings.has_result) == (result, result is not None)


def test_a_json_list_may_end_with_a_clis_result() -> None:
    """All events of a CLI as one list are judged by the result at its end."""
    events = [{"type": "system"}, {"type": "result", "is_error": True, "result": "Too many requests"}]
    findings, _ = read("json", json.dumps(events).encode())
    assert findings.is_error
    events[1] = {"type": "result", "is_error": False, "result": "fine"}
    findings, _ = read("json", json.dumps(events).encode())
    assert (findings.succeeded, findings.result) == (True, "fine")


def test_no_json_is_no_result() -> None:
    """Output that is no JSON gives no result."""
    findings, _ = read("json", b"starting\ndone.\n")
    assert not findings.has_result
    assert findings.last_line == "done."


def test_a_json_document_may_be_a_clis_result() -> None:
    """A result event as the only document is judged like one in a stream."""
    findings, _ = read("json", b'{"type":"result","is_error":true,"api_error_status":401,"result":"no"}')
    assert findings.is_error
    assert findings.fault is not None
    assert findings.fault.status == "unauthenticated"


def test_json_lines_end_with_a_result() -> None:
    """Of JSON lines the last one of type result counts, else the last object."""
    assert read("jsonl", lines({"a": 1}, {"type": "result", "value": 5}, {"b": 2}))[0].result == 5
    assert read("jsonl", lines({"type": "result", "value": 1}, {"type": "result", "value": [2]}))[0].result == [2]
    assert read("jsonl", lines({"a": 1}, {"b": 2}) + b"bye\n")[0].result == {"b": 2}
    assert not read("jsonl", b"bye\n")[0].has_result


# -- bytes, sizes, noise


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize(("file", "output"), [("1-ok", "claude"), ("4-denied", "claude"), ("5-other-cli", "codex")])
def test_pieces_of_any_size_read_the_same(size: int, file: str, output: str) -> None:
    """Where the pipe cut the stream makes no difference."""
    data = (TRANSCRIPTS / f"{file}.jsonl").read_bytes()
    whole, told = read(output, data)
    parts, told_parts = read(output, *(data[at : at + size] for at in range(0, len(data), size)))
    assert parts == whole
    assert (told_parts.messages, told_parts.tools, told_parts.used) == (told.messages, told.tools, told.used)


def test_bytes_that_are_not_utf8() -> None:
    """Bad bytes are replaced, and what follows them is read."""
    findings, told = read(
        "claude",
        b"start \x97\xc0\xff end\n" + b"z" * 300_000 + b"\n",
        b'{"type":"assistant","message":{"content":[{"type":"text","text":"a\xffb"}]}}\n' + GOOD,
    )
    assert findings.result == "ok"
    assert told.messages == ["a�b"]
    assert "�" in read("text", b"a\xffb")[0].result


def test_nul_and_control_characters() -> None:
    """A NUL byte, escaped or not, neither breaks a line nor loses a result."""
    findings, _ = read("claude", b'a\0b\n{"type":"result","is_error":false,"result":"a\\u0000b"}\n')
    assert findings.result == "a\0b"
    assert read("jsonl", b'{"type":"result","value":"a\0b"}\n')[0].result == "a\0b"


def test_lines_beyond_every_wall() -> None:
    """A line of 8 MB, 1 MB of stderr and 5 MB without an end do not hide the result."""
    big = lines({"type": "assistant", "message": {"content": [{"type": "text", "text": "x" * 8_000_000}]}})
    findings, told = read("claude", b"x" * 8_000_000 + b"\n", big, GOOD, b"y" * 5_000_000, stderr=b"e" * 1_000_000)
    assert findings.result == "ok"
    assert len(told.messages[0]) == 8_000_000
    assert findings.notes == []


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without end costs no more than the limit, is left out with a note, and the next line is read."""
    monkeypatch.setattr(reading, "LINE_LIMIT", 1 << 20)
    told = Told()
    reader = make_reader("claude", told)
    reader._lines = reading.Lines(1 << 20)  # type: ignore[attr-defined]
    piece = b'{"' * (1 << 15)
    tracemalloc.start()
    for _ in range(200):
        reader.feed("stdout", piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 << 20
    reader.feed("stdout", b"\n" + GOOD)
    findings = reader.close()
    assert findings.result == "ok"
    assert findings.notes == ["1 lines of more than 1 MB were left out"]


@pytest.mark.parametrize("output", ["text", "json", "jsonl", "claude"])
def test_floods_of_lines_are_held_by_nobody(output: str) -> None:
    """Many megabytes of plain lines leave a few behind."""
    told = Told()
    reader = make_reader(output, told)
    block = (b"l" * 99 + b"\n") * 10_000
    tracemalloc.start()
    for _ in range(64):
        reader.feed("stdout", block)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reader.feed("stdout", GOOD)
    assert held < 20 << 20
    findings = reader.close()
    assert "ok" in str(findings.result)


def test_noise_around_events() -> None:
    """Warnings, prefixes and half lines between events are passed over."""
    noise = b'warning: {not json}\n[debug] {"type":"system","session_id":"s-1"}\n}{\n{"type":\n\n[1]\nnull\n'
    findings, told = read("claude", noise, b"\r\n", GOOD.replace(b"\n", b"\r\n"), noise)
    assert findings.result == "ok"
    assert told.sessions == ["s-1"]


@pytest.mark.parametrize(
    "line",
    [b"[INFO] {1/3} %s", b"%s trailing", b"} %s {", b'{"type":"system"}%s', b'%s{"type":"system"}{"type"', b"{}%s"],
)
def test_noise_on_the_line_of_a_result(line: bytes) -> None:
    """A result is found before, behind and between noise and other events on its line."""
    findings, _ = read("claude", line % GOOD.strip() + b"\n")
    assert (findings.result, findings.succeeded) == ("ok", True)


def test_what_a_cut_event_quotes_is_no_event() -> None:
    """An object within an event that was cut is not taken for one of its own."""
    inner = '{"type":"result","is_error":false,"result":"quoted"}'
    findings, _ = read("claude", f'note {{"type":"user","message":{{"content":[{inner}'.encode())
    assert not findings.has_result


def test_the_last_of_two_results_wins() -> None:
    """Two result events: the later one is the result, and an error before it is forgotten."""
    bad = {"type": "result", "is_error": True, "result": "Overloaded"}
    findings, _ = read("claude", lines(bad) + GOOD)
    assert (findings.result, findings.is_error, findings.succeeded) == ("ok", False, True)
    findings, _ = read("claude", GOOD + lines(bad))
    assert (findings.is_error, findings.succeeded) == (True, False)


@settings(max_examples=60, deadline=None)
@given(output=st.sampled_from(OUTPUTS), data=st.data())
def test_no_output_breaks_a_reader(output: str, data: st.DataObject) -> None:
    """Events with wrong types everywhere and raw bytes are read without an error."""
    keys = st.sampled_from(
        [
            "type",
            "message",
            "content",
            "usage",
            "result",
            "item",
            "part",
            "error",
            "text",
            "id",
            "name",
            "tokens",
            "input_tokens",
            "total_cost_usd",
            "subtype",
            "is_error",
            "permission_denials",
            "stats",
            "status",
            "tool_name",
            "state",
            "value",
            "kind",
            "reason",
            "cache",
            "model",
            "api_error_status",
        ]
    )
    words = st.sampled_from(
        [
            "assistant",
            "user",
            "result",
            "system",
            "item.completed",
            "turn.completed",
            "turn.failed",
            "error",
            "message",
            "tool_use",
            "tool_result",
            "text",
            "step_finish",
            "step_start",
            "usage",
            "progress",
            "session",
            "checkpoint",
            "ask",
            "agent_message",
            "text",
            "success",
            "429",
        ]
    )
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )
    events = data.draw(st.lists(st.dictionaries(keys, values, max_size=5) | st.binary(max_size=30), max_size=6))
    told = Told()
    reader = make_reader(output, told)
    for event in events:
        reader.feed("stdout", event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n")
    assert isinstance(reader.close(), Findings)


def test_hostile_values_reach_the_result() -> None:
    """Every result of the hostile list that is JSON to Python arrives as it is."""
    for line in (INPUTS / "hostile-values.jsonl").read_bytes().splitlines():
        found = read("jsonl", line.replace(b'{"case"', b'{"type":"result","case"', 1) + b"\n")[0]
        assert repr(found.result) == repr(json.loads(line).get("result")), line[:80]


def test_an_unknown_output_is_named() -> None:
    """An output that nobody reads is refused with the known ones."""
    with pytest.raises(InvalidInput) as refused:
        make_reader("xml", Told())
    assert "claude" in str(refused.value.hint)


# -- the streams of the CLIs


def test_claude_in_full() -> None:
    """Messages, tools, session, result, and the usage of the last word."""
    findings, told = read("claude", (TRANSCRIPTS / "1-ok.jsonl").read_bytes())
    assert (findings.result, findings.succeeded, findings.session) == ("Fixed.", True, "s-0001")
    assert told.messages == ["Looking into the table tests."]
    assert told.tools == [("Bash", "make test"), ("Bash", "2 passed")]
    used = told.used
    assert (used.input_tokens, used.output_tokens, used.cost_usd, used.turns) == (2410, 9, 0.0123, 2)
    assert used.complete is True


def test_claude_usage_before_the_result() -> None:
    """A message that is told twice counts once; without the result its sum is incomplete."""
    data = (TRANSCRIPTS / "1-ok.jsonl").read_bytes().splitlines(keepends=True)
    _, told = read("claude", *data[:4])
    used = told.used
    assert (used.input_tokens, used.output_tokens, used.complete, used.cost_usd) == (1200, 3, False, None)


def test_claude_waits_for_a_tool() -> None:
    """A reader names the tool that is open, until the answer to it has come, also with two at once."""
    told = Told()
    reader = make_reader("claude", told)
    uses = [{"type": "tool_use", "id": f"t{n}", "name": name} for n, name in enumerate(("Read", "Bash"))]
    reader.feed("stdout", lines({"type": "assistant", "message": {"content": uses}}))
    assert reader.busy == "Bash"
    for name, still in (("t1", "Read"), ("t0", None)):
        answer = {"type": "tool_result", "tool_use_id": name, "content": "fine"}
        reader.feed("stdout", lines({"type": "user", "message": {"content": [answer]}}))
        assert reader.busy == still


def test_claude_denied_permissions_are_a_warning() -> None:
    """Denied tools do not undo a success, and are not hidden."""
    findings, _ = read("claude", (TRANSCRIPTS / "4-denied.jsonl").read_bytes())
    assert findings.succeeded
    assert findings.denied == ("Write: probe.txt",)
    assert findings.notes == ["warning: 1 tool use was denied (Write: probe.txt)"]


def test_codex_in_full() -> None:
    """The last message is the result, the turn's usage is the thread's sum, no cost is unknown cost."""
    findings, told = read("codex", (TRANSCRIPTS / "5-other-cli.jsonl").read_bytes())
    assert (findings.result, findings.succeeded) == ("Two files: `a.txt`, `b.txt`.", True)
    assert told.sessions == ["t-0001"]
    used = told.used
    assert (used.input_tokens, used.output_tokens, used.cost_usd, used.counter) == (5120, 111, None, "session_total")


def test_codex_failure_keeps_its_message() -> None:
    """A failed turn is a failure in its own words."""
    findings, _ = read("codex", (TRANSCRIPTS / "6-other-cli-failed.jsonl").read_bytes())
    assert findings.is_error
    assert not findings.has_result
    assert findings.fault is not None
    assert (findings.fault.status, findings.fault.message) == ("transient", "stream disconnected before completion")


def test_codex_goes_on_after_an_error_event() -> None:
    """What it could repair by itself is no failure."""
    findings, told = read(
        "codex",
        lines(
            {"type": "error", "message": "Reconnecting... 1/1"},
            {"type": "item.completed", "item": {"type": "agent_message", "text": "done"}},
            {"type": "turn.completed", "usage": {"input_tokens": 1, "output_tokens": 1}},
        ),
    )
    assert (findings.succeeded, findings.is_error, findings.result) == (True, False, "done")
    assert len(told.faults) == 1


def test_gemini_joins_what_came_after_the_last_tool() -> None:
    """Deltas are joined, its result event is the last word."""
    events = [
        {"type": "init", "session_id": "g-1", "model": "m"},
        {"type": "message", "role": "user", "content": "list"},
        {"type": "message", "role": "assistant", "content": "I look.", "delta": True},
        {"type": "tool_use", "tool_name": "ls", "parameters": {"path": "."}},
        {"type": "tool_result", "status": "success", "output": "a.txt"},
        {"type": "message", "role": "assistant", "content": "One ", "delta": True},
        {"type": "message", "role": "assistant", "content": "file.", "delta": True},
        {"type": "result", "status": "success", "stats": {"total_tokens": 60, "input_tokens": 50, "output_tokens": 10}},
    ]
    findings, told = read("gemini", lines(*events))
    assert (findings.result, findings.succeeded, findings.session) == ("One file.", True, "g-1")
    assert told.tools == [("ls", "."), ("ls", "a.txt")]
    assert (told.used.total_tokens, told.used.model) == (60, "m")
    events[-1] = {"type": "result", "status": "error", "error": {"message": "quota", "code": 429}}
    findings, _ = read("gemini", lines(*events))
    assert findings.fault is not None
    assert findings.fault.status == "rate_limited"


def test_opencode_adds_up_its_steps() -> None:
    """Usage comes by step, the text of the last step is the result."""

    def step(number: int, text: str, reason: str) -> list[dict[str, Any]]:
        tokens = {"input": 10, "output": 2, "reasoning": 0, "cache": {"read": 5, "write": 0}}
        part = {"id": f"p{number}", "reason": reason, "cost": 0.01, "tokens": tokens}
        return [
            {"type": "step_start", "sessionID": "o-1", "part": {}},
            {"type": "text", "sessionID": "o-1", "part": {"type": "text", "text": text}},
            {"type": "step_finish", "sessionID": "o-1", "part": part},
        ]

    findings, told = read("opencode", lines(*step(1, "looking", "tool-calls"), *step(2, "found it", "stop")))
    assert (findings.result, findings.succeeded, findings.session) == ("found it", True, "o-1")
    assert (told.used.input_tokens, told.used.output_tokens, told.used.turns) == (30, 4, 2)
    assert told.used.cost_usd == pytest.approx(0.02)
    findings, _ = read("opencode", lines(*step(1, "looking", "tool-calls")))
    assert not findings.has_result


@pytest.mark.parametrize(
    ("output", "first", "more"),
    [
        ("opencode", {"type": "step_finish", "part": {"id": "p", "reason": "stop"}}, {"type": "step_start"}),
        ("codex", {"type": "turn.completed", "usage": {}}, {"type": "turn.started"}),
    ],
)
def test_an_agent_that_goes_on_has_not_said_its_last_word(
    output: str, first: dict[str, Any], more: dict[str, Any]
) -> None:
    """A result after which another turn began, and did not end, is no success."""
    findings, _ = read(output, lines(first))
    assert (findings.succeeded, findings.has_result) == (True, True)
    findings, _ = read(output, lines(first, more))
    assert (findings.succeeded, findings.has_result) == (False, False)
    findings, _ = read(output, lines(first, more, first))
    assert (findings.succeeded, findings.has_result) == (True, True)


def test_gemini_ends_without_a_last_word() -> None:
    """The error event before it says why, if it names a fault that is known."""
    error = {"type": "error", "severity": "error", "message": "rate limit: status 429"}
    findings, _ = read("gemini", lines({"type": "init"}, error))
    assert findings.fault is not None
    assert findings.fault.status == "rate_limited"
    findings, _ = read("gemini", lines({"type": "init"}, {**error, "message": "something"}))
    assert findings.fault is None
    findings, _ = read("gemini", lines({"type": "init"}, error, {"type": "result", "status": "success"}))
    assert findings.succeeded


# -- the events file


def test_the_events_file() -> None:
    """Every line of the contract arrives; a result in the file wins over the output."""
    told = Told()
    events = EventsFile(told)
    events.feed(
        lines(
            {"type": "progress", "percent": 40, "message": "half"},
            {"type": "usage", "input_tokens": 7, "output_tokens": 3, "cost_usd": 0.5},
            {"type": "session", "id": "e-1"},
            {"type": "checkpoint", "name": "a", "value": 1},
            {"type": "checkpoint", "name": "a", "value": 2},
            {"type": "result", "value": {"x": 1}},
            {"type": "ask", "name": "q", "question": "Send?"},
            {"type": "ask", "name": "q", "question": "Send?"},
        )
    )
    assert events.asked
    output, _ = read("text", b"words")
    findings = merge(output, events.close())
    assert findings.result == {"x": 1}
    assert (findings.session, findings.checkpoints, len(findings.asks)) == ("e-1", {"a": 1}, 1)
    assert told.progressed == [(40.0, "half")]
    assert (told.used.total_tokens, told.used.cost_usd) == (10, 0.5)
    assert findings.notes == []


@pytest.mark.parametrize(
    ("second", "what"), [({"question": "Send all?"}, "words"), ({"question": "Send?", "choices": ["x"]}, "choices")]
)
def test_another_question_under_the_same_name(second: dict[str, Any], what: str) -> None:
    """S53: the first one counts, and a note says what differed."""
    events = EventsFile(Told())
    first = {"type": "ask", "name": "q", "question": "Send?", "choices": ["a", "b"]}
    events.feed(lines(first, {"choices": ["a", "b"], **second, "type": "ask", "name": "q"}))
    findings = events.close()
    assert [(ask.question, ask.choices) for ask in findings.asks] == [("Send?", ("a", "b"))]
    assert findings.notes == [f"asked under the name 'q' twice, with other {what}: the first question counts"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "drop tables"}\n',
        b"{broken\n",
        b'{"type": "progress", "percent": 1e999}\n',
        b'{"type": "usage", "tokens": -1}\n',
        b'{"type": "session", "id": 7}\n',
        b'{"type": "checkpoint", "name": "x"}\n',
        b'{"type": "ask"}\n',
        b'{"type": {"a": 1}}\n',
        b'[{"type": "result"}]\n',
        b'{"type": "progress", "percent": true}\n',
    ],
)
def test_hostile_lines_in_the_events_file_are_left_out(line: bytes) -> None:
    """A line that is not as the contract says has no effect but a note, and the next one is read."""
    told = Told()
    events = EventsFile(told)
    events.feed(line + lines({"type": "progress", "message": "still here"}))
    findings = events.close()
    assert len(findings.notes) == 1
    assert not findings.has_result
    assert not findings.asks
    assert not findings.checkpoints
    assert told.progressed == [(None, "still here")]
    assert told.sessions == []


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e400", "-1", "9" * 5000])
@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "claude",
            '{"type":"result","is_error":false,"result":"ok","num_turns":N,"total_cost_usd":N,"usage":{"input_tokens":N}}',
        ),
        (
            "codex",
            '{"type":"item.completed","item":{"type":"agent_message","text":"ok"}}\n'
            '{"type":"turn.completed","usage":{"input_tokens":N,"cached_input_tokens":N,"output_tokens":N}}',
        ),
        (
            "opencode",
            '{"type":"text","sessionID":"s","part":{"type":"text","text":"ok","time":{"end":1}}}\n'
            '{"type":"step_finish","sessionID":"s","part":{"type":"step-finish","reason":"stop","cost":N,"tokens":{"input":N}}}',
        ),
        ("openai", '{"choices":[{"message":{"content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":N}}'),
        ("jsonl", '{"type":"usage","input_tokens":N,"cost_usd":N,"turns":N}\n{"type":"result","value":"ok"}'),
    ],
)
def test_numbers_that_no_usage_can_be_lose_no_result(output: str, said: str, number: str) -> None:
    """A count beyond every float, below nothing or of thousands of digits is unknown; the answer beside it stays."""
    told = Told()
    reader = make_reader(output, told)
    reader.feed("stdout", said.replace("N", number).encode() + b"\n")
    findings = reader.close()
    assert (findings.result, findings.has_result) == ("ok", True)


def test_an_events_file_with_numbers_that_no_usage_can_be() -> None:
    """Each such line is left out with a note, and the lines behind it are read."""
    told = Told()
    events = EventsFile(told)
    huge = b"1" + b"0" * 400
    events.feed(
        b'{"type":"usage","input_tokens":%s,"turns":%s}\n{"type":"ask","question":"?","deadline":%s}\n' % ((huge,) * 3)
    )
    events.feed(b'{"type":"progress","percent":%s}\n{"type":"result","value":"ok"}\n' % huge)
    findings = events.close()
    assert findings.result == "ok"
    assert len(findings.notes) == 3
