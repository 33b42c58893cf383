"""The documentation's page "The papers, figure by figure", made from the results of ``python -m papers``.

``python -m papers.page docs/papers`` writes ``docs/papers.md``; with ``--check`` nothing is written, and
the exit status says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import where
from papers import FIGURES
from papers.figure import PAPERS, Figure, read
from sparsebp.core.files import read_file, write_atomically

_KINDS = {
    "exact": "computed, no rounding and no choice in it", "executed": "run here; the time it takes does not matter",
    "measured": "timed here", "simulated": "simulated for the paper's machines", "elsewhere": "not run here",
}  # fmt: skip
_MARKS = {True: "met", False: "**missed**", None: "–"}
_SHOWN = 40
"""Claims of a figure that the page shows; the JSON holds all."""


def listing() -> list[dict[str, Any]]:
    """Return the rows of ``python -m papers list``."""
    return [
        {"name": figure.name, "paper": figure.paper, "source": figure.source, "states": figure.states,
         "kind": figure.kind, "seconds": figure.seconds, "needs": list(figure.needs), "gpu": figure.gpu,
         "runs": figure.here, "command": figure.command}
        for figure in FIGURES.values()
    ]  # fmt: skip


def page(folder: Path) -> str:
    """Return the page of the results in `folder`; a figure without a result says so."""
    results = {name: read(folder / f"{name}.json") for name in FIGURES if (folder / f"{name}.json").exists()}
    full = {name: result for name, result in results.items() if not result["quick"]}
    parts = [_HEAD, _summary(full)]
    for paper, authors in PAPERS.items():
        parts.append(f"## {paper}: {authors}")
        for figure in FIGURES.values():
            if figure.paper == paper:
                parts.extend(_section(figure, full.get(figure.name), folder))
    return "\n\n".join(parts) + "\n"


_HEAD = """# The papers, figure by figure

Every figure and table of the five papers whose systems this package implements, what it states, and what comes out
here. `python -m papers list` prints them, `python -m papers NAME` runs one, `python -m papers all` those that fit
the machine. The page is made from the results of these commands by `python -m papers.page docs/papers`;
nothing is left out because it is unfavourable, and what needs a machine that was not at hand says so.

**met**: what the paper claims was done here, and ours is as good; a gain within the quartiles of its measurement is not
decided. *What ran* names the way back, the order or the schedule.

*exact*: computed, no rounding and no choice in it. *executed*: run, whatever time it takes. *measured*: timed beside
the peer on the machine that is named. *simulated*: for the paper's machines, from data sheets. *elsewhere*: not run
here."""


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = ["| paper | figures and tables | statements | met | missed | not decided, or not comparable here |",
            "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for paper in PAPERS:
        figures = [figure for figure in FIGURES.values() if figure.paper == paper]
        claims = [claim for figure in figures for claim in results.get(figure.name, {"claims": ()})["claims"]]
        counts = [sum(claim["met"] is kind for claim in claims) for kind in (True, False, None)]
        rows.append(f"| {paper} | {len(figures)} | {len(claims)} | {counts[0]} | {counts[1]} | {counts[2]} |")
    return "\n".join(rows)


def _section(figure: Figure, result: Mapping[str, Any] | None, folder: Path) -> Iterator[str]:
    yield f"### {figure.source}: {figure.states}"
    gpu = "; the paper's own form needs a GPU" if figure.gpu else ""
    if not figure.here:
        yield f"*Elsewhere* ({_KINDS['elsewhere']}{gpu}). {figure.why}."
        return
    yield f"*{figure.kind.capitalize()}* ({_KINDS[figure.kind]}{gpu}). `{figure.command}`, {_time(figure.seconds)}."
    if result is None:
        yield "Not run yet."
        return
    claims = result["claims"]
    columns = ["statement", "paper", "ours", "what ran", "", "why"]
    cells = [[c["what"], c["paper"], c["ours"], c.get("ran", ""), _MARKS[c["met"]], c["why"]] for c in claims[:_SHOWN]]
    if not any(row[3] for row in cells):
        for row in (columns, *cells):
            del row[3]
    rules = ["---:" if column in ("paper", "ours") else "---" for column in columns]
    yield "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (columns, rules, *cells))
    if len(claims) > _SHOWN:
        yield f"And {len(claims) - _SHOWN} more, in `{figure.name}.json`."
    if (folder / f"{figure.name}.png").exists():
        yield f"![{figure.source}]({folder.name}/{figure.name}.png)"
    by = f"python -m benchmarks {figure.rests_on}" if figure.rests_on else figure.command
    yield f"<small>`{by}`: {where({'benchmark': '', **result})}.</small>"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _time(seconds: int) -> str:
    return "below a second" if seconds == 0 else f"{seconds} s" if seconds < 120 else f"{round(seconds / 60)} minutes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m papers.page", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the results; the page is written beside it")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(arguments)
    path = options.folder.with_suffix(".md")
    text = page(options.folder)
    if options.check:
        kept = read_file(path, f"{path} cannot be read", expected="the page", remedy="Write it: leave --check out")
        return int(kept.decode() != text)
    write_atomically(path, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
