"""The Python of README, tutorial, how-to and explanation runs as it stands, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "explanation").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page share one namespace; a ``text`` block right behind one is its exact output."""
    text = page.read_text(encoding="utf-8")
    if "import torch" in text:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + block["code"], str(page), "exec")  # so that errors name the page's lines
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block["output"] is not None:
            assert printed.getvalue() == block["output"], f"{page.name}, the block at line {line}"


def test_the_readme_example_has_ten_lines() -> None:
    """Its heading says so; imports and blank lines are not counted."""
    block = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert block is not None
    lines = [line for line in block["code"].splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 10
