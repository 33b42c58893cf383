"""Asynchronous pipelines with stale, stashed and predicted weights: accuracy, losses, errors of the prediction.

``python -m benchmarks spectrain``. Networks in four stages on real digits (Chen et al., 2018, §4.4 and Fig. 9, on
networks of a size for a CPU). All sides see the same batches from the same initial weights; only the weights that F and
I read differ. The four ranks are threads of this process, and every action reads exactly the version that its schedule
says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tools import images, pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from benchmarks.tools.staged import NETWORKS, STAGES
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.errors import NonFiniteError
from sparsebp.core.tables import Column
from sparsebp.runtime.actions import Step, Watch
from sparsebp.runtime.pipeline import Distance, PipelineExecutor
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import dualpipe2018, pipedream

MOMENTUM, POINTS = 0.9, 50
LEVELS = ("moderate", "high")


class Side(NamedTuple):
    """One way to train: a schedule, a predictor, and its colour in the picture."""

    schedule: str | None
    predictor: str | None
    colour: str


SIDES = {
    "synchronous": Side(None, None, "#111827"),
    "vanilla": Side("DualPipe (2018)", "none", "#dc2626"),
    "stashing": Side("PipeDream", None, "#d97706"),
    "SpecTrain": Side("DualPipe (2018)", "momentum", "#1d4ed8"),
    "optimizer rule": Side("DualPipe (2018)", "optimizer_rule", "#059669"),
    "finite difference": Side("DualPipe (2018)", "finite_difference", "#a21caf"),
}
BUILDERS = {"DualPipe (2018)": dualpipe2018, "PipeDream": pipedream}


class Trained(NamedTuple):
    """One run: accuracy on the test set, the losses of all micro-batches, and the distances that were measured."""

    accuracy: float
    losses: list[float]
    distances: list[Distance]


class Losses(Watch):
    """Keeps the loss of every micro-batch; one that is not finite ends the run."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def loss(self, step: Step, m: int, value: float) -> None:
        """Note it."""
        self.found.append(value)
        if not math.isfinite(value):
            raise NonFiniteError("The loss is not finite", expected="a number", got=value, remedy="Lower the rate")


@cache
def schedule_of(name: str, batches: int) -> Schedule:
    """Return a schedule of four stages on four workers; every batch is a micro-batch of one endless step."""
    return BUILDERS[name](workers=STAGES, stages=STAGES, microbatches=batches)


def measure(run: Run) -> Iterator[Row]:
    """Train every network at either rate in every way, with all seeds."""
    for name in run.settings["networks"]:
        sizes, steps, batch = run.settings["sizes"][name], run.settings["steps"][name], run.settings["batch"]
        data = NETWORKS[name].data(run.settings["test"])
        for level, rate in zip(LEVELS, NETWORKS[name].rates, strict=True):
            synchronous: list[Trained] = []
            for side in SIDES:
                begin = time.perf_counter()
                runs = [
                    train(name, sizes, data, side, rate, batch, steps, seed, measured=number == 0)
                    for number, seed in enumerate(run.settings["seeds"])
                ]
                synchronous = synchronous or runs
                row: Row = {"network": name, "level": level, "rate": rate, "side": side, "steps": steps}
                yield row | summary(runs, synchronous) | {"seconds": time.perf_counter() - begin}


def train(
    name: str,
    sizes: Mapping[str, Any],
    data: Any,
    side: str,
    rate: float,
    batch: int,
    steps: int,
    seed: int,
    *,
    measured: bool,
) -> Trained:
    """Train once; a loss that is not finite ends the run, which counts as guessing then.

    Distances take a copy of all weights that are read, so they are measured only if asked for.
    """
    train_set, test_set = data
    given = [train_set.batch(chosen) for chosen in images.batches(len(train_set), batch, seed, steps)]
    watch, distances = Losses(), []  # type: ignore[var-annotated]

    def work(transport: Transport | None) -> nn.Sequential:
        model = NETWORKS[name].build(np.random.default_rng(seed), **sizes)
        optimizer = optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
        with np.errstate(over="ignore", invalid="ignore"):
            if transport is None:
                _train_alone(model, optimizer, given, watch)
            else:
                _train_on_ranks(
                    model, optimizer, SIDES[side], given, transport, watch, distances.append if measured else None
                )
        return model

    try:
        model = work(None) if SIDES[side].schedule is None else run_ranks(STAGES, work)[0]
    except NonFiniteError:
        return Trained(1 / len(set(test_set.labels.tolist())), watch.found, distances)
    x, target = test_set.batch(np.arange(len(test_set)))
    return Trained(float((model(x).argmax(axis=1) == target).mean()), watch.found, distances)


