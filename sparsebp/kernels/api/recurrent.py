"""Elman and gated recurrences over all steps, forward and backward, and their materialised Jacobians."""

from __future__ import annotations

from sparsebp.backend import FLOAT_DTYPES, check_array, given, namespace
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.types import Array, Nonlinearity
from sparsebp.kernels.api.checks import Family
from sparsebp.kernels.operands import WeightSums

NONLINEARITIES = ("tanh", "relu")
HELD_INPUTS = (1, 4, 8)
"""Input sizes of kernels that hold the input's weights, or the sums of their gradients; a smaller input leaves room."""

MOST_INPUTS = HELD_INPUTS[-1]
"""Largest input size that a device's forward kernel projects itself."""

SUMS_AT_MOST = 4
"""Memory that sums of weight gradients may take over that of the gradients at the gates, which they replace."""

Sizes = tuple[int, int, int]
"""``(T, B, H)``: steps, samples, hidden size."""


def room_for(features: int) -> int:
    """Return the smallest of `HELD_INPUTS` that has room for so many features; 0 where none has."""
    return min((inputs for inputs in HELD_INPUTS if inputs >= features), default=0)


def room_for_sums(registers: int, gates: int, hidden: int, features: int, itemsize: int) -> int:
    """Return for how many inputs a backward that sums weight gradients as it goes is made; 0 where it is none.

    A thread holds its rows of the weights and of their sums in registers, so many of which are free. In float64 the
    values that are loaded ahead take what there would be.
    """
    if registers == 0 or itemsize != 4:
        return 0
    room = room_for(features)
    return room if gates * (2 * hidden + room) <= registers else 0


