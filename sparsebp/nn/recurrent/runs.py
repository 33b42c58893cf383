"""One run of a cell, a layer in one direction, over time: forward, and back by any of the algorithms.

``bp`` (plain back-propagation, the recursion) and ``chunked`` are fused kernels that store no Jacobian. The other scans
materialise every step's transposed Jacobian and run the general scan over them (BPPSA §3.1 and Algorithm 1); the
gradients at the gates then follow from the gradient at every state without a recurrence.

Functions take the kernels `k` of the arrays' library, which their caller finds once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeGuard, cast

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import BACKWARDS, Array, Backward, ScanAlgorithm, check_choice, check_integer
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.host_pool import empty
from sparsebp.nn.dense import product, project, short_products, transposed_product
from sparsebp.nn.recurrent.cells import CellMath
from sparsebp.nn.recurrent.lengths import Segments
from sparsebp.nn.recurrent.saved import (
    GivenState,
    RunGradients,
    SavedRun,
    SegmentRun,
    State,
    UnsavedRun,
    Weights,
    split,
)
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.rules import HOST_CHOICE, Choice, choose_recurrent_backward

# The algorithm asked for.

FUSED = ("bp", "chunked")
"""Algorithms of fused kernels, which store no Jacobian."""


@dataclass(frozen=True)
class BackwardOptions:
    """The backward algorithm and its options; None lets the algorithm choose."""

    algorithm: Backward = "auto"
    up_levels: int | None = None
    chunks: int | None = None
    workers: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_choice("backward algorithm", self.algorithm, BACKWARDS)
        least = {"chunks": 1, "workers": 1, "up_levels": 0, "memory_limit": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_integer(name, value, low))


Begun: TypeAlias = tuple[SavedRun, tuple[Any, ...]]
"""A run without its states, and the arguments of the kernel that computes them."""
Want: TypeAlias = Literal["input", "weights", "both"]
"""Which gradients are asked for. A kernel that sums those of the weights need not store ga if "input" is not."""

# Forward.


def forward(
    k: Any, cell: CellMath, x: Array, weights: Weights, initial: GivenState | None = None, segments: Segments = (),
    begun: Begun | None = None,
) -> SavedRun:  # fmt: skip
    """Run a cell over x (T, B, I), C-contiguous, from an initial state; None for it, or an array of it, are zeros.

    With `segments`, x are their rows (N, 1, I). `begun` is what `begin` returned.
    """
    if weights.weight_hr is not None:
        return _forward_projected(k, cell, x, weights, initial)
    saved, (inputs, *projection) = begin(k, cell, x, weights, segments) if begun is None else begun
    if saved.segments:
        _run_segments(k, cell, saved, weights, inputs, projection, initial)
        return saved
    given = () if initial is None or all(array is None for array in initial) else initial
    for state, first in zip((saved.h0, saved.c0), given, strict=False):
        _set(state, first)
    if len(x):
        cell.run(k, inputs, weights, saved, *projection, fresh=not given)
    elif not given:
        saved.states[0][0] = saved.states[-1][0] = 0
    return saved


def _is_whole(initial: GivenState | None) -> TypeGuard[State]:
    """Whether kernels can read a given initial state where it is."""
    return initial is not None and all(array is not None and array.flags.c_contiguous for array in initial)


def _set(state: Array, given: Array | None) -> None:
    """Write a state or a gradient there; None stands for zeros."""
    if given is None or not given.flags.c_contiguous:
        state[...] = 0 if given is None else given
    else:
        backend.copy(state, given)


def begin(
    k: Any, cell: CellMath, x: Array, weights: Weights, segments: Segments = (), inputs: tuple[Any, ...] | None = None
) -> Begun:
    """Do what waits for no state: take memory, and project x, by one GEMM or, with few features, by the kernel."""
    xp, (steps, batch, _), hidden = k.xp, x.shape, len(weights.weight_ih) // cell.gates
    count, shape = len(cell.states), ((segments[0].batch if segments else 1) + steps, batch, hidden)
    states = tuple(map(empty, [xp] * count, [shape] * count, [x.dtype] * count))
    gates = empty(xp, (steps, batch, cell.kept * hidden), x.dtype) if cell.kept else None
    if inputs is None:
        inputs = cell.inputs(k, x, weights) if steps else (x,)
    return SavedRun(x, states, gates, segments), inputs


def _run_segments(
    k: Any, cell: CellMath, saved: SavedRun, weights: Weights, inputs: Array, projection: list[Any],
    initial: GivenState | None,
) -> None:  # fmt: skip
    """Fill states and gates, and the last state; on a host in one call."""
    segments, batch = saved.segments, len(saved.h0)
    for states, first in zip(saved.states, initial or (None,) * len(saved.states), strict=True):
        _set(states[:batch, 0], first)
    saved.last = tuple([states[:batch, 0].copy() for states in saved.states])
    if _is_compiled(k, inputs):
        after = tuple([states[batch:, 0] for states in saved.states])
        gates = None if saved.gates is None else saved.gates[:, 0]
        kernels.on_host().cells.forward(
            _kind(cell), segments, inputs[:, 0], weights.weight_hh, weights.bias_hh, projection, after, gates,
            saved.last,
        )  # fmt: skip
        return
    for number, cut in enumerate(segments):
        part = SegmentRun(saved, number)
        cell.run(k, cut.of(inputs), weights, part, *projection)
        for last, states in zip(saved.last, (part.h, part.c), strict=False):
            backend.copy(last[: cut.batch], states[-1])


def _is_compiled(k: Any, like: Array) -> bool:
    """Whether the host's kernels of all segments take the place of `k`, which checks nothing."""
    return type(like) is np.ndarray and k is kernels.get(np).unchecked


