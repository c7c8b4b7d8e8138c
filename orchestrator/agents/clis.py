"""The event streams of the coding-agent CLIs: Claude Code, Codex, Gemini CLI and its forks, OpenCode.

What each of them says, and when it is the last word, was seen with the real ones; ``docs/agents.md`` has the table. A
line that is not of a known type is passed over: new versions bring new events.
"""

from __future__ import annotations

from typing import Any

from orchestrator.agents.faults import Fault, from_status, from_text, shorten
from orchestrator.agents.meter import DELTA, PROCESS_TOTAL, SESSION_TOTAL, Amount, Report, dollars, tokens
from orchestrator.agents.reading import JOINED_LIMIT, EventReader, Reader, Signals, brief, flatten, mapping, text_of
from orchestrator.domain.words import OutcomeClass

# Claude Code -----------------------------------------------------------------------------------------------------------


class ClaudeMessages:
    """What comes before the result: messages, tools, and usage by message."""

    def __init__(self) -> None:
        self._turns: dict[str, None] = {}
        self._open: dict[str, str] = {}

    def read(self, event: dict[str, Any], signals: Signals) -> str | None:
        """Pass on what *event* says; return the tool that is being waited for."""
        message = mapping(event.get("message"))
        content = message.get("content")
        blocks = content if isinstance(content, list) else [content]
        if event.get("type") == "user":
            for answer in map(mapping, blocks):
                if answer.get("type") == "tool_result":
                    used = self._open.pop(str(answer.get("tool_use_id")), None)
                    if used is None and self._open:
                        used = self._open.pop(next(iter(self._open)))
                    signals.tool(used or "tool", brief(flatten(answer.get("content"))))
        elif event.get("type") == "assistant":
            for block in blocks:
                use = mapping(block)
                if use.get("type") == "tool_use":
                    name = str(use.get("name") or "tool")
                    self._open[str(use.get("id"))] = name
                    signals.tool(name, brief(use.get("input")))
                elif (isinstance(block, str) or use.get("type") == "text") and (text := flatten(block)):
                    signals.message(text)
            self._count(message, signals)
        return next(reversed(self._open.values()), None)

    def _count(self, message: dict[str, Any], signals: Signals) -> None:
        usage = _claude_amount(message.get("usage"))
        if usage.known():
            name = text_of(message.get("id"))
            if name is not None and len(self._turns) < 100_000:
                self._turns[name] = None
            signals.usage(
                Report(
                    usage,
                    DELTA,
                    name,
                    turns=len(self._turns) or None,
                    model=text_of(message.get("model")),
                    provisional=True,
                )
            )


def _claude_amount(usage: Any) -> Amount:
    """Tokens as Claude counts them: what was read from or written to the cache is input, too, and stands apart."""
    usage = mapping(usage)
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = [count for part in parts if (count := tokens(usage.get(part))) is not None]
    wrote = tokens(usage.get("output_tokens"))
    if not read and wrote is None:
        return Amount()
    cached = tokens(usage.get("cache_read_input_tokens"))
    return Amount(sum(read) if read else None, wrote, sum(read) + (wrote or 0), cached=cached)


def read_claude_result(reader: Reader, event: dict[str, Any]) -> None:
    """Take in a ``result`` event: the only one that says how it ended, by ``is_error`` and not by ``subtype``."""
    findings, signals = reader._findings, reader._signals
    reader._session(event.get("session_id"))
    amount = _claude_amount(event.get("usage"))._replace(cost=dollars(event.get("total_cost_usd")))
    models = mapping(event.get("modelUsage"))
    if amount.known():
        model = next(iter(models), None) if len(models) == 1 else None
        signals.usage(
            Report(amount, PROCESS_TOTAL, turns=tokens(event.get("num_turns")), model=text_of(model), final=True)
        )
    denied = []
    for denial in event.get("permission_denials") or ():
        name = str(mapping(denial).get("tool_name") or "a tool")
        denied.append(f"{name}: {brief(mapping(denial).get('tool_input'), 200)}")
    if denied:
        findings.denied = tuple(denied)
        shown = "; ".join(denied[:5]) + ("; …" if len(denied) > 5 else "")
        findings.note(f"warning: {len(denied)} tool use{'s were' if len(denied) > 1 else ' was'} denied ({shown})")
    value = event["structured_output"] if event.get("structured_output") is not None else event.get("result")
    text = value if isinstance(value, str) else ""
    subtype = str(event.get("subtype") or "success")
    reader.has_result = True
    reader.busy = None
    fault = _claude_fault(event, text, subtype)
    reader._result(value, succeeded=fault is None)
    if fault is not None:
        reader._failed(fault)


