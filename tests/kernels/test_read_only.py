"""Read-only outputs and non-arrays are refused by every kernel, on the host and on a device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import types
from numba.core.dispatcher import Dispatcher

from cuda_on_cpu.loader import NoGpu
from cuda_on_cpu.memory import CheckedNumpy
from device.kernel_arguments import KERNELS, Maker, arrays_of, copies, flat, replaced
from sparsebp import kernels
from sparsebp.core.errors import DeviceError, LayoutError
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.spec import Kernels

NAMES = list(KERNELS)
OF_PATTERNS = ("symbolic", "coloring")
"""Modules of functions that plans are made with."""


def implementations():
    return kernels.get(np), Kernels(DeviceKernels(CheckedNumpy(), NoGpu()))


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
def test_read_only_outputs_are_refused_and_read_only_inputs_are_read(name, dtype):
    arguments = Maker(dtype).arguments(name)
    written = written_by(name, arguments)
    assert written
    stated = {key for key, array in getattr(KERNELS[name], "arrays", {}).items() if array.written}
    assert not stated or stated >= written
    host, device = implementations()
    for key in written:
        for implementation in (host, device):
            changed = frozen_where(arguments, {key})
            before = {k: array.tobytes() for k, array in arrays_of(changed).items()}
            with pytest.raises(LayoutError, match="is read-only") as caught:
                getattr(implementation, name)(*changed.values())
            assert key in str(caught.value) or key.startswith("buffers")  # which have a name a rule
            assert before == {k: array.tobytes() for k, array in arrays_of(changed).items()}
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


@pytest.mark.parametrize("wrong", [None, [1.0, 2.0], 1.0, "x"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_array_is_refused_by_name(name, wrong):
    arguments = Maker(np.float32).arguments(name)
    arrays = getattr(KERNELS[name], "arrays", {})
    for key, value in flat(arguments).items():
        optional = key in arrays and arrays[key].there == f"{key} is not None"
        if not isinstance(value, np.ndarray) or (wrong is None and optional):
            continue
        for implementation in implementations():
            with pytest.raises(DeviceError, match=f"{key} is not an array"):
                getattr(implementation, name)(*replaced(arguments, {key: wrong}).values())
