"""Transcripts: bounded memory, exact counts, and what ends up in the database."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.repositories.events import DROPPED, TAIL_SEQ, EventRepository, LiveRow, NewEvent, Piece
from orchestrator.transcripts import HEAD_BYTES, PIECE_BYTES, TAIL_BYTES, Transcript


def test_neighbours_of_a_stream_are_one_piece() -> None:
    """Lines of one stream are joined; a piece of another kind stays a thing of its own and keeps its place."""
    transcript = Transcript()
    for kind, line in [("stdout", "a\n"), ("stdout", "b\n"), ("tool", "x"), ("tool", "y"), ("stdout", "c\n")]:
        transcript.add(kind, line)
    assert transcript.take() == [
        Piece(0, "stdout", "a\nb\n", 4),
        Piece(1, "tool", "x", 1),
        Piece(2, "tool", "y", 1),
        Piece(3, "stdout", "c\n", 2),
    ]
    assert not transcript.dirty
    assert transcript.take() == []


def test_a_piece_that_was_taken_is_never_changed() -> None:
    """After ``take`` the same stream goes on in a new piece."""
    transcript = Transcript()
    transcript.add("stdout", "one")
    assert transcript.take() == [Piece(0, "stdout", "one", 3)]
    transcript.add("stdout", "two")
    assert transcript.take() == [Piece(1, "stdout", "two", 3)]


def test_long_text_is_cut_between_characters() -> None:
    """No piece is longer than 64 KB, none cuts a character, and the bytes add up to what the agent wrote."""
    transcript = Transcript()
    long = "€" * 50_000
    transcript.add("stdout", long, 150_007)
    pieces = transcript.take()
    assert "".join(piece.text for piece in pieces) == long
    assert all(len(piece.text.encode()) <= PIECE_BYTES for piece in pieces)
    assert sum(piece.size for piece in pieces) == 150_007


def test_what_lies_between_head_and_tail_is_counted() -> None:
    """Of 3 MB the first 1 MB and the last 256 KB are kept; the rest is in ``dropped_bytes``, to the byte."""
    transcript = Transcript()
    lines = [f"{number:09d}\n" for number in range(300_000)]
    for line in lines:
        transcript.add("stdout", line)
    pieces = transcript.take()
    head = "".join(piece.text for piece in pieces if piece.seq != TAIL_SEQ)
    whole = "".join(lines)
    assert len(head) == HEAD_BYTES - HEAD_BYTES % 10
    assert whole.startswith(head)
    size = transcript.size()
    assert size.bytes == 3_000_000
    kept_tail = size.bytes - len(head) - size.dropped_bytes
    assert TAIL_BYTES - PIECE_BYTES < kept_tail <= TAIL_BYTES
    tail = pieces[-1]
    assert tail.seq == TAIL_SEQ
    assert tail.size == size.dropped_bytes
    assert whole[-kept_tail:][-100:].replace("\n", "\\n") in tail.text


def test_many_small_pieces_are_bounded_too() -> None:
    """An agent that says single words in pieces of their own fills neither memory nor the database with rows."""
    transcript = Transcript()
    for _ in range(60_000):
        transcript.add("message", "w")
    assert len(transcript.take()) < 21_000
    size = transcript.size()
    assert (size.bytes, size.dropped_bytes) == (60_000, 36_000)


def test_forbidden_characters_are_replaced_and_said() -> None:
    """NUL cannot be stored: it is replaced, and ``replaced`` says so."""
    transcript = Transcript()
    transcript.add("stdout", "fine")
    assert not transcript.size().replaced
    transcript.add("stdout", "a\x00b")
    assert transcript.take()[0].text == "finea\ufffdb"
    assert transcript.size().replaced


def test_what_could_not_be_written_comes_again() -> None:
    """Pieces given back come before newer ones, in their old places."""
    transcript = Transcript()
    transcript.add("stdout", "one")
    taken = transcript.take()
    transcript.add("stdout", "two")
    transcript.give_back(taken)
    assert [(piece.seq, piece.text) for piece in transcript.take()] == [(0, "one"), (1, "two")]


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr", "tool"]), st.text(max_size=30)), max_size=40), st.data())
def test_any_mixture_keeps_every_kind_in_order(writes: list[tuple[str, str]], data: st.DataObject) -> None:
    """Whatever is written and whenever it is taken, the text of each kind comes out as it went in."""
    transcript = Transcript()
    out: list[Piece] = []
    for kind, words in writes:
        transcript.add(kind, words)
        if data.draw(st.booleans()):
            out += transcript.take()
    out += transcript.take()
    assert [piece.seq for piece in out] == sorted({piece.seq for piece in out})
    for kind in ("stdout", "stderr", "tool"):
        wanted = "".join(words for each, words in writes if each == kind).replace("\x00", "\ufffd")
        assert "".join(piece.text for piece in out if piece.kind == kind) == wanted


# -- in the database ---------------------------------------------------------------------------------------------------


@pytest.fixture
def running(sessions: sessionmaker[Session]) -> tuple[int, UUID]:
    """A running task of attempt 1, and who holds it."""
    worker = uuid4()
    with sessions.begin() as session:
        task_id = session.scalar(
            text(
                "INSERT INTO tasks (agent, status, attempt, claimed_by, started_at)"
                " VALUES ('a', 'running', 1, :worker, clock_timestamp()) RETURNING id"
            ),
            {"worker": worker},
        )
    assert task_id is not None
    return task_id, worker


def test_events_are_fenced(engine: Engine, running: tuple[int, UUID]) -> None:
    """Pieces of another attempt or another worker are not written."""
    task_id, worker = running
    events = EventRepository(engine)
    events.add(
        [
            NewEvent(task_id, 1, worker, 0, "stdout", "mine", 4),
            NewEvent(task_id, 1, uuid4(), 1, "stdout", "another worker's", 16),
            NewEvent(task_id, 2, worker, 2, "stdout", "another attempt's", 17),
        ]
    )
    assert [event.text for event in events.of_attempt(task_id, 1)] == ["mine"]
    assert events.of_attempt(task_id, 2) == []


def test_writing_events_again_changes_nothing(engine: Engine, running: tuple[int, UUID]) -> None:
    """After a commit whose answer was lost the same pieces come again; only the tail is replaced."""
    task_id, worker = running
    transcript = Transcript()
    transcript.add("stdout", "h" * HEAD_BYTES)
    transcript.add("stdout", "first tail")
    events = EventRepository(engine)
    new = [NewEvent(task_id, 1, worker, *piece) for piece in transcript.take()]
    events.add(new)
    events.add(new)
    transcript.add("tool", "second")
    events.add([NewEvent(task_id, 1, worker, *piece) for piece in transcript.take()])
    read = events.of_attempt(task_id, 1)
    assert "".join(event.text for event in read) == "h" * HEAD_BYTES + "first tailsecond"
    assert [event.kind for event in read[-2:]] == ["stdout", "tool"]
    assert [event.text for event in events.last(task_id, 1, 2)] == ["first tail", "second"]
    assert [event.text for event in events.of_attempt(task_id, 1, after=read[-2].seq)] == ["second"]


def test_a_reader_is_told_what_was_left_out(engine: Engine, running: tuple[int, UUID]) -> None:
    """Between head and tail stands one event that names the bytes left out."""
    task_id, worker = running
    transcript = Transcript()
    for letter in "abcdefgh":
        transcript.add("stdout", letter * (HEAD_BYTES // 4))
    events = EventRepository(engine)
    events.add([NewEvent(task_id, 1, worker, *piece) for piece in transcript.take()])
    read = events.of_attempt(task_id, 1)
    (gap,) = [event for event in read if event.kind == DROPPED]
    kept = sum(len(event.text) for event in read)
    assert gap.bytes == transcript.size().dropped_bytes == transcript.size().bytes - kept
    assert read[-1].text.endswith("h")


def test_live_columns_are_fenced_and_keep_what_is_not_said(
    engine: Engine, sessions: sessionmaker[Session], running: tuple[int, UUID]
) -> None:
    """Progress of the owner is shown, None leaves a column alone, and a stranger changes nothing."""
    task_id, worker = running
    events = EventRepository(engine)
    done = events.set_live([LiveRow(task_id, 1, worker, 50.0, "half", "a line", '{"input_tokens": 5}', "s1")])
    assert done == {(task_id, 1)}
    assert events.set_live([LiveRow(task_id, 1, uuid4(), 99.0, "no", "no", None, "no")]) == set()
    assert events.set_live([LiveRow(task_id, 1, worker, None, "more", None, None, None)]) == {(task_id, 1)}
    with sessions() as session:
        row = session.execute(
            text("SELECT progress_percent, progress_message, last_output, live_usage, session FROM tasks")
        ).one()
    assert tuple(row) == (50.0, "more", "a line", {"input_tokens": 5}, "s1")


def test_a_locked_task_holds_no_other_back(
    engine: Engine, sessions: sessionmaker[Session], running: tuple[int, UUID]
) -> None:
    """A row that somebody has locked is left out of the flush, and out of its answer."""
    task_id, worker = running
    with sessions.begin() as session:
        session.execute(text("SELECT 1 FROM tasks WHERE id = :id FOR UPDATE"), {"id": task_id})
        row = LiveRow(task_id, 1, worker, 1.0, None, None, None, None)
        assert EventRepository(engine).set_live([row]) == set()
