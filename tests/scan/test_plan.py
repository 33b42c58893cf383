"""Planning: costs before values, choices with reasons, refusals with a remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scan.chains import algorithms, chains, dense, make_chain, make_stack
from sparsebp import SparsityPattern, plan_scan
from sparsebp.core.errors import DTypeError, MemoryLimitError, OptionError, PatternError, ShapeError
from sparsebp.scan import ScanPlan
from sparsebp.scan.algorithms import Span
from sparsebp.scan.cost import Slots, assign_slots, is_view, shared_spans


def ones(pattern: SparsityPattern) -> np.ndarray:
    return dense(pattern, np.ones(pattern.nnz), 0)


@settings(max_examples=40)
@given(chain=chains(longest=25), options=algorithms())
def test_flops_equal_a_direct_count(chain, options):
    """Two a multiplication: row lengths counted from all-ones matrices, products with the identity free."""
    plan = plan_scan(chain.patterns, **options, batch=chain.batch, shared=chain.shared)
    matrix = {Span(i + 1, i + 2): ones(p) for i, p in enumerate(chain.patterns)}
    identity = {span: p.kind == "identity" for span, p in zip(matrix, chain.patterns, strict=True)}
    shared = {span: s or identity[span] for span, s in zip(list(matrix), chain.shared, strict=True)}
    total = 0
    for step in plan.steps:
        right, left, target = step.right, step.left, step.target
        if step.kind == "mv":
            expected = 0 if identity[right] else 2 * int(matrix[right].sum()) * chain.batch
        else:
            count = int((matrix[right] @ matrix[left]).sum())
            free = identity[right] or identity[left]
            matrix[target] = (matrix[right] @ matrix[left] > 0).astype(float)
            shared[target] = shared[right] and shared[left]
            identity[target] = identity[right] and identity[left]
            expected = 0 if free else 2 * count * (1 if shared[target] else chain.batch)
            assert plan.sized.patterns[target].nnz == int(matrix[target].sum())
        assert step.flops == expected
        total += expected
    assert plan.flops == total


@given(n=st.integers(1, 30), size=st.integers(1, 6), batch=st.integers(1, 5))
def test_flops_of_dense_blocks_in_closed_form(n, size, batch):
    plan = plan_scan([SparsityPattern.dense(size, size)] * n, "blelloch", batch=batch)
    mm = sum(n // 2 ** (d + 1) - 1 for d in range(n.bit_length() - 1))
    assert plan.flops == 2 * batch * (mm * size**3 + n * size**2)


def test_injections_are_counted_apart():
    plan = plan_scan([SparsityPattern.dense(3, 3)] * 5, "blelloch", batch=2)
    mm = sum(s.kind == "mm" for s in plan.steps)
    assert plan.injection_flops == 2 * (mm * (2 * 9 + 3) + 5 * 3)


@settings(max_examples=20)
@given(chain=chains(longest=30), options=algorithms())
def test_products_that_live_together_do_not_share_memory(chain, options):
    plan = plan_scan(chain.patterns, **options, batch=chain.batch, shared=chain.shared)
    sized = plan.sized
    shared = shared_spans(sized.recipe.steps, plan.patterns, chain.shared)
    slots, capacities = assign_slots(sized.recipe.steps, sized.plans, sized.patterns, shared, chain.batch)
    assert sum(capacities) * 4 <= sized.workspace
    holder: dict[int, Span] = {}
    source: dict[Span, Span] = {}
    for step, product in zip(sized.recipe.steps, sized.plans, strict=True):
        for operand in (step.left, step.right):
            owner = source.get(operand, operand)
            if owner in slots:
                assert holder[slots[owner]] == owner  # nobody has written over it
        if is_view(product):
            other = step.left if sized.patterns[step.right].kind == "identity" else step.right
            source[step.target] = source.get(other, other)
        elif product is not None:
            holder[slots[step.target]] = step.target
            assert capacities[slots[step.target]] >= product.pattern.nnz


def test_a_reduction_keeps_few_products():
    """A chunk's running product needs two buffers, however long the chunk is."""
    patterns = [SparsityPattern([0, 1, 3], [0, 0, 1], (2, 2))] * 300
    plan = plan_scan(patterns, "chunked", chunks=3)
    assert plan.sized.workspace <= 3 * 3 * 4


@contextmanager
def recorded_empties(monkeypatch):
    """Collect the arrays that `numpy.empty` makes."""
    made, empty = [], np.empty
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
        yield made


