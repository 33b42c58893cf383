"""The runs on a GPU from end to end on the stand-in for CuPy, at tiny sizes, and with failing kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import gpu_peers, harness, load
from gpu_runs import cases, runs
from gpu_runs.carried import ROOT
from gpu_runs.machine_code import sets
from nvrtc.sources import SOURCES, kernels_of

STANDIN = ROOT / "tests" / "gpu_runs" / "standin"
TOOLS = {
    "git": "exit 128",
    "compute-sanitizer": """
while [ $# -gt 0 ]; do case $1 in
  --log-file) echo "ERROR SUMMARY: 0 errors" >"$2"; shift 2;;
  --tool|--target-processes|--error-exitcode|--print-limit) shift 2;;
  *) break;;
esac; done
"$@" && echo "========= ERROR SUMMARY: 0 errors" """,
    "ncu": """
while [ $# -gt 0 ]; do case $1 in
  --log-file) echo "Section: GPU Speed Of Light Throughput" >"$2"; shift 2;;
  --import) [ -s "$2" ] || exit 3; shift 2;;
  --cache-control) [ "$2" = none ] || exit 4; warm=1; shift 2;;
  -o) report=$2; shift 2;;
  --clock-control|--kernel-name|--section) shift 2;;
  *) break;;
esac; done
[ -z "$report" ] && exit 0
[ -n "$warm" ] || exit 5
echo report >"$report"; exec "$@" """,
}
"""Programs that take the place of others: they look at nothing, but run what they are given."""


def machine(folder: Path) -> dict[str, str]:
    """Return the environment of a machine with a stand-in for CuPy, an empty $OUT, and no git history."""
    for name, text in TOOLS.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    (folder / "out").mkdir()
    path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path, "PYTHONPATH": str(STANDIN), "OUT": str(folder / "out"), "SPARSEBP_COMMIT": "0123abc",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1",  # other tests run beside it
    }  # fmt: skip


@pytest.fixture
def there(tmp_path: Path) -> dict[str, str]:
    """A machine of this test alone."""
    return machine(tmp_path)


def results(there: dict[str, str]) -> Path:
    """Return the folder of the results, of which $OUT gets an archive."""
    return Path(there["OUT"]).with_name("results")


def run(name: str, there: dict[str, str]) -> tuple[int, list[str], dict[str, Any]]:
    """Return exit status, output and the outcome of each stage."""
    command = [sys.executable, "tests/gpu_runs", name, "--quick", "--seconds", "600", "--out", str(results(there))]
    done = subprocess.run(
        command, cwd=ROOT, env=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    summary = json.loads((results(there) / f"summary-{name}.json").read_text(encoding="utf-8"))
    assert summary["complete"] and summary["commit"] == "0123abc"
    return done.returncode, done.stdout.splitlines(), {stage["stage"]: stage for stage in summary["stages"]}


def result_of(name: str, there: dict[str, str]) -> dict[str, Any]:
    """Return the result that a benchmark has left in $OUT, with its picture, and with nothing partial."""
    out = results(there)
    (path,) = out.glob(f"{name}-*.json")
    assert path.stem == f"{name}-stand-in-for-an-h200-0123abc"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    result = harness.load_result(path)
    assert result["complete"] and result["benchmark"] == name
    return result


def comes_back(there: dict[str, str], name: str) -> bool:
    """Say whether $OUT has one archive with all results: a machine gives back eight files, of 16 MiB at most."""
    (archive,) = Path(there["OUT"]).iterdir()
    with tarfile.open(archive) as packed:
        inside = set(packed.getnames())
    return archive.name == f"gpu-{name}.tar.gz" and inside == {
        file.name for file in results(there).iterdir() if file.is_file()
    }


class Ran(NamedTuple):
    """Two runs, one after the other."""

    there: dict[str, str]
    stages: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The second run finds another machine, and the results of the first; there a kernel of products breaks it."""
    pytest.importorskip("torch")
    there = machine(tmp_path_factory.mktemp("first"))
    stages: dict[str, dict[str, Any]] = {}
    for name, fault, last in (("check", "", "ALL WELL"), ("first-2", "sticky:spgemm_pairs", "NOT WELL: gpu-numbers")):
        status, lines, found = run(name, there | {"STANDIN_FAULT": fault})
        assert status == int(bool(fault)) and last in lines, "\n".join(lines)
        assert found.keys() == runs.RUNS[name].keys()
        failed = {stage for stage, each in found.items() if each["outcome"] != "passed"}
        assert failed == ({"gpu-numbers"} if fault else set())
        stages |= found
        assert comes_back(there, name)
        next(Path(there["OUT"]).iterdir()).unlink()
    return Ran(there, stages)


def test_check(ran: Ran) -> None:
    assert ran.stages["tests"]["said"] == ran.stages["end to end"]["said"] == ["2 passed, 0 failed, 0 skipped"]
    assert ", 0 wrong, compared with " in ran.stages["launches"]["said"][-1]
    out = results(ran.there)
    rows = runs.rows_of(out / "check-launches.jsonl")
    assert {row["kernel"] for row in rows} == {"clamp_arrays", "gather"} and not [row for row in rows if "error" in row]
    for tool in ("memcheck", "racecheck"):
        assert "ERROR SUMMARY: 0 errors" in ran.stages[tool]["said"][0] and (out / f"check-{tool}.txt").exists()


