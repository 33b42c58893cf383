"""Convolutions on a device, in every tile: against the host's, over shapes that fill no tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_on_cpu.executor import Order
from cuda_on_cpu.loader import ExecutorLoader
from cuda_on_cpu.memory import CheckedNumpy, uninitialised
from sparsebp import kernels
from sparsebp.kernels.device import DeviceKernels, conv
from sparsebp.kernels.spec import Kernels
from strategies import normal, tolerance

ONES, NONE = (1, 1, 1), (0, 0, 0)
# Samples, input and output channels, sizes, kernel, stride, padding before, dilation, groups, padding behind.
CASES: dict[str, tuple[Any, ...]] = {
    "one number": (1, 1, 1, ONES, ONES, ONES, NONE, ONES, 1, NONE),
    "no sample": (0, 2, 3, (1, 4, 4), (1, 3, 3), ONES, (0, 1, 1), ONES, 1, (0, 1, 1)),
    "same": (2, 3, 17, (1, 8, 8), (1, 3, 3), ONES, (0, 1, 1), ONES, 1, (0, 1, 1)),
    "not square": (1, 5, 7, (1, 5, 11), (1, 2, 5), ONES, (0, 1, 3), ONES, 1, (0, 0, 1)),
    "strides": (3, 2, 5, (1, 7, 9), (1, 3, 3), (1, 2, 3), (0, 1, 0), ONES, 1, (0, 1, 2)),
    "a stride beyond the kernel": (2, 3, 2, (1, 7, 8), (1, 2, 1), (1, 3, 4), NONE, ONES, 1, NONE),
    "a stride beyond the input": (2, 3, 2, (1, 3, 3), (1, 2, 2), (1, 9, 2**40), (0, 1, 0), ONES, 1, NONE),
    "dilated": (2, 2, 3, (1, 9, 10), (1, 3, 3), (1, 2, 2), (0, 2, 3), (1, 2, 3), 1, (0, 1, 3)),
    "dilated by the stride": (1, 2, 3, (1, 12, 8), (1, 2, 3), (1, 4, 2), (0, 1, 0), (1, 6, 2), 1, NONE),
    "groups": (2, 6, 9, (1, 5, 5), (1, 3, 2), ONES, (0, 1, 0), ONES, 3, NONE),
    "depthwise": (2, 5, 5, (1, 6, 6), (1, 3, 3), (1, 2, 2), (0, 1, 1), ONES, 5, (0, 1, 1)),
    "three axes": (1, 2, 3, (4, 3, 5), (2, 3, 2), (2, 1, 2), (1, 1, 0), (1, 1, 2), 1, (0, 1, 1)),
    "long sums": (6, 29, 3, (1, 9, 9), (1, 3, 3), ONES, NONE, ONES, 1, NONE),
    "many channels": (1, 3, 67, (1, 4, 19), (1, 1, 3), ONES, NONE, ONES, 1, NONE),
}  # fmt: skip


def arrays_of(case: tuple[Any, ...], dtype: Any) -> tuple[tuple[Any, ...], dict[str, np.ndarray]]:
    """Return the options, and random weights, x, y and biases."""
    batch, channels, rows, sizes, kernel, stride, before, dilation, groups, behind = case
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    outputs = [(n + b + a - r) // s + 1 for n, b, a, r, s in zip(sizes, before, behind, reach, stride, strict=True)]
    shapes = {
        "weight": (rows, channels // groups, *kernel), "x": (batch, channels, *sizes), "y": (batch, rows, *outputs),
        "of_y": (rows,), "of_x": (channels,),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return (stride, before, dilation, groups), {name: normal(rng, shape, dtype) for name, shape in shapes.items()}


def results(k: Kernels, options: tuple[Any, ...], given: dict[str, np.ndarray], limits: Any) -> list[np.ndarray]:
    """Return what the three kernels write."""
    y, x, weight = (uninitialised(given[name].shape, given["x"].dtype) for name in ("y", "x", "weight"))
    k.convolve(given["weight"], given["x"], *options, y, given["of_y"], limits)
    k.convolve_t(given["weight"], given["y"], *options, x, given["of_x"] if limits else None, limits)
    k.correlate(given["y"], given["x"], *options, weight)
    return [y, x, weight]


FORMS = [(tile, np.float32) for tile in conv.TILES] + [(tile, np.float64) for tile in conv.TILES[1:]]


@pytest.mark.parametrize(("tile", "dtype"), FORMS)
def test_every_tile_agrees_with_the_host(tile: tuple[int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "TILES", (tile,))
    conv._plan.cache_clear()
    device = Kernels(DeviceKernels(CheckedNumpy(), ExecutorLoader(order="random")))
    for name, case in CASES.items():
        options, given = arrays_of(case, dtype)
        limits = (-0.7, 1.5) if name in ("same", "groups") else None
        found, wanted = (results(k, options, given, limits) for k in (device, kernels.get(np)))
        for each, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(each, want, **tolerance(dtype), err_msg=name)
    conv._plan.cache_clear()


def test_long_sums_are_divided_into_parts_and_come_out_the_same_every_time() -> None:
    options, given = arrays_of(CASES["long sums"], np.float32)
    plans = [
        conv._plan(name, given["weight"].shape, given["x"].shape, given["y"].shape, *options, 4, 132)
        for name in ("convolve", "convolve_t", "correlate")
    ]
    assert [plan.parts > 1 for plan in plans] == [True, False, True]
    found = []
    orders: tuple[Order, ...] = ("forward", "reverse")
    for order in orders:
        loader = ExecutorLoader(order=order)
        loader.multiprocessors = 132
        found.append(results(Kernels(DeviceKernels(CheckedNumpy(), loader)), options, given, None))
    for each, other, want in zip(*found, results(kernels.get(np), options, given, None), strict=True):
        np.testing.assert_array_equal(each, other)
        np.testing.assert_allclose(each, want, **tolerance(np.float32, 4))


def test_a_result_that_begins_anywhere_is_written() -> None:
    """Sixteen bytes at a time where it begins at a multiple of them, else number by number."""
    options, given = arrays_of(CASES["same"], np.float32)
    device, room = (
        Kernels(DeviceKernels(CheckedNumpy(), ExecutorLoader())),
        uninitialised(given["y"].size + 1, np.float32),
    )
    out, wanted = room[1:].reshape(given["y"].shape), uninitialised(given["y"].shape, np.float32)
    for k, each in ((device, out), (kernels.get(np), wanted)):
        k.convolve(given["weight"], given["x"], *options, each)
    np.testing.assert_allclose(out, wanted, **tolerance(np.float32))


def test_numbers_that_are_divided_by_a_product_and_a_shift() -> None:
    """Below 2^31, by the formula of the source."""
    near = (2**n + d for n in range(7, 31) for d in (-1, 0, 1))
    numbers = np.array([*range(70), *near, 2**31 - 1], np.uint64)
    for by in (1, 2, 3, 5, 7, 9, 64, 100, 641, 2**16 - 1, 2**16 + 1, 2**30 - 1, 2**30 + 1, 2**31 - 1):
        _, magic, shift = conv._divider(by)
        assert magic < 2**32
        quotients = ((numbers * np.uint64(magic) >> np.uint64(32)) + numbers) >> np.uint64(shift)
        np.testing.assert_array_equal(quotients, numbers // np.uint64(by))


def test_tiles_fit_the_result() -> None:
    def tile_of(name: str, x: tuple[int, ...], weight: tuple[int, ...], groups: int = 1) -> tuple[int, int]:
        y = (x[0], weight[0], 1, x[3], x[4])
        return conv._plan(name, weight, x, y, ONES, (0, 1, 1), ONES, groups, 4, 132).tile

    wide, depthwise = ((32, 64, 1, 56, 56), (128, 64, 1, 3, 3)), ((32, 144, 1, 56, 56), (144, 1, 1, 3, 3), 144)
    assert [tile_of(name, *wide) for name in ("convolve", "convolve_t", "correlate")] == [
        (128, 128),
        (64, 64),
        (128, 128),
    ]
    assert [tile_of(name, *depthwise) for name in ("convolve", "convolve_t")] == [(16, 256)] * 2
    assert tile_of("correlate", *depthwise) == (16, 16)
    assert tile_of("convolve", (32, 3, 1, 32, 32), (6, 3, 1, 3, 3)) == (16, 256)


def test_1x1_convolutions_of_many_channels_are_products() -> None:
    loader = ExecutorLoader()
    device = Kernels(DeviceKernels(CheckedNumpy(), loader))
    for channels, name in ((64, "channel_scale"), (63, "convolve")):
        options, given = arrays_of((3, channels, 65, (1, 2, 3), ONES, ONES, NONE, ONES, 1, NONE), np.float64)
        found, wanted = (results(k, options, given, (-5.0, 7.0)) for k in (device, kernels.get(np)))
        for each, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(each, want, **tolerance(np.float64))
        assert name in {kernel for _, kernel in loader.launched}
        assert ("conv.cu", "convolve_t") not in loader.launched or channels == 63
