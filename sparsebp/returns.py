"""Returns, advantages and moving averages as linear recurrences, of NumPy arrays and differentiable PyTorch tensors.

`gae`, `vtrace` and `td_lambda` have the arguments and the results of torchrl's ``generalized_advantage_estimate``,
``vtrace_advantage_estimate`` and ``td_lambda_return_estimate``, `ewm` those of pandas' ``ewm(...).mean()``. Each is
one pass over memory. float16 and bfloat16 are computed in float32, and results have their dtype.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import host_pool
from sparsebp.core.check import check_flag, check_integer, check_number
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.scan import linear_recurrence
from sparsebp.scan.sections import steps_first

__all__ = ["ewm", "gae", "td_lambda", "vtrace"]


def gae(
    gamma: Any, lmbda: Any, state_value: Any, next_state_value: Any, reward: Any, done: Any, terminated: Any = None, *,
    time_dim: int = -2,
) -> tuple[Any, Any]:  # fmt: skip
    """Return generalized advantage estimates, ``A[t] = δ[t] + γ λ A[t+1]`` with ``δ[t] = r[t] + γ v'[t] - v[t]``.

    Parameters
    ----------
    gamma, lmbda
        Discount γ and λ: numbers, or arrays that broadcast to the others.
    state_value, next_state_value
        Values v of the states, and v' of those that come after them. All arrays have one shape.
    reward
        Rewards r.
    done
        Whether an episode ends with the step, so that the next one belongs to another: booleans, or numbers ≠ 0.
    terminated
        Whether it ends in a state without a future, whose value v' is not read; None: where `done`.
    time_dim
        The axis of the steps.

    Returns
    -------
    advantage, value_target
        A, and A + v.

    Raises
    ------
    DTypeError, ShapeError, OptionError
        An array does not fit the others, or `time_dim` is not one of their axes.

    Notes
    -----
    Source: Schulman, Moritz, Levine, Jordan, Abbeel, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", 2016, equation 16.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> v, r = np.zeros((3, 1)), np.ones((3, 1))
    >>> sb.gae(0.5, 1.0, v, v, r, np.array([[False], [False], [True]]))[0].ravel()
    array([1.75, 1.5 , 1.  ])
    """
    given = {"state_value": state_value, "next_state_value": next_state_value, "reward": reward}
    xp, (v, after, r), (ends, final) = _checked(given, done, terminated)
    gamma, lmbda = _number(gamma), _number(lmbda)
    delta = r + gamma * xp.where(final, 0, after) - v
    factors = xp.where(ends, 0, gamma * lmbda * xp.ones_like(v))
    advantage = _run(factors, delta, None, _axis(time_dim, v), reverse=True)
    return _as(state_value, advantage), _as(state_value, advantage + v)


def vtrace(
    gamma: Any, log_pi: Any, log_mu: Any, state_value: Any, next_state_value: Any, reward: Any, done: Any,
    terminated: Any = None, rho_thresh: Any = 1.0, c_thresh: Any = 1.0, time_dim: int = -2,
) -> tuple[Any, Any]:  # fmt: skip
    """Return V-trace advantages and targets: returns of a behaviour policy μ, corrected for another policy π.

    With ``ρ[t] = min(ρ̄, π/μ)`` and ``c[t] = min(c̄, π/μ)`` the targets are
    ``s[t] = v[t] + ρ[t] (r[t] + γ v'[t] - v[t]) + γ c[t] (s[t+1] - v[t+1])``, and the advantages
    ``ρ[t] (r[t] + γ s[t+1] - v[t])``, with v' in place of s[t+1] where an episode or the sequence ends.

    Parameters
    ----------
    log_pi, log_mu
        Logarithms of the probabilities of the actions taken, under π and μ.
    rho_thresh, c_thresh
        ρ̄ and c̄.
    gamma, state_value, next_state_value, reward, done, terminated, time_dim
        As of `gae`.

    Returns
    -------
    advantage, value_target
        Both of the shape of the values.

    Raises
    ------
    DTypeError, ShapeError, OptionError
        As `gae`.

    Notes
    -----
    Source: Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures", 2018, equation 1.
    """
    given = {"state_value": state_value, "next_state_value": next_state_value, "reward": reward, "log_pi": log_pi,
             "log_mu": log_mu}  # fmt: skip
    xp, (v, after, r, of_pi, of_mu), (ends, final) = _checked(given, done, terminated)
    dim, gamma = _axis(time_dim, v), _number(gamma)
    ratio = xp.exp(of_pi - of_mu)
    rho, c = (xp.where(ratio > most, most, ratio) for most in map(_number, (rho_thresh, c_thresh)))
    delta = rho * (r + gamma * xp.where(final, 0, after) - v)
    target = _run(xp.where(ends, 0, gamma * c), delta, None, dim, reverse=True) + v
    of_next, own = (_steps(v, dim, slice(1, None)), _steps(v, dim, slice(-1, None)))
    following = xp.concatenate((target[of_next], after[own]), axis=dim)
    advantage = rho * (r + gamma * xp.where(final, 0, xp.where(ends, after, following)) - v)
    return _as(state_value, advantage), _as(state_value, target)


def td_lambda(
    gamma: Any, lmbda: Any, next_state_value: Any, reward: Any, done: Any, terminated: Any = None, *, time_dim: int = -2
) -> Any:
    """Return TD(λ) returns, ``G[t] = r[t] + γ ((1 - λ) v'[t] + λ G[t+1])``, with v' for G where an episode ends.

    Parameters
    ----------
    gamma, lmbda, next_state_value, reward, done, terminated, time_dim
        As of `gae`. A gamma or λ of each step belongs to that step: torchrl's ``rolling_gamma=True``.

    Returns
    -------
    Any
        G, of the shape of the rewards; the last step's G[t+1] is its v'.

    Raises
    ------
    DTypeError, ShapeError, OptionError
        As `gae`.

    Notes
    -----
    Source: Sutton and Barto, "Reinforcement Learning: An Introduction", 2nd edition, 2018, section 12.1.
    """
    given = {"next_state_value": next_state_value, "reward": reward}
    xp, (after, r), (ends, final) = _checked(given, done, terminated)
    dim, gamma, lmbda = _axis(time_dim, r), _number(gamma), _number(lmbda)
    after = xp.where(final, 0, after)
    through = gamma * lmbda * xp.ones_like(r)
    terms = r + gamma * after - xp.where(ends, 0, through * after)
    last = after[_steps(r, dim, slice(-1, None))]
    return _as(reward, _run(xp.where(ends, 0, through), terms, last, dim, reverse=True))


def ewm(
    x: Any, com: float | None = None, span: float | None = None, halflife: float | None = None,
    alpha: float | None = None, min_periods: int = 0, adjust: bool = True, ignore_na: bool = False, *, dim: int = 0,
) -> Any:  # fmt: skip
    """Return exponentially weighted means, as pandas' ``ewm(...).mean()``: NaN are missing values.

    Parameters
    ----------
    x
        Values, with the steps along `dim`. Arrays are summed in float64, tensors in their dtype.
    com, span, halflife, alpha
        One of them: the center of mass, ``α = 1 / (1 + com)``; the span, ``α = 2 / (span + 1)``; the half-life,
        ``α = 1 - 2 ** (-1 / halflife)``; or α itself, 0 < α ≤ 1.
    min_periods
        Values from which on there is a mean; NaN before.
    adjust
        Divide by the sum of the weights ``(1 - α) ** i``; else ``y[t] = (1 - α) y[t-1] + α x[t]`` from ``y[0] = x[0]``.
    ignore_na
        Weights count the values that are there, not the steps.
    dim
        The axis of the steps.

    Returns
    -------
    Any
        The means, of the shape of x.

    Raises
    ------
    DTypeError, ShapeError, OptionError
        x is not real and floating-point, or has no axis, or an option does not fit.

    Notes
    -----
    With a missing value, ``adjust=False`` and ``com=1``, pandas 3.1 departs from its documented weights; this function
    does not. Infinities, which pandas counts as missing, reach all later means.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> sb.ewm(np.array([1.0, 3.0, np.nan, 3.0]), alpha=0.5, adjust=False)
    array([1. , 2. , 2. , 2.66666667])
    """
    alpha = _alpha(com, span, halflife, alpha)
    least, adjust = check_integer("min_periods", min_periods, 0), check_flag("adjust", adjust)
    ignore_na, xp = check_flag("ignore_na", ignore_na), _namespace(x)
    values, dim = _widened(_float("x", x)), _axis(dim, x)
    run = _ewm_of_arrays if xp is np else _ewm_of_tensors
    return _as(x, run(values, alpha, adjust, ignore_na, least, dim))


def _ewm_of_arrays(x: Any, alpha: float, adjust: bool, ignore_na: bool, least: int, dim: int) -> Any:
    """Return the means by their kernel."""
    y = host_pool.empty(np, x.shape, x.dtype)
    kernels.on_host().averages.run(steps_first(x, dim), alpha, adjust, ignore_na, least, steps_first(y, dim))
    return y


def _ewm_of_tensors(x: Any, alpha: float, adjust: bool, ignore_na: bool, least: int, dim: int) -> Any:
    """Return the means by operations that can be differentiated."""
    torch = sys.modules["torch"]
    steps, shape = x.shape[dim], [-1 if axis == dim else 1 for axis in range(x.ndim)]
    time = torch.arange(steps, device=x.device).reshape(shape)
    if not _may_have_gaps(torch, x):
        if adjust:
            sums = torch.full((steps,), 1 / alpha, dtype=x.dtype, device=x.device)
            early = _sums_of_weights(alpha, steps)
            sums[: len(early)] = torch.as_tensor(early, dtype=x.dtype, device=x.device)
            found = _run(1 - alpha, x, None, dim) / sums.reshape(shape)
        else:
            found = _run(1 - alpha, torch.where(time == 0, x, alpha * x), None, dim)
        return found if least < 2 else torch.where(time + 1 < least, math.nan, found)
    # between two values nothing changes; the older ones' weight shrinks when the next one comes
    there = ~torch.isnan(x)
    before = _latest(torch, torch.where(there, time, -1), dim)  # the last value's step before each step
    gaps = torch.where(there, 1 if ignore_na else time - before, 0)
    decay, values, one = (1 - alpha) ** gaps.to(x.dtype), torch.where(there, x, 0), torch.ones_like(x)
    seen = there | (before >= 0)
    if adjust:
        weights = _run(decay, torch.where(there, one, 0), None, dim)
        found = _run(decay, values, None, dim) / torch.where(seen, weights, 1)
    else:
        share = torch.where(there, torch.where(before < 0, one, alpha / (decay + alpha)), 0)
        found = _run(1 - share, share * values, None, dim)
    if least > 1:
        seen = seen & (torch.cumsum(torch.where(there, 1, 0), dim) >= least)
    return torch.where(seen, found, math.nan)


# Arrays and tensors.


def _is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _namespace(x: Any) -> Any:
    if _is_tensor(x):
        return sys.modules["torch"]
    if not isinstance(x, np.ndarray):
        raise DTypeError("Not an array", expected="an array of NumPy or a tensor of PyTorch", got=type(x).__name__)
    return np


def _float(name: str, x: Any) -> Any:
    """Return x, which is real and floating-point."""
    if not (x.dtype.is_floating_point if _is_tensor(x) else x.dtype.kind == "f"):
        raise DTypeError(f"{name} has the wrong dtype", expected="a real floating-point one", got=x.dtype)
    return x


def _widened(x: Any) -> Any:
    """Return half precision as float32."""
    if x.dtype.itemsize >= 4:
        return x
    return x.float() if _is_tensor(x) else x.astype(np.float32)


def _as(x: Any, found: Any) -> Any:
    """Return a result in the dtype of an argument."""
    return found.to(x.dtype) if _is_tensor(x) else found.astype(x.dtype, copy=False)


def _number(x: Any) -> Any:
    """Return a number of NumPy as one of Python, which has no dtype to give to a result."""
    return x.item() if isinstance(x, np.generic) else x


def _checked(given: dict[str, Any], done: Any, terminated: Any) -> tuple[Any, list[Any], tuple[Any, Any]]:
    """Return the namespace, the arrays, and where episodes end and where they end for good; all of one shape."""
    flags = {"done": done} | ({} if terminated is None else {"terminated": terminated})
    name, lead = next(iter(given.items()))
    for other, array in {**given, **flags}.items():
        if _namespace(array) is not _namespace(lead):
            raise DTypeError(f"{other} is of another library", expected=f"as {name}", got=type(array).__name__)
        if array.shape != lead.shape:
            raise ShapeError(f"{other} has the wrong shape", expected=f"{tuple(lead.shape)}, as of {name}",
                             got=tuple(array.shape))  # fmt: skip
        if other in given and _float(other, array).dtype != lead.dtype:
            raise DTypeError(f"{other} has the wrong dtype", expected=f"{lead.dtype}, as of {name}", got=array.dtype)
    ends = done != 0
    final = ends if terminated is None else terminated != 0
    return _namespace(lead), [_widened(array) for array in given.values()], (ends, final)


def _axis(dim: int, x: Any) -> int:
    """Return the number of an axis, from 0."""
    if x.ndim == 0:
        raise ShapeError("The steps have no axis", expected="at least one axis", got=())
    return check_integer("the steps' axis", dim, -x.ndim, x.ndim - 1) % x.ndim


def _steps(x: Any, dim: int, part: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, part)


def _run(a: Any, b: Any, h0: Any, dim: int, reverse: bool = False) -> Any:
    """Return ``h[t] = a[t] * h[t-1] + b[t]`` along an axis; a is a number or of the shape of b."""
    sizes = math.prod(b.shape[:dim]), b.shape[dim], math.prod(b.shape[dim + 1 :])
    start = None if h0 is None else h0.reshape(sizes[0], sizes[2])
    if _is_tensor(b):
        from sparsebp.torch import linear_recurrence as of_tensors

        run: Any = of_tensors
        factors = a if isinstance(a, float) else a.reshape(sizes)
    else:
        run = linear_recurrence
        factors = np.full((1, 1, 1), a, b.dtype) if isinstance(a, float) else a.reshape(sizes)
    return run(factors, b.reshape(sizes), start, dim=1, reverse=reverse).reshape(b.shape)


# Exponential weights.


def _alpha(com: Any, span: Any, halflife: Any, alpha: Any) -> float:
    given = {name: value for name, value in (("com", com), ("span", span), ("halflife", halflife), ("alpha", alpha))
             if value is not None}  # fmt: skip
    if len(given) != 1:
        raise OptionError("The weights are not given once", expected="one of com, span, halflife and alpha",
                          got=", ".join(given) or "none")  # fmt: skip
    ((name, value),) = given.items()
    value = check_number(name, value, 1 if name == "span" else 0)
    found = {
        "com": lambda: 1 / (1 + value), "span": lambda: 2 / (value + 1), "alpha": lambda: value,
        "halflife": lambda: -math.expm1(-math.log(2) / value) if value else 0.0,
    }[name]()  # fmt: skip
    if not 0 < found <= 1:
        raise OptionError(f"{name} is out of range", expected="weights 0 < alpha <= 1", got=value)
    return float(found)


def _sums_of_weights(alpha: float, steps: int) -> np.ndarray:
    """Return ``Σ (1 - α) ** i`` over the steps up to each, until it is ``1 / α`` in double precision."""
    if alpha == 1:
        return np.ones(0)
    log = math.log1p(-alpha)
    return -np.expm1(log * np.arange(1, min(steps, int(-40 / log) + 1) + 1)) / alpha


def _may_have_gaps(torch: Any, values: Any) -> bool:
    """Whether NaN may be among the values; in a compiled graph and under a transform nobody can know."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return bool(torch.isnan(values).any())


def _latest(torch: Any, steps: Any, dim: int) -> Any:
    """Return the largest of the numbers before each along an axis, -1 at first."""
    most = torch.cummax(steps, dim).values
    first = -torch.ones_like(most[_steps(most, dim, slice(1))])
    return torch.cat((first, most[_steps(most, dim, slice(-1))]), dim)


def __dir__() -> list[str]:
    return sorted(__all__)