def test_numbers(ran: Ran) -> None:
    """A kernel that breaks the device costs its own points, and is told."""
    rows = result_of("gpu-numbers", ran.there)["rows"]
    wanted = ["forward", "input", "backward", "summed", "phases", "weights", "python", "captured", "cudnn", "scan"]
    assert {row["what"] for row in rows} == {*wanted, "derivative", "flashrnn", "spgemm"}
    wrong = [row for row in rows if "error" in row]
    assert {row["what"] for row in wrong} == {"spgemm"} and len(wrong) == sum(row["what"] == "spgemm" for row in rows)
    assert all("CUDARuntimeError" in row["error"] for row in wrong)
    assert f"{len(rows) - len(wrong)} rows measured, {len(wrong)} not" in ran.stages["gpu-numbers"]["said"][0]
    assert all(row["time"]["queued"] for row in rows if row["what"] in ("forward", "backward", "summed", "scan"))
    assert all({"host", "hertz", "all"} <= row["time"].keys() for row in rows if row["what"] == "forward")
    (wide,) = (row for row in rows if row["what"] == "cudnn" and row["cell"] == "RNN")
    assert wide["torch_kernels"] and {"forward_ratio", "backward_ratio", "backward_tf32_ratio"} <= wide.keys()
    held = [row for row in rows if row["what"] == "phases" and row["rows_a_lane"] == 2]
    assert {row["cell"] for row in held} == {"RNN", "GRU"}
    assert all(any("reduce" in name for name in row["launches"]) for row in held)
    assert ran.stages["ncu"]["said"] == ["1 launches profiled"]


def test_peers(ran: Ran) -> None:
    result = result_of("gpu-peers", ran.there)
    rows, sizes = result["rows"], load("gpu-peers").sizes
    assert {row["what"] for row in rows} == {point.what for point in gpu_peers.points({**result["settings"], **sizes})}
    assert not [row for row in rows if "error" in row or "failed" in row] and result["notes"] == []
    on_gpu = [row["ours"] for row in rows if row["what"] in ("accelerate", "recurrence", "adam")]
    assert on_gpu and all({"host", "hertz", "queued"} <= side.keys() for side in on_gpu)


def test_grid(ran: Ran) -> None:
    rows = result_of("gpu-grid", ran.there)["rows"]
    assert [row["model"] for row in rows] == ["RNN(1, 20)", "GRU(38, 20)"]
    assert all(row["gradient_difference"] < 1e-4 for row in rows)
    assert ran.stages["gpu-grid"]["said"][0].startswith("2 rows measured, 0 not: gpu-grid-")


def test_graphs(there: dict[str, str]) -> None:
    """And without Numba, which the machine's NumPy may be too new for."""
    pytest.importorskip("torch")
    status, lines, stages = run("graphs", there | {"STANDIN_FAULT": "numba"})
    assert status == 0 and stages["graph tests"]["said"] == ["2 passed, 0 failed, 0 skipped"], "\n".join(lines)
    rows = [row for row in result_of("gpu-graphs", there)["rows"] if row["network"] == "DenseNet"]
    assert [row["order"] for row in rows[-2:]] == ["one stream", "two streams"]
    assert all("captured" in row for row in rows)


def test_without_a_gpu_nothing_is_tried(there: dict[str, str]) -> None:
    if subprocess.run([sys.executable, "-c", "import cupy"], capture_output=True, check=False).returncode == 0:
        pytest.skip("CuPy is installed here")
    status, lines, stages = run("check", there | {"PYTHONPATH": ""})
    assert status == 1 and stages["versions"]["outcome"] == "failed"
    assert {stage["outcome"] for name, stage in stages.items() if name != "versions"} == {"left out"}
    assert "          no GPU answers CuPy: nothing can be run here" in lines


def test_every_source_and_every_kernel_is_in_the_first_run() -> None:
    compiled = sets()
    files = {file for file, _ in compiled}
    assert files == set(SOURCES)
    listed = [(file, defines) for file, sets_of in SOURCES.items() for defines in sets_of]
    assert all(one in compiled for one in listed)
    assert all(kernels_of(file) for file in files)
    called = [(case.kernel, case.key) for case in cases.every()]
    assert {kernel for kernel, _ in called} == set(cases.kernels()) == {case.kernel for case in cases.every(small=True)}
    assert len({key for _, key in called}) == len(called)


def test_what_differs_is_found() -> None:
    import numpy as np

    right = {"out": np.ones(3, np.float32), "index": np.arange(3)}
    assert cases.differences({"out": right["out"] * (1 + 5e-5), "index": right["index"]}, right) == []
    assert len(cases.differences({"out": right["out"] * 1.001, "index": right["index"]}, right)) == 1
    assert len(cases.differences({"out": right["out"] * np.nan, "index": right["index"] + 1}, right)) == 2
    assert cases.differences({"out": right["out"]}, right)
