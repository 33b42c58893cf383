"""Pairs of a torch.nn module and ours with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test draws the same numbers, and leaves PyTorch's generator as it was."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before)


@pytest.fixture(scope="session")
def pair() -> Any:
    """``pair("GRU", 5, 7, …)``: the module of torch.nn, and ours with the same weights, in float64 unless told."""
    import sparsebp.torch as st

    def make(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        kwargs.setdefault("dtype", torch.float64)
        theirs, ours = getattr(torch.nn, name)(*args, **kwargs), getattr(st, name)(*args, **kwargs)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        return theirs, ours

    return make
