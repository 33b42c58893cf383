"""The Python of README, tutorial, how-to and explanation runs as it stands, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "explanation").glob("*.md")),
]
BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>\w+) -->\n)?^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\n(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```\n)?",
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page share one namespace; a ``text`` block right behind one is its exact output.

    A block behind ``<!-- needs: LIBRARY -->`` is left out where the library is not installed.
    """
    text = page.read_text(encoding="utf-8")
    if "import torch" in text:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    missing = []
    for block in BLOCK.finditer(text):
        if block["needs"] and importlib.util.find_spec(block["needs"]) is None:
            missing.append(block["needs"])
            continue
        line = text[: block.start("code")].count("\n") + 1
        source = textwrap.dedent(block["code"])  # of a tab
        code = compile("\n" * (line - 1) + source, str(page), "exec")  # so that errors name the page's lines
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block["output"] is not None:
            assert printed.getvalue() == textwrap.dedent(block["output"]), f"{page.name}, the block at line {line}"
    if missing:
        pytest.skip(f"blocks left out, not installed: {', '.join(missing)}")


def test_every_block_is_run() -> None:
    """None is missed for its place in a page: a list, a tab."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == len(re.findall(r"^\s*(?:```|~~~)python", text, re.MULTILINE)), page.name


def test_the_numbers_of_the_first_page_are_measured() -> None:
    """Each is the median of its benchmark, as the overview of the benchmarks shows it."""
    measured = (ROOT / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
    medians = dict(
        reversed(re.findall(r"^\| \[[^]]*\]\((\w+\.md)[^|]*\|[^|]*\| ([\d.]+×)", measured, re.MULTILINE))
    )  # the first row of each page
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = re.findall(r"Measured: \*\*([^*]+)\*\*.*?\]\(benchmarks/(\w+\.md)\)", text, re.DOTALL)
    assert len(shown) == 4
    assert shown == [(medians[page], page) for _, page in shown]
    ways = [row["accelerate"] for row in json.loads((ROOT / "docs/benchmarks/torch.json").read_text())["rows"]]
    assert f"{ways.count('sparsebp')} of {len(ways)}. In the others" in text


def test_the_numbers_of_which_part_are_measured() -> None:
    """Each stands on the page that it links to."""
    shown = re.findall(r"\[([\d.]+×?)\]\((\S+)\)", (ROOT / "docs" / "which-part.md").read_text(encoding="utf-8"))
    assert len(shown) == 4
    assert [number for number, page in shown if f"| {number}" not in (ROOT / "docs" / page).read_text()] == []


def test_the_readme_example_has_ten_lines() -> None:
    """Its heading says so; imports and blank lines are not counted."""
    block = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert block is not None
    lines = [line for line in block["code"].splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 10
