"""The equations of RNN, GRU and LSTM on vectors of hidden units: a step forward, a step back, a chunk's map, Jacobians.

Compiled code is given a cell as a tuple with one number for each gate: `RNN_TANH`, `RNN_RELU`, `GRU` or `LSTM`. Its
length is part of its type, so frames are compiled for each cell, and `of_cell` picks the cell's functions:

cell(extra, z, apart, state, width, j, hidden, at, kept)
    For units j … of a sample's row z, whose gates begin `apart` from each other, update the sample's row of the state,
    `width` for each of its arrays, and write the arrays that the backward reads: `at` is where the sample's row begins
    in an array (T, B, H), `kept` are pointers to those arrays. ``extra[0]`` says whether an RNN's f is relu.
step_back(cell, saved, previous, at, hidden, j, g, out, second, width)
    For units j … and the gradient g at their h, write the gradients at the pre-activations to `out`, `width` apart;
    return the part of the gradient at h[t-1] that does not pass through w_hh. `saved` are pointers to the arrays that
    the forward kept, h of an RNN or GRU and c of an LSTM first; `previous` points to the sample's row of that array
    before the step. The gradient at the state's second array is at `second`, where it is read and replaced.
step_map(cell, saved, previous, at, hidden, w, width, rows, out, scratch)
    Take a map's rows, one part of `width` for each array of the state, one step into the past. `scratch` holds
    ``states * hidden + MAP_ROOM`` rows of `width`.

The LSTM. In row form a gradient (gh | gc) at the state (h, c) of a step first becomes one at c alone, ``d = gc + gh · o
(1 - t²)`` with t = tanh(c). From there it goes to c[t-1] as ``d · f``, and to h[t-1] as ``Σ (d · factor) @ W`` over i,
f and g and ``(gh · t o (1 - o)) @ W_o``: two of the four blocks of the Jacobian are diagonal, and of the dense ones,
the one from h is the one from c scaled, but for W_o. So a row of a chunk's map takes two products of H × H, and no
Jacobian of 2H × 2H is formed.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.core import cgutils, types

from sparsebp.kernels.host.engine import math
from sparsebp.kernels.host.engine.compile import INNER_JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    copy,
    device,
    fma,
    intrinsic,
    lanes,
    load,
    load_n,
    load_up_to,
    maximum,
    pointer,
    store,
    store_n,
    store_up_to,
    where_within,
    zeros,
)
from sparsebp.kernels.host.engine.tiles import accumulate

# Compiled functions have no annotations: their arguments are arrays, pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

RNN_TANH, RNN_RELU, GRU, LSTM = (0,), (1,), (0,) * 3, (0,) * 4
SAMPLES = 4
"""Samples, or rows of an affine map, that are worked on together."""
MAP_ROOM = 16
"""Rows of scratch that `step_map` may use in addition to a Jacobian's."""
PLANES = 9
"""Diagonals of a materialised Jacobian of an LSTM: four gates to h, three to c, and c to both."""


@intrinsic
def of_cell(typingctx, cell, rnn, gru, lstm):
    """Return one of three compiled functions, chosen when compiling by the number of gates of `cell`."""
    chosen = {1: rnn, 3: gru, 4: lstm}[len(cell)]
    return chosen(cell, rnn, gru, lstm), lambda context, builder, sig, args: context.get_dummy_value()


@intrinsic
def pointers_of(typingctx, arrays):
    """Return the pointers to a tuple of contiguous arrays of one dtype."""
    result = types.UniTuple(types.CPointer(arrays[0].dtype), len(arrays))

    def codegen(context, builder, sig, args):
        values = zip(arrays, cgutils.unpack_tuple(builder, args[0], len(arrays)), strict=True)
        return context.make_tuple(builder, result, [context.make_array(a)(context, builder, v).data for a, v in values])

    return result(arrays), codegen


@device
def columns_of(cell):
    """Return how many parts the weights feed: the gates, of which a GRU's n is fed in two parts."""
    return 4 if len(cell) == 3 else len(cell)


@device
def states_of(cell):
    """Return the number of arrays of the state: h, and an LSTM's c."""
    return 2 if len(cell) == 4 else 1


# Where the parts of a row of columns lie, see `forward`.


@numba.njit(**INNER_JIT)
def padded(numbers, itemsize):
    """Return a count of numbers rounded up to whole vectors."""
    count = VECTOR_BYTES // itemsize
    return (numbers + count - 1) // count * count


