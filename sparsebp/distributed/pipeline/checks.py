"""Whether the stages of a model can be dealt out to ranks as a schedule says."""

from __future__ import annotations

from collections import defaultdict

from sparsebp.core.errors import OptionError
from sparsebp.distributed.transport import Transport
from sparsebp.runtime.program import check_of_model
from sparsebp.runtime.stages import Stages
from sparsebp.schedule import Schedule, parts_of, validate


def check_fits_ranks(schedule: Schedule, stages: Stages, transport: Transport, *, predicts: bool) -> None:
    """Refuse a schedule that is not one of this model on these ranks.

    Raises
    ------
    OptionError
        It is for other stages or another number of ranks, asks for what ranks do not do, or deals out stages that have
        something in common.
    ScheduleError
        It cannot run.
    """
    graph, ranks = schedule.graph, transport.size
    check_of_model(
        schedule, stages,
        (ranks > len(stages), "has more ranks than stages", f"at most {len(stages)} ranks, one a stage", ranks,
         "Start fewer ranks, or train data-parallel, where each rank has all stages"),
        (schedule.workers != ranks, "is for another number of ranks", ranks, schedule.workers,
         f"Build it with workers={ranks}, or start {schedule.workers} ranks"),
        (graph.first != "F", "does not begin with the forwards", "first='F'", repr(graph.first),
         "Use fusion='none' or fusion='backward'"),
        (predicts and graph.weights != "latest", "reads no weights that a predictor could predict",
         "weights='latest', as in dualpipe-2018", repr(graph.weights), "Leave the predictor out"),
        (graph.synchronised, "synchronises gradients between replicas", "no S", "S", "Leave the S out"),
    )  # fmt: skip
    validate(schedule)
    if stages.scans:
        raise OptionError("A scan computes the gradients of all stages at once", expected="backward='bp'",
                          got="stages on several ranks", remedy="Call model.set_backward('bp')")  # fmt: skip
    if graph.updates == "microbatch" and stages.shared():
        raise OptionError("Stages share a parameter that each would update by itself", expected="none",
                          got=", ".join(stages.shared()), remedy="Use a synchronous schedule")  # fmt: skip
    _check_apart(schedule, stages)


def _check_apart(schedule: Schedule, stages: Stages) -> None:
    """Refuse what stages on different ranks share."""
    parameters: defaultdict[str, set[int]] = defaultdict(set)
    generators: defaultdict[int, set[int]] = defaultdict(set)  # the stages that draw from one
    layers: dict[int, list[str]] = {}
    counting: defaultdict[int, set[int]] = defaultdict(set)  # layers with running statistics
    named: dict[int, str] = {}
    for number, rank in enumerate(schedule.allocation):
        stage = stages[number]
        for name in stage.parameters.values():
            parameters[name].add(rank)
        for prefix, layer in stage.layer.modules(stage.name) if hasattr(stage.layer, "modules") else ():
            if layer.buffers:
                counting[id(layer)].add(rank)
                named.setdefault(id(layer), prefix)
        drawn = stage.layer.generators() if hasattr(stage.layer, "generators") else {}
        for name, generator in drawn.items():
            generators[id(generator)].add(number)
            layers.setdefault(id(generator), []).append(f"{stage.name}.{name}".strip("."))
    shared = [name for name, ranks in parameters.items() if len(ranks) > 1]
    if shared:
        raise OptionError("A parameter is shared by stages on several ranks", expected="all of its stages on one",
                          got=", ".join(shared), remedy="Deal the stages out otherwise, or untie them")  # fmt: skip
    counted = [named[key] for key, ranks in counting.items() if len(ranks) > 1]
    if counted:
        raise OptionError("A layer with running statistics is in stages on several ranks", got=", ".join(counted),
                          expected="all of its stages on one", remedy="Use a layer of its own in each")  # fmt: skip
    drawn_by = [", ".join(layers[key]) for key, drawing in generators.items() if not _draw_in_turn(schedule, drawing)]
    if drawn_by:
        raise OptionError(
            "Layers on several ranks, or in another order than in one worker, draw from one random generator",
            expected="a generator for each of them", got="; ".join(drawn_by),
            remedy="Build each with a seed of its own: rng=1, rng=2, …",
        )  # fmt: skip


def _draw_in_turn(schedule: Schedule, stages: set[int]) -> bool:
    """Return whether one rank runs these stages forward in the order of one worker: a micro-batch after another."""
    ranks = {schedule.allocation[number] for number in stages}
    cells = [part for lane in schedule.lanes if lane.worker in ranks for cell in lane.cells for part in parts_of(cell)]
    order = [(part.microbatch, part.stage) for part in cells if part.kind == "F" and part.stage in stages]
    return len(ranks) == 1 and order == sorted(order)
