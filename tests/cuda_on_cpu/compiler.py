"""CUDA C++ to a shared library: what g++ cannot take as it stands is rewritten, results are cached by content."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
DAYS_KEPT = 14
"""What no test has asked for in so many days is removed from the cache."""

Mode = Literal["check", "fast"]

_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")
_FLAGS: dict[Mode, tuple[str, ...]] = {
    "check": (
        "-O1",
        "-gdwarf-4",  # addr2line takes some files of version 5 for the unit itself
        "-fno-var-tracking",  # places are asked for, not values, and it takes a third of the time
        "-fsanitize=thread",
        "-fsanitize=alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow",
    ),
    "fast": ("-O1",),
}

_POISON = "#pragma GCC poison memcpy memset memmove memcmp"
"""The checker sees accesses that g++ compiles, not those inside library functions: kernels must not call these."""

_KERNEL = re.compile(
    r"""extern\s+"C"\s+__global__\s+(?:void\s+)?
        (?:__launch_bounds__\s*\((?P<bounds>(?:[^()]|\([^()]*\))*)\)\s*)?(?:void\s+)?
        (?P<name>\w+)\s*\((?P<parameters>[^)]*)\)""",
    re.VERBOSE,
)
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+([^;\[]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
_STATIC_SHARED = re.compile(r"(?<!extern )\b(?:static\s+)?__shared__\s+([^;]+);")
_ALIGN = re.compile(r"__align__\s*\([^)]*\)\s*")


class CompilerError(Exception):
    """There is no usable g++, or it refused a kernel source."""


@dataclass(frozen=True)
class Library:
    """A compiled source: the library and the parameter names of each kernel in it."""

    path: Path
    runtime: Path
    parameters: dict[str, tuple[str, ...]]


@cache
def compiler() -> tuple[str, str]:
    """Return the path and the version of g++.

    Raises
    ------
    CompilerError
        It is not installed. Nothing is skipped then: kernels that are not executed are not tested.
    """
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise CompilerError(
            "g++ is not installed, and the tests of the device kernels execute them on the CPU with it. "
            "Install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)."
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    if "clang" in version:
        raise CompilerError(f"The CPU executor needs GNU g++, but {path} is {version}. Set CXX to a g++.")
    return path, version


@cache
def cache_folder() -> Path:
    """Return this user's cache folder, or a temporary one where it cannot be written; old files are removed."""
    folder = _writable_folder()
    oldest = time.time() - DAYS_KEPT * 24 * 3600
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another test process was faster
            if path.stat().st_mtime < oldest:
                path.unlink()
    return folder


def cached(name: str) -> Path | None:
    """Return the file `name` of the cache, noted as used, or None."""
    path = cache_folder() / name
    if not path.exists():
        return None
    path.touch()
    return path


def _writable_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "sparsebp-tests" / "cuda_on_cpu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # a home that cannot be written: the temporary folder does as well
    folder = Path(tempfile.gettempdir()) / f"sparsebp-tests-{os.getuid()}" / "cuda_on_cpu"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def build(source: str, defines: tuple[str, ...], mode: Mode) -> Library:
    """Compile CUDA C++ `source` and return the library; the same content is compiled once per machine.

    Parameters
    ----------
    source
        With ``#line`` directives where messages shall name the file.
    defines
        Compiler options; those that begin with ``-D`` are used.
    mode
        ``"check"``: instrumented, every access is judged. ``"fast"``: nothing is checked.

    Raises
    ------
    CompilerError
        With the compiler's own messages.
    """
    text = _preprocess(source, tuple(d for d in defines if d.startswith("-D")))
    kernels = {m["name"]: m for m in _KERNEL.finditer(text)}
    if not kernels:
        raise CompilerError('The source defines no `extern "C" __global__` kernel.')
    exports = "\n".join(f"EMULATOR_EXPORT({name}, {m['bounds'] or '1024'})" for name, m in kernels.items())
    header = _header(mode)
    text = f'#include "{header.name}"\n{_POISON}\n{_rewrite_shared(text)}\n{exports}\n'
    runtime = _runtime()
    path = _compiled("kernel", (text, mode, runtime.name), [*_COMMON, *_FLAGS[mode], f"-I{header.parent}"], [runtime])
    return Library(path, runtime, {name: _names(m["parameters"]) for name, m in kernels.items()})


