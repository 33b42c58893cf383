"""Jacobians of random chains of all operators, and patterns, against PyTorch's dense Jacobians in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import networks as net
from sparsebp import jacobian_t, nn
from strategies import seeds

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def stable(twin, x, dense):
    """Whether the Jacobian stays when x moves by rounding errors: no tie of a maximum, no kink is near."""
    moved = net.torch_jacobians(twin, x + 1e-12 * np.random.default_rng(0).standard_normal(x.shape))
    return np.allclose(moved, dense, rtol=1e-6, atol=1e-8)


@given(network=net.networks())
@settings(max_examples=100)
def test_chains_of_all_operators(network):
    chain, x = network
    jacobian = jacobian_t(chain.layer, x)
    dense = net.torch_jacobians(chain.twin, x)
    assert jacobian.shape == dense.shape[1:]
    mask = np.zeros(jacobian.shape, bool)
    mask[jacobian.pattern.row_of_entry, jacobian.pattern.indices] = True
    ours = np.stack([jacobian.to_dense(b) for b in range(x.shape[0])])
    if not np.allclose(ours, dense, **CLOSE):
        assume(stable(chain.twin, x, dense))
    np.testing.assert_allclose(ours, dense, **CLOSE)
    assert not dense[:, ~mask].any()


SHAPES = {0: (5,), 1: (2, 6), 2: (2, 4, 4), 3: (2, 2, 3, 2)}
EVERYWHERE = [(kind, axes) for kind in net.ANYWHERE if kind != "Dropout" for axes in (0, 2)]
IMAGES = [(kind, axes) for kind in net.ON_IMAGES for axes in (1, 2, 3)]


@pytest.mark.parametrize(("kind", "axes"), sorted({*EVERYWHERE, *IMAGES}))
@given(data=st.data(), seed=seeds)
@settings(max_examples=4)
def test_the_pattern_is_the_union_of_what_random_inputs_show(kind, axes, data, seed):
    rng = np.random.default_rng(seed)
    operator = data.draw(net.operators(SHAPES[axes], rng, kinds=(kind,)))
    x = rng.standard_normal((300 if "MaxPool" in kind else 40, *operator.shape))  # each place of a window wins once
    pattern = jacobian_t(operator.layer, x[:1]).pattern
    one = torch.func.jacrev(lambda sample: operator.twin(sample[None])[0])
    dense = torch.func.vmap(one)(torch.from_numpy(x)).numpy().reshape(len(x), -1, x[0].size)
    seen = (dense != 0).any(axis=0).T
    mask = np.zeros(pattern.shape, bool)
    mask[pattern.row_of_entry, pattern.indices] = True
    np.testing.assert_array_equal(mask, seen)


def test_the_pattern_of_dropout_is_the_diagonal():
    pattern = jacobian_t(nn.Dropout(0.4, rng=0), np.ones((3, 2, 2))).pattern
    assert pattern.kind == "diagonal" and pattern.shape == (4, 4)