def test_memory_is_what_is_allocated(monkeypatch):
    """Buffers and results of a call add up to `memory`, less the index arrays of the plan."""
    for chain in (make_chain(np.random.default_rng(2), 15, 4), make_stack(np.random.default_rng(2), 15, 4, 3, False)):
        stacked = isinstance(chain.data, np.ndarray)
        shared = [False] * 15 if stacked else chain.shared
        plan = plan_scan(chain.patterns, "blelloch", batch=chain.batch, dtype=np.float64, shared=shared)
        with recorded_empties(monkeypatch) as made:
            plan(chain.g, chain.data)
        allocated = sum(a.nbytes for a in made)
        assert allocated <= plan.memory + chain.g.nbytes
        assert allocated >= 0.5 * (plan.sized.workspace + plan.sized.results)


def test_memory_has_the_fours_of_rows_by_which_one_vector_is_run():
    chain = make_chain(np.random.default_rng(2), 15, 1)
    plan = plan_scan(chain.patterns, "linear")
    own = {id(p): p for p in plan.patterns if p.kind not in ("identity", "diagonal", "dense")}.values()
    assert own and plan.sized.index == sum(p.fours.nbytes for p in own)


def limited(patterns, algorithm, limit, **options):
    with pytest.raises(MemoryLimitError) as caught:
        plan_scan(patterns, algorithm, memory_limit=limit, **options)
    return str(caught.value)


def way_out(message: str) -> dict:
    """Take the arguments out of the remedy."""
    found = re.search(r"Use algorithm='(\w+)'(?:, up_levels=(\d+))?", message)
    assert found, message
    up = found.group(2)
    return {"algorithm": found.group(1), **({} if up is None else {"up_levels": int(up)})}


