"""Programs of ranks as files: the action CSV of ``torch.distributed.pipelining`` with its communication.

One row a rank, in its order. ``0SEND_F1`` and ``1RECV_F1`` are the two ends of what stage 0 sends to stage 1 for
micro-batch 1, ``1SEND_B1`` and ``0RECV_B1`` those of the gradient on its way back, and ``0REDUCE_GRAD`` is S. They say
where an operation begins; where it is waited for follows, see `sparsebp.schedule.lowering`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, OptionError, ScheduleError
from sparsebp.core.files import check_path, parse_json, read_file, write_atomically
from sparsebp.schedule.actions import (
    KINDS,
    Action,
    Cell,
    First,
    Lane,
    Overlap,
    StepGraph,
    Updates,
    Weights,
    actions_of,
    parse,
    parts_of,
)
from sparsebp.schedule.costs import DURATIONS, Costs, Link, Network, StageBytes, check_cost
from sparsebp.schedule.lowering import (
    Compute,
    Instruction,
    Message,
    Post,
    RankProgram,
    Reduce,
    Send,
    check_rendezvous,
    with_waits,
)
from sparsebp.schedule.schedule import Schedule, validate
from sparsebp.schedule.simulation import simulate

# The text of an action CSV as rows of cells that know their line and column.

OPTIONS = ("schedule", "first", "weights", "updates", "synchronised", "unweighted", "recomputed")
"""What a first row of ``key=value`` cells may say; it begins with the first of these."""

_LABEL = re.compile(r"([0-9]{1,9}):(\w+)")
_COMMUNICATION = re.compile(r"([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)([0-9]{0,9})")


class Place(NamedTuple):
    """Where a cell stands in a file; both count from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


class Communication(NamedTuple):
    """A cell that is no action of a schedule: ``1RECV_F0`` receives what stage 1 reads.

    Attributes
    ----------
    stage, kind, microbatch
        As PyTorch writes them; the micro-batch is None where there is none.
    """

    stage: int
    kind: str
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass
class Rows:
    """What stands in an action CSV.

    Attributes
    ----------
    source
        What to call the file in messages.
    options
        Of the first row, by key, and where each stands.
    lanes
        One a row, without the blanks and communication.
    entries
        For every row its cells and communication, and where each stands.
    places
        Where every action stands; I and W of a B too.
    """

    source: str
    options: dict[str, tuple[str, Place]] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    entries: list[list[tuple[Cell | Communication, Place]]] = field(default_factory=list)
    places: dict[Action, list[Place]] = field(default_factory=dict)

    def numbers(self, key: str) -> frozenset[int]:
        """Return the numbers of an option, separated by spaces."""
        text, place = self.options.get(key, ("", Place(1, 1)))
        try:
            return frozenset(map(int, text.split()))
        except ValueError:
            raise self.refused("An option is not a list of numbers", place, expected=f"{key}=0 2, say", got=shown(text),
                               remedy="Separate the numbers of the stages by spaces") from None  # fmt: skip

    def flag(self, key: str) -> bool | None:
        """Return an option that is True or False; None where it is not there."""
        if key not in self.options:
            return None
        text, place = self.options[key]
        if text not in ("True", "False"):
            raise self.refused("An option is no truth value", place, expected="True or False", got=shown(text),
                               remedy="Write one of them, or leave it out")  # fmt: skip
        return text == "True"

    def refused(self, problem: str, place: Place, *, expected: object, got: object, remedy: str) -> FileFormatError:
        """Return the error about a place in the file."""
        return FileFormatError(f"{self.source}, {place}: {problem}", expected=expected, got=got, remedy=remedy)

    def located(self, error: ScheduleError) -> ScheduleError:
        """Return an error about a schedule with the places of its actions."""
        found = [action for action in error.actions if isinstance(action, Action) and action in self.places]
        where = "; ".join(f"{action} at {' and '.join(map(str, self.places[action]))}" for action in found)
        got = f"{error.got} [{where}]" if where else error.got
        return ScheduleError(f"{self.source}: {error.problem}", expected=error.expected, got=got, remedy=error.remedy,
                             actions=error.actions)  # fmt: skip


