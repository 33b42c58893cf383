"""MinGRU and MinLSTM in PyTorch: modules on a kernel that makes factors and terms from the projected input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import check_choice, check_flag, check_integer, check_number
from sparsebp.nn.recurrent.gated import Candidate
from sparsebp.torch import recurrences
from sparsebp.torch.linearly_recurrent import LinearlyRecurrent
from sparsebp.torch.modules import autocasts, check_tensors
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
from sparsebp.torch.recurrences import array_of_lengths, before, folded, last_states, samples_of, within

__all__ = ["MinGRU", "MinLSTM"]

# The recurrence as an operator: p are the inputs of gate and candidate, of a minGRU (T, B, 2H), or of the gates i and
# f and the candidate, of a minLSTM (T, B, 3H).

_OPTIONS = "Tensor? lengths, str nonlinearity, bool reverse"
torch.library.define("sparsebp::min_gru", f"(Tensor p, Tensor h0, {_OPTIONS}) -> Tensor")
torch.library.define(
    "sparsebp::min_gru_vjp", f"(Tensor p, Tensor h, Tensor grad_h, Tensor h0, {_OPTIONS}) -> (Tensor, Tensor)"
)
min_gru = torch.ops.sparsebp.min_gru.default
min_gru_vjp = torch.ops.sparsebp.min_gru_vjp.default


def _compute_min_gru(p: Tensor, h0: Tensor, lengths: Tensor | None, nonlinearity: str, reverse: bool) -> Tensor:
    with on_its_stream(p):
        x, start = to_array(p.contiguous()), to_array(h0.contiguous())
        xp = backend.namespace(x)
        h = host_pool.empty(xp, (*x.shape[:2], start.shape[1]), x.dtype)
        kernels.get(xp).min_gru_forward(x, start, array_of_lengths(lengths, x), nonlinearity, reverse, h)
        return to_tensor(h)


torch.library.impl("sparsebp::min_gru", ("cpu", "cuda"), _compute_min_gru)


@torch.library.impl("sparsebp::min_gru_vjp", ("cpu", "cuda"))
def _compute_min_gru_vjp(
    p: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, lengths: Tensor | None, nonlinearity: str, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with on_its_stream(p):
        given = [to_array(tensor.contiguous()) for tensor in (p, h, grad_h, h0)]
        xp = backend.namespace(given[0])
        gp, gh0 = (host_pool.empty(xp, tuple(tensor.shape), given[0].dtype) for tensor in (p, h0))
        kernels.get(xp).min_gru_backward(*given, array_of_lengths(lengths, given[0]), nonlinearity, reverse, gp, gh0)
        return to_tensor(gp), to_tensor(gh0)


@torch.library.register_fake("sparsebp::min_gru")
def _shape_of_min_gru(p: Tensor, h0: Tensor, lengths: Tensor | None, nonlinearity: str, reverse: bool) -> Tensor:
    return p.new_empty((*p.shape[:2], h0.shape[1]))


@torch.library.register_fake("sparsebp::min_gru_vjp")
def _shapes_of_min_gru_vjp(
    p: Tensor, h: Tensor, grad_h: Tensor, h0: Tensor, lengths: Tensor | None, nonlinearity: str, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return p.new_empty(p.shape), h0.new_empty(h0.shape)


def run_min_gru(p: Tensor, h0: Tensor, lengths: Tensor | None, nonlinearity: str, reverse: bool) -> Tensor:
    inputs = p, h0, lengths, nonlinearity, reverse
    found: Tensor = min_gru(*inputs) if torch.compiler.is_compiling() else apply(MinGRURun, *inputs)
    return found


class MinGRURun(torch.autograd.Function):
    """The operator with its derivatives; those that are differentiated again are made of `Recurrence`."""

    operator, forward = min_gru, below_autograd(min_gru, _compute_min_gru)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        p, h0, lengths, *ctx.options = inputs
        ctx.save_for_backward(p, output, h0, lengths)
        ctx.save_for_forward(p, output, h0, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> MAY_BE_NONE:
        p, h, h0, lengths = ctx.saved_tensors
        if not is_differentiated():
            with torch._C._AutoDispatchBelowAutograd():
                return *min_gru_vjp(p, h, grads[0], h0, lengths, *ctx.options), None, None, None
        nonlinearity, reverse = ctx.options
        z, rest, c, slope, of_gates = _gate_and_candidate(_masked(p, lengths), h0, nonlinearity)
        at_a, at_b, at_h0 = recurrences.gradients(rest, h, grads[0], h0, lengths, reverse)
        at_u = (at_b * c - at_a) * z * rest
        return torch.cat([*(at_u * own for own in of_gates), at_b * z * slope], 2), at_h0, None, None, None

    @staticmethod
    def jvp(ctx: Any, dp: Tensor | None, dh0: Tensor | None, *_: None) -> Tensor:
        """``dh[t] = (1 - z) dh[t-1] + dz (c - h[t-1]) + z dc``."""
        with primals(ctx.saved_tensors) as (p, h, h0, lengths):
            nonlinearity, reverse = ctx.options
            z, rest, c, slope, of_gates = _gate_and_candidate(_masked(p, lengths), h0, nonlinearity)
            terms = torch.zeros_like(h)
            if dp is not None:
                *along, dv = _masked(dp, lengths).chunk(len(of_gates) + 1, dim=2)
                du = sum(d * own for d, own in zip(along, of_gates, strict=True))
                terms = du * z * rest * (c - before(h, h0, lengths, reverse)) + z * slope * dv
            return recurrences.run(rest, terms, dh0, lengths, reverse)

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], p: Tensor, h0: Tensor, lengths: Tensor | None, nonlinearity: str,
        reverse: bool,
    ) -> Any:  # fmt: skip
        """Take the mapped axis as more samples."""
        sizes = info.batch_size, samples_of(p, in_dims[0])
        given = folded(p, in_dims[0], 1, sizes), folded(h0, in_dims[1], 0, sizes)
        steps_of = None if lengths is None else folded(lengths, in_dims[2], 0, sizes)
        return run_min_gru(*given, steps_of, nonlinearity, reverse).unflatten(1, sizes), 1


def _masked(p: Tensor, lengths: Tensor | None) -> Tensor:
    return p if lengths is None else torch.where(within(lengths, p), p, 0)


def _gate_and_candidate(
    p: Tensor, h0: Tensor, nonlinearity: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return z = σ(u), 1 - z, c, c's slope, and u's slopes: u is an input, or of a minLSTM ``log(σ(i) / σ(f))``."""
    *gates, v = p.split(h0.shape[1], dim=2)
    u: Tensor = gates[0]
    slopes: tuple[Tensor, ...] = (torch.ones_like(gates[0]),)
    if len(gates) == 2:
        u = functional.logsigmoid(gates[0]) - functional.logsigmoid(gates[1])
        slopes = (-gates[0]).sigmoid(), -(-gates[1]).sigmoid()
    z, rest = u.sigmoid(), (-u).sigmoid()
    if nonlinearity == "identity":
        return z, rest, v, torch.ones_like(v), slopes
    s = v.sigmoid()
    return z, rest, torch.where(v >= 0, v + 0.5, s), torch.where(v >= 0, 1.0, s * (1 - s)), slopes


