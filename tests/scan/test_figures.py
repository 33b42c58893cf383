"""A plan's report: dense FLOPs, BPPSA Fig. 3 and Fig. 10, measured steps."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings

from scan.chains import algorithms, chains, make_chain, make_stack
from scan.convolutional import vgg_like
from sparsebp import SparsityPattern, plan_scan
from sparsebp.core.errors import OptionError, ShapeError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture
def ax():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


@settings(max_examples=30)
@given(chain=chains(longest=25), options=algorithms())
def test_dense_flops_are_those_of_the_shapes(chain, options):
    plan = plan_scan(chain.patterns, **options, batch=chain.batch, shared=chain.shared)
    rows = [chain.g.shape[0], *(p.shape[0] for p in chain.patterns)]
    for step, count in zip(plan.steps, plan.sized.counts, strict=True):
        m, k = rows[step.right.stop - 1], rows[step.right.start - 1]
        n = 1 if step.kind == "mv" else rows[step.left.start - 1]
        width = chain.batch if step.kind == "mv" else count.width
        assert step.dense_flops == 2 * m * k * n * width >= step.flops
        assert width in (1, chain.batch)


def test_describe_has_flops_and_dense_flops():
    operators = vgg_like(np.random.default_rng(0), divide=32)
    plan = plan_scan([o.pattern for o in operators], "hybrid", up_levels=2, shared=[o.shared for o in operators])
    header = next(line for line in plan.describe().splitlines() if line.startswith("level "))
    assert re.findall(r"dense FLOP|FLOP|bytes|critical", header) == ["FLOP", "dense FLOP", "bytes", "critical"]
    rows = [line for line in plan.describe(100).splitlines() if re.match(r"L\d+ ", line)]
    assert len(rows) == len(plan.steps)
    assert any("fold" in row for row in rows) and any("unfold" in row for row in rows)


def test_tree_of_a_folded_chain(ax):
    operators = vgg_like(np.random.default_rng(0), divide=32)
    for up_levels in (1, 3):
        plan = plan_scan([o.pattern for o in operators], "hybrid", up_levels=up_levels)
        ax.clear()
        assert plan.plot(ax) is ax
        assert len(ax.lines) == 2 * len(plan.steps)
        labels = [label.get_text() for label in ax.get_yticklabels()]
        assert labels[0] == "input" and {"fold", "unfold"} <= set(labels)
        for line in ax.lines:  # a product lies below both operands: dependent steps never share a row
            assert line.get_ydata()[0] < line.get_ydata()[1]


@pytest.mark.parametrize("kind", ["tree", "flops"])
@pytest.mark.parametrize(
    ("length", "algorithm"), [(1, "linear"), (3, "blelloch"), (15, "hybrid"), (21, "chunked"), (40, "linear")]
)
def test_a_figure_of_its_own_cuts_nothing_off_and_says_what_colours_mean(length, algorithm, kind):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    plan = plan_scan([SparsityPattern.dense(2, 2)] * length, algorithm)
    ax = plan.plot(kind=kind)
    ax.figure.canvas.draw()
    try:
        box, (width, height) = ax.figure.get_tightbbox(), ax.figure.get_size_inches()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        legend = [text.get_text() for text in ax.get_legend().get_texts()]
        assert legend == ["matrix", "vector", "critical path"] if kind == "tree" else "matrix–vector" in "".join(legend)
        assert kind != "tree" or len(ax.lines) == 2 * len(plan.steps)
        assert ax.get_title()
    finally:
        pyplot.close(ax.figure)


def test_flops_of_every_step_beside_the_operators(ax):
    found = vgg_like(np.random.default_rng(0), divide=32)
    plan = plan_scan([o.pattern for o in found], "hybrid", up_levels=2, fold=False)
    operators = [(o.name, o.flops, 2 * o.pattern.shape[0] * o.pattern.shape[1]) for o in found]
    assert plan.plot(ax, kind="flops", operators=operators) is ax
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [
        "matrix–vector", "matrix–vector, critical", "matrix–matrix", "matrix–matrix, critical", "BP operators"
    ]  # fmt: skip
    drawn = np.concatenate([c.get_offsets() for c in ax.collections])
    expected = [(s.dense_flops, s.flops) for s in plan.steps] + [(o[2], o[1]) for o in operators]
    np.testing.assert_array_equal(np.sort(drawn, axis=0), np.sort(np.array(expected, float), axis=0))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert {t.get_text() for t in ax.texts} == {o.name for o in found}


def test_measured_times_in_place_of_flops(ax):
    chain = make_chain(np.random.default_rng(5), 9, 3)
    plan = plan_scan(chain.patterns, "blelloch", shared=chain.shared, batch=3, dtype=np.float64)
    times = plan.profile(chain.g, chain.data, chain.injections, repeats=2)
    plan.plot(ax, kind="flops", measured=times, operators=[("one", 1e-5), ("two", 2e-5, 100.0)])
    assert "measured" in ax.get_ylabel()
    drawn = np.concatenate([c.get_offsets() for c in ax.collections])
    assert set(times) <= set(drawn[:, 1])


@settings(max_examples=15, deadline=None)
@given(chain=chains(longest=12), options=algorithms())
def test_profile_measures_every_step_and_changes_nothing(chain, options):
    plan = plan_scan(chain.patterns, **options, batch=chain.batch, dtype=np.float64, shared=chain.shared)
    before = plan(chain.g, chain.data, chain.injections)
    times = plan.profile(chain.g, chain.data, chain.injections, repeats=1)
    assert len(times) == len(plan.steps) and all(t > 0 for t in times)
    assert len(plan.workspaces) == 1  # the call's buffers are used again
    after = plan(chain.g, chain.data, chain.injections)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_bad_arguments(ax):
    plan = plan_scan([SparsityPattern.dense(2, 2)] * 5, "blelloch")
    with pytest.raises(OptionError, match="Unknown kind of plot"):
        plan.plot(ax, kind="pie")
    with pytest.raises(OptionError, match="savefig"):
        plan.plot("scan.png")
    with pytest.raises(OptionError, match="does not show operators"):
        plan.plot(ax, operators=[("relu", 1.0)])
    with pytest.raises(ShapeError, match="measured has the wrong length"):
        plan.plot(ax, kind="flops", measured=[1.0])
    chain = make_stack(np.random.default_rng(0), 5, 2, 1, False)
    with pytest.raises(OptionError, match="repeats is too small"):
        plan.profile(chain.g, list(chain.data), repeats=0)
    with pytest.raises(ShapeError, match="Stacked data has no steps"):
        plan.profile(chain.g, chain.data)
