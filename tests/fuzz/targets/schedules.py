"""Schedules: builders with good and bad options, the CSV and back, damaged CSV, costs, simulation and validation."""

from __future__ import annotations

import inspect
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.case import accepted, expect, refused
from fuzz.draw import JUNK, chance, one_of, size
from fuzz.mutate import mutated_bytes, mutated_json
from schedules import OPTIONS, random_schedule
from sparsebp.core.errors import MemoryLimitError
from sparsebp.schedule import (
    KINDS,
    Action,
    Costs,
    Link,
    StageBytes,
    StepGraph,
    parse,
    read_costs,
    read_csv,
    simulate,
    to_csv,
    validate,
    write_costs,
)
from sparsebp.schedule.builders import BUILDERS
from sparsebp.schedule.files import from_csv

PIECES = [
    "0F0",
    "1F0",
    "0I0",
    "0W0",
    "0B0",
    "0U",
    "0U0",
    "1S",
    "(0F1;1B0)OVERLAP_F_B",
    "",
    "0:main",
    "1:sub",
    "x",
    "-1F0",
    "99999999F0",
    "0F99999999",
    "schedule=a",
    "first=I",
    "weights=latest",
    "recomputed=0 1",
    "unweighted=7",
    "0SEND_F1",
    '"',
    '"a,b"',
    "\0",
    "é",
    "0F0 0F1",
    "00F0",
    "٣F0",
    "first=",
    "recomputed=٣",
    "recomputed=-1",
    ",,",
    "0F",
]


def case(rng: np.random.Generator) -> None:
    one_of(rng, _random, _builder, _builder, _csv, _costs, _junk)(rng)


def _schedule(rng: np.random.Generator) -> Any:
    stages = size(rng, 1, 5)
    unweighted = frozenset(
        s for s in range(1, stages) if chance(rng, 0.2)
    )  # one has weights: a step without has no updates
    graph = StepGraph(stages, size(rng, 1, 3), unweighted, **one_of(rng, *OPTIONS))
    streams = ("main", "sub", "third")[: int(rng.integers(1, 4))]
    recomputed = [s for s in range(stages) if chance(rng, 0.2)]
    return random_schedule(
        graph,
        random.Random(int(rng.integers(2**32))),
        int(rng.integers(1, stages + 1)),
        streams,
        chance(rng, 0.5),
        one_of(rng, 0.0, 0.5, 1.0),
        recomputed,
    )


def _random(rng: np.random.Generator) -> None:
    """A valid schedule: there and back, and its simulation keeps what it promises."""
    schedule = _schedule(rng)
    with accepted("a valid schedule"):
        validate(schedule)
        back = _again(schedule)
        run = simulate(schedule, _some_costs(rng, schedule.graph.stages), steps=int(rng.integers(1, 4)))
    expect(back == schedule, f"{to_csv(schedule)}\nis read as\n{back}")
    expect(len(run.events) == run.steps * sum(len(lane.cells) for lane in schedule.lanes), "events")
    expect(run.makespan == max(event.end for event in run.events) and run.peak >= 0, "makespan")
    for lane in range(len(schedule.lanes)):
        own = [event for event in run.events if event.lane == lane]
        expect(all(a.end <= b.start + 1e-9 for a, b in pairwise(own)), "a lane runs two cells at once")


def _again(schedule: Any) -> Any:
    """Return what the schedule's CSV is read as."""
    return from_csv(to_csv(schedule))


def _some_costs(rng: np.random.Generator, stages: int) -> Costs:
    number = [float(n) / 4 for n in rng.integers(0, 12, 9)]
    return Costs(
        dict(zip("FIWSU", number, strict=False)),
        tuple(StageBytes(1, 2, 3) for _ in range(stages)),
        Link(number[5], one_of(rng, float("inf"), 1.0, 4)),
        one_of(rng, 1.0, 1.5, 2),
    )


def _builder(rng: np.random.Generator) -> None:
    name = one_of(rng, *BUILDERS)
    parameters = inspect.signature(BUILDERS[name]).parameters
    options: dict[str, Any] = {
        key: size(rng, 1, 7) for key in ("stages", "microbatches", "workers") if key in parameters
    }
    if chance(rng, 0.7):
        options = {
            key: value for key, value in {"stages": 8, "microbatches": 8, "workers": 4}.items() if key in parameters
        }
    for key in parameters:
        if key in ("k", "group", "chunks", "streams", "warmup") and chance(rng, 0.3):
            options[key] = size(rng, 1, 3)
    if chance(rng, 0.4):
        key = one_of(rng, *parameters)
        options[key] = one_of(rng, *(junk for junk in JUNK if not callable(junk)))  # what a function raises is its own
    schedule = BUILDERS[name](**options)  # our own error, or a schedule that runs
    validate(schedule)
    simulate(schedule)
    for key in ("stages", "microbatches", "workers"):
        if key in options:
            value = options[key]
            number = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
            expect(number, f"{name}({key}={value!r}) was accepted")
    expect(_again(schedule) == schedule, f"{name}({options}): the CSV is another schedule")


