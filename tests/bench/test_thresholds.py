"""Shipped thresholds come from a benchmark's rows, and are written where they are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks import thresholds
from sparsebp.core.errors import FileFormatError
from sparsebp.kernels.host.rnn import forward
from sparsebp.torch import rule

KEY = ("GRU", False, True, False, True)
OURS, TORCHS = (3e4, 20.0, 7.0, 0.5, 0.02, 0.01, 0.1, 2.0), (9e4, 9e3, 30.0, 0.9, 0.03, 0.0, 0.2, 0.0)


def row(rng: np.random.Generator) -> dict[str, Any]:
    """Return a row in which both sides take exactly what their costs say."""
    cell, in_float64, packed, trains, _ = KEY
    found = {"cell": cell, "in_float64": in_float64, "packed": packed, "trains": trains, "threads": 2}
    found |= {name: int(rng.integers(1, 100)) for name in thresholds.SIZES}
    terms = thresholds.sizes_of(found)[1].terms(rule.GATES[cell])
    ours, torchs = (float(np.dot(costs, terms)) * 1e-9 for costs in (OURS, TORCHS))
    return found | {"ours": {"median": ours}, "torch": {"median": torchs}, "torch_ratio": {"median": torchs / ours}}


def test_the_costs_are_fitted_from_times() -> None:
    rng = np.random.default_rng(0)
    table = thresholds.fitted([row(rng) for _ in range(60)])
    assert list(table) == [KEY]
    for found, wanted in zip(table[KEY], (OURS, TORCHS), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0.02, atol=1e-9)


def test_a_choice_is_told_with_its_share_of_the_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found = row(np.random.default_rng(0))
    ratio = found["torch_ratio"]["median"]
    assert ratio > 1
    monkeypatch.setitem(rule.COSTS, KEY, (OURS, TORCHS))
    assert thresholds.chosen(found) == {"way": "kernels", "of_best": 1.0}
    monkeypatch.setitem(rule.COSTS, KEY, (TORCHS, OURS))
    assert thresholds.chosen(found) == {"way": "torch.nn", "of_best": pytest.approx(1 / ratio)}


def test_the_table_is_written_as_it_stands() -> None:
    text = Path(rule.__file__).read_text(encoding="utf-8")
    assert thresholds.written(text, rule.COSTS) == text
    changed = thresholds.written(text, rule.COSTS | {KEY: (OURS, TORCHS)})
    new = [line.strip() for line in changed.splitlines() if line not in text.splitlines()]
    assert new == [f"{OURS!r},", f"{TORCHS!r},"]


def test_part_of_a_table_is_refused() -> None:
    text = Path(rule.__file__).read_text(encoding="utf-8")
    with pytest.raises(FileFormatError, match="1 of 48"):
        thresholds.written(text, {KEY: (OURS, TORCHS)})
    with pytest.raises(FileFormatError, match="COSTS"):
        thresholds.written("", rule.COSTS)


def test_the_work_that_is_worth_threads_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"work": 1_500_321, "wins": True}, {"work": 900_000, "wins": True}, {"work": 9_000_000, "wins": True},
            {"work": 5_000_000, "wins": False}]  # fmt: skip
    result, module = tmp_path / "sharing.json", tmp_path / "forward.py"
    of_a_run = dict.fromkeys(("title", "leaves_out"), "") | {
        "quick": False,
        "environment": {},
        "settings": {},
        "notes": [],
    }
    result.write_text(json.dumps(of_a_run | {"benchmark": "sharing", "rows": rows}))
    shutil.copy(str(forward.__file__), module)
    before = module.read_text(encoding="utf-8")
    monkeypatch.setattr(forward, "__file__", str(module))
    thresholds.main([str(result)])
    after = module.read_text(encoding="utf-8")
    assert after == before.replace(f"WORTH_THREADS = {forward.WORTH_THREADS:_}\n", "WORTH_THREADS = 1_500_000\n")
    result.write_text(json.dumps(of_a_run | {"benchmark": "sharing", "rows": rows[3:]}))
    with pytest.raises(FileFormatError, match="all threads are faster"):
        thresholds.main([str(result)])
