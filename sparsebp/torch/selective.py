"""The selective scan of Mamba in PyTorch, differentiable to any order.

First gradients are one call of a kernel, which keeps no states but one in 32 steps; all others are those of the same
function in terms of `linear_recurrence`, with all states in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebp.core.check import check_flag
from sparsebp.core.errors import ShapeError
from sparsebp.kernels.checks import kept_states
from sparsebp.scan import selective_scan as scan_of_arrays
from sparsebp.scan import selective_scan_vjp
from sparsebp.scan.selective import check_reset_shape, shapes_of
from sparsebp.torch import recurrences
from sparsebp.torch.modules import autocasts
from sparsebp.torch.ops import (
    MAY_BE_NONE,
    apply,
    below_autograd,
    gradients,
    is_differentiated,
    on_its_stream,
    one_by_one,
    primals,
    tangents,
    to_array,
    to_tensor,
)
from sparsebp.torch.recurrences import (
    HALVES,
    Lengths,
    array_of_lengths,
    check_alike,
    check_reset,
    folded,
    kept,
    lengths_of,
    samples_of,
    within,
)

__all__ = ["selective_scan"]


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, h0: Tensor | None = None, *,
    reverse: bool = False, lengths: Lengths | None = None, reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y with ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]`` and ``y[t] = Σ_n c[t, n] h[t, n] + d x[t]``.

    Differentiable at all tensors, to any order and in forward mode, also under `torch.func.vmap` and in compiled
    graphs. `mamba_ssm`'s ``selective_scan_fn`` has time as its last axis, and softplus and gate in itself.

    Parameters
    ----------
    x
        The input (T, B, E).
    dt
        Step sizes (T, B, E), positive in Mamba: after its softplus.
    a
        Rates of the states (E, N), negative in Mamba.
    b, c
        What the states take in and give out (T, B, N), the same for all channels.
    d
        The skip connection's weights (E,); None for none.
    h0
        The state before the first step (B, E, N); None for zeros.
    reverse
        Go from the last step to the first.
    lengths
        Valid steps of each sample (B,), from 0 to T; beyond them nothing is read and y is zero, and `reverse` begins at
        a sample's last step. None: all have T.
    reset
        Booleans (T, B), or (T,) for all samples: where one is true, the states before that step are cleared, also of
        NaN and infinity, and ``h[t] = dt[t] b[t] x[t]``. No gradient passes through it.

    Returns
    -------
    y
        The output (T, B, E).
    h_n
        The state after the last step (B, E, N); with lengths, each sample's last valid one.

    Raises
    ------
    DTypeError
        A tensor is not real and floating-point, or has another dtype than x. float16 and bfloat16 are computed in
        float32, and the results have their dtype; under autocast they are float32. Or `reset` is not boolean.
    DeviceError
        A tensor is sparse, or they are on different devices.
    ShapeError, OptionError
        A shape, or a length, does not fit.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> ones = torch.ones(3, 1, 1)
    >>> y, h_n = st.selective_scan(ones, ones, torch.zeros(1, 1), ones, ones)  # a = 0: sums
    >>> y.flatten().tolist()
    [1.0, 2.0, 3.0]
    """
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c}
    given |= {name: tensor for name, tensor in (("d", d), ("h0", h0)) if tensor is not None}
    check_alike(given)
    shapes = shapes_of(x.shape, a.shape)
    for name, tensor in given.items():
        if tensor.shape != shapes[name]:
            raise ShapeError(f"{name} has the wrong shape", expected=tuple(shapes[name]), got=tuple(tensor.shape))
    dtype, reverse = x.dtype if x.dtype in HALVES and not autocasts(x) else None, check_flag("reverse", reverse)
    x, dt, a, b, c = (tensor.float() if tensor.dtype in HALVES else tensor for tensor in (x, dt, a, b, c))
    d, h0 = (given[name].to(x.dtype) if name in given else x.new_zeros(shapes[name]) for name in ("d", "h0"))
    n = steps = None
    if reset is not None:
        check_reset(reset, x)
        check_reset_shape(tuple(reset.shape), tuple(x.shape))
        reset = (reset[:, None] if reset.dim() == 1 else reset).expand(x.shape[:2])
    if lengths is not None:
        # where dt is 0, the state stays as it is
        n = lengths_of(lengths, x)
        valid = within(n, x)
        x, dt, b, c = (torch.where(valid, tensor, 0) for tensor in (x, dt, b, c))
        reset = None if reset is None else reset & valid[:, :, 0]
        time = torch.arange(len(x), device=x.device)[:, None]
        steps = torch.where(valid[:, :, 0], (n - 1).clamp_max(len(x) - 1) - time, time) if reverse else None
    if reverse:
        x, dt, b, c = (_reversed(tensor, steps) for tensor in (x, dt, b, c))
        reset = None if reset is None else _reversed(reset[:, :, None], steps)[:, :, 0]
    y, h_n, _ = run(x, dt, a, b, c, d, h0, n, reset)
    y = _reversed(y, steps) if reverse else y
    if lengths is not None:
        y = torch.where(valid, y, 0)
    return (y, h_n) if dtype is None else (y.to(dtype), h_n.to(dtype))


