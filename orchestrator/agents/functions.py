"""Agents that are Python functions: ``@agent``, the context that such a function gets, and the errors it may raise.

Nothing here knows how a function is run; ``python`` does. Child processes import this module first, so it must stay
cheap to import.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import date, datetime, timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from orchestrator.domain.asking import Ask, read_ask
from orchestrator.domain.checkpoints import checkpoint_text
from orchestrator.domain.outcome import Budget, RetryPolicy
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.errors import InvalidInput, OrchestratorError

P = ParamSpec("P")
R = TypeVar("R")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    I = WithDefault("I", default=Any)  # noqa: E741 - a bare Context is one of anything
else:
    I = TypeVar("I")  # noqa: E741
Isolation = Literal["loop", "process"]


# What a function may raise ---------------------------------------------------------------------------------------------


class AgentFault(OrchestratorError):
    """A failure that an agent names itself. ``cause`` is the finer code of the run, default the class's own name."""

    code = "agent_fault"
    outcome_class: ClassVar[OutcomeClass] = OutcomeClass.TRANSIENT

    def __init__(self, message: str = "", *, cause: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class Permanent(AgentFault):
    """Another attempt would fail the same way: the task ends ``failed`` at once."""

    code = "permanent"
    outcome_class = OutcomeClass.PERMANENT


class StepResult(Permanent):
    """The result of a ``ctx.step`` that cannot be kept: no JSON, or too large."""

    code = "step_result"


class Transient(AgentFault):
    """The next attempt may succeed: counts as a retry, comes after the backoff."""

    code = "transient"
    outcome_class = OutcomeClass.TRANSIENT


class Unauthenticated(AgentFault):
    """The login or key was refused: the agent's breaker opens, no retry is used up."""

    code = "unauthenticated"
    outcome_class = OutcomeClass.UNAUTHENTICATED


class RateLimited(AgentFault):
    """The provider refuses for now: the task is tried again after ``retry_after`` seconds or at ``retry_at``.

    No retry is used up. Without either, the time comes from how many limits there were in a row.
    """

    code = "rate_limited"
    outcome_class = OutcomeClass.RATE_LIMITED

    def __init__(
        self,
        retry_after: float | None = None,
        message: str = "the provider's limit is reached",
        *,
        retry_at: datetime | None = None,
        cause: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, cause=cause, hint=hint)
        self.retry_after = retry_after
        self.retry_at = retry_at


# What a function gets --------------------------------------------------------------------------------------------------


class Session(str):
    """The agent's own session id: a text, empty if there is none. Called with an id it sets it."""

    __slots__ = ("_set",)
    _set: Callable[[str], None]

    def __call__(self, session: str) -> None:
        self._set(session)


class Channel(Protocol):
    """Where the words of a running function go: straight to the worker, or over a child's pipe."""

    def progress(self, percent: float | None, message: str | None) -> None: ...

    def usage(self, fields: dict[str, Any]) -> None: ...

    def session(self, session: str) -> None: ...

    def log(self, text: str) -> None: ...

    def keep(self, name: str, text: str) -> Future[Any]: ...


class Asked(BaseException):
    """Ends an attempt that asks a person. No Exception: a function's own handlers are not to take it for a failure."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask.question)
        self.ask = ask


class Context(Generic[I]):
    """The one argument of an agent function.

    ``input``, ``params``, ``title``, ``name`` and ``plan`` are the task's; ``Context[T]`` in the function's annotation makes
    the input a ``T``: a dataclass, a pydantic model. ``task_id`` and ``attempt`` name this attempt; ``session`` is the id
    that an earlier attempt set, ``traceparent`` the W3C trace context of this attempt. The calls return at once and are
    safe from any thread; after the attempt has ended they do nothing.
    """

    __slots__ = (
        "_answers",
        "_channel",
        "_checkpoints",
        "_open_question",
        "_session",
        "agent",
        "attempt",
        "input",
        "name",
        "params",
        "plan",
        "task_id",
        "title",
        "traceparent",
    )

    def __init__(
        self,
        channel: Channel,
        *,
        agent: str,
        task_id: int,
        attempt: int,
        input: Any = None,  # noqa: A002 - the word of the contract
        params: dict[str, Any] | None = None,
        title: str | None = None,
        name: str | None = None,
        plan: str | None = None,
        session: str | None = None,
        answers: Mapping[str, str] | None = None,
        traceparent: str | None = None,
        checkpoints: Mapping[str, Any] | None = None,
    ) -> None:
        self._channel = channel
        self._answers = dict(answers or {})
        self._checkpoints: dict[str, Any] = dict(checkpoints or {})
        self._open_question: Ask | None = None
        self.agent = agent
        self.task_id = task_id
        self.attempt = attempt
        self.input: I = input
        self.params: dict[str, Any] = params if params is not None else {}
        self.title = title
        self.name = name
        self.plan = plan
        self._session = session
        self.traceparent = traceparent

    def __repr__(self) -> str:
        return f"<Context of {self.agent!r}: task {self.task_id}, attempt {self.attempt}>"

    @property
    def open_question(self) -> Ask | None:
        """What this attempt has asked and was not told: it ends with it, whatever the function made of it."""
        return self._open_question

    @property
    def session(self) -> Session:
        """The agent's own session id; ``ctx.session = "…"`` or ``ctx.session("…")`` sets it for the next attempt."""
        session = Session(self._session or "")
        session._set = self._set_session
        return session

    @session.setter
    def session(self, session: str) -> None:
        self._set_session(session)

    def _set_session(self, session: str) -> None:
        if not isinstance(session, str) or not session:
            raise InvalidInput(f"a session id is a text that is not empty, found {session!r}", task=self.task_id)
        self._session = str(session)
        self._channel.session(self._session)

    def progress(self, percent: float | None = None, message: str | None = None) -> None:
        """Show how far the task is: *percent* from 0 to 100, a short *message*, or both."""
        if isinstance(percent, str) and message is None:
            percent, message = None, percent
        if percent is not None and not (isinstance(percent, int | float) and 0 <= percent <= 100):
            raise InvalidInput(f"progress is a number from 0 to 100, found {percent!r}", task=self.task_id)
        self._channel.progress(None if percent is None else float(percent), None if message is None else str(message))

    def usage(self, **fields: Any) -> None:
        """Report what was used, in the words of the events file.

        ``input_tokens``, ``output_tokens`` or ``tokens``, ``cost_usd``, ``turns``, ``model``; ``kind`` is ``delta``
        (default: the numbers are added up), ``process_total``, ``session_total`` or ``mixed``; an ``id`` counts once.
        """
        self._channel.usage(fields)

    def log(self, text: object) -> None:
        """Add a line to the transcript."""
        self._channel.log(str(text))

    def step(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call *function* once for the whole task, and return its result; in a coroutine it is awaited.

        The result is durable when this returns. A later attempt gets it without calling; of two that took the step at
        once the first write counts for both. *function* may be async where it is awaited. Raises StepResult, which
        fails the task for good, for a result that is no JSON or too large.
        """
        if not callable(function):
            raise InvalidInput(f"step {name!r:.100}: expected a function, found {function!r:.100}", task=self.task_id)
        if _in_coroutine():
            return self._step_in_coroutine(name, function, args, kwargs)
        if name in self._checkpoints:
            return self._checkpoints[name]
        return self._kept(name, self._keep(name, function(*args, **kwargs)).result())

    async def _step_in_coroutine(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        import asyncio

        if name in self._checkpoints:
            return self._checkpoints[name]
        value = function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await value
        return self._kept(name, await asyncio.wrap_future(self._keep(name, value)))

    def _keep(self, name: str, value: Any) -> Future[Any]:
        try:
            return self._channel.keep(name, checkpoint_text(name, to_json(value)))
        except (InvalidInput, Permanent) as error:
            raise StepResult(f"step {name!r:.100}: {error.message}", cause="step_result", hint=error.hint) from None

    def _kept(self, name: str, value: Any) -> Any:
        self._checkpoints[name] = value
        return value

    def ask(
        self,
        question: str,
        *,
        choices: Sequence[str] | None = None,
        name: str | None = None,
        deadline: float | timedelta | datetime | None = None,
        default: str | None = None,
    ) -> Any:
        """Ask a person, and return the answer, a text; in a coroutine it is awaited.

        The first time the attempt ends here, by a ``BaseException``, and its slot is free while the person thinks; the
        attempt after the answer gets it at once. *name* is the question's place (default: its own words): the same name
        has the same answer for good. With *choices* only these can be answered. At the *deadline* (seconds from now, or
        an instant) *default* is the answer, and without a default the task is cancelled. Raises InvalidInput.
        """
        given = {"question": question, "choices": choices, "name": name, "deadline": deadline, "default": default}
        ask = read_ask(given)
        if _in_coroutine():
            return self._asked_in_coroutine(ask)
        return self._answer_of(ask)

    async def _asked_in_coroutine(self, ask: Ask) -> str:
        return self._answer_of(ask)

    def _answer_of(self, ask: Ask) -> str:
        if ask.name in self._answers:
            return self._answers[ask.name]
        self._open_question = ask
        raise Asked(ask)


def _in_coroutine() -> bool:
    """Whether an event loop runs in this thread: then what can wait is awaited."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# What a function may return --------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """*value* as a JSON value: itself if it is one, dataclasses and models by their fields.

    Raises Permanent for what JSON cannot hold: another attempt would return the same.
    """
    if value is None or type(value) in (str, int, bool, float):
        return value
    try:
        json.dumps(value)
        return value
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(value, default=_fields))
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(value)
        raise Permanent(
            f"the result, of type {kind.__module__}.{kind.__qualname__}, cannot be stored as JSON: {error}",
            cause="result_not_json",
        ) from None


def _fields(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, UUID | PurePath):
        return str(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is no JSON value")


# The decorator ---------------------------------------------------------------------------------------------------------


class AgentFunction(Generic[P, R]):
    """A function as an agent: give it to ``Worker(agents=[…])``; called directly it is the plain function."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        *,
        max_retries: int | None = None,
        retry: RetryPolicy | None = None,
        budget: Budget | None = None,
        isolation: Isolation | None = None,
        kill_grace: float = 2.0,
        tasks_per_child: int = 1_000,
        memory_mb: int | None = None,
    ) -> None:
        if not callable(function):
            raise InvalidInput(f"an agent is a function, found {function!r}")
        if not isinstance(name, str) or not name.strip():
            raise InvalidInput(f"the name of an agent is a text that is not empty, found {name!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput(f"agent {name!r} yields; an agent function returns its result")
        if isolation not in (None, "loop", "process"):
            raise InvalidInput(f"isolation of agent {name!r} is 'loop' or 'process', found {isolation!r}")
        self.is_async = is_async(function)
        if isolation == "loop" and not self.is_async:
            raise InvalidInput(
                f"agent {name!r} is a plain function and would block the worker's loop",
                hint="make it async, or leave isolation out: a plain function runs in a child process",
            )
        self.function = function
        self.name = name
        self.max_retries = max_retries
        self.retry = retry
        self.budget = budget
        self.isolation: Isolation = isolation or ("loop" if self.is_async else "process")
        if memory_mb is not None and self.isolation == "loop":
            raise InvalidInput(
                f"agent {name!r} runs on the worker's loop, where memory_mb would limit the worker itself",
                hint='use isolation="process"',
            )
        self.kill_grace = kill_grace
        self.tasks_per_child = tasks_per_child
        self.memory_mb = memory_mb
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self.__qualname__: str = getattr(function, "__qualname__", self.__name__)
        self.__module__ = getattr(function, "__module__", self.__module__)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def accept(self, input: Any) -> Any:  # noqa: A002 - the word of the contract
        """*input* as JSON, if the function's annotation agrees with it. Raises InvalidInput with what is wrong."""
        from orchestrator.agents.typed import shown, types_of

        shape = types_of(self.function).input
        if shape is None:
            return input
        try:
            return shape.write(input)
        except InvalidInput as error:
            raise InvalidInput(
                f"input of agent {self.name!r}: expected {shown(shape.kind)}: {error.message}", agent=self.name
            ) from None

    def __repr__(self) -> str:
        return f"<agent {self.name!r}: {'async ' if self.is_async else ''}{where(self.function)}>"


def named(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of ``add`` with the name of the agent where its function stood, and its input checked."""
    function = task.get("agent") if isinstance(task, Mapping) else None
    if not isinstance(function, AgentFunction):
        return task
    return {**task, "agent": function.name, "input": function.accept(task.get("input"))}


def is_async(function: Any) -> bool:
    """Whether calling *function* makes a coroutine."""
    if inspect.iscoroutinefunction(function):
        return True
    call = vars(type(function)).get("__call__")
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(call)


def where(function: Any) -> str:
    """The dotted path of *function*, for people."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name}"


def _number(agent_name: str, word: str, value: float | None, *, whole: bool = False, least: float = 0) -> None:
    if value is None:
        return
    valid = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not valid or not abs(value) <= sys.float_info.max or value < least:
        kind = "a whole number" if whole else "a number"
        raise InvalidInput(f"{word} of agent {agent_name!r} is {kind} of at least {least:g}, found {value!r}")


@overload
def agent(name: Callable[P, R], /) -> AgentFunction[P, R]: ...


@overload
def agent(
    name: str | None = None,
    *,
    max_retries: int | None = None,
    budget_seconds: float | None = None,
    budget_tokens: int | None = None,
    budget_usd: float | None = None,
    budget_turns: int | None = None,
    on_limit: OnLimit | str = OnLimit.FAIL,
    retry: RetryPolicy | Mapping[str, float] | None = None,
    isolation: Isolation | None = None,
    kill_grace: float = 2.0,
    tasks_per_child: int = 1_000,
    memory_mb: int | None = None,
) -> Callable[[Callable[P, R]], AgentFunction[P, R]]: ...


def agent(
    name: str | Callable[P, R] | None = None,
    *,
    max_retries: int | None = None,
    budget_seconds: float | None = None,
    budget_tokens: int | None = None,
    budget_usd: float | None = None,
    budget_turns: int | None = None,
    on_limit: OnLimit | str = OnLimit.FAIL,
    retry: RetryPolicy | Mapping[str, float] | None = None,
    isolation: Isolation | None = None,
    kill_grace: float = 2.0,
    tasks_per_child: int = 1_000,
    memory_mb: int | None = None,
) -> AgentFunction[P, R] | Callable[[Callable[P, R]], AgentFunction[P, R]]:
    """Make a function of one argument, the ``Context``, an agent called *name* (default: the function's name).

    What is left out falls through to the product's defaults; a task's own values win over these. An ``async def`` runs
    on the worker's loop, or with ``isolation="process"`` in a child process, where a plain ``def`` always runs. A child
    is replaced after *tasks_per_child* tasks and may use *memory_mb* of address space; what goes beyond raises MemoryError
    in it. When a task is stopped, its child gets SIGTERM, which raises SystemExit in
    the function, and after *kill_grace* seconds SIGKILL; an async function on the loop gets CancelledError, and is
    closed after *kill_grace*. Annotations are checked: ``ctx: Context[T]`` is the type of the input, and a dataclass or a
    pydantic model in the return annotation that of the result; what does not fit fails for good, and is kept. Raises
    InvalidInput for values that cannot be.
    """
    if callable(name):
        return AgentFunction(name, getattr(name, "__name__", type(name).__name__))
    shown = name or "?"
    _number(shown, "max_retries", max_retries, whole=True)
    for word, value in (("budget_seconds", budget_seconds), ("budget_usd", budget_usd), ("kill_grace", kill_grace)):
        _number(shown, word, value)
    for word, count in (("budget_tokens", budget_tokens), ("budget_turns", budget_turns)):
        _number(shown, word, count, whole=True)
    _number(shown, "tasks_per_child", tasks_per_child, whole=True, least=1)
    _number(shown, "memory_mb", memory_mb, whole=True, least=64)
    try:
        limit = OnLimit(on_limit)
    except ValueError:
        raise InvalidInput(f"on_limit of agent {shown!r} is one of {', '.join(OnLimit)}, found {on_limit!r}") from None
    budget = None
    if any(value is not None for value in (budget_seconds, budget_tokens, budget_usd, budget_turns)):
        budget = Budget(budget_seconds, budget_tokens, budget_usd, budget_turns, limit)
    policy: RetryPolicy | None
    if retry is None or isinstance(retry, RetryPolicy):
        policy = retry
    else:
        unknown = set(retry) - {"initial", "factor", "max"}
        if unknown:
            raise InvalidInput(f"retry of agent {shown!r} knows initial, factor and max, found {sorted(unknown)}")
        policy = RetryPolicy(**dict(retry))

    def decorate(function: Callable[P, R]) -> AgentFunction[P, R]:
        return AgentFunction(
            function,
            name if name is not None else getattr(function, "__name__", type(function).__name__),
            max_retries=max_retries,
            retry=policy,
            budget=budget,
            isolation=isolation,
            kill_grace=kill_grace,
            tasks_per_child=tasks_per_child,
            memory_mb=memory_mb,
        )

    return decorate
