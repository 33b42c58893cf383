"""Gradient checks: scans against plain back-propagation, that against finite differences, Jacobians against both."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.check import BACKWARDS, Array, Backward, Seed, check_choice, check_generator
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.shortcuts import belongs
from sparsebp.jacobians import jacobian_t
from sparsebp.nn.recurrent import Recurrent
from sparsebp.train.checkpoint import evaluation

SCAN_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
"""Largest difference between algorithms that counts as agreement, relative to the gradient's largest entry."""
FINITE_TOLERANCE = {"float32": 5e-3, "float64": 1e-6}
"""The same against finite differences, which are taken in float64: this is the error of the model's own gradient."""
_AGAINST = {"scan": "sequential", "jacobian": "input_grad", "finite": "finite diff."}
INPUT = "input"
"""Name of the gradient at x among those of the parameters."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of a report."""

    kind: str  # "scan", "jacobian" or "finite"
    subject: str  # the algorithm and, of several recurrent layers, the layer; a layer; the parameter
    difference: float  # the largest, relative; NaN if the check was left out
    where: str  # the gradient with the largest difference
    note: str = ""  # why the check was left out


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """The result of `check_gradient`; prints as a table."""

    checks: tuple[Check, ...]  # one for each algorithm and recurrent layer, then for each parameter and the input
    scan_tolerance: float  # largest difference that counts as agreement
    finite_tolerance: float
    loss: float  # on the given data

    @property
    def max_scan_difference(self) -> float:
        """Largest relative difference between a scan algorithm and plain back-propagation; 0 without scans."""
        return self._max("scan")

    @property
    def max_finite_difference(self) -> float:
        """Largest relative difference between back-propagation and finite differences."""
        return self._max("finite")

    @property
    def ok(self) -> bool:
        """Whether all differences are within the tolerances; a NaN is not."""
        return all(self._max(kind) <= self._tolerance(kind) for kind in _AGAINST)

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        names = ("ok", "loss", "max_scan_difference", "max_finite_difference", "scan_tolerance", "finite_tolerance")
        checks = [dataclasses.asdict(check) for check in self.checks]
        return {name: getattr(self, name) for name in names} | {"checks": checks}

    def __str__(self) -> str:
        rows = [("against", "checked", "difference", "largest in", "")]
        for check in self.checks:
            number = "left out" if check.note else f"{check.difference:.2e}"
            verdict = check.note or ("ok" if check.difference <= self._tolerance(check.kind) else "DIFFERS")
            rows.append((_AGAINST[check.kind], check.subject, number, check.where, verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        verdict = "gradients agree" if self.ok else "GRADIENTS DIFFER"
        scan = f"scan {self.max_scan_difference:.2e} (tolerance {self.scan_tolerance:.0e}), "
        lines.append(
            f"{verdict}: {scan if any(check.kind == 'scan' for check in self.checks) else ''}"
            f"finite differences {self.max_finite_difference:.2e} (tolerance {self.finite_tolerance:.0e})"
        )
        return "\n".join(lines)

    def _max(self, kind: str) -> float:
        return float(np.max([c.difference for c in self.checks if c.kind == kind and not c.note], initial=0.0))

    def _tolerance(self, kind: str) -> float:
        return self.scan_tolerance if kind == "scan" else self.finite_tolerance


def check_gradient(
    model: nn.Layer,
    loss: Any,
    x: Array,
    target: Array,
    *,
    algorithms: Sequence[Backward] | None = None,
    samples: int = 4,
    step: float = 1e-5,
    rng: Seed = 0,
    memory_limit: int = 1 << 30,
    scan_tolerance: float | None = None,
    finite_tolerance: float | None = None,
    **forward_options: Any,
) -> GradientReport:
    """Check a model's gradients in three ways.

    For every recurrent layer, each scan algorithm is compared with plain back-propagation. Stages of classes outside
    this package that define `jacobian_t` have it compared with their `input_grad`. Plain back-propagation is compared
    with central differences of a float64 copy of the model, at `samples` entries of x and of every parameter.
    Dropout is off meanwhile; the model is left as it was.

    Parameters
    ----------
    model, loss
        The model and a loss of `sparsebp.nn`.
    x, target
        A batch.
    algorithms
        Scan algorithms to check. None: chunked, blelloch and hybrid, except those that need more than `memory_limit`;
        the report says so.
    samples
        Entries of each array to check by finite differences.
    step
        Half the width of the central difference.
    rng
        Generator or seed that chooses the entries.
    memory_limit
        Bytes that a scan may take, for layers that have no ``memory_limit`` of their own.
    scan_tolerance, finite_tolerance
        Default `SCAN_TOLERANCE` and `FINITE_TOLERANCE` for the model's dtype.
    **forward_options
        Passed to ``model.forward``, e.g. ``lengths``.

    Returns
    -------
    GradientReport
        Differences are relative to the largest entry of the same gradient, and at least to a thousandth of the largest
        of all, so that rounding noise of an array without influence does not count.

    Raises
    ------
    OptionError
        An algorithm is unknown.
    MemoryLimitError
        One of `algorithms` needs more memory than that.
    """
    for algorithm in algorithms or ():
        check_choice("backward algorithm", algorithm, BACKWARDS)
    generator, dtype = check_generator("rng", rng), x.dtype.name
    with evaluation(model):
        run = _Run(loss, x, target, forward_options)
        with _algorithm(_recurrent_layers(model).values(), "bp"):
            value, reference = run.gradients(model)
        checks = [*_scan_checks(model, run, reference, algorithms, memory_limit)]
        checks += _jacobian_checks(model, run, generator)
        if samples > 0:
            checks += _finite_checks(model, run, reference, samples, step, generator)
    return GradientReport(
        tuple(checks),
        SCAN_TOLERANCE[dtype] if scan_tolerance is None else scan_tolerance,
        FINITE_TOLERANCE[dtype] if finite_tolerance is None else finite_tolerance,
        value,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """The loss and the data of a check."""

    loss: Any
    x: Array
    target: Array
    options: Mapping[str, Any]

    def value(self, model: nn.Layer) -> float:
        return self.loss.forward(model.forward(self.x, **self.options)[0], self.target)[0]

    def gradients(self, model: nn.Layer) -> tuple[float, dict[str, Array]]:
        prediction, saved = model.forward(self.x, **self.options)
        value, loss_saved = self.loss.forward(prediction, self.target)
        gy = self.loss.input_grad(loss_saved)
        return value, {**model.weight_grad(gy, saved), INPUT: model.input_grad(gy, saved)}

    def in_float64(self) -> _Run:
        target = self.target.astype(np.float64) if self.target.dtype.kind == "f" else self.target
        return dataclasses.replace(self, x=self.x.astype(np.float64, order="C"), target=target)


def _scan_checks(
    model: nn.Layer, run: _Run, reference: Mapping[str, Array], algorithms: Sequence[Backward] | None,
    memory_limit: int,
) -> Iterator[Check]:  # fmt: skip
    layers = _recurrent_layers(model)
    defaults: tuple[Backward, ...] = ("chunked", "blelloch", "hybrid")
    for name, layer in layers.items():
        for algorithm in defaults if algorithms is None else algorithms:
            subject = f"{algorithm} in {name}" if len(layers) > 1 else algorithm
            others = [other for other in layers.values() if other is not layer]
            with _algorithm(others, "linear"), _algorithm([layer], algorithm, memory_limit):
                try:
                    _, gradients = run.gradients(model)
                except MemoryLimitError as error:
                    if algorithms is not None:
                        raise
                    yield Check("scan", subject, float("nan"), "", error.problem)
                    continue
            yield Check("scan", subject, *_largest(gradients, reference))


def _jacobian_checks(model: nn.Layer, run: _Run, rng: np.random.Generator) -> Iterator[Check]:
    x = run.x
    for name, layer in () if run.options else model.stages():
        y, saved = layer.forward(x)
        if belongs(layer, "jacobian_t") and not layer.jacobian_t.__module__.startswith("sparsebp."):
            gy = backend.namespace(y).asarray(rng.standard_normal(y.shape), dtype=y.dtype)
            got, expected = jacobian_t(layer, x).vjp(gy), layer.input_grad(gy, saved)
            yield Check("jacobian", name or type(layer).__name__, *_largest({INPUT: got}, {INPUT: expected}))
        x = y


def _finite_checks(
    model: nn.Layer, run: _Run, reference: Mapping[str, Array], samples: int, step: float, rng: np.random.Generator
) -> Iterator[Check]:
    double = copy.deepcopy(model).to(dtype=np.float64)
    run = run.in_float64()
    scales = _scales(reference)
    with _algorithm(_recurrent_layers(double).values(), "bp"):
        for name, array in {**double.parameters(), INPUT: run.x}.items():
            flat, gradient = array.reshape(-1), backend.to_host(reference[name]).reshape(-1)
            entries = rng.choice(flat.size, min(samples, flat.size), replace=False)
            differences = [
                abs(float(gradient[i]) - _central_difference(double, run, flat, int(i), step)) for i in entries
            ]
            yield Check(
                "finite", name, float(np.max(differences, initial=0.0)) / scales[name], f"{entries.size} entries"
            )


def _central_difference(model: nn.Layer, run: _Run, flat: Array, index: int, step: float) -> float:
    """Return the slope of the loss along entry `index` of `flat`, a view of a parameter or of x."""
    kept = flat[index].copy()
    values = []
    for sign in (1, -1):
        flat[index] = kept + sign * step
        values.append(run.value(model))
    flat[index] = kept
    return (values[0] - values[1]) / (2 * step)


def _scales(reference: Mapping[str, Array]) -> dict[str, float]:
    """Return the size that each gradient's differences are relative to."""
    largest = {name: float(abs(grad).max()) if grad.size else 0.0 for name, grad in reference.items()}
    floor = max(largest.values()) * 1e-3 or 1.0
    return {name: max(value, floor) for name, value in largest.items()}


def _largest(gradients: Mapping[str, Array], reference: Mapping[str, Array]) -> tuple[float, str]:
    """Return the largest relative difference (NaN counts as largest) and the name where it is."""
    scales = _scales(reference)
    differences = {
        name: float(abs(gradients[name] - grad).max()) / scales[name] for name, grad in reference.items() if grad.size
    }
    name = max(differences, key=lambda n: np.inf if np.isnan(differences[n]) else differences[n])
    return differences[name], name


def _recurrent_layers(model: nn.Layer) -> dict[str, Recurrent]:
    return {name or type(model).__name__: m for name, m in model.modules() if isinstance(m, Recurrent)}


@contextmanager
def _algorithm(layers: Iterable[Recurrent], algorithm: Backward, memory_limit: int | None = None) -> Iterator[None]:
    """Let `layers` run backward by `algorithm` meanwhile, within `memory_limit` unless they have a limit."""
    kept = [(layer, layer.options) for layer in layers]
    try:
        for layer, options in kept:
            limit = memory_limit if options.memory_limit is None else options.memory_limit
            layer.options = dataclasses.replace(options, algorithm=algorithm, memory_limit=limit)
        yield
    finally:
        for layer, options in kept:
            layer.options = options


def self_check(
    rng: Seed = 0, *, device: str = "cpu", progress: Callable[[str, int, int], None] | None = None
) -> dict[str, GradientReport]:
    """Run `check_gradient` on small models of every kind, on ``"cpu"`` or ``"cuda"``; return reports by name.

    Models, data and the checked entries depend on `rng`, a generator or seed. `progress` is called before each model
    with its name, its number from 0, and their count. Takes a few seconds once the kernels are compiled.
    """
    generator = check_generator("rng", rng)
    backend.device_namespace(device)  # before anything is made
    cases = list(_cases(generator))
    reports = {}
    for number, (name, model, loss, x, target, options) in enumerate(cases):
        if progress is not None:
            progress(name, number, len(cases))
        batch = (backend.to_device(array, device) for array in (x, target))
        reports[name] = check_gradient(model.to(device), loss, *batch, rng=generator, **options)
    return reports


def _cases(rng: np.random.Generator) -> Iterator[tuple[str, nn.Layer, Any, Array, Array, dict[str, Any]]]:
    """Yield every model's name, model, loss, input, target and forward options."""
    classify, regress = nn.CrossEntropyLoss(), nn.MSELoss()
    steps, batch = 37, 4
    for dtype in (np.float32, np.float64):
        options: dict[str, Any] = {"dtype": dtype, "rng": rng}
        recurrent: dict[str, Recurrent] = {
            "RNN tanh": nn.RNN(3, 8, **options),
            "RNN relu, 2 layers": nn.RNN(2, 5, num_layers=2, nonlinearity="relu", **options),
            "GRU": nn.GRU(3, 8, **options),
            "GRU, 2 layers, bidirectional": nn.GRU(2, 5, num_layers=2, bidirectional=True, **options),
            "LSTM": nn.LSTM(3, 8, **options),
            "LSTM, proj_size, bidirectional": nn.LSTM(2, 5, proj_size=3, bidirectional=True, **options),
            "MinGRU": nn.MinGRU(3, 8, **options),
            "MinLSTM, 2 layers, bidirectional": nn.MinLSTM(2, 5, num_layers=2, bidirectional=True, **options),
        }  # fmt: skip
        for name, rnn in recurrent.items():
            head = nn.Linear(rnn.directions * rnn.output_size, 3, **options)
            x = rng.standard_normal((steps, batch, rnn.input_size)).astype(dtype)
            key = f"{name}, {np.dtype(dtype).name}"
            yield f"{key}, last state", nn.SequenceClassifier(rnn, head), classify, x, rng.integers(0, 3, batch), {}
            outputs = rng.standard_normal((steps, batch, head.in_features)).astype(dtype)
            lengths = rng.integers(1, steps + 1, batch)
            yield f"{key}, every step, lengths", rnn, regress, x, outputs, {"lengths": lengths}
        chain = nn.Sequential(nn.Linear(6, 5, **options), nn.Tanh(), nn.Linear(5, 3, **options), nn.Sigmoid())
        x, outputs = (rng.standard_normal((batch, n)).astype(dtype) for n in (6, 3))
        yield f"Sequential, {np.dtype(dtype).name}", chain, regress, x, outputs, {}
