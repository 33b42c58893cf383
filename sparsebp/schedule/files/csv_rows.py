"""The text of an action CSV as rows of cells that know their line and column."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparsebp.core.arguments import shown
from sparsebp.core.errors import FileFormatError, OptionError, ScheduleError
from sparsebp.schedule.actions import Action, Cell, actions_of, parse, parts_of
from sparsebp.schedule.schedule import Lane

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
