"""Pipelines whose workers have contiguous parts of the stages: GPipe, 1F1B, zero-bubble, PipeDream, DualPipe (2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Cell, Overlap, StepGraph
from sparsebp.schedule.placement import Partition
from sparsebp.schedule.reorder import builder
from sparsebp.schedule.schedule import Schedule

Turn: TypeAlias = tuple[str, int, int]
"""Kind of the actions, chunk of the stages, micro-batch: what a worker does at a time."""


@builder
def gpipe(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
          input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the schedule of GPipe: every worker runs the forwards of all micro-batches, then their backwards.

    Its bubble is (N − 1) / (M + N − 1) for N workers, M micro-batches and equal stages. With one micro-batch it is
    what the out-of-order paper calls conventional cross-layer model parallelism (§5.2.1, Fig. 5a).

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
        Whether stage 0 has an I. True for stages of several layers, where B of the first stage costs as much as that
        of the others (and as in ``torch.distributed.pipelining``); False where a stage is one layer.

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

    return _pipeline("GPipe", graph, workers, turns, input_gradient=input_gradient)


@builder
def one_f_one_b(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = (),
                input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the 1F1B schedule: after a warm-up, every worker alternates a forward and a backward.

    Its bubble is that of GPipe, but worker k keeps the activations of at most N − k micro-batches, not of all.

    Parameters
    ----------
    workers, stages, microbatches, unweighted, input_gradient
        As for `gpipe`.

    Raises
    ------
    OptionError
        There are fewer stages than workers, or a number is below 1.

    Notes
    -----
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-flush), ICML 2021; Fan et al.,
    "DAPPLE", PPoPP 2021. The order is that of PyTorch's ``Schedule1F1B``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    return _pipeline("1F1B", graph, workers, _alternate, input_gradient=input_gradient)


@builder
def interleaved_one_f_one_b(*, workers: int, stages: int, microbatches: int, chunks: int = 2,
                            unweighted: Iterable[int] = (), input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the interleaved 1F1B schedule: 1F1B, with `chunks` parts of the model on every worker in turn.

    The bubble is `chunks` times smaller than that of 1F1B, for `chunks` times as much communication.

    Parameters
    ----------
    workers, stages, microbatches, unweighted, input_gradient
        As for `gpipe`; at least workers · chunks stages.
    chunks
        Parts of the model a worker.

    Raises
    ------
    OptionError
        There are fewer stages than parts; or the micro-batches do not split into equal rounds: with more of them than
        workers, their number must be a multiple of ``microbatches // workers``.

    Notes
    -----
    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, §2.2.
    The order is that of PyTorch's ``ScheduleInterleaved1F1B``.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    turns = partial(_alternate, ahead=2)
    return _pipeline(f"interleaved 1F1B, {chunks} chunks", graph, workers, turns, chunks, input_gradient)


@builder
def zero_bubble_h1(*, workers: int, stages: int, microbatches: int, chunks: int = 1, unweighted: Iterable[int] = (),
                   input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-H1: 1F1B, with worker k's weight gradients k micro-batches behind its input gradients.

    The bubble falls from (N − 1)(F + I + W) to (N − 1)(F + I − W). Every worker saves the activations of N
    micro-batches, as many as 1F1B's first. The gradients that W needs come on top: with F = I = W those of k + 1
    micro-batches on worker k, in place of one.

    Parameters
    ----------
    workers, stages, microbatches, unweighted, input_gradient
        As for `gpipe`.
    chunks
        Parts of the model a worker. With more than one the schedule is PyTorch's interleaved one.

    Raises
    ------
    OptionError
        There are fewer stages than parts, or (with several chunks) the micro-batches do not split into equal rounds.

    Notes
    -----
    Qi et al., "Zero bubble pipeline parallelism", 2023 (ICLR 2024), §2.1 and Table 1, where I is called B. Its memory
    is that of 1F1B under the paper's assumption that a micro-batch takes no more after I than before: I frees at least
    as much as the gradients take that W needs. `simulate` frees what was saved when both have run. The order is that
    of PyTorch's ``ScheduleInterleavedZeroBubble`` (ZB1P).
    """
    return _delayed("ZB-H1", 1, workers, chunks, StepGraph(stages, microbatches, frozenset(unweighted)), input_gradient)