@numba.njit(**INNER_JIT)
def part_at(part, gates, apart, itemsize):
    """Return where a part begins in a row of columns, of a GRU ``n r z | pad | M``: each `apart` from the one before.

    The input's product fills the gates, the state's as many parts from ``columns - gates`` on. The pad between z and M
    belongs to neither, so NaN from ∞ · 0 in it reaches no gate.
    """
    return part * apart if part < gates else padded(gates * apart, itemsize) + (part - gates) * apart


@device
def item_of(ptr):
    """Return the bytes of a number that a pointer points to."""
    return VECTOR_BYTES // lanes(ptr)


# A step forward. Training, inference and streams differ in where pre-activations come from and which arrays they keep.


@device
def rnn(relu, zero, z):
    """Return the new h; `zero` is a vector of zeros."""
    return maximum(zero, z) if relu else math.tanh(z)


@device
def gru(a_n, a_r, a_z, m, h):
    """Return the new h, and the gates r, z and n, from the pre-activations; r multiplies m, ``W_hn h + b_hn``."""
    r, z = math.sigmoid(a_r), math.sigmoid(a_z)
    n = math.tanh(fma(r, m, a_n))
    return fma(z, h - n, n), r, z, n


@device
def lstm(a_i, a_f, a_g, a_o, c):
    """Return the new h and c, and the gates i, f, g and o, from the pre-activations."""
    i, f, g, o = math.sigmoid(a_i), math.sigmoid(a_f), math.tanh(a_g), math.sigmoid(a_o)
    value = fma(f, c, i * g)
    return o * math.tanh(value), value, i, f, g, o


@device
def rnn_cell(extra, z, apart, state, width, j, hidden, at, kept):
    """Elman RNN (BPPSA Eq. 9); `kept`: h."""
    v = rnn(extra[0] != 0, zeros(z), load(z, j))
    store(state, j, v)
    store_up_to(kept[0], at + j, v, hidden - j)


@device
def gru_cell(extra, z, apart, state, width, j, hidden, at, kept):
    """GRU (BPPSA Eq. 10); `kept`: h, gates."""
    inner = load(z, part_at(3, 3, apart, item_of(z)) + j)
    v, reset, update, new = gru(load(z, j), load(z, apart + j), load(z, 2 * apart + j), inner, load(state, j))
    store(state, j, v)
    n = hidden - j
    store_up_to(kept[0], at + j, v, n)
    saved = advance(kept[1], 4 * at + j)
    store_up_to(saved, 0, reset, n)
    store_up_to(saved, hidden, update, n)
    store_up_to(saved, 2 * hidden, new, n)
    store_up_to(saved, 3 * hidden, inner, n)


@device
def lstm_cell(extra, z, apart, state, width, j, hidden, at, kept):
    """LSTM; `kept`: h, c, gates."""
    seen, value, i, f, g, o = lstm(
        load(z, j), load(z, apart + j), load(z, 2 * apart + j), load(z, 3 * apart + j), load(state, width + j)
    )
    store(state, j, seen)
    store(state, width + j, value)
    n = hidden - j
    store_up_to(kept[0], at + j, seen, n)
    store_up_to(kept[1], at + j, value, n)
    saved = advance(kept[2], 4 * at + j)
    store_up_to(saved, 0, i, n)
    store_up_to(saved, hidden, f, n)
    store_up_to(saved, 2 * hidden, g, n)
    store_up_to(saved, 3 * hidden, o, n)


# A step back.


@device
def _slope(h, relu, g):
    """Return g · f' at the output h: relu ``h > 0``, or NaN; tanh ``1 - h²``."""
    return where_within(h, 0.0, np.inf, g) if relu else g * fma(h, -1.0 * h, 1.0)


@device
def rnn_step_back(cell, saved, previous, at, hidden, j, g, out, second, width):
    """`saved`: h."""
    store(out, 0, _slope(load_up_to(saved[0], at + j, hidden - j), cell[0] != 0, g))
    return zeros(out)


