"""Pictures of all measured benchmarks: titles, legends, sizes, no text cut off, and the numbers of the results."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from benchmarks import documents, harness, load

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = sorted((DOCS / "benchmarks").glob("*.json"))
PNGS = [path for folder in ("benchmarks", "papers", "images") for path in sorted((DOCS / folder).glob("*.png"))]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_picture_has_a_title_and_a_legend(path: Path) -> None:
    result = harness.load_result(path)
    drawing = load(result["benchmark"]).draw(result)
    assert drawing.get_suptitle().replace("\n", " ") == result["title"]
    legends = [*drawing.legends, *(ax.get_legend() for ax in drawing.axes if ax.get_legend())]
    assert sum(len(legend.get_texts()) for legend in legends) > 1
    assert all(ax.get_xlabel() or ax.get_ylabel() for ax in drawing.axes)
    drawing.canvas.draw()
    box, (width, height) = drawing.get_tightbbox(), drawing.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_what_its_benchmark_says(path: Path) -> None:
    result = harness.load_result(path)
    benchmark = load(result["benchmark"])
    assert result["title"] == benchmark.title.format(**result["settings"])
    assert result["leaves_out"] == benchmark.leaves_out
    assert sum(map(benchmark.in_short, harness.measured(result))) <= 12


@pytest.mark.parametrize("path", PNGS, ids=lambda path: path.stem)
def test_pictures_fit_on_a_page(path: Path) -> None:
    size = struct.unpack(">II", path.read_bytes()[16:24])
    assert max(size) <= 1600 and (path.stem != "training-step" or size[0] <= 1200)


def test_bars_are_of_the_rows_that_documents_show() -> None:
    rows = [{"name": name, "threads": count, "ours": {"median": 0.5}, "theirs": None} for name, count in
            (("a", 1), ("b", 2))]  # fmt: skip
    draw = harness.bars("<{name}>", {"ours": "ours", "theirs": "theirs"}, "ms", unit=1e3, line=2.0)
    (ax,) = draw({"rows": rows}).axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["<a>\n1 thread", "<b>\n2 threads"]
    assert [text.get_text() for text in ax.texts] == ["500", "500", "", ""]
    (ax,) = draw({"rows": rows, "shown": rows[:1]}).axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["<a>"] and ax.get_xlabel() == "ms (1 thread)"


def test_bars_have_the_colours_of_the_peers() -> None:
    rows = [{"against": name, "ratio": 2.0} for name in ("torch", "arch", "scipy")]
    (ax,) = harness.bars("{against}", {"ratio": "over the peer"}, harness.SPEED_UP)({"rows": rows}).axes
    (bars,) = ax.containers
    colours = {to_hex(bar.get_facecolor()): bar.get_label() for bar in bars}
    assert [*colours] == [harness.TORCH, harness.OTHER_PEER[1], harness.SCIPY]
    assert [*colours.values()] == ["over PyTorch", "over another package", "over SciPy"]


def bars_of(results: documents.Results) -> dict[str, list[float]]:
    (ax,) = documents.draw_training_steps(results).axes
    return {group.get_label(): [bar.get_width() for bar in group] for group in ax.containers}


def test_readmes_picture_shows_the_numbers_of_the_result() -> None:
    results = documents.find_results(DOCS / "benchmarks")
    rows = {row["model"]: row for row in results["recurrent"][0][1]["rows"]
            if (row["threads"], row["batch"], row["length"]) == (1, 16, 1000)}  # fmt: skip
    assert {"GRU(38, 20)", "LSTM(38, 20)", "RNN(1, 20)"} == rows.keys()
    for name, key in (("torch.nn", "step_torch"), ("JAX", "step_jax"), ("sparsebp", "step_ours")):
        assert bars_of(results)[name] == pytest.approx([1e3 * row[key]["median"] for row in rows.values()])
    assert "docs/images/training-step.png" in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_readmes_picture_shows_an_accelerated_model_where_it_is_the_same() -> None:
    row = {"model": "GRU(38, 20)", "batch": 16, "length": 1000, "threads": 1, "step_torch": 3.0, "step_ours": 1.0}
    accelerated = {**row, "part": "small", "ours": 0.5}

    def of(one: dict[str, Any], cpu: str = "A") -> Any:
        return [(Path(), {"rows": [one], "environment": {"cpu": cpu}})]

    results = {"recurrent": of(row), "torch": of(accelerated)}
    assert bars_of(results) == {"torch.nn": [3e3], "sparsebp": [1e3], "sparsebp in a PyTorch model (accelerate)": [500]}
    others = [of(accelerated | other) for other in ({"part": "packed"}, {"length": 100}, {"threads": 2})]
    for other in (*others, of(accelerated, "another processor")):
        assert bars_of({**results, "torch": other}) == {"torch.nn": [3e3], "sparsebp": [1e3]}


def test_readmes_numbers_are_those_of_the_results() -> None:
    results = documents.find_results(DOCS / "benchmarks")
    text = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    ratios = {row["threads"]: f"{row['scipy_ratio']['median']:.1f}" for row in results["spgemm"][0][1]["rows"]
              if row["name"] == "random, n = 5000, 0.5%" and row["samples"] == 1}  # fmt: skip
    assert f"{ratios[1]} times as fast as SciPy's `a @ b` on one thread, {ratios[2]} times on two, without" in text
    steps = [row["best_ratio"]["median"] for row in results["recurrent"][0][1]["rows"] if row["threads"] == 2]
    assert f"On two threads, steps are {min(steps):.1f} to {max(steps):.1f} times as fast" in text
    for row in results["linear"][0][1]["rows"]:
        if (row["kind"], row["threads"]) == ("training MinGRU", 1):
            row_begins = rf"\| MinGRU\(38, {row['hidden']}\) \| {row['batch']} \| 1000 \| 1 \|[^|]*\| "
            assert re.search(rf"{row_begins}{row['best_ratio']['median']:.2f}×", text)
