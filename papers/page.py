"""The documentation's pages "The papers", made from the results of ``python -m papers``: an index, and one a paper.

``python -m papers.page docs/papers`` writes ``index.md`` and a page for each paper next to the results, with
``--pictures`` the pictures too. With ``--check`` nothing is written, and the exit status says whether the pages are up
to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import save_picture, write_texts
from papers import FIGURES
from papers.claims import VERDICTS, Figure, Found, Paper, read
from papers.table import PAPERS

_HEAD = """# The papers, figure by figure

Every figure and table of the five papers whose systems this package implements: what it states, and what came out
here. `python -m papers list` prints them, `python -m papers NAME` runs one, `python -m papers all` those that fit the
machine. These pages are made from the results of these commands by `python -m papers.page docs/papers`; all statements
with their tolerances are in `papers/table.py`. Nothing is left out because it is unfavourable.

A verdict belongs to the algorithm of the paper alone. What ran otherwise, such as plain back-propagation where the
paper runs a scan, stands in a column of its own, without a verdict. A statement is **met** or **missed** if the whole
spread of our result (quartiles, the 95 % interval of several runs, or the range over what the text leaves open) is
within the stated tolerance or outside it, and *within noise* if the spread reaches across. A gain that a stated bound
excludes is missed. *Not run*: the paper's machine or the time was not at hand, or the run is too short for the
statement. *Claims nothing*: there is no number or relation to compare with.

*exact*: computed or counted. *executed*: run, however long it takes. *measured*: timed next to the peer on the machine
that is named. *simulated*: for the paper's machines, from data sheets. *elsewhere*: not run.

In each line below, paper → ours → verdict → algorithm are those of the figure's first statement."""
_LEGEND = "*Otherwise* is what ran in another way; it has no verdict. [What the words mean](index.md)."
_MARKS = {"met": "met", "missed": "**missed**"}


def listing() -> list[dict[str, Any]]:
    """Return the rows of ``python -m papers list``."""
    return [
        {"name": figure.name, "paper": figure.paper.name, "source": figure.source, "states": figure.states,
         "kind": figure.kind, "seconds": figure.run.seconds if figure.run else 0, "runs": figure.run is not None,
         "needs": list(figure.run.needs) if figure.run else [], "command": figure.command}
        for figure in FIGURES.values()
    ]  # fmt: skip


def pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by its file's name; a figure without a result says so."""
    results = {name: read(folder / f"{name}.json") for name in FIGURES if (folder / f"{name}.json").exists()}
    full = {name: result for name, result in results.items() if not result["quick"]}
    written = {"index.md": "\n\n".join([_HEAD, _summary(full), *_index(full)]) + "\n"}
    for paper in PAPERS.values():
        parts = [f"# {paper.name}: {paper.authors}", _cited(paper), _LEGEND]
        for figure in _figures(paper):
            parts.extend(_section(figure, full.get(figure.name), folder))
        written[_file(paper)] = "\n\n".join(parts) + "\n"
    return written


def _figures(paper: Paper) -> list[Figure]:
    return [figure for figure in FIGURES.values() if figure.paper.name == paper.name]


def _file(paper: Paper) -> str:
    return f"{paper.name.lower()}.md"


def _cited(paper: Paper) -> str:
    kind, number = paper.number.split(":")
    site = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}[kind]
    return f"{paper.authors.rpartition(',')[0]}: “{paper.title}”, {paper.venue}, [{paper.number}]({site}{number})."


