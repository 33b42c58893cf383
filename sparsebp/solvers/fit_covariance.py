"""The covariance of a fit, from the factors of its normal equations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebp.core.check import Array, check_flag, shown
from sparsebp.core.errors import OptionError, PivotError
from sparsebp.patterns.pattern import SparsityPattern, structure_of
from sparsebp.solvers.normal_equations import Factored

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


def covariance(found: OptimizeResult, which: Any = None, *, absolute_sigma: bool = False) -> Array:
    """Return the covariance of fitted parameters: ``s² (Jᵀ J)⁻¹`` at the minimum, as `scipy.optimize.curve_fit` does.

    Parameters
    ----------
    found
        The result of `least_squares`, ours or SciPy's. Its `jac` has the weights and the loss. Bounds do not count.
    which
        Numbers of parameters, (k,) integers; None for all n. Each costs a solve, so ask for a few of many.
    absolute_sigma
        Whether residuals are divided by their standard deviations, so that s is 1. Else s² is ``2 cost / (m - n)``.

    Returns
    -------
    numpy.ndarray
        (k, k), of the dtype of `jac`. Standard errors are ``np.sqrt(np.diag(...))``.

    Raises
    ------
    OptionError
        `found` has no matrix `jac`, `which` has no such parameters, or s² is unknown: residuals are not more than
        parameters.
    PivotError
        Parameters are not determined: Jᵀ J is singular.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> t = np.array([0.0, 1.0, 2.0, 3.0])
    >>> found = sb.least_squares(lambda x: x[0] + x[1] * t - t**2, np.zeros(2))
    >>> sb.solvers.covariance(found).round(6)
    array([[ 1.4, -0.6],
           [-0.6,  0.4]])
    """
    jac = found.get("jac") if isinstance(found, dict) else None
    if isinstance(jac, np.ndarray):
        pattern, values = SparsityPattern.dense(*jac.shape), jac.ravel()
    elif hasattr(jac, "tocsr"):
        pattern = structure_of("jac", jac)
        values = pattern.values_of(jac)
    else:
        raise OptionError("found has no matrix jac", expected="a result of least_squares", got=shown(jac))
    m, n = pattern.shape
    chosen = np.arange(n) if which is None else np.atleast_1d(np.asarray(which))
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or (len(chosen) and not 0 <= chosen.min() <= chosen.max() < n):
        raise OptionError("which has no such parameters", expected=f"(k,) integers from 0 to {n - 1}", got=shown(which))
    if not check_flag("absolute_sigma", absolute_sigma) and m <= n:
        raise OptionError("The variance of residuals is unknown", expected=f"more than {n} residuals", got=m,
                          remedy="Divide residuals by their standard deviations, absolute_sigma=True")  # fmt: skip
    norms = np.zeros(n, values.dtype)
    np.maximum.at(norms, pattern.indices, abs(values))
    for at in np.flatnonzero(norms == 0)[:1]:
        raise PivotError(f"Parameter {at} is not determined", expected="a column of jac that is not 0", got=0)
    equations = Factored(pattern, values.dtype)
    equations.update(values / norms[pattern.indices], np.zeros(m, values.dtype))
    inverse = equations.inverse(chosen)
    if inverse is None:
        raise PivotError("Parameters are not determined: JᵀJ is singular", expected="independent columns of jac",
                         got=f"a result with {n} parameters", remedy="Fix some of them, or add residuals")  # fmt: skip
    scale = 1.0 if absolute_sigma else 2 * found.cost / (m - n)
    of = norms[chosen]
    result: Array = ((inverse + inverse.T) * (0.5 * scale) / (of[:, None] * of)).astype(values.dtype)
    return result
