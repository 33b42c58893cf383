"""Fills the measured tables of Markdown documents from the benchmarks' JSON files, so that nobody types a number.

``python -m benchmarks.documents`` rewrites the text between the markers in README.md and docs/benchmarks/*.md::

    <!-- bench:recurrent short -->
    …
    <!-- /bench:recurrent -->

``short`` is a table alone: the rows that the benchmark's `in_readme` or `in_short` selects, without targets. Otherwise
a picture comes before it, and after it notes and a link to ``<name>.csv``, which is written next to ``<name>.json`` and
has all of it.
README's table of recurrent networks has the minGRU's rows of the benchmark ``linear`` too.
``<!-- bench:overview -->`` is the table of all benchmarks that have an `overview`. With ``--pictures``, each
``<name>.png`` and README's picture are drawn anew as well. With ``--check`` nothing is written, and the exit status
says whether a text is out of date.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import NAMES, harness, load
from benchmarks.harness import Row
from benchmarks.linear import FEATURES
from sparsebp.core import tables
from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import read_file
from sparsebp.core.tables import Column

FOLDER = Path("docs/benchmarks")
TRAINING_STEPS = Path("docs/images/training-step.png")
SMALL = ("GRU(38, 20)", "LSTM(38, 20)", "RNN(1, 20)")
"""The networks of README's picture."""
_BLOCK = re.compile(r"<!-- bench:([\w-]+)( short)? -->\n.*?<!-- /bench:\1 -->", re.DOTALL)
_OVERVIEW = [Column(heading, heading, number=False) for heading in ("task", "compared with", "times as fast", "slower")]

Results: TypeAlias = Mapping[str, Sequence[tuple[Path, dict[str, Any]]]]


def fill(text: str, results: Results, folder: Path) -> str:
    """Return `text`, of a document in `folder`, with every marked block made anew."""

    def block(match: re.Match[str]) -> str:
        name, short = match.group(1), match.group(2) or ""
        if name == "overview":
            body = overview(results)
        elif name in NAMES:
            more = [result for _, result in results.get("linear", ())[:1]] if name == "recurrent" and short else []
            found = results.get(name, ())
            shown = found[:1] if short else found
            body = "\n\n".join(_section(path, result, bool(short), folder, more) for path, result in shown)
            body += "".join(f"\n\n{_elsewhere(result)}" for _, result in found[1:] if short)
        else:
            raise FileFormatError(f"A marker names the unknown benchmark {name!r}", expected=", ".join(NAMES), got=name)
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


def overview(results: Results) -> str:
    """Return the table of all benchmarks with an overview, from the newest result of each."""
    rows = []
    for name in NAMES:
        shown = load(name).overview if name in results else None
        if shown is not None:
            cells = shown.cells(harness.measured(results[name][0][1]))
            rows.append({column.key: cell for column, cell in zip(_OVERVIEW, cells, strict=True)})
    return tables.markdown_table(_OVERVIEW, rows)


def draw_training_steps(results: Results) -> Any:
    """Draw README's bars: a training step of three small recurrent networks by each side, on one thread.

    A bar for `sparsebp.torch.accelerate` is drawn where the benchmark ``torch`` has measured the same model, batch and
    length on the same processor.
    """
    shown = [result for _, result in results.get("recurrent", ())[:1]]
    beside = [result for _, result in results.get("torch", ()) if shown and _processor(result) == _processor(shown[0])]
    rows, accelerated = (
        [row for result in found[:1] for row in harness.measured(result) if row["threads"] == 1]
        for found in (shown, beside)
    )
    rows = [row for row in rows if row["model"] in SMALL and (row["batch"], row["length"]) == (16, 1000)]
    same = {key: row["ours"] for row in accelerated if row["part"] == "small"
            for key in [(row["model"], row["batch"], row["length"])]}  # fmt: skip
    sides = {
        "torch.nn": (harness.TORCH, [row["step_torch"] for row in rows]),
        "JAX": (harness.JAX, [row.get("step_jax") for row in rows]),
        "sparsebp": (harness.OURS, [row["step_ours"] for row in rows]),
        "sparsebp in a PyTorch model (accelerate)":
            (harness.BLUES[1], [same.get((row["model"], row["batch"], row["length"])) for row in rows]),
    }  # fmt: skip
    groups = [(name, colour, [math.nan if one is None else 1e3 * harness.middle(one) for one in values])
              for name, (colour, values) in sides.items() if any(values)]  # fmt: skip
    labels = [f"{row['model']}\n{row['length']} steps, batch {row['batch']}" for row in rows]
    drawing, _ = harness.bar_chart(labels, groups, "ms per training step (median; shorter is better)")
    return harness.finish(drawing, "Training step on one CPU thread, float32", fontsize=10)


