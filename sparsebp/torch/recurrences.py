"""Linear recurrences in PyTorch, differentiable to any order.

The gradient of a linear recurrence is one that runs the other way: with ``h[t] = a[t] * h[t-1] + b[t]``, the gradient
at b is ``g[t] = conj(a[t+1]) * g[t+1] + grad_h[t]``, and those at a and at h0 are products of g and h. The derivative
in forward mode is one as well. So an `autograd.Function` whose derivatives are made of itself has them to any order.
The first gradient, which nobody differentiates further, is one call of `sparsebp.linear_recurrence_vjp`, or, where
none at a is needed, of the recurrence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Complex, Real
from typing import Any

import torch
from torch import Tensor

from sparsebp.core import backend
from sparsebp.core.check import check_flag, check_integer
from sparsebp.core.errors import DeviceError, DTypeError, ShapeError
from sparsebp.scan import linear_recurrence as recurrence_of_arrays
from sparsebp.scan import linear_recurrence_vjp
from sparsebp.scan.recurrence import checked_lengths
from sparsebp.torch.modules import autocasts
from sparsebp.torch.ops import (
    MAY_BE_NONE,
    apply,
    below_autograd,
    is_differentiated,
    on_its_stream,
    primals,
    to_array,
    to_tensor,
)

__all__ = ["linear_recurrence"]

HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
Lengths = Tensor | Sequence[int]


def linear_recurrence(
    a: Tensor | complex, b: Tensor, h0: Tensor | None = None, *, dim: int = 0, reverse: bool = False,
    lengths: Lengths | None = None, reset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return h with ``h[t] = a[t] * h[t-1] + b[t]``, element by element, in one pass over memory.

    Differentiable at a, b and h0, to any order and in forward mode, also under `torch.func.vmap` and in compiled
    graphs. Only the gradients that are needed are computed.

    Parameters
    ----------
    a
        Factors: a number, or a tensor that broadcasts to the shape of b. They are shared along axes of length 1.
    b
        Terms (T, B, H), (T, N) or (T,), or with the steps along another axis `dim`. On the CPU, a, b and h0 are read
        where they lie, whatever their strides.
    h0
        The state before the first step, of the shape of b without the axis of the steps; None for zeros.
    dim
        The axis of the steps: 0 for (T, B, H), 1 for (B, T, H), -1 for (B, H, T). In memory, h has the steps first.
    reverse
        Go from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.
    lengths
        Valid steps of each sample, from 0 to T; the samples lie along the first of b's other axes. Beyond them nothing
        is read and h is zero, and `reverse` begins at a sample's last step. None: all have T.
    reset
        Booleans that broadcast to the shape of b: where one is true, the state before that step is cleared, also of NaN
        and infinity, and ``h[t] = b[t]``. No gradient passes through it.

    Returns
    -------
    torch.Tensor
        h, of the shape of b; complex if one of the tensors is.

    Raises
    ------
    DTypeError
        A tensor is not floating-point or complex, or they differ in precision; or `reset` is not boolean. float16 and
        bfloat16 are computed in float32, and h has their dtype; under autocast it is float32, as for `torch.cumsum`.
    DeviceError
        A tensor is sparse, or they are on different devices.
    ShapeError, OptionError
        A shape, or a length, does not fit. In compiled graphs, lengths are checked where the graph runs.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> b = torch.ones(4, requires_grad=True)
    >>> h = st.linear_recurrence(0.5, b)
    >>> h.tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> h[-1].backward()
    >>> b.grad.tolist()
    [0.125, 0.25, 0.5, 1.0]
    """
    wide_a, wide_b, start, at = _checked(a, b, h0, dim)
    given = {"a": wide_a, "b": wide_b}
    if reset is not None:
        check_reset(reset, b)
        _check_broadcasts("reset", reset, b)
        given["reset"] = reset
    full = {name: x.reshape((1,) * (b.dim() - x.dim()) + x.shape).movedim(at, 0) for name, x in given.items()}
    steps_of, shape = None if lengths is None else lengths_of(lengths, full["b"]), full["b"].shape
    # a single axis is time; the second of two is samples if they have lengths, and else units
    for axis in {1: (1, 1), 2: (1,) if lengths is None else (2,), 3: ()}[b.dim()]:
        full = {name: x.unsqueeze(axis) for name, x in full.items()}
        start = None if start is None else start.unsqueeze(axis - 1)
    h = run(full["a"], full["b"], start, steps_of, check_flag("reverse", reverse), full.get("reset"))
    h = h if h.shape == shape else h.reshape(shape)
    h = h.movedim(0, at) if at else h
    return h.to(b.dtype) if b.dtype in HALVES and not autocasts(b) else h


