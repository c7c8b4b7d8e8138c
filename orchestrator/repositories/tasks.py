"""``TaskRepository``: taking tasks, giving them back, and what the worker asks about those it holds.

Every public method is one transaction, opened and ended inside it. ``claim`` is unit 1 of ADR-0004. The statements are
Core, built once, rows as tuples: through entities a claim costs ten times the client's CPU (docs/adr/0004).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    JSON,
    BigInteger,
    Engine,
    Integer,
    Row,
    Select,
    Text,
    Update,
    Uuid,
    and_,
    any_,
    bindparam,
    cast,
    column,
    exists,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.orm import Session, aliased, sessionmaker

from orchestrator.database.engine import alone
from orchestrator.domain.entities import AgentState, Dependency, Task, WorkerRow, table
from orchestrator.domain.outcome import Claim, Outcome, Usage
from orchestrator.domain.settle import Settlement, settle
from orchestrator.domain.words import OutcomeClass, TaskStatus
from orchestrator.repositories import keys
from orchestrator.repositories.claims import (
    CLAIM_COLUMNS,
    KNOWN,
    ROUTE_SEPARATOR,
    Claimed,
    Known,
    Look,
    claim_of,
    described,
    retry_policy,
)
from orchestrator.repositories.runs import Ended, storable
from orchestrator.repositories.settling import Ending, write

DEEPER = 5_000
"""How many tasks of each agent a claim looks past that came up empty although there are ready ones."""
DEMOTED_AT_ONCE = 1_000
"""Rows that say that they are due and are not: so many are put right at once when they are all that a claim meets."""


class TaskRepository:
    """The tasks table as the run path uses it."""

    def __init__(self, engine: Engine) -> None:
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._keys_after = ""

    def claim(
        self,
        worker: UUID,
        agents: Sequence[Known],
        limit: int,
        *,
        plan_id: int | None = None,
        suspects: bool = False,
        keyed: bool = True,
    ) -> Claimed:
        """Take up to *limit* ready tasks for *worker*, the most urgent first; equal priority in the order of adding.

        A task can be claimed when all of these hold:
        - it is ``pending``, due by the database's clock, not held, and its agent is not paused;
        - its route is one of *agents* (and it belongs to *plan_id*, if one is given);
        - no other transaction holds its row (such rows are skipped, not waited for);
        - the worker's own row is alive; otherwise nothing is taken and ``alive`` is False;
        - it was never lost by a worker, or, with *suspects*, it was: those are taken one at a time;
        - its concurrency key and its directory have room. Such tasks are looked for when *keyed* is set, or nothing else
          was found.

        One statement takes them, and is its own transaction. On return the claim is committed: ``attempt`` is increased,
        status is ``running``, and what the task left open (max_retries, retry, budget) is filled from *agents*.
        """
        kind = (plan_id is not None, suspects)
        of_plan = {} if plan_id is None else {"of_plan": plan_id}
        rows: Sequence[Row[Any]] = ()
        holders: Sequence[Row[Any]] = ()
        seen, held, alive = None, 0.0, True
        plain = tuple(known for known in agents if known.directory is None)
        if keyed or len(plain) < len(agents):
            seen, holders, held = self._claim_keyed(worker, agents, limit, plan_id, suspects)
        left = limit - len(holders)
        statement = _build_claim(len(plain) > 1, *kind)
        known, routes = described(plain)
        values: dict[str, Any] = {"worker": worker, "known": known, "limit": left}
        if len(plain) > 1:
            values["spare"] = left * 4
        with self._sessions.begin() as session:
            connection = alone(session.connection())
            if plain and left > 0:
                sent = time.perf_counter()
                rows = connection.execute(statement, values | of_plan).all()
                held = max(held, time.perf_counter() - sent)
            while not rows and left > 0:
                alive, ready, waiting = connection.execute(
                    _build_left(*kind), {"worker": worker, "known_routes": routes} | of_plan
                ).one()
                if not (alive and ready):
                    seen = bool(seen) if not waiting else seen
                    break
                # Something is ready by its index: rows in other hands at the head, or rows that are not due after all.
                demoted = connection.execute(_build_demote(*kind), {"known_routes": routes} | of_plan).rowcount
                if len(plain) > 1:
                    values["spare"] = left + DEEPER
                sent = time.perf_counter()
                rows = connection.execute(statement, values | of_plan).all()
                held = max(held, time.perf_counter() - sent)
                if demoted < DEMOTED_AT_ONCE:
                    break
        if not rows and seen is None and alive:  # nothing else to do, and there are some
            seen, holders, held = self._claim_keyed(worker, agents, limit, plan_id, suspects)
        claims = [(row.priority, claim_of(row)) for row in rows]
        claims += [(row.priority, replace(claim_of(row), keyed=True)) for row in holders]
        claims.sort(key=lambda each: (-each[0], each[1].task_id))
        return Claimed([claim for _, claim in claims], held, alive, seen)

    def look(self, worker: UUID, agents: Sequence[Known], *, plan_id: int | None = None) -> Look:
        """Whether there is something to claim: one statement, for a poll that mostly finds nothing.

        Uses the indexes of the claim. Changes nothing.
        """
        values: dict[str, Any] = {"worker": worker, "known_routes": described(tuple(agents))[1]}
        if plan_id is not None:
            values["of_plan"] = plan_id
        with self._sessions.begin() as session:
            alive, ready, keyed, suspect, keyed_suspect = (
                alone(session.connection()).execute(_build_left(plan_id is not None, False, True), values).one()
            )
        return Look(alive, ready or keyed or suspect or keyed_suspect, keyed or keyed_suspect, suspect or keyed_suspect)

    def _claim_keyed(
        self, worker: UUID, agents: Sequence[Known], limit: int, plan_id: int | None, suspects: bool
    ) -> tuple[bool, list[Row[Any]], float]:
        """Claim tasks that hold a key or a directory, in one transaction; also say whether any is ready, and the hold."""
        directories = {known.route: known.directory for known in agents if known.directory is not None}
        with self._sessions.begin() as session:
            connection = session.connection()
            known, routes = described(tuple(agents))
            choice = keys.choose(
                connection, routes, directories, limit, plan_id=plan_id, suspects=suspects, after=self._keys_after
            )
            self._keys_after = choice.further
            if not choice.holds:
                return choice.seen, [], 0.0
            values: dict[str, Any] = {"worker": worker, "known": known, "chosen": choice.ids}
            if plan_id is not None:
                values["of_plan"] = plan_id
            sent = time.perf_counter()
            rows = connection.execute(_build_claim(True, plan_id is not None, suspects, chosen=True), values).all()
            keys.hold(connection, ((row.id, row.attempt) for row in rows), choice)
        return True, list(rows), time.perf_counter() - sent

    def parents_results(self, task_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The results of the tasks that each of *task_ids* depends on, by the parent's name; unnamed ones by ``#id``."""
        parent = aliased(Task)
        with self._sessions() as session:
            rows = session.execute(
                select(Dependency.task_id, parent.id, parent.name, parent.result)
                .join(parent, parent.id == Dependency.depends_on)
                .where(Dependency.task_id == any_(literal(list(task_ids), ARRAY(BigInteger))))
            ).all()
        found: dict[int, dict[str, Any]] = {}
        for child, parent_id, name, result in rows:
            found.setdefault(child, {})[name or f"#{parent_id}"] = result
        return found

    def promote(self, limit: int = 1000) -> tuple[set[str], float | None]:
        """Make *limit* tasks whose time has come ``due``; return their agents and the seconds until the next one.

        Uses the index tasks_not_due. Committed on return.
        """
        # Asked for once: compared with the function itself, which may differ from row to row, the whole index is read.
        now = select(func.clock_timestamp()).scalar_subquery()
        ripe = (
            select(Task.id)
            .where(Task.status == TaskStatus.PENDING, ~Task.due, Task.available_at <= now)
            .order_by(Task.available_at)
            .limit(limit)
            .with_for_update(skip_locked=True, key_share=True)
            .cte("ripe")
            .prefix_with("MATERIALIZED")
        )
        with self._sessions.begin() as session:
            agents = set(
                session.scalars(
                    update(Task).where(Task.id == ripe.c.id).values(due=True).returning(Task.agent),
                    execution_options={"synchronize_session": False},
                )
            )
            upcoming = session.scalar(
                select(func.extract("epoch", func.min(Task.available_at) - func.clock_timestamp())).where(
                    Task.status == TaskStatus.PENDING, ~Task.due
                )
            )
        return agents, None if upcoming is None else max(0.0, float(upcoming))

    def cancel_requests(self, worker: UUID) -> list[tuple[int, int]]:
        """The (task id, attempt) pairs of *worker* that somebody asked to cancel. Uses tasks_cancel_requested."""
        with self._sessions() as session:
            return [
                (task_id, attempt)
                for task_id, attempt in session.execute(
                    select(Task.id, Task.attempt).where(
                        Task.status == TaskStatus.RUNNING,
                        Task.cancel_requested_at.is_not(None),
                        Task.claimed_by == worker,
                    )
                )
            ]

    def owned(self, worker: UUID) -> set[tuple[int, int]]:
        """Every (task id, attempt) that the database says *worker* runs: for reconciliation. Uses tasks_running."""
        with self._sessions() as session:
            return {
                (task_id, attempt)
                for task_id, attempt in session.execute(
                    select(Task.id, Task.attempt).where(Task.status == TaskStatus.RUNNING, Task.claimed_by == worker)
                )
            }

    def hand_back(self, worker: UUID, held: Sequence[tuple[int, int]], reason: str) -> int:
        """Give the tasks *held* by *worker* back as ``interrupted``, with a run row each; return how many moved.

        Only what the fence (id, attempt, worker) still matches moves. For claims whose answer was lost, and for what a
        worker holds but never started. Committed on return.
        """
        ids = dict(held)
        moved = 0
        with self._sessions.begin() as session:
            rows = session.execute(
                _running(Task.id == any_(literal(sorted(ids), ARRAY(BigInteger))), Task.claimed_by == worker)
            ).all()
            rows = [row for row in rows if ids[row.id] == row.attempt]
            moved = _hand_back(session, rows, reason)
        return moved

    def take_back(self, limit: int = 100, give_up_after: float = 86_400.0) -> list[tuple[int, int, str]]:
        """Take back up to *limit* tasks whose workers no longer live, in id order: (task id, attempt, new status) of each.

        Each gets its ``lost`` run and its settlement in this one transaction; rows that somebody else is moving are
        skipped. Uses tasks_running. Committed on return; call again until it returns nothing.
        """
        # Not only of the dead: a restored dump has tasks of workers that are unknown here, and a claim whose answer took
        # its time may be committed after its worker signed off. Nobody else would ever look at those.
        living = aliased(WorkerRow)
        alive = exists().where(living.id == Task.claimed_by, living.dead_at.is_(None), living.stopped_at.is_(None))
        with self._sessions.begin() as session:
            rows = session.execute(_running(~alive).limit(limit)).all()
            return _lose(session, rows, give_up_after)

    def idle(self, agents: Sequence[Known], plan_id: int | None = None) -> bool:
        """Whether no task of *agents* runs anywhere, is due, or waits for a retry. Held tasks do not count.

        With *plan_id* only that plan's current tasks count, and those that are not due yet as well: a plan is worked to
        its end. Uses tasks_running, tasks_ready, tasks_not_due and tasks_of_plan.
        """
        pending = (Task.status == TaskStatus.PENDING, Task.held_at.is_(None))
        # The route without the hash of a concurrency key.
        base = func.split_part(Task.route, literal_column("E'\\x1e'"), literal_column("1"))
        routes = literal([agent.route for agent in agents], ARRAY(Text))
        mine: list[Any] = [
            or_(Task.route == any_(routes), and_(Task.concurrency_key.is_not(None), base == any_(routes)))
        ]
        if plan_id is not None:
            mine += [Task.plan_id == plan_id, Task.superseded_at.is_(None)]
            waits: Any = true()
        else:
            waits = Task.due | (Task.available_at <= func.clock_timestamp()) | (Task.attempt > 0)
        with self._sessions() as session:
            busy = session.scalar(
                select(
                    exists().where(Task.status == TaskStatus.RUNNING, *mine) | exists().where(*pending, waits, *mine)
                )
            )
        return not busy


