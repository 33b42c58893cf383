"""What a benchmark leaves behind, as text: a JSON file, and tables for documents and terminals.

A result is a plain dict that JSON can hold::

    {"benchmark": "recurrent", "title": …, "leaves_out": …, "quick": false,
     "complete": true, "environment": {…}, "settings": {…}, "rows": [{…}, …], "notes": ["…"]}

A row is a flat dict; a duration is the dict of `Timing.to_dict` (seconds), a ratio the dict of `timing.ratio`. A row
that could not be measured has an ``error``. ``complete`` is false while rows are measured, so in what a run leaves that
was killed; files of before that have none are complete.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import parse_json, prepare_folder, read_file, write_atomically

DEFAULT_FOLDER = Path("runs/bench")
_KEYS = {"benchmark": str, "title": str, "leaves_out": str, "quick": bool, "environment": dict, "settings": dict,
         "rows": list, "notes": list}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes
    ----------
    heading, key
        What stands above it, and the key of its values in a row.
    show
        How a value is written.
    number
        Whether it is a number, which stands to the right.
    on_terminal
        Whether the table that a run prints has it.
    """

    heading: str
    key: str
    show: Callable[[Any], str] = str
    number: bool = True
    on_terminal: bool = True

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the text of this column's cell; a dash where the row has no value."""
        value = row.get(self.key)
        return "–" if value is None else self.show(value)


def seconds(value: Mapping[str, float] | float) -> str:
    """Write a duration (a number, or the dict of a `Timing`) with three digits and a fitting unit."""
    number = float(value["median"] if isinstance(value, Mapping) else value)
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if number >= factor * 0.9995:
            return f"{number / factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{number / 1e-9:.3g} ns"


def times(value: Mapping[str, float] | float) -> str:
    """Write a ratio as ``12.3× (11.9–12.8)``: the median, and the quartiles where there are some."""
    if not isinstance(value, Mapping):
        return f"{_three_digits(value)}×"
    return f"{_three_digits(value['median'])}× ({_three_digits(value['low'])}–{_three_digits(value['high'])})"


def size(value: float) -> str:
    """Write a number of bytes with three digits and a binary unit."""
    number = float(value)
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{_three_digits(number)} {unit}"
        number /= 1024
    return f"{_three_digits(number)} GiB"


def count(value: float) -> str:
    """Write a large count (FLOPs) with three digits and an SI prefix."""
    number = float(value)
    for prefix in ("", " k", " M", " G"):
        if number < 1000:
            return f"{_three_digits(number)}{prefix}"
        number /= 1000
    return f"{_three_digits(number)} T"


def in_threads(number: int) -> str:
    """Write a number of threads: ``1 thread``, ``2 threads``."""
    return f"{number} thread{'s' if number > 1 else ''}"


def outcome(missed: Sequence[str]) -> str:
    """Say whether a row reaches what it is to reach, given what it misses."""
    return f"missed: {', '.join(missed)}" if missed else "met"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".") if value else "0"


def markdown_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table, numbers aligned to the right."""
    lines = [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "| " + " | ".join("---:" if column.number else "---" for column in columns) + " |",
    ]
    lines += ["| " + " | ".join(column.cell(row) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def text_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], width: int | None = None) -> str:
    """Return the same table for a terminal of `width` letters; None is as wide as it takes.

    Where it does not fit, its headings stand on several lines; where that is not enough either, it comes in parts, one
    below the other, each with the first column.
    """
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
    """Return how many letters a line of standard output has where that is a terminal, else None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _widths(heads: Iterable[Sequence[str]], cells: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(len, (*head, *column)), default=0) for head, column in zip(heads, cells, strict=True)]


def _parts(widths: Sequence[int], gap: int, width: int | None) -> list[list[int]]:
    """Return the columns of every part of a table that has `width` letters a line: the first, and as many as fit."""
    parts, used = [[0]], widths[0]
    for column, size in enumerate(widths[1:], 1):
        used += gap + size
        if width is not None and used > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0] + gap + size
        parts[-1].append(column)
    return parts


def measured(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result but those that could not be measured."""
    return [row for row in result["rows"] if "error" not in row]


def where(result: Mapping[str, Any]) -> str:
    """Return one line that says on what and when a result was measured."""
    env = result["environment"]
    gpu = f"{env['gpu']['name']}, " if "gpu" in env and result["benchmark"].startswith("gpu-") else ""
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items() if name in _NAMED)
    return (
        f"{gpu}{env['cpu']}, {env['cores']} cores, Python {env['python']}, {packages}, "
        f"commit {env['commit']}, {env['date'][:10]}"
    )


_NAMED = ("numpy", "numba", "torch", "jax", "onnxruntime", "scipy", "cupy-cuda12x", "cupy-cuda13x")


def save(result: Mapping[str, Any], folder: Path | None, stem: str | None = None) -> Path:
    """Write the result as ``<folder>/<stem>.json`` in one atomic step and return the path.

    Raises
    ------
    OutputError
        The folder cannot be written.
    """
    path = prepare_folder(DEFAULT_FOLDER if folder is None else folder) / f"{stem or result['benchmark']}.json"
    write_atomically(path, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def load(path: Path) -> dict[str, Any]:
    """Read a result that `save` wrote.

    Raises
    ------
    FileFormatError
        The file is no benchmark result.
    """
    problem, remedy = f"{path} cannot be read as a benchmark result", "Run the benchmark again"
    content = read_file(path, problem, expected="a JSON file written by sparsebp bench", remedy=remedy)
    try:
        result = parse_json(content)
    except ValueError as error:
        raise FileFormatError(problem, expected="JSON", got=str(error), remedy=remedy) from error
    missing = sorted(_KEYS.keys() - result.keys()) if isinstance(result, dict) else list(_KEYS)
    wrong = missing or [key for key, kind in _KEYS.items() if not isinstance(result[key], kind)]
    if wrong:
        raise FileFormatError(f"{path} is no benchmark result", expected=f"a JSON object with {', '.join(_KEYS)}",
                              got=f"missing or of another type: {', '.join(wrong)}", remedy=remedy)  # fmt: skip
    return result
