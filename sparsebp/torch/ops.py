"""Recurrent cells as PyTorch operators: tensors, packed rows, derivatives of any order.

An `autograd.Function` has the rules for both modes and for vmap; its backward is itself differentiable. Compiled graphs
hold the operators, which use the same functions as their autograd kernels. An operator that meets a mode or transform
unknown to compiled graphs raises, and PyTorch goes on without the graph. `torch.library.register_autograd` would
silently drop tangents instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd import Function, forward_ad

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.host_pool import empty
from sparsebp.nn.recurrent import runs
from sparsebp.nn.recurrent.cells import CellMath, GRUMath, LSTMMath, RNNMath
from sparsebp.nn.recurrent.lengths import Segment, Segments, cut, reversed_rows
from sparsebp.nn.recurrent.saved import SavedRun, State, Weights
from sparsebp.torch.padding import FEW_SEGMENTS, Padding, padding_of

# Tensors as arrays and back, without a copy: NumPy on the CPU, CuPy on a GPU and on PyTorch's current stream.


def on_its_stream(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Make CuPy use the tensor's device and PyTorch's current stream there; does nothing on the CPU."""
    return _on_its_stream(tensor) if tensor.is_cuda else _NO_STREAM


_NO_STREAM = contextlib.nullcontext()


@contextlib.contextmanager
def _on_its_stream(tensor: Tensor) -> Iterator[None]:
    cuda, device = _cupy().cuda, tensor.device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    with cuda.Device(device.index), _wrapped(stream, device.index), cuda.using_allocator(_memory(device)):
        yield


class _Room(NamedTuple):
    """Memory that CuPy was given: bytes of a tensor."""

    tensor: Tensor


@cache
def _memory(device: torch.device) -> Callable[[int], Any]:
    """Return an allocator for CuPy: PyTorch's memory, of its current stream there, and of a graph that it captures.

    So an array becomes a tensor without a copy, and there is one pool of memory instead of two.
    """
    cuda, number = backend.cupy().cuda, device.index

    def allocate(size: int) -> Any:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        return cuda.MemoryPointer(cuda.UnownedMemory(tensor.data_ptr(), size, _Room(tensor), number), 0)

    return allocate


class _Foreign(NamedTuple):
    """A stream by its pointer, in CUDA's stream protocol; those of older versions of PyTorch do not offer it."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@cache  # for good: CuPy 14 destroys PyTorch's stream when what wraps it ends
def _wrapped(pointer: int, number: int) -> Any:
    """Return CuPy's stream for one of the current device, `number`."""
    stream = backend.cupy().cuda.Stream
    if hasattr(stream, "from_external"):
        return stream.from_external(_Foreign(pointer))
    return backend.cupy().cuda.ExternalStream(pointer, number)  # before CuPy 14, which warns of it


_OF_ARRAYS = {
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64), torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128), torch.int32: np.dtype(np.int32), torch.int64: np.dtype(np.int64),
    torch.bool: np.dtype(np.bool_),
}  # fmt: skip
_OF_TENSORS = {dtype: of_tensor for of_tensor, dtype in _OF_ARRAYS.items()}
_cupy = cache(backend.cupy)  # which asks the driver at every call


