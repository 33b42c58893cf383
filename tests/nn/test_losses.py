"""Losses against torch.nn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import seeds, sizes

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


@given(n=sizes(1, 9), classes=sizes(1, 9), scale=st.sampled_from([1.0, 100.0]), seed=seeds)
def test_cross_entropy(n, classes, scale, seed):
    rng = np.random.default_rng(seed)
    logits, target = scale * rng.standard_normal((n, classes)), rng.integers(0, classes, n)
    tensor = torch.from_numpy(logits).requires_grad_()
    want = torch.nn.functional.cross_entropy(tensor, torch.from_numpy(target))
    want.backward()
    loss = nn.CrossEntropyLoss()
    for integers in (np.int64, np.uint8):
        value, saved = loss.forward(logits, target.astype(integers))
        assert isinstance(value, float)
        np.testing.assert_allclose(value, want.item(), **CLOSE)
        np.testing.assert_allclose(loss.input_grad(saved), tensor.grad.numpy(), **CLOSE)


@given(shape=st.lists(sizes(1, 5), min_size=1, max_size=3), seed=seeds)
def test_mse(shape, seed):
    rng = np.random.default_rng(seed)
    prediction, target = rng.standard_normal(shape), rng.standard_normal(shape)
    tensor = torch.from_numpy(prediction).requires_grad_()
    want = torch.nn.functional.mse_loss(tensor, torch.from_numpy(target))
    want.backward()
    value, saved = nn.MSELoss().forward(prediction, target)
    np.testing.assert_allclose(value, want.item(), **CLOSE)
    np.testing.assert_allclose(nn.MSELoss().input_grad(saved), tensor.grad.numpy(), **CLOSE)


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


def test_bad_input_is_refused():
    loss, logits = nn.CrossEntropyLoss(), np.ones((2, 3))
    with pytest.raises(DTypeError, match="class numbers"):
        loss.forward(logits, np.ones(2))
    with pytest.raises(ShapeError, match="target"):
        loss.forward(logits, np.zeros(3, int))
    with pytest.raises(ShapeError, match="empty"):
        loss.forward(np.ones((0, 3)), np.zeros(0, int))
    with pytest.raises(ValueError, match="target"):
        loss.forward(logits, np.array([0, 3]))
    with pytest.raises(ShapeError, match="target"):
        nn.MSELoss().forward(logits, np.ones((3, 2)))
    with pytest.raises(DTypeError, match="target"):
        nn.MSELoss().forward(logits, np.ones((2, 3), np.float32))
    with pytest.raises(ShapeError, match="empty"):
        nn.MSELoss().forward(np.ones((0, 3)), np.ones((0, 3)))


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
