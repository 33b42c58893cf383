"""Programs of ranks as files: the action CSV of ``torch.distributed.pipelining`` with its communication.

One row a rank, in its order. ``0SEND_F1`` and ``1RECV_F1`` are the two ends of what stage 0 sends to stage 1 for
micro-batch 1, ``1SEND_B1`` and ``0RECV_B1`` those of the gradient on its way back, and ``0REDUCE_GRAD`` is S. They say
where an operation begins; where it is waited for follows, see `sparsebp.schedule.lower`.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence

from sparsebp.core.errors import FileFormatError, ScheduleError
from sparsebp.core.files import check_path, read_file, write_atomically
from sparsebp.schedule.actions import Action, Cell, parts_of
from sparsebp.schedule.files.csv_rows import Communication, Place, Rows, decode, read_rows
from sparsebp.schedule.lowering.lower import with_waits
from sparsebp.schedule.lowering.programs import (
    Compute,
    Instruction,
    Message,
    Post,
    RankProgram,
    Reduce,
    Send,
)
from sparsebp.schedule.lowering.rendezvous import check_rendezvous
from sparsebp.schedule.schedule import Schedule

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
    """Return programs as text, as the head of `sparsebp.schedule.files.program_csv` describes it."""
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
