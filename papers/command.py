"""``python -m papers``: every figure and table of the five papers, one command each."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp.cli.common import Interrupted, JsonOption, make_program, out_option, print_line, print_table, write_json
from sparsebp.core import tables
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.files import prepare_folder

if TYPE_CHECKING:
    from papers.claims import Context, Figure

_PACKAGES = {"torch": "torch", "audio": "librosa", "data": "mlxtend", "mpi": "mpi4py"}
_COLUMNS = (
    tables.Column("name", "name", number=False), tables.Column("paper", "paper", number=False),
    tables.Column("source", "source", number=False), tables.Column("what it states", "states", number=False),
    tables.Column("ours is", "kind", number=False), tables.Column("s here", "seconds"),
)  # fmt: skip


def reproduce(
    names: Annotated[list[str], typer.Argument(help="Figures by name, list, or all.", show_default=False)],
    out: Annotated[Path | None, out_option("Folder for JSON and pictures.", show_default="runs/papers")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a smoke test.")] = False,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Take measurements, of benchmarks or figures, from these folders.", show_default="measure"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Reproduce figures and tables of the papers: each statement, and our result.

    Each leaves a JSON file and, where there is something to draw, a picture with
    the paper's axes. "all" leaves out figures that need a missing package or
    machine, and says so. Exits with 1 if one could not be run.

    \b
    Examples:
      python -m papers list
      python -m papers ooo-fig12 bppsa-fig7
      python -m papers all --quick
      python -m papers all --measured docs/benchmarks --measured docs/papers
    """
    from papers import FIGURES, find
    from papers.claims import Context
    from papers.page import listing

    if names == ["list"]:
        if json:
            write_json({"event": "result", "figures": listing()})
        else:
            print_table(_COLUMNS, listing())
        return
    whole = names == ["all"]
    if len(names) > 1 and {"list", "all"} & set(names):
        raise OptionError("list and all stand alone", expected="list, or all, or figures by name",
                          got=", ".join(names), remedy="Leave the others out")  # fmt: skip
    chosen = list(FIGURES.values()) if whole else [find(name) for name in names]
    folder = Path("runs", "papers") if out is None else out
    for place in measured or ():
        if not place.is_dir():
            raise OptionError("The folder of results is not there", expected="a folder with results of benchmarks",
                              got=str(place), remedy="Leave --measured out to measure")  # fmt: skip
    prepare_folder(folder)  # before an hour of work
    context = Context(quick, folder / "benchmarks", measured or (), lambda line: None)
    failed = False
    for number, figure in enumerate(chosen, 1):
        try:
            failed |= not _one(figure, context, folder, json, whole)
        except KeyboardInterrupt as error:
            where = f"at figure {number} of {len(chosen)}, {figure.name}; those before it are in {folder}"
            raise Interrupted(where) from error
    if failed:
        raise typer.Exit(1)


def _one(figure: Figure, context: Context, folder: Path, json: bool, whole: bool) -> bool:
    """Run a figure and print its result; return whether it could be run, or may be left out."""
    needs = figure.run.needs if figure.run else ()
    missing = [need for need in needs if importlib.util.find_spec(_PACKAGES[need]) is None]
    if missing and whole:
        _say(figure.name, "left out", f"it needs pip install 'sparsebp[{','.join(missing)}]'", json)
        return True
    begin = time.monotonic()
    try:
        result = figure.reproduce(context, folder)
    except SparseBPError as error:
        if not whole:
            raise
        _say(figure.name, "not run", str(error), json)
        return False
    if json:
        write_json({"event": "result", **result})
        return True
    _print(figure, result, time.monotonic() - begin)
    return True


def _say(name: str, event: str, why: str, json: bool) -> None:
    """Say of a figure that it leaves no result."""
    if json:
        write_json({"event": event, "figure": name, "why": why})
    else:
        print_line(name, f"{event}: {why}", 20)


def _print(figure: Figure, result: dict[str, Any], seconds: float) -> None:
    found = [claim["verdict"] for claim in result["claims"]]
    said = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in dict.fromkeys(found))
    print_line(figure.name, f"{figure.states}: {said}; {seconds:.1f} s", 20)
    for claim in result["claims"]:
        if claim["verdict"] != "met":
            why = f". {claim['why']}" if claim["why"] else ""
            print_line("", f"{claim['verdict']}: {claim['what']}: {claim['ours']}, the paper {claim['paper']}{why}", 20)


app = make_program(reproduce)
