"""Zero-bubble pipelines: I at once, W later, where a worker would wait."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.one_f_one_b import alternate
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.builders.partition import Partition
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule


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


def _delayed(name: str, ahead: int, workers: int, chunks: int, graph: StepGraph, input_gradient: bool) -> Schedule:
    partition = Partition(graph, workers, workers * chunks, input_gradient)
    return Schedule.of(graph, [_cells(partition, worker, ahead) for worker in range(workers)], name)


def _cells(partition: Partition, worker: int, ahead: int) -> list[Action]:
    """I in place of B, and each W as many backwards later as the worker is hops from the first, times `ahead`."""
    cells: list[Action] = []
    waiting: list[tuple[int, int]] = []
    for kind, chunk, m in alternate(partition, worker, ahead):
        cells += partition.cells("F" if kind == "F" else "I", chunk, m)
        if kind == "B":
            waiting.append((chunk, m))
            if len(waiting) > ahead * worker:
                cells += partition.cells("W", *waiting.pop(0))
    return cells + [cell for late in waiting for cell in partition.cells("W", *late)]
