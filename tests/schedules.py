"""Schedules for tests: from text, and random ones that are valid by construction."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import strategies as st

from sparsebp.schedule import Action, Cell, Costs, Lane, Link, Overlap, Schedule, StageBytes, StepGraph, parse, parts_of

OPTIONS = [
    {"updates": updates, "weights": weights, "first": first, "synchronised": synchronised}
    for updates, weights, first in [
        ("none", "current", "F"), ("none", "current", "I"),
        ("step", "current", "F"), ("step", "current", "I"), ("step", "current", "U"),
        ("microbatch", "stashed", "F"), ("microbatch", "latest", "F"),
    ]
    for synchronised in (False, True)
]  # fmt: skip


def lane(text: str) -> list[Cell]:
    """Return the cells that a text names, as in ``0F0 1F0 1B0``."""
    return [parse(cell) for cell in text.split()]


def fitting(name: str, workers: int, stages: int, microbatches: int) -> dict[str, int]:
    """Return these sizes, made larger where the builder of that name needs more."""
    if name == "dualpipe":
        workers += workers % 2
        stages, microbatches = max(stages, workers), microbatches + microbatches % 2
    if name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        stages = max(stages, 2 * workers)
    if name in ("dualpipe", "dualpipe-v"):
        microbatches = max(microbatches, 2 * workers)
    return {"workers": workers, "stages": stages, "microbatches": microbatches}


def worker_of(schedule: Schedule, action: Action) -> int:
    """Return the worker that runs an action."""
    return schedule.lanes[schedule.places[action][0]].worker


def all_actions(graph: StepGraph, input_gradient: bool = False) -> list[Action]:
    """Return the actions of a graph."""
    return [*graph.required(), *(graph.optional() if input_gradient else ())]


def random_order(graph: StepGraph, actions: Iterable[Action], rng: random.Random) -> list[Action]:
    """Return a random order of actions that respects their needs (of B: those of I and W)."""
    holder = {part: action for action in actions for part in parts_of(action)}
    needs: dict[Action, set[Action]] = {
        action: {holder[need] for part in parts_of(action) for need in graph.predecessors(part) if need in holder}
        - {action}
        for action in set(holder.values())
    }
    order: list[Action] = []
    done: set[Action] = set()
    while len(order) < len(needs):
        ready = sorted(action for action in needs if action not in done and needs[action] <= done)
        order.append(rng.choice(ready))
        done.add(order[-1])
    return order


def random_schedule(
    graph: StepGraph, rng: random.Random, workers: int = 1, streams: tuple[str, ...] = ("main",),
    input_gradient: bool = False, joined: float = 0.0, recomputed: Iterable[int] = (), replicated: Iterable[int] = (),
) -> Schedule:  # fmt: skip
    """Return a random valid schedule: a random order of a random graph, dealt onto workers and streams.

    `joined` is the share of I and W made one B, and of neighbouring F and B made an overlap. Micro-batches of a
    replicated stage are dealt onto all workers.
    """
    actions = set(all_actions(graph, input_gradient))
    for action in sorted(actions, key=str):
        both = parts_of(Action(action.stage, "B", action.microbatch)) if action.kind == "I" else ()
        if both and actions.issuperset(both) and rng.random() < joined:
            actions -= set(both)
            actions.add(Action(action.stage, "B", action.microbatch))
    order = random_order(graph, actions, rng)
    home = [*range(workers), *(rng.randrange(workers) for _ in range(graph.stages - workers))]
    rng.shuffle(home)
    homes = {(stage, m): rng.randrange(workers) for stage in replicated for m in range(1, graph.microbatches)}
    lanes: dict[tuple[int, str], list[Cell]] = {}
    last: tuple[int, str] | None = None
    for action in order:
        stream = "link" if action.kind == "S" and len(streams) > 1 else rng.choice(streams)
        if graph.updates == "microbatch" and action.kind in "FIBU":  # no update beside those who read the weights
            stream = streams[action.stage % len(streams)]
        key = homes.get(action[::2], home[action.stage]), stream
        cells = lanes.setdefault(key, [])
        before = cells[-1] if cells and last == key else None
        if isinstance(before, Action) and before.kind == "F" and action.kind in "IB" and rng.random() < joined:
            cells[-1] = Overlap(before, action)
        else:
            cells.append(action)
        last = key
    found = tuple(Lane(worker, stream, tuple(cells)) for (worker, stream), cells in sorted(lanes.items()))
    return Schedule(graph, found, "random", frozenset(recomputed), frozenset(replicated))


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    """Draw the graph of a small step."""
    stages = draw(st.integers(1, 5))
    unweighted = frozenset(draw(st.sets(st.integers(0, stages - 1), max_size=2)))
    return StepGraph(stages, draw(st.integers(1, 4)), unweighted, **draw(st.sampled_from(OPTIONS)))


@st.composite
def schedules(draw: st.DrawFn, streams: int = 3, joined: bool = True) -> Schedule:
    """Draw a valid schedule."""
    graph = draw(graphs())
    plain = StepGraph(graph.stages, graph.microbatches, graph.unweighted)
    return random_schedule(
        graph, random.Random(draw(st.integers(0, 2**32))), draw(st.integers(1, graph.stages)),
        ("main", "sub", "third")[: draw(st.integers(1, streams))], draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.5, 1.0])) if joined else 0.0,
        draw(st.sets(st.integers(0, graph.stages - 1), max_size=2)),
        draw(st.sets(st.integers(0, graph.stages - 1))) if graph == plain else (),
    )  # fmt: skip


@st.composite
def costs(draw: st.DrawFn, stages: int, slowdown: float = 2.0) -> Costs:
    """Draw costs; all numbers are small fractions of two, so that sums are exact."""
    number = st.integers(0, 12).map(lambda value: value / 4)
    return Costs(
        {kind: draw(number) for kind in "FIWSU"},
        tuple(StageBytes(*(draw(st.integers(0, 9)) for _ in range(3))) for _ in range(stages)),
        Link(draw(number), draw(st.sampled_from([float("inf"), 4, 1, 0.5]))),
        draw(st.sampled_from([1.0, 1.5, slowdown])),
    )