def decode(content: bytes, source: str) -> str:
    """Return the text of a file.

    Raises
    ------
    FileFormatError
        It is none.
    """
    if not isinstance(content, bytes):
        raise FileFormatError(f"{source} is no text", expected="a text, or bytes in UTF-8", got=type(content).__name__,
                              remedy="Pass the content of a schedule's file")  # fmt: skip
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{source} is not a text file",
            expected="UTF-8",
            got=f"byte {error.start}: {error.reason}",
            remedy="Pass the CSV file of a schedule",
        ) from error


def read_rows(text: str, source: str) -> Rows:
    """Return what stands in `text`.

    Raises
    ------
    FileFormatError
        A cell is neither blank nor an action, a row has no actions, or workers are missing.
    """
    rows = Rows(source)
    lines = list(_lines(text, rows))
    if lines and lines[0][1][0].startswith(f"{OPTIONS[0]}="):
        _read_options(rows, *lines.pop(0))
    labelled = bool(lines) and _LABEL.fullmatch(lines[0][1][0]) is not None
    for number, (line, cells) in enumerate(lines):
        match = _LABEL.fullmatch(cells[0])
        if labelled != (match is not None):
            raise rows.refused(
                "Some rows name their worker and stream, and some do not", Place(line, 1), got=shown(cells[0]),
                expected="a label such as 0:main in front of every row, or of none",
                remedy="Add what is missing; a row without label is the main stream of the worker of its number",
            )  # fmt: skip
        worker, stream = (int(match[1]), match[2]) if match else (number, "main")
        entries = list(_entries(rows, line, cells, 1 if match else 0))
        own = tuple(entry for entry, _ in entries if not isinstance(entry, Communication))
        rows.entries.append(entries)
        rows.lanes.append(Lane(worker, stream, own))
        if not labelled and not rows.lanes[-1].cells:
            raise rows.refused(f"Worker {worker} has no actions", Place(line, 1), expected="an action in every row",
                               got="blanks alone", remedy="Remove the row, or give it a stage")  # fmt: skip
    _check_workers(rows, [line for line, _ in lines])
    return rows


