"""Bounds of unknowns: points strictly between them, distances to them, and the best step between two bounds.

Distances and strict feasibility are those of the trust-region reflective method of `scipy.optimize.least_squares`: M.
Branch, T. Coleman, Y. Li, "A Subspace, Interior, and Conjugate Gradient Method for Large-Scale Bound-Constrained
Minimization Problems", SIAM J. Sci. Comput. 21, 1999. It reflects a step at the first bound; here the quadratic model
is minimised within all of them, which takes fewer steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.check import Array, shown
from sparsebp.core.errors import OptionError

START = 1e-10
"""Distance of the first point from a bound at least, relative to the bound or to 1: SciPy's."""
SHARE = 0.995
"""How far a step goes to a bound at most, of the distance, unless the fit is about to end: SciPy's."""
ROUNDS = 8
"""Sets of unknowns at bounds that are tried for a step at most."""
TRIES = 3
"""Rounds without progress after which one unknown at a time changes sides."""


class Box:
    """The points strictly between bounds.

    Attributes
    ----------
    low, high
        (n,), of the dtype of x.
    bounded
        Whether any of them is finite.
    """

    def __init__(self, bounds: Any, x0: Array) -> None:
        try:
            low, high = (bounds.lb, bounds.ub) if hasattr(bounds, "lb") else bounds
            self.low, self.high = (np.broadcast_to(np.asarray(end, x0.dtype), x0.shape) for end in (low, high))
        except (TypeError, ValueError) as error:
            raise OptionError("bounds do not fit x0", expected=f"lower and upper bounds, numbers or {x0.shape}",
                              got=shown(bounds)) from error  # fmt: skip
        self.bounded = bool(np.isfinite(self.low).any() or np.isfinite(self.high).any())
        for at in np.flatnonzero(~(self.low < self.high))[:1]:
            raise OptionError("bounds leave no room", expected="lower bounds below upper ones",
                              got=f"{self.low[at]} and {self.high[at]} in place {at}",
                              remedy="Leave fixed unknowns out of x")  # fmt: skip
        for at in np.flatnonzero(~((x0 >= self.low) & (x0 <= self.high)))[:1]:
            raise OptionError("x0 is outside the bounds", expected=f"{self.low[at]} to {self.high[at]} in place {at}",
                              got=x0[at], remedy="Start between them: numpy.clip(x0, lower, upper)")  # fmt: skip
        least = np.finfo(x0.dtype).tiny ** 0.5  # |g| / v does not overflow
        self.room = [np.maximum(np.spacing(abs(np.where(np.isfinite(end), end, 0))), least) for end in (low, high)]

    def inside(self, x: Array, relative: float = 0) -> Array:
        """Return x moved to a least distance from the bounds; where these leave no room for that, to their middle."""
        low, high = (end + sign * np.maximum(room, relative * np.maximum(1, abs(np.where(np.isfinite(end), end, 0))))
                     for end, room, sign in zip((self.low, self.high), self.room, (1, -1), strict=True))  # fmt: skip
        moved: Array = np.clip(x, low, high).astype(x.dtype)
        tight = low >= high
        moved[tight] = self.low[tight] / 2 + self.high[tight] / 2
        return moved

    def distances(self, x: Array, gradient: Array) -> tuple[Array, Array]:
        """Return Coleman and Li's v, the distance to the bound that ``-gradient`` points to, 1 where there is none.

        And where there is one.
        """
        up, down = (gradient < 0) & np.isfinite(self.high), (gradient > 0) & np.isfinite(self.low)
        v = np.where(
            up, np.maximum(self.high - x, self.room[1]), np.where(down, np.maximum(x - self.low, self.room[0]), 1)
        )
        return v, up | down

    def holds(self, x: Array) -> bool:
        """Whether x is strictly between the bounds."""
        return bool(((x > self.low) & (x < self.high)).all())

    def rest(self, x: Array, optimality: float) -> tuple[Array, Array]:
        """Return the longest steps down and up, in each unknown."""
        share = max(SHARE, 1 - optimality)
        return share * (self.low - x), share * (self.high - x)

    def active(self, x: Array, tolerance: float) -> Array:
        """Return -1 for each unknown at its lower bound, 1 at its upper one, else 0: SciPy's `active_mask`."""
        below, above = x - self.low, self.high - x
        at_low = np.isfinite(self.low) & (below <= np.minimum(above, tolerance * np.maximum(1, abs(self.low))))
        at_high = np.isfinite(self.high) & (above <= np.minimum(below, tolerance * np.maximum(1, abs(self.high))))
        return np.where(at_high, 1, np.where(at_low, -1, 0))


def best_within(low: Array, high: Array, step: Array, gradient: Array, diagonal: Array, equations: Any) -> Array:
    """Return the step h between two bounds that minimises ``gᵀ h + ½ hᵀ M h``, for M symmetric positive definite.

    By block principal pivoting: J. Júdice, F. Pires, "A Block Principal Pivoting Algorithm for Large-Scale Strictly
    Monotone Linear Complementarity Problems", Computers & Operations Research 21, 1994. Unknowns on the wrong side
    change it all at once; if that does not help, the last one alone. After `ROUNDS` rounds the best step so far counts.
    It is at least as good as the best one along the gradient, scaled by M's diagonal.

    Parameters
    ----------
    low, high
        Bounds below and above 0, (n,).
    step
        The minimiser without bounds.
    gradient, diagonal
        g, and the diagonal of M.
    equations
        Of M and g: see `sparsebp.solvers.normal_equations`.
    """

    multiply = equations.times

    def value(step: Array) -> float:
        return float((step * (gradient + multiply(step) / 2)).sum())

    down = -gradient / diagonal
    along = float((down * multiply(down)).sum())
    best = np.clip(down * (-float((down * gradient).sum()) / along if along > 0 else 1.0), low, high)
    lowest, fewest, tries = value(best), len(step) + 1, TRIES
    side = np.zeros(len(step), np.int8)  # -1 and 1: at a bound
    slope = np.zeros_like(step)
    for _ in range(ROUNDS):
        cut = np.clip(step, low, high)
        reached = value(cut)
        if reached < lowest:
            best, lowest = cut, reached
        leaves = (step > high).astype(np.int8) - (step < low)
        wrong = np.flatnonzero(np.where(side == 0, leaves, side * slope > 0))
        if not len(wrong):
            break
        if len(wrong) < fewest:
            fewest, tries = len(wrong), TRIES
        elif tries:
            tries -= 1
        else:
            wrong = wrong[-1:]
        side[wrong] = np.where(side[wrong] == 0, leaves[wrong], 0)
        step = np.where(side > 0, high, np.where(side < 0, low, 0))
        change = equations.solve_free(side != 0, step)
        if change is None:
            break
        step = step + change
        slope = gradient + multiply(step)
    return best