_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("min_gru", MinGRURun.apply, "Autograd")


# The modules.


class Gated(LinearlyRecurrent):
    """Base of `MinGRU` and `MinLSTM`: their parameters and layers."""

    gates: ClassVar[int]

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
                rows = self.gates * hidden_size
                shapes = {"weight_ih": (rows, features)} | ({"bias_ih": (rows,)} if bias else {})
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

    def _run(self, x: Tensor, hx: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        last: list[Tensor] = []
        zeros = x.new_zeros((x.shape[1], self.hidden_size))
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = functional.dropout(x, self.dropout, self.training)
            outputs = []
            for name, reverse in zip(self._names(layer), (False, True), strict=False):
                start = zeros if hx is None else hx[len(last)]
                outputs.append(self._direction(x, start, lengths, name, reverse))
                last.append(last_states(outputs[-1], start, lengths, reverse))
            x = torch.cat(outputs, 2) if self.bidirectional else outputs[0]
        return x, torch.stack(last)

    def _direction(self, x: Tensor, start: Tensor, lengths: Tensor | None, name: str, reverse: bool) -> Tensor:
        weight, bias = getattr(self, "weight_ih" + name), getattr(self, "bias_ih" + name) if self.bias else None
        return run_min_gru(functional.linear(x, weight, bias), start, lengths, self.nonlinearity, reverse)

    def _first_weight(self) -> Tensor:
        return cast(Tensor, self.weight_ih_l0)

    def _runs(self) -> int:
        return self.num_layers * (2 if self.bidirectional else 1)

    def _checked_state(self, hx: Tensor, x: Tensor) -> Tensor:
        hx = hx.to(x.dtype) if autocasts(x) else hx
        check_tensors(self._get_name(), {"input": x, "hx": hx})
        return hx


class MinGRU(Gated):
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

    gates = 2


class MinLSTM(Gated):
    """An LSTM without the state in its gates, ``h[t] = f' * h[t-1] + i' * c[t]``; as `sparsebp.nn.MinLSTM`.

    The gates are ``i = σ(W_ii x + b_ii)`` and f alike, ``i' = i / (f + i)`` and ``f' = f / (f + i)``; the candidate is
    ``v = W_ig x + b_ig``, or a function of it. The state is h alone. Weights move to and from `sparsebp.nn.MinLSTM` by
    `state_dict`.

    Parameters
    ----------
    input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, nonlinearity, device, dtype
        As of `MinGRU`.

    Notes
    -----
    Parameters: ``weight_ih_l{k}`` (3H, input), rows of i, f and v; ``bias_ih_l{k}`` (3H,); with the suffix
    ``_reverse`` for the second direction. All from U(±1/√input).

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?", 2024, §3.2.
    """

    gates = 3