@pytest.mark.parametrize("algorithm", ["blelloch", "chunked"])
@pytest.mark.parametrize("seed", range(4))
def test_refusal_names_an_algorithm_that_fits(algorithm, seed):
    chain = make_chain(np.random.default_rng(seed), 24, 3, most=12)
    options = {"chunks": 6} if algorithm == "chunked" else {}
    full = plan_scan(chain.patterns, algorithm, batch=3, **options).memory
    least = plan_scan(chain.patterns, "linear", batch=3).memory
    for limit in {least, (least + full) // 2, full - 1}:
        if limit >= full:
            continue
        message = limited(chain.patterns, algorithm, limit, batch=3, **options)
        plan = plan_scan(chain.patterns, **way_out(message), memory_limit=limit, batch=3)
        assert plan.memory <= limit
        assert f"{limit} bytes" in message


def test_a_tighter_limit_names_a_hybrid_and_then_the_linear_scan():
    patterns = [SparsityPattern.dense(6, 6)] * 32
    full = plan_scan(patterns, "blelloch", batch=4).memory
    one_level = plan_scan(patterns, "hybrid", up_levels=1, batch=4).memory
    linear = plan_scan(patterns, "linear", batch=4).memory
    assert linear < one_level < full
    assert way_out(limited(patterns, "blelloch", full - 1, batch=4))["algorithm"] == "hybrid"
    assert way_out(limited(patterns, "blelloch", one_level, batch=4)) == {"algorithm": "hybrid", "up_levels": 1}
    assert way_out(limited(patterns, "blelloch", one_level - 1, batch=4)) == {"algorithm": "linear"}
    message = limited(patterns, "blelloch", linear - 1, batch=4)
    assert f"No algorithm fits: the least is algorithm='linear' with {linear} bytes" in message
    assert "No algorithm fits" in limited(patterns, "linear", linear - 1, batch=4)
    assert "No algorithm fits" in limited(patterns, "auto", linear - 1, batch=4)


def test_auto_keeps_to_the_limit():
    patterns = [SparsityPattern.dense(6, 6)] * 1000
    free = plan_scan(patterns, workers=500)
    assert free.algorithm != "linear"
    linear = plan_scan(patterns, "linear")
    tight = plan_scan(patterns, workers=500, memory_limit=linear.memory)
    assert tight.algorithm == "linear"
    assert "beyond" in tight.reason


def test_a_call_with_a_larger_batch_is_refused_before_it_allocates(monkeypatch):
    patterns = [SparsityPattern.dense(6, 6)] * 16
    limit = plan_scan(patterns, "blelloch", batch=2).memory
    plan = plan_scan(patterns, "blelloch", batch=2, memory_limit=limit)
    plan(np.ones((6, 2), np.float32), np.ones((16, 36, 2), np.float32))
    g, data = np.ones((6, 3), np.float32), np.ones((16, 36, 3), np.float32)
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(MemoryLimitError, match=r"batch of 3.*Use algorithm=|No algorithm fits"):
        plan(g, data)


@given(
    chain=chains(longest=9),
    algorithm=st.sampled_from(["linear", "blelloch", "hybrid", "chunked"]),
    double=st.booleans(),
)
def test_a_call_may_take_all_of_the_limit_and_not_a_byte_more(chain, algorithm, double):
    dtype = np.float64 if double else np.float32
    options = {"up_levels": 1} if algorithm == "hybrid" else {}
    shared = {"shared": chain.shared, "dtype": dtype}
    data, g = [d.astype(dtype) for d in chain.data], chain.g.astype(dtype)
    needed = plan_scan(chain.patterns, algorithm, **options, batch=chain.batch, **shared).memory
    first = plan_scan(chain.patterns, algorithm, **options, batch=1, memory_limit=needed, **shared)
    want = plan_scan(chain.patterns, algorithm, **options)(g, data)
    for have, expected in zip(first(g, data), want, strict=True):
        np.testing.assert_array_equal(have, expected)
    first.memory_limit = needed - 1
    first.workspaces.clear()
    with pytest.raises(MemoryLimitError):
        first(g, data)
    first.memory_limit = needed  # refused calls leave nothing behind
    for have, expected in zip(first(g, data), want, strict=True):
        np.testing.assert_array_equal(have, expected)


def test_buffers_are_taken_again_before_new_ones_are_made():
    slots = Slots()
    large, small = slots.take(10), slots.take(5)
    slots.give(large)
    assert slots.take(20) == large and slots.capacities == [20, 5]  # the largest one grows
    slots.give(small)
    slots.give(large)
    assert slots.take(5) == small and slots.take(1) == large and slots.take(1) == 2
    assert slots.capacities == [20, 5, 1]


def test_of_equals_the_simplest_is_taken():
    step, scaling = SparsityPattern.dense(8, 8), SparsityPattern.diagonal(8)
    plan = plan_scan([scaling, step] * 2 + [scaling], workers=2)  # folded together, they are two matrices
    assert plan.compared["linear"] == plan.compared["blelloch"] and plan.algorithm == "linear"


def test_a_host_takes_the_linear_scan_without_counting(monkeypatch):
    monkeypatch.setattr("sparsebp.scan.rules._best", None)
    chain = make_chain(np.random.default_rng(4), 30, 2)
    for plan in (plan_scan(chain.patterns), plan_scan([SparsityPattern.dense(4, 4)] * 64)):
        assert plan.algorithm == "linear" and "On a host auto" in plan.describe() and not plan.compared
    assert plan_scan(chain.patterns, "hybrid").up_levels == 0
    one = plan_scan([SparsityPattern.dense(4, 4)], workers=5)
    assert one.algorithm == "linear" and "one Jacobian" in one.reason


def test_auto_says_why():
    patterns = [SparsityPattern.dense(8, 8)] * 512
    few = plan_scan(patterns, workers=1)
    assert few.algorithm == "linear"
    assert "1 worker" in few.reason and "linear" in few.reason
    many = plan_scan(patterns, workers=4096)
    assert many.algorithm in ("blelloch", "hybrid", "chunked")
    assert min(many.compared.values()) < many.compared["linear"]
    assert many.reason in many.describe()


def test_auto_on_a_chain_of_different_patterns():
    chain = make_chain(np.random.default_rng(4), 30, 2)
    plan = plan_scan(chain.patterns, batch=2, workers=1)
    assert plan.algorithm == "linear"
    assert "linear" in plan.compared


def test_hybrid_without_up_levels_chooses():
    plan = plan_scan([SparsityPattern.dense(4, 4)] * 64, "hybrid", workers=1)
    assert (plan.algorithm, plan.up_levels) == ("hybrid", 0)
    assert plan_scan([SparsityPattern.dense(4, 4)] * 5000, "hybrid", workers=1000).up_levels > 0
    assert plan_scan([SparsityPattern.dense(4, 4)], "hybrid").up_levels == 0


def test_critical_path_is_logarithmic():
    """BPPSA §3.6, in FLOPs: no path of Algorithm 1 is longer than one product a level."""
    for n in (1, 2, 7, 8, 100, 1000):
        plan = plan_scan([SparsityPattern.dense(3, 3)] * n, "blelloch")
        assert len(plan.critical_path) <= 2 * n.bit_length()
        left = plan.critical_path[0].target
        for step in plan.critical_path[1:]:
            assert left in (step.left, step.right)
            left = step.target
    assert len(plan_scan([SparsityPattern.dense(3, 3)] * 50, "linear").critical_path) == 50


def test_equal_patterns_are_planned_once():
    patterns = [SparsityPattern([0, 1, 3], [1, 0, 1], (2, 2)) for _ in range(64)]
    plan = plan_scan(patterns, "blelloch")
    assert len(plan.chain.products) <= 7
    assert len({id(p) for p in plan.patterns}) == 1


def test_describe_is_a_table_with_totals():
    plan = plan_scan([SparsityPattern.dense(4, 4)] * 21, "hybrid", up_levels=2, batch=3)
    text = plan.describe()
    assert "hybrid, 2 levels of up-sweep" in text and "was asked for" in text
    assert "levels         up-sweep 2, middle 4, down-sweep 3, output 1" in text
    rows = [line for line in text.splitlines() if re.match(r"L\d+ ", line)]
    assert len(rows) == len(plan.steps)
    assert sum(line.endswith("*") for line in rows) == len(plan.critical_path)
    assert "more steps" in plan.describe(max_rows=5)
    assert "chunked, 3 chunks" in plan_scan([SparsityPattern.dense(4, 4)] * 9, "chunked", chunks=3).describe()
    assert "21 Jacobians, hybrid" in repr(plan)


def dense_chain(n: int) -> list[SparsityPattern]:
    return [SparsityPattern.dense(2, 2)] * n


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([[]], {}, PatternError, "at least one Jacobian"),
        ([[np.eye(2)]], {}, PatternError, "not a pattern"),
        ([[SparsityPattern.dense(2, 3), SparsityPattern.dense(2, 3)]], {}, ShapeError, "does not chain"),
        ([dense_chain(3), "tree"], {}, OptionError, "Unknown scan algorithm"),
        ([dense_chain(3), "blelloch"], {"up_levels": 1}, OptionError, "hybrid scan alone"),
        ([dense_chain(3), "hybrid"], {"up_levels": -1}, OptionError, "up_levels is too small"),
        ([dense_chain(3), "chunked"], {"workers": 0}, OptionError, "workers is too small"),
        ([dense_chain(3), "chunked"], {"chunks": 0}, OptionError, "chunks is too small"),
        ([dense_chain(3), "blelloch"], {"chunks": 2}, OptionError, "chunks belongs to the chunked scan alone"),
        ([dense_chain(3)], {"batch": 0}, OptionError, "batch is too small"),
        ([dense_chain(3)], {"memory_limit": -1}, OptionError, "memory_limit is too small"),
        ([dense_chain(3)], {"memory_limit": "1G"}, OptionError, "memory_limit is not an integer"),
        ([dense_chain(3)], {"batch": 1.5}, OptionError, "batch is not an integer"),
        ([dense_chain(3)], {"dtype": np.float16}, DTypeError, "float32 or float64"),
        ([dense_chain(3)], {"shared": [True]}, ShapeError, "shared has the wrong length"),
    ],
)
def test_bad_plans_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        plan_scan(*arguments, **options)
    assert "Expected" in str(caught.value) and "Got" in str(caught.value)


