"""Checks of arguments other than arrays, each of which returns Python's own value; types that many modules use."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from sparsebp.core.errors import OptionError

T = TypeVar("T")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an integer, Python's or NumPy's, from `least` to `most`; bools are rejected."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and least <= number and (most is None or number <= most):
        return number
    problem = "is not an integer" if number is None else f"is too {'small' if number < least else 'large'}"
    expected = f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}"
    raise OptionError(f"{name} {problem}", expected=expected, got=shown(value))


def check_flag(name: str, value: Any) -> bool:
    """Return a bool; other truthy and falsy values are rejected."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"{name} is not a bool", expected="True or False", got=shown(value))
    return bool(value)


def check_number(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, *, finite: bool = True
) -> float:
    """Return a real number from `least` to `most`, never NaN, and finite unless `finite` is False."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if least <= number <= most and (math.isfinite(number) or not finite):
        return number
    below = "below " if float(f"{most:g}") > most else ""  # the float before a round number
    bounds = f" from {least:g} to {below}{most:g}" if math.isfinite(most) else f", {least:g} or more"
    raise OptionError(f"{name} is out of range" if real else f"{name} is not a number",
                      expected=("a finite number" if finite else "a number") + (bounds if math.isfinite(least) else ""),
                      got=shown(value))  # fmt: skip


def check_positive(name: str, value: Any, *, finite: bool = True) -> float:
    """Return a real number above 0."""
    if (number := check_number(name, value, finite=finite)) <= 0:
        raise OptionError(f"{name} is not positive", expected="more than 0", got=value)
    return number


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """Return an option that is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        remedy = did_you_mean(value, choices) if isinstance(value, str) else None
        raise OptionError(f"Unknown {name}", expected=" or ".join(map(repr, choices)), got=shown(value), remedy=remedy)
    return value


def did_you_mean(name: str, choices: Collection[Any]) -> str | None:
    """Return the question whether one of the choices with the nearest spelling is meant; None if none is near."""
    low = name.lower()
    near = [low] if low in choices else difflib.get_close_matches(low, choices)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else None


def check_scan_options(argument: str, algorithm: str, up_levels: int | None, chunks: int | None) -> None:
    """Check that `up_levels` and `chunks` are given to their own scan alone; `argument` names the algorithm's."""
    for name, value, owner in (("up_levels", up_levels, "hybrid"), ("chunks", chunks, "chunked")):
        if value is not None and algorithm != owner:
            raise OptionError(f"{name} belongs to the {owner} scan alone", expected=f"{argument}={owner!r}",
                              got=f"{argument}={algorithm!r}")  # fmt: skip


def check_default(name: str, value: Any, default: Any) -> None:
    """Check that an argument which only exists to match PyTorch's signature has its default."""
    if not (value is default or (type(value) is type(default) and value == default)):
        raise OptionError(f"{name} is not supported", expected=f"{name}={default!r}", got=shown(value),
                          remedy="See 'Beside torch.nn' in the reference")  # fmt: skip


def check_sequence(name: str, value: Any, of: str) -> list[Any]:
    """Return the entries of a sequence; strings are rejected."""
    try:
        if not isinstance(value, (str, bytes)):
            return list(value)
    except TypeError:
        pass
    raise OptionError(f"{name} is not a sequence", expected=f"a sequence of {of}", got=shown(value))


def check_generator(name: str, rng: Any) -> np.random.Generator:
    """Return a generator, or a new one from a seed; None means fresh entropy."""
    if rng is None or isinstance(rng, np.random.Generator):
        return np.random.default_rng(rng)
    return np.random.default_rng(check_integer(name, rng, 0))


def shown(value: Any) -> str:
    """Return a short text of a value for messages, even where ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "…"


# Literals and aliases shared by several modules.

Array: TypeAlias = Any
"""A NumPy or CuPy array; `sparsebp.core.backend` tells them apart."""

PatternKind: TypeAlias = Literal["identity", "diagonal", "selection", "dense", "general"]
ScanAlgorithm: TypeAlias = Literal["auto", "linear", "blelloch", "hybrid", "chunked"]
SCAN_ALGORITHMS: tuple[ScanAlgorithm, ...] = ("auto", "linear", "blelloch", "hybrid", "chunked")
Backward: TypeAlias = Literal["auto", "bp", "linear", "blelloch", "hybrid", "chunked"]
BACKWARDS: tuple[Backward, ...] = ("auto", "bp", "linear", "blelloch", "hybrid", "chunked")
"""Backward of a chain of layers or time steps: plain back-propagation, or a scan by that algorithm."""
Nonlinearity: TypeAlias = Literal["tanh", "relu"]
SlopeFunction: TypeAlias = Literal["given", "relu", "tanh", "sigmoid"]
SLOPES: tuple[SlopeFunction, ...] = ("given", "relu", "tanh", "sigmoid")
"""Input of a slope: itself, or y = f(x) for these f."""
Function: TypeAlias = Literal[
    "gelu", "gelu_tanh", "tanh", "sigmoid", "silu", "log_sigmoid", "softplus", "mish", "elu", "leaky_relu",
    "hard_sigmoid", "hard_swish", "softsign",
]  # fmt: skip
FUNCTIONS: tuple[Function, ...] = get_args(Function)
"""Functions of single elements whose kernels there are."""
LossFunction: TypeAlias = Literal["squared", "distance", "smooth_l1", "huber", "bce_with_logits"]
LOSS_FUNCTIONS: tuple[LossFunction, ...] = get_args(LossFunction)
"""Losses of single elements whose kernels there are."""
UpdateRule: TypeAlias = Literal["sgd", "adam", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop"]
"""Update rule of an optimizer's kernel."""
ProductFactors: TypeAlias = tuple[Array, Array]
"""Two matrices that stand for their product."""
Seed: TypeAlias = int | np.random.Generator | None
"""``rng=``: a `numpy.random.Generator`, a seed, or None for fresh entropy."""