class RecurrentKernels(Family):
    """Kernels over all steps of a recurrent layer.

    In all: w_hh (H, H) or (3H, H) as torch.nn lays it out (gates r, z, n), h0 (B, H); gy (T, B, H) or None is the
    gradient that arrives at every step's output, grad_h_n (B, H) or None the one that arrives at the last state. A
    batch of zero is legal; a sequence of zero steps and a hidden size of zero are not.

    Forward takes the projected input, or the input x (T, B, I) with its weights: w_ih (H, I) or (3H, I), where I on a
    device is at most `MOST_INPUTS`, b_ih and b_hh (H,) or (3H,), each of which may be None.
    """

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """Return up to which input size forward had better be given x and w_ih; 0 where a product is faster."""
        return int(self._run.projected_inputs(gates, hidden, itemsize))

    def sums_inside(self, gates: int, columns: int, sizes: Sizes, features: int, itemsize: int, chunks: int) -> bool:
        """Whether backward sums the weight gradients as it goes where it is given `WeightSums`, and had better be.

        ga has `columns` of the hidden size, of which the weights feed `gates`. Every chunk leaves its sums: where they
        would take much more memory than ga, products are better.
        """
        steps, batch, hidden = sizes
        room, samples = self._run.sums_for(gates, hidden, features, itemsize)
        most = SUMS_AT_MOST * steps * columns * min(samples, batch)
        return room > 0 and chunks * (gates * (hidden + room) + columns) <= most

    def rnn_forward(
        self,
        x: Array,
        w_hh: Array,
        h0: Array,
        nonlinearity: Nonlinearity,
        h: Array,
        w_ih: Array | None = None,
        b_ih: Array | None = None,
        b_hh: Array | None = None,
    ) -> None:
        """``h[t] = f(x[t] + w_hh @ h[t-1])``, f = tanh or relu (BPPSA Eq. 9).

        x (T, B, H): input projection with both biases; h (T, B, H), written. With w_ih, x is the input, and
        ``w_ih @ x[t] + b_ih + b_hh`` takes the projection's place.
        """
        namespace(x=x, w_hh=w_hh, h0=h0, h=h)
        _check_nonlinearity(nonlinearity)
        _, batch, hidden = check_sequence("h", h)
        check_array("h", h, written=True)
        check_input(x, h, hidden, w_ih, b_ih, b_hh, self._run.MOST_INPUTS)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
        self._run.rnn_forward(x, w_hh, h0, nonlinearity, h, w_ih, b_ih, b_hh)

    def rnn_backward(
        self,
        h: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        nonlinearity: Nonlinearity,
        gz: Array | None,
        gh0: Array,
        chunks: int = 1,
        sums: WeightSums | None = None,
    ) -> None:
        """Back-propagation. gz (T, B, H), written: gradient at the pre-activations; gh0 (B, H), written.

        With `sums` the weight gradients are written as well, and gz may be None. Where `room_for_sums` finds room they
        are summed as the recursion goes, in a fixed order, and no gz is stored for them; elsewhere by products.

        ``g[t] = gy[t] + w_hhᵀ @ gz[t+1]`` (``+ grad_h_n`` at the last t); ``gz[t] = g[t] * f'(t)``;
        ``gh0 = w_hhᵀ @ gz[0]``. f' is ``1 - h²`` (tanh) or ``h > 0`` (relu; 1 at a NaN).

        One chunk is the recursion, 2·T·B·H² FLOP. More of them, ``1 <= chunks <= T``, are reduce-then-scan, which
        stores no Jacobian: 2·(H + 1)·T·B·H²·(C - 2)/C FLOP more, for the affine maps of all chunks but the first and
        the last in time, which need none; it pays where far more than H workers are idle. Scratch: H·H + H values a
        map and sample.
        """
        namespace(h=h, w_hh=w_hh, gh0=gh0, **given(gz=gz, gy=gy, grad_h_n=grad_h_n), **arrays_of(sums))
        _check_nonlinearity(nonlinearity)
        steps, batch, hidden = check_sequence("h", h)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_incoming(h, gy, grad_h_n=grad_h_n)
        check_outgoing("gz", gz, h, 1, 1, sums)
        check_array("gh0", gh0, dtype=h.dtype, shape=(batch, hidden), written=True)
        check_chunks(chunks, steps)
        self._run.rnn_backward(h, w_hh, gy, grad_h_n, nonlinearity, gz, gh0, chunks, sums)

    def rnn_maps(self, h: Array, w_hh: Array, gy: Array | None, nonlinearity: Nonlinearity, maps: Array) -> None:
        """Reduce chunks of steps to affine maps: the first part of reduce-then-scan, by itself.

        maps (C, B, H + 1, H), written; chunk c has the steps ``c·T//C … (c + 1)·T//C - 1``. A gradient g, a row, that
        comes to the state behind a chunk goes to the state before it as ``g @ maps[c, b, :H] + maps[c, b, H]``.

        2·(H + 1)·T·B·H² FLOP.
        """
        namespace(h=h, w_hh=w_hh, maps=maps, **given(gy=gy))
        _check_nonlinearity(nonlinearity)
        hidden = check_sequence("h", h)[2]
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_maps(h, gy, maps)
        self._run.rnn_maps(h, w_hh, gy, nonlinearity, maps)

    def rnn_jacobians(self, h: Array, w_hh: Array, nonlinearity: Nonlinearity, out: Array) -> None:
        """Materialise the scan's elements: out (T, H, H, B), ``out[t, i, j, b] = w_hh[j, i] * f'(h[t, b, j])``,
        the transposed Jacobian of h[t] with respect to h[t-1] (rows: input, columns: output)."""
        namespace(h=h, w_hh=w_hh, out=out)
        _check_nonlinearity(nonlinearity)
        steps, batch, hidden = check_sequence("h", h)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
        check_array("out", out, dtype=h.dtype, shape=(steps, hidden, hidden, batch), written=True)
        self._run.rnn_jacobians(h, w_hh, nonlinearity, out)

    def gru_forward(
        self,
        x: Array,
        w_hh: Array,
        b_hn: Array,
        h0: Array,
        h: Array,
        gates: Array,
        w_ih: Array | None = None,
        b_ih: Array | None = None,
        b_hh: Array | None = None,
    ) -> None:
        """GRU (BPPSA Eq. 10) with every gate kept for the backward.

        x (T, B, 3H), gates in the order r, z, n: ``W_i x + b_i``, plus ``b_h`` for r and z only; b_hn (H,).
        ``M = W_hn h + b_hn``; ``n = tanh(x_n + r * M)``; ``h' = (1 - z) * n + z * h``.
        h (T, B, H), written; gates (T, B, 4H), written, in the order r, z, n, M. With w_ih, x is the input, and its
        projection is made here; of b_hh the parts of r and z are used.
        """
        namespace(x=x, w_hh=w_hh, b_hn=b_hn, h0=h0, h=h, gates=gates)
        steps, batch, hidden = check_sequence("h", h)
        check_array("h", h, written=True)
        check_input(x, h, 3 * hidden, w_ih, b_ih, b_hh, self._run.MOST_INPUTS)
        check_array("w_hh", w_hh, dtype=h.dtype, shape=(3 * hidden, hidden))
        check_array("b_hn", b_hn, dtype=h.dtype, shape=(hidden,))
        check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
        check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden), written=True)
        self._run.gru_forward(x, w_hh, b_hn, h0, h, gates, w_ih, b_ih, b_hh)

    def gru_backward(
        self,
        h: Array,
        h0: Array,
        gates: Array,
        w_hh: Array,
        gy: Array | None,
        grad_h_n: Array | None,
        ga: Array | None,
        gh0: Array,
        chunks: int = 1,
        sums: WeightSums | None = None,
    ) -> None:
        """Back-propagation through a GRU, by the recursion or by chunks, as `rnn_backward`; factored Jacobians, Eq. 11.

        ga (T, B, 4H), written: gradients at the pre-activations N, R, Z and at M, in the order **n, r, z, m**. So
        ``ga[..., H:]`` is what multiplies h (order r, z, n as in w_hh) and ``ga[..., :3H]`` what multiplies x
        (order n, r, z). gh0 (B, H), written. `sums` as in `rnn_backward`.

        6·T·B·H² FLOP, and with C chunks (2·(H + 1)·H² + 6·H²)·T·B·(C - 2)/C more.
        """
        optional = given(ga=ga, gy=gy, grad_h_n=grad_h_n)
        namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, gh0=gh0, **optional, **arrays_of(sums))
        steps, batch, hidden = _check_gru_saved(h, h0, gates, w_hh)
        check_incoming(h, gy, grad_h_n=grad_h_n)
        check_outgoing("ga", ga, h, 3, 4, sums)
        check_array("gh0", gh0, dtype=h.dtype, shape=(batch, hidden), written=True)
        check_chunks(chunks, steps)
        self._run.gru_backward(h, h0, gates, w_hh, gy, grad_h_n, ga, gh0, chunks, sums)

    def gru_maps(self, h: Array, h0: Array, gates: Array, w_hh: Array, gy: Array | None, maps: Array) -> None:
        """Reduce chunks of a GRU's steps to affine maps, as `rnn_maps`. 2·(H + 4)·T·B·H² FLOP."""
        namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, maps=maps, **given(gy=gy))
        _check_gru_saved(h, h0, gates, w_hh)
        check_maps(h, gy, maps)
        self._run.gru_maps(h, h0, gates, w_hh, gy, maps)

    def gru_jacobians(self, h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> None:
        """Materialise the scan's elements (BPPSA Eq. 11).

        out (T, H, H, B), rows: input h[t-1], columns: output h[t].
        """
        namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, out=out)
        steps, batch, hidden = _check_gru_saved(h, h0, gates, w_hh)
        check_array("out", out, dtype=h.dtype, shape=(steps, hidden, hidden, batch), written=True)
        self._run.gru_jacobians(h, h0, gates, w_hh, out)