def to_array(tensor: Tensor) -> Array:
    """Return a tensor's values as a C-contiguous array that shares memory, or a copy if it is not contiguous.

    On a GPU within `on_its_stream`, so nobody has to wait: not DLPack, which takes several times as long.
    """
    if tensor.is_cuda:
        if tensor.is_neg() or tensor.is_conj() or not tensor.is_contiguous():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        cp = _cupy()
        memory = cp.cuda.UnownedMemory(tensor.data_ptr(), tensor.nbytes, tensor, tensor.device.index)
        return cp.ndarray(tensor.shape, _OF_ARRAYS[tensor.dtype], cp.cuda.MemoryPointer(memory, 0))
    # not DLPack: it cannot say that memory is writeable, and kernels are compiled for writeable memory
    array = tensor.numpy(force=True)  # copies only tensors with a negative bit
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def to_tensor(array: Array) -> Tensor:
    """Return an array that nothing else keeps as a tensor; memory is shared.

    A CuPy array of memory that is not PyTorch's own is copied: it would return to CuPy's pool, which does not know
    about other PyTorch streams that may still read it. Within `on_its_stream`.
    """
    if type(array) is np.ndarray:
        return torch.from_numpy(array)
    owner = getattr(array.data.mem, "_owner", None)
    if type(owner) is not _Room or not array.flags.c_contiguous:
        array = array.copy()  # in C order
        owner = array.data.mem._owner
    found = torch.empty(0, dtype=_OF_TENSORS[array.dtype], device=owner.tensor.device)
    first = (array.data.ptr - owner.tensor.data_ptr()) // array.itemsize
    # no view, which callers could not detach_
    return found.set_(owner.tensor.untyped_storage(), first, array.shape)  # type: ignore[call-overload]


# Forward mode within forward mode. PyTorch calls the ``jvp`` of an `autograd.Function` with forward mode off at every
# level, so derivatives in forward mode of its result would silently be zero.


@contextlib.contextmanager
def primals(saved: Sequence[Tensor | None]) -> Iterator[list[Any]]:
    """Yield saved tensors without their tangents at the level of the ``jvp``; outer levels stay on in the block."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield [tensor if tensor is None else forward_ad.unpack_dual(tensor).primal for tensor in saved]


# One run of a recurrent cell, a layer in one direction, over packed rows: arrays in, arrays out, no tensors.
#
# The state of a cell is a tuple: (h,), or (h, c) for an LSTM. Initial and final states have a row per sample (B, H),
# saved ones a row for each sample's initial state, then one per step and sample (B + N, H).

CELLS: dict[str, CellMath] = {
    "rnn_tanh": RNNMath("tanh"), "rnn_relu": RNNMath("relu"), "gru": GRUMath(), "lstm": LSTMMath(),
}  # fmt: skip


class Backward(NamedTuple):
    """Gradients at x (N, I), at the initial state, and at the weights; None where not asked for."""

    x: Array | None
    start: State
    weights: Weights | None


def forward(kind: str, x: Array, segments: Segments, start: State, weights: Weights) -> SavedRun:
    """Run over x (N, I)."""
    cell, packed = CELLS[kind], segments if len(segments) > 1 else ()
    return runs.forward(_kernels(cell, x, weights, start), cell, by_step(x, segments, start), weights, start, packed)


def infer(kind: str, x: Array, segments: Segments, start: State, weights: Weights) -> tuple[Array, State]:
    """Return h (N, H) and each sample's last state as `forward` does, and keep nothing."""
    cell, packed = CELLS[kind], segments if len(segments) > 1 else ()
    k = kernels.get(backend.namespace(x))
    h, last = runs.infer(k, cell, by_step(x, segments, start), weights, start, packed)
    return _rows(h), last if packed else tuple([part.copy() for part in last])


