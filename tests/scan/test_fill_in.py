"""Fill-in estimated from patterns: near the truth, and enough to stop the up-sweep where products stop paying."""

from __future__ import annotations

import re
import warnings
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scan.chains import make_chain
from scan.convolutional import vgg_like
from sparsebp import SparsityPattern, plan_scan
from sparsebp.core.errors import MemoryLimitError
from sparsebp.products import plan_product
from sparsebp.scan import cost, rules
from sparsebp.scan.fill_in import EstimatedPattern, FillIn
from sparsebp.scan.rules import Candidate

MANY = 10_000


@cache
def pruned(divide: int = 1) -> tuple[list[SparsityPattern], list[bool]]:
    """VGG-11's 21 operators at CIFAR size with 3 % of the weights."""
    operators = vgg_like(np.random.default_rng(0), divide=divide, density=0.03 if divide == 1 else 0.2)
    return [o.pattern for o in operators], [o.shared for o in operators]


def plan_by_estimates(monkeypatch) -> list[Candidate]:
    """Let the winner be sized by estimates too, and return the list that each is put into."""
    planned = []

    def estimated(candidate, chain, *_):
        planned.append(candidate)
        return cost.size_recipe(candidate.recipe(chain.ends), chain, FillIn())

    monkeypatch.setattr(rules, "_planned", estimated)
    return planned


@pytest.mark.parametrize("fold", [False, True])
def test_estimates_are_near_what_planning_finds(fold):
    patterns, shared = pruned(16)
    plan = plan_scan(patterns, "blelloch", shared=shared, fold=fold, batch=2)
    estimated = cost.size_recipe(Candidate("blelloch").recipe(plan.chain.ends), plan.chain, FillIn())
    for guess, real in zip(estimated.plans, plan.sized.plans, strict=True):
        if real is not None:
            assert guess.products == pytest.approx(real.products, rel=0.3, abs=2)
            assert guess.pattern.nnz == pytest.approx(real.pattern.nnz, rel=0.3, abs=2)
    assert estimated.workspace == pytest.approx(plan.sized.workspace, rel=0.2)
    assert estimated.index < plan.sized.index  # an estimate leaves the index of products out


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_product_of_two_inputs_has_exactly_the_products_estimated(seed):
    """Multiplications follow from the degrees; scalings, identities and dense blocks are exact in nnz too."""
    first, second = make_chain(np.random.default_rng(seed), 2, 1, most=12).patterns
    guess = FillIn()(second, first, None)
    real = plan_product(second, first)
    assert guess.products == real.products
    assert guess.pattern.nnz <= second.shape[0] * first.shape[1]
    if real.strategy in ("identity", "scale_rows", "scale_columns", "dense"):
        assert (guess.strategy, guess.pattern.nnz) == (real.strategy, real.pattern.nnz)
        assert guess.pattern.kind == real.pattern.kind or guess.pattern.shape[0] * guess.pattern.shape[1] <= 1
    if real.pattern.nnz == 0:
        assert guess.pattern.nnz == 0


def test_estimates_are_the_same_every_time():
    patterns, shared = pruned(8)
    plan = plan_scan(patterns, "linear", shared=shared)
    recipe = Candidate("blelloch").recipe(plan.chain.ends)
    memory = {cost.size_recipe(recipe, plan.chain, FillIn()).memory for _ in range(2)}
    assert len(memory) == 1


@pytest.mark.parametrize(("workers", "up_levels"), [(1, 0), (2, 0), (MANY, 2), (10 * MANY, 2)])
def test_vgg11_stops_the_up_sweep_after_two_levels(workers, up_levels, monkeypatch):
    """BPPSA §5.3: up-sweep L0–L2, linear middle, down-sweep L7–L10, on a machine with many workers."""
    patterns, shared = pruned()
    planned = plan_by_estimates(monkeypatch)
    plan = plan_scan(patterns, "hybrid", workers=workers, shared=shared, fold=False)
    assert plan.up_levels == up_levels
    assert planned == [Candidate("hybrid", up_levels)]  # the others were judged by estimates alone


