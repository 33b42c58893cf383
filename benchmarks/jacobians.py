"""Generating transposed Jacobians: our analytic ones against PyTorch's automatic ones.

``python -m benchmarks jacobian``. Two peers: one ``autograd.grad`` an output column, as the paper does it, and
``vmap(jacrev(…))``, PyTorch's own way to a dense Jacobian. All sides include the forward pass that they need.

The rows of the paper's own table (BPPSA Table 1: the first VGG-11 operators on one 32×32 image) begin after the forward
pass, on every side. Ours: ``layer.jacobian_t(saved)``, all that a user pays whose forward ran anyway; patterns are
cached. The paper's peer is its own program: for every output column a one-hot gradient, one ``autograd.grad``
through the recorded forward, and at the end one stack of the columns into the dense matrix. Dense matrices of 65 536
columns take many seconds and, for ReLU, more memory than most machines have; so a random sample of columns is timed and
multiplied. ``torch.func.jacrev`` has to run the forward itself.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np

from benchmarks import harness, workloads
from benchmarks.harness import Benchmark, Overview, Result, Row, Run, columns, import_torch, refuse_difference
from sparsebp import nn, optim
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column
from sparsebp.data import ImageDataset, load_mnist_images
from sparsebp.models import vgg11

TABLE_1 = {"conv": 8.3e3, "ReLU": 1.2e6, "max-pool": 1.5e5}
"""Speed-up over autograd column by column that the paper reports (Table 1, last column)."""

SAMPLE = 256
"""Columns of the operators of Table 1 that either side of PyTorch is timed on."""

NOTES = (
    "Convolution, ReLU and max-pool are the first operators of VGG-11 on one 32×32 image (BPPSA Table 1), timed after "
    "the forward pass. Ours is jacobian_t; autograd calls torch.autograd.grad with a one-hot gradient for each column "
    "and stacks the columns.",
    f"PyTorch's two ways are timed on {SAMPLE} random columns and scaled to all of them, because the dense matrix "
    "takes 0.75 GiB for the convolution, 16 GiB for ReLU and 4 GiB for max-pool. jacrev runs the forward itself.",
)


@dataclass(frozen=True)
class Operator:
    """One operator on all sides, with the same parameters."""

    name: str  # as the table shows it
    ours: Callable[[], Any]  # returns the transposed Jacobian (for a sequence: a list of them)
    columns: Callable[[], Any]  # pyTorch's two ways
    jacrev: Callable[[], Any]
    difference: Callable[[Any], float]  # returns how far ours lies from PyTorch's, at most
    times: float = 1.0  # of PyTorch's timed columns to all columns
    more: Mapping[str, Any] = field(default_factory=dict)  # further entries of the row


def measure_jacobian(run: Run) -> Iterator[Row]:
    for note in NOTES:
        run.note(note)
    for count in run.threads():
        for operator in chain(jacobian_operators(run.settings["batch"], run.quick), table_1(run.quick)):
            yield measure_jacobian_row(operator, run.rounds) | {"threads": count}


def measure_jacobian_row(operator: Operator, rounds: Mapping[str, Any]) -> Row:
    jacobian = operator.ours()
    difference = operator.difference(jacobian)
    refuse_difference(f"The transposed Jacobian of {operator.name}", "PyTorch", difference)
    first = jacobian[0] if isinstance(jacobian, (list, tuple)) else jacobian
    sides = {"ours": operator.ours, "columns": operator.columns, "jacrev": operator.jacrev}
    timings = timing.measure(sides, **rounds)
    for name in ("columns", "jacrev"):
        timings[name] = timing.Timing(tuple(seconds * operator.times for seconds in timings[name].seconds))
    row: Row = {
        "name": operator.name, "shape": f"{first.shape[0]} × {first.shape[1]}",
        "sparsity": float(first.pattern.sparsity), "difference": difference, **operator.more,
        **timing.side_by_side(timings),
    }  # fmt: skip
    if "target" in row:
        row["met"] = "met" if row["columns_ratio"]["median"] >= row["target"] else "missed"
    return row


def jacobian_operators(batch: int, quick: bool) -> Iterator[Operator]:
    """Yield the operators, smallest first."""
    n = 8 if quick else 1024
    rng = np.random.default_rng(0)
    for name in ("ReLU", "Tanh", "Sigmoid"):
        yield _feed_forward(name, (), rng.standard_normal((batch, n), dtype=np.float32))
    yield _feed_forward("Linear", (n, n // 4), rng.standard_normal((batch, n), dtype=np.float32))
    for name, input_size in (("RNN", 1), ("GRU", 38)):
        yield _cell(name, input_size, 20, batch, rng)
        yield _sequence(name, input_size, 20, 3 if quick else 100, batch, rng)


def _feed_forward(name: str, arguments: tuple[int, ...], x: np.ndarray) -> Operator:
    torch = import_torch()
    layer, twin = getattr(nn, name)(*arguments), getattr(torch.nn, name)(*arguments)
    _load(twin, layer)

    def ours() -> Any:
        _, saved = layer.forward(x)
        return layer.jacobian_t(saved)

    title = f"{name}({', '.join(map(str, arguments))})" if arguments else name
    return _in_batches(title, ours, twin, torch.from_numpy(x), lambda j: _dense(j, len(x)), (twin, ()))


def _cell(name: str, input_size: int, hidden: int, batch: int, rng: np.random.Generator) -> Operator:
    torch = import_torch()
    layer, twin = (
        getattr(nn, name + "Cell")(input_size, hidden, rng=0),
        getattr(torch.nn, name + "Cell")(input_size, hidden),
    )
    _load(twin, layer)
    x = rng.standard_normal((batch, input_size), dtype=np.float32)
    h = np.tanh(rng.standard_normal((batch, hidden), dtype=np.float32))
    x_torch = torch.from_numpy(x)

    def ours() -> Any:
        _, saved = layer.forward(x, h)
        return layer.hidden_jacobian_t(saved)

    return _in_batches(
        f"{name}Cell({input_size}, {hidden}), hidden state", ours, lambda state: twin(x_torch, state),
        torch.from_numpy(h), lambda j: _dense(j, batch), (lambda state, one: twin(one, state), (x_torch,)),
    )  # fmt: skip


def _sequence(name: str, input_size: int, hidden: int, length: int, batch: int, rng: np.random.Generator) -> Operator:
    """Every hidden Jacobian of a sequence: the scan's elements. PyTorch takes all steps as one batch."""
    torch = import_torch()
    layer, twin = getattr(nn, name)(input_size, hidden, rng=0), getattr(torch.nn, name + "Cell")(input_size, hidden)
    twin.load_state_dict({key[: -len("_l0")]: torch.from_numpy(np.array(a)) for key, a in layer.state_dict().items()})
    x = rng.standard_normal((length, batch, input_size), dtype=np.float32)
    y = layer(x)
    previous = np.concatenate([np.zeros((1, batch, hidden), np.float32), y[:-1]]).reshape(length * batch, hidden)
    x_torch = torch.from_numpy(x.reshape(length * batch, input_size))

    def ours() -> Any:
        _, saved = layer.forward(x)
        return layer.hidden_jacobians_t(saved)

    return _in_batches(
        f"{name}({input_size}, {hidden}), all {length} steps", ours, lambda state: twin(x_torch, state),
        torch.from_numpy(previous), lambda js: np.concatenate([_dense(j, batch) for j in js]),
        (lambda state, one: twin(one, state), (x_torch,)),
    )  # fmt: skip


