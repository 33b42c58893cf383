"""Derivatives of the runs: gradients by the kernels, everything beyond by recomputation in PyTorch's operations.

An `autograd.Function` has the rules for both modes and for vmap; the way back is itself one with a way back. Compiled
graphs hold the operators, which come to the same functions as their kernels of autograd: so an operator that meets a
mode or transform which compiled graphs do not know raises, and PyTorch goes on without the graph. With
`torch.library.register_autograd` in place of this, tangents would be dropped without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function

from sparsebp.torch import operators, plain
from sparsebp.torch.nesting import primals

MAY_BE_NONE = tuple[Tensor | None, ...]


def recurrent(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y (N, H), h_n (B, H) and c_n (B, H), empty but for an LSTM, of one run over packed rows x (N, I)."""
    inputs: Any = kind, reverse, batch_sizes, x, h0, c0, *weights
    if _is_nobody_watching(x, h0, c0, *weights):
        found = operators.infer(*inputs)
    elif torch.compiler.is_compiling():
        found = operators.run(*inputs)
    elif torch._C._are_functorch_transforms_active():
        found = Run.apply(*inputs)
    else:
        inputs = unwrap_dead_wrappers(inputs)
        # `Function.apply` binds the arguments to their names first, which takes longer than all else that it does
        found = super(Function, Run).apply(*inputs) if _is_differentiated() else Run.forward(*inputs)
    return found[0], found[1], found[2]


