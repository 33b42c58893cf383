"""Gradient checks: scans against plain back-propagation, that against finite differences and against itself again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.check import BACKWARDS, Array, Backward, Seed, check_choice, check_generator
from sparsebp.core.errors import MemoryLimitError, OptionError, SparseBPError
from sparsebp.core.shortcuts import is_unbatched
from sparsebp.jacobians.jacobian import jacobian_of
from sparsebp.nn.gradients import gradients_of
from sparsebp.nn.recurrent.layers import Recurrent
from sparsebp.nn.recurrent.runs import BackwardOptions
from sparsebp.nn.sequential import ChainBackward, Link
from sparsebp.nn.steps import ValidSteps, seen_by_loss
from sparsebp.train.state import evaluation, training

SCAN_TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
"""Largest difference between algorithms that counts as agreement, relative to the gradient's largest entry."""
FINITE_TOLERANCE = {"float32": 5e-3, "float64": 1e-6}
"""The same against finite differences, which are taken in float64: this is the error of the model's own gradient."""
SCANS: tuple[Backward, ...] = ("linear", "chunked", "blelloch", "hybrid")
"""The algorithms that are checked if none is asked for."""
_AGAINST = {"jacobian": "input_grad", "scan": "sequential", "finite": "finite diff.", "repeat": "itself again"}
INPUT = "input"
"""Name of the gradient at x among those of the parameters."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of a report."""

    kind: str  # "jacobian", "scan", "finite" or "repeat"
    subject: str  # the algorithm and, of several parts, the layer; a layer; the parameter
    difference: float  # the largest, relative; NaN if the check was left out
    where: str  # the gradient with the largest difference
    note: str = ""  # why the check was left out
    mode: str = "evaluation"  # or "training"


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """The result of `check_gradient`; prints as a table."""

    checks: tuple[Check, ...]  # of each mode: Jacobians, each algorithm, each parameter and the input, repetition
    scan_tolerance: float  # largest difference that counts as agreement
    finite_tolerance: float
    loss: float  # on the given data, in evaluation
    not_checked: tuple[str, ...] = ()  # what was left out in addition to the rows with a note, and why

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
        found = {name: getattr(self, name) for name in names}
        return found | {"checks": checks, "not_checked": list(self.not_checked)}

    def __str__(self) -> str:
        rows = [("mode", "against", "checked", "difference", "largest in", "")]
        for check in self.checks:
            number = "left out" if check.note else f"{check.difference:.2e}"
            verdict = check.note or ("ok" if check.difference <= self._tolerance(check.kind) else "DIFFERS")
            rows.append((check.mode, _AGAINST[check.kind], check.subject, number, check.where, verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"not checked: {what}" for what in self.not_checked]
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
        return self.scan_tolerance if kind in ("repeat", "scan") else self.finite_tolerance


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
    """Check a model's gradients in four ways, in evaluation and in training.

    For every recurrent layer and every chain of layers (`Sequential`), each scan algorithm is compared with plain
    back-propagation. Layers that have a `jacobian_t` have it compared with their `input_grad`. Plain back-propagation
    is compared with central differences of a float64 copy of the model, at `samples` entries of x and of every
    parameter. And every layer must give the same gradients again after another forward and another backward, and write
    to none of the arrays that it is given or has returned.

    In training all forwards draw the same random numbers, for dropout say, and statistics are the batch's. It is not
    checked again if loss and gradients are bitwise those in evaluation. The model is left as it was.

    Parameters
    ----------
    model, loss
        The model and a loss of `sparsebp.nn`.
    x, target
        A batch. Of integers (word numbers) no gradient is taken.
    algorithms
        Scan algorithms to check. None: all of `SCANS`, except those that need more than `memory_limit`; the report
        says so.
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
        of all, so that rounding noise of an array without influence does not count. `not_checked` says what was left
        out, and why.

    Raises
    ------
    OptionError
        An algorithm is unknown, or two forwards in evaluation differ.
    ShapeError, DTypeError
        The gradient at the input of the model, or of a layer, is not of the input's shape and dtype.
    MemoryLimitError
        One of `algorithms` needs more memory than that.
    """
    for algorithm in algorithms or ():
        check_choice("backward algorithm", algorithm, BACKWARDS)
    backend.namespace(x=x, target=target)
    generator, dtype = check_generator("rng", rng), np.dtype(model.dtype or x.dtype).name
    kept = _Held(model)
    run = _Run(loss, x, target, forward_options, kept)
    left_out = [] if x.dtype.kind == "f" else ["the gradient at x, which is integers"]
    left_out += _strays(model)
    checks: list[Check] = []
    found: dict[str, tuple[float, dict[str, Array]]] = {}
    modes: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
        "evaluation": evaluation,
        "training": training,
    }
    try:
        for mode, switched in modes.items():
            with switched(model), _algorithm(_choosing(model).values(), "bp"):
                try:
                    repeated = _repeat_check(model, run, generator)
                    value, reference = found[mode] = run.gradients(model)
                    if run.value(model) != value and not np.isnan(value):
                        raise OptionError(f"Two forwards in {mode} differ", got="other numbers in each",
                                          expected="draws from the generators of the layers alone")  # fmt: skip
                except SparseBPError as error:
                    if mode == "evaluation":
                        raise
                    left_out.append(f"training: {type(error).__name__}: {error.problem}")
                    continue
            if mode == "training" and _same(found["evaluation"], found["training"]):
                left_out.append("training: loss and gradients are bitwise those in evaluation")
                continue
            with switched(model), _algorithm(_choosing(model).values(), "bp"):
                rows = [*_jacobian_checks(model, run, generator, memory_limit)]
                rows += _scan_checks(model, run, reference, algorithms, memory_limit)
                if samples > 0:
                    rows += _finite_checks(model, run, reference, samples, step, generator)
            checks += [dataclasses.replace(row, mode=mode) for row in (*rows, repeated)]
    finally:
        kept.restore()
    if samples <= 0:
        left_out.append("finite differences: samples=0")
    return GradientReport(
        tuple(checks),
        SCAN_TOLERANCE[dtype] if scan_tolerance is None else scan_tolerance,
        FINITE_TOLERANCE[dtype] if finite_tolerance is None else finite_tolerance,
        found["evaluation"][0],
        tuple(left_out),
    )