def _preprocess(source: str, defines: tuple[str, ...]) -> str:
    """Resolve the source's own macros and conditions, so that the rewriting below sees every kernel and only those."""
    return _run(
        [compiler()[0], "-E", "-xc++", "-std=c++17", "-DSPARSEBP_ON_CPU=1", "-D__CUDA_ARCH__=900", *defines, "-"],
        source,
    )


def _rewrite_shared(text: str) -> str:
    """Turn shared memory into calls; line numbers stay."""
    text = _DYNAMIC_SHARED.sub(
        lambda m: (
            f"{_ALIGN.sub('', m[1])}* const {m[2]} = static_cast<{_ALIGN.sub('', m[1])}*>(emulator_dynamic_shared());"
        ),
        text,
    )
    counter = iter(range(1 << 30))
    return _STATIC_SHARED.sub(lambda m: _static_shared(m[1], next(counter)), text)


def _static_shared(declaration: str, number: int) -> str:
    """``T a[4], b`` becomes references into memory of its own per variable, so that each one's bounds are known."""
    record = f"EmulatorShared{number}"
    parts = [f"struct {record} {{ {declaration}; }};"]
    for name in _declared(declaration):
        parts.append(
            f"static EmulatorSharedKey {record}_{name}; decltype({record}::{name})& {name} = "
            f'emulator_shared<decltype({record}::{name})>(&{record}_{name}, alignof({record}), "shared {name}");'
        )
    return " ".join(" ".join(parts).split())


def _declared(declaration: str) -> Iterator[str]:
    outside = re.sub(r"\[[^\]]*\]", "", _ALIGN.sub("", declaration))
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", outside)) != outside:
        outside = shorter
    for declarator in outside.split(","):
        yield re.findall(r"\w+", declarator)[-1]


def _names(parameters: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", p)[-1] for p in parameters.split(",") if p.strip() not in ("", "void"))


@cache
def _runtime() -> Path:
    sources = [HERE / "runtime.cpp", HERE / "checker.cpp"]
    content = tuple(p.read_text() for p in [*sources, *(HERE / h for h in ("runtime.h", "fiber.h", "cuda_subset.h"))])
    return _compiled("runtime", content, [*_COMMON, "-O2", f"-I{HERE}"], sources)


@cache
def _header(mode: Mode) -> Path:
    """Return a copy of ``cuda_subset.h`` with what g++ has made of it beside: most of what a small kernel takes."""
    text = '#line 1 "cuda_subset.h"\n' + (HERE / "cuda_subset.h").read_text()
    flags = [*_COMMON, *_FLAGS[mode]]
    header = cache_folder() / f"header-{_key(text, flags)}.h"
    with _lock(header.with_suffix(".lock")):
        if cached(header.name) and cached(f"{header.name}.gch"):
            return header
        header.write_text(text)
        unfinished = header.with_suffix(f".{os.getpid()}.tmp")
        _run([compiler()[0], *flags, "-xc++-header", str(header), "-o", str(unfinished)])
        unfinished.rename(header.with_name(f"{header.name}.gch"))
    return header


def _key(content: object, flags: list[str]) -> str:
    """Return what a result is known by; `content` has the headers, so it does not matter where they lie."""
    named = [flag for flag in flags if not flag.startswith("-I")]
    return hashlib.sha256(repr((content, named, compiler()[1])).encode()).hexdigest()[:20]


def _compiled(kind: str, content: tuple[str, ...], flags: list[str], inputs: list[Path]) -> Path:
    """Return the library for `content`.

    ``"runtime"`` compiles the files `inputs`; ``"kernel"`` compiles the first text of `content`, links with `inputs`.
    """
    path = compiler()[0]
    library = cache_folder() / f"{kind}-{_key(content, flags)}.so"
    if cached(library.name):
        return library
    with _lock(library.with_suffix(".lock")):  # test processes run side by side
        if library.exists():
            return library
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        if kind == "kernel":  # in two steps, so that -fsanitize brings its calls but not its libraries
            part = unfinished.with_suffix(".o")
            _run([path, *flags, "-c", "-xc++", "-", "-o", str(part)], content[0])
            _run([path, "-shared", str(part), *map(str, inputs), "-Wl,-rpath,$ORIGIN", "-o", str(unfinished)])
            part.unlink()
        else:
            _run([path, *flags, "-shared", *map(str, inputs), "-o", str(unfinished)])
        unfinished.rename(library)
    return library


def _run(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompilerError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