# -- the claim ----------------------------------------------------------------------------------------------------


# Built when first used: all of them at import would cost a command that claims nothing a seventh of its time.
@cache
def _build_claim(many: bool, of_plan: bool, suspects: bool, chosen: bool = False) -> Select[Any] | Update:
    """The claim statement: a fixed set of rows is locked first, then exactly that set is changed and returned.

    The CTEs are MATERIALIZED: a bare ``id IN (SELECT … LIMIT n FOR UPDATE SKIP LOCKED)`` may be planned as a join whose
    inner side runs again, and then takes more rows than asked. Rows come from the index tasks_ready (tasks_suspect,
    tasks_ready_of_plan). FOR NO KEY UPDATE does not conflict with the KEY SHARE of the foreign keys that point here.
    """
    # As JSON, which is written once for a worker's agents; arrays would be sent again, one by one, with every claim.
    known = (
        func.json_to_recordset(cast(bindparam("known", type_=Text), JSON))
        .table_valued(*(column(name, kind) for name, kind in KNOWN))
        .render_derived(name="known", with_types=True)
    )
    open_agents = select(known).where(~_paused(known.c.agent)).cte("open_agents").prefix_with("MATERIALIZED")
    # Locked FOR KEY SHARE: whoever declares this worker dead locks the row FOR UPDATE and so waits for this claim, or
    # this claim waits and then finds it dead. No claim of a dead worker can appear after its tasks were taken back.
    me = (
        select(WorkerRow.id)
        .where(
            WorkerRow.id == bindparam("worker", type_=Uuid),
            WorkerRow.dead_at.is_(None),
            WorkerRow.stopped_at.is_(None),
        )
        .with_for_update(read=True, key_share=True)
        .cte("me")
        .prefix_with("MATERIALIZED")
    )
    # Equal to the predicates of the partial indexes, literally: a bound parameter would hide them from the planner.
    pending, zero = literal_column("'pending'", Text), literal_column("0", Integer)
    ready = [Task.status == pending, Task.due, Task.held_at.is_(None)]
    suspicion = Task.lost_count > zero if suspects else Task.lost_count == zero
    # After the statement's snapshot was taken, and once a row: no visible row can have a later default than this.
    now = func.clock_timestamp()
    # Asked for by a subquery, the limit is as unknown to a plan for these values as it is to one for all: so the server
    # keeps the plan instead of making a new one for each claim, which would cost more than the claim.
    limit, spare = (select(bindparam(name, type_=Integer)).scalar_subquery() for name in ("limit", "spare"))
    order = (Task.priority.desc(), Task.id)
    base: Any = Task.route
    if chosen:
        # The ids come from keys.choose; what has changed since is left out.
        base = func.split_part(Task.route, literal_column("E'\\x1e'"), literal_column("1"))
        ours = [Task.plan_id == bindparam("of_plan", type_=BigInteger)] if of_plan else []
        picked = (
            select(Task.id, (Task.available_at <= now).label("ripe"))
            .where(
                Task.id == any_(bindparam("chosen", type_=ARRAY(BigInteger))),
                *ready,
                suspicion,
                *ours,
                exists(select(me.c.id)),
            )
            .order_by(*order)
        )
    elif of_plan:
        picked = (
            select(Task.id, (Task.available_at <= now).label("ripe"))
            .where(
                *ready,
                suspicion,
                Task.plan_id == bindparam("of_plan", type_=BigInteger),
                Task.route.in_(select(open_agents.c.route)),
                exists(select(me.c.id)),
            )
            .order_by(*order)
            .limit(limit)
        )
    elif not many:
        picked = (
            select(Task.id, (Task.available_at <= now).label("ripe"))
            .where(
                *ready,
                suspicion,
                Task.route == select(open_agents.c.route).scalar_subquery(),
                exists(select(me.c.id)),
            )
            .order_by(*order)
            .limit(limit)
        )
    else:
        # Each route's own head of the queue, without locks and with some to spare for what others hold; then the
        # best of all of them is locked and checked again.
        inner = aliased(Task)
        head = (
            select(inner.id, inner.priority)
            .where(
                inner.status == pending,
                inner.due,
                inner.held_at.is_(None),
                inner.lost_count > zero if suspects else inner.lost_count == zero,
                inner.route == open_agents.c.route,
            )
            .order_by(inner.priority.desc(), inner.id)
            .limit(spare)
            .lateral("head")
        )
        candidates = (
            select(head.c.id)
            .select_from(open_agents.join(head, true()))
            .order_by(head.c.priority.desc(), head.c.id)
            .limit(spare)
            .cte("candidates")
            .prefix_with("MATERIALIZED")
        )
        picked = (
            select(Task.id, (Task.available_at <= now).label("ripe"))
            .where(Task.id.in_(select(candidates.c.id)), *ready, suspicion, exists(select(me.c.id)))
            .order_by(*order)
            .limit(limit)
        )
    locked = picked.with_for_update(skip_locked=True, key_share=True, of=Task).cte("locked").prefix_with("MATERIALIZED")
    # By the primary key, whatever the planner thinks of the number of rows: joined to ``locked``, it would read the whole
    # table as soon as it expects many.
    ripe, unripe = (
        Task.id == any_(func.array(select(locked.c.id).where(condition).scalar_subquery(), type_=ARRAY(BigInteger)))
        for condition in (locked.c.ripe, ~locked.c.ripe)
    )
    # A row that says due although its time has not come (an INSERT by hand): put right, and not taken.
    demoted = update(Task).where(unripe).values(due=False).returning(Task.id).cte("demoted")
    return (
        update(table(Task))
        .add_cte(demoted)
        .where(ripe, base == open_agents.c.route)
        .values(
            # Left alone, it would cost more than the rest: of a column that is generated from it (``route``) the server
            # reads the expression anew for each row that an UPDATE does not change it in, and once where it does.
            agent=Task.agent,
            status=TaskStatus.RUNNING.value,
            attempt=Task.attempt + 1,
            claimed_by=bindparam("worker", type_=Uuid),
            started_at=now,
            max_retries=func.coalesce(Task.max_retries, open_agents.c.max_retries),
            retry=func.coalesce(Task.retry, open_agents.c.retry),
            budget_seconds=func.coalesce(Task.budget_seconds, open_agents.c.seconds),
            budget_tokens=func.coalesce(Task.budget_tokens, open_agents.c.tokens),
            budget_usd=func.coalesce(Task.budget_usd, open_agents.c.usd),
            budget_turns=func.coalesce(Task.budget_turns, open_agents.c.turns),
            on_limit=func.coalesce(Task.on_limit, open_agents.c.on_limit),
            progress_percent=null(),
            progress_message=null(),
            last_output=null(),
            last_output_at=null(),
            live_usage=null(),
        )
        .returning(*CLAIM_COLUMNS)
        .execution_options(synchronize_session=False)
    )


