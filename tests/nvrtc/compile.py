"""Compiles the kernels with NVRTC as CuPy does; logs are kept between runs, by content.

What ptxas says of each kernel is kept in the repository, too (``usage.json``): to compile every set of defines takes
minutes on a machine that has not done so before. Its keys are of the whole text, all options and NVRTC's version, so
what has changed in any way is compiled. ``PYTHONPATH=.:tests python -m nvrtc.keep_usage`` writes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cuda_on_cpu.compiler import cache_folder, cached
from sparsebp.kernels.device import options, source
from sparsebp.kernels.device.launch import Defines

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy 14.2 appends to our options (``_compile_with_cache_cuda`` and ``_compile_using_nvrtc`` in its
``cuda/compiler.py``), besides ``-arch=sm_XX`` and include folders, which sources without a library header do not look
into. NVRTC lets the last of two contradicting options win, so these stand whatever we pass."""


class Compiled(NamedTuple):
    """What came of a source: the machine code, and what the compiler and ptxas said."""

    cubin: bytes
    log: str


@cache
def library() -> ctypes.CDLL:
    """Load the library of the package ``nvidia-cuda-nvrtc``; no GPU or driver is needed."""
    found = sorted(path for folder in _packages() for path in folder.glob("*/lib/libnvrtc.so.*"))
    assert found, "libnvrtc is missing: pip install nvidia-cuda-nvrtc (part of the extra 'dev')"
    return ctypes.CDLL(str(found[-1]))


def log_of(file: str, defines: Defines, architecture: str, extra: tuple[str, ...] = ()) -> str:
    """Compile and return what ptxas says of each kernel."""
    text, given = source(file), flags(defines, architecture, ("--ptxas-options=-v", *extra))
    kept = cache_folder() / f"nvrtc-{_key(text, given)}.log"
    if not cached(kept.name):
        unfinished = kept.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(compiled(text, file, given).log, encoding="utf-8")
        unfinished.rename(kept)
    return kept.read_text(encoding="utf-8")


def flags(defines: Defines, architecture: str, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return all options in CuPy's order."""
    ftz, space = CUPY_OPTIONS
    return (*options(defines), ftz, *extra, f"-arch={architecture}", space)


def _key(text: str, flags: tuple[str, ...]) -> str:
    return hashlib.sha256(repr((text, flags, version())).encode()).hexdigest()[:20]


def compiled(text: str, file: str, given: tuple[str, ...]) -> Compiled:
    """Compile a source with all options, as `flags` gives them; an error is an AssertionError with the log."""
    lib, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None) == 0
    try:
        result = lib.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*map(str.encode, given)))
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        assert result == 0, f"{file} {' '.join(given)}\n{log.value.decode()}"
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        return Compiled(cubin.raw, log.value.decode())
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def version() -> tuple[int, int]:
    """Return NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return major.value, minor.value


def _packages() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


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


def usage(log: str) -> list[Usage]:
    """Take what ptxas says apart."""
    return [Usage(m[1], *map(int, m.groups()[1:])) for m in _ENTRY.finditer(log)]


USAGE = Path(__file__).with_name("usage.json")


@cache
def kept_usage() -> dict[str, list[list[object]]]:
    """Return what is kept in the repository, by key."""
    kept: dict[str, list[list[object]]] = json.loads(USAGE.read_text(encoding="utf-8"))
    return kept


def usage_key(file: str, defines: Defines, architecture: str) -> str:
    """Return the key of a set of defines in `kept_usage`."""
    return _key(source(file), flags(defines, architecture, ("--ptxas-options=-v",)))


def usage_of(file: str, defines: Defines, architecture: str) -> list[Usage]:
    """Return what ptxas says of each kernel: as it is kept, or else compiled."""
    kept = kept_usage().get(usage_key(file, defines, architecture))
    if kept is None:
        return usage(log_of(file, defines, architecture))
    return [Usage(*entry) for entry in kept]  # type: ignore[arg-type]
