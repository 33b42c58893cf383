"""Programs as files: their text, and the schedule recovered from it."""

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
