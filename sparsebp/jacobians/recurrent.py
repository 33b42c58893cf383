"""Materialised hidden-state Jacobians of recurrent layers, through the kernels: for the general scan engine and users.

Training does not need them: the fused kernels work with the factors (BPPSA Eq. 9 and 11) and store no Jacobian.
"""

from __future__ import annotations

from sparsebp import backend, kernels
from sparsebp.core.types import Array, Nonlinearity
from sparsebp.jacobians.transposed import TransposedJacobian
from sparsebp.patterns import SparsityPattern, hidden_pattern, lstm_pattern


def rnn_hidden_jacobians(h: Array, w_hh: Array, nonlinearity: Nonlinearity) -> Array:
    """Return ``w_hhᵀ · diag(f'(h[t]))`` of every step (BPPSA Eq. 9).

    Parameters
    ----------
    h
        Hidden states, (T, B, H).
    w_hh
        (H, H), as in torch.nn.
    nonlinearity
        "tanh" or "relu".

    Returns
    -------
    Array
        (T, H·H, B): for every step the values on `hidden_pattern(H)`; rows are the input h[t-1].

    Raises
    ------
    ShapeError, DTypeError, LayoutError, OptionError
        An argument does not fit.
    """
    xp = backend.namespace(h=h, w_hh=w_hh)
    steps, batch, size = h.shape
    out = xp.empty((steps, size, size, batch), dtype=h.dtype)
    kernels.get(xp).rnn_jacobians(h, w_hh, nonlinearity, out)
    return out.reshape(steps, size * size, batch)


def gru_hidden_jacobians(h: Array, h0: Array, gates: Array, w_hh: Array) -> Array:
    """Return the hidden-state Jacobians of every step of a GRU (BPPSA Eq. 11).

    Parameters
    ----------
    h, h0
        Hidden states (T, B, H) and the one before them (B, H).
    gates
        (T, B, 4H), in the order r, z, n, M, as `Kernels.gru_forward` keeps them.
    w_hh
        (3H, H), as in torch.nn.

    Returns
    -------
    Array
        (T, H·H, B): for every step the values on `hidden_pattern(H)`; rows are the input h[t-1].

    Raises
    ------
    ShapeError, DTypeError, LayoutError
        An argument does not fit.
    """
    xp = backend.namespace(h=h, h0=h0, gates=gates, w_hh=w_hh)
    steps, batch, size = h.shape
    out = xp.empty((steps, size, size, batch), dtype=h.dtype)
    kernels.get(xp).gru_jacobians(h, h0, gates, w_hh, out)
    return out.reshape(steps, size * size, batch)


def lstm_hidden_jacobians(c: Array, c0: Array, gates: Array, w_hh: Array) -> Array:
    """Return the Jacobians of every step of an LSTM: of (h, c)[t] with respect to (h, c)[t-1], transposed.

    Parameters
    ----------
    c, c0
        Cell states (T, B, H) and the one before them (B, H).
    gates
        (T, B, 4H), in the order i, f, g, o, as `Kernels.lstm_forward` keeps them.
    w_hh
        (4H, H), as in torch.nn.

    Returns
    -------
    Array
        (T, 2H·(H + 1), B): for every step the values on `lstm_pattern(H)`; rows are the inputs h[t-1], then c[t-1].

    Raises
    ------
    ShapeError, DTypeError, LayoutError
        An argument does not fit.
    """
    xp = backend.namespace(c=c, c0=c0, gates=gates, w_hh=w_hh)
    steps, batch, size = c.shape
    out = xp.empty((steps, lstm_pattern(size).nnz, batch), dtype=c.dtype)
    kernels.get(xp).lstm_jacobians(c, c0, gates, w_hh, out)
    return out


def hidden_elements(data: Array, pattern: SparsityPattern | None = None) -> list[TransposedJacobian]:
    """Return the steps of (T, nnz, B) values as `TransposedJacobian` objects on one pattern, views without a copy.

    Without a pattern, nnz is H·H.
    """
    pattern = hidden_pattern(round(data.shape[1] ** 0.5)) if pattern is None else pattern
    return [TransposedJacobian(pattern, step) for step in data]
