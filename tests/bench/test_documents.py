"""Measured tables in documents come from JSON files, and the committed documents are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import NAMES, documents, harness, load
from benchmarks.harness import environment
from sparsebp.core.errors import FileFormatError

ROOT = Path(__file__).resolve().parents[2]
TEXT = "before\n<!-- bench:jacobian short -->\nold\n<!-- /bench:jacobian -->\nafter\n"


def write_result(folder: Path, *, quick: bool = False, date: str = "2026-01-01", stem: str = "jacobian") -> Path:
    result = {"benchmark": "jacobian", "title": "A title", "quick": quick, "settings": {}, "leaves_out": "nothing"}
    result["environment"] = environment() | {"date": date}
    row = {"name": f"ReLU of {date}", "shape": "3 × 3", "sparsity": 0.5, "threads": 1, "ours": 1e-3, "columns": 1e-2}
    row |= {"columns_ratio": 10.0, "jacrev": 2e-3, "jacrev_ratio": 2.0, "target": 5.0, "met": "met"}
    result["rows"] = [row, row | {"name": "no target", "target": None}]
    result["notes"] = ["a note"]
    return harness.save_result(result, folder, stem)


def test_a_block_is_filled_and_filling_again_changes_nothing(tmp_path: Path) -> None:
    write_result(tmp_path / "results")
    results = documents.find_results(tmp_path / "results")
    text = documents.fill(TEXT, results, tmp_path)
    assert text.startswith("before\n<!-- bench:jacobian short -->\n| operator |")
    assert text.endswith("<!-- /bench:jacobian -->\nafter\n")
    assert "| ReLU of 2026-01-01 | 3 × 3 |" in text
    assert "no target" not in text  # which `in_short` leaves out
    assert "old" not in text
    assert documents.fill(text, results, tmp_path) == text


def test_of_a_run_that_was_broken_off_what_it_has_measured_is_shown(tmp_path: Path) -> None:
    result = harness.load_result(write_result(tmp_path / "other"))
    result["rows"][1] = {"name": "no target", "error": "it broke"}
    harness.save_result(result | {"complete": False}, tmp_path, "jacobian.partial")
    text = documents.fill(TEXT.replace(" short", ""), documents.find_results(tmp_path), tmp_path)
    assert "- Incomplete: the run was broken off." in text
    assert "| ReLU of 2026-01-01 | 3 × 3 |" in text and "| no target" not in text


def test_names_with_a_hyphen_have_blocks(tmp_path: Path) -> None:
    text = documents.fill(TEXT.replace("jacobian", "gpu-grid"), {}, tmp_path)
    assert "Not measured yet: `python -m benchmarks gpu-grid" in text and "old" not in text


def test_the_long_form_has_title_notes_and_picture(tmp_path: Path) -> None:
    path = write_result(tmp_path / "results")
    path.with_suffix(".png").write_bytes(b"")
    results = documents.find_results(tmp_path / "results")
    text = documents.fill(TEXT.replace(" short", ""), results, tmp_path / "docs")
    assert "**A title.** Left out: nothing." in text
    assert "- a note" in text
    assert "![A title](../results/jacobian.png)" in text


def test_quick_runs_do_not_count_and_the_newest_comes_first(tmp_path: Path) -> None:
    write_result(tmp_path, quick=True)
    assert "Not measured yet" in documents.fill(TEXT, documents.find_results(tmp_path), tmp_path)
    write_result(tmp_path, date="2026-01-01", stem="a")
    write_result(tmp_path, date="2026-02-01", stem="b")
    text = documents.fill(TEXT, documents.find_results(tmp_path), tmp_path)
    assert text.index("ReLU of 2026-02-01") < text.index("ReLU of 2026-01-01")


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_narrow_and_tell_their_columns_apart(name: str) -> None:
    benchmark = load(name)
    assert benchmark.name == name
    headings = [column.heading.strip() for column in benchmark.shown]
    assert len(set(headings)) == len(headings)
    tables = list(benchmark.tables.values())
    assert all(len(keys) <= 8 for keys in tables)
    shown, left_out = set().union(*tables), {"side"} if name == "pruned" else set()  # which the step tells
    assert shown | left_out == {column.key for column in benchmark.shown}
    assert benchmark.named(benchmark.short)


def test_rows_that_read_the_same_are_one(tmp_path: Path) -> None:
    path = write_result(tmp_path)
    result = harness.load_result(path)
    result["rows"].append(result["rows"][0] | {"columns_ratio": 20.0})
    harness.save_result(result, tmp_path, "jacobian")
    text = documents.fill(TEXT.replace(" short", ""), documents.find_results(tmp_path), tmp_path)
    times, ratios = text.split("*Ratios:*")
    assert times.count("| ReLU of 2026-01-01 |") == 1
    assert ratios.count("| ReLU of 2026-01-01 |") == 2


def test_an_unknown_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="unknown benchmark 'speed'"):
        documents.fill(TEXT.replace("jacobian", "speed"), {}, tmp_path)


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text(TEXT, encoding="utf-8")
    arguments = [str(page), "--results", str(tmp_path / "results")]
    assert documents.main([*arguments, "--check"]) == 1
    assert page.read_text(encoding="utf-8") == TEXT
    assert documents.main(arguments) == 0
    assert documents.main([*arguments, "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{page}: out of date", f"{page}: updated"]


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md"])
def test_the_committed_tables_equal_what_the_json_files_give(document: str) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    assert "<!-- bench:recurrent" in text
    assert documents.fill(text, documents.find_results(ROOT / documents.FOLDER), path.parent) == text, (
        "run: python -m benchmarks.documents README.md docs/benchmarks.md"
    )
