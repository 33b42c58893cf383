"""Builders: every technique is a function that returns a schedule. Pipelines are here; other modules have the others.

All take keyword arguments only. `BUILDERS` collects them by name; ``inspect.signature`` shows the options of each.
Options are documented once: those of pipelines in `gpipe`, the others in `reverse_first_k`. A number out of range, a
model with fewer stages than workers, or any other option that does not fit raises `OptionError`.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from itertools import zip_longest
from typing import Any, TypeAlias

from sparsebp.core.check import shown
from sparsebp.core.errors import OptionError
from sparsebp.schedule.allocation import Partition
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.list_scheduling import fast_forward, list_schedule, modulo
from sparsebp.schedule.one_worker import conventional, out_of_order, search_k, two_stream_list
from sparsebp.schedule.options import builder
from sparsebp.schedule.regions import Region, RegionTimes
from sparsebp.schedule.replicas import Priority, data_parallel, largest_k, reverse_first_k, synchronise
from sparsebp.schedule.schedule import Action, Cell, Overlap, Schedule, StepGraph
from sparsebp.schedule.simulation import Simulation, simulate
from sparsebp.schedule.updates import Fusion, place_updates

__all__ = [
    "BUILDERS",
    "Fusion",
    "Priority",
    "Region",
    "RegionTimes",
    "breadth_first",
    "conventional",
    "data_parallel",
    "discover_builders",
    "dualpipe",
    "dualpipe2018",
    "dualpipe_v",
    "fast_forward",
    "forward_only",
    "gpipe",
    "interleaved_one_f_one_b",
    "largest_k",
    "list_schedule",
    "modulo",
    "one_f_one_b",
    "out_of_order",
    "pipedream",
    "place_updates",
    "register_builder",
    "reverse_first_k",
    "search_k",
    "synchronise",
    "two_stream_list",
    "v_half",
    "v_min",
    "zero_bubble_1p",
    "zero_bubble_2p",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]

Turn: TypeAlias = tuple[str, int, int]
"""Kind of the actions, chunk of the stages, micro-batch: one turn of a worker."""

Way: TypeAlias = tuple[str, int]
"""A turn of a worker between two ways: kind, and which of its two chunks. ``("FB", 0)`` overlaps F of 0 with B of 1."""


@builder
def gpipe(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
          input_gradient: bool = True, recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return the schedule of GPipe: every worker runs the forwards of all micro-batches, then their backwards.

    Its bubble is (N − 1) / (M + N − 1) for N workers, M micro-batches, equal stages and free transfers. With one
    micro-batch it is the "conventional cross-layer model parallelism" of the out-of-order paper (§5.2.1, Fig. 5a).

    Parameters
    ----------
    workers
        Number of workers. Each has one contiguous part of the stages.
    stages
        Number of stages, at least `workers`.
    microbatches
        Number of micro-batches.
    unweighted
        Stages without parameters.
    input_gradient
        Whether stage 0 has an I. True for stages of several layers, where B of the first stage costs as much as B of
        the others (and as in ``torch.distributed.pipelining``); False where a stage is one layer.
    recomputed
        Stages that keep only their input and compute the rest again (§2.3 of the paper, for all stages).

    Raises
    ------
    OptionError
        There are fewer stages than workers, or a number is below 1.

    Notes
    -----
    Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019, §2.
    The backwards run in the order of the forwards, as in PyTorch's ``ScheduleGPipe``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))

    def turns(partition: Partition, worker: int) -> Iterator[Turn]:
        return ((kind, worker, m) for kind in "FB" for m in range(microbatches))

    schedule = _pipeline("GPipe", graph, workers, turns, input_gradient=input_gradient)
    return replace(schedule, recomputed=frozenset(recomputed))


@builder
def one_f_one_b(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
                input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the 1F1B schedule: after a warm-up, every worker alternates a forward and a backward.

    Its bubble equals GPipe's, but worker k keeps the activations of at most N − k micro-batches, not of all.

    Notes
    -----
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-flush), ICML 2021; Fan et al.,
    "DAPPLE", PPoPP 2021. The order is the same as in PyTorch's ``Schedule1F1B``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    return _pipeline("1F1B", graph, workers, _alternate, input_gradient=input_gradient)


@builder
def interleaved_one_f_one_b(*, workers: int, stages: int, microbatches: int, chunks: int = 2,
                            unweighted: Iterable[int] = (), input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the interleaved 1F1B schedule: 1F1B, with `chunks` parts of the model on every worker in turn.

    With equal stages and free transfers the bubble is `chunks` times smaller than 1F1B's, for `chunks` times as much
    communication. It needs workers · chunks stages or more. With more micro-batches than workers, they must split
    evenly into ``microbatches // workers`` rounds.

    Notes
    -----
    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, §2.2.
    The order is the same as in PyTorch's ``ScheduleInterleaved1F1B``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    turns = partial(_alternate, ahead=2)
    return _pipeline(f"interleaved 1F1B, {chunks} chunks", graph, workers, turns, chunks, input_gradient)


@builder
def zero_bubble_h1(*, workers: int, stages: int, microbatches: int, chunks: int = 1, unweighted: Iterable[int] = (),
                   input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-H1: 1F1B, with worker k's weight gradients k micro-batches behind its input gradients.

    Where W ≤ F, the bubble falls from (N − 1)(F + I + W) to (N − 1)(F + I − W), counted between a worker's first and
    last action and from 2 N − 1 micro-batches on; other durations have other bubbles, see `simulate`. Every worker
    saves the activations of N micro-batches, as many as 1F1B's first. In addition it keeps the gradients that W needs:
    with F = I = W, worker k keeps those of k + 1 micro-batches instead of one. With several `chunks` it is PyTorch's
    interleaved schedule, and `interleaved_one_f_one_b` says which micro-batches it needs.

    Notes
    -----
    Qi et al., "Zero bubble pipeline parallelism", 2023 (ICLR 2024), §2.1 and Table 1, where I is called B. Its memory
    equals 1F1B's under the paper's assumption that a micro-batch needs no more memory after I than before, that is,
    that I frees at least as much as the gradients kept for W occupy. `simulate` frees the activations when both have
    run. The order is that of PyTorch's ``ScheduleInterleavedZeroBubble`` (ZB1P).
    """
    return _delayed("ZB-H1", 1, workers, chunks, StepGraph(stages, microbatches, frozenset(unweighted)), input_gradient)


