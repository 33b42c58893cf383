"""Hyperbolic tangent, sigmoid, exponential, logarithm of 1 + x and normal distribution on SIMD values.

All rest on ``expm1`` in Cody and Waite's manner: y = n·ln2 + r with |r| <= ln2 / 2; ``expm1(r) = r + r²·P(r)`` with P
the polynomial that interpolates at Chebyshev nodes, of degree 5 for float32 (relative error 5.3e-10) and 10 for float64
(5.8e-19); ``expm1(y) = 2ⁿ·expm1(r) + (2ⁿ - 1)``.

``log1p(t) = 2 atanh(w)`` with w = t / (2 + t), and ``atanh(w) = w + w³·P(w²)`` with P interpolating at Chebyshev nodes.

The normal distribution is ``Φ(-|x|) = e^(-z²) P(t) / (2 (1 + 2z))`` with z = |x| / √2, t = (z - 3) / (z + 3) and P the
polynomial that interpolates ``(1 + 2z) e^(z²) erfc(z)`` at Chebyshev nodes, of degree 11 for float32 and 23 for float64
(Shepherd and Laframboise, "Chebyshev Approximation of (1 + 2x) exp(x²) erfc x in 0 ≤ x < ∞", 1981).

Error bounds, held by the tests against NumPy in a wider type, with and without fused multiply-add:

=============  ========  ==========================================================================================
function       error     range and limits
=============  ========  ==========================================================================================
``tanh``       3 ulp     everywhere; odd; ±1 beyond ±9.01 (float32) and ±19.06 (float64); keeps the sign of zero
``sigmoid``    3 ulp     for x >= -87 (float32), -708 (float64); below, it stays at the value there (< 2e-38, < 5e-308)
``exp``        1.5 ulp   for -87 <= x <= 88 (float32), -708 <= x <= 709 (float64); clamped to that range beyond
``expm1``      2 ulp     for x <= 88 (float32), 709 (float64); clamped beyond
``decay``      1.5 ulp   of exp(-|x|); 0 where that is below the range of ``exp``
``log1p``      2 ulp     for 0 <= x <= 1
``normal``     3 ulp     of Φ for x >= 0; 5 + x²/2 ulp down to -12 (float32), -36 (float64); below, it goes to 0
=============  ========  ==========================================================================================

NaN gives NaN in all of them.
"""

from __future__ import annotations

from typing import Any

from sparsebp.kernels.host.engine.simd import (
    absolute,
    copysign,
    device,
    fma,
    is_double,
    maximum,
    minimum,
    power_of_two,
    select_positive,
    where_positive,
)

# y = n·ln2 + r: adding SHIFT rounds y/ln2 to an integer n and leaves n in the low bits of the mantissa; ln2 is split so
# that n times the high part is exact.
_LOG2E = 1.4426950408889634
_SHIFT_32, _LN2_HIGH_32, _LN2_LOW_32 = 12582912.0, 0.693359375, -2.12194440054690583e-4
_SHIFT_64, _LN2_HIGH_64, _LN2_LOW_64 = 6755399441055744.0, 0.6931471803691238, 1.9082149292705877e-10

_HALF_ROOT = 0.7071067811865476


@device
def _polynomial_32(r: Any) -> Any:
    """Return (expm1(r) - r) / r² for |r| <= ln2 / 2, for float32."""
    p = fma(r, 0.00019890990981, 0.00139336497523)
    p = fma(p, r, 0.00833331048489)
    p = fma(p, r, 0.04166646674275)
    p = fma(p, r, 0.16666667163372)
    return fma(p, r, 0.5)


@device
def _polynomial_64(r: Any) -> Any:
    """Return (expm1(r) - r) / r² for |r| <= ln2 / 2, for float64."""
    p = fma(r, 2.0915085861092216e-09, 2.5105249184083644e-08)
    p = fma(p, r, 2.755727438257244e-07)
    p = fma(p, r, 2.755725532874057e-06)
    p = fma(p, r, 2.480158732243794e-05)
    p = fma(p, r, 0.00019841269874867803)
    p = fma(p, r, 0.0013888888888886322)
    p = fma(p, r, 0.008333333333326129)
    p = fma(p, r, 0.041666666666666664)
    p = fma(p, r, 0.1666666666666667)
    return fma(p, r, 0.5)


@device
def _expm1_parts(y: Any) -> Any:
    """Return expm1(r) and 2ⁿ where y = n·ln2 + r; y must lie in the range of normal exponents."""
    if is_double(y):
        shifted = fma(y, _LOG2E, _SHIFT_64)
        n = shifted - _SHIFT_64
        r = fma(n, -_LN2_LOW_64, fma(n, -_LN2_HIGH_64, y))
        p = _polynomial_64(r)
    else:
        shifted = fma(y, _LOG2E, _SHIFT_32)
        n = shifted - _SHIFT_32
        r = fma(n, -_LN2_LOW_32, fma(n, -_LN2_HIGH_32, y))
        p = _polynomial_32(r)
    return fma(r * r, p, r), power_of_two(shifted)


@device
def exp(x: Any) -> Any:
    """Return eˣ per lane, x clamped to the range in which the result is a normal number."""
    y = minimum(709.0, maximum(-708.0, x)) if is_double(x) else minimum(88.0, maximum(-87.0, x))
    m, scale = _expm1_parts(y)
    return fma(m, scale, scale)


