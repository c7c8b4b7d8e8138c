"""Types of input and result: what the annotations of an agent function say, checked against what it gets and returns.

    async def review(ctx: Context[Change]) -> Review: ...

``Change`` and ``Review`` may be dataclasses, pydantic models, or whatever else pydantic knows how to check. A result is
checked where its annotation has a dataclass or a model in it: ``-> dict`` and the like say little and are left alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.agents.functions import Context, Permanent, to_json, where
from orchestrator.errors import InvalidInput

TOLD = 5
"""Faults of one value that a message lists at most."""


class BadInput(Permanent):
    """The task's input is not what the function asks for: another attempt would get the same."""

    code = "bad_input"


class BadResult(Permanent):
    """The function returned something else than it says. ``result`` is what it was, as JSON: it is kept in the run."""

    code = "bad_result"
    result: Any = None


class Shape:
    """One type, and the check of JSON values against it."""

    def __init__(self, kind: Any) -> None:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        self.kind = kind
        try:
            self._adapter: Any = TypeAdapter(kind)
        except PydanticUserError as error:
            raise InvalidInput(f"the type {shown(kind)} cannot be checked: {str(error).splitlines()[0]}") from None

    def read(self, value: Any) -> Any:
        """*value*, from JSON, as the type. Raises InvalidInput with a sentence for each fault."""
        from pydantic import ValidationError

        try:
            return self._adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            raise InvalidInput(_faults(error)) from None

    def write(self, value: Any) -> Any:
        """*value*, of the type or like it, as JSON. Raises InvalidInput with a sentence for each fault."""
        from pydantic import ValidationError

        try:
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                checked = self._adapter.validate_json(json.dumps(to_json(value)))
            else:
                checked = self._adapter.validate_python(value)
            return to_json(self._adapter.dump_python(checked, mode="json"))
        except ValidationError as error:
            raise InvalidInput(_faults(error)) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Types:
    """What a function says of its input and its result; None: nothing that is checked."""

    input: Shape | None = None
    result: Shape | None = None

    def take(self, context: Context[Any]) -> None:
        """Make the context's input one of the type. Raises BadInput."""
        if self.input is not None:
            try:
                context.input = self.input.read(context.input)
            except InvalidInput as error:
                raise BadInput(
                    f"input: expected {shown(self.input.kind)}: {error.message}", cause="bad_input"
                ) from None

    def give(self, result: Any) -> Any:
        """*result* as JSON. Raises BadResult, and Permanent for what JSON cannot hold."""
        if self.result is None:
            return to_json(result)
        try:
            return self.result.write(result)
        except InvalidInput as error:
            bad = BadResult(f"result: expected {shown(self.result.kind)}: {error.message}", cause="bad_result")
            try:
                bad.result = to_json(result)
            except Permanent:
                bad.result = repr(result)
            raise bad from None


def types_of(function: Callable[..., Any]) -> Types:
    """The types in the annotations of *function*. Raises InvalidInput for a type of the input that cannot be found."""
    plain: Any = inspect.unwrap(function)
    if not inspect.isroutine(plain):
        plain = getattr(type(plain), "__call__", plain)  # noqa: B004 - an object that is called
    annotations = getattr(plain, "__annotations__", None)
    if not annotations:
        return Types()
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return Types()
    names = getattr(plain, "__globals__", {})
    given = annotations.get(parameters[0]) if parameters else None
    return Types(
        _input_shape(_resolved(given, names), function), _result_shape(_resolved(annotations.get("return"), names))
    )


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """*annotation* itself where it is written as text; the text again if what it names is not there."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)  # noqa: S307 - the text of the user's own source, as typing.get_type_hints does
    except Exception:  # noqa: BLE001 - names that only type checkers know
        return annotation


def _input_shape(annotation: Any, function: Any) -> Shape | None:
    if isinstance(annotation, str):
        if "Context[" in annotation:
            raise InvalidInput(
                f"agent function {where(function)}: the type of its input in {annotation!r} is not known when it runs",
                hint="import it outside of TYPE_CHECKING, or define it at the top of the module",
            )
        return None
    if typing.get_origin(annotation) is not Context:
        return None
    (kind,) = typing.get_args(annotation)
    return None if kind is Any or isinstance(kind, TypeVar) else Shape(kind)


def _result_shape(annotation: Any) -> Shape | None:
    if typing.get_origin(annotation) in (Awaitable, Coroutine):
        annotation = typing.get_args(annotation)[-1]
    return Shape(annotation) if not isinstance(annotation, str) and _shaped(annotation) else None


def _shaped(kind: Any) -> bool:
    """Whether there is a dataclass, a model or a typed dictionary in it."""
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        return dataclasses.is_dataclass(kind) or typing.is_typeddict(kind) or hasattr(kind, "model_validate")
    return any(_shaped(each) for each in typing.get_args(kind))


def shown(kind: Any) -> str:
    """The name of a type, for people."""
    return kind.__qualname__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)


def _faults(error: Any) -> str:
    """What is wrong with a value, field by field."""
    found = error.errors(include_url=False, include_context=False)
    told = []
    for each in found[:TOLD]:
        place = ".".join(str(part) for part in each["loc"])
        value = "" if each["type"] == "missing" else f", found {each['input']!r:.60}"
        told.append(f"{place + ': ' if place else ''}{each['msg']}{value}")
    more = f"; and {len(found) - TOLD} more" if len(found) > TOLD else ""
    return "; ".join(told) + more


__all__ = ["BadInput", "BadResult", "Shape", "Types", "shown", "types_of"]
