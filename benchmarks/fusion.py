"""Whole training steps with fused optimizers: time, and the peak of gradients in memory.

``python -m benchmarks fusion``. Forward, loss, backward and update of one batch, by our executor with every fusion, and
by PyTorch with `torch.optim` in its three forms and with an update in every parameter's
``register_post_accumulate_grad_hook``, which is PyTorch's backward-fusion. All of ours work on one model and one
optimizer's state, all of PyTorch's on their twins, in a process of its own. Ours also look at every gradient (norm,
finiteness), as training does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import optim as updates
from benchmarks.processes.apart import Apart
from benchmarks.tools import peers, pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, fits
from benchmarks.tools.images import torch_twin
from sparsebp import kernels
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column
from sparsebp.schedule.builders import Fusion

FUSIONS: tuple[Fusion, ...] = ("none", "forward", "backward")
TARGETS = {"step": 1.15, "share": 0.2, "peak": 1.2}
"""Backward-fusion over no fusion where the update's share of a step is above `share`; peak over the largest layer's."""
ALL = tuple(updates.OPTIMIZERS)
FEW = ("SGD, momentum", "Adam")


def measure(run: Run) -> Iterator[Row]:
    """Measure the steps of every network, batch size and optimizer."""
    peers.import_torch()  # refused before anything is measured
    with Apart() as apart:
        for network, (make, shape, batches) in networks(run.quick).items():
            need = 10 * sum(p.nbytes for p in make().parameters().values())
            for count in run.threads():
                for batch, name in [(batch, name) for batch, names in batches.items() for name in names]:
                    if fits(f"{network}, {name}", need, run.note):
                        yield measure_row(network, make, shape, batch, name, count, run.rounds, apart)


def networks(quick: bool = False) -> dict[str, tuple[Callable[[], Any], tuple[int, ...], dict[int, tuple[str, ...]]]]:
    """Return of each network: how it is made, a sample's shape, and the optimizers for each batch size."""
    from sparsebp import models

    width = 16 if quick else 2048
    found: dict[str, Any] = {
        f"SNN, 32 × {width}": (partial(snn, width), (width,), {32: FEW[1:]} if quick
                               else dict.fromkeys((1, 32, 128), FEW)),
        "LeNet-5": (partial(models.lenet5, rng=0), (1, 28, 28),
                    {32: FEW[:1]} if quick else {1: ALL, 8: FEW, 32: ALL, 128: FEW}),
    }  # fmt: skip
    if not quick:
        found |= {
            "MobileNetV2-style": (partial(models.mobilenetv2, rng=0), (3, 32, 32), {1: FEW, 8: FEW, 32: ALL}),
            "VGG-11": (partial(models.vgg11, rng=0), (3, 32, 32), dict.fromkeys((1, 8, 32), FEW)),
        }
    return found


