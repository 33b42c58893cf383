"""Draws the pictures of schedules into docs/images: ``PYTHONPATH=. python docs/make_schedule_images.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import harness
from sparsebp.schedule import Action, Costs, Schedule, Simulation, gantt, simulate
from sparsebp.schedule.builders import (
    conventional,
    dualpipe,
    dualpipe2018,
    fast_forward,
    gpipe,
    modulo,
    one_f_one_b,
    out_of_order,
    pipedream,
    place_updates,
    reverse_first_k,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

FOLDER = Path(__file__).parent / "images"
WIDTH, LEFT, RIGHT = 10.0, 1.3, 0.8
"""Inches of a picture, and of its margins."""


def draw(name: str, simulations: Sequence[Simulation], *, memory: bool = False) -> None:
    """Draw simulations below each other, all with the same scale of time."""
    heights = [0.3 * len(simulation.schedule.lanes) + (1.05 if memory else 0.05) for simulation in simulations]
    gap, bottom = 0.9, 0.5
    total = sum(heights) + gap * (len(heights) - 1) + 0.6 + bottom
    longest = max(simulation.makespan for simulation in simulations)
    drawing = Figure(figsize=(WIDTH, total))
    top = total - 0.6
    for simulation, height in zip(simulations, heights, strict=True):
        width = (WIDTH - LEFT - RIGHT) * simulation.makespan / longest
        box = (LEFT / WIDTH, (top - height) / total, width / WIDTH, height / total)
        ax = gantt(simulation, drawing.add_axes(box), memory=memory)
        if simulation is not simulations[-1]:
            for axes in (ax, *drawing.axes[-1:]):
                axes.set_xlabel("")
        top -= height + gap
    if memory:
        highest = max(curve.peak for simulation in simulations for curve in simulation.memory)
        for axes in drawing.axes[1::2]:
            axes.set_ylim(0, 1.08 * highest)
    harness.save_picture(drawing, FOLDER / f"schedule-{name}.png")


def named(schedule: Schedule, name: str) -> Schedule:
    """Return the schedule under the name that the paper has for this use of it."""
    return replace(schedule, name=name)


def main() -> None:
    """Draw every picture."""
    layer = Costs({"F": 1, "I": 0.5, "W": 0.5, "U": 1})  # a layer's backward is one unit
    baseline = conventional(stages=5, input_gradient=True)
    draw("fusion", [
        simulate(baseline, layer),
        simulate(place_updates(baseline, "forward"), layer),
        simulate(place_updates(baseline, "backward", stream="update"), layer),
    ])  # fmt: skip

    uneven = Costs({"F": 1, "I": 1, "W": 1.2, "U": 0.2}, slowdown=1.3)
    draw("out-of-order", [
        simulate(conventional(stages=8, fusion="backward"), uneven),
        simulate(conventional(stages=8, fusion="backward", streams=2), uneven),
        simulate(out_of_order(stages=8, costs=uneven), uneven),
    ])  # fmt: skip

    network = Costs({"F": 2, "I": 1, "W": 2, "S": 3, Action(4, "S"): 4})  # Fig. 4 of the out-of-order paper
    draw("reverse-first-k", [
        simulate(named(reverse_first_k(stages=5, k=0, priority="first-ready", costs=network), "conventional"), network),
        simulate(reverse_first_k(stages=5, k=3, costs=network), network),
    ])  # fmt: skip

    shape = {"workers": 2, "stages": 8}
    draw("model-parallel", [
        simulate(named(gpipe(**shape, microbatches=1, input_gradient=False), "conventional model parallelism")),
        simulate(fast_forward(**shape)),
        simulate(modulo(**shape)),
    ])  # fmt: skip

    shape = {"workers": 4, "stages": 16, "microbatches": 4}
    draw("micro-batches", [
        simulate(gpipe(**shape, input_gradient=False)), simulate(fast_forward(**shape)), simulate(modulo(**shape))
    ])  # fmt: skip

    shape = {"workers": 4, "stages": 4, "microbatches": 8}
    draw("pipelines", [simulate(build(**shape)) for build in (gpipe, one_f_one_b)], memory=True)
    draw("zero-bubble", [simulate(build(**shape)) for build in (zero_bubble_h1, zero_bubble_h2)], memory=True)

    draw("two-ways", [
        simulate(zero_bubble_v(workers=4, stages=8, microbatches=8)),
        simulate(dualpipe(workers=4, stages=4, microbatches=12), Costs(slowdown=1.5)),
    ], memory=True)  # fmt: skip

    units = Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == 3 else 1)
    draw("asynchronous", [
        simulate(pipedream(**shape), Costs({"F": 1, "B": 1, "U": 0})),
        simulate(dualpipe2018(workers=4, stages=4, microbatches=12), units),
    ], memory=True)  # fmt: skip


if __name__ == "__main__":
    main()