def _kind(cell: CellMath) -> str:
    return f"rnn_{cell.kind}" if cell.name == "rnn" else cell.name


def infer(
    k: Any, cell: CellMath, x: Array, weights: Weights, initial: GivenState | None = None, segments: Segments = ()
) -> tuple[Array, State]:
    """Return h (T, B, H) and the last state as `forward` does, and keep nothing."""
    xp, (steps, batch, _), hidden = backend.namespace(x), x.shape, len(weights.weight_ih) // cell.gates
    if not backend.is_host(xp) and x.size and not segments and weights.weight_hr is None and _is_whole(initial):
        states = tuple([empty(xp, (steps, batch, hidden), x.dtype) for _ in cell.states])
        gates = empty(xp, (steps, batch, cell.kept * hidden), x.dtype) if cell.kept else None
        inputs, *projection = cell.inputs(k, x, weights)
        cell.run(k, inputs, weights, UnsavedRun(x, initial, states, gates), *projection)
        return states[0], tuple([state[-1] for state in states])
    if cell.kind is None or weights.weight_hr is not None or not backend.is_host(xp):
        saved = forward(k, cell, x, weights, initial, segments)
        return saved.h, saved.last
    h, shape = empty(xp, (steps, batch, hidden), x.dtype), (segments[0].batch if segments else batch, hidden)
    of_host = kernels.on_host()
    start = tuple([
        np.zeros(shape, x.dtype) if array is None else np.array(array, order="C")
        for array in initial or (None,) * len(cell.states)
    ])  # fmt: skip
    if segments:
        of_host.inference.infer_segments(cell.kind, segments, x[:, 0], *weights[:4], start, h[:, 0])
    elif steps:
        ends = tuple([np.empty_like(array) for array in start[1:]])
        of_host.infer(cell.kind, x, *weights[:4], start, h, *ends)
        return h, (h[-1], *ends)
    return h, start


# Backward.


def backward(
    k: Any, cell: CellMath, saved: SavedRun, weights: Weights, gy: Array | None, at_last: GivenState,
    want: Want = "input", choice: Choice = HOST_CHOICE, options: BackwardOptions | None = None,
) -> RunGradients:  # fmt: skip
    """Return gradients of a run from gy (T, B, H) and `at_last` (B, H), at its last state, C-contiguous or None.

    `input_grad` and `weight_grad` compute from it those at the input and at the weights.
    """
    if weights.weight_hr is not None:
        return _backward_projected(k, cell, saved, weights, gy, at_last, choice, options)
    xp = k.xp
    if not len(saved.x):
        grads = _empty_gradients(xp, cell, saved)
        _arrive(grads, at_last)
        return grads
    if choice.algorithm not in FUSED:
        algorithm = cast(ScanAlgorithm, choice.algorithm)
        return _scan_back(xp, k, cell, saved, weights.weight_hh, gy, at_last, algorithm, options)
    if want != "input" and not saved.segments and cell.sums_inside(xp, saved, choice.chunks):
        return cell.summed_back(xp, k, saved, weights, gy, at_last, choice.chunks, want == "both")
    grads = _empty_gradients(xp, cell, saved)
    if saved.segments:
        _segments_back(xp, k, cell, saved, weights.weight_hh, gy, at_last, grads)
    else:
        cell.run_back(k, saved, weights.weight_hh, gy, at_last, choice.chunks, grads.ga, grads.initial)
    return grads


