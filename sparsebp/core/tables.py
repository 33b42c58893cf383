"""Tables and formatted numbers for documents and terminals."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str
    key: str  # of its values in a row
    show: Callable[[Any], str] = str  # formats a value
    number: bool = True  # numbers are right-aligned

    def cell(self, row: Mapping[str, Any]) -> str:
        """Format this column's cell; a dash if the row has no value."""
        value = row.get(self.key)
        return "–" if value is None else self.show(value)


def seconds(value: Mapping[str, float] | float) -> str:
    """Format a duration (a number, or the dict of a `Timing`) with three digits and a fitting unit."""
    number = float(value["median"] if isinstance(value, Mapping) else value)
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if number >= factor * 0.9995:
            return f"{number / factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{number / 1e-9:.3g} ns"


def times(value: Mapping[str, float] | float) -> str:
    """Format a ratio as ``12.3× (11.9–12.8)``: the median and, if given, the quartiles."""
    if not isinstance(value, Mapping):
        return f"{_three_digits(value)}×"
    return f"{_three_digits(value['median'])}× ({_three_digits(value['low'])}–{_three_digits(value['high'])})"


def size(value: float) -> str:
    """Format a number of bytes with three digits and a binary unit."""
    number = float(value)
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{_three_digits(number)} {unit}"
        number /= 1024
    return f"{_three_digits(number)} GiB"


def count(value: float) -> str:
    """Format a large count (FLOPs) with three digits and an SI prefix."""
    number = float(value)
    for prefix in ("", " k", " M", " G"):
        if number < 1000:
            return f"{_three_digits(number)}{prefix}"
        number /= 1000
    return f"{_three_digits(number)} T"


def in_threads(number: int) -> str:
    """Format a number of threads: ``1 thread``, ``2 threads``."""
    return f"{number} thread{'s' if number > 1 else ''}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".") if value else "0"


def markdown_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table, numbers right-aligned."""
    lines = [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "| " + " | ".join("---:" if column.number else "---" for column in columns) + " |",
    ]
    lines += ["| " + " | ".join(column.cell(row) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def text_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], width: int | None = None) -> str:
    """Return the table for a terminal of `width` characters, None for any width."""
    # If it does not fit, headings wrap; if that is not enough, it is split into parts that repeat the first column.
    rows = list(rows)
    cells = [[column.cell(row) for row in rows] for column in columns]
    heads, gap = [[column.heading] for column in columns], "  "
    widths = _widths(heads, cells)
    if width is not None and sum(widths) + len(gap) * (len(widths) - 1) > width:
        gap = " "
        words = [textwrap.wrap(column.heading, 1, break_long_words=False) for column in columns]
        heads = [textwrap.wrap(column.heading, fits)
                 for column, fits in zip(columns, _widths(words, cells), strict=True)]  # fmt: skip
        widths = _widths(heads, cells)
    texts = [[text.rjust(size) if column.number else text.ljust(size) for text in (*head, *shown)]
             for head, shown, size, column in zip(heads, cells, widths, columns, strict=True)]  # fmt: skip
    parts = []
    for part in _parts(widths, len(gap), width):
        height = max(len(texts[i]) for i in part)
        lines = zip(*([" " * widths[i]] * (height - len(texts[i])) + texts[i] for i in part), strict=True)
        parts.append("\n".join(gap.join(line).rstrip() for line in lines))
    return "\n\n".join(parts)


def letters() -> int | None:
    """Return the width of standard output if it is a terminal, else None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _widths(heads: Iterable[Sequence[str]], cells: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(len, (*head, *column)), default=0) for head, column in zip(heads, cells, strict=True)]


def _parts(widths: Sequence[int], gap: int, width: int | None) -> list[list[int]]:
    """Return the columns of every part of a table of `width` characters: the first, and as many as fit."""
    parts, used = [[0]], widths[0]
    for column, size in enumerate(widths[1:], 1):
        used += gap + size
        if width is not None and used > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0] + gap + size
        parts[-1].append(column)
    return parts
