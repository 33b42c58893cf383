"""Linear recurrences in PyTorch, differentiable to any order, and `MinGRU` on top of them.

The gradient of a linear recurrence is one that runs the other way: with ``h[t] = a[t] * h[t-1] + b[t]``, the gradient
at b is ``g[t] = conj(a[t+1]) * g[t+1] + grad_h[t]``, and those at a and at h0 are products of g and h. The derivative
in forward mode is one as well. So an `autograd.Function` whose derivatives are made of itself has them to any order.
The first gradient, which nobody differentiates further, is one call of `sparsebp.linear_recurrence_vjp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import check_choice, check_flag, check_integer, check_number
from sparsebp.core.errors import DeviceError, DTypeError, ShapeError
from sparsebp.nn.recurrent.gated import OPEN, Candidate
from sparsebp.scan import linear_recurrence as recurrence_of_arrays
from sparsebp.scan import linear_recurrence_vjp
from sparsebp.torch.modules import autocasts, cast_input, check_dense, check_lengths, check_tensors, without_autocast
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

__all__ = ["MinGRU", "linear_recurrence"]

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def linear_recurrence(
    a: Tensor, b: Tensor, h0: Tensor | None = None, *, reverse: bool = False, lengths: Tensor | list[int] | None = None
) -> Tensor:
    """Return h with ``h[t] = a[t] * h[t-1] + b[t]``, element by element, in one pass over memory.

    Differentiable at a, b and h0, to any order and in forward mode, also under `torch.func.vmap` and in compiled
    graphs.

    Parameters
    ----------
    a
        Factors: of the shape of b, or 1 along any axis, where all share its factors.
    b
        Terms (T, B, H).
    h0
        The state before the first step (B, H); None for zeros.
    reverse
        Go from the last step to the first: ``h[t] = a[t] * h[t+1] + b[t]``.
    lengths
        Valid steps of each sample (B,), from 1 to T; beyond them h is zero. None: all have T.

    Returns
    -------
    torch.Tensor
        h (T, B, H).

    Raises
    ------
    DTypeError
        A tensor is not float32, float64, complex64 or complex128, or they differ. Under autocast, half precision
        becomes float32, as for `torch.cumsum`.
    DeviceError
        A tensor is sparse, or they are on different devices.
    ShapeError, OptionError
        A shape, or a length, does not fit.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> a, b = torch.full((1, 1, 1), 0.5), torch.ones(4, 1, 1, requires_grad=True)
    >>> h = st.linear_recurrence(a, b)
    >>> h.flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> h[-1].sum().backward()
    >>> b.grad.flatten().tolist()
    [0.125, 0.25, 0.5, 1.0]
    """
    if isinstance(b, Tensor) and autocasts(b):
        a, b = _widened(a), _widened(b)
        h0 = h0 if h0 is None else _widened(h0)
    _check(a, b, h0)
    if lengths is not None:
        # In the padding a is 1 and b 0, so a reversed run comes to a sample's last step with its first state.
        valid = _valid(check_lengths(lengths, *b.shape[:2]), b)
        a, b = torch.where(valid, a, 1), torch.where(valid, b, 0)
    h = _run(a, b, b.new_zeros(b.shape[1:]) if h0 is None else h0, bool(reverse))
    return h if lengths is None else torch.where(valid, h, 0)


def _widened(x: Tensor) -> Tensor:
    return x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x


def _check(a: Any, b: Any, h0: Any) -> None:
    given = {"b": b, "a": a} | ({} if h0 is None else {"h0": h0})
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{name} is not a tensor", expected="a torch.Tensor", got=type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.device != b.device:
            raise DeviceError(f"{name} is elsewhere", expected=f"a dense tensor on {b.device}",
                              got=f"{tensor.layout} on {tensor.device}")  # fmt: skip
        if tensor.dtype not in DTYPES or tensor.dtype != b.dtype:
            expected = "float32, float64, complex64 or complex128" if tensor is b else f"{b.dtype}, as of b"
            raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=tensor.dtype)
    if b.dim() != 3:
        raise ShapeError("b has the wrong shape", expected="(T, B, H)", got=tuple(b.shape))
    if a.dim() != 3 or any(n not in (1, full) for n, full in zip(a.shape, b.shape, strict=True)):
        raise ShapeError("a has the wrong shape", expected=f"{tuple(b.shape)}, or 1 for any of them",
                         got=tuple(a.shape))  # fmt: skip
    if h0 is not None and h0.shape != b.shape[1:]:
        raise ShapeError("h0 has the wrong shape", expected=tuple(b.shape[1:]), got=tuple(h0.shape))


def _valid(lengths: Tensor, b: Tensor) -> Tensor:
    """Return (T, B, 1): true before a sample's end."""
    return (torch.arange(b.shape[0], device=b.device)[:, None] < lengths.to(b.device))[:, :, None]