def _paused(agent: Any) -> Any:
    """Whether somebody has paused *agent*."""
    return exists().where(
        AgentState.name == agent,
        AgentState.paused_at.is_not(None),
        (AgentState.paused_until.is_(None)) | (AgentState.paused_until > func.clock_timestamp()),
    )


def _ready(of_plan: bool, suspects: bool, route: Any = None) -> list[Any]:
    """The ready tasks of some routes, paused or not, as the claim's indexes have them; *route*: instead of known_routes."""
    pending, zero = literal_column("'pending'", Text), literal_column("0", Integer)
    conditions = [
        Task.status == pending,
        Task.due,
        Task.held_at.is_(None),
        Task.lost_count > zero if suspects else Task.lost_count == zero,
        Task.route == any_(bindparam("known_routes", type_=ARRAY(Text))) if route is None else route,
    ]
    if of_plan:
        conditions.append(Task.plan_id == bindparam("of_plan", type_=BigInteger))
    return conditions


@cache
def _build_left(of_plan: bool, *kinds: bool) -> Any:
    """Whether the worker lives, and whether anything is ready by the claim's index: without a key, and with one.

    What belongs to a paused agent is not ready. *kinds*: what has never been lost (False), what was (True), or both.
    """
    routes = func.unnest(bindparam("known_routes", type_=ARRAY(Text)))
    known = routes.table_valued(column("route", Text)).render_derived(name="known")
    agent = func.split_part(known.c.route, literal_column("E'\\x1f'"), literal_column("1"))
    going = select(known.c.route).where(~_paused(agent)).cte("going").prefix_with("MATERIALIZED")
    mine = any_(func.array(select(going.c.route).scalar_subquery(), type_=ARRAY(Text)))
    begin, end = (going.c.route.concat(literal_column(f"E'\\x{mark}'", Text)) for mark in ("1e", "1f"))
    found = [exists().where(WorkerRow.id == bindparam("worker", type_=Uuid), WorkerRow.dead_at.is_(None))]
    for suspects in kinds:
        keyed = _ready(of_plan, suspects, and_(Task.route > begin, Task.route < end))
        found.append(exists().where(*_ready(of_plan, suspects, Task.route == mine)))
        # The LIMIT keeps it from being planned as a join that reads all that is ready, once for each agent.
        one = select(Task.id).where(*keyed).correlate(going).limit(literal_column("1")).lateral("one")
        found.append(exists(select(one.c.id).select_from(going.join(one, true()))))
    return select(*found)


