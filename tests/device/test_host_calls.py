"""How much a call from PyTorch asks of the host: in a short run, that takes longer than the work of the GPU.

Counted on the stand-in, of which real CuPy has as much to do; times are measured by ``python -m benchmarks gpu-peers``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sparsebp
import sparsebp.torch as st
import strict_cupy
from sparsebp.torch import ops

pytestmark = pytest.mark.gpu
OURS, CUPY = Path(sparsebp.__file__).parent, Path(strict_cupy.__file__).parent
QUICK = ("<lambda>", "data", "__len__")
"""Attributes, which cost next to nothing."""


class Calls(NamedTuple):
    """What the host does for a call: tensors turned into arrays and back, launches and copies on the device, functions
    of CuPy, and functions of this package."""

    taken: int
    given: int
    launches: int
    cupy: int
    ours: int


def counted(run: Callable[[], Any]) -> Calls:
    """Count one call that is not the first."""
    run()
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        place, caller = Path(frame.f_code.co_filename), Path(frame.f_back.f_code.co_filename)
        name = frame.f_code.co_name
        if CUPY in place.parents and OURS in caller.parents and name not in QUICK:
            seen["cupy"] += 1
        elif OURS in place.parents and "<" not in name:
            seen["ours"] += 1
            seen[name] += 1

    with strict_cupy.counted() as counts:
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    assert (counts.h2d, counts.d2h, counts.synchronized, counts.allocations) == (0, 0, 0, 0)
    return Calls(seen["to_array"], seen["to_tensor"], counts.launches, seen["cupy"], seen["ours"])


@pytest.fixture(autouse=True)
def on_the_stand_in() -> Iterator[None]:
    if not strict_cupy.installed():
        pytest.skip("counted on the stand-in")
    from strict_cupy.tensors import on_the_device

    with on_the_device():
        yield


def back(module: Any, x: Any) -> Callable[[], None]:
    def run() -> None:
        y = module(x)[0]
        y = y if isinstance(y, torch.Tensor) else y.data
        y.backward(torch.ones_like(y))

    return run


def gru() -> Any:
    return st.accelerate(torch.nn.GRU(38, 20), faster_only=False)


MOST = {
    "inference": Calls(6, 2, 3, 53, 106),
    "forward": Calls(6, 4, 5, 62, 118),
    "forward and backward": Calls(15, 9, 11, 159, 287),
    "packed": Calls(15, 8, 8, 141, 238),
    "linear recurrence": Calls(5, 3, 4, 58, 132),  # two launches fill a missing h0, in place of PyTorch's
}


def call_of(name: str) -> Callable[[], Any]:
    module, x = gru(), torch.randn(300, 2, 38)
    if name == "inference":
        return torch.no_grad()(lambda: module(x))
    if name == "forward":
        return lambda: module(x)
    if name == "forward and backward":
        return back(module, x)
    if name == "packed":
        lengths = torch.arange(12) + 1
        return back(module, torch.nn.utils.rnn.pack_padded_sequence(torch.randn(12, 12, 38), lengths, False, False))
    a, b = (torch.rand(10, 2, 3, requires_grad=True) for _ in range(2))
    return lambda: st.linear_recurrence(a, b).sum().backward()


@pytest.mark.parametrize("name", MOST)
def test_a_call_asks_no_more_of_the_host(name: str) -> None:
    got, most = counted(call_of(name)), MOST[name]
    assert all(count <= limit for count, limit in zip(got, most, strict=True)), (got, most)


def test_weights_are_where_pytorch_left_them() -> None:
    """Updated in place, put elsewhere, or loaded: no call uses what was there before."""
    module, x = gru(), torch.randn(5, 2, 38)

    def found() -> tuple[Any, Any]:
        with torch.no_grad():
            return module(x)[0].clone(), torch.nn.GRU.forward(module, x)[0]

    other = torch.nn.GRU(38, 20).state_dict()
    with torch.no_grad():
        module.weight_hh_l0.mul_(0.5)
        torch.testing.assert_close(*found())
        module.weight_ih_l0.data = module.weight_ih_l0.data * 2
        torch.testing.assert_close(*found())
        module.bias_hh_l0 = torch.nn.Parameter(torch.ones(60))
        torch.testing.assert_close(*found())
        module.load_state_dict(other)
        torch.testing.assert_close(*found())
        module.weight_hh_l0.data = module.weight_hh_l0.data.T.contiguous().T  # not as it lies in memory
        torch.testing.assert_close(*found())


def test_a_result_shares_no_memory_with_what_is_kept() -> None:
    """A caller may write to it before the backward."""
    module, x = gru(), torch.randn(6, 2, 38, requires_grad=True)
    want = torch.autograd.grad(module(x)[0].sum(), x)[0]
    y, h = module(x)
    with torch.no_grad():
        y.detach().zero_(), h.detach().zero_(), y.detach().fill_(float("nan"))
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones_like(y))[0], want)


def test_an_array_that_is_an_input_is_copied() -> None:
    """Also a part of one, or one that is transposed: the result is not the input's memory."""
    x = torch.arange(12.0).reshape(3, 4)
    with ops.on_its_stream(x):
        array = ops.to_array(x)
        for tensor, like in ((ops.to_tensor(array), x), (ops.to_tensor((array * 2).T), 2 * x.T)):
            assert tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            assert not tensor._is_view() and tensor.is_contiguous()
            torch.testing.assert_close(tensor, like)