def _empty_gradients(xp: ModuleType, cell: CellMath, saved: SavedRun) -> RunGradients:
    shape, dtype = saved.h.shape, saved.h.dtype
    ga = empty(xp, (shape[0], shape[1], cell.columns * shape[2]), dtype)
    return RunGradients(tuple([xp.empty(saved.h0.shape, dtype) for _ in cell.states]), ga)


def _arrive(grads: RunGradients, at_last: GivenState) -> None:
    for into, arriving in zip(grads.initial, at_last, strict=True):
        _set(into, arriving)


def input_grad(cell: CellMath, grads: RunGradients, weights: Weights) -> Array:
    """Return the gradient at x (T, B, I)."""
    return grads.x if grads.ga is None else cell.input_grad(grads.ga, weights)


def weight_grad(k: Any, cell: CellMath, grads: RunGradients, saved: SavedRun, weights: Weights) -> Weights:
    """Return the gradients of the weights."""
    if grads.weights is not None:
        return grads.weights
    found = cell.weight_grad(k, cast(Array, grads.ga), saved, weights)
    return found if saved.inner is None else _with_projection(found, grads, saved.inner)


def _segments_back(
    xp: ModuleType, k: Any, cell: CellMath, saved: SavedRun, w_hh: Array, gy: Array | None, at_last: GivenState,
    grads: RunGradients,
) -> None:  # fmt: skip
    """Go back through all segments, on a host in one call; `grads` are written."""
    segments, ga = saved.segments, cast(Array, grads.ga)
    _arrive(grads, at_last)
    hidden = saved.h.shape[2]
    chunks = [
        1 if cut.steps < LONG else choice_of(cell, (cut.steps, cut.batch, hidden), ga.dtype, xp).chunks
        for cut in segments
    ]  # fmt: skip
    if max(chunks) == 1 and _is_compiled(k, ga):
        batch = len(saved.h0)
        start, after = ([states[part, 0] for states in saved.states] for part in (slice(batch), slice(batch, None)))
        kernels.on_host().cells.backward(
            _kind(cell), segments, w_hh, tuple(start), tuple(after), None if saved.gates is None else saved.gates[:, 0],
            None if gy is None else gy[:, 0], ga[:, 0], grads.initial,
        )  # fmt: skip
        return
    for number in reversed(range(len(segments))):
        cut = segments[number]
        here = tuple([part[: cut.batch] for part in grads.initial])
        out = tuple([xp.empty_like(part) for part in here])
        gy_here = None if gy is None else cut.of(gy)
        cell.run_back(k, SegmentRun(saved, number), w_hh, gy_here, here, chunks[number], cut.of(ga), out)
        for part, left in zip(here, out, strict=True):
            backend.copy(part, left)


LONG = 64
"""Steps from which one of several segments may be worth cutting into chunks."""


def choice_of(cell: CellMath, shape: tuple[int, int, int], dtype: np.dtype, xp: ModuleType) -> Choice:
    """Return how a run of states (T, B, H) goes back by the rule; on a host, and of none, by the recursion."""
    number = backend.device_number(xp)
    return HOST_CHOICE if number is None or 0 in shape else _choice_there(cell, shape, dtype, number)


@lru_cache(maxsize=256)  # the choice takes longer than a launch
def _choice_there(cell: CellMath, shape: tuple[int, int, int], dtype: np.dtype, device: int) -> Choice:
    """Return the choice for a device, the current one."""
    return cast(Choice, choose(BackwardOptions(), cell, shape, dtype, backend.cupy()))


# Backward by a scan over materialised Jacobians.


