"""Whole training steps with fused optimizers: time, and the peak of gradients in memory.

``python -m benchmarks fusion``. Forward, loss, backward and update of one batch, by our executor with every fusion, and
by PyTorch with `torch.optim` in its three forms and with an update in every parameter's
``register_post_accumulate_grad_hook``, which is PyTorch's backward-fusion. All of ours work on one model and one
optimizer's state, all of PyTorch's on their twins, in another process. Ours also look at every gradient (norm,
finiteness), as training does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import harness, workloads
from benchmarks.harness import Benchmark, Overview, Result, Row, Run, columns, copy_bandwidth, fits
from benchmarks.processes import Apart
from benchmarks.workloads import IMAGES, mlp, torch_twin
from sparsebp import kernels, nn, optim
from sparsebp.core import timing
from sparsebp.core.check import Backward
from sparsebp.core.tables import Column
from sparsebp.data import load_mnist_images
from sparsebp.models import lenet5
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.schedule.builders import Fusion
from sparsebp.train.setup import schedule_of

# Convergence: LeNet-5 on real digits by scan and by back-propagation, from one seed (BPPSA §3.5, Fig. 6).
#
# ``python -m benchmarks convergence``. Batch 256, SGD with momentum as in the paper, and Adam; float32 and float64. The
# loss of both runs is compared after every iteration: a scan computes the same gradients in another order of summation.

ALGORITHM: Backward = "blelloch"
SEED, TEST, TEST_EVERY = 0, 500, 5
CONVERGENCE_TARGETS = {"float32": 1e-4, "float64": 1e-10}
CONVERGENCE_OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD, lr 1e-3, momentum 0.9": lambda params: optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adam, lr 1e-3": lambda params: optim.Adam(params, lr=1e-3),
}


def measure_convergence(run: Run) -> Iterator[Row]:
    for dtype in CONVERGENCE_TARGETS:
        data = load_mnist_images(test=TEST, dtype=dtype)
        for name in CONVERGENCE_OPTIMIZERS:
            yield measure_convergence_row(name, dtype, data, run.settings["batch"], run.settings["iterations"])
    _add_rounding(run.result["rows"])


def measure_convergence_row(name: str, dtype: str, data: Any, batch: int, iterations: int) -> Row:
    bp, scan = (train(name, dtype, data, batch, iterations, way) for way in ("bp", ALGORITHM))
    difference, test_difference = (largest_difference(scan[key], bp[key]) for key in ("loss", "test"))
    target = CONVERGENCE_TARGETS[dtype]
    autograd = train_torch(name, dtype, data, batch, iterations)
    return {
        "optimizer": name, "dtype": dtype, "iterations": iterations, "first_loss": bp["loss"][0],
        "last_bp": bp["loss"][-1], "last_scan": scan["loss"][-1], "difference": difference,
        "test_difference": test_difference,
        "torch_difference": largest_difference(autograd, bp["loss"]), "target": target,
        "met": max(difference, test_difference) <= target,
        "step_bp": float(np.median(bp["seconds"])), "step_scan": float(np.median(scan["seconds"])),
        "losses_bp": bp["loss"], "losses_scan": scan["loss"], "test_bp": bp["test"], "test_scan": scan["test"],
    }  # fmt: skip


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.abs(reference)))


def _add_rounding(rows: Sequence[Row]) -> None:
    """Add to the float32 rows the difference of BP in float32 from BP in float64: no scan can be closer."""
    exact = {row["optimizer"]: row["losses_bp"] for row in rows if row["dtype"] == "float64"}
    for row in rows:
        if row["dtype"] == "float32":
            row["rounding"] = largest_difference(row["losses_bp"], exact[row["optimizer"]])


def train(name: str, dtype: str, data: Any, batch: int, iterations: int, backward: Backward) -> dict[str, list[float]]:
    """Train LeNet-5 and return the loss and the seconds of every iteration, and the test loss of every fifth."""
    train_set, test_set = data
    test_x, test_target = test_set.batch(np.arange(len(test_set)))
    model, loss = lenet5(dtype=dtype, rng=SEED), nn.CrossEntropyLoss()
    model.set_backward(backward)
    optimizer = CONVERGENCE_OPTIMIZERS[name](model.parameters())
    found: dict[str, list[float]] = {"loss": [], "test": [], "seconds": []}
    steps = workloads.train(model, optimizer, train_set, batch, SEED, iterations)
    for step, (value, seconds) in enumerate(steps):
        found["seconds"].append(seconds)
        found["loss"].append(value)
        if step % TEST_EVERY == 0 or step == iterations - 1:
            found["test"].append(float(loss.forward(model(test_x), test_target)[0]))
    return found


def train_torch(name: str, dtype: str, data: Any, batch: int, iterations: int) -> list[float]:
    """Train the same network by PyTorch's autograd on the same batches and return the losses."""
    import torch

    train_set, _ = data
    twin = workloads.torch_twin(lenet5(dtype=dtype, rng=SEED))
    optimizer = (
        torch.optim.Adam(twin.parameters(), lr=1e-3)
        if name.startswith("Adam")
        else torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
    )
    losses = []
    for chosen in workloads.batches(len(train_set), batch, SEED, iterations):
        x, target = map(torch.from_numpy, train_set.batch(chosen))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw_convergence(result: Result) -> Any:
    rows = [row for row in result["rows"] if row["dtype"] == "float32"]
    drawing, axes = harness.figure(len(rows), 2, width=10.5, height=2.9 * len(rows) + 0.9)
    for own, row in zip(axes, rows, strict=True):
        count = row["iterations"]
        tested = [i for i in range(count) if i % TEST_EVERY == 0 or i == count - 1]
        for ax, kind, at, label in zip(
            own, ("losses", "test"), (range(count), tested), ("training", "test"), strict=True
        ):
            ax.plot(at, row[f"{kind}_bp"], color=harness.BLUES[1], linewidth=4, label="back-propagation")
            ax.plot(at, row[f"{kind}_scan"], color=harness.OURS, linewidth=1.2, linestyle="--", label="scan")
            ax.set(xlabel="iteration", ylabel=f"{label} loss, nats")
            ax.set_title(f"{row['optimizer']}, {row['dtype']}", fontsize=9)
    return drawing


