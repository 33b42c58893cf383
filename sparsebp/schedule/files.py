"""Schedules, programs of ranks and costs as files.

Schedules and programs are written in the action CSV of ``torch.distributed.pipelining``: one row per worker, one cell
per action. ``2I0`` is the input gradient of stage 2 for micro-batch 0, ``(0F1;7B0)OVERLAP_F_B`` a forward and a
backward at once, a blank a bubble. Only the order counts; blanks put the cells in the columns of their start if every
action takes the same time.

Where a schedule has several streams per worker, a row stands for a stream, and its first cell names both: ``0:main``,
``0:sub``. A first row ``schedule=NAME,first=I,weights=latest,recomputed=0 2`` holds everything that cells cannot; where
no stage has weights, and so no U and S, ``updates=step`` and ``synchronised=True`` too, and ``backward=True`` where the
only stage has none. PyTorch reads neither row, nor
U and S: see ``to_csv(…, torch=True)``.

Programs have one row per rank, with its communication. ``0SEND_F1`` and ``1RECV_F1`` are the two ends of the message
from stage 0 to stage 1 for micro-batch 1, ``1SEND_B1`` and ``0RECV_B1`` the two ends of the gradient on its way back,
and ``0REDUCE_GRAD`` is S. They show where an operation begins, not where it is waited for.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, cast

from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, OptionError, ScheduleError
from sparsebp.core.files import check_path, read_file, write_atomically
from sparsebp.schedule.costs import Costs
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
from sparsebp.schedule.schedule import (
    KINDS,
    Action,
    Cell,
    First,
    Lane,
    Overlap,
    Schedule,
    StepGraph,
    Updates,
    Weights,
    actions_of,
    parse,
    parts_of,
    trusted,
    validate,
)
from sparsebp.schedule.simulation import simulate

OPTIONS = ("schedule", "first", "weights", "updates", "synchronised", "backward", "unweighted", "recomputed",
           "replicated")  # fmt: skip
"""Keys of the first row's ``key=value`` cells; it begins with the first of these."""

_LABEL = re.compile(r"([0-9]{1,9}):(\w+)")
_COMMUNICATION = re.compile(r"([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)([0-9]{0,9})")


