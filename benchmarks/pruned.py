"""Pruned VGG-11, retrained by scan: every step's FLOPs and time beside those of PyTorch's operators (BPPSA Fig. 10).

``python -m benchmarks pruned``. VGG-11 is trained on real digits (32×32, three channels) and pruned in stages, each
followed by a training (Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS 2015,
§3.4: one cut to 97 % costs what no short retraining brings back). After the last cut, to 97 %, it is retrained twice
from the same weights on the same batches: by back-propagation and by the hybrid scan. Then every step of the scan, and
every backward operator of PyTorch on the same weights, is measured by itself. The paper counted them; here they run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from benchmarks.tools import images, pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp import nn, optim
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column
from sparsebp.data import ImageDataset, load_mnist_images
from sparsebp.models import vgg11

SEED, AMOUNT, TEST = 0, 0.97, 1_000
UP_LEVELS = 1
"""Over the folded chain: its elements are conv–ReLU–pool blocks, so that a product joins two of them, four to six
operators, as the two levels of the paper join four."""
METHOD: Literal["class_uniform"] = "class_uniform"  # "97% of the weights in all convolution and linear operators"
STAGES = (
    (0.8, {"batch": 32, "steps": 60, "lr": 1e-3}),
    (0.9, {"batch": 32, "steps": 60, "lr": 1e-3}),
    (0.94, {"batch": 32, "steps": 60, "lr": 2e-3}),
    (0.96, {"batch": 16, "steps": 800, "lr": 2e-3}),
)
"""Amounts pruned on the way to `AMOUNT`, each with the training behind it, by back-propagation. The learning rate grows
as the sums of a layer lose terms; the last training goes on until the loss is near its plateau."""
QUICK = {"batch": 4, "steps": 2, "lr": 5e-4}
WITHIN = 0.005
"""Most that the two accuracies after retraining may differ by."""


def measure(run: Run) -> Iterator[Row]:
    """Train, prune, retrain; then measure every step and operator at every batch size."""
    data = load_mnist_images(size=32, channels=3, test=TEST)
    model = vgg11(3, 10, width=1 / 16 if run.quick else 1.0, rng=SEED)
    first, stages, last = (run.settings[part] for part in ("train", "stages", "retrain"))
    model, run.result["training"] = retrained(model, data, first, stages, last, run.echo)
    for batch in run.settings["batches"]:
        yield from measure_steps(model, data[0].batch(np.arange(batch)), 2 if run.quick else 7)
    for note in notes(run.result):
        run.note(note)


def retrained(
    model: nn.Sequential, data: tuple[ImageDataset, ImageDataset], first: Mapping[str, Any],
    stages: Sequence[tuple[float, Mapping[str, Any]]], last: Mapping[str, Any], echo: Callable[[str], None],
) -> tuple[nn.Sequential, dict[str, Any]]:  # fmt: skip
    """Train, prune in stages, and retrain by both; return the scan's model and what happened."""
    found: dict[str, Any] = {}

    def record(name: str, seconds: list[float]) -> None:
        found[name] = {"accuracy": accuracy(model, data[1]), "step": float(np.median(seconds)) if seconds else None}
        echo(f"{name}: accuracy {found[name]['accuracy']:.1%}, {found[name]['step'] or 0:.3g} s a step")

    train_in_stages(model, data[0], first, stages, record)
    found["sparsity"] = nn.prune(model, AMOUNT, METHOD).sparsity
    record("pruned", [])
    start, seed = copy.deepcopy(model), SEED + len(stages) + 1
    record("retrained by BP", train(model, data[0], last, seed))
    model = start
    model.set_backward("hybrid", up_levels=UP_LEVELS)
    record("retrained by scan", train(model, data[0], last, seed))
    return model, found


def train_in_stages(
    model: nn.Sequential, data: ImageDataset, first: Mapping[str, Any],
    stages: Sequence[tuple[float, Mapping[str, Any]]], record: Callable[[str, list[float]], None],
) -> None:  # fmt: skip
    """Train, then prune and train on by `stages`, in place; `record` is given a name and the seconds of every step."""
    record("trained", train(model, data, first, SEED))
    for number, (amount, options) in enumerate(stages, 1):
        nn.prune(model, amount, METHOD)
        record(f"{amount:.0%} pruned, trained on", train(model, data, options, SEED + number))