def _lines(text: str, rows: Rows) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of every line; blank lines at the end are none."""
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""))
    try:
        for row in reader:
            yield reader.line_num, [cell.strip() for cell in row] or [""]
    except csv.Error as error:
        raise rows.refused("This is not CSV", Place(reader.line_num, 1), expected="cells with commas between them",
                           got=str(error), remedy="Pass a file that write_csv wrote") from error  # fmt: skip


def _read_options(rows: Rows, line: int, cells: Sequence[str]) -> None:
    for column, cell in enumerate(cells, 1):
        key, equals, value = cell.partition("=")
        if cell and (not equals or key not in OPTIONS or key in rows.options):
            raise rows.refused("An option is unknown, or there twice", Place(line, column), got=shown(cell),
                               expected="each once: " + ", ".join(f"{name}=…" for name in OPTIONS),
                               remedy="Remove it")  # fmt: skip
        if cell:
            rows.options[key] = value, Place(line, column)


def _entries(rows: Rows, line: int, cells: Sequence[str], skipped: int) -> Iterator[tuple[Cell | Communication, Place]]:
    for column, text in enumerate(cells[skipped:], skipped + 1):
        if not text:
            continue
        place = Place(line, column)
        match = _COMMUNICATION.fullmatch(text)
        if match:
            yield Communication(int(match[1]), match[2], int(match[3]) if match[3] else None), place
            continue
        try:
            cell = parse(text)
        except (FileFormatError, OptionError) as error:
            raise rows.refused(error.problem, place, expected=error.expected, got=error.got,
                               remedy=error.remedy or "") from error  # fmt: skip
        for part in dict.fromkeys(part for action in actions_of(cell) for part in (action, *parts_of(action))):
            rows.places.setdefault(part, []).append(place)
        yield cell, place


def _check_workers(rows: Rows, lines: Sequence[int]) -> None:
    if not rows.places:
        raise rows.refused("There are no actions", Place(1, 1), expected="one row a worker, with cells such as 0F0",
                           got="blanks alone" if lines else "an empty file", remedy="Pass another")  # fmt: skip
    workers = {lane.worker for lane in rows.lanes}
    if max(workers) >= len(workers):
        missing = next(worker for worker in range(len(workers)) if worker not in workers)
        line = next(line for line, lane in zip(lines, rows.lanes, strict=True) if lane.worker == max(workers))
        raise rows.refused(f"Worker {missing} has no row", Place(line, 1), expected=f"workers 0 to {len(workers) - 1}",
                           got=f"worker {max(workers)}", remedy="Number the workers from 0")  # fmt: skip


# A schedule as ``torch.distributed.pipelining`` can run it: with the actions that it knows, and in its order.


def for_torch(schedule: Schedule, *, sums: bool = False) -> Schedule:
    """Return `schedule` with the actions that PyTorch knows: see ``to_csv(…, torch=True)``.

    Parameters
    ----------
    schedule
        The schedule.
    sums
        Whether every stage is to have an S, on a stream ``"link"``, as soon as its gradients are there: in files with
        communication that is PyTorch's ``REDUCE_GRAD``, which also divides the gradients by the micro-batches.

    Raises
    ------
    ScheduleError
        PyTorch could not run it.
    """
    graph = schedule.graph
    for problem, got in (
        ("begins with backwards", 'first="I"' if graph.first == "I" else None),
        ("updates after every micro-batch", graph.updates if graph.updates == "microbatch" else None),
        ("recomputes activations", f"stages {sorted(schedule.recomputed)}" if schedule.recomputed else None),
    ):
        if got is not None:
            raise _not_for_torch(problem, got)
    lanes = [replace(lane, cells=tuple(new for cell in lane.cells for new in _torch_cells(schedule, cell)))
             for lane in schedule.lanes]  # fmt: skip
    lanes = [lane for lane in lanes if lane.cells]
    for one, other in pairwise(lanes):
        if one.worker == other.worker:
            raise _not_for_torch("has several streams a worker", f"{one} and {other}")
    links = [Lane(lane.worker, "link", tuple(_sums(lane, graph.microbatches))) for lane in lanes if sums]
    plain = replace(graph, updates="none", synchronised=sums, first="F", unweighted=frozenset())
    lanes = [replace(lane, stream="main") for lane in lanes]
    written = replace(schedule, graph=plain, lanes=(*lanes, *links))
    for action in (action for action in written if action.kind == "W"):
        gradient = Action(action.stage, "I", action.microbatch)
        if written.places[gradient] > written.places[action]:
            raise _not_for_torch("has a W before its I", f"{action} before {gradient}")
    return written


def _sums(lane: Lane, microbatches: int) -> Iterator[Action]:
    """Yield an S of every stage of a lane, in the order in which the last of its gradients come."""
    left: Counter[int] = Counter()
    for part in (part for cell in lane.cells for part in parts_of(cell) if part.kind == "W"):
        left[part.stage] += 1
        if left[part.stage] == microbatches:
            yield Action(part.stage, "S")


def _torch_cells(schedule: Schedule, cell: Cell) -> Iterator[Cell]:
    """Yield what stands for a cell: at most one."""
    if isinstance(cell, Overlap):
        yield from (Overlap(cell.forward, backward) for backward in _torch_actions(schedule, cell.backward))
    else:
        yield from _torch_actions(schedule, cell)


def _torch_actions(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind in "SU":
        return
    weighted, differentiated = schedule.graph.weighted(stage), Action(stage, "I", m) in schedule
    if action.kind == "F" and not weighted and not differentiated:
        raise _not_for_torch("has a stage without backward", f"no backward of stage {stage}")
    alone = (action.kind == "I" and not weighted) or (action.kind == "W" and not differentiated)
    yield Action(stage, "B", m) if alone else action


def _not_for_torch(problem: str, got: str) -> ScheduleError:
    return ScheduleError(
        f"PyTorch cannot run the schedule: it {problem}", got=got,
        expected="F, then I, then W of every stage and micro-batch in one stream a worker",
        remedy="Write it without torch=True, or build another schedule",
    )  # fmt: skip


# Schedules as files: the action CSV of ``torch.distributed.pipelining``, and what that has no place for.
#
# One row a worker, one cell an action: ``2I0`` is the input gradient of stage 2 for micro-batch 0,
# ``(0F1;7B0)OVERLAP_F_B`` a forward and a backward at once, a blank a bubble. Only the order counts; blanks put the
# cells in the columns of their start if every action takes the same time.
#
# Where a schedule has several streams a worker, a row stands for a stream, and its first cell names both: ``0:main``,
# ``0:sub``. A first row ``schedule=NAME,first=I,weights=latest,recomputed=0 2`` says what cells cannot; where no stage
# has weights, and so no U and S, ``updates=step`` and ``synchronised=True`` too. PyTorch reads neither row, nor U and
# S: see ``to_csv(…, torch=True)``.


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
    """Return a schedule as text, as the head of `sparsebp.schedule.files` describes it.

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


