"""Optimizer Fusion: Efficient Training with Better Locality and Parallelism (Jiang et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.bench.tools import pictures
from sparsebp.bench.tools.benchmark import Result
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.reproduce.figure import Claim, Context, Figure, Found, claim, median
from sparsebp.reproduce.simulated import drawn_timelines
from sparsebp.schedule import Costs, Kind, simulate
from sparsebp.schedule.builders import conventional, place_updates

_DURATIONS: dict[Kind, float] = {"F": 1, "I": 0.5, "W": 0.5, "U": 1}
_COSTS = Costs(_DURATIONS)
_SMALL_SHARE = "The update's share of a step is {:.1%} here: so much can be hidden at most"


def _steps(n: int) -> dict[str, Any]:
    base = conventional(stages=n, input_gradient=True)
    return {"baseline": base, "forward-fusion": place_updates(base, "forward"),
            "backward-fusion": place_updates(base, "backward", stream="update")}  # fmt: skip


def depths(context: Context) -> Found:
    """§3: depth of the step's graph, unit costs, any number of workers."""
    claims = []
    for n in (1, 5, 12, 50):
        found = {name: round(simulate(step, _COSTS).makespan) for name, step in _steps(n).items()}
        claims += [claim(f"n = {n}, baseline: 3n", 3 * n, found["baseline"]),
                   claim(f"n = {n}, backward-fusion: 2n + 1", 2 * n + 1, found["backward-fusion"])]  # fmt: skip
    return Found(tuple(claims))


def global_information(context: Context) -> Found:
    """Table 1: clipping by the global norm is allowed to forward-fusion, and refused to backward-fusion."""
    from sparsebp import nn, optim
    from sparsebp.train import Trainer

    def trains(fusion: str) -> bool:
        model = nn.Linear(2, 2, rng=0)
        try:
            Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0, fusion=fusion)  # type: ignore[arg-type]
        except (OptionError, SparseBPError):
            return False
        return True

    return Found((claim("forward-fusion with a global norm", True, trains("forward")),
                  claim("backward-fusion with a global norm", False, trains("backward"))))  # fmt: skip


def _claims(rows: list[Mapping[str, Any]], least: Mapping[str, float], paper: Mapping[str, str]) -> tuple[Claim, ...]:
    return tuple(
        Claim(f"{row['network']}, B = {row['batch']}, {row['optimizer']}: {way}-fusion", paper[way],
              f"{median(row, f'{way}_ratio'):.2f}×", median(row, f"{way}_ratio") >= least[way],
              "" if median(row, f"{way}_ratio") >= least[way] else _SMALL_SHARE.format(row["share"]))
        for row in rows for way in ("forward", "backward")
    )  # fmt: skip


def speed(result: Result) -> Found:
    """Fig. 3, Table 2: MobileNetV2, batch 32."""
    rows = [row for row in result["rows"]
            if row["network"].startswith("MobileNet") and row["batch"] == 32]  # fmt: skip
    return Found(
        _claims(rows, {"forward": 1.12, "backward": 1.16}, {"forward": "1.12–1.17×", "backward": "1.16–1.26×"})
    )


def batches(result: Result) -> Found:
    """Fig. 4 and 5: speed-up over the batch size."""
    rows = [row for row in result["rows"] if row["optimizer"] == "Adam"]
    paper = dict.fromkeys(("forward", "backward"), "above 1, less with larger batches")
    return Found(_claims(rows, dict.fromkeys(paper, 1.0), paper), {"rows": [
        {"network": row["network"], "batch": row["batch"], "forward": median(row, "forward_ratio"),
         "backward": median(row, "backward_ratio")} for row in rows
    ]})  # fmt: skip