def train(model: nn.Sequential, data: ImageDataset, options: Mapping[str, Any], seed: int) -> list[float]:
    """Train with Adam, the learning rate falling to 0 as a cosine; return the seconds of every step."""
    optimizer, seconds = optim.Adam(model.parameters(), lr=options["lr"]), []
    schedule = optim.CosineAnnealingLR(optimizer, options["steps"])
    for _, taken in images.train(model, optimizer, data, options["batch"], seed, options["steps"]):
        seconds.append(taken)
        schedule.step()
    return seconds


def accuracy(model: nn.Sequential, data: ImageDataset) -> float:
    """Return the share of `data` that is classified right."""
    right = 0
    for chosen in np.array_split(np.arange(len(data)), 10):
        x, target = data.batch(chosen)
        right += int((model(x).argmax(axis=1) == target).sum())
    return right / len(data)


def measure_steps(model: nn.Sequential, batch: tuple[np.ndarray, np.ndarray], repeats: int) -> list[Row]:
    """Return a row for every step of the scan, for the Jacobians' values, and for every operator of PyTorch."""
    x, target = batch
    logits, saved = model.forward(x)
    loss = nn.CrossEntropyLoss()
    gy = loss.input_grad(loss.forward(logits, target)[1])
    (plan,) = model.scan_plans(saved)

    def jacobians() -> list[Any]:
        made = [model[i].jacobian_t(saved.layers[i]) for i in reversed(range(1, len(model)))]
        return [j for j in made if j.pattern.kind != "identity"]

    values = [j.data for j in jacobians()]
    seconds = plan.profile(np.ascontiguousarray(gy.T), values, repeats=repeats)
    rows = [
        {
            "side": "scan", "step": str(step.target), "phase": step.phase, "kind": step.kind, "critical": step.critical,
            "flops": step.flops, "dense_flops": step.dense_flops, "seconds": time_,
        }
        for step, time_ in zip(plan.steps, seconds, strict=True)
        if step.flops
    ]  # fmt: skip
    made = timing.measure({"all": jacobians}, rounds=repeats, least_rounds=1, budget=5.0)
    rows.append({"side": "scan", "step": "Jacobians' values", "seconds": min(made["all"].seconds)})
    rows += operators(model, x, repeats)
    slowest = max(row["seconds"] for row in rows if row["side"] == "BP")
    most = max(row["flops"] for row in rows if row["side"] == "BP")
    for row in rows:
        row |= {"batch": len(x), "share": row["seconds"] / slowest, "most_flops": most}
    return rows


def operators(model: nn.Sequential, x: np.ndarray, repeats: int) -> list[Row]:
    """Return a row for the input gradient of every operator behind the first: PyTorch's autograd, the same weights.

    A convolution's FLOPs are those of its kept weights; autograd computes with the zeros.
    """
    import torch

    rows = []
    value = torch.from_numpy(x)
    for number, module in enumerate(images.torch_twin(model)):
        value = value.detach().requires_grad_()
        y = module(value)
        if number and not isinstance(module, torch.nn.Flatten):
            g = torch.randn_like(y)
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                torch.autograd.grad(y, value, g, retain_graph=True)
                times.append(time.perf_counter() - start)
            dense = 2 * y.numel()
            flops = y.numel()
            if hasattr(module, "weight"):
                dense *= module.weight[0].numel()
                flops = round(dense * float((module.weight != 0).float().mean()))
            rows.append({
                "side": "BP", "step": f"{type(module).__name__} {number}", "kind": "op", "flops": flops,
                "dense_flops": dense, "seconds": min(times[1:]),
            })  # fmt: skip
        value = y
    return rows


