"""Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform: DualPipe and SpecTrain
(Chen, Yang and Cheng, 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.bench.tools import pictures
from sparsebp.bench.tools.benchmark import Result
from sparsebp.reproduce.figure import Claim, Context, Figure, Found, claim
from sparsebp.reproduce.simulated import draw_ranges, drawn_timelines, speed_ups
from sparsebp.schedule import Action, Costs, simulate
from sparsebp.schedule.builders import dualpipe2018, pipedream


def _units(workers: int) -> Costs:
    """Return equal units; the last worker runs forward and backward of a batch in one."""
    return Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == workers - 1 else 1)


def versions(context: Context) -> Found:
    """Eq. 5 and 6: version differences, read off the simulated schedule."""
    claims = []
    for workers in range(2, 9):
        found = simulate(dualpipe2018(workers=workers, stages=workers, microbatches=5 * workers), _units(workers))
        batch, devices = 2 * workers + 1, range(workers)
        claims += [
            claim(f"forward, N = {workers}: 2N − k − 2", [2 * workers - k - 2 for k in devices],
                  [found.version_difference(Action(k, "F", batch)) for k in devices]),
            claim(f"backward, N = {workers}: k", list(devices),
                  [found.version_difference(Action(k, "B", batch)) for k in devices]),
        ]  # fmt: skip
    return Found(tuple(claims))


def fifth_batch(context: Context) -> Found:
    """Fig. 8: the round trip of a batch on three devices."""
    found = simulate(dualpipe2018(workers=3, stages=3, microbatches=20), _units(3))
    trip = [Action(0, "F", 9), Action(1, "F", 9), Action(2, "F", 9), Action(1, "B", 9), Action(0, "B", 9)]
    return Found((
        claim("units from the first forward to the last backward", [0, 1, 2, 3, 4],
              [round(found.start(action) - found.start(trip[0])) for action in trip]),
        claim("version differences on the way", [4, 3, 2, 1, 0], [found.version_difference(action) for action in trip]),
    ))  # fmt: skip


def timelines(context: Context) -> Found:
    """Fig. 6: PipeDream and DualPipe on four devices."""
    found = simulate(dualpipe2018(workers=4, stages=4, microbatches=20), _units(4))
    starts = [round(found.start(Action(k, "F", 10))) for k in range(4)]
    back = found.start(Action(0, "B", 10))
    return Found((
        claim("DualPipe: forward of batch m on device k begins in unit m + k", [10, 11, 12, 13], starts),
        claim("its backward on the first device in unit m + 2N − 2", 16, round(back)),
    ))  # fmt: skip


def prediction(result: Result) -> Found:
    """Fig. 9 and Eq. 1, 4: the error of predicted weights beside that of stale ones."""
    rows = [row for row in result["rows"]
            if row["side"] == "SpecTrain" and "predicted_forward" in row]  # fmt: skip
    claims = tuple(
        Claim(f"{row['network']}, {row['level']} rate: RMSE of predicted over stale weights, forward", "below 1",
              f"{row['predicted_forward'] / row['stale_forward']:.2f}", row["predicted_forward"] < row["stale_forward"],
              "" if row["predicted_forward"] < row["stale_forward"] else "The direction of the steps changes too often")
        for row in rows
    )  # fmt: skip
    return Found(claims, {"rows": [
        {"name": f"{row['network']}, {row['level']}", "predicted": row["predicted_forward"],
         "stale": row["stale_forward"]} for row in rows
    ]})  # fmt: skip


def draw_prediction(data: Mapping[str, Any]) -> Any:
    """Draw both errors."""
    rows = data["rows"]
    drawing, ax = pictures.bar_chart(
        [row["name"] for row in rows],
        [("predicted", "#1e40af", [row["predicted"] for row in rows]),
         ("stale", "#c2410c", [row["stale"] for row in rows])],
        "RMSE from the weights that are used later", each=0.5,
    )  # fmt: skip
    ax.legend(fontsize=8)
    return drawing


def accuracy(result: Result) -> Found:
    """Table 1: SpecTrain's accuracy beside training without staleness, and that of stale weights."""
    rows = result["rows"]
    claims = []
    for row in rows:
        if row["side"] in ("vanilla", "stashing", "SpecTrain"):
            within = row["verdict"] not in ("below",)
            paper = "as synchronous" if row["side"] == "SpecTrain" else "below synchronous"
            met = within if row["side"] == "SpecTrain" else None
            claims.append(Claim(
                f"{row['network']}, {row['level']} rate, {row['side']}: accuracy minus synchronous", paper,
                f"{row['difference']['mean']:+.3f} ± {row['difference']['interval']:.3f}", met,
                "Few steps at a rate at which staleness hurts, from drawn weights" if met is False else
                "Shown beside the claim, not a target" if met is None else ""))  # fmt: skip
    return Found(tuple(claims))


