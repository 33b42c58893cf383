"""Argument checks of the training kernels: the loss."""

from __future__ import annotations

from sparsebp.core.types import Array
from sparsebp.kernels.api.checks import INT64, exact, rank, real, written


def check_softmax_cross_entropy(logits: Array, target: Array, losses: Array, grad: Array) -> None:
    """Check the arguments of `Kernels.softmax_cross_entropy`."""
    dtype = real("logits", logits)
    n, classes = rank("logits", logits, 2)
    exact("logits", logits, dtype, (n, classes))
    exact("target", target, INT64, (n,))
    written("losses", losses, dtype, (n,))
    written("grad", grad, dtype, (n, classes))
