"""Shipped thresholds come from a benchmark's rows, and are written where they are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import thresholds
from sparsebp.core.errors import FileFormatError
from sparsebp.kernels.host import forward
from sparsebp.torch import rule

CASE = ("GRU", False, True, False)


def row(hidden: int, length: int, wins: bool = True, **others: Any) -> dict[str, Any]:
    cell, in_float64, packed, trains = CASE
    of_case = {"cell": cell, "in_float64": in_float64, "packed": packed, "trains": trains}
    return of_case | {"hidden": hidden, "length": length, "wins": wins} | others


@pytest.mark.parametrize(("rows", "rule"), [
    ([row(20, 8), row(20, 32), row(20, 16)], ((20, 32),)),  # the slowest batch decides
    ([row(64, 16), row(20, 32)], ((64, 32),)),  # a larger size needs no fewer
    ([row(20, 8), row(64, 64), row(128, 64)], ((20, 8), (128, 64))),
    ([row(20, 8), row(64, 512, False), row(64, 8), row(128, 8)], ((20, 8),)),  # never, and so beyond
    ([row(20, 512, False)], ()),
])  # fmt: skip
def test_no_case_of_the_table_is_slower(rows: list[dict[str, Any]], rule: thresholds.Rule) -> None:
    for order in (rows, rows[::-1]):
        assert thresholds.rules(order) == {CASE: rule}


def test_the_table_is_written_as_it_stands() -> None:
    text = Path(rule.__file__).read_text(encoding="utf-8")
    assert thresholds.written(text, rule.FEWEST_STEPS) == text
    changed = thresholds.written(text, rule.FEWEST_STEPS | {CASE: ((20, 7),)})
    assert [line for line in changed.splitlines() if line not in text.splitlines()] == [
        '    ("GRU", False, True, False): ((20, 7),),'
    ]


def test_part_of_a_table_is_refused() -> None:
    text = Path(rule.__file__).read_text(encoding="utf-8")
    with pytest.raises(FileFormatError, match="1 of 24"):
        thresholds.written(text, {CASE: ((20, 7),)})
    with pytest.raises(FileFormatError, match="FEWEST_STEPS"):
        thresholds.written("", rule.FEWEST_STEPS)


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
