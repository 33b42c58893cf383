"""REPRODUCE: every figure and table of the papers, one command each; ``python -m papers``.

`figure` defines and runs a figure, one module a paper lists them, `page` makes the documentation's page of the
results.
"""

from __future__ import annotations

import difflib

from papers import bppsa, dualpipe, optimizer_fusion, out_of_order, preprint
from papers.figure import Figure
from sparsebp.core.check import shown
from sparsebp.core.errors import OptionError

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for paper in (bppsa, preprint, out_of_order, dualpipe, optimizer_fusion)
    for figure in paper.FIGURES
}  # fmt: skip
"""By name, in the order of the papers."""


def find(name: str) -> Figure:
    """Return the figure `name`."""
    if name not in FIGURES:
        near = difflib.get_close_matches(str(name).lower(), FIGURES, 3) or [next(iter(FIGURES))]
        raise OptionError("There is no such figure", expected=f"one of {len(FIGURES)} names, such as {', '.join(near)}",
                          got=shown(name), remedy="python -m papers list prints them")  # fmt: skip
    return FIGURES[name]