def _checked(a: Any, b: Any, h0: Any, dim: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return a, b and h0 in one dtype, and the axis of the steps from 0, after checking them."""
    if isinstance(a, Complex) and not isinstance(a, bool) and isinstance(b, Tensor):
        wide = b.dtype if isinstance(a, Real) else _COMPLEX.get(b.dtype, b.dtype)
        a = torch.tensor(a, dtype=wide, device=b.device)
    check_alike({"b": b, "a": a} | ({} if h0 is None else {"h0": h0}), complex_too=True)
    if not 1 <= b.dim() <= 3:
        raise ShapeError("b has the wrong shape", expected="(T, B, H), (T, N) or (T,)", got=tuple(b.shape))
    _check_broadcasts("a", a, b)
    at = check_integer("dim", dim, -b.dim(), b.dim() - 1) % b.dim()
    of_state = (*b.shape[:at], *b.shape[at + 1 :])
    if h0 is not None and h0.shape != of_state:
        raise ShapeError("h0 has the wrong shape", expected=of_state, got=tuple(h0.shape))
    is_complex = a.is_complex() or b.is_complex() or (h0 is not None and h0.is_complex())
    return _widened(a, is_complex), _widened(b, is_complex), None if h0 is None else _widened(h0, is_complex), at


def _check_broadcasts(name: str, x: Tensor, b: Tensor) -> None:
    if x.shape == b.shape:
        return
    if x.dim() > b.dim() or any(n not in (1, full) for n, full in zip(x.shape[::-1], b.shape[::-1], strict=False)):
        raise ShapeError(f"{name} has the wrong shape", expected=f"{tuple(b.shape)}, or 1 for any of them",
                         got=tuple(x.shape))  # fmt: skip


def check_reset(reset: Any, b: Tensor) -> None:
    """Check that resets are booleans where b is."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        raise DTypeError("reset has the wrong dtype", expected="a tensor of torch.bool",
                         got=reset.dtype if isinstance(reset, Tensor) else type(reset).__name__)  # fmt: skip
    if reset.layout != torch.strided or reset.device != b.device:
        raise DeviceError("reset is elsewhere", expected=f"a dense tensor on {b.device}",
                          got=f"{reset.layout} on {reset.device}")  # fmt: skip


def _widened(tensor: Tensor, to_complex: bool) -> Tensor:
    tensor = tensor.float() if tensor.dtype in HALVES else tensor
    return tensor.to(_COMPLEX.get(tensor.dtype, tensor.dtype)) if to_complex else tensor


def check_alike(given: dict[str, Any], complex_too: bool = False) -> None:
    """Check that tensors, the first of which leads, are dense, on one device, and of one precision."""
    first_name, first = next(iter(given.items()))
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{name} is not a tensor", expected="a torch.Tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.device != first.device:
            raise DeviceError(f"{name} is elsewhere", expected=f"a dense tensor on {first.device}",
                              got=f"{tensor.layout} on {tensor.device}")  # fmt: skip
        of_one = (_precision(tensor), _precision(first)) if complex_too else (tensor.dtype, first.dtype)
        if _precision(tensor) not in (*_COMPLEX, *HALVES) or of_one[0] != of_one[1]:
            kinds = "float16, bfloat16, float32, float64" + (", complex64 or complex128" if complex_too else "")
            expected = kinds if tensor is first else f"{first.dtype}, as of {first_name}"
            raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=tensor.dtype)
        if not complex_too and tensor.is_complex():
            raise DTypeError(f"{name} has the wrong dtype", expected="a real one", got=tensor.dtype)


def _precision(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's real part, under autocast float32 for half precision."""
    if tensor.is_complex():
        return tensor.dtype.to_real()
    return torch.float32 if tensor.dtype in HALVES and autocasts(tensor) else tensor.dtype


def lengths_of(lengths: Any, like: Tensor) -> Tensor:
    """Return the lengths (B,) as int64 where `like` (T, B, …) is. Their values are checked where they are used."""
    try:
        found = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)  # a copy: arrays may be read-only
    except (TypeError, ValueError, RuntimeError) as error:
        raise DTypeError("lengths are not numbers", expected="integers", got=type(lengths).__name__) from error
    if like.dim() < 2 or found.shape != like.shape[1:2]:
        expected = f"{tuple(like.shape[1:2])}, a number for each sample" if like.dim() > 1 else "None for a single axis"
        raise ShapeError("lengths has the wrong shape", expected=expected, got=tuple(found.shape))
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=found.dtype)
    return found.to(like.device, torch.int64)


def within(lengths: Tensor, like: Tensor) -> Tensor:
    """Return (T, B, 1): true before a sample's end."""
    return (torch.arange(like.shape[0], device=like.device)[:, None] < lengths)[:, :, None]


