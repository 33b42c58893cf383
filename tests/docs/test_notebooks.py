"""The notebooks of the documentation run as they stand, print what they are committed with, and become pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs_scripts import DOCS, script

pytest.importorskip("matplotlib")

NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))


def said(outputs: list[dict[str, Any]]) -> str:
    """Return what a cell printed, and where it drew: pictures differ by the version of matplotlib."""
    return "".join("".join(output["text"]) if output["output_type"] == "stream" else "[drawn]" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_it_says(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    compared = 0
    for cell, outputs in zip(code, script("run_notebooks").run(notebook), strict=True):
        kept = said(cell["outputs"])
        assert bool(said(outputs)) == bool(kept)
        if "machine" not in cell["metadata"].get("tags", ()):
            assert said(outputs) == kept, f"{''.join(cell['source'])}\n\nrun: python docs/run_notebooks.py"
            compared += bool(kept)
    assert compared


def test_a_notebook_becomes_a_page() -> None:
    pytest.importorskip("mkdocs")
    picture = {"output_type": "display_data", "data": {"image/png": "iVBO"}, "metadata": {}}
    printed = {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [picture, printed]},
    ]
    text, pictures = script("source_pages").as_markdown({"cells": cells}, "name")
    assert text.startswith("# Title\n\nText.\n\n<small>")
    assert "```python\nprint(1)\n```\n\n![" in text and "](name/1.png)\n\n```text\none\ntwo\n```" in text
    assert pictures == {"1.png": b"\x89PN"}