def snn(width: int) -> Any:
    """Return 32 fully connected layers of `width` (Chen, Yang and Cheng 2018)."""
    from sparsebp import nn

    rng = np.random.default_rng(0)
    layers = [layer for _ in range(32) for layer in (nn.Linear(width, width, rng=rng), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def measure_row(
    network: str, make: Callable[[], Any], shape: tuple[int, ...], batch: int, optimizer: str, threads: int,
    rounds: Mapping[str, Any], apart: Apart,
) -> Row:  # fmt: skip
    """Time all sides in turn, and measure what gradients take."""
    model = make()
    x, target = batch_of(model, shape, batch)
    executors, update_alone = ours(model, optimizer)
    peaks = {f"{name}_peak": peak_of_ours(executor, [(x, target)]) for name, executor in executors.items()}
    sides: dict[str, Callable[[], object]] = {
        name: lambda executor=executor: executor.step([(x, target)]) for name, executor in executors.items()
    } | {"update": update_alone}
    timers = {name: timing.timer(side) for name, side in sides.items()}
    theirs, peaks["hooks_peak"] = apart.build(steps_in_torch, make, shape, batch, optimizer, threads)
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
    return row | {"met": judge(row)}


def ours(model: Any, optimizer: str) -> tuple[dict[Fusion, Any], Callable[[], object]]:
    """Return an executor for each fusion, and the update of all parameters by itself."""
    from sparsebp import nn, optim
    from sparsebp.runtime.actions import Stages
    from sparsebp.runtime.executor import Executor
    from sparsebp.train.ranks import schedule_of

    cls, options = updates.OPTIMIZERS[optimizer]
    opt = getattr(optim, cls)(model.parameters(), **options)
    stages = Stages(model)
    executors = {
        fusion: Executor(model, nn.CrossEntropyLoss(), opt, schedule_of(stages, fusion, 1, "conventional"))
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
    return x, rng.integers(model.forward(x[:1])[0].shape[1], size=batch)


def steps_in_torch(
    make: Callable[[], Any], shape: tuple[int, ...], batch: int, optimizer: str, threads: int
) -> tuple[dict[str, Callable[[], object]], int]:
    """Return one whole step by each form of torch.optim, all with one state, and the peak of gradients with hooks."""
    import torch

    torch.set_num_threads(threads)
    model = make()
    (x, target), twin = batch_of(model, shape, batch), torch_twin(model)
    cls, options = updates.OPTIMIZERS[optimizer]
    inputs, targets, loss = torch.from_numpy(x), torch.from_numpy(target), torch.nn.CrossEntropyLoss()
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
    if cls in ("SGD", "Adam", "AdamW", "Adagrad"):
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


def judge(row: Mapping[str, Any]) -> str:
    """Say whether the row reaches what it is to reach: a step has a target only where the update is much of it."""
    missed, judged = [], row["share"] > TARGETS["share"]
    if judged and row["backward_ratio"]["median"] < TARGETS["step"]:
        missed.append(f"step ≥ {TARGETS['step']}×")
    if row["backward_peak"] > TARGETS["peak"] * row["largest"]:
        missed.append(f"gradients ≤ {TARGETS['peak']} × the largest layer's")
    outcome = report.outcome(missed)
    return outcome if judged else f"{outcome}; step without a target"


def picture(result: Result) -> Any:
    """Draw the speed-up of both fusions over the update's share of the step, as Fig. 7 of the paper."""
    drawing, axes = pictures.figure(width=6.5, height=4.0)
    ax = axes[0, 0]
    for fusion, color, marker in (("forward", "#93c5fd", "s"), ("backward", "#1e40af", "o")):
        ax.scatter(
            [row["share"] for row in result["rows"]], [row[f"{fusion}_ratio"]["median"] for row in result["rows"]],
            s=18, color=color, marker=marker, label=f"{fusion}-fusion",
        )  # fmt: skip
    ax.axhline(1.0, color="#9ca3af", linewidth=0.8)
    ax.plot([TARGETS["share"], 1.0], [TARGETS["step"]] * 2, color="#1e40af", linewidth=0.8, linestyle="--")
    ax.set_xlabel("the update's share of an unfused step", fontsize=9)
    ax.set_ylabel("times faster than unfused (dashed: target)", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing


_ROW = ("network", "batch", "optimizer")

BENCHMARK = Benchmark(
    name="fusion",
    title="Whole training steps with fused optimizers: float32, CPU",
    leaves_out="loading data",
    settings={"dtype": "float32", "targets": TARGETS, "optimizers": updates.OPTIMIZERS},
    rounds={"rounds": 11, "least_rounds": 3, "budget": 4.0},
    quick_rounds={"rounds": 1, "least_rounds": 1},
    threads=(2,),
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("batch", "batch"),
        Column("optimizer", "optimizer", number=False),
        Column("threads", "threads"),
        Column("unfused", "none", tables.seconds),
        Column("forward-fusion", "forward", tables.seconds),
        Column("backward-fusion", "backward", tables.seconds),
        Column("update's share", "share", "{:.0%}".format),
        Column("forward over unfused", "forward_ratio", tables.times),
        Column("backward over unfused", "backward_ratio", tables.times),
        Column("torch", "torch", tables.seconds, on_terminal=False),
        Column("torch, foreach", "foreach", tables.seconds, on_terminal=False),
        Column("torch, fused", "fused", tables.seconds, on_terminal=False),
        Column("torch, hooks", "hooks", tables.seconds),
        Column("backward over torch's hooks", "hooks_ratio", tables.times),
        Column("gradients, unfused", "none_peak", tables.size),
        Column("gradients, backward", "backward_peak", tables.size),
        Column("gradients, torch's hooks", "hooks_peak", tables.size),
        Column("largest layer's", "largest", tables.size),
        Column("outcome", "met", number=False),
    ),
    tables={
        "Time of a step": (*_ROW, "threads", *FUSIONS, "share"),
        "Time of a step in PyTorch": (*_ROW, "threads", "torch", "foreach", "fused", "hooks"),
        "Ratios": (*_ROW, "threads", "forward_ratio", "backward_ratio", "hooks_ratio", "met"),
        "Peak memory of gradients": (*_ROW, "none_peak", "backward_peak", "hooks_peak", "largest"),
    },
    short=(*_ROW, "share", "backward_ratio", "hooks_ratio", "none_peak", "backward_peak", "met"),
    picture=picture,
)
