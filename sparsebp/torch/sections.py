"""Cascades of second-order sections in PyTorch, differentiable to any order.

First gradients are one call of a kernel. Those of a section are sections again, with its poles: of the gradient at y
back from the last step, and of the terms that a change of its coefficients adds. So an `autograd.Function` whose
derivatives are made of itself, one section after the other, has them to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsebp.core.check import check_integer
from sparsebp.core.errors import DeviceError, DTypeError, ShapeError
from sparsebp.scan import sosfilt as filter_of_arrays
from sparsebp.scan import sosfilt_vjp
from sparsebp.scan.sections import shape_of_saved
from sparsebp.torch.modules import autocasts
from sparsebp.torch.ops import (
    MAY_BE_NONE,
    apply,
    below_autograd,
    is_differentiated,
    one_by_one,
    primals,
    to_array,
    to_tensor,
)
from sparsebp.torch.recurrences import HALVES

__all__ = ["sosfilt"]


def sosfilt(sos: Tensor, x: Tensor, dim: int = -1, zi: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Filter along one axis by a cascade of second-order sections, as `scipy.signal.sosfilt` does.

    Differentiable at sos, x and zi, to any order and in forward mode, also under `torch.func.vmap` and in compiled
    graphs. On the CPU.

    Parameters
    ----------
    sos
        Coefficients (S, 6), rows b0, b1, b2, a0, a1, a2 with a0 = 1, which has no gradient; any real floating-point
        dtype.
    x
        The signal, of any shape. It is summed in float64, whatever its dtype.
    dim
        The axis of the steps.
    zi
        States before the first step (S, …, 2, …): of x's shape with 2 in place of the steps; None for zeros.

    Returns
    -------
    y
        The filtered signal, of x's shape and dtype; under autocast float32 for half precision.
    zf
        The states after the last step, as zi, float64: to go on with.

    Raises
    ------
    DTypeError
        A tensor is not real and floating-point.
    DeviceError
        A tensor is sparse, or not on the CPU.
    ShapeError, OptionError
        A shape does not fit, `dim` is not an axis of x, or a0 is not 1.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> sos = torch.tensor([[1.0, 0, 0, 1, -0.5, 0]], requires_grad=True)
    >>> y, zf = st.sosfilt(sos, torch.ones(4))
    >>> y.tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> y.sum().backward()
    >>> sos.grad.tolist()
    [[6.125, 4.25, 2.5, 0.0, -5.5, -3.0]]
    """
    for name, tensor in ({"sos": sos, "x": x} | ({} if zi is None else {"zi": zi})).items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DTypeError(f"{name} has the wrong dtype", expected="a real floating-point tensor", got=got)
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise DeviceError(f"{name} is elsewhere", expected="a dense tensor on the CPU",
                              got=f"{tensor.layout} on {tensor.device}")  # fmt: skip
    if x.dim() == 0 or sos.dim() != 2 or sos.shape[1] != 6:
        raise ShapeError("x or sos has the wrong shape", expected="at least one axis, and (S, 6)",
                         got=f"{tuple(x.shape)} and {tuple(sos.shape)}")  # fmt: skip
    at = check_integer("dim", dim, -x.dim(), x.dim() - 1) % x.dim()
    of_state = (sos.shape[0], *x.shape[:at], 2, *x.shape[at + 1 :])
    if zi is not None and zi.shape != of_state:
        raise ShapeError("zi has the wrong shape", expected=of_state, got=tuple(zi.shape))
    states = x.new_zeros(of_state, dtype=torch.float64) if zi is None else zi.double()
    y, zf, _ = run(sos.double(), x.float() if x.dtype in HALVES else x, states, at)
    return y.to(x.dtype) if x.dtype in HALVES and not autocasts(x) else y, zf


# ---- the operators ---------------------------------------------------------------------------------------------------

torch.library.define("sparsebp::sosfilt", "(Tensor sos, Tensor x, Tensor zi, int dim) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "sparsebp::sosfilt_vjp",
    "(Tensor sos, Tensor x, Tensor saved, Tensor grad_y, Tensor grad_zf, int dim) -> (Tensor, Tensor, Tensor)",
)
filter_op = torch.ops.sparsebp.sosfilt.default
filter_vjp = torch.ops.sparsebp.sosfilt_vjp.default