def by_step(rows: Array, segments: Segments, start: State) -> Array:
    """Return rows as a run has them: (T, B, n), or (N, 1, n) of several segments."""
    count, width = rows.shape
    batch = 1 if len(segments) > 1 else len(start[0])
    return rows.reshape(count // batch if batch else 0, batch, width)


def saved_run(rows: Array, segments: Segments, states: State, gates: Array | None, start: State) -> SavedRun:
    """Return a run from its rows: x (N, I), states (B + N, H), gates (N, 4H)."""
    x, gates = by_step(rows, segments, start), None if gates is None else by_step(gates, segments, start)
    if len(segments) > 1:
        return SavedRun(x, tuple([part[:, None] for part in states]), gates, segments)
    return SavedRun(x, tuple([part.reshape(len(x) + 1, *start[0].shape) for part in states]), gates)


def backward(
    kind: str, saved: SavedRun, weights: Weights, gy: Array | None, at_last: tuple[Array | None, ...], for_input: bool,
    for_weights: bool,
) -> Backward:  # fmt: skip
    """Propagate gradients at h (T, B, H) and at the last state, any of them None, back through `forward`."""
    cell, xp = CELLS[kind], backend.namespace(saved.x)
    k = _kernels(cell, saved.x, weights, (saved.h0,), at_last, gy is None or gy.dtype == saved.h.dtype)
    want: runs.Want = "weights" if for_weights and not for_input else "input"
    choice = runs.choice_of(cell, saved.h.shape, saved.h.dtype, xp)
    grads = runs.backward(k, cell, saved, weights, gy, at_last, want, choice)
    at_x = runs.input_grad(cell, grads, weights).reshape(-1, saved.x.shape[2]) if for_input else None
    return Backward(at_x, grads.initial, runs.weight_grad(k, cell, grads, saved, weights) if for_weights else None)


def _kernels(
    cell: CellMath, x: Array, weights: Weights, start: State, at_last: tuple[Array | None, ...] = (), same: bool = True
) -> Any:
    """Return the kernels; they check their arguments unless these fit, on the host."""
    k, hidden = kernels.get(backend.namespace(x)), weights.weight_hh.shape[1]
    return k.unchecked if same and fits(cell, x, weights, hidden, (*start, *at_last)) else k


def fits(cell: CellMath, x: Array, weights: Weights, hidden: int, states: Sequence[Array | None]) -> bool:
    """Whether x, the weights and `states` (B, hidden) on the host need no check by the kernels."""
    if type(x) is not np.ndarray or x.dtype not in backend.FLOAT_DTYPES or hidden == 0:
        return False
    rows = cell.gates * hidden
    batch = 0 if states[0] is None else len(states[0])
    shapes = (rows, x.shape[-1]), (rows, hidden), (rows,), (rows,), *[(batch, hidden)] * len(states)
    for array, shape in zip((*weights[:4], *states), shapes, strict=True):
        if array is not None and not (
            type(array) is np.ndarray and array.shape == shape and array.dtype == x.dtype and array.flags.c_contiguous
        ):
            return False
    return True


# The runs as operators of PyTorch's dispatcher, ``sparsebp::run`` and ``sparsebp::run_back``.
#
# The dispatcher knows their output shapes (`torch.library.register_fake`), so compiled graphs hold them as they are.
# Outputs that a cell does not have, or that are not asked for, are empty tensors.

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
run_op = torch.ops.sparsebp.run.default
run_back = torch.ops.sparsebp.run_back.default


def apply(function: Any, *inputs: Any) -> Any:
    """Call an `autograd.Function`; without a graph where nothing may ask for derivatives.

    `Function.apply` binds the arguments to their names first, which takes longer than all its other work. The older
    vmap and `torch.jit.trace` need the operator: within them a Function sees wrappers without a graph, or is recorded.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)
    if torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADS) or torch._C._get_tracing_state() is not None:
        return function.operator(*inputs)
    inputs = tuple(unwrap_if_dead(value) if isinstance(value, Tensor) else value for value in inputs)
    return super(Function, function).apply(*inputs) if is_differentiated() else function.forward(*inputs)


def below_autograd(operator: Any, compute: Callable[..., Any]) -> staticmethod[..., Any]:
    """Return a `Function`'s forward: the operator, or what it computes where nothing has to see an operator."""

    def forward(*inputs: Any) -> Any:
        if are_plain(inputs):
            return compute(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return staticmethod(forward)


def is_differentiated() -> bool:
    """Whether a call may be differentiated, in any mode or by a transform."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


_PLAIN = {torch.Tensor, torch.nn.Parameter, str, int, bool, type(None)}
_BATCHED_GRADS = torch._C._dispatch_key_parse("VmapMode")
"""Key of the older vmap, of ``torch.autograd.grad(is_grads_batched=True)``; its tensors look plain."""


def are_plain(inputs: Sequence[Any]) -> bool:
    """Whether an operator's inputs may bypass PyTorch's dispatcher, which takes longer than a short run.

    Tensor subclasses, modes, traces and transforms must see the operator, and meta tensors have no values.
    """
    if (
        not _PLAIN.issuperset(map(type, inputs))
        or torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADS)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    ):
        return False
    for tensor in inputs:  # noqa: SIM110 - a third of the time of all()
        if isinstance(tensor, Tensor) and tensor.is_meta:
            return False
    return True


def compute_run(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y (N, H) in the order of x, h_n and c_n (B, H); for the backward, in the order of the run, h, c and gates.

    h (B + N, H) begins with h0. y has memory of its own: a caller may write to it.
    """
    with on_its_stream(x):
        start, sizes = _state(h0, c0), _sizes(batch_sizes)
        padding = _padding(reverse, sizes, x, h0.shape[0])
        if padding is not None:
            return _run_padded(kind, padding, x, start, _weights(weights))
        segments, reorder = cut(sizes, len(x), h0.shape[0]), _reordering(reverse, sizes, x, h0.shape[0])
        saved = forward(kind, reorder(to_array(x)), segments, start, _weights(weights))
        (h, c), (h_n, c_n) = _pair(tuple(map(_rows, saved.states))), _pair(saved.last)
        if not saved.segments:  # views of the states
            h_n, c_n = h_n.copy(), None if c_n is None else c_n.copy()
        after = h[len(h0) :]
        y = reorder(after)
        if y is after:
            y = empty(backend.namespace(h), after.shape, h.dtype)
            backend.copy(y, after)
        return _tensors(x, (y, h_n, c_n, h, c, None if saved.gates is None else _rows(saved.gates)))


def _run_padded(kind: str, padding: Padding, x: Tensor, start: State, weights: Weights) -> tuple[Tensor, ...]:
    """Return what `compute_run` does, by one run over all steps of all samples."""
    saved = forward(kind, to_array(padding.pad(x, padding.given)), _whole(padding), start, weights)
    h, *c = (to_tensor(_rows(states)) for states in saved.states)
    none, after = [x.new_empty(0) for _ in range(3)], slice(padding.batch, None)
    return (
        h[after][padding.given], h[after][padding.ends], c[0][after][padding.ends] if c else none[0],
        h[padding.kept], c[0][padding.kept] if c else none[1],
        none[2] if saved.gates is None else to_tensor(_rows(saved.gates))[padding.run],
    )  # fmt: skip


torch.library.impl("sparsebp::run", ("cpu", "cuda"), compute_run)


def infer_op(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y, h_n and c_n as ``sparsebp::run`` does, for tensors without gradients."""
    with on_its_stream(x):
        sizes = _sizes(batch_sizes)
        if _padding(reverse, sizes, x, h0.shape[0]) is not None:
            return compute_run(kind, reverse, batch_sizes, x, h0, c0, *weights)[:3]
        segments, reorder = cut(sizes, len(x), h0.shape[0]), _reordering(reverse, sizes, x, h0.shape[0])
        h, last = infer(kind, reorder(to_array(x)), segments, _state(h0, c0), _weights(weights))
        return _tensors(x, (reorder(h), *_pair(last)))


@torch.library.register_fake("sparsebp::run")
def _shapes_of_run(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None, w_ih: Tensor,
    w_hh: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, hidden = x.shape[0], w_hh.shape[1]
    none, y, last, kept = (0,), (rows, hidden), (h0.shape[0], hidden), CELLS[kind].kept
    states, gates = (h0.shape[0] + rows, hidden), (rows, kept * hidden) if kept else none
    c_n, c = (none, none) if c0 is None else (last, states)
    return tuple(x.new_empty(shape) for shape in (y, last, c_n, states, c, gates))


def compute_run_back(
    for_input: bool, for_weights: bool, gy: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None, h: Tensor,
    c: Tensor, gates: Tensor, kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor,
    c0: Tensor | None, *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients at x, h0, c0 and the weights."""
    with on_its_stream(x):
        start, sizes, weights_of_run = _state(h0, c0), _sizes(batch_sizes), _weights(weights)
        padding = _padding(reverse, sizes, x, h0.shape[0])
        if padding is None:
            segments, reorder = cut(sizes, len(x), h0.shape[0]), _reordering(reverse, sizes, x, h0.shape[0])
            at_y, at_last = None if gy is None else reorder(to_array(gy)), (_array(grad_h_n), _array(grad_c_n))
            rows = reorder(to_array(x))
        else:
            segments, rows = _whole(padding), to_array(padding.pad(x, padding.given))
            at_y, at_last = _array(_pad_gradients(padding, gy, grad_h_n)), (None, _array(grad_c_n))
            h, c, gates = _pad_kept(kind, padding, h, c, gates)
        states = (to_array(h),) if c0 is None else (to_array(h), to_array(c))
        saved = saved_run(rows, segments, states, to_array(gates) if CELLS[kind].kept else None, start)
        at_h = None if at_y is None else by_step(at_y, segments, start)
        found = backward(kind, saved, weights_of_run, at_h, at_last[: len(start)], for_input, for_weights)
        at_x = reorder(found.x) if padding is None and found.x is not None else found.x
        got = _tensors(x, (at_x, *_pair(found.start), *(found.weights[:4] if found.weights else (None,) * 4)))
        return got if padding is None or at_x is None else (got[0][padding.given], *got[1:])


def _pad_kept(kind: str, padding: Padding, h: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a run kept, padded by values for which no gradient flows from there; see `CellMath.close`."""
    h = padding.pad(h, padding.kept, 1 if kind == "rnn_tanh" else 0, before=1)
    if CELLS[kind].kept:
        gates = padding.pad_gates(gates, CLOSED[kind])
    return h, padding.pad(c, padding.kept, before=1) if c.numel() else c, gates


CLOSED = {"gru": 2, "lstm": 1}
"""The gate that is one past a sample's end: n, and f; all others are zero."""


def _pad_gradients(padding: Padding, gy: Tensor | None, at_ends: Tensor | None) -> Tensor | None:
    """Return the gradients at every step, with those at each sample's last state, which is that of its last step."""
    if gy is None:
        return None if at_ends is None else padding.pad(at_ends, padding.ends)
    padded = padding.pad(gy, padding.given)
    return padded if at_ends is None else padded.index_add_(0, padding.ends, at_ends)


torch.library.impl("sparsebp::run_back", ("cpu", "cuda"), compute_run_back)


@torch.library.register_fake("sparsebp::run_back")
def _shapes_of_run_back(
    for_input: bool, for_weights: bool, gy: Any, grad_h_n: Any, grad_c_n: Any, h: Any, c: Any, gates: Any, kind: str,
    reverse: bool, batch_sizes: Any, x: Tensor, h0: Tensor, c0: Tensor | None, *weights: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = x if for_input else None, h0, c0, *(weights if for_weights else (None,) * 4)
    return tuple(x.new_empty((0,) if like is None else like.shape) for like in wanted)


def _sizes(batch_sizes: Tensor | None) -> np.ndarray | None:
    return None if batch_sizes is None else batch_sizes.numpy().astype(np.int64, copy=False)


def _padding(reverse: bool, sizes: np.ndarray | None, x: Tensor, batch: int) -> Padding | None:
    """Return the padding for a packed run on a GPU; None for others, and where it does not pay."""
    if sizes is None or not x.is_cuda or len(cut(sizes, len(x), batch)) <= FEW_SEGMENTS:
        return None
    return padding_of(sizes, reversed_rows(sizes, len(x), batch) if reverse else None, x, batch)


def _whole(padding: Padding) -> tuple[Segment]:
    return (Segment(0, padding.steps, padding.batch),)


def _reordering(reverse: bool, sizes: np.ndarray | None, x: Tensor, batch: int) -> Callable[[Array], Array]:
    """Return what puts rows into the order of a run, a reversed one from each sample's end, and back into theirs."""
    if not reverse or not len(x):
        return lambda rows: rows
    if sizes is None:
        return lambda rows: rows.reshape(-1, batch, rows.shape[1])[::-1].copy().reshape(rows.shape)
    order: Array = reversed_rows(sizes, len(x), batch)
    order = backend.cupy().asarray(order) if x.is_cuda else order
    return lambda rows: rows.take(order, axis=0)


def _array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else to_array(tensor)


def _weights(tensors: Sequence[Tensor | None]) -> Weights:
    return Weights(*map(_array, tensors))


def _state(h: Tensor, c: Tensor | None) -> State:
    return (to_array(h),) if c is None else (to_array(h), to_array(c))


def _rows(array: Array) -> Array:
    """Return an array of a run, (T, B, n) or (N, 1, n), as rows."""
    return array.reshape(-1, array.shape[2])


def _pair(state: State) -> tuple[Array, Array | None]:
    return (state[0], None) if len(state) == 1 else (state[0], state[1])


def _tensors(like: Tensor, arrays: Iterable[Array | None]) -> tuple[Tensor, ...]:
    return tuple([like.new_empty(0) if array is None else to_tensor(array) for array in arrays])


# The same runs in PyTorch's own operations, step by step, for second derivatives and forward mode: PyTorch's cells are
# differentiable to any order, in both modes and under every transform of `torch.func`. First gradients never need them.

PLAIN_CELLS: dict[str, Callable[..., Any]] = {
    "rnn_tanh": torch.rnn_tanh_cell,
    "rnn_relu": torch.rnn_relu_cell,
    "gru": torch.gru_cell,
    "lstm": torch.lstm_cell,
}


def run_plain(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None, *weights: Tensor
) -> tuple[Tensor, ...]:
    """Return y (N, H), h_n (B, H) and, for an LSTM, c_n (B, H)."""
    cell, rows, batch = PLAIN_CELLS[kind], x.shape[0], h0.shape[0]
    sizes = [batch] * (rows // batch if rows else 0) if batch_sizes is None else batch_sizes.tolist()
    order = None
    if reverse:
        host = None if batch_sizes is None else np.array(sizes)
        order = torch.from_numpy(reversed_rows(host, rows, batch).copy()).to(x.device)
        x = x[order]
    with torch.autocast(x.device.type, enabled=False):
        y, last = _plain_steps(cell, x, sizes, (h0,) if c0 is None else (h0, c0), weights)
    return (y if order is None else y[order], *last)


def _plain_steps(
    cell: Callable[..., Any], x: Tensor, sizes: list[int], state: tuple[Tensor, ...], weights: tuple[Tensor, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Run over the rows, dropping samples where they end; return all states and each sample's last state."""
    outputs: list[Tensor] = [x.new_empty(0, state[0].shape[1])]
    ended: list[list[Tensor]] = [[] for _ in state]
    for x_t in x.split(sizes):
        for part, gone in zip(state, ended, strict=True):
            if len(x_t) < len(part):
                gone.append(part[len(x_t) :])
        state = tuple(part[: len(x_t)] for part in state)
        new = cell(x_t, state if len(state) > 1 else state[0], *weights)
        state = new if isinstance(new, tuple) else (new,)
        outputs.append(state[0])
    return torch.cat(outputs), [torch.cat([part, *gone[::-1]]) for part, gone in zip(state, ended, strict=True)]


def gradients(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], arriving: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients at `inputs`, given gradients `arriving` at the outputs; None stands for zero."""
    outputs, back = torch.func.vjp(function, *inputs)[:2]
    return back(tuple(_or_zeros(g, y) for g, y in zip(arriving, outputs, strict=True)))


def tangents(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], along: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Return the derivatives of the outputs along `along`; None stands for zero.

    The backward is linear in the arriving gradients, so the backward through *it* is the forward derivative. Forward
    mode thus only needs reverse mode, which nests anywhere.
    """
    outputs, back = torch.func.vjp(function, *inputs)[:2]
    forward = torch.func.vjp(back, tuple(torch.zeros_like(y) for y in outputs))[1]
    (found,) = forward(tuple(_or_zeros(v, x) for v, x in zip(along, inputs, strict=True)))
    return found


def _or_zeros(given: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if given is None else given


MAY_BE_NONE = tuple[Tensor | None, ...]


def recurrent(
    kind: str, reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y (N, H), h_n (B, H) and c_n (B, H), empty except for an LSTM, of one run over packed rows x (N, I)."""
    inputs: Any = kind, reverse, batch_sizes, x, h0, c0, *weights
    if _is_plain_inference(x, h0, c0, *weights):
        found = infer_op(*inputs)
    elif torch.compiler.is_compiling():
        found = run_op(*inputs)
    else:
        found = apply(Run, *inputs)
    return found[0], found[1], found[2]


def _is_plain_inference(*tensors: Tensor | None) -> bool:
    """Whether this is a plain call without gradients: no transform, mode, tangent or graph."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch.autograd.forward_ad._current_level < 0
        and all(
            tensor is None or (type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type in ("cpu", "cuda"))
            for tensor in tensors
        )
    )


# ---- autograd functions ---------------------------------------------------------------------------------------------


class Run(Function):
    """``sparsebp::run`` with its derivatives. y, h_n and c_n are differentiable."""

    operator, forward = run_op, below_autograd(run_op, compute_run)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: D102
        kind, reverse, *tensors = inputs
        _, _, c_n, h, c, gates = output
        ctx.kind, ctx.reverse = kind, reverse
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(h, c, gates, *([c_n] if tensors[3] is None else []))
        kept = h, c, gates, *tensors
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        needed = ctx.needs_input_grad
        if all(g is None for g in arriving[:3]):
            return (None,) * len(needed)
        kept = ctx.saved_tensors
        asked = needed[3], any(needed[6:])
        found = apply(RunBack, *asked, *arriving[:3], *kept[:3], ctx.kind, ctx.reverse, *kept[3:])
        return tuple(g if need else None for g, need in zip((None, None, None, *found), needed, strict=True))

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        batch_sizes, *saved = ctx.saved_tensors[3:]
        with primals(saved) as inputs:
            function, given = _of_given(_plain_run(ctx.kind, ctx.reverse, batch_sizes), inputs)
            found = tangents(function, given, _where_given(inputs, along[3:]))
        return (*found, *(None,) * (6 - len(found)))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:  # noqa: D102
        return _vmapped(Run.apply, 3, False, info.batch_size, in_dims, inputs)


class RunBack(Function):
    """``sparsebp::run_back`` with its derivatives, at the arriving gradients and at the inputs."""

    operator, forward = run_back, below_autograd(run_back, compute_run_back)

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
        found = iter(gradients(function, given, _where_true(ctx.returned, arriving)))
        grads = [None if tensor is None else next(found) for tensor in inputs]
        return (None, None, *grads[:3], *(None,) * 6, *grads[3:])

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> MAY_BE_NONE:  # noqa: D102
        with primals(ctx.saved_tensors[1:]) as saved:
            function, inputs, given = _again(ctx, saved)
            found = iter(tangents(function, given, _where_given(inputs, (*along[2:5], *along[11:]))))
        return tuple(next(found) if there else None for there in ctx.returned)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *inputs: Any) -> Any:  # noqa: D102
        return _vmapped(RunBack.apply, 11, inputs[1], info.batch_size, in_dims, inputs)


_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("run", Run.apply, "Autograd")
_LIBRARY.impl("run_back", RunBack.apply, "Autograd")


# ---- recomputation --------------------------------------------------------------------------------------------------


def _plain_run(kind: str, reverse: bool, batch_sizes: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *inputs: run_plain(kind, reverse, batch_sizes, *inputs)


def _again(
    ctx: Any, inputs: Sequence[Tensor | None]
) -> tuple[Callable[..., tuple[Tensor, ...]], MAY_BE_NONE, tuple[Tensor, ...]]:
    """Return the backward as a function of its differentiable inputs, all its inputs, and those that are not None."""
    batch_sizes = ctx.saved_tensors[0]

    def backward_of(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        function, given = _of_given(_plain_run(ctx.kind, ctx.reverse, batch_sizes), inputs[3:])
        outputs = 2 if inputs[5] is None else 3  # an LSTM has cells
        found = iter(gradients(function, given, inputs[:outputs]))
        grads = [None if tensor is None else next(found) for tensor in inputs[3:]]
        return tuple(g for g, there in zip(grads, ctx.returned, strict=True) if there and g is not None)

    function, given = _of_given(backward_of, inputs)
    return function, tuple(inputs), given


def _of_given(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None]
) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return `function` restricted to the inputs that are not None, and these inputs."""

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
    """Call with one more axis: as more samples of the batch if the weights are the same, else one by one.

    ``inputs[x_at]`` is x, preceded by the batch sizes; the weights begin at ``x_at + 3``. If `sums`, gradients of the
    weights are summed over the batch, which also takes one call each.
    """
    if sums or any(dim is not None for dim in (dims[x_at - 1], *dims[x_at + 3 :])):
        return one_by_one(call, count, dims, inputs)

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


def one_by_one(
    call: Callable[..., tuple[Tensor, ...]], count: int, dims: Sequence[int | None], inputs: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return what a rule of vmap does, by one call for each number of the mapped axis."""
    found = [
        call(*(i if dim is None else i.select(dim, number) for i, dim in zip(inputs, dims, strict=True)))
        for number in range(count)
    ]
    return tuple(torch.stack(outputs) for outputs in zip(*found, strict=True)), (0,) * len(found[0])


torch.library.register_vmap(
    "sparsebp::run", lambda info, dims, *inputs: _vmapped(run_op, 3, False, info.batch_size, dims, inputs)
)
torch.library.register_vmap(
    "sparsebp::run_back", lambda info, dims, *inputs: _vmapped(run_back, 11, inputs[1], info.batch_size, dims, inputs)
)


# An LSTM with a projected state (``proj_size``), in terms of one without.
#
# The state h = W_hr·m, with m = o·tanh(c), enters the gates as W_hh·h = (W_hh·W_hr)·m, so m is the state of an LSTM
# with that product as its weights. An initial h0 is not a projection of any m: it enters as features of each sample's
# first input, with weights W_hh, and m starts from zero.


def run_projected(
    reverse: bool, batch_sizes: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y (N, P), h_n (B, P) and c_n (B, H) for x (N, I), h0 (B, P), c0 (B, H), w_hh (4H, P) and w_hr (P, H)."""
    first = _first_rows(reverse, batch_sizes, x, h0.shape[0])
    starts = x.new_zeros(x.shape[0], h0.shape[1]).index_copy(0, first, h0)
    m, m_n, c_n = recurrent(
        "lstm", reverse, batch_sizes, torch.cat([x, starts], 1), torch.zeros_like(c0), c0, torch.cat([w_ih, w_hh], 1),
        w_hh @ w_hr, b_ih, b_hh,
    )  # fmt: skip
    return m @ w_hr.T, m_n @ w_hr.T, c_n


def _first_rows(reverse: bool, batch_sizes: Tensor | None, x: Tensor, batch: int) -> Tensor:
    """Return each sample's first row in the order of the run (B,)."""
    samples = torch.arange(batch, device=x.device)
    if not reverse:
        return samples
    if batch_sizes is None:
        return samples + (x.shape[0] - batch)
    sizes = batch_sizes.to(x.device)
    lengths = (sizes[:, None] > samples).sum(0)
    return (sizes.cumsum(0) - sizes)[lengths - 1] + samples
