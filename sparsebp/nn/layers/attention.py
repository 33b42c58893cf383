"""Multi-head self-attention: every step of a sequence looks at all steps of it."""

from __future__ import annotations

import math
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array, Seed
from sparsebp.kernels.matmul import matmul, matmul_batches
from sparsebp.nn.arrays import full, uniform
from sparsebp.nn.gradients import Gradients, Shared
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.identity import dropout_mask
from sparsebp.nn.layers.linear import Linear, column_sums
from sparsebp.nn.recurrent.lengths import Lengths, parse_lengths
from sparsebp.nn.work import Work


class AttentionSaved(NamedTuple):
    """What `MultiheadAttention.forward` keeps.

    Attributes
    ----------
    x
        The input.
    heads
        Queries (scaled by 1/√head_dim), keys and values (3, B · num_heads, T, head_dim).
    attention
        How much each step looks at each (B · num_heads, T, T); rows add up to 1.
    mask
        The dropout mask that they were multiplied with, or None.
    merged
        What `out_proj` saved.
    """

    x: Array
    heads: Array
    attention: Array
    mask: Array | None
    merged: Array


class MultiheadAttention(Layer):
    """Self-attention, as `torch.nn.MultiheadAttention` called with ``(x, x, x)``.

    Parameters
    ----------
    embed_dim
        Length of a step's vector.
    num_heads
        How many heads share it out; each has ``embed_dim / num_heads``.
    dropout
        Probability that a step's look at another one is dropped while training.
    bias
        Whether the projections have biases.
    batch_first
        Whether sequences are (B, T, embed_dim) and not (T, B, embed_dim).
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values; the dropout masks' generator is seeded by one draw from it.

    Raises
    ------
    OptionError
        A number is no integer from 1 on, `embed_dim` no multiple of `num_heads`, `dropout` outside 0 … 1, or a flag no
        truth value.

    Notes
    -----
    Parameters: ``in_proj_weight`` (3 · embed_dim, embed_dim), ``in_proj_bias``, of queries, keys and values;
    ``out_proj.weight`` (embed_dim, embed_dim), ``out_proj.bias``. The transposed Jacobian of a sample is dense, with
    (T · embed_dim)² entries, as every step depends on all. Source: Vaswani et al., "Attention Is All You Need", 2017,
    §3.2.
    """

    replayable = True
    generator: np.random.Generator

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, batch_first: bool = False, *,
        dtype: Any = np.float32, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads = (
            check_integer("embed_dim", embed_dim, 1), check_integer("num_heads", num_heads, 1),
        )  # fmt: skip
        if embed_dim % num_heads:
            raise OptionError(
                "The heads cannot share the vectors out", expected="embed_dim divisible by num_heads",
                got=f"embed_dim={embed_dim}, num_heads={num_heads}", remedy="Pass another number of heads",
            )  # fmt: skip
        self.head_dim = embed_dim // num_heads
        self.dropout, bias = check_number("dropout", dropout, 0, 1), check_flag("bias", bias)
        self.batch_first = check_flag("batch_first", batch_first)
        rng, real = check_generator("rng", rng), backend.float_dtype(dtype)
        bound = math.sqrt(6 / (4 * embed_dim))  # Xavier's, of all three matrices as one
        self.params["in_proj_weight"] = uniform(rng, (3 * embed_dim, embed_dim), bound, real)
        self.children["out_proj"] = Linear(embed_dim, embed_dim, bias, dtype=real, rng=rng)
        if bias:
            self.params["in_proj_bias"] = full((3 * embed_dim,), 0, real)
            self.children["out_proj"].params["bias"][...] = 0
        self.generator = own_generator(rng)

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, AttentionSaved]:
        """Let every step look at all.

        Parameters
        ----------
        x
            (T, B, embed_dim), or (B, T, embed_dim) with ``batch_first``.
        lengths
            Valid steps of each sample (B integers in 1 … T), or None for all. No step looks at one behind them.

        Returns
        -------
        y
            Of the shape of x. What it holds behind a sample's end means nothing.
        saved
            An `AttentionSaved`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit.
        """
        weight = self.params["in_proj_weight"]
        xp = check_input(x, dtype=weight.dtype, shape=(None, None, self.embed_dim), like=weight)
        steps, batch = x.shape[:2][:: -1 if self.batch_first else 1]
        valid = parse_lengths(lengths, steps, batch, xp) if x.size else None
        projected = matmul(xp, x, weight.T)
        if "in_proj_bias" in self.params:
            projected += self.params["in_proj_bias"]
        heads = self._split(xp, projected)
        heads[0] *= weight.dtype.type(1 / math.sqrt(self.head_dim))
        attention = matmul_batches(xp, heads[0], heads[1].transpose(0, 2, 1))
        if valid is not None:
            attention = self._only_valid(xp, attention, valid)
        _softmax(attention)
        mask = dropout_mask(self.generator, attention, self.dropout) if self._drops else None
        looked = matmul_batches(xp, attention if mask is None else attention * mask, heads[2])
        y, merged = self.children["out_proj"].forward(self._merge(xp, looked[None], x.shape))
        return y, AttentionSaved(x, heads, attention, mask, merged)

    def gradients(self, gy: Array, saved: AttentionSaved) -> Gradients:
        """Return the gradients; what leads to queries, keys and values is computed once for I and W."""
        xp = check_gy(gy, saved.x.shape, saved.x.dtype, saved.x)
        out = self.children["out_proj"].gradients(gy, saved.merged)
        projected = Shared(lambda: self._core(xp, out.input_grad(), saved), xp)
        return Gradients(
            self, gy, saved, lambda: matmul(xp, projected(), self.params["in_proj_weight"]),
            lambda: {**self._projection_grads(xp, projected(), saved.x), "out_proj": out},
        )  # fmt: skip

    def input_grad_work(self, shape: tuple[int, ...], saved: AttentionSaved) -> Work:
        """Return the cost of both projections, of four products over all pairs of steps, and of the softmax."""
        rows, pairs = prod(shape[:2]), saved.attention.size
        return Work(
            flops=8 * rows * self.embed_dim**2 + 8 * pairs * self.head_dim + 4 * pairs,
            values=4 * self.embed_dim**2 + 20 * rows * self.embed_dim + 8 * pairs, calls=14,
        )  # fmt: skip

    def capture_obstacle(self) -> str | None:
        """While training with dropout, every mask has a seed from the host's generator."""
        return "draws the seed of its mask on the host" if self._drops else None

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """First with ``batch_first``, else behind the steps."""
        return (0, 0) if self.batch_first else (1, 1)

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _core(self, xp: ModuleType, g: Array, saved: AttentionSaved) -> Array:
        """Return the gradient at what `in_proj_weight` gives, from the one at what `out_proj` takes."""
        (queries, keys, values), attention, mask = saved.heads, saved.attention, saved.mask
        (g,) = self._split(xp, g)
        found = xp.empty_like(saved.heads)
        given = attention if mask is None else attention * mask
        found[2] = matmul_batches(xp, given.transpose(0, 2, 1), g)
        scores = matmul_batches(xp, g, values.transpose(0, 2, 1))
        if mask is not None:
            scores *= mask
        _softmax_grad(scores, attention)
        found[0] = matmul_batches(xp, scores, keys)
        found[0] *= g.dtype.type(1 / math.sqrt(self.head_dim))
        found[1] = matmul_batches(xp, scores.transpose(0, 2, 1), queries)
        return self._merge(xp, found, saved.x.shape)

    def _projection_grads(self, xp: ModuleType, g: Array, x: Array) -> dict[str, Array]:
        rows = g.reshape(prod(g.shape[:2]), 3 * self.embed_dim)
        found = {"in_proj_weight": matmul(xp, rows.T, x.reshape(rows.shape[0], self.embed_dim))}
        if "in_proj_bias" in self.params:
            found["in_proj_bias"] = column_sums(xp, rows)
        return found

    def _split(self, xp: ModuleType, rows: Array) -> Array:
        """Return (…, …, n · embed_dim) as n arrays (n, B · num_heads, T, head_dim)."""
        first, second, width = rows.shape
        count = width // self.embed_dim
        parts = rows.reshape(first, second, count, self.num_heads, self.head_dim)
        steps, batch = (second, first) if self.batch_first else (first, second)
        turned = parts.transpose(2, 0, 3, 1, 4) if self.batch_first else parts.transpose(2, 1, 3, 0, 4)
        return xp.ascontiguousarray(turned).reshape(count, batch * self.num_heads, steps, self.head_dim)

    def _merge(self, xp: ModuleType, heads: Array, shape: tuple[int, ...]) -> Array:
        """Return n arrays (n, B · num_heads, T, head_dim) as (…, …, n · embed_dim), for an x of `shape`."""
        first, second, _ = shape
        steps, batch = (second, first) if self.batch_first else (first, second)
        parts = heads.reshape(len(heads), batch, self.num_heads, steps, self.head_dim)
        turned = parts.transpose(1, 3, 0, 2, 4) if self.batch_first else parts.transpose(3, 1, 0, 2, 4)
        return xp.ascontiguousarray(turned).reshape(first, second, len(heads) * self.embed_dim)

    def _only_valid(self, xp: ModuleType, scores: Array, lengths: Lengths) -> Array:
        """Return the scores with -∞ for keys behind a sample's end."""
        valid = lengths.valid[:, :, 0].T[:, None, None]  # (B, 1, 1, T)
        shaped = scores.reshape(-1, self.num_heads, *scores.shape[1:])
        return xp.where(valid, shaped, scores.dtype.type(-math.inf)).reshape(scores.shape)


def own_generator(rng: np.random.Generator) -> np.random.Generator:
    """Return a generator of a layer's own, seeded by one draw: its masks depend on its own forwards alone.

    With one generator for all, they would depend on the order in which the layers of a pipeline run.
    """
    return np.random.default_rng(int(rng.integers(2**63)))


def _softmax(scores: Array) -> None:
    """Turn scores into weights that add up to 1 along the last axis, in place."""
    if scores.size == 0:
        return
    xp = backend.namespace(scores)
    with np.errstate(invalid="ignore"):  # infinities give NaN
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


def _softmax_grad(g: Array, y: Array) -> None:
    """Turn the gradient at a softmax's output y into that at its input, ``y (g - Σ g y)``, in place."""
    g -= (g * y).sum(axis=-1, keepdims=True)
    g *= y