@builder
def zero_bubble_h2(*, workers: int, stages: int, microbatches: int, chunks: int = 1, unweighted: Iterable[int] = (),
                   input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-H2: twice the warm-up of ZB-H1, and twice its delay of the weight gradients.

    Where W ≤ F and W ≤ I, the bubble is (N − 1)(F + I − 2 W): none where F = I = W, from 2 N − 1 micro-batches on.
    Other durations have other bubbles, see `simulate`. It is counted between a worker's first and last action. Workers
    start and end one after another, so the next step can follow without a gap unless all workers synchronise at the end
    of the step. The activations of 2 N − 1 micro-batches are saved.

    Notes
    -----
    Qi et al., "Zero bubble pipeline parallelism", 2023 (ICLR 2024), §2.2 and Table 1.
    """
    return _delayed("ZB-H2", 2, workers, chunks, StepGraph(stages, microbatches, frozenset(unweighted)), input_gradient)


@builder
def zero_bubble_v(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
                  input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-V: the stages are placed in a V, down the workers and up again, and no worker waits in the middle.

    Worker k has chunks k and 2 N − 1 − k of the stages in 2 N chunks, so loss and input are both on worker 0. From
    2 N − 1 micro-batches on, where F = I = W, no worker waits between its first and last action; and each saves the
    activations of 2 N chunks, as many bytes as 1F1B's first worker saves; the gradients that W needs come on top, as in
    `zero_bubble_h1`. With fewer micro-batches the order is that of 2 N − 1 without the missing ones. It needs 2 N
    stages or more.

    Notes
    -----
    Qi et al., "Zero bubble pipeline parallelism", 2023 (ICLR 2024), §6; placements in a V, with less memory too, are
    the subject of their "Pipeline parallelism with controllable memory", NeurIPS 2024. The order is that of PyTorch's
    ``ScheduleZBVZeroBubble``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))

    def order(k: int) -> list[Way]:
        filled = max(2 * workers - 1, microbatches)
        return [
            *(2 * (workers - k) - 1) * [("F", 0)],
            *k * [("F", 1), ("F", 0)],
            *(workers - k) * [("F", 1), ("I", 1), ("W", 1)],
            *(filled - workers) * [("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)],
            *k * [("I", 0), ("I", 1)],
            *(workers - k) * [("I", 0), ("W", 0)],
            *k * [("W", 1)],
            *k * [("W", 0)],
        ]

    partition = Partition(graph, workers, 2 * workers, input_gradient)
    return _two_ways("ZB-V", partition, [order(k) for k in range(workers)], _in_a_v(workers), microbatches)


@builder
def zero_bubble_1p(*, workers: int, stages: int, microbatches: int, costs: Costs | None = None,
                   unweighted: Iterable[int] = (), input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-1p: an order that is found for the given costs, with the memory of 1F1B.

    Each worker saves at most the activations of N micro-batches. `list_schedule` makes candidates, with more or fewer
    forwards ahead and weight gradients behind, and the one with the least `Simulation.span_bubble` is taken.

    Parameters
    ----------
    workers, stages, microbatches, unweighted, input_gradient
        As for `gpipe`.
    costs
        Durations, link and bytes (`StageBytes.saved_for_weights` says what I frees).

    Notes
    -----
    Qi et al., "Zero bubble pipeline parallelism", 2023 (ICLR 2024), §3, whose heuristic is another. With the paper's
    profiled durations the bubbles are the paper's or smaller (docs/benchmarks/schedules.md).
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    return _within("ZB-1p", graph, workers, 1, costs or Costs(), input_gradient)


@builder
def zero_bubble_2p(*, workers: int, stages: int, microbatches: int, costs: Costs | None = None,
                   unweighted: Iterable[int] = (), input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-2p: as `zero_bubble_1p`, with the activations of 2 N micro-batches on each worker."""
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    return _within("ZB-2p", graph, workers, 2, costs or Costs(), input_gradient)


@builder
def v_half(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
           input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return V-Half: stages placed in a V as in `zero_bubble_v`, with about half of its activations.

    Every worker saves at most the activations of 2 ⌊(N + 2) / 2⌋ chunks. With equal F, I and W and 8 N micro-batches
    the workers wait for 5 to 7 % of the work: (3.5 N − 2) units for even N up to 16. It needs 2 N stages or more.

    Notes
    -----
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, §3: its building block, repeated every six
    units of time; weight gradients fill the gaps.
    """
    gap = 0 if workers % 2 else 3

    def block(k: int) -> dict[Way, int]:
        n = 3 * workers
        return {("F", 0): 2 * k, ("F", 1): n - k - 2, ("I", 1): n + gap + 2 * k - 1, ("I", 0): 2 * n + gap - k - 2}

    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    return _repeated("V-Half", graph, workers, block, input_gradient)


@builder
def v_min(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
          input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return V-Min: stages placed in a V as in `zero_bubble_v`, with about a third of its activations.

    Every worker saves at most the activations of 2 ⌊(N + 4) / 3⌋ chunks. With equal F, I and W and 8 N micro-batches
    the workers wait for up to 8.3 % of the work. It needs 2 N stages or more, and durations that are about equal: the
    paper's other building blocks depend less on that.

    Notes
    -----
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, §3, as in `v_half`.
    """
    gap = 0 if workers % 3 else 2

    def block(k: int) -> dict[Way, int]:
        n = 2 * workers
        return {("F", 0): k, ("F", 1): n - k - 1, ("I", 1): n + gap + k, ("I", 0): 2 * n + gap - k - 1}

    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    return _repeated("V-Min", graph, workers, block, input_gradient)


@builder
def breadth_first(*, workers: int, stages: int, microbatches: int, chunks: int = 2, unweighted: Iterable[int] = (),
                  input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the breadth-first schedule: each of a worker's `chunks` parts of the model runs all micro-batches in turn.

    The parts are dealt out as in `interleaved_one_f_one_b`. Where stages are sharded, each is gathered twice a step.
    The activations of all micro-batches are saved. It needs workers · chunks stages or more.

    Notes
    -----
    Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023. The order is that of PyTorch's
    ``ScheduleLoopedBFS``, whose backwards take the last micro-batch first.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))

    def turns(partition: Partition, worker: int) -> Iterator[Turn]:
        own = range(worker, workers * chunks, workers)
        yield from (("F", chunk, m) for chunk in own for m in range(microbatches))
        yield from (("B", chunk, m) for chunk in reversed(own) for m in reversed(range(microbatches)))

    return _pipeline(f"breadth-first, {chunks} chunks", graph, workers, turns, chunks, input_gradient)


@builder
def forward_only(*, workers: int, stages: int, microbatches: int, chunks: int = 1,
                 unweighted: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return a schedule of forwards alone, for evaluation: every worker takes its micro-batches as they come.

    With several `chunks` of the model on every worker in turn, they take turns in rounds of N micro-batches.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted), backward=False)

    def turns(partition: Partition, worker: int) -> Iterator[Turn]:
        for first in range(0, microbatches, workers):
            for chunk in range(worker, workers * chunks, workers):
                yield from (("F", chunk, m) for m in range(first, min(first + workers, microbatches)))

    return _pipeline("forward only", graph, workers, turns, chunks)


