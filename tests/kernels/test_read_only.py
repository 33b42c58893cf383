"""Rows say what a kernel writes, and what it only reads may be read-only; `test_refusals` has what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import types
from numba.core.dispatcher import Dispatcher

from device.kernel_arguments import KERNELS, Maker, arrays_of, copies
from sparsebp import kernels

NAMES = list(KERNELS)
OF_PATTERNS = ("symbolic", "coloring")
"""Modules of functions that plans are made with."""


def written_by(name: str, arguments: dict[str, Any]) -> set[str]:
    """Return which arrays the kernel changes; of a list, all."""
    after = copies(arguments)
    getattr(kernels.get(np), name)(*after.values())
    before, after = arrays_of(arguments), arrays_of(after)
    changed = {key.partition("[")[0] for key in before if before[key].tobytes() != after[key].tobytes()}
    return {key for key in before if key.partition("[")[0] in changed}


def frozen_where(arguments: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return copies of the arguments, the arrays of these names read-only."""
    changed = copies(arguments)
    for key, array in arrays_of(changed).items():
        if key in names:
            array.flags.writeable = False
    return changed


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_rows_state_what_is_written_and_read_only_inputs_are_read(name, dtype):
    arguments = Maker(dtype).arguments(name)
    written = written_by(name, arguments)
    assert written
    stated = {key for key, array in getattr(KERNELS[name], "arrays", {}).items() if array.written}
    assert not stated or stated >= written
    host = kernels.get(np)
    expected, got = copies(arguments), frozen_where(arguments, set(arrays_of(arguments)) - written)
    getattr(host, name)(*expected.values())
    getattr(host, name)(*got.values())
    for key, array in arrays_of(expected).items():
        assert array.tobytes() == arrays_of(got)[key].tobytes(), key


def test_nothing_is_compiled_a_second_time_for_read_only_arrays():
    host, found = kernels.get(np), 0
    for name in NAMES:
        arguments = Maker(np.float32).arguments(name)
        read = set(arrays_of(arguments)) - written_by(name, arguments)
        getattr(host, name)(*frozen_where(arguments, read).values())
    for module in [m for key, m in sys.modules.items() if key.startswith("sparsebp.kernels.host.")]:
        for function in vars(module).values():
            if isinstance(function, Dispatcher) and function.py_func.__module__ == module.__name__:
                if Path(module.__file__).stem in OF_PATTERNS:  # of patterns' arrays alone, all read-only
                    continue
                found += len(function.signatures)
                for signature in function.signatures:
                    assert all(t.mutable for t in signature if isinstance(t, types.Array)), (function, signature)
    assert found > len(NAMES)