# Costs from text: durations by kind, stage or action, and a JSON file of all costs.

_KEY = re.compile(r"[0-9]{0,9}[FIWBSU]|[0-9]{1,9}[FIWBSU][0-9]{1,9}")
_FORM = 'a JSON object such as {"durations": {"F": 1, "2W": 0.5}, "latency": 0.1}'
_REMEDY = "See sparsebp.schedule.read_costs"


@dataclass(frozen=True)
class _Entries:
    entries: Mapping[str, float]

    def __post_init__(self) -> None:
        what = type(self).__name__.lower()[:-1]
        for key, value in self.entries.items():
            if _KEY.fullmatch(key) is None:
                raise OptionError(f"A {what} is of no action", expected="F, I, W, B, S or U, 2F for stage 2, or 2F0",
                                  got=shown(key), remedy="Name a kind, a stage and kind, or an action")  # fmt: skip
            check_cost(f"The {what} of {key}", value)

    def most_specific(self, action: Action) -> float | None:
        """Return the entry that counts for an action, None if there is none."""
        keys = (str(action), f"{action.stage}{action.kind}", action.kind)
        return next((self.entries[key] for key in keys if key in self.entries), None)


@dataclass(frozen=True)
class Durations(_Entries):
    """Durations by kind (``"F"``), by stage (``"2F"``), by action (``"2F0"``); the most specific entry counts.

    Takes an action and returns its duration, as `Costs` wants it. A B without an entry takes the sum of its I and W;
    everything else without one takes what `Costs` takes by default.

    Parameters
    ----------
    entries
        The durations.

    Raises
    ------
    OptionError
        A key is none of these, or a duration is negative or not finite.
    """

    def __call__(self, action: Action) -> float:
        """Return the duration of an action."""
        found = self.most_specific(action)
        if found is None and action.kind == "B":
            return sum(map(self, parts_of(action)))
        return DURATIONS[action.kind] if found is None else found


@dataclass(frozen=True)
class Slowdowns(_Entries):
    """Slowdowns by kind, by stage, by action, as `Durations`; what has no entry is not slowed down.

    Takes an action and returns its slowdown, as `Costs` wants it. (`Costs` refuses one below 1 when it is used.)
    """

    def __call__(self, action: Action) -> float:
        """Return the slowdown of an action."""
        found = self.most_specific(action)
        return 1.0 if found is None else found


def parse_durations(texts: Iterator[str] | list[str]) -> dict[str, float]:
    """Return the durations that texts such as ``F=1`` and ``2W=0.5`` say.

    Raises
    ------
    OptionError
        One of them is no such text.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise OptionError("This is no duration", expected="F=1, 2W=0.5 or 2W0=0.5", got=shown(text),
                              remedy="Write what it is of, '=', and a number")  # fmt: skip
    return found


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Read costs from a JSON file.

    The file is an object, all of its keys optional: ``"durations"`` (see `Durations`), ``"stages"`` (the fields of
    `StageBytes`, once for all stages or in a list of one for each), ``"latency"``, ``"bandwidth"``, ``"slowdown"`` (a
    number, or an object by kind, stage or action, see `Slowdowns`); ``"network"`` (the fields of `Network`) in place of
    latency and bandwidth::

        {"durations": {"F": 1, "I": 1, "W": 1, "2W": 1.5}, "stages": {"saved": 4096}, "latency": 0.1}

    Raises
    ------
    FileFormatError
        There is no such file, or it holds something else.
    OptionError
        A cost is out of its range.
    """
    path = check_path("path", path)
    text = read_file(path, f"{path} has no costs", expected=_FORM, remedy=_REMEDY)
    try:
        content = parse_json(text)
    except ValueError as error:  # JSON or UTF-8
        raise _refused(path, str(error)) from error
    return costs_of(content, path)


