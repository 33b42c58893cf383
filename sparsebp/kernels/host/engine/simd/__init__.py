"""SIMD values inside Numba functions: one machine vector as a first-class value, lowered to LLVM vector instructions.

Numba does not vectorise the small loops that recurrent steps consist of (16 samples, 20 hidden units). Here a vector of
`lanes` numbers is a value like any other: it lives in a register, has ``+ - * /``, and is loaded from and stored to raw
pointers. LLVM lowers it on every target (AVX-512, AVX2, SSE, NEON); a vector wider than the machine's becomes several.

Rules for those who use it
--------------------------
- The functions below exist inside ``@njit`` code only. Vector functions are compiled with `device` so that LLVM inlines
  them and no vector goes through memory.
- A pointer does not keep its array alive: take pointers of arrays that are *arguments* of the function, or end it with
  `keep_alive` of those that it has made. (A test reads all of the host's kernels for that.)
- Nothing is checked. ``load_n`` and ``store_n`` touch exactly `n` numbers, which is how the ends of rows are handled.
- Operations are IEEE, NaN and infinity included; ``fma`` rounds once, or twice where the machine cannot fuse.
- Write ``fma``, and leave ``fastmath={"contract"}`` off: LLVM may make several copies of a loop and contract each as it
  likes, and then results would depend on which copy runs.
- Numba notices a change of the file that a cached function stands in, not of the files it calls; `engine.cache` does.
"""

from __future__ import annotations

from sparsebp.kernels.host.engine.simd.arithmetic import (
    absolute,
    copysign,
    fma,
    is_double,
    maximum,
    minimum,
    power_of_two,
    square_root,
    where_positive,
    where_within,
)
from sparsebp.kernels.host.engine.simd.fours import multiply_four
from sparsebp.kernels.host.engine.simd.memory import (
    address,
    advance,
    aligned_pointer,
    broadcast,
    clear,
    copy,
    filled,
    keep_alive,
    lanes,
    load,
    load_at,
    load_n,
    load_up_to,
    number,
    pointer,
    prefetch,
    store,
    store_n,
    store_pieces,
    store_up_to,
    word_at,
    zeros,
)
from sparsebp.kernels.host.engine.simd.types import VECTOR_BYTES, WORD, SimdType, device, intrinsic

__all__ = [
    "VECTOR_BYTES",
    "WORD",
    "SimdType",
    "absolute",
    "address",
    "advance",
    "aligned_pointer",
    "broadcast",
    "clear",
    "copy",
    "copysign",
    "device",
    "filled",
    "fma",
    "intrinsic",
    "is_double",
    "keep_alive",
    "lanes",
    "load",
    "load_at",
    "load_n",
    "load_up_to",
    "maximum",
    "minimum",
    "multiply_four",
    "number",
    "pointer",
    "power_of_two",
    "prefetch",
    "square_root",
    "store",
    "store_n",
    "store_pieces",
    "store_up_to",
    "where_positive",
    "where_within",
    "word_at",
    "zeros",
]
