"""Figures of the papers: claims, files, the command and the documentation page."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

import benchmarks as bench
from papers import FIGURES, find
from papers.figure import PAPERS, Claim, Context, Figure, Found, at_least, read
from papers.page import main, pages
from sparsebp.core.errors import FileFormatError, OptionError

MET = [
    "bppsa-fig1", "bppsa-fig3", "bppsa-table1", "bppsa-eq6", "bppsa-fig5", "bppsa-eq8", "bppsa-eq11", "bppsa-table3",
    "bppsa-fig7", "bppsa-space", "bppsa-condition", "bppsa-fig11", "preprint-fig8", "preprint-kinematics",
    "preprint-monte-carlo", "ooo-fig5", "spectrain-fig6", "spectrain-fig8", "spectrain-eq5", "fusion-depth",
    "fusion-table1",
]  # fmt: skip
"""Figures of which a quick run meets every statement that it decides without timing or training."""
UNDECIDED = ("time", "measured", "training loss", "Lemma 4")
RUN = [
    *MET, "ooo-fig7-here", "ooo-fig9", "ooo-s83", "ooo-s84", "ooo-fig12", "spectrain-fig3", "spectrain-fig4",
    "spectrain-fig7", "spectrain-fig9", "spectrain-table1", "spectrain-fig13", "fusion-transformer",
]  # fmt: skip
ON_BENCHMARKS = [name for name, figure in FIGURES.items() if figure.rests_on]
DOCS = Path(__file__).parents[2] / "docs"


def context(tmp_path, **options):
    return Context(**{"quick": True, "folder": tmp_path / "b", "measured": None, "echo": lambda line: None} | options)


def installed(figure):
    packages = {"torch": "torch", "audio": "librosa", "data": "mlxtend", "mpi": "mpi4py"}
    return all(importlib.util.find_spec(packages[need]) for need in figure.needs)


@pytest.mark.parametrize("name", RUN)
def test_what_runs_by_itself_says_what_ran_and_why_it_is_missed(name, tmp_path):
    figure = FIGURES[name]
    if not installed(figure):
        pytest.skip("needs a package that is not installed")
    claims = figure.reproduce(context(tmp_path), tmp_path)["claims"]
    assert claims and read(tmp_path / f"{name}.json")["claims"] == claims
    assert (tmp_path / f"{name}.png").exists() == (figure.draw is not None)
    for claim in claims:
        assert claim["met"] or claim["why"]
        assert claim["ran"] or figure.kind not in ("measured", "executed")
        assert not (claim["met"] and claim["why"]) or figure.kind not in ("exact", "simulated")
        if name in MET and not any(word in claim["what"] for word in UNDECIDED):
            assert claim["met"] or claim["paper"] == "not stated"


def test_nothing_is_decided_from_durations_that_were_chosen(tmp_path):
    claims = FIGURES["ooo-fig4"].reproduce(context(tmp_path), tmp_path)["claims"]
    assert all(claim["ours"] == claim["paper"] and claim["met"] is None for claim in claims)


@pytest.mark.parametrize("name", ON_BENCHMARKS)
def test_figures_read_the_results_that_benchmarks_leave(name, tmp_path):
    figure = FIGURES[name]
    assert figure.rests_on in bench.NAMES
    measured = DOCS / "benchmarks"
    result = figure.reproduce(context(tmp_path, measured=measured), tmp_path)
    assert result["claims"] and all(claim["paper"] and claim["ours"] for claim in result["claims"])
    assert result["environment"] == json.loads((measured / f"{figure.rests_on}.json").read_text())["environment"]
    assert not (tmp_path / "b").exists()  # nothing was measured


def test_a_benchmark_is_run_once_for_all_figures_that_rest_on_it(tmp_path, monkeypatch):
    runs = []

    class Fake:
        def run(self, out, *, quick, echo):
            runs.append((out, quick))
            return {"rows": [], "environment": {}}

    monkeypatch.setattr(bench, "load", lambda name: Fake())
    shared = context(tmp_path)
    assert shared.benchmark("fusion") is shared.benchmark("fusion")
    assert runs == [(tmp_path / "b", True)]


def changed_benchmark(tmp_path, name, **changes):
    result = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text()) | changes
    (tmp_path / f"{name}.json").write_text(json.dumps(result))
    return context(tmp_path, quick=False, measured=tmp_path)


def test_a_figure_of_a_quick_benchmark_is_quick(tmp_path):
    given = changed_benchmark(tmp_path, "schedule", quick=True)
    assert FIGURES["ooo-fig7"].reproduce(given, tmp_path / "out")["quick"]


@pytest.mark.parametrize(
    "changes", [{"complete": False}, {"benchmark": "fusion"}, {"rows": [{"error": "none"}]}, {"rows": [1]}]
)
def test_what_a_benchmark_left_unfinished_is_no_figure(changes, tmp_path):
    given = changed_benchmark(tmp_path, "schedule", **changes)
    with pytest.raises(FileFormatError, match="schedule"):
        FIGURES["ooo-fig7"].reproduce(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "row"), [("bppsa-table1-time", 1), ("fusion-fig3", {"network": None})])
def test_rows_of_another_kind_are_said(name, row, tmp_path):
    given = changed_benchmark(tmp_path, FIGURES[name].rests_on, rows=[row])
    with pytest.raises(FileFormatError, match=name):
        FIGURES[name].reproduce(given, tmp_path / "out")


def test_a_quick_result_without_its_rows_says_so_and_a_whole_one_is_refused(tmp_path):
    rows = [row for row in json.loads((DOCS / "benchmarks" / "fusion.json").read_text())["rows"] if row["batch"] == 1]
    figure = FIGURES["fusion-fig3"]
    given = changed_benchmark(tmp_path, "fusion", quick=True, rows=rows)
    (said,) = figure.reproduce(given, tmp_path / "out")["claims"]
    assert said["ours"] == "not measured" and said["met"] is None and "quick" in said["why"]
    with pytest.raises(FileFormatError, match="no row"):
        figure.reproduce(changed_benchmark(tmp_path, "fusion", rows=rows), tmp_path / "whole")


@pytest.mark.filterwarnings("error")
def test_learning_curves_are_drawn_where_every_run_diverged():
    pytest.importorskip("matplotlib")
    assert FIGURES["spectrain-fig12"].draw({"steps": 1, "curves": {"vanilla, moderate": [[1.0]]}})


def test_what_cannot_be_drawn_is_said_and_leaves_no_result(tmp_path):
    pytest.importorskip("matplotlib")
    ragged = dataclasses.replace(FIGURES["spectrain-fig10"], shows=lambda result: Found((), {"rows": [{}]}))
    given = Context(True, tmp_path / "b", DOCS / "benchmarks", lambda line: None)
    with pytest.raises(FileFormatError, match="spectrain-fig10"):
        ragged.reproduce(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_figure_says_what_it_is():
    for name, figure in FIGURES.items():
        assert figure.name == name and figure.paper in PAPERS and figure.states and figure.source
        assert (not figure.here) == (figure.kind == "elsewhere") == bool(figure.why)
        assert "TODO" not in figure.states


def test_a_missed_claim_says_why_and_a_met_one_does_not():
    assert at_least("x", 2.0, 1.5, why="slow") == Claim("x", "2×", "1.5×", False, "slow")
    assert at_least("x", 2.0, 2.0, why="slow") == Claim("x", "2×", "2×", True, "")


@pytest.mark.parametrize("path", sorted((DOCS / "papers").glob("*.json")), ids=lambda path: path.stem)
def test_what_the_page_calls_missed_says_why(path):
    claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
    assert claims and all(claim["met"] or claim["why"] for claim in claims)


def test_an_unknown_figure_is_refused():
    with pytest.raises(OptionError, match="ooo-fig9") as refused:
        find("ooo-fig99")
    assert len(str(refused.value)) < 250
    with pytest.raises(OptionError, match="no such figure"):
        find(3)


def test_the_page_shows_misses_and_what_was_not_run(tmp_path):
    shown = "bppsa-fig1"
    missed = dataclasses.replace(
        FIGURES[shown], draw=None, run=lambda given: Found((Claim("a | b", "2", "1", False, "why not"),))
    )
    missed.reproduce(context(tmp_path, quick=False), tmp_path)
    written = pages(tmp_path)
    text = "".join(written.values())
    assert r"| a \| b | 2 | 1 | **missed** | why not |" in text
    assert "| [BPPSA](bppsa.md) |" in written["index.md"] and "Not run yet." in text
    for figure in FIGURES.values():
        assert figure.states in text
        assert figure.here or figure.why in text
        assert f"#{figure.name})" in written["index.md"] and f"{{ #{figure.name} }}" in text


def test_quick_results_are_not_on_the_page(tmp_path):
    FIGURES["ooo-fig4"].reproduce(context(tmp_path), tmp_path)
    assert not any("units saved" in text for text in pages(tmp_path).values())


def test_a_page_of_many_statements_shows_those_that_are_not_met_first(tmp_path):
    claims = tuple(Claim(f"claim {i}", "1", "1", i < 8 or None, "" if i < 8 else "open here") for i in range(10))
    dataclasses.replace(FIGURES["bppsa-fig1"], draw=None, run=lambda given: Found(claims)).reproduce(
        context(tmp_path, quick=False), tmp_path
    )
    text = pages(tmp_path)["bppsa.md"]
    assert "8 met, 2 open ([all](bppsa-fig1.json))" in text
    shown = [number for number in range(10) if f"| claim {number} |" in text]
    assert shown == [0, 8, 9] and text.index("claim 9") < text.index("claim 0")


def test_the_documentations_pages_are_those_of_the_results():
    assert main([str(DOCS / "papers"), "--check"]) == 0
    for path in (DOCS / "papers").glob("*.md"):
        assert len(path.read_text(encoding="utf-8").replace("|", "").split()) <= 3000, path


@pytest.mark.parametrize("content", [b"", b"[]", b'{"figure": 1}', b"\xff"])
def test_what_is_no_result_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FileFormatError, match="no result of python -m papers"):
        read(tmp_path / "x.json")


def test_without_matplotlib_there_is_a_result_and_no_picture(tmp_path):
    from sparsebp.core.errors import MissingDependencyError

    def no_matplotlib(data):
        raise MissingDependencyError("none", remedy="install it")

    said = []
    figure = Figure("ooo-x", "Fig. 0", "exact", "s", draw=no_matplotlib, run=lambda given: Found(()))
    figure.reproduce(context(tmp_path, echo=said.append), tmp_path)
    assert (tmp_path / "ooo-x.json").exists() and "No picture" in said[0]