def _compute(sos: Tensor, x: Tensor, zi: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last states, and those that the way back begins its blocks with."""
    found = filter_of_arrays(to_array(sos), x.numpy(force=True), dim, to_array(zi))
    return to_tensor(found.y), to_tensor(found.zf), to_tensor(found.saved)


torch.library.impl("sparsebp::sosfilt", "cpu", _compute)


@torch.library.impl("sparsebp::sosfilt_vjp", "cpu")
def _compute_vjp(
    sos: Tensor, x: Tensor, saved: Tensor, grad_y: Tensor, grad_zf: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    signals = x.numpy(force=True), to_array(saved), grad_y.numpy(force=True)
    found = sosfilt_vjp(to_array(sos), *signals, dim, to_array(grad_zf))
    return to_tensor(found.sos), to_tensor(found.x), to_tensor(found.zi)


@torch.library.register_fake("sparsebp::sosfilt")
def _shapes(sos: Tensor, x: Tensor, zi: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), zi.new_empty(zi.shape), zi.new_empty(shape_of_saved(len(sos), x.shape, dim))


@torch.library.register_fake("sparsebp::sosfilt_vjp")
def _shapes_of_vjp(
    sos: Tensor, x: Tensor, saved: Tensor, grad_y: Tensor, grad_zf: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    return sos.new_empty(sos.shape), x.new_empty(x.shape), grad_zf.new_empty(grad_zf.shape)


def run(sos: Tensor, x: Tensor, zi: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last and the saved states, of sos and zi in float64."""
    inputs = sos, x, zi, dim
    found: tuple[Tensor, Tensor, Tensor] = (
        filter_op(*inputs) if torch.compiler.is_compiling() else apply(Sections, *inputs)
    )
    return found


class Sections(torch.autograd.Function):
    """The operator with its derivatives; the saved states have none."""

    operator, forward = filter_op, below_autograd(filter_op, _compute)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.dim = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, output[2])
        ctx.save_for_forward(*tensors, output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> MAY_BE_NONE:
        sos, x, zi, saved = ctx.saved_tensors
        if is_differentiated():
            return *_gradients(sos, x, zi, grads[0], grads[1], ctx.dim), None
        with torch._C._AutoDispatchBelowAutograd():
            return *filter_vjp(sos, x, saved, *grads[:2], ctx.dim), None

    @staticmethod
    def jvp(ctx: Any, dsos: Tensor | None, dx: Tensor | None, dzi: Tensor | None, *_: None) -> MAY_BE_NONE:
        with primals(ctx.saved_tensors[:3]) as inputs:
            along = [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, (dsos, dx, dzi), strict=True)]
            return *_tangents(inputs, along, ctx.dim), None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], sos: Tensor, x: Tensor, zi: Tensor, dim: int) -> Any:
        """Take the mapped axis as one more of x; where coefficients are mapped, one call follows the other."""
        if in_dims[0] is not None:
            return one_by_one(run, info.batch_size, in_dims, (sos, x, zi, dim))
        x, zi = (v.expand(info.batch_size, *v.shape) if at is None else v.movedim(at, 0)
                 for v, at in zip((x, zi), in_dims[1:3], strict=True))  # fmt: skip
        return run(sos, x, zi.movedim(0, 1), dim + 1), (0, 1, None)


def _signals(sos: Tensor, x: Tensor, zi: Tensor) -> list[Tensor]:
    """Return x, with the steps last, and the outputs of all sections."""
    found = [x]
    for k in range(len(sos)):
        found.append(run(sos[k : k + 1], found[-1], zi[k : k + 1], found[-1].dim() - 1)[0])
    return found


def _by_poles(c: Tensor, x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Filter x by a section's poles alone, from the state (z, w)."""
    poles = torch.cat([c.new_tensor([1, 0, 0, 1]), c[4:]])
    return run(poles[None], x, torch.stack([z, w], -1)[None], x.dim() - 1)[0]


def _gradients(
    sos: Tensor, x: Tensor, zi: Tensor, grad_y: Tensor, grad_zf: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients at sos, x and zi by operations that can be differentiated again.

    With g the gradient at a section's y, what comes later included, it is g as well that arrives at the state z before
    a step, and at w that of the next step.
    """
    of_states = zi.movedim(dim + 1, -1), grad_zf.movedim(dim + 1, -1)
    signals, arriving = _signals(sos, x.movedim(dim, -1).double(), of_states[0]), grad_y.movedim(dim, -1).double()
    at_sos, at_zi = [], []
    for k in reversed(range(len(sos))):
        c, u, y, (z, w) = sos[k], signals[k], signals[k + 1], of_states[1][k].unbind(-1)
        g = _by_poles(c, arriving.flip(-1), -c[4] * z - c[5] * w, -c[5] * z).flip(-1)
        further = torch.cat([g, z[..., None], w[..., None]], -1)
        after, then = further[..., 1:-1], further[..., 2:]
        sums = [(g * u).sum(), (after * u).sum(), (then * u).sum(), sos.new_zeros(())]
        at_sos.append(torch.stack([*sums, -(after * y).sum(), -(then * y).sum()]))
        at_zi.append(further[..., :2])
        arriving = c[0] * g + c[1] * after + c[2] * then
    of_sos, of_zi = (torch.stack(found[::-1]) if found else like for found, like in ((at_sos, sos), (at_zi, zi)))
    return of_sos, arriving.movedim(-1, dim).to(x.dtype), of_zi.movedim(-1, dim + 1)


def _tangents(inputs: Sequence[Tensor], along: Sequence[Tensor], dim: int) -> tuple[Tensor, Tensor]:
    """Return the derivatives of y and of the last states along tangents of sos, x and zi."""
    (sos, x, zi), (dsos, dx, dzi) = inputs, along
    of_states = zi.movedim(dim + 1, -1), dzi.movedim(dim + 1, -1)
    signals, du = _signals(sos, x.movedim(dim, -1).double(), of_states[0]), dx.movedim(dim, -1).double()
    last = []
    for k in range(len(sos)):
        c, d, u, y, (z, w) = sos[k], dsos[k], signals[k], signals[k + 1], of_states[1][k].unbind(-1)
        # what a step adds to y, to z and to w, but for the poles
        to_z, to_w = c[1] * du + d[1] * u - d[4] * y, c[2] * du + d[2] * u - d[5] * y
        steps = u.shape[-1]
        delayed = functional.pad(to_z, (1, 0))[..., :steps] + functional.pad(to_w, (2, 0))[..., :steps]
        du = _by_poles(c, c[0] * du + d[0] * u + delayed, z, w)
        ws = torch.cat([w[..., None], to_w - c[5] * du], -1)
        zs = torch.cat([z[..., None], to_z - c[4] * du + ws[..., :-1]], -1)
        last.append(torch.stack([zs[..., -1], ws[..., -1]], -1))
    of_zf = torch.stack(last) if last else of_states[1]
    return du.movedim(-1, dim).to(x.dtype), of_zf.movedim(-1, dim + 1)


_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("sosfilt", Sections.apply, "Autograd")