def _processor(result: Mapping[str, Any]) -> str:
    return str(result["environment"]["cpu"])


def to_csv(result: Mapping[str, Any]) -> str:
    """Return all rows as CSV, a column a key, in SI units.

    A timing or ratio has its median under its key, and quartiles and number of rounds under ``<key>_low``,
    ``<key>_high`` and ``<key>_rounds``; lists are numbers with spaces between them.
    """
    rows = [_flat(row) for row in result["rows"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {key if part == "median" else f"{key}_{part}": number for part, number in value.items()}
        else:
            flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _min_gru_steps(result: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a minGRU's training steps, as the benchmark ``recurrent`` has them."""
    return [row | {"model": f"MinGRU({FEATURES}, {row['hidden']})", "step_ours": row["ours"]}
            for row in harness.measured(result) if row["kind"] == "training MinGRU"]  # fmt: skip


def _section(
    path: Path, result: Mapping[str, Any], short: bool, folder: Path, more: Sequence[Mapping[str, Any]]
) -> str:  # fmt: skip
    benchmark, rows = load(result["benchmark"]), harness.measured(result)
    rows = [*rows, *(row for one in more for row in _min_gru_steps(one))]
    columns = benchmark.named(key for key in benchmark.short if key not in ("target", "targets", "met"))
    chosen = (short and benchmark.in_readme) or benchmark.in_short
    table = tables.markdown_table(columns, [row for row in rows if chosen(row)])
    parts = ["\n".join(dict.fromkeys(table.splitlines()))]  # of rows that read the same, one
    if not short:
        link = Path(os.path.relpath(path, folder))
        if path.with_suffix(".png").exists():
            parts.insert(0, f"![{result['title']}]({link.with_suffix('.png').as_posix()})")
        if not result.get("complete", True):
            parts.append("- Incomplete: the run was interrupted.")
        parts += [f"- {note}" for note in result["notes"]]
        parts.append(f"[All {len(rows)} rows as CSV]({link.with_suffix('.csv').as_posix()}).")
        parts.append(f"Left out: {result['leaves_out']}.")
    measured = "; minGRU: ".join(map(harness.where, (result, *more)))
    parts.append(f"<small>{measured}. Ratios: median (quartiles) over rounds in which both sides ran.</small>")
    return "\n\n".join(parts)


def _elsewhere(result: Mapping[str, Any]) -> str:
    """Return a line on a short table as another processor measured it: the ratios of the benchmark's overview."""
    benchmark = load(result["benchmark"])
    rows = filter(benchmark.in_short, harness.measured(result))
    ratios = sorted(harness.middle(row[benchmark.overview.ratio]) for row in rows) if benchmark.overview else []
    if not ratios:
        return ""
    middle = ratios[len(ratios) // 2]
    return (
        f"On another processor: {ratios[0]:.2f}× to {ratios[-1]:.2f}×, in the middle {middle:.2f}×.\n\n"
        f"<small>{harness.where(result)}.</small>"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill or check the documents and the CSV files; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=Path, help="Markdown files with <!-- bench:… --> markers")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures anew, too")
    options = parser.parse_args(arguments)
    results = find_results(options.results)
    if options.pictures:
        for path, result in (item for found in results.values() for item in found):
            harness.save_picture(load(result["benchmark"]).draw(result), path.with_suffix(".png"))
        harness.save_picture(draw_training_steps(results), TRAINING_STEPS)
    wanted = {path.with_suffix(".csv"): to_csv(result) for found in results.values() for path, result in found}
    for document in options.documents or [Path("README.md"), *sorted(FOLDER.glob("*.md"))]:
        text = read_file(document, f"{document} cannot be read", expected="a Markdown file", remedy="Pass another")
        wanted[document] = fill(text.decode(), results, document.parent)
    return harness.write_texts(wanted, options.check)


if __name__ == "__main__":
    sys.exit(main())