def check_input(
    x: Array, h: Array, rows: int, w_ih: Array | None, b_ih: Array | None, b_hh: Array | None, most: int
) -> None:
    """Check the projected input (T, B, rows), or the input, of at most so many features, with what projects it."""
    if w_ih is None:
        if b_ih is not None or b_hh is not None:
            raise OptionError(
                "A bias of the input was given without its weights",
                expected="w_ih with b_ih and b_hh",
                got="w_ih=None",
                remedy="Pass w_ih, or leave the biases out: the projected input has them",
            )
        check_array("x", x, dtype=h.dtype, shape=(*h.shape[:2], rows))
        return
    biases = given(b_ih=b_ih, b_hh=b_hh)
    namespace(h=h, w_ih=w_ih, **biases)
    check_array("w_ih", w_ih, dtype=h.dtype, shape=(rows, None))
    features = w_ih.shape[1]
    if not 1 <= features <= most:
        raise ShapeError(
            "The input size is not one that forward projects",
            expected=f"w_ih of shape ({rows}, 1 to {most})",
            got=w_ih.shape,
            remedy="Pass the projection in place of x: x @ w_ih.T with its bias, and no w_ih",
        )
    check_array("x", x, dtype=h.dtype, shape=(*h.shape[:2], features))
    for name, bias in biases.items():
        check_array(name, bias, dtype=h.dtype, shape=(rows,))


