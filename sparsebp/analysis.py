"""Analysis of recurrent models by their Jacobians: Lyapunov exponents, and how gradients flow back.

Functions of a model raise `OptionError` if it has no such layer or direction, `NonFiniteError` if states or weights are
not finite, and `ShapeError`, `DTypeError` or `DeviceError` if x or h0 does not fit it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Seed, check_choice, check_generator, check_integer
from sparsebp.core.errors import DTypeError, MemoryLimitError, NonFiniteError, OptionError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.jacobians import TransposedJacobian
from sparsebp.jacobians.jacobian import DEFAULT_MEMORY_LIMIT
from sparsebp.nn import Layer, SequenceClassifier, Sequential
from sparsebp.nn.recurrent.cells import CellMath
from sparsebp.nn.recurrent.jacobian import state_jacobians
from sparsebp.nn.recurrent.layers import Recurrent
from sparsebp.nn.recurrent.saved import SavedRun, Weights
from sparsebp.nn.sequential import is_group
from sparsebp.patterns import SparsityPattern

__all__ = ["GradientFlow", "LyapunovSpectrum", "gradient_flow", "hidden_jacobians", "lyapunov", "lyapunov_of"]


Format = Literal["stacked", "csr"]

PART = 1 << 25
"""Bytes of float64 Jacobians that `SteppedRun.parts` makes at a time."""


def hidden_jacobians(
    model: Any, x: Any, h0: Any = None, *, layer: int = 0, direction: int = 0, format: Format = "stacked",
    memory_limit: int | None = None,
) -> Any:  # fmt: skip
    """Return the Jacobian of every step's hidden state with respect to the one before it.

    Parameters
    ----------
    model
        An `RNN`, `GRU` or `LSTM`, or a `SequenceClassifier` or `Sequential` with one inside; or PyTorch's, whose
        weights are copied. It runs in evaluation mode, without dropout.
    x
        The model's input, as its forward takes it: (T, B, input_size) for a recurrent layer, or batch first if it says
        so; (T, input_size) is a batch of one.
    h0
        Initial states as the recurrent layer's forward takes them, a pair (h0, c0) for an LSTM; None for zeros.
    layer, direction
        Numbers of the layer and of the direction; in direction 1 the steps run backwards.
    format
        ``"stacked"``: one dense array. ``"csr"``: the transposed Jacobians on their sparsity pattern.
    memory_limit
        Most bytes of the result; None: 2 GiB.

    Returns
    -------
    numpy.ndarray or list of TransposedJacobian
        (T, B, n, n) in the model's dtype and library: entry [t, b, i, j] is the derivative of state i after step t
        with respect to state j before it, for sample b. n is H, or 2 H for an LSTM: first h, then c. Or, per step, the
        (n, n) transposed Jacobians of all samples.

    Raises
    ------
    MemoryLimitError
        The result would exceed `memory_limit`; raised before it is made.

    See Also
    --------
    lyapunov, gradient_flow : process a few steps at a time, for any length.
    """
    check_choice("format", format, ("stacked", "csr"))
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    run = SteppedRun(model, x, h0, layer, direction)
    entries = run.steps * run.batch * run.values_a_step
    if format == "stacked":
        entries += 2 * run.steps * run.batch * run.size**2  # scattered, and in the order of the result
    need = entries * run.itemsize
    if need > limit:
        raise MemoryLimitError(
            "The Jacobians of all steps would need too much memory", expected=f"at most {limit} bytes",
            got=f"{need} bytes for T = {run.steps}, B = {run.batch}, {run.size} states",
            remedy="Pass fewer steps or samples; lyapunov and gradient_flow need little memory",
        )  # fmt: skip
    values, pattern = run.values(0, run.steps)
    return [TransposedJacobian(pattern, step) for step in values] if format == "csr" else _stacked(values, pattern)


class SteppedRun:
    """One run of a recurrent layer over a sequence, whose Jacobians are made on demand.

    Parameters as for `hidden_jacobians`; `h0` may also be a `numpy.random.Generator`, which draws states from U(-1, 1).
    `steps`, `batch`, `size` are T, B and n; `values_a_step` is the number of entries of one sample's Jacobian.
    """

    def __init__(self, model: Any, x: Any, h0: Any, layer: int, direction: int) -> None:
        own = own_layer(model)
        with _evaluating(own):
            x = array_of(x)
            backend.namespace(x=x)
            recurrent, inputs = _recurrent_of(own, x)
            run = _number(recurrent, layer, direction)
            inputs, h0 = _batched(recurrent, inputs, h0 if isinstance(h0, np.random.Generator) else array_of(h0))
            states = _drawn(recurrent, inputs, h0) if isinstance(h0, np.random.Generator) else h0
            _, saved = recurrent.forward(inputs, states)
        self._cell: CellMath = recurrent.cell
        self._run: SavedRun = saved.runs[run]
        self._k: Any = kernels.get(backend.namespace(self._run.h)).unchecked
        self._weights = Weights.of(recurrent.params, f"_l{layer}" + "_reverse" * direction)
        self.steps, self.batch, _ = self._run.h.shape
        self.itemsize = self._run.h.dtype.itemsize
        _, pattern = self.values(0, 1)
        self.size, self.values_a_step = pattern.shape[0], pattern.nnz

    def values(self, begin: int, end: int) -> tuple[Array, SparsityPattern]:
        """Return the transposed Jacobians of steps `begin` to `end` (exclusive), (t, nnz, B), and their pattern."""
        return state_jacobians(self._k, self._cell, _part(self._run, begin, end), self._weights)

    def parts(self, backwards: bool = False) -> Iterator[np.ndarray]:
        """Yield float64 host Jacobians (t, B, n, n) of a few steps at a time, in time order, or the last part first."""
        length = max(1, PART // max(1, 8 * self.batch * self.size**2))
        begins = range(0, self.steps, length)
        for begin in reversed(begins) if backwards else begins:
            found = _stacked(*self.values(begin, min(begin + length, self.steps)))
            part = backend.to_host(found).astype(np.float64)  # synchronize!
            if not np.isfinite(part).all():
                raise NonFiniteError("The Jacobians are not finite", expected="finite states along the whole sequence",
                                     got=f"NaN or infinity between the steps {begin} and {begin + len(part)}",
                                     remedy="Look at the model's weights and states there")  # fmt: skip
            yield part


def own_layer(model: Any) -> Layer:
    """Return our layer, or a copy of PyTorch's module as one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from sparsebp.torch.sparse import layer_of

        return layer_of(model)
    if not isinstance(model, Layer):
        raise _no_recurrent(type(model).__name__)
    return model


