"""Every CUDA source compiles with CuPy's options and every set of defines, and no kernel spills registers.

All sets for one architecture; for the others every file and kernel, with the sets that need most registers: everything
for each would take a minute of CPU more. NVRTC needs no GPU. The most registers that each kernel takes are printed in
the test run's summary (see conftest.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import pytest

from sass.nvrtc import kept_usage, log_of, usage, usage_key, usage_of
from sparsebp.kernels.device import SOURCES, DeviceKernels, source
from sparsebp.kernels.device.launch import Defines
from sparsebp.kernels.operands import WeightSums

ARCHITECTURE = "sm_90"
OTHERS = ("sm_80", "sm_100")


def cases() -> list[tuple[str, Defines, str]]:
    everything = [(file, defines) for file, sets in SOURCES.items() for defines in sets]
    demanding = [(file, defines) for file, defines in everything if is_demanding(defines, SOURCES[file])]
    every = [(file, defines, ARCHITECTURE) for file, defines in everything]
    return every + [(file, defines, other) for other in OTHERS for file, defines in demanding]


def is_demanding(defines: Defines, sets: list[Defines]) -> bool:
    """Return whether the set is the largest of its kind in the file."""
    sizes = ("HIDDEN", "ROWS", "INPUTS")

    def kind(one: Defines) -> tuple[object, ...]:
        return "HIDDEN" in one, "ROWS" in one, *sorted(item for item in one.items() if item[0] not in sizes)

    def size(one: Defines) -> list[int]:
        return [int(one.get(name, 0)) for name in sizes]

    if defines.get("RELU") == 1:  # a line's difference
        return False
    return size(defines) == max(size(one) for one in sets if kind(one) == kind(defines))


def case_id(case: tuple[str, Defines, str]) -> str:
    file, defines, architecture = case
    names = (f"{name}={value}" for name, value in defines.items())
    return "-".join([file, *names, architecture]).replace(" ", "_")


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_compiles_without_spills(
    case: tuple[str, Defines, str], record_property: Callable[[str, object], None]
) -> None:
    file, defines, architecture = case
    kernels = usage_of(file, defines, architecture)
    assert kernels, f"{file} defines no kernel with {defines}"
    for kernel in kernels:
        named = " ".join(f"{name}={value}" for name, value in defines.items())
        record_property("registers", [file, kernel.kernel, architecture, kernel.registers, named])
        assert kernel.spill_stores == kernel.spill_loads == 0, f"{kernel} with {defines} on {architecture}"


@pytest.mark.parametrize("case", [("pointwise.cu", ARCHITECTURE), ("scan.cu", OTHERS[0]), ("csr.cu", OTHERS[1])])
def test_what_is_kept_of_a_compilation_is_what_the_compiler_says(case: tuple[str, str]) -> None:
    file, architecture = case
    defines = next(defines for name, defines, target in cases() if (name, target) == case)
    kept = kept_usage().get(usage_key(file, defines, architecture))
    if kept is None:
        pytest.skip("another version of NVRTC, or of the source: compiled by the tests above")
    assert [tuple(entry) for entry in kept] == usage(log_of(file, defines, architecture))


def test_every_file_is_listed() -> None:
    folder = resources.files("sparsebp.kernels.device") / "cuda"
    files = {entry.name for entry in folder.iterdir() if entry.name.endswith(".cu")}
    assert files == set(SOURCES)
    assert all(SOURCES.values()), "a file without a set of defines is never compiled"


@pytest.mark.parametrize("architecture", (ARCHITECTURE, *OTHERS))
@pytest.mark.parametrize("file", SOURCES)
def test_every_kernel_of_a_file_is_compiled(file: str, architecture: str) -> None:
    own = source(file).split(f'#line 1 "{file}"')[1]
    declared = set(re.findall(r"__global__[^(]*?(?:\bvoid\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(", own))
    sets = [defines for name, defines, target in cases() if (name, target) == (file, architecture)]
    compiled = {kernel.kernel for defines in sets for kernel in usage_of(file, defines, architecture)}
    assert declared
    assert compiled == declared


class _DoesNothing:
    """A kernel that takes any launch."""

    max_dynamic_shared_size_bytes = 0

    def __call__(self, *_: Any, **__: Any) -> None: ...


class _Asked:
    """A loader whose kernels do nothing: it notes with which defines the launchers ask for a file."""

    max_shared_memory, multiprocessors = 227 * 1024, 132

    def __init__(self) -> None:
        self.defines: dict[str, set[frozenset[str]]] = {}

    def get(self, file: str, defines: Defines) -> _Asked:
        self.defines.setdefault(file, set()).add(frozenset(defines))
        return self

    def get_function(self, _name: str) -> _DoesNothing:
        return _DoesNothing()


def test_launchers_ask_for_the_listed_sets_of_defines() -> None:
    asked = _Asked()
    kernels = DeviceKernels(np, asked)
    for hidden in (1, 5, 20, 32, 33, 64, 128, 200):
        for dtype in (np.float32, np.float64):
            _recurrent_launches(kernels, hidden, dtype)
            _lstm_launches(kernels, hidden, dtype)
    for file, sets in asked.defines.items():
        listed = {frozenset(defines) for defines in SOURCES[file]}
        assert sets <= listed, f"{file}: the launchers ask for {sets - listed}, SOURCES lists {listed}"


def _recurrent_launches(kernels: DeviceKernels, hidden: int, dtype: type) -> None:
    steps, batch, chunks = 8, 2, 4
    real = functools.partial(np.zeros, dtype=dtype)
    h, h0, gates = real((steps, batch, hidden)), real((batch, hidden)), real((steps, batch, 4 * hidden))
    w, w3, gh0 = real((hidden, hidden)), real((3 * hidden, hidden)), real((batch, hidden))
    gx, ga = real((steps, batch, 3 * hidden)), real((steps, batch, 4 * hidden))
    jacobians = real((steps, hidden, hidden, batch))
    for x, w_ih in (
        (h, None),
        (real((steps, batch, 1)), real((hidden, 1))),
        (real((steps, batch, 5)), real((hidden, 5))),
    ):
        bias = None if w_ih is None else real(hidden)
        kernels.rnn_forward(x, w, h0, "tanh", real(h.shape), w_ih, bias, bias)
    kernels.rnn_backward(h, w, None, h0, "relu", real(h.shape), gh0, 1, None)
    kernels.rnn_backward(h, w, h, h0, "tanh", real(h.shape), gh0, chunks, None)
    kernels.rnn_jacobians(h, w, "tanh", jacobians)
    for features in (1, 3, 8, 9):
        x, outputs = real((steps, batch, features)), [real((hidden, n)) for n in (features, hidden)]
        sums = WeightSums(x, h, *outputs, real(hidden), None)
        kernels.rnn_backward(h, w, h, h0, "tanh", None, gh0, chunks, sums)
        kernels.rnn_backward(h, w, None, h0, "tanh", None, gh0, 1, sums)
        outputs = [real((3 * hidden, n)) for n in (features, hidden)]
        kernels.gru_backward(h, h0, gates, w3, h, h0, None, gh0, chunks, WeightSums(x, h, *outputs, None, None))
    for x, w_ih in ((gx, None), (real((steps, batch, 3)), real((3 * hidden, 3)))):
        kernels.gru_forward(x, w3, real(hidden), h0, real(h.shape), gates, w_ih, None, None)
    kernels.gru_backward(h, h0, gates, w3, h, None, ga, gh0, 1, None)
    kernels.gru_backward(h, h0, gates, w3, h, h0, ga, gh0, chunks, None)
    kernels.gru_jacobians(h, h0, gates, w3, jacobians)


def _lstm_launches(kernels: DeviceKernels, hidden: int, dtype: type) -> None:
    steps, batch, chunks = 8, 2, 4
    real = functools.partial(np.zeros, dtype=dtype)
    c, c0, gates = real((steps, batch, hidden)), real((batch, hidden)), real((steps, batch, 4 * hidden))
    w, saved = real((4 * hidden, hidden)), (c, c0, gates)
    for x, w_ih in ((gates, None), (real((steps, batch, 3)), real((4 * hidden, 3)))):
        kernels.lstm_forward(x, w, c0, c0, c, c, gates, w_ih, None, None)
    kernels.lstm_backward(*saved, w, c, None, None, gates, c0, c0, 1, None)
    kernels.lstm_backward(*saved, w, None, c0, c0, gates, c0, c0, chunks, None)
    for features in (1, 3, 8, 9):
        outputs = real((4 * hidden, features)), real((4 * hidden, hidden))
        sums = WeightSums(real((steps, batch, features)), c, *outputs, None, None)
        kernels.lstm_backward(*saved, w, c, c0, c0, None, c0, c0, chunks, sums)
    kernels.lstm_maps(*saved, w, c, real((chunks, batch, 2 * hidden + 1, 2 * hidden)))
    kernels.lstm_jacobians(*saved, w, real((steps, 2 * hidden * (hidden + 1), batch)))
