"""REPRODUCE: every figure and table of the papers, one command each; ``sparsebp reproduce``.

`figure` says what a figure is and runs it, one module a paper lists them, `page` makes the documentation's page of the
results.
"""

from __future__ import annotations

import difflib

from sparsebp.core.check import shown
from sparsebp.core.errors import OptionError
from sparsebp.reproduce import bppsa, dualpipe, optimizer_fusion, out_of_order, preprint
from sparsebp.reproduce.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for paper in (bppsa, preprint, out_of_order, dualpipe, optimizer_fusion)
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
    if name not in FIGURES:
        near = difflib.get_close_matches(str(name).lower(), FIGURES, 3) or [next(iter(FIGURES))]
        raise OptionError("There is no such figure", expected=f"one of {len(FIGURES)} names, such as {', '.join(near)}",
                          got=shown(name), remedy="sparsebp reproduce list prints them")  # fmt: skip
    return FIGURES[name]