class _Held:
    """The random generators and the buffers of a model as they are now."""

    def __init__(self, model: nn.Layer) -> None:
        self._buffers = [(array, array.copy()) for _, layer in model.modules() for array in layer.buffers.values()]
        self._states = [(drawn, drawn.bit_generator.state) for drawn in model.generators().values()]

    def restore(self) -> None:
        """Set them again."""
        for array, values in self._buffers:
            array[...] = values
        for generator, state in self._states:
            generator.bit_generator.state = state

    @property
    def drawn(self) -> bool:
        """Whether a forward has drawn since."""
        return any(str(generator.bit_generator.state) != str(state) for generator, state in self._states)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The loss and the data of a check, and what each forward begins with."""

    loss: Any
    x: Array
    target: Array
    options: Mapping[str, Any]
    held: _Held

    def forward(self, model: nn.Layer) -> tuple[Array, Any]:
        self.held.restore()
        y, saved = model.forward(self.x.copy(), **self.options)  # a faulty layer may write to it
        return y, saved

    def value(self, model: nn.Layer) -> float:
        return self.loss.forward(*self._seen(model, self.forward(model)[0])[:2])[0]

    def gradients(self, model: nn.Layer) -> tuple[float, dict[str, Array]]:
        prediction, saved = self.forward(model)
        seen, target, steps = self._seen(model, prediction)
        value, loss_saved = self.loss.forward(seen, target)
        gy = self.loss.input_grad(loss_saved)
        gy = gy if steps is None else steps.spread(gy)
        return value, _gradients(type(model).__name__, model, gy, saved, self.x)

    def of_another_batch(self) -> _Run:
        """Return the same with other values of x."""
        return dataclasses.replace(self, x=self.x / 2 if self.x.dtype.kind == "f" else self.x[::-1])

    def _seen(self, model: nn.Layer, prediction: Array) -> tuple[Array, Array, ValidSteps | None]:
        return seen_by_loss(model, self.loss, self.x, prediction, self.target, self.options.get("lengths"))

    def in_float64(self, model: nn.Layer) -> _Run:
        x, target = (
            array.astype(np.float64, order="C") if array.dtype.kind == "f" else array for array in (self.x, self.target)
        )
        return dataclasses.replace(self, x=x, target=target, held=_Held(model))


def _gradients(name: str, layer: nn.Layer, gy: Array, saved: Any, x: Array) -> dict[str, Array]:
    """Return the gradients at a layer's parameters by name, and at its input x."""
    gradients = gradients_of(layer, gy, saved)
    found = dict(gradients.weight_grad())
    if x.dtype.kind == "f":
        found[INPUT] = gradients.input_grad()
        what = f"the input gradient of {name}"
        backend.namespace(**{what: found[INPUT]})
        backend.check_array(what, found[INPUT], dtype=x.dtype, shape=x.shape, contiguous=False)
    return found