def test_planning_does_not_import_what_it_does_not_need():
    code = (
        "import sys, sparsebp as sb; from sparsebp.scan import plan_scan;"
        "sb.plan_scan([sb.SparsityPattern.dense(2, 2)] * 9, 'blelloch').describe();"
        "bad = {'matplotlib', 'cupy', 'torch', 'numba'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plan_is_a_scan_plan():
    plan = plan_scan(dense_chain(5), "chunked", chunks=2)
    assert isinstance(plan, ScanPlan)
    assert (plan.chunks, plan.up_levels, plan.batch) == (2, None, 1)
    assert plan.stackable and not plan_scan([SparsityPattern.diagonal(2)] * 2).stackable


@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_costs_are_for_the_batch_they_are_asked_for(seed):
    chain = make_chain(np.random.default_rng(seed), 8, 1)
    assume(any(p.kind != "identity" for p in chain.patterns))
    one = plan_scan(chain.patterns, "blelloch", batch=1)
    ten = plan_scan(chain.patterns, "blelloch", batch=10)
    assert ten.flops == 10 * one.flops
    assert ten.sized.results == 10 * one.sized.results
    double = plan_scan(chain.patterns, "blelloch", batch=1, dtype=np.float64)
    assert double.sized.workspace == 2 * one.sized.workspace