def _is_nobody_watching(*tensors: Tensor | None) -> bool:
    """Whether this is a plain call on the CPU without gradients: no transform, mode, tangent or graph."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch.autograd.forward_ad._current_level < 0
        and all(
            tensor is None or (type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu")
            for tensor in tensors
        )
    )


# ---- the way back ---------------------------------------------------------------------------------------------------


class Run(Function):
    """`operators.run` with its derivatives. y, h_n and c_n are differentiable."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # noqa: D102
        if operators.are_plain(inputs):
            return operators.compute_run(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operators.run(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: D102
        kind, reverse, *tensors = inputs
        y, _, c_n, h, c, gates = output
        ctx.kind, ctx.reverse = kind, reverse
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(h, c, gates, *([c_n] if tensors[3] is None else []))
        kept = h if reverse else y, c, gates, *tensors
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        needed = ctx.needs_input_grad
        if all(g is None for g in arriving[:3]):
            return (None,) * len(needed)
        kept = ctx.saved_tensors
        asked = needed[3], any(needed[6:])
        way_back = RunBack.apply if _is_differentiated() else RunBack.forward
        found = way_back(*asked, *arriving[:3], *kept[:3], ctx.kind, ctx.reverse, *kept[3:])
        return tuple(g if need else None for g, need in zip((None, None, None, *found), needed, strict=True))

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        batch_sizes, *saved = ctx.saved_tensors[3:]
        with primals(saved) as inputs:
            function, given = _of_given(_plain_run(ctx.kind, ctx.reverse, batch_sizes), inputs)
            found = plain.tangents(function, given, _where_given(inputs, along[3:]))
        return (*found, *(None,) * (6 - len(found)))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:  # noqa: D102
        return _vmapped(Run.apply, 3, False, info.batch_size, in_dims, inputs)


class RunBack(Function):
    """`operators.run_back` with its derivatives: those of the gradients with respect to what arrives and the inputs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:  # noqa: D102
        if operators.are_plain(inputs):
            return operators.compute_run_back(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operators.run_back(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: D102
        for_input, for_weights, *arriving, _, _, _, kind, reverse, batch_sizes = inputs[:11]
        tensors = inputs[11:]
        asked = for_input, True, True, *(for_weights,) * 4
        ctx.kind, ctx.reverse = kind, reverse
        ctx.returned = tuple(want and given is not None for want, given in zip(asked, tensors, strict=True))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out, there in zip(output, ctx.returned, strict=True) if not there))
        kept = batch_sizes, *arriving, *tensors
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        function, inputs, given = _again(ctx, ctx.saved_tensors[1:])
        found = iter(plain.gradients(function, given, _where_true(ctx.returned, arriving)))
        grads = [None if tensor is None else next(found) for tensor in inputs]
        return (None, None, *grads[:3], *(None,) * 6, *grads[3:])

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        with primals(ctx.saved_tensors[1:]) as saved:
            function, inputs, given = _again(ctx, saved)
            found = iter(plain.tangents(function, given, _where_given(inputs, (*along[2:5], *along[11:]))))
        return tuple(next(found) if there else None for there in ctx.returned)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:  # noqa: D102
        return _vmapped(RunBack.apply, 11, inputs[1], info.batch_size, in_dims, inputs)


def _is_differentiated() -> bool:
    """Say whether derivatives of a way back may be asked for, in any mode or by a transform."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


for _function in (Run, RunBack):  # else `apply` looks for the parameters' names at every call: a tenth of a short run
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[attr-defined]

_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("run", Run.apply, "Autograd")
_LIBRARY.impl("run_back", RunBack.apply, "Autograd")


# ---- recomputation --------------------------------------------------------------------------------------------------


def _plain_run(kind: str, reverse: bool, batch_sizes: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *inputs: plain.run(kind, reverse, batch_sizes, *inputs)


def _again(
    ctx: Any, inputs: Sequence[Tensor | None]
) -> tuple[Callable[..., tuple[Tensor, ...]], MAY_BE_NONE, tuple[Tensor, ...]]:
    """Return the way back as a function of what may be differentiated of its inputs, all of them, and those given."""
    batch_sizes = ctx.saved_tensors[0]

    def way_back(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        function, given = _of_given(_plain_run(ctx.kind, ctx.reverse, batch_sizes), inputs[3:])
        outputs = 2 if inputs[5] is None else 3  # an LSTM has cells
        found = iter(plain.gradients(function, given, inputs[:outputs]))
        grads = [None if tensor is None else next(found) for tensor in inputs[3:]]
        return tuple(g for g, there in zip(grads, ctx.returned, strict=True) if there and g is not None)

    function, given = _of_given(way_back, inputs)
    return function, tuple(inputs), given


def _of_given(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None]
) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return `function` as one of those inputs that are not None, and these."""

    def of_given(*given: Tensor) -> tuple[Tensor, ...]:
        values = iter(given)
        return function(*(None if tensor is None else next(values) for tensor in inputs))

    return of_given, tuple(tensor for tensor in inputs if tensor is not None)


def _where_given(inputs: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> MAY_BE_NONE:
    return _where_true([tensor is not None for tensor in inputs], values)


def _where_true(there: Sequence[bool], values: Sequence[Tensor | None]) -> MAY_BE_NONE:
    return tuple(value for value, true in zip(values, there, strict=True) if true)


# ---- vmap -----------------------------------------------------------------------------------------------------------


def _vmapped(
    call: Callable[..., tuple[Tensor, ...]], x_at: int, sums: bool, count: int, dims: Sequence[int | None],
    inputs: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:  # fmt: skip
    """Call with one more axis: as more samples of the batch where the weights are the same, else one by one.

    ``inputs[x_at]`` is x, the batch sizes are before it, the weights three behind. Gradients of the weights are `sums`
    over the batch, so they are computed one by one, too.
    """
    if sums or any(dim is not None for dim in (dims[x_at - 1], *dims[x_at + 3 :])):
        found = [
            call(*(i if dim is None else i.select(dim, number) for i, dim in zip(inputs, dims, strict=True)))
            for number in range(count)
        ]
        return tuple(torch.stack(outputs) for outputs in zip(*found, strict=True)), (0,) * len(found[0])

    def folded(value: Any, dim: int | None, position: int) -> Any:
        if position == x_at - 1:
            return None if value is None else value * count
        if position >= x_at + 3 or not isinstance(value, Tensor) or value.dim() - (dim is not None) < 2:
            return value
        value = value.unsqueeze(1).expand(-1, count, -1) if dim is None else value.movedim(dim, 1)
        return value.reshape(value.shape[0] * count, value.shape[2])

    outputs = call(*(folded(i, dim, n) for n, (i, dim) in enumerate(zip(inputs, dims, strict=True))))
    unfolded = tuple(out if out.dim() < 2 else out.unflatten(0, (out.shape[0] // count, count)) for out in outputs)
    return unfolded, tuple(None if out.dim() < 2 else 1 for out in outputs)


def _vmapped_run(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
    return _vmapped(operators.run, 3, False, info.batch_size, in_dims, inputs)


def _vmapped_run_back(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:
    return _vmapped(operators.run_back, 11, inputs[1], info.batch_size, in_dims, inputs)


torch.library.register_vmap("sparsebp::run", _vmapped_run)
torch.library.register_vmap("sparsebp::run_back", _vmapped_run_back)
