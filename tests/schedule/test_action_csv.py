"""Action CSV is read and written by us and by PyTorch; errors name their cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import lane, schedules
from sparsebp.core.errors import FileFormatError, OutputError, ScheduleError
from sparsebp.schedule import KINDS, Action, Costs, Overlap, Schedule, StepGraph, read_csv, simulate, to_csv, write_csv
from sparsebp.schedule.files import from_csv

GPIPE = Schedule.of(
    StepGraph(2, 2), [lane("0F0 0F1 0B0 0B1"), lane("1F0 1F1 1B0 1B1")], "GPipe"
)  # fmt: skip
TWO_STREAMS = Schedule.of(
    StepGraph(3, unweighted=frozenset({1}), updates="step", synchronised=True, first="I"),
    [{"main": lane("2I0 1I0 0U 0F0 1F0 2U 2F0"), "sub": lane("2W0 0W0"), "link": lane("2S 0S")}],
    "out of order", recomputed=[0, 2],
)  # fmt: skip
STASHED = Schedule.of(
    StepGraph(2, 2, updates="microbatch", weights="stashed"),
    [lane("0F0 0F1 0W0 0U0 0W1 0U1"), lane("1F0 1B0 1U0 1F1 1B1 1U1")],
)  # fmt: skip


def test_blanks_are_bubbles():
    text = "0F0,0F1,,,0B0,0B1\r\n,1F0,1F1,1B0,1B1,\r\n"
    assert to_csv(GPIPE) == "schedule=GPipe\r\n" + text
    assert to_csv(GPIPE, torch=True) == to_csv(replace(GPIPE, name="")) == text


def test_streams_and_options_are_written_and_read():
    text = to_csv(TWO_STREAMS)
    assert text.splitlines()[0] == "schedule=out of order,first=I,recomputed=0 2"
    assert text.splitlines()[2] == "0:sub,,2W0,,0W0,,,,,,,"  # 2I0 computes the activations again first
    assert from_csv(text) == TWO_STREAMS


@pytest.mark.parametrize(
    "schedule",
    [
        GPIPE,
        STASHED,
        replace(STASHED, graph=replace(STASHED.graph, weights="latest")),
        TWO_STREAMS,
        Schedule.of(StepGraph(1, unweighted=frozenset({0})), [lane("0F0 0B0")]),  # B without weights
        Schedule.of(StepGraph(2, 2), [lane("0F0 0F1 0I0 0W1 0W0 0I1 1F0")[:-1], lane("1F0 1F1 1B0 1B1")]),
        Schedule.of(StepGraph(1, updates="step", first="U"), [lane("0U 0F0 0W0")], "a, \"b\""),
        *(  # without any weights, of which U and S would tell
            Schedule.of(StepGraph(2, 2, frozenset({0, 1}), **more), [lane("0F0 0F1"), lane("1F0 1F1 1I0 1I1")])
            for more in (
                {}, {"updates": "step"}, {"synchronised": True}, {"updates": "step", "synchronised": True},
                {"updates": "microbatch", "weights": "stashed"}, {"updates": "microbatch", "weights": "latest"},
            )
        ),
    ],
)  # fmt: skip
def test_round_trip(tmp_path, schedule):
    path = tmp_path / "some.csv"
    write_csv(schedule, path)
    assert read_csv(path) == (schedule if schedule.name else replace(schedule, name="some"))
    assert [p.name for p in tmp_path.iterdir()] == ["some.csv"]


@given(schedules(), st.text(max_size=6).map(str.strip))
def test_any_schedule_survives_with_its_name(schedule, name):
    schedule = replace(schedule, name=name)
    assert from_csv(to_csv(schedule)) == schedule


@given(schedules(joined=False))
def test_columns_are_starts_where_all_take_one_unit(schedule):
    starts = simulate(schedule, Costs(dict.fromkeys(KINDS, 1.0)))
    lines = [line for line in to_csv(schedule).splitlines() if not line.startswith("schedule=")]
    for lane_, line in zip(schedule.lanes, lines, strict=True):
        cells = line.split(",")
        cells = cells[1:] if ":" in cells[0] else cells
        assert [cell for cell in cells if cell] == [str(cell) for cell in lane_.cells]
        for cell in lane_.cells:
            assert starts.start(cell) == cells.index(str(cell))


def refused(text, error=FileFormatError, **options):
    with pytest.raises(error) as caught:
        from_csv(text, source="x.csv", **options)
    assert caught.value.expected
    assert str(caught.value).startswith("x.csv")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1", "no actions", "empty"]),
        (",,\n", ["line 1", "Worker 0 has no actions"]),
        ("0F0,0B0\n\n1F0,1B0", ["line 2", "Worker 1 has no actions"]),
        ("0F0,0B0\n,,,", ["line 2", "Worker 1 has no actions"]),
        ("0F0,0X0", ["line 1, column 2", "0X0"]),
        ("0F0,0B0\n,1F0,1Bx", ["line 2, column 3", "1Bx"]),
        ("0F,0B0", ["line 1, column 1", "needs a micro-batch"]),
        ("0F0;0B0", ["line 1, column 1"]),
        ("(0F1;7F0)OVERLAP_F_B", ["line 1, column 1", "forward and a backward"]),
        ("0" * 20 + "1F0", ["line 1, column 1"]),
        ("schedule=x,last=I\n0F0,0B0", ["line 1, column 2", "last=I"]),
        ("schedule=x,first=X\n0F0,0B0", ["line 1, column 2", "'X'"]),
        ("schedule=x,updates=X\n0F0,0B0", ["line 1, column 2", "'X'"]),
        ("schedule=x,synchronised=yes\n0F0,0B0", ["line 1, column 2", "'yes'", "True or False"]),
        ("schedule=x,recomputed=a\n0F0,0B0", ["line 1, column 2", "'a'"]),
        ("0:main,0F0\n0B0", ["line 2, column 1", "0:main"]),
        ("0F0\n0:main,0B0", ["line 2, column 1"]),
        ("0:main,0F0,0B0\n999999999:main,1F0,1B0", ["line 2", "Worker 1 has no row", "999999999"]),
        ("0F0,0B0,0U,0U0", ["0U and 0U0"]),
        ('0F0,"' + "x" * 200_000 + '"', ["line 1", "not CSV"]),
    ],
)  # fmt: skip
def test_bad_cells_are_found(text, words):
    message = refused(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n2F0,2B0", ["Stage 1 is on no worker", "2F0 at line 2, column 1"]),
        ("0F0,0B0,999999999F0", ["Stage 1 is on no worker", "line 1, column 3"]),
        ("0F0,0B0,0F2,0B2", ["A forward is missing", "0F1"]),
        ("0F0,0F999999999", ["A forward is missing", "line 1, column 2"]),
        ("0F0,0B0,0F1", ["Actions are missing", "0W1", "0F1 at line 1, column 3"]),
        ("0F0,0W0\n1F0,1W0", ["1I0", "1F0 at line 2, column 1"]),
        ("0F0,0B0,0W0", ["twice", "0W0 at line 1, column 2 and line 1, column 3"]),
        ("0F0,0B0\n1F0,1B0,0F1\n1F1,1B1,0B1", ["several workers", "line 2, column 3"]),
        ("0F0,0B0,0S,0S0", ["step has not", "0S0 at line 1, column 4"]),
        ("0B0,0F0", ["deadlocked", "0B0 (worker 0, main, 1st)", "line 1, column 1", "line 1, column 2"]),
        ("0F0,0B0\n,1B0,1F0", ["deadlocked", "line 2, column 2", "line 2, column 3"]),
        ("0F0,1F0,1W0,1U,1I0,0W0,0U", ["overwritten", "1U at line 1, column 4", "1I0 at line 1, column 5"]),
    ],
)  # fmt: skip
def test_bad_orders_are_found(text, words):
    message = refused(text, ScheduleError)
    for word in words:
        assert word in message


def test_files_that_are_none(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\x89PNG\r\n\x1a\n\0\xff")
    for path, words in ((tmp_path / "a.csv", "not a text file"), (tmp_path, "cannot be read"),
                        (tmp_path / "no.csv", "No such file")):  # fmt: skip
        with pytest.raises(FileFormatError, match=words):
            read_csv(path)
    with pytest.raises(OutputError):
        write_csv(GPIPE, tmp_path / "no" / "a.csv")


def test_what_the_caller_says_counts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0B0,0F0\n")
    assert read_csv(path, first="I").graph.first == "I"
    path.write_text("\ufeff0F0,0B0,0U0\n", encoding="utf-8")
    assert read_csv(path).graph.weights == "stashed"
    assert read_csv(path, weights="latest").graph.weights == "latest"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (TWO_STREAMS, "begins with backwards"),
        (STASHED, "every micro-batch"),
        (Schedule.of(StepGraph(1), [{"main": lane("0F0"), "sub": lane("0W0")}]), "several streams"),
        (Schedule.of(StepGraph(1), [lane("0F0 0W0 0I0")]), "W before its I"),
        (Schedule.of(StepGraph(1, unweighted=frozenset({0})), [lane("0F0")]), "without backward"),
        (Schedule.of(StepGraph(1), [lane("0F0 0B0")], recomputed=[0]), "recomputes"),
    ],
)  # fmt: skip
def test_what_pytorch_cannot_run_is_refused(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        to_csv(schedule, torch=True)


def test_what_pytorch_does_not_know_is_left_out_or_renamed():
    graph = StepGraph(3, unweighted=frozenset({1}), updates="step", synchronised=True)
    schedule = Schedule.of(
        graph, [{"main": lane("0F0 1F0 2F0 2I0 1I0 2W0 0W0 2U 0U"), "link": lane("2S 0S")}], "conventional"
    )  # fmt: skip
    assert to_csv(schedule, torch=True) == "0F0,1F0,2F0,2I0,1B0,2W0,0B0\r\n"


def test_overlaps_keep_their_form():
    overlap = Overlap(Action(0, "F", 1), Action(0, "B", 0))
    schedule = Schedule.of(StepGraph(1, 2), [[Action(0, "F", 0), overlap, Action(0, "B", 1)]])
    assert to_csv(schedule, torch=True) == to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\r\n"


CELL = st.one_of(
    st.builds("{}{}{}".format, st.integers(0, 3), st.sampled_from("FIWBSUX"), st.sampled_from(["", "0", "1", "2"])),
    st.sampled_from(
        ["", " ", "(0F1;0B0)OVERLAP_F_B", "(0F0;0B0)OVERLAP_F_B", "0:main", "1:sub", "0SEND_F1", "schedule=x"]
    ),
    st.text(max_size=4),
)


@given(st.lists(st.lists(CELL, max_size=5), max_size=4))
def test_any_other_text_is_refused_or_a_valid_schedule(rows):
    text = "\n".join(",".join(row) for row in rows)
    try:
        schedule = from_csv(text)
    except (FileFormatError, ScheduleError) as error:
        assert error.expected and error.got is not None
    else:
        assert from_csv(to_csv(schedule)) == schedule
