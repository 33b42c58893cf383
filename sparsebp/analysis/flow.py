"""How gradients flow back through time: the norms of products of hidden-state Jacobians, by lag.

The gradient of a loss at step T with respect to an earlier state is a product of Jacobians times the gradient at the
last one (Bengio et al. 1994; Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, Eq. 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparsebp.analysis.steps import SteppedRun
from sparsebp.core.arguments import check_choice

Norm = Literal["spectral", "frobenius"]


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """The norms of ∂h[T] / ∂h[T - lag] of a run over T steps.

    Attributes
    ----------
    log_norms
        (T + 1, B) float64: natural logarithms of the norms, for every lag from 0 to T and every sample; ``-inf`` where
        nothing arrives.
    norm
        Which norm it is.
    """

    log_norms: np.ndarray
    norm: Norm

    @property
    def rates(self) -> np.ndarray:
        """(T, B): mean logarithmic growth a step up to every lag from 1 on; the largest Lyapunov exponent in the end.

        Above zero gradients explode, below zero they vanish.
        """
        lags = np.arange(1, len(self.log_norms))[:, None]
        found: np.ndarray = (self.log_norms[1:] - self.log_norms[0]) / lags
        return found

    def plot(self, ax: Any, label: str | None = None, **options: Any) -> None:
        """Draw the norms over the lag, the median of the samples and the range of all of them, on a logarithmic axis.

        Parameters
        ----------
        ax
            Axes of Matplotlib.
        label
            What the legend says.
        **options
            For the line, as ``ax.plot`` takes them.
        """
        decades = self.log_norms / np.log(10)
        shown = np.isfinite(decades).all(axis=1)  # behind the lag where nothing arrives there is nothing to draw
        lags = np.arange(len(decades))[shown]
        (line,) = ax.plot(lags, np.median(decades[shown], axis=1), label=label, **options)
        ax.fill_between(lags, decades[shown].min(axis=1), decades[shown].max(axis=1), alpha=0.2, color=line.get_color())
        ax.set_xlabel("lag, steps back from the last one")
        ax.set_ylabel("log₁₀ of the norm of ∂h[T] / ∂h[T − lag]")


def gradient_flow(
    model: Any, x: Any, h0: Any = None, *, layer: int = 0, direction: int = 0, norm: Norm = "spectral"
) -> GradientFlow:
    """Compute how the gradient at the last hidden state grows or vanishes on its way back through time.

    Parameters
    ----------
    model, x, h0, layer, direction
        As for `hidden_jacobians`.
    norm
        ``"spectral"``: the most that any gradient grows by. ``"frobenius"``: the same root mean square for a gradient
        of random direction, that is the Frobenius norm over √n; cheaper.

    Returns
    -------
    GradientFlow
        The norms for every lag and sample.

    Raises
    ------
    OptionError
        The model has no such layer, or the norm is another one.
    NonFiniteError
        States or weights are not finite.
    ShapeError, DTypeError, DeviceError
        x or h0 does not fit the model.
    """
    check_choice("norm", norm, ("spectral", "frobenius"))
    run = SteppedRun(model, x, h0, layer, direction)
    product = np.broadcast_to(np.eye(run.size), (run.batch, run.size, run.size))
    scale = np.zeros(
        run.batch
    )  # logarithm of what was taken out of the product, so that it neither over- nor underflows
    logs = [scale]
    with np.errstate(divide="ignore"):
        for part in run.parts(backwards=True):
            for jacobian in part[::-1]:
                product = product @ jacobian
                size = np.abs(product).max(axis=(1, 2))
                product = product / np.where(size > 0, size, 1)[:, None, None]
                scale = scale + np.log(size)
                logs.append(scale + np.log(_norm(product, norm)))
    return GradientFlow(np.stack(logs), norm)


def _norm(matrices: np.ndarray, norm: Norm) -> np.ndarray:
    """Return (B,) norms; 1 for the identity."""
    if norm == "frobenius":
        found: np.ndarray = np.sqrt((matrices**2).mean(axis=(1, 2)) * matrices.shape[-1])
    else:
        found = np.linalg.svd(matrices, compute_uv=False)[:, 0]
    return found
