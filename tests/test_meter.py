"""Counting usage: an attempt's own part, whatever its agent's numbers mean (S50, S34)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agents.meter import Amount, Meter, Report, add_up, read_report
from orchestrator.agents.readers import make_reader
from orchestrator.domain.outcome import Usage

STREAMS = Path(__file__).parent / "inputs" / "usage-streams"
KINDS = ["delta", "process_total", "session_total", "mixed", "reset"]


class Metered:
    """Signals of which only usage counts; remembers the attempt's total after each report."""

    def __init__(self, carry: dict[str, Any] | None = None) -> None:
        self.meter = Meter(carry)
        self.totals: list[int | None] = []

    def usage(self, report: Report) -> None:
        self.totals.append(self.meter.add(report).total_tokens)

    def session(self, session: str) -> None:
        self.meter.session(session)

    def message(self, text: str) -> None: ...

    def tool(self, name: str, text: str) -> None: ...

    def result(self, value: Any) -> None: ...

    def error(self, fault: Any) -> None: ...

    def progress(self, percent: float | None, message: str | None) -> None: ...

    def checkpoint(self, name: str, value: Any) -> str | None: ...


def attempt(file: str, carry: dict[str, Any] | None = None) -> Metered:
    """Read a stream as one attempt."""
    metered = Metered(carry)
    reader = make_reader("jsonl", metered)
    reader.feed("stdout", (STREAMS / file).read_bytes())
    reader.close()
    return metered


def carried(usage: Usage | None) -> dict[str, Any] | None:
    """What the database would give to the next attempt."""
    assert usage is not None
    found: dict[str, Any] | None = json.loads(json.dumps(usage.carry))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_session_counts_once(kind: str) -> None:
    """Every kind of counter gives 3,000 tokens for the first attempt and 1,500 for the second."""
    first = attempt(f"{kind}-1.jsonl").meter.close(ended=True)
    assert first is not None
    assert first.total_tokens == 3000
    second = attempt(f"{kind}-2.jsonl", carried(first)).meter.close(ended=True)
    assert second is not None
    assert second.total_tokens == 1500
    assert second.counter == ("process_total" if kind == "reset" else kind)
    assert (first.cost_usd, second.cost_usd) == (None, None)
    both = add_up(first, second)
    assert both is not None
    assert both.total_tokens == 4500


@pytest.mark.parametrize("kind", ["process_total", "session_total", "mixed"])
def test_a_budget_over_both_attempts_is_reached_at_the_third_report(kind: str) -> None:
    """With 3,000 used before, 4,000 are passed at the report that says so, not at the first."""
    first = attempt(f"{kind}-1.jsonl").meter.close(ended=True)
    totals = attempt(f"{kind}-2.jsonl", carried(first)).totals
    over = [3000 + (total or 0) > 4000 for total in totals]
    assert over.index(True) == 2


@pytest.mark.parametrize("kind", ["process_total", "session_total"])
def test_usd_are_counted_like_tokens(kind: str) -> None:
    """Amounts of money follow the same rules as numbers of tokens."""
    meter = Meter()
    for cost in (0.1, 0.3):
        meter.add(Report(Amount(cost=cost), kind))
    first = meter.close(ended=True)
    assert first is not None
    assert first.cost_usd == pytest.approx(0.3)
    again = Meter(carried(first))
    start = 0.3 if kind == "session_total" else 0.0
    used = again.add(Report(Amount(cost=start + 0.2), kind))
    assert used.cost_usd == pytest.approx(0.2)
    assert used.total_tokens is None


def test_another_session_starts_from_nothing() -> None:
    """A fresh session's total is all this attempt's, however large the one before had grown."""
    meter = Meter({"session": "old", "amount": [None, None, 3000, None]})
    meter.session("new")
    assert meter.add(Report(Amount(total=5000), "session_total")).total_tokens == 5000


def test_a_resumed_session_without_a_known_start_is_not_all_new_spend() -> None:
    """Without a baseline the first total of a resumed session is where measuring starts."""
    meter = Meter(None, resumed=True)
    meter.add(Report(Amount(total=1_000_000), "session_total"))
    assert meter.add(Report(Amount(total=1_000_700), "session_total")).total_tokens == 700


def test_a_total_covers_the_differences_before_it() -> None:
    """Totals and differences in one stream are not added to each other."""
    meter = Meter()
    meter.add(Report(Amount(total=400), id="a"))
    meter.add(Report(Amount(total=600), id="b"))
    assert meter.add(Report(Amount(total=1000), "process_total")).total_tokens == 1000
    assert meter.add(Report(Amount(total=50), id="c")).total_tokens == 1050


def test_an_attempt_that_was_cut_off_is_incomplete_and_not_free() -> None:
    """What was reported before the end stays, marked as incomplete; unknown cost is None."""
    meter = Meter()
    for number in range(5):
        meter.add(Report(Amount(900, 100, 1000), id=f"m{number}", provisional=True))
    used = meter.close(ended=False)
    assert used is not None
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == (4500, 500, 5000)
    assert (used.complete, used.cost_usd, used.cost_source) == (False, None, None)


