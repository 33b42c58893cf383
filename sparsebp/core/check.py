"""Checks of arguments that are no arrays, each of which returns Python's own value; types that many rooms use.

And of what the forward of a user's own layer returns.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from sparsebp.core.errors import OptionError

T = TypeVar("T")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an option that is an integer, Python's or NumPy's, from `least` to `most`. A truth value is none."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and least <= number and (most is None or number <= most):
        return number
    raise OptionError(
        f"{name} is not an integer" if number is None else f"{name} is too {'small' if number < least else 'large'}",
        expected=f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}",
        got=shown(value),
    )


def check_flag(name: str, value: Any) -> bool:
    """Return an option that is True or False; what Python would take for one of them is refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"{name} is no truth value", expected="True or False", got=shown(value))
    return bool(value)


def check_number(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, *, finite: bool = True
) -> float:
    """Return an option that is a real number from `least` to `most`, finite unless `finite` is false, and never NaN."""
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


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """Return an option that is one of some texts."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"Unknown {name}", expected=" or ".join(map(repr, choices)), got=shown(value))
    return value


def check_default(name: str, value: Any, default: Any) -> None:
    """Refuse an option that is there for the names and places of PyTorch's arguments, unless it has its default."""
    if not (value is default or (type(value) is type(default) and value == default)):
        raise OptionError(f"{name} is not supported", expected=f"{name}={default!r}", got=shown(value),
                          remedy="Leave it out; see 'Beside torch.nn' in the reference")  # fmt: skip


def check_sequence(name: str, value: Any, of: str) -> list[Any]:
    """Return the entries of a sequence, `of` whatever; a text, or what cannot be gone through, is refused."""
    try:
        if not isinstance(value, (str, bytes)):
            return list(value)
    except TypeError:
        pass
    raise OptionError(f"{name} is no sequence", expected=f"a sequence of {of}", got=shown(value))


def check_generator(name: str, rng: Any) -> np.random.Generator:
    """Return a generator, or the new one of a seed; of None, one of fresh entropy."""
    if rng is None or isinstance(rng, np.random.Generator):
        return np.random.default_rng(rng)
    return np.random.default_rng(check_integer(name, rng, 0))


def forward_of(layer: Any, x: Any, *more: Any, **options: Any) -> tuple[Any, Any]:
    """Return what ``layer.forward(x)`` returns, after making sure that it is an array and what the way back needs."""
    try:
        found = layer.forward(x, *more, **options)
    except RecursionError:
        if hasattr(layer, "modules"):
            list(layer.modules())  # says so if the layer is inside itself
        raise
    if not isinstance(found, tuple) or len(found) != 2 or not hasattr(found[0], "dtype"):
        raise OptionError(f"{type(layer).__name__}.forward does not return what it should",
                          expected="(output, saved): an array, and what the way back needs, or None",
                          got=_described(found), remedy="Write: return y, saved")  # fmt: skip
    y, saved = found
    return y, saved


def _described(value: Any) -> str:
    inner = f" of {', '.join(type(entry).__name__ for entry in value[:4])}" if isinstance(value, tuple) else ""
    return f"{type(value).__name__}{inner}"


def shown(value: Any) -> str:
    """Return a text of a value for messages: short, and some text also where ``repr`` fails, of deep nesting, say."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "…"


# Literals and aliases that more than one room uses.

Array: TypeAlias = Any
"""A NumPy or CuPy array. Which of the two is asked for in `sparsebp.core.backend` alone."""

PatternKind: TypeAlias = Literal["identity", "diagonal", "selection", "dense", "general"]
ScanAlgorithm: TypeAlias = Literal["auto", "linear", "blelloch", "hybrid", "chunked"]
SCAN_ALGORITHMS: tuple[ScanAlgorithm, ...] = ("auto", "linear", "blelloch", "hybrid", "chunked")
Backward: TypeAlias = Literal["auto", "bp", "linear", "blelloch", "hybrid", "chunked"]
BACKWARDS: tuple[Backward, ...] = ("auto", "bp", "linear", "blelloch", "hybrid", "chunked")
"""How a chain of layers, or of time steps, runs backward: plain back-propagation, or a scan by that algorithm."""
Nonlinearity: TypeAlias = Literal["tanh", "relu"]
SlopeFunction: TypeAlias = Literal["given", "relu", "tanh", "sigmoid"]
SLOPES: tuple[SlopeFunction, ...] = ("given", "relu", "tanh", "sigmoid")
"""What a slope is made of: itself, or y = f(x) of these f."""
UpdateRule: TypeAlias = Literal["sgd", "adam", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop"]
"""What an optimizer's kernel does with a gradient."""
ProductFactors: TypeAlias = tuple[Array, Array]
"""Two matrices that stand for their product."""
Seed: TypeAlias = int | np.random.Generator | None
"""What ``rng=`` takes: a `numpy.random.Generator`, a seed, or None for fresh entropy."""