def costs_of(content: Any, source: object = "costs") -> Costs:
    """Return the costs of a parsed JSON file; see `read_costs`. `source` is what messages call it."""
    known = ("durations", "stages", "latency", "bandwidth", "network", "slowdown")
    _check_keys(content, known, source)
    durations = content.get("durations", {})
    if not isinstance(durations, dict):
        raise _refused(source, f"durations {shown(durations)}")
    slowdown = content.get("slowdown", 1.0)
    stages = content.get("stages", {})
    pair = {key: check_cost(key, content[key]) for key in ("latency", "bandwidth") if key in content}
    link = Link(**pair)
    if "network" in content:
        _check_keys(content["network"], [f.name for f in fields(Network)], source)
        if pair:
            raise _refused(source, f"a network beside {' and '.join(pair)}")
        link = Network(**content["network"])
    each = [_stage_bytes(entry, source) for entry in (stages if isinstance(stages, list) else [stages])]
    return Costs(
        Durations(durations),
        tuple(each) if isinstance(stages, list) else each[0],
        link,
        Slowdowns(slowdown) if isinstance(slowdown, dict) else check_cost("slowdown", slowdown),
    )


def write_costs(costs: Costs, actions: Iterable[Action], path: str | os.PathLike[str]) -> None:
    """Write costs to a JSON file that `read_costs` reads: first under a temporary name, then renamed.

    Parameters
    ----------
    costs
        Any; what their durations, and slowdowns that are a function, say of `actions` is written, action by action. S
        and U are the stage's, whatever the micro-batch.
    actions
        Those of the schedules that the costs are for, a `Schedule` say.
    path
        The file.

    Raises
    ------
    OptionError
        There is no duration of an action.
    OutputError
        The file cannot be written.
    """
    actions = tuple(actions)
    content: dict[str, Any] = {
        "durations": {str(action): costs.duration(action) for action in actions},
        "stages": [asdict(entry) for entry in costs.stages]
        if isinstance(costs.stages, tuple)
        else asdict(costs.stages),
        **_link_entries(costs.link),
        "slowdown": {str(action): costs.slowdown_of(action) for action in actions}
        if callable(costs.slowdown)
        else costs.slowdown,
    }
    write_atomically(path, json.dumps(content, indent=1).encode())


def _link_entries(link: Link) -> dict[str, Any]:
    """Return what a file says of a link; JSON has no infinity, which is what a file without a bandwidth means."""
    entries = {key: value for key, value in asdict(link).items() if value is not None and value != math.inf}
    return {"network": entries} if isinstance(link, Network) else entries


def _stage_bytes(entry: Any, source: object) -> StageBytes:
    _check_keys(entry, [f.name for f in fields(StageBytes)], source)
    return StageBytes(**{key: check_cost(f"The bytes of {key}", value) for key, value in entry.items()})


def _check_keys(entry: Any, known: tuple[str, ...] | list[str], source: object) -> None:
    if not isinstance(entry, dict):
        raise _refused(source, f"{type(entry).__name__} {shown(entry)}")
    unknown = sorted(entry.keys() - set(known))
    if unknown:
        raise FileFormatError(f"{source} has unknown keys", expected=", ".join(known), got=", ".join(unknown),
                              remedy="Remove them")  # fmt: skip


def _refused(source: object, got: str) -> FileFormatError:
    return FileFormatError(f"{source} has no costs", expected=_FORM, got=got, remedy=_REMEDY)


_SHARDING = ("UNSHARD", "RESHARD")
"""What PyTorch does with weights that are spread over replicas: nothing of a schedule's."""


def write_programs(programs: Sequence[RankProgram], path: str | os.PathLike[str]) -> None:
    """Write programs to a file that `read_programs` reads: under a temporary name first, then renamed.

    PyTorch's ``_load_csv(…, format="compute_comms")`` reads those of ``lower(for_torch(schedule, sums=True),
    one_stream=True)``: it has no U, and it posts and sends in the order of the file.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    write_atomically(path, programs_to_csv(programs).encode())


def programs_to_csv(programs: Sequence[RankProgram]) -> str:
    """Return programs as text, as the head of `sparsebp.schedule.files` describes it."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([name for one in program.instructions for name in _names(one)] for program in programs)
    return text.getvalue()