# ---- the operators ---------------------------------------------------------------------------------------------------

torch.library.define("sparsebp::linear_recurrence", "(Tensor a, Tensor b, Tensor h0, bool reverse) -> Tensor")
torch.library.define(
    "sparsebp::linear_recurrence_vjp",
    "(Tensor a, Tensor h, Tensor grad_h, Tensor h0, bool reverse) -> (Tensor, Tensor, Tensor)",
)
recurrence = torch.ops.sparsebp.linear_recurrence.default
recurrence_vjp = torch.ops.sparsebp.linear_recurrence_vjp.default


def _compute(a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    with on_its_stream(b):
        return to_tensor(recurrence_of_arrays(*map(_array, (a, b, h0)), reverse=reverse))


torch.library.impl("sparsebp::linear_recurrence", ("cpu", "cuda"), _compute)


@torch.library.impl("sparsebp::linear_recurrence_vjp", ("cpu", "cuda"))
def _compute_vjp(
    a: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with on_its_stream(h):
        found = linear_recurrence_vjp(*map(_array, (a, h, grad_h, h0)), reverse=reverse)
        return to_tensor(found.a), to_tensor(found.b), to_tensor(found.h0)


def _array(tensor: Tensor) -> Any:
    return to_array(tensor.resolve_conj())


@torch.library.register_fake("sparsebp::linear_recurrence")
def _shape(a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    return b.new_empty(b.shape)


@torch.library.register_fake("sparsebp::linear_recurrence_vjp")
def _shapes_of_vjp(a: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), h.new_empty(h.shape), h0.new_empty(h0.shape)


def _run(a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    inputs = a, b, h0, reverse
    found: Tensor = recurrence(*inputs) if torch.compiler.is_compiling() else apply(Recurrence, *inputs)
    return found


class Recurrence(torch.autograd.Function):
    """The operator with its derivatives."""

    operator, forward = recurrence, below_autograd(recurrence, _compute)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, _, h0, ctx.reverse = inputs
        ctx.save_for_backward(a, output, h0)
        ctx.save_for_forward(a, output, h0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> MAY_BE_NONE:
        a, h, h0 = ctx.saved_tensors
        if is_differentiated():
            return *_gradients(a, h, grads[0], h0, ctx.reverse), None
        with torch._C._AutoDispatchBelowAutograd():
            return *recurrence_vjp(a, h, grads[0], h0, ctx.reverse), None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, dh0: Tensor | None, _: None) -> Tensor:
        """``dh[t] = a[t] * dh[t-1] + da[t] * h[t-1] + db[t]``."""
        with primals(ctx.saved_tensors) as (a, h, h0):
            terms = torch.zeros_like(h) if db is None else db
            if da is not None:
                terms = terms + da * _before(h, h0, ctx.reverse)
            return _run(a, terms, torch.zeros_like(h0) if dh0 is None else dh0, ctx.reverse)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], a: Tensor, b: Tensor, h0: Tensor, reverse: bool) -> Any:
        """Take the mapped axis as more samples."""
        sizes = info.batch_size, _samples(b, in_dims[1])
        shared = in_dims[0] is None and a.shape[1] == 1
        found = _run(
            _folded(a, in_dims[0], 1, None if shared else sizes), _folded(b, in_dims[1], 1, sizes),
            _folded(h0, in_dims[2], 0, sizes), reverse,
        )  # fmt: skip
        return found.unflatten(1, sizes), 1


def _samples(x: Tensor, dim: int | None) -> int:
    """Return the number of samples of x (T, B, H), which has a mapped axis `dim` or none."""
    return x.shape[1 if dim is None else [n for n in range(4) if n != dim][1]]


def _folded(x: Tensor, dim: int | None, at: int, sizes: tuple[int, int] | None) -> Tensor:
    """Return x with the mapped axis joined to the one of samples, number `at`; both spread to `sizes`, if given."""
    x = x.unsqueeze(at) if dim is None else x.movedim(dim, at)
    shape = list(x.shape)
    shape[at : at + 2] = shape[at : at + 2] if sizes is None else sizes
    return x.expand(shape).flatten(at, at + 1)


def _before(h: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step."""
    return torch.cat([h[1:], h0[None]] if reverse else [h0[None], h[:-1]]) if len(h) else h


def _gradients(a: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients at a, b and h0 by operations that can be differentiated again."""
    factors = a.conj()
    if len(a) > 1:  # those of the step after
        none = torch.zeros_like(factors[:1])
        factors = torch.cat([none, factors[:-1]] if reverse else [factors[1:], none])
    g = _run(factors, grad_h, torch.zeros_like(h0), not reverse)
    at_a = (g * _before(h, h0, reverse).conj()).sum_to_size(a.shape)
    if len(h) == 0:
        return at_a, g, torch.zeros_like(h0)
    first = -1 if reverse else 0
    return at_a, g, (a[first].conj() * g[first])


# As in `sparsebp.torch.ops`: with `torch.library.register_autograd` instead, tangents would silently be dropped.
_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("linear_recurrence", Recurrence.apply, "Autograd")


# ---- the minGRU, whose kernel makes factors and terms itself -------------------------------------------------------

torch.library.define("sparsebp::min_gru", "(Tensor p, Tensor h0, str nonlinearity, bool reverse) -> Tensor")
torch.library.define(
    "sparsebp::min_gru_vjp",
    "(Tensor p, Tensor h, Tensor grad_h, Tensor h0, str nonlinearity, bool reverse) -> (Tensor, Tensor)",
)
min_gru = torch.ops.sparsebp.min_gru.default
min_gru_vjp = torch.ops.sparsebp.min_gru_vjp.default


def _compute_min_gru(p: Tensor, h0: Tensor, nonlinearity: str, reverse: bool) -> Tensor:
    with on_its_stream(p):
        x, start = to_array(p.contiguous()), to_array(h0.contiguous())
        xp = backend.namespace(x)
        h = host_pool.empty(xp, (*x.shape[:2], start.shape[1]), x.dtype)
        kernels.get(xp).min_gru_forward(x, start, None, nonlinearity, reverse, h)
        return to_tensor(h)


torch.library.impl("sparsebp::min_gru", ("cpu", "cuda"), _compute_min_gru)


@torch.library.impl("sparsebp::min_gru_vjp", ("cpu", "cuda"))
def _compute_min_gru_vjp(
    p: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, nonlinearity: str, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with on_its_stream(p):
        given = [to_array(tensor.contiguous()) for tensor in (p, h, grad_h, h0)]
        xp = backend.namespace(given[0])
        gp, gh0 = (host_pool.empty(xp, tuple(tensor.shape), given[0].dtype) for tensor in (p, h0))
        kernels.get(xp).min_gru_backward(*given, None, nonlinearity, reverse, gp, gh0)
        return to_tensor(gp), to_tensor(gh0)


@torch.library.register_fake("sparsebp::min_gru")
def _shape_of_min_gru(p: Tensor, h0: Tensor, nonlinearity: str, reverse: bool) -> Tensor:
    return p.new_empty((*p.shape[:2], h0.shape[1]))


@torch.library.register_fake("sparsebp::min_gru_vjp")
def _shapes_of_min_gru_vjp(
    p: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, nonlinearity: str, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return p.new_empty(p.shape), h0.new_empty(h0.shape)


def _run_min_gru(p: Tensor, h0: Tensor, nonlinearity: str, reverse: bool) -> Tensor:
    inputs = p, h0, nonlinearity, reverse
    found: Tensor = min_gru(*inputs) if torch.compiler.is_compiling() else apply(MinGRURun, *inputs)
    return found


class MinGRURun(torch.autograd.Function):
    """The operator with its derivatives; those that are differentiated again are made of `Recurrence`."""

    operator, forward = min_gru, below_autograd(min_gru, _compute_min_gru)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        p, h0, *ctx.options = inputs
        ctx.save_for_backward(p, output, h0)
        ctx.save_for_forward(p, output, h0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> MAY_BE_NONE:
        p, h, h0 = ctx.saved_tensors
        if not is_differentiated():
            with torch._C._AutoDispatchBelowAutograd():
                return *min_gru_vjp(p, h, grads[0], h0, *ctx.options), None, None
        nonlinearity, reverse = ctx.options
        z, rest, c, slope = _gate_and_candidate(p, nonlinearity)
        at_a, at_b, at_h0 = _gradients(rest, h, grads[0], h0, reverse)
        return torch.cat(((at_b * c - at_a) * z * rest, at_b * z * slope), 2), at_h0, None, None

    @staticmethod
    def jvp(ctx: Any, dp: Tensor | None, dh0: Tensor | None, *_: None) -> Tensor:
        """``dh[t] = (1 - z) dh[t-1] + dz (c - h[t-1]) + z dc``."""
        with primals(ctx.saved_tensors) as (p, h, h0):
            nonlinearity, reverse = ctx.options
            z, rest, c, slope = _gate_and_candidate(p, nonlinearity)
            terms = torch.zeros_like(h)
            if dp is not None:
                du, dv = dp.chunk(2, dim=2)
                terms = du * z * rest * (c - _before(h, h0, reverse)) + z * slope * dv
            return _run(rest, terms, torch.zeros_like(h0) if dh0 is None else dh0, reverse)

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], p: Tensor, h0: Tensor, nonlinearity: str, reverse: bool
    ) -> Any:  # fmt: skip
        """Take the mapped axis as more samples."""
        sizes = info.batch_size, _samples(p, in_dims[0])
        given = _folded(p, in_dims[0], 1, sizes), _folded(h0, in_dims[1], 0, sizes)
        return _run_min_gru(*given, nonlinearity, reverse).unflatten(1, sizes), 1


def _gate_and_candidate(p: Tensor, nonlinearity: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z, 1 - z, c and c's slope."""
    u, v = p.chunk(2, dim=2)
    z, rest = u.sigmoid(), (-u).sigmoid()
    if nonlinearity == "identity":
        return z, rest, v, torch.ones_like(v)
    s = v.sigmoid()
    return z, rest, torch.where(v >= 0, v + 0.5, s), torch.where(v >= 0, 1.0, s * (1 - s))


_LIBRARY.impl("min_gru", MinGRURun.apply, "Autograd")


# ---- MinGRU ----------------------------------------------------------------------------------------------------------


class MinGRU(torch.nn.Module):
    """A GRU without the state in its gates, ``h[t] = (1 - z[t]) * h[t-1] + z[t] * c[t]``; as `sparsebp.nn.MinGRU`.

    ``z = σ(W_iz x + b_iz)``, and c is ``v = W_in x + b_in`` or a function of it. Weights move to and from
    `sparsebp.nn.MinGRU` by `state_dict`.

    Parameters
    ----------
    input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        As of `torch.nn.GRU`.
    nonlinearity
        ``"identity"``: c = v. ``"positive"``: c = v + 0.5 where v ≥ 0, else σ(v).
    device, dtype
        As of `torch.nn.GRU`; float32 or float64.

    Notes
    -----
    Parameters: ``weight_ih_l{k}`` (2H, input), rows of z, then of v; ``bias_ih_l{k}`` (2H,); with the suffix
    ``_reverse`` for the second direction. All from U(±1/√input).

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?", 2024.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> y, h_n = st.MinGRU(3, 5, num_layers=2)(torch.randn(7, 4, 3))
    >>> y.shape, h_n.shape
    (torch.Size([7, 4, 5]), torch.Size([2, 4, 5]))
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, *, nonlinearity: Candidate = "identity",
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_size, self.hidden_size = (
            check_integer(name, size, 1) for name, size in (("input_size", input_size), ("hidden_size", hidden_size))
        )
        self.num_layers, self.dropout = (
            check_integer("num_layers", num_layers, 1),
            check_number("dropout", dropout, 0, 1),
        )
        self.bias, self.batch_first = check_flag("bias", bias), check_flag("batch_first", batch_first)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.nonlinearity: Candidate = check_choice("nonlinearity", nonlinearity, get_args(Candidate))
        for layer in range(num_layers):
            features = input_size if layer == 0 else hidden_size * (2 if bidirectional else 1)
            for name in self._names(layer):
                shapes = {"weight_ih": (2 * hidden_size, features)} | ({"bias_ih": (2 * hidden_size,)} if bias else {})
                for kind, shape in shapes.items():
                    self.register_parameter(
                        kind + name, torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    )
        self.reset_parameters()

    def _names(self, layer: int) -> list[str]:
        """Return the ends of the names of a layer's parameters, one a direction."""
        return [f"_l{layer}", f"_l{layer}_reverse"][: 2 if self.bidirectional else 1]

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for layer in range(self.num_layers):
            for name in self._names(layer):
                bound = getattr(self, "weight_ih" + name).shape[1] ** -0.5
                for kind in ("weight_ih", "bias_ih") if self.bias else ("weight_ih",):
                    torch.nn.init.uniform_(getattr(self, kind + name), -bound, bound)

    def extra_repr(self) -> str:
        """Return the arguments that are not the default."""
        given = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False,
                 "nonlinearity": "identity"}  # fmt: skip
        more = [f"{name}={getattr(self, name)}" for name, default in given.items() if getattr(self, name) != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *more])

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, lengths: Tensor | list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers.

        Parameters
        ----------
        input
            (T, B, input_size), with ``batch_first`` (B, T, input_size), or unbatched (T, input_size); float32 or
            float64. Under autocast it is converted to the dtype of the weights.
        hx
            The initial state (num_layers · directions, B, hidden_size), or None for zeros; unbatched without B.
        lengths
            Valid steps of each sample (B,), from 1 to T. Later input has no influence, later output is zero, and the
            last state is the last valid one.

        Returns
        -------
        output
            The last layer's states (T, B, directions · hidden_size), laid out as the input.
        h_n
            The last states, as `hx`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, or T is 0.
        """
        x, hx = self._checked(input, hx, lengths)
        unbatched = x.dim() == 2
        if unbatched:
            x, hx = x.unsqueeze(1), hx if hx is None else hx.unsqueeze(1)
        elif self.batch_first:
            x = x.transpose(0, 1)
        last: list[Tensor] = []
        with without_autocast(x):
            n = None if lengths is None else check_lengths(lengths, *x.shape[:2])
            if n is not None:
                x = torch.where(_valid(n, x), x, 0)  # so that NaN in the padding cannot spread
            for layer in range(self.num_layers):
                if layer and self.dropout:
                    x = functional.dropout(x, self.dropout, self.training)
                outputs = []
                for direction, name in enumerate(self._names(layer)):
                    y = self._direction(x, None if hx is None else hx[len(last)], n, name, direction == 1)
                    outputs.append(y)
                    last.append(y[0] if direction else y[-1] if n is None else _at_ends(y, n))
                x = torch.cat(outputs, 2)
        h_n = torch.stack(last)
        if unbatched:
            return x.squeeze(1), h_n.squeeze(1)
        return x.transpose(0, 1) if self.batch_first else x, h_n

    def _direction(self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, name: str, reverse: bool) -> Tensor:
        weight, bias = getattr(self, "weight_ih" + name), getattr(self, "bias_ih" + name) if self.bias else None
        p = functional.linear(x, weight, bias)
        start = p.new_zeros((p.shape[1], self.hidden_size)) if h0 is None else h0
        if lengths is None:
            return _run_min_gru(p, start, self.nonlinearity, reverse)
        valid = _valid(lengths, p)  # in the padding the gate is shut, and the state stays what it is
        shut = torch.cat((p.new_full((self.hidden_size,), -OPEN), p.new_zeros(self.hidden_size)))
        h = _run_min_gru(torch.where(valid, p, shut), start, self.nonlinearity, reverse)
        return torch.where(valid, h, 0)

    def _checked(self, x: Any, hx: Any, lengths: Any) -> tuple[Tensor, Tensor | None]:
        """Return the input and the state, under autocast in the dtype of the weights."""
        check_dense("MinGRU", "input", x)
        weight: Any = self.weight_ih_l0
        x = cast_input("MinGRU", x, weight)
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size or (lengths is not None and x.dim() == 2):
            raise ShapeError("input has the wrong shape", expected=f"(T, B, {self.input_size}), batch first if asked "
                             "for, or without lengths unbatched", got=tuple(x.shape))  # fmt: skip
        if x.shape[1 if x.dim() == 3 and self.batch_first else 0] == 0:
            raise ShapeError("input is empty", expected="at least one step", got=tuple(x.shape))
        if hx is not None:
            check_dense("MinGRU", "hx", hx)
            batch = () if x.dim() == 2 else (x.shape[0 if self.batch_first else 1],)
            shape = (self.num_layers * (2 if self.bidirectional else 1), *batch, self.hidden_size)
            if hx.shape != shape:
                raise ShapeError("hx has the wrong shape", expected=shape, got=tuple(hx.shape))
            hx = hx.to(x.dtype) if autocasts(x) else hx
            check_tensors("MinGRU", {"input": x, "hx": hx})
        return x, hx


def _at_ends(y: Tensor, lengths: Tensor) -> Tensor:
    return y[lengths.to(y.device) - 1, torch.arange(y.shape[1], device=y.device)]