@builder
def dualpipe_v(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
               input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return DualPipeV: stages placed in a V as in `zero_bubble_v`, forwards of one arm overlap backwards of the other.

    DeepSeek's kernels hide the communication of one half of such a pair behind the computation of the other. `simulate`
    takes max(F, B) for a pair, or more as `Costs.slowdown` says, up to F + B with 2; ranks of sparsebp run F, then B.
    With F&B for a pair and B = I + W, the longest bubble is (N − 1)(F&B + B − 3 W), in durations of a chunk, if I = F
    and W ≤ F; other durations have other bubbles, see `simulate`.
    Every worker saves the activations of 2 N + 1 chunks. It needs 2 N stages and 2 N micro-batches or more.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, §3.2.1 and Table 2, in the form that Sea AI Lab
    proposed ("cut-in-half", 2025). The order is that of ``DualPipeV`` in deepseek-ai/DualPipe and of PyTorch's
    ``ScheduleDualPipeV``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    partition = Partition(graph, workers, 2 * workers, input_gradient)
    _check_filled(workers, microbatches)
    orders = [_dualpipe_order(k, workers, microbatches) for k in range(workers)]
    return _two_ways("DualPipeV", partition, orders, _in_a_v(workers), microbatches)


@builder
def dualpipe(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
             input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return DeepSeek's DualPipe: the first half of the micro-batches enters at worker 0, the second at the last one.

    Worker k has chunks k and N − 1 − k of the stages in N chunks: all stages are on two workers, `Schedule.replicated`.
    Its order is that of worker min(k, N − 1 − k) in `dualpipe_v` with N / 2 workers and half the micro-batches. So are
    overlapped pairs, longest bubble (with I = F and W ≤ F) and activations: (N / 2 − 1)(F&B + B − 3 W), N + 1 chunks.
    It needs N stages or more, an even number of workers, and an even number of micro-batches, 2 N or more.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, §3.2.1, Fig. 5 and Table 2. The order is that of ``DualPipe`` in
    deepseek-ai/DualPipe. PyTorch does not have it.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    partition = Partition(graph, workers, workers, input_gradient)
    for name, count in (("workers", workers), ("micro-batches", microbatches)):
        if count % 2:
            raise OptionError(f"DualPipe has {name} in two halves", expected="an even number", got=count)
    _check_filled(workers, microbatches)

    def place(worker: int, way: int) -> tuple[int, int]:
        chunk = sorted((worker, workers - 1 - worker))[way]
        return chunk, 0 if chunk == worker else microbatches // 2

    half = microbatches // 2
    orders = [_dualpipe_order(min(k, workers - 1 - k), workers // 2, half) for k in range(workers)]
    return _two_ways("DualPipe", partition, orders, place, half, replicated=range(stages))


@builder
def pipedream(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = ()) -> Schedule:
    """Return PipeDream's schedule: 1F1B without a flush, an update after every backward, stashed weights.

    A micro-batch's backward reads the version of the weights that its forward read (weight stashing), although newer
    ones exist: worker k keeps up to N − k of them. A micro-batch is one batch of an endless stream (PipeDream calls it
    a minibatch).

    Notes
    -----
    Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, §3.2–3.3.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted), updates="microbatch", weights="stashed")

    def turns(partition: Partition, worker: int) -> Iterator[Turn]:
        for kind, chunk, m in _alternate(partition, worker):
            yield kind, chunk, m
            if kind == "B":
                yield "U", chunk, m

    return _pipeline("PipeDream", graph, workers, turns)


@builder
def dualpipe2018(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = ()) -> Schedule:
    """Return DualPipe's schedule: in every time unit each worker runs a forward and a backward at the same time.

    Batch m enters worker k in unit m + k and comes back in unit m + 2 N − 2 − k. The last worker runs forward and
    backward of the same batch in sequence. Updates follow both. A backward reads the newest weights, not its
    forward's: SpecTrain predicts them. With several stages per worker, the i-th forward overlaps the i-th backward.

    **This is the DualPipe of Chen, Yang and Cheng (2018), not DeepSeek's schedule of the same name (2024)**, which is
    synchronous and sends micro-batches through the pipeline from both ends: `dualpipe`.

    Notes
    -----
    Chen, Yang, Cheng, "Efficient and robust parallel DNN training through model parallelism on multi-GPU platform",
    2018, §3.1 and Fig. 6b. The simulated schedule shows the version differences of its Eq. 5 and 6 (2 N − k − 2 and k).
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted), updates="microbatch", weights="latest")
    partition = Partition(graph, workers, workers)

    def order(worker: int) -> Iterator[Cell]:
        behind = 2 * (workers - 1 - worker)  # units between a batch's forward and its backward on this worker
        for unit in range(microbatches + behind):
            forwards = partition.cells("F", worker, unit) if unit < microbatches else []
            backwards = partition.cells("B", worker, unit - behind) if unit >= behind else []
            if forwards and backwards and behind:
                yield from (Overlap(*pair) for pair in zip(forwards, backwards, strict=True))
            else:
                yield from (*forwards, *backwards)
            if backwards:
                yield from partition.cells("U", worker, unit - behind)

    return Schedule.of(graph, [order(worker) for worker in range(workers)], "DualPipe (2018)")


def _pipeline(name: str, graph: StepGraph, workers: int, turns: Callable[[Partition, int], Iterator[Turn]],
              chunks: int = 1, input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the schedule in which every worker takes the turns that `turns` yields."""
    partition = Partition(graph, workers, workers * chunks, input_gradient)
    each = [turns(partition, worker) for worker in range(workers)]
    return Schedule.of(graph, [[cell for turn in own for cell in partition.cells(*turn)] for own in each], name)


def _alternate(partition: Partition, worker: int, ahead: int = 1) -> Iterator[Turn]:
    """Yield turns of F and B: a warm-up of forwards, then one forward and one backward in turn."""
    # A worker one hop farther from the last one runs `ahead` more forwards before its first backward. Several chunks
    # take turns in rounds of about as many micro-batches as there are workers.
    workers, microbatches = partition.workers, partition.graph.microbatches
    turns = partition.chunks // workers
    rounds = max(1, microbatches // workers)
    if turns > 1 and microbatches % rounds:
        problem = "The micro-batches do not split into equal rounds"
        raise OptionError(problem, expected=f"a multiple of {rounds}", got=microbatches)
    order = [
        (turn, first + m)
        for first in range(0, microbatches, microbatches // rounds)
        for turn in range(turns)
        for m in range(microbatches // rounds)
    ] if turns > 1 else [(0, m) for m in range(microbatches)]  # fmt: skip
    warm_up = min(len(order), (turns - 1) * (microbatches // rounds) + ahead * (workers - 1 - worker))
    for position in range(len(order) + warm_up):
        if position < len(order):
            turn, m = order[position]
            yield "F", turn * workers + worker, m
        if position >= warm_up:
            turn, m = order[position - warm_up]
            yield "B", (turns - 1 - turn) * workers + worker, m


def _delayed(name: str, ahead: int, workers: int, chunks: int, graph: StepGraph, input_gradient: bool) -> Schedule:
    """Return 1F1B with I in place of B, and each W `ahead · worker` backwards later."""

    def turns(partition: Partition, worker: int) -> Iterator[Turn]:
        waiting: list[Turn] = []
        for kind, chunk, m in _alternate(partition, worker, ahead):
            yield ("F" if kind == "F" else "I"), chunk, m
            if kind == "B":
                waiting.append(("W", chunk, m))
                if len(waiting) > ahead * worker:
                    yield waiting.pop(0)
        yield from waiting

    return _pipeline(name, graph, workers, turns, chunks, input_gradient)


_CANDIDATES = ((1.25, 1, 0, 1), (1.25, 3, 10, 0.5), (2, 1, 0, 0), (2, 3, 2, 0.5), (2, 5, 0, 0.2), (2.25, 3, 2, 1),
               (2.25, 5, 0, 0.2))  # fmt: skip
"""For `_within`: forwards ahead, and weight gradients behind, per worker; weight gradients behind on all; patience."""


def _within(name: str, graph: StepGraph, workers: int, times: int, costs: Costs, input_gradient: bool) -> Schedule:
    """Return the list schedule with the least bubble in which workers save `times` · N micro-batches."""
    allocation = Partition(graph, workers, workers, input_gradient).allocation()
    costs.check(graph)
    whole = [0.0] * workers
    for stage, worker in enumerate(allocation):
        whole[worker] += costs.bytes_of(stage).saved

    def candidate(ahead: float, behind: float, start: float, patience: float) -> Simulation:
        def urgency(action: Action) -> tuple[float, int, int, int]:
            stage, kind, m = action
            k, m = allocation[stage], m or 0
            if kind == "F":
                return m - ahead * (workers - 1 - k), 1, m, stage
            return (m, 0, m, -stage) if kind == "I" else (m + behind * k + start, 2, m, -stage)

        memory = times * workers * max(whole)
        return simulate(list_schedule(graph, allocation, urgency, costs, memory=memory, patience=patience,
                                      input_gradient=input_gradient, name=name), costs)  # fmt: skip

    found = (candidate(*options) for options in _CANDIDATES)
    return min(found, key=lambda one: (one.span_bubble, one.makespan)).schedule


def _repeated(name: str, graph: StepGraph, workers: int, block: Callable[[int], dict[Way, int]],
              input_gradient: bool) -> Schedule:  # fmt: skip
    """Return the schedule of two ways in which a block of F and I begins every six units of time; W fill the gaps."""

    def order(k: int) -> Iterator[Way]:
        waiting: deque[Way] = deque()
        now = 0
        starts = [(start + 6 * m, way) for way, start in block(k).items() for m in range(graph.microbatches)]
        for start, (kind, way) in sorted(starts):
            for _ in range(min(start - now, len(waiting))):
                yield waiting.popleft()
            yield kind, way
            now = start + 1
            if kind == "I":
                waiting.append(("W", way))
        yield from waiting

    partition = Partition(graph, workers, 2 * workers, input_gradient)
    orders = [list(order(k)) for k in range(workers)]
    return _two_ways(name, partition, orders, _in_a_v(workers), graph.microbatches)


def _check_filled(workers: int, microbatches: int) -> None:
    if microbatches < 2 * workers:
        raise OptionError("There are too few micro-batches to fill the pipeline", got=microbatches,
                          expected=f"{2 * workers} or more for {workers} workers")  # fmt: skip


def _dualpipe_order(k: int, workers: int, microbatches: int) -> list[Way]:
    """Return the turns of worker k of DualPipeV: the eight steps of deepseek-ai/DualPipe."""
    behind = workers - 1 - k
    backwards = [1 - i % 2 for i in range(2 * (k + 1))]  # the ways of those that follow the last forward
    delayed = backwards[k + 1 :] + behind * [0]  # the ways of the backwards whose W comes later
    main = (microbatches - 2 * workers + k + 1) * [("FB", 0), ("FB", 1)]
    if not behind:  # where the V turns, the first pair would wait for the forward next to it
        main[:1] = [("F", 0), ("B", 1)]
    return [
        *2 * behind * [("F", 0)],
        *(k + 1) * [("F", 0), ("F", 1)],
        *behind * [("I", 1), ("W", 1), ("F", 1)],
        *main,
        *behind * [("B", 1), ("FB", 1)],
        *(("B" if i <= k else "I", way) for i, way in enumerate(backwards)),
        *(turn for way in delayed[:behind] for turn in (("W", way), ("I", 0))),
        *(("W", way) for way in delayed[behind:]),
    ]


def _in_a_v(workers: int) -> Callable[[int, int], tuple[int, int]]:
    """Return the chunk and first micro-batch of a worker's two ways: down the V, and up."""
    return lambda worker, way: (2 * workers - 1 - worker if way else worker, 0)


def _two_ways(name: str, partition: Partition, orders: list[list[Way]],
              place: Callable[[int, int], tuple[int, int]], microbatches: int,
              replicated: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return the schedule in which each worker runs its order, with so many micro-batches each way."""
    # place: The chunk of the stages, and the first micro-batch, of a worker and one of its ways.

    def cells(worker: int) -> Iterator[Cell]:
        count: Counter[tuple[str, int]] = Counter()
        for kinds, way in orders[worker]:
            turns = []
            for kind, side in zip(kinds, (way, 1 - way), strict=False):
                m = count["I" if kind == "B" else kind, side]
                count.update((part, side) for part in ("IW" if kind == "B" else kind))
                chunk, first = place(worker, side)
                turns.append(partition.cells(kind, chunk, first + m) if m < microbatches else [])
            yield from turns[0] if len(turns) == 1 else _overlapped(*turns)

    lanes = [cells(worker) for worker in range(partition.workers)]
    return Schedule.of(partition.graph, lanes, name, replicated=replicated)


def _overlapped(forwards: list[Action], backwards: list[Action]) -> Iterator[Cell]:
    """Yield forwards and backwards in pairs, and by themselves those without a partner, or without I."""
    for forward, backward in zip_longest(forwards, backwards):
        if forward and backward and backward.kind != "W":
            yield Overlap(forward, backward)
        else:
            yield from (action for action in (forward, backward) if action)


BUILDERS: dict[str, Callable[..., Schedule]] = {
    "conventional": conventional,
    "ooo": out_of_order,
    "ooo-list": two_stream_list,
    "data-parallel": data_parallel,
    "reverse-first-k": reverse_first_k,
    "fast-forward": fast_forward,
    "modulo": modulo,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "zb-1p": zero_bubble_1p,
    "zb-2p": zero_bubble_2p,
    "zb-v": zero_bubble_v,
    "v-half": v_half,
    "v-min": v_min,
    "breadth-first": breadth_first,
    "forward-only": forward_only,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "pipedream": pipedream,
    "dualpipe-2018": dualpipe2018,
}
"""The builders by the names of their techniques. `register_builder` adds to them."""


def register_builder(name: str, build: Callable[..., Schedule]) -> None:
    """Add a builder, so that `build` and the command line find it by name.

    Installed packages name theirs as entry points of the group ``sparsebp.schedules``, without a call.

    Parameters
    ----------
    name
        A new one.
    build
        Takes keyword arguments and returns a `Schedule`.

    Raises
    ------
    OptionError
        The name is taken or no text, or the builder cannot be called.
    """
    if not isinstance(name, str) or not name or name in BUILDERS or not callable(build):
        raise OptionError("This builder cannot be registered", expected="a new name, and a function",
                          got=f"{name!r}, {shown(build)}")  # fmt: skip
    BUILDERS[name] = build


def discover_builders() -> None:
    """Register the builders of installed packages: the entry points of the group ``sparsebp.schedules``."""
    for point in entry_points(group="sparsebp.schedules"):
        if point.name not in BUILDERS:
            register_builder(point.name, point.load())


SIZES = {"workers": 4, "stages": 8, "microbatches": 8}
"""Stand in for required options that `build` is not given."""


def build(name: str, *, costs: Costs | None = None, fusion: Fusion | None = None, strict: bool = True,
          **options: Any) -> Schedule:  # fmt: skip
    """Return the schedule of a builder.

    Parameters
    ----------
    name
        A key of `BUILDERS`.
    costs
        For the builders that plan with them.
    fusion
        Where the updates go, see `place_updates`; None: the builder's default.
    strict
        Whether to refuse options that the builder does not take; else they are left out.
    options
        Of the builder. None is left out; `SIZES` stand in for missing ones.

    Raises
    ------
    OptionError
        The builder is unknown, does not take an option, or refuses one.
    """
    if name not in BUILDERS:
        discover_builders()
    if name not in BUILDERS:
        raise OptionError("Unknown builder", expected=", ".join(BUILDERS), got=repr(name))
    parameters = inspect.signature(BUILDERS[name]).parameters
    given = {key: value for key, value in options.items() if value is not None}
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    unknown = [] if takes_all else sorted(given.keys() - parameters.keys())
    if unknown and strict:
        raise OptionError(f"The builder {name} does not take {' and '.join(unknown)}", expected=", ".join(parameters),
                          got=", ".join(f"{key}={given[key]!r}" for key in unknown))  # fmt: skip
    given = {key: value for key, value in given.items() if key not in unknown}
    for key, size in SIZES.items():
        if parameters[key].default is inspect.Parameter.empty if key in parameters else takes_all:
            given.setdefault(key, size)
    for key, value in (("costs", costs), ("fusion", fusion)):
        if value is not None and key in parameters:
            given[key] = value
    schedule = BUILDERS[name](**given)
    if not isinstance(schedule, Schedule):
        raise OptionError(f"The builder {name} returns no schedule", expected="a Schedule", got=shown(schedule))
    return schedule if fusion is None or "fusion" in parameters else place_updates(schedule, fusion)