def array_of(value: Any) -> Any:
    """Return a tensor, or a tuple of them, as arrays; anything else as it is."""
    torch = sys.modules.get("torch")
    if isinstance(value, (tuple, list)):  # an LSTM's state
        return tuple(map(array_of, value))
    if torch is not None and isinstance(value, torch.Tensor):
        from sparsebp.interop.torch import from_torch

        return from_torch(value)
    return value


def _recurrent_of(model: Layer, x: Array) -> tuple[Recurrent, Array]:
    """Return the first recurrent layer of a model, and its input."""
    if isinstance(model, Recurrent):
        return model, x
    if isinstance(model, SequenceClassifier):
        return model.rnn, x
    if isinstance(model, Sequential):
        for layer in _layers_of(model):
            if isinstance(layer, (Recurrent, SequenceClassifier)):
                return _recurrent_of(layer, x)
            x = layer(x)
    raise _no_recurrent(type(model).__name__)


def _layers_of(model: Any) -> Iterator[Layer]:
    """Yield the layers of a chain, in order, those of a `Stage` too."""
    for _, layer in model._named() if is_group(model) else model.stages():
        if is_group(layer):
            yield from _layers_of(layer)
        else:
            yield layer


def _no_recurrent(got: str) -> OptionError:
    return OptionError("The model has no recurrent layer", expected="an RNN, GRU or LSTM, ours or PyTorch's, or a "
                       "SequenceClassifier or Sequential with one", got=got)  # fmt: skip


