"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.builders.partition import Partition
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule


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
    partition = Partition(graph, workers, workers, input_gradient)
    lanes = [
        [cell for kind in "FB" for m in range(microbatches) for cell in partition.cells(kind, worker, m)]
        for worker in range(workers)
    ]
    return Schedule.of(graph, lanes, "GPipe")
