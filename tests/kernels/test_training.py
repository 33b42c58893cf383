"""Loss and optimizer kernels on every backend, against PyTorch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.errors import DTypeError, OptionError, ShapeError
from strategies import normal, reals, seeds, sizes, tolerance


def double(array):
    return torch.tensor(array.astype(np.float64))


@given(n=sizes(0, 33), classes=sizes(1, 33), scale=st.sampled_from([1.0, 30.0]), dtype=reals, seed=seeds)
def test_softmax_cross_entropy(backend, n, classes, scale, dtype, seed):
    rng = np.random.default_rng(seed)
    logits, target = normal(rng, (n, classes), dtype, scale), rng.integers(0, classes, n)
    losses, grad = backend.empty(n, dtype), backend.empty((n, classes), dtype)
    backend.kernels.softmax_cross_entropy(backend.array(logits), backend.array(target), losses, grad)
    x = double(logits).requires_grad_()
    expected = torch.nn.functional.cross_entropy(x, torch.tensor(target), reduction="none")
    expected.sum().backward()
    np.testing.assert_allclose(backend.numpy(losses), expected.detach(), **tolerance(dtype, 10))
    np.testing.assert_allclose(backend.numpy(grad), x.grad, **tolerance(dtype, 10))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_a_loss_that_is_not_finite(backend, value):
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = value
    losses, grad = backend.empty(3, np.float32), backend.empty((3, 4), np.float32)
    backend.kernels.softmax_cross_entropy(backend.array(logits), backend.array([0, 1, 2]), losses, grad)
    np.testing.assert_array_equal(np.isfinite(backend.numpy(losses)), [True, False, True])
    assert np.isfinite(backend.numpy(grad)[[0, 2]]).all()


@given(
    shape=st.sampled_from([(), (1,), (0, 3), (7,), (3, 5), (2, 3, 11)]), momentum=st.sampled_from([0.0, 0.9]),
    variant=st.sampled_from(["plain", "dampened", "nesterov"]), weight_decay=st.sampled_from([0.0, 0.1]), dtype=reals,
    seed=seeds,
)  # fmt: skip
def test_sgd_update(backend, shape, momentum, variant, weight_decay, dtype, seed):
    rng = np.random.default_rng(seed)
    nesterov = variant == "nesterov" and momentum > 0
    dampening = 0.2 if variant == "dampened" else 0.0
    start = normal(rng, shape, dtype)
    theirs = double(start).requires_grad_()
    optimizer = torch.optim.SGD(
        [theirs], lr=0.3, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
    )
    ours = backend.array(start)
    buffer = backend.empty(shape, dtype) if momentum else None
    for step in range(3):
        grad = normal(rng, shape, dtype)
        theirs.grad = double(grad)
        optimizer.step()
        backend.kernels.sgd_update(
            ours, backend.array(grad), buffer, 0.3, momentum, dampening, weight_decay, nesterov, step == 0
        )
    np.testing.assert_allclose(backend.numpy(ours), theirs.detach(), **tolerance(dtype))


@given(
    shape=st.sampled_from([(), (1,), (0, 3), (7,), (3, 5), (2, 3, 11)]), decoupled=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]), dtype=reals, seed=seeds,
)  # fmt: skip
def test_adam_update(backend, shape, decoupled, weight_decay, dtype, seed):
    rng = np.random.default_rng(seed)
    start = normal(rng, shape, dtype)
    theirs = double(start).requires_grad_()
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = make([theirs], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    ours, m, v = backend.array(start), backend.zeros(shape, dtype), backend.zeros(shape, dtype)
    for step in range(1, 5):
        grad = normal(rng, shape, dtype)
        theirs.grad = double(grad)
        optimizer.step()
        backend.kernels.adam_update(
            ours, backend.array(grad), m, v, 0.01, 0.8, 0.95, 1e-6, weight_decay, decoupled, step
        )
    np.testing.assert_allclose(backend.numpy(ours), theirs.detach(), **tolerance(dtype))


def test_a_gradient_that_is_not_finite_reaches_its_own_parameter_only(backend):
    grad = np.array([1, np.nan, np.inf], np.float32)
    param = backend.array(np.ones(3), np.float32)
    m, v = backend.zeros(3, np.float32), backend.zeros(3, np.float32)
    backend.kernels.adam_update(param, backend.array(grad), m, v, 0.1, 0.9, 0.999, 1e-8, 0.0, False, 1)
    np.testing.assert_array_equal(np.isfinite(backend.numpy(param)), [True, False, False])


def test_wrong_arguments_are_refused(backend):
    k, ones = backend.kernels, backend.array(np.ones(3, np.float32))
    with pytest.raises(ShapeError, match="momentum"):
        k.sgd_update(ones, ones, None, 0.1, 0.9, 0.0, 0.0, False, True)
    with pytest.raises(ShapeError, match="momentum"):
        k.sgd_update(ones, ones, ones, 0.1, 0.0, 0.0, 0.0, False, True)
    with pytest.raises(DTypeError, match="grad"):
        k.sgd_update(ones, ones.astype(np.float64), None, 0.1, 0.0, 0.0, 0.0, False, True)
    with pytest.raises(OptionError, match="step"):
        k.adam_update(ones, ones, ones, ones, 0.1, 0.9, 0.999, 1e-8, 0.0, False, 0)
    with pytest.raises(ShapeError, match="losses"):
        k.softmax_cross_entropy(
            backend.array(np.ones((2, 3), np.float32)), backend.array([0, 1]), ones, backend.empty((2, 3), np.float32)
        )
    with pytest.raises(DTypeError, match="target"):
        target = backend.array([0, 1], np.int32)
        logits = backend.array(np.ones((2, 3), np.float32))
        k.softmax_cross_entropy(logits, target, backend.empty(2, np.float32), backend.empty((2, 3), np.float32))


def test_host_updates_are_bitwise_equal_for_every_number_of_threads():
    import numba

    rng, k = np.random.default_rng(0), kernels.get(np)
    start, grad = normal(rng, (300_003,), np.float32), normal(rng, (300_003,), np.float32)
    logits, target = normal(rng, (9001, 10), np.float32), rng.integers(0, 10, 9001)
    results, before = [], numba.get_num_threads()
    try:
        for threads in (1, before, before):
            numba.set_num_threads(threads)
            param, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
            losses, slope = np.empty(9001, np.float32), np.empty_like(logits)
            k.adam_update(param, grad, m, v, 0.1, 0.9, 0.999, 1e-8, 0.1, True, 1)
            k.sgd_update(param, grad, m, 0.1, 0.9, 0.0, 0.1, True, False)
            k.softmax_cross_entropy(logits, target, losses, slope)
            results.append((param, m, v, losses, slope))
    finally:
        numba.set_num_threads(before)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, second)