def _scan_back(
    xp: ModuleType, k: Any, cell: CellMath, saved: SavedRun, w_hh: Array, gy: Array | None, at_last: GivenState,
    algorithm: ScanAlgorithm, options: BackwardOptions | None,
) -> RunGradients:  # fmt: skip
    steps, batch, hidden = saved.h.shape
    pattern, dtype = cell.pattern(hidden), saved.h.dtype
    plan = _plan_within(options or BackwardOptions(), algorithm, pattern, saved.h.shape, dtype, xp)
    data = jacobians(k, cell, saved, w_hh, reverse=True)  # the scan's first element is the last step's
    seed = xp.zeros((pattern.shape[0], batch), dtype=dtype)
    injections = None
    if gy is not None:
        seed[:hidden] += gy[-1].T
        injections = xp.zeros((steps, pattern.shape[0], batch), dtype=dtype)
        injections[:-1, :hidden] = gy[-2::-1].transpose(0, 2, 1) if steps > 1 else 0
    for number, arriving in enumerate(at_last):
        if arriving is not None:
            seed[number * hidden : (number + 1) * hidden] += arriving.T
    y = plan(seed, data, injections=injections)
    at_states = xp.empty((steps, batch, pattern.shape[0]), dtype=dtype)
    at_states[-1] = seed.T
    for t in range(1, steps):
        at_states[steps - 1 - t] = y[t - 1].T
    initial = tuple(map(xp.ascontiguousarray, split(y[steps - 1].T, len(at_last))))
    return RunGradients(initial, gate_gradients(k, cell, saved, w_hh, split(at_states, len(at_last))))


def jacobians(k: Any, cell: CellMath, saved: SavedRun, w_hh: Array, reverse: bool = False) -> Array:
    """Return the steps' transposed Jacobians, values on the cell's pattern (T, nnz, B); from the last if `reverse`."""
    steps, batch, hidden = saved.h.shape
    out = empty(backend.namespace(saved.h), (steps, cell.pattern(hidden).nnz, batch), saved.h.dtype)
    cell.run_jacobians(k, saved, w_hh, reverse, out)
    return out


def gate_gradients(k: Any, cell: CellMath, saved: SavedRun, w_hh: Array, at_states: State) -> Array:
    """Return ga from the full gradients at every state, (T, B, H) each: all steps are samples of one step back."""
    xp, (steps, batch, _) = backend.namespace(saved.h), saved.h.shape
    rows = steps * batch
    states = tuple([xp.stack((all_[:-1], all_[1:])).reshape(2, rows, -1) for all_ in saved.states])
    gates = None if saved.gates is None else saved.gates.reshape(1, rows, -1)
    run = SavedRun(saved.x.reshape(1, rows, -1), states, gates)
    grads = _empty_gradients(xp, cell, run)
    at_last = [xp.ascontiguousarray(at).reshape(rows, -1) for at in at_states]
    cell.run_back(k, run, w_hh, None, at_last, 1, grads.ga, grads.initial)
    return cast(Array, grads.ga).reshape(steps, batch, -1)


def _plan_within(
    options: BackwardOptions, algorithm: ScanAlgorithm, pattern: SparsityPattern, shape: tuple[int, int, int],
    dtype: np.dtype, xp: ModuleType,
) -> Any:  # fmt: skip
    """Return the scan's plan if it and the Jacobians fit into the memory limit; refuse before anything is allocated."""
    steps, batch, hidden = shape
    stored = steps * pattern.nnz * batch * dtype.itemsize
    limit = options.memory_limit
    rest = None if limit is None else max(limit - stored, 0)
    up_levels = options.up_levels if algorithm == "hybrid" else None
    try:
        return _scan_plan(pattern, steps, algorithm, up_levels, options.workers, rest, batch, dtype, xp)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"backward={algorithm!r} would need too much memory for T = {steps}, B = {batch}, H = {hidden}",
            expected=f"at most {limit} bytes (memory_limit)",
            got=f"{stored} bytes of Jacobians, and the scan's own",
            remedy="Use backward='bp' or 'chunked', which store no Jacobian, or raise memory_limit",
        ) from error


@lru_cache(maxsize=4)  # a plan keeps its buffers: cache only a few
def _scan_plan(
    pattern: SparsityPattern, steps: int, algorithm: ScanAlgorithm, up_levels: int | None, workers: int | None,
    memory_limit: int | None, batch: int, dtype: np.dtype, xp: ModuleType,
) -> Any:  # fmt: skip
    from sparsebp.scan import plan_scan

    return plan_scan(
        [pattern] * steps, algorithm=algorithm, up_levels=up_levels, workers=workers,
        memory_limit=memory_limit, batch=batch, dtype=dtype, xp=xp,
    )  # fmt: skip


