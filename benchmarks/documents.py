"""Fills the measured tables of Markdown documents from the benchmarks' JSON files, so that nobody types a number.

``python -m benchmarks.documents README.md docs/benchmarks.md`` rewrites the text between the markers::

    <!-- bench:recurrent short -->
    …
    <!-- /bench:recurrent -->

Without ``short`` there are the benchmark's ``tables``; a row that a table shows already is left out. ``short`` is the
table that it has for a README. With ``--check`` nothing is written, and the exit status says whether a
document is up to date.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import NAMES, harness, load
from benchmarks.harness import Benchmark
from sparsebp.core import tables
from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import read_file, write_atomically

FOLDER = Path("docs/benchmarks")
_BLOCK = re.compile(r"<!-- bench:([\w-]+)( short)? -->\n.*?<!-- /bench:\1 -->", re.DOTALL)


def fill(text: str, results: Mapping[str, Sequence[tuple[Path, dict[str, Any]]]], folder: Path) -> str:
    """Return `text` with every marked block made anew."""

    def block(match: re.Match[str]) -> str:
        name, short = match.group(1), match.group(2) or ""
        if name not in NAMES:
            raise FileFormatError(f"A marker names the unknown benchmark {name!r}", expected=", ".join(NAMES), got=name)
        body = "\n\n".join(_section(path, result, bool(short), folder) for path, result in results.get(name, ()))
        body = body or f"*Not measured yet: `python -m benchmarks {name} --out {FOLDER}` writes the numbers.*"
        return f"<!-- bench:{name}{short} -->\n{body}\n<!-- /bench:{name} -->"

    return _BLOCK.sub(block, text)


def find_results(folder: Path) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """Return the full results in `folder` by benchmark, the newest first.

    Runs with ``--quick`` are ignored; interrupted ones count with their rows.
    """
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = harness.load_result(path)
        if not result["quick"]:
            found.setdefault(result["benchmark"], []).append((path, result))
    for results in found.values():
        results.sort(key=lambda item: item[1]["environment"]["date"], reverse=True)
    return found


def _section(path: Path, result: Mapping[str, Any], short: bool, folder: Path) -> str:
    benchmark, rows = load(result["benchmark"]), harness.measured(result)
    if short:
        keys = [key for key in benchmark.short if key not in ("target", "met")]  # a README's reader knows no targets
        parts = [_table(benchmark, keys, filter(benchmark.in_short, rows))]
    else:
        parts = [f"*{caption}:*\n\n{_table(benchmark, keys, rows)}" for caption, keys in benchmark.tables.items()]
        parts.insert(0, f"**{result['title']}.** Left out: {result['leaves_out']}.")
        if not result.get("complete", True):
            parts.append("- Incomplete: the run was broken off.")
        parts += [f"- {note}" for note in result["notes"]]
        picture = path.with_suffix(".png")
        if picture.exists():
            parts.append(f"![{result['title']}]({Path(os.path.relpath(picture, folder)).as_posix()})")
    parts.append(
        f"<small>{harness.where(result)}. Ratios: median (quartiles) over rounds in which both sides ran.</small>"
    )
    return "\n\n".join(parts)


def _table(benchmark: Benchmark, keys: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of some of a benchmark's columns; of rows that then read the same, one."""
    table = tables.markdown_table(benchmark.named(keys), rows)
    return "\n".join(dict.fromkeys(table.splitlines()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill or check the documents named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="+", type=Path, help="Markdown files with <!-- bench:… --> markers")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    options = parser.parse_args(arguments)
    results, stale = find_results(options.results), False
    for document in options.documents:
        before = read_file(
            document, f"{document} cannot be read", expected="a Markdown file", remedy="Pass another"
        ).decode()
        after = fill(before, results, document.parent)
        if after != before:
            stale = True
            print(f"{document}: {'out of date' if options.check else 'updated'}")
            if not options.check:
                write_atomically(document, after.encode())
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