def _strays(model: nn.Layer) -> Iterator[str]:
    """Say which attributes hold layers that are no parts of the model."""
    layers = list(model.modules())
    parts = {id(layer) for _, layer in layers}
    for name, layer in layers:
        for attribute, value in vars(layer).items():
            held = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            if any(isinstance(one, nn.Layer) and id(one) not in parts for one in held):
                yield f"layers in {'.'.join(filter(None, (name, attribute)))}: no children, not trained and not saved"


def _same(one: tuple[float, Mapping[str, Array]], other: tuple[float, Mapping[str, Array]]) -> bool:
    """Whether loss and gradients are equal, to the last bit."""
    equal = (bool((grad == other[1][name]).all()) for name, grad in one[1].items())
    return one[0] == other[0] and all(equal)


def _scan_checks(
    model: nn.Layer, run: _Run, reference: Mapping[str, Array], algorithms: Sequence[Backward] | None,
    memory_limit: int,
) -> Iterator[Check]:  # fmt: skip
    layers: dict[str, Any] = _choosing(model)
    for name, layer in layers.items():
        for algorithm in SCANS if algorithms is None else algorithms:
            subject = f"{algorithm} in {name}" if len(layers) > 1 else algorithm
            with _algorithm([layer], algorithm, memory_limit):
                try:
                    _, gradients = run.gradients(model)
                except MemoryLimitError as error:
                    if algorithms is not None:
                        raise
                    yield Check("scan", subject, float("nan"), "", error.problem)
                    continue
                chain = getattr(layer, "_backward", None)
            if isinstance(chain, _Chain) and not any(chain.scanned):
                subject = f"scans in {name}" if len(layers) > 1 else "scans"
                note = "there is nothing to scan: no layers in a row that map each sample by itself"
                yield Check("scan", subject, float("nan"), "", note)
                break
            yield Check("scan", subject, *_largest(gradients, reference))


def _is_ours(written: Any) -> bool:
    """Whether a class or a method is this package's; its layers of layers are checked by their children."""
    return str(written.__module__).startswith("sparsebp.")


def _jacobian_checks(model: nn.Layer, run: _Run, rng: np.random.Generator, memory_limit: int) -> Iterator[Check]:
    """Yield a check of every `jacobian_t` of a user's class, then one of all others."""
    ours: dict[str, tuple[Array, Array]] = {}
    for name, layer, x, y, saved, _ in _forwards(model, run):
        if "jacobian_t" not in layer.valid_shortcuts:
            continue
        own = not _is_ours(layer.jacobian_t)
        if (layer.children and not own) or x.dtype.kind != "f":
            continue
        if Link(layer, saved, x.shape, y.shape).couples_samples() or is_unbatched(layer, saved, x.shape):
            continue  # no sample has one
        if layer.input_grad_work(x.shape, saved).entries * x.dtype.itemsize > memory_limit:
            yield Check("jacobian", name, float("nan"), "", "it would need more than memory_limit")
            continue
        try:
            jacobian = jacobian_of(layer, saved, x.shape, y.shape, y)
        except SparseBPError as error:
            kept = error.problem if isinstance(error, MemoryLimitError) else ""
            yield Check("jacobian", name, float("nan"), error.problem, kept)
            continue
        gy = backend.namespace(y).asarray(rng.standard_normal(y.shape), dtype=y.dtype)
        pair = jacobian.vjp(gy), gradients_of(layer, gy, saved).input_grad()
        if own:
            yield Check("jacobian", name, *_largest({INPUT: pair[0]}, {INPUT: pair[1]}))
        else:
            ours[name] = pair
    if ours:
        got, expected = ({name: pair[side] for name, pair in ours.items()} for side in (0, 1))
        yield Check("jacobian", f"{len(ours)} of sparsebp's layers", *_largest(got, expected, alike=False))


