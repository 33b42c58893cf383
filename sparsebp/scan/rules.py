"""The rules by which `auto` chooses an algorithm: for a scan over Jacobians, and for a recurrent layer's backward.

On a host, plain back-propagation (the linear scan) is taken. It is the fastest in all 16 rows of
``docs/benchmarks/scan.json`` (RNN, T = 10 … 30 000, B = 16, H = 20; one and two threads):

=========  =======  =======  =======  =========  =========
T          threads  bp       chunked  hybrid     blelloch
=========  =======  =======  =======  =========  =========
100        2        0.27 ms  0.85 ms  0.85 ms    1.47 ms
1000       1        1.58 ms  10.1 ms  9.15 ms    22.1 ms
1000       2        1.13 ms  5.94 ms  6.58 ms    14.3 ms
30 000     2        24.3 ms  139 ms   216 ms     416 ms
=========  =======  =======  =======  =========  =========

A scan multiplies matrices where back-propagation multiplies vectors, so it does about as many times the work as a
vector has rows. It pays where more workers than rows would stand idle: on a GPU with a long sequence and a small
hidden size, or on a machine that the caller describes by ``workers=`` (BPPSA §3.6). There the algorithm with the least
parallel time is taken, counted in FLOPs of one worker: max(work / workers, longest path of dependent steps), a lower
bound by R. Brent, "The parallel evaluation of general arithmetic expressions", J. ACM 21, 1974.

A recurrent layer's backward on a GPU was first measured on an H100, in
``docs/benchmarks/gpu-peers-nvidia-h100-80gb-hbm3-de896d47.json``. Its times are of forward and backward together, in
float32 and captured. The backward's alone is what is left without 50 µs of small kernels and the forward, at H = 64
that of ``inference`` and otherwise estimated. What the rule counts for 528 schedulers at 1.98 GHz stands beside them:

=====================  ==============  ========  ========  ===============  ==========
layer, H               T, B            measured  backward  counted chunked  counted bp
=====================  ==============  ========  ========  ===============  ==========
GRU 64, 64 chunks      1000, 16        2249 µs   1940 µs   2122 µs          408 µs
RNN 64, 64 chunks      1000, 16        1110 µs   910 µs    766 µs           149 µs
RNN 120, 76 chunks     1406, 34        15.3 ms   15.0 ms   14.4 ms          369 µs
GRU 64, 60 chunks      1000, 64        7447 µs   7100 µs   8168 µs          408 µs
LSTM 40, 112 chunks    3047, 6         3748 µs   2700 µs   2651 µs          1046 µs
GRU 64, 64 chunks      1000, 1         529 µs    220 µs    222 µs           408 µs
LSTM 64, 64 chunks     1000, 1         877 µs    480 µs    519 µs           537 µs
LSTM 64, bp            1000, 16        867 µs    470 µs    5541 µs          537 µs
GRU 128, bp            1000, 16        1631 µs   850 µs    16.2 ms          796 µs
LSTM 128, bp           1000, 16        2393 µs   1250 µs   43.0 ms          1055 µs
RNN 128, bp            1000, 16        542 µs    260 µs    5533 µs          279 µs
=====================  ==============  ========  ========  ===============  ==========
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import check_choice, check_integer
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.machine import Machine, machine
from sparsebp.scan.algorithms import Recipe, Span, fold_recipe, level_counts, recipe, tree_levels
from sparsebp.scan.cost import Chain, SizedRecipe, TooMuch, amount, bounds, size_recipe

MARGIN = 0.8
"""A scan is taken if its parallel time is at most this share of plain back-propagation's: the counts are rough."""
LANES = 32
"""Lanes of a GPU's worker, a warp scheduler. Each computes a value."""
START = 25_000
"""FLOPs of sparse products that a host's worker could do in the 6 µs of a kernel call (benchmark spgemm)."""
LAUNCH = 4000
"""FLOPs that a lane of a GPU could do in the 2 µs that a kernel takes to start. Predicted, not measured."""
MAP_ROW = 0.4
"""Time of a row in the reduction of a step to an affine map on a host, over the time of the step in the recursion. In
scan.json ``chunked - bp`` is up to 7.2 times the whole ``bp`` for maps of 21 rows (B = 16)."""
MAP_ROW_OF_FEW = 0.2
"""The same with fewer than four samples, which leave rows of the recursion's kernel idle. Roughly measured."""
STEP = 40, 4
"""Cycles of a step of the recursion on a GPU: of any, and of each of the H weights by which a unit of each gate
multiplies. Measured: LSTM 930 at H = 64; RNN 515, GRU 1680, LSTM 2475 at H = 128; counted from machine code at H = 20:
RNN 121, GRU 185. GRU and LSTM of 256 units take 10 times as long, as weights are streamed; a scan streams them, too."""
RATE = 6.0
"""Multiply-adds of a scheduler in a cycle while all of them reduce steps to maps; 32 at most. Measured: 4.5 to 6.9."""
ROW_ALONE = 0.3
"""Time of a map's row where it waits for no other map, over a step of the recursion: measured 0.29 (GRU, H = 64,
B = 1), counted from machine code 0.2 to 0.5 (H = 20)."""
COMBINE = 6, 44
"""Cycles a row to combine a map with what comes after it: of maps in shared memory (H ≤ 32) by machine code, and of
others, eight of whose values are loaded at a time from the L2 cache, in about 350 cycles."""

