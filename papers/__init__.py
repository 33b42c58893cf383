"""REPRODUCE: every figure and table of the papers, one command each; ``python -m papers``.

`table` has all statements of the papers with their tolerances, one module a paper obtains our results, `claims` judges
and runs, `page` makes the documentation's pages.
"""

from __future__ import annotations

import dataclasses
import difflib

from papers import bppsa, bppsa_measured, dualpipe, optimizer_fusion, out_of_order, preprint
from papers.claims import Figure, Run
from papers.table import ALL
from sparsebp.core.check import shown
from sparsebp.core.errors import OptionError

RUNS: dict[str, Run] = {
    name: run
    for paper in (bppsa, bppsa_measured, preprint, out_of_order, dualpipe, optimizer_fusion)
    for name, run in paper.RUNS.items()
}
FIGURES: dict[str, Figure] = {figure.name: dataclasses.replace(figure, run=RUNS.get(figure.name)) for figure in ALL}
"""By name, in the order of the papers."""


def find(name: str) -> Figure:
    """Return the figure `name`."""
    if name not in FIGURES:
        near = difflib.get_close_matches(str(name).lower(), FIGURES, 3) or [next(iter(FIGURES))]
        raise OptionError("There is no such figure", expected=f"one of {len(FIGURES)} names, such as {', '.join(near)}",
                          got=shown(name), remedy="python -m papers list prints them")  # fmt: skip
    return FIGURES[name]
