"""Exponentials, logarithms, sines and hyperbolic tangents of the compiled loops, a vector at a time.

Errors are at most 2 ulp (tanh and expit: 3), held by the tests. Where a vector's way does not go, such as beyond the
range of normal numbers, the C library's function is used for the number.

Sine and cosine reduce x = n·π/2 + r in Cody and Waite's manner, by parts of π/2 whose products with n are exact, and
logarithms x = 2ⁿ·m to √½ <= m < √2, with f = m - 1 and log m = 2 atanh(f / (2 + f)), summed as in fdlibm. All
polynomials interpolate at Chebyshev nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir

from sparsebp.kernels.host.engine import math, simd
from sparsebp.kernels.host.engine.compile import APART, INNER_JIT
from sparsebp.kernels.host.engine.simd import copysign, device, fma, intrinsic, is_double


def _where_bit(bit: int) -> Any:
    """Return the function that selects by a bit of the integer n."""

    @intrinsic
    def chosen(typingctx: Any, shifted: Any, yes: Any, no: Any) -> Any:
        """Return `yes` in the lanes where the bit is set, else `no`; `shifted` as of `simd.power_of_two`."""
        word = ir.VectorType(ir.IntType(shifted.dtype.bitwidth), shifted.lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            one = builder.and_(builder.bitcast(args[0], word), ir.Constant(word, [1 << bit] * shifted.lanes))
            return builder.select(builder.icmp_unsigned("!=", one, ir.Constant(word, None)), args[1], args[2])

        return shifted(shifted, yes, no), codegen

    return chosen


_where_odd, _where_second = _where_bit(0), _where_bit(1)


def _part(of_exponent: bool) -> Any:
    """Return the function that gives n, or m, of positive normal numbers x = 2ⁿ·m, √½ <= m < √2."""

    @intrinsic
    def part(typingctx: Any, x: Any) -> Any:
        wide = x.dtype.bitwidth == 64
        word = ir.VectorType(ir.IntType(x.dtype.bitwidth), x.lanes)
        mantissa, one, root = (52, 0x3FF << 52, 0x3FE6A09E667F3BCD) if wide else (23, 0x7F << 23, 0x3F3504F3)

        def of(value: int) -> Any:
            return ir.Constant(word, [value] * x.lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            bits = builder.add(builder.bitcast(args[0], word), of(one - root))
            if of_exponent:
                n = builder.sub(builder.lshr(bits, of(mantissa)), of(one >> mantissa))
                return builder.sitofp(n, simd.llvm_vector(x))
            m = builder.add(builder.and_(bits, of((1 << mantissa) - 1)), of(root))
            return builder.bitcast(m, simd.llvm_vector(x))

        return x(x), codegen

    return part


_exponent, _mantissa = _part(True), _part(False)
_TWO_OVER_PI = 0.6366197723675814


@device
def _sine_and_cosine(x: Any) -> Any:
    """Return n plus the shift of `simd.power_of_two`, and sine and cosine of r, x = n·π/2 + r."""
    if is_double(x):
        shifted = fma(x, _TWO_OVER_PI, 6755399441055744.0)
        n = shifted - 6755399441055744.0
        r = fma(n, -9.920935791635221434603409e-10, fma(n, -1.570796325802803039550781, x))
        r = fma(n, -2.903855973979358266847447e-28, fma(n, -5.170182978890249594880037e-19, r))
        z = r * r
        p = fma(z, 1.5916726193889337421e-10, -2.5051112272573243662e-8)
        p = fma(p, z, 2.7557316008171551075e-6)
        p = fma(p, z, -0.00019841269836575709034)
        p = fma(p, z, 0.0083333333333308270041)
        p = fma(p, z, -0.16666666666666664498)
        q = fma(z, -1.1381754653662936764e-11, 2.0876134024090146233e-9)
        q = fma(q, z, -2.7557317212686590119e-7)
        q = fma(q, z, 0.000024801587298651291568)
        q = fma(q, z, -0.0013888888888887321242)
        q = fma(q, z, 0.04166666666666666531)
    else:
        shifted = fma(x, _TWO_OVER_PI, 12582912.0)
        n = shifted - 12582912.0
        r = fma(n, -0.00048351287841796875, fma(n, -1.5703125, x))
        r = fma(n, -6.077100506506192601475144e-11, fma(n, -0.000000313855707645416259765625, r))
        z = r * r
        p = fma(z, 2.7246868722877944544e-6, -0.00019840063040804116852)
        p = fma(p, z, 0.0083333318306294283635)
        p = fma(p, z, -0.1666666666374136766)
        q = fma(z, -2.7298407652795174721e-7, 0.000024800580601354642352)
        q = fma(q, z, -0.0013888887635227974877)
        q = fma(q, z, 0.041666666664226133516)
    half = 0.5 * z
    w = 1.0 - half
    return shifted, copysign(fma(r * z, p, r), r), w + fma(z * z, q, (1.0 - w) - half)


@device
def _sin(x: Any) -> Any:
    n, s, c = _sine_and_cosine(x)
    found = _where_odd(n, c, s)
    return _where_second(n, -1.0 * found, found)


@device
def _cos(x: Any) -> Any:
    n, s, c = _sine_and_cosine(x)
    found = _where_odd(n, s, c)
    return _where_second(n + 1.0, -1.0 * found, found)


@device
def _log_and(x: Any, rest: Any) -> Any:
    """Return log(x) + rest, of a small rest."""
    n, f = _exponent(x), _mantissa(x) - 1.0
    s = f / (f + 2.0)
    z, half = s * s, 0.5 * f * f
    if is_double(x):
        p = fma(z, 0.14630031364122860468, 0.15330617306743304885)
        p = fma(p, z, 0.18182922513515941633)
        p = fma(p, z, 0.22222210674238515246)
        p = fma(p, z, 0.28571428628810995598)
        p = fma(p, z, 0.39999999999893221763)
        p = fma(p, z, 0.6666666666666669907)
        high, low = 0.6931471803691238, 1.9082149292705877e-10
    else:
        p = fma(z, 0.23341943388714560866, 0.28550396959618013579)
        p = fma(p, z, 0.40000125594554367087)
        p = fma(p, z, 0.6666666654988317655)
        high, low = 0.693138122558594, 9.058000614490314e-06
    correction = fma(n, low, rest)
    return fma(n, high, f - (half - fma(s, fma(z, p, half), correction)))


@device
def _log(x: Any) -> Any:
    return _log_and(x, x - x)


@device
def _log1p(x: Any) -> Any:
    u = x + 1.0
    return copysign(_log_and(u, (x - (u - 1.0)) / u), x)


@device
def _expm1(x: Any) -> Any:
    return copysign(math.expm1(x), x)


def _expit(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


_ANY = (-np.inf, np.inf)
_OF_EXPONENTIALS, _OF_SINES = ((-708.0, 708.0), (-87.0, 87.0)), ((-1e6, 1e6), (-25000.0, 25000.0))
FUNCTIONS: dict[str, tuple[Any, Any, tuple[tuple[float, float], tuple[float, float]]]] = {
    "exp": (math.exp, np.exp, _OF_EXPONENTIALS),
    "expm1": (_expm1, np.expm1, _OF_EXPONENTIALS),
    "expit": (math.sigmoid, numba.njit(**INNER_JIT)(_expit), _OF_EXPONENTIALS),
    "tanh": (math.tanh, np.tanh, (_ANY, _ANY)),
    "log": (_log, np.log, ((2.3e-308, 1.7e308), (1.2e-38, 3.4e38))),
    "log1p": (_log1p, np.log1p, ((-0.9999999, 1.7e308), (-0.9999999, 3.4e38))),
    "sin": (_sin, np.sin, _OF_SINES),
    "cos": (_cos, np.cos, _OF_SINES),
}
"""Functions: of a vector, of a number, and between which numbers the vectors' is right, of float64 and float32."""


