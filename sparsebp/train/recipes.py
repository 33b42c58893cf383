"""What further commands do: compare two backward algorithms, prune a checkpoint, tune a step, compile all kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp import kernels, nn, optim
from sparsebp.core import backend, timing
from sparsebp.core.check import BACKWARDS, SCAN_ALGORITHMS, Array, Backward
from sparsebp.core.errors import FileFormatError, OptionError, OutputError, ShapeError, SparseBPError
from sparsebp.core.files import check_path
from sparsebp.core.machine import host_memory
from sparsebp.core.threads import get_threads, set_threads, thread_counts
from sparsebp.jacobians import jacobian_t
from sparsebp.kernels.spec import UPDATE_OPTIONS
from sparsebp.patterns.pattern import SparsityPattern, color_columns, color_symmetric
from sparsebp.products.factor import plan_factor
from sparsebp.products.product import ProductPlan, candidates_of_structure, plan_addition, plan_by, plan_product
from sparsebp.runtime.executor import OutOfOrderExecutor
from sparsebp.scan import linear_recurrence, linear_recurrence_vjp, plan_scan, selective_scan, selective_scan_vjp
from sparsebp.train import verify
from sparsebp.train.checkpoint import (
    FILE_NAME,
    Checkpoint,
    History,
    held_if_run,
    load_checkpoint,
    save_checkpoint,
    take_weights,
)
from sparsebp.train.config import TrainConfig, build, config_for, config_of
from sparsebp.train.setup import batch_of
from sparsebp.train.trainer import Runner

__all__ = ["Comparison", "compare_histories", "prune_checkpoint", "verify"]


EARLY = 100
"""Steps over which rounding stays small even in a chaotic training."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs that differ in their backward algorithm alone."""

    backward: str
    reference: str
    steps: int  # of each run
    max_loss_difference: float  # absolute, at the same step
    step_of_max: int  # from 1
    # Over the first `EARLY` steps. In a chaotic training, the last bit of one weight grows into another curve within
    # some hundred steps; only the early difference tells a wrong gradient from rounding.
    early_loss_difference: float
    final_losses: tuple[float, float]  # (backward, reference)
    seconds: tuple[float, float]  # median of a step, without the first, which compiles: (backward, reference)

    @property
    def time_ratio(self) -> float:
        """Time of a reference step over a step with `backward`."""
        return self.seconds[1] / self.seconds[0]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a dict that JSON can hold."""
        return dataclasses.asdict(self) | {"time_ratio": self.time_ratio}

    def describe(self) -> str:
        """Return the comparison as text."""
        return (
            f"{self.backward} against {self.reference}, {self.steps} steps from the same seed: "
            f"largest difference of losses {self.max_loss_difference:.3g} (step {self.step_of_max}; "
            f"{self.early_loss_difference:.3g} over the first {min(EARLY, self.steps)} steps), "
            f"step time {self.seconds[0] * 1e3:.2f} ms against {self.seconds[1] * 1e3:.2f} ms "
            f"(ratio {self.time_ratio:.2f})"
        )


def _step_time(history: History) -> float:
    return float(np.median(history.seconds[1:] or history.seconds))


def compare_histories(first: History, second: History, backward: str, reference: str) -> Comparison:
    """Compare the losses of two runs from the same seed, step by step, given their histories and algorithms.

    Raises
    ------
    ShapeError
        The runs took different numbers of steps, or none.
    """
    if first.steps != second.steps or first.steps == 0:
        raise ShapeError("The two runs cannot be compared step by step",
                         expected="the same number of steps, at least 1", got=f"{first.steps} and {second.steps}",
                         remedy="Train both with the same data, batch size and epochs")  # fmt: skip
    difference = np.abs(np.asarray(first.loss) - np.asarray(second.loss))
    return Comparison(
        backward, reference, first.steps, float(difference.max()), int(difference.argmax()) + 1,
        float(difference[:EARLY].max()), (first.loss[-1], second.loss[-1]), (_step_time(first), _step_time(second)),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Agreement:
    """One algorithm against plain back-propagation."""

    algorithm: str
    relative_difference: float  # ‖g - g_sequential‖ / ‖g_sequential‖ over all weight gradients together
    largest_difference: float  # absolute, of an entry
    parameter: str  # where that entry is

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return dataclasses.asdict(self)


COMPARED: tuple[Backward, ...] = ("chunked", "blelloch")
"""The scans whose gradients are compared."""


def gradient_agreement(
    config: TrainConfig, model: Any, loss: Any, batch: tuple[Array, Array], algorithms: Sequence[Backward] = COMPARED
) -> list[Agreement]:
    """Compare the weight gradients of `algorithms` with plain back-propagation, on a batch on the model's device.

    For a recurrent model, ``"blelloch"`` stores about 3·T·B·H² values.
    """
    state = model.state_dict()
    reference = _gradients(config, state, "bp", loss, batch)
    norm = _norm(reference)
    results = []
    for algorithm in algorithms:
        grads = _gradients(config, state, algorithm, loss, batch)
        differences = {name: grads[name] - reference[name] for name in reference}
        largest = {name: float(abs(difference).max()) for name, difference in differences.items()}
        name = max(largest, key=lambda n: largest[n])
        results.append(Agreement(algorithm, _norm(differences) / norm if norm else 0.0, largest[name], name))
    return results


def _gradients(
    config: TrainConfig, state: Any, algorithm: Backward, loss: Any, batch: tuple[Array, Array]
) -> dict[str, Array]:
    model = dataclasses.replace(config, backward=algorithm).build_model()
    model.load_state_dict(state)
    model.eval()
    _, grads = nn.value_and_grad(model, loss)(*batch)
    return {name: backend.to_host(grad).astype("float64") for name, grad in grads.items()}


def _norm(arrays: dict[str, Array]) -> float:
    return math.sqrt(sum(float((array**2).sum()) for array in arrays.values()))


# Pruning of a checkpoint: weights, masks, and the optimizer's state.


def prune_checkpoint(
    path: str | os.PathLike[str], out: str | os.PathLike[str], amount: float, method: Any = "class_blind", *,
    overwrite: bool = False,
) -> nn.PruneReport:  # fmt: skip
    """Prune the network of the checkpoint `path` and write all of it to `out`, in one atomic step.

    Parameters
    ----------
    path
        A checkpoint of `sparsebp train`, or its folder. Existing masks are kept.
    out
        The file to write. From ``checkpoint.safetensors`` in a folder, a run with a constant learning rate and more
        epochs resumes.
    amount, method
        See `sparsebp.prune`.
    overwrite
        Whether to replace a file that is at `out`.

    Raises
    ------
    FileFormatError
        The file is not a checkpoint of such a run.
    OptionError
        `amount` or `method` is invalid, or `out` is the checkpoint itself.
    OutputError
        `out` cannot be written, is there already, or a run holds its folder.
    """
    path, out = check_path("path", path), check_path("out", out)
    with held_if_run(out.parent):
        return _prune(path, out, amount, method, overwrite)


def _prune(path: Path, out: Path, amount: float, method: Any, overwrite: bool) -> nn.PruneReport:
    source = path / FILE_NAME if os.path.isdir(path) else path
    checkpoint = load_checkpoint(source)
    if os.path.exists(out) and os.path.samefile(source, out):
        raise OptionError("out is the checkpoint itself, which would be lost", expected="another file", got=out)
    if os.path.lexists(out) and not overwrite:
        raise OutputError(f"{out} is there already", expected="a new file", got="one that would be lost",
                          remedy="Name another one (--out), or replace it by overwrite=True (--overwrite)")  # fmt: skip
    try:
        described = checkpoint.state.get("config")
        model = config_of(described if isinstance(described, dict) else {}).build_model()
    except OptionError as error:
        raise FileFormatError(
            f"{path} does not say what network it is of", expected="a checkpoint that sparsebp train wrote",
            got=str(error), remedy="Load the weights into your model, call sparsebp.prune, and save its state_dict"
        ) from error  # fmt: skip
    model.to("cpu")
    take_weights(model, checkpoint, path)
    report = nn.prune(model, amount, method)
    state = {name: backend.to_host(array) for name, array in model.state_dict().items()}
    tensors = dict(checkpoint.tensors) | {f"model.{name}": array for name, array in state.items()}
    for name in report.kept:
        mask = state[f"{name}.weight_mask"]
        for stored in tensors:
            if stored.startswith("optimizer.") and stored.endswith(f".{name}.weight"):
                if tensors[stored].shape != mask.shape:
                    raise FileFormatError(f"{path} is damaged: {stored}", expected=mask.shape,
                                          got=tensors[stored].shape)  # fmt: skip
                tensors[stored] = tensors[stored] * mask
    save_checkpoint(out, Checkpoint(tensors, {**checkpoint.state, "pruning": report.to_json()}))
    return report


def __dir__() -> list[str]:
    return sorted(__all__)


# ``sparsebp tune``: the fastest order of a step, backward and number of threads for a model on this machine. The
# combinations run a few training steps in turn; their results differ by rounding only.

TUNED = ("fusion", "schedule", "backward", "threads")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One combination."""

    options: Mapping[str, Any]  # by the names in `TUNED`
    seconds: timing.Timing | None = None  # of a step; None if refused
    refused: str | None = None  # why

    def to_json(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        measured = None if self.seconds is None else self.seconds.to_dict()
        return {**self.options, "seconds": measured, "refused": self.refused}


def combinations(
    config: TrainConfig, fusions: Iterable[str] = (), schedules: Iterable[str] = (), backwards: Iterable[str] = (),
    threads: Iterable[int] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return all combinations of the choices; where there are none, of the usual ones."""
    here = thread_counts()["kernels"]
    choices = (
        tuple(fusions) or ("none", "forward", "backward"),
        tuple(schedules) or ("conventional", "ooo"),
        tuple(backwards) or tuple(dict.fromkeys((config.backward, "bp", "auto"))),
        tuple(threads) or tuple(dict.fromkeys((1, here))),
    )
    return [dict(zip(TUNED, values, strict=True)) for values in product(*choices)]


def tune(
    options: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], *, steps: int = 3, rounds: int = 5,
    budget: float = 60.0, progress: Callable[[str, int, int], None] = lambda name, number, count: None,
) -> list[Trial]:  # fmt: skip
    """Time `steps` steps in a row of every combination, in turn; return the fastest first, then those refused.

    `options` are those of `config_for`. Once `budget` seconds have passed, measuring stops after two rounds. `progress`
    is called with a name, a number from 0 and the count, before each combination is prepared and once before all are
    measured.
    """
    for name, value in (("steps", steps), ("rounds", rounds)):
        if value < 1:
            raise OptionError(f"{name} is too small", expected="1 or more", got=value)
    before = thread_counts()["kernels"]
    sides: dict[int, _Side] = {}
    refused: list[Trial] = []
    data = None
    try:
        for number, choice in enumerate(tried):
            progress(", ".join(f"{name}={value}" for name, value in choice.items()), number, len(tried))
            try:
                config = _config(options, choice)
                data = data or config.load_data()
                sides[number] = _Side(config, data, int(choice["threads"]), steps)
            except SparseBPError as error:
                refused.append(Trial(choice, refused=str(error)))
        if not sides:
            reasons = dict.fromkeys(trial.refused for trial in refused)
            raise OptionError("No combination can be had", expected="one at least", got="; ".join(map(str, reasons)))
        progress("while they were measured", len(tried), len(tried))
        calls = {str(number): timing.Call(side.run, side.prepare) for number, side in sides.items()}
        measured = timing.measure(calls, rounds=rounds, least_rounds=min(2, rounds), warmup=1, budget=budget)
    finally:
        for side in sides.values():
            side.close()
        set_threads(before)
    trials = [
        Trial(tried[int(number)], timing.Timing(tuple(value / steps for value in found.seconds)))
        for number, found in measured.items()
    ]
    return [*sorted(trials, key=lambda trial: trial.seconds.median if trial.seconds else 0.0), *refused]


def _config(options: Mapping[str, Any], choice: Mapping[str, Any]) -> TrainConfig:
    if choice["schedule"] != "conventional" and choice["threads"] < 2:
        raise OptionError("Two streams need two threads", expected="threads=2 or more", got=choice["threads"],
                          remedy="Use schedule='conventional'")  # fmt: skip
    chosen = {name: value for name, value in choice.items() if name != "threads"}
    return config_for(**{**options, **chosen})


class _Side:
    """A trainer that runs the same batches again and again, after an out-of-order schedule is found."""

    def __init__(self, config: TrainConfig, data: Any, threads: int, steps: int) -> None:
        self.threads, self.steps = threads, steps
        set_threads(threads)
        run = build(config, data=data)
        size = min(config.batch_size, len(run.train_set))
        parts = [range(i * size // config.accumulate, (i + 1) * size // config.accumulate)
                 for i in range(config.accumulate)]  # fmt: skip
        self._batches = [batch_of(run.train_set, np.array(part), run.trainer.model) for part in parts if part]
        run.trainer.lr_scheduler = None  # which counts the steps of a whole run
        self._runner = Runner(run.trainer)
        self.run()
        executor = self._runner.executor
        while isinstance(executor, OutOfOrderExecutor) and executor.found is None:
            self.run()

    def prepare(self) -> None:
        """Give this side its threads."""
        if thread_counts()["kernels"] != self.threads:
            set_threads(self.threads)

    def run(self, _: object = None) -> None:
        """Run the steps."""
        for _step in range(self.steps):
            self._runner.step(self._batches, 0)
        self._runner.flush()

    def close(self) -> None:
        """End the threads of two streams."""
        self._runner.close()


# Small computations that between them call every kernel of the CPU, so that all are compiled and kept on disk.

_SAMPLES = 3


def jobs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield all computations, in float32 and in float64, by name."""
    for dtype in (np.float32, np.float64):
        for name, job in _JOBS.items():
            yield f"{name}, {np.dtype(dtype).name}", functools.partial(job, np.dtype(dtype))


def compile_all(told: Callable[[str, int, int], None]) -> None:
    """Run all of them, on as many processes as kernels have threads; `told` learns how far it is."""
    names = [name for name, _ in jobs()]
    workers = min(get_threads(), len(names), max(1, host_memory() >> 31))  # each takes about 1 GB
    if workers == 1:
        for number, name in enumerate(names):
            told(name, number, len(names))
            _run(name)
        return
    spawn = multiprocessing.get_context("spawn")  # a child after a fork would wait for threads that it has not
    with ProcessPoolExecutor(workers, spawn, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            told(names[0], 0, len(names))
            for number, done in enumerate(as_completed([pool.submit(_run, name) for name in names])):
                told(done.result(), number + 1, len(names))
        except BaseException:
            for process in list(pool._processes.values()):
                process.kill()
            raise


def _run(name: str) -> str:
    """Run one of them by name; return it."""
    from sparsebp.kernels.host.engine.compile import NOTICE

    NOTICE.told = True  # the command tells of it
    dict(jobs())[name]()
    return name


def folder() -> Path:
    """Return the folder below which Numba keeps compiled kernels."""
    from sparsebp.kernels.host.csr import _csr_matvec

    kept, package = Path(_csr_matvec.stats.cache_path), Path(kernels.__file__).parents[1]
    return package if kept.is_relative_to(package) else kept.parent


def _train(model: nn.Layer, shape: tuple[int, ...], dtype: np.dtype, *optimizers: optim.Optimizer) -> None:
    x, target = np.random.default_rng(0).standard_normal(shape).astype(dtype), np.arange(_SAMPLES)
    _, gradients = nn.value_and_grad(model, nn.CrossEntropyLoss())(x, target)
    for optimizer in optimizers:
        optimizer.step(gradients)


def _recurrent(kind: type[nn.RNN] | type[nn.GRU] | type[nn.LSTM], dtype: np.dtype) -> None:
    for backward in BACKWARDS:
        cell = kind(2, 5, backward=backward, dtype=dtype, rng=0)
        _train(nn.SequenceClassifier(cell, nn.Linear(5, 4, dtype=dtype, rng=0)), (9, _SAMPLES, 2), dtype)
    layer = kind(2, 5, dtype=dtype, rng=0)
    y, saved = layer.forward(np.zeros((9, _SAMPLES, 2), dtype))
    layer.cell.reduced(kernels.get(np).unchecked, saved.runs[0], layer.params["weight_hh_l0"], y)


def _one_step(dtype: np.dtype) -> None:
    nn.GRU(2, 5, dtype=dtype, rng=0).stream().step(np.ones(2, dtype))
    host, room = kernels.on_host().one_step, np.zeros(200, dtype)
    at, table = room.ctypes.data, host.table_of("gru", 1, 1, 2, 5, [room.ctypes.data] * 4)
    host.forward(room, table, *(at,) * 7)
    host.backward(room, table, *(at,) * 12)


def _convolutions(dtype: np.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "rng": 0}
    layers = (
        nn.Conv2d(2, 4, 3, padding=1, **options), nn.BatchNorm2d(4, dtype=dtype), nn.Hardtanh(),
        nn.Conv2d(4, 4, 3, stride=2, groups=4, **options), nn.ReLU(), nn.Conv2d(4, 6, 2, **options), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(6, 5, **options),
    )  # fmt: skip
    _train(nn.Sequential(*layers), (_SAMPLES, 2, 9, 9), dtype)
    nn.AvgPool2d(2).forward(np.ones((_SAMPLES, 2, 4, 4), dtype))
    nn.ReLU().forward(np.ones(_SAMPLES, dtype))  # alone: not in the pass of the layer before
    evaluated = nn.BatchNorm2d(2, dtype=dtype).eval()
    evaluated.vjp(np.ones((_SAMPLES, 2, 3, 3), dtype))[1](np.ones((_SAMPLES, 2, 3, 3), dtype)).weights  # noqa: B018


def _sequences(dtype: np.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "rng": 0}
    encoder = nn.TransformerEncoderLayer(6, 2, 5, activation="gelu", batch_first=True, **options)
    _train(nn.Sequential(encoder, nn.MeanOverSteps(True)), (_SAMPLES, 4, 6), dtype)
    words = nn.Embedding(5, 3, **options)
    y, numbers = words.forward(np.arange(5))
    words.weight_grad(y, numbers)
    x = np.ones((_SAMPLES, 3, 4), dtype)
    for layer in (nn.Softmax(-1), nn.Softmax(1), nn.PReLU(dtype=dtype)):
        _, gradients = layer.vjp(x)
        gradients(x).input, gradients(x).weights
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()):
        loss.forward(x, x)


def _scans(dtype: np.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "rng": 0}
    layers = (
        nn.Conv2d(1, 2, 3, **options), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 6, **options), nn.Tanh(),
        nn.Linear(6, 6, **options), nn.Sigmoid(), nn.Linear(6, 4, **options),
    )  # fmt: skip
    for backward in BACKWARDS:
        _train(nn.Sequential(*layers, backward=backward), (_SAMPLES, 1, 6, 6), dtype)
    jacobian_t(layers[0], np.ones((_SAMPLES, 1, 6, 6), dtype))
    dense, g = [SparsityPattern.dense(3, 3)] * 7, np.ones((3, _SAMPLES), dtype)
    for algorithm in SCAN_ALGORITHMS:
        chunks = 3 if algorithm == "chunked" else None
        plan = plan_scan(dense, algorithm, chunks=chunks, batch=_SAMPLES, dtype=dtype)
        plan(g, np.ones((len(dense), 9, _SAMPLES), dtype))


def _linear_recurrences(dtype: np.dtype) -> None:
    k, h, x, h0 = kernels.get(np), *(np.ones((_SAMPLES, 2, size), dtype) for size in (5, 10)), np.ones((2, 5), dtype)
    out, back, none = np.empty_like(h), np.empty_like(x), np.empty_like(h0)
    linear_recurrence_vjp(h, linear_recurrence(h, h), h)
    k.min_gru_forward(x, h0, None, "tanh", False, out)
    k.min_gru_backward(x, out, h, h0, None, "tanh", False, back, none)
    states, w = np.zeros((_SAMPLES + 1, 2, 5), dtype), np.ones((10, 5), dtype)
    kernels.on_host().gated_forward(h, w, None, "identity", back, states)
    kernels.on_host().gated_backward(h, back, states, h, "identity", none, None, (w, None))
    layer = nn.LRU(5, 3, dtype=dtype, rng=0)
    y, saved = layer.forward(h)
    _ = layer.gradients(y, saved).weights
    rates = -np.ones((5, 10), dtype)
    selective_scan_vjp(h, h, rates, x, x, None, selective_scan(h, h, rates, x, x).states, h)


def _sparse_products(dtype: np.dtype) -> None:
    rows, columns = np.indices((12, 24))
    scattered, selected = (rows + columns**2) % 5 == 0, columns == rows // 2 * 2
    runs, apart = abs(columns - rows) < 11, columns // 2 == rows
    for left in (scattered[:, :12], selected[:, :12]):
        for right in (scattered, selected, runs, apart):
            for strategy in candidates_of_structure(_pattern(left), _pattern(right)):
                _multiply(plan_by(strategy), dtype)
    blocks = _pattern(np.ones((26, 26), bool))  # are of 2 by 2
    _multiply(plan_by(next(way for way in candidates_of_structure(blocks, blocks) if way.name == "blocks")), dtype)
    full = _pattern(np.indices((64, 64)).sum(axis=0) % 9 > 0)
    _multiply(plan_product(full, full), dtype)
    diagonal, square = SparsityPattern.diagonal(12), _pattern(scattered[:, :12])
    moved = -np.subtract(*np.indices((256, 330)))  # 65 a row, one further than in the row before
    band = _pattern((moved >= 0) & (moved < 65))
    for plan in (
        plan_product(diagonal, square), plan_product(square, diagonal),
        plan_product(band, SparsityPattern.diagonal(band.shape[1])),
    ):  # fmt: skip
        _multiply(plan, dtype)
    plan_addition(square, diagonal)
    color_columns(_pattern(np.eye(5, dtype=bool) | np.roll(np.eye(5, dtype=bool), 1, axis=1)))  # in both orders
    color_symmetric(blocks)


def _multiply(plan: ProductPlan, dtype: np.dtype) -> None:
    for batch in (1, _SAMPLES):
        plan(np.ones((plan.a.nnz, batch), dtype), np.ones((plan.b.nnz, batch), dtype))


def _pattern(mask: np.ndarray) -> SparsityPattern:
    return SparsityPattern(np.append(0, np.cumsum(mask.sum(axis=1))), np.nonzero(mask)[1], mask.shape)


def _factors(dtype: np.dtype) -> None:
    plan = plan_factor(SparsityPattern.diagonal(3))
    for shape in ((3,), (3, _SAMPLES)):
        factors, b = plan(np.ones(shape, dtype)), np.ones((3, _SAMPLES), dtype)
        factors.refine(b, factors.solve(b))


def _dense_products(dtype: np.dtype) -> None:
    host, thin, large = kernels.on_host(), np.ones((16, 1024), dtype), np.ones((1024, 1024), dtype)
    host.matmul(thin, large, np.empty((16, 1024), dtype))
    host.matmul_many([(thin[:, :16], thin[:, 16:32])])
    _train(nn.Sequential(nn.Linear(5, 4, dtype=dtype, rng=0), nn.ReLU()), (_SAMPLES, 5), dtype)
    sgd = np.ones((1, len(UPDATE_OPTIONS["sgd"])))
    host.update_by_product("sgd", large, thin.T, thin, [None], sgd, np.ones(1, np.int64))


def _optimizers(dtype: np.dtype) -> None:
    kinds: tuple[Any, ...] = (
        optim.SGD, optim.Adam, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    )  # fmt: skip
    for kind in kinds:
        model = nn.Linear(4, 3, dtype=dtype, rng=0)
        _train(model, (_SAMPLES, 4), dtype, kind(model.parameters(), lr=0.1))
    gradients = {"weight": np.ones((3, 4), dtype)}
    optim.clip_grad_norm(gradients, 0.1)
    optim.clip_grad_value(gradients, 0.1)


_JOBS: dict[str, Callable[[np.dtype], None]] = {
    "RNN": functools.partial(_recurrent, nn.RNN), "GRU": functools.partial(_recurrent, nn.GRU),
    "LSTM": functools.partial(_recurrent, nn.LSTM), "one step": _one_step, "convolutions": _convolutions,
    "sequences": _sequences, "scans": _scans, "linear recurrences": _linear_recurrences,
    "sparse products": _sparse_products, "factors": _factors, "dense products": _dense_products,
    "optimizers": _optimizers,
}  # fmt: skip