@cache
def _build_demote(of_plan: bool, suspects: bool) -> Update:
    """Put right what says that it is due and is not (an INSERT by hand), many at once."""
    wrong = (
        select(Task.id)
        .where(*_ready(of_plan, suspects), Task.available_at > func.clock_timestamp())
        .limit(DEMOTED_AT_ONCE)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("wrong")
        .prefix_with("MATERIALIZED")
    )
    return update(table(Task)).where(Task.id == wrong.c.id).values(due=False)


# -- taking back --------------------------------------------------------------------------------------------------


def _running(*conditions: Any) -> Select[Any]:
    """Running tasks that match, locked in id order; rows that somebody is moving are skipped. Uses tasks_running."""
    return (
        select(
            *CLAIM_COLUMNS,
            WorkerRow.name.label("worker"),
            WorkerRow.host,
            WorkerRow.held,
            Task.live_usage,
            func.clock_timestamp().label("now"),
        )
        .select_from(Task)
        .outerjoin(WorkerRow, WorkerRow.id == Task.claimed_by)
        .where(Task.status == literal_column("'running'"), *conditions)
        .order_by(Task.id)
        .with_for_update(skip_locked=True, key_share=True, of=Task)
    )


def _lose(session: Session, rows: Sequence[Row[Any]], give_up_after: float) -> list[tuple[int, int, str]]:
    endings = []
    for row in rows:
        claim = claim_of(row)
        message = f"worker {row.worker or claim.claimed_by} is gone"
        outcome = _unreported(row, OutcomeClass.LOST, "worker_lost", message)
        settlement = settle(
            claim, outcome, cancel_requested=claim.cancel_requested, give_up_after=give_up_after, alone=row.held == 1
        )
        endings.append(_ending(claim, outcome, settlement, row))
    write(session, endings)
    return [(e.claim.task_id, e.claim.attempt, e.settlement.status.value) for e in endings]


