"""One step a call, or a few: policies, decoders, sampling, streams.

PyTorch spends many times longer on such a call than on its arithmetic. So little stands between the module and the
kernel: checks that read no values, memory for the outputs, and the call. From call to call sizes and addresses are
kept, no values: every call looks whether the weights are where an optimizer, ``load_state_dict`` or ``.data`` left
them. With gradients, all layers and steps are one `autograd.Function`.

Tensor subclasses, transforms, modes, autocast and traces are left to the other ways.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from sparsebp import kernels
from sparsebp.core.check import Array
from sparsebp.torch.ops import MAY_BE_NONE, are_plain, gradients, is_differentiated, run_plain

_DTYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_KINDS = {"RNN_TANH": "tanh", "RNN_RELU": "relu", "GRU": "gru", "LSTM": "lstm"}
_GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
_PLAIN = {"tanh": "rnn_tanh", "relu": "rnn_relu"}
_TENSORS = frozenset((Tensor, torch.nn.Parameter))


MOST_STEPS, MOST_SAMPLES, MOST_STATES, MOST_WIDTHS = 8, 64, 8192, 3200
"""Up to which this way runs a call: steps, samples, and either times the larger one of input and hidden size.

``python -m benchmarks one-step`` compares it with PyTorch. With larger states PyTorch's BLAS makes up for its overhead;
beyond a few steps, the kernels that pack the weights are faster."""


OF_CELLS = f"a cell with B > {MOST_SAMPLES} or B · H > {MOST_STATES}, or tensors that are not plain"


def is_faster(steps: int, batch: int, features: int, hidden: int) -> bool:
    """Whether this way was measured to be faster than PyTorch's; an RNNCell with gradients is as fast."""
    width = max(features, hidden)
    few = steps <= MOST_STEPS and batch <= MOST_SAMPLES
    return few and batch * width <= MOST_STATES and steps * width <= MOST_WIDTHS


class Plan(NamedTuple):
    """What calls of one shape have in common, while the weights stay where they are.

    Attributes
    ----------
    tables
        Of each layer, as `sparsebp.kernels.host.rnn.one_step` takes it.
    lstm
        Whether there is a second state.
    dtype
        Of all tensors.
    zeros, at_zeros
        A state or biases that are not given, and where they are.
    y, h
        The shapes of the output, None for a cell, and of the state.
    swaps
        Whether steps and samples have to change places in memory.
    steps, state, itemsize
        Steps, numbers of a layer's h, and bytes of a number.
    saved
        Numbers that a layer keeps for the backward.
    forward, backward
        The kernels.
    kind
        Of `sparsebp.kernels.host.rnn.one_step`.
    """

    tables: tuple[Array, ...]
    lstm: bool
    dtype: torch.dtype
    zeros: Array
    at_zeros: int
    y: tuple[int, ...] | None
    h: tuple[int, ...]
    swaps: bool
    steps: int
    state: int
    itemsize: int
    saved: int
    forward: Any
    backward: Any
    kind: str


class Weights(NamedTuple):
    """Weights that were looked at: plain, contiguous, on the CPU, of one dtype and the right shapes.

    While they are the same objects, with the same addresses, bytes and strides, they need not be looked at again.
    """

    tensors: tuple[Any, ...]
    at: list[int]
    bytes: list[int]
    strides: list[tuple[int, ...]]
    dtype: torch.dtype
    of_inference: bool
    plans: dict[Any, Plan | None]

    def stay(self, weights: Any) -> bool:
        """Whether the weights are those, where they were."""
        return (
            all(map(is_, weights, self.tensors))
            and list(map(_address, weights)) == self.at
            and list(map(_bytes, weights)) == self.bytes
            and list(map(_stride, weights)) == self.strides
        )


_NONE = Weights((object(),), [], [], [], torch.float32, False, {})
_OF_CELLS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_address, _stride = Tensor.data_ptr, Tensor.stride
_bytes, _requires_grad = Tensor.nbytes.__get__, Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_transforms, _autocast = torch._C._are_functorch_transforms_active, torch._C._is_any_autocast_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_strided = torch.strided
_trace, _records = torch._C._get_tracing_state, torch.is_grad_enabled


