"""The equations of the cells, on vectors of hidden units: pre-activations and state in, the new state and gates out.

Training, inference and streams differ in where these come from and what is kept of them; the arithmetic is here.
"""

from __future__ import annotations

from typing import Any

from sparsebp.kernels.host.engine import functions
from sparsebp.kernels.host.engine.simd import device, fma, maximum


@device
def rnn(relu: bool, zero: Any, z: Any) -> Any:
    """Return the new h; `zero` is a vector of zeros."""
    return maximum(zero, z) if relu else functions.tanh(z)


@device
def gru(of_new: Any, of_reset: Any, of_update: Any, inner: Any, h: Any) -> Any:
    """Return the new h, and the gates r, z and n; `inner` is what r multiplies, ``W_hn h + b_hn``."""
    reset, update = functions.sigmoid(of_reset), functions.sigmoid(of_update)
    new = functions.tanh(fma(reset, inner, of_new))
    return fma(update, h - new, new), reset, update, new


@device
def lstm(of_enter: Any, of_keep: Any, of_new: Any, of_show: Any, c: Any) -> Any:
    """Return the new h and c, and the gates i, f, g and o."""
    enter, keep = functions.sigmoid(of_enter), functions.sigmoid(of_keep)
    new, show = functions.tanh(of_new), functions.sigmoid(of_show)
    value = fma(keep, c, enter * new)
    return show * functions.tanh(value), value, enter, keep, new, show