def last_states(h: Tensor, start: Tensor, lengths: Tensor | None, reverse: bool) -> Tensor:
    """Return the states (B, H) after each sample's last step in the order of the run: `start` where it has none."""
    if lengths is None:
        return h[0 if reverse else -1]
    last = h[0] if reverse else at_steps(h, (lengths - 1).clamp_min(0), h)
    return torch.where((lengths > 0)[:, None], last, start)


def array_of_lengths(lengths: Tensor | None, like: Any) -> Any:
    """Return lengths as an operator's kernel takes them, after checking their values against an array (T, B, …)."""
    (steps_of,) = _arrays(lengths)
    return checked_lengths(steps_of, like.shape, backend.namespace(like))


# ---- the operators ---------------------------------------------------------------------------------------------------

_EXTRA = "Tensor? lengths, Tensor? reset, bool reverse"
torch.library.define("sparsebp::linear_recurrence", f"(Tensor a, Tensor b, Tensor? h0, {_EXTRA}) -> Tensor")
torch.library.define(
    "sparsebp::linear_recurrence_vjp",
    f"(Tensor a, Tensor h, Tensor grad_h, Tensor? h0, {_EXTRA}) -> (Tensor, Tensor, Tensor)",
)
recurrence = torch.ops.sparsebp.linear_recurrence.default
recurrence_vjp = torch.ops.sparsebp.linear_recurrence_vjp.default


def _compute(
    a: Tensor, b: Tensor, h0: Tensor | None, lengths: Tensor | None, reset: Tensor | None, reverse: bool
) -> Tensor:
    with on_its_stream(b):
        *given, steps_of, resets = _arrays(a, b, h0, lengths, reset)
        return to_tensor(recurrence_of_arrays(*given, reverse=reverse, lengths=steps_of, reset=resets))


torch.library.impl("sparsebp::linear_recurrence", ("cpu", "cuda"), _compute)