@builder
def zero_bubble_h2(*, workers: int, stages: int, microbatches: int, chunks: int = 1, unweighted: Iterable[int] = (),
                   input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return ZB-H2: twice the warm-up of ZB-H1, and twice its delay of the weight gradients.

    The bubble is (N − 1)(F + I − 2 W): none where F = I = W, from 2 N − 1 micro-batches on. It is counted between a
    worker's first and last action: the workers start and end one after the other, so that the next step can follow
    without a gap where nothing holds all workers at its end. The activations of 2 N − 1 micro-batches are saved.

    Parameters
    ----------
    workers, stages, microbatches, chunks, unweighted, input_gradient
        As for `zero_bubble_h1`.

    Raises
    ------
    OptionError
        As for `zero_bubble_h1`.

    Notes
    -----
    Qi et al., "Zero bubble pipeline parallelism", 2023 (ICLR 2024), §2.2 and Table 1.
    """
    return _delayed("ZB-H2", 2, workers, chunks, StepGraph(stages, microbatches, frozenset(unweighted)), input_gradient)


@builder
def pipedream(*, workers: int, stages: int, microbatches: int, unweighted: Iterable[int] = ()) -> Schedule:
    """Return PipeDream's schedule: 1F1B without a flush, an update after every backward, stashed weights.

    A micro-batch's backward reads the version of the weights that its forward read (weight stashing), although newer
    ones are there: worker k keeps up to N − k of them.

    Parameters
    ----------
    workers, stages, unweighted
        As for `gpipe`.
    microbatches
        How many of the endless stream of batches. (What PipeDream calls a minibatch.)

    Raises
    ------
    OptionError
        There are fewer stages than workers, or a number is below 1.

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
    backward of the same batch in sequence. Updates follow both, and a backward reads the newest weights, not those of
    its forward: SpecTrain is to predict them.

    **This is the DualPipe of Chen, Yang and Cheng (2018), not DeepSeek's schedule of the same name (2024)**, which is
    synchronous and sends micro-batches through the pipeline from both ends.

    Parameters
    ----------
    workers, stages, unweighted
        As for `gpipe`. With several stages a worker, the i-th forward overlaps the i-th backward.
    microbatches
        How many of the endless stream of batches.

    Raises
    ------
    OptionError
        There are fewer stages than workers, or a number is below 1.

    Notes
    -----
    Chen, Yang, Cheng, "Efficient and robust parallel DNN training through model parallelism on multi-GPU platform",
    2018, §3.1 and Fig. 6b. The version differences of its Eq. 5 and 6 (2 N − k − 2 and k) can be read off the
    simulated schedule.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted), updates="microbatch", weights="latest")
    partition = Partition(graph, workers, workers)
    return Schedule.of(graph, [_dualpipe_cells(partition, worker) for worker in range(workers)], "DualPipe (2018)")


def _pipeline(name: str, graph: StepGraph, workers: int, turns: Callable[[Partition, int], Iterator[Turn]],
              chunks: int = 1, input_gradient: bool = True) -> Schedule:  # fmt: skip
    """Return the schedule in which every worker takes the turns that `turns` yields."""
    partition = Partition(graph, workers, workers * chunks, input_gradient)
    each = [turns(partition, worker) for worker in range(workers)]
    return Schedule.of(graph, [[cell for turn in own for cell in partition.cells(*turn)] for own in each], name)


def _alternate(partition: Partition, worker: int, ahead: int = 1) -> Iterator[Turn]:
    """Yield turns of F and B: a warm-up of forwards, then one forward and one backward in turn.

    A worker that is one hop farther from the last one runs `ahead` forwards more before its first backward. Several
    chunks take turns in rounds of about as many micro-batches as there are workers.
    """
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
    """I in place of B, and each W as many backwards later as the worker is hops from the first, times `ahead`."""

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


def _dualpipe_cells(partition: Partition, worker: int) -> list[Cell]:
    cells: list[Cell] = []
    microbatches = partition.graph.microbatches
    behind = 2 * (partition.workers - 1 - worker)  # units between a batch's forward and its backward on this worker
    for unit in range(microbatches + behind):
        forwards = partition.cells("F", worker, unit) if unit < microbatches else []
        backwards = partition.cells("B", worker, unit - behind) if unit >= behind else []
        if forwards and backwards and behind:
            cells += [Overlap(forward, backward) for forward, backward in zip(forwards, backwards, strict=True)]
        else:
            cells += [*forwards, *backwards]
        if backwards:
            cells += partition.cells("U", worker, unit - behind)
    return cells
