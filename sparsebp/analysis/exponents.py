"""Lyapunov exponents: the mean logarithmic growth, a step, along the directions that a chain of Jacobians stretches.

A basis goes through the chain and is made orthonormal at every step by a QR decomposition; the logarithms of the
diagonal of R are what its directions have grown by (Benettin et al. 1980; for recurrent networks Vogt et al., "On
Lyapunov Exponents for RNNs", 2022, Algorithm 1, and Engelken, Wolf & Abbott, "Lyapunov spectra of chaotic recurrent
neural networks", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.analysis.steps import SteppedRun, array_of
from sparsebp.core.arguments import check_generator, check_integer
from sparsebp.core.errors import DTypeError, NonFiniteError, OptionError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Seed

_BLOCKS = 10
"""Stretches of a run whose means say how sure the exponents are."""


@dataclass(frozen=True, eq=False)
class LyapunovSpectrum:
    """The k largest Lyapunov exponents of every sample, in natural logarithms a step.

    Attributes
    ----------
    growth
        (T, B, k) float64: by what the logarithms grew at each of the counted steps.
    states
        Number n of states of the system.
    """

    growth: np.ndarray = field(repr=False)
    states: int

    @property
    def steps(self) -> int:
        """Steps that were counted."""
        return len(self.growth)

    @cached_property
    def exponents(self) -> np.ndarray:
        """(B, k): the means over the steps, the largest first (but for the noise of a finite run).

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
        """The largest exponent's mean over the batch: above zero, nearby states move apart, and the model is chaotic.

        Gradients then explode over time; below zero they vanish, by this factor's exponential a step.
        """
        return float(self.mean[0])

    @property
    def error(self) -> np.ndarray:
        """(B, k): standard errors of the exponents, from the means of ten stretches of the run; NaN for short runs."""
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
            The exponents that were computed do not sum to below zero, so that more are needed.
        """
        sums = np.concatenate(([0.0], np.cumsum(self.mean)))
        whole = int(np.argmax(sums[1:] < 0)) if (sums[1:] < 0).any() else len(self.mean)
        if whole == self.states:
            return float(self.states)
        if whole == len(self.mean):
            raise OptionError(
                "The dimension needs more exponents", expected="as many as sum to below zero",
                got=f"{len(self.mean)} of {self.states}, with the sum {sums[-1]:.3g}", remedy="Pass a larger k",
            )  # fmt: skip
        return whole + float(sums[whole] / abs(self.mean[whole]))


def lyapunov(
    model: Any, x: Any, k: int | None = None, *, h0: Any = None, warm_up: int | None = None, layer: int = 0,
    direction: int = 0, rng: Seed = 0,
) -> LyapunovSpectrum:  # fmt: skip
    """Compute Lyapunov exponents of a recurrent layer along the states that an input leads it through.

    Parameters
    ----------
    model, x, layer, direction
        As for `hidden_jacobians`. A layer without input of its own, an autonomous one, gets zeros; exponents are those
        of this layer's state at the given input, so of stacked layers each has its own.
    k
        How many, the largest first; None: all. A step takes some ``H² k`` operations a sample.
    h0
        Initial states as the recurrent layer's forward takes them; None: drawn from U(-1, 1), as at zero a network
        without bias and input would stay there.
    warm_up
        Steps that are not counted: until the state is on its attractor, and the basis along its directions. None: a
        tenth of them.
    rng
        Generator or seed of the initial states and of the basis.

    Returns
    -------
    LyapunovSpectrum
        ``exponents`` (B, k), and what follows from them.

    Raises
    ------
    OptionError
        The model has no such layer, k is not from 1 to the number of states, or no step is left to count.
    NonFiniteError
        States or weights are not finite.
    ShapeError, DTypeError, DeviceError
        x or h0 does not fit the model.

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
    """Compute Lyapunov exponents of any chain of Jacobians, of a map or a flow of one's own.

    Parameters
    ----------
    jacobians
        The Jacobians of the steps in the order of time, entry [i, j] the derivative of state i after the step with
        respect to state j before it: an array (T, n, n) or (T, B, n, n), or an iterable of (n, n) or (B, n, n) arrays.
    k
        How many, the largest first; None: all.
    warm_up
        Steps that are not counted.
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
        There is nothing to go through, k is not from 1 to n, or no step is left to count.
    DTypeError, DeviceError
        A Jacobian has no real numbers, or is no array.
    NonFiniteError
        An entry is NaN or infinite.
    """
    try:
        steps = iter(jacobians)
    except TypeError as error:
        raise OptionError("There is no chain of Jacobians", got=type(jacobians).__name__,
                          expected="an array (T, n, n) or (T, B, n, n), or an iterable of Jacobians",
                          remedy="Pass the Jacobians of the steps in their order") from error  # fmt: skip
    try:
        first = _matrix(0, next(steps))
    except StopIteration:
        first = np.empty(0)
    if first.ndim not in (2, 3) or first.shape[-1] != first.shape[-2] or first.size == 0:
        raise ShapeError("There is no chain of Jacobians", expected="(n, n) or (B, n, n) for every step, one or more",
                         got=first.shape, remedy="Pass the Jacobians of the steps in their order")  # fmt: skip
    batch = 1 if first.ndim == 2 else first.shape[0]
    return _spectrum(_checked(first, steps), batch, first.shape[-1], k, warm_up, check_generator("rng", rng))


def _matrix(number: int, given: Any) -> np.ndarray:
    """Return a step's Jacobian as an array of float64 on the host."""
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
        raise DTypeError(
            f"The Jacobian of step {number} has no real numbers", expected="an array of floats", remedy="Pass real "
            "arrays; of sparse matrices J.toarray()", got=f"{type(given).__name__} of {found.dtype}",
        )  # fmt: skip
    return found.astype(np.float64, copy=False)


def _checked(first: np.ndarray, rest: Iterator[Any]) -> Iterator[np.ndarray]:
    """Yield the Jacobians as finite (B, n, n) arrays."""
    for number, given in enumerate(chain([first], rest)):
        step = given if number == 0 else _matrix(number, given)
        if step.shape != first.shape:
            raise ShapeError(f"The Jacobian of step {number} has another shape", expected=first.shape, got=step.shape,
                             remedy="Pass Jacobians of one system")  # fmt: skip
        if not np.isfinite(step).all():
            raise NonFiniteError(f"The Jacobian of step {number} is not finite", expected="finite entries",
                                 got="NaN or infinity", remedy="Look at the system's state there")  # fmt: skip
        yield step.reshape(-1, *step.shape[-2:])


def _spectrum(
    jacobians: Iterable[np.ndarray], batch: int, size: int, k: int | None, warm_up: int, rng: np.random.Generator
) -> LyapunovSpectrum:
    """Take an orthonormal basis through the chain; see the module."""
    count = size if k is None else check_integer("k", k, 1, size)
    warm_up = check_integer("warm_up", warm_up, 0)
    basis, _ = np.linalg.qr(rng.standard_normal((batch, size, count)))
    growth = []
    for number, jacobian in enumerate(jacobians):
        basis, triangle = np.linalg.qr(jacobian @ basis)
        if number >= warm_up:
            growth.append(np.abs(np.diagonal(triangle, axis1=1, axis2=2)))
    if not growth:
        raise OptionError("No step is left to count", expected="more steps than warm_up", got=f"warm_up={warm_up}",
                          remedy="Pass a longer input, or a smaller warm_up")  # fmt: skip
    with np.errstate(divide="ignore"):  # a direction that is mapped to zero has the exponent -inf
        return LyapunovSpectrum(np.log(np.stack(growth)), size)