@device
def _gru_factors(saved, previous, at, hidden, j):
    """Return the diagonals of Eq. 11 for hidden units j …: at N, R, Z and M, and the direct one, z.

    In the paper's terms N: j6·j7, R: j2·j3·j6·j7, Z: j9·j10, M: j5·j6·j7, with j2 = r(1 - r), j3 = M, j5 = r,
    j6 = 1 - n², j7 = 1 - z, j9 = z(1 - z), j10 = h[t-1] - n.
    """
    gate, n = advance(saved[1], 4 * at + j), hidden - j
    reset, update = load_up_to(gate, 0, n), load_up_to(gate, hidden, n)
    new, inner = load_up_to(gate, 2 * hidden, n), load_up_to(gate, 3 * hidden, n)
    keep = 1.0 - update
    to_n = keep * fma(new, -1.0 * new, 1.0)
    to_m = to_n * reset
    to_r = to_m * (1.0 - reset) * inner
    to_z = update * keep * (load_up_to(previous, j, n) - new)
    return to_n, to_r, to_z, to_m, update


@device
def gru_step_back(cell, saved, previous, at, hidden, j, g, out, second, width):
    """`saved`: h, gates."""
    to_n, to_r, to_z, to_m, direct = _gru_factors(saved, previous, at, hidden, j)
    store(out, 0, to_n * g)
    store(out, width, to_r * g)
    store(out, 2 * width, to_z * g)
    store(out, part_at(3, 3, width, item_of(out)), to_m * g)
    return direct * g


@device
def _lstm_factors(saved, previous, at, hidden, j):
    """Return the diagonals of a step for hidden units j ….

    From c to the pre-activations of i, f and g, from h to o's, from h to c, and from c to the c before.
    """
    gate, n = advance(saved[1], 4 * at + j), hidden - j
    i, f = load_up_to(gate, 0, n), load_up_to(gate, hidden, n)
    g, o = load_up_to(gate, 2 * hidden, n), load_up_to(gate, 3 * hidden, n)
    seen = math.tanh(load_up_to(saved[0], at + j, n))
    to_i = g * i * (1.0 - i)
    to_f = load_up_to(previous, j, n) * f * (1.0 - f)
    to_g = i * fma(g, -1.0 * g, 1.0)
    to_o = seen * o * (1.0 - o)
    to_c = o * fma(seen, -1.0 * seen, 1.0)
    return to_i, to_f, to_g, to_o, to_c, f


@device
def lstm_step_back(cell, saved, previous, at, hidden, j, g, out, second, width):
    """`saved`: c, gates."""
    to_i, to_f, to_g, to_o, to_c, f = _lstm_factors(saved, previous, at, hidden, j)
    d = fma(g, to_c, load(second, 0))
    store(out, 0, to_i * d)
    store(out, width, to_f * d)
    store(out, 2 * width, to_g * d)
    store(out, 3 * width, to_o * g)
    store(second, 0, d * f)
    return zeros(out)


# A step of a chunk's affine map: rows times the step's Jacobian.


@device
def map_rows(size):
    """Return the scratch rows of an affine map of `size` values: one more, in whole blocks."""
    return (size + SAMPLES) // SAMPLES * SAMPLES


@device
def clear(out, size):
    """Set whole vectors of scratch to zero."""
    for j in range(0, size, lanes(out)):
        store(out, j, zeros(out))


@device
def _multiply_map(rows, jacobian, hidden, width, out):
    """``out = rows @ jacobian``: take a map of one state one step into the past. 2 · (H + 1) · H² FLOP."""
    clear(out, map_rows(hidden) * width)
    for first in range(0, map_rows(hidden), SAMPLES):
        at = first * width
        accumulate(advance(rows, at), width, hidden, jacobian, width, width, advance(out, at), width)


@device
def rnn_step_map(cell, saved, previous, at, hidden, w, width, rows, out, scratch):
    """Multiply by ``diag(f') @ w_hh``."""
    h, relu = saved[0], cell[0] != 0
    for k in range(hidden):
        value = broadcast(h, at + k)
        for j in range(0, width, lanes(out)):
            store(scratch, k * width + j, _slope(value, relu, load(w, k * width + j)))
    _multiply_map(rows, scratch, hidden, width, out)