CONVERGENCE = Benchmark(
    name="convergence",
    title="LeNet-5 on real digits, batch {batch}: losses by scan ({algorithm}, all levels) and layer by layer",
    leaves_out="nothing; a step is forward, loss, backward and update; its time is the median over the iterations",
    settings={"seed": SEED, "targets": CONVERGENCE_TARGETS, "algorithm": ALGORITHM},
    sizes={"batch": 256, "iterations": 100},
    quick={"batch": 16, "iterations": 3},
    threads=None,
    measure=measure_convergence,
    columns=columns(
        Column("met", "met", lambda v: "yes" if v else "no", number=False),
        words={"optimizer": "optimizer"},
        numbers={"iterations": "iterations"},
        seconds={"step_bp": "step, BP", "step_scan": "step, scan"},
        formats={
            "{:.4f}": {"first_loss": "first loss"},
            "{:.8f}": {"last_bp": "last loss, BP", "last_scan": "last loss, scan"},
            "{:.2e}": {
                "difference": "largest relative difference", "test_difference": "the same of the test loss",
                "torch_difference": "PyTorch's BP against ours", "rounding": "our BP, float32 against float64",
            },
            "≤ {:.0e}": {"target": "target"},
        },
    ),
    short=("optimizer", "dtype", "iterations", "last_bp", "last_scan", "difference", "target", "met"),
    picture=draw_convergence,
)  # fmt: skip


# Optimizer updates, all parameters in one pass, against torch.optim and against one parameter after the other.
#
# ``python -m benchmarks optim``. Only the update is timed: ours in one call, ours
# name by name, and `torch.optim` with ``foreach=False``, ``foreach=True`` and ``fused=True`` (where PyTorch has one),
# on the parameters of networks with few large and many small tensors. All sides update the same arrays and keep buffers
# of their own. An update does next to no arithmetic: its floor is the bytes that it must move, at the rate of a copy.

Shapes = Mapping[str, tuple[int, ...]]