def _load(twin: Any, layer: Any) -> None:
    torch = import_torch()
    twin.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in layer.state_dict().items()})


def _dense(jacobian: Any, batch: int) -> np.ndarray:
    return np.stack([np.asarray(jacobian.to_dense(sample=s)) for s in range(batch)])


def _in_batches(
    name: str, ours: Callable[[], Any], function: Callable[[Any], Any], x: Any, to_dense: Callable[[Any], np.ndarray],
    per_sample: tuple[Callable[..., Any], tuple[Any, ...]],
) -> Operator:  # fmt: skip
    """Return an operator on a batch, forward passes included."""
    torch = import_torch()

    def columns() -> Any:
        """One ``autograd.grad`` for each output, the batch together: (n_out, N, n_in)."""
        at = x.detach().requires_grad_(True)
        y = function(at)
        return torch.stack([torch.autograd.grad(y[:, j].sum(), at, retain_graph=True)[0] for j in range(y.shape[1])])

    def jacrev() -> Any:
        """``vmap(jacrev(f))`` over the samples: (N, n_out, n_in)."""
        single, others = per_sample
        with torch.no_grad():
            return torch.func.vmap(torch.func.jacrev(single))(x, *others)

    def difference(jacobian: Any) -> float:
        return float(np.abs(to_dense(jacobian) - np.swapaxes(jacrev().numpy(), 1, 2)).max())

    return Operator(name, ours, columns, jacrev, difference)


