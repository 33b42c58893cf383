"""Pictures, text charts and traces of simulated schedules."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import lane
from sparsebp.core.errors import MissingDependencyError, OptionError, OutputError
from sparsebp.schedule import (
    Costs,
    Link,
    Schedule,
    StageBytes,
    StepGraph,
    chrome_trace,
    gantt,
    simulate,
    text_chart,
    write_trace,
)  # fmt: skip
from sparsebp.schedule.builders import build
from sparsebp.schedule.plot import numbers, row
from sparsebp.schedule.schedule import actions_of

GPIPE = simulate(
    Schedule.of(StepGraph(2, 3), [lane("0F0 0F1 0F2 0B0 0B1 0B2"), lane("1F0 1F1 1F2 1B0 1B1 1B2")], "GPipe"),
    Costs(link=Link(latency=0.5)),
)  # fmt: skip
STREAMS = simulate(
    Schedule.of(
        StepGraph(3, unweighted=frozenset({1}), updates="step", synchronised=True),
        [{"main": lane("0F0 1F0 2F0 2I0 1I0 0U 2U"), "sub": lane("2W0 0W0"), "link": lane("2S 0S")}], "streams",
    ),
    Costs({"F": 1, "I": 1, "W": 2, "S": 0.25, "U": 0}),
)  # fmt: skip
OVERLAP = simulate(
    Schedule.of(
        StepGraph(4, 2),
        [lane("0F0 1F0 1B0 (0F1;0B0)OVERLAP_F_B 1F1 1B1 0B1"),
         lane("2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1")],
    ),
)  # fmt: skip
EMPTY = simulate(Schedule.of(StepGraph(1), [lane("0F0 0B0")]), Costs(dict.fromkeys("FIW", 0.0)))
NOTHING = {"durations": dict.fromkeys("FIW", 0.0), "link": Link(latency=2.0)}
ONLY_WAITING = simulate(GPIPE.schedule, Costs(**NOTHING))
REPEATED = simulate(STREAMS.schedule, Costs(slowdown=2), steps=3)
ALL = [GPIPE, STREAMS, OVERLAP, EMPTY, ONLY_WAITING, REPEATED]


def test_text_chart():
    lines = text_chart(GPIPE, 60).splitlines()
    assert lines[0].startswith("GPipe: makespan 1")
    assert lines[1] == "worker 0  F0─F1─F2─············B0────B1────B2────"
    assert lines[-1] == "number: micro-batch; · bubble"
    assert "F1/0|B0/0" in text_chart(OVERLAP, 200) and "F1/0|B0/0" in text_chart(OVERLAP, 60)


@pytest.mark.parametrize("simulation", ALL)
@given(width=st.integers(40, 200))
def test_text_fits_the_width_and_shows_every_kind(simulation, width):
    text = text_chart(simulation, width)
    assert max(map(len, text.splitlines())) <= width
    lanes = simulation.schedule.lanes
    rows = [line for line in text.splitlines() if line.startswith("worker")]
    margin = 2 + max(len(row(simulation.schedule, lane)) for lane in lanes)
    assert len(rows) % len(lanes) == 0
    for number in range(len(lanes)):  # every action, with all its numbers, in its place
        events = [event for event in simulation.events if event.lane == number and event.end > event.start]
        labels = ["|".join(f"{action.kind}{'/'.join(numbers(simulation.schedule, action))}"
                           for action in actions_of(event.cell)) for event in events]  # fmt: skip
        drawn = "".join(line[margin:] for line in rows[number :: len(lanes)])
        assert re.fullmatch("[·─]*".join(["", *map(re.escape, labels), ""]), drawn), (labels, drawn)


@pytest.mark.parametrize("unit, other", [(5e-324, 1), (1e99, 1), (1e99, 1e16), (1e120, 0), (1e280, 1e280)])
def test_text_of_very_long_and_very_different_times(unit, other):
    lines = text_chart(simulate(GPIPE.schedule, Costs({"F": unit, "I": other, "W": 1})), 60).splitlines()
    assert max(map(len, lines)) <= 60 and lines[1].startswith("worker 0")


@pytest.mark.parametrize("unit", [1e-320, 1e300])
def test_a_step_without_an_axis_in_floating_point_is_refused(unit):
    with pytest.raises(OptionError, match="too short or too long to draw"):
        text_chart(simulate(GPIPE.schedule, Costs(dict.fromkeys("FIW", unit))), 60)


def test_parts_of_a_chart():
    schedule = build("gpipe", workers=4, stages=4, microbatches=16)
    parts = text_chart(simulate(schedule), 80).splitlines()
    starts = [number for number, line in enumerate(parts) if line.startswith("worker 0")]
    assert len(starts) > 1 and all(parts[number - 1] == "" for number in starts[1:])
    cells = "".join(parts[number][10:] for number in starts)
    assert [int(n) for n in re.findall(r"F(\d+)", cells)] == list(range(16)) and "B15───" in cells
    times = [int(n) for number in starts for n in parts[number + 4].split()]
    assert times == list(range(0, times[-1] + 1, times[1])) and times[-1] + times[1] > 57
    assert sum(bool(re.match(r"memory .* \d+$", line)) for line in parts) == 4  # the peaks, once
    many = text_chart(simulate(build("gpipe", workers=4, stages=4, microbatches=400)), 80).splitlines()
    assert max(map(len, many)) <= 80 and sum(line.startswith("worker 0") for line in many) <= 12


def test_text_without_memory_in_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    text = text_chart(GPIPE, memory=False)
    assert "memory" not in text and max(map(len, text.splitlines())) <= 50


@pytest.mark.parametrize("simulation", ALL)
@pytest.mark.parametrize("memory", [True, False])
def test_gantt(simulation, memory):
    pytest.importorskip("matplotlib")
    ax = gantt(simulation, memory=memory)
    assert ax.get_yticklabels()[0].get_text().startswith("worker 0")
    assert len(ax.get_yticks()) == len(simulation.schedule.lanes)
    drawn = sum(len(c.get_paths()) for c in ax.collections if c.get_label() != "transfer")
    assert drawn == sum(1 + hasattr(event.cell, "backward") for event in simulation.events)
    assert len(ax.figure.axes) == 1 + memory
    assert {text.get_text() for text in ax.texts} <= {"0", "1", "2", "0\n0"} | {
        f"{m}{between}{s}"
        for m in range(2)
        for s in range(4)
        for between in "\n/"  # "/": half of an overlap
    }
    assert bool(ax.texts) == (simulation not in (EMPTY, ONLY_WAITING))
    assert ax.get_xlim() == (0, simulation.makespan or 1)
    named = {text.get_text() for text in ax.get_legend().get_texts()}
    assert ("transfer" in named) == any(transfer.end > transfer.start for transfer in simulation.transfers)
    ax.figure.canvas.draw()


def test_gantt_into_given_axes():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.subplots(2, 1)[1]
    assert gantt(GPIPE, ax) is ax
    transfers = [c for c in ax.collections if c.get_label() == "transfer"]
    assert len(transfers[0].get_segments()) == len(GPIPE.transfers) == 6


def test_gantt_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match="plot"):
        gantt(GPIPE)


@pytest.mark.parametrize("simulation", ALL)
def test_trace_is_what_the_viewers_take(tmp_path, simulation):
    write_trace(simulation, tmp_path / "t.json", unit=10.0)
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    needed = {
        "M": {"name", "pid", "args"}, "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"}, "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"}, "b": {"name", "cat", "id", "pid", "ts", "args"},
        "e": {"name", "cat", "id", "pid", "ts"},
    }  # fmt: skip
    for event in events:
        assert needed[event["ph"]] <= event.keys()
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(simulation.events)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(10 * simulation.makespan)
    for curve in simulation.memory:
        counters = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == curve.worker]
        assert max(sum(args.values()) for args in counters) == curve.peak
    for phase in "sfbe":
        assert [e["id"] for e in events if e["ph"] == phase] == list(range(len(simulation.transfers)))
    for arrow in (e for e in events if e["ph"] in "sf"):  # both ends are inside of a box
        assert any(
            box["tid"] == arrow["tid"] and box["ts"] <= arrow["ts"] <= box["ts"] + box["dur"] for box in complete
        )
    for begin, end in zip(*([e for e in events if e["ph"] == phase] for phase in "sf"), strict=True):
        assert begin["ts"] < end["ts"] and begin["pid"] != end["pid"]
    for phase, side in (("b", "start"), ("e", "end")):
        spans = [(e["ts"], e["pid"], e["name"]) for e in events if e["ph"] == phase]
        assert spans == [(10 * getattr(t, side), t.sender, f"to worker {t.receiver}") for t in simulation.transfers]
    for event, box in zip(simulation.events, complete, strict=True):
        assert (box["name"], box["tid"], box["ts"]) == (str(event.cell), event.lane, 10 * event.start)
        assert box["dur"] == pytest.approx(10 * (event.end - event.start))
    for curve in simulation.memory:
        times = [e["ts"] for e in events if e["ph"] == "C" and e["pid"] == curve.worker]
        assert times == [10 * time for time in curve.times]


def test_bad_traces(tmp_path):
    with pytest.raises(OptionError):
        chrome_trace(GPIPE, unit=0)
    with pytest.raises(OutputError):
        write_trace(GPIPE, tmp_path / "no" / "t.json")


def test_measured_bytes_are_drawn():
    costs = Costs(stages=(StageBytes(10, 20, 1e6), StageBytes(1, 2, 3e9)))
    assert "e+09" in text_chart(simulate(GPIPE.schedule, costs), 80)