def _over_rows(of_vector: Any, of_number: Any, limits: Any) -> Any:
    """Return a function of numbers that stand in a row of an array."""
    (low_64, high_64), (low_32, high_32) = limits

    def run(room, source, to, count):  # type: ignore[no-untyped-def] # compiled
        numbers = simd.pointer(room)
        for k in range(0, count, simd.lanes(numbers)):  # whole vectors: rows have room for them
            simd.store(numbers, to + k, of_vector(simd.load(numbers, source + k)))
        low, high = (low_64, high_64) if is_double(numbers) else (low_32, high_32)
        for k in range(count):
            x = room[np.uint64(source + k)]
            if not ((x >= low) & (x <= high)):  # NaN too
                room[np.uint64(to + k)] = of_number(x)

    return numba.njit(**{**INNER_JIT, **APART})(run)


ROWS: dict[str, Callable[..., None]] = {f"rows_of_{name}": _over_rows(*given) for name, given in FUNCTIONS.items()}
"""By the names that they have in the text of loops: of an array, the places of operands and results, their number."""


@cache
def version() -> str:
    """Return a digest of what the functions consist of: machine code on the disk is of one version."""
    files = (__file__, math.__file__, simd.__file__)
    return hashlib.blake2b(b"".join(Path(str(file)).read_bytes() for file in files), digest_size=12).hexdigest()
