"""The page on expected GPU performance shows its predictions and what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from docs_scripts import script

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_shows_its_figures() -> None:
    command = [sys.executable, str(DOCS / "make_gpu_expectations.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run docs/make_gpu_expectations.py"


def test_times_are_ranges_and_have_the_start_of_every_kernel() -> None:
    page = script("make_gpu_expectations")
    names = ("rnn_reduce", "scan_combine", "rnn_backward")
    phases = [{"kernel": name, "steps": 10, "cycles": 100, "cycles, four passes": 300} for name in names]
    begin, low, high = 1500 + 700 + 800, 3 * 10 * 100, 3 * 10 * 300
    expected = [(begin + cycles) / page.CLOCK + 2 * page.NODE for cycles in (low, high)]
    assert page.seconds(phases) == pytest.approx((expected[0], page.ERROR * expected[1]))
    assert page.over((80.0, 110.0), (2.0, 4.0)) == "20–55×"


def test_an_archive_fills_the_cells_and_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = script("make_gpu_expectations")
    figures = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    monkeypatch.setattr(page, "BENCHMARKS", tmp_path / "benchmarks")
    page.BENCHMARKS.mkdir()
    assert "have not run on a GPU yet" in page.what_has_run()
    assert "| Adam on 9.2 million parameters | – | – |  |  |  |" in page.tables(figures)["measured"]
    lines = {
        "versions.log": [{"python": "3"}, {"packages": {}}, {"environment": {"gpu": {"name": "A GPU"}, "date": "1"}}],
        "check-launches.jsonl": [{"kernel": "spmv"}, {"kernel": "spmv", "error": "differs"}],
        "check-tests.jsonl": [{"test": "a", "outcome": "failed", "why": "no"}],
        "end-to-end-tests.jsonl": [{"test": "f.py::b", "outcome": "passed", "measured": {"worst": 2e-8}}],
    }
    files = {name: "\n".join(map(json.dumps, rows)) for name, rows in lines.items()}
    files["summary-first-1.json"] = json.dumps({"commit": "0123abc", "stages": []})
    adam = {"what": "adam", "ours": {"median": 2e-3}, "torch": {"median": 3e-6}}
    peers = {"benchmark": "gpu-peers", "environment": {"date": "1"}, "rows": [adam]}
    files["gpu-peers-a-gpu-0123abc.json"] = json.dumps(peers)
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as packed:
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
            packed.add(tmp_path / name, name)
    page.take(tmp_path / "archive.tar.gz")
    assert "| Adam on 9.2 million parameters | – | – | 2 ms | 3 µs | – |" in page.tables(figures)["measured"]
    assert "on a GPU (A GPU): 1 of 2 calls of 1 kernels are right, and 1 of 2 GPU tests passed." in page.what_has_run()
    (kept,) = (page.BENCHMARKS / "gpu-runs").iterdir()
    assert kept.name == "first-1-a-gpu-0123abc.json"
    assert json.loads(kept.read_text(encoding="utf-8"))["end_to_end"]["worst"] == {"b": 2e-8}
