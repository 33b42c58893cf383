"""The DualPipe of 2018: the forward of one batch and the backward of another in every time unit."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebp.schedule.actions import Cell, Overlap
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.builders.partition import Partition
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule


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
    return Schedule.of(graph, [_cells(partition, worker) for worker in range(workers)], "DualPipe (2018)")


def _cells(partition: Partition, worker: int) -> list[Cell]:
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
