"""Tasks that may not run beside certain others: those of one concurrency key, and those that work in one directory.

Used by ``TaskRepository.claim`` inside its transaction. The claim of tasks without a key knows nothing of this: a task with
one has a route of its own (its agent's route, then the hash of its key), which no claim asks for by name. ``choose``
looks at those routes, picks what has room, and the claim takes exactly the picked ids.

Exact at any number of claimers: whoever picks for a key holds its advisory lock until the commit and counts in a statement
that begins after it got the lock. A lock that somebody else has is not waited for. Who holds a key is a row of
``key_holders``, which counts only while that very attempt runs: nothing has to be undone when one ends, dies or is taken
back, so that room is never lost. Directories are told apart by their real path on the worker's host; one inside the
other is the same room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Boolean, Connection, Integer, Text, bindparam, text

KEY_SEPARATOR = "\x1e"
"""Stands between the route of an agent and the hash of a task's key."""

KEYS_AT_ONCE = 500
"""Keys that one claim looks at; the next one goes on behind the last of them."""
LOOKED_AT = 5_000
"""Tasks of a directory agent that a claim looks at, the most urgent first."""

DEFAULT_ROOM = 1
"""Tasks of one key that run at once, unless ``concurrency_limits`` says otherwise."""

_LOCKS = 0x6F726B65
"""The class of our advisory locks, so that they meet no other's."""

Directory = Callable[[str | None], str]
"""From the ``dir`` of a task to the real path that its agent would work in."""


@dataclass(slots=True)
class Choice:
    """The tasks that a claim is to take by id, with what each of them holds then: (kind, name) pairs."""

    holds: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    seen: bool = False
    """Whether any task with a key was ready, with or without room."""
    further: str = ""
    """Where the next look starts."""

    @property
    def ids(self) -> list[int]:
        return sorted(self.holds)


def choose(
    connection: Connection,
    routes: Sequence[str],
    directories: Mapping[str, Directory],
    limit: int,
    *,
    plan_id: int | None = None,
    suspects: bool = False,
    after: str = "",
) -> Choice:
    """Pick up to *limit* ready tasks that hold something and have room, as far as no ready task without is more urgent.

    *directories* are the routes whose tasks hold their directory. On return the locks of what was picked are held until
    the transaction ends: claim those ids in it, and call ``hold``.
    """
    choice = Choice()
    values = {
        "routes": list(routes),
        "serial": [route in directories for route in routes],
        "plan": plan_id,
        "limit": limit,
        "keys": KEYS_AT_ONCE,
        "looked_at": LOOKED_AT,
        "suspects": suspects,
        "after": after,
    }
    rows = connection.execute(_CANDIDATES[suspects], values).all()
    choice.seen = bool(rows)
    if len({row.route for row in rows if row.concurrency_key is not None}) >= KEYS_AT_ONCE:
        choice.further = max(row.route for row in rows)
    free = [row for row in rows if row.id is not None]
    if not free:
        return choice
    free.sort(key=lambda row: (-row.priority, row.id))
    plain = [route for route in routes if route not in directories]
    others = []
    if plain:
        others = [
            (-row.priority, row.id)
            for row in connection.execute(_OTHERS[suspects], {"routes": plain, "plan": plan_id, "limit": limit})
        ]
    wanted = []
    for row in free:
        holds = [("key", row.concurrency_key)] if row.concurrency_key is not None else []
        if row.base in directories:
            holds.append(("directory", directories[row.base](row.dir)))
        wanted.append((row, holds))
    locked = _lock(connection, (each for _, holds in wanted for each in holds))
    held, room = _held(connection, locked)
    rank = 0
    for row, holds in wanted:
        # As many of the others as come before it have the better claim on a slot.
        rank_here = sum(1 for other in others if other < (-row.priority, row.id))
        if rank_here + rank >= limit:
            break
        if all(each in locked or each[0] == "directory" for each in holds) and _fits(holds, held, room, locked):
            choice.holds[row.id] = holds
            for each in holds:
                held.append(each)
            rank += 1
    return choice


def hold(connection: Connection, claimed: Iterable[tuple[int, int]], choice: Choice) -> None:
    """Note what the *claimed* attempts, as (task id, attempt), hold while they run."""
    rows = [(task, attempt, *each) for task, attempt in claimed for each in choice.holds[task]]
    if rows:
        tasks, attempts, kinds, names = zip(*rows, strict=True)
        connection.execute(
            _HOLD, {"tasks": list(tasks), "attempts": list(attempts), "kinds": list(kinds), "names": list(names)}
        )


