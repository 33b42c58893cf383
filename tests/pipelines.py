"""Small models and their data for tests of pipelines, and steps of them on one worker and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

import orders
import schedules
from orders import digest, state_of
from sparsebp import models, nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.runtime.actions import Stages, trained_parameters
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.pipeline import PipelineExecutor
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import build

SYNCHRONOUS = (
    "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v", "fast-forward", "modulo",
)  # fmt: skip


def on_sizes(*sizes: int) -> list[tuple[str, int]]:
    """Return the synchronous schedules with each of these numbers of ranks that they can have: DualPipe's are even."""
    return [(name, size) for name in SYNCHRONOUS for size in sizes
            if schedules.fitting(name, size, 8, 1)["workers"] == size]  # fmt: skip


def mlp(dtype: Any = np.float64, width: int = 5) -> nn.Sequential:
    """Return a model of 8 stages, 5 of them with parameters, the first without."""
    sizes = [7, width, 6, width, 4, 3]
    layers: list[nn.Layer] = [nn.Flatten()]
    for number, (given, made) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(given, made, dtype=dtype, rng=number)] + ([nn.Tanh()] if number < 2 else [])
    return nn.Sequential(*layers)


def gru(dtype: Any = np.float64) -> nn.Sequential:
    """Return a stacked GRU, one stage a layer."""
    options = {"batch_first": True, "dtype": dtype}
    layers = [nn.GRU(3 if number == 0 else 4, 4, rng=number, **options) for number in range(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 5, 3, dtype=dtype, rng=9))


def grouped(dtype: Any = np.float64, group: Callable[..., nn.Layer] = nn.Stage) -> nn.Sequential:
    """Return a model of convolutions with running statistics, in 4 stages: groups of layers, and one that scans."""

    def linear(given: int, made: int) -> nn.Linear:
        return nn.Linear(given, made, dtype=dtype, rng=given)

    return nn.Sequential(
        nn.Sequential(group(nn.Conv2d(1, 2, 3, dtype=dtype, rng=0), nn.BatchNorm2d(2, dtype=dtype), nn.ReLU())),
        group(nn.MaxPool2d(2), nn.Flatten(), group(linear(8, 5), nn.Tanh()), nn.Dropout(0.2, rng=3)),
        group(linear(5, 6), nn.Tanh(), linear(6, 6), nn.Sigmoid(), backward="blelloch"),
        group(linear(6, 4), nn.Tanh(), linear(4, 3)),
    )


def unet(dtype: Any = np.float64, draws: bool = False) -> nn.Sequential:
    """Return a small U-Net: its skip connections cross stages, and one passes another; with `draws` dropout too."""

    def convolution(given: int, made: int) -> nn.Conv2d:
        return nn.Conv2d(given, made, 3, padding=1, dtype=dtype, rng=given + made)

    extra = [nn.BatchNorm2d(4, dtype=dtype), nn.ReLU(), nn.Dropout(0.2, rng=3)] if draws else []
    return nn.Sequential(
        nn.Stash("image"), nn.Stage(convolution(2, 4), nn.Tanh(), nn.Stash("fine")), nn.MaxPool2d(2),
        nn.Sequential(convolution(4, 5), nn.Stash("coarse"), nn.Tanh(), convolution(5, 5)), nn.Pop("coarse"),
        convolution(5, 4), *extra, nn.Upsample(scale_factor=2), nn.Stash("coarse"), nn.Pop("fine", "concat"),
        convolution(8, 4), nn.Pop("coarse"), nn.Pop("image", "concat"), nn.Stage(nn.Flatten(), nn.Linear(
            96, 3, dtype=dtype, rng=1)),
    )  # fmt: skip


def lenet5(dtype: Any = np.float64) -> nn.Sequential:
    """Return LeNet-5."""
    return models.lenet5(dtype=dtype, classes=3, rng=0)


def vgg11(dtype: Any = np.float64) -> nn.Sequential:
    """Return VGG-11, a sixteenth as wide."""
    return models.vgg11(dtype=dtype, classes=3, width=1 / 16, rng=0)


def densenet(dtype: Any = np.float64) -> nn.Sequential:
    """Return a small DenseNet: it has running statistics."""
    return models.densenet(dtype=dtype, classes=3, depth=10, growth=2, blocks=3, rng=0)