def _claims(figure: Figure, results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a figure; one that is run elsewhere needs no result."""
    if figure.name in results:
        return list(results[figure.name]["claims"])
    return figure.rows(Found({})) if figure.run is None else []


def counts(claims: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many have each of `VERDICTS`."""
    return [sum(claim["verdict"] == verdict for claim in claims) for verdict in VERDICTS]


def _outcome(claims: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{count} {word}" for count, word in zip(counts(claims), VERDICTS, strict=True) if count) or "–"


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [f"| paper | statements | {' | '.join(VERDICTS)} |", "| --- | " + " | ".join(["---:"] * 6) + " |"]
    for paper in PAPERS.values():
        claims = [claim for figure in _figures(paper) for claim in _claims(figure, results)]
        rows.append(f"| [{paper.name}]({_file(paper)}) | {len(claims)} | {' | '.join(map(str, counts(claims)))} |")
    return "\n".join(rows)


def _index(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each figure: paper → ours → verdict → algorithm."""
    for paper in PAPERS.values():
        yield f"## {paper.name}: {paper.authors}"
        yield _cited(paper)
        rows = ["| figure | statement | paper | ours | verdict | algorithm | all its statements |",
                "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        for figure in _figures(paper):
            claims = _claims(figure, results)
            link = f"[{figure.source}]({_file(paper)}#{figure.name})"
            first = (
                claims[0]
                if claims
                else {"what": figure.states, "paper": "–", "ours": "–", "verdict": "not run", "ran": ""}
            )
            cells = [link, first["what"], first["paper"], first["ours"], _mark(first), first["ran"], _outcome(claims)]
            rows.append(_line(cells))
        yield "\n".join(rows)


def _section(figure: Figure, result: Mapping[str, Any] | None, folder: Path) -> Iterator[str]:
    yield f"## {figure.source}: {figure.states} {{ #{figure.name} }}"
    claims = _claims(figure, {} if result is None else {figure.name: result})
    kind = f"*{figure.kind.capitalize()}*"
    if figure.run is not None:
        kind += f" by `{figure.command}`, {_time(figure.run.seconds)}"
    yield f"{kind}. Algorithm: {figure.ran or '–'}." if claims else f"{kind}. Not run yet."
    if (folder / f"{figure.name}.png").exists():
        yield f"![{figure.source}]({figure.name}.png)"
    if not claims:
        return
    columns = {"statement": "what", "paper": "paper", "tolerance": "tolerance", "ours": "ours", "": "verdict",
               "algorithm": "ran", "otherwise": "other", "why": "why"}  # fmt: skip
    rows = [{**claim, "verdict": _mark(claim), "ran": claim["ran"].replace(figure.ran,
        "") if figure.ran else claim["ran"]}
            for claim in claims]  # fmt: skip
    kept = {title: key for title, key in columns.items() if any(row[key] for row in rows)}
    yield "\n".join([_line(kept), "| " + " | ".join(["---"] * len(kept)) + " |",
                     *(_line([row[key] for key in kept.values()]) for row in rows)])  # fmt: skip
    if result is not None:
        env, by = result["environment"], ""
        if figure.run is not None and figure.run.rests_on:
            by = f"`python -m benchmarks {figure.run.rests_on}`, "
        cores = f"{env['cores']} core{'s' * (env['cores'] > 1)}"
        yield f"<small>{by}{env['cpu']}, {cores}, commit {env['commit']}, {env['date'][:10]}.</small>"


def _mark(claim: Mapping[str, Any]) -> str:
    return _MARKS.get(claim["verdict"], f"*{claim['verdict']}*")


def _line(cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def _time(seconds: int) -> str:
    return "below a second" if seconds == 0 else f"{seconds} s" if seconds < 120 else f"{round(seconds / 60)} minutes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m papers.page", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the results, and of the pages")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures anew from the results")
    options = parser.parse_args(arguments)
    for figure in FIGURES.values() if options.pictures else ():
        path = options.folder / f"{figure.name}.json"
        if figure.run is not None and figure.run.draw is not None and path.exists():
            save_picture(figure.picture(read(path)["data"]), path.with_suffix(".png"))
    return write_texts({options.folder / name: text for name, text in pages(options.folder).items()}, options.check)


if __name__ == "__main__":
    sys.exit(main())
