"""``python -m benchmarks``: options, several benchmarks, and what is refused."""

import json
from functools import partial

import pytest

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)

from benchmarks.command import app
from commands import Calls, one_message, run

invoke = partial(run, app)


def test_bench_forwards_its_options(tmp_path, monkeypatch):
    from benchmarks.harness import Benchmark

    def fake(self, out=None, *, quick=False, threads=None, seconds=None, echo=print):
        echo("a table")
        return {"name": self.name, "out": str(out), "quick": quick, "rows": []}

    refused = invoke("convergence", "--threads", 1)
    assert "threads" in one_message(refused, code=2)
    monkeypatch.setattr(Benchmark, "run", fake)
    assert invoke("spgemm", "--out", tmp_path, "--quick").stdout == "a table\n"
    result = json.loads(invoke("spgemm", "--out", tmp_path, "--quick", "--json").stdout)
    assert (result["name"], result["out"], result["quick"]) == ("spgemm", str(tmp_path), True)


def test_bench_of_several(tmp_path, monkeypatch):
    from benchmarks import NAMES, others, processes
    from sparsebp.core import backend

    asked = []

    def fake(names, out, *, quick, json, told):
        asked.append((list(names), out, quick, json))
        for number in range(len(names)):
            told(number, 90.0)
        return [processes.Outcome(names[0], "done", 61, 3, ("a row",)), processes.Outcome(names[-1], "failed", 1)]

    monkeypatch.setattr(processes, "run_series", fake)
    monkeypatch.setattr(backend, "has_gpu", lambda: False)
    monkeypatch.setattr(others, "installed", set)
    result = invoke("all", "--out", tmp_path, "--quick")
    possible = [name for name in NAMES if not name.startswith(("gpu", "others"))]
    assert result.exit_code == 1 and asked == [(possible, tmp_path, True, False)]
    assert "left out: others, others-speech (no library of theirs is installed: recbole, lightning" in result.stdout
    assert "left out: gpu-numbers, gpu-grid, gpu-graphs, gpu-peers" in result.stdout and "a row" in result.stdout
    assert f"1 of {len(asked[0][0])}: recurrent (0 s so far, 90 s the last time)" in result.stdout
    result = invoke("scan", "scan", "torch", "--json")
    assert asked[-1] == (["scan", "torch"], None, False, True) and result.exit_code == 1
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == ["begin", "begin", "summary"]
    assert "--threads" in one_message(invoke("scan", "torch", "--threads", 1), code=2)


def test_bench(monkeypatch, tmp_path):
    from benchmarks.harness import Benchmark

    calls = Calls({"rows": []})
    monkeypatch.setattr(Benchmark, "run", calls)
    invoke("recurrent", "--out", tmp_path, "--threads", 2, "--threads", 1)
    invoke("recurrent", "--quick")
    invoke("gpu-grid", "--seconds", 60)
    assert calls == [
        ((tmp_path,), {"quick": False, "threads": (2, 1), "seconds": None}),
        ((None,), {"quick": True, "threads": None, "seconds": None}),
        ((None,), {"quick": False, "threads": None, "seconds": 60.0}),
    ]


@pytest.mark.parametrize("arguments", [["nothing"], ["spgemm", "--threads", 0], ["x"]])
def test_wrong_usage_exits_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


def test_an_empty_out_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "Error: --out is empty." in one_message(invoke("spgemm", "--quick", "--out", ""))
    assert list(tmp_path.iterdir()) == []
