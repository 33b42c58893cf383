"""The algorithms as lists of steps: pure integers, against the statements of the paper; and affine maps, joined."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import OptionError
from sparsebp.scan import algorithms
from sparsebp.scan.algorithms import (
    AbstractStep,
    LevelCount,
    Recipe,
    Span,
    blelloch,
    chunk_cuts,
    chunked,
    combine,
    critical_path,
    hybrid,
    level_counts,
    linear,
    recipe,
)
from strategies import seeds

lengths = st.one_of(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 21, 31, 32, 33]), st.integers(1, 200))


def literal_algorithm_1(n: int) -> tuple[list[Span | None], list[list[AbstractStep]], list[list[AbstractStep]]]:
    """BPPSA Algorithm 1 word for word, on spans; None is the symbolic identity. Returns a, and products by level."""
    a: list[Span | None] = [Span(i, i + 1) for i in range(n + 1)]
    depth = math.ceil(math.log2(n + 1))

    def join(left, right, level, steps):  # left ◇ right
        if left is None or right is None:
            return right if left is None else left
        steps.append(combine(level, "", left, right))
        return steps[-1].target

    up, down = [], []
    for d in range(depth - 1):
        up.append([])
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            a[right] = join(a[left], a[right], d, up[-1])
    a[n] = None
    for d in range(depth - 1, -1, -1):
        down.append([])
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            kept, a[left] = a[left], a[right]
            a[right] = join(a[right], kept, d, down[-1])
    return a, up, down


def products(steps) -> list[tuple[Span, Span]]:
    return [(s.left, s.right) for s in steps]


@given(n=lengths)
def test_bppsa_algorithm_1_levels(n):
    """Algorithm 1: ⌈log₂(n+1)⌉ - 1 levels up, ⌈log₂(n+1)⌉ down; matrices are multiplied on the way up only."""
    plan = blelloch(n)
    depth = math.ceil(math.log2(n + 1))
    assert plan.levels == {"up-sweep": depth - 1, "down-sweep": depth, "output": 1}
    assert {s.level for s in plan.steps if s.phase == "up-sweep"} == set(range(depth - 1))
    assert all(s.kind == "mv" for s in plan.steps if s.phase != "up-sweep")
    # the first down-sweep level, from row `depth`, multiplies with the symbolic identity alone: it has no products
    assert {s.level for s in plan.steps if s.phase == "down-sweep"} <= set(range(depth + 1, 2 * depth))


@given(n=lengths)
def test_bppsa_algorithm_1_products(n):
    """The products are those of Algorithm 1 word for word, less the ones that line 7 overwrites unread."""
    a, up, down = literal_algorithm_1(n)
    assert a == [None, *(Span(0, i) for i in range(1, n + 1))]  # the exclusive scan, BPPSA Eq. 4
    plan = blelloch(n)
    kept = [s for level in up for s in level if s.target.stop != n + 1]
    assert products(s for s in plan.steps if s.phase == "up-sweep") == products(kept)
    assert products(s for s in plan.steps if s.phase == "down-sweep") == products(s for level in down for s in level)
    assert products(plan.steps[-1:]) == [(Span(0, n), Span(n, n + 1))]


def test_bppsa_5_3_vgg11_hybrid():
    """BPPSA §5.3: VGG-11's 21 operators run the up-sweep from L0 to L2, a linear middle, the down-sweep from L7 to L10.

    L0 … L10 are the rows of Fig. 3, the states of an array of 22 elements: L0 the input, L1 … L4 after the four levels
    of the full up-sweep, L5 after line 7 has set the identity, L6 … L10 after the five levels of the full down-sweep.
    A step's `level` is the row that it starts from.

    "Up-sweep from L0 to L2" are therefore k = 2 levels. "Down-sweep from L7 to L10" are the last three of five: depths
    d = 2, 1, 0, k + 1 levels. Of these the first, from L7, only hands on what the chain has computed on its way (as the
    first level of the full down-sweep only multiplies with the identity), so products start from rows L8 and L9.
    """
    full = blelloch(21)
    assert full.levels == {"up-sweep": 4, "down-sweep": 5, "output": 1}
    plan = hybrid(21, 2)
    assert plan.levels == {"up-sweep": 2, "middle": 4, "down-sweep": 3, "output": 1}
    rows = {phase: {s.level for s in plan.steps if s.phase == phase} for phase in plan.levels}
    assert rows["up-sweep"] == {0, 1}  # L0 -> L1 -> L2
    assert rows["down-sweep"] == {8, 9}  # L7 -> L8 moves data, L8 -> L9 -> L10 multiply
    last_row = 10
    assert last_row - plan.levels["down-sweep"] == 7
    assert rows["output"] == {10}
    # the array's state in row L8 of the full scan: exclusive prefixes at the ends of all blocks of four
    in_row_8 = {s.target for s in full.steps if s.level < 8}
    middle = [s for s in plan.steps if s.phase == "middle"]
    assert [s.target for s in middle] == [Span(0, 8), Span(0, 12), Span(0, 16), Span(0, 20)]
    assert {s.target for s in middle} <= in_row_8
    # from there on both are the same
    assert products(s for s in plan.steps if s.level >= 8) == products(s for s in full.steps if s.level >= 8)
    # and no product is wider than four operators
    assert max(s.target.stop - s.target.start for s in plan.steps if s.kind == "mm") == 4


def every_recipe(n: int) -> list[Recipe]:
    return [
        linear(n),
        blelloch(n),
        *(hybrid(n, k) for k in range(n.bit_length() + 1)),
        *(chunked(n, c) for c in {1, 2, 3, 4, 7, n, n + 3}),
    ]


@given(n=lengths)
def test_every_recipe_can_be_executed_and_is_complete(n):
    for plan in every_recipe(n):
        have = {Span(i, i + 1) for i in range(n + 1)}
        for step in plan.steps:
            assert step.left in have and step.right in have
            assert step.left.stop == step.right.start
            assert step.target not in have  # nothing is computed twice
            have.add(step.target)
        assert {Span(0, i + 2) for i in range(n)} <= have
        assert sum(s.kind == "mv" for s in plan.steps) == n
        used = {span for s in plan.steps for span in (s.left, s.right)}
        assert all(s.target in used for s in plan.steps if s.kind == "mm")  # and no product of matrices in vain


@given(n=lengths)
def test_steps_of_a_level_are_independent(n):
    for plan in every_recipe(n):
        level_of = {}
        for s in plan.steps:
            if s.phase != "middle":
                assert all(level_of.get(x, (-1, ""))[0] < s.level or x not in level_of for x in (s.left, s.right))
            level_of[s.target] = (s.level, s.phase)


@given(n=lengths, k=st.integers(0, 9))
def test_hybrid_between_linear_and_blelloch(n, k):
    assert hybrid(n, 0).steps == linear(n).steps
    assert hybrid(n, 10).steps == blelloch(n).steps
    up = [s for s in hybrid(n, k).steps if s.phase == "up-sweep"]
    assert {s.level for s in up} == set(range(min(k, n.bit_length() - 1)))
    assert products(up) == products(s for s in blelloch(n).steps if s.phase == "up-sweep" and s.level < k)


@given(n=lengths, chunks=st.integers(1, 40))
def test_chunks_are_even_and_only_inner_ones_multiply_matrices(n, chunks):
    cuts = chunk_cuts(n, chunks)
    sizes = [b - a for a, b in pairwise(cuts)]
    assert cuts[0] == 0 and cuts[-1] == n and len(sizes) == min(n, chunks)
    assert max(sizes) - min(sizes) <= 1
    mm = [s for s in chunked(n, chunks).steps if s.kind == "mm"]
    assert len(mm) == sum(size - 1 for size in sizes[1:-1])
    if chunks < 3:
        assert products(chunked(n, chunks).steps) == products(linear(n).steps)


@given(n=lengths)
def test_bppsa_3_6_step_complexity(n):
    """BPPSA Eq. 6: with enough workers Blelloch takes Θ(log n) steps, the linear scan n."""
    log = math.ceil(math.log2(n + 1))
    plan = blelloch(n)
    assert len(critical_path(plan.steps, [0] * len(plan.steps))) <= 2 * log
    assert len(critical_path(plan.steps, [1] * len(plan.steps))) <= 2 * log
    assert critical_path(linear(n).steps, [3] * n) == tuple(range(n))


@given(n=lengths)
def test_bppsa_3_6_work_complexity(n):
    """BPPSA Eq. 7: Θ(n) products."""
    assert len(blelloch(n).steps) <= 2 * n


@given(n=lengths, k=st.integers(0, 8), chunks=st.integers(1, 20))
def test_level_counts_are_those_of_the_steps(n, k, chunks):
    def levels(plan: Recipe, by_level: bool):
        key = (lambda s: (s.level, s.phase)) if by_level else (lambda s: s.phase)
        count = Counter((key(s), s.kind) for s in plan.steps)
        return [(count[name, "mm"], count[name, "mv"]) for name in dict.fromkeys(key(s) for s in plan.steps)]

    assert [(p.mm, p.mv) for p in level_counts("blelloch", n)] == levels(blelloch(n), True)
    assert [(p.mm, p.mv) for p in level_counts("hybrid", n, up_levels=k)] == levels(hybrid(n, k), k > 0)
    shape = level_counts("chunked", n, chunks=chunks)
    assert [(p.mm, p.mv) for p in shape] == levels(chunked(n, chunks), False)
    assert all(p.rounds == chunked(n, chunks).levels[p.phase] for p in shape)


def test_level_counts_of_one_worker():
    assert level_counts("linear", 5) == level_counts("hybrid", 5, up_levels=0) == [LevelCount("linear", 0, 5, 5)]
    assert level_counts("chunked", 5) == [LevelCount("reduce", 0, 5, 5)]


def test_critical_path_follows_the_heaviest_dependences():
    steps = hybrid(21, 2).steps
    assert [str(steps[i].target) for i in critical_path(steps, [1] * len(steps))][-1] == "y21"
    weights = [0] * len(steps)
    heavy = next(i for i, s in enumerate(steps) if str(s.target) == "J4:5")
    weights[heavy] = 100
    assert heavy in critical_path(steps, weights)


def test_spans_have_names():
    names = {Span(0, 1): "g", Span(0, 4): "y3", Span(2, 3): "J2", Span(2, 6): "J2:5"}
    assert {span: str(span) for span in names} == names


def test_unknown_algorithm():
    with pytest.raises(OptionError, match="linear, blelloch, hybrid or chunked"):
        recipe("auto", 3)


# ---- affine maps in one array: joined in their order, whatever the grouping ------------------------------------------


def through(maps: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Take rows g (B, n) through maps (C, B, n + 1, n), the first one first."""
    for one in maps:
        g = np.einsum("bi,bij->bj", g, one[:, :-1]) + one[:, -1]
    return g


