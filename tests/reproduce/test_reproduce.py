"""Figures of the papers: runs, files, stored results and the documentation's pages."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

import benchmarks as bench
from papers import FIGURES, RUNS, find
from papers.claims import VERDICTS, Context, Found, Ours, Run, Statement, exact, read
from papers.page import main, pages
from papers.table import PAPERS
from sparsebp.core.errors import FileFormatError, MissingDependencyError, OptionError

MET = [
    "bppsa-fig1", "bppsa-fig3", "bppsa-table1", "bppsa-fig5", "bppsa-eq6", "bppsa-s51", "bppsa-space",
    "bppsa-condition", "bppsa-eq8", "bppsa-eq9", "bppsa-eq11", "bppsa-table3", "bppsa-fig11", "preprint-fig8",
    "preprint-s5", "ooo-s8", "spectrain-fig6", "spectrain-fig8", "spectrain-eq5", "spectrain-alg1", "fusion-depth",
    "fusion-table1", "fusion-alg23",
]  # fmt: skip
"""Figures of which a quick run meets every statement."""
RUN = [
    *MET, "bppsa-fig7", "bppsa-fig9", "bppsa-fig12", "bppsa-s43", "bppsa-fig10", "preprint-kinematics", "ooo-alg1",
    "ooo-fig4", "ooo-fig5", "ooo-fig7-here", "ooo-fig9", "ooo-s83", "ooo-s84", "ooo-fig12", "spectrain-fig3",
    "spectrain-fig4", "spectrain-fig7", "spectrain-fig9", "spectrain-table1", "spectrain-fig13", "fusion-transformer",
]  # fmt: skip
ON_BENCHMARKS = [name for name, run in RUNS.items() if run.rests_on]
DOCS = Path(__file__).parents[2] / "docs"
STORED = sorted((DOCS / "papers").glob("*.json"))
MEASURED = [path for path in STORED if path.stem in RUNS and (RUNS[path.stem].measure or RUNS[path.stem].rests_on)]


def context(tmp_path, **options):
    return Context(**{"quick": True, "folder": tmp_path / "b", "measured": (), "echo": lambda line: None} | options)


def installed(run):
    packages = {"torch": "torch", "audio": "librosa", "data": "mlxtend", "mpi": "mpi4py"}
    return all(importlib.util.find_spec(packages[need]) for need in run.needs)


def changed(name, **options):
    """Return a figure whose run differs."""
    return dataclasses.replace(FIGURES[name], run=dataclasses.replace(RUNS[name], **options))


@pytest.mark.parametrize("name", RUN)
def test_what_runs_by_itself_leaves_a_row_for_every_statement(name, tmp_path):
    figure = FIGURES[name]
    if not installed(figure.run):
        pytest.skip("needs a package that is not installed")
    rows = figure.reproduce(context(tmp_path), tmp_path)["claims"]
    assert [row["key"] for row in rows] == [statement.key for statement in figure.statements]
    assert read(tmp_path / f"{name}.json")["claims"] == rows
    assert (tmp_path / f"{name}.png").exists() == (figure.run.draw is not None)
    assert all(row["verdict"] == "met" for row in rows) or name not in MET
    if figure.run.measure is not None:  # its measurements can be taken again
        given = context(tmp_path, measured=(tmp_path,))
        assert figure.reproduce(given, tmp_path / "again")["claims"] == rows
    else:
        stored = read(DOCS / "papers" / f"{name}.json")["claims"]
        assert [(row["key"], row["verdict"]) for row in rows] == [(row["key"], row["verdict"]) for row in stored]


@pytest.mark.parametrize("name", ON_BENCHMARKS)
def test_figures_read_the_results_that_benchmarks_leave(name, tmp_path):
    figure = FIGURES[name]
    assert figure.run.rests_on in bench.NAMES
    result = figure.reproduce(context(tmp_path, measured=(DOCS / "benchmarks",)), tmp_path)
    stored = json.loads((DOCS / "benchmarks" / f"{figure.run.rests_on}.json").read_text())
    assert result["environment"] == stored["environment"] and any(row["ours"] != "–" for row in result["claims"])
    assert not (tmp_path / "b").exists()  # nothing was measured


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_what_is_stored_is_judged_as_the_table_says(path, tmp_path):
    """Every row follows from the stored measurements, or from the benchmark's, and this version's table."""
    figure = FIGURES[path.stem]
    plain = dataclasses.replace(figure, run=dataclasses.replace(figure.run, draw=None))
    given = context(tmp_path, quick=False, measured=(DOCS / "benchmarks", DOCS / "papers"))
    found, stored = plain.reproduce(given, tmp_path), read(path)
    assert found["claims"] == stored["claims"] and found["data"] == stored["data"]


def test_every_figure_that_runs_has_its_result():
    assert {path.stem for path in STORED} == RUNS.keys()
    assert {path.stem for path in (DOCS / "papers").glob("*.png")} == {name for name, run in RUNS.items() if run.draw}


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
    return context(tmp_path, quick=False, measured=(tmp_path,))


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


def test_a_quick_benchmark_without_its_rows_leaves_statements_that_are_not_run(tmp_path):
    rows = [row for row in json.loads((DOCS / "benchmarks" / "fusion.json").read_text())["rows"] if row["batch"] == 1]
    given = changed_benchmark(tmp_path, "fusion", quick=True, rows=rows)
    found = FIGURES["fusion-fig3"].reproduce(given, tmp_path / "out")["claims"]
    assert {row["verdict"] for row in found} == {"not run"}


@pytest.mark.filterwarnings("error")
def test_learning_curves_are_drawn_where_every_run_diverged():
    pytest.importorskip("matplotlib")
    assert RUNS["spectrain-fig12"].draw({"steps": 1, "curves": {"vanilla, moderate": [[1.0]]}})


def test_what_cannot_be_drawn_is_said_and_leaves_no_result(tmp_path):
    pytest.importorskip("matplotlib")
    ragged = changed("spectrain-fig10", show=lambda result: Found({}, {"rows": [{}]}))
    given = context(tmp_path, quick=False, measured=(DOCS / "benchmarks",))
    with pytest.raises(FileFormatError, match="spectrain-fig10"):
        ragged.reproduce(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_table_and_the_runs_belong_together():
    assert not RUNS.keys() - FIGURES.keys()
    for name, figure in FIGURES.items():
        keys = [statement.key for statement in figure.statements]
        assert figure.name == name and name.startswith(figure.paper.name.lower()) and figure.states and figure.source
        assert keys and len(set(keys)) == len(keys) and (figure.kind == "elsewhere") == (figure.run is None)
        assert all(statement.what and statement.paper for statement in figure.statements)


def test_an_unknown_figure_is_refused():
    with pytest.raises(OptionError, match="ooo-fig9") as refused:
        find("ooo-fig99")
    assert len(str(refused.value)) < 250
    with pytest.raises(OptionError, match="no such figure"):
        find(3)


def test_the_pages_show_misses_and_what_was_not_run(tmp_path):
    shown = dataclasses.replace(
        FIGURES["bppsa-fig1"], statements=(Statement("a", "a | b", "2", exact(2), "why not"),),
        run=Run(lambda raw: Found({"a": Ours(1, other="3 by BP")})),
    )  # fmt: skip
    shown.reproduce(context(tmp_path, quick=False), tmp_path)
    written = pages(tmp_path)
    text = "".join(written.values())
    assert r"| a \| b | 2 | equal | 1 | **missed** | 3 by BP | why not |" in text
    assert "| [BPPSA](bppsa.md) |" in written["index.md"] and "Not run yet." in text
    for figure in FIGURES.values():
        assert figure.states in text
        assert f"#{figure.name})" in written["index.md"] and f"{{ #{figure.name} }}" in text
    for paper in PAPERS.values():
        assert written["index.md"].count(f"“{paper.title}”") == 1 and paper.number.split(":")[1] in written["index.md"]


def test_quick_results_are_not_on_the_pages(tmp_path):
    FIGURES["ooo-fig12"].reproduce(context(tmp_path), tmp_path)
    assert not any("83 / 51 units" in text for text in pages(tmp_path).values())


def test_the_index_has_a_line_for_each_figure_paper_ours_verdict_algorithm():
    lines = (DOCS / "papers" / "index.md").read_text(encoding="utf-8").splitlines()
    for name, figure in FIGURES.items():
        (line,) = [line for line in lines if f"#{name})" in line]
        first = figure.statements[0]
        assert f"| {first.paper} |" in line and any(verdict in line for verdict in VERDICTS)


def test_the_documentations_pages_are_those_of_the_results():
    assert main([str(DOCS / "papers"), "--check"]) == 0


@pytest.mark.parametrize("content", [b"", b"[]", b'{"figure": 1}', b"\xff"])
def test_what_is_no_result_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FileFormatError, match="no result of python -m papers"):
        read(tmp_path / "x.json")


def test_without_matplotlib_there_is_a_result_and_no_picture(tmp_path):
    def no_matplotlib(data):
        raise MissingDependencyError("none", remedy="install it")

    said = []
    figure = changed("ooo-fig12", draw=no_matplotlib)
    figure.reproduce(context(tmp_path, echo=said.append), tmp_path)
    assert (tmp_path / "ooo-fig12.json").exists() and "No picture" in said[0]
