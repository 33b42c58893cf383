"""Runs the examples of the gallery and keeps their pictures: ``PYTHONPATH=. python docs/make_gallery.py [name …]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib as mpl

FOLDER = Path(__file__).parent / "gallery"
STYLE = {
    "figure.figsize": (6.4, 3.4), "figure.constrained_layout.use": True, "savefig.dpi": 110, "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip


def run(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the names that an example defines, and its one figure."""
    mpl.use("agg")
    from matplotlib import pyplot

    pyplot.close("all")
    try:
        with mpl.rc_context(STYLE), mock.patch.object(pyplot, "show"):
            names = runpy.run_path(str(path))
            (number,) = pyplot.get_fignums()
            figure = pyplot.figure(number)
            figure.canvas.draw()
    finally:
        pyplot.close("all")
    return names, figure


def main(wanted: list[str]) -> None:
    """Draw the pictures of these examples, or of all."""
    for path in sorted(FOLDER.glob("*.py")):
        if not wanted or path.stem in wanted:
            _, figure = run(path)
            figure.savefig(path.with_suffix(".png"), dpi=STYLE["savefig.dpi"], metadata={"Software": None})
            print(path.stem)


if __name__ == "__main__":
    main(sys.argv[1:])