def _check_gru_saved(h: Array, h0: Array, gates: Array, w_hh: Array) -> Sizes:
    steps, batch, hidden = check_sequence("h", h)
    check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
    check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden))
    check_array("w_hh", w_hh, dtype=h.dtype, shape=(3 * hidden, hidden))
    return steps, batch, hidden


def check_incoming(h: Array, gy: Array | None, **last: Array | None) -> None:
    """Check the gradients that may come in: at every step's output, and at the last states; None stands for zero."""
    if gy is not None:
        check_array("gy", gy, dtype=h.dtype, shape=h.shape)
    for name, array in given(**last).items():
        check_array(name, array, dtype=h.dtype, shape=h.shape[1:])


def check_maps(h: Array, gy: Array | None, maps: Array, states: int = 1) -> None:
    """Check what reductions of chunks take and write; a cell's state is so many arrays of H."""
    steps, batch, hidden = h.shape
    check_incoming(h, gy)
    check_array("maps", maps, dtype=h.dtype, shape=(None, batch, states * hidden + 1, states * hidden), written=True)
    check_chunks(len(maps), steps)


def arrays_of(sums: WeightSums | None) -> dict[str, Array]:
    """Return the arrays of `sums` that are there, by name."""
    return {} if sums is None else given(**sums._asdict())


def check_outgoing(name: str, ga: Array | None, h: Array, gates: int, columns: int, sums: WeightSums | None) -> None:
    """Check what a backward leaves: ga (T, B, columns·H), which may be missing where there are sums, and those.

    The weights have gates·H rows.
    """
    steps, batch, hidden = h.shape
    if ga is not None:
        check_array(name, ga, dtype=h.dtype, shape=(steps, batch, columns * hidden), written=True)
    elif sums is None:
        raise OptionError(
            f"{name} is missing", expected="an array to write to, or sums", got="None and None",
            remedy=f"Pass {name}, or the WeightSums in whose place it may be left out",
        )  # fmt: skip
    if sums is None:
        return
    rows = gates * hidden
    check_array("weight_ih", sums.weight_ih, dtype=h.dtype, shape=(rows, None), written=True)
    check_array("weight_hh", sums.weight_hh, dtype=h.dtype, shape=(rows, hidden), written=True)
    check_array("x", sums.x, dtype=h.dtype, shape=(steps, batch, sums.weight_ih.shape[1]))
    check_array("before", sums.before, dtype=h.dtype, shape=h.shape)
    for bias, array in given(bias_ih=sums.bias_ih, bias_hh=sums.bias_hh).items():
        check_array(bias, array, dtype=h.dtype, shape=(rows,), written=True)


def check_sequence(name: str, array: Array) -> Sizes:
    """Check the array that gives a call its sizes: (T, B, H), float, contiguous, T >= 1, H >= 1."""
    if array.dtype not in FLOAT_DTYPES:
        raise DTypeError(
            f"{name} has the wrong dtype",
            expected="float32 or float64",
            got=array.dtype,
            remedy=f"Convert it with {name}.astype('float32'); nothing is converted silently",
        )
    check_array(name, array, shape=(None, None, None))
    steps, batch, hidden = array.shape
    if steps < 1:
        raise ShapeError(
            f"{name} holds no time steps, and empty sequences are not allowed",
            expected="(T, B, H) with T >= 1",
            got=array.shape,
            remedy="Leave empty sequences out before calling",
        )
    if hidden < 1:
        raise ShapeError(
            f"{name} has a hidden size of zero",
            expected="(T, B, H) with H >= 1",
            got=array.shape,
            remedy="Use a hidden size of at least 1",
        )
    return steps, batch, hidden


def _check_nonlinearity(nonlinearity: str) -> None:
    if nonlinearity not in NONLINEARITIES:
        raise OptionError(
            "Unknown nonlinearity",
            expected=" or ".join(repr(name) for name in NONLINEARITIES),
            got=repr(nonlinearity),
            remedy="Pass one of the two",
        )


def check_chunks(chunks: int, steps: int) -> None:
    """Check the number of chunks of a sequence."""
    if not 1 <= chunks <= steps:
        raise OptionError(
            "The number of chunks does not fit the number of steps",
            expected=f"1 <= chunks <= T = {steps}",
            got=chunks,
            remedy="Pass fewer chunks; chunks=1 is the sequential recursion",
        )
