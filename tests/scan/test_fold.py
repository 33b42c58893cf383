"""Folding: conv–ReLU–pool blocks become one element, and the gradient at every position still comes out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scan.chains import Chain, algorithms, random_pattern
from scan.convolutional import vgg_like
from sparsebp import SparsityPattern, plan_scan
from sparsebp.patterns import conv_pattern, pool_pattern
from sparsebp.scan import Span
from sparsebp.scan.algorithms import LIGHT, fold_recipe, piece_ends, recipe


@st.composite
def convolutional_chains(draw: st.DrawFn) -> Chain:
    """Forward from a small image: convolutions, pooling with and without overlap, diagonals, dense and general ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, channels, size = draw(st.sampled_from([1, 2, 5])), int(rng.integers(1, 3)), int(rng.integers(3, 6))
    patterns: list[SparsityPattern] = []
    for _ in range(draw(st.integers(1, 9))):
        width = channels * size * size
        kind = rng.choice(["conv", "pool", "overlapping pool", "relu", "relu", "identity", "selection", "general"])
        if kind == "conv":
            out = int(rng.integers(1, 4))
            patterns.append(conv_pattern(channels, out, (size, size), 3, padding=1).pattern)
            channels = out
        elif kind == "pool" and size >= 2:
            patterns.append(pool_pattern(channels, (size, size), 2).pattern)
            size //= 2
        elif kind == "overlapping pool" and size >= 3:
            patterns.append(pool_pattern(channels, (size, size), 3, 1).pattern)
            size -= 2
        elif kind in ("relu", "identity"):
            patterns.append(random_pattern(rng, "diagonal" if kind == "relu" else kind, width, width))
        else:
            patterns.append(random_pattern(rng, str(kind) if kind == "selection" else "general", width, width))
    for _ in range(draw(st.integers(0, 2))):  # a classifier
        patterns.append(random_pattern(rng, "dense", patterns[-1].shape[1], int(rng.integers(1, 8))))
    patterns.reverse()
    data, injections = [], []
    for p in patterns:
        shape = (p.nnz,) if rng.random() < 0.5 else (p.nnz, batch)
        scale = np.sqrt(max(1.0, p.nnz / max(1, p.shape[0])))
        data.append(np.ones(shape) if p.kind == "identity" else rng.standard_normal(shape) / scale)
        injections.append(rng.standard_normal((p.shape[0], batch)) if rng.random() < 0.6 else None)
    return Chain(patterns, data, rng.standard_normal((patterns[0].shape[1], batch)), injections)


@settings(max_examples=60, deadline=None)
@given(chain=convolutional_chains(), options=algorithms())
def test_every_algorithm_equals_the_linear_scan(chain, options):
    """Shared and per-sample values mixed, injections anywhere, in float64 to 1e-12."""
    plan = plan_scan(chain.patterns, **options, batch=chain.batch, dtype=np.float64, shared=chain.shared)
    y = plan(chain.g, chain.data, chain.injections)
    for have, want in zip(y, chain.expected(), strict=True):
        assert np.abs(have - want).max(initial=0) <= 1e-12 * max(1.0, np.abs(want).max(initial=0))


def test_pieces_end_where_an_element_is_neither_diagonal_nor_selection():
    patterns = [o.pattern for o in vgg_like(np.random.default_rng(0), divide=16)]
    ends = piece_ends(patterns)
    assert ends == (3, 5, 8, 10, 13, 15, 18, 21)  # eight convolutions
    assert all(patterns[e - 1].kind not in LIGHT for e in ends)
    relu = SparsityPattern.diagonal(4)
    assert piece_ends([relu]) == (1,)
    assert piece_ends([relu, relu]) == (2,)
    general = SparsityPattern([0, 2, 2, 4, 4], [0, 1, 2, 3], (4, 4))
    assert piece_ends([relu, general, general, relu, relu]) == (2, 5)


@given(
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    algorithm=st.sampled_from(["blelloch", "hybrid", "chunked"]),
    parameter=st.integers(1, 5),
)
def test_a_folded_recipe_is_executable_and_complete(pieces, algorithm, parameter):
    ends = tuple(int(e) for e in np.cumsum(pieces))
    folded = fold_recipe(recipe(algorithm, len(ends), up_levels=parameter, chunks=parameter), ends)
    known = {Span(i, i + 1) for i in range(ends[-1] + 1)}
    for step in folded.steps:
        assert {step.left, step.right} <= known
        assert step.left.stop == step.right.start
        assert step.target not in known  # nothing is computed twice
        known.add(step.target)
    assert {Span(0, i + 1) for i in range(ends[-1] + 1)} <= known
    assert folded.n == ends[-1]
    for phase in ("fold", "unfold"):
        rounds = {step.level for step in folded.steps if step.phase == phase}
        assert len(rounds) == folded.levels.get(phase, 0)
        if phase == "unfold":
            assert all(s.kind == "mv" for s in folded.steps if s.phase == phase)


def test_folding_makes_a_block_one_element_of_the_tree():
    operators = vgg_like(np.random.default_rng(0), divide=16)
    patterns = [o.pattern for o in operators]
    plan = plan_scan(patterns, "hybrid", up_levels=1, shared=[o.shared for o in operators])
    assert len(plan.elements) == 8
    assert [span.start for span in plan.elements] == [1, *(span.stop for span in plan.elements[:-1])]
    assert plan.elements[-1].stop == 22
    assert "21 transposed Jacobians, folded into 8 elements" in plan.describe()
    assert plan.levels["up-sweep"] == 1 and plan.levels["middle"] == 3
    fold = [s for s in plan.steps if s.phase == "fold"]
    strategies = {p.strategy for s, p in zip(plan.steps, plan.sized.plans, strict=True) if s.phase == "fold"}
    assert fold and strategies & {"scale_rows", "scale_columns"}
    assert {s.phase for s in plan.steps[-3:]} == {"unfold"}
    apart = plan_scan(patterns, "hybrid", up_levels=2, fold=False)
    assert len(apart.elements) == 21
    assert not {"fold", "unfold"} & {s.phase for s in apart.steps}


@pytest.mark.parametrize("options", [{"algorithm": "linear"}, {"algorithm": "hybrid", "up_levels": 0}])
def test_a_linear_scan_has_nothing_to_fold(options):
    patterns = [o.pattern for o in vgg_like(np.random.default_rng(0), divide=16)]
    folded, apart = (plan_scan(patterns, **options, fold=fold) for fold in (True, False))
    assert folded.steps == apart.steps
    assert len(folded.elements) == 21