class OneStep:
    """The calls of an accelerated module that go this way."""

    __slots__ = ("_cell", "_weights")

    def __init__(self, cell: bool) -> None:
        self._cell, self._weights = cell, _NONE

    def __call__(self, module: Any, x: Any, hx: Any = None) -> Any:
        """Return what the module's forward does; None if the call goes another way."""
        call = self.find(module, x, hx)
        if call is None:
            return None
        plan, x, h, c, known = call
        weights = known.tensors
        if _records() and (x.requires_grad or any(map(_requires_grad, weights)) or _any_requires_grad(h, c)):
            found = super(Function, Steps).apply(plan, known, x, h, c, *weights)
        else:
            found = _compute(plan, x, h, c, 0)
        if self._cell:
            return found if plan.lstm else found[0]
        y = found[0].transpose_(0, 1) if plan.swaps else found[0]  # no view, as in PyTorch: callers may detach_ it
        return (y, (found[1], found[2])) if plan.lstm else (y, found[1])

    def case(self, module: Any, x: Any, hx: Any = None) -> str:
        """Return which case a call that goes this way is; empty for others."""
        call = self.find(module, x, hx)
        if call is None:
            return ""
        plan, dtype = call[0], "float32" if call[0].dtype is torch.float32 else "float64"
        what = module._get_name() if isinstance(module, torch.nn.RNNCellBase) else module.mode.partition("_")[0]
        gradients = "" if _records() else ", no gradients"
        return f"{dtype} {what}{gradients}, few steps, T = {plan.steps} ≤ {MOST_STEPS}"

    def find(self, module: Any, x: Any, hx: Any = None) -> tuple[Plan, Tensor, Any, Any, Weights] | None:
        """Return a call that goes this way: its plan, contiguous x, h and c, and the weights."""
        if (
            type(x) not in _TENSORS
            or _transforms()
            or _autocast()
            or _dispatch_modes()
            or _function_modes()
            or _trace() is not None
            or forward_ad._current_level >= 0
        ):  # PyTorch's operations are to be seen
            return None
        own, known, parameters = module.__dict__, self._weights, module._parameters
        key = (x.shape, False, own.get("nonlinearity")) if self._cell else (x.shape, own["batch_first"], own["mode"])
        plan: Any = known.plans.get(key, _NONE)
        if plan is None:  # wherever the weights are now
            return None
        if self._cell:  # by name: pruning puts another parameter in the place of one
            weights = list(map(parameters.get, _OF_CELLS if own["bias"] else _OF_CELLS[:2]))
        else:
            weights = own["_flat_weights"]
            if len(parameters) < len(weights) or not all(map(is_, parameters.values(), weights)):
                return None  # parametrized, or exchanged
            if own["dropout"] and own["training"]:
                return None
        try:
            if not known.stay(weights):
                looked_at = _looked_at(module, self._cell, weights)
                if looked_at is None:
                    return None
                self._weights = known = looked_at
                plan = _NONE
            if plan is _NONE:
                plan = _planned(module, self._cell, known, key)
                if plan is None:
                    return None
            if x.dtype is not plan.dtype or x.layout is not _strided or not _is_readable(x):
                return None
            if plan.swaps:
                x = x.transpose(0, 1)
            if not x.is_contiguous():
                x = x.contiguous()
            h = c = None
            if hx is not None:
                if plan.lstm:
                    if type(hx) not in (tuple, list) or len(hx) != 2:
                        return None
                    h, c = _state(plan, hx[0]), _state(plan, hx[1])
                    if c is None:
                        return None
                else:
                    h = _state(plan, hx)
                if h is None:
                    return None
            if _records() and (known.of_inference or x.is_inference() or _is_of_inference(h) or _is_of_inference(c)):
                return None  # such tensors cannot be saved, and PyTorch's operations save fewer
        except RuntimeError:  # a tensor without memory: a sparse one, or that of a transform which has ended
            return None
        return plan, x, h, c, known


def _state(plan: Plan, part: Any) -> Tensor | None:
    """Return a tensor of the state, contiguous; None if it is not a plain one."""
    if type(part) not in _TENSORS or part.dtype is not plan.dtype or part.shape != plan.h:
        return None
    if part.layout is not _strided or not _is_readable(part):
        return None
    return part if part.is_contiguous() else part.contiguous()


def _is_readable(tensor: Tensor) -> bool:
    """Whether the numbers lie in this machine's memory as they are; raises if they lie nowhere."""
    return tensor.is_cpu and not tensor.is_neg() and tensor.data_ptr() != 0