def _hand_back(session: Session, rows: Sequence[Row[Any]], reason: str) -> int:
    endings = []
    for row in rows:
        claim = claim_of(row)
        outcome = _unreported(row, OutcomeClass.INTERRUPTED, "handed_back", reason)
        settlement = settle(claim, outcome, cancel_requested=claim.cancel_requested)
        endings.append(_ending(claim, outcome, settlement, row))
    write(session, endings)
    return len(endings)


def _ending(claim: Claim, outcome: Outcome, settlement: Settlement, row: Row[Any]) -> Ending:
    # The numbers are an agent's: one that no column takes would keep the whole batch from being taken back, for ever.
    ended = storable(Ended(claim, outcome, row.worker, row.host))
    return Ending(claim, ended.outcome, settlement, ended.worker, ended.host)


def _unreported(row: Row[Any], kind: OutcomeClass, cause: str, message: str) -> Outcome:
    """The outcome of an attempt that nobody else can report. What it used so far is kept: it was paid for (S34)."""
    live = row.live_usage or {}
    used = {name: live[name] for name in _USAGE if live.get(name) is not None}
    usage = Usage(**used, complete=False) if used else None
    elapsed = max(0.0, (row.now - row.started_at).total_seconds())
    return Outcome(kind, cause=cause, message=message, usage=usage, elapsed=elapsed)


_USAGE = (
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "cost_usd",
    "cost_source",
    "counter",
    "turns",
    "model",
    "carry",
    "cached_tokens",
)


__all__ = ["ROUTE_SEPARATOR", "Claimed", "Known", "TaskRepository", "retry_policy"]
