"""Every CUDA source compiles for sm_80 and sm_90 with every set of defines, and no kernel spills registers.

NVRTC needs no GPU. The most registers that each kernel takes are printed in the test run's summary (see conftest.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuda_on_cpu.compiler import cache_folder, cached
from sparsebp.kernels.device import SOURCES, DeviceKernels, options, source
from sparsebp.kernels.device.base import Defines
from sparsebp.kernels.operands import WeightSums

ARCHITECTURES = ("sm_80", "sm_90")

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '\w+'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


class Usage(NamedTuple):
    """What ptxas says of one kernel."""

    kernel: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


@cache
def nvrtc() -> ctypes.CDLL:
    """Load the library of the package ``nvidia-cuda-nvrtc``; no GPU or driver is needed."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(p for folder in folders for p in folder.glob("*/lib/libnvrtc.so.*"))
    assert found, "libnvrtc is missing: pip install nvidia-cuda-nvrtc (part of the extra 'dev')"
    return ctypes.CDLL(str(found[-1]))


@cache
def nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return major.value, minor.value


def log_of(file: str, defines: Defines, architecture: str) -> str:
    """Compile to machine code and return what ptxas says; logs of what compiled are kept between runs, by content."""
    text = source(file)
    flags = (*options(defines), f"--gpu-architecture={architecture}", "--ptxas-options=-v")
    key = hashlib.sha256(repr((text, flags, nvrtc_version())).encode()).hexdigest()[:20]
    kept = cache_folder() / f"nvrtc-{key}.log"
    if not cached(kept.name):
        unfinished = kept.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(compile_cubin(text, file, flags), encoding="utf-8")
        unfinished.rename(kept)
    return kept.read_text(encoding="utf-8")


def compile_cubin(text: str, file: str, flags: tuple[str, ...]) -> str:
    """Compile to machine code and return the log; fails the test with the log if it does not compile."""
    lib, program = nvrtc(), ctypes.c_void_p()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None) == 0
    encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    result = lib.nvrtcCompileProgram(program, len(flags), encoded)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0, f"{file} {' '.join(flags)}\n{log.value.decode()}"
    return log.value.decode()


def usage(log: str) -> list[Usage]:
    return [Usage(m[1], *map(int, m.groups()[1:])) for m in _ENTRY.finditer(log)]


def cases() -> list[tuple[str, Defines]]:
    return [(file, defines) for file, sets in SOURCES.items() for defines in sets]


def case_id(case: tuple[str, Defines]) -> str:
    file, defines = case
    return "-".join([file, *(f"{name}={value}" for name, value in defines.items())]).replace(" ", "_")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_compiles_without_spills(
    case: tuple[str, Defines], architecture: str, record_property: Callable[[str, object], None]
) -> None:
    file, defines = case
    kernels = usage(log_of(file, defines, architecture))
    assert kernels, f"{file} defines no kernel with {defines}"
    for kernel in kernels:
        record_property("registers", [file, kernel.kernel, architecture, kernel.registers, case_id(("", defines))[1:]])
        assert kernel.spill_stores == kernel.spill_loads == 0, f"{kernel} with {defines} on {architecture}"


def test_every_file_is_listed() -> None:
    folder = resources.files("sparsebp.kernels.device") / "cuda"
    files = {entry.name for entry in folder.iterdir() if entry.name.endswith(".cu")}
    assert files == set(SOURCES)
    assert all(SOURCES.values()), "a file without a set of defines is never compiled"


@pytest.mark.parametrize("file", SOURCES)
def test_every_kernel_of_a_file_is_compiled(file: str) -> None:
    own = source(file).split(f'#line 1 "{file}"')[1]
    declared = set(re.findall(r"__global__[^(]*?(?:\bvoid\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(", own))
    compiled = {kernel.kernel for defines in SOURCES[file] for kernel in usage(log_of(file, defines, "sm_90"))}
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
    kernels.rnn_forward(h, w, h0, "tanh", real(h.shape))
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
    kernels.gru_forward(gx, w3, real(hidden), h0, real(h.shape), gates)
    kernels.gru_backward(h, h0, gates, w3, h, None, ga, gh0, 1, None)
    kernels.gru_backward(h, h0, gates, w3, h, h0, ga, gh0, chunks, None)
    kernels.gru_jacobians(h, h0, gates, w3, jacobians)
