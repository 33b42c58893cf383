"""BPPSA App. C: PipeDream's stale weights with Adam, beside plain training with Adam."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.spectrain import interval, schedule_of
from benchmarks.tools import images, pictures
from benchmarks.tools.staged import NETWORKS, STAGES
from papers.figure import Claim, Context, Found
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.runtime.pipeline import PipelineExecutor

_RATE, _BATCH, _TOPS = 1e-3, 32, (1, 5)
_SIDES = ("in turn", "PipeDream")
_RAN = {"in turn": "bp, Adam, one worker", "PipeDream": f"PipeDream with stashed weights, {STAGES} stages, bp, Adam"}


def accuracies(context: Context) -> Found:
    """Train VGG-11 on digits with Adam, in turn and by PipeDream; return top-1 and top-5 accuracies."""
    network = NETWORKS["VGG-11"]
    data = network.data(20 if context.quick else 1000)
    sizes, seeds = (network.quick, (0, 1)) if context.quick else (network.sizes, tuple(range(6)))
    parts, steps = (2, 4) if context.quick else (4, 40)

    def build(seed: int) -> nn.Sequential:
        return network.build(np.random.default_rng(seed), **sizes)

    found = {side: [_train(side, partial(build, seed), data, parts, steps, seed) for seed in seeds] for side in _SIDES}
    top = {side: np.array(runs)[:, -1] for side, runs in found.items()}  # (seeds, tops)
    claims = []
    for number, (k, paper) in enumerate(zip(_TOPS, (2.6, 1.9), strict=True)):
        lost, width = interval(100 * (top["in turn"][:, number] - top["PipeDream"][:, number]))
        met = lost > width
        claims.append(Claim(
            f"top-{k} accuracy lost by PipeDream, points, {len(seeds)} runs", f"{paper}", f"{lost:.1f} ± {width:.1f}",
            met, "" if met else "Digits and a small VGG-11: within the noise of the runs",
            _RAN["PipeDream"],
        ))  # fmt: skip
    for side in _SIDES:
        means = 100 * top[side].mean(axis=0)
        claims.append(Claim(f"accuracy, {side}: top-1 and top-5, %", "not stated", f"{means[0]:.1f}, {means[1]:.1f}",
                            None, "The paper trains VGG-16 on ImageNet", _RAN[side]))  # fmt: skip
    return Found(tuple(claims), {"steps": [steps * (k + 1) for k in range(parts)], "accuracies": found})


def _train(
    side: str, build: Callable[[], nn.Sequential], data: Any, parts: int, steps: int, seed: int
) -> list[list[float]]:  # fmt: skip
    """Return top-1 and top-5 accuracy after each of so many parts of the training; the pipeline is drained there."""
    train_set, test_set = data
    given = [train_set.batch(chosen) for chosen in images.batches(len(train_set), _BATCH, seed, parts * steps)]
    loss = nn.CrossEntropyLoss()

    def work(transport: Transport | None) -> list[list[float]]:
        model, found = build(), []
        optimizer = optim.Adam(model.parameters(), lr=_RATE)
        schedule = schedule_of("PipeDream", steps)
        executor = None if transport is None else PipelineExecutor(model, loss, optimizer, schedule, transport)
        for begin in range(0, len(given), steps):
            part = given[begin : begin + steps]
            if executor is None:
                _in_turn(model, loss, optimizer, part)
            else:
                executor.step(part)
                executor.flush()
            if transport is None or transport.rank == 0:
                found.append(_top(model, test_set))
        return found

    return run_ranks(STAGES, work)[0] if side == "PipeDream" else work(None)


def _in_turn(model: nn.Sequential, loss: Any, optimizer: optim.Optimizer, part: Sequence[Any]) -> None:
    for x, target in part:
        logits, saved = model.forward(x)
        optimizer.step(model.weight_grad(loss.input_grad(loss.forward(logits, target)[1]), saved))


def _top(model: nn.Sequential, data: Any) -> list[float]:
    x, target = data.batch(np.arange(len(data)))
    order = np.argsort(-model(x), axis=1)
    return [float((order[:, :k] == np.asarray(target)[:, None]).any(axis=1).mean()) for k in _TOPS]


def draw_accuracies(data: Mapping[str, Any]) -> Any:
    """Draw the mean accuracies over the steps, with their ranges."""
    drawing, axes = pictures.figure(1, len(_TOPS), width=11.6, height=4.2)
    for ax, number, k in zip(axes[0], range(len(_TOPS)), _TOPS, strict=True):
        for side, colour in zip(_SIDES, ("#111827", "#d97706"), strict=True):
            runs = 100 * np.array(data["accuracies"][side])[:, :, number]
            mean = runs.mean(axis=0)
            ax.errorbar(data["steps"], mean, [mean - runs.min(axis=0), runs.max(axis=0) - mean], color=colour,
                        capsize=3, marker="o", markersize=4, label=f"Adam, {side}")  # fmt: skip
        ax.set(xlabel="batches", ylabel=f"top-{k} accuracy on held-out digits, %")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="lower right")
    return drawing
