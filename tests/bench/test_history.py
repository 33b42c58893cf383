"""The benchmarks of ``asv``: found where its configuration says, and every one of them runs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from benchmarks.history import steps

ROOT = Path(__file__).resolve().parents[2]
CLASSES = [kind for _, kind in inspect.getmembers(steps, inspect.isclass) if kind.__module__ == steps.__name__]


def test_the_configuration_names_the_folder_of_the_benchmarks() -> None:
    chosen = json.loads((ROOT / "asv.conf.json").read_text(encoding="utf-8"))
    assert ROOT / chosen["benchmark_dir"] == Path(steps.__file__).parent
    assert [kind.__name__ for kind in CLASSES] == ["Chain", "ConvolutionalStep", "RecurrentStep", "SparseProduct"]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_benchmark_runs(kind: type) -> None:
    timed = [name for name in dir(kind) if name.startswith("time_")]
    cases = getattr(kind, "params", ())
    assert timed and all(isinstance(case, str) for case in cases)  # a tuple would be another parameter's values
    benchmark, case = kind(), cases[:1]
    benchmark.setup(*case)
    for name in timed:
        getattr(benchmark, name)(*case)
    if kind is steps.SparseProduct:
        pair, pattern = benchmark.pair, benchmark.plan.pattern
        assert_allclose(pattern.to_scipy(benchmark.out).toarray(), (pair.a @ pair.b).toarray(), rtol=1e-3, atol=1e-3)