def learning_curves(result: Result) -> Found:
    """Fig. 5 and 12: learning curves of the Transformer."""
    rows = [row for row in result["rows"]
            if row["network"] == "Transformer" and row.get("loss") is not None]  # fmt: skip
    kept = {f"{row['side']}, {row['level']}": np.asarray(row["loss"], float).tolist() for row in rows}
    last = {name: float(np.mean(loss[-10:])) for name, loss in kept.items() if np.ndim(loss) == 1 and loss}
    claims = []
    for level in dict.fromkeys(row["level"] for row in rows):
        vanilla, predicted = last.get(f"vanilla, {level}"), last.get(f"SpecTrain, {level}")
        if vanilla is not None and predicted is not None:
            claims.append(Claim(f"Transformer, {level} rate: last losses of SpecTrain and of stale weights",
                                "SpecTrain's is lower", f"{predicted:.3f} and {vanilla:.3f}", predicted < vanilla,
                                "" if predicted < vanilla else "The prediction overshoots at this rate"))  # fmt: skip
    return Found(tuple(claims), {"curves": kept})


def draw_curves(data: Mapping[str, Any]) -> Any:
    """Draw the losses."""
    drawing, axes = pictures.figure()
    for name, loss in data["curves"].items():
        if name.endswith("moderate") and np.ndim(loss) == 1:
            axes[0, 0].plot(loss, linewidth=1, label=name.split(",")[0])
    axes[0, 0].set(xlabel="step", ylabel="training loss")
    if axes[0, 0].lines:  # every run may have diverged
        axes[0, 0].legend(fontsize=8)
    return drawing


def throughput(result: Result) -> Found:
    """Fig. 10, 11 and 13: over data-parallel and over PipeDream, simulated."""
    return speed_ups(result, lambda row: row["source"].startswith("Chen"))


_LINKS = (
    "Bytes between four GPUs and their share of a step, profiled on P40s; our simulated shares are in spectrain-fig10"
)
FIGURES = (
    Figure(
        name="spectrain-fig3",
        paper="SpecTrain",
        source="Fig. 1–4",
        kind="elsewhere",
        gpu=True,
        why=_LINKS,
        states="transfers between GPUs and their overhead",
    ),
    Figure(
        name="spectrain-fig6",
        paper="SpecTrain",
        source="Fig. 6",
        kind="exact",
        run=timelines,
        draw=lambda data: drawn_timelines(
            [build(workers=4, stages=4, microbatches=12) for build in (pipedream, dualpipe2018)], _units(4)
        ),
        states="timelines of PipeDream and DualPipe",
    ),
    Figure(
        name="spectrain-fig7",
        paper="SpecTrain",
        source="Fig. 7",
        kind="elsewhere",
        gpu=True,
        states="forward and backward side by side on a P40 take as long as one after the other",
        why="Two kernels at once on one GPU; our simulation takes the paper's own finding for granted",
    ),
    Figure(
        name="spectrain-fig8",
        paper="SpecTrain",
        source="Fig. 8",
        kind="exact",
        run=fifth_batch,
        states="the round trip of the 5th batch and its weight versions",
    ),
    Figure(
        name="spectrain-eq5",
        paper="SpecTrain",
        source="Eq. 5 and 6",
        kind="exact",
        run=versions,
        states="version differences 2N − k − 2 and k",
    ),
    Figure(
        name="spectrain-fig9",
        rests_on="spectrain",
        paper="SpecTrain",
        source="Fig. 9, Eq. 1 and 4",
        kind="executed",
        seconds=1500,
        shows=prediction,
        draw=draw_prediction,
        needs=("data",),
        states="RMSE of predicted weights is below that of stale ones",
    ),
    Figure(
        name="spectrain-table1",
        rests_on="spectrain",
        paper="SpecTrain",
        source="Table 1",
        kind="executed",
        seconds=1500,
        shows=accuracy,
        needs=("data",),
        states="SpecTrain keeps the accuracy that staleness costs",
    ),
    Figure(
        name="spectrain-fig12",
        rests_on="spectrain",
        paper="SpecTrain",
        source="Fig. 5 and 12",
        kind="executed",
        seconds=1500,
        shows=learning_curves,
        draw=draw_curves,
        needs=("data",),
        states="learning curves of the Transformer",
    ),
    Figure(
        name="spectrain-fig10",
        rests_on="scaling-papers",
        paper="SpecTrain",
        source="Fig. 10, 11 and 13",
        kind="simulated",
        seconds=30,
        shows=throughput,
        draw=draw_ranges,
        gpu=True,
        states="throughput: 2.64× data-parallel, 1.68× PipeDream",
    ),
)
