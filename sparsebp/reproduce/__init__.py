"""REPRODUCE: every figure and table of the four papers, one command each; ``sparsebp reproduce``.

`figure` says what a figure is and runs it, one module a paper lists them, `page` makes the documentation's page of the
results.
"""

from __future__ import annotations

from sparsebp.core.arguments import check_choice
from sparsebp.reproduce import bppsa, dualpipe, optimizer_fusion, out_of_order
from sparsebp.reproduce.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for paper in (bppsa, out_of_order, dualpipe, optimizer_fusion)
    for figure in paper.FIGURES
}  # fmt: skip
"""By name, in the order of the papers."""


def find(name: str) -> Figure:
    """Return the figure `name`.

    Raises
    ------
    OptionError
        There is none of that name.
    """
    return FIGURES[check_choice("figure", name, FIGURES)]