def _repeat_check(model: nn.Layer, run: _Run, rng: np.random.Generator) -> Check:
    """Check that the layers keep to their rules: values are saved and returned for good, arguments are only read."""
    got: dict[str, Array] = {}
    expected: dict[str, Array] = {}

    def compare(what: str, now: Array, then: Array) -> None:
        got[what], expected[what] = now.copy(), then

    forwards = [seen for seen in _forwards(model, run) if not (seen[1].children and _is_ours(type(seen[1])))]
    first: list[tuple[Array, dict[str, Array], dict[str, Array]]] = []
    for name, layer, x, y, saved, before in forwards:
        compare(f"{name}: x", x, before)
        gy = backend.namespace(y).asarray(rng.standard_normal(y.shape), dtype=y.dtype)
        grads = _gradients(name, layer, gy.copy(), saved, x)
        first.append((gy, grads, {key: grad.copy() for key, grad in grads.items()}))
    outputs = [y.copy() for _, _, _, y, _, _ in forwards]
    run.of_another_batch().forward(model)
    for (name, _, _, y, _, _), before in zip(forwards, outputs, strict=True):
        compare(f"{name}: y", y, before)
    for (name, layer, x, _, saved, _), (gy, grads, kept) in zip(forwards, first, strict=True):
        _gradients(name, layer, gy / 2, saved, x)
        for key, grad in kept.items():
            compare(f"{name}: {key}, returned before", grads[key], grad)
        given = gy.copy()
        again = _gradients(name, layer, given, saved, x)
        compare(f"{name}: gy", given, gy)
        for key, grad in kept.items():
            compare(f"{name}: {key}", again[key], grad)
    return Check("repeat", f"{len(forwards)} layer{'s' * (len(forwards) != 1)}", *_largest(got, expected, alike=False))