def _train_alone(model: nn.Sequential, optimizer: optim.Optimizer, given: Sequence[Any], watch: Losses) -> None:
    loss = nn.CrossEntropyLoss()
    for m, (x, target) in enumerate(given):
        logits, saved = model.forward(x)
        value, kept = loss.forward(logits, target)
        watch.loss(Step([(x, target)], 1, None), m, float(value))
        optimizer.step(model.weight_grad(loss.input_grad(kept), saved))


def _train_on_ranks(
    model: nn.Sequential, optimizer: optim.Optimizer, side: Side, given: Sequence[Any], transport: Transport,
    watch: Losses, note: Callable[[Distance], None] | None,
) -> None:  # fmt: skip
    predictor = None if side.predictor is None else optim.make_predictor(side.predictor, optimizer)
    executor = PipelineExecutor(
        model, nn.CrossEntropyLoss(), optimizer, schedule_of(side.schedule or "", len(given)), transport, watch=watch,
        predictor=predictor, note=note,
    )  # fmt: skip
    executor.step(given)
    executor.flush()


def summary(runs: Sequence[Trained], synchronous: Sequence[Trained]) -> Row:
    """Return what a row says of its runs, beside the synchronous ones of the same seeds."""
    accuracies = np.array([run.accuracy for run in runs])
    mean, width = interval(accuracies)
    lost, lost_width = interval(accuracies - [run.accuracy for run in synchronous])
    steps = max(len(run.losses) for run in synchronous)
    curves = np.array([curve(run.losses, steps) for run in runs])
    finished = [run for run in runs if math.isfinite(run.losses[-1])]
    row: Row = {
        "accuracies": accuracies.tolist(), "accuracy": {"mean": mean, "interval": width},
        "difference": {"mean": lost, "interval": lost_width}, "diverged": len(runs) - len(finished),
        "verdict": "–" if runs is synchronous else verdict(lost, lost_width),
        "loss": [value if math.isfinite(value) else None for value in curves.mean(axis=0).tolist()],
    }  # fmt: skip
    errors = [distance for run in finished for distance in run.distances if distance.ahead > 0]
    for kind, what in (("F", "forward"), ("I", "backward")):
        chosen = [d for d in errors if d.action.kind == kind and d.action.microbatch >= 2 * STAGES]  # type: ignore[operator]
        if chosen:
            row[f"predicted_{what}"] = float(np.mean([d.predicted for d in chosen]))
            row[f"stale_{what}"] = float(np.mean([d.stale for d in chosen]))
            row[f"error_{what}"] = row[f"predicted_{what}"] / row[f"stale_{what}"] if row[f"stale_{what}"] else None
    return row


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % confidence interval by Student's t."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return float(values.mean()), 0.0
    return float(values.mean()), float(t.ppf(0.975, count - 1) * values.std(ddof=1) / math.sqrt(count))


def verdict(difference: float, width: float) -> str:
    """Say where a mean difference from synchronous training is."""
    if abs(difference) <= width:
        return "within noise"
    return "below" if difference < 0 else "above"


def curve(losses: Sequence[float], steps: int) -> list[float]:
    """Return the means of the losses in some stretches of the steps; NaN from where a run has ended."""
    whole = np.full(steps, np.nan)
    whole[: len(losses)] = losses
    return [float(part.mean()) for part in np.array_split(whole, min(POINTS, steps))]