def _reversed(x: Tensor, steps: Tensor | None) -> Tensor:
    """Return x (T, B, n) reversed in time; `steps` (T, B) says which step comes where."""
    return x.flip(0) if steps is None else x.gather(0, steps[:, :, None].expand(x.shape))


# ---- the operators ---------------------------------------------------------------------------------------------------

_INPUTS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor h0"
torch.library.define(
    "sparsebp::selective_scan", f"({_INPUTS}, Tensor? lengths, Tensor? reset) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "sparsebp::selective_scan_vjp",
    f"({_INPUTS}, Tensor states, Tensor grad_y, Tensor grad_h_n, Tensor? reset) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
scan = torch.ops.sparsebp.selective_scan.default
scan_vjp = torch.ops.sparsebp.selective_scan_vjp.default


def _compute(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state, and the states that the way back begins with; lengths are checked alone."""
    *operands, lengths, reset = inputs
    with on_its_stream(operands[0]):
        arrays = [*map(to_array, operands)]
        array_of_lengths(lengths, arrays[0])
        found = scan_of_arrays(*arrays, reset=_array(reset))
        return to_tensor(found.y), to_tensor(found.h_n.copy()), to_tensor(found.states)


torch.library.impl("sparsebp::selective_scan", ("cpu", "cuda"), _compute)


@torch.library.impl("sparsebp::selective_scan_vjp", ("cpu", "cuda"))
def _compute_vjp(*inputs: Any) -> tuple[Tensor, ...]:
    *operands, _, states, grad_y, grad_h_n, reset = inputs
    with on_its_stream(grad_y):
        arrays = map(to_array, (*operands, states, grad_y, grad_h_n))
        return tuple(to_tensor(grad) for grad in selective_scan_vjp(*arrays, reset=_array(reset)))


def _array(reset: Tensor | None) -> Any:
    return None if reset is None else to_array(reset)


@torch.library.register_fake("sparsebp::selective_scan")
def _shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, h0 = inputs[0], inputs[6]
    batch, channels, order = h0.shape
    return x.new_empty(x.shape), x.new_empty(h0.shape), x.new_empty((kept_states(x.shape[0]), batch, order, channels))


@torch.library.register_fake("sparsebp::selective_scan_vjp")
def _shapes_of_vjp(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:7])


def run(*inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state and the kept states."""
    found: tuple[Tensor, Tensor, Tensor] = (
        scan(*inputs) if torch.compiler.is_compiling() else apply(SelectiveScan, *inputs)
    )
    return found


def _by_recurrence(
    reset: Tensor | None, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y and the last state, with all states in memory."""
    flags = None if reset is None else reset[:, :, None]
    # before and after the product with a: its derivatives, zero at resets, meet no NaN
    exponents = kept(kept(dt, flags)[..., None] * a, None if flags is None else flags[..., None])
    terms = (dt * x)[..., None] * b[:, :, None]
    wide = torch.exp(exponents).flatten(2), terms.flatten(2), h0.flatten(1)
    h = recurrences.run(*wide, None, False, flags).unflatten(2, a.shape)
    return (h @ c[..., None])[..., 0] + d * x, h[-1] if len(x) else h0


class SelectiveScan(torch.autograd.Function):
    """The operator with its derivatives; the kept states have none."""

    operator, forward = scan, below_autograd(scan, _compute)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs[:7], output[2], inputs[8])
        ctx.save_for_forward(*inputs[:7], inputs[8])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> MAY_BE_NONE:
        *saved, reset = ctx.saved_tensors
        if is_differentiated():
            return *gradients(partial(_by_recurrence, reset), tuple(saved[:7]), grads[:2]), None, None
        with torch._C._AutoDispatchBelowAutograd():
            found: tuple[Tensor, ...] = scan_vjp(*saved, *grads[:2], reset)
        needed = zip(found, ctx.needs_input_grad, strict=False)
        return *(grad if needs else None for grad, needs in needed), None, None

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> MAY_BE_NONE:
        with primals(ctx.saved_tensors) as inputs:
            *operands, reset = inputs
            return *tangents(partial(_by_recurrence, reset), tuple(operands), along[:7]), None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
        """Take the mapped axis as more samples; where rates or skip weights are mapped, one call follows the other."""
        if in_dims[2] is not None or in_dims[5] is not None:
            return one_by_one(run, info.batch_size, in_dims, inputs)
        sizes, at = (info.batch_size, samples_of(inputs[0], in_dims[0])), (1, 1, None, 1, 1, None, 0, 0, 1)
        wide = [i if place is None or i is None else folded(i, dim, place, sizes)
                for i, dim, place in zip(inputs, in_dims, at, strict=True)]  # fmt: skip
        y, h_n, states = run(*wide)
        return (y.unflatten(1, sizes), h_n.unflatten(0, sizes), states.unflatten(1, sizes)), (1, 0, 1)


_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("selective_scan", SelectiveScan.apply, "Autograd")
