"""Pairs of a torch.nn module and ours with the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")


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
