"""NAdam's momenta: plain numbers, for whoever works them out on the host."""

from __future__ import annotations

import math

_TERMS = 52
"""Of a series whose k-th term is below 2⁻ᵏ."""


def momenta(beta1: float, momentum_decay: float, step: float) -> tuple[float, float, float]:
    """Return NAdam's momentum of a step, of the next one, and the product of all up to this one.

    Step i has the momentum β₁ (1 − q^i / 2) with q = 0.96^momentum_decay, so the product needs the sum of
    log(1 − q^i / 2), which is −Σₖ 2⁻ᵏ/k Σᵢ q^(ki), and the inner sum is geometric. So nothing has to be kept from step
    to step. Numerators and denominators of the inner sums, 1 − q^(kn) and 1 − q^k, grow from term to term without
    cancellation.
    """
    slope = momentum_decay * math.log(0.96)
    q, last = math.exp(slope), math.exp(slope * step)
    first_gap, all_gaps = -math.expm1(slope), -math.expm1(slope * step)
    total, power, gap, gaps = 0.0, 1.0, 0.0, 0.0
    for k in range(1, _TERMS + 1):
        power *= 0.5 * q
        gap, gaps = first_gap + q * gap, all_gaps + last * gaps
        total -= power / k * (gaps / gap if first_gap > 0.0 else step)
    product = beta1**step * math.exp(total)
    return beta1 * (1.0 - 0.5 * last), beta1 * (1.0 - 0.5 * last * q), product