def _is_of_inference(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_inference()


def _any_requires_grad(h: Tensor | None, c: Tensor | None) -> bool:
    return (h is not None and h.requires_grad) or (c is not None and c.requires_grad)


def _kind(module: Any, cell: bool) -> str | None:
    if not cell:
        return _KINDS.get(module.mode)
    if isinstance(module, torch.nn.RNNCell):
        return module.nonlinearity if module.nonlinearity in _GATES else None
    return "gru" if isinstance(module, torch.nn.GRUCell) else "lstm"


def _widths(module: Any, cell: bool) -> tuple[int, ...]:
    """Return the features of each layer's input."""
    return (module.input_size, *(module.hidden_size,) * (0 if cell else module.num_layers - 1))


def _looked_at(module: Any, cell: bool, weights: Any) -> Weights | None:
    """Return the weights if the kernels can read them where they lie. None that comes out of a graph: it would live."""
    kind, hidden = _kind(module, cell), module.hidden_size
    if kind is None or not (cell or (not module.bidirectional and not module.proj_size)):
        return None
    rows = _GATES[kind] * hidden
    biases = ((rows,), (rows,)) if module.bias else ()
    shapes = [shape for width in _widths(module, cell) for shape in ((rows, width), (rows, hidden), *biases)]
    if len(weights) != len(shapes) or not _TENSORS.issuperset(map(type, weights)):
        return None
    dtype = weights[0].dtype
    for weight, shape in zip(weights, shapes, strict=True):
        if weight.shape != shape or weight.dtype is not dtype or not weight.is_leaf:
            return None
        if not weight.is_cpu or not weight.is_contiguous():
            return None
    at = list(map(_address, weights))
    if dtype not in _DTYPES or not all(at):
        return None
    of_inference = any(map(Tensor.is_inference, weights))
    return Weights(tuple(weights), at, list(map(_bytes, weights)), list(map(_stride, weights)), dtype, of_inference, {})


def _planned(module: Any, cell: bool, weights: Weights, key: tuple[Any, ...]) -> Plan | None:
    """Return the plan of the calls with an input of this shape, from now on too; None if they go another way."""
    if len(weights.plans) >= MOST_PLANS:
        weights.plans.clear()
    plan = weights.plans[key] = _new_plan(module, cell, weights, *key)
    return plan


MOST_PLANS = 256


def _new_plan(
    module: Any, cell: bool, weights: Weights, shape: tuple[int, ...], batch_first: bool, _: Any
) -> Plan | None:  # fmt: skip
    """Return the plan of the calls with an input of this shape; None if they go another way."""
    kind, hidden, widths = _kind(module, cell), module.hidden_size, _widths(module, cell)
    if kind is None or len(weights.tensors[0]) != _GATES[kind] * hidden:  # another one now
        return None
    lengths = (1, *shape) if cell else shape
    if len(lengths) not in (2, 3) or shape[-1] != module.input_size:
        return None
    batched = len(lengths) == 3
    steps, batch = (lengths[0], 1) if not batched else lengths[1::-1] if batch_first else lengths[:2]
    if min(*lengths, steps) < 1 or hidden < 2:  # a number alone is contiguous even where its sign is to come yet
        return None
    if not is_faster(steps, batch, widths[0], hidden):
        return None
    host, count = kernels.on_host().one_step, 4 if module.bias else 2
    zeros = np.zeros(max(_GATES[kind], len(widths) * batch) * hidden, _DTYPES[weights.dtype])
    none = (zeros.ctypes.data,) * (4 - count)
    swaps = batched and not cell and batch_first and min(steps, batch) > 1
    lead = () if cell else (len(widths),)
    return Plan(
        tables=tuple(
            host.table_of(kind, steps, batch, width, hidden, (*weights.at[n * count : n * count + count], *none))
            for n, width in enumerate(widths)
        ),
        kind=kind, lstm=kind == "lstm", dtype=weights.dtype, zeros=zeros, at_zeros=zeros.ctypes.data,
        y=None if cell else (steps, batch, hidden) if swaps else (*shape[:-1], hidden),
        h=(*lead, batch, hidden) if batched else (*lead, hidden), swaps=swaps,
        steps=steps, state=batch * hidden, itemsize=zeros.itemsize, saved=host.saved_of(kind, steps, batch, hidden),
        forward=host.forward, backward=host.backward,
    )  # fmt: skip


# ---- running them ---------------------------------------------------------------------------------------------------


def _compute(plan: Plan, x: Tensor, h: Tensor | None, c: Tensor | None, saved: int) -> tuple[Tensor, ...]:
    """Return the output, if there is one, and the states; `saved` is the address of memory for the backward, or 0."""
    h_n = x.new_empty(plan.h) if h is None else torch.empty_like(h)
    at_h = plan.at_zeros if h is None else h.data_ptr()
    at_y = at_c = at_c_n = 0
    last: tuple[Tensor, ...] = (h_n,)
    if plan.lstm:
        c_n = torch.empty_like(h_n)
        at_c, at_c_n, last = plan.at_zeros if c is None else c.data_ptr(), c_n.data_ptr(), (h_n, c_n)
    if plan.y is not None:
        y = torch.empty_like(h_n) if plan.y == plan.h else x.new_empty(plan.y)
        at_y, last = y.data_ptr(), (y, *last)
    if len(plan.tables) == 1:
        plan.forward(plan.zeros, plan.tables[0], x.data_ptr(), at_h, at_c, at_y, h_n.data_ptr(), at_c_n, saved)
    else:
        _compute_layers(plan, x, (at_h, at_c, at_y, h_n.data_ptr(), at_c_n), saved)
    return last


def _compute_layers(plan: Plan, x: Tensor, at: tuple[int, ...], saved: int) -> None:
    """Run the layers, each on the states of the one below."""
    at_h, at_c, at_y, at_h_n, at_c_n = at
    source, step = x.data_ptr(), plan.state * plan.itemsize
    # these are the saved ones, the last one if there is one step, or in memory that the layers share
    shared = x.new_empty(plan.steps * plan.state) if plan.steps > 1 and not saved else None
    for layer, table in enumerate(plan.tables):
        shift, keep = layer * step, saved and saved + layer * plan.saved * plan.itemsize
        y = at_y if layer == len(plan.tables) - 1 else _place(shared)
        plan.forward(plan.zeros, table, source, at_h + shift, at_c + shift, y, at_h_n + shift, at_c_n + shift, keep)
        source = keep + step if keep else y or at_h_n + shift


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Steps(Function):
    """All layers and steps of a call, with their gradients."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, plan: Plan, known: Weights, x: Tensor, h: Tensor | None, c: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        saved = x.new_empty(len(plan.tables) * plan.saved)
        ctx.plan, ctx.known = plan, known
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, h, c, saved, *weights)
        return _compute(plan, x, h, c, saved.data_ptr())

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        plan: Plan = ctx.plan
        x, h, c, saved, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if (
            is_differentiated() or not are_plain(arriving) or not ctx.known.stay(weights)
            or not _is_row(plan, x) or not _is_row(plan, saved)
        ):  # fmt: skip
            return None, None, *_differentiably(plan, (x, h, c, *weights), needs, arriving)
        given = [None if g is None else g.contiguous() for g in arriving]
        grads = [torch.empty_like(t) if need else None for t, need in zip((x, h, c, *weights), needs, strict=True)]
        _compute_back(plan, x, saved, given, grads)
        return None, None, *grads


def _is_row(plan: Plan, tensor: Tensor) -> bool:
    """Whether a saved tensor has come back as it was saved: hooks may have had it."""
    return type(tensor) in _TENSORS and tensor.dtype is plan.dtype and tensor.is_cpu and tensor.is_contiguous()


def _compute_back(
    plan: Plan, x: Tensor, saved: Tensor, arriving: list[Tensor | None], grads: list[Tensor | None]
) -> None:
    """Write the gradients at x, h, c and the weights, where wanted."""
    gy, gh_n, gc_n = (*((0,) if plan.y is None else ()), *map(_place, arriving), 0)[:3]
    gx, gh, gc, *of_weights = map(_place, grads)
    layers, step, block = len(plan.tables), plan.state * plan.itemsize, plan.saved * plan.itemsize
    each = len(of_weights) // layers
    between = x.new_empty(plan.steps * plan.state) if layers > 1 else None  # read before it is written to
    for layer in range(layers - 1, -1, -1):
        shift, keep = layer * step, saved.data_ptr() + layer * block
        below = _place(between) if layer else gx
        plan.backward(
            plan.zeros, plan.tables[layer], keep - block + step if layer else x.data_ptr(), keep, gy,
            *(at and at + shift for at in (gh_n, gc_n)), below, *(at and at + shift for at in (gh, gc)),
            *of_weights[layer * each : layer * each + each], *(0,) * (4 - each),
        )  # fmt: skip
        gy = below


def _differentiably(
    plan: Plan, inputs: MAY_BE_NONE, needs: tuple[bool, ...], arriving: MAY_BE_NONE
) -> list[Tensor | None]:
    """Return the gradients by PyTorch's operations, which have derivatives of their own."""
    there = [tensor is not None for tensor in inputs]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        values = iter(given)
        return _plainly(plan, *(next(values) if one else None for one in there))

    found = iter(gradients(run, tuple(tensor for tensor in inputs if tensor is not None), arriving))
    grads = [next(found) if one else None for one in there]
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def _plainly(plan: Plan, x: Any, h: Any, c: Any, *weights: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a call by PyTorch's operations."""
    layers, hidden = len(plan.tables), plan.h[-1]
    each, batch = len(weights) // layers, plan.state // hidden
    rows, lasts = x.reshape(plan.steps * batch, -1), []
    start = [rows.new_zeros(layers, batch, hidden) if part is None else part.reshape(layers, batch, hidden)
             for part in ((h, c) if plan.lstm else (h,))]  # fmt: skip
    for layer in range(layers):
        own = (*weights[layer * each : layer * each + each], None, None)[:4]
        state = (*(part[layer] for part in start), None)[:2]
        rows, *last = run_plain(_PLAIN.get(plan.kind, plan.kind), False, None, rows, *state, *own)
        lasts.append(last)
    states = tuple(torch.stack(part).reshape(plan.h) for part in zip(*lasts, strict=True))
    return states if plan.y is None else (rows.reshape(plan.y), *states)
