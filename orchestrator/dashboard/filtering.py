"""The filter of the dashboard: words that all must be found, ``agent:`` ``plan:`` ``worker:`` ``class:`` in that alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.domain.snapshot import AgentRow, Alert, Failure, Question, RunningTask, Snapshot, WorkerRow
from orchestrator.domain.values import value

FIELDS = ("agent", "plan", "worker", "class")


@value
class _Facts:
    """What a row can be found by: a text, and for each field its values."""

    text: str
    agent: Iterable[str] = ()
    plan: Iterable[str] = ()
    worker: Iterable[str] = ()
    error_class: Iterable[str] = ()

    def of(self, field: str) -> Iterable[str]:
        return self.error_class if field == "class" else getattr(self, field)


def filtered(snapshot: Snapshot, text: str) -> Snapshot:
    """Return *snapshot* with the rows only in which every word of *text* is found, whatever its case.

    Counts stay those of the whole queue, except where they would count rows that are not shown.
    """
    words = [_word(word) for word in text.casefold().split()]
    if not words:
        return snapshot
    alerts = tuple(alert for alert in snapshot.alerts if _matches(_of_alert(alert), words))
    questions = tuple(question for question in snapshot.questions if _matches(_of_question(question), words))
    return replace(
        snapshot,
        running=tuple(task for task in snapshot.running if _matches(_of_running(task), words)),
        alerts=alerts,
        alert_count=len(alerts),
        questions=questions,
        question_count=len(questions),
        failures=tuple(failure for failure in snapshot.failures if _matches(_of_failure(failure), words)),
        agents=tuple(agent for agent in snapshot.agents if _matches(_of_agent(agent), words)),
        workers=tuple(worker for worker in snapshot.workers if _matches(_of_worker(worker), words)),
    )


def _word(word: str) -> tuple[str, str]:
    field, colon, value = word.partition(":")
    return (field, value) if colon and field in FIELDS else ("", word)


def _matches(facts: _Facts, words: Iterable[tuple[str, str]]) -> bool:
    return all(
        any(value in each.casefold() for each in facts.of(field)) if field else value in facts.text.casefold()
        for field, value in words
    )


def _text(*parts: object) -> str:
    return "\n".join(str(part) for part in parts if part)


def _of_running(task: RunningTask) -> _Facts:
    text = _text(task.id, task.name, task.title, task.agent, task.plan, task.worker, task.last_output)
    return _Facts(text, (task.agent,), (task.plan or "",), (task.worker,))


def _of_failure(failure: Failure) -> _Facts:
    text = _text(failure.task_id, failure.name, failure.title, failure.agent, failure.cause, failure.message)
    return _Facts(text, (failure.agent,), error_class=(failure.error_class or "",))


def _of_question(question: Question) -> _Facts:
    text = _text(question.task_id, question.name, question.title, question.agent, question.text)
    return _Facts(text, (question.agent,))


def _of_alert(alert: Alert) -> _Facts:
    names = (alert.name,)
    return _Facts(
        _text(alert.task_id, alert.name, alert.what, alert.kind),
        names if alert.subject == "agent" else (),
        (),
        names if alert.subject == "worker" else (),
    )


def _of_agent(agent: AgentRow) -> _Facts:
    return _Facts(_text(agent.name, agent.state, agent.state_reason), (agent.name,))


def _of_worker(worker: WorkerRow) -> _Facts:
    return _Facts(_text(worker.name, worker.host, worker.state, *worker.agents), worker.agents, (), (worker.name,))