# An algorithm for a chain of Jacobians.


class Candidate(NamedTuple):
    """An algorithm with its parameter."""

    algorithm: str
    up_levels: int | None = None
    chunks: int | None = None

    def __str__(self) -> str:
        """As the arguments of `plan_scan`, shortened."""
        if self.up_levels is not None:
            return f"{self.algorithm} (up_levels={self.up_levels})"
        return self.algorithm if self.chunks is None else f"{self.algorithm} (chunks={self.chunks})"

    @property
    def arguments(self) -> str:
        """As the arguments of `plan_scan`."""
        extra = "" if self.up_levels is None else f", up_levels={self.up_levels}"
        extra += "" if self.chunks is None else f", chunks={self.chunks}"
        return f"algorithm={self.algorithm!r}{extra}"

    @property
    def multiplies(self) -> bool:
        """Whether the algorithm multiplies matrices at all."""
        return self.algorithm != "linear" and self.up_levels != 0

    def recipe(self, ends: tuple[int, ...]) -> Recipe:
        """Return the steps for a chain folded into pieces with these ends (unfolded without matrix products)."""
        n = len(ends) if self.multiplies else ends[-1]
        found = recipe(self.algorithm, n, up_levels=self.up_levels, chunks=self.chunks or 1)
        return fold_recipe(found, ends) if self.multiplies else found


ON_A_HOST = "On a host auto takes plain back-propagation, the fastest in every measured row (benchmark scan)"

MUCH = 100
"""Times the work of the linear scan from which the caller of an algorithm is warned."""
QUICK = 1 << 24
"""FLOPs of full products up to which a scan is planned without estimating its fill-in first."""
DOUBT = 2.0
"""Factor by which an estimate of memory must exceed the limit before it is believed without planning."""
SMALL = 1 << 24
"""Bytes beyond the limit up to which no estimate is believed: planning so little is quick, and exact."""


class Decision(NamedTuple):
    """The sized winner, the reason, and the parallel times that were compared, in FLOPs by candidate."""

    sized: SizedRecipe
    reason: str
    compared: Mapping[str, float]


def candidates(n: int, chunks: int) -> list[Candidate]:
    """Return the algorithms that differ from each other for n Jacobians, those with the fewest products first."""
    found = [Candidate("linear")]
    found += [Candidate("chunked", chunks=min(n, chunks))] * (min(n, chunks) >= 3)  # with fewer chunks it is linear
    found += [Candidate("hybrid", up_levels=k) for k in range(1, tree_levels(n) - 1)]
    return [*found, Candidate("blelloch")] if n > 1 else found