@torch.library.impl("sparsebp::linear_recurrence_vjp", ("cpu", "cuda"))
def _compute_vjp(
    a: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor | None, lengths: Tensor | None, reset: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients at a, b and h0; the last is empty without h0."""
    with on_its_stream(h):
        *given, steps_of, resets = _arrays(a, h, grad_h, h0, lengths, reset)
        found = linear_recurrence_vjp(*given, reverse=reverse, lengths=steps_of, reset=resets)
        return to_tensor(found.a), to_tensor(found.b), h.new_empty(0) if h0 is None else to_tensor(found.h0)


def _arrays(*tensors: Tensor | None) -> list[Any]:
    """Return tensors as arrays: on the CPU with the strides that they have, on a GPU contiguous."""
    return [
        None
        if tensor is None
        else to_array(tensor.resolve_conj().contiguous())
        if tensor.is_cuda
        else tensor.resolve_conj().numpy(force=True)
        for tensor in tensors
    ]


@torch.library.register_fake("sparsebp::linear_recurrence")
def _shape(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return b.new_empty(b.shape)


@torch.library.register_fake("sparsebp::linear_recurrence_vjp")
def _shapes_of_vjp(a: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), h.new_empty(h.shape), h.new_empty((0,) if h0 is None else h0.shape)


def run(
    a: Tensor, b: Tensor, h0: Tensor | None, lengths: Tensor | None, reverse: bool, reset: Tensor | None = None
) -> Tensor:
    """Return h for checked tensors of three axes and one dtype."""
    inputs = a, b, h0, lengths, reset, reverse
    found: Tensor = recurrence(*inputs) if torch.compiler.is_compiling() else apply(Recurrence, *inputs)
    return found


class Recurrence(torch.autograd.Function):
    """The operator with its derivatives."""

    operator, forward = recurrence, below_autograd(recurrence, _compute)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, _, h0, lengths, reset, ctx.reverse = inputs
        ctx.save_for_backward(a, output if ctx.needs_input_grad[0] else None, h0, lengths, reset)
        ctx.save_for_forward(a, output, h0, lengths, reset)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> MAY_BE_NONE:
        a, h, h0, lengths, reset = ctx.saved_tensors
        if h is None or is_differentiated():
            found = gradients(a, h, grads[0], h0, lengths, ctx.reverse, reset)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                found = recurrence_vjp(a, h, grads[0], h0, lengths, reset, ctx.reverse)
        return found[0], found[1], None if h0 is None else found[2], None, None, None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, dh0: Tensor | None, *_: None) -> Tensor:
        """``dh[t] = a[t] * dh[t-1] + da[t] * h[t-1] + db[t]``."""
        with primals(ctx.saved_tensors) as (a, h, h0, lengths, reset):
            terms = torch.zeros_like(h) if db is None else db
            if da is not None:
                da = da if lengths is None else torch.where(within(lengths, h), da, 0)
                terms = terms + kept(da, reset) * before(h, h0, lengths, ctx.reverse, reset)
            return run(a, terms, dh0, lengths, ctx.reverse, reset)

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, h0: Tensor | None, lengths: Tensor | None,
        reset: Tensor | None, reverse: bool,
    ) -> Any:  # fmt: skip
        """Take the mapped axis as more samples."""
        sizes = info.batch_size, samples_of(b, in_dims[1])
        start, steps_of = (None if x is None else folded(x, dim, 0, sizes)
                           for x, dim in zip((h0, lengths), in_dims[2:4], strict=True))  # fmt: skip
        of_a, of_reset = (
            None if x is None else folded(x, dim, 1, None if dim is None and x.shape[1] == 1 else sizes)
            for x, dim in ((a, in_dims[0]), (reset, in_dims[4]))
        )
        given: Any = of_a, folded(b, in_dims[1], 1, sizes), start, steps_of, reverse, of_reset
        found = run(*given)
        return found.unflatten(1, sizes), 1


def samples_of(x: Tensor, dim: int | None) -> int:
    """Return the number of samples of x (T, B, H), which has a mapped axis `dim` or none."""
    return x.shape[1 if dim is None else [n for n in range(4) if n != dim][1]]


def folded(x: Tensor, dim: int | None, at: int, sizes: tuple[int, int] | None) -> Tensor:
    """Return x with the mapped axis joined to the one of samples, number `at`; both spread to `sizes`, if given."""
    x = x.unsqueeze(at) if dim is None else x.movedim(dim, at)
    shape = list(x.shape)
    shape[at : at + 2] = shape[at : at + 2] if sizes is None else sizes
    return x.expand(shape).flatten(at, at + 1)


def before(h: Tensor, h0: Tensor | None, lengths: Tensor | None, reverse: bool, reset: Tensor | None = None) -> Tensor:
    """Return the state before each step, 0 where it does not matter: after a reset, and beyond a sample's length."""
    if len(h) == 0:
        return h
    start = torch.zeros_like(h[:1]) if h0 is None else h0[None]
    found = kept(torch.cat([h[1:], start] if reverse else [start, h[:-1]]), reset)
    if lengths is None:
        return found
    if not reverse:
        return torch.where(within(lengths, h), found, 0)
    return torch.where(within(lengths - 1, h), found, torch.where(within(lengths, h), kept(start, reset), 0))


def kept(x: Tensor, reset: Tensor | None) -> Tensor:
    """Return x with 0 at resets."""
    return x if reset is None else torch.where(reset, 0, x)


def _of_step_after(x: Tensor, reverse: bool) -> Tensor:
    """Return x, of every step or of all, with every step's in the place of the step before; 0 comes in."""
    if len(x) == 1:
        return x
    none = torch.zeros_like(x[:1])
    return torch.cat([none, x[:-1]] if reverse else [x[1:], none])


def gradients(
    a: Tensor, h: Tensor | None, grad_h: Tensor, h0: Tensor | None, lengths: Tensor | None, reverse: bool,
    reset: Tensor | None = None,
) -> tuple[Any, Tensor, Any]:  # fmt: skip
    """Return the gradients at a, b and h0 by operations that can be differentiated again; at a None without h."""
    start, after = None if h0 is None else torch.zeros_like(h0), _of_step_after(a.conj(), reverse)
    if len(a) > 1 and lengths is not None and not reverse:  # after a sample's last step there is only padding
        after = torch.where(within(lengths - 1, grad_h), after, 0)
    g = run(after, grad_h, start, lengths, not reverse, None if reset is None else _of_step_after(reset, reverse))
    at_a = None
    if h is not None:
        at_a = (kept(g, reset) * before(h, h0, lengths, reverse, reset).conj()).sum_to_size(a.shape)
    if h0 is None or len(g) == 0:
        return at_a, g, start
    if lengths is None:
        first = -1 if reverse else 0
        at = None if reset is None else reset[first]
        return at_a, g, kept(a[first].conj(), at) * kept(g[first], at)
    firsts = (lengths - 1 if reverse else torch.zeros_like(lengths)).clamp_min(0)
    passes = (lengths > 0)[:, None] if reset is None else (lengths > 0)[:, None] & ~at_steps(reset, firsts, g)
    factors, arriving = (torch.where(passes, at_steps(x, firsts, g), 0) for x in (a.conj(), g))
    return at_a, g, factors * arriving


def at_steps(x: Tensor, steps: Tensor, like: Tensor) -> Tensor:
    """Return what x, of the shape of `like` (T, B, H) or shared, is at one step of each sample (B, H)."""
    return x.expand(like.shape).gather(0, steps[None, :, None].expand(1, *like.shape[1:]))[0]


# As in `sparsebp.torch.ops`: with `torch.library.register_autograd` instead, tangents would silently be dropped.
_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("linear_recurrence", Recurrence.apply, "Autograd")
