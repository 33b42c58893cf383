"""Examples of other libraries: both sides start alike, quietly, in a temporary folder, and are compared."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import load, others

torch = pytest.importorskip("torch")

CASE = others.Case("torch", "GRU", 8, 40)


def example(case: others.Case, accelerate: others.Accelerate, settings: others.Settings) -> others.Side:
    """Return a model that draws its weights and data from every generator, prints, and writes a file."""
    model = accelerate(getattr(torch.nn, case.cell)(3, case.hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=random.random())

    def step() -> None:
        print("an epoch")
        Path("checkpoint").touch()
        x = torch.randn(case.length, 2, 3) + np.random.rand() + random.random()  # noqa: NPY002 - as libraries do
        optimizer.zero_grad()
        model(x)[0].sum().backward()
        optimizer.step()

    return others.Side("an epoch", step, lambda: model)


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any) -> dict[str, Any]:
    """Return the row of the case for the library that `make` stands for, printed as users see it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(others, "LIBRARIES", {"torch": make})
    monkeypatch.setitem(others.OTHERS.quick, "cases", (CASE,))
    return dict(load("others").run(tmp_path / "out", quick=True, threads=(1,), echo=lambda line: None)["rows"][0])


def test_both_sides_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    row = measured(monkeypatch, tmp_path, example)
    assert 0 <= row["difference"] < 1e-6 and row["share"] == 1 and row["task"] == "an epoch"
    assert row["package"] == f"torch {torch.__version__}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and capsys.readouterr().out == ""


def test_another_result_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(case: others.Case, accelerate: others.Accelerate, settings: others.Settings) -> others.Side:
        side = example(case, accelerate, settings)
        if "forward" in side.module().__dict__:  # accelerated
            side.module().bias_ih_l0.data += 1e-3
        return side

    row = measured(monkeypatch, tmp_path, wrong)
    assert row["error"].startswith("SparseBPError: torch, GRU(8): a parameter differs") and "ours" not in row