class Place(NamedTuple):
    """The position of a cell in a file; both count from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


@dataclass
class Rows:
    """The content of an action CSV: options and their places, lanes without communication, places of all actions."""

    # communication: Its cells: the number of the lane, how many cells of the lane come before, text, place.

    source: str
    options: dict[str, tuple[str, Place]] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    places: dict[Action, list[Place]] = field(default_factory=dict)
    communication: list[tuple[int, int, str, Place]] = field(default_factory=list)

    def numbers(self, key: str) -> frozenset[int]:
        """Return the numbers of an option, separated by spaces."""
        text, place = self.options.get(key, ("", Place(1, 1)))
        try:
            return frozenset(map(int, text.split()))
        except ValueError:
            raise self.error("An option is not a list of numbers", place, f"{key}=0 2, say", shown(text)) from None

    def flag(self, key: str) -> bool | None:
        """Return an option that is True or False; None where it is missing."""
        if key not in self.options:
            return None
        text, place = self.options[key]
        if text not in ("True", "False"):
            raise self.error("An option is neither True nor False", place, "True or False", shown(text))
        return text == "True"

    def error(
        self, problem: str, place: Place, expected: object, got: object, remedy: str | None = None
    ) -> FileFormatError:
        """Return the error about a place in the file."""
        return FileFormatError(f"{self.source}, {place}: {problem}", expected=expected, got=got, remedy=remedy)

    def located(self, error: ScheduleError) -> ScheduleError:
        """Return an error about a schedule with the places of its actions."""
        known = [action for action in error.actions if isinstance(action, Action) and action in self.places]
        where = "; ".join(f"{action} at {' and '.join(map(str, self.places[action]))}" for action in known)
        got, problem = f"{error.got} [{where}]" if where else error.got, f"{self.source}: {error.problem}"
        return ScheduleError(problem, expected=error.expected, got=got, remedy=error.remedy, actions=error.actions)


def read_rows(text: str, source: str) -> Rows:
    """Return the content of `text`; refuse cells that are not actions, empty rows, and missing workers."""
    rows = Rows(source)
    lines = list(_lines(text, rows))
    if lines and lines[0][1][0].startswith(f"{OPTIONS[0]}="):
        _read_options(rows, *lines.pop(0))
    labelled = bool(lines) and _LABEL.fullmatch(lines[0][1][0]) is not None
    for number, (line, cells) in enumerate(lines):
        match = _LABEL.fullmatch(cells[0])
        if labelled != (match is not None):
            raise rows.error("Some rows name their worker and stream, and some do not", Place(line, 1),
                             "a label such as 0:main in front of every row, or of none", shown(cells[0]),
                             "A row without a label is the main stream of the worker of its number")  # fmt: skip
        worker, stream = (int(match[1]), match[2]) if match else (number, "main")
        rows.lanes.append(Lane(worker, stream, tuple(_cells(rows, line, cells, 1 if match else 0))))
        if not labelled and not rows.lanes[-1].cells:
            raise rows.error(f"Worker {worker} has no actions", Place(line, 1), "an action in every row", "blanks")
    if not rows.places:
        raise rows.error("There are no actions", Place(1, 1), "one row a worker, with cells such as 0F0",
                         "blanks alone" if lines else "an empty file")  # fmt: skip
    workers = {lane.worker for lane in rows.lanes}
    last = max(workers)
    if last >= len(workers):
        missing = next(worker for worker in range(len(workers)) if worker not in workers)
        line = next(line for (line, _), lane in zip(lines, rows.lanes, strict=True) if lane.worker == last)
        expected = f"workers 0 to {len(workers) - 1}"
        raise rows.error(f"Worker {missing} has no row", Place(line, 1), expected, f"worker {last}",
                         "Number the workers from 0")  # fmt: skip
    return rows


def _lines(text: str, rows: Rows) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of every line, without blank lines at the end."""
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""))
    try:
        for row in reader:
            yield reader.line_num, [cell.strip() for cell in row] or [""]
    except csv.Error as error:
        place = Place(reader.line_num, 1)
        raise rows.error("This is not CSV", place, "cells with commas between them", error) from error


def _read_options(rows: Rows, line: int, cells: Sequence[str]) -> None:
    for column, cell in enumerate(cells, 1):
        key, equals, value = cell.partition("=")
        if cell and (not equals or key not in OPTIONS or key in rows.options):
            expected = "each once: " + ", ".join(f"{name}=…" for name in OPTIONS)
            raise rows.error("An option is unknown, or there twice", Place(line, column), expected, shown(cell))
        if cell:
            rows.options[key] = value, Place(line, column)


def _cells(rows: Rows, line: int, cells: Sequence[str], skipped: int) -> Iterator[Cell]:
    """Yield the cells of a row, without blanks and communication, and record their places."""
    before = 0
    for column, text in enumerate(cells[skipped:], skipped + 1):
        place = Place(line, column)
        if _COMMUNICATION.fullmatch(text):
            rows.communication.append((len(rows.lanes), before, text, place))
        if not text or _COMMUNICATION.fullmatch(text):
            continue
        before += 1
        try:
            cell = parse(text)
        except (FileFormatError, OptionError) as error:
            raise rows.error(error.problem, place, error.expected, error.got, error.remedy) from error
        for part in dict.fromkeys(part for action in actions_of(cell) for part in (action, *parts_of(action))):
            rows.places.setdefault(part, []).append(place)
        yield cell


