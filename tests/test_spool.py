"""The spool: outcomes survive the end of their process, come back once, and are private."""

from __future__ import annotations

import fcntl
import logging
import resource
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from orchestrator.domain.outcome import Budget, Claim, Outcome, RetryPolicy, TranscriptSize, Usage
from orchestrator.domain.words import OnLimit, OutcomeClass
from orchestrator.repositories.events import Piece
from orchestrator.repositories.runs import Ended
from orchestrator.worker.spool import Spool

URL = "postgresql://me:secret@db.example/jobs"


def ended() -> Ended:
    """An outcome with every field set."""
    claim = Claim(
        task_id=7,
        attempt=2,
        claimed_by=uuid4(),
        agent="coder",
        started_at=datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
        input={"text": "\ud800 half"},
        params={"a": [1, None]},
        budget=Budget(seconds=1.5, usd=2.0, on_limit=OnLimit.ASK),
        retry=RetryPolicy(1, 3, 9),
        limited_since=datetime(2026, 1, 1, tzinfo=UTC),
        session="s",
        meter={"ids": ["x"]},
    )
    outcome = Outcome(
        OutcomeClass.RATE_LIMITED,
        cause="429",
        message="slow down",
        result={"deep": [{"a": "é"}]},
        retry_at=datetime(2026, 1, 3, tzinfo=UTC),
        usage=Usage(input_tokens=5, complete=False, carry={"total": 3}),
        transcript=TranscriptSize(10, 2, True),
        notes=("one", "two"),
        elapsed=3.25,
        variables=("HOME", "PATH"),
    )
    return Ended(claim, outcome, "worker-1", "host")


def collect(spool: Spool) -> list[tuple[Ended, list[Piece]]]:
    """Everything that the spool offers."""
    offered: list[tuple[Ended, list[Piece]]] = []
    spool.offer(lambda each, pieces: offered.append((each, pieces)))
    return offered


def test_what_is_kept_comes_back_as_it_was_and_once(tmp_path: Path) -> None:
    """Every field of claim and outcome, and the unwritten transcript, are offered again; then the file is gone."""
    kept, pieces = ended(), [Piece(3, "stdout", "the end\n", 8)]
    Spool(URL, tmp_path).keep(kept, pieces)
    assert collect(Spool(URL, tmp_path)) == [(kept, pieces)]
    assert collect(Spool(URL, tmp_path)) == []


def test_databases_are_apart_and_passwords_do_not_matter(tmp_path: Path) -> None:
    """Another database is offered nothing; the same one by another spelling and password is."""
    Spool(URL, tmp_path).keep(ended())
    assert collect(Spool("postgresql://me@db.example/others", tmp_path)) == []
    assert len(collect(Spool("postgresql+psycopg://me:new@db.example:5432/jobs", tmp_path))) == 1


def test_files_are_private_and_appear_whole(tmp_path: Path) -> None:
    """Nobody else can read them, and a draft that a crash left is never offered."""
    spool = Spool(URL, tmp_path)
    path = spool.keep(ended())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    (spool.directory / "9-1-abc.new").write_bytes(b"half")
    assert len(collect(spool)) == 1


def test_a_disk_that_takes_no_more_keeps_nothing_of_it(tmp_path: Path) -> None:
    """The kernel refuses the write: an OSError, and no half of a file is left in its place."""
    spool = Spool(URL, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            spool.keep(ended())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(spool.directory.iterdir()) == []


def test_what_the_database_does_not_take_stays(tmp_path: Path) -> None:
    """If recording raises, the file stays for the next time."""
    spool = Spool(URL, tmp_path)
    spool.keep(ended())

    def refuse(_ended: Ended, _pieces: list[Piece]) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        spool.offer(refuse)
    assert len(collect(spool)) == 1


def test_one_file_is_taken_by_one_process(tmp_path: Path) -> None:
    """A file that another process has locked is left alone; when that process dies, it is there again."""
    spool = Spool(URL, tmp_path)
    path = spool.keep(ended())
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert collect(spool) == []
    assert len(collect(spool)) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99}', b'{"version": 1, "claim": {}}', b"\xff\x00"])
def test_a_corrupt_file_is_moved_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It is named in the log once, kept, and does not hold the others back."""
    spool = Spool(URL, tmp_path)
    spool.keep(replace(ended(), host="good"))
    (spool.directory / "0-bad.json").write_bytes(content)
    with caplog.at_level(logging.ERROR):
        assert [each.host for each, _ in collect(spool)] == ["good"]
    assert "0-bad" in caplog.text
    assert (spool.directory / "0-bad.unreadable").read_bytes() == content
    caplog.clear()
    assert collect(spool) == []
    assert caplog.text == ""


def test_a_result_that_json_has_no_form_for_is_kept_as_text(tmp_path: Path) -> None:
    """Better its text than nothing."""
    kept = ended()
    Spool(URL, tmp_path).keep(replace(kept, outcome=replace(kept.outcome, result={"a": {1, 2}})))
    ((back, _),) = collect(Spool(URL, tmp_path))
    assert back.outcome.result == {"a": "{1, 2}"}


def test_nothing_is_made_before_there_is_something_to_keep(tmp_path: Path) -> None:
    """Offering an empty spool leaves no folder."""
    assert collect(Spool(URL, tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
