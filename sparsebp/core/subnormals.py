"""Subnormal numbers, which are taken for zero where this library computes.

Numbers below the smallest normal one (1.2e-38 in float32, 2.2e-308 in float64) cost an Intel processor 100 to 200
cycles an operation; vanishing gradients end there. A processor can take them for zero instead, as GPUs do under
``-ftz=true`` and as XLA does on a CPU. That is a mode of each thread, in a control register. Compiled kernels set it
by themselves and put it back (`sparsebp.kernels.host.engine.compile`); here is the same for NumPy and the BLAS.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from functools import cache
from typing import Any, NamedTuple

BITS = {"x86_64": 0x8040, "AMD64": 0x8040, "aarch64": 1 << 24, "arm64": 1 << 24}
"""Of a processor's control register: MXCSR's flush to zero and denormals are zero; FPCR's FZ, for inputs as well."""


class Control(NamedTuple):
    """A control register's place in the C library's ``fenv_t``, in words of 32 bits, and the bits that flush."""

    word: int
    bits: int


CONTROLS = {
    ("linux", "x86_64"): Control(7, BITS["x86_64"]),
    ("linux", "aarch64"): Control(0, BITS["aarch64"]),
}  # fmt: skip
"""By system and processor. Elsewhere NumPy computes as it always does."""

_WORDS = 16  # in an environment, or more: x86-64 has 8


class Mode(threading.local):
    """Whether the calling thread flushes, and its environment before it did."""

    def __init__(self) -> None:
        self._flushes = False
        self._before, self._during = (ctypes.c_uint32 * _WORDS)(), (ctypes.c_uint32 * _WORDS)()

    def settle(self, flush: bool) -> None:
        """Flush from now on, or restore the mode that was there before.

        An interrupt (Ctrl-C) may come between any two lines: the next call goes on.
        """
        if flush is self._flushes:
            return
        found = _control()
        if found is None:
            return
        control, read, write = found
        if flush:
            read(self._before)
            ctypes.memmove(self._during, self._before, ctypes.sizeof(self._during))
            self._during[control.word] |= control.bits
            self._flushes = True
            write(self._during)
        else:
            write(self._before)
            self._flushes = False


@cache
def _control() -> tuple[Control, Any, Any] | None:
    control = CONTROLS.get((sys.platform, platform.machine()))
    if control is None:
        return None
    for name in (None, "libm.so.6"):  # newer C libraries hold everything
        library = ctypes.CDLL(name)
        if hasattr(library, "fegetenv"):
            return control, library.fegetenv, library.fesetenv
    return None
