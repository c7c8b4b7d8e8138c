"""The benchmark itself: that its rows work and what its report looks like. Nothing here judges a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.__main__ import ROWS
from tests.bench.figures import Figure

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as ``scripts/bench`` does."""
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_ratio_is_the_median_of_the_ratios_within_each_run() -> None:
    """A run on a slow machine is compared with the limit of that run, and a run that found nothing does not count."""
    figure = Figure("drain", "tasks/s", 0.8, 1.0, against="loop")
    for value, limit in ((50.0, 100.0), (900.0, 1_000.0), (None, 7.0), (20.0, 10.0)):
        figure.add(value, limit)
    assert figure.ratio == 0.9
    assert figure.met() == "must"


@pytest.mark.parametrize(("value", "met"), [(4.0, "goal"), (5.0, "must"), (9.0, "no")])
def test_an_upper_bound_is_met_from_below(value: float, met: str) -> None:
    """What is asked as *at most* is met by what is not more; without a limit the value itself is judged."""
    figure = Figure("hold", "ms", 5.0, 4.0, at_most=True)
    figure.add(value)
    assert figure.met() == met


def test_what_was_not_measured_is_not_met() -> None:
    """A figure without runs has neither a median nor a judgement."""
    shown = Figure("hold", "ms", 5.0, 4.0, at_most=True).as_json()
    assert (shown["median"], shown["met"], shown["runs"]) == (None, None, [])


@pytest.mark.parametrize("arguments", [("--rows", "drian"), ("--runs", "0")])
def test_a_wrong_command_line_says_what_was_expected(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started for a row that there is not, or for no runs."""
    from tests.bench.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_small_rows_are_measured_and_reported() -> None:
    """A smoke run gives one JSON document in which every figure has its runs, and leaves the judgement to readers."""
    names = ["drain", "guarantees", "cli"]
    done = bench("--small", "--rows", ",".join(names))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["small"] is True
    assert list(report["rows"]) == names
    for name, row in report["rows"].items():
        assert "error" not in row, name
        assert row["figures"], name
        for figure in row["figures"]:
            assert len(figure["runs"]) == 1, figure
            assert figure["median"] >= 0, figure
            assert figure["met"] in (None, "no", "must", "goal"), figure
            assert ("limit" in figure) == (figure["ratio"] is not None), figure


@pytest.mark.slow
def test_every_row_is_listed_with_a_sentence() -> None:
    """``--list`` names the rows without starting anything."""
    listed = bench("--list")
    assert listed.returncode == 0
    assert [line.split(maxsplit=1)[0] for line in listed.stdout.splitlines()] == list(ROWS)


def test_a_limit_too_small_to_be_measured_is_none() -> None:
    """A smoke run may use less CPU than a tick of the clock: there is no ratio then, and no judgement."""
    figure = Figure("CPU", "µs", against="bare", must=1.0)
    figure.add(5.0, 0.0)
    assert (figure.as_json()["ratio"], figure.as_json()["met"]) == (None, None)
    figure.add(6.0, 3.0)
    assert figure.as_json()["ratio"] == 2
