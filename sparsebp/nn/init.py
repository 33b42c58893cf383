"""Initial values of parameters: PyTorch's default ranges, and chrono initialisation for long sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.arguments import check_generator, check_integer
from sparsebp.errors import OptionError
from sparsebp.types import Array, Seed


def generator(rng: Seed) -> np.random.Generator:
    """Return `rng` itself if it is a Generator, else a new one from that seed (None: fresh entropy).

    Raises
    ------
    OptionError
        It is no seed.
    """
    return check_generator("rng", rng)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: Any) -> np.ndarray:
    """Draw from U(-bound, bound). The same seed gives the same numbers, rounded, in both dtypes.

    Raises
    ------
    OptionError
        No machine has room for so many.
    """
    _check_size(shape)
    return rng.uniform(-bound, bound, shape).astype(dtype)


def full(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    """Return an array of one value.

    Raises
    ------
    OptionError
        No machine has room for it.
    """
    _check_size(shape)
    return np.full(shape, value, dtype)


def _check_size(shape: tuple[int, ...]) -> None:
    if max(1, *shape) * math.prod(n or 1 for n in shape) > 2**60:  # NumPy counts bytes in 63 bits
        raise OptionError("A parameter is too large for any machine", expected="fewer than 2**60 elements", got=shape,
                          remedy="Build a smaller layer")  # fmt: skip


def fan_in_bound(fan_in: int) -> float:
    """Return ``1 / sqrt(fan_in)``, PyTorch's default bound for `Linear` and, with the hidden size, for RNN and GRU."""
    return 1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0


def he_convolutions(model: Any, rng: Seed = None) -> None:
    """Draw the weights of all convolutions of `model` anew from N(0, 2 / fan_in), in place, and set their biases to 0.

    That keeps the signal's size through ReLUs, also in deep networks without normalisation (He et al., "Delving Deep
    into Rectifiers", 2015, Eq. 10). The model lives on the host.
    """
    from sparsebp.nn.conv import Conv

    rng = generator(rng)
    for _, layer in model.modules():
        if isinstance(layer, Conv):
            weight = layer.params["weight"]
            weight[...] = rng.normal(0.0, math.sqrt(2 / math.prod(weight.shape[1:])), weight.shape)
            if "bias" in layer.params:
                layer.params["bias"][...] = 0


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
    hidden_size, max_length = check_integer("hidden_size", hidden_size, 1), check_integer("max_length", max_length, 3)
    rng = generator(rng)
    gate = slice(hidden_size, 2 * hidden_size)  # rows r, z, n
    names = [n for n, a in weights.items() if "bias_ih" in n and a.shape == (3 * hidden_size,)]
    if not names:
        raise OptionError(
            "No GRU bias was found",
            expected=f"parameters bias_ih… of length {3 * hidden_size}",
            got=", ".join(weights) or "no parameters",
            remedy="Build the GRU with bias=True",
        )
    for name in names:
        values = np.log(rng.uniform(1.0, max_length - 1.0, hidden_size)).astype(weights[name].dtype)
        gate_view = weights[name][gate]
        gate_view[...] = backend.namespace(gate_view).asarray(values)
        weights[name.replace("bias_ih", "bias_hh")][gate] = 0