def table_1(quick: bool) -> Iterator[Operator]:
    """Yield the operators of the paper's table, after their forward; with `quick`, fewer channels on an 8×8 image."""
    torch = import_torch()
    channels, size = (4, 8) if quick else (64, 32)
    layers = {
        "conv": (
            f"Conv2d(3, {channels}, 3, padding=1)",
            nn.Conv2d(3, channels, 3, padding=1, rng=0),
            torch.nn.Conv2d(3, channels, 3, padding=1),
        ),
        "ReLU": (f"ReLU, {channels}×{size}×{size}", nn.ReLU(), torch.nn.ReLU()),
        "max-pool": (f"MaxPool2d(2), {channels}×{size}×{size}", nn.MaxPool2d(2), torch.nn.MaxPool2d(2)),
    }
    value = np.random.default_rng(0).standard_normal((1, 3, size, size), dtype=np.float32)
    for name, (title, layer, twin) in layers.items():
        _load(twin, layer)
        x = torch.from_numpy(value).clone().requires_grad_(True)
        value, saved = layer.forward(value)
        yield _after_forward(title, partial(layer.jacobian_t, saved), twin, x, TABLE_1[name])


def _after_forward(
    name: str, ours: Callable[[], Any], function: Callable[[Any], Any], x: Any, target: float
) -> Operator:
    torch = import_torch()
    y = function(x)
    chosen = np.random.default_rng(0).permutation(y.numel())[:SAMPLE]

    def columns() -> Any:
        """The columns, (1, n_in, columns), as the paper's own program makes them."""
        made = []
        for column in chosen.tolist():
            gradient = torch.zeros(1, y.numel())
            gradient[:, column] = 1
            made.append(torch.autograd.grad(y, x, gradient.view(y.shape), retain_graph=True)[0].view(1, -1))
        return torch.stack(made, dim=2)

    def jacrev() -> Any:
        """These outputs' rows of the Jacobian, (columns, 1, …), by one vectorised vjp."""
        outputs = torch.from_numpy(chosen)
        with torch.no_grad():
            return torch.func.jacrev(lambda at: function(at).reshape(-1)[outputs])(x.detach())

    def difference(jacobian: Any) -> float:
        return float(np.abs(jacobian.to_scipy().tocsc()[:, chosen].toarray() - columns()[0].numpy()).max())

    more = {"timed": len(chosen), "dense_bytes": 4 * x.numel() * y.numel(), "target": target}
    return Operator(name, ours, columns, jacrev, difference, y.numel() / len(chosen), more)


JACOBIAN = Benchmark(
    name="jacobian",
    title="Transposed Jacobians of {batch} samples (one for Conv2d, MaxPool2d and the ReLU between), float32",
    leaves_out="the forward pass of Conv2d, ReLU 64×32×32 and MaxPool2d, on both sides; otherwise nothing",
    settings={"dtype": "float32"},
    sizes={"batch": 16},
    quick={"batch": 2},
    rounds={"rounds": 11, "budget": 8.0, "least_rounds": 3},
    measure=measure_jacobian,
    columns=columns(
        words={"name": "operator", "shape": "inputs × outputs"},
        seconds={"columns": "autograd, column by column", "jacrev": "vmap(jacrev)"},
        times={"columns_ratio": "over autograd", "jacrev_ratio": "over jacrev"},
        formats={"{:.4f}": {"sparsity": "sparsity"}, "≥ {:.2g}×": {"target": "paper's, over autograd"}},
    ),
    short=("name", "shape", "threads", "ours", "columns_ratio", "jacrev_ratio", "target", "met"),
    in_short=lambda row: row["threads"] == 1,
    overview=Overview(task="Jacobian of an operator", peer="PyTorch, `vmap(jacrev)`", ratio="jacrev_ratio",
                      label="{name}", page="jacobians.md"),
    picture=harness.bars("{name}", {"columns_ratio": "over autograd, column by column", "jacrev_ratio":
                         "over vmap(jacrev)"}, "speed-up: PyTorch's time over ours, median",
                         (harness.TORCH_TINT, harness.TORCH), log=True, line=1.0),
)  # fmt: skip


