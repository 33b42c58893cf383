"""Programs as files: their text, and the schedule that is found in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import schedules
from sparsebp.schedule import read_csv
from sparsebp.schedule.builders import BUILDERS, build, gpipe
from sparsebp.schedule.files import programs_to_csv, write_programs
from sparsebp.schedule.lowering import Compute, Message, Post, Reduce, Send, lower

TEXT = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\r\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\r\n"
SCHEDULE = gpipe(workers=2, stages=2, microbatches=2)


def cell(one: Compute | Post | Send | Reduce) -> str:
    """Return what a file has for an instruction, found in another way: from the stages and the way of a message."""
    if isinstance(one, Compute):
        return str(one.cell)
    if isinstance(one, Reduce):
        return str(one.action).replace("S", "REDUCE_GRAD")
    message: Message = one.message
    forward = message.source.kind == "F"
    here = message.source.stage if isinstance(one, Send) else message.boundary + forward
    return f"{here}{'SEND' if isinstance(one, Send) else 'RECV'}_{'F' if forward else 'B'}{message.source.microbatch}"


@given(schedules(), st.booleans())
def test_files_have_what_programs_begin(schedule, one_stream):
    programs = lower(schedule, one_stream=one_stream)
    begun = [[cell(one) for one in each.instructions if isinstance(one, (Compute, Post, Send, Reduce))]
             for each in programs]  # fmt: skip
    assert [line.split(",") for line in programs_to_csv(programs).replace('"', "").splitlines()] == begun


@pytest.mark.parametrize("name", BUILDERS)
def test_the_schedule_is_found_in_the_file(tmp_path, name):
    schedule = build(name, strict=False, workers=3, stages=6, microbatches=6)
    if max(lane.stream != "main" for lane in schedule.lanes) or schedule.graph.first != "F":
        pytest.skip("a file of programs has one row a rank, and no options")
    write_programs(lower(schedule), tmp_path / "programs.csv")
    assert read_csv(tmp_path / "programs.csv").lanes == schedule.lanes


def test_the_text():
    assert programs_to_csv(lower(SCHEDULE)) == TEXT
    assert programs_from_csv(TEXT.encode(), SCHEDULE) == lower(SCHEDULE)


def test_the_schedule_is_found_in_the_same_file(tmp_path):
    write_programs(lower(SCHEDULE), tmp_path / "programs.csv")
    assert read_csv(tmp_path / "programs.csv").lanes == SCHEDULE.lanes


def test_what_pytorch_adds_is_skipped():
    text = TEXT.replace("0F0,0SEND", "0UNSHARD,0F0,0SEND").replace("0B1\r", "0B1,0REDUCE_GRAD,0RESHARD\r")
    assert programs_from_csv(text, SCHEDULE) == lower(SCHEDULE)


def test_posts_elsewhere_are_kept():
    """A receive may be posted anywhere before its reader; the waits follow."""
    later = programs_from_csv(TEXT.replace("1RECV_F1,1F0", "1F0,1RECV_F1"), SCHEDULE)
    assert [str(one) for one in later[1].instructions[:5]] == [
        "post 0F0 from 0", "await 0F0 from 0", "1F0", "post 0F1 from 0", "await 0F1 from 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0SEND_F1,", "", "line 2, column 2: 1RECV_F1 is never sent"),
        ("1RECV_F1,", "", "The result of 0F1 is not received"),
        ("0B1\r", "\r", "A cell is missing. Expected 0B1"),
        ("1F0,1F1", "1F1,1F0", "1F1 comes before what it needs. Expected 1F0 in front of it"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "line 1, column 1: 0SEND_F0 comes before what it needs. Expected 0F0"),
        ("1RECV_F0,1RECV_F1,1F0", "1RECV_F1,1F0,1RECV_F0", "1F0 comes before what it needs. Expected receive 0F0"),
        ("0SEND_F0", "0SEND_F0,0SEND_F0", "line 1, column 3: 0SEND_F0 is there twice"),
        ("0SEND_F0", "0SEND_F0,0SEND_F2", "0SEND_F2 is no message of the schedule"),
        ("0SEND_F0", "0SEND_F0,0SEND_B0", "0SEND_B0 is no message of the schedule"),
        ("0SEND_F0", "0SEND_F0,0RECV_F0", "0RECV_F0 is no message of the schedule"),
        ("0SEND_F0", "0SEND_F0,1RECV_F0", "1RECV_F0 is on another rank. Expected rank 1. Got rank 0"),
        ("0SEND_F0", "0SEND_F0,0SEND_F", "0SEND_F is no message"),
        ("1F0", "1F0,0F7", "Got 0F7 on rank 1"),
        ("0B1\r", "0I1,0W1\r", "Got 0I1 on rank 0"),
        ("0F0,", "0F0,0S,", "Got 0S on rank 0"),
        ("1SEND_B1\r\n", "1SEND_B1\r\n2F0\r\n", "Expected 2 rows, one a rank. Got 3 rows"),
        ("0SEND_F0", "0SEND", "is not an action"),
    ],
)
def test_what_does_not_fit_is_refused(old, new, words):
    assert old in TEXT
    with pytest.raises(FileFormatError) as caught:
        programs_from_csv(TEXT.replace(old, new), SCHEDULE)
    assert words in str(caught.value) and str(caught.value).startswith("the CSV, line ")


def test_another_schedule_is_refused():
    with pytest.raises(FileFormatError, match=r"A cell is missing\. Expected 2F0"):
        programs_from_csv(TEXT, gpipe(workers=2, stages=3, microbatches=2))
    with pytest.raises(FileFormatError, match="comes before what it needs"):
        programs_from_csv(TEXT, one_f_one_b(workers=2, stages=2, microbatches=2))


def test_a_deadlock_is_refused():
    """Messages of a pair of ranks are received in another order than they are sent in."""
    text = TEXT.replace("1RECV_F0,1RECV_F1,1F0", "1RECV_F1,1RECV_F0,1F0")
    with pytest.raises(ScheduleError, match="the CSV: The programs are deadlocked") as caught:
        programs_from_csv(text, SCHEDULE)
    assert "0F1 at line 1, column 3" in str(caught.value)


CELL = st.sampled_from(["0F0", "0SEND_F0", "1RECV_F0", "1F0", "1B0", "1SEND_B0", "0RECV_B0", "0B0", "", "0REDUCE_GRAD"])


@given(st.lists(st.lists(CELL, max_size=5), max_size=3))
def test_any_rows_are_refused_or_programs_of_the_schedule(rows):
    schedule = gpipe(workers=2, stages=2, microbatches=1)
    try:
        programs = programs_from_csv("\n".join(map(",".join, rows)), schedule)
    except (FileFormatError, ScheduleError) as error:
        assert error.expected and error.got is not None
    else:
        assert programs_from_csv(programs_to_csv(programs), schedule) == programs
