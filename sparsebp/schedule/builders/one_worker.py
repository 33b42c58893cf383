"""One worker: the conventional order, and list scheduling on the two streams of one device."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.fusion import Fusion, place_updates
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.costs import Costs
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


@builder
def two_stream_list(*, stages: int, costs: Costs | None = None, fusion: Fusion | None = "backward",
                    unweighted: Iterable[int] = (), input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return a schedule of one worker's two streams: I, F and what would be late on "main", other W and U on "sub".

    The step begins with the backward and ends with the forward that follows it. The second stream takes weight
    gradients as they become ready, so that what they read is still in the cache and is soon given back. When the main
    stream comes to a forward whose weights the second one has not begun with, or has to wait for them long enough to
    compute others, it takes weight gradients itself, those of the next forwards first: the streams meet in the middle.
    Updates are planned right after their weight gradients.

    Parameters
    ----------
    stages
        Number of stages.
    costs
        Durations and slowdowns: times are those beside the other stream.
    fusion
        Where the updates go, see `place_updates`; None leaves them out (`synchronise` comes before updates).
    unweighted
        Stages without parameters.
    input_gradient
        Whether stage 0 has an I.

    Notes
    -----
    Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969; the graph is that of Oh et al.,
    "Out-of-order backprop", EuroSys 2022, §4.1, where the streams are not equals.
    """
    costs = costs or Costs()
    graph = StepGraph(stages, unweighted=frozenset(unweighted), first="I")
    main: list[Action] = []
    sub: list[Action] = []
    ready = {stages - 1: 0.0}
    """When the gradient at a stage's output is there."""
    updated: dict[int, float] = {}
    waiting = [stage for stage in range(stages) if graph.weighted(stage)]
    now = beside = 0.0

    def time(*actions: Action) -> float:
        return sum(costs.duration(action) * costs.slowdown_of(action) for action in actions)

    def weigh(stage: int) -> float:
        return time(Action(stage, "W", 0), Action(stage, "U"))

    def run_beside(until: float) -> float:
        """Let the second stream take weight gradients, the last stage's first, that it can begin before `until`."""
        end = beside
        while waiting and max(end, ready[waiting[-1]]) < until:
            stage = waiting.pop()
            end = updated[stage] = max(end, ready[stage]) + weigh(stage)
            sub.append(Action(stage, "W", 0))
        return end

    for stage in reversed(range(stages)):
        if stage > 0 or input_gradient:
            now += time(Action(stage, "I", 0))
            main.append(Action(stage, "I", 0))
        if stage > 0:
            ready[stage - 1] = now
    for stage in range(stages):
        beside = run_beside(now)
        while waiting and (waiting[0] == stage or now + weigh(waiting[0]) <= updated.get(stage, now)):
            own = waiting.pop(0)
            main.append(Action(own, "W", 0))
            now += weigh(own)
            updated[own] = now
            beside = run_beside(now)
        now = max(now, updated.get(stage, 0.0)) + time(Action(stage, "F", 0))
        main.append(Action(stage, "F", 0))
    lanes = {"main": main, "sub": sub} if sub else {"main": main}
    schedule = Schedule.of(graph, [lanes], "out-of-order, list scheduling")
    return schedule if fusion is None else place_updates(schedule, fusion)
