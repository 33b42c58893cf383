"""Losses against torch.nn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.errors import OptionError


def test_a_nan_comes_through():
    value, _ = nn.CrossEntropyLoss().forward(np.array([[np.nan, 1.0], [0.0, 1.0]]), np.array([0, 1]))
    assert np.isnan(value)


@pytest.mark.parametrize("weight", [None, np.ones(2)])
def test_a_class_beyond_int64_is_not_taken_for_the_ignored_one(weight):
    target = np.array([0, 2**64 - 100], np.uint64)
    with pytest.raises(OptionError, match="target"):
        nn.CrossEntropyLoss(weight=weight).forward(np.ones((2, 2)), target)
    target[1] = 7
    value, _ = nn.CrossEntropyLoss(weight=weight, ignore_index=7).forward(np.ones((2, 2)), target)
    assert value == pytest.approx(np.log(2))


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": -1}])
def test_what_is_ignored_on_a_device(options):
    cp = backend.cupy()
    rng = np.random.default_rng(0)
    loss, prediction = nn.CrossEntropyLoss(**options), rng.standard_normal((5, 3))
    target = np.array([0, 2, loss.ignore_index, 1, loss.ignore_index])
    twin = torch.from_numpy(prediction.copy()).requires_grad_()
    want = torch.nn.CrossEntropyLoss(**options)(twin, torch.from_numpy(target))
    want.sum().backward()
    value, saved = loss.forward(cp.asarray(prediction), cp.asarray(target))
    np.testing.assert_allclose(cp.asnumpy(cp.asarray(value)), want.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(cp.asnumpy(saved), twin.grad.numpy(), rtol=1e-12, atol=1e-15)
    unread, _ = loss.on_device(cp.asarray(prediction), cp.asarray(target))
    assert bool(cp.isnan(unread).any()) is (loss.ignore_index == -100)
    with pytest.raises(OptionError, match="a class that is not there"):
        loss.forward(cp.asarray(prediction), cp.asarray(np.array([0, 3, -100, 1, 1])))