@given(seed=seeds, count=st.integers(1, 9), batch=st.integers(0, 3), size=st.integers(1, 5))
def test_joined_maps_do_what_they_do_one_after_the_other(seed: int, count: int, batch: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    maps, g = rng.standard_normal((count, batch, size + 1, size)), rng.standard_normal((batch, size))
    kept = maps.copy()
    np.testing.assert_allclose(through(algorithms.join_all(maps)[None], g), through(maps, g), rtol=1e-9, atol=1e-9)
    if count == 3:
        left, right = (
            algorithms.join(algorithms.join(*maps[:2]), maps[2]),
            algorithms.join(maps[0], algorithms.join(*maps[1:])),
        )
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(maps, kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identity_and_constant(dtype: type) -> None:
    rng = np.random.default_rng(0)
    one, vectors = rng.standard_normal((2, 4, 3)).astype(dtype), rng.standard_normal((2, 3)).astype(dtype)
    same, fixed = algorithms.identity(one), algorithms.constant(vectors)
    assert same.dtype == fixed.dtype == dtype
    np.testing.assert_array_equal(algorithms.join(one, same), one)
    np.testing.assert_array_equal(algorithms.join(same, one), one)
    np.testing.assert_array_equal(algorithms.join(one, fixed), fixed)
    np.testing.assert_array_equal(through(fixed[None], rng.standard_normal((2, 3))), vectors)
