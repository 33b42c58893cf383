"""The conventional order on one worker: forward, backward layer by layer, update."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.fusion import Fusion, place_updates
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule


@builder
def conventional(*, stages: int, microbatches: int = 1, fusion: Fusion = "none", streams: int = 1,
                 unweighted: Iterable[int] = (), input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return the conventional schedule of one worker: F of all stages, then W and I of each from the last to the first.

    Several micro-batches accumulate their gradients: each runs forward and backward, one after the other.

    Parameters
    ----------
    stages
        Number of stages.
    microbatches
        Number of micro-batches.
    fusion
        Where the updates go: see `place_updates`.
    streams
        1, or 2: weight gradients on a second stream, in the same order.
    unweighted
        Stages without parameters.
    input_gradient
        Whether stage 0 has an I, the gradient with respect to the input of the model.

    Raises
    ------
    OptionError
        A number is out of its range, or `fusion` is unknown.
    """
    if streams not in (1, 2):
        raise OptionError("Unknown number of streams", expected="1 or 2", got=streams, remedy="Pass one of them")
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    main: list[Action] = []
    weights: list[Action] = []
    for m in range(microbatches):
        main += [Action(stage, "F", m) for stage in range(stages)]
        for stage in reversed(range(stages)):
            if graph.weighted(stage):
                (main if streams == 1 else weights).append(Action(stage, "W", m))
            if stage > 0 or input_gradient:
                main.append(Action(stage, "I", m))
    lanes = {"main": main, "sub": weights} if weights else {"main": main}
    name = "conventional" if streams == 1 else "conventional, two streams"
    return place_updates(Schedule.of(graph, [lanes], name), fusion)