# An LSTM with a projection (proj_size): ``h = W_hr m`` with ``m = o * tanh(c)``.
#
# Since ``W_hh h = (W_hh W_hr) m``, the recursion is an LSTM's with the state (m, c) and the weights ``W_hh W_hr``. So
# every kernel and scan works on it. h0 is not a projection of an m: its part is added to the projected input, and m
# begins with zero. All h, and the gradients at them, are then one product over all steps.


def unprojected(saved: SavedRun, weights: Weights) -> tuple[SavedRun, Weights]:
    """Return the run of the recursion itself, and its weights."""
    return (saved, weights) if saved.inner is None else (saved.inner, _folded(weights))


def _folded(weights: Weights) -> Weights:
    return weights._replace(weight_hh=product(weights.weight_hh, cast(Array, weights.weight_hr)), weight_hr=None)


def _forward_projected(k: Any, cell: CellMath, x: Array, weights: Weights, initial: GivenState | None) -> SavedRun:
    (h0, c0), folded, gx = initial or (None, None), _folded(weights), project(x, weights.weight_ih, None)
    if h0 is not None:
        gx[0] += product(h0, weights.weight_hh.T)
    begun = begin(k, cell, x, folded, inputs=(gx, None, *folded[2:4]))
    inner = forward(k, cell, x, folded, (None, c0), begun=begun)
    h = empty(backend.namespace(x), (len(x) + 1, x.shape[1], weights.weight_hh.shape[1]), x.dtype)
    h[0] = 0 if h0 is None else h0
    h[1:] = product(inner.h, cast(Array, weights.weight_hr).T)
    return SavedRun(x, (h, inner.states[1]), inner=inner)


def _backward_projected(
    k: Any, cell: CellMath, saved: SavedRun, weights: Weights, gy: Array | None, at_last: GivenState, choice: Choice,
    options: BackwardOptions | None,
) -> RunGradients:  # fmt: skip
    """Take the gradient at h to m and back through the recursion; then compute it at every h."""
    w_hr, (inner, folded) = cast(Array, weights.weight_hr), unprojected(saved, weights)
    at_m = None if gy is None else product(gy, w_hr)
    last_m = None if at_last[0] is None else product(at_last[0], w_hr)
    grads = backward(k, cell, inner, folded, at_m, (last_m, *at_last[1:]), "input", choice, options)
    at_h = empty(backend.namespace(saved.h), saved.states[0].shape, saved.h.dtype)  # entry t feeds step t
    at_h[:-1] = product(cast(Array, grads.ga), weights.weight_hh)
    at_h[-1] = 0 if at_last[0] is None else at_last[0]
    if gy is not None:
        at_h[1:] += gy
    return RunGradients((at_h[0].copy(), *grads.initial[1:]), grads.ga, at_h=at_h[1:])


def _with_projection(found: Weights, grads: RunGradients, inner: SavedRun) -> Weights:
    """Add the gradient of W_hr: one more GEMM."""
    m, at_h = inner.h, cast(Array, grads.at_h)
    rows, xp = m.shape[0] * m.shape[1], backend.namespace(m)
    with short_products(xp, at_h.size * m.shape[2]):
        w_hr = transposed_product(at_h.reshape(rows, -1), m.reshape(rows, m.shape[2]))
    return found._replace(weight_hr=xp.ascontiguousarray(w_hr))


def choose(
    options: BackwardOptions, cell: CellMath, shape: tuple[int, int, int], dtype: np.dtype, xp: ModuleType,
    **stack: int,
) -> Any:  # fmt: skip
    """Return the `scan.Choice` for states of `shape` (T, B, H); ``auto`` is a rule."""
    # `stack` are `input_size`, `layers` and `directions`.
    if options.algorithm == "auto":
        if cell.diagonal:
            return Choice("bp", 1, "A step's Jacobian is diagonal: one linear recurrence goes back, at the speed of "
                          "memory.", {})  # fmt: skip
        if options.workers is None and backend.is_host(xp):
            return HOST_CHOICE
        return choose_recurrent_backward(
            cast(Any, cell.name), *shape, dtype, xp, options.workers, options.memory_limit, **stack
        )
    steps = shape[0]
    # The square root balances the sequential part inside the chunks with the one over the chunks.
    chunks = min(options.chunks or math.isqrt(steps), steps) if options.algorithm == "chunked" else 1
    return Choice(options.algorithm, chunks, f"backward={options.algorithm!r} was asked for", {})