def _number(recurrent: Recurrent, layer: int, direction: int) -> int:
    """Return the number of the run of a layer in a direction."""
    layer = check_integer("layer", layer, 0, recurrent.num_layers - 1)
    return layer * recurrent.directions + check_integer("direction", direction, 0, recurrent.directions - 1)


def _batched(recurrent: Recurrent, x: Any, h0: Any) -> tuple[Any, Any]:
    """Return an unbatched sequence (T, features) and its state as a batch of one; a batch as it is."""
    if getattr(x, "ndim", 3) != 2:
        return x, h0
    if isinstance(h0, tuple):
        h0 = tuple(part[:, None] for part in h0)
    elif hasattr(h0, "ndim"):
        h0 = h0[:, None]
    return (x[None] if recurrent.batch_first else x[:, None]), h0


def _drawn(recurrent: Recurrent, x: Array, rng: np.random.Generator) -> Any:
    """Draw initial states in the range of tanh: a layer without input would stay at 0."""
    if x.ndim != 3:  # the forward will raise
        return None
    weight = recurrent.params["weight_ih_l0"]
    shapes = recurrent.state_shapes(x.shape[0 if recurrent.batch_first else 1])
    states = tuple(
        backend.as_namespace(rng.uniform(-1, 1, shape).astype(weight.dtype), backend.namespace(weight))
        for shape in shapes
    )
    return states if len(states) > 1 else states[0]


