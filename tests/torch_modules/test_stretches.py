"""Packed segments run in one compiled call, bitwise equal to one call for each."""

import numpy as np
import pytest

from sparsebp.kernels.host.rnn import backward as host_backward
from sparsebp.nn.recurrent.lengths import cut
from sparsebp.nn.recurrent.saved import Weights
from sparsebp.torch import ops

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


def run(kind, dtype, batch_sizes, features, hidden, arrives, bias):
    """Return all that forward and backward leave."""
    rng, rows, batch = np.random.default_rng(0), sum(batch_sizes), batch_sizes[0]

    def draw(*shape):
        return rng.uniform(-1, 1, shape).astype(dtype)

    cuts = cut(np.array(batch_sizes), rows, batch)
    biases = (draw(GATES[kind] * hidden), draw(GATES[kind] * hidden)) if bias else (None, None)
    weights = Weights(draw(GATES[kind] * hidden, features), draw(GATES[kind] * hidden, hidden), *biases)
    start = tuple(draw(batch, hidden) for _ in range(2 if kind == "lstm" else 1))
    x, gy, last = draw(rows, features), draw(rows, hidden), tuple(draw(batch, hidden) for _ in start)
    done = ops.forward(kind, x, cuts, start, weights)
    back = ops.backward(
        kind, done, weights, ops.by_step(gy, cuts, start) if arrives else None, last if bias else (None,) * len(start),
        True, True,
    )  # fmt: skip
    y, ends = ops.infer(kind, x, cuts, start, weights)
    for one, other in zip((y, *ends), (done.h[:, 0], *done.last), strict=True):
        np.testing.assert_array_equal(one, other)
    arrays = (*done.states, *done.last, done.gates, back.x, *back.start, *back.weights)
    return [array for array in arrays if array is not None]


@pytest.mark.parametrize(("kind", "dtype"), [("rnn_relu", "f4"), ("rnn_tanh", "f8"), ("gru", "f4"), ("lstm", "f4")])
def test_one_call_is_as_one_for_each(kind, dtype, monkeypatch):
    cases = [
        ([7, 7, 7, 5, 5, 2, 1, 1], 3, 11, True, True),
        ([5, 4, 3, 2, 1], 1, 1, False, True),
        ([130] * 3 + [9] * 70, 4, 20, True, False),
        ([6, 6, 5, 2], 129, 9, True, True),  # so many features are projected before
        ([6, 6, 5, 2, 1], 3, 130, True, True),
        ([21, 20, 20, 2], 5, 128, False, False),
    ]
    together = [run(kind, dtype, *case) for case in cases]
    monkeypatch.setattr(ops, "fits", lambda *_: False)
    for case, found in zip(cases, together, strict=True):
        for one, other in zip(found, run(kind, dtype, *case), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("kind", "products"), [("rnn_tanh", 1), ("gru", 3), ("lstm", 4)])
def test_the_weights_of_a_large_state_are_packed_once(kind, products, monkeypatch):
    packed, pack = [], host_backward.pack_matrix
    monkeypatch.setattr(host_backward, "pack_matrix", lambda w: packed.append(w.shape) or pack(w))
    run(kind, "f4", [4, 3, 2, 1], 3, 130, True, True)
    assert packed == [(3, packed[0][1]), (130, packed[0][1]), *[(130, 130)] * products]
