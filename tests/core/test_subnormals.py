"""Subnormal numbers are zero in kernels and in blocks of products, and the caller's mode is as it was before."""

from __future__ import annotations

import numba
import numpy as np
import pytest

import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.core import subnormals, threads
from sparsebp.kernels.host.engine.compile import JIT

pytestmark = pytest.mark.skipif(subnormals._control() is None, reason="a processor whose mode is not known")
TINY = {np.float32: 1e-39, np.float64: 1e-309}


def flushes(dtype=np.float32):
    return float(np.array([TINY[dtype]], dtype)[0] + np.array([0], dtype)[0]) == 0


@pytest.fixture(params=[False, True])
def caller(request):
    """A caller that flushes itself, or does not."""
    mode = subnormals.Mode()
    mode.settle(request.param)
    yield request.param
    assert flushes() is request.param
    mode.settle(False)
    assert not flushes()


@pytest.mark.parametrize("dtype", TINY)
def test_kernels_take_them_for_zero_on_every_thread(caller, dtype):
    tiny, results = TINY[dtype], []
    for count in (1, threads.most_threads()):
        threads.set_threads(count)
        params = {"w": np.full(600_000, 2.0, dtype), "v": np.full(3, tiny, dtype)}
        sgd = optim.SGD(params, lr=1.0, momentum=0.5)
        for _ in range(3):
            sgd.step({name: np.full(array.shape, tiny, dtype) for name, array in params.items()})
            assert flushes(dtype) is caller
        a = sb.SparsityPattern.dense(60, 60)
        product = sb.plan_product(a, a)(np.full(3600, 1e-20, dtype), np.full(3600, 1e-20 * tiny, dtype))
        gru = nn.GRU(3, 5, dtype=dtype, rng=0)
        y, saved = gru.forward(np.ones((4, 2, 3), dtype))
        gradient = gru.input_grad(np.full(y.shape, tiny, dtype), saved)
        assert (params["w"] == 2).all()
        assert not params["v"].any() and not product.any() and not gradient.any()
        results.append(b"".join(one.tobytes() for one in (*params.values(), product, gradient, y)))
        assert flushes(dtype) is caller
    assert results[0] == results[1]


def test_bits_do_not_depend_on_the_callers_mode():
    def trained():
        model = nn.Sequential(nn.GRU(2, 3, rng=0), nn.MeanOverSteps(), nn.Linear(3, 2, rng=1))
        adam, grad = optim.Adam(model.parameters(), lr=1e-2), nn.value_and_grad(model, nn.CrossEntropyLoss())
        for _ in range(3):
            adam.step(grad(np.full((6, 4, 2), 1e-37, np.float32), np.arange(4) % 2)[1])
        return [np.asarray(one).tobytes() for one in (*model.parameters().values(), *adam.state_dict().values())]

    mode, found = subnormals.Mode(), trained()
    mode.settle(True)
    try:
        assert trained() == found
    finally:
        mode.settle(False)


def test_a_kernel_that_raises_or_returns_early_restores_the_mode(caller):
    @numba.njit(**{**JIT, "cache": False})
    def product(a, b, way):
        if way == 0:
            raise ValueError("no way")
        return a * b if way == 1 else a / b

    tiny = np.float32(TINY[np.float32])
    with pytest.raises(ValueError, match="no way"):
        product(tiny, tiny, 0)
    assert flushes() is caller
    assert product(tiny, np.float32(1), 1) == 0
    assert flushes() is caller


def test_blocks_nest(caller):
    with threads.one_blas_thread():
        with threads.one_core():
            assert flushes()
        assert flushes() and flushes(np.float64)
        assert not (np.full((64, 64), 1e-20, np.float32) @ np.full((64, 64), 1e-20, np.float32)).any()
        with pytest.raises(ZeroDivisionError), threads.one_blas_thread():
            raise ZeroDivisionError
        assert flushes()
    assert flushes() is caller


def test_a_block_that_is_left_by_an_interrupt_ends_with_the_next_one():
    block = threads.one_blas_thread()
    block.__enter__()
    del block  # the interrupt came before the first line of __exit__
    assert flushes()
    threads.thread_counts()
    assert not flushes()