def _csv(rng: np.random.Generator) -> None:
    """Damaged text: our own error, or a schedule that runs and goes there and back."""
    text = to_csv(_schedule(rng))
    for _ in range(int(rng.integers(1, 4))):
        rows = [row.split(",") for row in text.splitlines()]
        row = rows[int(rng.integers(len(rows)))] if rows else [""]
        way = int(rng.integers(6))
        if way == 0 and row:
            row[int(rng.integers(len(row)))] = one_of(rng, *PIECES)
        elif way == 1:
            row.insert(int(rng.integers(len(row) + 1)), one_of(rng, *PIECES))
        elif way == 2 and row:
            del row[int(rng.integers(len(row)))]
        elif way == 3 and rows:
            rows.insert(0, [one_of(rng, *PIECES) for _ in range(int(rng.integers(1, 4)))])
        elif way == 4 and rows:
            del rows[int(rng.integers(len(rows)))]
        elif rows:
            rows.append(list(row))
        text = "\n".join(map(",".join, rows))
    content: Any = text if chance(rng, 0.5) else mutated_bytes(rng, text.encode())
    options = {
        "first": one_of(rng, None, None, None, "F", "I", "x", 3),
        "weights": one_of(rng, None, None, None, "latest", []),
    }
    if chance(rng, 0.2):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.csv"
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            schedule = read_csv(path, **options)
    else:
        schedule = from_csv(content, **options)
    simulate(schedule)
    expect(_again(schedule) == schedule, f"{text!r} is another schedule")


def _costs(rng: np.random.Generator) -> None:
    schedule = _schedule(rng)
    costs = _some_costs(rng, schedule.graph.stages)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        with accepted("costs"):
            write_costs(costs, schedule, path)
            back = read_costs(path)
        expect(all(back.duration(a) == costs.duration(a) for a in schedule), "durations")
        expect(back.stages == costs.stages and back.link == costs.link, "bytes or link")
        if chance(rng, 0.5):
            path.write_bytes(mutated_bytes(rng, path.read_bytes()))
        else:
            path.write_text(json.dumps(mutated_json(rng, json.loads(path.read_bytes()))))
        simulate(schedule, read_costs(path))


def _junk(rng: np.random.Generator) -> None:
    """Anything in place of an argument."""
    values = [junk for junk in JUNK if not callable(junk)]  # what a function given as a cost raises is its own
    junk, other = one_of(rng, *values), one_of(rng, *values)
    way = int(rng.integers(9))
    if way == 0:
        Action(junk, one_of(rng, *KINDS, other), one_of(rng, 0, other))
    elif way == 1:
        graph = StepGraph(
            one_of(rng, 2, junk),
            one_of(rng, 2, other),
            **{one_of(rng, "updates", "first", "weights", "unweighted", "synchronised"): junk},
        )
        for name, value in (("stages", graph.stages), ("microbatches", graph.microbatches)):
            expect(not isinstance(value, (bool, float)), f"{name} {value!r}")
    elif way == 2:
        simulate(
            _schedule(rng),
            Costs(one_of(rng, junk, {"F": junk}, {"F": 1, "I": 1, "W": 1, "U": 0, "S": 0})),
            steps=one_of(rng, 1, other),
        )
    elif way == 3:
        StageBytes(one_of(rng, 1, junk), other)
    elif way == 4:
        Link(one_of(rng, 1, junk), other)
    elif way == 5:
        parse(junk)
    elif way == 6:
        from_csv(junk)
    elif way == 7:
        refused("a path", one_of(rng, read_csv, read_costs), one_of(rng, "", "a", "\0", "a" * 5000, "/", b"a".decode()))
    else:
        schedule = _schedule(rng)
        try:
            simulate(
                schedule,
                Costs(stages=one_of(rng, junk, (junk,) * schedule.graph.stages), slowdown=one_of(rng, 1.0, other)),
            )
        except MemoryLimitError:
            return