@contextlib.contextmanager
def _evaluating(model: Layer) -> Iterator[None]:
    """Run the model without dropout inside the ``with`` block."""
    modes = [(layer, layer.training) for _, layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def _part(saved: SavedRun, begin: int, end: int) -> SavedRun:
    """Return views of steps `begin` to `end` (exclusive) of a run, with the state before them if it is kept."""
    steps = len(saved.x)

    def cut(value: Any) -> Any:
        if value is None or isinstance(value, SavedRun):
            return value if value is None else _part(value, begin, end)
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value[begin : end + len(value) - steps]

    return SavedRun(cut(saved.x), cut(saved.states), cut(saved.gates), inner=cut(saved.inner))


def _stacked(values: Array, pattern: SparsityPattern) -> Array:
    """Return transposed Jacobians (t, nnz, B) as Jacobians (t, B, n, n)."""
    xp, (steps, _, batch), (size, _) = backend.namespace(values), values.shape, pattern.shape
    if pattern.kind != "dense":
        placed = xp.zeros((steps, size * size, batch), dtype=values.dtype)
        placed[:, xp.asarray(pattern.row_of_entry.astype(np.int64) * size + pattern.indices)] = values
        values = placed
    return xp.ascontiguousarray(values.reshape(steps, size, size, batch).transpose(0, 3, 2, 1))


# Lyapunov exponents: the mean logarithmic growth per step along the directions that a chain of Jacobians stretches.
#
# A basis goes through the chain and is orthonormalised at every step by a QR decomposition; the logarithms of the
# diagonal of R are the growth of its directions (Benettin et al. 1980; for recurrent networks Vogt et al., "On Lyapunov
# Exponents for RNNs", 2022, Algorithm 1, and Engelken, Wolf & Abbott, "Lyapunov spectra of chaotic recurrent neural
# networks", 2023).

_BLOCKS = 10
"""Number of segments of a run whose means give the standard errors."""


@dataclass(frozen=True, eq=False)
class LyapunovSpectrum:
    """The k largest Lyapunov exponents of every sample, as natural logarithms per step.

    Attributes
    ----------
    growth
        (T, B, k) float64: growth of the logarithms at each counted step.
    states
        Number n of states.
    """

    growth: np.ndarray = field(repr=False)
    states: int

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return len(self.growth)

    @cached_property
    def exponents(self) -> np.ndarray:
        """(B, k): the means over the steps, largest first (up to the noise of a finite run).

        ``-inf`` where the chain maps a direction to zero, as a ReLU that is off does.
        """
        found: np.ndarray = self.growth.mean(axis=0)
        return found

    @property
    def mean(self) -> np.ndarray:
        """(k,): the exponents' means over the batch."""
        found: np.ndarray = self.exponents.mean(axis=0)
        return found

    @property
    def largest(self) -> float:
        """The largest exponent's mean over the batch. Above zero the model is chaotic, and gradients explode over time;
        below zero they vanish, by the exponential of this number per step.
        """
        return float(self.mean[0])

    @property
    def error(self) -> np.ndarray:
        """(B, k): standard errors of the exponents, from the means of ten segments of the run; NaN for short runs."""
        if self.steps < 2 * _BLOCKS:
            return np.full(self.exponents.shape, np.nan)
        with np.errstate(invalid="ignore"):  # of -inf
            means = np.stack([block.mean(axis=0) for block in np.array_split(self.growth, _BLOCKS)])
            deviation: np.ndarray = means.std(axis=0, ddof=1) / np.sqrt(_BLOCKS)
        return deviation

    def dimension(self) -> float:
        """Return the Kaplan–Yorke dimension of the attractor, from the mean exponents.

        Raises
        ------
        OptionError
            The computed exponents do not sum to below zero, so more are needed.
        """
        sums = np.concatenate(([0.0], np.cumsum(self.mean)))
        whole = int(np.argmax(sums[1:] < 0)) if (sums[1:] < 0).any() else len(self.mean)
        if whole == self.states:
            return float(self.states)
        if whole == len(self.mean):
            raise OptionError("The dimension needs more exponents", expected="as many as sum to below zero",
                              got=f"{len(self.mean)} of {self.states}, with the sum {sums[-1]:.3g}")  # fmt: skip
        return whole + float(sums[whole] / abs(self.mean[whole]))


def lyapunov(
    model: Any, x: Any, k: int | None = None, *, h0: Any = None, warm_up: int | None = None, layer: int = 0,
    direction: int = 0, rng: Seed = 0,
) -> LyapunovSpectrum:  # fmt: skip
    """Compute Lyapunov exponents of a recurrent layer along the states of a given input.

    Parameters
    ----------
    model, x, layer, direction
        As for `hidden_jacobians`. An autonomous layer gets zeros as input. Exponents belong to this layer's state at
        its input, so stacked layers each have their own.
    k
        Number of exponents, largest first; None: all. A step takes about ``H² k`` operations per sample.
    h0
        Initial states as the recurrent layer's forward takes them; None: drawn from U(-1, 1), as a network without bias
        and input would stay at zero.
    warm_up
        Number of first steps that are not counted, while the state and the basis settle. None: a tenth.
    rng
        Generator or seed of the initial states and of the basis.

    Returns
    -------
    LyapunovSpectrum
        ``exponents`` (B, k), and quantities derived from them.

    Raises
    ------
    OptionError
        k is not from 1 to the number of states, or no step is left to count.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> model = sb.nn.RNN(1, 8, bias=False, dtype=np.float64, rng=0)
    >>> sb.lyapunov(model, np.zeros((200, 2, 1)), k=3).exponents.shape
    (2, 3)
    """
    generator = check_generator("rng", rng)
    run = SteppedRun(model, x, generator if h0 is None else h0, layer, direction)
    skipped = run.steps // 10 if warm_up is None else warm_up
    return _spectrum(chain.from_iterable(run.parts()), run.batch, run.size, k, skipped, generator)


def lyapunov_of(jacobians: Any, k: int | None = None, *, warm_up: int = 0, rng: Seed = 0) -> LyapunovSpectrum:
    """Compute Lyapunov exponents of any chain of Jacobians, such as your own map or flow.

    Parameters
    ----------
    jacobians
        The Jacobians of the steps in time order, entry [i, j] the derivative of state i after the step with respect to
        state j before it: an array (T, n, n) or (T, B, n, n), or an iterable of (n, n) or (B, n, n) arrays.
    k
        Number of exponents, largest first; None: all.
    warm_up
        Number of first steps that are not counted.
    rng
        Generator or seed of the basis.

    Returns
    -------
    LyapunovSpectrum
        With B = 1 for Jacobians without a batch.

    Raises
    ------
    ShapeError
        A Jacobian is not square, or has another shape than the first.
    OptionError
        There is no Jacobian, k is not from 1 to n, or no step is left to count.
    DTypeError, DeviceError
        A Jacobian is not real, or not an array.
    NonFiniteError
        An entry is NaN or infinite.
    """
    try:
        steps = iter(jacobians)
    except TypeError as error:
        raise OptionError("There is no chain of Jacobians", got=type(jacobians).__name__,
                          expected="an array (T, n, n) or (T, B, n, n), or an iterable") from error  # fmt: skip
    try:
        first = _matrix(0, next(steps))
    except StopIteration:
        first = np.empty(0)
    if first.ndim not in (2, 3) or first.shape[-1] != first.shape[-2] or first.size == 0:
        raise ShapeError("There is no chain of Jacobians", expected="(n, n) or (B, n, n) for every step, one or more",
                         got=first.shape)  # fmt: skip
    batch = 1 if first.ndim == 2 else first.shape[0]
    return _spectrum(_checked(first, steps), batch, first.shape[-1], k, warm_up, check_generator("rng", rng))


def _matrix(number: int, given: Any) -> np.ndarray:
    """Return a step's Jacobian as a float64 host array."""
    found = given
    if not isinstance(given, (list, tuple, np.generic, float, int)):
        found = array_of(given)
        backend.namespace(**{f"The Jacobian of step {number}": found})
        found = backend.to_host(found)  # synchronize!
    try:
        found = np.asarray(found)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise DTypeError(f"The Jacobian of step {number} has no real numbers", expected="an array of floats",
                         remedy="Pass real arrays; convert sparse matrices with J.toarray()",
                         got=f"{type(given).__name__} of {found.dtype}")  # fmt: skip
    return found.astype(np.float64, copy=False)


def _checked(first: np.ndarray, rest: Iterator[Any]) -> Iterator[np.ndarray]:
    """Yield the Jacobians as finite (B, n, n) arrays."""
    for number, given in enumerate(chain([first], rest)):
        step = given if number == 0 else _matrix(number, given)
        if step.shape != first.shape:
            raise ShapeError(f"The Jacobian of step {number} has another shape", expected=first.shape, got=step.shape)
        if not np.isfinite(step).all():
            raise NonFiniteError(f"The Jacobian of step {number} is not finite", expected="finite entries",
                                 got="NaN or infinity")  # fmt: skip
        yield step.reshape(-1, *step.shape[-2:])


def _spectrum(
    jacobians: Iterable[np.ndarray], batch: int, size: int, k: int | None, warm_up: int, rng: np.random.Generator
) -> LyapunovSpectrum:
    """Propagate an orthonormal basis through the chain; see above."""
    count = size if k is None else check_integer("k", k, 1, size)
    warm_up = check_integer("warm_up", warm_up, 0)
    basis, _ = np.linalg.qr(rng.standard_normal((batch, size, count)))
    growth = []
    for number, jacobian in enumerate(jacobians):
        basis, triangle = np.linalg.qr(jacobian @ basis)
        if number >= warm_up:
            growth.append(np.abs(np.diagonal(triangle, axis1=1, axis2=2)))
    if not growth:
        raise OptionError("No step is left to count", expected="more steps than warm_up", got=f"warm_up={warm_up}")
    with np.errstate(divide="ignore"):  # directions mapped to zero have the exponent -inf
        return LyapunovSpectrum(np.log(np.stack(growth)), size)


# How gradients flow back through time: the norms of products of hidden-state Jacobians, by lag.
#
# The gradient of a loss at step T with respect to an earlier state is a product of Jacobians times the gradient at the
# last one (Bengio et al. 1994; Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, Eq. 5).

Norm = Literal["spectral", "frobenius"]


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """The norms of ∂h[T] / ∂h[T - lag] of a run over T steps.

    Attributes
    ----------
    log_norms
        (T + 1, B) float64: natural logarithms of the norms, for lags 0 to T and every sample; ``-inf`` where no
        gradient arrives.
    norm
        The norm.
    """

    log_norms: np.ndarray
    norm: Norm

    @property
    def rates(self) -> np.ndarray:
        """(T, B): mean logarithmic growth per step, for lags from 1 on; tends to the largest Lyapunov exponent.

        Above zero gradients explode, below zero they vanish.
        """
        lags = np.arange(1, len(self.log_norms))[:, None]
        found: np.ndarray = (self.log_norms[1:] - self.log_norms[0]) / lags
        return found

    def plot(self, ax: Any, label: str | None = None, **options: Any) -> None:
        """Draw the median and range of the norms over the lag, on a logarithmic axis.

        Parameters
        ----------
        ax
            Matplotlib axes.
        label
            Label in the legend.
        **options
            Options of the line for ``ax.plot``.
        """
        decades = self.log_norms / np.log(10)
        shown = np.isfinite(decades).all(axis=1)  # nothing to draw beyond the lag where no gradient arrives
        lags = np.arange(len(decades))[shown]
        (line,) = ax.plot(lags, np.median(decades[shown], axis=1), label=label, **options)
        ax.fill_between(lags, decades[shown].min(axis=1), decades[shown].max(axis=1), alpha=0.2, color=line.get_color())
        ax.set_xlabel("lag, steps back from the last one")
        ax.set_ylabel("log₁₀ of the norm of ∂h[T] / ∂h[T − lag]")


def gradient_flow(
    model: Any, x: Any, h0: Any = None, *, layer: int = 0, direction: int = 0, norm: Norm = "spectral"
) -> GradientFlow:
    """Compute how the gradient at the last hidden state grows or vanishes on its way back in time.

    Parameters
    ----------
    model, x, h0, layer, direction
        As for `hidden_jacobians`.
    norm
        ``"spectral"``: the largest growth of any gradient. ``"frobenius"``: the root mean square growth of a gradient
        of random direction, the Frobenius norm over √n; cheaper.

    Returns
    -------
    GradientFlow
        The norms for every lag and sample.
    """
    check_choice("norm", norm, ("spectral", "frobenius"))
    run = SteppedRun(model, x, h0, layer, direction)
    product = np.broadcast_to(np.eye(run.size), (run.batch, run.size, run.size))
    scale = np.zeros(run.batch)  # logarithm of the factor taken out of the product, which must not over- or underflow
    logs = [scale]
    with np.errstate(divide="ignore"):
        for part in run.parts(backwards=True):
            for jacobian in part[::-1]:
                product = product @ jacobian
                size = np.abs(product).max(axis=(1, 2))
                product = product / np.where(size > 0, size, 1)[:, None, None]
                scale = scale + np.log(size)
                logs.append(scale + np.log(_norm(product, norm)))
    return GradientFlow(np.stack(logs), norm)


def _norm(matrices: np.ndarray, norm: Norm) -> np.ndarray:
    """Return (B,) norms; 1 for the identity."""
    if norm == "frobenius":
        found: np.ndarray = np.sqrt((matrices**2).mean(axis=(1, 2)) * matrices.shape[-1])
    else:
        found = np.linalg.svd(matrices, compute_uv=False)[:, 0]
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
