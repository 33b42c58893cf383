"""Packed segments run in one compiled call, bitwise equal to one call for each."""

import numpy as np
import pytest

from sparsebp import kernels
from sparsebp.nn.cells import Weights
from sparsebp.torch import ops
from sparsebp.torch.ops import segments

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


def run(kind, dtype, batch_sizes, features, hidden, arrives, bias):
    """Return all that forward and backward leave."""
    rng, rows, batch = np.random.default_rng(0), sum(batch_sizes), batch_sizes[0]

    def draw(*shape):
        return rng.uniform(-1, 1, shape).astype(dtype)

    cuts = segments(np.array(batch_sizes), rows, batch)
    biases = (draw(GATES[kind] * hidden), draw(GATES[kind] * hidden)) if bias else (None, None)
    weights = Weights(draw(GATES[kind] * hidden, features), draw(GATES[kind] * hidden, hidden), *biases)
    start = tuple(draw(batch, hidden) for _ in range(2 if kind == "lstm" else 1))
    x, gy, last = draw(rows, features), draw(rows, hidden), tuple(draw(batch, hidden) for _ in start)
    done = ops.forward(kind, x, cuts, start, weights)
    back = ops.backward(
        kind, x, cuts, start, weights, done.states, done.gates, gy if arrives else None,
        last if bias else (None,) * len(start), True, True, done.h,
    )  # fmt: skip
    arrays = (*done.states, *done.last, done.gates, back.x, *back.start, *back.weights)
    return [array for array in arrays if array is not None]


@pytest.mark.parametrize(("kind", "dtype"), [("rnn_relu", "f4"), ("rnn_tanh", "f8"), ("gru", "f4"), ("lstm", "f4")])
def test_one_call_is_as_one_for_each(kind, dtype, monkeypatch):
    cases = [
        ([7, 7, 7, 5, 5, 2, 1, 1], 3, 11, True, True),
        ([5, 4, 3, 2, 1], 1, 1, False, True),
        ([130] * 3 + [9] * 70, 4, 20, True, False),
        ([6, 6, 5, 2], 129, 9, True, True),  # so many features are projected before
    ]
    together = [run(kind, dtype, *case) for case in cases]
    monkeypatch.setattr(kernels.on_host().cells, "takes", lambda hidden: False)
    for case, found in zip(cases, together, strict=True):
        for one, other in zip(found, run(kind, dtype, *case), strict=True):
            np.testing.assert_array_equal(one, other)
