"""RNN, GRU and LSTM written plainly in NumPy (float64), and cases to compare them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import strict_cupy
from backends import Backend
from sparsebp.kernels.operands import WeightSums
from strategies import normal, reals, seeds, sizes


@dataclass(frozen=True)
class Case:
    """Sizes, dtype and which gradients arrive; all arrays follow from `seed`."""

    steps: int
    batch: int
    hidden: int
    dtype: np.dtype
    has_gy: bool
    has_grad_h_n: bool
    seed: int

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Return normal values of the case's dtype; each shape has its own."""
        return normal(np.random.default_rng([self.seed, *shape]), shape, self.dtype, scale)

    def weights(self, gates: int) -> np.ndarray:
        """Return w_hh (gates * H, H), scaled so that states stay of size one."""
        return self.normal(gates * self.hidden, self.hidden, scale=self.hidden**-0.5)

    def incoming(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return gy and grad_h_n, None where the case has none."""
        gy = self.normal(self.steps, self.batch, self.hidden) if self.has_gy else None
        return gy, self.normal(self.batch, self.hidden) if self.has_grad_h_n else None


@st.composite
def cases(draw: st.DrawFn, backend: Backend) -> Case:
    """Cases of awkward sizes; few and tiny ones where kernels are emulated, few hidden ones where each is compiled."""
    if backend.emulated:
        steps, batch = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([1, 3]))
        hidden = draw(st.sampled_from([1, 20, 33]))
    else:
        steps, batch = draw(sizes(1, 17)), draw(sizes(1, 9))
        some = st.sampled_from([1, 20, 33] if strict_cupy.installed() else [1, 7, 20, 32, 33, 64, 128])
        hidden = draw(st.one_of(some, st.integers(1, 128)) if backend.name == "host" else some)
    return Case(steps, batch, hidden, draw(reals), draw(st.booleans()), draw(st.booleans()), draw(seeds))


@st.composite
def input_cases(draw: st.DrawFn, backend: Backend, streamed: int) -> Case:
    """Cases of up to some rounds of eight steps; a device streams weights from the hidden size `streamed` on."""
    steps = draw(st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 24, 27]))
    batch = draw(st.sampled_from([1, 3] if backend.emulated else [1, 3, 16, 33]))
    hidden = draw(st.sampled_from([1, 20, 33, streamed]))
    return Case(steps, batch, hidden, draw(reals), False, False, draw(seeds))


def through_maps(maps: np.ndarray, last: np.ndarray | None) -> np.ndarray:
    """Take the gradient at the last state (None: zero) through the chunks' maps (C, B, H + 1, H) to the first state."""
    hidden = maps.shape[3]
    g = np.zeros((maps.shape[1], 1, hidden)) if last is None else last[:, None].astype(np.float64)
    for one in maps[::-1].astype(np.float64):
        g = g @ one[:, :hidden] + one[:, hidden:]
    return g[:, 0]


def projections(
    data: st.DataObject, case: Case, gates: int, some: tuple[int, ...] = (1, 2, 4, 5, 8)
) -> tuple[Any, ...]:
    """Return x of one to eight features, `some` of them, w_ih, b_ih and b_hh; either bias may be None."""
    features, rows = data.draw(st.sampled_from(some)), gates * case.hidden
    biases = (case.normal(rows, scale=scale) if data.draw(st.booleans()) else None for scale in (1.0, 0.5))
    return case.normal(case.steps, case.batch, features), case.normal(rows, features), *biases


def project(x: np.ndarray, w_ih: np.ndarray, b_ih: Any, b_hh: Any, both: int) -> np.ndarray:
    """Return ``w_ih x`` with b_ih, and with b_hh in its first `both` rows, rounded to the dtype of x."""
    gx = x.astype(np.float64) @ w_ih.astype(np.float64).T
    if b_ih is not None:
        gx += b_ih
    if b_hh is not None:
        gx[..., :both] += b_hh[:both]
    return gx.astype(x.dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rnn_forward(gx: np.ndarray, w_hh: np.ndarray, h0: np.ndarray, nonlinearity: str) -> np.ndarray:
    """Return h (T, B, H) in float64."""
    gx, w_hh, state = (a.astype(np.float64) for a in (gx, w_hh, h0))
    h = np.empty(gx.shape)
    for t in range(len(gx)):
        z = gx[t] + state @ w_hh.T
        h[t] = state = np.tanh(z) if nonlinearity == "tanh" else np.maximum(z, 0)
    return h


def rnn_slopes(h: np.ndarray, nonlinearity: str) -> np.ndarray:
    """Return f' (T, B, H) in float64."""
    h = h.astype(np.float64)
    return 1 - h * h if nonlinearity == "tanh" else np.where(h <= 0, 0.0, 1.0)


def rnn_backward(
    h: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None, grad_h_n: np.ndarray | None, nonlinearity: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return gz (T, B, H) and gh0 (B, H) in float64."""
    slopes, w_hh = rnn_slopes(h, nonlinearity), w_hh.astype(np.float64)
    gz = np.empty(slopes.shape)
    carry = np.zeros(slopes.shape[1:]) if grad_h_n is None else grad_h_n.astype(np.float64)
    for t in range(len(h) - 1, -1, -1):
        gz[t] = slopes[t] * (carry if gy is None else carry + gy[t])
        carry = gz[t] @ w_hh
    return gz, carry


def gru_forward(gx: np.ndarray, w_hh: np.ndarray, b_hn: np.ndarray, h0: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return h (T, B, H) and the gates r, z, n, M (T, B, 4H) in float64."""
    gx, w_hh, b_hn, state = (a.astype(np.float64) for a in (gx, w_hh, b_hn, h0))
    hidden = h0.shape[1]
    h, gates = np.empty((*gx.shape[:2], hidden)), np.empty((*gx.shape[:2], 4 * hidden))
    for t in range(len(gx)):
        x_r, x_z, x_n = np.split(gx[t], 3, axis=-1)
        a_r, a_z, a_n = np.split(state @ w_hh.T, 3, axis=-1)
        r, z, inner = sigmoid(x_r + a_r), sigmoid(x_z + a_z), a_n + b_hn
        n = np.tanh(x_n + r * inner)
        h[t] = state = (1 - z) * n + z * state
        gates[t] = np.concatenate([r, z, n, inner], axis=-1)
    return h, gates


def gru_backward(
    h: np.ndarray,
    h0: np.ndarray,
    gates: np.ndarray,
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    grad_h_n: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ga (T, B, 4H), order n, r, z, m, and gh0 (B, H) in float64."""
    h, h0, gates, w_hh = (a.astype(np.float64) for a in (h, h0, gates, w_hh))
    ga = np.empty(gates.shape)
    carry = np.zeros(h0.shape) if grad_h_n is None else grad_h_n.astype(np.float64)
    for t in range(len(h) - 1, -1, -1):
        r, z, n, inner = np.split(gates[t], 4, axis=-1)
        before = h[t - 1] if t else h0
        g = carry if gy is None else carry + gy[t]
        g_n = g * (1 - z) * (1 - n * n)
        g_r = g_n * inner * r * (1 - r)
        g_z = g * (before - n) * z * (1 - z)
        ga[t] = np.concatenate([g_n, g_r, g_z, g_n * r], axis=-1)
        carry = g * z + ga[t, :, h.shape[-1] :] @ w_hh
    return ga, carry


def lstm_forward(
    gx: np.ndarray, w_hh: np.ndarray, h0: np.ndarray, c0: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return h and c (T, B, H) and the gates i, f, g, o (T, B, 4H) in float64."""
    gx, w_hh, seen, state = (a.astype(np.float64) for a in (gx, w_hh, h0, c0))
    h, c, gates = np.empty((*gx.shape[:2], h0.shape[1])), np.empty((*gx.shape[:2], h0.shape[1])), np.empty(gx.shape)
    for t in range(len(gx)):
        a_i, a_f, a_g, a_o = np.split(gx[t] + seen @ w_hh.T, 4, axis=-1)
        i, f, g, o = sigmoid(a_i), sigmoid(a_f), np.tanh(a_g), sigmoid(a_o)
        c[t] = state = f * state + i * g
        h[t] = seen = o * np.tanh(state)
        gates[t] = np.concatenate([i, f, g, o], axis=-1)
    return h, c, gates


def lstm_backward(
    c: np.ndarray, c0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None,
    grad_h_n: np.ndarray | None, grad_c_n: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return ga (T, B, 4H), gh0 and gc0 (B, H) in float64."""
    c, c0, gates, w_hh = (a.astype(np.float64) for a in (c, c0, gates, w_hh))
    ga = np.empty(gates.shape)
    gh, gc = (np.zeros(c0.shape) if g is None else g.astype(np.float64) for g in (grad_h_n, grad_c_n))
    for t in range(len(c) - 1, -1, -1):
        i, f, g, o = np.split(gates[t], 4, axis=-1)
        before, seen = c[t - 1] if t else c0, np.tanh(c[t])
        gh = gh if gy is None else gh + gy[t]
        gc = gc + gh * o * (1 - seen * seen)
        at = [gc * g * i * (1 - i), gc * before * f * (1 - f), gc * i * (1 - g * g), gh * seen * o * (1 - o)]
        ga[t] = np.concatenate(at, axis=-1)
        gh, gc = ga[t] @ w_hh, gc * f
    return ga, gh, gc


def weight_sums(ga: np.ndarray, gates: int, x: np.ndarray, before: np.ndarray) -> dict[str, np.ndarray]:
    """Return the weight gradients in float64 by the names of `WeightSums`, from ga (T, B, columns·H)."""
    rows = gates * before.shape[2]
    of_input, of_state = ga[..., :rows], ga[..., ga.shape[-1] - rows :]
    if gates == 3:  # n, r, z -> r, z, n
        of_input = np.roll(of_input, -before.shape[2], axis=-1)
    return {
        "weight_ih": np.einsum("tbi,tbj->ij", of_input, x.astype(np.float64)),
        "weight_hh": np.einsum("tbi,tbj->ij", of_state, before.astype(np.float64)),
        "bias_ih": of_input.sum(axis=(0, 1)),
        "bias_hh": of_state.sum(axis=(0, 1)),
    }


def empty_sums(backend: Backend, gates: int, x: np.ndarray, before: np.ndarray, bias: bool = True) -> WeightSums:
    """Return the operand of a backward, its outputs unwritten."""
    rows, hidden, dtype = gates * before.shape[2], before.shape[2], x.dtype
    biases = (backend.empty(rows, dtype), backend.empty(rows, dtype)) if bias else (None, None)
    outputs = backend.empty((rows, x.shape[2]), dtype), backend.empty((rows, hidden), dtype)
    return WeightSums(backend.array(x), backend.array(before), *outputs, *biases)
