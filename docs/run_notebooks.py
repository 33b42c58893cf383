"""Runs the documentation's notebooks and keeps what they print and draw: ``python docs/run_notebooks.py``.

No Jupyter is needed: cells of code are executed one after the other in this process. A cell with the tag ``machine``
prints what another machine may print otherwise; a test compares all others.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

FOLDER = Path(__file__).parent


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the outputs of every cell of code, as a notebook keeps them."""
    mpl.use("agg")
    from matplotlib import pyplot

    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    show, pyplot.show = pyplot.show, lambda: None  # figures are taken below
    try:
        with mpl.rc_context():
            for cell in filter(lambda cell: cell["cell_type"] == "code", notebook["cells"]):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
                outputs.append(_outputs(printed.getvalue(), pyplot))
    finally:
        pyplot.show = show
        pyplot.close("all")
    return outputs


def _outputs(printed: str, pyplot: Any) -> list[dict[str, Any]]:
    """Return what a cell printed, and the figures that it left open, which are closed."""
    outputs: list[dict[str, Any]] = []
    for number in pyplot.get_fignums():
        drawn = io.BytesIO()
        pyplot.figure(number).savefig(drawn, format="png", metadata={"Software": None})
        data = {"image/png": base64.b64encode(drawn.getvalue()).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    return outputs


def main() -> None:
    """Run every notebook, and write its outputs into it."""
    for path in sorted(FOLDER.rglob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, outputs) in enumerate(zip(code, run(notebook), strict=True), start=1):
            cell["execution_count"], cell["outputs"] = number, outputs
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.relative_to(FOLDER)}: {len(code)} cells run")


if __name__ == "__main__":
    main()