def test_a_memory_limit_stops_the_up_sweep_earlier(monkeypatch):
    patterns, shared = pruned()
    plan_by_estimates(monkeypatch)
    options = {"algorithm": "hybrid", "workers": MANY, "shared": shared, "fold": False}
    two = plan_scan(patterns, **options)
    one = plan_scan(patterns, **options, memory_limit=two.memory // 4)
    assert (one.up_levels, two.up_levels) == (1, 2)
    assert one.memory <= two.memory // 4
    assert f"beyond {two.memory // 4} bytes: hybrid (up_levels=2)" in one.reason


def test_the_hybrid_scan_of_vgg11_has_the_papers_rows():
    patterns, shared = pruned(8)
    plan = plan_scan(patterns, "hybrid", up_levels=2, shared=shared, fold=False)
    rows = {phase: {s.level for s in plan.steps if s.phase == phase} for phase in ("up-sweep", "down-sweep", "output")}
    assert rows == {"up-sweep": {0, 1}, "down-sweep": {8, 9}, "output": {10}}  # the step from L7 only moves data
    assert plan.levels == {"up-sweep": 2, "middle": 4, "down-sweep": 3, "output": 1}


def test_two_workers_run_the_linear_scan():
    patterns, shared = pruned(8)
    plan = plan_scan(patterns, workers=2, shared=shared, batch=16)
    assert plan.algorithm == "linear" and "multiplies matrices" in plan.reason


def test_a_step_beyond_memory_is_refused_before_anything_is_planned(monkeypatch):
    """Blelloch's scan of VGG-11 would multiply matrices of 1e11 products; the error names the step and what fits."""
    patterns, shared = pruned(8)
    linear = plan_scan(patterns, "linear", shared=shared, batch=64).memory
    planned = []
    monkeypatch.setattr(cost, "plan_product", lambda *a, **k: planned.append(a) or plan_product(*a, **k))
    with pytest.raises(
        MemoryLimitError, match=r"step of the scan's (up-sweep|fold), J\d+:\d+ = .*Use algorithm="
    ) as caught:
        plan_scan(patterns, "blelloch", shared=shared, batch=64, memory_limit=linear + 100)
    assert "linear" in str(caught.value) and not planned


def test_without_a_limit_the_machine_is_the_limit(monkeypatch):
    from sparsebp.core import machine as machines

    patterns, shared = pruned(8)
    monkeypatch.setattr(machines, "host_memory", lambda: 2**20)
    with pytest.raises(MemoryLimitError, match="1048576 bytes"):
        plan_scan(patterns, "blelloch", shared=shared, batch=16)


def test_dense_factors_need_no_sketch():
    fill_in = FillIn()
    a, b, c = SparsityPattern.dense(3, 4), SparsityPattern.dense(4, 5), SparsityPattern([0, 1, 1, 2, 2], [0, 2], (4, 3))
    ab = fill_in(a, b, None).pattern
    assert isinstance(ab, EstimatedPattern) and (ab.nnz, ab.kind) == (15, "dense")
    longer = fill_in(c, fill_in(a, b, None).pattern, None)
    assert longer.products == pytest.approx(10, abs=1) and longer.pattern.nnz == pytest.approx(10, abs=1)
    empty = SparsityPattern([0, 0, 0], [], (2, 4))
    assert fill_in(empty, b, None).pattern.nnz == 0


def filling_chain(n: int = 20) -> list[SparsityPattern]:
    """Random patterns whose products are full after two levels."""
    rng = np.random.default_rng(5)
    masks = [rng.random((60, 60)) < 0.1 for _ in range(n)]
    return [SparsityPattern(np.concatenate(([0], np.cumsum(m.sum(axis=1)))), np.nonzero(m)[1], m.shape) for m in masks]


def test_what_fill_in_costs_is_said_before_it_is_planned(monkeypatch):
    patterns = filling_chain()
    monkeypatch.setattr(rules, "MUCH", 50)
    monkeypatch.setattr(rules, "QUICK", 0)
    with monkeypatch.context() as planless:
        planless.setattr(rules, "_planned", lambda *_: pytest.fail("it was planned first"))
        planless.setattr(rules.warnings, "warn", lambda text, *_, **__: (_ for _ in ()).throw(RuntimeError(text)))
        with pytest.raises(RuntimeError, match=r"blelloch scan fills in.* times the work of the linear scan"):
            plan_scan(patterns, "blelloch")
    with pytest.warns(RuntimeWarning, match="fills in") as caught:
        plan = plan_scan(patterns, "blelloch")
    assert caught[0].filename == __file__
    said = float(re.search(r"take ([\d.e+]+) times the work", plan.reason)[1])
    told = float(re.search(r"fill-in .*; ([\d.e+]+) times the work of the linear scan", plan.describe())[1])
    assert told == pytest.approx(plan.flops / plan_scan(patterns, "linear").flops, rel=0.01)
    assert said == pytest.approx(told, rel=0.01)  # once planned, it is known
    monkeypatch.setattr(rules, "QUICK", 1 << 40)
    monkeypatch.setattr(cost.Chain, "fill_in", None)  # a small scan is planned without estimates, and warned of too
    with pytest.warns(RuntimeWarning, match="fills in") as caught:
        plan_scan(patterns, "blelloch")
    assert caught[0].filename == __file__


def test_no_warning_where_products_stay_thin():
    patterns = [SparsityPattern.diagonal(30), SparsityPattern.dense(30, 30)] * 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm in ("linear", "blelloch", "hybrid", "chunked", "auto"):
            plan_scan(patterns, algorithm)
        plan_scan(filling_chain(), "auto")
        plan_scan(filling_chain(), "linear")
    assert "fill-in" not in plan_scan(patterns, "linear").describe()