# Pruned VGG-11, retrained by scan: FLOPs and time of every step and of PyTorch's operators (BPPSA Fig. 10).
#
# ``python -m benchmarks pruned``. VGG-11 is trained on real digits (32×32, three channels) and pruned in stages, each
# followed by a training (Han et al., "Learning both weights and connections for efficient neural networks", NeurIPS
# 2015, §3.4: no short retraining recovers from one cut to 97 %). After the last cut, to 97 %, it is retrained
# twice from the same weights on the same batches: by back-propagation and by the hybrid scan. Then every step of the
# scan, and every backward operator of PyTorch on the same weights, is measured by itself. The paper counted them; here
# they run.

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


def measure_pruned(run: Run) -> Iterator[Row]:
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
    """Train, prune in stages, and retrain by both; return the scan's model and a record."""
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
    for _, taken in workloads.train(model, optimizer, data, options["batch"], seed, options["steps"]):
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
    rows += pruned_operators(model, x, repeats)
    slowest = max(row["seconds"] for row in rows if row["side"] == "BP")
    most = max(row["flops"] for row in rows if row["side"] == "BP")
    for row in rows:
        row |= {"batch": len(x), "share": row["seconds"] / slowest, "most_flops": most}
    return rows


def pruned_operators(model: nn.Sequential, x: np.ndarray, repeats: int) -> list[Row]:
    """Return a row for the input gradient of every operator behind the first: PyTorch's autograd, the same weights.

    A convolution's FLOPs count its kept weights only; autograd computes with the zeros.
    """
    import torch

    rows = []
    value = torch.from_numpy(x)
    for number, module in enumerate(workloads.torch_twin(model)):
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
    """Return sentences on the accuracies, and on the steps that are at most as slow as the slowest operator."""
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


def draw_pruned(result: Result) -> Any:
    batches = result["settings"]["batches"]
    drawing, axes = harness.figure(2, len(batches), width=4.6 * len(batches), height=7.4)
    styles = (("mv", "o", harness.BLUES[2], "scan, matrix–vector"), ("mm", "s", harness.OURS, "scan, matrix–matrix"),
              ("op", "D", harness.TORCH, "PyTorch's operators"))  # fmt: skip
    for column, batch in enumerate(batches):
        for place, (key, label) in enumerate((("flops", "FLOP of a step"), ("seconds", "time of a step, s"))):
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
    return drawing


PRUNED = Benchmark(
    name="pruned",
    title="VGG-11 on real digits, {amount:.0%} pruned: steps of the hybrid scan and PyTorch's backward operators",
    leaves_out="weight gradients, which both sides compute the same way, and planning, done once; computing the "
    "Jacobians' values has its own row",
    settings={
        "optimizer": "Adam, cosine to 0", "amount": AMOUNT, "method": METHOD, "up_levels": UP_LEVELS, "seed": SEED,
        "test": TEST, "within": WITHIN,
    },
    sizes={
        "train": {"batch": 64, "steps": 100, "lr": 5e-4}, "stages": STAGES,
        "retrain": {"batch": 16, "steps": 200, "lr": 5e-4}, "batches": (1, 16),
    },
    quick={"train": QUICK, "stages": [(amount, QUICK) for amount, _ in STAGES], "retrain": QUICK, "batches": (1, 2)},
    threads=None,
    measure=measure_pruned,
    columns=columns(
        Column("critical", "critical", lambda v: "yes" if v else "", number=False),
        words={"side": "side", "step": "step", "phase": "phase"},
        numbers={"batch": "batch"},
        seconds={"seconds": "time"},
        counts={"dense_flops": "FLOP if dense", "flops": "FLOP"},
        formats={"{:.2f}": {"share": "time / slowest BP operator"}},
    ),
    short=("batch", "side", "step", "flops", "seconds", "share"),
    in_short=lambda row: row["share"] >= 1.5,
    picture=draw_pruned,
)  # fmt: skip
