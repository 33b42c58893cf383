"""Every product of Blelloch's scan over the convolution layers of VGG-11: its operands, its operations, its seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sparsebp import nn
from sparsebp.patterns import SparsityPattern
from sparsebp.products import ProductPlan, plan_product
from sparsebp.scan.algorithms import Span, critical_path, recipe
from sparsebp.scan.run import Multiply

OPERATORS = 21
"""Of VGG-11, in front of its linear layer (BPPSA §5.3)."""
_LONG, _BUDGET, _TRIALS = 2.0, 0.5, 50
"""Seconds from which a step is run once; seconds for the trials of a shorter one; trials at most, as in the preprint"""


class Element(NamedTuple):
    """A transposed Jacobian, or a product of some: where its entries are, and their values for one image."""

    pattern: SparsityPattern
    data: np.ndarray


def elements(model: nn.Sequential, x: np.ndarray) -> list[Element]:
    """Return J_1 … J_21 for the image `x`, the last operator's first.

    Max-pooling is stored as in Algorithms 8 to 10: one entry for each output.
    """
    saved = model.forward(x)[1]
    found = []
    for number in reversed(range(OPERATORS)):
        made = model[number].jacobian_t(saved.layers[number])
        data = np.ascontiguousarray(made.data.reshape(made.pattern.nnz, -1)[:, 0])
        found.append(Element(made.pattern, data))
        if isinstance(model[number], nn.MaxPool2d):
            found[-1] = _without_zeros(found[-1])
    return found


def _without_zeros(element: Element) -> Element:
    matrix = element.pattern.to_scipy(element.data, copy=True)
    matrix.eliminate_zeros()
    return Element(SparsityPattern.from_scipy(matrix), matrix.data)


def walk(
    chain: Sequence[Element], *, timed: bool, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Go through Algorithm 1 and return a row for every product, and for every Jacobian that it starts from.

    Parameters
    ----------
    chain
        As `elements` returns it.
    timed
        Whether values are multiplied and each step is timed; else the patterns alone are.
    note
        Takes a line for every product.
    """
    steps = recipe("blelloch", len(chain)).steps
    spans = {Span(i + 1, i + 2): element for i, element in enumerate(chain)}
    last = {span: number for number, step in enumerate(steps) for span in (step.left, step.right)}
    g = np.random.default_rng(1).standard_normal((chain[0].pattern.shape[1], 1)).astype(chain[0].data.dtype)
    vectors, multiply = {Span(0, 1): g}, Multiply(g)
    exact = _linear(chain, g, multiply, timed)
    rows = [_row(str(span), "input", element) for span, element in spans.items()]
    products = []
    for number, step in enumerate(steps):
        right = spans[step.right]
        row: dict[str, Any] = {"step": str(step.target), "kind": step.kind, "phase": step.phase, "level": step.level}
        if step.kind == "mv":
            size = right.pattern.shape
            row |= {"flops": 2 * right.pattern.nnz, "dense": math.prod(size)}
            if timed:
                seconds, y = _time(partial(multiply, *right, vectors[step.left], None))
                vectors[step.target] = y
                wanted = exact[step.target.stop - 1][1]
                row |= {"seconds": seconds, "difference": _difference(y, wanted)}
        else:
            left = spans[step.left]
            plan, spans[step.target], taken = _product(right, left, timed)
            row |= _row(str(step.target), "mm", spans[step.target]) | {
                "flops": plan.flops, "dense": right.pattern.shape[0] * math.prod(left.pattern.shape),
                "left": left.pattern.nnz, "right": right.pattern.nnz, "strategy": plan.strategy, "seconds": taken,
            }  # fmt: skip
            note(f"{row['step']}: {row['flops']:.3g} FLOP, {row['nnz']} entries")
        products.append(row)
        for span in {step.left, step.right}:
            if last[span] == number:
                spans.pop(span, None)
    path = set(critical_path(steps, [row["flops"] for row in products]))
    for number, row in enumerate(products):
        row["critical"] = number in path
    if timed:
        rows += [{"step": f"y{i}", "kind": "linear", "seconds": exact[i][0]} for i in sorted(exact)]
    return rows + products


def _row(step: str, kind: str, element: Element) -> dict[str, Any]:
    pattern = element.pattern
    return {"step": step, "kind": kind, "nnz": pattern.nnz, "sparsity": pattern.sparsity,
            "convolution": kind == "input" and pattern.kind in ("general", "dense")}  # fmt: skip


def _product(right: Element, left: Element, timed: bool) -> tuple[ProductPlan, Element, float | None]:
    """Return the plan of ``right · left``, the product, and the seconds of its values."""
    plan = plan_product(right.pattern, left.pattern)
    if not timed:
        return plan, Element(plan.pattern, np.empty(0, np.float32)), None
    out = np.empty(plan.pattern.nnz, right.data.dtype)
    seconds, _ = _time(lambda: plan(right.data, left.data, out=out))
    return plan, Element(plan.pattern, out), seconds


def _linear(
    chain: Sequence[Element], g: np.ndarray, multiply: Multiply, timed: bool
) -> dict[int, tuple[float, np.ndarray]]:
    """Return seconds and result of every step of the linear scan: the preprint's weaker baseline."""
    found: dict[int, tuple[float, np.ndarray]] = {}
    y = g
    for number, element in enumerate(chain if timed else (), 1):
        seconds, y = _time(partial(multiply, *element, y, None))
        found[number] = seconds, y
    return found


def _difference(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def _time(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median of the trials after one that warms up, and the last result; a long run is the only one."""
    begin = time.perf_counter()
    result = run()
    seconds = [time.perf_counter() - begin]
    if seconds[0] < _LONG:
        begin, seconds = time.perf_counter(), []
        while not seconds or (len(seconds) < _TRIALS and time.perf_counter() - begin < _BUDGET):
            start = time.perf_counter()
            result = run()
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), result