def test_nothing_reported_is_unknown() -> None:
    """An agent that reports nothing has no usage, which is not zero usage."""
    assert Meter().close(ended=True) is None


@pytest.mark.parametrize(
    "line",
    [
        {"tokens": -5},
        {"tokens": "many"},
        {"tokens": float("nan")},
        {"tokens": float("inf")},
        {"tokens": True},
        {"tokens": 1e300},
        {"kind": "guess", "tokens": 5},
        {"kind": ["delta"], "tokens": 5},
        {},
    ],
)
def test_a_report_that_cannot_be_is_refused(line: dict[str, Any]) -> None:
    """Numbers that are none spoil no sum."""
    assert isinstance(read_report({"type": "usage", **line}), str)


@given(
    st.lists(
        st.tuples(st.sampled_from(["delta", "process_total", "session_total"]), st.integers(0, 10_000)), max_size=40
    )
)
def test_usage_is_never_negative(reports: list[tuple[str, int]]) -> None:
    """Whatever is reported in whatever order, an attempt never used less than nothing, nor more than all of it."""
    meter = Meter()
    for number, (kind, total) in enumerate(reports):
        used = meter.add(Report(Amount(total=total), kind, id=str(number)))
        assert used.total_tokens is not None
        assert 0 <= used.total_tokens <= sum(total for _, total in reports[: number + 1])


def test_money_that_a_total_does_not_name_stays() -> None:
    """A total of tokens covers no differences of USD, and the other way round."""
    meter = Meter()
    meter.add(Report(Amount(total=400, cost=0.02), id="a"))
    used = meter.add(Report(Amount(total=500), "session_total"))
    assert (used.total_tokens, used.cost_usd) == (500, 0.02)
    used = meter.add(Report(Amount(cost=0.03), "process_total"))
    assert used.total_tokens == 500
    assert used.cost_usd == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["process_total", "session_total"])
def test_a_total_that_is_told_again_with_a_trace_less_money(kind: str) -> None:
    """Neither tokens nor USD are counted twice because a sum of fractions came out smaller by a trace."""
    meter = Meter()
    meter.add(Report(Amount(900, 100, 1000, 0.1 + 0.2), kind))
    used = meter.add(Report(Amount(900, 100, 1000, 0.3), kind))
    assert used.total_tokens == 1000
    assert used.cost_usd == pytest.approx(0.3)


def test_tokens_by_session_and_money_by_process() -> None:
    """A counter of USD that starts anew leaves that of the tokens alone, in whatever order they are told."""
    first = Meter()
    first.add(Report(Amount(total=3000, cost=0.03), "session_total"))
    carry = carried(first.close(ended=True))
    for reports in (
        [Amount(total=3600, cost=0.006)],
        [Amount(total=3600), Amount(cost=0.006)],
        [Amount(cost=0.006), Amount(total=3600)],
        [Amount(total=3000), Amount(total=3600, cost=0.006)],
    ):
        meter = Meter(carry)
        for amount in reports:
            used = meter.add(Report(amount, "session_total"))
        assert used.total_tokens == 600
        assert used.cost_usd == pytest.approx(0.006)


def test_what_an_attempt_did_not_speak_of_is_carried_on() -> None:
    """An attempt between that reports only tokens does not make the session's money new spend for the next one."""
    meter = Meter()
    meter.add(Report(Amount(total=3000, cost=0.03), "session_total"))
    between = Meter(carried(meter.close(ended=True)))
    between.add(Report(Amount(total=3500), "session_total"))
    last = Meter(carried(between.close(ended=True)))
    used = last.add(Report(Amount(total=3600, cost=0.04), "session_total"))
    assert used.total_tokens == 100
    assert used.cost_usd == pytest.approx(0.01)


def test_parts_may_move_within_a_total_that_grows() -> None:
    """Tokens that are counted otherwise from one report to the next are no new start as long as their sum grows."""
    meter = Meter()
    meter.add(Report(Amount(900, 100, 1000, cached=800), "process_total"))
    used = meter.add(Report(Amount(850, 250, 1100, cached=700), "process_total"))
    assert used.total_tokens == 1100


amounts = st.builds(
    lambda read, wrote, cost: Amount(
        read, wrote, None if read is None and wrote is None else (read or 0) + (wrote or 0), cost
    ),
    st.none() | st.integers(0, 999),
    st.none() | st.integers(0, 999),
    st.none() | st.floats(0, 9),
)


@given(st.lists(st.tuples(st.sampled_from(["delta", "process_total", "session_total"]), amounts), max_size=20), amounts)
def test_nothing_of_usage_is_negative_or_more_than_was_said(reports: list[tuple[str, Amount]], base: Amount) -> None:
    """In no field, with a session that had begun before, whichever fields the reports name."""
    meter = Meter({"amount": list(base[:4])}, resumed=True)
    said = [0.0] * 4
    for kind, amount in reports:
        used = meter.add(Report(amount, kind))
        said = [one + (other or 0) for one, other in zip(said, amount, strict=False)]
        found = (used.input_tokens, used.output_tokens, used.total_tokens, used.cost_usd)
        for value, most in zip(found, (said[0], said[1], said[0] + said[1], said[3]), strict=True):
            assert value is None or 0 <= value <= most + 1e-6