def _names(instruction: Instruction) -> Iterator[str]:
    """Yield what stands for an instruction: nothing for a wait."""
    match instruction:
        case Compute(cell):
            yield str(cell)
        case Reduce((stage, _, m)):
            yield str(Communication(stage, "REDUCE_GRAD", m))
        case Send(message) | Post(message):
            stage, kind, m = message.source
            way = "F" if kind == "F" else "B"
            if isinstance(instruction, Send):
                yield str(Communication(stage, f"SEND_{way}", m))
            else:
                yield str(Communication(stage + 1 if kind == "F" else stage - 1, f"RECV_{way}", m))


def read_programs(path: str | os.PathLike[str], schedule: Schedule) -> tuple[RankProgram, ...]:
    """Read programs that `write_programs` wrote, or ``_dump_csv`` of a schedule of ``torch.distributed.pipelining``.

    Parameters
    ----------
    path
        A text file, UTF-8.
    schedule
        What the programs are of. `sparsebp.schedule.read_csv` finds that of PyTorch's file in the file itself.
        ``UNSHARD`` and ``RESHARD`` are skipped, and ``REDUCE_GRAD`` where the schedule has no S.

    Returns
    -------
    The programs, with waits, free of deadlock.

    Raises
    ------
    FileFormatError
        There is no such file, a cell is neither an action nor communication, or the programs are not of `schedule`:
        the message has line and column.
    ScheduleError
        The programs are deadlocked.
    """
    path = check_path("path", path)
    remedy = "Pass the path of programs"
    content = read_file(path, f"{path} cannot be read", expected="a CSV file", remedy=remedy)
    return programs_from_csv(content, schedule, source=str(path))


def programs_from_csv(content: str | bytes, schedule: Schedule, *, source: str = "the CSV") -> tuple[RankProgram, ...]:
    """Return the programs that a text, or UTF-8, holds; see `read_programs`. `source` is what messages call it."""
    rows = read_rows(content if isinstance(content, str) else decode(content, source), source)
    if [lane.worker for lane in rows.lanes] != list(range(schedule.workers)):
        raise rows.refused(
            "The programs are not of the schedule", Place(1, 1), expected=f"{schedule.workers} rows, one a rank",
            got=f"{len(rows.lanes)} rows", remedy="Pass the schedule they are of",
        )  # fmt: skip
    begun = _Reading(rows, schedule).begun
    try:
        programs = with_waits(schedule.graph, begun)
        check_rendezvous(programs)
    except ScheduleError as error:
        raise rows.located(error) from error
    return programs