def notes(result: Result) -> list[str]:
    """Say what the table shows: the accuracies, and how many steps are at or under the slowest operator."""
    training, found = result["training"], []
    scores = {name: training[f"retrained by {name}"]["accuracy"] for name in ("BP", "scan")}
    apart = abs(scores["BP"] - scores["scan"])
    stages = "; ".join(f"{name} {training[name]['accuracy']:.1%}" for name in training if name.endswith("trained on"))
    found.append(
        f"Accuracy on {result['settings']['test']} held-out digits: trained {training['trained']['accuracy']:.1%}; "
        f"pruned in stages by BP: {stages}; then {training['sparsity']:.1%} pruned "
        f"{training['pruned']['accuracy']:.1%}, and from there retrained by BP {scores['BP']:.1%}, "
        f"by the hybrid scan {scores['scan']:.1%}: {'within' if apart <= WITHIN else 'not within'} {WITHIN:.1%}. "
        f"A step of retraining with batch {result['settings']['retrain']['batch']} takes "
        f"{tables.seconds(training['retrained by BP']['step'])} by BP, "
        f"{tables.seconds(training['retrained by scan']['step'])} by scan."
    )
    for batch in result["settings"]["batches"]:
        rows = [row for row in result["rows"] if row["batch"] == batch and "kind" in row]
        scan = [row for row in rows if row["side"] == "scan"]
        total = {side: sum(row["seconds"] for row in rows if row["side"] == side) for side in ("scan", "BP")}
        found.append(
            f"Batch {batch}: {sum(row['share'] <= 1 for row in scan)} of the scan's {len(scan)} steps take at most the "
            f"time of the slowest BP operator, {sum(row['flops'] <= row['most_flops'] for row in scan)} at most its "
            f"FLOPs; all steps together {tables.seconds(total['scan'])}, all operators {tables.seconds(total['BP'])}."
        )
    return found


def picture(result: Result) -> Any:
    """Draw FLOPs and times over the dense complexity, as the paper's Fig. 10; a column a batch."""
    batches = result["settings"]["batches"]
    drawing, axes = pictures.figure(2, len(batches), width=4.6 * len(batches), height=7.4)
    styles = (("mv", "o", "#f58518", "scan, matrix–vector"), ("mm", "s", "#4c78a8", "scan, matrix–matrix"),
              ("op", "o", "#2ca02c", "PyTorch's operators"))  # fmt: skip
    for column, batch in enumerate(batches):
        for place, (key, label) in enumerate((("flops", "FLOP"), ("seconds", "seconds, measured"))):
            ax = axes[place, column]
            for kind, marker, colour, name in styles:
                rows = [row for row in result["rows"] if row["batch"] == batch and row.get("kind") == kind]
                for critical in (False, True):
                    some = [row for row in rows if bool(row.get("critical")) is critical]
                    ax.scatter(
                        [row["dense_flops"] for row in some], [row[key] for row in some], marker=marker, s=36,
                        facecolors=colour if critical else "none", edgecolors=colour,
                        label=name + (", critical" if critical else "") if some else None,
                    )  # fmt: skip
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_xlabel("FLOP if nothing were sparse")
            ax.set_ylabel(label)
            ax.set_title(f"batch {batch}", fontsize=10)
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
    pictures.legend_below(drawing, *axes[0, 0].get_legend_handles_labels(), columns=3)
    return drawing


BENCHMARK = Benchmark(
    name="pruned",
    title="VGG-11 on real digits, {amount:.0%} pruned: the steps of the hybrid scan beside PyTorch's backward "
    "operators",
    leaves_out="the gradients of the weights, which both sides compute alike; planning, once; the values of the "
    "Jacobians, which have a line of their own",
    settings={
        "optimizer": "Adam, cosine to 0",
        "amount": AMOUNT,
        "method": METHOD,
        "up_levels": UP_LEVELS,
        "seed": SEED,
        "test": TEST,
        "within": WITHIN,
    },
    sizes={
        "train": {"batch": 64, "steps": 100, "lr": 5e-4},
        "stages": STAGES,
        "retrain": {"batch": 16, "steps": 200, "lr": 5e-4},
        "batches": (1, 16),
    },
    quick={"train": QUICK, "stages": [(amount, QUICK) for amount, _ in STAGES], "retrain": QUICK, "batches": (1, 2)},
    threads=None,
    measure=measure,
    columns=(
        Column("batch", "batch"),
        Column("side", "side", number=False),
        Column("step", "step", number=False),
        Column("phase", "phase", number=False),
        Column("kind", "kind", number=False),
        Column("critical", "critical", lambda v: "yes" if v else "", number=False),
        Column("FLOP if dense", "dense_flops", tables.count),
        Column("FLOP", "flops", tables.count),
        Column("time", "seconds", tables.seconds),
        Column("of the slowest BP operator's", "share", "{:.2f}".format),
    ),
    tables={
        "Steps of the scan (J: a product of matrices, y: of a matrix and the gradient) and operators of BP": (
            "batch",
            "step",
            "phase",
            "critical",
            "dense_flops",
            "flops",
            "seconds",
            "share",
        )
    },
    short=("batch", "side", "step", "flops", "seconds", "share"),
    picture=picture,
)
