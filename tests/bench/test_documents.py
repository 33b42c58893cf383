"""Measured tables in documents come from JSON files, and the committed documents are up to date."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks import NAMES, documents, harness, load
from benchmarks.harness import environment
from sparsebp.core.errors import FileFormatError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / documents.FOLDER).glob("*.md"))
TEXT = "before\n<!-- bench:jacobian short -->\nold\n<!-- /bench:jacobian -->\nafter\n"


def write_result(folder: Path, *, quick: bool = False, date: str = "2026-01-01", stem: str = "jacobian") -> Path:
    result = {"benchmark": "jacobian", "title": "A title", "quick": quick, "settings": {}, "leaves_out": "nothing"}
    result["environment"] = environment() | {"date": date}
    row = {"name": f"ReLU of {date}", "shape": "3 × 3", "sparsity": 0.5, "threads": 1, "ours": 1e-3, "columns": 1e-2}
    row |= {"columns_ratio": 10.0, "jacrev": 2e-3, "jacrev_ratio": 2.0, "target": 5.0, "met": "met"}
    result["rows"] = [row, row | {"name": "no target", "target": None}, row | {"name": "another", "threads": 2}]
    result["notes"] = ["a note"]
    return harness.save_result(result, folder, stem)


def test_a_block_is_filled_and_filling_again_changes_nothing(tmp_path: Path) -> None:
    write_result(tmp_path / "results")
    results = documents.find_results(tmp_path / "results")
    text = documents.fill(TEXT, results, tmp_path)
    assert text.startswith("before\n<!-- bench:jacobian short -->\n| operator |")
    assert text.endswith("<!-- /bench:jacobian -->\nafter\n")
    assert "| ReLU of 2026-01-01 | 3 × 3 |" in text
    assert "another" not in text  # which `in_short` leaves out
    assert "old" not in text
    assert documents.fill(text, results, tmp_path) == text


def test_an_interrupted_run_shows_the_rows_it_measured(tmp_path: Path) -> None:
    result = harness.load_result(write_result(tmp_path / "other"))
    result["rows"][1] = {"name": "no target", "error": "it broke"}
    harness.save_result(result | {"complete": False}, tmp_path, "jacobian.partial")
    text = documents.fill(TEXT.replace(" short", ""), documents.find_results(tmp_path), tmp_path)
    assert "- Incomplete: the run was interrupted." in text
    assert "| ReLU of 2026-01-01 | 3 × 3 |" in text and "| no target" not in text


def test_names_with_a_hyphen_have_blocks(tmp_path: Path) -> None:
    text = documents.fill(TEXT.replace("jacobian", "gpu-grid"), {}, tmp_path)
    assert "Not measured yet: `python -m benchmarks gpu-grid" in text and "old" not in text


def test_the_long_form_has_picture_notes_and_csv(tmp_path: Path) -> None:
    path = write_result(tmp_path / "results")
    path.with_suffix(".png").write_bytes(b"")
    results = documents.find_results(tmp_path / "results")
    text = documents.fill(TEXT.replace(" short", ""), results, tmp_path / "docs")
    assert "Left out: nothing." in text
    assert "- a note" in text
    assert "![A title](../results/jacobian.png)" in text
    assert "[All 3 rows as CSV](../results/jacobian.csv)" in text


def test_quick_runs_do_not_count_and_the_newest_comes_first(tmp_path: Path) -> None:
    write_result(tmp_path, quick=True)
    assert "Not measured yet" in documents.fill(TEXT, documents.find_results(tmp_path), tmp_path)
    write_result(tmp_path, date="2026-01-01", stem="a")
    write_result(tmp_path, date="2026-02-01", stem="b")
    results = documents.find_results(tmp_path)
    text = documents.fill(TEXT.replace(" short", ""), results, tmp_path)
    assert text.index("ReLU of 2026-02-01") < text.index("ReLU of 2026-01-01")
    text = documents.fill(TEXT, results, tmp_path)
    assert "ReLU of 2026-02-01" in text and "ReLU of 2026-01-01" not in text


@pytest.mark.parametrize("name", NAMES)
def test_columns_are_told_apart(name: str) -> None:
    benchmark = load(name)
    assert benchmark.name == name
    headings = [column.heading.strip() for column in benchmark.named(benchmark.short)]
    headings += [column.heading.strip() for column in benchmark.columns if column.key not in benchmark.short]
    assert len(set(headings)) == len(headings)


def test_rows_that_read_the_same_are_one(tmp_path: Path) -> None:
    path = write_result(tmp_path)
    result = harness.load_result(path)
    result["rows"].append(result["rows"][0] | {"columns": 1.0})  # which is not shown
    result["rows"].append(result["rows"][0] | {"columns_ratio": 20.0})
    harness.save_result(result, tmp_path, "jacobian")
    text = documents.fill(TEXT, documents.find_results(tmp_path), tmp_path)
    assert text.count("| ReLU of 2026-01-01 |") == 2


def test_the_overview_counts_and_names_what_is_slower(tmp_path: Path) -> None:
    path = write_result(tmp_path)
    result = harness.load_result(path)
    result["rows"][1] |= {"jacrev_ratio": {"median": 0.5, "low": 0.4, "high": 1.5}}
    result["rows"].append({"name": "left out", "jacrev_ratio": None})
    harness.save_result(result, tmp_path, "jacobian")
    text = documents.overview(documents.find_results(tmp_path))
    assert text.splitlines()[2].endswith("| 2.00× (0.500–2.00) | 1 of 3: no target |")
    assert len(text.splitlines()) == 3


def test_an_unknown_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="unknown benchmark 'speed'"):
        documents.fill(TEXT.replace("jacobian", "speed"), {}, tmp_path)


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path / "results")
    page, table = tmp_path / "page.md", tmp_path / "results" / "jacobian.csv"
    page.write_text(TEXT, encoding="utf-8")
    arguments = [str(page), "--results", str(tmp_path / "results")]
    assert documents.main([*arguments, "--check"]) == 1
    assert page.read_text(encoding="utf-8") == TEXT and not table.exists()
    assert documents.main(arguments) == 0
    assert documents.main([*arguments, "--check"]) == 0
    out, updated = [f"{path}: out of date" for path in (table, page)], [f"{path}: updated" for path in (table, page)]
    assert capsys.readouterr().out.splitlines() == out + updated


def test_the_committed_documents_and_csv_files_equal_what_the_json_files_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert documents.main(["--check"]) == 0, capsys.readouterr().out + "run: python -m benchmarks.documents"
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    marked = re.findall(r"<!-- bench:([\w-]+) -->", "".join(texts.values()))
    assert sorted(marked) == sorted([*NAMES, "overview"])
    assert "<!-- bench:recurrent short -->" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 3000
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert all(len(table.splitlines()) <= 2 + 12 for table in tables)


@pytest.mark.parametrize("path", sorted((ROOT / documents.FOLDER).glob("*.json")), ids=lambda path: path.stem)
def test_a_csv_file_has_every_number_of_the_json_file(path: Path) -> None:
    rows = harness.load_result(path)["rows"]
    with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows)
    for row, cells in zip(rows, read, strict=True):
        for key, value in row.items():
            if isinstance(value, dict):
                assert all(cells[key if p == "median" else f"{key}_{p}"] == str(number) for p, number in value.items())
            elif isinstance(value, list):
                assert cells[key] == " ".join(map(str, value))
            else:
                assert cells[key] == ("" if value is None else str(value))