class _Reading:
    """The rows of a file as what ranks begin; all of it is compared with a schedule.

    Attributes
    ----------
    begun
        For every rank, what it begins in order.
    """

    def __init__(self, rows: Rows, schedule: Schedule) -> None:
        self._rows, self._schedule, self._cells = rows, schedule, schedule.cells
        self._workers = [schedule.lanes[lane].worker for lane in schedule.cells.lanes]
        self._sends = {send.source: send for sends in schedule.cells.sends.values() for send in sends}
        self._places: dict[int, int] = {}  # of every cell in its row
        self._where: dict[tuple[int, Instruction], int] = {}  # (rank, instruction) -> place in the row
        tags: Counter[tuple[int, int]] = Counter()
        self._messages: dict[Action, Message] = {}
        for rank, entries in enumerate(rows.entries):
            for entry, place in entries:
                if isinstance(entry, Communication) and entry.kind.startswith("SEND"):
                    self._number(self._source(entry, rank, place), tags)
        self.begun = [list(self._row(rank, entries)) for rank, entries in enumerate(rows.entries)]
        self._check_complete()
        self._check_order()

    def _number(self, source: Action, tags: Counter[tuple[int, int]]) -> None:
        pair = self._workers[self._cells.numbers[source]], self._sends[source].receiver
        if source not in self._messages:
            self._messages[source] = Message(source, *pair, tags[pair])
            tags[pair] += 1

    def _source(self, entry: Communication, rank: int, place: Place) -> Action:
        """Return the action whose result is sent, of a send or a receive of the schedule's."""
        receives, forward = entry.kind.startswith("RECV"), entry.kind.endswith("F")
        stage = entry.stage + (0 if not receives else -1 if forward else 1)
        source = None
        if stage >= 0 and entry.microbatch is not None:
            source = Action(stage, "F" if forward else "I", entry.microbatch)
        send = self._sends.get(source) if source else None
        if send is None or source is None:
            raise self._refused(f"{entry} is no message of the schedule", place, got=f"it on rank {rank}",
                                expected="what stages of two ranks send each other")  # fmt: skip
        home = send.receiver if receives else self._workers[self._cells.numbers[source]]
        if home != rank:
            raise self._refused(f"{entry} is on another rank", place, expected=f"rank {home}", got=f"rank {rank}")
        return source

    def _row(self, rank: int, entries: Sequence[tuple[Cell | Communication, Place]]) -> Iterator[Instruction]:
        for position, (entry, place) in enumerate(entries):
            one = self._instruction(entry, rank, place)
            if one is None:
                continue
            if (rank, one) in self._where:
                raise self._refused(f"{entry} is there twice", place, expected="each once", got="another before it")
            self._where[rank, one] = position
            if isinstance(one, (Compute, Reduce)):
                self._place(one.cell if isinstance(one, Compute) else one.action, rank, position, place)
            yield one

    def _instruction(self, entry: Cell | Communication, rank: int, place: Place) -> Instruction | None:
        if not isinstance(entry, Communication):
            return Reduce(entry) if isinstance(entry, Action) and entry.kind == "S" else Compute(entry)
        if entry.kind == "REDUCE_GRAD":
            return Reduce(Action(entry.stage, "S", entry.microbatch)) if self._schedule.graph.synchronised else None
        if entry.kind in _SHARDING:
            return None
        message = self._messages.get(self._source(entry, rank, place))
        if message is None:
            raise self._refused(f"{entry} is never sent", place, expected="its other end in another row", got="none")
        return Post(message) if entry.kind.startswith("RECV") else Send(message)

    def _place(self, cell: Cell, rank: int, position: int, place: Place) -> None:
        number = self._cells.numbers.get(parts_of(cell)[0])
        if number is None or self._cells.cells[number] != cell or self._workers[number] != rank:
            raise self._refused("The programs are not of the schedule", place, got=f"{cell} on rank {rank}",
                                expected=f"cells of its lanes of worker {rank}")  # fmt: skip
        self._places[number] = position

    def _check_complete(self) -> None:
        missing = [number for number in range(len(self._cells.cells)) if number not in self._places]
        if missing:
            rank = self._workers[missing[0]]
            raise self._refused("A cell is missing", self._end(rank), expected=f"{self._cells.cells[missing[0]]}",
                                got=f"none on rank {rank}")  # fmt: skip
        for source, send in self._sends.items():
            message = self._messages.get(source)
            sender = self._workers[self._cells.numbers[source]]
            for rank, kind, name in ((sender, Send, "sent"), (send.receiver, Post, "received")):
                if message is None or (rank, kind(message)) not in self._where:
                    raise self._refused(f"The result of {source} is not {name}", self._end(rank), got="none",
                                        expected=f"it on rank {rank}")  # fmt: skip

    def _check_order(self) -> None:
        """Refuse what comes before something of its own rank that it needs."""
        places, cells = self._places, self._cells.cells
        for number, followers in enumerate(self._cells.followers):
            for follower in followers:
                self._check_behind(self._workers[number], places[number], places[follower], cells[number])
        for source, send in self._sends.items():
            number, message = self._cells.numbers[source], self._messages[source]
            sent, posted = (self._where[message.sender, Send(message)], self._where[message.receiver, Post(message)])
            self._check_behind(message.sender, places[number], sent, cells[number])
            self._check_behind(
                message.receiver, posted, min(map(places.__getitem__, send.readers)), f"receive {source}"
            )

    def _check_behind(self, rank: int, first: int, second: int, needed: object) -> None:
        if second < first:
            entry, place = self._rows.entries[rank][second]
            raise self._refused(f"{entry} comes before what it needs", place, expected=f"{needed} in front of it",
                                got="it behind")  # fmt: skip

    def _end(self, rank: int) -> Place:
        """Return where a row ends."""
        return self._rows.entries[rank][-1][1]

    def _refused(self, problem: str, place: Place, *, expected: str, got: str) -> FileFormatError:
        return self._rows.refused(problem, place, expected=expected, got=got, remedy="Pass the schedule's own programs")
