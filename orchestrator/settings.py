"""What a process is told about its surroundings: one frozen value, read from a file and the environment when asked.

Importing this module reads nothing. Order: the environment goes before the file, and whatever the command line says goes
before both (``settings.changed(heartbeat=5)``). Agents stay raw mappings here; ``plans.definitions`` makes agents of them.
Lengths of time are in seconds.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import InvalidInput, did_you_mean

DEFAULT_FILE = "orchestrator.toml"

POOLERS = ("none", "session", "transaction")

__version__ = "0.1.0"
"""The version of this package; the build reads it from here."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process. Every way to make one checks it: ``InvalidInput`` names the setting.

    - ``database_url``: None means the embedded PostgreSQL
    - ``pooler``: ``transaction`` behind a transaction-mode pooler: no prepared statements, no LISTEN; ``session`` behind one
      that leaves a session to its client; ``none`` finds out and takes any pooler for a transaction-mode one
    - ``concurrency``: None leaves it to the command (4 for ``run``, 10 for ``worker``)
    - ``heartbeat`` / ``lease``: how often a worker renews, and how long it counts as alive without a renewal
    - ``sweep``, ``poll``: between two looks for dead workers, and for work
    - ``grace``: what agents get to finish in when a worker is told to stop
    - ``max_retries``, ``retry_*``, ``give_up_after``: for tasks whose agent says nothing else
    - ``tracing``: ``off``, ``on`` (spans of OpenTelemetry go to the application's own provider) or an exporter's name
    - ``redact``: names of environment variables whose values are never stored or shown
    - ``retention``, ``agents``, ``alerts``: as they stand in the file; ``source_dir`` is the directory that relative paths
      start from
    - ``prices``: by model, USD for a million tokens of ``input``, ``output`` and ``cached`` input
    """

    database_url: str | None = None
    pooler: str = "none"
    concurrency: int | None = None
    heartbeat: float = 10.0
    lease: float = 40.0
    sweep: float = 5.0
    poll: float = 1.0
    grace: float = 20.0
    max_retries: int = 2
    retry_initial: float = 5.0
    retry_factor: float = 2.0
    retry_max: float = 600.0
    give_up_after: float = 86_400.0
    tracing: str = "off"
    redact: tuple[str, ...] = ()
    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    retention: Mapping[str, Any] = field(default_factory=dict)
    agents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alerts: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None
    source_dir: Path | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        prices = {model: _price(model, each) for model, each in _table("prices", self.prices).items()}
        object.__setattr__(self, "prices", prices)

    @classmethod
    def load(cls, config: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None) -> Settings:
        """Return the settings of the configuration file and of *env* (default: this process's environment).

        The file is *config*, else ``ORCHESTRATOR_CONFIG``, else ``orchestrator.toml`` in the working directory if there
        is one. Raises ``InvalidInput`` for a named file that cannot be read, a key that is not known, a wrong value.
        """
        env = os.environ if env is None else env
        named = config if config is not None else env.get("ORCHESTRATOR_CONFIG") or None
        path = Path(named) if named is not None else Path(DEFAULT_FILE)
        values: dict[str, Any] = {}
        if named is not None or path.is_file():
            try:
                values = _read(path)
                values.update(source=path, source_dir=path.absolute().parent)
            except InvalidInput as fault:
                raise InvalidInput(f"{path}: {fault.message}", hint=fault.hint, config=str(path)) from None
        if url := env.get("ORCHESTRATOR_DATABASE_URL"):
            values["database_url"] = url
        if tracing := env.get("ORCHESTRATOR_TRACING"):
            values["tracing"] = tracing
        try:
            return cls(**values)
        except InvalidInput as fault:
            if "source" not in values:
                raise
            raise InvalidInput(f"{path}: {fault.message}", hint=fault.hint, **fault.ids) from None

    def changed(self, **values: Any) -> Settings:
        """Return these settings with *values* in the place of theirs; None leaves a setting as it is."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})


def _check_ranges(settings: Settings) -> None:
    """Refuse what no process could work with. Runs on whatever way the values came in."""
    for name in ("heartbeat", "lease", "sweep", "poll", "give_up_after", "retry_initial", "retry_max"):
        _require(name, getattr(settings, name), lambda value: value > 0, "more than 0")
    _require("grace", settings.grace, lambda value: value >= 0, "0 or more")
    _require("retry_factor", settings.retry_factor, lambda value: value >= 1, "1 or more")
    _require("max_retries", settings.max_retries, lambda value: value >= 0, "0 or more", whole=True)
    if settings.concurrency is not None:
        _require("concurrency", settings.concurrency, lambda value: value >= 1, "1 or more", whole=True)
    if settings.pooler not in POOLERS:
        raise InvalidInput(f"pooler: expected one of {', '.join(POOLERS)}, found {settings.pooler!r}", setting="pooler")
    if settings.heartbeat > settings.lease / 2:
        raise InvalidInput(
            f"heartbeat of {settings.heartbeat:g} s is more than half of the lease of {settings.lease:g} s: "
            "one late renewal would make a living worker count as dead",
            hint=f"set heartbeat to {settings.lease / 2:g} or less, or lease to {settings.heartbeat * 2:g} or more",
            setting="heartbeat",
        )


def _require(name: str, value: Any, fits: Callable[[Any], bool], wanted: str, *, whole: bool = False) -> None:
    shown = _SHOWN.get(name, name)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max or not fits(value):
        kind = "a whole number" if whole else "a number of seconds" if name != "retry_factor" else "a number"
        raise InvalidInput(f"{shown}: expected {kind}, {wanted}, found {value!r}", setting=shown)


_SHOWN = {"retry_initial": "retry.initial", "retry_factor": "retry.factor", "retry_max": "retry.max"}


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of Settings that the file sets."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as fault:
        raise InvalidInput(f"cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        line = fault.object[: fault.start].count(b"\n") + 1
        raise InvalidInput(f"line {line}: is not UTF-8 text") from fault
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise InvalidInput(f"is not TOML: {fault}") from fault
    except ValueError as fault:
        raise InvalidInput("holds a number of more digits than can be read") from fault
    except RecursionError:
        raise InvalidInput("is nested too deeply") from None
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "retry":
            values.update(_retry(value))
        elif key in _TABLES:
            values[key] = _table(key, value)
        elif key in _FIELDS:
            values[key] = _FIELDS[key](key, value)
        else:
            raise InvalidInput(f"unknown key {key!r}{did_you_mean(key, KEYS)}", hint=_where(text, key))
    for name, agent in values.get("agents", {}).items():
        _table(f"agents.{name}", agent)
    return values


def _where(text: str, key: str) -> str | None:
    """Return where *key* stands at the start of a line, as a help for the eye."""
    found = re.search(rf"(?m)^[ \t]*\[*[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]", text)
    return None if found is None else f"it stands in line {text.count(chr(10), 0, found.start()) + 1}"


def _table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{key}: expected a table, found {value!r}")
    return value


def _retry(value: Any) -> dict[str, Any]:
    table = _table("retry", value)
    for key in table:
        if key not in ("initial", "factor", "max"):
            raise InvalidInput(f"unknown key 'retry.{key}'{did_you_mean(key, ['initial', 'factor', 'max'])}")
    return {f"retry_{key}": each for key, each in table.items()}


def _price(model: str, value: Any) -> dict[str, float]:
    """The prices of one model; ``cached`` left out is as dear as other input."""
    where = f"prices.{model}"
    table = _table(where, value)
    for key, price in table.items():
        if key not in PRICE_KEYS:
            raise InvalidInput(f"unknown key '{where}.{key}'{did_you_mean(key, PRICE_KEYS)}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price <= 1e6:
            raise InvalidInput(f"{where}.{key}: expected USD for a million tokens, found {price!r}")
    for key in ("input", "output"):
        if key not in table:
            raise InvalidInput(f"{where}: {key} is missing", hint=PRICE_HINT)
    return {key: float(table.get(key, table["input"])) for key in PRICE_KEYS}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{key}: expected text, found {value!r}")
    return value


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"{key}: expected a list of texts, found {value!r}")
    return tuple(value)


def _as_is(key: str, value: Any) -> Any:
    return value


PRICE_KEYS = ("input", "output", "cached")
PRICE_HINT = "USD for a million tokens: input = 1.25, output = 10, and cached = 0.125 if reads from a cache are cheaper"

_TABLES = ("retention", "agents", "alerts", "prices")
_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "database_url": _text,
    "pooler": _text,
    "tracing": _text,
    "redact": _texts,
    **dict.fromkeys(("concurrency", "heartbeat", "lease", "sweep", "poll", "grace", "max_retries"), _as_is),
    "give_up_after": _as_is,
}

KEYS = ("retry", *_TABLES, *_FIELDS)
"""Every key that the configuration file may have."""

assert {key for key in KEYS if key != "retry"} <= {each.name for each in fields(Settings)}
