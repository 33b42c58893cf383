"""The runs as operators of PyTorch's dispatcher, ``sparsebp::run`` and ``sparsebp::run_back``.

The dispatcher knows the shapes of what they return (`torch.library.register_fake`), so compiled graphs hold them as
they are. What a cell does not have, or what was not asked for, is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebp.core.types import Array
from sparsebp.nn.recurrent.tape import State, Weights
from sparsebp.torch import runs
from sparsebp.torch.arrays import on_its_stream, to_array, to_tensor
from sparsebp.torch.packing import Stretch, reversed_rows, stretches

INPUTS = (
    "str kind, bool reverse, Tensor? batch_sizes, Tensor x, Tensor h0, Tensor? c0, "
    "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh"
)
STATE = "Tensor h, Tensor c, Tensor gates"
torch.library.define("sparsebp::run", f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "sparsebp::run_back",
    f"(bool for_input, bool for_weights, Tensor? gy, Tensor? grad_h_n, Tensor? grad_c_n, {STATE}, {INPUTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
run = torch.ops.sparsebp.run.default
run_back = torch.ops.sparsebp.run_back.default


_PLAIN = {torch.Tensor, torch.nn.Parameter, str, bool, type(None)}


def are_plain(inputs: Sequence[Any]) -> bool:
    """Say whether an operator's inputs may be computed with right here, without PyTorch's dispatcher.

    For an operator written in Python it takes longer than a short run itself. But subclasses of tensors, modes, traces
    and transforms have to see the operator, and tensors on no device have no values.
    """
    return (
        _PLAIN.issuperset(map(type, inputs))
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in inputs)
    )


def compute_run(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y (N, H) in the order of x, h_n and c_n (B, H), and what the way back needs, in the order of the run.

    That is the states h (empty where they are y), an LSTM's cells c, and the gates.
    """
    with on_its_stream(x):
        rows, start = to_array(x), _state(h0, c0)
        cuts, order = _cuts(reverse, batch_sizes, rows, h0.shape[0])
        done = runs.forward(kind, _ordered(rows, order), cuts, start, Weights(*map(_array, weights)))
        (h, c), (h_n, c_n) = _pair(done.states), _pair(done.last)
        return _tensors(x, (_ordered(h, order), h_n, c_n, h if reverse else None, c, done.gates))


torch.library.impl("sparsebp::run", ("cpu", "cuda"), compute_run)


def infer(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y, h_n and c_n as ``sparsebp::run`` does, for tensors of the CPU that nothing is differentiated by."""
    rows = to_array(x)
    cuts, order = _cuts(reverse, batch_sizes, rows, h0.shape[0])
    h, last = runs.infer(kind, _ordered(rows, order), cuts, _state(h0, c0), Weights(*map(_array, weights)))
    return _tensors(x, (_ordered(h, order), *_pair(last)))


@torch.library.register_fake("sparsebp::run")
def _shapes_of_run(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None, w_ih: Tensor,
    w_hh: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, hidden = x.shape[0], w_hh.shape[1]
    none, states, last = (0,), (rows, hidden), (h0.shape[0], hidden)
    gates = (rows, runs.KEPT[kind] * hidden) if runs.KEPT[kind] else none
    of_c = (none, none) if c0 is None else (last, states)
    return tuple(x.new_empty(shape) for shape in (states, last, of_c[0], states if reverse else none, of_c[1], gates))


def compute_run_back(
    for_input: bool, for_weights: bool, gy: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None, h: Tensor,
    c: Tensor, gates: Tensor, kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor,
    c0: Tensor | None, *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients at x, h0, c0 and the weights."""
    with on_its_stream(x):
        rows, start, at_y = to_array(x), _state(h0, c0), _array(gy)
        cuts, order = _cuts(reverse, batch_sizes, rows, h0.shape[0])
        found = runs.backward(
            kind, _ordered(rows, order), cuts, start, Weights(*map(_array, weights)),
            _state(h, None if c0 is None else c), to_array(gates) if runs.KEPT[kind] else None,
            at_y if at_y is None else _ordered(at_y, order), (_array(grad_h_n), _array(grad_c_n))[: len(start)],
            for_input, for_weights,
        )  # fmt: skip
        at_x = found.x if found.x is None else _ordered(found.x, order)
        return _tensors(x, (at_x, *_pair(found.start), *(found.weights[:4] if found.weights else (None,) * 4)))


torch.library.impl("sparsebp::run_back", ("cpu", "cuda"), compute_run_back)


@torch.library.register_fake("sparsebp::run_back")
def _shapes_of_run_back(
    for_input: bool, for_weights: bool, gy: Any, grad_h_n: Any, grad_c_n: Any, h: Any, c: Any, gates: Any, kind: str,
    reverse: bool, batch_sizes: Any, x: Tensor, h0: Tensor, c0: Tensor | None, *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = x if for_input else None, h0, c0, *(weights if for_weights else (None,) * 4)
    return tuple(x.new_empty((0,) if like is None else like.shape) for like in wanted)


def _cuts(reverse: bool, batch_sizes: Tensor | None, rows: Array, batch: int) -> tuple[Sequence[Stretch], Array | None]:
    """Return the stretches of the rows, and the rows' order in a reversed run."""
    sizes = None if batch_sizes is None else batch_sizes.numpy()
    cuts = stretches(sizes, len(rows), batch)
    return cuts, reversed_rows(sizes, len(rows), batch) if reverse else None


def _ordered(rows: Array, order: Array | None) -> Array:
    """Return the rows in an order that is its own inverse: the gradients' order, too."""
    return rows if order is None else rows.take(order, axis=0)


def _array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else to_array(tensor)


def _state(h: Tensor, c: Tensor | None) -> State:
    return (to_array(h),) if c is None else (to_array(h), to_array(c))


def _pair(state: State) -> tuple[Array, Array | None]:
    return (state[0], None) if len(state) == 1 else (state[0], state[1])


def _tensors(like: Tensor, arrays: Iterable[Array | None]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if array is None else to_tensor(array) for array in arrays)
