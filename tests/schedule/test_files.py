"""Action CSV is read and written by us and by PyTorch; programs and costs as files; errors name their place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import fitting, lane, schedules
from sparsebp.core.errors import FileFormatError, OptionError, OutputError, ScheduleError
from sparsebp.schedule import (
    KINDS,
    Action,
    Costs,
    Durations,
    Link,
    Overlap,
    Schedule,
    StageBytes,
    StepGraph,
    read_costs,
    read_csv,
    simulate,
    to_csv,
    write_costs,
    write_csv,
)
from sparsebp.schedule.builders import BUILDERS, build, conventional, gpipe
from sparsebp.schedule.costs import costs_of, parse_durations
from sparsebp.schedule.files import from_csv, programs_to_csv, write_programs
from sparsebp.schedule.lowering import Compute, Message, Post, Reduce, Send, lower

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
        (Schedule.of(StepGraph(1, 2), [lane("0F0 0B0"), lane("0F1 0B1")], replicated=[0]), "on several workers"),
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


# ---- programs of ranks -----------------------------------------------------------------------------------------------


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
    schedule = build(name, strict=False, **fitting(name, 3, 6, 6))
    if max(lane.stream != "main" for lane in schedule.lanes) or schedule.graph.first != "F" or schedule.replicated:
        pytest.skip("a file of programs has one row a rank, and no options")
    write_programs(lower(schedule), tmp_path / "programs.csv")
    assert read_csv(tmp_path / "programs.csv").lanes == schedule.lanes


def test_the_text():
    assert programs_to_csv(lower(SCHEDULE)) == TEXT


# ---- costs from text and JSON ----------------------------------------------------------------------------------------


def test_the_most_specific_entry_counts():
    durations = Durations({"F": 2, "1F": 3, "1F0": 4, "W": 5, "2I": 6, "1B": 7})
    actions = {Action(0, "F", 0): 2, Action(1, "F", 1): 3, Action(1, "F", 0): 4, Action(0, "B", 0): 1 + 5,
               Action(2, "B", 0): 6 + 5, Action(1, "B", 3): 7, Action(0, "U"): 0, Action(0, "S"): 0}  # fmt: skip
    for action, duration in actions.items():
        assert durations(action) == duration


def test_texts():
    assert parse_durations(["F=1", " 2W = 0.5", "2W0=1e-3"]) == {"F": 1, "2W": 0.5, "2W0": 1e-3}
    for text in ("F", "F=", "=1x", "F=x"):
        with pytest.raises(OptionError):
            parse_durations([text])
    for key in ("", "X", "F0", "2", "2W0 "):
        with pytest.raises(OptionError):
            Durations({key: 1})
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(OptionError):
            Durations({"F": value})


def test_all_keys():
    costs = costs_of({"durations": {"F": 3}, "stages": [{"output": 1}, {"saved": 5}], "latency": 1, "bandwidth": 2,
                      "slowdown": 1.5})  # fmt: skip
    assert costs.duration(Action(0, "F", 0)) == 3 and costs.slowdown == 1.5
    assert (costs.link.latency, costs.link.bandwidth) == (1, 2)
    assert costs.stages == (StageBytes(1), StageBytes(saved=5))
    assert costs_of({}).stages == StageBytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["durations", "stages", "latency", "bandwidth", "slowdown", "F", "saved", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def test_slowdowns_of_actions(tmp_path):
    costs = costs_of({"slowdown": {"W": 1.5, "2W": 2, "2W0": 3, "I": 1.25}})
    wanted = {"0W0": 1.5, "2W1": 2, "2W0": 3, "1I0": 1.25, "1F0": 1}
    assert {key: costs.slowdown_of(Action(int(key[0]), key[1], int(key[2]))) for key in wanted} == wanted
    schedule = conventional(stages=3, streams=2)
    write_costs(costs, schedule, tmp_path / "costs.json")
    read = read_costs(tmp_path / "costs.json")
    assert all(read.slowdown_of(action) == costs.slowdown_of(action) for action in schedule)
    for wrong in ({"W": -1}, {"X": 2}):
        with pytest.raises(OptionError, match="slowdown"):
            costs_of({"slowdown": wrong})
    with pytest.raises(OptionError, match="slowdown is out of range"):
        costs_of({"slowdown": {"W": 0.5}}).slowdown_of(Action(0, "W", 0))


@given(JSON)
def test_any_other_content_is_refused(content):
    try:
        costs = costs_of(content)
    except (FileFormatError, OptionError) as error:
        assert error.expected
    else:
        assert costs.duration(Action(0, "B", 0)) >= 0


@given(
    durations=st.dictionaries(st.sampled_from("FIWU"), st.floats(0, 1e6), min_size=4), slowdown=st.floats(1, 9),
    latency=st.floats(0, 9), bandwidth=st.sampled_from([math.inf, 2.5]), saved=st.lists(st.floats(0, 1e9), max_size=3),
)  # fmt: skip
def test_what_is_written_is_read(tmp_path_factory, durations, slowdown, latency, bandwidth, saved):
    schedule = conventional(stages=3, fusion="backward")
    stages = tuple(StageBytes(saved=s) for s in saved) if saved else StageBytes(2, 3, 4)
    costs = Costs(durations, stages, Link(latency, bandwidth), slowdown)
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write_costs(costs, schedule, path)
    read = read_costs(path)
    assert (read.stages, read.link, read.slowdown) == (costs.stages, costs.link, costs.slowdown)
    assert all(read.duration(action) == costs.duration(action) for action in schedule)