def choose(
    algorithm: str, up_levels: int | None, chunks: int | None, asked_workers: bool, chain: Chain, memory_limit: int
) -> Decision:
    """Plan the algorithm asked for; for ``auto``, and ``hybrid`` without `up_levels`, plan the best within the limit.

    Raises
    ------
    MemoryLimitError
        None fits; the message names an algorithm that would.
    """
    n, m = len(chain.ends), chain.machine
    enough = -(-m.workers // chain.batch)  # chunks that keep all workers busy
    by_rule = algorithm == "auto" or (algorithm == "hybrid" and up_levels is None)
    if by_rule and (asked_workers or m.is_device):
        options = candidates(n, enough)
        if algorithm == "hybrid":
            options = [Candidate("hybrid", up_levels=o.up_levels or 0) for o in options if o[0] in ("linear", "hybrid")]
        if len(options) > 1:
            return _best(options, chain, memory_limit)
    option, reason = Candidate(algorithm), f"{algorithm} was asked for"
    if by_rule:
        option = Candidate("linear") if algorithm == "auto" else Candidate("hybrid", up_levels=0)
        reason = "Of one Jacobian every scan is linear" if asked_workers or m.is_device else ON_A_HOST
    elif algorithm == "chunked":
        option = Candidate("chunked", chunks=min(n, chunks or enough))
        reason = f"{option} was asked for"
    elif algorithm == "hybrid":
        option = Candidate("hybrid", up_levels=up_levels)
        reason = f"{option} was asked for"
    try:
        return _planned_with_warning(option, chain, memory_limit, reason)
    except MemoryLimitError as error:
        raise refusal(option, chain, memory_limit, error) from error


def _best(options: Sequence[Candidate], chain: Chain, memory_limit: int) -> Decision:
    """Plan the option with the least parallel time that fits into the memory; the first of equals."""
    m = chain.machine
    counts, dropped = _counted(options, chain, memory_limit)
    order = sorted(counts, key=lambda o: counts[o] / (MARGIN if o.multiplies else 1.0))
    for best in order:
        try:
            sized = _planned(best, chain, memory_limit)
        except MemoryLimitError:
            dropped.append(str(best))
            continue
        compared = {str(o): counts[o] for o in order if str(o) not in dropped}
        shown = ", ".join(f"{name} {amount(count, 'FLOP')}" for name, count in list(compared.items())[:4])
        reason = (
            f"{best.algorithm} has the least parallel time, max(work / workers, critical path), on a {m.name} "
            f"({m.workers} worker{'s' if m.workers != 1 else ''}) for {len(chain.patterns)} Jacobians and batch "
            f"{chain.batch}: {shown}"
        )
        if not best.multiplies:
            reason += f". A scan, which multiplies matrices, must be {1 / MARGIN:g} times faster"
        if dropped:
            reason += f". Left out, beyond {memory_limit} bytes: {', '.join(dropped)}"
        return Decision(sized, f"{reason}.", compared)
    error = MemoryLimitError(f"Of {', '.join(dropped)}, none keeps to memory_limit")
    raise refusal(options[0], chain, memory_limit, error)


def _counted(options: Sequence[Candidate], chain: Chain, memory_limit: int) -> tuple[dict[Candidate, float], list[str]]:
    """Return the parallel time of each option that may be the best, and the options beyond the memory limit."""
    counts: dict[Candidate, float] = {}
    dropped: list[str] = []
    for option in options:
        if chain.is_stack:
            counts[option] = stack_time(option, chain)
            continue
        most = min(counts.values(), default=float("inf")) * parallel_values(
            chain.machine
        )  # beyond, it cannot be the best
        try:
            sized = size_recipe(option.recipe(chain.ends), chain, chain.fill_in, _believed(memory_limit), most)
        except MemoryLimitError:
            dropped.append(str(option))
        except TooMuch:
            pass
        else:
            counts[option] = steps_time(sized, chain.machine)
    return counts, dropped


def parallel_values(m: Machine) -> int:
    """Return how many values are computed at the same time."""
    return m.workers * (LANES if m.is_device else 1)


def steps_time(sized: SizedRecipe, m: Machine) -> float:
    """Return the parallel time in FLOPs of a worker: max(work / workers, critical path).

    Workers share the values of a step. On a host each worker starts steps, on a GPU one thread starts all of them.
    """
    parallel, start = parallel_values(m), LAUNCH if m.is_device else START
    issued = start if m.is_device else start / m.workers
    finish: dict[Span, float] = {}
    work = 0.0
    for step, count in zip(sized.recipe.steps, sized.counts, strict=True):
        ready = max(finish.get(step.left, 0.0), finish.get(step.right, 0.0))
        finish[step.target] = ready + start + count.flops / max(1, min(parallel, count.rows * count.width))
        work += issued + count.flops / parallel
    return max(work, *finish.values())


def stack_time(option: Candidate, chain: Chain) -> float:
    """Return the parallel time of stacked dense blocks, one level per call; a host's few calls are not counted."""
    n, size = len(chain.patterns), chain.patterns[0].shape[0]
    width, parallel = 1 if all(chain.shared) else chain.batch, parallel_values(chain.machine)
    mm, mv, total = 2 * size**3 * width, 2 * size**2 * chain.batch, 0.0
    for _, matrices, vectors, rounds in level_counts(
        option.algorithm, n, up_levels=option.up_levels or 0, chunks=option.chunks or 1
    ):
        step = mm / min(parallel, size * width) if matrices else mv / min(parallel, size * chain.batch)
        total += max(rounds * step, (matrices * mm + vectors * mv) / parallel)
        total += LAUNCH * (bool(matrices) + bool(vectors)) if chain.machine.is_device else 0
    return total


def layers_time(works: Iterable[tuple[int, int, int]], m: Machine) -> float:
    """Return the parallel time of one layer after the other: (FLOPs, values, array operations) of each."""
    parallel, start = parallel_values(m), LAUNCH if m.is_device else START
    return sum(flops / max(1, min(parallel, values)) + calls * start for flops, values, calls in works)


def refusal(candidate: Candidate, chain: Chain, memory_limit: int, error: MemoryLimitError) -> MemoryLimitError:
    """Return the error for a candidate that needs too much memory; it names the nearest algorithm that does not."""
    most = {"hybrid": candidate.up_levels or 0, "linear": 0}.get(candidate.algorithm, len(chain.ends))
    levels = range(min(most, tree_levels(len(chain.ends)) - 1) - 1, 0, -1)
    for other in [*(Candidate("hybrid", up_levels=k) for k in levels), Candidate("linear")]:
        limit = memory_limit if other.multiplies else None  # report the linear scan's need even if it exceeds the limit
        try:
            memory = _planned(other, chain, limit).memory
        except MemoryLimitError:
            continue
        break
    remedy = f"Use {other.arguments}, which needs {memory} bytes, or raise memory_limit"
    if memory > memory_limit:
        remedy = (
            f"No algorithm fits: the least is {other.arguments} with {memory} bytes. "
            "Raise memory_limit to that, or make the batch smaller"
        )
    return MemoryLimitError(error.problem, expected=f"at most {memory_limit} bytes", got=error.got, remedy=remedy)


def _planned_with_warning(option: Candidate, chain: Chain, memory_limit: int, reason: str) -> Decision:
    """Plan the option; warn of much fill-in, by an estimate before it is planned if that takes long."""
    if not option.multiplies or chain.is_stack:
        return Decision(_planned(option, chain, memory_limit), f"{reason}.", {})
    linear = 2 * chain.batch * sum([p.nnz for p in chain.patterns if p.kind != "identity"])
    steps = option.recipe(chain.ends)
    estimated = bounds(steps, chain)[0] > QUICK
    if estimated:
        sized = size_recipe(steps, chain, chain.fill_in, _believed(memory_limit))
        _warn_of_fill_in(option, sized.flops / max(linear, 1))
    sized = _planned(option, chain, memory_limit)
    times = sized.flops / max(linear, 1)
    if not estimated:
        _warn_of_fill_in(option, times)
    said = f" Its products take {times:.3g} times the work of the linear scan." if times >= 1.5 else ""
    return Decision(sized, f"{reason}.{said}", {})


def _warn_of_fill_in(option: Candidate, times: float) -> None:
    if times >= MUCH:
        warnings.warn(
            f"The {option.algorithm} scan fills in: its products take about {times:.3g} times the work of the linear "
            "scan. algorithm='auto' takes the least; describe() of a plan shows every product.",
            RuntimeWarning,
            stacklevel=5,
        )


def _believed(memory_limit: int) -> int:
    """Return the bytes from which an estimate refuses a scan; an estimate may exceed a plan's real need."""
    return max(round(DOUBT * memory_limit), memory_limit + SMALL)


def _planned(candidate: Candidate, chain: Chain, memory_limit: int | None) -> SizedRecipe:
    """Plan a candidate. Raises `MemoryLimitError` beyond the limit, first by an estimate if that is clear."""
    steps = candidate.recipe(chain.ends)
    if memory_limit is not None and candidate.multiplies and not chain.is_stack:
        believed = _believed(memory_limit)
        if bounds(steps, chain)[1] > believed:
            size_recipe(steps, chain, chain.fill_in, believed)
    return size_recipe(steps, chain, chain.product, memory_limit)


# The backward of a recurrent layer.

Cell: TypeAlias = Literal["rnn", "gru", "lstm"]
STATES = {"rnn": 1, "gru": 1, "lstm": 2}
"""Arrays of H values in the state, which a Jacobian maps to each other."""
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
"""Matrices (H, H) among the weights."""


@dataclass(frozen=True)
class Choice:
    """The algorithm of a backward pass, and why it was taken.

    Attributes
    ----------
    algorithm
        ``"bp"`` or ``"chunked"``, or the algorithm that was asked for.
    chunks
        Chunks of time for ``"chunked"``, else 1.
    reason
        One sentence: the rule, and the numbers that it compared.
    memory
        Bytes of scratch memory of each algorithm that was compared.
    """

    algorithm: str
    chunks: int
    reason: str
    memory: Mapping[str, int]


def choose_recurrent_backward(
    cell: Cell,
    T: int,
    B: int,
    H: int,
    dtype: Any = np.float32,
    xp: ModuleType = np,
    workers: int | None = None,
    memory_limit: int | None = None,
    *,
    input_size: int | None = None,
    layers: int = 1,
    directions: int = 1,
) -> Choice:
    """Choose the backward of a recurrent layer: on a host ``bp``, else the recursion or a chunked scan by a rule.

    The rule counts sequential steps. The recursion takes T. With C chunks a worker reduces T / C steps to an affine map
    of n + 1 rows (n = H, for an LSTM 2H), C maps are combined, and T / C steps run again. A scan pays where T is long,
    the batch is small, and there are more workers than rows. On a GPU the multiplications of the first phase are what
    counts, T·B·(n + 1)·H² for each gate: it pays up to about 30 units, and with more for a sample or two.

    Parameters
    ----------
    cell
        ``"rnn"``, ``"gru"`` or ``"lstm"``.
    T, B, H
        Length, batch and hidden size.
    dtype
        float32 or float64.
    xp
        ``numpy`` or ``cupy``: where the layer runs.
    workers
        Threads (or warp schedulers) to count with. None: on a GPU all; on a host ``bp`` is taken without counting.
    memory_limit
        Bytes of scratch memory that may be used.
    input_size, layers, directions
        Sizes of the stack, which do not change the choice.

    Raises
    ------
    OptionError
        The cell is unknown, or a size is below 1.
    """
    check_choice("recurrent cell", cell, tuple(STATES))
    T, B, H = check_integer("T", T, 1), check_integer("B", B, 1), check_integer("H", H, 1)
    workers = None if workers is None else check_integer("workers", workers, 1)
    memory_limit = None if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    for name, value in (("input_size", 1 if input_size is None else input_size), ("layers", layers),
                        ("directions", directions)):  # fmt: skip
        check_integer(name, value, 1)
    itemsize = backend.float_dtype(dtype).itemsize
    if backend.is_host(backend.check_module(xp)) and workers is None:
        return HOST_CHOICE
    return _choose(cell, T, B, H, itemsize, machine(xp, workers), memory_limit)


HOST_CHOICE = Choice("bp", 1, f"{ON_A_HOST}; workers= weighs it against a chunked scan", {"bp": 0})


@lru_cache(maxsize=256)  # called at every forward
def _choose(cell: Cell, T: int, B: int, H: int, itemsize: int, m: Machine, memory_limit: int | None) -> Choice:
    n = STATES[cell] * H
    chunks = chunks_for(T, B, n, m)
    recursion, chunked = T * max(1.0, B / m.workers), chunked_steps(phases(cell, B, H, itemsize, m), T, B, m, chunks)
    memory = {"bp": 0, "chunked": chunks * B * n * (n + 1) * itemsize}
    if memory_limit is None:
        memory_limit = m.memory // 2  # states, gates and gradients need the rest
    counted = f"{recursion:.3g} by bp, {chunked:.3g} by {chunks} chunks with maps of {n + 1} rows"
    reason = (
        f"Sequential steps on a {m.name} ({m.workers} worker{'s' if m.workers != 1 else ''}) "
        f"for T={T}, B={B}: {counted}"
    )
    if chunked > MARGIN * recursion:
        return Choice("bp", 1, f"{reason}; a scan must take {1 / MARGIN:g} times fewer", memory)
    if memory["chunked"] > memory_limit:
        return Choice("bp", 1, f"{reason}; the maps are beyond the memory limit, {memory_limit} bytes", memory)
    return Choice("chunked", chunks, f"{reason}; chunked has the fewest", memory)


def chunks_for(T: int, B: int, n: int, m: Machine) -> int:
    """Return the chunks that keep the workers busy, but no more than are worth combining one by one.

    A warp of a GPU reduces the maps of up to eight samples at the same time.
    """
    if m.is_device:
        return min(T, 2 * (isqrt(T) + 1), 2 + max(m.workers - B, 0) // -(-B // 8))
    return min(T, isqrt(T * (n + 1)), 2 + m.workers // B)


class Phases(NamedTuple):
    """What the phases of reduce-then-scan take, over the time of a step of the recursion."""

    alone: float  # to reduce a step to a map
    shared: float  # the same, as the share of one worker while all are busy
    combine: float  # to combine two maps
    start: float  # two more kernels


def phases(cell: str, B: int, H: int, itemsize: int, m: Machine) -> Phases:
    """Return what the phases take for maps of n + 1 rows."""
    n = STATES[cell] * H
    if not m.is_device:
        row = max(0.5, (n + 1) * (MAP_ROW if B >= 4 else MAP_ROW_OF_FEW))
        return Phases(row, row, 1.0, 0.0)
    in_warps = H <= LANES  # else whole warps work out the units of a row
    lanes, per_row = (H, COMBINE[0]) if in_warps else (-(-H // LANES) * LANES, COMBINE[1])
    step = STEP[0] + STEP[1] * GATES[cell] * H
    multiplied = GATES[cell] * H * lanes * (n + 1) * itemsize / 4  # a float64 takes two turns or more
    return Phases(max(0.5, ROW_ALONE * (n + 1)), multiplied / RATE / step, per_row * n / step, 2 * LAUNCH / step)


def chunked_steps(of: Phases, T: int, B: int, m: Machine, chunks: int) -> float:
    """Count the sequential steps of reduce-then-scan. The first and the last chunk need no map."""
    if chunks < 3:
        return T * max(1.0, B / m.workers)
    length = -(-T // chunks)
    reduce = length * max(of.alone, ((chunks - 2) * B * of.shared + B) / m.workers)
    return of.start + reduce + (chunks - 2) * of.combine + length * max(1.0, (chunks - 1) * B / m.workers)
