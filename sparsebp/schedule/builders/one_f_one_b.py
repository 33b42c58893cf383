"""One forward, one backward: 1F1B, interleaved 1F1B, and PipeDream that updates after each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sparsebp.core.errors import OptionError
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.builders.partition import Partition
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule


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
    partition = Partition(graph, workers, workers, input_gradient)
    return Schedule.of(graph, [_cells(partition, worker) for worker in range(workers)], "1F1B")


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
    partition = Partition(graph, workers, workers * chunks, input_gradient)
    cells = [_cells(partition, worker, ahead=2) for worker in range(workers)]
    return Schedule.of(graph, cells, f"interleaved 1F1B, {chunks} chunks")


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
    partition = Partition(graph, workers, workers)
    return Schedule.of(graph, [_cells(partition, worker, backward="BU") for worker in range(workers)], "PipeDream")


def alternate(partition: Partition, worker: int, ahead: int) -> Iterator[tuple[str, int, int]]:
    """Yield (``"F"`` or ``"B"``, chunk, micro-batch): a warm-up of forwards, then one forward and one backward in turn.

    A worker that is one hop farther from the last one runs `ahead` forwards more before its first backward. Several
    chunks take turns in rounds of about as many micro-batches as there are workers.
    """
    workers, microbatches = partition.workers, partition.graph.microbatches
    turns = partition.chunks // workers
    rounds = max(1, microbatches // workers)
    if turns > 1 and microbatches % rounds:
        raise OptionError("The micro-batches do not split into equal rounds", expected=f"a multiple of {rounds}",
                          got=microbatches, remedy=f"Use a multiple of the {workers} workers, say")  # fmt: skip
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


def _cells(partition: Partition, worker: int, ahead: int = 1, backward: str = "B") -> list:
    return [
        cell
        for what, chunk, m in alternate(partition, worker, ahead)
        for kind in ("F" if what == "F" else backward)
        for cell in partition.cells(kind, chunk, m)
    ]
