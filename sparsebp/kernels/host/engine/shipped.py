"""Machine code that travels with a wheel, looked into before Numba's own cache.

A wheel holds a store for each level of the x86-64 instruction set that it was built for (``make release``): the object
code of every kernel, made on another machine. Numba's key, the host CPU's name and features, does not matter then: the
process's linker takes the code as it is. What must match instead, the versions of Python, Numba and LLVM, the system
and the sources, is checked once, when the store is opened. Where anything differs, kernels are compiled as always.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba import config
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2", "xsave")
LEVELS = {"x86-64-v4": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), "x86-64-v3": _V3}
"""Levels of the x86-64 psABI, best first, and the features by which LLVM tells them."""

FOLDER = Path(__file__).parents[1] / "shipped"
"""Where a wheel keeps its stores, a folder a level; a clone of the repository has none."""

_PACKAGE = Path(__file__).parents[3]


def level() -> str | None:
    """Return the best level that kernels may be compiled for, by the features that Numba goes by, or None.

    These are the host's, whatever CPU Numba is told, unless it is told features too.
    """
    told: Any = config.CPU_NAME  # type: ignore[attr-defined]
    if told in LEVELS:
        return told
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    listed: Any = config.CPU_FEATURES  # type: ignore[attr-defined]
    if listed is None:
        features = {name for name, there in binding.get_host_cpu_features().items() if there}
        if not config.ENABLE_AVX:  # type: ignore[attr-defined]
            features = {name for name in features if not name.startswith("avx")}
    else:
        features = {name[1:] for name in listed.split(",") if name.startswith("+")}
    return next((name for name, needs in LEVELS.items() if features.issuperset(needs)), None)


def made_for() -> dict[str, Any]:
    """Return what object code and the pickles around it depend on besides the level."""
    sources = hashlib.sha256()
    for file in sorted((_PACKAGE / "kernels").rglob("*.py")):
        sources.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return {
        "python": list(sys.version_info[:2]),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "llvm": list(binding.llvm_version_info),
        "system": [sys.platform, platform.machine()],
        "sources": sources.hexdigest(),
    }


class Store:
    """Compiled kernels of one level: ``index.json`` says where each lies in ``kernels.bin``, and its checksum."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[str, list[Any]] = {}
        self.blob = b""

    def open(self) -> Store | None:
        """Read what a wheel brought; None where there is none, it is damaged, or was made for something else."""
        try:
            head = json.loads((self.folder / "index.json").read_bytes())
            if head["made_for"] != made_for():
                return None
            self.blob = (self.folder / "kernels.bin").read_bytes()
            kernels = head["kernels"].items()
            self.index = {key: [int(start), int(size), str(checksum)] for key, (start, size, checksum) in kernels}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return self

    def get(self, key: str) -> bytes | None:
        """Return the kernel of this key; None where it is not there or its checksum differs."""
        if key not in self.index:
            return None
        start, size, checksum = self.index[key]
        data = self.blob[start : start + size]
        return data if _checksum(data) == checksum else None

    def add(self, key: str, data: bytes) -> None:
        """Append a kernel."""
        self.index[key] = [len(self.blob), len(data), _checksum(data)]
        self.blob += data

    def write(self) -> None:
        """Write both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "kernels.bin").write_bytes(self.blob)
        head = {"made_for": made_for(), "kernels": dict(sorted(self.index.items()))}
        (self.folder / "index.json").write_text(json.dumps(head, indent=0))


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


recording: Store | None = None
"""Where `make release` collects what it compiles."""


@cache
def _opened() -> Store | None:
    name = level()
    return Store(FOLDER / name).open() if name else None


class KernelCache(FunctionCache):
    """Numba's cache of one function, with the wheel's store in front."""

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        if recording is not None:
            return None
        store = _opened()
        data = None if store is None else store.get(self._key(sig, target_context.codegen()))
        if data is None:
            return super()._load_overload(sig, target_context)
        (name, machine, symbols), *rest = pickle.loads(data)
        return CompileResult._rebuild(_Linker(target_context), (name, machine, symbols), *rest)

    def _save_overload(self, sig: Any, data: Any) -> None:
        if recording is None:
            super()._save_overload(sig, data)
        elif self._impl.check_cachable(data):
            # without LLVM's intermediate code, to which nothing links, and the annotated source
            (name, _, (machine, _)), fndesc, env, signature, objectmode, lifted, _, *rest = data._reduce()
            entries = {fndesc.llvm_func_name, fndesc.llvm_cpython_wrapper_name, fndesc.llvm_cfunc_wrapper_name}
            symbols = sorted(entries.intersection(f.name for f in data.library.get_defined_functions()))
            kept = (name, machine, symbols), fndesc, env, signature, objectmode, lifted, "", *rest
            recording.add(self._key(sig, data.codegen), dumps(kept))

    def _key(self, sig: Any, codegen: Any) -> str:
        code, closure = self._index_key(sig, codegen)[2]
        function = self._py_func
        place = f"{function.__module__}:{function.__qualname__}:{function.__code__.co_firstlineno}"
        return f"{place}:{sig}:{code[:12]}{closure[:12]}"


class _Linker:
    """A target context whose code generator takes stored object code."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def codegen(self) -> _Linker:
        return self

    def unserialize_library(self, state: tuple[str, bytes, list[str]]) -> Any:
        name, machine, symbols = state
        codegen = self._context.codegen()
        library = codegen.create_library(name)
        library.enable_object_caching()
        library._set_compiled_object(machine)
        library._finalize_final_module()
        codegen._engine._defined_symbols.update(symbols)
        return library


def keep(function: Any) -> None:
    """Give a kernel that Numba caches the store in front."""
    if isinstance(function._cache, FunctionCache):
        function._cache = KernelCache(function.py_func)


def cfunc(signature: Any, function: Callable, **options: Any) -> Any:
    """Return what ``numba.cfunc(signature, cache=True, **options)(function)`` does, with the store in front."""
    options.pop("cache")
    compiler = options.pop("pipeline_class")
    made: Any = CFunc(function, normalize_signature(signature), locals={}, options=options, pipeline_class=compiler)
    made._cache = KernelCache(function)
    made.compile()
    return made
