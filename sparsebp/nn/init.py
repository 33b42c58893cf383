"""Initial values other than PyTorch's defaults, and random numbers that do not depend on the number of replicas."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.absent import write
from sparsebp.core.check import Array, Seed, check_generator, check_integer
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.conv import Conv
from sparsebp.nn.linear import Linear, Prunable


def he_convolutions(model: Any, rng: Seed = None) -> None:
    """Draw the weights of all convolutions of `model` anew from N(0, 2 / fan_in), in place, and set their biases to 0.

    That keeps the signal's size through ReLUs, also in deep networks without normalisation (He et al., "Delving Deep
    into Rectifiers", 2015, Eq. 10). The model lives on the host.
    """
    _draw_anew(model, Conv, lambda fan_in: math.sqrt(2 / fan_in), rng)


def lecun_linear(model: Any, rng: Seed = None) -> None:
    """Draw the weights of all linear layers of `model` anew from N(0, 1 / fan_in), in place, and set their biases to 0.

    With `SELU` that keeps the signal's mean and variance through many layers (Klambauer et al., "Self-normalizing
    neural networks", 2017, §2). The model lives on the host.
    """
    _draw_anew(model, Linear, lambda fan_in: 1 / math.sqrt(fan_in), rng)


def _draw_anew(model: Any, kind: type[Prunable], deviation: Callable[[int], float], rng: Seed) -> None:
    rng = check_generator("rng", rng)
    for _, layer in model.modules():
        if isinstance(layer, kind):
            weight = layer.params["weight"]
            draw = partial(_normal, deviation=deviation(math.prod(weight.shape[1:])), shape=weight.shape)
            write(weight, draw, rng)
            if "bias" in layer.params:
                write(layer.params["bias"], lambda _: 0)


def _normal(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(0.0, deviation, shape)


def chrono_update_gate(weights: dict[str, Array], hidden_size: int, max_length: int, rng: Seed = None) -> None:
    """Chrono-initialise a GRU's update-gate biases in place, so that its memory spans up to `max_length` steps.

    The update gate z multiplies the old state, so its time constant is ``1 / (1 - z)``. With ``b_z = log(u)``,
    ``u ~ U(1, max_length - 1)``, the units' time constants are spread uniformly over the lengths that matter
    (Tallec & Ollivier, "Can recurrent neural networks warp time?", ICLR 2018, chrono initialisation; there it is stated
    for the LSTM's forget gate, whose part z plays here).

    Parameters
    ----------
    weights
        `GRU.parameters()` (or a model's that contains one): every pair ``*bias_ih*``, ``*bias_hh*`` of length
        3·hidden_size is set. The sum of the two counts: ``bias_ih`` gets the value, ``bias_hh`` zero.
    hidden_size
        Of the GRU.
    max_length
        The longest dependency expected, in steps; at least 3.
    rng
        Generator or seed.

    Raises
    ------
    OptionError
        `max_length` is below 3, or no bias of that length is there.
    """
    _chrono("GRU", 3, {1: 1}, weights, hidden_size, max_length, rng)  # rows r, z, n


def chrono_forget_gate(weights: dict[str, Array], hidden_size: int, max_length: int, rng: Seed = None) -> None:
    """Chrono-initialise an LSTM's gate biases in place, so that its memory spans up to `max_length` steps.

    ``b_f = log(u)``, ``u ~ U(1, max_length - 1)``, and ``b_i = -b_f`` (Tallec & Ollivier, "Can recurrent neural
    networks warp time?", ICLR 2018, chrono initialisation).

    Parameters
    ----------
    weights
        `LSTM.parameters()` (or a model's that contains one): every pair ``*bias_ih*``, ``*bias_hh*`` of length
        4·hidden_size is set. The sum of the two counts: ``bias_ih`` gets the values, ``bias_hh`` zero.
    hidden_size
        Of the LSTM.
    max_length
        The longest dependency expected, in steps; at least 3.
    rng
        Generator or seed.
    """
    _chrono("LSTM", 4, {1: 1, 0: -1}, weights, hidden_size, max_length, rng)  # rows i, f, g, o


def chrono_min_gru(weights: dict[str, Array], hidden_size: int, max_length: int, rng: Seed = None) -> None:
    """Chrono-initialise the gate biases of a `MinGRU` in place, so that its memory spans up to `max_length` steps.

    ``b_z = -log(u)``, ``u ~ U(1, max_length - 1)``: as `chrono_update_gate`, but there z multiplies the old state, and
    here the new value. Arguments and errors are the same; ``bias_ih_l{k}`` has the length 2·hidden_size.
    """
    _chrono("MinGRU", 2, {0: -1}, weights, hidden_size, max_length, rng)  # rows z, v


def chrono_min_lstm(weights: dict[str, Array], hidden_size: int, max_length: int, rng: Seed = None) -> None:
    """Chrono-initialise the gate biases of a `MinLSTM` in place, as `chrono_forget_gate` does those of an LSTM.

    Arguments and errors are the same; ``bias_ih_l{k}`` has the length 3·hidden_size.
    """
    _chrono("MinLSTM", 3, {1: 1, 0: -1}, weights, hidden_size, max_length, rng)  # rows i, f, v


def _chrono(
    kind: str, gates: int, signs: dict[int, int], weights: dict[str, Array], hidden_size: int, max_length: int,
    rng: Seed,
) -> None:  # fmt: skip
    """Give the biases of the gates in `signs` the logarithm of time constants, times their signs."""
    hidden_size, max_length = check_integer("hidden_size", hidden_size, 1), check_integer("max_length", max_length, 3)
    rng = check_generator("rng", rng)
    names = [n for n, a in weights.items() if "bias_ih" in n and a.shape == (gates * hidden_size,)]
    if not names:
        raise OptionError(f"No {kind} bias was found", expected=f"parameters bias_ih… of length {gates * hidden_size}",
                          got=", ".join(weights) or "no parameters",
                          remedy=f"Build the {kind} with bias=True")  # fmt: skip
    for name in names:
        values = np.log(rng.uniform(1.0, max_length - 1.0, hidden_size)).astype(weights[name].dtype)
        for number, sign in signs.items():
            gate = slice(number * hidden_size, (number + 1) * hidden_size)
            gate_view = weights[name][gate]
            gate_view[...] = backend.namespace(gate_view).asarray(sign * values)
            if (other := name.replace("bias_ih", "bias_hh")) in weights:
                weights[other][gate] = 0


# Random numbers of layers: a replica, which sees some of the samples, uses the rows that one worker would draw for
# them.


class Rows(NamedTuple):
    """The samples that a forward sees: `own` of `total`, from number `begin` on."""

    begin: int
    own: int
    total: int


class _Within(threading.local):
    rows: Callable[[], Rows] | None = None
    drawn: set[int] = set()  # noqa: RUF012 (replaced, never changed)


_within = _Within()


@contextlib.contextmanager
def rows_of(rows: Callable[[], Rows]) -> Iterator[set[int]]:
    """Let forwards of this thread draw the rows of a larger batch; yields the identities of generators that did."""
    # `rows` is called when a layer draws: a model that draws nothing need not know.
    before = _within.rows, _within.drawn
    _within.rows, _within.drawn = rows, set()
    try:
        yield _within.drawn
    finally:
        _within.rows, _within.drawn = before


def draw_rows(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    make: Callable[[np.random.Generator, tuple[int, ...]], Array],
    axis: int | None = 0,
) -> Array:
    """Return ``make(generator, shape)``; on one of several replicas, its rows of the array one worker would draw.

    A replica draws for the batches of all replicas, so that all generators stay in step, and uses its own rows. A
    custom layer that draws by itself would draw the same numbers for the samples of every replica.

    Parameters
    ----------
    generator
        The layer's ``generator``.
    shape
        The shape for this call's samples.
    make
        Draws an array of a shape.
    axis
        The axis of `shape` with the samples, or with equally many entries for each. None: the numbers do not depend on
        the batch, as for a mask of weights.

    Raises
    ------
    ShapeError
        On a replica: the axis has no equal number of entries for each sample.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> rng = np.random.default_rng(0)
    >>> sb.nn.draw_rows(rng, (2, 3), np.random.Generator.standard_normal).shape
    (2, 3)
    """
    if _within.rows is None:
        return make(generator, shape)
    _within.drawn.add(id(generator))
    if axis is None:
        return make(generator, shape)
    axis = check_integer("axis", axis, -len(shape), len(shape) - 1) % len(shape)
    begin, own, total = _within.rows()
    each, rest = divmod(shape[axis], own)
    if rest:
        raise ShapeError(
            "Random numbers have no rows for each sample", expected=f"a multiple of {own} samples on axis {axis}",
            got=shape, remedy="Pass the axis of the samples, or None for numbers that do not depend on the batch"
        )  # fmt: skip
    whole = make(generator, (*shape[:axis], total * each, *shape[axis + 1 :]))
    at: tuple[Any, ...] = (slice(None),) * axis + (slice(begin * each, (begin + own) * each),)
    return backend.namespace(whole).ascontiguousarray(whole[at])
