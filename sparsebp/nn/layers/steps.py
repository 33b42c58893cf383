"""What sequences need before and behind an encoder: a step's position, and the mean over the steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_generator, check_integer
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array, Seed
from sparsebp.nn.arrays import normal
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.identity import identity_jacobian_t
from sparsebp.nn.recurrent.lengths import Lengths, parse_lengths


class PositionalEmbedding(Layer):
    """A learned vector for every position, added to the step there.

    Parameters
    ----------
    max_length
        Most steps that a sequence has.
    embedding_dim
        Length of a step's vector.
    batch_first
        Whether sequences are (B, T, embedding_dim) and not (T, B, embedding_dim).
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, N(0, 0.02²).

    Raises
    ------
    OptionError
        A length is below 1 or no integer, or `batch_first` is no truth value.

    Notes
    -----
    Parameter: ``weight`` (max_length, embedding_dim). Source: Vaswani et al., "Attention Is All You Need", 2017, §3.5
    (learned positional embeddings); the initial values are those of Devlin et al., "BERT", 2019.
    """

    replayable = True
    stepwise = True

    def __init__(
        self, max_length: int, embedding_dim: int, batch_first: bool = False, *, dtype: Any = np.float32,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_length = check_integer("max_length", max_length, 1)
        self.embedding_dim = check_integer("embedding_dim", embedding_dim, 1)
        self.batch_first = check_flag("batch_first", batch_first)
        shape = (self.max_length, self.embedding_dim)
        self.params["weight"] = normal(check_generator("rng", rng), shape, 0.02, backend.float_dtype(dtype))

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x, plus its position's vector at every step; `saved` is x.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has another number of axes or features, more steps than there are vectors, or another dtype.
        """
        weight = self.params["weight"]
        check_input(x, dtype=weight.dtype, shape=(None, None, self.embedding_dim), like=weight)
        steps = x.shape[1 if self.batch_first else 0]
        if steps > self.max_length:
            raise ShapeError("x has too many steps", expected=f"at most {self.max_length} (max_length)", got=steps,
                             remedy="Cut the sequences, or build the layer with a larger max_length")  # fmt: skip
        return x + (weight[:steps] if self.batch_first else weight[:steps, None]), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy itself."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": Σ gy}``, summed over the batch; zero for positions that no step is at."""
        weight = self.params["weight"]
        xp = check_gy(gy, saved.shape, weight.dtype, weight)
        batch, steps = (0, 1) if self.batch_first else (1, 0)
        grad = xp.zeros(weight.shape, weight.dtype)
        grad[: gy.shape[steps]] = gy.sum(axis=batch)
        return {"weight": grad}

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity, shared by the batch."""
        return identity_jacobian_t(saved, self.batch_axes[0])

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """First with ``batch_first``, else behind the steps."""
        return (0, 0) if self.batch_first else (1, 1)


class MeanSaved(NamedTuple):
    """What `MeanOverSteps.forward` keeps: the input, and of padded sequences their lengths."""

    x: Array
    lengths: Lengths | None


class MeanOverSteps(Layer):
    """The mean of a sequence's vectors: (B, T, d) to (B, d), or (T, B, d) to (B, d) without `batch_first`.

    Parameters
    ----------
    batch_first
        Whether sequences are (B, T, d) and not (T, B, d).

    Raises
    ------
    OptionError
        It is no truth value.
    """

    replayable = True
    joins_steps = True

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = check_flag("batch_first", batch_first)

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, MeanSaved]:
        """Return the mean over the steps.

        Parameters
        ----------
        x
            (B, T, d) with ``batch_first``, else (T, B, d).
        lengths
            Valid steps of each sample (B integers in 1 … T), whose mean it is; or None for all.

        Returns
        -------
        y
            (B, d).
        saved
            A `MeanSaved`.

        Raises
        ------
        ShapeError, DTypeError, OptionError
            x has another number of axes, or no steps; or `lengths` do not fit.
        """
        xp = check_input(x, shape=(None, None, None))
        steps = x.shape[self._axis]
        if steps == 0:
            raise ShapeError("x has no steps", expected="at least one", got=x.shape, remedy="Skip empty sequences")
        valid = parse_lengths(lengths, steps, x.shape[1 - self._axis], xp) if x.size else None
        if valid is None:
            return x.mean(axis=self._axis), MeanSaved(x, None)
        kept = xp.where(self._turned(valid.valid), x, x.dtype.type(0))  # whatever stands behind an end, NaN too
        return kept.sum(axis=self._axis) / valid.values[:, None].astype(x.dtype), MeanSaved(x, valid)

    def input_grad(self, gy: Array, saved: MeanSaved) -> Array:
        """Return gy divided by the number of steps, at each of them; zero behind a sample's end."""
        x, lengths = saved
        xp = check_gy(gy, (x.shape[1 - self._axis], x.shape[2]), x.dtype, x)
        if lengths is None:
            share = gy * gy.dtype.type(1 / x.shape[self._axis])
            return xp.ascontiguousarray(xp.broadcast_to(xp.expand_dims(share, self._axis), x.shape))
        share = xp.expand_dims(gy / lengths.values[:, None].astype(gy.dtype), self._axis)
        return xp.ascontiguousarray(xp.where(self._turned(lengths.valid), share, gy.dtype.type(0)))

    def jacobian_t(self, saved: MeanSaved) -> Any:
        """Return one entry 1/T a row, shared by the batch, or with lengths a sample's own: a selection."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import step_sum_pattern

        x, lengths = saved
        xp, steps = backend.namespace(x), x.shape[self._axis]
        pattern = step_sum_pattern(steps, x.shape[2])
        if lengths is None:
            return TransposedJacobian(pattern, xp.full(pattern.nnz, x.dtype.type(1 / steps), dtype=x.dtype))
        shares = xp.where(lengths.valid[:, :, 0], 1 / lengths.values, 0).astype(x.dtype)  # (T, B)
        return TransposedJacobian(pattern, xp.ascontiguousarray(xp.repeat(shares, x.shape[2], axis=0)))

    def _turned(self, valid: Array) -> Array:
        """Return (T, B, 1) on the axes of x."""
        return valid.transpose(1, 0, 2) if self.batch_first else valid

    @property
    def _axis(self) -> int:
        return 1 if self.batch_first else 0

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """First in the output; in the input first with ``batch_first``, else behind the steps."""
        return (0 if self.batch_first else 1), 0
