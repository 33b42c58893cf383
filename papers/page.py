"""The documentation's pages "The papers", made from the results of ``python -m papers``: an index, and one a paper.

``python -m papers.page docs/papers`` writes ``index.md`` and a page for each paper next to the results, with
``--pictures`` the pictures too. With ``--check`` nothing is written, and the exit status says whether the pages are up
to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import save_picture, write_texts
from papers import FIGURES
from papers.figure import PAPERS, Figure, read

_MARKS = {True: "met", False: "**missed**", None: "open"}
_SHOWN, _SHOWN_MET = 3, 2
"""Statements of a figure that its page shows, those that are not met first, and of a figure that is met as a whole."""


def listing() -> list[dict[str, Any]]:
    """Return the rows of ``python -m papers list``."""
    return [
        {"name": figure.name, "paper": figure.paper, "source": figure.source, "states": figure.states,
         "kind": figure.kind, "seconds": figure.seconds, "needs": list(figure.needs), "gpu": figure.gpu,
         "runs": figure.here, "command": figure.command}
        for figure in FIGURES.values()
    ]  # fmt: skip


def pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by its file's name; a figure without a result says so."""
    results = {name: read(folder / f"{name}.json") for name in FIGURES if (folder / f"{name}.json").exists()}
    full = {name: result for name, result in results.items() if not result["quick"]}
    written = {"index.md": "\n\n".join([_HEAD, _summary(full), *_index(full)]) + "\n"}
    for paper, authors in PAPERS.items():
        parts = [f"# {paper}: {authors}", _LEGEND]
        for figure in _figures(paper):
            parts.extend(_section(figure, full.get(figure.name), folder))
        written[_file(paper)] = "\n\n".join(parts) + "\n"
    return written


def _figures(paper: str) -> list[Figure]:
    return [figure for figure in FIGURES.values() if figure.paper == paper]


def _file(paper: str) -> str:
    return f"{paper.lower()}.md"


_HEAD = """# The papers, figure by figure

Every figure and table of the five papers whose systems this package implements: what it states, and what came out
here. `python -m papers list` prints them, `python -m papers NAME` runs one, `python -m papers all` those that fit the
machine. These pages are made from the results of these commands by `python -m papers.page docs/papers`. Nothing is
left out because it is unfavourable.

A statement is **met** if what the paper claims was done here and our result is as good. It is *open* if the difference
lies within the spread of the measurement, or if the paper's machine was not at hand.

*exact*: computed, without rounding or choice. *executed*: run, however long it takes. *measured*: timed next to the
peer on the machine that is named. *simulated*: for the paper's machines, from data sheets. *elsewhere*: not run."""
_LEGEND = f"""Each figure shows at most {_SHOWN} of its statements, those that are not met first ({_SHOWN_MET} if
all are met); its JSON file has all.
*What ran* names the backward algorithm, the order or the schedule. [What the words mean](index.md)."""


def _claims(figure: Figure, results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return results[figure.name]["claims"] if figure.name in results else []


def _counts(claims: Sequence[Mapping[str, Any]]) -> list[int]:
    return [sum(claim["met"] is kind for claim in claims) for kind in (True, False, None)]


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = ["| paper | figures and tables | statements | met | missed | open |",
            "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for paper in PAPERS:
        claims = [claim for figure in _figures(paper) for claim in _claims(figure, results)]
        met, missed, undecided = _counts(claims)
        rows.append(
            f"| [{paper}]({_file(paper)}) | {len(_figures(paper))} | {len(claims)} | {met} | {missed} | {undecided} |"
        )
    return "\n".join(rows)


def _index(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of each paper: figure, verdict, and the algorithm that ran."""
    for paper, authors in PAPERS.items():
        yield f"## {paper}: {authors}"
        rows = ["| figure | how | outcome | what ran |", "| --- | --- | --- | --- |"]
        for figure in _figures(paper):
            claims = _claims(figure, results)
            ran = dict.fromkeys(
                claim["ran"].split(";")[0].split(",")[0]
                for claim in claims
                if claim.get("ran", "nothing") not in ("", "nothing")
            )
            link = f"[{_cell(figure.source)}]({_file(paper)}#{figure.name})"
            rows.append(f"| {link} | {figure.kind} | {_outcome(claims)} | {_cell(', '.join([*ran][:3]))} |")
        yield "\n".join(rows)


def _outcome(claims: Sequence[Mapping[str, Any]]) -> str:
    words = [f"{count} {word}" for count, word in zip(_counts(claims), ("met", "missed", "open"), strict=True) if count]
    return ", ".join(words) or "–"


def _section(figure: Figure, result: Mapping[str, Any] | None, folder: Path) -> Iterator[str]:
    yield f"## {figure.source}: {figure.states} {{ #{figure.name} }}"
    gpu = " The paper's own form needs a GPU." if figure.gpu else ""
    if not figure.here:
        yield f"*Elsewhere*: {figure.why}.{gpu}"
        return
    kind = f"*{figure.kind.capitalize()}* by `{figure.command}`, {_time(figure.seconds)}.{gpu}"
    if result is None:
        yield f"{kind} Not run yet."
        return
    claims = result["claims"]
    yield f"{kind} Statements: {_outcome(claims)} ([all]({figure.name}.json))."
    if (folder / f"{figure.name}.png").exists():
        yield f"![{figure.source}]({figure.name}.png)"
    limit = _SHOWN_MET if all(claim["met"] is True for claim in claims) else _SHOWN
    shown = sorted(claims, key=lambda claim: claim["met"] is True)[:limit]  # stable: the paper's order otherwise
    columns = ["statement", "paper", "ours", "what ran", "", "why"]
    cells = [[c["what"], c["paper"], c["ours"], c.get("ran", ""), _MARKS[c["met"]], c["why"]] for c in shown]
    for above, row in reversed([*pairwise(cells)]):
        row[5] = "as above" if row[5] and row[5] == above[5] else row[5]
    for column in (5, 3):
        if not any(row[column] for row in cells):
            for row in (columns, *cells):
                del row[column]
    rules = ["---:" if column in ("paper", "ours") else "---" for column in columns]
    yield "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (columns, rules, *cells))
    env, by = result["environment"], f"`python -m benchmarks {figure.rests_on}`, " if figure.rests_on else ""
    yield f"<small>{by}{env['cpu']}, {env['cores']} cores, commit {env['commit']}, {env['date'][:10]}.</small>"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _time(seconds: int) -> str:
    return "below a second" if seconds == 0 else f"{seconds} s" if seconds < 120 else f"{round(seconds / 60)} minutes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m papers.page", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the results, and of the pages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures anew from the results")
    options = parser.parse_args(arguments)
    for figure in FIGURES.values() if options.pictures else ():
        path = options.folder / f"{figure.name}.json"
        if figure.draw is not None and path.exists():
            save_picture(figure.picture(read(path)["data"]), path.with_suffix(".png"))
    return write_texts({options.folder / name: text for name, text in pages(options.folder).items()}, options.check)


if __name__ == "__main__":
    sys.exit(main())
