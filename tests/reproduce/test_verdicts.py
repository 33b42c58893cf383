"""A row of the papers' page is "met" only where the paper's claim was reproduced decisively."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers import FIGURES, dualpipe, out_of_order
from papers.figure import Context, faster, gained
from papers.optimizer_fusion import _course, _trend
from papers.out_of_order import data_parallel, data_parallel_here, executed_pipelines, single_device

DOCS = Path(__file__).parents[2] / "docs"
SAID = ("BPPSA", "Preprint", "OOO", "SpecTrain", "Fusion")
"""Papers of which every measured row says what ran."""


def quick(tmp_path, name):
    figure = FIGURES[name]
    if "data" in figure.needs and importlib.util.find_spec("mlxtend") is None:
        pytest.skip("needs a package that is not installed")
    measured = Context(True, tmp_path / "b", DOCS / "benchmarks", lambda line: None)
    return figure.reproduce(measured, tmp_path)["claims"]


def benchmark(name):
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def timing(median, spread=0.01):
    return {"median": median, "low": median * (1 - spread), "high": median * (1 + spread)}


@pytest.mark.parametrize("path", sorted((DOCS / "papers").glob("*.json")), ids=lambda path: path.stem)
def test_what_no_paper_states_is_not_met(path):
    for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]:
        assert claim["met"] is None or not claim["paper"].startswith("not stated"), claim["what"]


@pytest.mark.parametrize("path", sorted((DOCS / "papers").glob("*.json")), ids=lambda path: path.stem)
def test_what_was_measured_says_what_ran(path):
    figure = FIGURES[path.stem]
    if figure.paper not in SAID or figure.kind not in ("measured", "executed"):
        pytest.skip("nothing was run")
    assert all(claim["ran"] for claim in json.loads(path.read_text(encoding="utf-8"))["claims"])


def test_a_gain_within_the_spread_is_not_decided():
    def verdict(base, ours):
        return faster("x", "1.03×", 1.03, base, ours, ran="r", why="w")

    assert verdict(timing(1.2), timing(1.0)).met is True
    assert verdict(timing(1.2, 0.2), timing(1.0, 0.2)).met is None
    assert verdict(timing(1.0), timing(1.2)).met is False
    assert gained("x", "1", 1.0, {"median": 1.1, "low": 0.9}, ran="r", why="w").met is None


def test_the_order_that_is_kept_is_no_gain_by_reordering():
    row = {name: timing(1.0) for name in ("two", "joint", "list", "one")} | {
        "network": "x",
        "conventional": timing(0.7),
    }
    (claim,) = single_device({"rows": [row]}).claims
    assert claim.met is False and claim.ours == "0.70×" and "conventional" in claim.ran


def test_a_network_gains_by_reordering_only_where_the_best_such_order_is_faster():
    rows = benchmark("schedule")["rows"]
    for row, claim in zip(rows, single_device({"rows": rows}).claims, strict=True):
        best = min((row[name] for name in ("joint", "list")), key=lambda time: time["median"])
        assert claim.ours == f"{row['conventional']['median'] / best['median']:.2f}×"
        assert claim.met is not True or best["high"] < row["conventional"]["low"]
        assert claim.met is not False or best["median"] > row["conventional"]["median"] / 1.03


def test_what_the_paper_does_not_state_is_not_met():
    claims = [
        *data_parallel_here(benchmark("data-parallel")).claims,
        *executed_pipelines(benchmark("scaling-measured")).claims,
        *data_parallel(benchmark("scaling-papers")).claims,
    ]
    for claim in claims:
        assert claim.met is None or ("not stated" not in claim.paper and "first ready" not in claim.what)
    assert not any(claim.met for claim in claims if claim.ours in ("1.00×", "1.01×"))


@given(st.floats(-1, 1), st.floats(0, 1))
def test_an_accuracy_is_kept_lost_or_not_decided(lost, width):
    met, why = dualpipe.kept(lost, width)
    assert met is not True or lost - width > -0.021
    assert met is not False or lost + width < 0
    assert bool(why) == (met is not True)


def test_the_interval_of_vgg_decides_nothing():
    assert dualpipe.kept(-0.252, 0.322)[0] is None
    assert dualpipe.kept(-0.089, 0.038)[0] is False
    assert dualpipe.kept(0.001, 0.01)[0] is True


def test_losses_of_a_run_that_diverged_never_reach_the_criterion():
    runs = [dualpipe.padded([3.0, 2.0, math.nan], 5), dualpipe.padded([3.0, 2.0, 1.0, 0.5, 0.5], 5)]
    assert np.isinf(runs[0][2:]).all() and len(runs[0]) == 5
    assert np.isinf(dualpipe.smoothed(runs)).all()
    assert dualpipe.smoothed([[4.0] * 30]) == pytest.approx(np.full(11, 4.0))


@pytest.mark.parametrize(
    ("ratios", "met"),
    [((0.9, 1.2, 1.1), True), ((0.9, 0.95, 0.93), False), ((1.5, 1.2, 1.1), False), ((0.9, 1.1, 1.2), False)],
)
def test_slower_at_small_batches_is_no_gain_by_itself(ratios, met):
    rows = [{"network": "x", "batch": size} for size in (1, 8, 32)]
    claim = _course(rows, "fusion", ratios, "r")
    assert claim.met is met and bool(claim.why) == (not met)


def test_a_weak_rank_correlation_decides_nothing():
    assert _trend("x", "negative", [1, 2, 3, 4], [4, 3, 2, 1], -1, "w", "r").met is True
    assert _trend("x", "negative", [1, 2, 3, 4], [1, 2, 3, 4], -1, "w", "r").met is False
    assert _trend("x", "negative", [1, 2, 3, 4], [2, 1, 4, 0], -1, "w", "r").met is None


def test_fig_12_is_not_rounded_to_what_the_paper_says(tmp_path):
    claims = {claim["what"]: claim for claim in quick(tmp_path, "ooo-fig12")}
    found = claims["16 layers on 4 devices: modulo over GPipe"]
    assert (found["ours"], found["met"]) == ("1.63", False)
    assert all(claim["met"] is None for what, claim in claims.items() if "units" in what)


def test_the_optimizers_of_fig_7_are_the_papers():
    claims = FIGURES["fusion-fig7"].shows(benchmark("fusion")).claims
    assert not any(name in claim.what for claim in claims for name in ("AdamW", "AMSGrad"))


def test_recurrent_cases_take_sequences_of_the_batch_they_say():
    for make, shape, samples in out_of_order._cases(quick=True).values():
        assert make().forward(np.zeros(shape, np.float32))[0].shape[0] == samples
