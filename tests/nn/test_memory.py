"""The pool behind large NumPy arrays: memory is used again, but never while a view of it lives."""

from __future__ import annotations

import gc
import threading

import numpy as np

from sparsebp import nn
from sparsebp.core import host_pool


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_the_last_view_dies():
    pool = host_pool.HostPool()
    array = pool.empty((3, host_pool.SMALLEST), np.float32)
    assert array.flags.c_contiguous and array.flags.writeable and array.dtype == np.float32
    first = address(array)
    assert first % host_pool.ALIGNMENT == 0
    view = array[1:, ::2].reshape(-1)[3:]
    view = array.T[4:, 0]
    array[...] = 7
    del array
    gc.collect()
    other = pool.empty((3, host_pool.SMALLEST), np.float32)
    assert address(other) != first
    other[...] = 8
    assert (view == 7).all() and pool.free_bytes == 0
    del view
    gc.collect()
    assert pool.free_bytes > 0
    assert address(pool.empty((3 * host_pool.SMALLEST,), np.float32)) == first  # the same number of bytes
    assert np.asarray(other, np.float64).dtype == np.float64


def test_small_arrays_and_empty_ones_are_plain():
    pool = host_pool.HostPool()
    assert pool.empty((3,), np.float64).base is None
    assert pool.empty((0, 10**9), np.float64).shape == (0, 10**9)
    assert host_pool.empty(np, (4, 5), "float32").shape == (4, 5)


def test_no_more_than_the_limit_is_kept():
    pool = host_pool.HostPool(kept=3 * host_pool.SMALLEST)
    arrays = [pool.empty((host_pool.SMALLEST + 64 * i,), np.uint8) for i in range(5)]
    del arrays
    gc.collect()
    assert 0 < pool.free_bytes <= pool.kept
    big = pool.empty((pool.kept + 1,), np.uint8)
    before = pool.free_bytes
    del big
    gc.collect()
    assert pool.free_bytes == before


def test_all_that_is_kept_is_handed_out_again():
    pool = host_pool.HostPool(kept=3 * (host_pool.SMALLEST + host_pool.ALIGNMENT))
    sizes = [host_pool.SMALLEST] * 5
    arrays = [pool.empty((size,), np.uint8) for size in sizes]
    there = {address(array) for array in arrays}
    del arrays
    gc.collect()
    assert pool.free_bytes == pool.kept
    again = [pool.empty((size,), np.uint8) for size in sizes[:3]]
    assert pool.free_bytes == 0 and {address(array) for array in again} < there
    other = pool.empty((2 * host_pool.SMALLEST,), np.uint8)
    del again, other  # the size that was met first makes room
    gc.collect()
    assert pool.free_bytes == 2 * host_pool.SMALLEST + host_pool.ALIGNMENT + host_pool.SMALLEST + host_pool.ALIGNMENT
    assert pool.release() > 0 and pool.free_bytes == 0 == pool.release()


def test_threads():
    pool = host_pool.HostPool()
    wrong = []

    def work(number):
        for _ in range(200):
            array = pool.empty((host_pool.SMALLEST,), np.uint8)
            array[...] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_output_outlives_its_saved():
    layer = nn.GRU(3, 16, rng=0)
    x = np.random.default_rng(0).standard_normal((500, 16, 3)).astype(np.float32)
    y = layer(x)
    copy = y.copy()
    for _ in range(3):
        layer(x + 1)
    np.testing.assert_array_equal(y, copy)
