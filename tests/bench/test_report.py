"""Numbers as text, tables, JSON and its errors, pictures, the record of the environment."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import harness
from benchmarks import harness as environment_module
from benchmarks.harness import Benchmark, Run, available_memory, environment, total_memory
from sparsebp.core import tables
from sparsebp.core.errors import FileFormatError, OptionError, OutputError

COLUMNS = (
    tables.Column("model", "model", number=False),
    tables.Column("time", "ours", tables.seconds),
    tables.Column("ratio", "ratio", tables.times),
)
ROWS = [
    {"model": "RNN", "ours": {"median": 0.00123}, "ratio": {"median": 12.34, "low": 11.9, "high": 12.8}},
    {"model": "GRU", "ours": 2.0},
]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2.00 s"), (0.0123, "12.3 ms"), (123e-6, "123 µs"), (5e-9, "5 ns"), ({"median": 1e-3}, "1.00 ms")],
)
def test_seconds(value: Any, text: str) -> None:
    assert tables.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (2048, "2.00 KiB"), (768 << 20, "768 MiB")])
def test_sizes(value: int, text: str) -> None:
    assert tables.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12.0"), (1500, "1.50 k"), (7.7e9, "7.70 G"), (2e13, "20.0 T")])
def test_counts(value: float, text: str) -> None:
    assert tables.count(value) == text


def test_ratios_show_their_spread() -> None:
    assert tables.times(ROWS[0]["ratio"]) == "12.3× (11.9–12.8)"
    assert tables.times(0.5) == "0.500×"


def test_tables() -> None:
    assert tables.markdown_table(COLUMNS, ROWS).splitlines() == [
        "| model | time | ratio |",
        "| --- | ---: | ---: |",
        "| RNN | 1.23 ms | 12.3× (11.9–12.8) |",
        "| GRU | 2.00 s | – |",
    ]
    assert tables.text_table(COLUMNS, ROWS).splitlines() == [
        "model     time              ratio",
        "RNN    1.23 ms  12.3× (11.9–12.8)",
        "GRU     2.00 s                  –",
    ]


@given(
    width=st.integers(1, 90),
    headings=st.lists(
        st.sampled_from(["a", "peak memory", "per micro-batch", "micro-batches"]), min_size=1, max_size=6
    ),
    cells=st.lists(st.lists(st.sampled_from(["1", "two words", "12.5%"]), min_size=6, max_size=6), max_size=3),
)
def test_a_table_in_any_width_shows_every_cell(width: int, headings: list[str], cells: list[list[str]]) -> None:
    columns = [tables.Column(heading, str(i), number=i > 0) for i, heading in enumerate(headings)]
    rows = [dict(zip(map(str, range(len(headings))), row, strict=False)) for row in cells]
    whole, text = tables.text_table(columns, rows), tables.text_table(columns, rows, width)
    if max(map(len, whole.splitlines())) <= width:
        assert text == whole
        return
    assert max(map(len, text.splitlines())) <= max(width, 9 + 1 + 9)  # the first column and one more
    parts = [part.splitlines() for part in text.split("\n\n")]
    for number, row in enumerate(rows, 1):  # the last lines of every part are the rows
        shown = [part[number - 1 - len(rows)] for part in parts]
        assert all(line.startswith(row["0"]) for line in shown)
        others = " ".join(line[len(row["0"]) :] for line in shown)
        assert others.split() == " ".join(list(row.values())[1:]).split()
    heads = " ".join(line for part in parts for line in part[: len(part) - len(rows)]).split()
    assert Counter("".join(heads)) >= Counter("".join(headings).replace(" ", ""))


def test_a_result_is_saved_whole_and_read_back(tmp_path: Path) -> None:
    result = {"benchmark": "recurrent", "title": "A title", "quick": True, "settings": {"batch": 16}, "rows": ROWS}
    result |= {"leaves_out": "nothing", "environment": environment(), "notes": []}
    path = harness.save_result(result, tmp_path / "new" / "folder")
    assert path.name == "recurrent.json"
    assert harness.load_result(path) == json.loads(json.dumps(result))
    assert [p.name for p in path.parent.iterdir()] == ["recurrent.json"], "no temporary file may stay behind"
    assert harness.where(result).startswith(result["environment"]["cpu"])


@pytest.mark.parametrize("content", [b"not json", b"[1, 2]", b'{"benchmark": "x"}', b"\xff\xfe"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="benchmark result"):
        harness.load_result(path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="cannot be written"):
        harness.save_result({"benchmark": "recurrent"}, tmp_path / "file" / "folder")


def measure(run: Run) -> Iterator[dict[str, Any]]:
    for text in ("a peer is missing", "a peer is missing"):
        run.note(text)
    yield from ROWS


def picture(_: Any) -> Any:
    drawing, axes = harness.figure()
    axes[0, 0].plot([1, 2])
    return drawing


BENCHMARK = Benchmark(
    name="recurrent", title="A batch of {batch}", leaves_out="nothing", measure=measure, columns=COLUMNS,
    short=("model", "ratio"), picture=picture, threads=None,
    settings={"seed": 1}, sizes={"batch": 16}, quick={"batch": 2},
)  # fmt: skip


def test_a_run_writes_json_and_picture_and_prints_the_table_last(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines: list[str] = []
    result = BENCHMARK.run(tmp_path, quick=True, echo=lines.append)
    assert (result["title"], result["settings"]) == ("A batch of 2", {"seed": 1, "batch": 2})
    assert harness.load_result(tmp_path / "recurrent.json") == json.loads(json.dumps(result))
    assert (tmp_path / "recurrent.png").read_bytes().startswith(b"\x89PNG")
    assert lines[:2] == ["model RNN; ratio 12.3× (11.9–12.8)", "model GRU; ratio –"]
    assert lines.count("note: a peer is missing") == 1
    assert lines[-1] == tables.text_table(BENCHMARK.named(("model", "ratio", "ours")), ROWS)


def test_the_newest_result_of_every_maker_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cpu: str, *, quick: bool = False) -> dict[str, str]:
        monkeypatch.setattr(harness, "cpu_model", lambda: cpu)
        BENCHMARK.run(tmp_path, quick=quick, echo=lambda line: None)
        found = {path.stem: harness.load_result(path) for path in tmp_path.glob("*.json")}
        return {stem: result["environment"]["cpu"] for stem, result in found.items()}

    assert run("AMD EPYC") == {"recurrent": "AMD EPYC"}
    assert run("AMD Ryzen") == {"recurrent": "AMD Ryzen"}
    assert run("Intel(R) Xeon") == {"recurrent": "Intel(R) Xeon", "recurrent-amd": "AMD Ryzen"}
    assert run("AMD EPYC") == {"recurrent": "AMD EPYC", "recurrent-intel": "Intel(R) Xeon"}
    assert run("Intel(R) Core", quick=True) == {"recurrent": "Intel(R) Core", "recurrent-intel": "Intel(R) Xeon"}


def test_rows_are_kept_as_they_come_and_a_run_that_is_broken_off_leaves_them(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []

    def breaks_off(run: Run) -> Iterator[dict[str, Any]]:
        for row in measure(run):
            yield row
            kept.append(harness.load_result(tmp_path / "recurrent.partial.json"))
        raise KeyboardInterrupt

    before = harness.save_result({"benchmark": "recurrent"}, tmp_path).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        replace(BENCHMARK, measure=breaks_off).run(tmp_path, quick=True, echo=lambda line: None)
    assert [len(result["rows"]) for result in kept] == [1, 2]
    assert not any(result["complete"] for result in kept)
    assert (tmp_path / "recurrent.json").read_bytes() == before
    BENCHMARK.run(tmp_path, quick=True, echo=lambda line: None)
    assert harness.load_result(tmp_path / "recurrent.json")["complete"]
    assert not (tmp_path / "recurrent.partial.json").exists()


def test_rows_that_could_not_be_measured_are_in_no_table_and_no_picture(tmp_path: Path) -> None:
    drawn: list[Any] = []
    lines: list[str] = []
    result = replace(
        BENCHMARK,
        measure=lambda run: iter([ROWS[0], {"model": "LSTM", "error": "ValueError: no such cell"}]),
        picture=lambda result: drawn.append(result["rows"]) or picture(result),
    ).run(tmp_path, echo=lines.append)
    assert result["rows"][1]["error"] and drawn == [ROWS[:1]]
    assert "model LSTM: ValueError: no such cell" in lines
    assert lines[-1] == tables.text_table(BENCHMARK.named(("model", "ratio", "ours")), ROWS[:1])


def test_seconds_that_a_benchmark_does_not_count_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="takes the time that it takes"):
        BENCHMARK.run(tmp_path, seconds=5)


def test_threads_that_a_benchmark_does_not_vary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not vary threads"):
        BENCHMARK.run(tmp_path, threads=(1,))


def test_the_environment_names_what_was_measured_on() -> None:
    record = environment()
    assert {"date", "commit", "cpu", "cores", "python", "sparsebp", "packages", "blas"} <= record.keys()
    assert "numpy" in record["packages"]
    json.dumps(record)
    total, free = total_memory(), available_memory()
    assert total is None or free is None or 0 < free <= total


def test_an_installed_copy_does_not_take_the_commit_of_the_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    if shutil.which("git") is None:
        pytest.skip("needs git")
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "other"], check=True)
    package = tmp_path / "lib" / "benchmarks"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.delenv("SPARSEBP_COMMIT", raising=False)
    monkeypatch.setattr(environment_module, "__file__", str(package / "harness.py"))
    assert environment_module.commit() == "unknown"
    subprocess.run([*git, "add", "."], check=True)
    assert environment_module.commit() != "unknown"
    monkeypatch.setenv("SPARSEBP_COMMIT", "0123abc")  # a copy with the history of another commit
    assert environment_module.commit() == "0123abc"
