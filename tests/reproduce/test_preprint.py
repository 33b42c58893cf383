"""BPPSA's preprint: the scan over VGG-11 step by step, a skeleton's chain, sampled products."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers import FIGURES, RUNS, preprint
from papers.claims import Context
from sparsebp import nn
from sparsebp.models import vgg11
from sparsebp.scan.algorithms import recipe

PREPRINT = [name for name, figure in FIGURES.items() if figure.paper.name == "Preprint"]


def image(seed=0):
    return np.random.default_rng(seed).standard_normal((1, 3, 32, 32)).astype(np.float32)


def narrow(seed=0):
    return vgg11(3, 10, width=1 / 32, rng=seed)


def context(tmp_path):
    return Context(True, tmp_path, (), lambda line: None)


def test_the_preprint_has_a_figure_for_each_of_its_statements():
    named = ("fig7a", "fig7b", "fig7c", "fig8", "fig9", "kinematics", "monte-carlo")
    assert set(PREPRINT) >= {f"preprint-{name}" for name in named}


def test_the_citation_names_the_preprint():
    cited = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    assert '"Scaling Back-propagation by Parallel Scan Algorithm"' in cited and "year: 2019" in cited


def test_every_gradient_of_the_scan_is_that_of_the_linear_one():
    rows = preprint.walk(preprint.elements(narrow(), image()), timed=True)
    found = [row for row in rows if row["kind"] == "mv"]
    assert {row["step"] for row in found} == {f"y{i}" for i in range(1, 22)}
    assert all(row["difference"] < 1e-5 and row["seconds"] > 0 for row in found)


def test_the_walk_counts_as_scipy_multiplies():
    chain = preprint.elements(narrow(), image())
    rows = {row["step"]: row for row in preprint.walk(chain, timed=False)}
    products = {step.target: step for step in recipe("blelloch", preprint.OPERATORS).steps if step.kind == "mm"}
    ones = {str(i): chain[i - 1].pattern.to_scipy(np.ones(chain[i - 1].pattern.nnz)) for i in range(1, 22)}
    made = {f"J{i}": matrix for i, matrix in ones.items()}
    for target, step in products.items():
        right, left = made[str(step.right)], made[str(step.left)]
        made[str(target)] = product = right @ left
        product.data[:] = 1
        row = rows[str(target)]
        degrees = np.bincount(right.indices, minlength=right.shape[1])
        assert row["nnz"] == product.nnz
        assert row["flops"] in (2 * int(degrees @ np.diff(left.indptr)), 2 * product.nnz)
        assert (row["left"], row["right"]) == (left.nnz, right.nnz)


def test_pooling_is_stored_with_an_entry_for_each_output():
    model = narrow()
    chain = preprint.elements(model, image())
    pools = [i for i in range(21) if isinstance(model[20 - i], nn.MaxPool2d)]
    assert [chain[i].pattern.nnz for i in pools] == [chain[i].pattern.shape[1] for i in pools]


def test_figures_of_one_network_share_a_walk(tmp_path, monkeypatch):
    walks = []
    walk = preprint.walk
    monkeypatch.setattr(preprint, "walk", lambda *given, **options: walks.append(options) or walk(*given, **options))
    shared = context(tmp_path)
    for name in ("preprint-fig8", "preprint-fig8"):
        RUNS[name].measure(shared)
    assert len(walks) == 1


@given(st.integers(2, 40), st.sampled_from(["linear", "chunked", "blelloch"]), st.integers(0, 1000))
def test_a_skeletons_gradient_is_that_of_finite_differences(joints, way, seed):
    angles = np.random.default_rng(seed).normal(scale=0.4, size=joints)
    skeleton = preprint.Skeleton(joints, way)
    value, gradient = skeleton.value_and_gradient(angles)
    frame = np.eye(4)
    for matrix in skeleton.transforms(angles)[0]:
        frame = frame @ matrix
    assert value == pytest.approx(0.5 * float(np.sum((frame[:3, 3] - preprint._TARGET) ** 2)))
    step = np.zeros(joints)
    step[seed % joints] = 1e-5
    more, less = (skeleton.value_and_gradient(angles + sign * step)[0] for sign in (1, -1))
    assert gradient[seed % joints] == pytest.approx((more - less) / 2e-5, abs=1e-8)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 20), st.integers(0, 1000))
def test_a_sampled_product_is_the_product_on_the_mean(rows, inner, count, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rows, inner)), rng.standard_normal((inner, 4))
    sizes = preprint.column_sizes(a, b)
    drawn = np.mean([preprint.draw_weights(sizes, count, rng) for _ in range(3000)], axis=0)
    share = sizes / sizes.sum()
    assert np.abs(drawn - 1).max() < 6 * np.sqrt((1 / share).max() / (3000 * count))


def test_the_expected_error_is_met_by_many_samples():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((20, 50)), rng.standard_normal((50, 10))
    sizes, exact = preprint.column_sizes(a, b), a @ b
    errors = [
        np.linalg.norm((a * preprint.draw_weights(sizes, 10, rng)) @ b - exact) / np.linalg.norm(exact)
        for _ in range(2000)
    ]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(preprint.expected_error(a, b, exact, 10), rel=0.05)


def test_training_with_all_columns_is_plain_training():
    rng = np.random.default_rng(3)
    given_ = [(rng.standard_normal((4, 1, 6, 6)).astype(np.float32), rng.integers(0, 10, 4)) for _ in range(3)]
    exact, rough = (preprint.train(given_, share, width=8) for share in (1.0, 0.25))
    assert exact[0] == rough[0] and exact[1] != rough[1]
