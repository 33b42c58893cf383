"""Pictures of all measured benchmarks: titles, legends, and no text cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness, load

RESULTS = sorted((Path(__file__).resolve().parents[2] / "docs" / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_picture_has_a_title_and_a_legend(path: Path) -> None:
    result = harness.load_result(path)
    drawing = load(result["benchmark"]).draw(result)
    assert drawing.get_suptitle().replace("\n", " ") == result["title"]
    legends = [*drawing.legends, *(ax.get_legend() for ax in drawing.axes if ax.get_legend())]
    assert sum(len(legend.get_texts()) for legend in legends) > 1
    drawing.canvas.draw()
    box, (width, height) = drawing.get_tightbbox(), drawing.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