def _claude_fault(event: dict[str, Any], text: str, subtype: str) -> Fault | None:
    words = text or "; ".join(flatten(one) for one in event.get("errors") or () if flatten(one))
    if subtype == "error_max_turns":
        return Fault(OutcomeClass.OVER_BUDGET, "max_turns", words or "the agent's own limit of turns was reached")
    if subtype.startswith("error_max_budget"):
        return Fault(OutcomeClass.OVER_BUDGET, "max_budget", words or "the agent's own limit of USD was reached")
    # Some versions report a used-up plan as a good answer of exactly this form.
    used_up = text.startswith("Claude AI usage limit reached|")
    if not event.get("is_error") and subtype == "success" and not used_up:
        return None
    status = event.get("api_error_status")
    if isinstance(status, str) and status.isdigit():
        status = int(status)
    if isinstance(status, int) and not isinstance(status, bool) and status >= 400:
        return from_status(status, words)
    words = words or f"the agent reported an error ({subtype})"
    return from_text(words) or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words))


class ClaudeReader(EventReader):
    """``claude -p --output-format stream-json --verbose``."""

    output = "claude"
    due = "a result event"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._messages = ClaudeMessages()

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        self._session(event.get("session_id"))
        if kind == "result":
            read_claude_result(self, event)
        elif kind in ("assistant", "user"):
            self.busy = self._messages.read(event, self._signals)
        elif kind == "system" and event.get("subtype") == "api_retry":
            status = event.get("error_status")
            words = f"the agent tries again by itself: {event.get('error')}"
            fault = from_status(status, words) if isinstance(status, int) else None
            self._signals.error(fault or Fault(OutcomeClass.TRANSIENT, "api_retry", words))


# Codex -----------------------------------------------------------------------------------------------------------------


class CodexReader(EventReader):
    """``codex exec --json``: the result is the last message, usage is the thread's sum, resumed turns included."""

    output = "codex"
    due = "a turn.completed event"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._answer: str | None = None
        self._turns = 0
        self._error: str | None = None
        self._warning: str | None = None

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "thread.started":
            self._session(event.get("thread_id"))
        elif kind == "turn.started":
            self._unfinished()
        elif kind in ("item.started", "item.completed"):
            self._item(mapping(event.get("item")), done=kind == "item.completed")
        elif kind == "turn.completed":
            self._turns += 1
            self.busy = None
            usage = mapping(event.get("usage"))
            read, wrote = tokens(usage.get("input_tokens")), tokens(usage.get("output_tokens"))
            if read is not None or wrote is not None:
                cached = tokens(usage.get("cached_input_tokens"))
                amount = Amount(read, wrote, (read or 0) + (wrote or 0), cached=cached)
                self._signals.usage(Report(amount, SESSION_TOTAL, turns=self._turns, final=True))
            self._result(self._answer, succeeded=True)
            self.has_result = True
        elif kind == "turn.failed":
            error = event.get("error")
            self._fail(
                flatten(mapping(error).get("message"))
                or flatten(error)
                or self._error
                or self._warning
                or "the turn failed"
            )
        elif kind == "error":
            # Also told for what it then tries again, so only a failed turn makes it final.
            self._error = flatten(event.get("message")) or "an error without a message"
            self._signals.error(from_text(self._error) or Fault(OutcomeClass.TRANSIENT, "agent_error", self._error))

    def _item(self, item: dict[str, Any], *, done: bool) -> None:
        kind = str(item.get("type") or item.get("item_type") or "item")
        if kind == "agent_message":
            if done and (text := flatten(item.get("text"))):
                self._answer = text
                self._signals.message(text)
        elif kind == "error":
            if done:
                # As an item it is a warning, after which the turn goes on: the last word only of a turn that fails.
                self._warning = flatten(item.get("message")) or self._warning
        elif kind not in ("reasoning", "todo_list"):
            self.busy = None if done else kind
            shown = item.get("aggregated_output") if done else item.get("command", item.get("query", item.get("tool")))
            if shown is None:
                shown = {key: value for key, value in item.items() if key not in ("id", "type", "status")}
            self._signals.tool(kind, brief(shown))

    def _fail(self, words: str) -> None:
        self.has_result = True
        self._failed(from_text(words) or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words)))

    def _end(self) -> None:
        super()._end()
        if not self._findings.has_result and not self._findings.is_error and self._error is not None:
            self._failed(from_text(self._error) or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(self._error)))


# Gemini CLI (and its forks) --------------------------------------------------------------------------------------------


