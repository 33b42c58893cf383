"""Argument checks of the recurrent kernels, one function per kernel, shared by the host and the device launchers.

Both backends call the same function, so both raise the same errors for the same mistake. Each function returns the
sizes ``(T, B, H)`` that it has made sure of. A batch of zero is legal; a sequence of zero steps and a hidden size of
zero are not.
"""

from __future__ import annotations

from sparsebp.backend import FLOAT_DTYPES, check_array, given, namespace
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.types import Array

NONLINEARITIES = ("tanh", "relu")

Sizes = tuple[int, int, int]
"""``(T, B, H)``: steps, samples, hidden size."""


def check_rnn_forward(gx: Array, w_hh: Array, h0: Array, nonlinearity: str, h: Array) -> Sizes:
    """Check the arguments of `Kernels.rnn_forward`.

    Returns
    -------
    (T, B, H)

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError, OptionError
        The first argument that does not fit, with what was expected, what came and what to do.
    """
    namespace(gx=gx, w_hh=w_hh, h0=h0, h=h)
    _check_nonlinearity(nonlinearity)
    steps, batch, hidden = _check_sequence("gx", gx)
    check_array("w_hh", w_hh, dtype=gx.dtype, shape=(hidden, hidden))
    check_array("h0", h0, dtype=gx.dtype, shape=(batch, hidden))
    check_array("h", h, dtype=gx.dtype, shape=(steps, batch, hidden), written=True)
    return steps, batch, hidden


def check_rnn_backward(
    h: Array, w_hh: Array, gy: Array | None, grad_h_n: Array | None, nonlinearity: str, gz: Array, gh0: Array
) -> Sizes:
    """Check the arguments of `Kernels.rnn_backward`; returns and raises as `check_rnn_forward`."""
    namespace(h=h, w_hh=w_hh, gz=gz, gh0=gh0, **given(gy=gy, grad_h_n=grad_h_n))
    _check_nonlinearity(nonlinearity)
    steps, batch, hidden = _check_sequence("h", h)
    check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
    _check_incoming(h, gy, grad_h_n)
    check_array("gz", gz, dtype=h.dtype, shape=(steps, batch, hidden), written=True)
    check_array("gh0", gh0, dtype=h.dtype, shape=(batch, hidden), written=True)
    return steps, batch, hidden


def check_rnn_scan_backward(
    h: Array,
    w_hh: Array,
    gy: Array | None,
    grad_h_n: Array | None,
    nonlinearity: str,
    chunks: int,
    gz: Array,
    gh0: Array,
) -> Sizes:
    """Check the arguments of `Kernels.rnn_scan_backward`; returns and raises as `check_rnn_forward`."""
    sizes = check_rnn_backward(h, w_hh, gy, grad_h_n, nonlinearity, gz, gh0)
    _check_chunks(chunks, sizes[0])
    return sizes


def check_rnn_jacobians(h: Array, w_hh: Array, nonlinearity: str, out: Array) -> Sizes:
    """Check the arguments of `Kernels.rnn_jacobians`; returns and raises as `check_rnn_forward`."""
    namespace(h=h, w_hh=w_hh, out=out)
    _check_nonlinearity(nonlinearity)
    steps, batch, hidden = _check_sequence("h", h)
    check_array("w_hh", w_hh, dtype=h.dtype, shape=(hidden, hidden))
    check_array("out", out, dtype=h.dtype, shape=(steps, hidden, hidden, batch), written=True)
    return steps, batch, hidden


def check_gru_forward(gx: Array, w_hh: Array, b_hn: Array, h0: Array, h: Array, gates: Array) -> Sizes:
    """Check the arguments of `Kernels.gru_forward`; returns and raises as `check_rnn_forward`."""
    namespace(gx=gx, w_hh=w_hh, b_hn=b_hn, h0=h0, h=h, gates=gates)
    steps, batch, hidden = _check_sequence("h", h)
    check_array("h", h, written=True)
    check_array("gx", gx, dtype=h.dtype, shape=(steps, batch, 3 * hidden))
    check_array("w_hh", w_hh, dtype=h.dtype, shape=(3 * hidden, hidden))
    check_array("b_hn", b_hn, dtype=h.dtype, shape=(hidden,))
    check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
    check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden), written=True)
    return steps, batch, hidden


def check_gru_backward(
    h: Array,
    h0: Array,
    gates: Array,
    w_hh: Array,
    gy: Array | None,
    grad_h_n: Array | None,
    ga: Array,
    gh0: Array,
) -> Sizes:
    """Check the arguments of `Kernels.gru_backward`; returns and raises as `check_rnn_forward`."""
    namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, ga=ga, gh0=gh0, **given(gy=gy, grad_h_n=grad_h_n))
    steps, batch, hidden = _check_gru_saved(h, h0, gates, w_hh)
    _check_incoming(h, gy, grad_h_n)
    check_array("ga", ga, dtype=h.dtype, shape=(steps, batch, 4 * hidden), written=True)
    check_array("gh0", gh0, dtype=h.dtype, shape=(batch, hidden), written=True)
    return steps, batch, hidden


def check_gru_scan_backward(
    h: Array,
    h0: Array,
    gates: Array,
    w_hh: Array,
    gy: Array | None,
    grad_h_n: Array | None,
    chunks: int,
    ga: Array,
    gh0: Array,
) -> Sizes:
    """Check the arguments of `Kernels.gru_scan_backward`; returns and raises as `check_rnn_forward`."""
    sizes = check_gru_backward(h, h0, gates, w_hh, gy, grad_h_n, ga, gh0)
    _check_chunks(chunks, sizes[0])
    return sizes


def check_gru_jacobians(h: Array, h0: Array, gates: Array, w_hh: Array, out: Array) -> Sizes:
    """Check the arguments of `Kernels.gru_jacobians`; returns and raises as `check_rnn_forward`."""
    namespace(h=h, h0=h0, gates=gates, w_hh=w_hh, out=out)
    steps, batch, hidden = _check_gru_saved(h, h0, gates, w_hh)
    check_array("out", out, dtype=h.dtype, shape=(steps, hidden, hidden, batch), written=True)
    return steps, batch, hidden


def _check_gru_saved(h: Array, h0: Array, gates: Array, w_hh: Array) -> Sizes:
    steps, batch, hidden = _check_sequence("h", h)
    check_array("h0", h0, dtype=h.dtype, shape=(batch, hidden))
    check_array("gates", gates, dtype=h.dtype, shape=(steps, batch, 4 * hidden))
    check_array("w_hh", w_hh, dtype=h.dtype, shape=(3 * hidden, hidden))
    return steps, batch, hidden


def _check_incoming(h: Array, gy: Array | None, grad_h_n: Array | None) -> None:
    """Check the two gradients that may come in; None stands for zero."""
    if gy is not None:
        check_array("gy", gy, dtype=h.dtype, shape=h.shape)
    if grad_h_n is not None:
        check_array("grad_h_n", grad_h_n, dtype=h.dtype, shape=h.shape[1:])


def _check_sequence(name: str, array: Array) -> Sizes:
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


def _check_chunks(chunks: int, steps: int) -> None:
    if not 1 <= chunks <= steps:
        raise OptionError(
            "The number of chunks does not fit the number of steps",
            expected=f"1 <= chunks <= T = {steps}",
            got=chunks,
            remedy="Pass fewer chunks; chunks=1 is the sequential recursion",
        )