def picture(result: Result) -> Any:
    """Draw the losses, one row a network and one column a rate, and beside them the accuracies with their intervals."""
    rows = result["rows"]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    drawing, axes = pictures.figure(len(networks), 3, width=8.5, height=2.4 * len(networks) + 0.5)
    for line, network in enumerate(networks):
        bars = axes[line, 2]
        for number, level in enumerate(LEVELS):
            ax = axes[line, number]
            of_level = [row for row in rows if (row["network"], row["level"]) == (network, level)]
            for row in of_level:
                values = [math.nan if value is None else value for value in row["loss"]]
                at = (np.arange(len(values)) + 0.5) * row["steps"] / len(values)
                ax.plot(at, values, color=SIDES[row["side"]].colour, linewidth=1.3, label=row["side"])
            if of_level:
                ax.set_title(f"{network}, rate {of_level[0]['rate']:g}", fontsize=9)
                ax.set_ylim(0, 1.4 * max(value for value in of_level[0]["loss"] if value is not None))
            for place, row in enumerate(of_level):
                bars.bar(
                    number * (len(SIDES) + 1) + place, row["accuracy"]["mean"], color=SIDES[row["side"]].colour,
                    yerr=row["accuracy"]["interval"], capsize=2,
                )  # fmt: skip
        ticks = [f"{level} rate" for level in LEVELS]
        bars.set_xticks([len(SIDES) / 2 - 0.5 + number * (len(SIDES) + 1) for number in range(len(LEVELS))], ticks)
        bars.set_ylim(0, 1)
        bars.set_title(f"{network}, accuracy", fontsize=9)
        axes[line, 0].set_ylabel("training loss")
    for ax in axes[-1, :2]:
        ax.set_xlabel("batch")
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
    handles, names = axes[0, 0].get_legend_handles_labels()
    pictures.legend_below(drawing, handles, names, columns=len(SIDES))
    return drawing


def _with_interval(value: Mapping[str, float]) -> str:
    return f"{100 * value['mean']:.1f} ± {100 * value['interval']:.1f}"


_ROW = ("network", "rate", "side")
_NETWORKS = tuple(NETWORKS)

BENCHMARK = Benchmark(
    name="spectrain",
    title="Stale, stashed and predicted weights in four stages: SGD with momentum {momentum}, batch {batch}, digits",
    leaves_out="time: the ranks are threads of one process; what is compared is what training comes to",
    settings={"momentum": MOMENTUM, "stages": STAGES},
    sizes={
        "networks": _NETWORKS, "test": 1000, "seeds": (0, 1, 2, 3, 4),
        "sizes": {name: dict(network.sizes) for name, network in NETWORKS.items()},
        "batch": 32, "steps": {"SNN": 60, "VGG-11": 70, "GRU": 250, "Transformer": 150},
    },
    quick={
        "networks": ("SNN", "GRU", "Transformer"), "test": 10, "seeds": (0, 1),
        "sizes": {name: dict(network.quick) for name, network in NETWORKS.items()},
        "batch": 8, "steps": dict.fromkeys(NETWORKS, 12),
    },
    threads=None,
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("rate", "rate", "{:g}".format),
        Column("weights", "side", number=False),
        Column("batches", "steps", on_terminal=False),
        Column("accuracy, %", "accuracy", _with_interval),
        Column("from synchronous", "difference", _with_interval),
        Column("that is", "verdict", number=False),
        Column("diverged", "diverged"),
        Column("RMSE F, read", "predicted_forward", "{:.2e}".format, on_terminal=False),
        Column("RMSE F, newest", "stale_forward", "{:.2e}".format, on_terminal=False),
        Column("RMSE F, read / newest", "error_forward", "{:.2f}".format),
        Column("RMSE I, read / newest", "error_backward", "{:.2f}".format),
        Column("seconds", "seconds", "{:.0f}".format, on_terminal=False),
    ),
    tables={
        "Accuracy after training, and its difference from synchronous training with the same seeds (95 % intervals)": (
            *_ROW, "steps", "accuracy", "difference", "verdict", "diverged",
        ),
        "How far from the weights that they were to be were those that an action read, and the newest ones": (
            *_ROW, "predicted_forward", "stale_forward", "error_forward", "error_backward", "seconds",
        ),
    },
    short=("network", "rate", "side", "accuracy", "difference", "verdict", "error_forward"),
    picture=picture,
)  # fmt: skip