@device
def gru_step_map(cell, saved, previous, at, hidden, w, width, rows, out, scratch):
    """Multiply by the row form of Eq. 11, ``Σ diag(factor) @ W + diag(z)``, formed with 6·H² FLOP.

    The factored form would cost three products a row of the map instead of one; forming it once serves H + 1 rows.
    """
    count, jacobian, factors = lanes(w), scratch, advance(scratch, hidden * width)
    for j in range(0, width, count):
        _, to_r, to_z, to_m, direct = _gru_factors(saved, previous, at, hidden, j)
        store(factors, j, to_r)
        store(factors, width + j, to_z)
        store(factors, 2 * width + j, to_m)
        store(factors, 3 * width + j, direct)
    gate = hidden * width
    for k in range(hidden):
        to_r, to_z, to_m = broadcast(factors, k), broadcast(factors, width + k), broadcast(factors, 2 * width + k)
        for j in range(0, width, count):
            i = k * width + j
            value = to_r * load(w, i)
            value = fma(to_z, load(w, gate + i), value)
            store(jacobian, i, fma(to_m, load(w, 2 * gate + i), value))
        i = k * width + k
        store_n(jacobian, i, load_n(jacobian, i, 1) + broadcast(factors, 3 * width + k), 1)
    _multiply_map(rows, jacobian, hidden, width, out)


@device
def lstm_step_map(cell, saved, previous, at, hidden, w, width, rows, out, scratch):
    """Multiply by the blocks from c and by W_o, see the module. 4·(2H + 1)·H² FLOP, and 6·H² to form the blocks."""
    count = lanes(w)
    blocks = scratch  # (2H, padded): Σ diag(factor) @ W over i, f and g; below it W_o
    fed = advance(blocks, 2 * hidden * width)  # of four rows: (d | gh · t o (1 - o))
    factors = advance(fed, 2 * SAMPLES * width)
    for j in range(0, width, count):
        to_i, to_f, to_g, to_o, to_c, f = _lstm_factors(saved, previous, at, hidden, j)
        store(factors, j, to_i)
        store(factors, width + j, to_f)
        store(factors, 2 * width + j, to_g)
        store(factors, 3 * width + j, to_o)
        store(factors, 4 * width + j, to_c)
        store(factors, 5 * width + j, f)
    gate = hidden * width
    for k in range(hidden):
        to_i, to_f, to_g = broadcast(factors, k), broadcast(factors, width + k), broadcast(factors, 2 * width + k)
        for i in range(k * width, (k + 1) * width, count):
            value = to_i * load(w, i)
            value = fma(to_f, load(w, gate + i), value)
            store(blocks, i, fma(to_g, load(w, 2 * gate + i), value))
            store(blocks, gate + i, load(w, 3 * gate + i))
    for first in range(0, map_rows(2 * hidden), SAMPLES):
        for s in range(SAMPLES):
            for j in range(0, width, count):
                row, place = (first + s) * 2 * width + j, s * 2 * width + j
                gh = load(rows, row)
                d = fma(gh, load(factors, 4 * width + j), load(rows, row + width))
                store(fed, place, d)
                store(fed, place + width, gh * load(factors, 3 * width + j))
                store(out, row, zeros(out))
                store(out, row + width, d * load(factors, 5 * width + j))
        target = advance(out, first * 2 * width)
        accumulate(fed, 2 * width, hidden, blocks, width, width, target, 2 * width)
        accumulate(advance(fed, width), 2 * width, hidden, advance(blocks, gate), width, width, target, 2 * width)


# One step's materialised Jacobian.


@device
def _write_row(gates, factors, weights, i, hidden, batch, out):
    """Write row i of one step's block ``Σ w_hhᵀ · diag(factor)``: (H, B). factors (gates, H, B)."""
    square, plane = hidden * hidden, hidden * batch
    for j in range(hidden):
        at = j * hidden + i
        for b in range(0, batch, lanes(factors)):
            k, n = j * batch + b, batch - b
            value = broadcast(weights, at) * load_n(factors, k, n)
            for q in range(1, gates):
                value = fma(broadcast(weights, q * square + at), load_n(factors, q * plane + k, n), value)
            store_up_to(out, k, value, n)


@device
def _write_jacobian(gates, factors, w_hh, t, out):
    """Write one step's (H, H, B) block ``Σ w_hhᵀ · diag(factor)``, plus the diagonal of a factor beyond the gates.

    factors (gates or gates + 1, H, B).
    """
    _, hidden, batch = factors.shape
    plane = hidden * batch
    target, source, weights = advance(pointer(out), t * hidden * plane), pointer(factors), pointer(w_hh)
    for i in range(hidden):
        _write_row(gates, source, weights, i, hidden, batch, target)
        if factors.shape[0] > gates:
            for b in range(0, batch, lanes(source)):
                k, n = i * batch + b, batch - b
                store_n(target, k, load_n(target, k, n) + load_n(source, gates * plane + k, n), n)
        target = advance(target, plane)


