"""Schedules as files: the action CSV of ``torch.distributed.pipelining``, and what that has no place for.

One row a worker, one cell an action: ``2I0`` is the input gradient of stage 2 for micro-batch 0,
``(0F1;7B0)OVERLAP_F_B`` a forward and a backward at once, a blank a bubble. Only the order counts; blanks put the cells
in the columns of their start if every action takes the same time.

Where a schedule has several streams a worker, a row stands for a stream, and its first cell names both: ``0:main``,
``0:sub``. A first row ``schedule=NAME,first=I,weights=latest,recomputed=0 2`` says what cells cannot; where no stage
has weights, and so no U and S, ``updates=step`` and ``synchronised=True`` too. PyTorch reads neither row, nor U and S:
see ``to_csv(…, torch=True)``.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from sparsebp.core.errors import OptionError, ScheduleError
from sparsebp.core.files import check_path, read_file, write_atomically
from sparsebp.schedule.actions import KINDS, Action, Lane, actions_of
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.files.csv_rows import OPTIONS, Place, Rows, decode, read_rows
from sparsebp.schedule.files.for_torch import for_torch
from sparsebp.schedule.graph import First, StepGraph, Updates, Weights
from sparsebp.schedule.schedule import Schedule
from sparsebp.schedule.simulation.simulate import simulate
from sparsebp.schedule.validate import validate


def read_csv(path: str | os.PathLike[str], *, first: First | None = None, weights: Weights | None = None) -> Schedule:
    """Read a schedule that `write_csv` wrote, or ``_dump_csv`` of a schedule of ``torch.distributed.pipelining``.

    Cells of communication (``0SEND_F1``, ``0UNSHARD``, ``0REDUCE_GRAD``) are skipped: the graph implies transfers.
    Rows may differ in length, as PyTorch's do.

    Parameters
    ----------
    path
        A text file, UTF-8.
    first
        With what the step begins, see `StepGraph`. Default: what the file says, else ``"F"``.
    weights
        Which weights a backward reads, see `StepGraph`. Default: what the file says, else ``"stashed"`` if there is a U
        a micro-batch, and ``"current"`` if not.

    Returns
    -------
    The schedule, validated. Stages without any W, B, S or U are taken for unweighted. Its name is that in the file, or
    the file's.

    Raises
    ------
    FileFormatError
        There is no such file, it is not text, or a cell is no action; the message has line and column.
    ScheduleError
        The schedule is incomplete or cannot run; the message has the lines and columns of the actions.
    """
    path = check_path("path", path)
    remedy = "Pass the path of a schedule"
    content = read_file(path, f"{path} cannot be read", expected="a CSV file", remedy=remedy)
    schedule = from_csv(content, first=first, weights=weights, source=str(path))
    return schedule if schedule.name else replace(schedule, name=path.stem)


def write_csv(schedule: Schedule, path: str | os.PathLike[str], *, torch: bool = False) -> None:
    """Write `to_csv` of a schedule to a file: under a temporary name first, then renamed.

    Raises
    ------
    ScheduleError
        The schedule cannot run, or `torch` and PyTorch's runtime could not run it.
    OutputError
        The file cannot be written.
    """
    write_atomically(path, to_csv(schedule, torch=torch).encode())


def from_csv(content: str | bytes, *, first: First | None = None, weights: Weights | None = None,
             source: str = "the CSV") -> Schedule:  # fmt: skip
    """Return the schedule that a text, or UTF-8, holds; see `read_csv`. `source` is what messages call it."""
    rows = read_rows(content if isinstance(content, str) else decode(content, source), source)
    _check_forwards(rows)
    if first is None:
        first = cast(First | None, rows.options.get("first", ("F",))[0])
    if weights is None:
        weights = cast(Weights | None, rows.options.get("weights", (None,))[0])
    updates = cast(Updates | None, rows.options.get("updates", (None,))[0])
    try:
        graph = infer_graph(
            rows.places, first or "F", weights, rows.numbers("unweighted"), updates, rows.flag("synchronised")
        )
    except OptionError as error:
        about = ("first", "weights", "updates", "unweighted")
        found = (place for key, (_, place) in rows.options.items() if key in about)
        raise rows.refused(error.problem, next(found, Place(1, 1)), expected=error.expected, got=error.got,
                           remedy=error.remedy or "") from error  # fmt: skip
    try:
        name = rows.options.get(OPTIONS[0], ("",))[0]
        schedule = Schedule(graph, tuple(rows.lanes), name, rows.numbers("recomputed"))
        validate(schedule)
    except ScheduleError as error:
        raise rows.located(error) from error
    return schedule


def to_csv(schedule: Schedule, *, torch: bool = False) -> str:
    """Return a schedule as text, as the head of `sparsebp.schedule.files.action_csv` describes it.

    Parameters
    ----------
    schedule
        The schedule.
    torch
        Write what ``_load_csv`` of PyTorch's schedules reads. U and S are left out: there the optimizer and the
        gradients' synchronisation are no part of a schedule. W of a stage 0 without I, and I of a stage without
        weights, become B, which is what PyTorch calls a backward with one of its halves.

    Raises
    ------
    ScheduleError
        The schedule cannot run; or `torch` and PyTorch's runtime could not run it: it has several streams a worker,
        updates after every micro-batch, begins with backwards, recomputes, or has a W before its I.
    """
    written = for_torch(schedule) if torch else schedule
    header, labelled = {} if torch else _options(written), not torch and _needs_labels(schedule)
    starts = simulate(written, Costs(durations=dict.fromkeys(KINDS, 1.0)))
    rows = []
    for lane in written.lanes:
        row: list[str] = []
        for cell in lane.cells:
            row += [""] * (round(starts.start(actions_of(cell)[0])) - len(row))
            row.append(str(cell))
        rows.append([f"{lane.worker}:{lane.stream}", *row] if labelled else row)
    width = max(map(len, rows))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if labelled or any(header.values()):
        writer.writerow(f"{key}={value}" for key, value in header.items())
    writer.writerows([*row, *[""] * (width - len(row))] for row in rows)
    return text.getvalue()


def infer_graph(actions: Iterable[Action], first: First = "F", weights: Weights | None = None,
                unweighted: Iterable[int] = (), updates: Updates | None = None,
                synchronised: bool | None = None) -> StepGraph:  # fmt: skip
    """Return the graph of a step that consists of some actions.

    Parameters
    ----------
    actions
        All actions, F of every stage and micro-batch among them.
    first, weights
        See `read_csv`.
    unweighted
        Stages without weights, beside those that have no W, B, S or U.
    updates, synchronised
        See `StepGraph`; None: as the actions have it, which do not say it where no stage has weights.

    Raises
    ------
    OptionError
        There is no such graph: for instance some U have a micro-batch, and some have none.
    """
    everything = set(actions)
    found = {action.microbatch is not None for action in everything if action.kind == "U"}
    if len(found) > 1:
        mixed = [min(u for u in everything if u.kind == "U" and (u.microbatch is None) == none) for none in (1, 0)]
        raise OptionError("Some updates are of one micro-batch, and some of the step", expected="one kind of them",
                          got=" and ".join(map(str, mixed)), remedy="Write all as 0U, or all as 0U0")  # fmt: skip
    updates = updates or ("none" if not found else "microbatch" if True in found else "step")
    stages = range(1 + max(action.stage for action in everything))
    weighted = {action.stage for action in everything if action.kind in "WBSU"}.difference(unweighted)
    return StepGraph(
        len(stages),
        1 + max(action.microbatch or 0 for action in everything),
        frozenset(stage for stage in stages if stage not in weighted),
        updates=updates,
        synchronised=any(action.kind == "S" for action in everything) if synchronised is None else synchronised,
        first=first,
        weights=weights or ("stashed" if updates == "microbatch" else "current"),
    )


def _check_forwards(rows: Rows) -> None:
    """Refuse gaps in the numbers of stages and micro-batches, before anything as large as their product is made."""
    there = rows.places
    stages = range(1 + max(action.stage for action in there))
    microbatches = range(1 + max(action.microbatch or 0 for action in there))
    if sum(action.kind == "F" for action in there) == len(stages) * len(microbatches):
        return
    stage, m = next((s, m) for s in stages for m in microbatches if Action(s, "F", m) not in there)
    alone = all(action.stage != stage for action in there)
    last = max(there, key=(lambda action: action.stage) if alone else (lambda action: action.microbatch or 0))
    raise rows.located(ScheduleError(
        f"Stage {stage} is on no worker" if alone else "A forward is missing", got=f"no {Action(stage, 'F', m)}",
        expected=f"stages 0 to {stages[-1]}, micro-batches 0 to {microbatches[-1]}, for there is {last}",
        remedy="Add what is missing, or number from 0", actions=[last],
    ))  # fmt: skip


def _options(schedule: Schedule) -> dict[str, str]:
    """Return what the first row has to say: the name, and what would not be inferred from the cells."""
    graph, options = schedule.graph, {OPTIONS[0]: schedule.name}
    guess = infer_graph(schedule)
    if graph.first != guess.first:
        options["first"] = graph.first
    if graph.weights != guess.weights:
        options["weights"] = graph.weights
    if graph.updates != guess.updates:
        options["updates"] = graph.updates
    if graph.synchronised != guess.synchronised:
        options["synchronised"] = str(graph.synchronised)
    if graph.unweighted != guess.unweighted:
        options["unweighted"] = _listed(graph.unweighted)
    if schedule.recomputed:
        options["recomputed"] = _listed(schedule.recomputed)
    return options


def _listed(stages: Iterable[int]) -> str:
    return " ".join(map(str, sorted(stages)))


def _needs_labels(schedule: Schedule) -> bool:
    """Whether there is more, or less, than the main stream of every worker in turn."""
    return schedule.lanes != tuple(
        Lane(worker, "main", lane.cells) for worker, lane in enumerate(schedule.lanes)
    ) or not all(lane.cells for lane in schedule.lanes)