def base_route(route: str) -> str:
    """The route that workers register and claim by: without the hash of a task's concurrency key."""
    return route.partition(KEY_SEPARATOR)[0]


def overlap(one: str, other: str) -> bool:
    """Whether two real paths are the same directory, or one lies within the other."""
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first == second or first in second.parents or second in first.parents


def _fits(
    holds: Sequence[tuple[str, str]],
    held: Sequence[tuple[str, str]],
    room: Mapping[str, int],
    locked: set[tuple[str, str]],
) -> bool:
    for kind, name in holds:
        if kind == "key":
            if sum(1 for each in held if each == (kind, name)) >= room.get(name, DEFAULT_ROOM):
                return False
        elif _ALL_DIRECTORIES not in locked or any(
            other == "directory" and overlap(name, path) for other, path in held
        ):
            return False
    return True


_ALL_DIRECTORIES = ("directories", "")


def _lock(connection: Connection, holds: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Try to lock what *holds* names; all directories have one lock, since they can lie within each other."""
    names = sorted({each if each[0] == "key" else _ALL_DIRECTORIES for each in holds})
    values = {"names": [f"{kind} {name}" for kind, name in names], "locks": _LOCKS}
    got = connection.execute(_LOCK, values).scalars().all()
    return {name for name, has in zip(names, got, strict=True) if has}


def _held(connection: Connection, locked: set[tuple[str, str]]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """What running tasks hold of the *locked* names, and how much room each key has; leftovers are removed."""
    keys = sorted(name for kind, name in locked if kind == "key")
    values = {"keys": keys, "directories": _ALL_DIRECTORIES in locked}
    connection.execute(_TIDY, values)
    held = [(kind, name) for kind, name in connection.execute(_HELD, values)]
    room = {str(key): int(most) for key, most in connection.execute(_ROOM, {"keys": keys})}
    return held, room


# -- the statements -----------------------------------------------------------------------------------------------


def _ready(task: str, suspects: bool) -> str:
    """As the indexes tasks_ready and tasks_suspect have it."""
    lost = ">" if suspects else "="
    return f"{task}.status = 'pending' AND {task}.due AND {task}.held_at IS NULL AND {task}.lost_count {lost} 0"


_OPEN = """
known AS MATERIALIZED (
  SELECT k.route, k.serial FROM unnest(:routes, :serial) AS k (route, serial)
  WHERE NOT EXISTS (
    SELECT FROM agents AS a
    WHERE a.name = split_part(k.route, E'\\x1f', 1) AND a.paused_at IS NOT NULL
      AND (a.paused_until IS NULL OR a.paused_until > clock_timestamp())))
"""


def _candidates(suspects: bool) -> Any:
    # A loose index scan from key to key. A key without room yields its route and no id: it was seen. A directory agent's
    # tasks are looked at together, one for each dir that they name: which of those are the same, only its host knows.
    ready = _ready("t", suspects)
    statement = text(f"""
WITH RECURSIVE {_OPEN},
walk (route, base, serial) AS (
  SELECT (SELECT t.route FROM tasks AS t
          WHERE {ready} AND t.route > greatest(k.route || E'\\x1e', :after) AND t.route < k.route || E'\\x1f'
          ORDER BY t.route LIMIT 1), k.route COLLATE "C", k.serial
  FROM known AS k
  UNION ALL
  SELECT (SELECT t.route FROM tasks AS t
          WHERE {ready} AND t.route > w.route AND t.route < w.base || E'\\x1f'
          ORDER BY t.route LIMIT 1), w.base, w.serial
  FROM walk AS w WHERE w.route IS NOT NULL
),
routes AS MATERIALIZED (
  SELECT route, base, serial FROM walk WHERE route IS NOT NULL LIMIT :keys
)
SELECT r.route, r.base, h.id, h.priority, r.concurrency_key, h.dir
FROM (
  SELECT r.route, r.base, r.serial, first.concurrency_key, coalesce(l.max_running, {DEFAULT_ROOM}) - (
    SELECT count(*) FROM key_holders AS k
    JOIN tasks AS t ON t.id = k.task_id AND t.attempt = k.attempt AND t.status = 'running'
    WHERE k.kind = 'key' AND k.name = first.concurrency_key) AS room
  FROM routes AS r
  CROSS JOIN LATERAL (
    SELECT t.concurrency_key FROM tasks AS t WHERE {ready} AND t.route = r.route LIMIT 1) AS first
  LEFT JOIN concurrency_limits AS l ON l.key = first.concurrency_key
) AS r
LEFT JOIN LATERAL (
  SELECT t.id, t.priority, t.dir FROM tasks AS t
  WHERE r.room > 0 AND {ready} AND t.route = r.route AND (:plan IS NULL OR t.plan_id = :plan)
  ORDER BY t.priority DESC, t.id LIMIT :limit
) AS h ON true
UNION ALL
SELECT k.route, k.route, h.id, h.priority, NULL, h.dir
FROM known AS k
CROSS JOIN LATERAL (
  SELECT DISTINCT ON (one.dir) one.id, one.priority, one.dir FROM (
    SELECT t.id, t.priority, t.dir FROM tasks AS t
    WHERE {ready} AND t.route = k.route AND (:plan IS NULL OR t.plan_id = :plan)
    ORDER BY t.priority DESC, t.id LIMIT :looked_at
  ) AS one ORDER BY one.dir, one.priority DESC, one.id
) AS h
WHERE k.serial
""")
    return statement.bindparams(
        bindparam("routes", type_=ARRAY(Text)),
        bindparam("serial", type_=ARRAY(Boolean)),
        bindparam("plan", type_=BigInteger),
        bindparam("after", type_=Text),
        bindparam("keys", type_=Integer),
        bindparam("looked_at", type_=Integer),
        bindparam("limit", type_=Integer),
    )


def _others(suspects: bool) -> Any:
    """The heads of the routes without keys, to be weighed against. Uses tasks_ready or tasks_suspect."""
    ready = _ready("t", suspects)
    statement = text(f"""
SELECT h.priority, h.id FROM unnest(:routes) AS k (route)
CROSS JOIN LATERAL (
  SELECT t.priority, t.id FROM tasks AS t
  WHERE {ready} AND t.route = k.route AND (:plan IS NULL OR t.plan_id = :plan)
  ORDER BY t.priority DESC, t.id LIMIT :limit
) AS h
WHERE NOT EXISTS (
  SELECT FROM agents AS a
  WHERE a.name = split_part(k.route, E'\\x1f', 1) AND a.paused_at IS NOT NULL
    AND (a.paused_until IS NULL OR a.paused_until > clock_timestamp()))
ORDER BY h.priority DESC, h.id LIMIT :limit
""")
    return statement.bindparams(
        bindparam("routes", type_=ARRAY(Text)),
        bindparam("plan", type_=BigInteger),
        bindparam("limit", type_=Integer),
    )


_CANDIDATES = {suspects: _candidates(suspects) for suspects in (False, True)}
_OTHERS = {suspects: _others(suspects) for suspects in (False, True)}

_LOCK = text("""
SELECT pg_try_advisory_xact_lock(:locks, hashtext(n.name))
FROM unnest(:names) WITH ORDINALITY AS n (name, place) ORDER BY n.place
""").bindparams(bindparam("names", type_=ARRAY(Text)), bindparam("locks", type_=Integer))

_NAMED = "((h.kind = 'key' AND h.name = ANY (:keys)) OR (h.kind = 'directory' AND :directories))"
_RUNS = "SELECT FROM tasks AS t WHERE t.id = h.task_id AND t.attempt = h.attempt AND t.status = 'running'"
_TYPES = (bindparam("keys", type_=ARRAY(Text)), bindparam("directories", type_=Boolean))

# Both use key_holders_kind_name.
_TIDY = text(f"DELETE FROM key_holders AS h WHERE {_NAMED} AND NOT EXISTS ({_RUNS})").bindparams(*_TYPES)
_HELD = text(f"SELECT h.kind, h.name FROM key_holders AS h WHERE {_NAMED} AND EXISTS ({_RUNS})").bindparams(*_TYPES)
_ROOM = text("SELECT key, max_running FROM concurrency_limits WHERE key = ANY (:keys)").bindparams(_TYPES[0])

_HOLD = text("""
INSERT INTO key_holders (task_id, kind, name, attempt)
SELECT * FROM unnest(:tasks, :kinds, :names, :attempts)
ON CONFLICT (task_id, kind) DO UPDATE SET name = excluded.name, attempt = excluded.attempt
""").bindparams(
    bindparam("tasks", type_=ARRAY(BigInteger)),
    bindparam("kinds", type_=ARRAY(Text)),
    bindparam("names", type_=ARRAY(Text)),
    bindparam("attempts", type_=ARRAY(Integer)),
)

__all__ = ["DEFAULT_ROOM", "Choice", "Directory", "base_route", "choose", "hold", "overlap"]