def for_torch(schedule: Schedule, *, sums: bool = False) -> Schedule:
    """Return `schedule` with the actions that PyTorch knows: see ``to_csv(…, torch=True)``.

    `sums` adds an S of every stage, on a stream ``"link"``, as soon as its gradients are complete: in files with
    communication that is PyTorch's ``REDUCE_GRAD``, which also divides the gradients by the number of micro-batches.

    Raises
    ------
    ScheduleError
        PyTorch could not run it.
    """
    graph = schedule.graph
    if graph.first == "I":
        raise _not_for_torch("begins with backwards", 'first="I"')
    if graph.updates == "microbatch":
        raise _not_for_torch("updates after every micro-batch", graph.updates)
    if not graph.backward:
        raise _not_for_torch("has no backward", "forwards alone")
    if schedule.recomputed:
        raise _not_for_torch("recomputes activations", f"stages {sorted(schedule.recomputed)}")
    if schedule.replicated:
        raise _not_for_torch("has stages on several workers", f"stages {sorted(schedule.replicated)}")
    # PyTorch asks nothing before the first stage with weights for gradients: there it splits no backward in two.
    weighted = [stage for stage in range(graph.stages) if graph.weighted(stage)]
    joined = weighted[0] if weighted and weighted[0] > 0 else None
    lanes = [replace(lane, cells=tuple(new for cell in lane.cells for new in _torch_cells(schedule, cell, joined)))
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
    """Yield an S of every stage of a lane, in the order in which their last gradients come."""
    left: Counter[int] = Counter()
    for part in (part for cell in lane.cells for part in parts_of(cell) if part.kind == "W"):
        left[part.stage] += 1
        if left[part.stage] == microbatches:
            yield Action(part.stage, "S")


def _torch_cells(schedule: Schedule, cell: Cell, joined: int | None) -> Iterator[Cell]:
    """Yield the replacement of a cell: at most one. Of the stage `joined` B stands in place of I, and no W."""
    action = cell.backward if isinstance(cell, Overlap) else cell
    stage, m = action.stage, action.microbatch
    if action.kind in "SU" or (action.kind == "W" and stage == joined):
        return
    weighted, differentiated = schedule.graph.weighted(stage), Action(stage, "I", m) in schedule
    if action.kind == "F" and not weighted and not differentiated:
        raise _not_for_torch("has a stage without backward", f"no backward of stage {stage}")
    if (action.kind == "I" and (not weighted or stage == joined)) or (action.kind == "W" and not differentiated):
        action = Action(stage, "B", m)
    yield Overlap(cell.forward, action) if isinstance(cell, Overlap) else action


def _not_for_torch(problem: str, got: str) -> ScheduleError:
    return ScheduleError(f"PyTorch cannot run the schedule: it {problem}", got=got,
                         expected="F, then I, then W of every stage and micro-batch in one stream a worker",
                         remedy="Write it without torch=True, or build another schedule")  # fmt: skip


def read_csv(path: str | os.PathLike[str], *, first: First | None = None, weights: Weights | None = None) -> Schedule:
    """Read a schedule that `write_csv` wrote, or ``_dump_csv`` of a schedule of ``torch.distributed.pipelining``.

    Cells of communication (``0SEND_F1``, ``0UNSHARD``, ``0REDUCE_GRAD``) are skipped, except for unknown stages and
    micro-batches: the graph implies transfers. `check_communication` checks their order.
    Rows may differ in length, as PyTorch's do. Stages without any W, B, S or U are taken for unweighted.

    Parameters
    ----------
    path
        A text file, UTF-8.
    first
        How the step begins, see `StepGraph`. Default: as in the file, else ``"F"``.
    weights
        Which weights a backward reads, see `StepGraph`. Default: as in the file, else ``"stashed"`` if there is a U
        for each micro-batch, and ``"current"`` if not.

    Returns
    -------
    The schedule, validated. Its name comes from its first row, or is the file's.

    Raises
    ------
    FileFormatError
        There is no such file, it is not text, or a cell is not an action; the message has line and column.
    ScheduleError
        The schedule is incomplete or cannot run; the message has the lines and columns of the actions.
    """
    path = check_path("path", path)
    content = read_file(path, f"{path} cannot be read", expected="a CSV file",
                        remedy="Pass the path of a schedule, such as sparsebp schedule build writes")  # fmt: skip
    schedule = from_csv(content, first=first, weights=weights, source=str(path))
    return schedule if schedule.name else replace(schedule, name=path.stem)


def write_csv(schedule: Schedule, path: str | os.PathLike[str], *, torch: bool = False) -> None:
    """Write `to_csv` of a schedule to a file: under a temporary name first, then renamed.

    With ``torch=True`` PyTorch's ``_load_csv`` reads it; otherwise `read_csv` does, with everything that it holds.

    Raises
    ------
    ScheduleError
        As for `to_csv`.
    OutputError
        The file cannot be written.
    """
    write_atomically(path, to_csv(schedule, torch=torch).encode())


def from_csv(content: str | bytes, *, first: First | None = None, weights: Weights | None = None,
             source: str = "the CSV") -> Schedule:  # fmt: skip
    """Return the schedule of a text or UTF-8 bytes; see `read_csv`. `source` is its name in messages."""
    rows = read_rows(_text(content, source), source)
    _check_forwards(rows)
    if first is None:
        first = cast(First | None, rows.options.get("first", ("F",))[0])
    if weights is None:
        weights = cast(Weights | None, rows.options.get("weights", (None,))[0])
    updates = cast(Updates | None, rows.options.get("updates", (None,))[0])
    try:
        graph = infer_graph(
            rows.places,
            first or "F",
            weights,
            rows.numbers("unweighted"),
            updates,
            rows.flag("synchronised"),
            rows.flag("backward"),
        )
    except OptionError as error:
        about = ("first", "weights", "updates", "unweighted")
        place = next((place for key, (_, place) in rows.options.items() if key in about), Place(1, 1))
        raise rows.error(error.problem, place, error.expected, error.got, error.remedy) from error
    try:
        name = rows.options.get(OPTIONS[0], ("",))[0]
        schedule = Schedule(graph, tuple(rows.lanes), name, rows.numbers("recomputed"), rows.numbers("replicated"))
        validate(schedule)
    except ScheduleError as error:
        raise rows.located(error) from error
    except OptionError as error:
        place = next(rows.options[key][1] for key in ("recomputed", "replicated") if key in rows.options)
        raise rows.error(error.problem, place, error.expected, error.got, error.remedy) from error
    for _, _, cell, place in rows.communication:
        _communicated(rows, graph, cell, place)
    return schedule


def _text(content: str | bytes, source: str) -> str:
    try:
        return content if isinstance(content, str) else content.decode("utf-8-sig")
    except (UnicodeDecodeError, AttributeError) as error:
        got = shown(content) if isinstance(error, AttributeError) else f"byte {error.start}: {error.reason}"
        raise FileFormatError(f"{source} is not a text file", expected="UTF-8", got=got) from error


def _communicated(rows: Rows, graph: StepGraph, text: str, place: Place) -> tuple[str, Action] | None:
    """Return whether a cell sends or receives, and the action whose result that is; None for other communication."""
    match = _COMMUNICATION.fullmatch(text)
    stage, name, m = int(match[1]), match[2], int(match[3] or 0)  # type: ignore[index]
    what, _, way = name.partition("_")
    other = stage
    if what in ("SEND", "RECV"):
        other = stage + (1 if (what == "SEND") == (way == "F") else -1)
    known = 0 <= min(stage, other) <= max(stage, other) < graph.stages and m < graph.microbatches
    if not known or ((other != stage) != bool(match[3]) and name != "REDUCE_GRAD"):  # type: ignore[index]
        raise rows.error("There is no such communication", place, got=text,
                         expected=f"stages 0 to {graph.stages - 1} and their neighbours, micro-batches 0 to "
                                  f"{graph.microbatches - 1}")  # fmt: skip
    if other == stage:
        return None
    return what, trusted(stage if what == "SEND" else other, "F" if way == "F" else "I", m)


def check_communication(content: str | bytes, schedule: Schedule, *, one_stream: bool = True,
                        source: str = "the CSV") -> bool:  # fmt: skip
    """Refuse sends and receives of a file that are not those of its schedule, or that may wait forever.

    Parameters
    ----------
    content, source
        A file, as for `from_csv`, which reads the schedule.
    schedule
        Of that file.
    one_stream
        Whether a rank's sends and receives run one after the other, as on one stream of NCCL: see `check_rendezvous`.

    Returns
    -------
    Whether the file has sends or receives.

    Raises
    ------
    FileFormatError
        A message is not one between stages of different workers, is sent before it is made or received after it is
        read, or is there twice.
    ScheduleError
        A message is missing, or the ranks wait for each other.
    """
    rows = read_rows(_text(content, source), source)
    wanted = {send.source: send.receiver for sends in schedule.cells.sends.values() for send in sends}
    tags: Counter[tuple[int, int]] = Counter()
    messages: dict[Action, Message] = {}
    begun: list[list[Instruction]] = [[] for _ in schedule.lanes]
    found: list[tuple[int, int, str, Action, Place]] = []
    for lane, before, text, place in rows.communication:
        known = _communicated(rows, schedule.graph, text, place)
        if known is not None:
            found.append((lane, before, *known, place))
    if not found:
        return False
    if [lane.worker for lane in rows.lanes] != list(range(schedule.workers)):
        raise rows.error("Sends and receives are in a row that is not a worker's only one", found[0][-1],
                         "one row per worker, in order", f"{len(rows.lanes)} rows")  # fmt: skip
    seen: set[tuple[str, Action]] = set()
    for lane, before, what, made, place in found:
        worker = schedule.lanes[lane].worker
        maker = schedule.lanes[schedule.places[made][0]].worker if made in schedule else -1
        reader = wanted.get(made, -1)
        if worker != (maker if what == "SEND" else reader) or (what, made) in seen or reader < 0:
            raise rows.error("This is not a message of the schedule", place, got=f"{what} of {made} on worker {worker}",
                             expected="once each, results that another worker needs, on its two workers")  # fmt: skip
        seen.add((what, made))
        position = schedule.places[made][1] if what == "SEND" else _first_reader(schedule, made)
        if (before <= position) if what == "SEND" else (before > position):
            raise rows.error("A message is sent before it is made, or received after it is read", place,
                             expected="SEND behind its action, RECV before it", got=f"{what} of {made}")  # fmt: skip
        if what == "SEND":
            messages[made] = Message(made, worker, reader, tags[worker, reader])
            tags[worker, reader] += 1
    missing = sorted({(what, action) for action in wanted for what in ("SEND", "RECV")} - seen)
    if missing:
        what, made = missing[0]
        raise rows.located(ScheduleError("A message is missing", expected=f"{2 * len(wanted)} sends and receives",
                                         got=f"no {what} of {made}", actions=[made]))  # fmt: skip
    at: dict[int, list[tuple[int, str, Action]]] = {}
    for lane, before, what, made, _ in found:
        at.setdefault(lane, []).append((before, what, made))
    for number, lane_ in enumerate(schedule.lanes):
        queue = deque(at.get(number, ()))
        for position in range(len(lane_.cells) + 1):
            while queue and queue[0][0] == position:
                _, what, made = queue.popleft()
                begun[number].append((Send if what == "SEND" else Post)(messages[made]))
            begun[number] += [Compute(cell) for cell in lane_.cells[position : position + 1]]
    try:
        check_rendezvous(with_waits(schedule.graph, begun), one_stream=one_stream)
    except ScheduleError as error:
        raise rows.located(error) from error
    return True


def _first_reader(schedule: Schedule, made: Action) -> int:
    """Return the place in its lane of the first cell that waits for another worker's result."""
    cells = schedule.cells
    sends = cells.sends[cells.numbers[made]]
    first = min(number for send in sends if send.source == made for number in send.readers)
    return first - cells.first[cells.lanes[first]]


def to_csv(schedule: Schedule, *, torch: bool = False) -> str:
    """Return a schedule as text, in the format at the head of `sparsebp.schedule.files`.

    With `torch` it is in the form that PyTorch's ``_load_csv`` of schedules reads. U and S are left out: there the
    optimizer and the gradients' synchronisation are not part of a schedule. W of a stage 0 without I, and I of a stage
    without weights, become B, PyTorch's name for a backward with only one of its halves. Where the first stages have no
    weights, B also stands for I and W of the first stage with weights: PyTorch asks the stages before it for no
    gradient, and computes a wrong one from the two halves.

    Raises
    ------
    ScheduleError
        The schedule cannot run; or `torch` and PyTorch's runtime could not run it: it has several streams per worker,
        updates after every micro-batch, begins with backwards, recomputes, has replicated stages, or a W before its I.
    """
    written = for_torch(schedule) if torch else schedule
    header = {} if torch else _options(written)
    plain = tuple(Lane(worker, "main", lane.cells) for worker, lane in enumerate(schedule.lanes))
    labelled = not torch and (schedule.lanes != plain or not all(lane.cells for lane in plain))
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
                unweighted: Iterable[int] = (), updates: Updates | None = None, synchronised: bool | None = None,
                backward: bool | None = None) -> StepGraph:  # fmt: skip
    """Return the graph of a step from its actions, F of every stage and micro-batch among them."""
    # unweighted: Stages without weights, in addition to those without any W, B, S or U.
    # updates, synchronised, backward: None: as the actions have it, which do not show it where no stage has weights.
    everything = set(actions)
    found = {action.microbatch is not None for action in everything if action.kind == "U"}
    if len(found) > 1:
        mixed = [min(u for u in everything if u.kind == "U" and (u.microbatch is None) == none) for none in (1, 0)]
        raise OptionError("Some updates are of one micro-batch, and some of the step", expected="one kind of them",
                          got=" and ".join(map(str, mixed)), remedy="Write all as 0U, or all as 0U0")  # fmt: skip
    updates = updates or ("none" if not found else "microbatch" if True in found else "step")
    stages = range(1 + max(action.stage for action in everything))
    backward = any(action.kind != "F" for action in everything) if backward is None else backward
    weighted = {action.stage for action in everything if action.kind in "WBSU" or not backward}.difference(unweighted)
    return StepGraph(
        len(stages),
        1 + max(action.microbatch or 0 for action in everything),
        frozenset(stage for stage in stages if stage not in weighted),
        updates=updates,
        synchronised=any(action.kind == "S" for action in everything) if synchronised is None else synchronised,
        first=first,
        weights=weights or ("stashed" if updates == "microbatch" else "current"),
        backward=backward,
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
    problem = f"Stage {stage} is on no worker" if alone else "A forward is missing"
    expected = f"stages 0 to {stages[-1]}, micro-batches 0 to {microbatches[-1]}, for there is {last}"
    raise rows.located(ScheduleError(problem, expected=expected, got=f"no {Action(stage, 'F', m)}", actions=[last]))


def _options(schedule: Schedule) -> dict[str, str]:
    """Return the contents of the first row: the name, and everything that the cells do not imply."""
    graph, guess, options = schedule.graph, infer_graph(schedule), {OPTIONS[0]: schedule.name}
    for key in ("first", "weights", "updates", "synchronised", "backward"):
        if getattr(graph, key) != getattr(guess, key):
            options[key] = str(getattr(graph, key))
    usual = {"unweighted": guess.unweighted, "recomputed": frozenset(), "replicated": frozenset()}
    stages = usual | {"unweighted": graph.unweighted, "recomputed": schedule.recomputed,
                      "replicated": schedule.replicated}  # fmt: skip
    return options | {key: " ".join(map(str, sorted(stages[key]))) for key in stages if stages[key] != usual[key]}


def without_weights(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Return a schedule, such as PyTorch's, for a model in which further stages have no weights: without their W, S, U.

    A B of theirs becomes I.
    """
    bare = frozenset(stages) - schedule.graph.unweighted

    def kept(cell: Cell) -> Iterator[Cell]:
        action = cell.backward if isinstance(cell, Overlap) else cell
        if action.stage in bare and action.kind == "B":
            action = Action(action.stage, "I", action.microbatch)
        if action.stage not in bare or action.kind not in "WSU":
            yield Overlap(cell.forward, action) if isinstance(cell, Overlap) else action

    lanes = [replace(lane, cells=tuple(new for cell in lane.cells for new in kept(cell))) for lane in schedule.lanes]
    graph = replace(schedule.graph, unweighted=schedule.graph.unweighted | bare)
    return replace(schedule, graph=graph, lanes=tuple(lane for lane in lanes if lane.cells)) if bare else schedule


def write_programs(programs: Sequence[RankProgram], path: str | os.PathLike[str], *,
                   sharded: Iterable[int] = ()) -> None:  # fmt: skip
    """Write `programs_to_csv` to a file: under a temporary name first, then renamed.

    PyTorch's ``_load_csv(…, format="compute_comms")`` reads those of ``lower(for_torch(schedule, sums=True),
    one_stream=True)``: it has no U, and it posts and sends in the order of the file.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    write_atomically(path, programs_to_csv(programs, sharded=sharded).encode())


def programs_to_csv(programs: Sequence[RankProgram], *, sharded: Iterable[int] = ()) -> str:
    """Return programs as text, in the format at the head of `sparsebp.schedule.files`.

    Stages that are `sharded` (FSDP) get the cells of PyTorch: ``0UNSHARD`` gathers the weights of stage 0 before it is
    one of the next three stages of its rank, ``0RESHARD`` frees them when it is none of these.

    Raises
    ------
    OptionError
        A sharded stage is on no rank.
    """
    wanted, text = frozenset(sharded), io.StringIO(newline="")
    known = {action.stage for program in programs for one in program.instructions if isinstance(one, Compute)
             for action in actions_of(one.cell)}  # fmt: skip
    if wanted - known:
        raise OptionError("Unknown stages are sharded", expected=f"0 to {max(known)}", got=sorted(wanted - known))
    csv.writer(text).writerows(_with_shards(program.instructions, wanted) for program in programs)
    return text.getvalue()


_GATHERED = 3
"""Stages of a rank that are gathered at a time at most, as in PyTorch: a forward's, a backward's, and the next."""


def _with_shards(instructions: Sequence[Instruction], sharded: Collection[int]) -> Iterator[str]:
    """Yield the cells of a rank, with those that gather and free the weights of sharded stages."""
    needed: list[list[int]] = []  # by each action and after it
    for one in reversed(instructions):
        if isinstance(one, Compute):
            stages = [action.stage for action in actions_of(one.cell)]
            needed.append(list(dict.fromkeys([*stages, *(needed[-1] if needed else ())]))[:_GATHERED])
    active: list[int] = []
    for one in instructions:
        if isinstance(one, Compute):
            stages = needed.pop()
            yield from (f"{stage}RESHARD" for stage in active if stage not in stages)
            active = [stage for stage in active if stage in stages]
            gathered = [stage for stage in stages if stage in sharded and stage not in active]
            yield from (f"{stage}UNSHARD" for stage in gathered)
            active += gathered
        yield from _names(one)
    yield from (f"{stage}RESHARD" for stage in active)


def _names(instruction: Instruction) -> Iterator[str]:
    """Yield the cells of an instruction: none for a wait."""
    match instruction:
        case Compute(cell):
            yield str(cell)
        case Reduce((stage, _, m)):
            yield f"{stage}REDUCE_GRAD{'' if m is None else m}"
        case Send(message) | Post(message):
            stage, kind, m = message.source
            way, reader = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
            yield f"{stage}SEND_{way}{m}" if isinstance(instruction, Send) else f"{reader}RECV_{way}{m}"