def draw_batches(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups over the batch size."""
    drawing, axes = pictures.figure(1, 2)
    for ax, way in zip(axes[0], ("forward", "backward"), strict=True):
        for network in dict.fromkeys(row["network"] for row in data["rows"]):
            rows = [row for row in data["rows"] if row["network"] == network]
            ax.plot([r["batch"] for r in rows], [r[way] for r in rows], marker="o", label=network)
        ax.axhline(1, color="grey", linewidth=0.8)
        ax.set(xscale="log", xlabel="batch size", ylabel="times faster", title=f"{way}-fusion")
    axes[0, 0].legend(fontsize=7)
    return drawing


def models(result: Result) -> Found:
    """Fig. 6: fewer parameters a layer, higher speed-up."""
    rows = [row for row in result["rows"] if row["batch"] == 32 and row["optimizer"] == "Adam"]
    paper = dict.fromkeys(("forward", "backward"), "1 to 1.2 (drawn), on other networks")
    return Found(_claims(rows, dict.fromkeys(paper, 1.0), paper))


def optimizers(result: Result) -> Found:
    """Fig. 7: by optimizer."""
    rows = [row for row in result["rows"] if row["network"] == "LeNet-5" and row["batch"] == 32]
    paper = dict.fromkeys(("forward", "backward"), "above 1, on MobileNetV2")
    return Found(_claims(rows, dict.fromkeys(paper, 1.0), paper))


def gradient_memory(result: Result) -> Found:
    """Beyond the paper: what backward-fusion holds of gradients."""
    rows = {row["network"]: row for row in result["rows"] if row["batch"] <= 32}
    return Found(tuple(
        Claim(f"{name}: peak of the gradients held, baseline over backward-fusion", "not stated",
              f"{row['none_peak'] / row['backward_peak']:.1f}×", None, "The paper speaks of time alone")
        for name, row in rows.items()
    ))  # fmt: skip


FIGURES = (
    Figure(
        name="fusion-depth",
        paper="Fusion",
        source="Fig. 1 and §3",
        kind="exact",
        run=depths,
        draw=lambda data: drawn_timelines(list(_steps(5).values()), _COSTS),
        states="depth of a step: 3n, with backward-fusion 2n + 1",
    ),
    Figure(
        name="fusion-table1",
        paper="Fusion",
        source="Table 1",
        kind="executed",
        run=global_information,
        states="global information: forward-fusion allows it, backward-fusion does not",
    ),
    Figure(
        name="fusion-fig3",
        rests_on="fusion",
        paper="Fusion",
        source="Fig. 3 and Table 2",
        kind="measured",
        seconds=420,
        shows=speed,
        needs=("torch",),
        gpu=True,
        states="MobileNetV2, batch 32: 1.12–1.17× and 1.16–1.26×",
    ),
    Figure(
        name="fusion-fig5",
        rests_on="fusion",
        paper="Fusion",
        source="Fig. 4 and 5",
        kind="measured",
        seconds=420,
        shows=batches,
        draw=draw_batches,
        needs=("torch",),
        gpu=True,
        states="speed-up over the batch size",
    ),
    Figure(
        name="fusion-fig6",
        rests_on="fusion",
        paper="Fusion",
        source="Fig. 6",
        kind="measured",
        seconds=420,
        shows=models,
        needs=("torch",),
        gpu=True,
        states="speed-up by model",
    ),
    Figure(
        name="fusion-fig7",
        rests_on="fusion",
        paper="Fusion",
        source="Fig. 7",
        kind="measured",
        seconds=420,
        shows=optimizers,
        needs=("torch",),
        gpu=True,
        states="speed-up by optimizer",
    ),
    Figure(
        name="fusion-memory",
        rests_on="fusion",
        paper="Fusion",
        source="§3",
        kind="executed",
        seconds=420,
        shows=gradient_memory,
        needs=("torch",),
        states="memory of gradients",
    ),
    Figure(
        name="fusion-fig2",
        paper="Fusion",
        source="Fig. 2",
        kind="elsewhere",
        gpu=True,
        states="memory transactions and locality",
        why="Counters of a GPU's memory; on the CPU sparsebp bench optim measures the bytes moved a second",
    ),
)