@device
def expm1(x: Any) -> Any:
    """Return eˣ - 1 per lane, x clamped to the range of `exp`."""
    y = minimum(709.0, maximum(-708.0, x)) if is_double(x) else minimum(88.0, maximum(-87.0, x))
    m, scale = _expm1_parts(y)
    return fma(m, scale, scale - 1.0)


@device
def decay(x: Any) -> Any:
    """Return e^-|x| per lane, 0 far out."""
    a = absolute(x)
    return select_positive(a - (708.0 if is_double(x) else 87.0), 0.0, exp(-1.0 * a))


@device
def log1p(x: Any) -> Any:
    """Return log(1 + x) per lane, for 0 <= x <= 1."""
    w = x / (x + 2.0)
    u = w * w
    p = _atanh_64(u) if is_double(x) else _atanh_32(u)
    return 2.0 * fma(w * u, p, w)


@device
def _atanh_32(u: Any) -> Any:
    """Return (atanh(w) / w - 1) / w² at u = w², for w <= 1/3."""
    p = fma(u, 0.11612164612, 0.108532879004)
    p = fma(p, u, 0.142961789972)
    p = fma(p, u, 0.19999853166)
    return fma(p, u, 0.333333336603)


@device
def _atanh_64(u: Any) -> Any:
    """Return (atanh(w) / w - 1) / w² at u = w², for w <= 1/3."""
    p = fma(u, 0.0761563130971449242, 0.031670554258851227)
    p = fma(p, u, 0.0497101244827736731)
    p = fma(p, u, 0.0524019961718263703)
    p = fma(p, u, 0.0588399888362051808)
    p = fma(p, u, 0.0666658847456908923)
    p = fma(p, u, 0.076923101269020812)
    p = fma(p, u, 0.0909090904300282773)
    p = fma(p, u, 0.111111111116659934)
    p = fma(p, u, 0.142857142857109716)
    p = fma(p, u, 0.200000000000000077)
    return fma(p, u, 0.333333333333333333)


@device
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e⁻ˣ) per lane."""
    return 1.0 / (1.0 + exp(-1.0 * x))


@device
def tanh(x: Any) -> Any:
    """Return tanh(x) = expm1(2|x|) / (expm1(2|x|) + 2) with the sign of x, per lane."""
    y = minimum(40.0 if is_double(x) else 20.0, 2.0 * absolute(x))
    m, scale = _expm1_parts(y)
    e = fma(m, scale, scale - 1.0)
    return copysign(e / (e + 2.0), x)


@device
def _tail_32(t: Any) -> Any:
    """Return (1 + 2z) e^(z²) erfc(z) at t = (z - 3) / (z + 3)."""
    p = fma(t, 8.00745497478e-5, -9.25376912641e-5)
    p = fma(p, t, -0.000734082050393)
    p = fma(p, t, 0.00187506024587)
    p = fma(p, t, 0.00250677867186)
    p = fma(p, t, -0.0237635597022)
    p = fma(p, t, 0.0683131967196)
    p = fma(p, t, -0.119275281369)
    p = fma(p, t, 0.129644720915)
    p = fma(p, t, -0.0475621561464)
    p = fma(p, t, -0.135621100058)
    return fma(p, t, 1.25300805635)


@device
def _tail_64(t: Any) -> Any:
    """Return (1 + 2z) e^(z²) erfc(z) at t = (z - 3) / (z + 3)."""
    p = fma(t, 9.9488209475371958e-10, -3.16959203955352196e-9)
    p = fma(p, t, -1.3361953304404018e-8)
    p = fma(p, t, 2.77790615997086329e-8)
    p = fma(p, t, 1.01957173757908939e-7)
    p = fma(p, t, -1.20387139236165253e-7)
    p = fma(p, t, -6.16770949355096349e-7)
    p = fma(p, t, 3.36490339652982549e-7)
    p = fma(p, t, 3.47252028006551874e-6)
    p = fma(p, t, -7.18614939630362216e-7)
    p = fma(p, t, -0.0000201006276644061065)
    p = fma(p, t, 4.94403121488292762e-6)
    p = fma(p, t, 0.000125099374359158215)
    p = fma(p, t, -0.000105158280854672537)
    p = fma(p, t, -0.000779832277274254708)
    p = fma(p, t, 0.00188869009083329058)
    p = fma(p, t, 0.00252939181679966303)
    p = fma(p, t, -0.0237705148906622709)
    p = fma(p, t, 0.0683080273439214412)
    p = fma(p, t, -0.119273663416815948)
    p = fma(p, t, 0.129645158702762625)
    p = fma(p, t, -0.0475622943534189722)
    p = fma(p, t, -0.135621106124581193)
    return fma(p, t, 1.25300805826972954)


@device
def normal(x: Any) -> Any:
    """Return Φ(x), the distribution of a normal variable, and e^(-x²/2), both 0 far out, per lane."""
    wide = is_double(x)
    a = minimum(40.0, absolute(x))
    exponent = -0.5 * a * a
    e = where_positive(exponent + (708.0 if wide else 87.0), exp(exponent))
    z = _HALF_ROOT * a
    t = (z - 3.0) / (z + 3.0)
    p = _tail_64(t) if wide else _tail_32(t)
    q = 0.5 * e * p / fma(z, 2.0, 1.0)
    return where_positive(x, 1.0 - 2.0 * q) + q, e