class GeminiReader(EventReader):
    """``gemini --output-format stream-json``: the result is what it said after its last tool."""

    output = "gemini"
    due = "a result event"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._parts: list[str] = []
        self._size = 0
        self._model: str | None = None
        self._error: str | None = None

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "init":
            self._session(event.get("session_id"))
            self._model = text_of(event.get("model"))
        elif kind == "message" and event.get("role") in ("assistant", "model"):
            self._say(flatten(event.get("content")), more=bool(event.get("delta")))
        elif kind == "tool_use":
            self._parts.clear()
            self._size = 0
            self.busy = str(event.get("tool_name") or "tool")
            self._signals.tool(self.busy, brief(event.get("parameters")))
        elif kind == "tool_result":
            self._signals.tool(self.busy or "tool", brief(event.get("output") or event.get("status") or ""))
            self.busy = None
        elif kind == "error":
            self._error = flatten(event.get("message")) or self._error
            if self._error:
                self._signals.error(
                    from_text(self._error) or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(self._error))
                )
        elif kind == "result":
            self._finish(event)

    def _say(self, text: str, *, more: bool) -> None:
        if not more:
            self._parts.clear()
            self._size = 0
        self._size += len(text)
        if text and self._size <= JOINED_LIMIT:
            self._parts.append(text)
        if text:
            self._signals.message(text)

    def _finish(self, event: dict[str, Any]) -> None:
        stats = mapping(event.get("stats"))
        read, wrote = tokens(stats.get("input_tokens")), tokens(stats.get("output_tokens"))
        total = tokens(stats.get("total_tokens"))
        if total is None and (read is not None or wrote is not None):
            total = (read or 0) + (wrote or 0)
        if total is not None:
            amount = Amount(read, wrote, total, cached=tokens(stats.get("cached")))
            self._signals.usage(Report(amount, PROCESS_TOTAL, model=self._model, final=True))
        self.has_result = True
        self.busy = None
        error = event.get("error")
        good = event.get("status") == "success" and not error
        self._result(self._answer(event), succeeded=good)
        if not good:
            code = mapping(error).get("code")
            words = (
                flatten(mapping(error).get("message"))
                or flatten(error)
                or self._error
                or f"it ended as {event.get('status')!r}"
            )
            fault = from_status(code, words) if isinstance(code, int) and 400 <= code <= 599 else from_text(words)
            self._failed(fault or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words)))

    def _end(self) -> None:
        super()._end()
        # Without a last word its exit code says more than an error that none of our words fit.
        if not self.has_result and self._error is not None and (fault := from_text(self._error)) is not None:
            self._failed(fault)

    def _answer(self, event: dict[str, Any]) -> str:
        return text_of(event.get("response")) or text_of(event.get("result")) or "".join(self._parts).strip()


# OpenCode --------------------------------------------------------------------------------------------------------------


class OpencodeReader(EventReader):
    """``opencode run --format json``: the result is the text of the last step, usage comes by step."""

    output = "opencode"
    due = "a last step_finish event"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._texts: list[str] = []
        self._steps = 0

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        part = mapping(event.get("part"))
        self._session(event.get("sessionID") or part.get("sessionID"))
        if kind == "step_start":
            self._texts.clear()
            self._unfinished()
        elif kind == "text":
            if text := flatten(part):
                self._texts.append(text[:JOINED_LIMIT])
                self._signals.message(text)
        elif kind == "tool_use":
            state = mapping(part.get("state"))
            name = str(part.get("tool") or "tool")
            self.busy = name if state.get("status") in ("pending", "running") else None
            self._signals.tool(name, brief(state.get("output") or state.get("input") or ""))
        elif kind == "step_finish":
            self._finish_step(part)
        elif kind == "error":
            error = mapping(event.get("error"))
            data = mapping(error.get("data"))
            words = (
                flatten(data.get("message"))
                or flatten(error.get("message"))
                or text_of(error.get("name"))
                or "an error"
            )
            status = data.get("statusCode")
            fault = from_status(status, words) if isinstance(status, int) and 400 <= status <= 599 else from_text(words)
            self._failed(fault or Fault(OutcomeClass.TRANSIENT, "agent_error", shorten(words)))

    def _finish_step(self, part: dict[str, Any]) -> None:
        self._steps += 1
        self.busy = None
        counts = mapping(part.get("tokens"))
        cache = mapping(counts.get("cache"))
        read = [
            count
            for value in (counts.get("input"), cache.get("read"), cache.get("write"))
            if (count := tokens(value)) is not None
        ]
        wrote = [count for key in ("output", "reasoning") if (count := tokens(counts.get(key))) is not None]
        amount = Amount(
            sum(read) if read else None,
            sum(wrote) if wrote else None,
            sum(read) + sum(wrote) if read or wrote else None,
            dollars(part.get("cost")),
            tokens(cache.get("read")),
        )
        if amount.known():
            self._signals.usage(Report(amount, DELTA, text_of(part.get("id")), turns=self._steps))
        if part.get("reason") not in ("tool-calls", "tool_use"):
            self._result("\n".join(self._texts).strip(), succeeded=True)
            self.has_result = True
