"""PyTorch's own lists of cases, ``torch.testing._internal``, to run with ours in place of theirs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings


def load(name: str) -> Any:
    """Return a module of ``torch.testing._internal``; skip where this PyTorch has none that can be used.

    They derive their test cases from ``expecttest``, which is not part of PyTorch and which the lists do not need. And
    they load a profile of hypothesis of their own, in the place of which ours is loaded again.
    """
    pytest.importorskip("torch")
    ours = settings.default
    lacking = importlib.util.find_spec("expecttest") is None
    if lacking:
        expecttest: Any = types.ModuleType("expecttest")
        expecttest.TestCase = unittest.TestCase
        sys.modules["expecttest"] = expecttest
    try:
        return importlib.import_module(f"torch.testing._internal.{name}")
    except ImportError as error:
        pytest.skip(f"torch.testing._internal.{name}: {error}", allow_module_level=True)
    finally:
        settings.register_profile("before-torch", parent=ours)
        settings.load_profile("before-torch")
        if lacking:
            del sys.modules["expecttest"]


def version_of_lists(page: Path) -> str:
    """Return the version of PyTorch ("2.13") whose lists the tables of `page` count."""
    found = re.search(r"the lists are PyTorch (\d+\.\d+)'s", page.read_text())
    assert found, f"{page.name} does not say whose lists it counts"
    return found[1]


def lists_are_counted(page: Path) -> bool:
    """Whether the lists of this PyTorch are those that the tables of `page` count; each version has its own."""
    import torch

    return re.match(r"\d+\.\d+", torch.__version__)[0] == version_of_lists(page)


@contextlib.contextmanager
def scalars_in_float64() -> Iterator[None]:
    """Let optimizers of PyTorch keep the numbers of their state in float64: NAdam's product is rounded else."""
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