OPTIM_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 1e-3}), "SGD, momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 1e-3}), "AdamW": ("AdamW", {"lr": 1e-3}),
    "AMSGrad": ("Adam", {"lr": 1e-3, "amsgrad": True}), "Adagrad": ("Adagrad", {"lr": 1e-3}),
    "Adadelta": ("Adadelta", {"lr": 1e-3}), "RMSprop": ("RMSprop", {"lr": 1e-3}),
}  # fmt: skip
"""By name in the table: the class, of the same name here and in torch.optim, and its options."""
PEERS = {"unfused": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
"""The forms of torch.optim."""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
"""Those that PyTorch has fused on a CPU."""
OPTIM_TARGETS = {"foreach": 1.5, "fused": 1.0}


def measure_optim(run: Run) -> Iterator[Row]:
    harness.import_torch()  # refused before anything is measured
    for network, shapes in optim_networks(run.quick).items():
        need = 4 * sum(map(math.prod, shapes.values())) * (2 + 4 * 3 + 3)  # all sides' buffers, foreach's intermediates
        for count in run.threads():
            for name in OPTIM_OPTIMIZERS:
                if fits(f"{network}, {name}", need, run.note):
                    yield measure_optim_row(network, shapes, name, count, run.rounds)


def optim_networks(quick: bool = False) -> dict[str, Shapes]:
    """Return the parameters' shapes of each network, by name.

    SNN is the fully connected network of the 2018 DualPipe paper, 32 layers of 2048 units.
    """
    width = 32 if quick else 2048
    snn: Shapes = {
        f"{i}.{name}": shape for i in range(32) for name, shape in (("weight", (width, width)), ("bias", (width,)))
    }
    others = ("LeNet-5",) if quick else ("LeNet-5", "MobileNetV2-style", "VGG-11")
    shapes: dict[str, Shapes] = {
        name: {key: p.shape for key, p in IMAGES[name][0]().parameters().items()} for name in others
    }
    return {f"SNN, 32 × {width}": snn} | shapes


def measure_optim_row(network: str, shapes: Shapes, optimizer: str, threads: int, rounds: Mapping[str, Any]) -> Row:
    ours, calls = sides(shapes, optimizer)
    timings = timing.measure(calls, **rounds)
    moved = bytes_moved(ours)
    row: Row = {
        "network": network, "tensors": len(shapes), "parameters": sum(map(math.prod, shapes.values())),
        "optimizer": optimizer, "threads": threads,
        "moved": moved, "floor_times": timings["ours"].median / (moved / copy_bandwidth(threads)),
    }  # fmt: skip
    row |= timing.side_by_side(timings)
    return row | judge_optim(row)


def sides(shapes: Shapes, optimizer: str) -> tuple[Any, dict[str, Callable[[], object]]]:
    """Return our optimizer, and one update by each side; all work on the same parameters and gradients."""
    import torch

    rng = np.random.default_rng(0)
    params, grads = ({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(2))
    cls, options = OPTIM_OPTIMIZERS[optimizer]
    ours = getattr(optim, cls)(params, **options)

    def name_by_name() -> None:
        update = ours.begin()
        for name, grad in grads.items():
            update.apply({name: grad})

    calls: dict[str, Callable[[], object]] = {"ours": lambda: ours.step(grads), "loop": name_by_name}
    twins = [torch.nn.Parameter(torch.from_numpy(param)) for param in params.values()]
    for twin, grad in zip(twins, grads.values(), strict=True):
        twin.grad = torch.from_numpy(grad)
    for name, form in PEERS.items():
        if name != "fused" or cls in FUSED:
            calls[name] = getattr(torch.optim, cls)(twins, **options, **form).step
    return ours, calls


def bytes_moved(optimizer: Any) -> int:
    """Return the bytes that an update must move: gradients read, parameters and buffers read and written."""
    parameters = sum(param.nbytes for param in optimizer.params.values())
    buffers = sum(array.nbytes for arrays in optimizer.buffers.values() for array in arrays.values())
    return 3 * parameters + 2 * buffers


def judge_optim(row: Mapping[str, Any]) -> dict[str, str]:
    targets = {side: least for side, least in OPTIM_TARGETS.items() if f"{side}_ratio" in row}
    missed = [side for side, least in targets.items() if row[f"{side}_ratio"]["median"] < least]
    return {
        "targets": ", ".join(f"≥ {least:g}× {side}" for side, least in targets.items()),
        "met": harness.outcome(missed),
    }


OPTIM = Benchmark(
    name="optim",
    title="Updating all parameters, gradients given: float32, CPU",
    leaves_out="forward and backward; python -m benchmarks fusion measures whole steps",
    settings={"dtype": "float32", "targets": OPTIM_TARGETS, "optimizers": OPTIM_OPTIMIZERS},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 4.0},
    measure=measure_optim,
    columns=columns(
        words={"optimizer": "optimizer", "targets": "targets"},
        numbers={"tensors": "tensors"},
        seconds={"loop": "one at a time", "unfused": "torch", "foreach": "torch, foreach", "fused": "torch, fused"},
        times={
            "loop_ratio": "over one at a time", "unfused_ratio": "over torch", "foreach_ratio": "over foreach",
            "fused_ratio": "over fused", "floor_times": "× copy floor",
        },
        sizes={"moved": "bytes moved"},
        counts={"parameters": "parameters"},
    ),
    short=("network", "optimizer", "ours", "foreach_ratio", "fused_ratio", "met", "floor_times"),
    in_short=lambda row: row["threads"] == 2 and row["optimizer"] in ("SGD", "Adam", "AdamW"),
    overview=Overview(task="An optimizer update", peer="PyTorch, fused", ratio="fused_ratio",
                      label="{network}, {optimizer}", page="optimizers.md"),
    picture=harness.bars("{network}, {optimizer}", {"foreach_ratio": "over torch, foreach", "fused_ratio":
                         "over torch, fused"}, harness.SPEED_UP,
                         (harness.TORCH_TINT, harness.TORCH), line=1.0),
)  # fmt: skip


FUSIONS: tuple[Fusion, ...] = ("none", "forward", "backward")
FUSION_TARGETS = {"step": 1.15, "share": 0.2, "peak": 1.2}
"""Backward-fusion over no fusion where the update's share of a step is above `share`; peak over the largest layer's."""
ALL = tuple(OPTIM_OPTIMIZERS)
FEW = ("SGD, momentum", "Adam")


def measure_fusion(run: Run) -> Iterator[Row]:
    harness.import_torch()  # refused before anything is measured
    with Apart() as apart:
        for network, make, shape, batches in fusion_networks(run.quick):
            need = 10 * sum(p.nbytes for p in make().parameters().values())
            for count in run.threads():
                for batch, name in [(batch, name) for batch, names in batches.items() for name in names]:
                    if fits(f"{network}, {name}", need, run.note):
                        yield measure_fusion_row(network, make, shape, batch, name, count, run.rounds, apart)


def fusion_networks(quick: bool = False) -> Iterator[tuple[str, Any, tuple[int, ...], dict[int, tuple[str, ...]]]]:
    """Yield each network, how it is made, a sample's shape, and the optimizers for each batch size."""
    width = 16 if quick else 2048
    batches: dict[int, tuple[str, ...]] = {32: FEW[1:]} if quick else dict.fromkeys((1, 32, 128), FEW)
    yield f"SNN, 32 × {width}", partial(mlp, width, 32), (width,), batches  # Chen, Yang and Cheng 2018
    of_lenet: dict[int, tuple[str, ...]] = {32: FEW[:1]} if quick else {1: ALL, 8: FEW, 32: ALL, 128: FEW}
    yield "LeNet-5", *IMAGES["LeNet-5"], of_lenet
    if not quick:
        yield "MobileNetV2-style", *IMAGES["MobileNetV2-style"], {1: FEW, 8: FEW, 32: ALL}
        yield "VGG-11", *IMAGES["VGG-11"], dict.fromkeys((1, 8, 32), FEW)


def measure_fusion_row(
    network: str, make: Callable[[], Any], shape: tuple[int, ...], batch: int, optimizer: str, threads: int,
    rounds: Mapping[str, Any], apart: Apart,
) -> Row:  # fmt: skip
    model = make()
    x, target = batch_of(model, shape, batch)
    executors, update_alone = ours(model, optimizer)
    peaks = {f"{name}_peak": peak_of_ours(executor, [(x, target)]) for name, executor in executors.items()}
    sides: dict[str, Callable[[], object]] = {
        name: lambda executor=executor: executor.step([(x, target)]) for name, executor in executors.items()
    } | {"update": update_alone}
    timers = {name: timing.timer(side) for name, side in sides.items()}
    theirs, peaks["hooks_peak"] = apart.build(fusion_in_torch, make, shape, batch, optimizer, threads)
    timings = timing.in_turn(timers | theirs, **rounds)
    share = timings["update"].median / timings["none"].median
    weighted = [list(layer.parameters().values()) for _, layer in model.stages() if layer.parameters()]
    largest = max(sum(array.nbytes for array in arrays) for arrays in weighted)
    row: Row = {
        "network": network, "batch": batch, "optimizer": optimizer, "threads": threads, "share": share,
        "largest": largest, "layer_parameters": fmean(sum(a.size for a in arrays) for arrays in weighted), **peaks,
    }  # fmt: skip
    row |= {name: measured.to_dict() for name, measured in timings.items()}
    row |= {f"{name}_ratio": timing.ratio(timings["none"], timings[name]) for name in ("forward", "backward")}
    row["hooks_ratio"] = timing.ratio(timings["hooks"], timings["backward"])
    return row | {"met": judge_fusion(row)}


def ours(model: Any, optimizer: str) -> tuple[dict[Fusion, Any], Callable[[], object]]:
    """Return an executor for each fusion, and the update of all parameters by itself."""
    cls, options = OPTIM_OPTIMIZERS[optimizer]
    opt = getattr(optim, cls)(model.parameters(), **options)
    stages = Stages(model)
    executors = {
        fusion: PlainExecutor(model, nn.CrossEntropyLoss(), opt, schedule_of(stages, fusion, 1, "conventional"))
        for fusion in FUSIONS
    }
    grads = {name: np.zeros_like(param) for name, param in model.parameters().items()}
    return executors, lambda: opt.step(grads)


def peak_of_ours(executor: Any, batches: Any) -> int:
    """Return the most bytes of weight gradients that are there at once in a step."""
    alive: list[weakref.ref[Any]] = []
    most = [0]
    layers = [stage.layer for stage in executor.stages.all if stage.parameters]

    def watch(layer: Any) -> Callable[..., Any]:
        compute = layer.weight_grad

        def weight_grad(gy: Any, saved: Any, *shared: Any) -> Any:
            grads = compute(gy, saved, *shared)
            alive.extend(weakref.ref(grad) for grad in grads.values())
            most[0] = max(most[0], sum(grad.nbytes for grad in (ref() for ref in alive) if grad is not None))
            return grads

        return weight_grad

    def by_rows(layer: Any) -> Callable[..., Any]:
        compute = layer.weight_grad_factors

        def weight_grad_factors(gy: Any, saved: Any) -> Any:
            found, host = compute(gy, saved), kernels.on_host()
            for factors in [] if found is None else found[0].values():
                if host.worth_update_by_product(*factors):
                    most[0] = max(most[0], host.bytes_at_once(*factors))
            return found

        return weight_grad_factors

    for layer in layers:
        layer.weight_grad, layer.weight_grad_factors = watch(layer), by_rows(layer)
    try:
        executor.step(batches)
    finally:
        for layer in layers:
            del layer.weight_grad, layer.weight_grad_factors
    return most[0]


def batch_of(model: Any, shape: tuple[int, ...], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of inputs and targets."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *shape), np.float32)
    _, classes, *sizes = model.forward(x[:2])[0].shape
    return x, rng.integers(classes, size=(batch, *sizes))


def _in_torch(make: Callable[[], Any], shape: tuple[int, ...], batch: int, threads: int) -> tuple[Any, ...]:
    """Return PyTorch, with so many threads; our model, inputs and targets as tensors, and the loss."""
    torch = harness.import_torch()
    torch.set_num_threads(threads)
    model = make()
    return torch, model, *map(torch.from_numpy, batch_of(model, shape, batch)), torch.nn.CrossEntropyLoss()


def fusion_in_torch(
    make: Callable[[], Any], shape: tuple[int, ...], batch: int, optimizer: str, threads: int
) -> tuple[dict[str, Callable[[], object]], int]:
    """Return one whole step by each form of torch.optim, all with one state, and the peak of gradients with hooks."""
    torch, model, inputs, targets, loss = _in_torch(make, shape, batch, threads)
    twin = torch_twin(model)
    cls, options = OPTIM_OPTIMIZERS[optimizer]
    parameters = list(twin.parameters())
    whole = getattr(torch.optim, cls)(parameters, **options, foreach=False)

    def backward() -> None:
        loss(twin(inputs), targets).backward()

    def step(form: Mapping[str, bool]) -> Callable[[], None]:
        chosen = {"foreach": False, **form}

        def run() -> None:
            whole.zero_grad()
            backward()
            whole.param_groups[0].update(chosen)
            whole.step()

        return run

    calls: dict[str, Callable[[], object]] = {"torch": step({}), "foreach": step({"foreach": True})}
    if cls in FUSED:
        calls["fused"] = step({"fused": True, "foreach": False})
    most = [0]
    pieces = {p: getattr(torch.optim, cls)([p], **options, foreach=False) for p in parameters}
    for piece in pieces.values():
        piece.state = whole.state

    def update(parameter: Any) -> None:
        if most[0] >= 0:
            most[0] = max(most[0], sum(p.grad.nbytes for p in parameters if p.grad is not None))
        pieces[parameter].step()
        parameter.grad = None

    def hooked() -> None:
        whole.zero_grad()
        handles = [p.register_post_accumulate_grad_hook(update) for p in parameters]
        backward()
        for handle in handles:
            handle.remove()

    calls["torch"]()  # the state is there from now on
    hooked()
    peak, most[0] = most[0], -1
    return calls | {"hooks": hooked}, peak


def judge_fusion(row: Mapping[str, Any]) -> str:
    missed, judged = [], row["share"] > FUSION_TARGETS["share"]
    if judged and row["backward_ratio"]["median"] < FUSION_TARGETS["step"]:
        missed.append(f"step ≥ {FUSION_TARGETS['step']}×")
    if row["backward_peak"] > FUSION_TARGETS["peak"] * row["largest"]:
        missed.append(f"gradients ≤ {FUSION_TARGETS['peak']} × the largest layer's")
    outcome = harness.outcome(missed)
    return outcome if judged else f"{outcome}; step without a target"


FUSION = Benchmark(
    name="fusion",
    title="Whole training steps with fused optimizers: float32, CPU",
    leaves_out="loading data",
    settings={"dtype": "float32", "targets": FUSION_TARGETS, "optimizers": OPTIM_OPTIMIZERS},
    rounds={"rounds": 11, "least_rounds": 3, "budget": 4.0},
    quick_rounds={"rounds": 1, "least_rounds": 1},
    threads=(2,),
    measure=measure_fusion,
    columns=columns(
        words={"optimizer": "optimizer"},
        numbers={"batch": "batch"},
        seconds={
            "none": "unfused", "forward": "forward-fusion", "backward": "backward-fusion", "torch": "torch",
            "foreach": "torch, foreach", "fused": "torch, fused", "hooks": "torch, hooks",
        },
        times={
            "forward_ratio": "forward over unfused", "backward_ratio": "backward over unfused",
            "hooks_ratio": "backward over torch's hooks",
        },
        sizes={
            "none_peak": "gradients, unfused", "backward_peak": "gradients, backward",
            "hooks_peak": "gradients, torch's hooks", "largest": "gradients of the largest layer",
        },
        formats={"{:.0%}": {"share": "update's share"}},
    ),
    short=(
        "network", "batch", "optimizer", "share", "backward_ratio", "hooks_ratio", "none_peak", "backward_peak", "met",
    ),
    in_short=lambda row: row["optimizer"] == "Adam" and row["batch"] in (1, 32),
    picture=harness.bars(
        "{network}, B = {batch}; update: {share:.1%}",
        {"backward_ratio": "backward-fusion", "forward_ratio": "forward-fusion"},
        "speed-up over the unfused step, median; update: its share of that step", line=1.0,
    ),
)  # fmt: skip


# Convolutional networks against PyTorch, eager, with channels in front and channels last: training steps and inference.
#
# ``python -m benchmarks convolution``. A step is forward, cross-entropy, backward and SGD with momentum: ours as
# ``Trainer(schedule="conventional")`` runs it, PyTorch's with ``fused=True``, its fastest form on a CPU. Inference is a
# forward in evaluation: ours under `inference_mode`, PyTorch's under its own. PyTorch runs in another process. The
# target is for the ratio over the faster of its two layouts, round by round.

CONVOLUTION_TARGETS = {
    "LeNet-5": 1.25, "MobileNetV2-style": 1.2, "VGG-11": 1.0, "ResNet-8": 1.0, "U-Net": 1.0, "depthwise 1-D": 1.1,
}  # fmt: skip
"""Times PyTorch's speed, of its faster layout, in a training step; for one sample, and in inference: `LEAST`."""
LEAST = 0.95
OPTIMIZER = "SGD, momentum"
LAYOUTS = ("torch", "channels_last")
CONVOLUTION_BATCHES = dict.fromkeys(CONVOLUTION_TARGETS, (1, 32, 128)) | {"VGG-11": (1, 8, 32)}


def measure_convolution(run: Run) -> Iterator[Row]:
    harness.import_torch()  # refused before anything is measured
    with Apart() as apart:
        for count in run.threads():
            for network, batches in ({"LeNet-5": (2,)} if run.quick else CONVOLUTION_BATCHES).items():
                for batch in batches:
                    if fits(network, batch << 25, run.note):
                        for task in ("step", "inference"):
                            args = network, *IMAGES[network], batch, task, count, run.rounds, apart
                            yield measure_convolution_row(*args)


def measure_convolution_row(
    network: str, make: Callable[[], Any], shape: tuple[int, ...], batch: int, task: str, threads: int,
    rounds: Mapping[str, Any], apart: Apart,
) -> Row:  # fmt: skip
    model = make()
    x, target = batch_of(model, shape, batch)
    executor = ours(model, OPTIMIZER)[0]["none"]

    def infer() -> None:
        with nn.inference_mode():
            model(x)

    if task == "inference":
        model.eval()
    timers = {"ours": timing.timer(infer if task == "inference" else lambda: executor.step([(x, target)]))}
    theirs, _ = apart.build(convolution_in_torch, make, shape, batch, task, threads)
    timings = timing.in_turn(timers | theirs, **rounds)
    best = timing.Timing(tuple(map(min, *(timings[name].seconds for name in LAYOUTS))))
    least = CONVOLUTION_TARGETS[network] if task == "step" and batch > 1 else LEAST
    row: Row = {"network": network, "task": task, "batch": batch, "threads": threads, "target": least}
    row |= timing.side_by_side(timings) | {"best_ratio": timing.ratio(best, timings["ours"])}
    return row | {"met": "met" if row["best_ratio"]["median"] >= row["target"] else "missed"}


def convolution_in_torch(
    make: Callable[[], Any], shape: tuple[int, ...], batch: int, task: str, threads: int
) -> tuple[dict[str, Callable[[], object]], None]:
    """Return one whole step, or a forward, for each layout; series have one axis after the channels, and one layout."""
    torch, model, x, target, loss = _in_torch(make, shape, batch, threads)
    name, options = OPTIM_OPTIMIZERS[OPTIMIZER]

    def side(layout: Any) -> Callable[[], object]:
        twin, inputs = torch_twin(model), x
        if x.ndim == 4:
            twin, inputs = twin.to(memory_format=layout), x.to(memory_format=layout)
        optimizer = getattr(torch.optim, name)(twin.parameters(), **options, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            loss(twin(inputs), target).backward()
            optimizer.step()

        def infer() -> None:
            with torch.inference_mode():
                twin(inputs)

        twin.train(task == "step")
        return step if task == "step" else infer

    formats = torch.contiguous_format, torch.channels_last
    return {name: side(layout) for name, layout in zip(LAYOUTS, formats, strict=True)}, None


CONVOLUTION = Benchmark(
    name="convolution",
    title="Convolutional networks, training steps and inference: float32, CPU",
    leaves_out="loading data; a step is forward, cross-entropy, backward, SGD with momentum; inference is a forward",
    settings={"dtype": "float32", "targets": CONVOLUTION_TARGETS, "least": LEAST, "optimizer": OPTIMIZER},
    rounds={"rounds": 11, "least_rounds": 3, "budget": 3.0},
    quick_rounds={"rounds": 1, "least_rounds": 1},
    threads=(1,),
    measure=measure_convolution,
    columns=columns(
        words={"task": "task"},
        numbers={"batch": "batch"},
        seconds={"torch": "torch", "channels_last": "torch, channels last"},
        times={
            "torch_ratio": "over torch", "channels_last_ratio": "over channels last", "best_ratio": "over the faster",
        },
        formats={"≥ {:g}×": {"target": "target"}},
    ),
    short=("network", "batch", "ours", *LAYOUTS, "best_ratio", "target", "met"),
    in_short=lambda row: row["task"] == "step" and row["batch"] in (1, 32),
    overview=Overview(task="A training step of a convolutional network", peer="PyTorch, its faster layout",
                      ratio="best_ratio", label="{network}, batch {batch}, {task}", page="convolutions.md"),
    picture=harness.bars("{network}, batch {batch}, {task}", {"torch_ratio": "over PyTorch", "channels_last_ratio":
                         "over PyTorch, channels last"}, harness.SPEED_UP,
                         (harness.TORCH, harness.TORCH_TINT), line=1.0),
)  # fmt: skip