@numba.njit(**INNER_JIT)
def rnn_jacobian(t, cell, w_hh, out, saved):
    """Write one step's Jacobian (H, H, B), as the two below; `saved` are the arrays."""
    h, relu = saved[0], cell[0] != 0
    _, batch, hidden = h.shape
    slopes = np.empty((1, hidden, batch), h.dtype)
    for b in range(batch):
        for j in range(hidden):
            value = h[t, b, j]
            slopes[0, j, b] = (0.0 if value <= 0.0 else 1.0) if relu else 1.0 - value * value
    _write_jacobian(1, slopes, w_hh, t, out)


@numba.njit(**INNER_JIT)
def gru_jacobian(t, cell, w_hh, out, saved):
    """BPPSA Eq. 11."""
    h, gates, h0 = saved
    _, batch, hidden = h.shape
    factors = np.empty((4, hidden, batch), h.dtype)
    for b in range(batch):
        for j in range(hidden):
            previous = h[t - 1, b, j] if t > 0 else h0[b, j]
            reset, update = gates[t, b, j], gates[t, b, hidden + j]
            new, inner = gates[t, b, 2 * hidden + j], gates[t, b, 3 * hidden + j]
            to_m = (1.0 - update) * (1.0 - new * new) * reset
            factors[0, j, b] = to_m * (1.0 - reset) * inner
            factors[1, j, b] = update * (1.0 - update) * (previous - new)
            factors[2, j, b] = to_m
            factors[3, j, b] = update
    _write_jacobian(3, factors, w_hh, t, out)


@device
def _write_diagonals(t, b, c, c0, gates, room, out):
    """Write one sample's diagonals of a step to out (PLANES, H, B); room: PLANES padded rows of scratch."""
    _, batch, hidden = c.shape
    rows = aligned_pointer(room)
    count = lanes(rows)
    width = (hidden + count - 1) // count * count
    at = (t * batch + b) * hidden
    previous = advance(pointer(c), at - batch * hidden) if t > 0 else advance(pointer(c0), b * hidden)
    for j in range(0, width, count):
        to_i, to_f, to_g, to_o, to_c, f = _lstm_factors((pointer(c), pointer(gates)), previous, at, hidden, j)
        store(rows, j, to_c * to_i)
        store(rows, width + j, to_c * to_f)
        store(rows, 2 * width + j, to_c * to_g)
        store(rows, 3 * width + j, to_o)
        store(rows, 4 * width + j, to_i)
        store(rows, 5 * width + j, to_f)
        store(rows, 6 * width + j, to_g)
        store(rows, 7 * width + j, to_c * f)
        store(rows, 8 * width + j, f)
    for plane in range(PLANES):
        for j in range(hidden):
            out[plane, j, b] = rows[plane * width + j]


@device
def _write_lstm_jacobian(t, factors, w_hh, out):
    """Write one step's values: a dense row of h to h and to c for each h before, two diagonal entries for each c."""
    _, hidden, batch = factors.shape
    plane = hidden * batch
    weights, source = pointer(w_hh), pointer(factors)
    target = advance(pointer(out), t * 2 * (hidden + 1) * plane)
    for i in range(hidden):
        _write_row(4, source, weights, i, hidden, batch, target)
        _write_row(3, advance(source, 4 * plane), weights, i, hidden, batch, advance(target, plane))
        target = advance(target, 2 * plane)
    for i in range(hidden):
        copy(target, advance(source, (PLANES - 2) * plane + i * batch), batch)
        copy(advance(target, batch), advance(source, (PLANES - 1) * plane + i * batch), batch)
        target = advance(target, 2 * batch)


@numba.njit(**INNER_JIT)
def lstm_jacobian(t, cell, w_hh, out, saved):
    """Rows of h, dense to h and to c, then two diagonal entries for each c."""
    c, gates, c0 = saved
    _, batch, hidden = c.shape
    factors = np.empty((PLANES, hidden, batch), c.dtype)
    room = np.empty(PLANES * (hidden + VECTOR_BYTES) + VECTOR_BYTES, c.dtype)
    for b in range(batch):
        _write_diagonals(t, b, c, c0, gates, room, factors)
    _write_lstm_jacobian(t, factors, w_hh, out)