def transformer(dtype: Any = np.float64) -> nn.Sequential:
    """Return a small Transformer's encoder with a classifier."""
    return models.transformer_classifier(3, 3, steps=5, width=4, heads=2, layers=3, dtype=dtype, rng=0)


MODELS: dict[str, tuple[Callable[..., nn.Sequential], tuple[int, ...]]] = {
    "mlp": (mlp, (7,)), "gru": (gru, (5, 3)), "lenet5": (lenet5, (1, 28, 28)), "vgg11": (vgg11, (3, 32, 32)),
    "densenet": (densenet, (3, 8, 8)), "transformer": (transformer, (5, 3)), "grouped": (grouped, (1, 6, 6)),
    "unet": (unet, (2, 4, 4)),
}  # fmt: skip


def batches(name: str, sizes: list[int], dtype: Any = np.float64, seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Return micro-batches of these sizes for the model of that name."""
    rng = np.random.default_rng(seed)
    shape = MODELS[name][1]
    return [(rng.standard_normal((n, *shape)).astype(dtype), rng.integers(0, 3, n)) for n in sizes]


def filling(schedule: str, ranks: int, sizes: list[int]) -> list[int]:
    """Return sizes of micro-batches, repeated until there are as many as the builder of that name needs."""
    needed = schedules.fitting(schedule, ranks, 8, len(sizes))["microbatches"]
    return sizes * -(-needed // len(sizes))


def schedule_of(name: str, model: Any, workers: int, microbatches: int, **options: Any) -> Schedule:
    """Return the schedule of a builder for a model."""
    stages = Stages(model)
    return build(name, workers=workers, stages=len(stages), microbatches=microbatches, unweighted=stages.unweighted,
                 **options)  # fmt: skip


def momentum(model: Any) -> optim.SGD:
    """Return SGD with momentum."""
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def executor(
    model: Any, schedule: Schedule | str, transport: Transport, microbatches: int = 2, optimizer: Any = None,
    **options: Any,
) -> PipelineExecutor:  # fmt: skip
    """Return a rank's executor, by default with momentum; the schedule is one, or a builder's name."""
    if isinstance(schedule, str):
        schedule = schedule_of(schedule, model, transport.size, microbatches)
    parts = model, nn.CrossEntropyLoss(), optimizer or momentum(model)
    return PipelineExecutor(*parts, schedule, transport, **options)


Numbers = list[tuple[float, float]]


def alone(
    make: Callable[[], Any], make_optimizer: Callable[[Any], Any], steps: list[list[Any]], **options: Any
) -> tuple[Numbers, dict[str, Any]]:
    """Run steps on one worker, of any numbers of micro-batches; return losses and norms, and the state afterwards."""
    model = make()
    optimizer, found = make_optimizer(model), []
    names = Stages(model, trained_parameters(model, optimizer)).names
    for batches in steps:
        schedule = orders.order_for(model, microbatches=len(batches), fusion="none")
        one = PlainExecutor(model, nn.CrossEntropyLoss(), optimizer, schedule, graph=False, **options)
        found += one.step(batches)
    return [(step.loss, step.norm(names)) for step in found], state_of(model, optimizer)


def on_ranks(
    size: int, make: Callable[[], Any], make_optimizer: Callable[[Any], Any], steps: list[list[Any]],
    schedule: Callable[[Any], Schedule], **options: Any,
) -> tuple[Numbers, dict[str, Any]]:  # fmt: skip
    """Run steps on ranks that are threads; make sure that all have the same in the end, and return it."""

    def work(transport: Transport) -> tuple[Numbers, dict[str, Any]]:
        model = make()
        optimizer = make_optimizer(model)
        own = executor(model, schedule(model), transport, optimizer=optimizer, **options)
        found = [step for batches in steps for step in own.step(batches)]
        assert own.pending
        own.flush()
        assert not own.pending
        own.close()
        return [(step.loss, step.norm(own.stages.names)) for step in found], state_of(model, optimizer)

    results = run_ranks(size, work)
    for numbers, state in results[1:]:
        assert numbers == results[0][0]
        assert digest(state) == digest(results[0][1])
    return results[0]


def assert_close(
    found: tuple[Numbers, dict[str, Any]], wanted: tuple[Numbers, dict[str, Any]], **tolerance: Any
) -> None:
    """Compare losses, norms and states."""
    np.testing.assert_allclose(found[0], wanted[0], **tolerance)
    orders.assert_close(found[1], wanted[1], **tolerance)