def _forwards(model: nn.Layer, run: _Run) -> list[tuple[str, nn.Layer, Array, Array, Any, Array]]:
    """Return the layers that a forward runs, with their last input, output, saved value, and a copy of the input."""
    seen: dict[int, tuple[str, nn.Layer, Array, Array, Any, Array]] = {}
    layers = {id(layer): (name, layer) for name, layer in reversed([*model.modules()])}

    def watched(name: str, layer: nn.Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def watching(x: Array, *more: Any, **options: Any) -> Any:
            before = x.copy()
            y, saved = forward(x, *more, **options)
            seen[id(layer)] = name or type(layer).__name__, layer, x, y, saved, before
            return y, saved

        return watching

    before = [(layer, vars(layer).get("forward")) for _, layer in layers.values()]
    for name, layer in layers.values():
        layer.forward = watched(name, layer, layer.forward)  # type: ignore[method-assign]
    try:
        run.forward(model)
    finally:
        for layer, own in before:
            del layer.forward
            if own is not None:
                layer.forward = own  # type: ignore[method-assign]
    return list(seen.values())


def _finite_checks(
    model: nn.Layer, run: _Run, reference: Mapping[str, Array], samples: int, step: float, rng: np.random.Generator
) -> Iterator[Check]:
    run.forward(model)
    drawn = run.held.drawn
    run.held.restore()
    double = copy.deepcopy(model).to(dtype=np.float64)
    of_double = run.in_float64(double)
    with _algorithm(_choosing(double).values(), "bp"):
        if drawn and model.dtype != np.float64:  # float64 draws other numbers
            _, reference = of_double.gradients(double)
        scales = _scales(reference)
        arrays = double.parameters()
        for name in reference:
            array = of_double.x if name == INPUT else arrays[name]
            flat, gradient = array.reshape(-1), backend.to_host(reference[name]).reshape(-1)
            entries = rng.choice(flat.size, min(samples, flat.size), replace=False)
            differences = [
                abs(float(gradient[i]) - _central_difference(double, of_double, flat, int(i), step)) for i in entries
            ]
            difference = float(np.max(differences, initial=0.0)) / scales[name]
            yield Check("finite", name, difference, f"{entries.size} of {flat.size} entries")


def _central_difference(model: nn.Layer, run: _Run, flat: Array, index: int, step: float) -> float:
    """Return the slope of the loss along entry `index` of `flat`, a view of a parameter or of x."""
    kept = flat[index].copy()
    values = []
    for sign in (1, -1):
        flat[index] = kept + sign * step
        values.append(run.value(model))
    flat[index] = kept
    return (values[0] - values[1]) / (2 * step)


def _scales(reference: Mapping[str, Array], *, alike: bool = True) -> dict[str, float]:
    """Return the size that each gradient's differences are relative to."""
    largest = {name: float(abs(grad).max()) if grad.size else 0.0 for name, grad in reference.items()}
    floor = (max(largest.values()) * 1e-3 if alike else 0.0) or 1.0
    return {name: max(value, floor) if alike else value or floor for name, value in largest.items()}


def _largest(
    gradients: Mapping[str, Array], reference: Mapping[str, Array], *, alike: bool = True
) -> tuple[float, str]:
    """Return the largest relative difference (NaN counts as largest) and the name where it is."""
    # alike: whether they are gradients of one loss, whose sizes can be compared.
    scales = _scales(reference, alike=alike)
    differences = {
        name: float(abs(gradients[name] - grad).max()) / scales[name] for name, grad in reference.items() if grad.size
    }
    name = max(differences, key=lambda n: np.inf if np.isnan(differences[n]) else differences[n])
    return differences[name], name


def _choosing(model: nn.Layer) -> dict[str, Any]:
    """Return the parts that can go back by several algorithms, by name: recurrent layers, and chains of layers."""
    found: dict[str, Any] = {}
    inner: set[int] = set()  # links of a chain around them
    for name, layer in model.modules():
        if isinstance(layer, nn.Sequential):
            inner.update(id(child) for child in layer.children.values() if not isinstance(child, nn.Stage))
        if isinstance(layer, Recurrent) or (isinstance(layer, nn.Sequential) and id(layer) not in inner):
            found[name or type(model).__name__] = layer
    return found


class _Chain(ChainBackward):
    """The way back of a chain that notes its scans."""

    def __init__(self, options: BackwardOptions) -> None:
        super().__init__(options)
        self.scanned: list[int] = []

    def _scan(self, segment: Sequence[Link], gy: Array) -> list[Array]:
        self.scanned.append(len(segment))
        return super()._scan(segment, gy)


@contextlib.contextmanager
def _algorithm(layers: Iterable[Any], algorithm: Backward, memory_limit: int | None = None) -> Iterator[None]:
    """Let `layers` run backward by `algorithm` meanwhile, within `memory_limit` unless they have a limit."""
    kept: list[tuple[Any, str, Any]] = []
    try:
        for layer in layers:
            chain = isinstance(layer, nn.Sequential)
            place = "_backward" if chain else "options"
            before = getattr(layer, place)
            options = before.options if chain else before
            limit = memory_limit if options.memory_limit is None else options.memory_limit
            levels = options.up_levels if algorithm == "hybrid" else None
            chunks = options.chunks if algorithm == "chunked" else None
            new = BackwardOptions(algorithm, levels, chunks, options.workers, limit)
            kept.append((layer, place, before))
            setattr(layer, place, _Chain(new) if chain else new)
        yield
    finally:
        for layer, place, before in reversed(kept):
            setattr(layer, place, before)


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
        images = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, **options), nn.BatchNorm2d(3, dtype=dtype), nn.ReLU(),
            nn.Residual(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, **options), nn.BatchNorm2d(3, dtype=dtype))),
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2, rng=rng), nn.Linear(12, 3, **options),
        )  # fmt: skip
        x = rng.standard_normal((batch, 2, 4, 4)).astype(dtype)
        yield f"convolutions, BatchNorm2d, Dropout, {np.dtype(dtype).name}", images, classify, x, outputs.argmax(1), {}
        encoder = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, **options)
        chain = nn.Sequential(encoder, nn.MeanOverSteps(batch_first=True), nn.Linear(4, 3, **options))
        x = rng.standard_normal((batch, 3, 4)).astype(dtype)
        yield f"TransformerEncoderLayer, {np.dtype(dtype).name}", chain, regress, x, outputs, {}
